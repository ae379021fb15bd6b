"""Where trained models look: entropies layer by layer, and maps over a handful of test images."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from vitrefine.data.dataset import Batch, DataSet, Loader, Place
from vitrefine.data.open import open_data
from vitrefine.diagnose.attention import attention_entropy, attention_map
from vitrefine.errors import UserError
from vitrefine.report import words
from vitrefine.report.entropies import LayerEntropy
from vitrefine.report.pictures import data_uri, grey_photo, overlay
from vitrefine.report.results import Arm, Group
from vitrefine.surgery.checkpoint import load
from vitrefine.surgery.inputs import normalisation
from vitrefine.train.fit import Size, fit
from vitrefine.train.output import logits_of
from vitrefine.train.recipe import load_recipe
from vitrefine.train.run import MODEL, RECIPE

IMAGES = 6  # shown
SAMPLE = 64  # over which entropies are taken
_SEARCHED = 16  # batches in which different classes are looked for
_LARGEST = 160  # pixels of a side of a picture in the page
_PARTS = ("images", "targets", "index")


@dataclass(frozen=True)
class Cell:
    """What a model makes of a picture."""

    overlay: str  # a data URI: more or less opaque where the model attends more or less
    prediction: str
    right: bool


@dataclass(frozen=True)
class Picture:
    """A test image, and what the models make of it by their places."""

    name: str
    number: int  # in the test set
    truth: str
    photo: str  # a data URI
    width: int
    height: int
    cells: Mapping[int, Cell]


@dataclass
class Look:
    """What is to be shown of a group's attention, and why some of it is not."""

    entropy: dict[int, list[LayerEntropy]] = field(default_factory=dict)
    pictures: list[Picture] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seed: int | None = None  # of the runs looked at
    sample: int = 0


def look(group: Group, name: str) -> Look:
    """Look through the models of the first seed that most of a group's specs have finished.

    Args:
        group: Specs whose model cannot be loaded, or does not attend, are named in the notes.
        name: Begins the ids of its pictures.
    """
    found = Look()
    arms = {index: arm for index, arm in enumerate(group.arms) if arm.finished}
    if not arms:
        return found
    finished = [seed for arm in arms.values() for seed in arm.finished]
    found.seed = max(sorted(set(finished)), key=finished.count)
    try:
        data = open_data(group.first.data)
    except UserError as error:
        found.notes.append(f"Attention is not shown, because the data cannot be opened here: {error}.")
        return found
    if data.fingerprint != group.first.fingerprint:
        found.notes.append(f"Attention is not shown, because {data.name} is no longer what the runs were tested on.")
        return found
    views: dict[Size, _View] = {}
    cells: dict[int, list[Cell]] = {}
    gone = [index for index, arm in arms.items() if _has_lost_its_model(arm, found.seed)]
    if gone:
        names = words.specs([arms[index].label for index in gone])
        found.notes.append(f"Attention of {names} is not shown, for there is no {MODEL} in the folder of the run.")
    for index, arm in arms.items():
        if index in gone:
            continue
        try:
            model, view = _opened(arm, found.seed, data, views)
            found.entropy[index] = _entropies(model, _normalised(view.sample, data, model))
            cells[index] = _cells(model, _normalised(view.shown, data, model), data.classes)
        except UserError as error:
            found.notes.append(f"{arm.label}: {str(error).rstrip('.')}.")
        except Exception as error:  # hours of training must not lose their page to a model that is hard to look into
            found.notes.append(f"{arm.label}: {type(error).__name__}: {error}.")
    if views:
        view = next(iter(views.values()))
        found.sample = len(view.sample)
        found.pictures = _pictures(view.shown, data, cells, name) if cells else []
    return found


def _has_lost_its_model(arm: Arm, seed: int) -> bool:
    run = arm.finished.get(seed)
    return run is not None and not (run.folder / MODEL).is_file()


@dataclass(frozen=True)
class _View:
    """Test images at the size that a model takes: those that are shown, and those over which entropies are taken."""

    shown: Batch
    sample: Batch


def _opened(arm: Arm, seed: int, data: DataSet, views: dict[Size, _View]) -> tuple[nn.Module, _View]:
    """The model of a spec, and what to show to it."""
    run = arm.finished.get(seed)
    if run is None:
        raise UserError(f"its run of seed {seed} has not finished, so its attention is not shown")
    recipe = load_recipe(run.folder / RECIPE)
    size = fit(run.fitted, data, recipe).size
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if size not in views:
        place = Place(batch=SAMPLE, rank=0, world=1, device=device, seed=0)
        options = recipe.data.model_copy(update={"test_batch": SAMPLE})
        views[size] = _view(data.test_loader(place, options, size))
    return load(run.folder / MODEL, device=device), views[size]


def _normalised(batch: Batch, data: DataSet, model: nn.Module) -> Batch:
    """Images as the model was trained on them: one that started from weights kept their mean and deviation."""
    used = normalisation(model, data.channels) or (data.mean, data.std)
    own_mean, own_std, mean, std = (
        torch.tensor(values, device=batch.images.device).view(-1, 1, 1) for values in (data.mean, data.std, *used)
    )
    return replace(batch, images=(batch.images * own_std + own_mean - mean) / std)


def _entropies(model: nn.Module, sample: Batch) -> list[LayerEntropy]:
    found = attention_entropy(model, sample.images)
    if not found:
        raise UserError("it attends nowhere")
    return [LayerEntropy(tuple(layer.entropy.tolist()), layer.bound) for layer in found]


def _view(loader: Loader) -> _View:
    """The first images; shown is the first of each of a few classes, and further ones where there are too few."""
    batches: list[Batch] = []
    shown: dict[int, tuple[int, int]] = {}  # by class: number of the batch, place in it
    for batch in itertools.islice(loader.epoch(0), _SEARCHED):
        for place, target in enumerate(batch.targets.tolist()):
            shown.setdefault(target, (len(batches), place))
        batches.append(batch)
        if len(shown) >= IMAGES:
            break
    if not batches:
        raise UserError("there is no test image to look at")
    further = ((0, place) for place in range(len(batches[0])))
    places = list(dict.fromkeys([*shown.values(), *further]))[:IMAGES]
    parts = ([getattr(batches[number], part)[place] for number, place in places] for part in _PARTS)
    return _View(Batch(*map(torch.stack, parts)), batches[0])


@torch.no_grad()
def _cells(model: nn.Module, shown: Batch, classes: Sequence[str]) -> list[Cell]:
    predicted = logits_of(model(shown.images)).argmax(dim=1).tolist()
    maps = attention_map(model, shown.images).float().cpu()
    return [
        Cell(overlay(heat), classes[guess], guess == truth)
        for heat, guess, truth in zip(maps, predicted, shown.targets.tolist(), strict=True)
    ]


def _pictures(shown: Batch, data: DataSet, cells: Mapping[int, Sequence[Cell]], name: str) -> list[Picture]:
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (data.mean, data.std))
    pictures = []
    for place in range(len(shown)):
        image = shown.images[place].cpu() * std + mean
        photo = grey_photo(image)
        photo.thumbnail((_LARGEST, _LARGEST))
        pictures.append(
            Picture(
                f"{name}-photo-{place}",
                int(shown.index[place]),
                data.classes[int(shown.targets[place])],
                data_uri(photo, "PNG" if max(photo.size) <= 64 else "JPEG"),
                *photo.size,
                {index: row[place] for index, row in cells.items()},
            )
        )
    return pictures
