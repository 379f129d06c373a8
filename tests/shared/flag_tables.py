# SPDX-License-Identifier: Apache-2.0
"""The pages of all flags and of vLLM's, made of their declarations: python tests/shared/flag_tables.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from blink.bench.config import BenchConfig
from blink.cli.flags import add_flags
from blink.config import EngineConfig, FrontendConfig, ServeConfig
from blink.quantize.config import QuantizeConfig
from blink.view.config import TopConfig, TraceConfig
from blink.vllm.table import Flag, load_table

_COMMANDS = {"serve": ServeConfig, "engine": EngineConfig, "frontend": FrontendConfig}
_TOOLS = {"bench": BenchConfig, "top": TopConfig, "trace": TraceConfig, "quantize": QuantizeConfig}
_HEAD = """# All flags

This page is made from the flags' declarations by `python tests/shared/flag_tables.py`; a test compares them.
`blink COMMAND --help` prints the same. Numbers take suffixes as in vLLM: `4k` is 4000, `4K` is 4096. Other commands
have few flags: see `blink chat --help` and `blink doctor --help`.
"""

_VLLM_HEAD = """# From vLLM to Blink

Most command lines of `vllm serve` work with `blink serve`. Blink knows every flag of vLLM 0.33, and removed flags that
are still in use. It accepts a flag, or refuses it with the reason. It ignores none in silence.

```sh
vllm serve Qwen/Qwen3-8B --max-model-len 32k --tensor-parallel-size 1 --enforce-eager
blink serve Qwen/Qwen3-8B --max-model-len 32k --tensor-parallel-size 1 --enforce-eager
```

The second line prints this, and starts:
`these flags have no effect here: --enforce-eager (Blink's engine runs graphs of its own kernels)`.

**Unchanged**

- OpenAI's API with vLLM's fields, defaults and error bodies: [clients](clients.md)
- Metric names at `/metrics`: [metrics](metrics.md)
- `LLM` and `SamplingParams` in Python: [offline inference](offline.md)
- The Hugging Face cache and its variables: [models from the hub](hub.md)

**Different**

| subject | vLLM | Blink |
|---|---|---|
| scheduler | a host process | on the GPU: [scheduling](scheduling.md) |
| GPUs of an engine | several | one; several engines by [Ray Serve](ray.md) |
| speculative decoding | many methods | n-grams, suffixes, grammars, EAGLE-3, MTP: [speculation](speculation.md) |
| [LoRA](lora.md) | yes | on the CPU engine and on one GPU |
| images | yes | not yet: refused |
| address without `--host` | all addresses | 127.0.0.1 |
| tool calls | `--enable-auto-tool-choice`, `--tool-call-parser` | no flag needed: [tool calls](tools.md) |
| answers without `<think>` | `qwen3`: reasoning | the end of the prompt decides: [reasoning](reasoning.md) |
| `<tool_call>` within reasoning | `qwen3`: the end of it | only a call of the form `<tool_call><function=` ends it |
| prefix cache with several API keys | shared | one for each key; `--prefix-cache-isolation none` shares it |
| stored responses (`/v1/responses`) | when switched on | always; `--response-store-size 0` stores nothing |
| batch work with lower priority | `priority` | also [best-effort requests](classes.md), whose steps can be preempted |

## The four results

- **Same**: Blink has the flag, with the same meaning. [All flags](flags.md) has the details.
- **Other name**: the flag is another name for a flag of Blink.
- **No effect**: Blink accepts the flag, and says in one line at the start that it has no effect. Answers do not change.
- **Only**: Blink accepts the values that match its behavior. It refuses others with the reason.

## How flags are written

- Within a name, underscores may replace dashes. Short names work: `-tp`, `-q`, `-cc`, `-O3`.
- Values follow a space or `=`. Lists take several words: `--served-model-name a b`. Put MODEL before them.
- A switch has `--no-...`; `--enable-x` and `--disable-x` are each other's opposite.
- Objects are JSON, or are given key by key: `--hf-overrides.rope_theta 1000000`.
- `--config FILE` reads flags from YAML. The command line wins over the file.
- Whole numbers take suffixes: `4k` is 4000, `4K` is 4096.
- An unknown flag is refused, and the nearest name is shown.

