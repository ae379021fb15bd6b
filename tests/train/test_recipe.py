"""Recipes: what is shipped, what overrides do, and the sentence for each kind of mistake."""

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from vitrefine.errors import UserError
from vitrefine.train.recipe import Recipe, dump_recipe, load_recipe, recipe_names

PLAIN = """\
epochs: 10
batch: 8
optim:
  lr: 1e-3
schedule:
  warmup_epochs: 1
"""


def written(folder: Path, text: str, name: str = "mine.yaml") -> str:
    file = folder / name
    file.write_text(text)
    return str(file)


def sentence(folder: Path, text: str, *overrides: str) -> str:
    """What a recipe is refused with, the file's path cut to its name."""
    with pytest.raises(UserError) as caught:
        load_recipe(written(folder, text), overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{folder}/", "")


def test_shipped_recipes_are_valid_and_survive_their_text(tmp_path: Path) -> None:
    names = recipe_names()
    assert {"deit", "deit_cb_small", "deit_base", "deit_distill", "refiner_standard", "refiner_advanced"} <= set(names)
    assert {"lit_ti", "lit", "finetune", "cifar", "digits"} <= set(names)
    for name in names:
        recipe = load_recipe(name)
        assert load_recipe(written(tmp_path, dump_recipe(recipe))) == recipe


@pytest.mark.parametrize("name", recipe_names())
def test_the_head_of_a_shipped_recipe_says_command_and_result(name: str) -> None:
    import vitrefine

    text = (Path(vitrefine.__file__).parent / "recipes" / f"{name}.yaml").read_text()
    head = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    assert f"--recipe {name}" in head
    assert any(word in head for word in ("Expected", "Result"))
    assert max(map(len, text.splitlines())) <= 120


def test_published_figures() -> None:
    deit, refiner, lit = load_recipe("deit"), load_recipe("refiner_advanced"), load_recipe("lit")
    assert (deit.lr, deit.batch, deit.epochs, deit.augment.repeats) == (1e-3, 1024, 300, 3)
    assert load_recipe("deit", ["batch=512"]).lr == 5e-4
    assert load_recipe("deit_cb_small") == deit.model_copy(
        update={"augment": deit.augment.model_copy(update={"repeats": 1})}
    )
    assert (refiner.lr, refiner.batch, refiner.model.ema, refiner.schedule.cooldown_epochs) == (5e-4, 256, 0.99996, 10)
    assert refiner.epochs - refiner.schedule.cooldown_epochs == 300
    assert refiner.loss.token_labels is not None
    assert (refiner.loss.token_labels.weight, refiner.loss.token_labels.mix) == (0.5, True)
    assert (lit.optim.offset_lr_ratio, lit.schedule.warmup_epochs, lit.model.drop_path) == (0.01, 20, 0.2)
    distil = load_recipe("deit_distill").loss.distillation
    assert distil is not None
    assert (distil.kind, distil.alpha) == ("hard", 0.5)


def test_overrides_go_on_top_in_their_order(tmp_path: Path) -> None:
    file = written(tmp_path, PLAIN)
    recipe = load_recipe(file, ["optim.lr=5e-4", "augment.scale=[0.5, 1]", "optim.lr=1e-2", "compile=false"])
    assert recipe.optim.lr == 1e-2
    assert recipe.augment.scale == (0.5, 1.0)
    assert recipe.compile is False
    assert load_recipe(file, ["loss.distillation.teacher=a(pretrained=true)"]).loss.distillation is not None
    assert load_recipe(file, ["loss.token_labels={weight: 1}", "loss.token_labels=null"]).loss.token_labels is None


def test_yaml_is_read_as_people_mean_it(tmp_path: Path) -> None:
    text = PLAIN.replace("1e-3", "1E-3") + "precision: auto\nmodel: {ema: .9, drop: ~, drop_path:}\ncompile: True\n"
    recipe = load_recipe(written(tmp_path, text))
    assert (recipe.optim.lr, recipe.model.ema, recipe.model.drop, recipe.model.drop_path) == (1e-3, 0.9, None, None)
    assert recipe.compile is True
    assert "no" in sentence(tmp_path, PLAIN + "deterministic: no\n")  # YAML 1.2: a word


def test_extends_by_name_and_beside_the_file(tmp_path: Path) -> None:
    written(tmp_path, PLAIN)
    upper = written(tmp_path, "extends: mine.yaml\noptim:\n  weight_decay: 0.1\n", "upper.yaml")
    recipe = load_recipe(upper)
    assert (recipe.batch, recipe.optim.lr, recipe.optim.weight_decay) == (8, 1e-3, 0.1)
    top = written(tmp_path, "extends: deit\nbatch: 512\n", "top.yaml")
    assert load_recipe(top) == load_recipe("deit", ["batch=512"])


def test_mistakes_below_name_the_file_below(tmp_path: Path) -> None:
    written(tmp_path, PLAIN.replace("batch: 8", "batch: -8"), "lower.yaml")
    assert sentence(tmp_path, "extends: lower.yaml\n") == "lower.yaml, line 2: batch must be at least 1, not -8"


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("optm: {}\n", "mine.yaml, line 7: there is no setting optm; did you mean optim?"),
        ("lr: 1\n", "mine.yaml, line 7: there is no setting lr; did you mean optim.lr?"),
        ("model: {wibble: 1}\n", "mine.yaml, line 7: there is no setting model.wibble; model has drop_path, drop, ema"),
        ("precision: fp8\n", 'mine.yaml, line 7: precision must be auto, fp32, bf16 or fp16, not "fp8"'),
        ("compile: maybe\n", 'mine.yaml, line 7: compile must be true, false or auto, not "maybe"'),
        ("deterministic: 1\n", "mine.yaml, line 7: deterministic must be true or false, not 1"),
        ("accumulate: 1.5\n", "mine.yaml, line 7: accumulate must be a whole number, not 1.5"),
        ("accumulate: true\n", "mine.yaml, line 7: accumulate must be a whole number, not true"),
        ("model: {ema: 1}\n", "mine.yaml, line 7: model.ema must be below 1, not 1"),
        ("model:\n  ema: high\n", 'mine.yaml, line 8: model.ema must be a number, not "high"'),
        ("model: 3\n", "mine.yaml, line 7: model must be a group of settings (drop_path, drop, ema), not 3"),
        ("data: [1]\n", "mine.yaml, line 7: data must be a group of settings"),
        ("augment: {scale: [0.1]}\n", "mine.yaml, line 7: augment.scale must be a list of 2, not [0.1]"),
        ("augment: {scale: 0.1}\n", "mine.yaml, line 7: augment.scale must be a list in brackets"),
        ("augment: {scale: [1, 0.5]}\n", "mine.yaml, line 7: augment.scale: "),
        ("loss: {distillation: {kind: soft}}\n", "mine.yaml, line 7: loss.distillation.teacher is missing; add it"),
        ("epochs: 3\n", "mine.yaml, line 7: epochs is said twice, first in mine.yaml, line 1; drop one"),
        ("extends: [deit]\n", "mine.yaml, line 7: extends must be the name of one recipe, not ['deit']"),
        ("data: &a {}\naugment: *a\n", "mine.yaml, line 8: this is no YAML: a recipe has no references"),
        ("data: {\n", "mine.yaml, line 8: this is no YAML: "),
        ("\tdata: 1\n", "mine.yaml, line 7: this is no YAML: "),
        ("? [a, b]\n: 1\n", "mine.yaml, line 7: the name of a setting must be a word"),
        ("data: !!python/name:os.system ''\n", "mine.yaml, line 7: tag:yaml.org,2002:python/name:os.system is nothing"),
        ("accumulate: !!int two\n", "mine.yaml, line 7: two is no int"),
        (f"accumulate: {'9' * 5000}\n", "mine.yaml, line 7: 9999"),
        ("stall_epochs: 99999999999999999999\n", "mine.yaml, line 7: stall_epochs must be at most 2"),
        ("data: " + "[" * 1500 + "\n", "mine.yaml: this is no YAML"),
        ("data: \x07\n", "mine.yaml: this is no YAML"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, extra: str, expected: str) -> None:
    assert sentence(tmp_path, PLAIN + extra).startswith(expected)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.lrr=1", "--set optim.lrr=1: there is no setting optim.lrr; did you mean optim.lr?"),
        ("optim.lr=-1", "--set optim.lr=-1: optim.lr must be above 0, not -1"),
        ("optim.lr.value=1", "--set optim.lr.value=1: optim.lr must be a number, not a group of settings"),
        ("optim=1", "--set optim=1: optim must be a group of settings (name, lr, "),
        (
            "optim.name=madgrad",
            "--set optim.name=madgrad: optim.name: madgrad cannot be continued from a checkpoint; take adamw",
        ),
        (
            "optim.name=adamww",
            "--set optim.name=adamww: optim.name: timm has no optimiser 'adamww'; did you mean adamw",
        ),
        ("optim.betas=[0.9, 1.5]", "--set optim.betas=[0.9, 1.5]: optim.betas must be below 1, not 1.5"),
        ("loss.distillation.alpha=1", "--set loss.distillation.alpha=1: loss.distillation.teacher is missing; add it"),
        ("optim.lr", "--set optim.lr is no override; write one as optim.lr=1e-3"),
        ("optim..lr=1", "--set optim..lr=1 is no override; write one as optim.lr=1e-3"),
        ("optim.lr= ", "--set optim.lr=  has no value; for none, write optim.lr=null"),
        ("optim.lr=[1", "--set optim.lr=[1: this is no YAML: "),
        ("optim.lr=1e999", "--set optim.lr=1e999: optim.lr must be a finite number"),
        ("optim.name=AdamW", "--set optim.name=AdamW: optim.name: timm has no optimiser 'AdamW'; did you mean adamw?"),
    ],
)
def test_a_mistaken_override_is_named(tmp_path: Path, override: str, expected: str) -> None:
    assert sentence(tmp_path, PLAIN, override).startswith(expected)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["accumulate=3"], "--set accumulate=3: batch=8 is not divisible by accumulate=3; change one of them"),
        (["accumulate=8"], "--set accumulate=8: mixup and cutmix mix two images, but a step has only one"),
        (["augment.repeats=9"], "--set augment.repeats=9: augment.repeats=9 is more than batch=8; lower it"),
        (
            ["schedule.warmup_epochs=10"],
            "--set schedule.warmup_epochs=10: schedule.warmup_epochs=10 and schedule.cooldown_epochs=0 "
            "leave nothing of epochs=10; lower them or train longer",
        ),
        (["epochs=1"], "--set epochs=1: schedule.warmup_epochs=1 and schedule.cooldown_epochs=0 leave nothing of"),
        (["schedule.cooldown_epochs=9"], "--set schedule.cooldown_epochs=9: schedule.warmup_epochs=1 and "),
        (
            ["schedule.min_lr=1e-2"],
            "--set schedule.min_lr=1e-2: schedule.min_lr=0.01 is above the learning rate 0.001;",
        ),
        (
            ["optim.lr_batch=1024"],
            "--set optim.lr_batch=1024: schedule.min_lr=1e-05 is above the learning rate 7.8125e-06 "
            "(optim.lr · batch / optim.lr_batch); lower it",
        ),
        (["optim.momentum=0.9"], "--set optim.momentum=0.9: optim.momentum is nothing that adamw has; make it null"),
        (["optim.betas=[0.9]"], "--set optim.betas=[0.9]: optim.betas must be 2 numbers for adamw"),
        (["optim.betas=[]"], "--set optim.betas=[]: optim.betas must be 2 numbers for adamw"),
        (
            ["loss.token_labels.mix=true", "loss.distillation.teacher=x"],
            "--set loss.distillation.teacher=x: loss.token_labels and loss.distillation do not go together",
        ),
        (
            ["loss.distillation={teacher: x, temperature: 3}"],
            "--set loss.distillation={teacher: x, temperature: 3}: loss.distillation.temperature has no effect where",
        ),
        (
            ["loss.kind=bce", "loss.token_labels.weight=1"],
            "--set loss.kind=bce: loss.token_labels is defined with cross-entropy; set loss.kind to ce",
        ),
        (["loss.mix_token=true"], "--set loss.mix_token=true: there is no setting loss.mix_token; did you mean"),
    ],
)
def test_settings_that_do_not_go_together(tmp_path: Path, overrides: list[str], expected: str) -> None:
    assert sentence(tmp_path, PLAIN, *overrides).startswith(expected)


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"there is no recipe 'diet', but deit; give a YAML file or one of cifar, cifar_finetune, cifar_quick",
    ):
        load_recipe("diet")
    with pytest.raises(UserError, match="there is no recipe"):
        load_recipe(tmp_path)
    with pytest.raises(UserError, match="there is no recipe"):
        load_recipe("x" * 5000)
    assert sentence(tmp_path, "") == "mine.yaml: epochs is missing; add it"
    assert sentence(tmp_path, "- 1\n") == "mine.yaml holds no settings; a recipe has lines such as epochs: 300"
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(UserError, match=r"binary\.yaml is no text, so it is no recipe"):
        load_recipe(tmp_path / "binary.yaml")
    written(tmp_path, "batch: 8\noptim: {lr: 1}\n", "lower.yaml")
    assert sentence(tmp_path, "extends: lower.yaml\n") == "mine.yaml: epochs is missing; add it"
    for same in ("mine.yaml", f"../{tmp_path.name}/mine.yaml"):
        assert f"mine.yaml extends {same}, which extends it in turn" in sentence(tmp_path, f"extends: {same}\n")
    wrong = "mine.yaml extends what is not there: there is no recipe 'deti', but deit; give a YAML file or one of"
    assert sentence(tmp_path, "extends: deti\n").startswith(wrong)


