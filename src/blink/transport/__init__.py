# SPDX-License-Identifier: Apache-2.0
"""How a frontend reaches the region: one-sided, ordered reads and writes."""

from blink.transport.base import Transport
from blink.transport.shm import ShmTransport

__all__ = ["ShmTransport", "Transport"]
