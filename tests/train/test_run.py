"""The folder of a run, read again: whole, or with a sentence that names the file, the fault and the remedy."""

import json

import pytest

from vitrefine.errors import UserError
from vitrefine.train.run import find_runs, list_runs, read_run

ABOUT = {"spec": "a(b=1)", "base_spec": "a", "data": "digits", "fingerprint": "0", "recipe": "digits", "seed": 0}
ABOUT |= {"status": "running", "precision": "no"}
RESULT = {"top1": 50.0, "top5": 99, "test_loss": float("nan"), "test_images": 12, "images_per_s": 9.0}
RESULT |= {"peak_memory_mib": None, "seconds": 1.0, "epochs": 2, "params": 3, "macs": None, "correct": "ff00"}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(ABOUT))
    (tmp_path / "result.json").write_text(json.dumps(RESULT))
    (tmp_path / "recipe.yaml").write_text("epochs: 2")
    return tmp_path


def test_what_is_there(folder):
    run = read_run(folder)
    assert (run.spec, run.base_spec, run.seed, run.alone, run.recipe_text) == ("a(b=1)", "a", 0, True, "epochs: 2")
    assert run.about == ABOUT  # also what no command asks for
    assert run.status == "killed"  # for nobody holds the lock
    assert run.result.top5 == 99
    (folder / "result.json").unlink()
    assert read_run(folder).result is None


def test_folders_that_hold_no_run(tmp_path):
    with pytest.raises(UserError, match=r"holds no run: there is no run\.json in it; name the folder of a run"):
        read_run(tmp_path)
    with pytest.raises(UserError, match="there is no folder"):
        list_runs(tmp_path / "nowhere")
    assert list_runs(tmp_path) == []


@pytest.mark.parametrize(
    ("file", "content", "fault"),
    [
        ("run.json", '{"spec": "a', "it is no JSON (EOF while parsing a string at line 1 column 11)"),
        ("run.json", "", "it is no JSON (EOF while parsing a value at line 1 column 0)"),
        ("run.json", "\0", "it is no JSON (expected value at line 1 column 1)"),
        ("run.json", "[]", "it is something else (Input should be an object)"),
        ("run.json", "{}", "it has no spec"),
        ("run.json", {"seed": "x"}, "seed must be a whole number"),
        ("run.json", {"seed": 1.5}, "seed must be a whole number"),
        ("run.json", {"status": 3}, "status must be a word or text"),
        ("run.json", {"params": "many"}, "params must be a whole number"),
        ("run.json", {"versions": ["x"]}, "versions is something else (Input should be an object)"),
        ("run.json", {"versions": {"torch": 2}}, "versions.torch must be a word or text"),
        ("result.json", "{", "it is no JSON (EOF while parsing an object at line 1 column 1)"),
        ("result.json", "3", "it is something else (Input should be an object)"),
        ("result.json", '{"top1": 1}', "it has no top5"),
        ("result.json", {"top1": "x"}, "top1 must be a number"),
        ("result.json", {"images_per_s": None}, "images_per_s must be a number"),
        ("result.json", {"correct": "zz"}, 'its "correct" does not hold 12 images'),
        ("result.json", {"correct": "ff"}, 'its "correct" does not hold 12 images'),
        ("result.json", {"test_images": 0, "correct": ""}, 'its "correct" does not hold 0 images'),
    ],
)
def test_damage(folder, file, content, fault):
    whole = ABOUT if file == "run.json" else RESULT
    (folder / file).write_text(content if isinstance(content, str) else json.dumps(whole | content))
    with pytest.raises(UserError) as refused:
        _ = read_run(folder).result
    remedy = "move this run elsewhere, or train it again"
    if file == "result.json":
        remedy = "delete it and run again with --resume"
    assert str(refused.value) == f"{folder / file} is damaged: {fault}; {remedy}"


@pytest.mark.parametrize("damage", [None, "epochs: [1", "just words", "\0"])
def test_a_recipe_that_cannot_be_read(folder, damage):
    (folder / "recipe.yaml").unlink()
    if damage is not None:
        (folder / "recipe.yaml").write_text(damage)
    with pytest.raises(UserError, match=r"recipe\.yaml cannot be read; restore it"):
        _ = read_run(folder).recipe_text


def test_lines_of_another_kind_are_no_epochs(folder):
    assert read_run(folder).epochs == []
    lines = [{"epoch": 1, "train_loss": 2}, {"epoch": 2, "top1": "x"}, {"epoch": "3"}, {"epoch": 4, "top1": 5.5}]
    text = "".join(json.dumps({"kind": "epoch", **line}) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"kind": "step", "step": 1}\n{"kind": "epoch", "epo')
    assert [(line.epoch, line.train_loss, line.top1) for line in read_run(folder).epochs] == [
        (1, 2.0, None),
        (4, None, 5.5),
    ]


def test_one_that_is_damaged_is_found_but_not_listed(folder):
    (folder / "b").mkdir()
    (folder / "b" / "run.json").write_text("{")
    assert find_runs(folder) == [folder / "b", folder]
    with pytest.raises(UserError, match=r"b/run\.json is damaged"):
        list_runs(folder)
