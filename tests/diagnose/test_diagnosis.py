"""All at once: what is measured of a model is what its maps and tokens have, by the plain functions."""

import csv
import io
import json
import math
from typing import Any

import pytest
import timm
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import vitrefine
from vitrefine.diagnose import capture, capture_features, diagnose, head_similarity, linear_cka, relative_distance
from vitrefine.diagnose.attention import attention_map, attention_rollout
from vitrefine.diagnose.cka import evolution
from vitrefine.diagnose.collect import _thinned, split
from vitrefine.diagnose.grid import TokenGrid
from vitrefine.diagnose.measures import row_entropy, softmax_gradient, token_similarity
from vitrefine.diagnose.streamed import off_diagonal
from vitrefine.diagnose.watching import watching
from vitrefine.errors import UserError
from vitrefine.ops.token_statistics import centred_gram as gram
from vitrefine.surgery.census import disturb

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SWIN = {"img_size": 56, "depths": (2, 2), "num_heads": (2, 4), "embed_dim": 16}


def small(modifications: str = "") -> nn.Module:
    torch.manual_seed(0)
    spec = f"vit_tiny_patch16_224{modifications}"
    return disturb(vitrefine.create(spec, img_size=64, depth=3, embed_dim=48, num_heads=3, num_classes=4).eval())


