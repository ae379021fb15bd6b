"""From the text that names a data set to the set."""

import importlib.util
from collections.abc import Callable

from vitrefine.data.dataset import DataSet, is_utf8
from vitrefine.errors import UserError
from vitrefine.files import user_path

FORMS = {
    "digits": "scikit-learn's handwritten digits, nothing to download",
    "cifar10:PATH": "CIFAR-10: the official batches (folder or archive), an .npz or zips of mosaics",
    "cifar100:PATH": "CIFAR-100, in the same forms",
    "folder:PATH": "a folder of class folders, or train/ and val/ (or test/) folders of them",
    "wds:TRAIN[::TEST]": "WebDataset shards: paths or URLs, with braces: shards/train-{0000..0099}.tar",
    "hf:NAME": "a Hugging Face data set, or the folder of one saved with save_to_disk",
    "imagenet:PATH": "ImageNet: a folder with train/ and val/, classes named n01440764 …",
    "imagenet-v2:PATH": "ImageNet-V2, for testing: folders 0 … 999",
    "imagenet-a:PATH": "ImageNet-A, for testing: folders of its 200 classes, n01498041 …",
}


def open_data(text: str) -> DataSet:
    """Open the data set that a text names; the forms are those of `FORMS`, or the path of an existing folder."""
    if not is_utf8(text):
        raise UserError(f"{text!r} is no UTF-8, in which a run's files are written; rename the folder")
    kind, colon, rest = text.partition(":")
    if text == "digits":
        return _digits(text, rest)
    if kind in _OPENERS and colon:
        if not rest:
            raise UserError(f"{text!r} names no data; write {_form(kind)}")
        return _opened(kind, text, rest)
    if text and user_path(text).is_dir():
        return _opened("folder", text, text)
    if kind in _OPENERS:
        raise UserError(f"{text!r} names no data; write {_form(kind)}")
    forms = ", ".join(FORMS)
    raise UserError(f"there is no data set or folder {text!r}; give one of {forms}, or the path of an image folder")


def _opened(kind: str, text: str, rest: str) -> DataSet:
    try:
        return _OPENERS[kind](text, rest)
    except OSError as error:
        raise UserError(f"{text} cannot be read ({error}); see that all of it is there and may be read") from error


def _form(kind: str) -> str:
    return next(form for form in FORMS if form.partition(":")[0] == kind)


def _need(package: str, text: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{text} needs the package {package}; install it with: pip install 'vitrefine[data]'")


def _digits(text: str, _: str) -> DataSet:
    from vitrefine.data.arrays import digits
    from vitrefine.data.memory import MemorySet

    return MemorySet(text, digits())


def _cifar(text: str, path: str) -> DataSet:
    from vitrefine.data.arrays import cifar
    from vitrefine.data.memory import MemorySet

    return MemorySet(text, cifar(text.partition(":")[0], user_path(path)))


def _folder(text: str, path: str) -> DataSet:
    from vitrefine.data.folder import folder_set

    return folder_set(text, user_path(path))


def _shards(text: str, pattern: str) -> DataSet:
    _need("webdataset", text)
    from vitrefine.data.shards import shard_set

    return shard_set(text, pattern)


def _hub(text: str, name: str) -> DataSet:
    _need("datasets", text)
    from vitrefine.data.hf import hub_set

    return hub_set(text, name)


def _imagenet(text: str, path: str) -> DataSet:
    from vitrefine.data.imagenet import imagenet_a_set, imagenet_set, imagenet_v2_set

    opener = {"imagenet": imagenet_set, "imagenet-v2": imagenet_v2_set, "imagenet-a": imagenet_a_set}
    return opener[text.partition(":")[0]](text, user_path(path))


_OPENERS: dict[str, Callable[[str, str], DataSet]] = {
    "cifar10": _cifar,
    "cifar100": _cifar,
    "folder": _folder,
    "wds": _shards,
    "hf": _hub,
    "imagenet": _imagenet,
    "imagenet-v2": _imagenet,
    "imagenet-a": _imagenet,
}
