"""Batched augmentation against Pillow, image by image, and against its own definitions."""

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from vitrefine.data import colour
from vitrefine.data.draws import Draws
from vitrefine.data.finish import Finish
from vitrefine.data.geometry import centre_crop, random_crop, random_flip, random_resized_crop, resize, warp
from vitrefine.data.memory import training_batch
from vitrefine.data.mixing import MIX_DRAWS, _beta, mix, random_erase, soft_labels
from vitrefine.data.options import Augment
from vitrefine.data.randaugment import OPERATIONS, _change, _change_unseen, _room, apply_operations, rand_augment


def draws(images, rows, seed=0):
    return Draws.of(rows, len(images), torch.Generator().manual_seed(seed))


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (4, 3, 24, 32), generator=generator, dtype=torch.uint8)
    noise[1] = noise[1] // 4 + 90  # low contrast
    noise[2] = noise[2, :, :1, :1]  # one colour
    noise[3] = torch.arange(32, dtype=torch.uint8) * 7  # a ramp
    return noise


def pillow(images, function):
    out = [np.asarray(function(Image.fromarray(i.permute(1, 2, 0).numpy()))) for i in images]
    return torch.from_numpy(np.stack(out)).permute(0, 3, 1, 2)


def full(images, value):
    return torch.full((len(images),), float(value))


def contrast_table(images, factor):
    return colour.blend_table(colour.mean_grey(images), images, full(images, factor))


@pytest.mark.parametrize(
    ("table", "function"),
    [
        (colour.autocontrast_table, ImageOps.autocontrast),
        (colour.equalize_table, ImageOps.equalize),
        (lambda x: colour.posterize_table(x, full(x, 2)), lambda i: ImageOps.posterize(i, 2)),
        (lambda x: colour.solarize_table(x, full(x, 100)), lambda i: ImageOps.solarize(i, 100)),
        (lambda x: colour.blend_table(full(x, 0), x, full(x, 1.7)), lambda i: ImageEnhance.Brightness(i).enhance(1.7)),
        (lambda x: contrast_table(x, 0.4), lambda i: ImageEnhance.Contrast(i).enhance(0.4)),
        (lambda x: contrast_table(x, 1.8), lambda i: ImageEnhance.Contrast(i).enhance(1.8)),
    ],
)
def test_tables_are_pillows(images, table, function):
    ours, theirs = colour.look_up(images, table(images)), pillow(images, function)
    assert (ours.int() - theirs.int()).abs().max() <= 1  # Pillow blends in float32 of its own
    assert (ours == theirs).float().mean() > 0.95


@pytest.mark.parametrize("factor", [0.1, 0.6, 1.9])
@pytest.mark.parametrize(
    ("blend", "enhance"), [(colour.saturate, ImageEnhance.Color), (colour.sharpen, ImageEnhance.Sharpness)]
)
def test_blends_are_pillows(images, blend, enhance, factor):
    ours = blend(images, full(images, factor))
    theirs = pillow(images, lambda image: enhance(image).enhance(factor))
    assert (ours.int() - theirs.int()).abs().max() <= 1
    assert (ours == theirs).float().mean() > 0.95


def test_grey_is_pillows(images):
    theirs = torch.from_numpy(
        np.stack([np.asarray(Image.fromarray(i.permute(1, 2, 0).numpy()).convert("L")) for i in images])
    )
    assert torch.equal(colour.grey(images)[:, 0], theirs)


def test_each_image_gets_its_own_operation(images):
    for number, name in enumerate(OPERATIONS):
        operation = torch.full((4,), -1)
        operation[0] = number
        out = apply_operations(images, operation, torch.full((4,), 0.9), torch.ones(4))
        assert torch.equal(out[1:], images[1:]), name
        assert name == "autocontrast" or not torch.equal(out[0], images[0]), name


def test_translation_moves_by_its_share(images):
    operation = torch.full((4,), OPERATIONS.index("translate_x"))
    out = apply_operations(images, operation, torch.full((4,), 1 / 0.45 * 8 / 32), torch.ones(4))
    assert torch.equal(out[..., : 32 - 8], images[..., 8:])
    assert (out[..., 32 - 8 :] == 0).all()


def test_rotation_of_a_square_by_a_quarter():
    image = torch.randint(0, 256, (1, 1, 8, 8), dtype=torch.uint8)
    matrix = torch.tensor([[[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0]]])
    assert torch.equal(warp(image, matrix)[0, 0], torch.rot90(image[0, 0], -1))


def test_fill_comes_in_from_outside(images):
    matrix = torch.tensor([[1.0, 0, 4.0], [0, 1, 0]]).expand(4, 2, 3)
    out = warp(images, matrix, fill=torch.tensor([10.0, 20.0, 30.0]))
    assert (out == torch.tensor([10, 20, 30], dtype=torch.uint8).view(1, 3, 1, 1)).all()


def test_random_crop_is_a_window_of_the_padded_image(images):
    out = random_crop(images, 3, draws(images, 2))
    padded = torch.nn.functional.pad(images, (3,) * 4)
    for one, source in zip(out, padded, strict=True):
        windows = source.unfold(1, 24, 1).unfold(2, 32, 1)
        assert (windows == one[:, None, None]).flatten(3).all(3).all(0).any()


def test_flip_mirrors_about_half():
    images = torch.arange(6, dtype=torch.uint8).expand(1000, 1, 2, 6)
    out = random_flip(images, draws(images, 1))
    flipped = (out == images.flip(-1)).flatten(1).all(1)
    assert ((out == images).flatten(1).all(1) ^ flipped).all()
    assert 0.45 < flipped.float().mean() < 0.55


