# SPDX-License-Identifier: Apache-2.0
"""All routes by which an admin changes a server while it runs."""

from __future__ import annotations

from fastapi import APIRouter

from blink.api.admin.model_routes import model_routes
from blink.api.admin.pause_routes import AdminService, pause_routes
from blink.api.admin.tensor_routes import tensor_routes


def admin_routes(service: AdminService) -> APIRouter:
    """Return the routes."""
    router = APIRouter()
    for routes in (pause_routes, model_routes, tensor_routes):
        router.include_router(routes(service))
    return router
