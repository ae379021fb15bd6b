"""Pictures of a diagnosis: where models look on images, what a query attends to, where merging reads."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch.nn.functional as F
from matplotlib import colormaps
from PIL import Image
from torch import Tensor

from vitrefine.diagnose.diagnosis import Diagnosis
from vitrefine.diagnose.matrices import AttentionMatrices, shades
from vitrefine.diagnose.offsets import sampling_picture
from vitrefine.report.pictures import data_uri, grey_photo, overlay

LARGEST = 176  # pixels of a side of a picture in the page
CELL = 36  # pixels of a small map
MOST_ROWS = 24  # layers of which small maps are shown
MATRICES = 5  # layers whose maps are shown as matrices
PAIRED = ("last layer", "rolled out")  # what is shown of two models side by side


def looks(examined: Sequence[tuple[Tensor, Mapping[str, Tensor]]], names: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each image: the photo, and what each model makes of it."""
    if not any(heat for _, heat in examined):
        return []
    rows = []
    for number, picture in enumerate(examined[0][0]):
        photo = _photo(picture)
        cells = [
            {
                "overlay": overlay(heat[number]),
                "model": name if len(names) > 1 else "",
                "what": what,
                "words": f"attention of {name} on image {number + 1}, {what}",
            }
            for name, (_, maps) in zip(names, examined, strict=True)
            for what, heat in maps.items()
            if len(names) == 1 or what in PAIRED
        ]
        rows.append({"name": f"look-{number}", "photo": data_uri(photo, "JPEG"), "size": photo.size, "cells": cells})
    return rows


def _photo(picture: Tensor) -> Image.Image:
    photo = grey_photo(picture)
    if max(photo.size) < 64:  # of tiny pictures the pixels are the picture
        factor = -(-64 // max(photo.size))
        photo = photo.resize((photo.width * factor, photo.height * factor), Image.Resampling.NEAREST)
    photo.thumbnail((LARGEST, LARGEST))
    return photo


def query_strips(diagnoses: Sequence[Diagnosis]) -> list[dict[str, Any]]:
    """Of each model the small maps of what its query attends to: a strip for each layer, a map for each head."""
    found: list[dict[str, Any]] = []
    for place, diagnosis in enumerate(diagnoses):
        queries = diagnosis.queries
        if queries is None:
            continue
        every = max(1, -(-len(queries.names) // MOST_ROWS))
        strips = [
            {"number": number, "name": name, "image": _strip(list(maps))}
            for number, name, maps in list(zip(queries.numbers, queries.names, queries.maps, strict=True))[::every]
        ]
        found.append({"place": place, "strips": strips})
    return found


def map_matrices(matrices: AttentionMatrices) -> list[dict[str, Any]]:
    """A few layers of a model, from the first to the last: their maps as matrices, before and after refinement."""
    count = len(matrices.layers)
    chosen = sorted({round(step * (count - 1) / (MATRICES - 1)) for step in range(MATRICES)})
    found = []
    for number in chosen:
        layer = matrices.layers[number]
        pictures = [layer.before] if layer.after is None else [layer.before, layer.after]
        images = [_coloured(shades(matrix)) for matrix in pictures]
        found.append({"number": number + 1, "name": layer.name, "images": images})
    return found


def _coloured(values: Tensor) -> str:
    pixels = (colormaps["magma"](values.numpy())[..., :3] * 255).round().astype(np.uint8)
    return data_uri(Image.fromarray(pixels).quantize(64), "PNG")


def spectra(diagnoses: Sequence[Diagnosis]) -> list[dict[str, Any]]:
    """Of each model the gains of its refinement kernels, a small picture for each refiner, all on one scale."""
    found: list[dict[str, Any]] = []
    for place, diagnosis in enumerate(diagnoses):
        kernels = diagnosis.kernels
        if kernels is None:
            continue
        most = max(float(gain.max()) for gain in kernels.gains)
        strip = _strip([gain.cpu() / most for gain in kernels.gains], together=True)
        found.append({"place": place, "image": strip, "count": len(kernels.gains), "most": f"{most:.2f}"})
    return found


def _strip(maps: Sequence[Tensor], together: bool = False) -> str:
    """Small maps in a row, each as bright as its greatest value unless they are on one scale."""
    cells = []
    for heat in maps:
        values = heat.double() if together else heat.double() / heat.max().clamp(min=1e-12)
        scaled = F.interpolate(values[None, None], size=(CELL, CELL), mode="nearest")[0, 0].clamp(0, 1).numpy()
        pixels = (colormaps["magma"](scaled)[..., :3] * 255).round().astype(np.uint8)
        cells.append(np.pad(pixels, ((0, 0), (0, 3), (0, 0)), constant_values=255))
    pixels = np.concatenate(cells, axis=1)
    alpha = np.full((*pixels.shape[:2], 1), 255, dtype=np.uint8)
    alpha[:, [column for column in range(pixels.shape[1]) if column % (CELL + 3) >= CELL]] = 0
    return data_uri(Image.fromarray(np.concatenate([pixels, alpha], axis=2)), "PNG")


def merging_pictures(diagnosis: Diagnosis, pictures: Tensor) -> list[dict[str, Any]]:
    """Where the output tokens in the middle of images are read from, as points in per cent of the image's sides."""
    mergings = diagnosis.mergings
    if not mergings:
        return []
    height, width = mergings[-1].offsets.shape[-2:]
    tokens = list(dict.fromkeys([(height // 2, width // 2), (height // 4, width // 4)]))  # one, if there is but one
    found = []
    for number, picture in enumerate(pictures):
        if number >= len(mergings[0].offsets):
            break
        shape = picture.shape[-2:]
        drawn = sampling_picture(mergings, picture.expand(3, -1, -1) if len(picture) == 1 else picture, tokens, number)
        photo = _photo(picture)
        points = [
            [
                (round((x + 0.5) / shape[1] * photo.width, 1), round((y + 0.5) / shape[0] * photo.height, 1))
                for y, x in p
            ]
            for p in (points.tolist() for points in drawn.points)
        ]
        found.append({"photo": data_uri(photo, "JPEG"), "size": photo.size, "points": points})
    return found
