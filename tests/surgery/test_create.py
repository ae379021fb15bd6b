"""Models from specs and specs from models; the verbs; and the documents, whose code and tables have to stay true."""

import copy
import importlib.util
import inspect
import re
import sys
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

import vitrefine
from vitrefine.errors import UserError
from vitrefine.surgery import registry, verbs
from vitrefine.surgery.create import create, report_of, spec_of
from vitrefine.surgery.graft import RECORD, strip, surgery_of
from vitrefine.surgery.operate import apply
from vitrefine.surgery.spec import Call, parse

DOCS = Path(__file__).parents[2] / "docs"
SMALL_LIT = "lit_ti(depths=[1,1,1,1],embed_dims=[16,32,64,64],img_size=64,num_classes=5,num_heads=[1,1,2,2])"


def on_meta(name: str, **kwargs) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name, **kwargs)


def test_create_is_base_then_modifications_in_order():
    torch.manual_seed(0)
    model = create("test_vit(num_classes=3)+refiner+cb(layers=all)")
    torch.manual_seed(0)
    by_hand = timm.create_model("test_vit", num_classes=3)
    apply(by_hand, "refiner")
    apply(by_hand, "cb", layers="all")
    x = torch.randn(2, 3, 160, 160)
    assert torch.equal(model.eval()(x), by_hand.eval()(x))
    assert [call.name for call in surgery_of(model).modifications] == ["refiner", "cb"]
    assert surgery_of(model).base == Call("test_vit", {"num_classes": 3})


@pytest.mark.parametrize(
    ("spec", "kwargs", "canonical"),
    [
        ("timm:test_vit + cb( layers=upper )", {}, "test_vit+cb"),
        ("test_vit+cb", {"num_classes": 10}, "test_vit(num_classes=10)+cb"),
        ("test_vit(num_classes=3)", {"num_classes": 10}, "test_vit(num_classes=10)"),
        ("test_vit", {"pretrained": False, "img_size": [64, 96]}, "test_vit(img_size=[64,96])"),
        ("test_vit(pretrained=false)+cb_s", {}, "test_vit+cb_s"),
        (SMALL_LIT + "+cb", {}, SMALL_LIT + "+cb"),
    ],
)
def test_a_model_remembers_its_spec(spec, kwargs, canonical):
    model = create(spec, **kwargs)
    assert str(spec_of(model)) == canonical
    assert str(spec_of(create(spec_of(model)))) == canonical
    assert str(spec_of(copy.deepcopy(model))) == canonical


def test_a_spec_may_be_parsed_already():
    assert spec_of(create(parse("test_vit+cb"))) == parse("test_vit+cb")


def test_nothing_is_allocated_under_the_meta_device():
    with torch.device("meta"):
        model = create("test_vit+refiner+cb_s")
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert model.state_dict().keys() == create("test_vit+refiner+cb_s").state_dict().keys()
    assert str(spec_of(model)) == "test_vit+refiner+cb_s"


@pytest.mark.parametrize(
    ("spec", "kwargs", "sentence"),
    [
        ("test_vit+refinr", {}, "there is no modification 'refinr'; did you mean refiner"),
        ("test_vit+cb(postion=end)", {}, "did you mean position"),
        ("no_such_model", {}, "no_such_model"),
        ("test_vit", {"norm_layer": nn.LayerNorm}, "norm_layer cannot be an argument of test_vit here: a spec holds"),
        ("test_vit", {"depth": float("nan")}, "depth cannot be an argument of test_vit here"),
    ],
)
def test_a_bad_spec_gets_one_sentence(spec, kwargs, sentence):
    with pytest.raises(UserError) as error:
        create(spec, **kwargs)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "kwargs", "spec"),
    [
        ("test_vit", {}, "test_vit"),
        ("vit_tiny_patch16_224.augreg_in21k", {}, "vit_tiny_patch16_224.augreg_in21k"),
        (
            "test_vit",
            {"num_classes": 7, "img_size": 96, "in_chans": 1},
            "test_vit(img_size=96,in_chans=1,num_classes=7)",
        ),
        ("test_vit", {"img_size": (64, 96)}, "test_vit(img_size=[64,96])"),
        ("test_vit", {"global_pool": "avg"}, "test_vit(global_pool=avg)"),
        ("test_vit", {"drop_path_rate": 0.2}, "test_vit(drop_path_rate=0.2)"),
        ("swin_tiny_patch4_window7_224", {"img_size": 256}, "swin_tiny_patch4_window7_224(img_size=256)"),
        ("levit_128s", {"num_classes": 5, "in_chans": 1}, "levit_128s(in_chans=1,num_classes=5)"),
        ("refined_vit_s", {"num_classes": 5}, "refined_vit_s(num_classes=5)"),
    ],
)
def test_the_spec_of_a_model_of_timm_is_read_off(name, kwargs, spec):
    model = on_meta(name, **kwargs)
    assert str(spec_of(model)) == spec
    assert RECORD not in vars(model)
    apply(model, "cb_s")
    assert str(spec_of(model)) == spec + "+cb_s"


def test_a_head_exchanged_later_is_in_the_spec():
    model = create("test_vit+cb")
    model.reset_classifier(4)
    assert str(spec_of(model)) == "test_vit(num_classes=4)+cb"


