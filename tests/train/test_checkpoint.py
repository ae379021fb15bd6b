"""Checkpoints: whole or not there, the last few kept, damage found, no code run."""

from pathlib import Path

import pytest
import torch

from vitrefine.errors import UserError
from vitrefine.train.checkpoint import Checkpoints, damage, step_of


@pytest.fixture
def said():
    return []


@pytest.fixture
def store(tmp_path, said):
    return Checkpoints(tmp_path / "checkpoints", 2, said.append)


def state(step):
    generators = [{"torch": torch.get_rng_state(), "python": (3, (1, 2), None)}]
    return {
        "model": {"w": torch.arange(5000.0) * step},
        "progress": {"step": step, "best": float("inf")},
        "rng": generators,
    }


def test_round_trip(store, said):
    assert store.newest() is None
    path = store.write(7, state(7))
    assert step_of(path) == 7
    found, content = store.newest()
    assert found == path
    assert content["progress"] == {"step": 7, "best": float("inf")}
    assert torch.equal(content["model"]["w"], state(7)["model"]["w"])
    assert content["rng"][0]["python"] == (3, (1, 2), None)
    assert said == []


def test_the_last_few_are_kept(store):
    for step in (1, 2, 10, 9):  # 9 again: after falling back past 10
        newest = store.write(step, state(step))
    assert [step_of(path) for path in store.files()] == [10, 9]
    assert newest in store.files()


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "grow"])
def test_damage_is_found_and_told(store, said, harm):
    good, bad = store.write(1, state(1)), store.write(2, state(2))
    content = bytearray(bad.read_bytes())
    if harm == "flip":
        content[-100] ^= 64
    changed = {"flip": content, "cut": content[:-1], "empty": b"", "grow": content + b"\0"}[harm]
    bad.write_bytes(changed)
    assert damage(good) is None
    assert store.newest()[0] == good
    assert said == [f"{bad} is damaged; going back to {good.name}"]
    assert store.files() == [good]
    good.write_bytes(changed)
    assert store.newest() is None
    assert said[1] == f"{good} is damaged; starting from the beginning"


class Malicious:
    def __reduce__(self):
        return Path.touch, (Path("marker"),)


def test_no_code_is_run(store, said, tmp_path, monkeypatch):
    """Even if it comes with the right digest."""
    monkeypatch.chdir(tmp_path)
    store.write(3, {"model": Malicious()})
    assert store.newest() is None
    assert "is no checkpoint" in said[0]
    assert "starting from the beginning" in said[0]
    assert not Path("marker").exists()


def test_leftovers_are_removed(store):
    store.write(1, state(1))
    (store.folder / ".0123.part").write_bytes(b"half")
    store.write(2, state(2))
    assert {path.suffix for path in store.folder.iterdir()} == {".pt"}


def test_a_failed_write_leaves_all_as_it_was(store, monkeypatch):
    path = store.write(1, state(1))

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match=r"step 2 cannot be written \(No space left on device\).*step-00000001"):
        store.write(2, state(2))
    assert list(store.folder.iterdir()) == [path]
    assert damage(path) is None


def test_names(tmp_path):
    with pytest.raises(UserError, match="is no checkpoint of a run"):
        step_of(tmp_path / "step-7.pt")
