"""Images as they come: grey, transparent, deep, turned, cut short."""

import io

import numpy as np
import pytest
from PIL import Image

from vitrefine.data.picture import BrokenImage, read_picture


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


NOISE = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
def test_every_mode_becomes_rgb(mode):
    image = Image.fromarray(NOISE).convert(mode)
    picture = read_picture(encoded(image, "JPEG" if mode in ("CMYK", "YCbCr") else "PNG"))
    assert (picture.mode, picture.size) == ("RGB", (30, 20))
    if mode in ("RGB", "RGBA"):
        assert np.array_equal(np.asarray(picture), NOISE)


def test_sixteen_bits_are_scaled_and_not_clipped():
    values = np.arange(600, dtype=np.uint16).reshape(20, 30) * 100
    picture = np.asarray(read_picture(encoded(Image.fromarray(values))))
    assert np.array_equal(picture[..., 0], values >> 8)


def test_integers_of_few_values_stay():
    values = np.arange(200, dtype=np.int32).reshape(10, 20)
    picture = np.asarray(read_picture(encoded(Image.fromarray(values), "TIFF")))
    assert np.array_equal(picture[..., 1], values)


@pytest.mark.parametrize("scale", [1, 255])
def test_decimals_are_scaled_and_not_clipped(scale):
    values = np.arange(200, dtype=np.float32).reshape(10, 20) / 199
    values[0, 0] = np.nan
    picture = np.asarray(read_picture(encoded(Image.fromarray(values * scale), "TIFF")))
    assert np.array_equal(picture[..., 2], (np.nan_to_num(values) * 255).astype(np.uint8))


def test_a_palette_with_transparency():
    image = Image.fromarray(NOISE).quantize(8)
    assert read_picture(encoded(image, transparency=b"\x00\x80\xff")).mode == "RGB"


def test_exif_rotation_is_undone():
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright: turn by 90° clockwise to view
    picture = read_picture(encoded(Image.fromarray(NOISE), exif=exif))
    assert np.array_equal(np.asarray(picture), np.rot90(NOISE, -1))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"hello, I am a text", "not an image"),
        (encoded(Image.fromarray(NOISE), "JPEG")[:-80], "truncated"),
        (encoded(Image.fromarray(NOISE))[:-200], "truncated"),
        (encoded(Image.fromarray(NOISE))[:60] + b"\x00" * 4000, "damaged|truncated"),
    ],
)
def test_broken_images_say_why(content, reason, tmp_path):
    with pytest.raises(BrokenImage, match=reason):
        read_picture(content)
    (tmp_path / "image.png").write_bytes(content)
    with pytest.raises(BrokenImage, match=reason):
        read_picture(tmp_path / "image.png")


def test_a_picture_of_too_many_pixels(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(BrokenImage, match="too large"):
        read_picture(encoded(Image.fromarray(NOISE)))


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(BrokenImage, match="missing"):
        read_picture(tmp_path / "none.png")
    with pytest.raises(BrokenImage, match="not readable"):
        read_picture(tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP"])
def test_any_damage_is_borne(kind):
    if kind.lower() not in {name.lower() for name in Image.registered_extensions().values()}:
        pytest.skip(f"this Pillow has no {kind}")
    whole, chance = encoded(Image.fromarray(NOISE), kind), np.random.default_rng(0)
    for _ in range(300):
        harmed = bytearray(whole)
        for place in chance.integers(min(len(harmed), 400), size=3):
            harmed[place] = chance.integers(256)
        try:
            assert read_picture(bytes(harmed)).mode == "RGB"
        except BrokenImage:
            continue


def test_any_cut_is_whole_or_broken():
    whole = encoded(Image.fromarray(NOISE), "JPEG")
    for length in range(0, len(whole), 7):
        try:
            assert read_picture(whole[:length]).size == (30, 20)
        except BrokenImage:
            continue
