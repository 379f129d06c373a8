# SPDX-License-Identifier: Apache-2.0
"""Views of a running server: live figures in the terminal and timelines of its steps. They only read."""
