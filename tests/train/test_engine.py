"""`train` in this process: what it writes, and what it refuses."""

import json
import math
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import ViTConfig

import vitrefine
from vitrefine.data.dataset import Place
from vitrefine.data.open import open_data
from vitrefine.errors import UserError
from vitrefine.report.checks import check_specs
from vitrefine.train.engine import train
from vitrefine.train.job import Silent
from vitrefine.train.lock import FolderLock
from vitrefine.train.recipe import load_recipe
from vitrefine.train.run import list_runs, read_run


class Notes(Silent):
    """Keeps what it is told."""

    def __init__(self):
        self.said, self.lines, self.started, self.ended = [], [], None, None

    def on_start(self, start):
        self.started = start

    def on_step(self, line):
        self.lines.append(line)

    def on_epoch(self, line):
        self.lines.append(line)

    def on_note(self, sentence):
        self.said.append(sentence)

    def on_end(self, result):
        self.ended = result


@pytest.fixture(scope="module")
def done(small_job, tmp_path_factory):
    """A finished run."""
    folder, notes = tmp_path_factory.mktemp("runs") / "done", Notes()
    job = small_job(
        folder, "log_every=10", "model.ema=0.8", "model.drop_path=0.1", "precision=fp32", track=("tensorboard",)
    )
    return job, train(job, watch=notes), notes


def test_what_is_written(done):
    job, result, notes = done
    run = read_run(job.folder)
    about = run.about
    assert run.status == "finished"
    assert about["spec"] == str(vitrefine.parse(job.spec.replace("(", "(num_classes=10,")))
    assert (about["base_spec"], about["data"], about["seed"], run.data) == (job.spec, "digits", 0, "digits")
    assert about["params"] == result.params > 0
    assert about["macs"] == result.macs > 0
    assert about["versions"].keys() >= {"vitrefine", "python", "torch", "timm", "accelerate"}
    assert about["command"].startswith("vitrefine train 'vit_tiny_patch16_224(img_size=32")
    assert "--set log_every=10 --set model.ema=0.8" in about["command"]
    assert load_recipe(job.folder / "recipe.yaml") == job.recipe
    assert run.result == result == notes.ended
    assert [line["step"] for line in run.metrics("step")] == [10, 20, 30, 40]
    assert [line["epoch"] for line in run.metrics("epoch")] == [1, 2]
    assert run.metrics() == notes.lines
    assert all(math.isfinite(line["loss"]) and line["images_per_s"] > 0 for line in run.metrics("step"))
    assert notes.started.steps == 44
    assert list((job.folder / "vitrefine").glob("events.out.tfevents.*"))
    assert list_runs(job.folder.parent)[0].folder == job.folder


def test_the_model_that_is_saved_is_the_one_that_was_tested(done):
    job, result, _ = done
    model = vitrefine.load(job.folder)
    assert model.pretrained_cfg["label_names"] == tuple("0123456789")
    data = open_data("digits")
    assert model.pretrained_cfg["mean"] == pytest.approx(data.mean)
    prepared = {name: model.pretrained_cfg[name] for name in ("crop_pct", "crop_mode", "interpolation")}
    assert prepared == {"crop_pct": 1.0, "crop_mode": "center", "interpolation": "bilinear"}  # the library's: bicubic
    place = Place(64, 0, 1, torch.device("cpu"), 0)
    batches = list(data.test_loader(place, job.recipe.data, (32, 32)).epoch(0))
    with torch.no_grad():
        right = torch.cat([model(batch.images).argmax(dim=1) == batch.targets for batch in batches])
    assert len(right) == result.test_images
    bits = bin(int(result.correct, 16))[2:].zfill(4 * len(result.correct))[: len(right)]
    assert [bit == "1" for bit in bits] == right.tolist()
    assert result.top1 == pytest.approx(100 * right.double().mean().item())
    assert result.top5 >= result.top1


def test_tests_come_as_often_as_asked_and_after_the_last_epoch(small_job, tmp_path):
    job = small_job(tmp_path / "run", "epochs=3", "test_epochs=2")
    result = train(job)
    lines = read_run(job.folder).metrics("epoch")
    assert [line["epoch"] for line in lines if "top1" in line] == [2, 3]
    assert lines[-1]["top1"] == result.top1
    alone = train(small_job(tmp_path / "alone", "epochs=3", "test_epochs=null"))
    assert (alone.correct, alone.test_loss) == (result.correct, result.test_loss)


