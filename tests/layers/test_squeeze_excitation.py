"""Squeeze-excitation over tokens against timm's over maps."""

import pytest
import torch
from timm.layers import SEModule

from vitrefine.errors import UserError
from vitrefine.layers.squeeze_excitation import TokenSqueezeExcitation


def timm_twin(module: TokenSqueezeExcitation, dim: int) -> SEModule:
    twin = SEModule(dim, rd_channels=module.fc1.out_features).double()
    twin.load_state_dict({k: v[..., None, None] if v.ndim == 2 else v for k, v in module.state_dict().items()})
    return twin


def test_layouts_equal_timm() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 32, dtype=torch.float64)
    module = TokenSqueezeExcitation(32, reduction=4, dtype=torch.float64)
    expected = timm_twin(module, 32)(x.permute(0, 3, 1, 2))
    torch.testing.assert_close(module(x.flatten(1, 2)), expected.flatten(2).transpose(1, 2))
    module.layout = "NHWC"
    torch.testing.assert_close(module(x), expected.permute(0, 2, 3, 1))
    module.layout = "NCHW"
    torch.testing.assert_close(module(x.permute(0, 3, 1, 2)), expected)


def test_mask_leaves_padding_out() -> None:
    torch.manual_seed(0)
    module = TokenSqueezeExcitation(32)
    x = torch.randn(2, 12, 32)
    mask = (torch.arange(12) < 7).expand(2, 12)
    torch.testing.assert_close(module(x, mask)[:, :7], module(x[:, :7]))


def test_gradients() -> None:
    torch.manual_seed(0)
    module = TokenSqueezeExcitation(8, reduction=2, dtype=torch.float64)
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(module, (x,))


def test_size_and_factory_arguments() -> None:
    module = TokenSqueezeExcitation(384, device="meta", dtype=torch.bfloat16)
    assert sum(p.numel() for p in module.parameters()) == 384 * 24 + 24 + 24 * 384 + 384
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.bfloat16)}


def test_bad_arguments() -> None:
    with pytest.raises(UserError, match="layout 'NC'"):
        TokenSqueezeExcitation(32, layout="NC")
    with pytest.raises(UserError, match="32 channels 64 times"):
        TokenSqueezeExcitation(32, reduction=64)
