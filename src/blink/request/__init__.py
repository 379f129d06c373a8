# SPDX-License-Identifier: Apache-2.0
"""What online and offline requests share: their planning and the table of sequences. Loads neither torch nor CUDA."""
