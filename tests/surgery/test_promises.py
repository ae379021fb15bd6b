"""What surgery promises, each promise over models of every kind and every modification.

A small model of each kind stands for its family, so that the whole matrix is quick; those of `FEW` are in every run,
the others under `full`. A modification that cannot apply to a model is checked to say so and to leave it untouched.
"""

import copy
import dataclasses
import functools
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models.mlp_mixer import MlpMixer
from timm.models.nest import Nest
from timm.models.volo import VOLO
from torch import Tensor, nn

from vitrefine.errors import UserError
from vitrefine.surgery.census import EQUAL_AT_START, disturb
from vitrefine.surgery.create import create, report_of, spec_of
from vitrefine.surgery.graft import RECORD, lineage, strip
from vitrefine.surgery.newcomer import Newcomer
from vitrefine.surgery.operate import Report, apply
from vitrefine.surgery.registry import names

SWIN = {"img_size": 56, "depths": (2, 2), "num_heads": (2, 4), "embed_dim": 16}
SAM = {"depth": 2, "img_size": 64, "embed_dim": 48, "num_heads": 3, "window_size": 2, "neck_chans": 16}
TNT = {"depth": 2, "img_size": 64, "embed_dim": 48, "inner_dim": 12, "num_heads_outer": 3, "num_heads_inner": 3}
TWINS = {"depths": (2, 2, 1, 1), "embed_dims": (16, 32, 64, 128), "num_heads": (1, 2, 4, 8)}
VOLOS = {"img_size": 64, "embed_dims": (24, 48, 48, 48), "num_heads": (2, 4, 4, 4), "num_classes": 10}
SEQUENCER = {"layers": (1, 1, 1, 1), "img_size": 64, "embed_dims": (24, 48, 48, 48), "hidden_sizes": (6, 12, 12, 12)}


def _timm(name: str, **arguments: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, num_classes=10, **arguments)


