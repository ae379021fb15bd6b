"""Where the heads are in the tensors that a model attends with.

Nearly all models write (B, heads, queries, keys). Windowed ones write (B, windows, heads, …) or (B, heads, windows, …);
some fold heads into the batch, (B·heads, …); and some have a single head and no axis for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

HEAD_COUNT = ("num_heads", "num_attention_heads", "heads", "n_heads", "nhead")


@dataclass(frozen=True)
class HeadAxis:
    """The axis of the heads, counted from the end of a map's shape; or folded into axis 0; or none at all."""

    axis: int | None = -3
    folded: int = 0  # heads that axis 0 holds, times the batch

    def plain(self, ndim: int) -> bool:
        """Whether tensors of this many axes are (B, heads, …, …) as they are."""
        return ndim == 4 and self.axis == -3

    def split(self, x: Tensor) -> Tensor:
        """The model's (…) as (B, heads, rows, columns)."""
        if self.plain(x.ndim):
            return x
        if self.folded:
            return x.unflatten(0, (-1, self.folded)).movedim(1, -3).flatten(0, -4)
        if self.axis is None:
            return x.flatten(0, -3).unsqueeze(1)
        return x.movedim(self.axis, -3).flatten(0, -4)

    def join(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """(B, heads, rows, columns) as the model has it, whose leading axes `shape` gives."""
        if self.plain(len(shape)):
            return x
        if self.folded:
            x = x.unflatten(0, (shape[0] // self.folded, *shape[1:-2])).movedim(-3, 1)
            return x.flatten(0, 1)
        if self.axis is None:
            return x.squeeze(1).unflatten(0, tuple(shape[:-2]))
        lead = list(shape[:-2])
        lead.pop(self.axis + 2)
        return x.unflatten(0, lead).movedim(-3, self.axis)


def head_axes(module: nn.Module, shape: tuple[int, ...], batch: int) -> list[tuple[HeadAxis, int]]:
    """Which axis of maps of this shape holds the heads, and how many there are; the likeliest reading first.

    Args:
        module: What attends; most say how many heads they have.
        shape: Of the maps.
        batch: Images, or windows, in what the module is given.
    """
    stated = next((getattr(module, name) for name in HEAD_COUNT if isinstance(getattr(module, name, None), int)), None)
    lead = shape[:-2]
    if stated is not None:
        beside_maps, after_batch = -1, 1 - len(lead)
        found = [HeadAxis(axis - 2) for axis in (beside_maps, after_batch) if len(lead) > 1 and lead[axis] == stated]
        if found:
            return [(axis, stated) for axis in dict.fromkeys(found)]
        if lead[0] % (batch * stated) == 0:
            return [(HeadAxis(None, folded=stated), stated)]
    return [(HeadAxis(), shape[-3])] if len(shape) >= 4 else [(HeadAxis(None), 1)]
