"""Gathering what a model does while it runs on batch after batch: numbers only, no maps and no features are kept."""

import math
from collections import Counter
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
from vitrefine.diagnose.queries import QueryMaps, middle
from vitrefine.diagnose.similarity import SimilarityMatrix
from vitrefine.diagnose.streamed import call_statistics, off_diagonal, refined_similarity
from vitrefine.errors import UserError
from vitrefine.ops.attention_statistics import AttentionStatistics
from vitrefine.ops.token_statistics import centred_gram

MOST_ROWS = 1 << 13  # of a head and a batch that means and percentiles are taken of
QUERY = "query"

TITLES = {
    "entropy": ("entropy of attention", "nats"),
    "class_entropy": ("entropy of the class token's attention", "nats"),
    "distance": ("relative distance of attention", "of the image's sides"),
    "gradient": ("gradient of the softmax, nuclear norm for λ = 1", ""),
    "head_similarity": ("similarity of heads", "cosine"),
    "refined_head_similarity": ("similarity of heads after refinement", "cosine"),
}


@dataclass(frozen=True)
class Seen:
    """What was found of one call."""

    name: str
    found: AttentionStatistics
    refined: Tensor | None  # similarity of heads
    keys: int
    grid: TokenGrid | None
    proper: bool

    @property
    def kind(self) -> tuple[object, ...]:
        """Calls of one kind can be worked on together."""
        refined = None if self.refined is None else self.refined.shape
        return self.found.entropy.device, self.found.entropy.shape, refined, self.keys, self.grid, self.proper


@dataclass
class AttentionCollector:
    """Statistics of attention by quantity and layer.

    Small steps take a GPU longer than they ought to: what can wait is done when a batch ends, for many layers at once.
    """

    prefix_tokens: int
    class_token: bool
    batch: int = 0
    size: tuple[int, int] = (1, 1)
    images: int = 0
    seen: list[Seen] = field(default_factory=list)  # in this batch
    values: dict[str, dict[str, list[Tensor]]] = field(default_factory=dict)  # of `quantities`, by batch
    keys: dict[str, int] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)  # of layers in the model
    looks: Counter[str] = field(default_factory=Counter)  # of the query: for each image one, or more if a layer repeats
    placed: dict[tuple[TokenGrid, torch.device], Tensor] = field(default_factory=dict)  # coordinates

    def begin(self, images: Tensor) -> None:
        size = images.shape[-2], images.shape[-1]
        if self.images and size != self.size:
            one, other = ("×".join(map(str, each)) for each in (self.size, size))
            raise UserError(f"there are images of {one} and of {other}; give images of one size")
        self.batch, self.size = len(images), size
        self.images += len(images)

    def on_call(self, attention: Attention, call: Call) -> None:
        _, _, queries, keys = call.shape
        grid = over_image(call, self.batch, self.size, self.prefix_tokens) if queries == keys and call.proper else None
        places = None if grid is None else self._coordinates(grid, call)
        found = call_statistics(call, places, None if grid is None else middle(grid))
        refined = refined_similarity(call) if call.is_refined else None
        self.places[attention.name] = attention.number
        self.seen.append(Seen(attention.name, found, refined, keys, grid, call.proper))

    def _coordinates(self, grid: TokenGrid, call: Call) -> Tensor:
        tensor = call.q if call.written is None else call.written
        assert tensor is not None
        place = grid, tensor.device
        if place not in self.placed:
            self.placed[place] = grid.coordinates().to(tensor.device)
        return self.placed[place]

    def finish(self) -> None:
        """End a batch."""
        kinds: dict[tuple[object, ...], list[Seen]] = {}
        for seen in self.seen:
            kinds.setdefault(seen.kind, []).append(seen)
        found = {kind: iter(quantities(alike)) for kind, alike in kinds.items()}
        for seen in self.seen:
            if seen.proper:
                self.keys[seen.name] = seen.keys
                self.looks[seen.name] += self.batch
            for key, values in next(found[seen.kind]).items():
                if key == "class_entropy" and not self.class_token:
                    continue  # that of a register
                self.values.setdefault(key, {}).setdefault(seen.name, []).append(values)
        self.seen.clear()

    def profiles(self) -> dict[str, Profile]:
        """What was found, by quantity."""
        return {key: self._profile(key) for key in TITLES if key in self.values}

    def _profile(self, key: str) -> Profile:
        layers = [
            Layer.of(name, torch.cat(values, dim=1), self._bound(key, name))
            for name, values in self.values[key].items()
        ]
        return Profile(key, *TITLES[key], tuple(layers), tuple(self.places[layer.name] for layer in layers))

    def _bound(self, key: str, name: str) -> float | None:
        if key in ("entropy", "class_entropy"):
            return math.log(self.keys[name])
        return 1 - 1 / self.keys[name] if key == "gradient" else None

    def query_maps(self) -> QueryMaps | None:
        """The attention of the middle patch; None where no layer sees the whole image."""
        rows = self.values.get(QUERY)
        if not rows:
            return None
        maps = [(torch.stack(sums).sum(dim=0) / self.looks[name]).cpu() for name, sums in rows.items()]
        return QueryMaps("middle patch", list(rows), maps, self.images, [self.places[name] + 1 for name in rows])


