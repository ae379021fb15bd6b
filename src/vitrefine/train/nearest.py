"""What somebody may have meant."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of the names that is most like a mistyped one, if any is."""
    found = get_close_matches(name.lower(), list(names), n=1, cutoff=0.6)
    return found[0] if found else None
