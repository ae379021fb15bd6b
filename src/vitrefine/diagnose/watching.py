"""A model under watch: batch after batch runs through it, and collectors learn from what happens inside.

On a GPU nothing in here waits for the device, and nothing leaves it before somebody asks what was found.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vitrefine.diagnose.attention import has_class_token, prefix_tokens_of
from vitrefine.diagnose.capture import capture
from vitrefine.diagnose.collect import AttentionCollector, FeatureCollector
from vitrefine.diagnose.evaluation import evaluating
from vitrefine.diagnose.features import capture_features
from vitrefine.diagnose.offsets import Merging, Mergings, capture_offsets
from vitrefine.surgery.selection import Layers


@dataclass
class Watched:
    """A model that is being watched: what is known of it so far."""

    model: nn.Module
    attention: AttentionCollector
    features: FeatureCollector
    mergings: Mergings
    moved: list[list[Merging]] = field(default_factory=list)  # a batch each

    @torch.no_grad()
    def run(self, images: Tensor) -> None:
        """Look at a batch."""
        self.attention.begin(images)
        self.features.begin(images)
        self.model(images)
        self.attention.finish()
        self.features.finish()
        self.moved.append(self.mergings.found)
        self.mergings.found = []


@contextmanager
def watching(model: nn.Module, layers: Layers = "all") -> Iterator[Watched]:
    """A model in evaluation that `diagnose` can learn from, and that is left as it was."""
    attention = AttentionCollector(prefix_tokens_of(model), has_class_token(model))
    features = FeatureCollector()
    with (
        evaluating(model),
        capture(model, layers, on_call=attention.on_call),
        capture_features(model, features.on_tokens),
        capture_offsets(model) as mergings,
    ):
        yield Watched(model, attention, features, mergings)