def test_resized_crop_of_the_whole_image_is_the_image(images):
    out = random_resized_crop(images, (24, 32), draws(images, 4), scale=(1.0, 1.0), ratio=(32 / 24, 32 / 24))
    assert (out.int() - images.int()).abs().max() <= 1


def test_same_seed_same_images(images):
    def once():
        return rand_augment(images, draws(images, 8, seed=5))

    assert torch.equal(once(), once())


def test_mixed_targets_say_what_the_images_are():
    images = torch.arange(8.0).view(8, 1, 1, 1).expand(8, 1, 16, 16)
    targets = soft_labels(torch.arange(8), 8)
    for options in ({"mixup": 0.8, "cutmix": 0.0}, {"mixup": 0.0, "cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0}):
        mixed, mixed_targets = mix(images, targets, draws(images, MIX_DRAWS, seed=3), **options)
        # An image that is all its own label makes the mean of the mixed one the label's expectation.
        expected = (mixed_targets * torch.arange(8.0)).sum(dim=1)
        torch.testing.assert_close(mixed.mean(dim=(1, 2, 3)), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mixed_targets.sum(dim=1), torch.ones(8))


@pytest.mark.parametrize("alpha", [0.2, 0.8, 1.0])
def test_weights_follow_the_beta_distribution(alpha):
    sample = _beta(alpha, draws(range(200_000), 32))
    assert abs(sample.mean().item() - 0.5) < 0.005
    assert abs(sample.var().item() - 1 / (4 * (2 * alpha + 1))) < 0.003
    below = (sample < 0.25).float().mean().item()
    exact = torch.distributions.Beta(alpha, alpha).sample((200_000,)).lt(0.25).float().mean().item()
    assert abs(below - exact) < 0.01


def test_erasing_takes_the_asked_share():
    images = torch.zeros(4000, 1, 32, 32)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    out = random_erase(images, noise, draws(images, 5), p=0.25)
    touched = (out != 0).flatten(1).float().mean(dim=1)
    assert 0.22 < (touched > 0).float().mean() < 0.28
    erased = touched[touched > 0]
    assert erased.min() > 0.01
    assert erased.max() < 0.4
    assert math.isclose(erased.mean().item(), (0.02 + 1 / 3) / 2, abs_tol=0.03)


def test_smoothing():
    target = soft_labels(torch.tensor([1]), 4, 0.1)
    torch.testing.assert_close(target, torch.tensor([[0.025, 0.925, 0.025, 0.025]]))


def test_nothing_is_mixed_with_probability_zero():
    images, targets = torch.rand(6, 3, 8, 8), soft_labels(torch.arange(6), 6)
    mixed, mixed_targets = mix(images, targets, draws(images, MIX_DRAWS), p=0.0)
    assert torch.equal(mixed, images)
    assert torch.equal(mixed_targets, targets)


def test_draws_run_out_aloud():
    few = draws(range(3), 2)
    few.take(2)
    with pytest.raises(IndexError, match="2 rows were drawn, and 3 are needed"):
        few.one()


def test_centre_crop_cuts_and_pads(images):
    assert torch.equal(centre_crop(images, (20, 30)), images[..., 2:22, 1:31])
    padded = centre_crop(images, (28, 32))
    assert torch.equal(padded[..., 2:26, :], images)
    assert not padded[..., :2, :].any()


def test_resize_is_nearly_pillows(images):
    ours = resize(images, (12, 16))
    theirs = pillow(images, lambda image: image.resize((16, 12), Image.Resampling.BILINEAR))
    assert (ours.int() - theirs.int()).abs().max() <= 1


@pytest.mark.parametrize("room", [24, 20, 7])
def test_changing_without_counting_changes_the_same_images(room):
    images = torch.arange(24, dtype=torch.uint8).view(24, 1, 1, 1).expand(24, 3, 4, 4)
    chosen = torch.arange(24) % 4 == 1

    def change(some, rows):
        return some + rows.to(torch.uint8)[:, None, None, None] + 100

    assert torch.equal(_change_unseen(images, chosen, change, room), _change(images, chosen, change))


def test_there_is_nearly_always_room():
    operation = (torch.rand(2000, 256, generator=torch.Generator().manual_seed(0)) * 2 * len(OPERATIONS)).long()
    for count in (1, 5, 8):
        assert (operation < count).sum(dim=1).max() <= _room(256, count / (2 * len(OPERATIONS))) < 256


def test_the_augmentation_of_a_batch_is_one_graph():
    torch.compiler.reset()
    compiled = torch.compile(training_batch, backend="aot_eager", fullgraph=True, dynamic=False)
    data = torch.randint(0, 256, (20, 3, 8, 8), dtype=torch.uint8), torch.arange(20) % 4
    finish = Finish.of(4, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2), torch.device("cpu"))
    for crop in ("pad", "resized"):
        augment = Augment(crop=crop, rand_augment=None)  # on a CPU its shapes depend on what is drawn
        given = torch.tensor([3, 0, 19, 7]), torch.rand(100, 4), torch.randn(4, 3, 8, 8), finish, augment, (8, 8)
        for ours, plain in zip(
            compiled(*data, *given, torch.zeros(3)), training_batch(*data, *given, None), strict=True
        ):
            torch.testing.assert_close(ours, plain)
