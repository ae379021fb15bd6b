"""Broadcasts as modules, and the MLP that ends with one."""

import pytest
import torch
from timm.layers import Mlp
from torch import Tensor, nn

from vitrefine.errors import UserError
from vitrefine.layers.context_broadcast import (
    BROADCASTS,
    ContextBroadcast,
    ContextBroadcastMlp,
    GatedContextBroadcast,
    HybridContextBroadcast,
    ScaledContextBroadcast,
    create_broadcast,
)
from vitrefine.ops.context_broadcast import (
    context_broadcast,
    gated_context_broadcast,
    hybrid_context_broadcast,
    scaled_context_broadcast,
)

SHAPES = {"NLC": (2, 12, 8), "NHWC": (2, 3, 4, 8), "NCHW": (2, 8, 3, 4)}
MASKS = {"NLC": (2, 12), "NHWC": (2, 3, 4), "NCHW": (2, 3, 4)}
FUNCTIONS = {
    "cb": context_broadcast,
    "cb_gate": gated_context_broadcast,
    "cb_hybrid": hybrid_context_broadcast,
}


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("name", BROADCASTS)
def test_modules_are_their_functions(name: str, layout: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(SHAPES[layout], dtype=torch.float64)
    mask = torch.rand(MASKS[layout]) < 0.7
    module = create_broadcast(name, 8, layout=layout, dtype=torch.float64)
    if isinstance(module, ScaledContextBroadcast):
        nn.init.normal_(module.scale)
        expected = scaled_context_broadcast(x, module.scale, layout=layout, mask=mask)
    else:
        expected = FUNCTIONS[name](x, layout=layout, mask=mask)
    torch.testing.assert_close(module(x, mask), expected, rtol=0, atol=0)


@pytest.mark.parametrize("layout", SHAPES)
def test_scaled_starts_as_the_identity(layout: str) -> None:
    x = torch.randn(SHAPES[layout])
    module = ScaledContextBroadcast(8, layout)
    assert torch.equal(module(x), x)
    nn.init.ones_(module.scale)
    module.reset_parameters()
    assert torch.equal(module(x), x)


def test_scale_learns_from_zero() -> None:
    module = ScaledContextBroadcast(8)
    module(torch.randn(2, 12, 8) + 1).square().sum().backward()
    assert module.scale.grad is not None
    assert module.scale.grad.abs().min() > 0


def test_only_scaled_has_parameters() -> None:
    for module in (ContextBroadcast(), GatedContextBroadcast(), HybridContextBroadcast()):
        assert not list(module.parameters())
    assert {name: tuple(p.shape) for name, p in ScaledContextBroadcast(8).named_parameters()} == {"scale": (8,)}


def test_factory_arguments() -> None:
    assert ScaledContextBroadcast(8, dtype=torch.float64, device="meta").scale.is_meta
    mlp = ContextBroadcastMlp(8, 16, broadcast="cb_s", dtype=torch.float64)
    assert {p.dtype for p in mlp.parameters()} == {torch.float64}


def test_class_token_is_told_apart() -> None:
    x = torch.randn(2, 12, 8)
    with_class, without = GatedContextBroadcast()(x), GatedContextBroadcast(class_token=False)(x)
    torch.testing.assert_close(with_class, x * (x[:, :1] + 1))
    torch.testing.assert_close(without, x * (x.mean(1, keepdim=True) + 1))


def test_unknown_names() -> None:
    with pytest.raises(UserError, match="broadcast 'cbs'"):
        create_broadcast("cbs", 8)
    with pytest.raises(UserError, match="layout 'NC'"):
        ContextBroadcast("NC")


@pytest.mark.parametrize("name", BROADCASTS)
def test_mlp_loads_plain_weights_and_broadcasts_last(name: str) -> None:
    torch.manual_seed(0)
    plain = Mlp(8, 16, norm_layer=nn.LayerNorm).double()
    mlp = ContextBroadcastMlp(8, 16, norm_layer=nn.LayerNorm, broadcast=name).double()
    missing = mlp.load_state_dict(plain.state_dict(), strict=name != "cb_s")
    assert missing.missing_keys == (["broadcast.scale"] if name == "cb_s" else [])
    x = torch.randn(2, 12, 8, dtype=torch.float64)
    torch.testing.assert_close(mlp(x), mlp.broadcast(plain(x)))


def test_mlp_with_scale_zero_is_the_plain_one() -> None:
    plain = Mlp(8, 16)
    mlp = ContextBroadcastMlp(8, 16, broadcast="cb_s")
    mlp.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(2, 12, 8)
    assert torch.equal(mlp(x), plain(x))


def test_mlp_broadcasts_after_dropout() -> None:
    """Dropped entries still receive the mean: none is exactly zero, as half would be were dropout last."""
    torch.manual_seed(0)
    mlp = ContextBroadcastMlp(8, 16, drop=(0.0, 0.5))
    assert mlp.train()(torch.randn(2, 12, 8)).abs().min() > 0


def test_convolutional_mlp_broadcasts_a_map() -> None:
    torch.manual_seed(0)
    mlp = ContextBroadcastMlp(8, 16, use_conv=True)
    x = torch.randn(2, 8, 3, 4)
    plain = Mlp.forward(mlp, x)
    torch.testing.assert_close(mlp(x), (plain + plain.mean((2, 3), keepdim=True)) / 2)


def test_mlp_passes_the_mask_on() -> None:
    torch.manual_seed(0)
    mlp = ContextBroadcastMlp(8, 16)
    x = torch.randn(2, 12, 8)
    short = mlp(x[:, :7])
    mask = (torch.arange(12) < 7).expand(2, 12)
    torch.testing.assert_close(mlp(x, mask)[:, :7], short)


def mid_and_end(mlp: Mlp, broadcast: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = mlp.act(mlp.fc1(x))
    return mlp.fc2(broadcast(hidden)), broadcast(mlp.fc2(hidden))


def test_cb_at_mid_equals_cb_at_end() -> None:
    """CB's weights sum to one and fc2 is affine, so the two commute, bias included (Table 4b)."""
    torch.manual_seed(0)
    mlp = Mlp(8, 16).double()
    mid, end = mid_and_end(mlp, ContextBroadcast(), torch.randn(2, 12, 8, dtype=torch.float64))
    torch.testing.assert_close(mid, end, rtol=0, atol=1e-13)


@pytest.mark.parametrize("bias", [False, True])
def test_cb_s_at_mid_differs_from_end_by_the_bias(bias: bool) -> None:
    """With one Λ for all channels: x_i + λ·mean has weights that sum to 1 + λ, so end has λ·b more than mid."""
    torch.manual_seed(0)
    mlp = Mlp(8, 16, bias=bias).double()
    amount = 0.3
    at_mid, at_end = (ScaledContextBroadcast(dim, dtype=torch.float64) for dim in (16, 8))
    for module in (at_mid, at_end):
        nn.init.constant_(module.scale, amount)
    hidden = mlp.act(mlp.fc1(torch.randn(2, 12, 8, dtype=torch.float64)))
    difference = at_end(mlp.fc2(hidden)) - mlp.fc2(at_mid(hidden))
    expected = torch.zeros(8, dtype=torch.float64) if mlp.fc2.bias is None else amount * mlp.fc2.bias
    torch.testing.assert_close(difference, expected.expand_as(difference), rtol=0, atol=1e-13)
    assert bool(difference.abs().max() > 1e-3) == bias


def test_mid_and_end_part_under_dropout() -> None:
    """The commuting holds for evaluation only: drop2 lies between fc2 and the end."""
    torch.manual_seed(0)
    hidden = torch.randn(2, 12, 16)
    fc2, drop, broadcast = nn.Linear(16, 8), nn.Dropout(0.5), ContextBroadcast()
    torch.manual_seed(1)
    mid = drop(fc2(broadcast(hidden)))
    torch.manual_seed(1)
    end = broadcast(drop(fc2(hidden)))
    assert not torch.allclose(mid, end)


@pytest.mark.parametrize("name", BROADCASTS)
def test_mlp_compiles_whole(name: str) -> None:
    torch.manual_seed(0)
    mlp = ContextBroadcastMlp(8, 16, broadcast=name).eval()
    x = torch.randn(2, 12, 8)
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), mlp(x))
