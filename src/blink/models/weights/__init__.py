# SPDX-License-Identifier: Apache-2.0
"""Where a model's description and weights come from."""
