"""What every registered model can do, at small sizes."""

import pytest
import timm
import timm.optim
import torch
from timm.models import VisionTransformer

import vitrefine.models
from vitrefine.errors import UserError

PYRAMID = {
    "embed_dims": (8, 16, 24, 32),
    "depths": (1, 1, 2, 1),
    "num_heads": (1, 2, 4, 4),
    "mlp_ratios": (2, 2, 2, 2),
}
VIT = {"embed_dim": 24, "depth": 4, "num_heads": 4}
SMALL = {"lit": PYRAMID, "pvt": PYRAMID, "refined_vit": VIT, "cb_vit": VIT, "localvit": VIT}
# Base model and the arguments that make it small; variants of one class that run other code are listed too.
MODELS = [(name, SMALL[module]) for module in SMALL for name in timm.list_models(module=module)]
MODELS += [
    ("refined_vit_s", {**VIT, "variant": "paper"}),
    ("refined_vit_s", {**VIT, "variant": "paper", "constraint": "spatial", "share": 0, "reduction": False}),
    ("refined_vit_s", {**VIT, "variant": "paper", "constraint": "row+col", "share": 2}),
    ("refined_vit_s", {**VIT, "refine_own": True, "token_labels": True}),
    ("pvt_small_msa", {**PYRAMID, "attention": (0, 0, 0, 0)}),
]
IDS = [name + "".join(f"-{k}={v}" for k, v in kw.items() if k not in {*PYRAMID, *VIT}) for name, kw in MODELS]
every_model = pytest.mark.parametrize(("name", "small"), MODELS, ids=IDS)


def create(name, small, **kwargs):
    torch.manual_seed(0)
    model = timm.create_model(name, **{"num_classes": 5, "img_size": 64, **small, **kwargs})
    # Batch norms that have seen nothing hide mistakes in evaluation mode.
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model.eval()


@pytest.fixture
def image():
    return torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def test_all_modules_are_covered():
    assert set(vitrefine.models.__all__) >= set(SMALL)
    names = {name for module in SMALL for name in timm.list_models(module=module)}
    assert {"lit_ti", "lit_s", "lit_m", "lit_b", "lit_ti_star", "lit_s_star", "pvt_small", "pvt_small_msa"} <= names
    assert {"refined_vit_s", "refined_vit_m", "refined_vit_l", "refined_vit_base", "localvit_ti"} <= names
    assert {f"{kind}_vit_{size}" for kind in ("cb", "cb_s") for size in ("ti", "s", "b")} <= names


@every_model
def test_gradients_reach_every_parameter(name, small, image):
    model = create(name, small).train()
    output = model(image)
    loss = sum(out.square().sum() for out in output[:2]) if isinstance(output, tuple) else output.square().sum()
    loss.backward()
    assert all(out.isfinite().all() for out in (output[:2] if isinstance(output, tuple) else [output]))
    silent = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not silent


@every_model
@pytest.mark.parametrize("size", [(96, 96), (64, 128)])
def test_other_image_sizes(name, small, size):
    image = torch.randn(1, 3, *size)
    model = create(name, small)
    assert model(image).shape == (1, 5)
    assert model(image).isfinite().all()


@every_model
def test_state_dict_round_trip(name, small, image):
    model, other = create(name, small), create(name, small)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter)
    other.load_state_dict(model.state_dict(), strict=True)
    torch.testing.assert_close(other(image), model(image), rtol=0, atol=0)


@every_model
def test_compiles_whole(name, small, image):
    model = create(name, small)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(image), model(image), rtol=1e-4, atol=1e-5)


@every_model
def test_exports(name, small, image):
    model = create(name, small)
    program = torch.export.export(model, (image,))
    torch.testing.assert_close(program.module()(image), model(image), rtol=1e-4, atol=1e-5)


@every_model
def test_timm_protocol(name, small, image):
    model = create(name, small)
    features = model.forward_features(image)
    torch.testing.assert_close(model.forward_head(features), model(image))
    assert model.forward_head(features, pre_logits=True).shape == (2, model.num_features)
    final, maps = model.forward_intermediates(image)
    torch.testing.assert_close(final, features)
    assert all(m.ndim == 4 for m in maps)
    assert len(maps) == len(model.feature_info)
    names = dict(model.named_parameters())
    assert model.no_weight_decay() & names.keys()
    assert {"stem", "blocks"} <= model.group_matcher().keys()
    groups = timm.optim.param_groups_layer_decay(model, layer_decay=0.9)
    assert sum(len(g["params"]) for g in groups) == len(names)
    model.reset_classifier(3)
    assert model(image).shape == (2, 3)
    assert model.get_classifier().out_features == 3
    model.reset_classifier(0, "")
    assert model(image).shape == features.shape


