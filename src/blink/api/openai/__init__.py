# SPDX-License-Identifier: Apache-2.0
"""OpenAI's API, with vLLM's fields: what bodies mean, and how answers are written."""
