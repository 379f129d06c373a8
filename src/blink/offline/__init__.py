# SPDX-License-Identifier: Apache-2.0
"""What `LLM` and `AsyncLLM` are made of: an engine in this process, and outputs in vLLM's form."""
