# SPDX-License-Identifier: Apache-2.0
"""Who may change a server while it runs: whoever has the admin key, where the operator has switched that on."""

from __future__ import annotations

import os
from typing import Final

from fastapi import Request

from blink.api.http.bodies import JSON, check_content_type
from blink.api.http.clients import is_admin
from blink.config import FrontendConfig
from blink.errors import NotFoundError

_DEV_MODE: Final = "VLLM_SERVER_DEV_MODE"
_KEY_VARIABLE: Final = "BLINK_ADMIN_API_KEY"
# Only an admin key opens these; ADMIN_OR_KEY those too, and an API key where the server has no admin key.
ADMIN_PATHS: Final = (
    "/pause", "/resume", "/is_paused", "/pause_generation", "/continue_generation",
    "/sleep", "/wake_up", "/is_sleeping", "/update_weights_from_disk", "/update_weights_from_tensor",
    "/init_weights_update_group", "/destroy_weights_update_group", "/update_weights_from_distributed",
    "/begin_weight_update", "/end_weight_update", "/init_weight_transfer_engine", "/start_weight_update",
    "/update_weights", "/finish_weight_update", "/get_world_size",
)  # fmt: skip
# Whose bodies are streams, and so may be of any size.
STREAM_PATHS = ("/update_weights_from_tensor",)
ADMIN_OR_KEY_PATHS: Final = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


def admin_keys(config: FrontendConfig) -> list[str]:
    """Return the admin keys, of the flag and of the environment."""
    return [key for key in (*config.admin_api_key, os.environ.get(_KEY_VARIABLE)) if key]


def check_admin(config: FrontendConfig, request: Request, media_type: str = JSON) -> None:
    """Refuse a change that is switched off, or a client who may not ask for it. media_type: of its body.

    Raises:
        NotFoundError: nobody may.
        HTTPException: a page of another origin asks for it.
    """
    if request.method == "POST":
        check_content_type(request, config.allowed_origins, media_type)  # a foreign page's post is refused
    switch = os.environ.get(_DEV_MODE, "").lower() in ("1", "true")
    if not (config.enable_admin_endpoints or switch):
        raise NotFoundError(f"{request.url.path} is switched off (--enable-admin-endpoints or {_DEV_MODE}=1).")
    if not is_admin(request.scope):
        raise NotFoundError(f"{request.url.path} needs an admin key: start the server with --admin-api-key.")
