# SPDX-License-Identifier: Apache-2.0
"""`blink quantize`: write a model with matrices of 8 or 4 bits, rounded so that its outputs change least."""
