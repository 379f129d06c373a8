# SPDX-License-Identifier: Apache-2.0
"""The C API of the native library. The only module that loads it; needs neither torch nor a compiler."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

from blink.errors import ConfigError

_U32, _U64, _I32, _PTR, _STR = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32, ctypes.c_void_p, ctypes.c_char_p

# name: (result, arguments)
_FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    "blink_layout_text": (_STR, []),
    "blink_layout_digest": (_U64, []),
    "blink_state_text": (_STR, [_PTR]),
    "blink_region_bytes": (_U64, [_PTR]),
    "blink_region_init": (None, [_PTR, _PTR, _STR, _STR]),
    "blink_region_publish": (None, [_PTR, _U64]),
    "blink_kv_event_layout": (None, [_PTR, _PTR]),
    "blink_queue_pair_layout": (None, [_PTR, _PTR]),
    "blink_state_bytes": (_U64, [_PTR]),
    "blink_state_build": (None, [_PTR, _PTR, _U64, _U64]),
    "blink_index_tokens": (None, [_PTR, _PTR, _U32, _U32, _PTR]),
    "blink_step": (_U32, [_PTR, _U64]),
    "blink_step_replayed": (_U32, [_PTR, _U64, _U64]),
    "blink_has_news": (_U32, [_PTR, _U32]),
    "blink_check_integrity": (_STR, [_PTR]),
    "blink_loop_start": (_PTR, [_PTR]),
    "blink_loop_wait": (_I32, [_PTR, _U32]),
    "blink_loop_finish": (None, [_PTR, _U32]),
    "blink_loop_stop": (None, [_PTR]),
    "blink_load_u32": (_U32, [_PTR]),
    "blink_load_u64": (_U64, [_PTR]),
    "blink_store_u32": (None, [_PTR, _U32]),
    "blink_store_u64": (None, [_PTR, _U64]),
    "blink_cq_drain": (_U32, [_PTR, _U32, _U32, _PTR, _U32]),
    "blink_cq_find_rare": (_U32, [_PTR, _U32, _U32]),
    "blink_shm_poller_start": (_PTR, [_PTR, _U32, _U32, _I32, _U32]),
    "blink_shm_poller_expect": (None, [_PTR, _U32, _U32]),
    "blink_shm_poller_stop": (None, [_PTR]),
    "blink_store_at": (None, [_PTR, _U64, _U32]),
    "blink_lease_renewer_start": (_PTR, [_PTR, _PTR, _U64, _U32, _U32]),
    "blink_lease_renewer_renew": (None, [_PTR]),
    "blink_lease_renewer_stop": (None, [_PTR]),
    "blink_hash_blocks": (None, [_STR, _STR, _PTR, _U32, _U32, _PTR]),
    "blink_automaton_build": (_I32, [_PTR, _PTR, _PTR]),
    "blink_language_build": (_I32, [_PTR]),
    "blink_language_combine": (_I32, [_STR, _STR, _U32]),
    "blink_language_take": (None, [_PTR]),
    "blink_language_work": (_U64, []),
    "blink_list_allowed": (_U32, [_PTR]),
    "blink_sample": (None, [_PTR, _PTR]),
    "blink_json_weigh": (None, [_PTR, _U64, _PTR]),
    "blink_collector_start": (_PTR, [_PTR, _PTR, _U64, _U32, _U32, _I32, _U32]),
    "blink_collector_expect": (None, [_PTR, _U32, _U32]),
    "blink_collector_drain": (_U32, [_PTR, _U32, _PTR, _U32]),
    "blink_collector_stop": (None, [_PTR]),
    "blink_pause_ns": (_U64, [_U64, _U64, _U64]),
    "blink_rhythm_ns": (_U64, [_PTR, _PTR, _U32, _U64]),
    "blink_rms_norm": (None, [_PTR, _PTR, _PTR, _PTR, _U32, _U32, ctypes.c_float]),
    "blink_rotate_and_store": (None, [*[_PTR] * 5, *[_U32] * 6, _PTR, _PTR, ctypes.c_float]),
    "blink_gate_rows": (None, [_PTR, _U32, _U32, _PTR, _PTR]),
    "blink_run_layers": (None, [_PTR, _PTR, _U32, _PTR]),
    "blink_thread_pool_start": (_PTR, [_U32]),
    "blink_thread_pool_stop": (None, [_PTR]),
    "blink_attend_rows": (
        None,
        [_PTR, _U64, _PTR, _U32, _U64, _PTR, _PTR, _PTR, _PTR, *[_U32] * 7, ctypes.c_float, ctypes.c_float, _PTR],
    ),
    "blink_gguf_block_values": (_U32, [_U64]),
    "blink_gguf_block_bytes": (_U32, [_U64]),
    "blink_has_gguf_kernels": (_U32, [_U32]),
    "blink_multiply_gguf": (None, [_U32, _PTR, _PTR, _U32, _PTR, _PTR]),
    "blink_has_bf16_kernel": (_U32, [_U32]),
    "blink_multiply_gguf_bf16": (None, [_U32, _PTR, _PTR, _U32, _PTR, _PTR]),
    "blink_has_int16_kernel": (_U32, [_U32]),
    "blink_multiply_gguf_int16": (None, [_U32, _PTR, _PTR, _U32, _PTR, _PTR]),
    "blink_dequantize_gguf": (None, [_U32, _PTR, _PTR, _PTR]),
    "blink_take_gguf_rows": (_U32, [_U32, _PTR, _PTR, _U32, _PTR]),
}


def library_path() -> Path:
    """Return where the native library is: BLINK_NATIVE_LIBRARY, or beside this package."""
    return Path(os.environ.get("BLINK_NATIVE_LIBRARY") or Path(__file__).parents[1] / "lib" / "libblink.so")


def declare(library: ctypes.CDLL, functions: Mapping[str, tuple[object, list[object]]]) -> None:
    """Tell ctypes the result and the arguments of each function by name."""
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments


def _load() -> ctypes.CDLL:
    path = library_path()
    try:
        library = ctypes.CDLL(str(path))
        declare(library, _FUNCTIONS)
    except (OSError, AttributeError) as error:  # it is broken, or of another version
        raise ConfigError(
            f"the native library {path} cannot be loaded ({error}); reinstall the package, or run `make native`"
        ) from error
    return library


lib = _load()
