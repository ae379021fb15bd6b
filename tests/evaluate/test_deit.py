"""A published model on real images: what timm's own tools give, image by image."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from timm.data import create_transform

import vitrefine
from vitrefine.data.open import open_data
from vitrefine.evaluate.images import ImageSet
from vitrefine.evaluate.occlusion import Occlusion
from vitrefine.evaluate.open import open_subject
from vitrefine.evaluate.predictions import Examiner

SHARED = Path(__file__).parents[3] / "shared" / "data"
WEIGHTS = SHARED / "weights" / "deit_tiny_patch16_224.fp16.safetensors"

pytestmark = pytest.mark.skipif(not WEIGHTS.exists(), reason="needs DeiT-Ti's weights and sample images")


@pytest.fixture(scope="module")
def names():
    return sorted((SHARED / "imagenet_sample").glob("*.jpg"))[:8]


@pytest.fixture(scope="module")
def examiner(names, tmp_path_factory):
    folder = tmp_path_factory.mktemp("deit")
    model = vitrefine.create("deit_tiny_patch16_224")
    model.load_state_dict({name: weight.float() for name, weight in load_file(WEIGHTS).items()})
    vitrefine.save(model, folder / "deit.safetensors")
    for name in names:
        place = folder / "sample" / str(int(name.stem))
        place.mkdir(parents=True)
        shutil.copy(name, place)
    data = open_data(f"imagenet-v2:{folder / 'sample'}")
    subject = open_subject(str(folder / "deit.safetensors"), data, device="cpu")
    return Examiner(subject, ImageSet(data, subject.device, batch=3, workers=0))


def test_as_timm_does_it(examiner, names):
    found = examiner.predict()
    config = examiner.subject.model.pretrained_cfg
    assert examiner.subject.crop_ratio == config["crop_pct"] == 0.9
    same = {name: config[name] for name in ("mean", "std", "crop_pct")}
    transform = create_transform((3, 224, 224), interpolation="bicubic", **same)
    images = torch.stack([transform(Image.open(name).convert("RGB")) for name in names])
    targets = torch.tensor([int(name.stem) for name in names])
    with torch.no_grad():
        logits = examiner.subject.model(images)
    assert found.target.tolist() == targets.tolist()
    assert found.best.tolist() == logits.topk(5).indices.tolist()
    assert found.loss.tolist() == pytest.approx(F.cross_entropy(logits, targets, reduction="none").tolist(), abs=1e-3)
    assert found.right.mean() >= 0.75


def test_hiding_half_of_each_image_matters(examiner):
    assert examiner.predict(Occlusion()).loss.mean() > examiner.predict().loss.mean()
