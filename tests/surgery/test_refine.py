"""Refined attention in models that exist is the refined attention of the paper, whichever way a model attends."""

import copy
import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import set_fused_attn
from timm.models.nest import Nest
from timm.models.volo import VOLO
from torch import Tensor, nn
from transformers import DeiTConfig, DeiTModel, ViTConfig, ViTModel

from vitrefine.errors import UserError
from vitrefine.layers.refined_attention import RefinedAttention
from vitrefine.layers.refiner import Refiner
from vitrefine.ops.refined_attention import refine_maps
from vitrefine.surgery.census import disturb
from vitrefine.surgery.graft import strip
from vitrefine.surgery.operate import apply
from vitrefine.surgery.refine import Refined
from vitrefine.surgery.survey import survey

EXACT = 1e-10  # of double precision, through a whole model

HF = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}
SWIN = {"img_size": 56, "depths": (2, 2), "num_heads": (2, 4), "embed_dim": 16}

# Small models of every layout of heads, every kind of token and mask; all can attend fused and un-fused.
BOTH_WAYS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "vit": (lambda: timm.create_model("test_vit"), 160),
    "deit, distilled": (lambda: timm.create_model("deit_tiny_distilled_patch16_224", depth=2, img_size=64), 64),
    "dinov3, rotary": (lambda: timm.create_model("vit_tiny_patch16_dinov3_qkvb", depth=2, img_size=64), 64),
    "beit, relative bias": (
        lambda: timm.create_model("beit_base_patch16_224", depth=2, img_size=64, embed_dim=48, num_heads=3),
        64,
    ),
    "swin, shift mask": (lambda: timm.create_model("swin_tiny_patch4_window7_224", **SWIN), 56),
    "pvt_v2, reduced keys": (lambda: timm.create_model("pvt_v2_b0", depths=(1, 1, 1, 1)), 64),
    "twins, windows before heads": (
        lambda: timm.create_model(
            "twins_svt_small", depths=(2, 2, 1, 1), embed_dims=(16, 32, 64, 128), num_heads=(1, 2, 4, 8)
        ),
        56,
    ),
    "nest, windows after heads": (
        lambda: Nest(img_size=64, depths=(1, 1, 1), embed_dims=(24, 48, 96), num_heads=(2, 4, 8)),
        64,
    ),
    "hiera, pooled queries": (
        lambda: timm.create_model("hiera_tiny_224", stages=(1, 1, 1, 1), embed_dim=24, img_size=64),
        64,
    ),
    "sam, heads in the batch": (
        lambda: timm.create_model(
            "samvit_base_patch16_224",
            depth=2,
            img_size=64,
            embed_dim=48,
            num_heads=3,
            window_size=2,
            global_attn_indexes=(1,),
            neck_chans=16,
        ),
        64,
    ),
    "maxvit, grid and window": (lambda: timm.create_model("maxvit_pico_rw_256", img_size=64, depths=(1, 1, 1, 1)), 64),
    "cait, class attention": (lambda: timm.create_model("cait_xxs24_224", depth=2, img_size=64), 64),
    "crossvit, cross attention": (lambda: timm.create_model("crossvit_tiny_240", depth=((1, 2, 0),)), 240),
    "volo, outlook": (
        lambda: VOLO((1, 1, 1, 1), img_size=64, embed_dims=(24, 48, 48, 48), num_heads=(2, 4, 4, 4)),
        64,
    ),
    "mobilenetv4, multi-query": (lambda: timm.create_model("mobilenetv4_hybrid_medium"), 64),
    "iformer, one head": (lambda: timm.create_model("iformer_t"), 64),
}


@pytest.fixture
def fused() -> Iterator[Callable[[bool], None]]:
    """Switches timm's fused attention, experimental uses too, for models created after; the default returns."""
    yield lambda enable: set_fused_attn(enable, experimental=enable)
    set_fused_attn(True, experimental=False)


def _randomise(model: nn.Module, like: nn.Module | None = None) -> nn.Module:
    """A model of double precision with weights that are nowhere zero; those of `like` if it is given."""
    torch.manual_seed(0)
    disturb(model)
    if like is not None:
        model.load_state_dict(like.state_dict())
    return model.double().eval()


def _stir(model: nn.Module) -> None:
    """Refiners far from the identity."""
    torch.manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Refiner):
                for parameter in module.parameters():
                    parameter.add_(0.3 * torch.randn_like(parameter))


