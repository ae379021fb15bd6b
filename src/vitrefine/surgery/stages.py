"""The stages of a pyramid, found by the number of tokens in the sums with which its blocks end.

A stage is what happens at one resolution: from one stage to the next the map is halved each way, so a quarter of the
tokens is left (up to rounding, and class tokens). Width does not tell stages apart, for some models (NextViT) change it
within one. A model of one resolution has one stage. What comes before the first sum, and what a model calls its stem,
is none.
"""

import math
import re
from dataclasses import dataclass

from vitrefine.surgery.flow import Flow
from vitrefine.surgery.survey import Survey

QUARTER = (0.2, 0.45)  # bounds of the share of tokens that a halving leaves; the sides of a small map round up
SAME = 1.5  # tokens of one stage differ by less than this factor: a class token in a small map
STEM = re.compile(r"(^|\.)stem(\.|$)")


@dataclass(frozen=True)
class Pyramid:
    """The number of tokens an image has in each stage, and when each stage was last at work."""

    tokens: tuple[int, ...]
    ended: tuple[int, ...] = ()  # time of its last sum, by the clock of the flow

    def __len__(self) -> int:
        return len(self.tokens)

    def stage_of(self, tokens: int) -> int | None:
        """The stage, from 0, that works on about so many tokens."""
        if not tokens or not self.tokens:
            return None
        off = [abs(math.log(tokens / own)) for own in self.tokens]
        nearest = off.index(min(off))
        return nearest if off[nearest] < math.log(SAME) else None


def find_stages(found: Survey, flow: Flow) -> Pyramid:
    """The stages in the order in which a model passes through them."""
    # A block adds up what has the shape of its own input or output; an attention may add up heads, which are no tokens.
    sums = [
        (m.tokens, m.time)
        for m in flow.meetings
        if m.tokens and m.shape in (found.visits[m.owner].inputs, found.visits[m.owner].output)
        if not STEM.search(m.owner)
    ]
    counts = [tokens for tokens, _ in sums]
    levels = [max(counts)] if counts else []
    for tokens in counts[counts.index(levels[0]) :] if counts else ():
        if QUARTER[0] <= tokens / levels[-1] <= QUARTER[1]:
            levels.append(tokens)
    pyramid = Pyramid(tuple(levels))
    ended = {pyramid.stage_of(tokens): time for tokens, time in sums}
    return Pyramid(tuple(levels), tuple(ended[stage] for stage in range(len(levels))))
