# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportMissingParameterType=false
"""The kernels of prompts of the gated delta rule, in chunks of 64 tokens.

With G the decay since the chunk's start, and L_ij = exp(G_i - G_j) for j <= i:

mix (a program for some tokens of a head of q, k or v) convolves, and normalises q and k.
relate (for each chunk and key head) computes P = Q K^T L, and A = strictly lower(beta K K^T L).
invert() returns T = (I + A)^-1 beta.
solve (for each chunk and value head) computes U = T V and W = T exp(G) K.

scan (for each sequence, value head and some columns of its state) walks over the chunks. It computes N = U - W S, then
O = exp(G) Q S + P N, then S = exp(G_last) S + K^T (exp(G_last - G) N).
keep_inputs leaves the last inputs in the slots, and finish normalises the outputs and gates them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _count_chunks(starts, num_rows, ROWS: tl.constexpr, C: tl.constexpr):
    """Return how many chunks each row has."""
    row = tl.arange(0, ROWS)
    first = tl.load(starts + row, row < num_rows, other=0)
    end = tl.load(starts + row + 1, row < num_rows, other=0)
    return (end - first + C - 1) // C


@triton.jit
def _convolve(
    qkv, inputs, conv, stride, start, position, is_first, token, count, channel,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Return the convolved values of some channels of a row's tokens, in float32; zeros where there is no token.

    start, position: of the row's first token; is_first: whether that is among these; count: of the row's tokens.
    """
    total = tl.zeros((token.shape[0], channel.shape[0]), tl.float32)
    for back in tl.static_range(4):
        at = token - back
        now = tl.load(
            qkv + (start + at)[:, None].to(tl.int64) * stride + channel[None, :],
            ((at >= 0) & (token < count))[:, None],
            other=0.0,
        )
        if back > 0:  # noqa: SIM102  (known when compiled, the other is not)
            if is_first:
                place = (position + at + SIZE) % SIZE
                has_past = (at < 0) & (position + at >= 0)
                now += tl.load(inputs + place[:, None] * CHANNELS + channel[None, :], has_past[:, None], other=0.0)
        weight = tl.load(conv + (3 - back) * CHANNELS + channel)
        total += now.to(tl.float32) * weight.to(tl.float32)[None, :]
    return tl.where((token < count)[:, None], total * tl.sigmoid(total), 0.0)


@triton.jit
def _find_chunk(chunk, slots, positions, starts, num_rows, ROWS: tl.constexpr, C: tl.constexpr):
    """Return a chunk's row's first token, position, number of tokens and slot, and its number in that row; the slot is
    below 0 if there is nothing to do."""
    counts = _count_chunks(starts, num_rows, ROWS, C)
    row = tl.sum((tl.cumsum(counts) <= chunk).to(tl.int32))
    index = chunk - tl.sum(tl.where(tl.arange(0, ROWS) < row, counts, 0))
    slot = tl.load(slots + row, row < num_rows, other=-1)
    position = tl.load(positions + row, row < num_rows, other=0)
    start = tl.load(starts + row, row < num_rows, other=0)
    count = tl.load(starts + row + 1, row < num_rows, other=0) - start
    return start, position, count, slot, index


