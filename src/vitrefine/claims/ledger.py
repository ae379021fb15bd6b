"""Reading ledgers: YAML in which every mistake is told with its file and line."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vitrefine.claims.schema import Claim, Ledger
from vitrefine.errors import UserError
from vitrefine.train.complaint import complaint
from vitrefine.train.document import Document, read_document

FOLDER = "claims"
_PARTS = ("title", "paper", "usual", "claims")
_USUAL = ("data", "recipe", "seeds")


def read_ledgers(docs: Path) -> list[Ledger]:
    """The ledgers in the folder of the documentation, by name."""
    files = sorted((docs / FOLDER).glob("*.yaml"))
    if not files:
        raise UserError(f"{docs / FOLDER} holds no ledger (*.yaml); say with --docs where the documentation is")
    return [read_ledger(file) for file in files]


def read_ledger(file: Path) -> Ledger:
    """The claims in a file."""
    document = read_document(file, str(file))
    for key in document.settings:
        if key not in _PARTS:
            raise UserError(f"{document.where((key,))}: there is no {key} in a ledger; it has {', '.join(_PARTS)}")
    title, paper = (_text(document, key) for key in ("title", "paper"))
    usual = _mapping(document, "usual")
    for key in usual:
        if key not in _USUAL:
            wrong = f"usual has {', '.join(_USUAL)}, but no {key}"
            raise UserError(f"{document.where(('usual', key))}: {wrong}; say that with each test")
    found = {name: _claim(document, name, usual) for name in _mapping(document, "claims")}
    for name, claim in found.items():
        _check_reference(document, name, claim, found)
    return Ledger(file.stem, title, paper, found, usual)


def _text(document: Document, key: str) -> str:
    value = document.settings.get(key)
    if not isinstance(value, str) or not value:
        raise UserError(f"{document.where((key,))}: a ledger needs a {key}, as text; add it")
    return value


def _mapping(document: Document, key: str) -> dict[str, Any]:
    value = document.settings.get(key, {})
    if not isinstance(value, dict):
        raise UserError(f"{document.where((key,))}: {key} must be names with what is said of each, indented below it")
    return value


def _claim(document: Document, name: str, usual: dict[str, Any]) -> Claim:
    """A claim of a document, read as a document of its own so that complaints name what is wrong within it."""
    path = ("claims", name)
    settings = document.settings["claims"][name]
    places = {keys[2:]: place for keys, place in document.places.items() if keys[:2] == path}
    if not isinstance(settings, dict):
        raise UserError(f"{document.where(path)}: {name} must be a claim, with where, claim and the like below it")
    if isinstance(settings.get("test"), dict):
        settings = {**settings, "test": {**usual, **settings["test"]}}
    own = Document(settings, document.origin, places)
    try:
        return Claim.model_validate(settings)
    except ValidationError as error:
        raise UserError(complaint(error, own, Claim)) from error


def _check_reference(document: Document, name: str, claim: Claim, claims: dict[str, Claim]) -> None:
    if claim.same_as is None:
        return
    where = document.where(("claims", name, "same_as"))
    if claim.same_as not in claims:
        raise UserError(f"{where}: there is no claim {claim.same_as} in this ledger; name one that is there")
    if claims[claim.same_as].same_as is not None:
        raise UserError(f"{where}: {claim.same_as} repeats another claim itself; name that one")
