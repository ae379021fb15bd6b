"""The live view: a bar on a terminal, plain lines elsewhere."""

import io
import re
from pathlib import Path

from rich.console import Console

from vitrefine.cli.progress import TrainingView
from vitrefine.train.job import Start

START = Start("vit[a]", "digits", Path("runs/x"), "cpu", 2, "fp32", 5_360_000, 1, 2, 10, 0)
STEP = {"kind": "step", "step": 5, "epoch": 1, "loss": 2.25, "lr": 1e-3, "images_per_s": 1234.5}
EPOCH = {
    "kind": "epoch",
    "epoch": 1,
    "step": 10,
    "train_loss": 2.0,
    "top1": 51.5,
    "images_per_s": 1300.0,
    "seconds": 3.0,
}


def watch(terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=160, color_system=None)
    with TrainingView(console) as view:
        view.on_note("a note [with] brackets")
        view.on_start(START)
        view.on_step(STEP)
        view.on_epoch(EPOCH | {"skipped": {"broken image": 3}})
    return out.getvalue()


def test_plain_lines():
    assert watch(terminal=False).splitlines() == [
        "a note [with] brackets",
        "vit[a] on digits: 2 epochs of 10 updates, 5.36 M parameters, cpu in fp32 in each of 2 processes; "
        "writing to runs/x",
        "step 5/20  loss 2.250  1,234 images/s  lr 1.00e-03",
        "epoch 1/2  loss 2.000  test 51.50 %  1,300 images/s  3.0 s",
        "3 times skipped: broken image",
    ]


def test_a_bar():
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", watch(terminal=True))
    assert "a note [with] brackets" in shown
    last = [line for line in shown.replace("\r", "\n").splitlines() if "images/s" in line][-1]
    assert last.startswith("x ")
    assert "epoch 1/2 loss 2.000  test 51.50 %  1,300 images/s" in last
    assert "step 5/20" not in shown
