"""The Refiner authors' modules and models, reproduced through the converter."""

import pytest
import torch

from vitrefine.layers.official_refiner import OfficialRefiner
from vitrefine.layers.position import resize_position
from vitrefine.layers.refined_attention import OfficialRefinedAttention
from vitrefine.models.convert import rename
from vitrefine.models.refined_vit import RefinedVisionTransformer

GRADIENT_TOLERANCE = 1e-6  # stored in float32 of a float64 run


def load(module, state):
    module.load_state_dict(rename(state, "refiner"), strict=True)
    return module.eval()


def check_gradients(module, fixture, inputs, output, agrees):
    gradients = torch.autograd.grad(
        output, [*inputs, *module.parameters()], fixture.grad_output.to(output.dtype), allow_unused=True
    )
    for ours, name in zip(gradients, ["grad_input", "grad_input_1"][: len(inputs)], strict=False):
        agrees(ours, fixture.all[name])
    prefix = "grad_state_dict."
    theirs = rename({k.removeprefix(prefix): v for k, v in fixture.all.items() if k.startswith(prefix)}, "refiner")
    ours = dict(zip([n for n, _ in module.named_parameters()], gradients[len(inputs) :], strict=True))
    assert theirs.keys() == ours.keys()
    for name, gradient in theirs.items():
        agrees(ours[name], gradient, GRADIENT_TOLERANCE)


@pytest.mark.parametrize("name", ["", "_r1", "_k5", "_k2even", "_conv"])
def test_dla(golden, agrees, name):
    fixture = golden(f"refiner_dla_module{name}")
    meta = fixture.meta
    module = OfficialRefiner(
        meta["inp"],
        expansion=meta["expand_ratio"],
        kernel_size=meta["kernel_size"],
        dense=meta["refine_mode"] == "conv",
    )
    load(module, fixture.state)
    agrees(module(fixture.input), fixture.output)
    module.double()
    maps = fixture.input.double().requires_grad_()
    output = module(maps)
    agrees(output, fixture.output_f64)
    check_gradients(module, fixture, [maps], output, agrees)


@pytest.mark.parametrize("name", ["fresh", "fresh_prev", "shared", "plain_prev"])
def test_attention(golden, agrees, name):
    fixture = golden(f"refiner_attention_{name}")
    meta = fixture.meta
    module = OfficialRefinedAttention(
        meta["dim"],
        meta["num_heads"],
        shared=meta["share_atten"],
        refine_own=meta["apply_transform"],
        expansion=meta["head_expand"],
    )
    load(module, fixture.state)
    before = [fixture.input_attn] if meta["prev_attn_given"] else []
    output, maps = module(fixture.input, *before)
    agrees(output, fixture.output)
    agrees(maps, fixture.attn_next)
    module.double()
    inputs = [t.double().requires_grad_() for t in (fixture.input, *before)]
    output, maps = module(*inputs)
    agrees(output, fixture.output_f64)
    agrees(maps, fixture.attn_next_f64)
    check_gradients(module, fixture, inputs, output, agrees)


@pytest.mark.parametrize("name", ["", "_dense", "_transform"])
def test_model(golden, agrees, name):
    fixture = golden(f"refiner_vit_tiny{name}")
    meta = fixture.meta
    model = RefinedVisionTransformer(
        img_size=meta["img_size"],
        patch_size=meta["patch_size"],
        num_classes=meta["num_classes"],
        embed_dim=meta["embed_dim"],
        depth=len(meta["depth"]),
        num_heads=meta["num_heads"],
        mlp_ratio=meta["mlp_ratio"],
        expansion=meta["head_expand"] if any(meta["apply_transform"]) else 3,  # which the code ignores otherwise
        refine_own=any(meta["apply_transform"]),
        stem="conv" if meta["use_cnn_embed"] else "linear",
        token_labels=meta["return_dense"],
    )
    load(model, fixture.state)
    agrees(model.patch_embed(fixture.input), fixture.patch_embed_out)
    tokens, blocks = model.forward_intermediates(fixture.input, return_prefix_tokens=True, output_fmt="NLC")
    agrees(tokens, fixture.features)
    for i, (patches, prefix) in enumerate(blocks):
        agrees(torch.cat([prefix, patches], dim=1), fixture.all[f"block{i}_tokens"])
    agrees(model(fixture.input), fixture.output)
    agrees(model.double()(fixture.input.double()), fixture.output_f64)

    model.float().train()
    load(model, fixture.state).train()
    output = model(fixture.input)
    if meta["return_dense"]:
        agrees(output[0], fixture.train_cls_logits)
        agrees(output[1], fixture.train_aux_logits)
        assert output[2].tolist() == [0, 0, 0, 0]
    else:
        agrees(output, fixture.train_cls_logits)


def test_position_resize(golden, agrees):
    fixture = golden("refiner_pos_resize")
    agrees(resize_position(fixture.input, (14, 14), (24, 24), mode="bilinear"), fixture.output)
    agrees(resize_position(fixture.input, (14, 14), (24, 24)), fixture.output_bicubic)
