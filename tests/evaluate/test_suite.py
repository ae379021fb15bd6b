"""The whole evaluation: an object that prints itself, JSON, and what a run's folder keeps."""

import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from PIL import Image

import vitrefine
from vitrefine.data.open import open_data
from vitrefine.errors import UserError
from vitrefine.evaluate.evaluation import FILE, add_to_run, read_evaluations
from vitrefine.evaluate.rfc import RATIOS
from vitrefine.evaluate.speed import measure_speed
from vitrefine.evaluate.suite import SUITES, evaluate

from .conftest import Linear, small_set


@pytest.fixture
def call(data, tmp_path):
    def run(suites=("accuracy",), model=None, **options):
        usual = {"device": "cpu", "cache": tmp_path / "cache", "workers": 0, "repeats": 2, "ratios": (0.9, 1.2)}
        return evaluate(model or Linear(), data, suites, **{**usual, **options})

    return run


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("vitrefine.evaluate.suite.measure_speed", partial(measure_speed, seconds=0.01))


def test_all(call, quick):
    found = call("all")
    shown = str(found)
    assert shown.startswith("Linear on 60 images of small, CPU")
    for words in ("top-1", "ECE", "central half black", "FGSM, ε = 8/255", "2 draws", "crop ratio (RFC)", "images/s"):
        assert words in shown
    assert all(len(line) <= 120 for line in shown.splitlines())
    assert set(SUITES) <= found.as_dict().keys()


def test_only_what_was_asked_for(call):
    found = call(["rfc"]).as_dict()
    assert set(SUITES) & found.keys() == {"rfc"}
    assert [point["ratio"] for point in found["rfc"]["sweep"]] == [0.9, 1.0, 1.2]
    assert min(RATIOS) < 1 < max(RATIOS)
    assert {1.02, 1.13} <= set(RATIOS)  # those of the paper's Table 5 lie between


def test_json(call, tmp_path):
    found = call()
    found.write(tmp_path / "out.json")
    read = json.loads((tmp_path / "out.json").read_text())
    assert read == found.as_dict()
    assert read["accuracy"]["top1"].keys() == {"value", "low", "high", "over", "count"}
    assert read["settings"]["crop_ratio"] == 1.0


def test_repeatable_without_a_cache(call):
    suites = ["accuracy", "robustness", "rfc"]
    first, again = (call(suites, cache=None).as_dict() for _ in range(2))
    assert first == again
    assert first["robustness"] != call(suites, cache=None, seed=1).as_dict()["robustness"]


def test_a_second_suite_computes_only_what_is_new(call):
    class Counting(Linear):
        images = 0

        def forward(self, images):
            Counting.images += len(images)
            return super().forward(images)

    call(["accuracy"], Counting())
    assert Counting.images == 60
    call(["accuracy", "rfc"], Counting())
    assert Counting.images == 60 + 2 * 60


def test_a_cache_in_the_users_folder(call, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    call(cache="~/own")
    assert list((tmp_path / "own").glob("*.npz"))


def test_of_a_model_in_memory_nothing_is_kept_unasked(data, tmp_path, monkeypatch):
    """Neither code nor hooks show in its weights."""
    monkeypatch.setenv("VITREFINE_CACHE", str(tmp_path))
    model = Linear()
    first = evaluate(model, data, device="cpu")
    model.register_forward_hook(lambda _, __, logits: -logits)
    assert evaluate(model, data, device="cpu").accuracy != first.accuracy
    assert not list(tmp_path.iterdir())


def test_a_run_keeps_its_evaluations(call, quick, tmp_path):
    """Parts join, other settings stand beside, and a damaged file harms nothing."""
    add_to_run(tmp_path, call(["accuracy"]))
    add_to_run(tmp_path, call(["speed"]))
    (found,) = read_evaluations(tmp_path)
    assert set(SUITES) & found.keys() == {"accuracy", "speed"}
    add_to_run(tmp_path, call(["accuracy"], limit=20))
    assert [each["images"] for each in read_evaluations(tmp_path)] == [60, 20]
    (tmp_path / FILE).write_text("{")
    assert read_evaluations(tmp_path) == []


def test_a_run_keeps_its_evaluations_in_any_locale(call, tmp_path):
    add_to_run(tmp_path, call(["robustness"]))  # of which labels are in Greek
    code = "import sys, pathlib; from vitrefine.evaluate.evaluation import read_evaluations as read; "
    code += "print(len(read(pathlib.Path(sys.argv[1]))))"
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=plain, capture_output=True, text=True, check=True
    )
    assert found.stdout == "1\n"


def test_broken_images_are_told_of(tmp_path):
    for number in range(1000):
        place = tmp_path / "data" / str(number % 10)
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(place / f"{number:04d}.bmp")
    data = open_data(str(tmp_path / "data"))
    with open(data.test_source.name_of(7), "w") as file:
        file.write("no image")
    options = {"device": "cpu", "workers": 0, "size": (8, 8), "cache": tmp_path / "cache"}
    for _ in range(2):  # also of predictions that are kept
        found = evaluate(Linear(), data, **options)
        assert found.images == 199
        assert found.notes[-1] == "1 of 200 test images cannot be read, and are left out"


def test_names(tmp_path):
    spec = "vit_tiny_patch16_224(img_size=8,patch_size=4,depth=1,embed_dim=24,num_heads=3,num_classes=10)"
    path = tmp_path / "model.safetensors"
    vitrefine.save(vitrefine.create(spec), path)
    found = evaluate(str(path), small_set(), device="cpu", cache=tmp_path)
    assert found.model.startswith("vit_tiny_patch16_224(")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(call, quick):
    """Everything but chance is as on a CPU; and that is repeatable."""
    here, there, again = (call("all", device=device, cache=None) for device in ("cpu", "cuda", "cuda"))
    assert there.accuracy.top1 == here.accuracy.top1
    assert there.accuracy.loss == pytest.approx(here.accuracy.loss, rel=1e-4)
    assert there.robustness == again.robustness
    assert there.rfc == here.rfc


def test_complaints(call):
    with pytest.raises(
        UserError, match="there is no suite 'speeed'; choose one of accuracy, robustness, rfc, speed, all"
    ):
        call(["speeed"])
    for name, value in (("repeats", 0), ("workers", -1), ("batch", 0), ("limit", 0)):
        with pytest.raises(UserError, match=f"--{name} is {value}; at least"):
            call(["robustness"], **{name: value})
    with pytest.raises(UserError, match="a model in memory has its weights already; leave pretrained out"):
        call(pretrained=True)
    with pytest.raises(UserError, match="there is no data set or folder 'nowhere'"):
        evaluate(Linear(), "nowhere")
