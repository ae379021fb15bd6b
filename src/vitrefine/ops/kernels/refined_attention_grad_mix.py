"""Backward: the gradient of the mix, in partial sums of a fixed order (no atomics: repeatable bits)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrefine.ops.kernels.launch import Bound, Launcher
from vitrefine.ops.kernels.refined_attention_blocks import block_places
from vitrefine.ops.kernels.refined_attention_call import Call
from vitrefine.ops.kernels.refined_attention_plan import Buffer, windows


@triton.jit(do_not_specialize=["n_out", "n_rows", "width", "n_images", "n_keys"])
def grad_mix_kernel(
    windows, maps, partial, n_out, n_rows, width, n_images, n_keys, SIZE: tl.constexpr, HEADS: tl.constexpr,
    SPAN: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
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
        place, exists = block_places(start_row, start, n_out, n_keys, width, SIZE, HEADS, ROWS, KEYS)
        p = tl.load(maps + image.to(tl.int64) * n_rows * width * HEADS + place, mask=exists, other=0.0)
        result = tl.dot(tl.trans(grads), p, result, input_precision=PRECISION)
    cells = ((tl.program_id(0) * (SIZE + 1) + top) * SPAN + source[:, None]) * (4 * HEADS) + target[None, :]
    if ADD:
        result += tl.load(partial + cells)
    tl.store(partial + cells, result)


@triton.jit(do_not_specialize=["n_mixed", "n_heads"])
def fold_mix_kernel(total, dmix, n_mixed, n_heads, SIZE: tl.constexpr, HEADS: tl.constexpr, SPAN: tl.constexpr):
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


def bind_grad_mix(
    launch: Launcher, call: Call, of: Buffer, grad_refined: Tensor, maps: Tensor, partial: Tensor
) -> tuple[Bound, Bound]:
    """To be launched over (MIX_PROGRAMS, k + 1), with the rows of a chunk, of its buffer, its width, and its images.

    The first writes the partial sums of the first chunk, the second adds another chunk's.
    """
    tile = call.tiles["grad_mix"]
    before, after = (windows(grad_refined, of, call.n_keys, call.size, tile), maps, partial), (call.n_keys,)
    constants = {**call.products, **call.window, **tile.options()}
    first, following = (launch.bind(grad_mix_kernel, before, after, ADD=add, **constants) for add in (False, True))
    return first, following


def fold_mix(launch: Launcher, call: Call, partial: Tensor) -> Tensor:
    """The gradient of the mix, out of partial sums."""
    dmix = torch.empty_like(call.mix, memory_format=torch.contiguous_format)
    arguments = partial.sum(0), dmix, call.n_mixed, call.heads
    launch(fold_mix_kernel, (call.size, call.size, 1), *arguments, HEADS=call.padded_heads, **call.window)
    return dmix
