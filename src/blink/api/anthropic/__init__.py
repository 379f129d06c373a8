# SPDX-License-Identifier: Apache-2.0
"""Anthropic's API: a message is a chat for all but its body, its answers and its errors."""
