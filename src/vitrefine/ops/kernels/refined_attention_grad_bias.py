"""Backward, only where an additive mask wants a gradient: dS, summed over the images that share the mask."""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=[
        "first_image",
        "first_out",
        "last_out",
        "n_rows",
        "width",
        "n_images",
        "n_heads",
        "n_queries",
        "n_keys",
    ]
)
def grad_bias_kernel(
    maps,
    grad_maps,
    delta,
    dbias,
    dbias_image,
    first_image,
    first_out,
    last_out,
    n_rows,
    width,
    n_images,
    n_heads,
    n_queries,
    n_keys,
    PAD: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
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
        p = tl.load(maps + place, mask=exists[:, :, None], other=0.0).to(tl.float32)
        dp = tl.load(grad_maps + place, mask=exists[:, :, None], other=0.0).to(tl.float32)
        row_sum = tl.load(
            delta + ((first_image + slot + image) * n_heads + heads[None, :]) * n_queries + rows[:, None],
            mask=(heads < n_heads)[None, :] & (rows < last_out)[:, None],
            other=0.0,
        )
        result += p * (dp - row_sum[:, None, :])
    place = heads[:, None, None] * n_queries * n_keys + rows[None, :, None] * n_keys + columns[None, None, :]
    place = dbias + (first_image + slot) * dbias_image + place
    exists = (heads < n_heads)[:, None, None] & exists[None, :, :]
    tl.store(place, tl.load(place, mask=exists, other=0.0) + tl.permute(result, (2, 0, 1)), mask=exists)
