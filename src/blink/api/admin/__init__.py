# SPDX-License-Identifier: Apache-2.0
"""Endpoints that change a server while it runs."""