def _difference(one: Tensor, other: Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


def _image(size: int) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(2, 3, size, size, dtype=torch.float64)


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_fused_and_plain_paths_agree(name: str, fused: Callable[[bool], None]) -> None:
    """The strongest check: two computations of one model, tapped at different calls, refined by one random mixture."""
    make, size = BOTH_WAYS[name]
    fused(True)
    one = _randomise(make())
    fused(False)
    other = _randomise(make(), like=one)
    assert any(site.kind == "sdpa" for site in survey(one).attentions)
    assert all(site.kind == "softmax" for site in survey(other).attentions)
    image = _image(size)
    with torch.no_grad():
        before = one(image)
        assert _difference(other(image), before) < EXACT
        for model in (one, other):
            apply(model, "refiner")
            assert _difference(model(image), before) < 1e-5  # a refiner starts as the identity in single precision
        _stir(one)
        other.load_state_dict(one.state_dict())
        after = one(image)
        assert _difference(other(image), after) < EXACT
    assert _difference(after, before) > 1e-2, "the refiner has no effect on the output"


def _attention(model: nn.Module, name: str) -> nn.Module:
    """One attention of a model, refined at random; in double precision."""
    _randomise(model)
    apply(model, "refiner")
    _stir(model)
    return model.get_submodule(name)


@torch.no_grad()
def test_refined_vit_block_is_the_layer() -> None:
    module: Any = _attention(timm.create_model("test_vit"), "blocks.0.attn")
    layer = RefinedAttention(64, 2).double().eval()
    layer.load_state_dict(module.state_dict())
    tokens = torch.randn(2, 101, 64, dtype=torch.float64)
    torch.testing.assert_close(module(tokens), layer(tokens)[0], rtol=1e-11, atol=1e-12)


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


@torch.no_grad()
def test_shifted_windows_by_hand() -> None:
    """Swin: bias and shift mask enter the scores; pairs across the seam stay at zero, not only nearly."""
    model = timm.create_model("swin_tiny_patch4_window7_224", **SWIN)
    module: Any = _attention(model, "layers.0.blocks.1.attn")
    mask = model.layers[0].blocks[1].attn_mask.double()  # (windows, N, N) of 0 and -100
    assert (mask == -100).any()
    windows, tokens = mask.shape[:2]
    x = torch.randn(2 * windows, tokens, 16, dtype=torch.float64)
    q, k, v = (_heads(part, 2) for part in module.qkv(x).chunk(3, dim=-1))
    bias = module.relative_position_bias_table[module.relative_position_index.flatten()].unflatten(0, (tokens, tokens))
    scores = q @ k.transpose(-2, -1) / math.sqrt(8) + bias.permute(2, 0, 1)
    hidden = (mask < 0).repeat(2, 1, 1)[:, None]
    maps = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
    refined = refine_maps(maps, module.refiner.mix()).masked_fill(hidden, 0)
    expected = module.proj((refined @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x, mask), expected, rtol=1e-10, atol=1e-11)


@torch.no_grad()
@pytest.mark.parametrize("modification", ["refiner", "dla", "expansion", "refiner(share=1)"])
def test_pairs_across_the_seam_weigh_nothing(modification: str) -> None:
    model: Any = _randomise(timm.create_model("swin_tiny_patch4_window7_224", **SWIN))
    apply(model, modification)
    _stir(model)
    mask = model.layers[0].blocks[1].attn_mask.double()
    scores = torch.randn(mask.shape[0], 2, *mask.shape[1:], dtype=torch.float64) + mask[:, None]
    hidden = (mask < 0)[:, None].expand_as(scores)
    block = 0 if "share" in modification else 1  # the block after would use the maps of this one
    refined = model.layers[0].blocks[block].attn.attend_maps(scores, scores.softmax(dim=-1))
    assert (refined[hidden] == 0).all()
    assert (refined[~hidden] != 0).all()


@torch.no_grad()
def test_talking_heads_of_its_own_by_hand() -> None:
    """CaiT mixes heads before and after its softmax; the refiner works between the softmax and the second mixture."""
    module: Any = _attention(timm.create_model("cait_xxs24_224", depth=2, img_size=64), "blocks.0.attn")
    x = torch.randn(2, 16, 192, dtype=torch.float64)
    q, k, v = (_heads(part, 4) for part in module.qkv(x).chunk(3, dim=-1))
    scores = torch.einsum("gh,bhij->bgij", module.proj_l.weight, q @ k.transpose(-2, -1) / math.sqrt(48))
    scores = scores + module.proj_l.bias[:, None, None]
    refined = refine_maps(scores.softmax(dim=-1), module.refiner.mix())
    mixed = torch.einsum("gh,bhij->bgij", module.proj_w.weight, refined) + module.proj_w.bias[:, None, None]
    expected = module.proj((mixed @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x), expected, rtol=1e-11, atol=1e-12)


@torch.no_grad()
def test_class_attention_by_hand() -> None:
    """CaiT's class token is the one query: a 1×N map, convolved as such."""
    module: Any = _attention(timm.create_model("cait_xxs24_224", depth=2, img_size=64), "blocks_token_only.0.attn")
    x = torch.randn(2, 17, 192, dtype=torch.float64)
    q, k, v = _heads(module.q(x[:, :1]), 4), _heads(module.k(x), 4), _heads(module.v(x), 4)
    refined = refine_maps((q @ k.transpose(-2, -1) / math.sqrt(48)).softmax(dim=-1), module.refiner.mix())
    expected = module.proj((refined @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x), expected, rtol=1e-11, atol=1e-12)


@torch.no_grad()
def test_reduced_keys_by_hand() -> None:
    """PVTv2: many queries, few keys, from a smaller image; the map is refined as the rectangle it is."""
    module: Any = _attention(timm.create_model("pvt_v2_b0", depths=(1, 1, 1, 1)), "stages.1.blocks.0.attn")
    x = torch.randn(2, 64, 64, dtype=torch.float64)
    reduced = module.norm(module.sr(x.transpose(1, 2).unflatten(2, (8, 8))).flatten(2).transpose(1, 2))
    k, v = (_heads(part, 2) for part in module.kv(reduced).chunk(2, dim=-1))
    maps = (_heads(module.q(x), 2) @ k.transpose(-2, -1) / math.sqrt(32)).softmax(dim=-1)
    assert maps.shape == (2, 2, 64, 4)
    expected = module.proj((refine_maps(maps, module.refiner.mix()) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x, (8, 8)), expected, rtol=1e-11, atol=1e-12)


@torch.no_grad()
def test_windows_by_hand() -> None:
    """Twins: each 7×7 window is refined by itself."""
    make, _ = BOTH_WAYS["twins, windows before heads"]
    module: Any = _attention(make(), "blocks.1.0.attn")
    x = torch.randn(2, 14 * 14, 32, dtype=torch.float64)
    windows = x.reshape(2, 2, 7, 2, 7, 32).transpose(2, 3).reshape(2 * 4, 49, 32)
    q, k, v = (_heads(part, 2) for part in module.qkv(windows).chunk(3, dim=-1))
    refined = refine_maps((q @ k.transpose(-2, -1) / math.sqrt(16)).softmax(dim=-1), module.refiner.mix())
    out = (refined @ v).transpose(1, 2).reshape(2, 2, 2, 7, 7, 32).transpose(2, 3).reshape(2, 196, 32)
    torch.testing.assert_close(module(x, (14, 14)), module.proj(out), rtol=1e-11, atol=1e-12)


def _vit() -> nn.Module:
    return _randomise(timm.create_model("test_vit"))


@torch.no_grad()
def test_shared_maps_are_those_of_the_block_before() -> None:
    model: Any = _vit()
    report = apply(model, "refiner(share=1)")
    _stir(model)
    assert sum("uses the maps of" in change.what for change in report.changes) == 3
    tokens, later = (torch.randn(2, 101, 64, dtype=torch.float64) for _ in range(2))
    first, second = model.blocks[0].attn, model.blocks[1].attn
    layer = RefinedAttention(64, 2, hands_on=True).double().eval()
    layer.load_state_dict(first.state_dict())
    expected, maps = layer(tokens)
    torch.testing.assert_close(first(tokens), expected, rtol=1e-11, atol=1e-12)
    values = _heads(second.qkv(later).chunk(3, dim=-1)[2], 2)
    shared = second.proj((maps @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(second(later), shared, rtol=1e-11, atol=1e-12)


@torch.no_grad()
def test_spatial_constraint_follows_the_image() -> None:
    model: Any = _vit()
    apply(model, "refiner(constraint=spatial)")
    _stir(model)
    module = model.blocks[0].attn
    layer = RefinedAttention(64, 2, constraint="spatial").double().eval()
    layer.load_state_dict(module.state_dict())
    tokens = torch.randn(2, 101, 64, dtype=torch.float64)
    torch.testing.assert_close(module(tokens), layer(tokens, grid=(10, 10))[0], rtol=1e-11, atol=1e-12)


@torch.no_grad()
def test_a_map_of_no_square_says_so() -> None:
    with pytest.raises(UserError, match="square"):
        apply(timm.create_model("test_vit", img_size=(160, 144)), "dla(constraint=spatial)")
    model = timm.create_model("test_vit", dynamic_img_size=True).eval()
    apply(model, "dla(constraint=spatial)")
    with pytest.raises(UserError, match="square"):
        model(torch.randn(1, 3, 160, 144))


def test_authors_form_trains_its_norms() -> None:
    model = timm.create_model("test_vit")
    apply(model, "refiner(variant=official)")
    model.train()
    model(torch.randn(2, 3, 160, 160)).square().sum().backward()
    new = {name: p for name, p in model.named_parameters() if ".refiner." in name}
    assert new
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in new.values())


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("refiner(variant=official,kernel_size=5)", "kernel_size 3"),
        ("refiner(variant=official,expansion=0)", "expansion=0 leaves no maps"),
        ("refiner(share=-1)", "share=-1 is too small"),
        ("refiner(share=-2)", "share=-2 is too small"),
        ("refiner(layers=9)", "out of range"),
        ("dla(kernel_size=1)", "do nothing"),
    ],
)
def test_impossible_options_say_so_and_change_nothing(spec: str, words: str) -> None:
    model = timm.create_model("test_vit")
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(UserError, match=words):
        apply(model, spec)
    assert [type(module) for module in model.modules()] == kinds


