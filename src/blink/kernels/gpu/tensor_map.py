# SPDX-License-Identifier: Apache-2.0
# The cuda packages choose their modules when imported, which pyright cannot follow.
# pyright: reportAttributeAccessIssue=false
"""Descriptions of tensors for the GPU's tensor copies."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NewType

from cuda.bindings import driver
from torch import Tensor

from blink.kernels.gpu.launch import check
from blink.kernels.layer_cache import LayerCache

BOX_ROW = 64  # elements of a box's row in shared memory: csrc/kernels/common/tensor_copy.cuh's kBoxRow


TensorMap = NewType("TensorMap", bytes)  # csrc/kernels/args.h


def encode_matrix(matrix: Tensor, box_rows: int) -> TensorMap:
    """Describe a contiguous matrix, in boxes of so many rows."""
    rows, columns = matrix.shape
    return _encode(matrix, (columns, rows), (columns,), (BOX_ROW, box_rows))


def encode_bytes(matrix: Tensor, box_rows: int) -> TensorMap:
    """Describe a contiguous matrix of bytes, in boxes of so many rows of 128."""
    rows, columns = matrix.shape
    return _encode(matrix, (columns, rows), (columns,), (2 * BOX_ROW, box_rows))


def encode_hi_lo(hi_lo: Tensor, box_rows: int) -> TensorMap:
    """Describe contiguous hi/lo FP8 [2, rows, columns], in boxes of so many rows of 128 bytes of both."""
    count, rows, columns = hi_lo.shape
    return _encode(
        hi_lo, (columns, rows, count), (columns, rows * columns), (2 * BOX_ROW // hi_lo.itemsize, box_rows, count)
    )


def encode_stages(tensor: Tensor, box: tuple[int, int, int]) -> TensorMap:
    """Describe a contiguous tensor [groups, rows, columns] in boxes of so many groups, rows and parts of 128 bytes of
    rows; in shared memory a box's parts lie behind one another."""
    groups, rows, columns = tensor.shape
    box_groups, box_rows, parts = box
    part = 2 * BOX_ROW // tensor.itemsize
    assert tensor.is_contiguous() and columns % part == 0
    sizes, strides = (part, rows, groups, columns // part), (columns, rows * columns, part)
    return _encode(tensor, sizes, strides, (part, box_rows, box_groups, parts))


def encode_cells(cache: LayerCache, box_tokens: int) -> TensorMap:
    """Describe a layer's contiguous KV cache, in boxes of some tokens' keys and values of one head.

    Its dimensions, the last in memory first: dims of a head up to 128 bytes, tokens, the head's parts, heads, keys and
    values.
    """
    kv_heads, head_dim = cache.kv_heads, cache.head_dim
    row = min(head_dim, 2 * BOX_ROW // cache.dtype.itemsize)
    parts, token = head_dim // row, kv_heads * head_dim
    sizes = (row, cache.num_blocks * cache.block_size, parts, kv_heads, 2)
    strides = (token, row, head_dim, cache.values_offset)
    return _encode(cache.cells, sizes, strides, (row, box_tokens, parts, 1, 2))


def encode_token_groups(cache: LayerCache) -> TensorMap:
    """Describe a layer's contiguous KV cache of bf16, in boxes of a block's keys, or values if it has any, of one head.

    In shared memory a box's tokens lie in groups of eight, of which each has parts of 64 dims behind one another. The
    map's dimensions, the last in memory first: dims of a part, tokens of a group, parts of all heads, groups, keys and
    values.
    """
    block_size, kv_heads, head_dim = cache.block_size, cache.kv_heads, cache.head_dim
    parts, token, group = head_dim // BOX_ROW, kv_heads * head_dim, 8
    assert (
        cache.cells.is_contiguous()
        and cache.dtype.itemsize == 2
        and block_size % group == 0
        and head_dim % BOX_ROW == 0
    )
    sizes = (BOX_ROW, group, kv_heads * parts, cache.num_blocks * block_size // group, len(cache.cells))
    strides = (token, BOX_ROW, group * token, cache.values_offset)
    return _encode(cache.cells, sizes, strides, (BOX_ROW, group, parts, block_size // group, 1))


def _encode(tensor: Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> TensorMap:
    """Encode a tensor of bf16 or of one byte an element, in boxes whose rows are of 128 bytes or 64.

    strides: in elements, of all dimensions but the first, whose are neighbours.
    """
    types, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    is_bytes = tensor.itemsize == 1
    is_narrow = box[0] * tensor.itemsize == BOX_ROW
    encoded = check(
        driver.cuTensorMapEncodeTiled(
            types.CU_TENSOR_MAP_DATA_TYPE_UINT8 if is_bytes else types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            len(sizes),
            tensor.data_ptr(),
            [driver.cuuint64_t(size) for size in sizes],
            [driver.cuuint64_t(stride * tensor.itemsize) for stride in strides],
            [driver.cuuint32_t(size) for size in box],
            [driver.cuuint32_t(1) for _ in box],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzles.CU_TENSOR_MAP_SWIZZLE_64B if is_narrow else swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return TensorMap(array("Q", map(int, encoded.opaque)).tobytes())
