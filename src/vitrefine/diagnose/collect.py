"""Gathering what a model does while it runs on batch after batch: numbers only, no maps and no features are kept."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vitrefine.diagnose import cka
from vitrefine.diagnose.attention import over_image
from vitrefine.diagnose.call import Call
from vitrefine.diagnose.capture import Attention
from vitrefine.diagnose.grid import TokenGrid
from vitrefine.diagnose.measures import token_similarity
from vitrefine.diagnose.profile import Layer, Profile, single
from vitrefine.diagnose.queries import QueryMaps, middle, query_rows
from vitrefine.diagnose.similarity import SimilarityMatrix
from vitrefine.diagnose.streamed import call_statistics, off_diagonal, refined_similarity

MOST_ROWS = 1 << 13  # of a head and a batch that percentiles are taken of; means are of all up to here

TITLES = {
    "entropy": ("entropy of attention", "nats"),
    "class_entropy": ("entropy of the class token's attention", "nats"),
    "distance": ("relative distance of attention", "of the image's sides"),
    "gradient": ("gradient of the softmax, nuclear norm for λ = 1", ""),
    "head_similarity": ("similarity of heads", "cosine"),
    "refined_head_similarity": ("similarity of heads after refinement", "cosine"),
}


@dataclass
class AttentionCollector:
    """Statistics of attention by quantity and layer."""

    prefix_tokens: int
    batch: int = 0
    size: tuple[int, int] = (1, 1)
    images: int = 0
    values: dict[str, dict[str, list[Tensor]]] = field(default_factory=dict)  # (heads, values) a batch
    keys: dict[str, int] = field(default_factory=dict)
    queried: dict[str, Tensor] = field(default_factory=dict)
    placed: dict[TokenGrid, Tensor] = field(default_factory=dict)  # coordinates on the device of the maps

    def begin(self, images: Tensor) -> None:
        self.batch, self.size = len(images), (images.shape[-2], images.shape[-1])
        self.images += len(images)

    def on_call(self, attention: Attention, call: Call) -> None:
        name, (_, _, queries, keys) = attention.name, call.shape
        grid = over_image(call, self.batch, self.size, self.prefix_tokens) if queries == keys else None
        found = call_statistics(call, None if grid is None else self._coordinates(grid, call))
        self._keep("head_similarity", name, off_diagonal(found.similarity).T)
        if call.is_refined:
            self._keep("refined_head_similarity", name, off_diagonal(refined_similarity(call)).T)
        if not call.proper:
            return
        self.keys[name] = keys
        self._keep("entropy", name, found.entropy.transpose(0, 1).flatten(1))
        self._keep("gradient", name, 1 - found.squares.transpose(0, 1).flatten(1))
        if grid is None:
            return
        if found.distance is not None:
            self._keep("distance", name, found.distance[:, :, grid.prefix :].transpose(0, 1).flatten(1))
        if grid.prefix:
            self._keep("class_entropy", name, found.entropy[:, :, 0].T)
        rows = query_rows(call, grid, middle(grid))
        self.queried[name] = self.queried.get(name, torch.zeros_like(rows)) + rows

    def _coordinates(self, grid: TokenGrid, call: Call) -> Tensor:
        if grid not in self.placed:
            tensor = call.q if call.written is None else call.written
            assert tensor is not None
            self.placed[grid] = grid.coordinates().to(tensor.device)
        return self.placed[grid]

    def _keep(self, key: str, name: str, values: Tensor) -> None:
        step = -(-values.shape[1] // MOST_ROWS)
        self.values.setdefault(key, {}).setdefault(name, []).append(values[:, ::step])

    def profiles(self) -> dict[str, Profile]:
        """What was found, by quantity."""
        return {key: self._profile(key) for key in TITLES if key in self.values}

    def _profile(self, key: str) -> Profile:
        layers = [
            Layer.of(name, torch.cat(values, dim=1).cpu(), self._bound(key, name))
            for name, values in self.values[key].items()
        ]
        return Profile(key, *TITLES[key], tuple(layers))

    def _bound(self, key: str, name: str) -> float | None:
        if key in ("entropy", "class_entropy"):
            return math.log(self.keys[name])
        return 1 - 1 / self.keys[name] if key == "gradient" else None

    def query_maps(self) -> QueryMaps | None:
        """The attention of the middle patch; None where no layer sees the whole image."""
        if not self.queried:
            return None
        maps = [(total / self.images).cpu() for total in self.queried.values()]
        return QueryMaps("middle patch", list(self.queried), maps, self.images)


@dataclass
class FeatureCollector:
    """Over-smoothing, feature evolution and similarity of the tokens between blocks."""

    batch: int = 0
    smooth: dict[str, list[Tensor]] = field(default_factory=dict)
    evolutions: list[Tensor] = field(default_factory=list)
    alike: cka.MinibatchCka = field(default_factory=cka.MinibatchCka)
    grams: dict[str, Tensor] = field(default_factory=dict)

    def begin(self, images: Tensor) -> None:
        self.batch = len(images)
        self.grams = {}

    def on_tokens(self, name: str, tokens: Tensor) -> None:
        if tokens.shape[1] > 1:
            self.smooth.setdefault(name, []).append(token_similarity(tokens))
        if len(tokens) % self.batch == 0:  # windows of one image lie next to each other
            self.grams[name] = cka.gram(tokens.reshape(self.batch, -1))

    def finish(self) -> None:
        """End a batch; CKA of fewer images than an unbiased estimate needs is left out."""
        if self.batch >= cka.LEAST_IMAGES and len(self.grams) > 1:
            grams = list(self.grams.values())
            self.evolutions.append(cka.evolution(grams[1:]))
            self.alike.update(grams)

    def profiles(self) -> dict[str, Profile]:
        """What was found, by quantity."""
        smooth = [torch.cat(values).cpu() for values in self.smooth.values()]
        found = {
            "token_similarity": single("token_similarity", "similarity of tokens", "cosine", [*self.smooth], smooth)
        }
        if self.evolutions:
            blocks = list(self.grams)[1:]
            each = torch.stack(self.evolutions, dim=1).cpu()
            found["evolution"] = single("evolution", "feature evolution", "F", blocks, list(each))
        return found

    def matrix(self) -> SimilarityMatrix | None:
        if not self.alike.batches:
            return None
        return SimilarityMatrix(list(self.grams), self.alike.compute().cpu())


def split(images: Tensor, batch: int) -> Sequence[Tensor]:
    """Batches; a last one that is too small for similarities joins the one before."""
    parts = list(images.split(batch))
    if len(parts) > 1 and len(parts[-1]) < cka.LEAST_IMAGES:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts
