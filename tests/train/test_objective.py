"""Losses against plain float64 sums over the definitions, and the checks before training."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vitrefine
from vitrefine.data.dataset import Batch
from vitrefine.errors import UserError
from vitrefine.surgery.create import spec_of
from vitrefine.train.cross_entropy import binary_cross_entropy, soft_cross_entropy
from vitrefine.train.distillation import DistillationLoss
from vitrefine.train.objective import Objective, build_objective
from vitrefine.train.options import Distillation
from vitrefine.train.output import logits_of
from vitrefine.train.recipe import Recipe, load_recipe
from vitrefine.train.teacher import Teacher
from vitrefine.train.token_labels import TokenLabelLoss, patch_labels

CLASSES = 5
REFINED = "refined_vit_s(img_size=32,patch_size=8,depth=2,embed_dim=24,num_heads=2)"
DISTILLED = "deit_tiny_distilled_patch16_224(img_size=32,patch_size=8,depth=2,embed_dim=24,num_heads=2)"
PLAIN = "vit_tiny_patch16_224(img_size=32,patch_size=8,depth=2,embed_dim=24,num_heads=2)"


def recipe(*overrides: str) -> Recipe:
    return load_recipe("digits", overrides)


def soft(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, CLASSES, dtype=torch.float64, generator=generator).softmax(-1)


def batch(images: Tensor | None = None, seed: int = 0) -> Batch:
    if images is None:
        images = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
    count = len(images)
    return Batch(images=images, targets=soft(count).to(images.dtype), index=torch.arange(count))


class Fixed(nn.Module):
    """A model that gives what it was told to, whatever it sees."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor) -> Any:
        return self.output


def entropy_sum(logits: Tensor, targets: Tensor) -> float:
    """Mean of −Σ t log p, written out."""
    total = 0.0
    for z, t in zip(logits.reshape(-1, CLASSES).tolist(), targets.reshape(-1, CLASSES).tolist(), strict=True):
        norm = sum(torch.tensor(z, dtype=torch.float64).exp().tolist())
        total -= sum(
            ti * (zi - torch.tensor(norm, dtype=torch.float64).log().item()) for zi, ti in zip(z, t, strict=True)
        )
    return total / (logits.numel() // CLASSES)


def test_cross_entropy_is_its_definition() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, CLASSES, dtype=torch.float64)
    assert soft_cross_entropy(logits, soft(6)).item() == pytest.approx(entropy_sum(logits, soft(6)), rel=1e-12)
    p = logits.sigmoid()
    expected = -(soft(6) * p.log() + (1 - soft(6)) * (1 - p).log()).mean()
    assert binary_cross_entropy(logits, soft(6)).item() == pytest.approx(expected.item(), rel=1e-12)


def test_half_precision_logits_are_compared_in_single() -> None:
    logits = torch.randn(6, CLASSES).bfloat16()
    loss = soft_cross_entropy(logits, soft(6).float())
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(entropy_sum(logits.double(), soft(6)), rel=1e-5)


@pytest.mark.parametrize(("kind", "compare"), [("ce", soft_cross_entropy), ("bce", binary_cross_entropy)])
def test_the_plain_objective(kind: str, compare: Any) -> None:
    model = vitrefine.create(PLAIN, num_classes=CLASSES)
    objective = build_objective(recipe(f"loss.kind={kind}"), model, CLASSES)
    given = batch()
    loss = objective(model, given)
    assert loss.item() == pytest.approx(compare(model(given.images), given.targets).item())
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert not list(objective.parameters())


@pytest.mark.parametrize("box", [(0, 0, 0, 0), (1, 0, 3, 2), (0, 0, 4, 4), (2, 2, 2, 4)])
def test_token_labels_with_mixed_patches(box: tuple[int, int, int, int]) -> None:
    torch.manual_seed(0)
    cls, patches = torch.randn(6, CLASSES, dtype=torch.float64), torch.randn(6, 16, CLASSES, dtype=torch.float64)
    given = batch(torch.randn(6, 3, 32, 32, dtype=torch.float64))
    loss = Objective(TokenLabelLoss(0.5))(Fixed((cls, patches, torch.tensor(box))), given)
    area = (box[2] - box[0]) * (box[3] - box[1]) / 16
    mixed = (1 - area) * given.targets + area * given.targets.flip(0)
    repeated = torch.stack([given.targets] * 16, dim=1)
    assert loss.item() == pytest.approx(entropy_sum(cls, mixed) + 0.5 * entropy_sum(patches, repeated), rel=1e-12)


