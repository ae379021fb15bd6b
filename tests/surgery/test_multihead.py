"""PyTorch's own attention written out: the same outputs and weights, whatever the masks, the layout and the caller."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitrefine.errors import UserError
from vitrefine.surgery.graft import strip
from vitrefine.surgery.multihead import ExplicitMultihead, explicit_multihead
from vitrefine.surgery.operate import apply

BATCH, QUERIES, KEYS, DIM, HEADS = 2, 5, 7, 12, 3


def pair(**options: Any) -> tuple[nn.Module, nn.Module]:
    """A plain attention, and one with the same weights that is written out."""
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(DIM, HEADS, dtype=torch.float64, **options)
    ours = nn.MultiheadAttention(DIM, HEADS, dtype=torch.float64, **options)
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours.load_state_dict(plain.state_dict())
    explicit_multihead(ours, ours)
    assert isinstance(ours, ExplicitMultihead)
    return plain, ours


def tokens(batch_first: bool, length: int, seed: int) -> Tensor:
    x = torch.randn(BATCH, length, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x if batch_first else x.transpose(0, 1)


def masks(kind: str) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(3)
    hidden = torch.rand(BATCH * HEADS, QUERIES, KEYS, generator=random) < 0.4
    hidden[..., 0] = False
    padding = torch.zeros(BATCH, KEYS, dtype=torch.bool)
    padding[1, -2:] = True
    additive = torch.randn(QUERIES, KEYS, dtype=torch.float64, generator=random)
    return {
        "none": {},
        "boolean": {"attn_mask": hidden[0]},
        "additive": {"attn_mask": additive},
        "of each head": {"attn_mask": hidden},
        "padding": {"key_padding_mask": padding},
        "both": {
            "attn_mask": additive,
            "key_padding_mask": torch.zeros(BATCH, KEYS).double().masked_fill(padding, -1e9),
        },
    }[kind]


@pytest.mark.parametrize("weights", ["none", "mean", "each"])
@pytest.mark.parametrize("mask", ["none", "boolean", "additive", "of each head", "padding", "both"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_equals_pytorch(batch_first: bool, mask: str, weights: str) -> None:
    plain, ours = pair(batch_first=batch_first)
    q, k, v = (tokens(batch_first, n, seed) for n, seed in ((QUERIES, 0), (KEYS, 1), (KEYS, 2)))
    options = {"need_weights": weights != "none", "average_attn_weights": weights == "mean", **masks(mask)}
    expected, expected_weights = plain(q, k, v, **options)
    got, got_weights = ours(q, k, v, **options)
    torch.testing.assert_close(got, expected)
    assert (got_weights is None) == (expected_weights is None)
    if expected_weights is not None:
        torch.testing.assert_close(got_weights, expected_weights)


@pytest.mark.parametrize("batch_first", [True, False])
def test_one_sequence_without_a_batch(batch_first: bool) -> None:
    plain, ours = pair(batch_first=batch_first, bias=False)
    x = tokens(True, QUERIES, 0)[0]
    padding = torch.tensor([False] * 4 + [True])
    for got, expected in zip(ours(x, x, x, padding), plain(x, x, x, padding), strict=True):
        torch.testing.assert_close(got, expected)


def test_causal() -> None:
    plain, ours = pair(batch_first=True)
    x = tokens(True, QUERIES, 0)
    options = {"attn_mask": torch.ones(QUERIES, QUERIES).triu(1).bool(), "is_causal": True, "need_weights": False}
    torch.testing.assert_close(ours(x, x, x, **options)[0], plain(x, x, x, **options)[0])


def test_dropout_acts_in_training_only() -> None:
    _, ours = pair(batch_first=True, dropout=0.5)
    x = tokens(True, QUERIES, 0)
    for needs in (True, False):
        assert not torch.equal(ours(x, x, x, need_weights=needs)[0], ours(x, x, x, need_weights=needs)[0])
    ours.eval()
    assert torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])


@pytest.mark.parametrize("options", [{"kdim": 6, "vdim": 6}, {"add_bias_kv": True}, {"add_zero_attn": True}])
def test_forms_that_cannot_be_written_out(options: dict[str, Any]) -> None:
    module = nn.MultiheadAttention(DIM, HEADS, **options)
    with pytest.raises(UserError, match="cannot be changed"):
        explicit_multihead(module, module)


class Encoder(nn.Module):
    """An image's patches through PyTorch's own encoder layer, which has a way around its attention's forward."""

    img_size = 8

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, DIM, 2, 2)
        self.layer = nn.TransformerEncoderLayer(DIM, 4, 16, batch_first=True)  # an even number, or it has no such way

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.stem(x).flatten(2).transpose(1, 2))


def test_acts_in_an_encoder_layer_without_gradients() -> None:
    torch.manual_seed(0)
    model = Encoder().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    image = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        before = model(image)
        apply(model, "uniform_head")
        changed = model(image)
    assert (changed - before).abs().max() > 1e-3
    torch.testing.assert_close(model(image), changed)  # with gradients there never was a way around
    strip(model)
    with torch.no_grad():
        assert torch.equal(model(image), before)


def test_nested_tensors_are_refused() -> None:
    _, ours = pair(batch_first=True)
    nested = torch.nested.nested_tensor([torch.randn(3, DIM).double(), torch.randn(4, DIM).double()])
    with pytest.raises(UserError, match="enable_nested_tensor=False"):
        ours(nested, nested, nested)