def test_sharing_across_shapes_says_so() -> None:
    with pytest.raises(UserError, match="other shapes"):
        apply(timm.create_model("pvt_v2_b0", depths=(1, 1, 1, 1)), "refiner(share=1)")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("test_resnet", "has no attention"),
        ("edgenext_xx_small", "relate channels"),
        ("efficientvit_m0", "one after another"),
        ("efficientvim_m1", "state-space|no products"),
        ("mobilevitv2_050", "no products"),
        ("coat_tiny", "has no attention"),
    ],
)
def test_what_cannot_be_refined_says_why(name: str, words: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(UserError, match=words):
        apply(model, "refiner")


def test_dropout_of_maps_still_drops() -> None:
    """In training, the refined maps lose entries at the model's own rate, and the rest grows to make up for it."""
    model: Any = timm.create_model("test_vit", attn_drop_rate=0.5)
    apply(model, "refiner")
    attention = model.blocks[0].attn.train()
    tokens = torch.randn(2, 101, 64)
    torch.manual_seed(0)
    one, other = attention(tokens), attention(tokens)
    assert not torch.equal(one, other)
    torch.manual_seed(0)
    assert torch.equal(attention(tokens), one)
    assert torch.equal(attention.eval()(tokens), attention(tokens))


@torch.no_grad()
def test_masks_of_the_caller_are_kept() -> None:
    """A padding mask given to timm's attention: masked keys weigh nothing, whatever the kernel brings from beside."""
    model: Any = _vit()
    apply(model, "dla")
    _stir(model)
    module = model.blocks[0].attn
    tokens = torch.randn(2, 12, 64, dtype=torch.float64)
    mask = torch.ones(2, 1, 1, 12, dtype=torch.bool)
    mask[1, ..., 9:] = False
    before = module(tokens, attn_mask=mask)
    tokens[1, 9:] = 1e3
    assert torch.equal(module(tokens, attn_mask=mask)[1, :9], before[1, :9])
    assert torch.equal(module(tokens, attn_mask=mask)[0], before[0])


@torch.no_grad()
def test_gqa_and_causal_calls_are_understood() -> None:
    class Grouped(nn.Module):
        num_heads = 4

        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            q, (k, v) = _heads(self.q(x), 4), (_heads(part, 2) for part in self.kv(x).chunk(2, dim=-1))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).flatten(2)

    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.attention = nn.Conv2d(3, 16, 32, 32), Grouped()

        def forward(self, image: Tensor) -> Tensor:
            return self.attention(self.stem(image).flatten(2).transpose(1, 2))

    model = Text().double()
    image = torch.randn(2, 3, 224, 224, dtype=torch.float64)
    before = model(image)
    plain = copy.deepcopy(model)
    apply(model, "talking_heads")
    assert _difference(model(image), before) < EXACT
    _stir(model)
    refined = model(image)
    image[..., 192:, :] += 1  # the last row of patches: no query before it may see it
    torch.testing.assert_close(model(image)[:, :42], refined[:, :42], rtol=0, atol=0)
    strip(model)
    assert torch.equal(model(image), plain(image))


