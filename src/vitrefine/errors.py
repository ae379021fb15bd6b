"""The one exception for mistakes a user can mend; the command line prints it as a sentence and exits with 2."""

from collections.abc import Iterable


class UserError(ValueError):
    """A wrong name, size, option or file: the message names the thing and the remedy."""


def check_choice(what: str, value: object, choices: Iterable[object]) -> None:
    """Refuse a value that is none of the choices."""
    choices = list(choices)
    if value not in choices:
        shown = ", ".join(str(choice) or '""' for choice in choices)
        raise UserError(f"there is no {what} {value!r}; choose one of {shown}")
