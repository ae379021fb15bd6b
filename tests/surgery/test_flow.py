"""Which modules end at which sums: told apart in blocks of every kind that models are made of."""

import torch
from torch import Tensor, nn

from vitrefine.surgery.flow import Flow, follow
from vitrefine.surgery.maps import layout_of, read_maps


class Block(nn.Module):
    """A residual block in one of several styles."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        self.norm, self.mix, self.scale = nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.shortcut, self.nothing = nn.Linear(8, 8), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        match self.style:
            case "pre-norm":
                return x + self.mix(self.norm(x))
            case "post-norm":
                return x + self.scale(self.mix(x))
            case "norm of the sum":
                return self.norm(x + self.mix(x))
            case "two branches":
                return self.shortcut(x) + self.mix(self.norm(x))
            case "shared norm":
                y = self.norm(x)
                return x + self.mix(y) + self.shortcut(y)
            case "gate":
                return x * self.mix(self.norm(x))
            case "in place":
                shortcut = self.nothing(x)
                x = self.mix(self.norm(x))
                x += shortcut
                return x
        raise AssertionError


class Model(nn.Module):
    """Patches of a 16×16 image, and a block."""

    img_size = 16

    def __init__(self, style: str) -> None:
        super().__init__()
        self.patches, self.block = nn.Conv2d(3, 8, 4, 4), Block(style)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.patches(x).flatten(2).transpose(1, 2))


def branch(style: str) -> list[str]:
    return [name.removeprefix("block.") for name in follow(Model(style)).branch("block.mix")]


def test_what_belongs_to_a_branch() -> None:
    assert branch("pre-norm") == ["norm", "mix"]
    assert branch("post-norm") == ["mix", "scale"]
    assert branch("norm of the sum") == ["mix"]
    assert branch("two branches") == ["norm", "mix"]
    assert branch("in place") == ["norm", "mix"]
    assert branch("shared norm") == ["mix"]


def sums(flow: Flow) -> list[tuple[str, tuple[int, ...], int]]:
    return [(m.owner, m.shape, m.tokens) for m in flow.meetings if m.is_sum]


def test_sums_and_other_meetings() -> None:
    assert sums(follow(Model("pre-norm"))) == [("block", (2, 16, 8), 16)]
    gate = follow(Model("gate"))
    assert [meeting.is_sum for meeting in gate.meetings] == [False]
    assert gate.image == (16, 16)


def test_the_model_is_left_alone() -> None:
    model = Model("pre-norm").train()
    before = model(torch.ones(1, 3, 16, 16))
    follow(model)
    assert model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(model(torch.ones(1, 3, 16, 16)), before)


def test_layouts() -> None:
    norm = nn.LayerNorm(96)
    assert layout_of((2, 49, 96), (224, 224), norm) == "NLC"
    assert layout_of((2, 96, 14, 14), (224, 224), norm) == "NCHW"
    assert layout_of((2, 14, 14, 96), (224, 224), norm) == "NHWC"
    assert layout_of((2, 16, 196, 96), (224, 224), norm) == "NHWC"  # windows, tokens, channels
    assert layout_of((2, 96, 4, 64), (256, 256), norm) == "NCHW"  # channels, places in a patch, patches
    assert layout_of((2, 96, 15, 20), (240, 320), norm) == "NCHW"
    assert layout_of((2, 8, 10, 96), (240, 320), norm) == "NHWC"
    assert [m.layout for m in read_maps((2, 32, 32, 32), (64, 64))] == ["NCHW", "NHWC"]
    assert [(m.height, m.width) for m in read_maps((2, 300, 96), (240, 320))] == [(15, 20)]
    assert not read_maps((2, 197, 96), (224, 224))
