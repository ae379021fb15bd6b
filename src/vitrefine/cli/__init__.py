"""The command line: `vitrefine`, one file a command."""

import sys

from vitrefine.cli.app import app
from vitrefine.errors import UserError

INTERRUPTED = 130  # what shells give a command that Ctrl-C ended


def main() -> None:
    """Run the command line; a user's mistake is one sentence on stderr and exit code 2."""
    try:
        app(prog_name="vitrefine")
    except UserError as error:
        sys.exit(_complain(str(error), 2))
    except SystemExit as finished:
        # typer has turned the KeyboardInterrupt into this code and says nothing.
        if finished.code == INTERRUPTED:
            _complain("interrupted", INTERRUPTED)
        raise


def _complain(sentence: str, code: int) -> int:
    print(f"vitrefine: {sentence}", file=sys.stderr)
    return code