def quantities(seen: Sequence[Seen]) -> list[dict[str, Tensor]]:
    """Of each of some calls of one kind (heads, values) by quantity; of the query (heads, h, w), summed over images."""
    first = seen[0]
    found = {"head_similarity": off_diagonal(torch.stack([call.found.similarity for call in seen])).mT}
    if first.refined is not None:
        refined = [call.refined for call in seen if call.refined is not None]
        found["refined_head_similarity"] = off_diagonal(torch.stack(refined)).mT
    if first.proper and first.keys > 1:  # a single key has all attention, whatever a layer has learned
        entropy = torch.stack([call.found.entropy for call in seen]).transpose(1, 2)  # (calls, heads, images, queries)
        squares = torch.stack([call.found.squares for call in seen]).transpose(1, 2)
        found["entropy"], found["gradient"] = entropy.flatten(2), 1 - squares.flatten(2)
        if first.grid is not None:
            prefix, sides = first.grid.prefix, (first.grid.height, first.grid.width)
            distance = [call.found.distance for call in seen if call.found.distance is not None]
            found["distance"] = torch.stack(distance)[..., prefix:].transpose(1, 2).flatten(2)
            rows = [call.found.row for call in seen if call.found.row is not None]
            found[QUERY] = torch.stack(rows).sum(dim=1)[..., prefix:].unflatten(-1, sides)
            if prefix:
                found["class_entropy"] = entropy[..., 0]
    kept = {key: values if key == QUERY else _thinned(values) for key, values in found.items()}
    return [{key: values[number] for key, values in kept.items()} for number in range(len(seen))]


def _thinned(values: Tensor) -> Tensor:
    """As many of the values of a head as are kept, spread over all: not always the same columns of an image."""
    count = values.shape[-1]
    step = -(-count // MOST_ROWS)
    while math.gcd(step, count) > 1:
        step += 1
    return values if step == 1 else values[..., ::step].clone()


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
            self.grams[name] = centred_gram(tokens.reshape(self.batch, -1))

    def finish(self) -> None:
        """End a batch; CKA of fewer images than an unbiased estimate needs is left out."""
        if self.batch >= cka.LEAST_IMAGES and len(self.grams) > 1:
            grams = list(self.grams.values())
            self.evolutions.append(cka.evolution(grams[1:]))
            self.alike.update(grams)

    def profiles(self) -> dict[str, Profile]:
        """What was found, by quantity."""
        smooth = [torch.cat(values) for values in self.smooth.values()]
        found = {
            "token_similarity": single("token_similarity", "similarity of tokens", "cosine", [*self.smooth], smooth)
        }
        if self.evolutions:
            blocks = list(self.grams)[1:]
            each = torch.stack(self.evolutions, dim=1)
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
