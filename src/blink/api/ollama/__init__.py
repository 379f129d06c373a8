# SPDX-License-Identifier: Apache-2.0
"""Ollama's API: its chats and completions are those of OpenAI's API for all but their bodies, answers and errors."""
