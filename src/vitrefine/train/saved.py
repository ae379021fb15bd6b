"""JSON that a command wrote, read again: of the kind that was written, or a sentence says what is wrong with it."""

from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from vitrefine.errors import UserError
from vitrefine.train.complaint import EXPECTED

Kind = TypeVar("Kind")


def read_saved(path: Path, kind: TypeAdapter[Kind], remedy: str) -> Kind:
    """What a file holds.

    Args:
        path: The file.
        kind: What it has to be; numbers in quotes are no numbers.
        remedy: What to do if it is something else.
    """
    try:
        return kind.validate_json(path.read_bytes(), strict=True)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); {remedy}") from error
    except ValidationError as error:
        raise UserError(f"{path} is damaged: {_fault(error)}; {remedy}") from error


def _fault(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    kind, context = first["type"], first.get("ctx", {})
    name = ".".join(map(str, first["loc"]))
    if kind == "json_invalid":
        return f"it is no JSON ({context['error']})"
    if kind == "missing":
        return f"it has no {name}"
    if kind in EXPECTED:
        return f"{name} must be {EXPECTED[kind].format(**context)}"
    return f"{name or 'it'} is something else ({first['msg']})"
