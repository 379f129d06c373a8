# SPDX-License-Identifier: Apache-2.0
"""The API of llama.cpp's server: completions with its names, and what its clients ask about the server."""
