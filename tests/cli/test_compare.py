"""`vitrefine compare` among processes that a launcher started: one speaks, and none waits in vain."""

import pytest

from vitrefine.cli.compare import compare
from vitrefine.errors import UserError
from vitrefine.train.processes import OfOneProcess

SPEC = "vit_tiny_patch16_224(img_size=32,patch_size=8,depth=1,embed_dim=24,num_heads=3)"


@pytest.fixture
def second(monkeypatch):
    """Make this process the second of two, in which every run fails with the error that is given."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("accelerate.PartialState.__init__", lambda self: None)
    monkeypatch.setattr("accelerate.PartialState.destroy_process_group", lambda self: None)

    def fail_with(error):
        def train(job, watch):
            raise error

        monkeypatch.setattr("vitrefine.train.engine.train", train)

    return fail_with


def test_a_failure_of_all_is_told_by_the_first(second, tmp_path, capfd):
    second(UserError("the loss is nan"))
    compare([SPEC], out=tmp_path / "out")  # and raises no SystemExit, for which a launcher would end the first
    assert "nan" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("error", [OfOneProcess("too little memory"), RuntimeError("a bug")])
def test_a_failure_of_one_process_ends_it(second, tmp_path, error):
    second(error)
    with pytest.raises(type(error), match=str(error)):
        compare([SPEC], out=tmp_path / "out")