class Map(nn.Module):
    """A teacher of the form that timm's convolutional networks have: pooling between its map and its classifier."""

    def __init__(self, channels_last: bool = False) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 7, 4, 4)
        self.classifier = nn.Linear(7, CLASSES)
        self.channels_last = channels_last
        if channels_last:
            self.output_fmt = "NHWC"

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.convolution(x)
        return x.permute(0, 2, 3, 1) if self.channels_last else x

    def forward_head(self, x: Tensor) -> Tensor:
        return self.classifier(x.mean((1, 2) if self.channels_last else (2, 3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_teacher_labels_each_place(channels_last: bool) -> None:
    torch.manual_seed(0)
    model = Map(channels_last).double()
    teacher = Teacher(model)
    images = torch.randn(2, 3, 8, 12, dtype=torch.float64)
    dense = teacher.dense(images)
    assert dense.shape == (2, CLASSES, 2, 3)
    for i in range(2):
        for j in range(3):
            place = images[:, :, 4 * i : 4 * i + 4, 4 * j : 4 * j + 4]
            torch.testing.assert_close(dense[:, :, i, j], model(place))
    same = patch_labels(dense, images, 6)
    torch.testing.assert_close(same, dense.softmax(1).flatten(2).transpose(1, 2))
    finer = patch_labels(dense, images, 24)  # 4×6: corners are those of the map
    torch.testing.assert_close(finer[:, 0], same[:, 0])
    torch.testing.assert_close(finer.sum(-1), torch.ones(2, 24, dtype=torch.float64))


def test_token_labels_from_a_teacher() -> None:
    torch.manual_seed(0)
    teacher = Teacher(Map().double())
    given = batch(torch.randn(6, 3, 16, 16, dtype=torch.float64))
    cls, patches = torch.randn(6, CLASSES, dtype=torch.float64), torch.randn(6, 16, CLASSES, dtype=torch.float64)
    box = torch.tensor([0, 1, 2, 3])
    loss = Objective(TokenLabelLoss(0.3, teacher))(Fixed((cls, patches, box)), given)
    mixed = 0.75 * given.targets + 0.25 * given.targets.flip(0)
    labels = teacher.dense(given.images).softmax(1).flatten(2).transpose(1, 2)
    assert loss.item() == pytest.approx(entropy_sum(cls, mixed) + 0.3 * entropy_sum(patches, labels), rel=1e-12)


@pytest.mark.parametrize("mix", [True, False])
def test_refined_models_learn_from_token_labels(mix: bool) -> None:
    settings = recipe("loss.token_labels.weight=0.5", f"loss.token_labels.mix={str(mix).lower()}")
    model = vitrefine.create(REFINED, num_classes=CLASSES, **settings.model_arguments())
    objective = build_objective(settings, model, CLASSES)
    torch.manual_seed(0)
    loss = objective(model, batch())
    torch.manual_seed(0)
    cls, patches, box = model(batch().images)
    again = TokenLabelLoss(0.5)((cls, patches, box), batch().images, batch().targets)
    assert loss.item() == pytest.approx(again.item(), rel=1e-4)  # batch norm has moved in between
    assert bool(box.any()) or not mix
    loss.backward()
    assert model.aux_head.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("token", [True, False])
def test_distillation_is_its_definition(kind: str, token: bool) -> None:
    torch.manual_seed(0)
    cls, dist, told = (torch.randn(6, CLASSES, dtype=torch.float64) for _ in range(3))
    temperature = 3.0 if kind == "soft" else 1.0
    options = Distillation(teacher="x", kind=kind, alpha=0.3, temperature=temperature)  # type: ignore[arg-type]
    objective = Objective(DistillationLoss(options, Teacher(Fixed(told))))
    given = batch(torch.randn(6, 3, 8, 8, dtype=torch.float64))
    loss = objective(Fixed((cls, dist) if token else cls), given)
    student = dist if token else cls
    if kind == "hard":
        labels = torch.eye(CLASSES, dtype=torch.float64)[told.argmax(1)]
        learnt = entropy_sum(student, labels)
    else:
        p, q = (told / 3).softmax(1), (student / 3).softmax(1)
        learnt = 9 * (p * (p / q).log()).sum(1).mean().item()
    assert loss.item() == pytest.approx(0.7 * entropy_sum(cls, given.targets) + 0.3 * learnt, rel=1e-12)


def test_distilled_models_return_both_and_remain_what_they_are(tmp_path: Any) -> None:
    teacher = vitrefine.create(PLAIN, num_classes=CLASSES)
    vitrefine.save(teacher, tmp_path / "teacher.safetensors")
    settings = recipe(f"loss.distillation.teacher={tmp_path}/teacher.safetensors")
    model = vitrefine.create(DISTILLED + "+cb_s", num_classes=CLASSES)
    objective = build_objective(settings, model, CLASSES)
    objective(model, batch()).backward()
    assert model.head_dist.weight.grad.abs().sum() > 0
    assert model.head.weight.grad.abs().sum() > 0
    assert not model.distilled_training
    assert str(spec_of(model)).startswith("deit_tiny_distilled")
    # an exception on the way leaves no trace either
    with pytest.raises(AssertionError):
        objective(model, batch(torch.randn(2, 3, 16, 16)))
    assert not model.distilled_training


def test_a_teacher_is_frozen_and_stays_in_evaluation() -> None:
    teacher = Teacher(nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, CLASSES), nn.Dropout(0.9)))
    teacher.train()
    assert not any(module.training for module in teacher.modules())
    assert not any(p.requires_grad for p in teacher.parameters())
    images = torch.randn(2, 3, 8, 8, requires_grad=True)
    assert not teacher(images).requires_grad


def test_a_teacher_sees_its_own_normalisation() -> None:
    model: Any = Map()
    model.pretrained_cfg = {"mean": (0.5, 0.4, 0.3), "std": (0.1, 0.2, 0.3)}
    mean, std = torch.tensor([0.1, 0.2, 0.3])[:, None, None], torch.tensor([0.5, 0.6, 0.7])[:, None, None]
    pixels = torch.rand(2, 3, 8, 8)
    seen = Teacher(model, mean.flatten().tolist(), std.flatten().tolist()).prepare((pixels - mean) / std)
    its_mean, its_std = (torch.tensor(model.pretrained_cfg[k])[:, None, None] for k in ("mean", "std"))
    torch.testing.assert_close(seen, (pixels - its_mean) / its_std)


def test_a_teacher_of_one_size_sees_images_of_that_size() -> None:
    model = vitrefine.create(PLAIN, num_classes=CLASSES)
    assert Teacher(model)(torch.randn(2, 3, 48, 48)).shape == (2, CLASSES)


SWIN = "swin_tiny_patch4_window7_224(img_size=64,depths=[1,1],embed_dim=16,num_heads=[1,2])"


@pytest.mark.parametrize("spec", ["test_resnet", "test_nfnet", SWIN])
def test_places_of_a_linear_classifier_average_to_its_image(spec: str) -> None:
    teacher = Teacher(vitrefine.create(spec, num_classes=CLASSES).double())
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    torch.testing.assert_close(teacher.dense(images).mean((2, 3)), teacher(images))


def test_networks_label_patches_and_token_models_do_not(tmp_path: Any) -> None:
    for spec, file in (("test_convnext", "net"), (PLAIN, "tokens")):
        vitrefine.save(vitrefine.create(spec, num_classes=CLASSES), tmp_path / f"{file}.safetensors")

    def loss(file: str) -> Tensor:
        settings = recipe(f"loss.token_labels.teacher={tmp_path}/{file}.safetensors")
        model = vitrefine.create(REFINED, num_classes=CLASSES, **settings.model_arguments())
        return build_objective(settings, model, CLASSES, mean=(0.5,) * 3, std=(0.5,) * 3)(model, batch())

    assert loss("net").isfinite()
    with pytest.raises(UserError, match="VisionTransformer has no feature map that could be classified place by place"):
        loss("tokens")


@pytest.mark.parametrize(
    ("spec", "overrides", "expected"),
    [
        (PLAIN, ["loss.token_labels.weight=1"], "loss.token_labels needs a classifier of patches"),
        (
            REFINED.replace(")", ",token_labels=true)"),
            ["loss.token_labels.mix=true"],
            "the model was made with mix_token=false, but loss.token_labels.mix is true",
        ),
        (REFINED.replace(")", ",token_labels=true)"), [], "the recipe has no token labels to teach it"),
        (PLAIN, ["loss.distillation.teacher=resnet18"], "the teacher resnet18 would have random weights; add"),
        (
            PLAIN,
            ["loss.distillation.teacher=resnet18(pretrained=true)"],
            "tells 1000 classes apart, but the data has 5",
        ),
        (PLAIN, ["loss.distillation.teacher=gone.safetensors"], "gone.safetensors"),
        (PLAIN, ["loss.distillation.teacher={folder}/ten.safetensors"], "tells 10 classes apart, but the data has 5"),
    ],
)
def test_what_cannot_be_trained_is_refused(tmp_path: Any, spec: str, overrides: list[str], expected: str) -> None:
    for name, classes in (("ten", 10), ("five", CLASSES)):
        vitrefine.save(vitrefine.create(PLAIN, num_classes=classes), tmp_path / f"{name}.safetensors")
    settings = recipe(*(override.replace("{folder}", str(tmp_path)) for override in overrides))
    model = vitrefine.create(spec, num_classes=CLASSES)
    with pytest.raises(UserError, match=expected):
        build_objective(settings, model, CLASSES)


def test_a_teacher_must_take_the_images(tmp_path: Any) -> None:
    vitrefine.save(vitrefine.create(PLAIN, num_classes=CLASSES, in_chans=1), tmp_path / "grey.safetensors")
    settings = recipe(f"loss.distillation.teacher={tmp_path}/grey.safetensors")
    with pytest.raises(UserError, match="takes images of 1 channels, but the data has 3"):
        build_objective(settings, vitrefine.create(PLAIN), CLASSES, mean=(0.5,) * 3, std=(0.5,) * 3)


def test_logits_are_found_in_what_models_return() -> None:
    logits = torch.zeros(2, CLASSES)
    named = type("Output", (), {"logits": logits})()
    assert logits_of(logits) is logits_of((logits, 1, 2)) is logits_of(named) is logits
    with pytest.raises(UserError, match="but this one gives a tensor of 3 dimensions"):
        logits_of(torch.zeros(2, 3, CLASSES))
    with pytest.raises(UserError, match="but this one gives dict"):
        logits_of({})
