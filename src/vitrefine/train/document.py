"""YAML that remembers where each setting was said: a file and line, or an override on the command line.

Two things differ from PyYAML's reading. Numbers are YAML 1.2's, so that 1e-3 is a number and `no` a word; and what can
only be a mistake or a trap is refused: a key said twice, and references from one place of a file to another.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from vitrefine.errors import UserError

Keys = tuple[str, ...]


@dataclass(frozen=True)
class Document:
    """Settings, and for each of them where it was said."""

    settings: dict[str, Any]
    origin: str
    places: dict[Keys, str]

    def where(self, keys: Keys) -> str:
        """Where a setting was said, or the group that it is missing in."""
        while keys and keys not in self.places:
            keys = keys[:-1]
        return self.places.get(keys, self.origin)

    def __or__(self, upper: "Document") -> "Document":
        """Another document's settings on top of these, group by group."""
        places = {**self.places, **upper.places}
        for keys, place in upper.places.items():
            for depth in range(1, len(keys)):
                if not self._is_group(keys[:depth]):  # the upper document made it one
                    places[keys[:depth]] = place
        return Document(_merged(self.settings, upper.settings), self.origin, places)

    def _is_group(self, keys: Keys) -> bool:
        settings: Any = self.settings
        for key in keys:
            settings = settings.get(key) if isinstance(settings, dict) else None
        return isinstance(settings, dict)


def _merged(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    merged = dict(lower)
    for key, value in upper.items():
        below = merged.get(key)
        merged[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (PyYAML's own form)

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="a recipe has no references", problem_mark=self.peek_event().start_mark)
        return super().compose_node(parent, index)


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"null|Null|NULL|~", "nN~"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), [*_first])
_Loader.yaml_implicit_resolvers[""] = [("tag:yaml.org,2002:null", re.compile(r"$"))]

_READ: dict[str, Callable[[str], Any]] = {
    "tag:yaml.org,2002:bool": lambda text: text.lower() == "true",
    "tag:yaml.org,2002:null": lambda text: None,
    "tag:yaml.org,2002:int": int,
    "tag:yaml.org,2002:float": float,
    "tag:yaml.org,2002:str": str,
}


def read_document(file: Path | Traversable, origin: str) -> Document:
    """The settings in a file, which messages call `origin`."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{origin} is no text, so it is no recipe; give a YAML file") from error
    except OSError as error:
        raise UserError(f"{origin} cannot be read ({error.strerror}); see that you may read it") from error
    document = _parse(text, origin, lines=True)
    if not isinstance(document.settings, dict):
        raise UserError(f"{origin} holds no settings; a recipe has lines such as epochs: 300")
    return document


def read_override(text: str) -> Document:
    """The setting in `optim.lr=1e-3`."""
    origin = f"--set {text}"
    name, equals, value = text.partition("=")
    keys = tuple(name.strip().split("."))
    if not equals or not all(keys):
        raise UserError(f"{origin} is no override; write one as optim.lr=1e-3")
    if not value.strip():
        raise UserError(f"{origin} has no value; for none, write {name}=null")
    inner = _parse(value, origin, lines=False)
    settings: Any = inner.settings
    for key in reversed(keys):
        settings = {key: settings}
    return Document(settings, origin, {keys: origin} | {keys + rest: place for rest, place in inner.places.items()})


def _parse(text: str, origin: str, *, lines: bool) -> Document:
    places: dict[Keys, str] = {}

    def place(node: yaml.Node) -> str:
        return f"{origin}, line {node.start_mark.line + 1}" if lines else origin

    def construct(node: yaml.Node, keys: Keys) -> Any:
        if isinstance(node, yaml.SequenceNode):
            return [construct(item, keys) for item in node.value]
        if isinstance(node, yaml.MappingNode):
            return dict(construct_pair(key, value, keys) for key, value in node.value)
        if node.tag not in _READ:
            raise UserError(f"{place(node)}: {node.tag} is nothing that a recipe holds")
        try:
            return _READ[node.tag](node.value)
        except ValueError as error:
            raise UserError(f"{place(node)}: {node.value[:40]} is no {node.tag.rpartition(':')[2]}") from error

    def construct_pair(key: yaml.Node, value: yaml.Node, keys: Keys) -> tuple[str, Any]:
        if not isinstance(key, yaml.ScalarNode):
            raise UserError(f"{place(key)}: the name of a setting must be a word")
        keys = (*keys, key.value)
        if keys in places:
            raise UserError(f"{place(key)}: {'.'.join(keys)} is said twice, first in {places[keys]}; drop one")
        places[keys] = place(key)
        return key.value, construct(value, keys)

    try:
        root = yaml.compose(text, Loader=_Loader)
        settings = {} if root is None else construct(root, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if lines and mark else ""
        raise UserError(f"{origin}{line}: this is no YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{origin}: this is no YAML that a recipe could be written in") from error
    return Document(settings, origin, places)
