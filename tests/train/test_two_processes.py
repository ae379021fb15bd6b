"""Two processes (gloo) do what one does, and continue what one began.

In double precision: sums in another order differ by rounding, and AdamW blows that up where gradients are next to none.
"""

import pytest
import torch
from safetensors.torch import load_file

from vitrefine.train.run import read_run

# Nothing random besides the order, for that is drawn by each process.
PLAIN = ["augment.crop=none", "augment.flip=0", "augment.mixup=0", "augment.cutmix=0", "augment.erasing=0"]
OVERRIDES = [*PLAIN, "model.ema=0.9", "optim.clip_grad=1"]


def losses(folder):
    return torch.tensor([line["loss"] for line in read_run(folder).metrics("step")], dtype=torch.float64)


@pytest.fixture(scope="module")
def alone(stages, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "alone"
    (done,) = stages({"folder": folder, "overrides": OVERRIDES, "double": True})
    assert done["codes"] == [0], done
    return folder


def assert_like(folder, alone):
    """The same losses, weights and predictions."""
    assert len(losses(folder)) == len(losses(alone)) == 44
    assert (losses(folder) - losses(alone)).abs().max() < 1e-5
    ours, theirs = (load_file(path / "model.safetensors") for path in (folder, alone))
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-5, rtol=1e-5)
    results = [read_run(path).result for path in (folder, alone)]
    assert results[0].test_images == results[1].test_images == 359
    assert results[0].correct == results[1].correct
    assert results[0].top1 == pytest.approx(100 * int(results[0].correct, 16).bit_count() / 359)


def test_the_same_loss_curve(stages, alone, tmp_path):
    (both,) = stages({"folder": tmp_path / "run", "overrides": OVERRIDES, "world": 2, "double": True})
    assert both["codes"] == [0, 0], both
    assert read_run(tmp_path / "run").about["processes"] == 2
    assert_like(tmp_path / "run", alone)


@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
def test_one_continues_what_the_other_number_began(stages, alone, tmp_path, first, then):
    """The signal reaches the last process only: all must stop at the same step."""
    again = {"folder": tmp_path / "run", "overrides": OVERRIDES, "resume": True, "double": True}
    stopped, done = stages(again | {"world": first, "term_at": 8}, again | {"world": then})
    assert stopped["codes"] == [0] * first, stopped
    assert done["codes"] == [0] * then, done
    assert any(note.startswith("continuing after step ") for note in done["said"]), done
    assert_like(tmp_path / "run", alone)


def test_two_processes_resume_to_the_same_bits(stages, tmp_path):
    """With drop path, mixing and erasing: the generators of both come back."""
    overrides = ["model.drop_path=0.3", "epochs=1", "checkpoint_steps=4"]
    jobs = [{"folder": tmp_path / name, "overrides": overrides, "world": 2, "resume": True} for name in "ab"]
    killed, *done = stages(jobs[0] | {"kill_at": 10}, jobs[0], jobs[1])
    assert killed["codes"] != [0, 0]
    assert [outcome["codes"] for outcome in done] == [[0, 0], [0, 0]], done
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_parameters_that_have_no_part_in_the_output(stages, tmp_path):
    """A block that uses the maps of another leaves its own queries and keys idle, which DDP would wait for."""
    spec = "eva02_base_patch14_448(img_size=32,patch_size=8,depth=2,embed_dim=24,num_heads=3)+refiner(share=1)"
    (both,) = stages({"folder": tmp_path / "run", "spec": spec, "overrides": ["epochs=1"], "world": 2})
    assert both["codes"] == [0, 0], both


def test_mistakes_are_everyones(stages, tmp_path):
    """The main process finds the mistake; the other must not wait for it for ever."""
    (tmp_path / "run").write_text("in the way")
    odd, barred = stages(
        {"folder": tmp_path / "odd", "overrides": ["batch=63"], "world": 2}, {"folder": tmp_path / "run", "world": 2}
    )
    assert odd["codes"] == [2, 2]
    assert "error: batch=63 cannot be dealt out to 2 processes; take a multiple" in odd["said"]
    assert barred["codes"] == [2, 2]
    assert f"error: {tmp_path}/run cannot be made a folder: File exists; choose another with --out" in barred["said"]