## Environment variables

- `VLLM_API_KEY` sets an API key, as `BLINK_API_KEY` does.
- `VLLM_LOGGING_LEVEL` and `VLLM_HTTP_TIMEOUT_KEEP_ALIVE` set `--log-level` and `--keep-alive-timeout`.
- `HF_TOKEN`, `HF_HOME`, `HF_ENDPOINT` and `HF_HUB_OFFLINE` work as in other programs.

## In Python

`LLM(...)` takes the same names as keyword arguments, with underscores. The table below holds for them too:
`trust_remote_code=True` has no effect, and `pipeline_parallel_size=2` is refused.

The rest of this page is made from `src/blink/vllm/flags.txt`.
"""


def flags_of(config_class: type) -> dict[str, argparse.Action]:
    """Return the flags of a configuration by name, in their order."""
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser, config_class)
    return {action.option_strings[0]: action for action in parser._actions if action.option_strings}


def render_page() -> str:
    """Return the page."""
    serve = {name: {*flags_of(kind)} for name, kind in _COMMANDS.items()}
    lines = [_HEAD, "## `blink serve`, `blink engine`, `blink frontend`\n", "| flag | of | meaning |", "|---|---|---|"]
    for flag, action in flags_of(ServeConfig).items():
        owners = [name for name in ("engine", "frontend") if flag in serve[name]]
        lines.append(_row(flag, action, ", ".join(owners) or "serve"))
    for name, kind in _TOOLS.items():
        lines += [f"\n## `blink {name}`\n", "| flag | meaning |", "|---|---|"]
        lines += [_row(flag, action) for flag, action in flags_of(kind).items()]
    return "\n".join(lines) + "\n"


def render_vllm_page() -> str:
    """Return the page about vLLM's flags."""
    lines, section = [_VLLM_HEAD], ""
    for flag in dict.fromkeys(load_table().values()):
        if flag.section != section:
            section = flag.section
            lines += [f"\n## {section}\n" if len(lines) > 1 else f"## {section}\n", "| flag | in Blink |", "|---|---|"]
        names = ", ".join(f"`{name}`" for name in flag.names)
        lines.append(f"| {names} | {_decision(flag)} |")
    return "\n".join(lines) + "\n"


def _decision(flag: Flag) -> str:
    words = ", ".join(f"`{word}`" for word in flag.words)
    match flag.action:
        case "same":
            return "same" + _other_values(flag.words)
        case "alias":
            return f"other name of `{flag.words[0]}`" + _other_values(flag.words[1:])
        case "override":
            return f"{words} of `--hf-overrides`"
        case "config":
            return "same"
        case "quiet":
            return f"no effect: {flag.reason}"
        case "keys":
            return f"only {words}: {flag.reason}"
        case _:
            return f"only {words}: {flag.reason}" if words else f"refused: {flag.reason}"


def _other_values(words: Sequence[str]) -> str:
    """Say which values are Blink's others."""
    pairs = (word.rsplit("=", 1) for word in words)
    return "".join(f"; `{theirs}` is `{own}`" for theirs, own in pairs)


def _row(flag: str, action: argparse.Action, *more: str) -> str:
    shown = flag.replace("--", "--[no-]", 1) if isinstance(action, argparse.BooleanOptionalAction) else flag
    if action.choices:
        shown += " " + "\\|".join(map(str, action.choices))
    text = str(action.help).replace("%%", "%").replace("|", "\\|")
    return " | ".join(["| `" + shown + "`", *more, text]) + " |"


if __name__ == "__main__":
    docs = Path(__file__).resolve().parents[2] / "docs"
    (docs / "flags.md").write_text(render_page())
    (docs / "from-vllm.md").write_text(render_vllm_page())
