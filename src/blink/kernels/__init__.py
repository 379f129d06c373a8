# SPDX-License-Identifier: Apache-2.0
"""The operations of the model: each file checks its operands and picks the code for their device, cpu/ or gpu/."""
