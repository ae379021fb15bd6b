"""The refiner of attention maps, paper form: expansion, distributed local attention, reduction (Refiner, Fig. 3).

Every step is linear, so a `Refiner` is no more than the weights of a `Mix`; `ops.refined_attention` applies them.
It starts as the identity, so a model that gets one gives the outputs it gave before.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrefine.errors import UserError, check_choice
from vitrefine.ops.choice import no_autocast
from vitrefine.ops.refined_attention import Mix, refine_maps

CONSTRAINTS = ("none", "spatial", "row+col")


class Refiner(nn.Module):
    """Weights that refine the maps of `num_heads` heads.

    Args:
        num_heads: Maps that come in.
        expansion: Ratio r of maps in between; 1 is talking heads, 0 leaves the heads unmixed (DLA alone).
        kernel_size: Side of the local kernels; 1 leaves DLA out.
        reduction: Whether the maps return to `num_heads`; without it `out_heads` is r times as many.
        constraint: Where a local kernel may reach (Table 4): `none`, any neighbour in (query, key); `spatial`,
            neighbouring patches of the image, for one query; `row+col`, the same row or the same column of the map.
    """

    expand: nn.Parameter | None
    local: nn.Parameter | None
    row: nn.Parameter | None
    column: nn.Parameter | None
    reduce: nn.Parameter | None

    def __init__(
        self,
        num_heads: int,
        *,
        expansion: float = 3,
        kernel_size: int = 3,
        reduction: bool = True,
        constraint: str = "none",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice("constraint", constraint, CONSTRAINTS)
        if kernel_size < 1:
            raise UserError(f"kernel_size={kernel_size} is too small; 1 leaves the convolution out, 3 is the paper's")
        hidden = round(num_heads * expansion) if expansion else num_heads
        if hidden < num_heads or hidden % num_heads:
            raise UserError(f"expansion={expansion} does not give each of {num_heads} heads the same number of maps")
        if not expansion and kernel_size == 1:
            raise UserError("this refiner would do nothing: give it an expansion or a kernel_size above 1")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads, self.hidden, self.kernel_size, self.constraint = num_heads, hidden, kernel_size, constraint
        self.out_heads = num_heads if reduction else hidden
        for name in ("expand", "local", "row", "column", "reduce"):
            self.register_parameter(name, None)
        if expansion:
            self.expand = nn.Parameter(torch.empty(hidden, num_heads, **factory))
            # Talking heads (r = 1, no convolution) is one square matrix: a second one would add nothing.
            if reduction and (hidden > num_heads or kernel_size > 1):
                self.reduce = nn.Parameter(torch.empty(num_heads, hidden, **factory))
        if kernel_size > 1 and constraint == "row+col":
            self.row = nn.Parameter(torch.empty(hidden, kernel_size, **factory))
            self.column = nn.Parameter(torch.empty(hidden, kernel_size, **factory))
        elif kernel_size > 1:
            self.local = nn.Parameter(torch.empty(hidden, kernel_size, kernel_size, **factory))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start as the identity.

        Maps that are copies of one head would get equal gradients for ever, so the copies are stirred a little and
        the reduction is the inverse of exactly that.
        """
        if self.expand is not None:
            wide = torch.promote_types(self.expand.dtype, torch.float32)  # in half precision nothing is solved
            identity = torch.eye(self.num_heads, device=self.expand.device, dtype=wide)
            expand = identity.repeat_interleave(self.hidden // self.num_heads, dim=0)
            if self.reduce is not None:
                if self.hidden > self.num_heads:
                    expand = expand + 0.1 * torch.randn_like(expand)
                with no_autocast(expand):
                    self.reduce.copy_(torch.linalg.solve(expand.T @ expand, expand.T))
            self.expand.copy_(expand)
        centre = (self.kernel_size - 1) // 2
        if self.local is not None:
            self.local.zero_()
            self.local[:, centre, centre] = 1
        if self.row is not None and self.column is not None:
            self.row.zero_()
            self.column.zero_()
            self.row[:, centre] = 1

    def mix(self) -> Mix:
        """The weights as the op takes them."""
        if self.row is None or self.column is None:
            return Mix(self.expand, self.local, self.reduce)
        before, after = (self.kernel_size - 1) // 2, self.kernel_size // 2
        row = F.pad(self.row[:, None, :], (0, 0, before, after))
        column = F.pad(self.column[:, :, None], (before, after))
        return Mix(self.expand, row + column, self.reduce)

    def grid(self, grid: tuple[int, int] | None) -> tuple[int, int] | None:
        """The image grid that the op needs: none, unless the kernel is to follow the image."""
        if self.constraint != "spatial":
            return None
        if grid is None:
            raise UserError("a refiner with constraint=spatial needs the height and width of the grid of patches")
        return grid

    def forward(self, maps: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """Refine (B, H, N, N) maps."""
        return refine_maps(maps, self.mix(), grid=self.grid(grid))

    def extra_repr(self) -> str:
        return f"{self.num_heads} -> {self.hidden} -> {self.out_heads}, kernel_size={self.kernel_size}"


def distributed_local_attention(num_heads: int, kernel_size: int = 3, **options: object) -> Refiner:
    """DLA alone: each map convolved by its own kernel (Refiner Table 2)."""
    return Refiner(num_heads, expansion=0, kernel_size=kernel_size, **options)  # type: ignore[arg-type]


def attention_expansion(num_heads: int, expansion: float = 3, **options: object) -> Refiner:
    """Expansion (and reduction) alone, no convolution (Refiner Table 1)."""
    return Refiner(num_heads, expansion=expansion, kernel_size=1, **options)  # type: ignore[arg-type]


def talking_heads(num_heads: int, **options: object) -> Refiner:
    """One square matrix across heads after the softmax: expansion with r = 1."""
    return Refiner(num_heads, expansion=1, kernel_size=1, **options)  # type: ignore[arg-type]