@triton.jit
def mix(
    qkv,
    inputs,
    conv,
    slots,
    positions,
    starts,
    q_out,
    k_out,
    v_out,
    stride,
    num_rows,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    PART: tl.constexpr,
    OF_V: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Convolve some tokens of a chunk; of q and k, heads one after the other, or with OF_V of v."""
    CHANNELS: tl.constexpr = 2 * K_HEADS * DK + V_HEADS * DV
    D: tl.constexpr = DV if OF_V else DK
    chunk, part, head = tl.program_id(0) // (C // PART), tl.program_id(0) % (C // PART), tl.program_id(1)
    start, position, count, slot, index = _find_chunk(chunk, slots, positions, starts, num_rows, ROWS, C)
    if slot < 0:
        return
    i, channel = part * PART + tl.arange(0, PART), tl.arange(0, D)
    past = inputs + slot.to(tl.int64) * SIZE * CHANNELS
    first = head * D + (2 * K_HEADS * DK if OF_V else 0)
    is_first = (index == 0) & (part == 0)
    token = index * C + i
    x = _convolve(qkv, past, conv, stride, start, position, is_first, token, count, first + channel, CHANNELS, SIZE)
    if OF_V:
        to = v_out + (chunk * V_HEADS + head).to(tl.int64) * C * D
    else:
        x *= tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None] * tl.where(head < K_HEADS, DK**-0.5, 1.0)
        to = tl.where(head < K_HEADS, q_out, k_out) + (chunk * K_HEADS + head % K_HEADS).to(tl.int64) * C * D
    tl.store(to + i[:, None] * D + channel[None, :], x.to(v_out.dtype.element_ty))


@triton.jit
def _load_gates(a, b, a_stride, b_stride, dt_bias, rate, head, at, here):
    """Return g and beta of some tokens; 0 where there is none."""
    x = tl.load(a + at * a_stride + head, here, other=0.0).to(tl.float32) + tl.load(dt_bias + head)
    softplus = tl.where(x > 20, x, tl.log(1 + tl.exp(tl.minimum(x, 20.0))))
    beta = tl.sigmoid(tl.load(b + at * b_stride + head, here, other=0.0).to(tl.float32))
    return tl.where(here, tl.load(rate + head) * softplus, 0.0), tl.where(here, beta, 0.0)


@triton.jit
def relate(
    b,
    a,
    rate,
    dt_bias,
    slots,
    positions,
    starts,
    q_in,
    k_in,
    p_out,
    decay_out,
    system_out,
    beta_out,
    b_stride,
    a_stride,
    num_rows,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,  # noqa: ARG001  (as the others)
    ROWS: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, k_head = tl.program_id(0), tl.program_id(1)
    start, _, count, slot, index = _find_chunk(chunk, slots, positions, starts, num_rows, ROWS, C)
    if slot < 0:
        return
    i, j, k_channel = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :], tl.arange(0, DK)[None, :]
    token = index * C + tl.arange(0, C)
    place = (chunk * K_HEADS + k_head).to(tl.int64) * C * DK + i * DK + k_channel
    k = tl.load(k_in + place)
    kk = tl.dot(k, k.T, input_precision=PRECISION)
    qk = tl.dot(tl.load(q_in + place), k.T, input_precision=PRECISION)
    for repeat in range(V_HEADS // K_HEADS):
        head = k_head * (V_HEADS // K_HEADS) + repeat
        at, to = (start + token).to(tl.int64), (chunk * V_HEADS + head).to(tl.int64) * C
        g, beta = _load_gates(a, b, a_stride, b_stride, dt_bias, rate, head, at, token < count)
        decay = tl.cumsum(g)
        tl.store(decay_out + to + tl.arange(0, C), decay)
        tl.store(beta_out + to + tl.arange(0, C), beta)
        between = tl.exp(tl.where(i >= j, decay[:, None] - decay[None, :], float("-inf")))
        tl.store(p_out + to * C + i * C + j, (qk * between).to(p_out.dtype.element_ty))
        tl.store(system_out + to * C + i * C + j, tl.where(i > j, kk * between * beta[:, None], 0.0))


@triton.jit
def solve(
    slots,
    positions,
    starts,
    k_in,
    inverse_in,
    decay_in,
    u,
    w_out,
    num_rows,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute W, and U in the place of V."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    _, _, _, slot, _ = _find_chunk(chunk, slots, positions, starts, num_rows, ROWS, C)
    if slot < 0:
        return
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    k_channel, v_channel = tl.arange(0, DK)[None, :], tl.arange(0, DV)[None, :]
    to = (chunk * V_HEADS + head).to(tl.int64) * C
    inverse = tl.load(inverse_in + to * C + i * C + j)
    decay = tl.load(decay_in + to + tl.arange(0, C))
    k = tl.load(k_in + ((chunk * K_HEADS + head // (V_HEADS // K_HEADS)).to(tl.int64) * C + i) * DK + k_channel)
    v = tl.load(u + (to + i) * DV + v_channel)
    decayed = (inverse.to(tl.float32) * tl.exp(decay)[None, :]).to(k.dtype)
    tl.store(w_out + (to + i) * DK + k_channel, tl.dot(decayed, k, input_precision=PRECISION).to(k.dtype))
    tl.store(u + (to + i) * DV + v_channel, tl.dot(inverse, v, input_precision=PRECISION).to(k.dtype))


@triton.jit
def scan(
    states,
    slots,
    positions,
    starts,
    q_in,
    k_in,
    u_in,
    w_in,
    p_in,
    decay_in,
    out,
    num_rows,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, position = tl.load(slots + row).to(tl.int64), tl.load(positions + row)
    start = tl.load(starts + row)
    count = tl.load(starts + row + 1) - start
    if (slot < 0) | (count == 0):
        return
    first = tl.sum(tl.where(tl.arange(0, ROWS) < row, _count_chunks(starts, num_rows, ROWS, C), 0))
    k_channel, column = tl.arange(0, DK), block * COLUMNS + tl.arange(0, COLUMNS)
    k_head = head // (V_HEADS // K_HEADS)
    home = states + (slot * V_HEADS + head) * DK * DV + k_channel[:, None] * DV + column[None, :]
    has_state = (position + 0 * k_channel > 0)[:, None]
    state = tl.load(home, has_state, other=0.0)
    for index in tl.range(0, (count + C - 1) // C, num_stages=STAGES):
        at = ((first + index) * V_HEADS + head).to(tl.int64) * C
        at_k = ((first + index) * K_HEADS + k_head).to(tl.int64) * C
        o, state = _apply_chunk(
            *(state, q_in + at_k * DK, k_in + at_k * DK, u_in + at * DV, w_in + at * DK, p_in + at * C, decay_in + at),
            *(column, DK, DV, C, PRECISION),
        )
        token = index * C + tl.arange(0, C)
        to = out + (start + token).to(tl.int64)[:, None] * (V_HEADS * DV) + head * DV + column[None, :]
        tl.store(to, o, (token < count)[:, None])
    tl.store(home, state)


@triton.jit
def _apply_chunk(
    state,
    q,
    k,
    u,
    w,
    p,
    decay,
    column,
    DK: tl.constexpr,
    DV: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return a chunk's outputs and the state behind it, in some columns."""
    i, k_channel = tl.arange(0, C), tl.arange(0, DK)
    by_token, by_channel = i[:, None] * DK + k_channel[None, :], i[None, :] * DK + k_channel[:, None]
    of_w, of_q, of_k = tl.load(w + by_token), tl.load(q + by_token), tl.load(k + by_channel)
    of_u, of_p = tl.load(u + i[:, None] * DV + column[None, :]), tl.load(p + i[:, None] * C + i[None, :])
    decays, last = tl.load(decay + i), tl.load(decay + C - 1)
    rounded = state.to(of_q.dtype)
    updates = of_u.to(tl.float32) - tl.dot(of_w, rounded, input_precision=PRECISION)
    o = tl.dot(of_q, rounded, input_precision=PRECISION) * tl.exp(decays)[:, None]
    o += tl.dot(of_p, updates.to(of_q.dtype), input_precision=PRECISION)
    updates = (updates * tl.exp(last - decays)[:, None]).to(of_q.dtype)
    return o.to(of_q.dtype), state * tl.exp(last) + tl.dot(of_k, updates, input_precision=PRECISION)


@triton.jit
def keep_inputs(
    qkv, inputs, slots, positions, starts, stride, num_channels,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keep a row's last inputs, each at the place of its position: at most WIDTH, where a slot has SIZE places."""
    row, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot, start = tl.load(slots + row).to(tl.int64), tl.load(starts + row)
    count = tl.load(starts + row + 1) - start
    if slot < 0:
        return
    token = count - WIDTH + tl.arange(0, WIDTH)
    here = (token >= 0)[:, None] & (channel < num_channels)[None, :]
    values = tl.load(qkv + (start + token).to(tl.int64)[:, None] * stride + channel[None, :], here)
    place = slot * SIZE + (tl.load(positions + row) + token) % SIZE
    tl.store(inputs + place[:, None] * num_channels + channel[None, :], values, here)


@triton.jit
def finish(
    out, z, norm, starts, z_stride, eps, num_rows, V_HEADS: tl.constexpr, DV: tl.constexpr, TOKENS: tl.constexpr
):
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    column = tl.program_id(1) * DV + tl.arange(0, DV)[None, :]
    here = token < tl.load(starts + num_rows)
    o = tl.load(out + token * (V_HEADS * DV) + column, here, other=0.0).to(tl.float32)
    gate = tl.load(z + token * z_stride + column, here, other=0.0).to(tl.float32)
    rate = tl.rsqrt(tl.sum(o * o, 1) / DV + eps)[:, None]
    o *= rate * tl.load(norm + tl.arange(0, DV))[None, :] * gate * tl.sigmoid(gate)
    tl.store(out + token * (V_HEADS * DV) + column, o.to(out.dtype.element_ty), here)
