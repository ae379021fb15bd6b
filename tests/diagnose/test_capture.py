"""Nothing comes back empty: small models that stand for families, plain and refined; compiled, wrapped, in bf16."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import vitrefine
from vitrefine.diagnose.call import Call
from vitrefine.diagnose.capture import capture
from vitrefine.diagnose.measures import row_entropy
from vitrefine.errors import UserError
from vitrefine.models.refined_vit import RefinedVisionTransformer
from vitrefine.surgery.census import disturb

_SPEC = importlib.util.spec_from_file_location("promises", Path(__file__).parents[1] / "surgery" / "test_promises.py")
assert _SPEC is not None
assert _SPEC.loader is not None
promises: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(promises)

# These have no attention from tokens to tokens in which all heads are there at once, and say so.
WITHOUT = {"mixer", "edgenext", "coat", "efficientvim", "efficientvit_mit", "efficientvit_msra", "sequencer"}
WITHOUT |= {"swiftformer"}
MATRIX = [
    pytest.param(name, modification, marks=() if name in promises.FEW else pytest.mark.full)
    for name in promises.MODELS
    for modification in ("", "refiner")
]


def small(**arguments: Any) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, embed_dim=48, num_heads=3, **arguments)
    return disturb(model.eval())


def images(count: int = 2, size: int = 64) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))


def maps_of(model: nn.Module, given: Tensor, **options: Any) -> list[Tensor]:
    with torch.no_grad(), capture(model, **options) as attentions:
        model(given)
    return [call.maps() for attention in attentions for call in attention.calls]


@pytest.mark.parametrize(("name", "modification"), MATRIX)
def test_nothing_comes_back_empty(name: str, modification: str) -> None:
    torch.manual_seed(0)
    make, size = promises.MODELS[name]
    model = disturb(make()).eval()
    if modification:
        try:
            vitrefine.apply(model, modification)
        except UserError as refusal:
            if name not in WITHOUT:
                pytest.skip(f"+{modification} does not apply: {refusal}")
    if name in WITHOUT:
        with pytest.raises(UserError, match="has no attention to look at"), capture(model):
            pass
        return
    with torch.no_grad(), capture(model) as attentions:
        model(images(2, size))
    assert attentions
    for attention in attentions:
        assert attention.calls, attention.name
        for call in attention.calls:
            maps = call.maps()
            assert maps.shape == call.shape
            assert maps.shape[1] == attention.heads
            assert maps.isfinite().all()
            sums = maps.sum(dim=-1)
            assert ((sums - 1).abs() < 1e-4).logical_or(sums == 0).all()  # windows may have rows of padding
            assert call.is_refined == bool(modification)
            if modification:
                assert call.refined_maps().shape == maps.shape


@pytest.mark.parametrize("first", ["compiled", "captured"])
def test_compiled_models(first: str) -> None:
    """Compiled and run before, or compiled inside: the same maps as of the plain model, which stays compiled after."""
    model, given = small(), images()
    plain = maps_of(model, given)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        if first == "compiled":
            before = compiled(given)
            found = maps_of(compiled, given)
        else:
            with capture(model) as attentions:
                compiled(given)
            found = [call.maps() for attention in attentions for call in attention.calls]
            before = model(given)
        torch.testing.assert_close(compiled(given), before)
    assert len(found) == len(plain) == 2
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other)


def test_autocast() -> None:
    model, given = small(), images()
    exact = maps_of(model, given)
    with torch.autocast("cpu", torch.bfloat16):
        found = maps_of(model, given)
    for maps, other in zip(found, exact, strict=True):
        assert maps.dtype == torch.float32  # made in single precision, of what was projected in half
        torch.testing.assert_close(maps.sum(dim=-1), torch.ones(maps.shape[:-1]))
        torch.testing.assert_close(row_entropy(maps), row_entropy(other), rtol=0.02, atol=0.02)


def test_wrapped_models(tmp_path: Path) -> None:
    model, given = small(), images()
    plain = maps_of(model, given)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(model)
        found = maps_of(wrapped, given)
        assert [type(module) for module in wrapped.modules()].count(DistributedDataParallel) == 1
        again = maps_of(torch.compile(wrapped, backend="aot_eager"), given)
    finally:
        dist.destroy_process_group()
    for maps, other, third in zip(found, plain, again, strict=True):
        assert torch.equal(maps, other)
        assert torch.equal(third, other)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_hugging_face(implementation: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
    config = transformers.ViTConfig(image_size=64, attn_implementation="eager", **sizes)
    model = disturb(transformers.ViTModel(config).eval())
    expected = model(images(), output_attentions=True).attentions
    model.set_attn_implementation(implementation)
    found = maps_of(model, images())
    assert len(found) == 2
    for maps, other in zip(found, expected, strict=True):
        torch.testing.assert_close(maps, other.detach())


def test_torchvision() -> None:
    """PyTorch's own multi-head attention, which no tap can look into."""
    from torchvision.models import VisionTransformer

    torch.manual_seed(0)
    model = VisionTransformer(64, 16, num_layers=2, num_heads=3, hidden_dim=48, mlp_dim=96).eval()
    with torch.no_grad():
        before = model(images())
        found = maps_of(model, images())
        assert torch.equal(model(images()), before)
    assert [maps.shape for maps in found] == [(2, 3, 17, 17)] * 2


