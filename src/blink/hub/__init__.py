# SPDX-License-Identifier: Apache-2.0
"""Models of the Hugging Face hub: their names, which of their files are needed, their download and their cache."""
