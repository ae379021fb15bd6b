"""What a text that names a model points at, before anything is loaded: a run, or something else that is there."""

import os
import re
from pathlib import Path

from vitrefine.errors import UserError
from vitrefine.surgery.hub import HUB
from vitrefine.train.run import MODEL, RUN, RunInfo, read_run


def is_saved(text: str) -> bool:
    """Whether a text names a run or a checkpoint, which have weights of their own, and no spec."""
    return run_of(text) is not None or os.path.exists(text) or text.startswith(HUB)


def run_of(text: str) -> RunInfo | None:
    """The run that a text names by its folder or by its model; None if it names something else.

    A path that leads nowhere is refused: no spec looks like one.
    """
    path = Path(text)
    folder = path.parent if path.name == MODEL else path
    if os.path.isfile(folder / RUN):
        return read_run(folder)
    if os.path.exists(text) or text.startswith(HUB):
        return None
    if path.suffix == ".safetensors":
        raise UserError(f"there is no file {text}; give a checkpoint that is there, the folder of a run, or a spec")
    if "/" in re.split(r"[(+:]", text, maxsplit=1)[0]:
        raise UserError(
            f"there is no folder {text}; give the folder of a run, a checkpoint, or a spec (a Hugging Face id is "
            "written hf:OWNER/NAME)"
        )
    return None
