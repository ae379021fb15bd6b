"""Mean cosine of tokens, and products of centred features: one read of the tokens each, in the type that they have.

Centred features are multiplied as sums of two bfloat16, in three products: 16 bits of each number count.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrefine.ops.kernels.launch import Launcher, on_its_device
from vitrefine.ops.kernels.shapes import cdiv, padded, rows_contiguous

COLUMNS = 64  # of features at a time
SHARES = 132  # programs that share the columns of a gram: one for each multiprocessor of an H200
SHORTEST = tl.constexpr(1e-12)  # that a token is divided by, as of `F.normalize`


@triton.jit
def cosine_kernel(
    tokens, out, stride_image, stride_token, stride_channel, n_tokens, n_channels, TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """The mean cosine of one image's tokens."""
    channels = tl.arange(0, CHANNELS)
    tokens += tl.program_id(0).to(tl.int64) * stride_image
    total = tl.zeros((CHANNELS,), tl.float32)
    lengths = tl.zeros((TOKENS,), tl.float32)
    for start in range(0, n_tokens, TOKENS):
        rows = start + tl.arange(0, TOKENS)
        exists = (rows < n_tokens)[:, None] & (channels < n_channels)[None, :]
        place = rows.to(tl.int64)[:, None] * stride_token + channels[None, :] * stride_channel
        some = tl.load(tokens + place, mask=exists, other=0.0).to(tl.float32)
        unit = some / tl.maximum(tl.sqrt(tl.sum(some * some, 1)), SHORTEST)[:, None]
        lengths += tl.sum(unit * unit, 1)
        total += tl.sum(unit, 0)
    pairs = tl.maximum(1.0 * n_tokens * (n_tokens - 1), 1.0)
    tl.store(out + tl.program_id(0), (tl.sum(total * total, 0) - tl.sum(lengths, 0)) / pairs)


@triton.jit
def gram_kernel(
    features, partial, stride, n_images, n_columns, IMAGES: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """[IMAGES, IMAGES] products of centred features over a share of the columns."""
    images = tl.arange(0, IMAGES)
    gram = tl.zeros((IMAGES, IMAGES), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(n_columns, COLUMNS), tl.num_programs(0)):
        columns = tile * COLUMNS + tl.arange(0, COLUMNS)
        exists = (images < n_images)[:, None] & (columns < n_columns)[None, :]
        place = images.to(tl.int64)[:, None] * stride + columns[None, :]
        some = tl.load(features + place, mask=exists, other=0.0).to(tl.float32)
        some = tl.where(exists, some - (tl.sum(some, 0) / n_images)[None, :], 0.0)
        gram = tl.dot(some, tl.trans(some), gram, input_precision=PRECISION)
    cells = images[:, None] * n_images + images[None, :]
    inside = (images < n_images)[:, None] & (images < n_images)[None, :]
    tl.store(partial + tl.program_id(0).to(tl.int64) * n_images * n_images + cells, gram, mask=inside)


@torch.library.custom_op("vitrefine::mean_cosine", mutates_args=())
@on_its_device
def mean_cosine_triton(tokens: Tensor) -> Tensor:
    """`mean_cosine` of (B, N, C) in half or single precision."""
    batch, count, channels = tokens.shape
    out = tokens.new_empty(batch, dtype=torch.float32)
    width = triton.next_power_of_2(channels)
    Launcher("mean_cosine", [tokens])(
        cosine_kernel,
        (batch, 1, 1),
        tokens,
        out,
        *tokens.stride(),
        count,
        channels,
        TOKENS=max(1, 8192 // width),
        CHANNELS=width,
        num_warps=8,
    )
    return out


@mean_cosine_triton.register_fake
def _(tokens: Tensor) -> Tensor:
    return tokens.new_empty(tokens.shape[0], dtype=torch.float32)


@torch.library.custom_op("vitrefine::centred_gram", mutates_args=())
@on_its_device
def centred_gram_triton(features: Tensor) -> Tensor:
    """`centred_gram` of (n, columns), n at most 128, in half or single precision."""
    features = rows_contiguous(features)
    count, width = features.shape
    several = 1 if count > 64 else 4  # fit a multiprocessor
    shares = min(several * SHARES, cdiv(width, COLUMNS))
    partial = features.new_empty((shares, count, count), dtype=torch.float32)
    Launcher("centred_gram", [features])(
        gram_kernel,
        (shares, 1, 1),
        features,
        partial,
        features.stride(0),
        count,
        width,
        IMAGES=padded(count),
        COLUMNS=COLUMNS,
        PRECISION="bf16x3" if features.is_cuda else "ieee",  # which the interpreter does not know
        num_warps=8 if count > 64 else 4,
        num_stages=3,
    )
    return partial.sum(dim=0, dtype=torch.float64)


@centred_gram_triton.register_fake
def _(features: Tensor) -> Tensor:
    return features.new_empty((features.shape[0], features.shape[0]), dtype=torch.float64)