def test_some_layers_alone() -> None:
    model, given = small(), images()
    every = maps_of(model, given)
    (last,) = maps_of(model, given, layers=1)
    assert torch.equal(last, every[1])
    with pytest.raises(UserError, match="layers=2 is out of range"):
        maps_of(model, given, layers=2)


def test_calls_that_are_handed_on_are_not_kept() -> None:
    model = small()
    seen: list[tuple[str, Call]] = []
    with torch.no_grad(), capture(model, on_call=lambda attention, call: seen.append((attention.name, call))) as found:
        model(images())
    assert [name for name, _ in seen] == ["blocks.0.attn", "blocks.1.attn"]
    assert [(attention.runs, attention.calls) for attention in found] == [(1, []), (1, [])]


def test_captures_inside_one_another_and_copies() -> None:
    """A survey of a model that is being captured runs a copy of it, of which nothing is written down."""
    model, given = small(), images()
    from vitrefine.surgery.survey import survey

    with torch.no_grad(), capture(model) as attentions:
        survey(model)
        assert not any(attention.runs for attention in attentions)
        model(given)
    assert [attention.runs for attention in attentions] == [1, 1]


def recomputed(attention: Any, x: Tensor) -> Tensor:
    """The plain maps of a native attention, by its equations."""
    q, k, _ = attention._qkv(x)
    return ((q @ k.mT) * q.shape[-1] ** -0.5).softmax(dim=-1)


def test_native_refined_attention_of_the_paper() -> None:
    torch.manual_seed(0)
    model = RefinedVisionTransformer(
        img_size=64, embed_dim=48, depth=2, num_heads=3, variant="paper", share=0, stem="linear", num_classes=4
    ).eval()
    disturb(model)
    seen: list[Tensor] = []
    blocks: Any = model.blocks
    with torch.no_grad(), capture(model) as attentions:
        blocks[1].attn.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        model(images())
    (call,) = attentions[1].calls
    expected = recomputed(blocks[1].attn, seen[0]).detach()
    torch.testing.assert_close(call.maps(), expected)
    torch.testing.assert_close(call.refined_maps(), blocks[1].attn.refiner(expected).detach())
    assert (call.refined_maps() - call.maps()).abs().max() > 1e-3


