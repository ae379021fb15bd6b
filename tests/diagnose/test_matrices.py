"""Matrices of attention are the mean maps, and their group means where there are many tokens."""

import pytest
import torch

import vitrefine
from vitrefine.diagnose import capture, matrices
from vitrefine.diagnose.matrices import attention_matrices, shades
from vitrefine.surgery.census import disturb


@pytest.mark.parametrize("modification", ["", "+refiner"])
def test_whole_and_in_groups(modification: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    spec = f"vit_tiny_patch16_224{modification}"
    sizes = {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 3}
    model = disturb(vitrefine.create(spec, class_token=False, global_pool="avg", **sizes).eval())
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad(), capture(model) as attentions:
        model(images)
    call = attentions[1].calls[0]
    whole = attention_matrices(model, images)
    assert [layer.name for layer in whole.layers] == ["blocks.0.attn", "blocks.1.attn"]
    torch.testing.assert_close(whole.layers[1].before, call.maps().mean(dim=(0, 1)))
    if modification:
        torch.testing.assert_close(whole.layers[1].after, call.refined_maps().mean(dim=(0, 1)))
    else:
        assert whole.layers[1].after is None
    monkeypatch.setattr(matrices, "SIDE", 4)
    (coarse,) = attention_matrices(model, images, layers=1).layers
    groups = whole.layers[1].before.unflatten(0, (4, 4)).unflatten(2, (4, 4)).mean(dim=(1, 3))
    torch.testing.assert_close(coarse.before, groups)
    assert "blocks.1.attn 0." in str(whole)
    whole.plot()


def test_shades() -> None:
    found = shades(torch.tensor([[0.0, 1.0], [0.25, -0.5]]))
    assert found.min() == 0
    assert found.max() == 1
