"""Lines of the log: appended whole, cut back on resume, read in spite of damage."""

import pytest

from vitrefine.errors import UserError
from vitrefine.train.run import read_lines
from vitrefine.train.tracking import MetricsFile, check_trackers


@pytest.fixture
def metrics(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(1, 7):
        file.add({"kind": "step", "step": step, "epoch": (step + 2) // 3, "loss": 1 / step})
        if step % 3 == 0:
            file.add({"kind": "epoch", "step": step, "epoch": step // 3, "top1": 50.0})
    return file


def steps(file):
    return [(line["kind"], line["step"]) for line in read_lines(file.path)]


@pytest.mark.parametrize(
    ("step", "epochs", "left"),
    [
        (0, 0, []),
        (2, 0, ["step", "step"]),
        (3, 0, ["step", "step", "step"]),  # killed while it tested: the epoch's line comes again
        (3, 1, ["step", "step", "step", "epoch"]),
        (6, 2, ["step", "step", "step", "epoch"] * 2),
    ],
)
def test_what_comes_again_is_cut(metrics, step, epochs, left):
    metrics.cut(step, epochs)
    assert [kind for kind, _ in steps(metrics)] == left


def test_half_a_line_is_no_line(metrics):
    whole = steps(metrics)
    with metrics.path.open("a") as file:
        file.write('{"kind": "step", "st')
    assert steps(metrics) == whole
    metrics.cut(6, 2)
    assert steps(metrics) == whole
    assert metrics.path.read_text().endswith("}\n")


def test_no_file_is_no_line(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.cut(3, 1)
    file.sync()
    assert not file.path.exists()


def test_trackers(monkeypatch):
    check_trackers(("tensorboard",))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="wandb is not installed; pip install wandb, or leave out --track wandb"):
        check_trackers(("wandb",))