def test_a_finished_run_is_finished(done, small_job):
    job, result, _ = done
    again, notes = small_job(job.folder, *job.overrides, resume=True), Notes()
    assert train(again, watch=notes) == result
    assert notes.said[-1] == f"{job.folder} is finished; nothing is left to do"


def test_a_folder_with_a_run_is_not_overwritten(done, small_job):
    with pytest.raises(UserError, match="holds a run already; continue it with --resume, or choose another --out"):
        train(small_job(done[0].folder))


@pytest.mark.parametrize(
    ("overrides", "options", "sentence"),
    [
        (
            [],
            {"spec": "vit_tiny_patch16_224(depth=1,embed_dim=24,num_heads=3)"},
            "its model is vit_tiny_patch16_224(depth=2",
        ),
        ([], {"seed": 3}, "its seed is 0, not 3"),
        ([], {"weights": "pretrained"}, "where it started is None, not pretrained"),
        (["optim.lr=1e-4"], {}, "its recipe says optim.lr=0.001, not 0.0001"),
        (["epochs=3"], {}, "its recipe says epochs=2, not 3"),
        (["augment.mixup=0"], {}, "its recipe says augment.mixup=0.8, not 0.0"),
    ],
)
def test_a_run_is_not_continued_as_another_one(done, small_job, overrides, options, sentence):
    job = small_job(done[0].folder, *done[0].overrides, *overrides, resume=True, **options)
    with pytest.raises(UserError, match="holds another run") as refused:
        train(job)
    assert sentence in str(refused.value)
    assert str(refused.value).endswith("; use what it had, or another --out")
    assert read_run(done[0].folder).status == "finished"


def test_checkpoints_of_an_unknown_run_are_not_continued(done, small_job):
    about = done[0].folder / "run.json"
    before = about.read_text()
    about.unlink()
    for resume in (False, True):
        with pytest.raises(UserError, match=r"holds checkpoints, but no run\.json that says of what run; restore that"):
            train(small_job(done[0].folder, *done[0].overrides, seed=3, resume=resume))
    assert not about.exists()
    about.write_text(before)


def test_other_data_is_another_run(done, small_job):
    job = small_job(done[0].folder, *done[0].overrides, resume=True)
    path = done[0].folder / "run.json"
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | {"fingerprint": "0"}))
    with pytest.raises(UserError, match="its data is digits as it was then, not digits"):
        train(job)
    path.write_text(before)


def test_what_changes_nothing_may_change(done, small_job):
    job = small_job(
        done[0].folder, *done[0].overrides, "log_every=1", "keep_checkpoints=1", "accumulate=2", resume=True
    )
    assert train(job) == done[1]


def test_a_resumed_run_remembers_where_it_was(small_job, tmp_path, monkeypatch):
    """Its speed is that of all its devices, and of what shared them."""

    class Breaks(Silent):
        def on_epoch(self, line):
            raise RuntimeError("here")

    for device in ("CPU, 4 threads", "A100", "A100"):
        monkeypatch.setattr("vitrefine.train.claim.in_words", lambda _, device=device: device)
        with pytest.raises(RuntimeError, match="here"):
            train(small_job(tmp_path, at_once=3, resume=True), watch=Breaks())
    train(small_job(tmp_path, at_once=1, resume=True))
    assert not read_run(tmp_path).alone
    assert read_run(tmp_path).told.device == "CPU, 4 threads, then A100"


def test_a_folder_in_use_is_refused(small_job, tmp_path):
    (tmp_path / "run").mkdir()
    with FolderLock(tmp_path / "run"), pytest.raises(UserError, match="is being written by this very process"):
        train(small_job(tmp_path / "run", resume=True))


def test_a_loss_that_is_no_number_stops_the_run(small_job, tmp_path):
    job = small_job(tmp_path / "run", "optim.lr=1e30", "schedule.warmup_epochs=0", "checkpoint_steps=1", "log_every=4")
    with pytest.raises(UserError) as refused:
        train(job)
    said = str(refused.value)
    assert "(learning rate 1e+30)" in said or "(learning rate 9.99e+29)" in said
    assert " at step " in said
    assert "there is no checkpoint yet" in said or "the last good checkpoint is" in said
    run = read_run(tmp_path / "run")
    assert (run.status, run.about["error"]) == ("failed", said)
    for path in (tmp_path / "run" / "checkpoints").glob("*.pt"):
        state = torch.load(path, weights_only=True)["model"]
        assert all(tensor.isfinite().all() for tensor in state.values())


