"""The command line: `vitrefine`, one file a command."""

import io
import signal
import sys

from vitrefine.errors import UserError

INTERRUPTED = 130  # what shells give a command that Ctrl-C ended


def main() -> None:
    """Run the command line; a user's mistake is one sentence on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # where … cannot be written, a question mark can
            stream.reconfigure(errors="replace")
    try:
        from vitrefine.cli.app import app  # here, for Ctrl-C may come while it is read

        app(prog_name="vitrefine")
    except UserError as error:
        sys.exit(_complain(str(error), 2))
    except OSError as error:  # a full disk, a file that may not be read: nothing that a traceback would explain
        what = error.filename or "the output"
        sys.exit(_complain(f"{what}: {error.strerror or error}; see to that, and run this again", 2))
    except RuntimeError as error:
        # PyTorch raises it wherever the command is when such a process ends; mostly it was memory that ran out.
        if not str(error).startswith("DataLoader worker (pid"):
            raise
        what = f"a process that reads images ended ({str(error).strip()})"
        sys.exit(_complain(f"{what}; see that memory is left for such, or take fewer of them", 2))
    except KeyboardInterrupt:
        sys.exit(_complain("interrupted", INTERRUPTED))
    except SystemExit as finished:
        _end_quietly()
        # typer has turned the KeyboardInterrupt into this code and says nothing.
        if finished.code == INTERRUPTED:
            _complain("interrupted", INTERRUPTED)
        raise


def _complain(sentence: str, code: int) -> int:
    _end_quietly()
    print(f"vitrefine: {sentence}", file=sys.stderr)
    return code


def _end_quietly() -> None:
    """Let a further Ctrl-C end the process as it is: Python on its way out would show it as a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
