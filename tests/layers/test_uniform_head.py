"""Attention with a uniform head: against loops over heads, masks, loading, and the parameters of Table 1."""

import math
from typing import Any

import pytest
import timm
import torch
from timm.layers import Attention
from torch import Tensor, nn

from vitrefine.errors import UserError
from vitrefine.layers.uniform_head import MODES, UniformHeadAttention

DIM, HEADS, TOKENS = 24, 4, 7


def attention(mode: str, **options: float) -> UniformHeadAttention:
    torch.manual_seed(0)
    module = UniformHeadAttention(DIM, HEADS, mode, dtype=torch.float64, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def tokens() -> Tensor:
    return torch.randn(2, TOKENS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def naive(module: UniformHeadAttention, x: Tensor, visible: Tensor) -> Tensor:
    """One head, one query at a time; `visible` is (N, N)."""
    learned, width, head_dim = module.learned_heads, module.query_dim, module.head_dim
    out = torch.zeros_like(x)
    for b in range(x.shape[0]):
        qkv = x[b] @ module.qkv.weight.T + module.qkv.bias
        heads = []
        for h in range(learned):
            q = qkv[:, h * width : (h + 1) * width]
            k = qkv[:, (learned + h) * width : (learned + h + 1) * width]
            v = qkv[:, 2 * learned * width :][:, h * head_dim : (h + 1) * head_dim]
            scores = (q @ k.T / math.sqrt(width)).masked_fill(~visible, -math.inf)
            heads.append(scores.softmax(-1) @ v)
        if module.mode == "append":
            values = x[b] @ module.uniform_value.weight.T + module.uniform_value.bias
            weight = torch.cat([module.proj.weight, module.uniform_proj], dim=1)
        else:
            values = qkv[:, -head_dim:]
            weight = module.proj.weight
        heads.append(torch.stack([values[visible[i]].mean(0) for i in range(len(values))]))
        out[b] = torch.cat(heads, dim=1) @ weight.T + module.proj.bias
    return out


@pytest.mark.parametrize("mode", MODES)
def test_equals_loops(mode: str) -> None:
    module = attention(mode)
    expected = naive(module, tokens(), torch.ones(TOKENS, TOKENS, dtype=torch.bool))
    torch.testing.assert_close(module(tokens()), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_masks(mode: str, additive: bool) -> None:
    module = attention(mode)
    visible = torch.rand(TOKENS, TOKENS, generator=torch.Generator().manual_seed(2)) < 0.5
    visible |= torch.eye(TOKENS, dtype=torch.bool)
    mask = torch.zeros(TOKENS, TOKENS, dtype=torch.float64).masked_fill(~visible, -math.inf) if additive else visible
    expected = naive(module, tokens(), visible)
    for shaped in (mask, mask.expand(HEADS, -1, -1), mask.expand(2, HEADS, -1, -1)):
        torch.testing.assert_close(module(tokens(), attn_mask=shaped), expected, rtol=0, atol=1e-12)


def test_uniform_head_sees_what_any_head_sees() -> None:
    module = attention("replace")
    per_head = torch.eye(TOKENS, dtype=torch.bool).repeat(HEADS, 1, 1)
    per_head[0, :, 2] = True
    nn.init.eye_(module.proj.weight)
    nn.init.zeros_(module.proj.bias)
    values = (tokens() @ module.qkv.weight.T + module.qkv.bias)[..., -module.head_dim :]
    expected = (values + values[:, 2:3]) / 2  # itself and token 2, which head 0 alone lets through
    torch.testing.assert_close(module(tokens(), attn_mask=per_head)[..., -module.head_dim :], expected)


@pytest.mark.parametrize("mode", MODES)
def test_padding_changes_nothing(mode: str) -> None:
    module = attention(mode)
    x = tokens()
    padding_mask = (torch.arange(TOKENS) < 5).expand(2, 1, 1, TOKENS)
    torch.testing.assert_close(module(x, attn_mask=padding_mask)[:, :5], module(x[:, :5]))


@pytest.mark.parametrize("mode", MODES)
def test_causal(mode: str) -> None:
    module = attention(mode)
    triangle = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    torch.testing.assert_close(module(tokens(), is_causal=True), naive(module, tokens(), triangle), rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_gradients(mode: str) -> None:
    assert torch.autograd.gradcheck(attention(mode), (tokens()[:1, :3].requires_grad_(),))


@pytest.mark.parametrize("mode", MODES)
def test_without_bias(mode: str) -> None:
    module = UniformHeadAttention(DIM, HEADS, mode, qkv_bias=False)
    assert {name for name, _ in module.named_parameters() if name.endswith("bias")} == {"proj.bias"}
    assert module(tokens().float()).shape == (2, TOKENS, DIM)


def test_dropout_acts_in_training_only() -> None:
    module = attention("replace", attn_drop=0.5, proj_drop=0.5)
    assert not torch.equal(module(tokens()), module(tokens()))
    module.eval()
    assert torch.equal(module(tokens()), module(tokens()))


def test_append_starts_as_the_attention_it_extends() -> None:
    torch.manual_seed(0)
    plain = Attention(DIM, HEADS, qkv_bias=True).double()
    module = UniformHeadAttention(DIM, HEADS, "append", dtype=torch.float64)
    keys = module.load_state_dict(plain.state_dict(), strict=False)
    assert keys.missing_keys == ["uniform_proj", "uniform_value.weight", "uniform_value.bias"]
    assert not keys.unexpected_keys
    torch.testing.assert_close(module(tokens()), plain(tokens()), rtol=0, atol=1e-14)
    module(tokens()).square().sum().backward()
    assert module.uniform_proj.grad is not None
    assert module.uniform_proj.grad.abs().max() > 0


def test_replace_loads_plain_attention() -> None:
    """What is loaded is the plain attention with the queries and keys of its last head set to zero."""
    torch.manual_seed(0)
    plain = Attention(DIM, HEADS, qkv_bias=True).double()
    state = plain.state_dict()
    kept = {name: weight.clone() for name, weight in state.items()}
    module = UniformHeadAttention(DIM, HEADS, "replace", dtype=torch.float64)
    nn.Sequential(module).load_state_dict({f"0.{name}": weight for name, weight in state.items()}, strict=True)
    assert all(torch.equal(state[name], kept[name]) for name in kept)
    head_dim = DIM // HEADS
    with torch.no_grad():
        for part in (plain.qkv.weight, plain.qkv.bias):
            part[DIM - head_dim : DIM] = 0
            part[2 * DIM - head_dim : 2 * DIM] = 0
    torch.testing.assert_close(module(tokens()), plain(tokens()), rtol=0, atol=1e-14)
    module.load_state_dict(module.state_dict(), strict=True)


def vit_small(mode: str | None, embed_dim: int = 384, num_heads: int = 6) -> int:
    model: Any = timm.create_model("vit_small_patch16_224", embed_dim=embed_dim, num_heads=num_heads, device="meta")
    if mode is not None:
        for block in model.blocks:
            block.attn = UniformHeadAttention(embed_dim, num_heads, mode, device="meta")
    return sum(parameter.numel() for parameter in model.parameters())


def test_parameters_of_table_1() -> None:
    """Printed for ViT-S, A, B, C: 22, 21, 22, 29 M. C is met by a model one head wider, not by one more head."""
    plain = vit_small(None)
    assert plain == 22_050_664
    assert vit_small("replace") == 21_459_304
    assert vit_small("widen") == 22_059_904
    assert abs(vit_small("widen") / plain - 1) < 0.01
    assert vit_small("append") == 22_641_256
    assert vit_small("replace", embed_dim=448, num_heads=7) == 29_164_712


@pytest.mark.parametrize(("dim", "heads"), [(192, 3), (384, 6), (768, 12), (1024, 16)])
def test_widened_heads_are_of_comparable_size(dim: int, heads: int) -> None:
    widened = sum(p.numel() for p in UniformHeadAttention(dim, heads, "widen", device="meta").parameters())
    plain = sum(p.numel() for p in Attention(dim, heads, qkv_bias=True, device="meta").parameters())
    assert abs(widened / plain - 1) < 0.01


@pytest.mark.parametrize("mode", MODES)
def test_works_in_a_timm_model(mode: str) -> None:
    torch.manual_seed(0)
    model: Any = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    for block in model.blocks:
        block.attn = UniformHeadAttention(192, 3, mode)
    image = torch.randn(2, 3, 32, 32)
    model(image).sum().backward()
    model.eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(image), model(image))


def test_bad_arguments() -> None:
    with pytest.raises(UserError, match="no mode of a uniform head 'add'"):
        UniformHeadAttention(DIM, HEADS, "add")
    with pytest.raises(UserError, match="24 channels do not divide into 5 heads"):
        UniformHeadAttention(DIM, 5)
    with pytest.raises(UserError, match="no learned head"):
        UniformHeadAttention(DIM, 1)