# A model, and the side of its images.
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "vit": (_timm("test_vit"), 160),
    "cait": (_timm("cait_xxs24_224", depth=2, img_size=64), 64),
    "edgenext": (_timm("edgenext_xx_small", depths=(1, 2, 2, 2)), 64),
    "eva": (_timm("vit_tiny_patch16_dinov3_qkvb", depth=2, img_size=64), 64),
    "hiera": (_timm("hiera_tiny_224", stages=(1, 1, 1, 1), embed_dim=24, img_size=64), 64),
    "levit": (_timm("levit_128s", depth=(1, 1, 1), img_size=64), 64),
    "mixer": (lambda: MlpMixer(num_blocks=2, img_size=64, embed_dim=48, num_classes=10), 64),
    "mobilevit": (_timm("mobilevit_xxs"), 64),
    "nest": (lambda: Nest(64, embed_dims=(24, 48, 96), num_heads=(2, 4, 8), depths=(1, 1, 1), num_classes=10), 64),
    "pvt_v2": (_timm("pvt_v2_b0", depths=(1, 1, 1, 1)), 64),
    "sam": (_timm("samvit_base_patch16_224", **SAM, global_attn_indexes=(1,)), 64),
    "swin": (_timm("swin_tiny_patch4_window7_224", **SWIN), 56),
    "twins": (_timm("twins_svt_small", **TWINS), 56),
    "volo": (lambda: VOLO((1, 1, 1, 1), **VOLOS), 64),
    "xcit": (_timm("xcit_nano_12_p8_224", depth=2, img_size=64), 64),
    # Only under `full`:
    "beit": (_timm("beit_base_patch16_224", depth=2, img_size=64, embed_dim=48, num_heads=3), 64),
    "coat": (_timm("coat_tiny", img_size=64), 64),
    "convit": (_timm("convit_tiny", depth=2, img_size=64, local_up_to_layer=1), 64),
    "crossvit": (_timm("crossvit_tiny_240", depth=((1, 2, 0),)), 240),
    "davit": (_timm("davit_tiny", depths=(1, 1), embed_dims=(24, 48), num_heads=(1, 2)), 64),
    "deit": (_timm("deit_tiny_distilled_patch16_224", depth=2, img_size=64), 64),
    "efficientformer_v2": (_timm("efficientformerv2_s0", img_size=64), 64),
    "efficientvim": (_timm("efficientvim_m1"), 64),
    "efficientvit_mit": (_timm("efficientvit_b0"), 64),
    "efficientvit_msra": (_timm("efficientvit_m0"), 224),
    "fastvit": (_timm("fastvit_sa12"), 64),
    "halonet": (_timm("halonet_h1"), 256),
    "iformer": (_timm("iformer_t"), 64),
    "maxxvit": (_timm("maxvit_pico_rw_256", img_size=64, depths=(1, 1, 1, 1)), 64),
    "mobilenetv4": (_timm("mobilenetv4_hybrid_medium"), 64),
    "mvitv2": (_timm("mvitv2_tiny"), 224),
    "naflexvit": (_timm("naflexvit_base_patch16_gap", depth=2, embed_dim=48, num_heads=3), 64),
    "nextvit": (_timm("nextvit_small"), 64),
    "pit": (_timm("pit_ti_224", depth=(1, 1, 1), img_size=64), 64),
    "sequencer": (_timm("sequencer2d_s", **SEQUENCER), 64),
    "shvit": (_timm("shvit_s1"), 64),
    "swiftformer": (_timm("swiftformer_xs"), 64),
    "swin_v2": (_timm("swinv2_tiny_window8_256", **SWIN | {"img_size": 64, "window_size": 8}), 64),
    "tiny_vit": (_timm("tiny_vit_5m_224", depths=(1, 1, 1, 1)), 64),
    "tnt": (_timm("tnt_s_legacy_patch16_224", **TNT), 64),
    "visformer": (_timm("visformer_tiny"), 224),
}
FEW = list(MODELS)[:15]
OPTIONS = [
    "cb(position=mid)",
    "cb(block=attention)",
    "cb_s(position=front,layers=upper)",
    "refiner(share=1)",
    "refiner(variant=official)",
    'refiner(constraint="row+col")',
    "uniform_head(mode=append)",
    "uniform_head(mode=widen)",
    "extra_block(kind=mlp)",
    "cb+refiner+se",
]
MATRIX = [(name, modification) for name in MODELS for modification in names()]
MATRIX += [(name, modification) for name in ("vit", "swin") for modification in OPTIONS]
MATRIX += [("swin", "dtm(variant=paper)"), ("pvt_v2", "less_attention+dtm"), ("pvt_v2", "dtm(variant=paper)")]

# Tracing a model takes seconds: in every run, each modification on one model that it is made for.
TRACED = {("vit", modification) for modification in [*names(), *OPTIONS]}
TRACED |= {("swin", "refiner"), ("swin", "dtm"), ("swin", "less_attention"), ("pvt_v2", "dtm"), ("xcit", "refiner")}


def over(cases: list[tuple[str, str]], few: Callable[[str, str], bool]) -> pytest.MarkDecorator:
    """One test a case; those that are not among the few are marked `full`."""
    marked = [pytest.param(*case, marks=() if few(*case) else pytest.mark.full) for case in cases]
    return pytest.mark.parametrize(("name", "modification"), marked)


in_every_run = over(MATRIX, lambda name, _: name in FEW)
traced = over(MATRIX, lambda *case: case in TRACED)


@dataclasses.dataclass
class Case:
    """An original, a copy of it that was operated on, and an input."""

    original: nn.Module
    model: nn.Module
    report: Report
    image: Tensor
    before: Tensor

    @functools.cached_property
    def new(self) -> list[str]:
        """The names of the weights that are new."""
        old = self.original.state_dict()
        return [name for name in self.model.state_dict() if name not in old]


