# SPDX-License-Identifier: Apache-2.0
"""Write a whole GGUF file for a config.json: random weights in Q4_K_M's types, and another file's tokenizer.

So engines can be compared at a size of which no file is at hand. Texts mean nothing, and take as long.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import torch
from gguf_header import write_header

from blink.models.weights.dummy_gguf import draw_blocks
from blink.models.weights.files import resolve_model
from blink.models.weights.source import read_spec

Kind = gguf.GGMLQuantizationType
_FLOATS = {Kind.F32: torch.float32, Kind.F16: torch.float16}


def draw_tensor(tensor: Any, generator: torch.Generator) -> Any:
    """Return random numbers for a tensor of a header, as a file holds them; norms are near 1."""
    rows = [int(size) for size in reversed(tensor.shape)]
    if tensor.tensor_type in _FLOATS:
        drawn = torch.randn(rows, generator=generator) * 0.02 + (len(rows) == 1 and "norm" in tensor.name)
        return drawn.to(_FLOATS[tensor.tensor_type]).numpy()
    count = int(torch.Size(rows[:-1]).numel())
    blocks = draw_blocks(int(tensor.tensor_type), count, rows[-1], generator)
    return blocks.view(*rows[:-1], -1).numpy()


def copy_fields(writer: gguf.GGUFWriter, reader: gguf.GGUFReader, *, tokenizer: bool) -> None:
    """Copy what a file says: of its tokenizer, or of all else."""
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture" or name.startswith("tokenizer.") != tokenizer:
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)


def write_model(config: Path, tokenizer: Path, output: Path, seed: int = 0) -> None:
    """Write the file; tokenizer: a GGUF file with as many tokens as the config says."""
    spec, generator = read_spec(config), torch.Generator().manual_seed(seed)
    with TemporaryDirectory() as folder:
        write_header(spec, Path(folder) / "header.gguf", None)
        header = gguf.GGUFReader(Path(folder) / "header.gguf")
        words = gguf.GGUFReader(tokenizer)
        if (count := len(words.fields["tokenizer.ggml.tokens"].data)) != spec.vocab_size:
            raise SystemExit(f"{tokenizer} has {count} tokens, and {config} {spec.vocab_size}: set vocab_size to it")
        name = header.fields["general.architecture"].contents()
        writer = gguf.GGUFWriter(output, str(name))
        copy_fields(writer, header, tokenizer=False)
        copy_fields(writer, words, tokenizer=True)
        drawn = {tensor.name: draw_tensor(tensor, generator) for tensor in header.tensors}
        kinds = {tensor.name: tensor.tensor_type for tensor in header.tensors}
        for tensor, values in drawn.items():
            raw = None if kinds[tensor] in _FLOATS else kinds[tensor]
            writer.add_tensor(tensor, values, raw_dtype=raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def main() -> None:
    """Write a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="directory with a config.json")
    parser.add_argument("output", type=Path, help=".gguf file to write")
    parser.add_argument("--tokenizer", default="", help="GGUF file; without it, the default model")
    options = parser.parse_args()
    write_model(options.config, resolve_model(options.tokenizer), options.output)
    print(f"{options.output}: {options.output.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
