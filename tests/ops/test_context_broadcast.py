"""Context Broadcasting against loops over tokens, in every layout, masked and not."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from vitrefine.errors import UserError
from vitrefine.ops.context_broadcast import (
    context_broadcast,
    gated_context_broadcast,
    hybrid_context_broadcast,
    mean_token,
    scaled_context_broadcast,
)

BATCH, HEIGHT, WIDTH, CHANNELS = 2, 3, 4, 5
TO_LAYOUT = {
    "NLC": lambda x: x.flatten(1, 2),
    "NHWC": lambda x: x,
    "NCHW": lambda x: x.permute(0, 3, 1, 2),
}
SCALE = torch.linspace(-1, 2, CHANNELS, dtype=torch.float64)
VARIANTS = {
    "cb": context_broadcast,
    "cb_s": lambda x, **options: scaled_context_broadcast(x, SCALE, **options),
    "cb_gate": lambda x, **options: gated_context_broadcast(x, class_token=False, **options),
    "cb_hybrid": lambda x, **options: hybrid_context_broadcast(x, class_token=False, **options),
}


def feature_map(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, HEIGHT, WIDTH, CHANNELS, dtype=torch.float64, generator=generator)


def some_mask() -> Tensor:
    mask = torch.rand(BATCH, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(1)) < 0.6
    assert 0 < mask[0].sum() < HEIGHT * WIDTH
    return mask


def loop(name: str, tokens: Tensor, mask: Tensor | None, gate_by_class: bool) -> Tensor:
    """The equations of the paper, one token and one channel at a time."""
    out = torch.empty_like(tokens)
    for b in range(tokens.shape[0]):
        seen = [j for j in range(tokens.shape[1]) if mask is None or mask[b, j]]
        for c in range(tokens.shape[2]):
            mean = sum(tokens[b, j, c].item() for j in seen) / len(seen)
            gate = tokens[b, 0, c].item() if gate_by_class else mean
            for i in range(tokens.shape[1]):
                x = tokens[b, i, c].item()
                out[b, i, c] = {
                    "cb": (x + mean) / 2,
                    "cb_s": x + SCALE[c].item() * mean,
                    "cb_gate": x * (gate + 1),
                    "cb_hybrid": x * gate + (x + mean) / 2,
                }[name]
    return out


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_equals_loops(name: str, masked: bool) -> None:
    tokens = feature_map().flatten(1, 2)
    mask = some_mask().flatten(1) if masked else None
    torch.testing.assert_close(VARIANTS[name](tokens, mask=mask), loop(name, tokens, mask, False), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["cb_gate", "cb_hybrid"])
def test_class_token_gates(name: str) -> None:
    tokens = feature_map().flatten(1, 2)
    function = gated_context_broadcast if name == "cb_gate" else hybrid_context_broadcast
    torch.testing.assert_close(function(tokens), loop(name, tokens, None, True), rtol=0, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("name", VARIANTS)
def test_layouts_agree(name: str, layout: str, masked: bool) -> None:
    x = feature_map()
    mask = some_mask() if masked else None
    tokens = VARIANTS[name](TO_LAYOUT["NLC"](x), mask=None if mask is None else mask.flatten(1))
    expected = TO_LAYOUT[layout](tokens.unflatten(1, (HEIGHT, WIDTH)))
    torch.testing.assert_close(VARIANTS[name](TO_LAYOUT[layout](x), layout=layout, mask=mask), expected)


def test_masked_tokens_do_not_count() -> None:
    tokens = feature_map().flatten(1, 2)
    mask = some_mask().flatten(1)
    noisy = torch.where(mask[..., None], tokens, torch.tensor(1e6, dtype=torch.float64))
    torch.testing.assert_close(mean_token(noisy, mask=mask), mean_token(tokens, mask=mask))


def test_a_sequence_that_is_all_padding_gives_no_nan() -> None:
    tokens = feature_map().flatten(1, 2)
    out = context_broadcast(tokens, mask=torch.zeros(tokens.shape[:2], dtype=torch.bool))
    torch.testing.assert_close(out, tokens / 2)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layout", TO_LAYOUT)
@pytest.mark.parametrize("name", VARIANTS)
def test_gradients(name: str, layout: str, masked: bool) -> None:
    x = TO_LAYOUT[layout](feature_map()).contiguous().requires_grad_()
    mask = some_mask() if masked else None
    if mask is not None and layout == "NLC":
        mask = mask.flatten(1)
    assert torch.autograd.gradcheck(lambda x: VARIANTS[name](x, layout=layout, mask=mask), x)


def test_gradient_of_the_scale() -> None:
    tokens = feature_map().flatten(1, 2)
    scale = SCALE.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda scale: scaled_context_broadcast(tokens, scale), scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_masked_mean_of_many_tokens_keeps_to_half_precision(dtype: torch.dtype) -> None:
    """512 tokens of 200 add up to more than float16 can hold, and 511 is a number that bfloat16 cannot."""
    mask = torch.ones(1, 512, dtype=torch.bool)
    mask[0, 0] = False
    mean = mean_token(torch.full((1, 512, 2), 200, dtype=dtype), mask=mask)
    assert mean.dtype == dtype
    assert mean.eq(200).all()


@pytest.fixture
def cuda_autocast() -> Iterator[None]:
    """Autocast of CUDA in bfloat16, where `torch.autocast` would leave it off for want of a GPU."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    yield
    torch.set_autocast_enabled("cuda", before[0])
    torch.set_autocast_dtype("cuda", before[1])


@pytest.mark.usefixtures("cuda_autocast")
@pytest.mark.parametrize("name", VARIANTS)
def test_masks_under_autocast_on_a_gpu(name: str) -> None:
    """CUDA's autocast takes sums in float32; the mean token is of the type of the tokens all the same."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, 5, CHANNELS, dtype=torch.bfloat16, device="cuda")
        mask = torch.ones(2, 5, dtype=torch.bool, device="cuda")
        if name == "cb_s":
            scaled_context_broadcast(x, torch.empty(CHANNELS, device="cuda"), mask=mask)
        else:
            assert VARIANTS[name](x, mask=mask).dtype == torch.bfloat16


def test_broadcasting_keeps_the_mean_token() -> None:
    tokens = feature_map().flatten(1, 2)
    torch.testing.assert_close(mean_token(context_broadcast(tokens)), mean_token(tokens))


def test_unknown_layout() -> None:
    with pytest.raises(UserError, match="layout 'CHWN'"):
        context_broadcast(feature_map(), layout="CHWN")
