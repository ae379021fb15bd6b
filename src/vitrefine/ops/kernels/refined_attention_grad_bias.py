"""Backward, only where an additive mask wants a gradient: dS, summed over the images that share the mask."""

import triton
import triton.language as tl
from torch import Tensor

from vitrefine.ops.kernels.launch import Bound, Launcher
from vitrefine.ops.kernels.refined_attention_call import Call
from vitrefine.ops.kernels.refined_attention_tiles import load_score_grads


@triton.jit(do_not_specialize=[
    "first_image", "first_out", "last_out", "n_rows", "width", "n_images", "n_heads", "n_queries", "n_keys"
])  # fmt: skip
def grad_bias_kernel(
    maps, grad_maps, delta, dbias, dbias_image, first_image, first_out, last_out, n_rows, width, n_images, n_heads,
    n_queries, n_keys, PAD: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Add dS of `n_images` images from program_id(2) on to a contiguous float32 (·, H, Nq, Nk) buffer."""
    slot = tl.program_id(2).to(tl.int64)
    heads = tl.arange(0, HEADS)
    rows = first_out + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    pixels = (rows - first_out + PAD)[:, None] * width + columns[None, :] + PAD
    exists = (rows < last_out)[:, None] & (columns < n_keys)[None, :]
    result = tl.zeros((ROWS, KEYS, HEADS), tl.float32)
    for image in range(n_images):
        buffer = (slot + image) * n_rows * width * HEADS
        place = buffer + pixels[:, :, None] * HEADS + heads[None, None, :]
        result += load_score_grads(
            maps, grad_maps, delta, place, exists[:, :, None], first_image + slot + image, heads, rows, n_heads,
            n_queries, last_out,
        )  # fmt: skip
    place = heads[:, None, None] * n_queries * n_keys + rows[None, :, None] * n_keys + columns[None, None, :]
    place = dbias + (first_image + slot) * dbias_image + place
    exists = (heads < n_heads)[:, None, None] & exists[None, :, :]
    tl.store(place, tl.load(place, mask=exists, other=0.0) + tl.permute(result, (2, 0, 1)), mask=exists)


def bind_grad_bias(
    launch: Launcher, call: Call, maps: Tensor, grad_maps: Tensor, delta: Tensor, dbias: Tensor, *, alone: bool
) -> Bound:
    """To be launched over (tiles of rows, tiles of keys, images or 1), with a chunk's place, buffer and images.

    `alone`: there is a mask for each image, not one for all.
    """
    return launch.bind(
        grad_bias_kernel,
        (maps, grad_maps, delta, dbias, dbias.stride(0) if alone else 0),
        (call.heads, call.n_queries, call.n_keys),
        PAD=call.pad,
        HEADS=call.padded_heads,
        **call.tiles["grad_bias"].options(),
    )
