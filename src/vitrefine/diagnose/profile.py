"""One quantity layer by layer and head by head: what nearly every measure of a model comes to."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOW, MIDDLE, HIGH = 0.15, 0.5, 0.85  # the percentiles of the CB paper, and the middle
MOST_VALUES = 1 << 24  # that PyTorch takes percentiles of


@dataclass(frozen=True)
class Summary:
    """The mean of some values, and their 15th, 50th and 85th percentiles."""

    mean: float
    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Tensor) -> "Summary":
        """Of all values that are numbers."""
        return cls.of_rows(values.reshape(1, -1))[0]

    @classmethod
    def of_rows(cls, values: Tensor) -> list["Summary"]:
        """Of each row of (rows, values), on the device where they are."""
        if not values.numel():
            return [cls(*[math.nan] * 4) for _ in values]
        values = (values.cpu() if values.device.type == "mps" else values).double()  # which has no double precision
        some = values[:, :: -(-values.shape[1] // MOST_VALUES)]
        ends = torch.nanquantile(some, values.new_tensor([LOW, MIDDLE, HIGH]), dim=1)
        return [cls(*row) for row in torch.cat([values.nanmean(dim=1)[None], ends]).T.tolist()]


@dataclass(frozen=True)
class Layer:
    """A layer: all of its values together, and those of each head."""

    name: str
    whole: Summary
    heads: tuple[Summary, ...] = ()
    bound: float | None = None  # the most that a value can be

    @classmethod
    def of(cls, name: str, values: Tensor, bound: float | None = None) -> "Layer":
        """Of (heads, values)."""
        return cls(name, Summary.of(values), tuple(Summary.of_rows(values)), bound)

    @property
    def share(self) -> float | None:
        """The mean as a share of the bound."""
        return self.whole.mean / self.bound if self.bound else None


@dataclass(frozen=True)
class Profile:
    """A quantity over the layers of a model; prints itself and plots itself."""

    key: str
    title: str
    unit: str
    layers: tuple[Layer, ...]
    places: tuple[int, ...] = ()  # of these among all layers of the model, from 0, where some are left out

    @property
    def numbers(self) -> list[int]:
        """Of the layers, as people count them: from 1."""
        return [place + 1 for place in self.places or range(len(self.layers))]

    @property
    def means(self) -> list[float]:
        return [layer.whole.mean for layer in self.layers]

    @property
    def mean(self) -> float:
        """Over layers."""
        return sum(self.means) / len(self.means)

    @property
    def shares(self) -> list[float] | None:
        """Of each layer's bound; None where there is no bound."""
        shares = [layer.share for layer in self.layers]
        return [share for share in shares if share is not None] if None not in shares and shares else None

    def rows(self) -> Iterator[dict[str, Any]]:
        """A row for each layer and for each of its heads."""
        for number, layer in zip(self.numbers, self.layers, strict=True):
            whole = {"quantity": self.key, "unit": self.unit, "number": number - 1, "layer": layer.name}
            for head, summary in ("all", layer.whole), *enumerate(layer.heads):
                yield {**whole, "head": head, **vars(summary), "bound": layer.bound}

    def __str__(self) -> str:
        width = max(len("layer"), *(len(layer.name) for layer in self.layers))
        bounded = any(layer.bound is not None for layer in self.layers)
        head = f"{'layer':<{width}} {'mean':>9} {'15 %':>9} {'50 %':>9} {'85 %':>9}" + " " * 3 + "bound" * bounded
        lines = [f"{self.title}, {self.unit}" if self.unit else self.title, head]
        for layer in self.layers:
            numbers = "".join(f" {value:9.4f}" for value in vars(layer.whole).values())
            bound = f" {layer.bound:8.4f} ({layer.share:4.0%})" if layer.bound is not None else ""
            lines.append(f"{layer.name:<{width}}{numbers}{bound}")
        return "\n".join(lines)

    def plot(self) -> "Figure":
        """Means by layer, the band from the 15th to the 85th percentile, a dot for each head, and the bound."""
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(6.4, 3.4), layout="constrained")
        axes = figure.add_subplot()
        numbers = self.numbers
        low, high = ([getattr(layer.whole, end) for layer in self.layers] for end in ("low", "high"))
        axes.fill_between(numbers, low, high, alpha=0.2, linewidth=0, label="15th to 85th percentile")
        axes.plot(numbers, self.means, marker="o", label="mean")
        dots = [
            (number, head.mean)
            for number, layer in zip(numbers, self.layers, strict=True)
            for head in layer.heads
            if len(layer.heads) > 1
        ]
        if dots:
            across, up = zip(*dots, strict=True)
            axes.scatter(across, up, s=9, alpha=0.6, color="C1", zorder=3, label="heads")
        bounds = [layer.bound for layer in self.layers]
        if None not in bounds:
            axes.plot(numbers, bounds, linestyle="--", color="grey", label="bound")  # type: ignore[arg-type]
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("layer")
        axes.set_ylabel(self.unit or self.key)
        axes.set_title(self.title)
        axes.legend(frameon=False, fontsize="small")
        return figure


def single(key: str, title: str, unit: str, names: Sequence[str], values: Sequence[Tensor]) -> Profile:
    """A profile of layers without heads."""
    layers = [Layer(name, Summary.of(value)) for name, value in zip(names, values, strict=True)]
    return Profile(key, title, unit, tuple(layers))
