"""Stages and merging, found in models as they come; on the meta device, so that none of them has to be small."""

import pytest
import timm
import torch

import vitrefine.models  # noqa: F401  (registers the models)
from vitrefine.surgery.flow import follow
from vitrefine.surgery.merging import find_merges
from vitrefine.surgery.stages import Pyramid, find_stages
from vitrefine.surgery.survey import survey

SIDES = {  # of the map in each stage
    "swin_tiny_patch4_window7_224": [56, 28, 14, 7],
    "pvt_small_msa": [56, 28, 14, 7],
    "pvt_v2_b0": [56, 28, 14, 7],
    "twins_svt_small": [56, 28, 14, 7],
    "maxvit_pico_rw_256": [64, 32, 16, 8],
    "coatnet_nano_rw_224": [56, 28, 14, 7],
    "nextvit_small": [56, 28, 14, 7],
    "mobilevit_xxs": [128, 64, 32, 16, 8],
    "nest_tiny_jx": [56, 28, 14],
    "gcvit_xxtiny": [56, 28, 14, 7],
    "levit_128s": [14, 7, 4],
    "volo_d1_224": [28, 14],
    "mvitv2_tiny": [56, 28, 14, 7],
    "pit_ti_224": [27, 14, 7],
    "coat_tiny": [56, 28, 14, 7],
    "vit_tiny_patch16_224": [14],
    "cait_xxs24_224": [14],
    "tnt_s_legacy_patch16_224": [56],
    "mixer_s32_224": [7],
}
MERGES = {
    "swin_tiny_patch4_window7_224": ["layers.1.downsample", "layers.2.downsample", "layers.3.downsample"],
    "pvt_v2_b0": ["stages.1.downsample.proj", "stages.2.downsample.proj", "stages.3.downsample.proj"],
    "twins_svt_small": ["patch_embeds.1.proj", "patch_embeds.2.proj", "patch_embeds.3.proj"],
    "pit_ti_224": ["transformers.1.pool.conv", "transformers.2.pool.conv"],
    "coat_tiny": ["patch_embed2.proj", "patch_embed3.proj", "patch_embed4.proj"],
    "nest_tiny_jx": ["levels.1.pool.pool", "levels.2.pool.pool"],
    "maxvit_pico_rw_256": ["stages.1.blocks.0.conv", "stages.2.blocks.0.conv", "stages.3.blocks.0.conv"],
    "volo_d1_224": ["network.1.proj"],
    "mvitv2_tiny": [],
    "levit_128s": [],
}


@pytest.mark.parametrize("name", SIDES)
def test_stages_and_merges(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    found, flow = survey(model), follow(model)
    pyramid = find_stages(found, flow)
    assert len(pyramid) == len(SIDES[name])
    for own, side in zip(pyramid.tokens, SIDES[name], strict=True):
        assert own in (side * side - 1, side * side, side * side + 1)  # a class token in one stage only, say
    assert list(pyramid.ended) == sorted(pyramid.ended)
    if name in MERGES:
        merges, reasons = find_merges(found, flow, pyramid)
        assert [merge.innermost.name for merge in merges] == MERGES[name]
        assert sorted({merge.stage for merge in merges} | set(reasons)) == list(range(1, len(pyramid)))


def test_stage_of() -> None:
    pyramid = Pyramid((3136, 784, 196, 50))
    assert [pyramid.stage_of(tokens) for tokens in (3136, 783, 49, 1, 12544, 0)] == [0, 1, 3, None, None, None]
