# SPDX-License-Identifier: Apache-2.0
"""What Blink knows of vLLM: its flags, and what becomes of each."""
