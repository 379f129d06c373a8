# SPDX-License-Identifier: Apache-2.0
"""The HTTP half of Blink: OpenAI's API before a region. Loads neither torch nor CUDA: it runs on SmartNIC cores."""
