# SPDX-License-Identifier: Apache-2.0
"""A queue pair in another machine's memory. Loads its libraries at the first use."""
