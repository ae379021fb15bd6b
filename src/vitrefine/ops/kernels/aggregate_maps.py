"""Products of whole maps with values, and their gradients: O = A V, dA = dO Vᵀ, dV = Aᵀ dO, for each image and head.

cuBLAS wants operands and results image by image and head by head; tokens lie the other way round, and copying them
takes longer than the product. These kernels read and write them where they are, and each element of a map once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrefine.ops.aligned_maps import empty_maps
from vitrefine.ops.kernels.launch import Launcher
from vitrefine.ops.kernels.precision import product_precision
from vitrefine.ops.kernels.rows import load_rows, store_rows
from vitrefine.ops.kernels.shapes import cdiv, padded

TILE = {"ROWS": 64, "KEYS": 64, "num_warps": 4, "num_stages": 3}


@triton.jit
def load_map(maps, row_stride, rows, columns, n_rows, n_columns):
    """[rows, columns] of a map, zero outside. Read to the end of a row's memory, which is a whole number of vectors."""
    within = (rows < n_rows)[:, None] & (columns < row_stride)[None, :]
    value = tl.load(maps + rows[:, None] * row_stride + columns[None, :], mask=within, other=0.0)
    return tl.where((columns < n_columns)[None, :], value, 0.0).to(maps.dtype.element_ty)


@triton.jit
def own_tile(n_tokens, n_heads, SIZE: tl.constexpr):
    """Image, head and tokens of a program; tiles of one map follow one another."""
    tiles = tl.cdiv(n_tokens, SIZE)
    which = (tl.program_id(0) // tiles).to(tl.int64)
    return which // n_heads, which % n_heads, (tl.program_id(0) % tiles) * SIZE + tl.arange(0, SIZE)


@triton.jit
def aggregate_maps_kernel(
    maps, v, out, map_image, map_head, map_row, v_image, v_head, v_token, out_image, out_head, out_token, n_heads,
    n_queries, n_keys, dim, DIM: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """O(i) = Σ_j A(i, j) V(j), for a tile of queries of a map."""
    image, head, rows = own_tile(n_queries, n_heads, ROWS)
    maps += image * map_image + head * map_head
    v += image * v_image + head * v_head
    result = tl.zeros((ROWS, DIM), tl.float32)
    for start in range(0, n_keys, KEYS):
        keys = start + tl.arange(0, KEYS)
        a = load_map(maps, map_row, rows, keys, n_queries, n_keys)
        result = tl.dot(a, load_rows(v, keys, v_token, n_keys, dim, DIM), result, input_precision=PRECISION)
    store_rows(out + image * out_image + head * out_head, result, rows, out_token, n_queries, dim, DIM)


@triton.jit
def aggregate_maps_grad_maps_kernel(
    grad, v, grad_maps, grad_image, grad_head, grad_token, v_image, v_head, v_token, map_image, map_head, map_row,
    n_heads, n_queries, n_keys, dim, DIM: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dA(i, j) = dO(i) · V(j), for a tile of queries of a map; zero past the last key."""
    image, head, rows = own_tile(n_queries, n_heads, ROWS)
    grad_maps += image * map_image + head * map_head
    v += image * v_image + head * v_head
    grads = load_rows(grad + image * grad_image + head * grad_head, rows, grad_token, n_queries, dim, DIM)
    for start in range(0, map_row, KEYS):
        keys = start + tl.arange(0, KEYS)
        values = load_rows(v, keys, v_token, n_keys, dim, DIM)
        product = tl.dot(grads, tl.trans(values), input_precision=PRECISION).to(grad_maps.dtype.element_ty)
        within = (rows < n_queries)[:, None] & (keys < map_row)[None, :]
        tl.store(grad_maps + rows[:, None] * map_row + keys[None, :], product, mask=within)


@triton.jit
def aggregate_maps_grad_values_kernel(
    grad, maps, grad_v, grad_image, grad_head, grad_token, map_image, map_head, map_row, v_image, v_head, v_token,
    n_heads, n_queries, n_keys, dim, DIM: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dV(j) = Σ_i A(i, j) dO(i), for a tile of keys of a map."""
    image, head, keys = own_tile(n_keys, n_heads, KEYS)
    maps += image * map_image + head * map_head
    grad += image * grad_image + head * grad_head
    result = tl.zeros((KEYS, DIM), tl.float32)
    for start in range(0, n_queries, ROWS):
        rows = start + tl.arange(0, ROWS)
        a = load_map(maps, map_row, rows, keys, n_queries, n_keys)
        grads = load_rows(grad, rows, grad_token, n_queries, dim, DIM)
        result = tl.dot(tl.trans(a), grads, result, input_precision=PRECISION)
    store_rows(grad_v + image * v_image + head * v_head, result, keys, v_token, n_keys, dim, DIM)


def _launch(launch: Launcher, kernel: object, operands: tuple[Tensor, ...], maps: Tensor, dim: int, tile: str) -> None:
    """Over all tiles of all maps; `tile` says whether a program has rows or keys of its own."""
    images, heads, n_queries, n_keys = maps.shape
    tiles = cdiv(n_queries if tile == "ROWS" else n_keys, TILE[tile])
    launch(
        kernel,
        (images * heads * tiles, 1, 1),
        *(*operands, *(stride for operand in operands for stride in operand.stride()[:3])),
        *(heads, n_queries, n_keys, dim),
        DIM=padded(dim),
        PRECISION=product_precision(maps.dtype),
        **TILE,
    )


def empty_output(maps: Tensor, v: Tensor) -> Tensor:
    """(B, G, Nq, d), laid out as (B, Nq, G, d), unfilled."""
    images, heads, n_queries, _ = maps.shape
    return v.new_empty((images, n_queries, heads, v.shape[-1])).transpose(1, 2)


def output(launch: Launcher, maps: Tensor, v: Tensor) -> Tensor:
    """O = A V."""
    out = empty_output(maps, v)
    _launch(launch, aggregate_maps_kernel, (maps, v, out), maps, v.shape[-1], "ROWS")
    return out


def grad_maps(launch: Launcher, grad: Tensor, v: Tensor) -> Tensor:
    """dA = dO Vᵀ, with rows as `empty_maps` has them."""
    images, heads, n_queries, dim = grad.shape
    found = empty_maps(grad, images, heads, n_queries, v.shape[2])
    _launch(launch, aggregate_maps_grad_maps_kernel, (grad, v, found), found, dim, "ROWS")
    return found


def grad_values(launch: Launcher, grad: Tensor, maps: Tensor, v: Tensor) -> Tensor:
    """dV = Aᵀ dO, laid out as the values are."""
    found = torch.empty_like(v)
    _launch(launch, aggregate_maps_grad_values_kernel, (grad, maps, found), maps, v.shape[-1], "KEYS")
    return found
