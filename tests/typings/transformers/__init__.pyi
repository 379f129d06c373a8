# SPDX-License-Identifier: Apache-2.0
"""Whatever transformers has is of any type to pyright, which would else read 2,900 of its files for a few names."""

from typing import Any

def __getattr__(name: str) -> Any: ...
