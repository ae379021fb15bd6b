"""A survey finds what is there, says what it is, and leaves no trace on the model."""

from collections import Counter
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from vitrefine.errors import UserError
from vitrefine.surgery.survey import Survey, survey

_surveys: dict[str, Survey] = {}


def _survey(name: str, **arguments: Any) -> Survey:
    key = f"{name} {arguments}"
    if key not in _surveys:
        with torch.device("meta"):
            _surveys[key] = survey(timm.create_model(name, **arguments))
    return _surveys[key]


def _kinds(found: Survey) -> Counter[str]:
    return Counter(type(found.visits[site.name].module).__name__ for site in found.attentions)


ATTENTIONS = {
    "test_vit": {"Attention": 6},
    "cait_xxs24_224": {"TalkingHeadAttn": 24, "ClassAttn": 2},
    "crossvit_tiny_240": {"Attention": 15, "CrossAttention": 6},
    "davit_tiny": {"WindowAttention": 6, "ChannelAttention": 6},
    "swin_tiny_patch4_window7_224": {"WindowAttention": 12},
    "tnt_s_legacy_patch16_224": {"Attention": 24},
    "volo_d1_224": {"OutlookAttention": 4, "Attention": 14, "ClassAttention": 2},
    "xcit_nano_12_p8_224": {"XCA": 12, "ClassAttn": 2},
    "halonet_h1": {"HaloAttn": 19},
    "resmlp_12_224": {},
    "coat_tiny": {},
    "convnext_atto": {},
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attentions_are_found(name: str) -> None:
    assert _kinds(_survey(name)) == ATTENTIONS[name]


MIXERS = [
    "mixer_s32_224",
    "resmlp_12_224",
    "gmlp_ti16_224",
    "swiftformer_xs",
    "efficientvim_m1",
    "efficientvit_b0",
    "coat_tiny",
    "edgenext_xx_small",
    "mobilevitv2_050",
    "halonet_h1",
]
CONVOLUTIONAL = [
    "test_convnext",
    "test_resnet",
    "test_efficientnet",
    "resnest14d",  # "split attention" is a gate on channels
    "skresnet18",  # so is that of "selective kernels"
    "gcresnet33ts",  # a "global context" is a pooling
    "seresnet33ts",
    "poolformerv2_s12",
    "fastvit_t8",
    "repvit_m1",
    "focalnet_tiny_srf",
    "fasternet_t0",
    "mambaout_femto",
    "inception_next_atto",
]


@pytest.mark.parametrize("name", MIXERS)
def test_token_mixing_without_softmax_is_seen(name: str) -> None:
    assert _survey(name).mixes_tokens


@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_convolutions_and_gates_are_no_token_mixing(name: str) -> None:
    found = _survey(name)
    assert not found.mixes_tokens
    assert not found.attentions


def test_recurrence_is_token_mixing() -> None:
    assert _survey("sequencer2d_s", layers=(1, 1, 1, 1)).mixes_tokens


ODD = {
    "edgenext_xx_small": {"CrossCovarianceAttn": "relate channels"},
    "xcit_nano_12_p8_224": {"XCA": "relate channels"},
    "davit_tiny": {"ChannelAttention": "relate channels"},
    "volo_d1_224": {"OutlookAttention": "no products"},
    "efficientvim_m1": {"HSMSSD": "no products"},
    "mobilevitv2_050": {"LinearSelfAttention": "no products"},
    "lambda_resnet26rpt_256": {"LambdaLayer": "no products"},
    "efficientvit_m0": {"CascadedGroupAttention": "one after another"},
    "test_vit": {},
    "cait_xxs24_224": {},  # its scores pass through a linear layer after the product
    "gcvit_xxtiny": {},  # and here through a module that adds a bias
    "efficientformerv2_s0": {},
    "convit_tiny": {},  # has maps of positions beside those of queries and keys
    "hiera_tiny_224": {},
    "halonet_h1": {},
    "vit_dlittle_patch16_reg1_gap_256": {},  # two maps a head, one taken from the other
}


@pytest.mark.parametrize("name", ODD)
def test_softmaxes_that_are_no_maps_of_tokens_are_told_apart(name: str) -> None:
    found = _survey(name)
    odd = {type(found.visits[site.name].module).__name__: site.odd for site in found.attentions if site.odd}
    assert odd.keys() == ODD[name].keys()
    for kind, words in ODD[name].items():
        assert words in odd[kind]


# The class of the module whose output is the end of the MLP, its layout, and how many MLPs there are.
MLPS = {
    "test_vit": ("Mlp", "NLC", 6),
    "cait_xxs24_224": ("Mlp", "NLC", 24),  # not the two whose only token is the class token
    "volo_d1_224": ("Mlp", "NHWC", 18),
    "csatv2": ("Mlp", "NLC", 4),  # not those of gates with a single channel
    "test_convnext": ("Mlp", "NHWC", 9),
    "caformer_s18": ("Mlp", "NCHW", 18),
    "levit_128s": ("LevitMlp", "NLC", 11),
    "gmlp_ti16_224": ("GatedMlp", "NLC", 30),
    "mixer_s32_224": ("Mlp", "NLC", 8),  # not those across tokens
    "sequencer2d_s": ("Mlp", "NHWC", 4),
    "visformer_tiny": ("SpatialMlp", "NCHW", 15),
    # Where a wrapper adds the residual, what it wraps.
    "efficientvit_m0": ("ConvMlp", "NCHW", 16),
    "shvit_s1": ("FFN", "NCHW", 15),
    # Where no module bears the name: what follows attention and widens.
    "efficientvit_b0": ("MBConv", "NCHW", 4),
    "mobilenetv4_hybrid_medium": ("ConvNormAct", "NCHW", 8),
    # Where the MLP is a sequence, its last step.
    "cpubone_nano": ("Dropout", "NCHW", 3),
    "lowformer_b0": ("Dropout", "NCHW", 7),
    "iformer_t": ("BatchNorm2d", "NCHW", 5),
}


@pytest.mark.parametrize("name", MLPS)
def test_mlps_are_found(name: str) -> None:
    kind, layout, count = MLPS[name]
    found = _survey(name, layers=(1, 1, 1, 1)) if name == "sequencer2d_s" else _survey(name)
    assert len(found.mlps) == count
    last = found.mlps[-1]
    assert type(found.visits[last.end].module).__name__ == kind
    if name != "caformer_s18":  # turns from images to tokens half way
        assert {site.layout for site in found.mlps} == {layout}


@pytest.mark.parametrize("name", MLPS)
def test_mlps_are_what_the_papers_call_so(name: str) -> None:
    """Their end has the width of the tokens and no residual in it; their middle is before the last linear layer."""
    found = _survey(name, layers=(1, 1, 1, 1)) if name == "sequencer2d_s" else _survey(name)
    assert len({site.end for site in found.mlps}) == len(found.mlps)
    for site in found.mlps:
        front, middle, end = (found.visits[part] for part in (site.front, site.middle, site.end))
        channel = 1 if site.layout == "NCHW" else -1
        assert front.inputs[channel] == end.output[channel] == site.dim
        assert middle.inputs[channel] == site.hidden
        assert isinstance(middle.module, nn.Linear | nn.Conv2d)
        assert not end.adds_input
        assert not front.adds_input
        assert not any(isinstance(part.module, nn.Sequential) for part in (front, middle, end))


def test_bottlenecks_are_no_mlps() -> None:
    """HaloNet attends inside a bottleneck, which narrows and widens again: there is no MLP in it."""
    assert not _survey("halonet_h1").mlps
    assert not _survey("botnet26t_256").mlps


@pytest.mark.parametrize("name", ["vit_b_16", "swin_t", "swin_v2_t", "maxvit_t"])
def test_torchvision(name: str) -> None:
    with torch.device("meta"):
        found = survey(torchvision.models.get_model(name, num_classes=10))
    blocks = {"vit_b_16": 12, "swin_t": 12, "swin_v2_t": 12, "maxvit_t": 22}[name]
    assert len(found.attentions) == len(found.mlps) == blocks  # not those that make Swin v2's position bias
    assert not any(site.odd for site in found.attentions)


def test_the_model_is_left_as_it_was() -> None:
    model = timm.create_model("test_vit").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    survey(model)
    assert model.training
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_weights_without_storage_and_of_any_type_are_enough() -> None:
    with torch.device("meta"):
        model = timm.create_model("test_vit").to(torch.bfloat16)
    assert len(survey(model).attentions) == 6


class _Chooses(nn.Module):
    """Runs its attention only if a weight says so."""

    def __init__(self) -> None:
        super().__init__()
        self.switch = nn.Parameter(torch.ones(()))
        self.stem, self.attention = nn.Conv2d(3, 16, 32, 32), nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, image: Tensor) -> Tensor:
        tokens = self.stem(image).flatten(2).transpose(1, 2)
        return self.attention(tokens, tokens, tokens)[0] if self.switch.item() > 0 else tokens