def test_a_model_on_the_hub_is_one_of_timm(monkeypatch):
    def fetch(model_id, cache_dir):
        config = {"architecture": "test_vit", "num_classes": 37, "mean": (0.1, 0.2, 0.3)}
        return config, "test_vit", {"img_size": 64, "num_classes": 37}

    monkeypatch.setattr("timm.models._factory.load_model_config_from_hf", fetch)
    model = create("hf_hub:owner/name+cb")
    monkeypatch.undo()
    assert str(spec_of(model)) == "test_vit(img_size=64,num_classes=37)+cb"


@pytest.mark.parametrize("base", ["test_vit(num_classes=4)", "torchvision:vit_b_32(num_classes=4)"])
def test_stripping_leaves_the_base(base):
    with torch.device("meta"):
        assert str(spec_of(strip(create(f"{base}+cb")))) == base


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: nn.Linear(2, 2), "Linear was not made by vitrefine.create, and only a model of timm's shows"),
        # Six heads instead of three: no weight has another shape, and yet it is another model.
        (lambda: on_meta("vit_tiny_patch16_224", num_heads=6), "its blocks.0.attn.num_heads is 6, not 3"),
        (lambda: on_meta("vit_tiny_patch16_224", depth=13), "blocks.12.norm1.weight is a weight"),
        (lambda: on_meta("vit_tiny_patch16_224", depth=11), "it has no blocks.11.norm1.weight"),
        (lambda: on_meta("vit_tiny_patch16_224", act_layer=nn.ReLU), "its blocks.0.mlp.act is a ReLU, not a GELU"),
        (lambda: on_meta("hiera_tiny_224", img_size=256), "its pos_embed is 1×4096×96, not 1×3136×96"),
    ],
)
def test_a_model_that_no_spec_describes_is_refused(make, sentence):
    model = make()
    with pytest.raises(UserError) as error:
        spec_of(model)
    assert sentence in str(error.value)
    assert "create it with vitrefine.create(" in str(error.value)


def test_a_part_exchanged_later_is_refused():
    model = create("test_vit+cb")
    model.blocks[0].mlp = nn.Identity()
    with pytest.raises(UserError, match=r"was changed since vitrefine\.create, and it has no blocks\.0\.mlp"):
        spec_of(model)


def test_the_report_is_of_everything_so_far():
    model = create("test_vit+refiner")
    second = apply(model, "cb_s")
    report = report_of(model)
    assert [call.name for call in report.modifications] == ["refiner", "cb_s"]
    assert report.changes[-len(second.changes) :] == second.changes
    assert report.new_parameters == _count(model) - _count(timm.create_model("test_vit"))
    assert report_of(timm.create_model("test_vit")).changes == ()


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


VERBS = {
    "broadcast": "cb",
    "refine": "refiner",
    "dla": "dla",
    "expand": "expansion",
    "talk": "talking_heads",
    "uniform": "uniform_head",
    "squeeze": "se",
    "deform": "dtm",
    "less_attention": "less_attention",
    "extra_block": "extra_block",
}


@pytest.mark.parametrize(("verb", "name"), VERBS.items())
def test_a_verb_has_the_options_of_its_modification(verb, name):
    function = getattr(vitrefine, verb)
    options = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    expected = {key: option.default for key, option in registry.get(name).options.items()}
    if verb == "broadcast":  # all or the upper half: each kind has its own
        assert options.pop("layers") is None
        expected.pop("layers")
    assert registry.validate(Call(name, options)) == {}
    assert options.keys() == expected.keys()


def test_every_modification_has_a_verb():
    kinds = inspect.signature(verbs.broadcast).parameters["kind"].annotation.__args__
    assert {*VERBS.values(), *kinds} == set(registry.MODULES)


def test_verbs_apply():
    model = timm.create_model("test_vit")
    assert str(vitrefine.broadcast(model, "cb_s").modifications[0]) == "cb_s"
    assert str(vitrefine.refine(model, expansion=2).modifications[0]) == "refiner(expansion=2)"
    model = timm.create_model("test_vit")
    assert str(vitrefine.broadcast(model, layers=[0, 1]).modifications[0]) == "cb(layers=0-1)"


def blocks_of(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def test_the_example_in_the_guide_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks_of("surgery.md"))
    assert "pretrained=True" in code
    exec(compile(code.replace("pretrained=True", "pretrained=False"), "surgery.md", "exec"), {})


def test_the_guide_lists_every_modification_and_option():
    rows = []
    for name in registry.MODULES:
        found = registry.get(name)
        rows.append(f"### `+{name}`\n\n{found.summary[0].upper()}{found.summary[1:]}.\n")
        table = [f"| `{key}={registry.show(o.default)}` | {o.takes} | {o.help} |" for key, o in found.options.items()]
        if table:
            rows.append("\n".join(["| option and default | takes | meaning |", "|---|---|---|", *table]) + "\n")
    begin, end = "<!-- options: begin -->\n\n", "\n<!-- options: end -->"
    written = (DOCS / "surgery.md").read_text().partition(begin)[2].partition(end)[0]
    assert written == "\n".join(rows)


def test_the_worked_example_of_a_new_modification_runs(tmp_path, monkeypatch):
    module, line, check = blocks_of("adding-a-modification.md")
    ((name, home),) = eval(f"{{{line}}}").items()
    file = tmp_path / "module.py"
    file.write_text(module)
    found = importlib.util.spec_from_file_location(home, file)
    loaded = importlib.util.module_from_spec(found)
    monkeypatch.setitem(registry.MODULES, name, home)
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setitem(sys.modules, home, loaded)
    found.loader.exec_module(loaded)
    scope: dict = {}
    exec(compile(check, "adding-a-modification.md", "exec"), scope)
    (test,) = [value for key, value in scope.items() if key.startswith("test_")]
    test(tmp_path)
