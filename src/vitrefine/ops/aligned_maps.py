"""Attention maps that exist as a whole, for blocks that use them again."""

from torch import Tensor

ROW = 16  # values, to a multiple of which rows are padded


def empty_maps(like: Tensor, batch: int, n_maps: int, n_queries: int, n_keys: int) -> Tensor:
    """(B, G, Nq, Nk), uninitialised, with a gap after each row so that the next starts at a multiple of 32 bytes.

    Matrix products want rows that start there; at N = 197 every second row would not even start at a word.
    """
    return like.new_empty((batch, n_maps, n_queries, -(-n_keys // ROW) * ROW))[..., :n_keys]


def has_gaps(maps: Tensor) -> bool:
    """Whether rows are apart as in `empty_maps`."""
    row = maps.stride(-2)
    return maps.stride(-1) == 1 and row % ROW == 0 and 0 < row - maps.shape[-1] < ROW
