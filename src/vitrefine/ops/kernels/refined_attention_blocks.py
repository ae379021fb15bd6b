"""The convolution of refined attention, as the kernels share it.

Attention maps travel between the kernels with their heads innermost and a border of zeros: pixel (i, j) of an image is
`HEADS` contiguous values, heads padded to 16 or 32. Any shift of the map is then aligned, and the k + 1 columns that
two neighbouring outputs read are contiguous. The convolution is a matrix product over blocks of 2×2 pixels:

    [pixels / 4, (k + 1) · SPAN] · [(k + 1) · SPAN, 4 · HEADS],   SPAN = (k + 1) · HEADS, padded to a power of two

The first factor is the window that a block reads, row by row; overlapping windows are one strided view of the buffer,
(row pairs, 2, column pairs, SPAN), so the copy engine fetches them (a tensor descriptor). The second is the mix with
its taps shifted to each of the four pixels, packed once a call (`pack_mix`). For a 3×3 mix 16 pixels are read for 4
written, and under half of the products are with zeros: cheap next to what it saves in loads and synchronisation.
"""

import triton
import triton.language as tl


@triton.jit
def pack_mix(mix, packed, first, step, n_mixed, n_heads, SIZE: tl.constexpr, HEADS: tl.constexpr, SPAN: tl.constexpr):
    """Write the (G, H, k, k) mix in three forms [(k + 1) · SPAN, 4 · HEADS]; programs share the work by rows.

    What is multiplied over keys (forward) or over queries (gradient of the values) next wants those two neighbours
    side by side, columns (row, g, column) or (column, g, row). The transposed convolution's result returns to memory,
    where the heads of a pixel are neighbours: columns (row, column, h).
    """
    target = tl.arange(0, 4 * HEADS)[None, :]
    source = tl.arange(0, HEADS)[:, None]
    across: tl.constexpr = SPAN // HEADS
    cells: tl.constexpr = (SIZE + 1) * across
    outer = target // (2 * HEADS)
    for form in tl.static_range(3):
        for item in range(first, cells, step):
            if form == 0:
                a, b = item // across - outer, item % across - target % 2
                mixed, head = target // 2 % HEADS, source
            elif form == 1:
                a, b = item // across - target % 2, item % across - outer
                mixed, head = target // 2 % HEADS, source
            else:
                a, b = SIZE - 1 - (item // across - outer), SIZE - 1 - (item % across - target // HEADS % 2)
                mixed, head = source, target % HEADS
            exists = (a >= 0) & (a < SIZE) & (b >= 0) & (b < SIZE) & (mixed < n_mixed) & (head < n_heads)
            weight = tl.load(mix + ((mixed * n_heads + head) * SIZE + a) * SIZE + b, mask=exists, other=0.0)
            cell = ((form * cells + item) * HEADS + source) * (4 * HEADS) + target
            tl.store(packed + cell, weight.to(packed.dtype.element_ty))


@triton.jit
def block_places(
    start_row, start_column, n_out, n_keys, width, SIZE: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """[blocks, 4 · HEADS]: place in the buffer of the values of a tile's 2×2 blocks, and whether there is a pixel."""
    top = start_row + SIZE // 2
    first = start_column + SIZE // 2
    block = tl.arange(0, ROWS * KEYS // 4)
    value = tl.arange(0, 4 * HEADS)[None, :]
    rows = top + 2 * (block // (KEYS // 2))[:, None] + value // (2 * HEADS)
    left = first + 2 * (block % (KEYS // 2))[:, None]
    place = (rows * width + left) * HEADS + value % (2 * HEADS)
    columns = left + value // HEADS % 2
    exists = (rows < n_out + SIZE // 2) & (columns < n_keys + SIZE // 2)
    # The compiler cannot see through the remainder that 16 bytes always belong to one pixel.
    return tl.max_contiguous(tl.multiple_of(place, (1, 8)), (1, 8)), tl.max_constancy(exists, (1, 8))


@triton.jit
def load_window(windows, row_pair, column_pair, row, SPAN: tl.constexpr, BLOCKS: tl.constexpr):
    """One row of the windows of a tile's blocks."""
    return tl.reshape(windows.load([row_pair + row // 2, row % 2, column_pair, 0]), (BLOCKS, SPAN))


@triton.jit
def load_weight(packed, row, HEADS: tl.constexpr, SPAN: tl.constexpr):
    """The mix of one row of a window."""
    source = tl.arange(0, SPAN)[:, None]
    target = tl.arange(0, 4 * HEADS)[None, :]
    return tl.load(packed + (row * SPAN + source) * (4 * HEADS) + target)


@triton.jit
def load_weights(packed, SIZE: tl.constexpr, HEADS: tl.constexpr, SPAN: tl.constexpr):
    """The mix of all rows of a window, where it fits the shared memory beside the rest; else nothing.

    To be called before a loop over tiles: in the loop the compiler would fetch the weights again for every tile, and
    hold several copies, wherever something is stored there too.
    """
    weights = ()
    if (SIZE + 1) * SPAN * 4 * HEADS * packed.dtype.element_ty.primitive_bitwidth <= 32768 * 8:
        for row in tl.static_range(SIZE + 1):
            weights = weights + (load_weight(packed, row, HEADS, SPAN),)  # type: ignore[assignment]  # noqa: RUF005
    return weights


@triton.jit
def convolve(
    windows, packed, weights, row_pair, column_pair, SIZE: tl.constexpr, HEADS: tl.constexpr, SPAN: tl.constexpr,
    BLOCKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[BLOCKS, 4 · HEADS]: the convolution at the four pixels of each block of a tile, a row of windows at a time."""
    result = tl.zeros((BLOCKS, 4 * HEADS), tl.float32)
    if len(weights) > 0:
        for row in tl.static_range(SIZE + 1):
            window = load_window(windows, row_pair, column_pair, row, SPAN, BLOCKS)
            result = tl.dot(window, weights[row], result, input_precision=PRECISION)
    else:
        for row in range(SIZE + 1):
            window = load_window(windows, row_pair, column_pair, row, SPAN, BLOCKS)
            result = tl.dot(window, load_weight(packed, row, HEADS, SPAN), result, input_precision=PRECISION)
    return result
