"""Reading a worker's part of the shards: shuffled, resumable, and going on where something is broken.

The order in which samples leave the shuffling buffer is known before anything is read, since it depends on their number
and a seed alone. An epoch that is taken up again therefore opens only the shards that it still needs.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from PIL import Image

from vitrefine.data.broken import Broken
from vitrefine.data.picture import BrokenImage, read_picture
from vitrefine.data.shard_list import DAMAGED, READ_ERRORS, Shards, TarSample, class_number, label_text, samples_of
from vitrefine.data.sharding import Piece


@dataclass(frozen=True)
class Decoded:
    """A picture, its class, and its number among all images of the shards."""

    picture: Image.Image
    label: int
    number: int


class _Encoded(NamedTuple):
    sample: TarSample
    url: str
    number: int


def buffered_order(count: int, buffer: int, seed: int) -> Iterator[int]:
    """Numbers below `count`, each once, as they leave a buffer that is filled in order and emptied at random."""
    chance = random.Random(seed)
    held: list[int] = []
    for number in range(count):
        held.append(number)
        if len(held) > buffer:
            place = chance.randrange(len(held))
            held[place], held[-1] = held[-1], held[place]
            yield held.pop()
    chance.shuffle(held)
    yield from held


class ShardReader:
    """Decodes the samples of pieces of shards; `broken` gathers what could not be read since it was last emptied."""

    def __init__(self, shards: Shards, classes: tuple[str, ...], pieces: list[Piece]) -> None:
        self.broken: list[Broken] = []
        self._urls, self._pieces = shards.urls, pieces
        self._starts = [0, *accumulate(shards.sizes)]
        self._number = {name: number for number, name in enumerate(classes)}

    def read(self, order: list[int]) -> Iterator[Decoded | None]:
        """The samples at these positions, in this order; None for those that cannot be read.

        A position must not come much before one that is smaller: all that lies between is held in memory.
        """
        wanted = set(order)
        stream = self._stream(wanted)
        held: dict[int, _Encoded | None] = {}
        for position in order:
            while position not in held:
                here, encoded = next(stream)
                held[here] = encoded
            encoded = held.pop(position)
            yield None if encoded is None else self._decoded(encoded)

    def _stream(self, wanted: set[int]) -> Iterator[tuple[int, _Encoded | None]]:
        """Wanted samples as they lie in the shards; None if the shard ends or breaks before one."""
        here = 0
        for piece in self._pieces:
            positions = range(here, here + len(piece))
            here = positions.stop
            if wanted.isdisjoint(positions):
                continue
            url = self._urls[piece.shard]
            samples = self._samples(url, piece)
            for number, position in enumerate(positions, self._starts[piece.shard] + piece.first):
                sample = next(samples, None)
                if position in wanted:
                    yield position, None if sample is None else _Encoded(sample, url, number)

    def _samples(self, url: str, piece: Piece) -> Iterator[TarSample]:
        import webdataset
        from webdataset.tariterators import tar_file_iterator

        read = 0
        try:
            with webdataset.gopen(url) as stream:
                files = ((file["fname"], file["data"]) for file in tar_file_iterator(stream, skip_meta=None))
                for number, sample in enumerate(samples_of(files)):
                    if number >= piece.first:
                        read += 1
                        yield sample
                    if number + 1 == piece.stop:
                        return
        except READ_ERRORS as error:
            if read == len(piece):
                return  # a pipe that complains of being closed early
            reason = "missing shard" if isinstance(error, FileNotFoundError) else DAMAGED
            self.broken.append(Broken(url, reason, len(piece) - read))
            return
        self.broken.append(Broken(url, "shard with fewer images than said", len(piece) - read))

    def _decoded(self, encoded: _Encoded) -> Decoded | None:
        try:
            return Decoded(read_picture(encoded.sample.image), self._label(encoded.sample), encoded.number)
        except BrokenImage as reason:
            self.broken.append(Broken(f"{encoded.url}: {encoded.sample.key}", str(reason)))
            return None

    def _label(self, sample: TarSample) -> int:
        text = label_text(sample.files)
        if text is None:
            raise BrokenImage("without a label")
        number = class_number(text, self._number)
        if number is None:
            raise BrokenImage("of an unknown class")
        return number