def test_a_stalled_loss_stops_the_run(small_job, tmp_path):
    still = ("optim.lr=1e-9", "schedule.min_lr=0", "schedule.warmup_lr=0", "epochs=9", "stall_epochs=2", "batch=512")
    with pytest.raises(UserError, match=r"has stalled: no new minimum for 2 epochs, .* at step \d+ \(learning rate"):
        train(small_job(tmp_path / "run", *still))
    assert 3 <= len(read_run(tmp_path / "run").metrics("epoch")) < 9
    # After the last epoch there is nothing left to stop.
    assert train(small_job(tmp_path / "end", *still, "epochs=2", "stall_epochs=1")).epochs == 2


def test_accumulated_steps_make_the_same_updates(small_job, tmp_path):
    plain = (
        "precision=fp32",
        "augment.crop=none",
        "augment.flip=0",
        "augment.mixup=0",
        "augment.cutmix=0",
        "augment.erasing=0",
    )
    sgd = ("optim.name=sgd", "optim.momentum=0.9", "optim.lr=0.05", "epochs=1", "model.ema=0.5", "optim.clip_grad=1")
    for accumulate in (1, 4):
        train(small_job(tmp_path / str(accumulate), *plain, *sgd, f"accumulate={accumulate}"))
    losses = [[line["loss"] for line in read_run(tmp_path / name).metrics("step")] for name in "14"]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_weights_to_start_from(done, small_job, tmp_path):
    """Those of another run with other classes fit, except for the head."""
    source, notes = done[0].folder, Notes()
    still = ("epochs=1", "schedule.warmup_epochs=0", "schedule.warmup_lr=0", "optim.lr=1e-12", "schedule.min_lr=0")
    job = small_job(tmp_path / "run", *still, spec=f"{done[0].spec}+cb_s", weights=str(source))
    train(job, watch=notes)
    assert notes.said[0].startswith(f"started from {source}: ")
    assert notes.said[0].endswith("new: blocks.0.mlp.broadcast.scale, blocks.1.mlp.broadcast.scale")
    plain, model = tmp_path / "plain.safetensors", vitrefine.load(source)
    after = vitrefine.load(tmp_path / "run").state_dict()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(after[name], weight, atol=1e-6, rtol=0)
    # Weights that others wrote say nothing of their model; names and shapes must do.
    save_file(model.state_dict(), plain)
    notes = Notes()
    again = small_job(tmp_path / "again", *job.overrides, spec=job.spec, weights=str(plain))
    train(again, watch=notes)
    assert notes.said[0].startswith(f"started from {plain}: {len(model.state_dict())} of ")
    save_file(model.state_dict() | {"head.bias": torch.tensor(0.0)}, tmp_path / "odd.safetensors")
    with pytest.raises(UserError, match=r"does not fit .*: its head\.bias is \(\), not \(10,\); take a model of"):
        train(small_job(tmp_path / "odd", spec=job.spec, weights=str(tmp_path / "odd.safetensors")))
    finer = done[0].spec.replace("patch_size=8", "patch_size=4")
    with pytest.raises(UserError, match=r"does not fit .*: its pos_embed is"):
        train(small_job(tmp_path / "other", spec=finer, weights=str(source)))


def test_weights_keep_their_patches(small_job, tmp_path):
    """A run on small images has smaller patches than its spec's name says; the same spec goes on from there."""
    few = ("epochs=1", "schedule.warmup_epochs=0")
    spec, notes = "vit_tiny_patch16_224(depth=1,embed_dim=24,num_heads=3)", Notes()
    train(small_job(tmp_path / "first", *few, spec=spec))
    train(small_job(tmp_path / "second", *few, spec=f"{spec}+cb_s", weights=str(tmp_path / "first")), watch=notes)
    assert notes.said[0].endswith("new: blocks.0.mlp.broadcast.scale")
    assert "patch_size=4" in read_run(tmp_path / "second").spec
    job = small_job(tmp_path / "third", *few)
    check_specs([spec, f"{spec}+cb_s"], open_data(job.data), job.recipe, str(tmp_path / "first"))  # as `compare` does