def test_a_path_that_depends_on_values_needs_values() -> None:
    (site,) = survey(_Chooses()).attentions
    assert site.kind == "mha"
    assert site.maps == [(2, 2, 49, 49)]
    with torch.device("meta"):
        model = _Chooses()
    with pytest.raises(UserError, match="real device"):
        survey(model)


@pytest.mark.parametrize(
    "name",
    [
        "coat_tiny",
        "efficientformerv2_s0",
        "efficientvit_m0",
        "gmlp_ti16_224",
        "hiera_tiny_224",
        "levit_128s",
        "tnt_s_legacy_patch16_224",
        "volo_d1_224",
    ],
)
def test_a_size_that_a_model_keeps_to_itself_is_found(name: str) -> None:
    assert _survey(name, img_size=96).mlps


def test_a_size_that_no_one_would_guess_says_so() -> None:
    with torch.device("meta"):
        model = timm.create_model("hiera_tiny_224", img_size=(64, 352))
    with pytest.raises(UserError, match="img_size"):
        survey(model)
    model.img_size = (64, 352)
    assert len(survey(model).attentions) == 12


def test_blocks_in_a_list_with_a_norm_after_it_may_be_without_an_mlp() -> None:
    class Encoder(nn.Module):
        img_size = 8

        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 12, 2, 2)
            self.encoder = nn.TransformerEncoder(
                nn.TransformerEncoderLayer(12, 3, 24, batch_first=True), 2, nn.LayerNorm(12), enable_nested_tensor=False
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.encoder(self.stem(x).flatten(2).transpose(1, 2))

    found = survey(Encoder())
    assert [site.name for site in found.attentions] == [f"encoder.layers.{i}.self_attn" for i in range(2)]
    assert not found.mlps


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
def test_a_model_that_takes_more_than_an_image_says_so() -> None:
    class Pair(nn.Module):
        def forward(self, image: Tensor, other: Tensor) -> Tensor:
            return image + other

    class Batch(nn.Module):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return batch["image"]

    for model in (Pair(), Batch()):
        with pytest.raises(UserError, match="the part of it that takes images alone"):
            survey(model)


def test_weights_multiplied_by_weights_are_no_attention() -> None:
    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(3, 8), nn.Linear(8, 3)

        def forward(self, image: Tensor) -> Tensor:
            weight = self.other.weight @ self.one.weight
            positions = torch.softmax(torch.arange(224.0).expand(2, 224, 224) @ weight.mean().expand(224, 224), dim=-2)
            return (image.movedim(1, -1) @ weight.T).mean() + positions.mean()

    assert not survey(Folded()).mixes_tokens


def test_a_softmax_of_scores_from_a_module_of_its_own_is_attention() -> None:
    class Product(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return q @ k.transpose(-2, -1)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.product, self.softmax = nn.Linear(3, 9), Product(), nn.Softmax(dim=-1)

        def forward(self, image: Tensor) -> Tensor:
            q, k, v = self.qkv(image[..., ::8, ::8].flatten(2).transpose(1, 2)).chunk(3, dim=-1)
            return self.softmax(self.product(q, k)) @ v

    (site,) = survey(Attention()).attentions
    assert site.name == ""
    assert site.maps == [(2, 784, 784)]
    assert not site.odd
