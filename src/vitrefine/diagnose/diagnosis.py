"""`diagnose(model, images)`: all that can be measured of how a model attends, in one pass over some images."""

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from timm.utils.model import unwrap_model
from torch import Tensor, nn

from vitrefine.diagnose.broadcast import broadcast_scales
from vitrefine.diagnose.collect import split
from vitrefine.diagnose.kernels import KernelSpectra, kernel_spectra
from vitrefine.diagnose.offsets import Merging, offset_lengths
from vitrefine.diagnose.profile import Profile
from vitrefine.diagnose.queries import QueryMaps
from vitrefine.diagnose.similarity import SimilarityMatrix
from vitrefine.diagnose.watching import watching
from vitrefine.diagnose.words import findings
from vitrefine.errors import UserError
from vitrefine.surgery.selection import Layers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCH = 32  # of CKA in the Refiner paper
COLUMNS = ("model", "quantity", "unit", "number", "layer", "head", "mean", "low", "median", "high", "bound")


@dataclass(frozen=True)
class Diagnosis:
    """What was found; prints itself and plots itself, as does every part of it."""

    model: str
    images: int
    profiles: dict[str, Profile]
    similarity: SimilarityMatrix | None = None
    queries: QueryMaps | None = None
    kernels: KernelSpectra | None = None
    mergings: list[Merging] = field(default_factory=list)  # of the last batch

    def __getitem__(self, quantity: str) -> Profile:
        """A profile by its key: `diagnosis["entropy"]`."""
        if quantity not in self.profiles:
            raise UserError(f"{self.model} has no {quantity}; it has {', '.join(self.profiles)}")
        return self.profiles[quantity]

    @property
    def findings(self) -> list[str]:
        """What it means, in sentences; the most telling first."""
        return findings(self.profiles, self.similarity, self.images)

    def rows(self) -> Iterator[dict[str, Any]]:
        """All numbers, a row for each quantity, layer and head."""
        for profile in self.profiles.values():
            for row in profile.rows():
                yield {"model": self.model, **row}

    def to_csv(self) -> str:
        """All profiles as comma-separated values."""
        return rows_to_csv(self.rows())

    def to_json(self) -> dict[str, Any]:
        """Everything but pictures, as plain lists and dictionaries."""
        alike = self.similarity
        return {
            "model": self.model,
            "images": self.images,
            "findings": self.findings,
            "profiles": {key: [_plain(row) for row in profile.rows()] for key, profile in self.profiles.items()},
            "cka": None if alike is None else {"blocks": list(alike.names), "values": alike.values.tolist()},
        }

    def __str__(self) -> str:
        head = [f"{self.model}, {self.images} images", *(f"- {sentence}" for sentence in self.findings)]
        parts = [*self.profiles.values(), self.similarity, self.queries, self.kernels]
        return "\n\n".join(["\n".join(head), *(str(part) for part in parts if part is not None)])

    def plot(self) -> "Figure":
        """The means of all profiles, one plot each."""
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        columns = 3
        rows = -(-len(self.profiles) // columns)
        figure = Figure(figsize=(3.6 * columns, 2.6 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[len(self.profiles) :]:
            axes.set_axis_off()
        for axes, profile in zip(grid.flat, self.profiles.values(), strict=False):
            low, high = ([getattr(layer.whole, end) for layer in profile.layers] for end in ("low", "high"))
            axes.fill_between(profile.numbers, low, high, alpha=0.2, linewidth=0)
            axes.plot(profile.numbers, profile.means, marker="o", markersize=3)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set_title(profile.title, fontsize=8)
        return figure


def rows_to_csv(rows: Iterable[dict[str, Any]]) -> str:
    """Rows of diagnoses as comma-separated values."""
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def to_json_text(diagnoses: Iterable[Diagnosis], data: str) -> str:
    """Diagnoses on the images of a data set as one JSON document."""
    found = {"data": data, "diagnoses": [diagnosis.to_json() for diagnosis in diagnoses]}
    return json.dumps(found, indent=1, ensure_ascii=False)


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Without what the whole row shares; what is no number in Python is none in JSON."""
    kept = {key: value for key, value in row.items() if key not in ("quantity", "unit")}
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in kept.items()
    }


def _checked(batch: object) -> Tensor:
    if isinstance(batch, Tensor) and batch.ndim == 4 and len(batch):
        return batch
    what = f"a tensor of shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else f"a {type(batch).__name__}"
    raise UserError(f"a batch is {what}; give images alone, without labels, as (N, C, H, W), one at least")


def diagnose(
    model: nn.Module,
    images: Tensor | Iterable[Tensor],
    *,
    name: str | None = None,
    layers: Layers = "all",
    batch: int = BATCH,
) -> Diagnosis:
    """Measure how a model attends, on images.

    Args:
        model: Any model that attends; it is run in evaluation and left as it was.
        images: (N, C, H, W), or batches of them; as the model is to be given them.
        name: What to call the model; its class if None.
        layers: Which attentions, counted from 0.
        batch: Images at a time where they are not in batches; 32 is what the Refiner paper takes CKA of.
    """
    if batch < 1:
        raise UserError(f"batch={batch} is no number of images at a time; give 1 or more")
    inner = unwrap_model(model)
    like = next((p for p in inner.parameters() if p.is_floating_point()), torch.empty(0))
    with watching(model, layers) as watched:
        for part in split(images, batch) if isinstance(images, Tensor) else images:
            watched.run(_checked(part).to(like.device, like.dtype))
    attention, features = watched.attention, watched.features
    if not attention.images:
        raise UserError("there is no image to look at; give at least one")
    profiles = {**attention.profiles(), **features.profiles()}
    for profile in broadcast_scales(model) or ():
        profiles[profile.key] = profile
    if watched.moved[-1]:
        profiles["offset"] = offset_lengths([merging for found in watched.moved for merging in found])
    return Diagnosis(
        name or type(inner).__name__,
        attention.images,
        profiles,
        features.matrix(),
        attention.query_maps(),
        kernel_spectra(model),
        watched.moved[-1],
    )
