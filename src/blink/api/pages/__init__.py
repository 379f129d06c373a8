# SPDX-License-Identifier: Apache-2.0
"""The pages that a browser shows: static files, and the API's description."""