def images(count: int = 9) -> Tensor:
    return torch.randn(count, 3, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def found() -> tuple[nn.Module, Any]:
    model = small()
    return model, diagnose(model, images(), name="small", batch=4)


def test_numbers_are_those_of_the_plain_functions(found: tuple[nn.Module, Any]) -> None:
    model, diagnosis = found
    with torch.no_grad(), capture(model) as attentions:
        model(images())
    places = TokenGrid(1, 4, 4).coordinates()
    for number, attention in enumerate(attentions):
        maps = attention.calls[0].maps().double()
        expected = {
            "entropy": row_entropy(maps).transpose(0, 1).flatten(1),
            "class_entropy": row_entropy(maps)[:, :, 0].T,
            "distance": relative_distance(maps, places)[:, :, 1:].transpose(0, 1).flatten(1),
            "gradient": softmax_gradient(maps).transpose(0, 1).flatten(1),
            "head_similarity": off_diagonal(head_similarity(maps)).T,
        }
        for key, values in expected.items():
            layer = diagnosis[key].layers[number]
            assert layer.name == f"blocks.{number}.attn"
            assert layer.whole.mean == pytest.approx(values.mean().item(), abs=1e-5)
            assert [head.mean for head in layer.heads] == pytest.approx(values.mean(dim=1).tolist(), abs=1e-5)
            quantiles = torch.quantile(values.flatten(), torch.tensor([0.15, 0.5, 0.85]).double()).tolist()
            assert [layer.whole.low, layer.whole.median, layer.whole.high] == pytest.approx(quantiles, abs=1e-5)
        assert diagnosis["entropy"].layers[number].bound == math.log(17)
        assert diagnosis["gradient"].layers[number].bound == pytest.approx(16 / 17)


def test_features(found: tuple[nn.Module, Any]) -> None:
    model, diagnosis = found
    batches = split(images(), 4)
    assert [len(batch) for batch in batches] == [4, 5]  # one image alone has no CKA
    tokens: dict[str, list[Tensor]] = {}
    with torch.no_grad(), capture_features(model, lambda name, x: tokens.setdefault(name, []).append(x)) as names:
        for batch in batches:
            model(batch)
    assert names == ["input", "blocks.0", "blocks.1", "blocks.2"]
    similar = [token_similarity(torch.cat(tokens[name])).mean().item() for name in names]
    assert diagnosis["token_similarity"].means == pytest.approx(similar, abs=1e-6)
    each = torch.stack([evolution([gram(tokens[name][b]) for name in names[1:]]) for b in range(2)])
    assert diagnosis["evolution"].means == pytest.approx(each.mean(dim=0).tolist(), abs=1e-6)
    first, last = tokens["blocks.0"][0], tokens["blocks.2"][0]
    assert 1 / linear_cka(first, last) == pytest.approx(each[0, -1].item())
    assert diagnosis.similarity.values.shape == (4, 4)
    torch.testing.assert_close(diagnosis.similarity.values.diagonal(), torch.ones(4, dtype=torch.float64))


def test_everything_prints_and_plots(found: tuple[nn.Module, Any]) -> None:
    _, diagnosis = found
    text = str(diagnosis)
    assert text.startswith("small, 9 images\n- ")
    assert "entropy of attention, nats" in text
    for part in (diagnosis, diagnosis.similarity, diagnosis.queries, *diagnosis.profiles.values()):
        assert isinstance(part.plot(), Figure)
        assert str(part)


def test_tables(found: tuple[nn.Module, Any]) -> None:
    _, diagnosis = found
    rows = list(csv.DictReader(io.StringIO(diagnosis.to_csv())))
    entropy = [row for row in rows if row["quantity"] == "entropy"]
    assert len(entropy) == 3 * (1 + 3)  # all heads together, and each
    assert float(entropy[0]["mean"]) == diagnosis["entropy"].means[0]
    content = json.loads(json.dumps(diagnosis.to_json(), allow_nan=False))
    assert content["profiles"]["entropy"][0]["bound"] == math.log(17)
    assert content["cka"]["blocks"] == ["input", "blocks.0", "blocks.1", "blocks.2"]


def test_the_query_in_the_middle(found: tuple[nn.Module, Any]) -> None:
    model, diagnosis = found
    with torch.no_grad(), capture(model) as attentions:
        model(images())
    expected = attentions[2].calls[0].maps()[:, :, 1 + 2 * 4 + 2, 1:].mean(dim=0).unflatten(-1, (4, 4))
    torch.testing.assert_close(diagnosis.queries.maps[2], expected)


def test_a_block_that_runs_twice_attends_no_more_than_others() -> None:
    model: Any = small()
    model.blocks[2] = model.blocks[0]
    queries = diagnose(model, images(4)).queries
    assert queries is not None
    assert len(queries.names) == 2
    assert all((maps.sum(dim=(1, 2)) <= 1).all() for maps in queries.maps)


def test_the_model_is_left_as_it_was() -> None:
    model = small().train()
    kinds, state = [type(m) for m in model.modules()], [set(vars(m)) for m in model.modules()]
    model.blocks[1].eval()  # type: ignore[index]
    modes = [m.training for m in model.modules()]
    diagnose(model, images(4))
    assert [type(m) for m in model.modules()] == kinds
    assert [set(vars(m)) for m in model.modules()] == state
    assert [m.training for m in model.modules()] == modes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_refined_models_have_both_maps() -> None:
    diagnosis = diagnose(small("+refiner+cb_s"), images(4))
    before, after = diagnosis["head_similarity"], diagnosis["refined_head_similarity"]
    assert [layer.name for layer in before.layers] == [layer.name for layer in after.layers]
    assert before.means != pytest.approx(after.means, abs=1e-6)
    assert diagnosis.kernels is not None
    assert len(diagnosis.kernels.names) == 3
    assert {"broadcast_ratio", "broadcast_mean"} <= diagnosis.profiles.keys()
    assert any("CB_S adds" in sentence for sentence in diagnosis.findings)


@pytest.mark.parametrize(
    ("spec", "arguments", "keys"),
    [
        ("swin_tiny_patch4_window7_224+dtm", SWIN, {"entropy", "offset"}),
        ("lit_ti", {"img_size": 64}, {"entropy", "offset", "class_entropy"}),
        ("refined_vit_s", {"img_size": 64, "depth": 4}, {"entropy", "refined_head_similarity"}),
        ("pvt_v2_b0", {"depths": (1, 1, 1, 1)}, {"entropy", "token_similarity"}),
    ],
)
def test_other_kinds(spec: str, arguments: dict[str, Any], keys: set[str]) -> None:
    torch.manual_seed(0)
    model = disturb(vitrefine.create(spec, **arguments).eval())
    size = arguments.get("img_size", 64)
    diagnosis = diagnose(model, torch.randn(4, 3, size, size))
    assert keys <= diagnosis.profiles.keys()
    for profile in diagnosis.profiles.values():
        assert all(math.isfinite(value) for value in profile.means), profile.key
    for share in diagnosis["entropy"].shares or []:
        assert 0 < share <= 1 + 1e-6


def test_layers_of_other_kinds_stay_in_order() -> None:
    """Blocks that attend for themselves and blocks that use the maps of others take turns."""
    torch.manual_seed(0)
    model = disturb(vitrefine.create("refined_vit_s", img_size=64, depth=4, embed_dim=48, num_heads=3).eval())
    names = [layer.name for layer in diagnose(model, images(4))["head_similarity"].layers]
    assert names == [f"blocks.{number}.attn" for number in range(4)]


def test_layers_are_counted_in_the_model() -> None:
    torch.manual_seed(0)
    pyramid = diagnose(vitrefine.create("pvt_small", img_size=64, depths=(1, 1, 1, 2)), images(4))
    assert pyramid["entropy"].numbers == [1, 2, 3, 4, 5]
    assert pyramid["distance"].numbers == [4, 5]  # keys of the others are fewer than their queries
    assert [row["number"] for row in pyramid["distance"].rows() if row["head"] == "all"] == [3, 4]
    assert pyramid.queries is not None
    assert pyramid.queries.numbers == [4, 5]
    assert diagnose(small(), images(4), layers=2)["entropy"].numbers == [3]


def test_a_register_is_no_class_token() -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=64, depth=2, class_token=False, reg_tokens=4, global_pool="avg"
    ).eval()
    diagnosis = diagnose(model, images(4))
    assert "class_entropy" not in diagnosis.profiles
    assert "distance" in diagnosis.profiles
    with torch.no_grad(), capture(model) as attentions:
        model(images(4))
    seen = attentions[1].calls[0].maps().mean(dim=(1, 2))[:, 4:]
    expected = (seen / seen.amax(dim=1, keepdim=True)).unflatten(1, (4, 4))
    torch.testing.assert_close(attention_map(model, images(4)), expected)


