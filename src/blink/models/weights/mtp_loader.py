# SPDX-License-Identifier: Apache-2.0
"""Load a checkpoint's layer that predicts one token further, as Qwen3-Next and Qwen 3.5 and 3.6 store it: mtp.*."""

from __future__ import annotations

import torch

from blink.config import ModelConfig
from blink.errors import ConfigError
from blink.models.decoder import Decoder
from blink.models.families import FAMILIES
from blink.models.mtp import MtpHead
from blink.models.mtp_spec import describe_mtp
from blink.models.weights.decoder_loader import DecoderLoader
from blink.models.weights.files import resolve_model
from blink.models.weights.loader import open_checkpoint
from blink.models.weights.source import find_format
from blink.models.weights.target import WeightTarget
from blink.models.weights.tensor_loader import TensorLoader

_FLAG = "--speculative-config"


@torch.inference_mode()
def load_mtp(config: ModelConfig, model: Decoder) -> MtpHead:
    """Load the layer from the files that a model was loaded from, in the model's type.

    Raises:
        ConfigError: they have none, or it is malformed; the message names the tensor.
    """
    path, spec = resolve_model(config.model), describe_mtp(model.spec.as_stored)
    if find_format(path, config.load_format) == "gguf":
        raise ConfigError(f"{_FLAG}: the draft layer (MTP) of GGUF files is not read yet: use safetensors, or ngram")
    target = WeightTarget(model.device, model.dtype, int, model.kv_dtype)
    checkpoint = open_checkpoint(path, spec, config, target, is_mtp=True)
    hidden = spec.hidden_size
    try:
        checkpoint.check("model.pre_fc_norm_hidden.weight", (hidden,))
    except ConfigError as error:
        raise ConfigError(f"{_FLAG}: {path} has no draft layer (MTP): use ngram. {error}") from error
    tensors = TensorLoader(checkpoint, target, shifted_norms=FAMILIES[spec.architecture].shifted_norms)
    loader = DecoderLoader(checkpoint, spec, target)
    return MtpHead(
        spec=spec,
        layer=loader.load_layer(0),
        norm=loader.load_norm("model.norm"),
        embedding_norm=tensors.read_norm("model.pre_fc_norm_embedding", hidden),
        hidden_norm=tensors.read_norm("model.pre_fc_norm_hidden", hidden),
        fusion=tensors.load_matrix({"model.fc": hidden}, 2 * hidden),
    )
