# SPDX-License-Identifier: Apache-2.0
"""POST /v1/responses: a chat for all but its body and its answers."""
