"""Where tables are printed."""

from rich.console import Console

_LEAST = 80  # columns


def wide_console() -> Console:
    """As wide as the terminal, but no narrower than tables need: rich would drop columns, a terminal breaks lines."""
    console = Console()
    console.width = max(console.width, _LEAST)
    return console
