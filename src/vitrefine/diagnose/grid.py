"""Where the tokens of an attention are in the image: how many come before the patches, and the grid of the rest."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrefine.surgery.maps import read_maps

MOST_PREFIX_TOKENS = 8  # class, distillation and register tokens
LEAST_PATCHES = 4


@dataclass(frozen=True)
class TokenGrid:
    """`prefix` tokens that have no place in the image, then patches row by row."""

    prefix: int
    height: int
    width: int

    def coordinates(self) -> Tensor:
        """The middle of each patch, (N, 2) as (y, x) from 0 to 1; NaN for tokens without a place."""
        down = (torch.arange(self.height) + 0.5) / self.height
        across = (torch.arange(self.width) + 0.5) / self.width
        patches = torch.cartesian_prod(down, across)
        return torch.cat([torch.full((self.prefix, 2), torch.nan), patches])


@functools.cache
def token_grid(tokens: int, size: tuple[int, int], prefix_tokens: int = 0) -> TokenGrid | None:
    """How `tokens` tokens cover an image of this size; None where they make no map of it.

    Args:
        tokens: Keys of the attention.
        size: Height and width of the image, of which only the ratio counts.
        prefix_tokens: How many the model says come first; other numbers are tried after that one.
    """
    for prefix in (prefix_tokens, *range(MOST_PREFIX_TOKENS)):
        for grid in read_maps((1, tokens - prefix, 1), size) if tokens - prefix >= LEAST_PATCHES else ():
            if abs(grid.height / grid.width - size[0] / size[1]) < 1e-6 or grid.height == grid.width:
                return TokenGrid(prefix, grid.height, grid.width)
    return None
