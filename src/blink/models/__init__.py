# SPDX-License-Identifier: Apache-2.0
"""The decoder, and the descriptions of models that it is built from."""
