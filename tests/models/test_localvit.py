"""LocalViT-Ti: its size as published, its block against plain functions, and what timm's ViT can do."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitrefine.errors import UserError
from vitrefine.models.localvit import LocalVisionTransformer, LocalVitBlock


def small(**options: Any) -> LocalVisionTransformer:
    torch.manual_seed(0)
    options = {"img_size": 64, "depth": 3, "embed_dim": 64, "num_classes": 10, **options}
    model = timm.create_model("localvit_ti", **options)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None and module.running_var is not None:
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model.eval()


def images(height: int = 64, width: int = 64) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))


def test_published_parameters_and_flops() -> None:
    """5.9 M and 1.3 G; papers count a multiply-accumulate as one, PyTorch as two."""
    model = timm.create_model("localvit_ti", device="meta").eval()
    assert sum(p.numel() for p in model.parameters()) == 5_908_696
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(torch.empty(1, 3, 224, 224, device="meta"))
    assert round(counter.get_total_flops() / 2e9, 1) == 1.3


def batch_norm(x: Tensor, norm: Any) -> Tensor:
    return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=1e-5)


def h_swish(x: Tensor) -> Tensor:
    return x * (x + 3).clamp(0, 6) / 6


@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_block_computes_its_equations(prefix: int) -> None:
    block = small().double().blocks[1]
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    x = torch.randn(2, prefix + 15, 64, dtype=torch.float64)
    x1 = x + block.attn(block.norm1(x))
    image = x1[:, prefix:].transpose(1, 2).reshape(2, 64, 3, 5)
    ff = block.mlp
    hidden = h_swish(batch_norm(torch.einsum("oc,bchw->bohw", ff.conv_pw.weight[..., 0, 0], image), ff.bn1))
    hidden = h_swish(batch_norm(F.conv2d(hidden, ff.conv_dw.weight, padding=1, groups=256), ff.bn2))
    squeezed = hidden.mean((2, 3)) @ ff.se.conv_reduce.weight[..., 0, 0].T + ff.se.conv_reduce.bias
    gate = squeezed.relu() @ ff.se.conv_expand.weight[..., 0, 0].T + ff.se.conv_expand.bias
    hidden = hidden * ((gate + 3).clamp(0, 6) / 6)[..., None, None]
    branch = batch_norm(torch.einsum("oc,bchw->bohw", ff.conv_pwl.weight[..., 0, 0], hidden), ff.bn3)
    expected = torch.cat([x1[:, :prefix], x1[:, prefix:] + branch.flatten(2).transpose(1, 2)], dim=1)
    torch.testing.assert_close(block(x, (3, 5)), expected, rtol=0, atol=1e-11)


def test_locality() -> None:
    """Through the feed-forward (its squeeze-excitation aside) a patch reaches its eight neighbours and no further."""
    block = small(depth=1).double().blocks[0]
    nn.init.zeros_(block.attn.proj.weight)  # and its bias starts at zero: no token sees another here
    block.mlp.se = nn.Identity()
    x = torch.randn(1, 1 + 35, 64, dtype=torch.float64)
    moved = x.clone()
    moved[0, 1 + 2 * 7 + 3] += 1  # row 2, column 3 of a 5×7 grid
    changed = (block(x, (5, 7)) - block(moved, (5, 7))).abs().amax(-1)[0] > 1e-12
    assert not changed[0]
    assert changed[1:].reshape(5, 7).nonzero().tolist() == [[i, j] for i in (1, 2, 3) for j in (2, 3, 4)]


def test_squeeze_excitation_starts_half_open() -> None:
    feed_forward = LocalVitBlock(64, 4).mlp
    x = torch.randn(2, 256, 3, 5)
    torch.testing.assert_close(feed_forward.se(x), x / 2, rtol=0.02, atol=0)
    assert (feed_forward.conv_pw.bias, feed_forward.conv_dw.bias, feed_forward.conv_pwl.bias) == (None, None, None)


def test_backward_reaches_every_parameter() -> None:
    model = small().train()
    model(images()).square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []


@pytest.mark.parametrize(("height", "width"), [(32, 96), (80, 48), (50, 71)])
def test_any_input_size(height: int, width: int) -> None:
    model = small()
    with torch.no_grad():
        assert model(images(height, width)).shape == (2, 10)
        features = model.forward_intermediates(images(height, width), indices=[2], intermediates_only=True)[0]
    assert features.shape == (2, 64, -(-height // 16), -(-width // 16))


def test_static_image_size() -> None:
    dynamic, static = small(), small(dynamic_img_size=False, dynamic_img_pad=False)
    with torch.no_grad():
        torch.testing.assert_close(static(images()), dynamic(images()))


def test_rows_and_columns_are_told_apart() -> None:
    """A transposed image through transposed kernels and position embeddings gives the same logits."""
    model, twin = small(img_size=(32, 80)), small(img_size=(80, 32))
    state = {
        name: weight.mT if weight.shape[-2:] in ((16, 16), (3, 3)) else weight
        for name, weight in model.state_dict().items()
    }
    positions = state["pos_embed"]
    grid = positions[:, 1:].unflatten(1, (2, 5)).transpose(1, 2).flatten(1, 2)
    state["pos_embed"] = torch.cat([positions[:, :1], grid], dim=1)
    twin.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(twin(images(32, 80).mT), model(images(32, 80)))


def test_state_dict_round_trip(tmp_path: Path) -> None:
    model = small()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    options: dict[str, Any] = {"img_size": 64, "depth": 3, "embed_dim": 64, "num_classes": 10}
    other = timm.create_model("localvit_ti", checkpoint_path=str(tmp_path / "model.pt"), **options).eval()
    with torch.no_grad():
        assert torch.equal(other(images()), model(images()))


def test_compile_equals_eager() -> None:
    model = small()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(images()), model(images()))
        torch.testing.assert_close(compiled(images(32, 96)), model(images(32, 96)))


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    model = small()
    with torch.no_grad():
        exported = torch.export.export(model, (images(64, 96),), strict=strict).module()
        torch.testing.assert_close(exported(images(64, 96)), model(images(64, 96)))


def test_features_only() -> None:
    features: Any = timm.create_model(
        "localvit_ti", img_size=64, depth=3, embed_dim=64, features_only=True, out_indices=(0, 2)
    ).eval()
    with torch.no_grad():
        outputs = features(images(64, 96))
    assert [tuple(output.shape) for output in outputs] == [(2, 64, 4, 6)] * 2
    assert features.feature_info.reduction() == [16, 16]


def test_intermediates_agree_with_timm() -> None:
    """Every form of the answer is the one timm's own method gives, had it the grid to pass on."""
    model = small(reg_tokens=2)
    square = images()
    for block in model.blocks:
        block.forward = with_grid(block.forward, (4, 4))
    model.eval()
    for options in (
        {},
        {"indices": 2, "norm": True},
        {"indices": [0, 2], "output_fmt": "NLC", "intermediates_only": True},
        {"indices": [0], "stop_early": True, "return_prefix_tokens": True},
        {"indices": [1], "output_dict": True, "return_prefix_tokens": True},
        {"indices": [1], "output_dict": True, "intermediates_only": True},
    ):
        with torch.no_grad():
            ours = model.forward_intermediates(square, **options)
            theirs = super(LocalVisionTransformer, model).forward_intermediates(square, **options)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def with_grid(forward: Any, grid: tuple[int, int]) -> Any:
    return lambda x, *given, **options: forward(x, *(given or (grid,)), **options)