@functools.cache
def _original(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    make, size = MODELS[name]
    torch.manual_seed(0)
    model, image = disturb(make()), torch.randn(2, 3, size, size)
    settle(model, image)
    return model, image, run(model, image)


def settle(model: nn.Module, image: Tensor) -> None:
    """Give batch norms the statistics of what they see: with those of their start some outputs are in the thousands."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    run(model.train(), image)
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum
    model.eval()


@functools.cache
def _operated(name: str, modification: str) -> tuple[nn.Module, Report] | UserError:
    model = copy.deepcopy(_original(name)[0])
    torch.manual_seed(1)
    try:
        return model, apply(model, modification)
    except UserError as error:
        return error


def operated(name: str, modification: str) -> Case:
    """A case of its own for a test; skips where the modification does not apply, which other tests look into."""
    outcome = _operated(name, modification)
    if isinstance(outcome, UserError):
        pytest.skip(f"+{modification} does not apply: {outcome}")
    original, image, before = _original(name)
    return Case(original, copy.deepcopy(outcome[0]), outcome[1], image, before)


def run(model: nn.Module, image: Tensor) -> Tensor:
    with torch.no_grad():
        return first(model(image))


def first(output: Any) -> Tensor:
    """The logits: some models return a second head's beside them."""
    return output if isinstance(output, Tensor) else output[0]


def difference(one: Tensor, other: Tensor) -> float:
    return ((one.float() - other.float()).norm() / other.float().norm()).item()


def stir(case: Case, amount: float = 0.05) -> None:
    """Move the new weights off their start, where some are zero and hide others."""
    generator = torch.Generator().manual_seed(int(100 * amount))
    for name, parameter in case.model.named_parameters():
        if name in case.new:
            parameter.data.add_(amount * torch.randn(parameter.shape, generator=generator))


@in_every_run
def test_refusals_leave_the_model_untouched(name: str, modification: str) -> None:
    if not isinstance(_operated(name, modification), UserError):
        pytest.skip("it applies")
    original, image, before = _original(name)
    model = copy.deepcopy(original)
    with pytest.raises(UserError, match=r"\w+ \w+") as raised:
        apply(model, modification)
    assert "\n" not in str(raised.value)
    assert [type(module) for module in model.modules()] == [type(module) for module in original.modules()]
    assert list(model.state_dict()) == list(original.state_dict())
    assert torch.equal(run(model, image), before)


@in_every_run
def test_the_report_lists_what_was_changed(name: str, modification: str) -> None:
    case = operated(name, modification)
    assert case.report.changes
    changed = {change.where for change in case.report.changes if change.where}  # a note on the whole model has none
    for where in changed:
        now, then = case.model.get_submodule(where), case.original.get_submodule(where)
        assert type(now) is not type(then) or set(now.state_dict()) != set(then.state_dict())
    # CoaT has one MLP under several names, of which the report gives the first.
    own = {name for name, _ in (*case.model.named_parameters(), *case.model.named_buffers())}
    assert all(any(weight.startswith(f"{where}.") for where in changed) for weight in own.intersection(case.new))
    counts = [sum(p.numel() for p in model.parameters()) for model in (case.model, case.original)]
    assert case.report.new_parameters == counts[0] - counts[1]
    assert all(change.where in str(case.report) for change in case.report.changes)


@in_every_run
def test_weights_keep_their_names_and_values(name: str, modification: str) -> None:
    case = operated(name, modification)
    now = case.model.state_dict()
    for key, value in _weights(case):
        if key not in now or not torch.equal(now[key], value):
            assert _was_taken_out(key, case, modification), key


def _was_taken_out(key: str, case: Case, modification: str) -> bool:
    """Whether the report of a modification that takes parts out names the part of this weight."""
    takes_out = "less_attention" in modification or "variant=paper" in modification
    owner = key.rpartition(".")[0]
    named = any(f"{owner}.".startswith(f"{change.where}.") for change in case.report.changes if change.where)
    others = {part for c in case.report.changes for part in c.what.partition(" with its ")[2].split(", ")}
    return takes_out and (named or not others.isdisjoint(owner.split(".")))


@in_every_run
def test_weights_of_the_original_load(name: str, modification: str) -> None:
    case = operated(name, modification)
    weights = {key: value + 1 if value.is_floating_point() else value for key, value in _weights(case)}
    newcomers = [where for where, module in case.model.named_modules() if isinstance(module, Newcomer)]
    missing = {key for key in case.new if not any(key.startswith(f"{where}.") for where in newcomers)}
    missing = {key for key in missing if not key.endswith("num_batches_tracked")}  # PyTorch does not miss it
    result = case.model.load_state_dict(weights, strict=not missing)
    assert set(result.missing_keys) == missing
    assert not result.unexpected_keys
    now = case.model.state_dict()
    for key, value in weights.items():
        assert _was_taken_out(key, case, modification) or torch.equal(now[key], value), key


def _weights(case: Case) -> list[tuple[str, Tensor]]:
    return list(case.original.state_dict().items())


@in_every_run
def test_a_state_dict_makes_a_round_trip(name: str, modification: str) -> None:
    case = operated(name, modification)
    stir(case)
    file = io.BytesIO()
    torch.save(case.model.state_dict(), file)
    file.seek(0)
    twin = operated(name, modification).model
    twin.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert torch.equal(run(twin, case.image), run(case.model, case.image))


@in_every_run
def test_outputs_start_equal_where_that_is_promised(name: str, modification: str) -> None:
    if modification not in EQUAL_AT_START.values():
        pytest.skip("it promises no equal start")
    case = operated(name, modification)
    assert difference(run(case.model, case.image), case.before) < 1e-5


@in_every_run
def test_gradients_reach_every_new_parameter(name: str, modification: str) -> None:
    unreached = set()
    for attempt in range(20):  # a narrow layer may be all on the dead side of its ReLU
        case = operated(name, modification)
        stir(case, 0.05 + 0.05 * attempt)
        output = first(case.model(case.image))
        (output * torch.randn_like(output)).sum().backward()
        new = {key: p.grad for key, p in case.model.named_parameters() if key in case.new}
        assert all(grad is not None and grad.isfinite().all() for grad in new.values())
        dead = {key for key, grad in new.items() if grad is not None and not grad.any()}
        unreached = dead & unreached if attempt else dead
        if not unreached:
            break
    assert not unreached


@in_every_run
def test_train_and_eval_reach_the_new_parts(name: str, modification: str) -> None:
    case = operated(name, modification)
    before = run(case.model, case.image)
    case.model.train()
    assert all(module.training for module in case.model.modules())
    states = {key: value.clone() for key, value in case.model.state_dict().items()}
    output = first(case.model(case.image))
    assert output.shape == before.shape
    case.model.load_state_dict(states)  # batch norms have moved
    case.model.eval()
    assert not any(module.training for module in case.model.modules())
    assert torch.equal(run(case.model, case.image), before)


@in_every_run
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_equal_and_independent(name: str, modification: str, duplicate: Callable[..., nn.Module]) -> None:
    case = operated(name, modification)
    before = run(case.model, case.image)
    twin = duplicate(case.model)
    assert torch.equal(run(twin, case.image), before)
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in case.model.parameters()}
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    run(twin, case.image)
    assert torch.equal(run(case.model, case.image), before)


