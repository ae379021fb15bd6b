"""Where deformable token merging reads: the length of its offsets, and the points behind one output token.

Each merging reads k² taps for an output token, each at its place in the kernel plus a learned offset. Followed back
through three mergings of 2×2 that makes the 4³ points of LIT's Figure 2.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from timm.utils.model import unwrap_model
from torch import Tensor, nn

from vitrefine.diagnose.profile import Layer, Profile
from vitrefine.errors import UserError
from vitrefine.layers.token_merging import OffsetConvolution

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Merging:
    """The offsets of one merging: (B, 2·taps, h, w) as dy, dx of each tap, and how its taps lie."""

    name: str
    offsets: Tensor
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    reads: tuple[int, int]  # height and width of the map that it reads

    def lengths(self) -> Tensor:
        """Of each tap's offsets, in tokens of the map that is read: (taps, B·h·w)."""
        dy, dx = self.offsets.float().unflatten(1, (-1, 2)).unbind(dim=2)
        return torch.hypot(dy, dx).transpose(0, 1).flatten(1)


@dataclass
class Mergings:
    """The mergings of a model in the order in which they ran."""

    found: list[Merging] = field(default_factory=list)


@contextmanager
def capture_offsets(model: nn.Module) -> Iterator[Mergings]:
    """Write down the offsets of every deformable merging while the context lasts."""
    mergings = Mergings()
    hooks = []
    for name, module in unwrap_model(model).named_modules():
        if isinstance(module, OffsetConvolution):

            def note(conv: Any, args: Any, output: Tensor, name: str = name, own: nn.Module = module) -> None:
                if conv is not own:
                    return  # a copy, made to find something out
                geometry: tuple[Any, ...] = (conv.kernel_size, conv.stride, conv.padding, tuple(args[0].shape[-2:]))
                mergings.found.append(Merging(name.removesuffix(".offset"), output.detach(), *geometry))

            hooks.append(module.register_forward_hook(note))
    try:
        with torch.compiler.set_stance("force_eager"):
            yield mergings
    finally:
        for hook in hooks:
            hook.remove()


def offset_lengths(mergings: Sequence[Merging]) -> Profile:
    """How far taps are moved, merging by merging; the taps are its heads."""
    lengths: dict[str, list[Tensor]] = {}
    for merging in mergings:
        lengths.setdefault(merging.name, []).append(merging.lengths().cpu())
    layers = [Layer.of(name, torch.cat(values, dim=1)) for name, values in lengths.items()]
    return Profile("offset", "length of the offsets of token merging", "tokens", tuple(layers))


def sampling_points(mergings: Sequence[Merging], token: tuple[int, int], image: int = 0) -> Tensor:
    """The points that an output token of the last merging is made of: (taps of all mergings, 2) as (y, x).

    Args:
        mergings: In the order in which they ran, each reading what the one before put out.
        token: Row and column in the map that the last one puts out.
        image: Which one of the batch.

    Returns:
        Coordinates in the map that the first merging reads, its first token at (0, 0). A point between tokens of a map
        takes the offsets of the nearest.
    """
    points = torch.tensor([token], dtype=torch.float64)
    for merging in reversed(mergings):
        offsets = merging.offsets[image].double().cpu()
        height, width = offsets.shape[-2:]
        if merging is mergings[-1] and not (0 <= token[0] < height and 0 <= token[1] < width):
            raise UserError(f"token {token} is not in the map of {height}×{width} that {merging.name} puts out")
        near = points.round().long()
        rows, columns = near[:, 0].clamp(0, height - 1), near[:, 1].clamp(0, width - 1)
        moved = offsets[:, rows, columns].unflatten(0, (-1, 2)).permute(2, 0, 1)  # (points, taps, 2)
        taps = torch.cartesian_prod(*(torch.arange(k, dtype=torch.float64) for k in merging.kernel))
        stride, padding = (torch.tensor(pair, dtype=torch.float64) for pair in (merging.stride, merging.padding))
        points = (points * stride - padding)[:, None] + taps + moved
        points = points.flatten(0, 1)
    return points


@dataclass(frozen=True)
class SamplingPicture:
    """The points behind some output tokens on an image; prints itself and plots itself."""

    image: Tensor  # (H, W, 3), from 0 to 1
    points: Sequence[Tensor]  # of each token (points, 2) as (y, x), in pixels

    def __str__(self) -> str:
        spread = [f"{(points.amax(dim=0) - points.amin(dim=0)).tolist()}" for points in self.points]
        return f"{len(self.points)} tokens of {len(self.points[0])} points, over {', '.join(spread)} pixels"

    def plot(self) -> "Figure":
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4, 4), layout="constrained")
        axes = figure.add_subplot()
        axes.imshow(self.image.numpy())
        for points in self.points:
            axes.scatter(points[:, 1], points[:, 0], s=6)
        axes.set_xlim(-0.5, self.image.shape[1] - 0.5)
        axes.set_ylim(self.image.shape[0] - 0.5, -0.5)
        axes.set_axis_off()
        return figure


def sampling_picture(
    mergings: Sequence[Merging], picture: Tensor, tokens: Sequence[tuple[int, int]], image: int = 0
) -> SamplingPicture:
    """The points behind output tokens, in pixels of the picture (3, H, W), whose values are from 0 to 1."""
    (height, width), (down, across) = picture.shape[-2:], mergings[0].reads
    scale = torch.tensor([height / down, width / across], dtype=torch.float64)
    points = [(sampling_points(mergings, token, image) + 0.5) * scale - 0.5 for token in tokens]
    return SamplingPicture(picture.permute(1, 2, 0).clamp(0, 1).cpu(), points)
