# SPDX-License-Identifier: Apache-2.0
"""What the GPUs of a tensor-parallel group say to each other over NVLink."""