@in_every_run
@pytest.mark.parametrize("of_a_copy", [False, True])
def test_strip_gives_the_original_back(name: str, modification: str, of_a_copy: bool) -> None:
    case = operated(name, modification)
    model = copy.deepcopy(case.model) if of_a_copy else case.model
    assert strip(model) is model
    assert RECORD not in vars(model)
    assert list(model.state_dict()) == list(case.original.state_dict())
    assert all(torch.equal(model.state_dict()[key], value) for key, value in _weights(case))
    assert [type(module) for module in model.modules()] == [type(module) for module in case.original.modules()]
    assert [set(vars(module)) for module in model.modules()] == [set(vars(m)) for m in case.original.modules()]
    assert torch.equal(run(model, case.image), case.before)


@in_every_run
def test_mixed_precision_trains(name: str, modification: str) -> None:
    case = operated(name, modification)
    stir(case)
    exact = run(case.model, case.image)
    with torch.autocast("cpu", torch.bfloat16):
        output = first(case.model(case.image))
    output.float().square().mean().backward()
    if exact.abs().max() < 1e4:  # gates multiply from block to block, and some models have many
        assert all(p.grad is None or p.grad.isfinite().all() for p in case.model.parameters())
    if exact.isfinite().all() and "gate" not in modification and "hybrid" not in modification:  # these grow without end
        with torch.autocast("cpu", torch.bfloat16):
            usual = difference(run(case.original, case.image), case.before)
        assert difference(output, exact) < 10 * usual + 0.05


