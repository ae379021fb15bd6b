"""Backward: the gradient of the mix, in partial sums of a fixed order (no atomics: repeatable bits)."""

import triton
import triton.language as tl

from vitrefine.ops.kernels.refined_attention_blocks import block_places


@triton.jit(do_not_specialize=["n_out", "n_rows", "width", "n_images", "n_keys"])
def grad_mix_kernel(
    windows,
    maps,
    partial,
    n_out,
    n_rows,
    width,
    n_images,
    n_keys,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Windows of dA*, transposed, times blocks of P: row program_id(1) of the window's gradient, [SPAN, 4 · HEADS]."""
    source = tl.arange(0, SPAN)
    target = tl.arange(0, 4 * HEADS)
    row_tiles = tl.cdiv(n_out, ROWS)
    key_tiles = tl.cdiv(n_keys, KEYS)
    top = tl.program_id(1)
    result = tl.zeros((SPAN, 4 * HEADS), tl.float32)
    for tile in range(tl.program_id(0), n_images * row_tiles * key_tiles, tl.num_programs(0)):
        image = tile // (row_tiles * key_tiles)
        start_row = tile // key_tiles % row_tiles * ROWS
        start = tile % key_tiles * KEYS
        grads = windows.load([(image * n_rows + start_row) // 2 + top // 2, top % 2, start // 2, 0])
        grads = tl.reshape(grads, (ROWS * KEYS // 4, SPAN))
        row, column, place = block_places(start_row + SIZE // 2, start + SIZE // 2, width, HEADS, ROWS, KEYS)
        exists = (row < n_out + SIZE // 2) & (column < n_keys + SIZE // 2)
        exists = tl.max_constancy(exists, (1, 8))
        p = tl.load(maps + image.to(tl.int64) * n_rows * width * HEADS + place, mask=exists, other=0.0)
        result = tl.dot(tl.trans(grads), p, result, input_precision=PRECISION)
    cells = ((tl.program_id(0) * (SIZE + 1) + top) * SPAN + source[:, None]) * (4 * HEADS) + target[None, :]
    if ADD:
        result += tl.load(partial + cells)
    tl.store(partial + cells, result)


@triton.jit(do_not_specialize=["n_mixed", "n_heads"])
def fold_mix_kernel(
    total,
    dmix,
    n_mixed,
    n_heads,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Tap (program_id(0), program_id(1)) of the gradient of the (G, H, k, k) mix.

    The tap acts on each of a block's four pixels, each time one place further in the window.
    """
    a, b = tl.program_id(0), tl.program_id(1)
    mixed = tl.arange(0, HEADS)[:, None]
    head = tl.arange(0, HEADS)[None, :]
    result = tl.zeros((HEADS, HEADS), tl.float32)
    for pixel in tl.static_range(4):
        row = SIZE - 1 - a + pixel // 2
        column = SIZE - 1 - b + pixel % 2
        result += tl.load(total + (row * SPAN + column * HEADS + mixed) * (4 * HEADS) + pixel * HEADS + head)
    place = ((mixed * n_heads + head) * SIZE + a) * SIZE + b
    tl.store(dmix + place, result.to(dmix.dtype.element_ty), mask=(mixed < n_mixed) & (head < n_heads))
