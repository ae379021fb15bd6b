"""Take any vision transformer, change how it attends, and know what that did."""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrefine.errors import UserError

if TYPE_CHECKING:
    from vitrefine.surgery.checkpoint import load, save
    from vitrefine.surgery.create import create, report_of, spec_of
    from vitrefine.surgery.graft import strip
    from vitrefine.surgery.hub import push_to_hub
    from vitrefine.surgery.operate import apply
    from vitrefine.surgery.spec import parse
    from vitrefine.surgery.verbs import (
        broadcast,
        deform,
        dla,
        expand,
        extra_block,
        less_attention,
        refine,
        squeeze,
        talk,
        uniform,
    )

__version__ = "0.1.0"

# Where each public name lives; it is imported when it is first asked for.
_HOME = {
    "apply": "operate",
    "create": "create",
    "load": "checkpoint",
    "parse": "spec",
    "push_to_hub": "hub",
    "report_of": "create",
    "save": "checkpoint",
    "spec_of": "create",
    "strip": "graft",
    "broadcast": "verbs",
    "deform": "verbs",
    "dla": "verbs",
    "expand": "verbs",
    "extra_block": "verbs",
    "less_attention": "verbs",
    "refine": "verbs",
    "squeeze": "verbs",
    "talk": "verbs",
    "uniform": "verbs",
}

__all__ = [
    "UserError",
    "apply",
    "broadcast",
    "create",
    "deform",
    "dla",
    "expand",
    "extra_block",
    "less_attention",
    "load",
    "parse",
    "push_to_hub",
    "refine",
    "report_of",
    "save",
    "spec_of",
    "squeeze",
    "strip",
    "talk",
    "uniform",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"vitrefine.surgery.{_HOME[name]}"), name)
    raise AttributeError(f"module 'vitrefine' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


def _is_the_command_line() -> bool:
    program = Path(sys.argv[0] if sys.argv else "").stem
    # While `python -m` looks for a module, packages around it are imported: whose it is, only the interpreter knows.
    return program == "vitrefine" or (program == "-m" and f"{__name__}.cli" in sys.orig_argv)


# The command line answers --help before it pays for PyTorch; everyone else finds our models in timm's registry as soon
# as they import us.
if not _is_the_command_line():
    importlib.import_module("vitrefine.models")
