# SPDX-License-Identifier: Apache-2.0
"""The endpoints of models that pool: embeddings, scores and ranks."""