def test_images_are_normalised_as_weights_are_used_to(small_job, tmp_path):
    generator = np.random.default_rng(0)
    images, labels = generator.integers(0, 256, (128, 32, 32, 3), np.uint8), np.arange(128) % 10
    np.savez(tmp_path / "few.npz", x_train=images, y_train=labels, x_test=images[:10], y_test=labels[:10])
    options = {"data": f"cifar10:{tmp_path / 'few.npz'}"}
    overrides = ("epochs=1", "schedule.warmup_epochs=0")

    def mean(name, **weights):
        train(small_job(tmp_path / name, *overrides, **options, **weights))
        return tuple(vitrefine.load(tmp_path / name).pretrained_cfg["mean"])

    own = pytest.approx(tuple(images.reshape(-1, 3).mean(0) / 255))
    assert mean("scratch") == own
    save_file(vitrefine.load(tmp_path / "scratch").state_dict(), tmp_path / "plain.safetensors")
    assert mean("plain", weights=str(tmp_path / "plain.safetensors")) == (0.5, 0.5, 0.5)  # as timm has it for this ViT
    assert mean("again", weights=str(tmp_path / "scratch")) == own


def test_too_little_memory_is_one_sentence(small_job, tmp_path, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("vitrefine.train.loop.Loop._update", fail)
    with pytest.raises(UserError, match=r"steps of 64 images need .* --resume --set accumulate=2, which"):
        train(small_job(tmp_path / "run"))
    assert read_run(tmp_path / "run").status == "failed"
    with pytest.raises(UserError, match=r"steps of 15 images need .* --resume --set accumulate=9, which"):
        train(small_job(tmp_path / "odd", "batch=45", "accumulate=3"))
    with pytest.raises(UserError, match=r"steps of 2 images need .* --resume --set accumulate=4, which"):
        train(small_job(tmp_path / "unmixed", "batch=4", "accumulate=2", "augment.mix_probability=0"))
    for name, *overrides in (["mixed", "batch=4", "accumulate=2"], ["least", "batch=1", "augment.mix_probability=0"]):
        with pytest.raises(UserError, match=r"steps of [12] images need .*; take smaller images or a smaller model"):
            train(small_job(tmp_path / name, *overrides))


def test_mistakes_are_found_before_anything_is_written(small_job, tmp_path):
    for options, sentence in [
        ({"track": ("wandb2",)}, "there is no tracker 'wandb2'; choose one of tensorboard, wandb, trackio"),
        ({"data": "nothing"}, "there is no data set or folder 'nothing'"),
        ({"spec": "vit_tny"}, "there is no model 'vit_tny'"),
    ]:
        with pytest.raises(UserError) as refused:
            train(small_job(tmp_path / "run", **options))
        assert sentence in str(refused.value)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match=r"1438 training images do not fill one step of 4096"):
        train(small_job(tmp_path / "run", "batch=4096"))
    with pytest.raises(UserError, match=r"cannot take images of 7x7 \(.*; change data.size or the model"):
        train(small_job(tmp_path / "run", "data.size=7", spec="vit_tiny_patch16_224(depth=1)"))


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_that_no_generator_takes(small_job, tmp_path, seed):
    with pytest.raises(UserError, match=rf"the seed is {seed}; take one from 0 to 2\*\*63 - 1"):
        small_job(tmp_path / "run", seed=seed)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_half_precision_that_cannot_be_had_here(small_job, tmp_path):
    with pytest.raises(UserError, match="precision=fp16 needs a GPU"):
        train(small_job(tmp_path / "run", "precision=fp16"))


def test_models_without_drop_path(small_job, tmp_path):
    with pytest.raises(UserError, match=r"takes no argument drop_path_rate; train it with --set model.drop_path=null"):
        train(small_job(tmp_path / "run", "model.drop_path=0.1", spec="vgg11"))
    ViTConfig(image_size=32, patch_size=8).save_pretrained(tmp_path / "vit")
    with pytest.raises(UserError, match=r"has no drop_path_rate; train it with --set model.drop_path=null"):
        train(small_job(tmp_path / "run", "model.drop_path=0.1", spec=f'hf:"{tmp_path / "vit"}"'))


def test_it_runs_in_a_thread(small_job, tmp_path):
    """Where signals cannot be heard."""
    results = []
    job = small_job(tmp_path / "run", "epochs=1", "batch=512", "schedule.warmup_epochs=0", "precision=bf16")
    thread = threading.Thread(target=lambda: results.append(train(job)))
    thread.start()
    thread.join()
    assert results[0].epochs == 1
    assert read_run(tmp_path / "run").about["precision"] == "bf16"