def test_maps_that_meet_no_values_are_not_measured() -> None:
    model = small("+refiner(share=1)")
    diagnosis = diagnose(model, images(4))
    assert diagnosis["entropy"].numbers == diagnosis["refined_head_similarity"].numbers == [1, 3]
    shared, own = diagnosis["head_similarity"].means[1], diagnosis["refined_head_similarity"].means[0]
    assert shared == pytest.approx(own, abs=1e-6)


def test_attention_to_a_single_key_has_no_entropy() -> None:
    """On small images a pyramid reduces its keys to one."""
    torch.manual_seed(0)
    model = vitrefine.create("pvt_small", img_size=32, depths=(1, 1, 1, 1))
    diagnosis = diagnose(model, torch.randn(4, 3, 32, 32))
    assert diagnosis["head_similarity"].numbers == [1, 2, 3, 4]
    assert diagnosis["entropy"].numbers == [4]
    assert diagnosis.findings[0].startswith("layer 4 is nearly uniform: ")
    assert "nats" in str(diagnosis)


def test_of_many_rows_some_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    every = diagnose(small(), images(4))["entropy"]
    monkeypatch.setattr("vitrefine.diagnose.collect.MOST_ROWS", 20)
    some = diagnose(small(), images(4))["entropy"]
    assert some.means != every.means
    assert some.means == pytest.approx(every.means, abs=0.1)


def test_the_rows_that_are_kept_are_of_the_whole_image() -> None:
    columns = torch.arange(32.0).repeat(32 * 4096)  # of 4,096 queries in rows of 32, of 32 images
    kept = _thinned(columns[None])
    assert kept.shape[1] <= 8192
    assert kept.mean().item() == pytest.approx(15.5, abs=0.05)


@needs_gpu
def test_nothing_waits_for_the_device() -> None:
    model, given = small().cuda(), images(4).cuda()
    with watching(model) as watched:
        watched.run(given)  # kernels are compiled, coordinates moved
        torch.cuda.set_sync_debug_mode("error")
        try:
            watched.run(given)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@needs_gpu
def test_a_gpu_finds_the_same() -> None:
    expected, found = diagnose(small(), images()), diagnose(small().cuda(), images())
    assert expected.profiles.keys() == found.profiles.keys()
    for key, profile in expected.profiles.items():
        assert found[key].means == pytest.approx(profile.means, abs=1e-4), key
    assert expected.similarity is not None
    assert found.similarity is not None
    torch.testing.assert_close(found.similarity.values, expected.similarity.values, rtol=0, atol=1e-4)


@needs_gpu
def test_many_tokens_fit_two_gibibytes() -> None:
    model = timm.create_model("vit_small_patch16_224", img_size=2048, depth=1, class_token=False, global_pool="avg")
    torch.cuda.reset_peak_memory_stats()
    diagnose(model.cuda(), torch.randn(1, 3, 2048, 2048))
    assert torch.cuda.max_memory_allocated() < 2 << 30


def test_mistakes_get_a_sentence() -> None:
    with pytest.raises(UserError, match="ResNet has no attention to look at"):
        diagnose(timm.create_model("test_resnet"), torch.randn(1, 3, 160, 160))
    with pytest.raises(UserError, match="there is no image to look at"):
        diagnose(small(), [])
    with pytest.raises(UserError, match="VisionTransformer has no offset; it has entropy"):
        diagnose(small(), images(1))["offset"]
    with pytest.raises(UserError, match="a batch is a list; give images alone, without labels"):
        diagnose(small(), [[images(4), torch.zeros(4)]])  # type: ignore[list-item]
    with pytest.raises(UserError, match=r"a batch is a tensor of shape \(3, 64, 64\); give images"):
        diagnose(small(), images(1)[0])
    with pytest.raises(UserError, match=r"a batch is a tensor of shape \(0, 3, 64, 64\)"):
        diagnose(small(), images(0))
    with pytest.raises(UserError, match="batch=0 is no number of images at a time"):
        diagnose(small(), images(1), batch=0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, dynamic_img_size=True)
    with pytest.raises(UserError, match="there are images of 64×64 and of 32×64; give images of one size"):
        diagnose(model, [images(4), images(4)[:, :, :32]])


def test_rollout_against_a_loop() -> None:
    model = small()
    with torch.no_grad(), capture(model) as attentions:
        model(images(2))
    for image in range(2):
        rolled = torch.eye(17)
        for attention in attentions:
            mean = attention.calls[0].maps()[image].mean(dim=0)
            rolled = (mean + torch.eye(17)) / 2 @ rolled
        row = rolled[0, 1:].unflatten(0, (4, 4))
        torch.testing.assert_close(attention_rollout(model, images(2))[image], row / row.max())
