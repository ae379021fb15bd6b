"""The LIT authors' modules and models, reproduced through the converter."""

import pytest
import torch

from vitrefine.layers.attention import GlobalAttention
from vitrefine.layers.token_merging import DeformableTokenMerging
from vitrefine.models.convert import rename
from vitrefine.models.pyramid import PyramidTransformer

GRADIENT_TOLERANCE = 1e-6  # stored in float32 of a float64 run


def load(module, state):
    module.load_state_dict(rename(state, "lit"), strict=True)
    return module.eval()


def check_gradients(module, fixture, x, output, agrees):
    names, parameters = zip(*module.named_parameters(), strict=True)
    gradients = torch.autograd.grad(output, [x, *parameters], fixture.grad_output.to(output.dtype))
    agrees(gradients[0], fixture.grad_input)
    prefix = "grad_state_dict."
    theirs = rename({k.removeprefix(prefix): v for k, v in fixture.all.items() if k.startswith(prefix)}, "lit")
    assert theirs.keys() == set(names)
    for name, gradient in zip(names, gradients[1:], strict=True):
        agrees(gradient, theirs[name], GRADIENT_TOLERANCE)


@pytest.mark.parametrize("name", ["dtm_module", "dtm_module_merging"])
def test_deformable_token_merging(golden, agrees, name):
    fixture = golden(name)
    height, width = fixture.meta["input_resolution"]
    module = load(DeformableTokenMerging(fixture.meta["in_chans"], fixture.meta["embed_dim"]), fixture.state)

    def nhwc(x):
        return x.permute(0, 2, 3, 1) if x.ndim == 4 else x.unflatten(1, (height, width))

    agrees(module.sampling_offsets(nhwc(fixture.input)), fixture.offset)
    agrees(module(nhwc(fixture.input)).flatten(1, 2), fixture.output)
    agrees(module.train()(nhwc(fixture.input)).flatten(1, 2), fixture.train_output)
    load(module, fixture.state).double()
    x = fixture.input.double().requires_grad_()
    output = module(nhwc(x)).flatten(1, 2)
    agrees(output, fixture.output_f64)
    check_gradients(module, fixture, x, output, agrees)


@pytest.mark.parametrize("name", ["lit_relpos_attention", "lit_relpos_attention_rect"])
def test_relative_position_attention(golden, agrees, name):
    fixture = golden(name)
    grid = tuple(fixture.meta["input_resolution"])
    module = load(GlobalAttention(fixture.meta["dim"], fixture.meta["num_heads"], grid=grid), fixture.state)
    agrees(module.position(grid), fixture.relative_position_bias)
    agrees(module(fixture.input, grid), fixture.output)
    module.double()
    x = fixture.input.double().requires_grad_()
    output = module(x, grid)
    agrees(output, fixture.output_f64)
    check_gradients(module, fixture, x, output, agrees)


@pytest.mark.parametrize("name", ["lit_ti_tiny", "lit_s_tiny", "lit_s_tiny_rect"])
def test_model(golden, agrees, name):
    fixture = golden(name)
    meta = fixture.meta
    tiny = "embed_dims" in meta
    size = meta["img_size"]
    model = PyramidTransformer(
        img_size=size if isinstance(size, int) else tuple(size),
        num_classes=meta["num_classes"],
        embed_dims=meta["embed_dims"] if tiny else [meta["embed_dim"] * 2**i for i in range(4)],
        depths=meta["depths"],
        num_heads=meta["num_heads"],
        mlp_ratios=meta["mlp_ratios"] if tiny else [meta["mlp_ratio"]] * 4,
        relative=not tiny,
        norm_eps=1e-6 if tiny else 1e-5,
    )
    load(model, fixture.state)
    agrees(model.patch_embed(fixture.input).flatten(1, 2), fixture.embed1)
    tokens, maps = model.forward_intermediates(fixture.input)
    agrees(tokens, fixture.features)
    for i, stage in enumerate(maps):
        theirs = fixture.all[f"stage{i + 1}"][:, -stage[0, 0].numel() :]
        agrees(stage.flatten(2).transpose(1, 2), theirs)
        if i:
            merge, before = model.stages[i].merge, maps[i - 1].permute(0, 2, 3, 1)
            agrees(merge.sampling_offsets(before), fixture.all[f"offset{i + 1}"])
            agrees(merge(before).flatten(1, 2), fixture.all[f"embed{i + 1}"])
    agrees(model(fixture.input), fixture.output)
    agrees(model.double()(fixture.input.double()), fixture.output_f64)
    load(model.float(), fixture.state).train()
    agrees(model(fixture.input), fixture.train_output)
