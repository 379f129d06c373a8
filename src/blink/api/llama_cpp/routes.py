# SPDX-License-Identifier: Apache-2.0
"""The paths of llama.cpp's server without a body: what its clients ask about the server."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from blink import __version__
from blink.api.openai.absent import add_refusals
from blink.api.serving.served_model import ServedModel
from blink.sampling_ranges import SAMPLING_RANGES

_REFUSED = {
    "/embedding": "Not here: /v1/embeddings makes embeddings, of models that do.",
    "/reranking": "Not here: /v1/rerank ranks documents, of models that do.",
    "/slots": "This server has no slots to show: /metrics counts its sequences.",
}


def llama_cpp_routes(served: ServedModel) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @router.get("/props")
    @router.head("/props", include_in_schema=False)
    async def props() -> dict[str, Any]:
        """Return the properties of the server: context, chat template, special tokens and default sampling."""
        assets, engine = served.assets, served.engine
        defaults = {name: assets.sampling_defaults.get(name, each.default) for name, each in SAMPLING_RANGES.items()}
        return {
            "default_generation_settings": {"n_ctx": engine.max_model_len, "params": defaults},
            "total_slots": engine.max_sequences,
            "model_alias": served.model_names[0],
            "model_path": assets.root,
            "modalities": {"vision": False, "audio": False},
            "chat_template": assets.template_source,
            "bos_token": assets.special_tokens.get("bos_token", ""),
            "eos_token": assets.special_tokens.get("eos_token", ""),
            "build_info": f"blink {__version__}",
        }

    add_refusals(router, _REFUSED)
    return router