def test_scores_that_lie_far_apart_are_no_padding() -> None:
    """Keys that nobody sees in one-hot maps are tokens all the same: their own rows stay."""
    model: Any = timm.create_model("test_vit").eval()
    for block in model.blocks:
        block.attn.fused_attn = False
        nn.init.normal_(block.attn.qkv.weight, std=5)
    image = torch.randn(1, 3, 160, 160)
    before = model(image)
    apply(model, "refiner")
    torch.testing.assert_close(model(image), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "arguments", "module", "function"),
    [
        ("lit_s", {}, "vitrefine.layers.attention", "relative_attention"),
        ("refined_vit_s", {"variant": "paper"}, "vitrefine.ops.refined_attention", "_choose"),
    ],
)
def test_our_own_kernels_do_not_hide_attention_from_surgery(
    name: str, arguments: dict[str, Any], module: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU these attend by operators that no tap can see into; a block that was operated on must not."""

    def hidden(*args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("attention was computed out of sight")

    model = timm.create_model(name, img_size=64, **arguments).eval()
    apply(model, "uniform_head")
    monkeypatch.setattr(sys.modules[module], function, hidden)
    with torch.no_grad():
        model(torch.randn(1, 3, 64, 64))
    with pytest.raises(AssertionError, match="out of sight"), torch.no_grad():
        strip(model)(torch.randn(1, 3, 64, 64))


@pytest.mark.parametrize(
    ("make", "size", "aside"),
    [
        (lambda: ViTModel(ViTConfig(image_size=32, patch_size=8, **HF)), 32, {1}),
        (lambda: DeiTModel(DeiTConfig(image_size=32, patch_size=8, **HF)), 32, {2}),
        (lambda: timm.create_model("lit_ti", depths=(1, 1, 1, 1), img_size=64), 64, {0, 1}),
    ],
)
def test_spatial_constraint_finds_the_tokens_that_are_no_patches(
    make: Callable[[], nn.Module], size: int, aside: set[int]
) -> None:
    """Where a model does not say, or has them in its last stage only."""
    torch.manual_seed(0)
    model, image = make().eval(), torch.randn(1, 3, size, size)
    with torch.no_grad():
        before = model(image)
        apply(model, "dla(constraint=spatial)")
        after = model(image)
    assert {m.prefix_tokens for m in model.modules() if isinstance(m, Refined)} == aside
    torch.testing.assert_close(*(x if isinstance(x, Tensor) else x[0] for x in (after, before)))


@torch.no_grad()
@pytest.mark.parametrize("fused", [True, False])
def test_shared_maps_are_hidden_where_their_user_has_a_mask(fused: bool) -> None:
    """In Swin every second block has a mask, and the one before it, whose maps it uses, has none."""
    model: Any = timm.create_model("swin_tiny_patch4_window7_224", **SWIN).eval()
    apply(model, "refiner(share=1)")
    model(torch.randn(1, 3, 56, 56))
    block = model.layers[0].blocks[1]
    block.attn.fused_attn = fused
    apart = block.attn_mask < 0  # (windows, tokens, tokens)
    assert apart.any()
    tokens = torch.randn(len(apart), 49, 16)
    # What a token gives changes nothing in those that may not see it.
    changed = torch.where(apart[:, 0, :, None], tokens + 1, tokens)
    before, after = (block.attn(x, block.attn_mask)[:, 0] for x in (tokens, changed))
    torch.testing.assert_close(after, before)


def test_a_model_that_shares_maps_is_copied_while_it_trains() -> None:
    model = timm.create_model("test_vit", num_classes=3)
    apply(model, "refiner(share=1)")
    image = torch.randn(2, 3, 160, 160)
    model(image).sum().backward()
    twin = copy.deepcopy(model).eval()
    with torch.no_grad():
        torch.testing.assert_close(twin(image), model.eval()(image), rtol=0, atol=0)


def test_checkpointing_that_would_lose_the_gradient_of_shared_maps_is_refused() -> None:
    config = ViTConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, image_size=8, patch_size=4
    )
    model = ViTModel(config).train()
    apply(model, "refiner(share=1)")
    image = torch.randn(2, 3, 8, 8)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model(image)[0].sum().backward()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(UserError, match="use_reentrant=False"):
        model(image.requires_grad_())[0].sum().backward()


@torch.no_grad()
def test_threads_share_no_maps_with_each_other() -> None:
    model: Any = _vit()
    apply(model, "refiner(share=1)")
    image, other = torch.randn(2, 2, 3, 160, 160, dtype=torch.float64)
    expected = model(image)

    def run_another(*args: Any) -> None:
        hook.remove()
        thread = threading.Thread(target=model, args=(other,))
        thread.start()
        thread.join()

    hook = model.blocks[0].attn.register_forward_hook(run_another)
    torch.testing.assert_close(model(image), expected, rtol=0, atol=0)


def test_attentions_that_share_maps_are_still_found() -> None:
    model = timm.create_model("test_vit")
    apply(model, "refiner(share=1)")
    assert [site.name for site in survey(model).attentions] == [f"blocks.{i}.attn" for i in range(6)]
