# SPDX-License-Identifier: Apache-2.0
"""Text and tokens: tokenizer, template, prompt, generation. Loads neither torch nor CUDA."""