def test_intermediates_refuse_an_unknown_layout() -> None:
    with pytest.raises(UserError, match="NHWC"):
        small().forward_intermediates(images(), output_fmt="NHWC")


def test_attention_mask_reaches_the_attention() -> None:
    model = small()
    nothing_but_oneself = torch.eye(17, dtype=torch.bool)
    with torch.no_grad():
        logits = model(images())
        assert not torch.allclose(model(images(), attn_mask=nothing_but_oneself), logits)
        torch.testing.assert_close(model(images(), attn_mask=torch.ones_like(nothing_but_oneself)), logits)


def test_classifier_and_pooling_can_be_reset() -> None:
    model = small()
    model.reset_classifier(7)
    assert model(images()).shape == (2, 7)
    model.reset_classifier(0, "avg")
    assert model(images()).shape == (2, 64)


def test_optimiser_groups() -> None:
    model = small()
    assert "pos_embed" in model.no_weight_decay()
    undecayed = {id(p) for p in param_groups_weight_decay(model, 0.05, model.no_weight_decay())[0]["params"]}
    assert all((p.ndim <= 1) == (id(p) in undecayed) for n, p in model.named_parameters() if n.startswith("blocks"))
    assert len({group["lr_scale"] for group in param_groups_layer_decay(model, layer_decay=0.5)}) == 3 + 2


def test_gradient_checkpointing_changes_no_gradient() -> None:
    """Two sizes before one backward: a block has to recompute on the grid it had."""
    gradients = []
    for enable in (False, True):
        model = small().train()
        model.set_grad_checkpointing(enable)
        (model(images()).square().sum() + model(images(32, 96)).square().sum()).backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_drop_path_is_on_the_attention_only() -> None:
    block = small(drop_path_rate=0.5).blocks[2]
    assert block.drop_path1.drop_prob == 0.5
    assert isinstance(block.drop_path2, nn.Identity)


def test_patch_dropout_is_refused() -> None:
    with pytest.raises(UserError, match="patch_drop_rate"):
        small(patch_drop_rate=0.5)
