"""The counter, against counts by hand and the figures that papers agree on."""

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import DeformConv2d

from vitrefine.errors import UserError
from vitrefine.models.cost import ITSELF, measure
from vitrefine.ops import deformable_merge


def create(name: str, **kwargs: object) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name, **kwargs)


class Attend(nn.Module):
    """Attention among the rows of each channel's map: H channels are heads, rows are tokens."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            return F.scaled_dot_product_attention(x, x, x)
        return (x @ x.transpose(-2, -1)).softmax(dim=-1) @ x


def test_linear_by_hand() -> None:
    cost = measure(nn.Linear(5, 7), (4, 5), in_chans=3)
    assert (cost.params, cost.macs, cost.activations) == (5 * 7 + 7, 3 * 4 * 5 * 7, 3 * 4 * 7)
    assert measure(nn.Linear(5, 7, bias=False), (4, 5)).macs == cost.macs


@pytest.mark.parametrize("groups", [1, 2])
def test_convolution_by_hand(groups: int) -> None:
    cost = measure(nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=groups), (10, 12), in_chans=4)
    assert cost.activations == 6 * 5 * 6
    assert cost.macs == 6 * 5 * 6 * (4 // groups) * 9


def test_transposed_convolution_by_hand() -> None:
    cost = measure(nn.ConvTranspose2d(4, 6, 2, stride=2), (5, 7), in_chans=4)
    assert (cost.macs, cost.activations) == (4 * 5 * 7 * 6 * 4, 6 * 10 * 14)


@pytest.mark.parametrize("fused", [True, False])
def test_attention_by_hand(fused: bool) -> None:
    heads, tokens, width = 3, 10, 8
    cost = measure(Attend(fused), (tokens, width), in_chans=heads)
    assert cost.macs == 2 * heads * tokens * tokens * width
    assert cost.activations == heads * tokens * tokens + heads * tokens * width


def test_deformable_convolution_counts_as_a_convolution() -> None:
    class Deformable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.merge = DeformConv2d(4, 6, 2, stride=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.merge(x, x.new_zeros(1, 8, x.shape[2] // 2, x.shape[3] // 2))

    class Merge(Deformable):
        def forward(self, x: Tensor) -> Tensor:
            offset = x.new_zeros(1, 8, x.shape[2] // 2, x.shape[3] // 2)
            return deformable_merge(x.permute(0, 2, 3, 1), offset, self.merge.weight, self.merge.bias)

    plain = measure(nn.Conv2d(4, 6, 2, stride=2), (8, 10), in_chans=4)
    assert plain.macs == 6 * 4 * 5 * 4 * 4
    for model in (Deformable(), Merge()):
        cost = measure(model, (8, 10), in_chans=4)
        assert (cost.params, cost.macs, cost.activations) == (plain.params, plain.macs, plain.activations)


@pytest.mark.parametrize(
    ("name", "params", "macs"),
    [
        ("deit_tiny_patch16_224", 5.7, 1.3),
        ("deit_small_patch16_224", 22.1, 4.6),
        ("deit_base_patch16_224", 86.6, 17.6),
        ("swin_tiny_patch4_window7_224", 28.3, 4.5),
        ("resnet50", 25.6, 4.1),
    ],
)
def test_figures_of_known_models(name: str, params: float, macs: float) -> None:
    cost = measure(create(name), (224, 224))
    assert (round(cost.params / 1e6, 1), round(cost.macs / 1e9, 1)) == (params, macs)


def test_fused_attention_makes_no_difference() -> None:
    fused = create("vit_tiny_patch16_224", img_size=64)
    plain = copy.deepcopy(fused)
    for block in plain.blocks:
        assert block.attn.fused_attn
        block.attn.fused_attn = False
    assert measure(fused, (64, 64)) == measure(plain, (64, 64))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "resnet18", "convnext_atto"])
def test_stages_add_up(name: str) -> None:
    cost = measure(create(name), (224, 224))
    assert sum(stage.params for stage in cost.stages) == cost.params
    assert sum(stage.macs for stage in cost.stages) == cost.macs
    assert sum(stage.activations for stage in cost.stages) == cost.activations


def test_stages_of_a_vit() -> None:
    cost = measure(create("vit_tiny_patch16_224"), (224, 224))
    names = [stage.name for stage in cost.stages]
    assert names == ["patch_embed", *(f"blocks.{i}" for i in range(12)), "norm", "head", ITSELF]
    embed, block, *_, head, itself = cost.stages
    assert (embed.shape, block.shape, head.shape) == ((196, 192), (197, 192), (1000,))
    assert embed.macs == 196 * 192 * 3 * 16 * 16
    assert block.macs == 197 * 192 * 192 * 12 + 2 * 197 * 197 * 192
    assert (itself.params, itself.macs) == (192 + 197 * 192, 0)


def test_stages_of_a_pyramid() -> None:
    cost = measure(create("swin_tiny_patch4_window7_224"), (224, 224))
    assert [stage.name for stage in cost.stages if stage.macs] == [
        "patch_embed",
        *(f"layers.{i}" for i in range(4)),
        "head",
    ]
    assert [stage.shape for stage in cost.stages[1:5]] == [(56, 56, 96), (28, 28, 192), (14, 14, 384), (7, 7, 768)]


def test_stages_are_found_inside_a_wrapper() -> None:
    """Where the list of blocks is deeper down, as in transformers' models, the parts are those of its level."""

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = create("vit_tiny_patch16_224", num_classes=0)
            self.classifier = nn.Linear(192, 10)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.classifier(self.body(x))}

    names = [stage.name for stage in measure(Wrapper(), (224, 224)).stages]
    assert "body.blocks.11" in names
    assert "classifier" in names


def test_shared_parameters_are_counted_once() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    cost = measure(nn.Sequential(first, second), (1, 4), in_chans=1)
    assert cost.params == 16 + 4 + 4
    assert cost.macs == 32


def test_the_model_is_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).train()
    before = copy.deepcopy(model.state_dict())
    measure(model, (8, 8))
    assert model.training
    assert not model[0]._forward_hooks
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_precision_and_mode_do_not_matter() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 5))
    expected = measure(model, (8, 8))
    assert expected.macs == 4 * 6 * 6 * 27 + 4 * 6 * 6 * 5
    assert measure(copy.deepcopy(model).to(torch.bfloat16), (8, 8)) == expected
    with torch.inference_mode():
        assert measure(model, (8, 8)) == expected


def test_tensors_that_are_no_buffers_come_along() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.ones(4, 4, requires_grad=True) * 2  # a non-leaf, which cannot be deep-copied

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.table

    assert measure(Table(), (3, 4), in_chans=1).macs == 3 * 4 * 4


def test_a_model_that_looks_at_values_is_refused() -> None:
    class Curious(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum().item() > 0 else -x

    with pytest.raises(UserError, match="Curious"):
        measure(Curious(), (8, 8))


def test_a_wrong_size_is_the_models_own_error() -> None:
    with pytest.raises(AssertionError):
        measure(create("vit_tiny_patch16_224"), (225, 225))