def test_native_refined_attention_of_the_authors() -> None:
    torch.manual_seed(0)
    model = timm.create_model("refined_vit_s", img_size=64, depth=4, embed_dim=48, num_heads=3).eval()
    disturb(model)
    blocks: Any = model.blocks
    handed: list[Tensor] = []
    with torch.no_grad(), capture(model) as attentions:
        for block in blocks:
            block.attn.register_forward_hook(lambda module, args, output: handed.append(output[1]))
        model(images())
    assert [attention.name for attention in attentions] == [f"blocks.{i}.attn" for i in range(4)]
    own, sharing, later, _ = (attention.calls[0] for attention in attentions)
    assert own.proper
    assert later.proper
    assert not own.is_refined
    torch.testing.assert_close(own.maps(), handed[0])  # softmax and nothing else
    assert not sharing.proper
    assert torch.equal(sharing.maps(), handed[0])
    refiner, scale = blocks[1].attn.refiner, blocks[1].attn.scale
    with torch.no_grad():
        torch.testing.assert_close(sharing.refined_maps(), scale * refiner(handed[0]))
        torch.testing.assert_close(
            sharing.refined_maps(queries=slice(3, 9)), (scale * refiner(handed[0]))[:, :, 3:9], rtol=1e-4, atol=1e-5
        )
    assert later.is_refined  # by what the blocks before have handed on
    torch.testing.assert_close(later.refined_maps(), handed[2])
    torch.testing.assert_close(later.maps() + blocks[2].attn.scale * handed[1], handed[2])


@pytest.mark.parametrize("spec", ["refiner", "refiner(variant=official)", "dla(constraint=spatial)", "talking_heads"])
def test_surgically_refined_attention(spec: str) -> None:
    """What the context gives as refined maps multiplies the values to what the module really put out."""
    model = small()
    plain = maps_of(model, images())
    vitrefine.apply(model, spec)
    blocks: Any = model.blocks
    generator = torch.Generator().manual_seed(1)
    for parameter in blocks[0].attn.refiner.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    model.eval()
    projected: list[Tensor] = []
    joined: list[Tensor] = []
    with torch.no_grad(), capture(model) as attentions:
        blocks[0].attn.qkv.register_forward_hook(lambda module, args, output: projected.append(output))
        blocks[0].attn.proj.register_forward_pre_hook(lambda module, args: joined.append(args[0]))
        model(images())
    (call,) = attentions[0].calls
    torch.testing.assert_close(call.maps(), plain[0])
    values = projected[0].unflatten(-1, (3, 3, -1)).permute(2, 0, 3, 1, 4)[2]
    expected = (call.refined_maps() @ values).transpose(1, 2).flatten(2)
    torch.testing.assert_close(joined[0], expected, rtol=1e-4, atol=1e-5)


def test_lit_with_relative_positions() -> None:
    torch.manual_seed(0)
    model = disturb(timm.create_model("lit_s", img_size=64, depths=(1, 1, 1, 1)).eval())
    found = maps_of(model, images())
    assert [maps.shape[1:] for maps in found] == [(12, 16, 16), (24, 4, 4)]
    blocks: Any = dict(model.named_modules())
    attention = next(m for name, m in blocks.items() if name.endswith("attn") and m is not None)
    seen: list[Tensor] = []
    attention.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        model(images())
        q, k, _ = (part.unflatten(-1, (12, -1)).transpose(1, 2) for part in attention.qkv(seen[0]).chunk(3, dim=-1))
        scores = (q @ k.mT) * q.shape[-1] ** -0.5 + attention.position((4, 4))
    torch.testing.assert_close(found[0], scores.softmax(dim=-1))


def test_a_model_whose_attention_cannot_be_seen_is_not_passed_over() -> None:
    model = small()
    blocks: Any = model.blocks
    for block in blocks:
        block.forward = lambda x, **_: x  # the survey's copy runs the class's own forward no more
    with pytest.raises(UserError, match="has no attention to look at"), capture(model):
        model(images())


def test_training_mode_is_kept() -> None:
    model = small().train()
    with capture(model) as attentions:
        model(images()).sum().backward()
    assert model.training
    assert all(not call.maps().requires_grad for attention in attentions for call in attention.calls)
    assert all(p.grad is not None for p in model.parameters())
