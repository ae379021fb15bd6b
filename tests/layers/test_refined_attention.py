"""Attention with refined maps: the paper's form and the authors', sharing, dropout and masks."""

import pytest
import torch
import torch.nn.functional as F
from timm.layers import Attention
from torch import Tensor, nn

from vitrefine.layers.refined_attention import OfficialRefinedAttention, RefinedAttention
from vitrefine.ops.refined_attention import refine_maps

DIM, HEADS, GRID = 24, 4, (2, 3)
WIDTH = DIM // HEADS
TOKENS = 1 + GRID[0] * GRID[1]


def randomised(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for tensor in module.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.2, 0.6) if tensor.ndim == 1 else tensor.normal_(std=0.3)
    return module.double().eval()


def paper(**options: object) -> RefinedAttention:
    return randomised(RefinedAttention(DIM, HEADS, **options))


def official(**options: object) -> OfficialRefinedAttention:
    return randomised(OfficialRefinedAttention(DIM, HEADS, **options))


def tokens(seed: int = 1) -> Tensor:
    return torch.randn(2, TOKENS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def heads_of(x: Tensor) -> Tensor:
    return x.reshape(*x.shape[:2], HEADS, WIDTH).transpose(1, 2)


def plain_maps(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax maps and values by the book."""
    q, k, v = (heads_of(part) for part in module.qkv(x).split(DIM, dim=-1))
    return (q @ k.transpose(-2, -1) / WIDTH**0.5).softmax(dim=-1), v


def project(module: nn.Module, maps: Tensor, v: Tensor) -> Tensor:
    return module.proj((maps @ v).transpose(1, 2).reshape(2, TOKENS, -1))


OPTIONS = [
    {},
    {"expansion": None},
    {"kernel_size": 1},
    {"expansion": 1, "kernel_size": 1},
    {"reduction": False, "expansion": 2},
    {"constraint": "row+col"},
    {"constraint": "spatial"},
    {"qkv_bias": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("hands_on", [False, True])
def test_paper_form_by_the_book(options: dict, hands_on: bool) -> None:
    module, x = paper(hands_on=hands_on, **options), tokens()
    maps, v = plain_maps(module, x)
    refined = refine_maps(maps, module.refiner.mix(), grid=module.refiner.grid(GRID))
    v = v.repeat_interleave(refined.shape[1] // HEADS, dim=1)
    out, handed = module(x, grid=GRID)
    torch.testing.assert_close(out, project(module, refined, v))
    if hands_on:
        torch.testing.assert_close(handed, refined)
    else:
        assert handed is None


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_handing_on_changes_no_output(options: dict) -> None:
    quiet, loud = paper(**options), paper(hands_on=True, **options)
    torch.testing.assert_close(quiet(tokens(), grid=GRID)[0], loud(tokens(), grid=GRID)[0])


def test_starts_as_plain_attention() -> None:
    torch.manual_seed(0)
    ours, theirs = RefinedAttention(DIM, HEADS), Attention(DIM, HEADS, qkv_bias=True)
    left_over = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert not left_over.unexpected_keys
    assert all(name.startswith("refiner.") for name in left_over.missing_keys)
    x = tokens().float()
    torch.testing.assert_close(ours(x)[0], theirs(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("reduction", [True, False])
def test_a_sharing_block_hands_the_same_maps_on(reduction: bool) -> None:
    own, shared = paper(hands_on=True, reduction=reduction), paper(shared=True, hands_on=True, reduction=reduction)
    assert not hasattr(shared, "qkv")
    assert not hasattr(shared, "refiner")
    _, maps = own(tokens())
    out, handed = shared(tokens(2), maps)
    assert handed is maps
    v = heads_of(shared.v(tokens(2))).repeat_interleave(maps.shape[1] // HEADS, dim=1)
    torch.testing.assert_close(out, project(shared, maps, v))
    with pytest.raises(AssertionError, match="needs those of the block before"):
        shared(tokens())


def test_own_maps_do_not_depend_on_those_before() -> None:
    module = paper()
    torch.testing.assert_close(module(tokens(), torch.randn(2, HEADS, TOKENS, TOKENS))[0], module(tokens())[0])


@pytest.mark.parametrize("expansion", [1, 2, 3])
def test_without_reduction_the_projection_is_wider(expansion: int) -> None:
    for module in (paper(expansion=expansion, reduction=False), paper(expansion=expansion)):
        out_heads = module.refiner.out_heads
        assert module.proj.weight.shape == (DIM, WIDTH * out_heads)
    assert out_heads == HEADS
    assert paper(expansion=expansion, reduction=False).refiner.out_heads == HEADS * expansion


def test_without_reduction_copies_of_a_head_part_after_one_step() -> None:
    torch.manual_seed(0)
    module = RefinedAttention(DIM, HEADS, expansion=2, reduction=False)
    module(tokens().float())[0].square().sum().backward()
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    kernels = module.refiner.local.detach().unflatten(0, (HEADS, 2))
    assert (kernels[:, 0] - kernels[:, 1]).abs().amax(dim=(-2, -1)).gt(1e-6).all()


@pytest.mark.parametrize("build", [paper, official])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("rate", [{"attn_drop": 0.5}, {"proj_drop": 0.5}], ids=str)
def test_dropout_is_for_training(build, shared: bool, rate: dict) -> None:
    dropping, whole = build(shared=shared, **rate), build(shared=shared)
    maps = torch.rand(2, HEADS, TOKENS, TOKENS, dtype=torch.float64)
    torch.testing.assert_close(dropping(tokens(), maps)[0], whole(tokens(), maps)[0])
    # Batch norms have to stay in evaluation, or they alone would make a difference.
    for module in (dropping, whole):
        module.train()
        for norm in (m for m in module.modules() if isinstance(m, nn.BatchNorm2d)):
            norm.eval()
    torch.testing.assert_close(whole(tokens(), maps)[0], build(shared=shared)(tokens(), maps)[0])
    first, second = dropping(tokens(), maps)[0], dropping(tokens(), maps)[0]
    assert not torch.allclose(first, second)


def test_dropout_leaves_the_maps_handed_on_whole() -> None:
    module = paper(hands_on=True, attn_drop=0.5)
    maps = module(tokens())[1]
    torch.testing.assert_close(module.train()(tokens())[1], maps)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("hands_on", [False, True])
def test_masked_tokens_are_not_seen(options: dict, hands_on: bool) -> None:
    """A token that is masked as key and as query has no way into the output of the others."""
    module = paper(hands_on=hands_on, **options)
    real = torch.ones(2, TOKENS, dtype=torch.bool)
    real[0, 3], real[1, 5:] = False, False
    mask = real[:, None, :, None] & real[:, None, None, :]
    x = tokens()
    out, maps = module(x, attn_mask=mask, grid=GRID)
    changed = torch.where(real[..., None], x, tokens(5))
    other, _ = module(changed, attn_mask=mask, grid=GRID)
    torch.testing.assert_close(out[real], other[real], rtol=0, atol=0)
    if hands_on:
        assert maps.masked_select(~mask.expand_as(maps)).eq(0).all()


def test_masked_keys_stay_zero_and_both_kinds_of_mask_agree() -> None:
    module = paper(hands_on=True)
    keys = torch.ones(2, 1, 1, TOKENS, dtype=torch.bool)
    keys[0, ..., 2], keys[1, ..., 4:] = False, False
    out, maps = module(tokens(), attn_mask=keys)
    assert maps.masked_select(~keys.expand_as(maps)).eq(0).all()
    assert maps.masked_select(keys.expand_as(maps)).ne(0).all()
    additive = torch.zeros(keys.shape, dtype=torch.float64).masked_fill(~keys, float("-inf"))
    torch.testing.assert_close(module(tokens(), attn_mask=additive)[0], out)


def official_refined(module: OfficialRefinedAttention, maps: Tensor) -> Tensor:
    """adapt_bn(DLA(maps)), written out for evaluation mode."""
    refiner, last = module.refiner[0], module.refiner[1]

    def norm(x: Tensor, bn: nn.BatchNorm2d) -> Tensor:
        mean, var, weight, bias = (t[:, None, None] for t in (bn.running_mean, bn.running_var, bn.weight, bn.bias))
        return (x - mean) / (var + 1e-5).sqrt() * weight + bias

    x = maps
    if isinstance(refiner.expand, nn.Sequential):
        x = norm(F.conv2d(x, refiner.expand[0].weight), refiner.expand[1]).clamp(0, 6)
    x = F.conv2d(x, refiner.local.weight, padding=1, groups=x.shape[1])
    x = norm(F.conv2d(norm(x, refiner.local_norm).clamp(0, 6), refiner.reduce.weight), refiner.reduce_norm)
    return norm(maps + x, last)


@pytest.mark.parametrize("refine_own", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("expansion", [1, 3])
def test_official_block_with_maps_of_its_own(refine_own: bool, given: bool, expansion: int) -> None:
    module, x = official(refine_own=refine_own, expansion=expansion), tokens()
    assert (module.refiner is not None) == refine_own
    before = torch.rand(2, HEADS, TOKENS, TOKENS, dtype=torch.float64) if given else None
    maps, v = plain_maps(module, x)
    if before is not None:
        maps = maps + WIDTH**-0.5 * before
    if refine_own:
        maps = official_refined(module, maps)
    out, handed = module(x, before)
    torch.testing.assert_close(handed, maps)
    torch.testing.assert_close(out, project(module, maps, v))


def test_official_block_that_shares() -> None:
    module, x = official(shared=True, expansion=6), tokens()
    before = torch.rand(2, HEADS, TOKENS, TOKENS, dtype=torch.float64)
    out, handed = module(x, before)
    assert handed is before, "maps are handed on unrefined"
    assert module.refiner[0].local.weight.shape[0] == 3 * HEADS, "the ratio is 3, whatever is asked"
    used = WIDTH**-0.5 * official_refined(module, before)
    torch.testing.assert_close(out, project(module, used, heads_of(module.v(x))))
    with pytest.raises(AssertionError, match="needs those of the block before"):
        module(x)
