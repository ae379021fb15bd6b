"""What modifications have learned: CB_S scales, refinement kernels, offsets and the points behind a token."""

import math

import pytest
import torch

import vitrefine
from vitrefine.diagnose.broadcast import broadcast_scales, scale_ratio
from vitrefine.diagnose.kernels import kernel_spectra, kernel_spectrum
from vitrefine.diagnose.offsets import Merging, capture_offsets, offset_lengths, sampling_picture, sampling_points
from vitrefine.errors import UserError
from vitrefine.surgery.census import disturb


def merging(offsets: torch.Tensor, name: str = "m") -> Merging:
    side = 2 * offsets.shape[-1]
    return Merging(name, offsets, (2, 2), (2, 2), (0, 0), (side, side))


def test_scales() -> None:
    scale = torch.linspace(-1, 1, 201)  # |λ| is spread evenly: its 10th percentile is 0.1, its 90th is 0.9
    assert scale_ratio(scale).item() == pytest.approx(1 / 9, abs=0.01)
    assert scale_ratio(torch.full((8,), -0.3)).item() == pytest.approx(1)
    model = vitrefine.create("vit_tiny_patch16_224+cb_s", depth=2, img_size=32)
    for number, block in enumerate(model.blocks):  # type: ignore[arg-type, union-attr]
        block.mlp.broadcast.scale.data.fill_(number + 1)
    found = broadcast_scales(model)
    assert found is not None
    assert [profile.means for profile in found] == [[1, 1], [1, 2]]
    assert broadcast_scales(vitrefine.create("vit_tiny_patch16_224", depth=1)) is None


def test_a_spectrum_against_a_loop() -> None:
    kernel = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0)).double()
    found = kernel_spectrum(kernel, steps=5)
    for u in range(5):
        for v in range(5):
            total = sum(
                kernel[1, a, b].item() * complex(math.cos(phase), -math.sin(phase))
                for a in range(3)
                for b in range(3)
                for phase in [math.pi / 4 * (u * a + v * b)]
            )
            assert found[1, u, v].item() == pytest.approx(abs(total), abs=1e-12)


def test_a_refiner_that_has_learned_nothing_has_gain_one() -> None:
    spectra = kernel_spectra(vitrefine.create("vit_tiny_patch16_224+refiner", depth=2))
    assert spectra is not None
    for gain in spectra.gains:
        torch.testing.assert_close(gain, torch.ones_like(gain))
    assert "1.000" in str(spectra)
    spectra.plot()


def test_uniform_merging_reads_a_square() -> None:
    """Three mergings of 2×2 without offsets: the 8×8 tokens below the output token, each once."""
    layers = [merging(torch.zeros(1, 8, side, side)) for side in (16, 8, 4)]
    points = sampling_points(layers, (1, 2))
    assert len(points) == 4**3
    expected = {(float(y), float(x)) for y in range(8, 16) for x in range(16, 24)}
    assert {tuple(point) for point in points.tolist()} == expected


def test_offsets_add_up_on_the_way_down() -> None:
    """Everything one token to the right in each of two mergings: two in the upper one's tokens are four below."""
    shifted = torch.zeros(1, 8, 4, 4)
    shifted[:, 1::2] = 1  # dx of all taps
    points = sampling_points([merging(torch.zeros(1, 8, 8, 8)), merging(shifted)], (0, 0))
    assert points[:, 1].tolist() == [float(x) for x in (2, 3, 2, 3, 4, 5, 4, 5, 2, 3, 2, 3, 4, 5, 4, 5)]
    assert points[:, 0].max() == 3
    lengths = offset_lengths([merging(shifted), merging(3 * shifted)])
    assert lengths.means == [2.0]
    with pytest.raises(UserError, match="is not in the map of 4×4"):
        sampling_points([merging(shifted)], (4, 0))


def test_points_in_pixels() -> None:
    picture = sampling_picture([merging(torch.zeros(1, 8, 4, 4))], torch.rand(3, 32, 32), [(0, 0)])
    assert sorted(map(tuple, picture.points[0].tolist())) == [(1.5, 1.5), (1.5, 5.5), (5.5, 1.5), (5.5, 5.5)]
    assert "1 tokens of 4 points" in str(picture)
    picture.plot()


@pytest.mark.parametrize(
    ("spec", "arguments", "count"),
    [
        ("lit_ti", {"img_size": 64}, 3),
        (
            "swin_tiny_patch4_window7_224+dtm",
            {"img_size": 56, "depths": (1, 1), "num_heads": (2, 2), "embed_dim": 8},
            1,
        ),
        ("pvt_v2_b0+dtm", {"depths": (1, 1, 1, 1)}, 3),
    ],
)
def test_offsets_of_models(spec: str, arguments: dict, count: int) -> None:
    torch.manual_seed(0)
    model = disturb(vitrefine.create(spec, **arguments).eval())
    size = arguments.get("img_size", 64)
    with torch.no_grad(), capture_offsets(model) as mergings:
        model(torch.randn(2, 3, size, size))
    assert len(mergings.found) == count
    taps = math.prod(math.prod(m.kernel) for m in mergings.found)
    points = sampling_points(mergings.found, (0, 0), image=1)
    assert points.shape == (taps, 2)
    assert offset_lengths(mergings.found).means[0] > 0
