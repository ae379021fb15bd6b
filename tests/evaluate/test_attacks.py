"""Attacks against foolbox's, against a model whose gradient is known, and against any kind of model."""

import pytest
import torch
import torch.nn.functional as F

import vitrefine
from vitrefine.errors import UserError
from vitrefine.evaluate.attacks import FGSM, PGD, fgsm, pgd
from vitrefine.evaluate.images import Shown
from vitrefine.evaluate.subject import subject_of

from .conftest import Linear, small_set

SMALL = "vit_tiny_patch16_224(img_size=32,patch_size=8,depth=2,embed_dim=24,num_heads=3,num_classes=10)"


@pytest.fixture(scope="module")
def subject():
    torch.manual_seed(0)
    return subject_of(vitrefine.create(SMALL), small_set(size=32), device="cpu")


@pytest.fixture(scope="module")
def shown():
    chance = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (12, 3, 32, 32), generator=chance) / 255
    return Shown(pixels, torch.randint(0, 10, (12,), generator=chance), torch.arange(100, 112))


def foolbox_attack(subject, shown, attack, epsilon):
    """What foolbox makes of the images, in the same pixel space and with the same preprocessing."""
    foolbox = pytest.importorskip("foolbox")
    normalisation = {"mean": list(subject.mean), "std": list(subject.std), "axis": -3}
    model = foolbox.PyTorchModel(subject.model, bounds=(0, 1), preprocessing=normalisation, device="cpu")
    return attack(model, shown.pixels, foolbox.criteria.Misclassification(shown.targets), epsilons=epsilon / 255)[1]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_model_without_gradients(subject, shown, mode):
    with pytest.raises(UserError, match="attacks need gradients, and this model computes without"):
        fgsm(mode()(subject.logits), shown.pixels, shown.targets, 1)


@pytest.mark.parametrize("epsilon", [1, 8])
def test_fgsm_is_foolbox_s(subject, shown, epsilon):
    foolbox = pytest.importorskip("foolbox")
    theirs = foolbox_attack(subject, shown, foolbox.attacks.LinfFastGradientAttack(), epsilon)
    ours = fgsm(subject.logits, shown.pixels, shown.targets, epsilon)
    assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize(("epsilon", "steps", "step"), [(1, 5, 0.5), (8, 10, 2.0)])
def test_pgd_is_foolbox_s(subject, shown, epsilon, steps, step):
    foolbox = pytest.importorskip("foolbox")
    attack = foolbox.attacks.LinfPGD(abs_stepsize=step / 255, steps=steps, random_start=False)
    theirs = foolbox_attack(subject, shown, attack, epsilon)
    ours = pgd(subject.logits, shown.pixels, shown.targets, epsilon, steps=steps, step=step)
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_a_linear_model():
    """The loss of the first class grows where its weight is less than the other's."""
    weight = torch.tensor([[1.0, -1.0, 0.0], [0.0, 0.0, 0.0]])

    def logits(pixels):
        return pixels.flatten(1) @ weight.T

    pixels = torch.tensor([0.5, 0.5, 0.5]).view(1, 3, 1, 1)
    attacked = fgsm(logits, pixels, torch.tensor([0]), 51)
    assert torch.allclose(attacked.flatten(), torch.tensor([0.3, 0.7, 0.5]))
    beyond = fgsm(logits, pixels, torch.tensor([0]), 255)
    assert torch.equal(beyond.flatten(), torch.tensor([0.0, 1.0, 0.5]))
    for start in (None, torch.tensor([0.7, 0.3, 0.5]).view(1, 3, 1, 1)):
        reached = pgd(logits, pixels, torch.tensor([0]), 51, steps=10, start=start)
        assert torch.allclose(reached.flatten(), torch.tensor([0.3, 0.7, 0.5]))


@pytest.mark.parametrize("attack", [FGSM(2), PGD(2, steps=4)])
def test_bounds(subject, shown, attack):
    attacked = attack(subject, shown)
    assert float((attacked - shown.pixels).abs().max()) <= 2 / 255 + 1e-6
    assert float(attacked.min()) >= 0
    assert float(attacked.max()) <= 1
    before, after = (F.cross_entropy(subject.logits(x), shown.targets) for x in (shown.pixels, attacked))
    assert after > before


def test_more_steps_do_more_harm(subject, shown):
    once, often = (subject.logits(attack(subject, shown)) for attack in (FGSM(4), PGD(4)))
    assert F.cross_entropy(often, shown.targets) > F.cross_entropy(once, shown.targets)


def test_pgd_is_repeatable_image_by_image(subject, shown):
    whole, again, other = (PGD(2, steps=1, seed=seed)(subject, shown) for seed in (0, 0, 1))
    assert torch.equal(whole, again)
    assert not torch.equal(whole, other)
    half = PGD(2, steps=1)(subject, shown.part(torch.tensor([7, 3])))
    assert torch.allclose(half, whole[[7, 3]], atol=1e-6)


def test_pgd_starts_anywhere_within_epsilon(data):
    """Seen where there is no gradient to follow: evenly spread, and not heaped up at the bounds."""
    flat = Linear()
    flat.weight.data.zero_()
    grey = Shown(torch.full((4, 3, 8, 8), 0.5), torch.zeros(4, dtype=torch.long), torch.arange(4))
    away = (PGD(8)(subject_of(flat, data, device="cpu"), grey) - 0.5) * 255 / 8
    assert 0.95 < float(away.abs().max()) <= 1 + 1e-5
    assert float(away.std()) == pytest.approx(3**-0.5, rel=0.1)


def test_gradients_are_not_left_behind(subject, shown):
    subject.model.zero_grad(set_to_none=True)
    attacked = FGSM(1)(subject, shown)
    assert not attacked.requires_grad
    assert not shown.pixels.requires_grad
    assert all(parameter.grad is None for parameter in subject.model.parameters())


@pytest.mark.parametrize(
    "spec",
    [
        f"{SMALL}+refiner(variant=official)+cb",
        "lit_ti(img_size=32,num_classes=10)",
        "resnet10t(num_classes=10)",
    ],
)
def test_any_model(spec, shown):
    subject = subject_of(vitrefine.create(spec), small_set(size=32), size=(32, 32), device="cpu")
    few = shown.part(torch.arange(2))
    with torch.no_grad():
        attacked = FGSM(4)(subject, few)
    assert float((attacked - few.pixels).abs().max()) == pytest.approx(4 / 255, abs=1e-6)
