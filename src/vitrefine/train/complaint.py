"""What is wrong with a recipe, in one sentence: where it was said, which setting, and what would be right."""

import json
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from vitrefine.train.document import Document, Keys
from vitrefine.train.nearest import nearest
from vitrefine.train.options import Conflict

# Pydantic's kinds of errors, as far as settings cause them; in brackets what its context calls the bound.
EXPECTED = {
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "below {lt:g}",
    "less_than_equal": "at most {le:g}",
    "finite_number": "a finite number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number of at most 64 bits",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a word or text",
    "tuple_type": "a list in brackets, such as [0.9, 0.999]",
    "too_short": "a list of {min_length}",
    "too_long": "a list of {max_length}",
    "literal_error": "{expected}",
}


def complaint(error: ValidationError, document: Document, schema: type[BaseModel]) -> str:
    """The first mistake in a document that is not as the schema wants it.

    Args:
        error: What pydantic found.
        document: What it was given.
        schema: What it compared that with.
    """
    mistakes = error.errors(include_url=False)
    mistake = mistakes[0]
    kind, context = mistake["type"], mistake.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, Conflict):
        return f"{_culprit(cause, document)}: {cause}"
    keys = _said(mistake["loc"], document.settings)
    where, name = document.where(keys), ".".join(keys)
    if kind == "missing" and isinstance(mistake["loc"][-1], int):
        length = 1 + max(int(other["loc"][-1]) for other in mistakes if other["loc"][:-1] == mistake["loc"][:-1])
        return f"{where}: {name} must be a list of {length}, not {_shown(mistake['input'])}"
    if kind == "missing":
        return f"{where}: {'.'.join(map(str, mistake['loc']))} is missing; add it"
    if kind == "extra_forbidden":
        return f"{where}: there is no setting {name}; {_instead(keys, schema)}"
    if kind == "value_error":
        return f"{where}: {name}: {cause}"
    if kind in EXPECTED:
        expected = EXPECTED[kind].format(**context).replace("True", "true").replace("False", "false").replace("'", "")
    elif group := _group(keys, schema):
        expected = f"a group of settings ({', '.join(group.model_fields)})"
    else:
        expected = f"otherwise ({mistake['msg']})"
    return f"{where}: {name} must be {expected}, not {_shown(mistake['input'])}"


def _culprit(conflict: Conflict, document: Document) -> str:
    """Where the settings that do not go together were said; an override rather than the file below it."""
    said = [place for key in conflict.keys if (place := document.places.get(tuple(key.split("."))))]
    overrides = [place for place in said if place.startswith("--set")]
    return [*overrides, *said, document.origin][0]


def _said(location: tuple[int | str, ...], settings: Any) -> Keys:
    """The setting that pydantic points at, without the types and indices that it adds."""
    keys: Keys = ()
    for part in location:
        if not isinstance(settings, dict) or part not in settings:
            break
        keys, settings = (*keys, str(part)), settings[part]
    return keys


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a group of settings"
    return json.dumps(value, ensure_ascii=False)


def _group(keys: Keys, schema: type[BaseModel]) -> type[BaseModel] | None:
    """The schema of a group of settings."""
    for key in keys:
        field = schema.model_fields.get(key)
        kinds = [field.annotation, *get_args(field.annotation)] if field else []
        groups = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not groups:
            return None
        schema = groups[0]
    return schema


def _settings(schema: type[BaseModel], above: Keys = ()) -> Iterator[Keys]:
    for key in schema.model_fields:
        keys = (*above, key)
        yield keys
        if group := _group((key,), schema):
            yield from _settings(group, keys)


def _instead(keys: Keys, schema: type[BaseModel]) -> str:
    """What may have been meant by an unknown setting: one beside it, one of that name elsewhere, or any beside it."""
    group = _group(keys[:-1], schema)
    assert group is not None, "only a group can hold an unknown setting"
    elsewhere = {known[-1]: ".".join(known) for known in _settings(schema)}
    if close := nearest(keys[-1], group.model_fields):
        return f"did you mean {'.'.join((*keys[:-1], close))}?"
    if close := nearest(keys[-1], elsewhere):
        return f"did you mean {elsewhere[close]}?"
    return f"{'.'.join(keys[:-1]) or 'a recipe'} has {', '.join(group.model_fields)}"