@every_model
def test_set_input_size(name, small):
    model, image = create(name, small), torch.randn(1, 3, 96, 128)
    before = model(image)
    trained = {n: p.requires_grad_("stages.0" not in n).requires_grad for n, p in model.named_parameters()}
    model.set_input_size(img_size=(96, 128))
    assert {n: p.requires_grad for n, p in model.named_parameters()} == trained
    assert all(p.is_contiguous() for p in model.parameters()), "which files of weights ask for"
    torch.testing.assert_close(model(image), before)
    other = timm.create_model(name, num_classes=5, img_size=(96, 128), **small)
    assert {n: t.shape for n, t in other.state_dict().items()} == {n: t.shape for n, t in model.state_dict().items()}


@every_model
def test_arguments_that_timm_gives(name, small, image):
    small = {**small, "num_classes": 5}
    wide = timm.create_model(name, in_chans=4, pretrained_cfg_overlay={"input_size": (3, 64, 96)}, **small)
    assert wide.eval()(torch.randn(1, 4, 64, 96)).shape == (1, 5)
    made = timm.create_model(name, img_size=(64, 96), **small)
    positions = {n: p.shape for n, p in made.named_parameters() if p.ndim == 3}
    assert positions.items() <= {n: p.shape for n, p in wide.named_parameters()}.items()
    assert create(name, small | {"num_classes": 0})(image).shape == (2, wide.num_features)
    assert create(name, small, out_indices=(0, 1))(image).shape == (2, 5), "which is for features_only=True alone"


@every_model
def test_batches_of_any_size(name, small, image):
    model = create(name, small)
    program = torch.export.export(model, (image,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=4096)},))
    several = torch.randn(5, 3, 64, 64)
    torch.testing.assert_close(program.module()(several), model(several), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(several[:1]), model(several)[:1], rtol=1e-4, atol=1e-5)
    if not isinstance(model, VisionTransformer):  # timm's, which cannot
        assert model(several[:0]).shape == (0, 5)


@every_model
def test_features_only(name, small, image):
    model = create(name, small, features_only=True, out_indices=(1, 3))
    maps = model(image)
    assert [m.shape[1] for m in maps] == model.feature_info.channels()
    assert [64 // m.shape[2] for m in maps] == model.feature_info.reduction()


@every_model
def test_gradient_checkpointing_changes_nothing(name, small, image):
    model = create(name, small)
    plain = model(image)
    model.set_grad_checkpointing()
    image.requires_grad_()
    checkpointed = model(image)
    torch.testing.assert_close(checkpointed, plain)
    checkpointed.sum().backward()
    assert image.grad is not None


@pytest.mark.parametrize("name", ["refined_vit_s", "localvit_ti", "cb_vit_ti"])
def test_intermediates_as_timm_names_them(name, image):
    model = create(name, VIT)
    named = model.forward_intermediates(image, indices=[1, 3], return_prefix_tokens=True, norm=True, output_dict=True)
    final, pairs = model.forward_intermediates(image, indices=[1, 3], return_prefix_tokens=True, norm=True)
    assert named.keys() == {"image_intermediates", "image_intermediates_prefix", "image_features"}
    torch.testing.assert_close(named["image_features"], final)
    for patches, prefix, pair in zip(
        named["image_intermediates"], named["image_intermediates_prefix"], pairs, strict=True
    ):
        torch.testing.assert_close((patches, prefix), tuple(pair))
    torch.testing.assert_close(torch.cat([pairs[1][1], pairs[1][0].flatten(2).mT], dim=1), final)
    only = model.forward_intermediates(image, indices=[1], intermediates_only=True, output_dict=True)
    assert only.keys() == {"image_intermediates"}


@pytest.mark.parametrize("name", ["refined_vit_s", "localvit_ti", "lit_ti"])
def test_formats_of_features_are_named(name, image):
    model = create(name, PYRAMID if name == "lit_ti" else VIT)
    with pytest.raises(UserError, match="there is no format of features 'CHW'; choose one of NCHW, "):
        model.forward_intermediates(image, output_fmt="CHW")


@pytest.mark.full
@every_model
def test_inductor(name, small, image):
    model = create(name, small)
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(image), model(image), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["lit_s", "refined_vit_s"])
def test_a_size_that_does_not_fit_is_named_with_its_neighbours(name):
    model = create(name, SMALL["lit" if name == "lit_s" else "refined_vit"])
    with pytest.raises(ValueError, match=r"70x64 does not fit.*multiple of"):
        model(torch.randn(1, 3, 70, 64))