@in_every_run
def test_activation_checkpointing_changes_nothing(name: str, modification: str) -> None:
    case = operated(name, modification)
    if not _can_checkpoint(case.original):
        pytest.skip("the model itself has no activation checkpointing")
    stir(case)
    gradients = []
    for enable in (False, True):
        case.model.set_grad_checkpointing(enable)  # type: ignore[operator]
        case.model.zero_grad(set_to_none=True)
        output = first(case.model(case.image))
        output.square().mean().backward()
        gradients.append([output, *(p.grad for p in case.model.parameters() if p.grad is not None)])
    assert len(gradients[0]) == len(gradients[1])
    for plain, checkpointed in zip(*gradients, strict=True):
        assert torch.equal(plain, checkpointed)


def _can_checkpoint(model: nn.Module) -> bool:
    try:
        copy.deepcopy(model).set_grad_checkpointing(True)  # type: ignore[operator]
    except (AssertionError, AttributeError):
        return False
    return True


@traced
def test_compiles_in_one_graph(name: str, modification: str) -> None:
    case = operated(name, modification)
    if not _compiles(name):
        pytest.skip("the model itself does not compile in one graph")
    stir(case)
    torch._dynamo.reset()
    compiled = torch.compile(case.model, fullgraph=True, backend="aot_eager")
    expected = run(case.model, case.image)
    torch.testing.assert_close(run(compiled, case.image), expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


@functools.cache
def _compiles(name: str) -> bool:
    model, image, _ = _original(name)
    torch._dynamo.reset()
    try:
        run(torch.compile(model, fullgraph=True, backend="aot_eager"), image)
    except Exception:
        return False
    return True


@traced
def test_exports(name: str, modification: str) -> None:
    case = operated(name, modification)
    if not _exports(name):
        pytest.skip("the model itself does not export")
    stir(case)
    expected = run(case.model, case.image)
    exported = torch.export.export(case.model, (case.image,)).module()
    torch.testing.assert_close(run(exported, case.image), expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


@functools.cache
def _exports(name: str) -> bool:
    model, image, _ = _original(name)
    try:
        torch.export.export(model, (image,))
    except Exception:
        return False
    return True


STEP = """
import os, sys, torch, torch.distributed as dist, timm
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from vitrefine.surgery.operate import apply

kind, rank, store = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
SWIN = dict(img_size=56, depths=(2, 2), num_heads=(2, 4), embed_dim=16, drop_path_rate=0.0)
CASES = [
    (dict(model_name="test_vit"), 160, "cb_s+refiner"),
    (dict(model_name="test_vit"), 160, "uniform_head(mode=append)+se"),
    (dict(model_name="test_vit"), 160, "refiner(share=1)+extra_block"),
    (dict(model_name="swin_tiny_patch4_window7_224", **SWIN), 56, "dtm+refiner+cb"),
    (dict(model_name="swin_tiny_patch4_window7_224", **SWIN), 56, "less_attention(stages=1)+cb_s"),
]
for arguments, size, modifications in CASES:
    torch.manual_seed(0)
    model = timm.create_model(**arguments, num_classes=4)
    apply(model, modifications)
    reference = timm.create_model(**arguments, num_classes=4)
    apply(reference, modifications)
    reference.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(4, 3, size, size, generator=generator)
    if kind == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (2,))
        for block in list(getattr(model, "blocks", ())) + [b for s in getattr(model, "layers", ()) for b in s.blocks]:
            fully_shard(block, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    for network, batch in ((wrapped, images[2 * rank : 2 * rank + 2]), (reference, images)):
        optimiser = torch.optim.SGD(network.parameters(), lr=0.1)
        network(batch).square().mean().backward()
        optimiser.step()
    for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        one = one.full_tensor() if hasattr(one, "full_tensor") else one
        assert other.grad is not None, (modifications, name)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=lambda m: f"{modifications} {name}: {m}")
dist.destroy_process_group()
print("done", flush=True)
os._exit(0)  # gloo's threads, which weights in shards keep alive, may abort a Python that shuts down
"""


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_distributed_training_takes_the_same_step(kind: str, tmp_path: Path) -> None:
    """Two processes with half a batch each take the step that one takes with the whole batch."""
    script = tmp_path / "step.py"
    script.write_text(STEP)
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), kind, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
        assert output.strip().endswith("done")


@pytest.mark.parametrize("modification", ["cb", "cb_gate", "cb_hybrid"])
def test_broadcasting_adds_no_parameter(modification: str) -> None:
    with torch.device("meta"):
        model = timm.create_model("vit_small_patch16_224")
    assert apply(model, modification).new_parameters == 0


def test_dimension_scaling_adds_what_the_paper_prints() -> None:
    """CB_S: 0.02 % of the parameters of ViT-S."""
    with torch.device("meta"):
        model = timm.create_model("vit_small_patch16_224")
    parameters = sum(p.numel() for p in model.parameters())
    added = apply(model, "cb_s").new_parameters
    assert added == 12 * 384
    assert round(100 * added / parameters, 2) == 0.02


def test_grafts_stack_and_come_off_in_any_model() -> None:
    """All modifications that a model takes, one on top of the other, and off again."""
    original, image, before = _original("swin")
    model = copy.deepcopy(original)
    refusals = []
    for modification in (m for m in names() if not isinstance(_operated("swin", m), UserError)):
        try:
            apply(model, modification)
        except UserError as error:  # cb after cb_s: the place is taken
            refusals.append(str(error))
    assert all("twice" in refusal or "no attention" in refusal for refusal in refusals)
    assert len(lineage(type(model.get_submodule("layers.1.blocks.0.mlp")))) > 1
    run(model, image)
    strip(model)
    assert torch.equal(run(model, image), before)


def test_the_copy_of_a_part_that_is_compiled_has_weights_of_its_own() -> None:
    model = timm.create_model("test_vit", num_classes=3).eval()
    apply(model, "cb_s")
    part: Any = model.get_submodule("blocks.0.mlp")
    part.compile(backend="eager")
    tokens = torch.randn(1, 4, 64)
    assert part(tokens).any()
    twin = copy.deepcopy(part)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin(tokens).any()
    pickle.loads(pickle.dumps(part))


def test_a_patched_forward_would_hide_a_change_and_is_refused() -> None:
    model: Any = timm.create_model("test_vit")
    patched = model.blocks[1].attn
    patched.forward = functools.partial(type(patched).forward, patched)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(UserError, match="would hide any change"):
        apply(model, "refiner")
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")])
def test_what_wraps_a_model_is_not_changed_in_its_place(wrap: Callable[[nn.Module], nn.Module]) -> None:
    wrapped = wrap(create("test_vit+cb"))
    for change in (strip, lambda model: apply(model, "cb_s")):
        with pytest.raises(UserError, match="wraps the model that is to be changed"):
            change(wrapped)
    assert str(spec_of(wrapped)) == "test_vit+cb"
    assert len(report_of(wrapped).changes) == 3