def test_batches_are_dealt_out_evenly() -> None:
    recipe = load_recipe("deit", ["accumulate=2"])
    assert recipe.per_process(8) == 64
    with pytest.raises(UserError, match="batch=1024 cannot be dealt out to 3 processes times accumulate=2"):
        recipe.per_process(3)


def test_an_image_alone_is_not_mixed_with_itself() -> None:
    overrides = ["batch=8", "accumulate=4", "optim.lr_batch=8"]
    with pytest.raises(UserError, match="mixup and cutmix mix two images, but 2 processes take one each"):
        load_recipe("deit", overrides).per_process(2)
    assert load_recipe("deit", [*overrides, "augment.mixup=0", "augment.cutmix=0"]).per_process(2) == 1


def test_arguments_of_the_model() -> None:
    assert load_recipe("digits").model_arguments() == {}
    expected = {"drop_path_rate": 0.133, "token_labels": True, "mix_token": True}
    assert load_recipe("refiner_advanced").model_arguments() == expected


def test_recipes_cannot_change_under_a_run() -> None:
    recipe = load_recipe("digits")
    with pytest.raises(ValueError, match="frozen"):
        recipe.epochs = 3  # type: ignore[misc]
    assert isinstance(recipe, Recipe)


def test_every_setting_and_recipe_is_documented() -> None:
    page = Path(__file__).parents[2] / "docs" / "recipes.md"
    text = page.read_text()

    def settings(group: type[BaseModel]) -> Iterator[str]:
        for name, field in group.model_fields.items():
            inner = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
            groups = [kind for kind in inner if issubclass(kind, BaseModel)]
            yield from settings(groups[0]) if groups else [name]

    for name in settings(Recipe):
        assert f"`{name}`" in text or f".{name}`" in text, name
    for name in recipe_names():
        assert f"| `{name}` |" in text, name
