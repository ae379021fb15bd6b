"""Models in folders and repositories as the Hugging Face Hub has them: weights, config.json and a model card."""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from timm.utils.model import unwrap_model
from torch import nn

from vitrefine import __version__
from vitrefine.errors import UserError
from vitrefine.files import replace_file
from vitrefine.surgery.create import report_of, spec_of
from vitrefine.surgery.description import describe
from vitrefine.surgery.weights import KEY, write

T = TypeVar("T")

WEIGHTS, CARD = "model.safetensors", "README.md"  # in a folder
HUB = ("hf-hub:", "hf_hub:")


def save_folder(
    model: nn.Module,
    folder: str | Path,
    *,
    input_config: Mapping[str, Any] | None = None,
    classes: Sequence[str] | None = None,
) -> None:
    """Write a model to a folder as the Hugging Face Hub has it: weights, config.json and a README.md; `load` reads it.

    Args:
        model: As for `save`.
        folder: It is created if it is not there.
        input_config: As for `save`.
        classes: As for `save`.
    """
    folder, model = Path(folder), unwrap_model(model)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made a folder: {error.strerror}") from error
    info = describe(model, input_config, classes)
    write(folder / WEIGHTS, model.state_dict(), info)
    config = {"library_name": KEY, "version": __version__, **info}
    replace_file(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())
    replace_file(folder / CARD, _card(model, folder.name).encode())


def push_to_hub(
    model: nn.Module,
    repo_id: str,
    *,
    token: str | None = None,
    private: bool | None = None,
    input_config: Mapping[str, Any] | None = None,
    classes: Sequence[str] | None = None,
) -> str:
    """Put a model on the Hugging Face Hub, and return its address there.

    Args:
        model: As for `save`.
        repo_id: `"owner/name"`; it is created if it is not there. A model card that it has already is kept.
        token: The one that `hf auth login` keeps if None.
        private: Whether a repository that is created is private; as the owner has set it if None.
        input_config: As for `save`.
        classes: As for `save`.
    """
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as folder:
        save_folder(model, folder, input_config=input_config, classes=classes)
        Path(folder, CARD).write_text(_card(model, f"{HUB[0]}{repo_id}"))
        api = HfApi(token=token)
        address = _online(repo_id, lambda: api.create_repo(repo_id, private=private, exist_ok=True))
        own = _online(repo_id, lambda: api.file_exists(repo_id, CARD))  # a card that is there may be someone's work
        kept = [CARD] if own else None
        _online(repo_id, lambda: api.upload_folder(repo_id=repo_id, folder_path=folder, ignore_patterns=kept))
    return str(address)


def located(path: str | Path) -> Path:
    """The file of weights that a path means: itself, one in a folder, or one fetched from the Hub."""
    text = str(path)
    if text.startswith(HUB):
        from huggingface_hub import hf_hub_download

        name, _, revision = text[len(HUB[0]) :].partition("@")
        return Path(_online(name, lambda: hf_hub_download(name, WEIGHTS, revision=revision or None)))
    path = Path(path)
    if path.is_dir():
        if not (path / WEIGHTS).is_file():
            raise UserError(f"{path} is a folder without a {WEIGHTS}; name the file")
        return path / WEIGHTS
    return path


def _online(repo_id: str, ask: Callable[[], T]) -> T:
    # The base of all errors of its HTTP client, whichever one this version of huggingface_hub uses.
    from huggingface_hub.errors import HTTPError

    try:
        return ask()
    except (HTTPError, OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise UserError(
            f"{repo_id} cannot be reached on the Hugging Face Hub ({reason}); "
            "check its name, the network and that you are logged in (hf auth login)"
        ) from error


def _card(model: nn.Module, address: str) -> str:
    """The model card: what it is, what was changed and how to load it."""
    report = report_of(model)
    changed = f"What `vitrefine` changed in it:\n\n```\n{report}\n```\n" if report.changes else ""
    return (
        f"---\nlibrary_name: {KEY}\ntags:\n- {KEY}\n---\n\n# {spec_of(model)}\n\n"
        f'```python\nimport vitrefine\n\nmodel = vitrefine.load("{address}")\n```\n\n{changed}'
    )
