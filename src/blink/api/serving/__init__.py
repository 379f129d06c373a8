# SPDX-License-Identifier: Apache-2.0
"""From a request that is read to its response, whatever API it came by."""
