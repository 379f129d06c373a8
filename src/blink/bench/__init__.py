# SPDX-License-Identifier: Apache-2.0
"""`blink bench`: an open-loop load generator for any server with OpenAI's completions API; loads no torch."""
