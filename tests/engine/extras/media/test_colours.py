"""Bring colours of files to sRGB as they say, or log a line."""

import io
import struct

import numpy as np
import pytest
from PIL import Image, ImageCms
from zerowaste_vae.engine import log
from zerowaste_vae.engine.extras.media.clips import Clip
from zerowaste_vae.engine.extras.media.colours import MATRICES, srgb_table, transform, unconverted


@pytest.fixture(autouse=True)
def _anew():
    log._said.clear()


def profile(red, green, blue, gamma):
    """A matrix profile: the primaries' XYZ under D50, and one exponent."""
    fixed = lambda value: struct.pack(">i", round(value * 65536))  # noqa: E731
    xyz = lambda values: b"XYZ \0\0\0\0" + b"".join(map(fixed, values))  # noqa: E731
    curve = b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256)) + b"\0\0"
    tags = {b"rXYZ": xyz(red), b"gXYZ": xyz(green), b"bXYZ": xyz(blue), b"wtpt": xyz((0.9642, 1, 0.8249)),
            b"rTRC": curve, b"gTRC": curve, b"bTRC": curve, b"cprt": b"text\0\0\0\0none\0\0\0\0",
            b"desc": b"desc\0\0\0\0" + struct.pack(">I", 5) + b"test\0" + b"\0" * 78}  # fmt: skip
    at, table, data = 132 + 12 * len(tags), struct.pack(">I", len(tags)), b""
    for name, value in tags.items():
        value += b"\0" * (-len(value) % 4)
        table, data = table + name + struct.pack(">II", at + len(data), len(value)), data + value
    head = struct.pack(">I4sI4s4s4s", 128 + len(table) + len(data), b"none", 0x02100000, b"mntr", b"RGB ", b"XYZ ")
    head += b"\0" * 12 + b"acsp" + b"\0" * 28 + fixed(0.9642) + fixed(1) + fixed(0.8249)
    return head.ljust(128, b"\0") + table + data


ADOBE = profile((0.60974, 0.31111, 0.01947), (0.20528, 0.62567, 0.06087), (0.14919, 0.06322, 0.74457), 2.19922)
PLAIN = profile((0.43607, 0.22249, 0.01392), (0.38515, 0.71687, 0.09708), (0.14307, 0.06061, 0.71410), 2.2)


def picture():
    """[48, 64, 3] inside all of the spaces below."""
    y, x = np.mgrid[0:48, 0:64]
    return (64 + np.stack([x * 2, y * 127 // 47, (x + y) % 128], -1)).astype(np.uint8)


def read(path, colours=3):
    return next(Clip(path, colours).integers()).astype(int)


@pytest.mark.parametrize("suffix", ["png", "tif", "webp"])
def test_a_profile_is_applied(tmp_path, caplog, suffix):
    """The file holds AdobeRGB's numbers for the colours of `picture`."""
    srgb = ImageCms.createProfile("sRGB")
    wide = ImageCms.ImageCmsProfile(io.BytesIO(ADOBE))
    stored = ImageCms.profileToProfile(Image.fromarray(picture()), srgb, wide)
    assert np.abs(np.asarray(stored).astype(int) - picture()).max() > 20
    path = tmp_path / f"a.{suffix}"
    stored.save(path, icc_profile=ADOBE, lossless=True)
    assert np.abs(read(path) - picture()).max() <= 3 and not caplog.records
    stored.putalpha(77)
    stored.save(path, icc_profile=ADOBE, lossless=True)
    with_alpha = read(path, 4)
    assert np.abs(with_alpha[..., :3] - picture()).max() <= 3 and (with_alpha[..., 3] == 77).all()


def test_srgbs_own_profiles_move_nothing(tmp_path, caplog):
    for icc in (ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes(),):
        Image.fromarray(picture()).save(tmp_path / "a.png", icc_profile=icc)
        assert np.array_equal(read(tmp_path / "a.png"), picture()) and not caplog.records
        assert transform(icc, "RGB") is None
    assert transform(PLAIN, "RGB") is not None  # gamma 2.2 is not sRGB's curve in the shadows


def test_printing_colours_and_lab(tmp_path, caplog):
    image = Image.fromarray(picture())
    image.convert("CMYK").save(tmp_path / "a.tif")
    assert np.abs(read(tmp_path / "a.tif") - picture()).max() <= 2
    assert "a.tif: its printing colours (CMYK) have no profile" in caplog.text
    to_lab = ImageCms.buildTransform(ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), "RGB", "LAB")
    ImageCms.applyTransform(image, to_lab).save(tmp_path / "lab.tif")
    assert np.abs(read(tmp_path / "lab.tif") - picture()).max() <= 8  # of 8 bits of LAB


@pytest.mark.parametrize("icc", [b"no profile", PLAIN[:200]])
def test_a_profile_that_cannot_be_used_is_said(tmp_path, caplog, icc):
    Image.fromarray(picture()).save(tmp_path / "a.png", icc_profile=icc)
    assert np.array_equal(read(tmp_path / "a.png"), picture())
    assert "a.png: its colour profile cannot be used" in caplog.text


def test_a_profile_beside_16_bits_is_said(tmp_path, caplog):
    gray = Image.fromarray(picture()[..., 0].astype(np.uint16) * 257)
    icc = profile((0.9642, 1, 0.8249), (0.2, 0.6, 0.06), (0.1, 0.1, 0.7), 1.0)
    gray.save(tmp_path / "a.png", icc_profile=icc)
    read(tmp_path / "a.png")
    assert "a.png: its colour profile" in caplog.text


def with_chunk(path, kind, data):
    """A PNG with one chunk more, behind its head."""
    import zlib

    raw = path.read_bytes()
    chunk = struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    path.write_bytes(raw[:33] + chunk + raw[33:])


def to_linear(pixels):
    value = pixels / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


@pytest.mark.parametrize(("kind", "data"), [(b"gAMA", struct.pack(">I", 100000)), (b"cICP", bytes([1, 8, 0, 1]))])
def test_linear_light_in_a_png(tmp_path, caplog, kind, data):
    Image.fromarray(np.round(to_linear(picture()) * 255).astype(np.uint8)).save(tmp_path / "a.png")
    with_chunk(tmp_path / "a.png", kind, data)
    assert np.abs(read(tmp_path / "a.png") - picture()).max() <= 8 and not caplog.records  # of 8 bits of light


@pytest.mark.parametrize(("data", "says"), [((9, 16), "is HDR"), ((12, 13), "Display P3"), ((1, 13), None)])
def test_what_a_png_says_by_numbers(tmp_path, caplog, data, says):
    Image.fromarray(picture()).save(tmp_path / "a.png")
    with_chunk(tmp_path / "a.png", b"cICP", bytes([*data, 0, 1]))
    assert np.array_equal(read(tmp_path / "a.png"), picture())
    assert says in caplog.text if says else not caplog.records


def test_srgbs_gamma_moves_nothing(tmp_path, caplog):
    Image.fromarray(picture()).save(tmp_path / "a.png")
    with_chunk(tmp_path / "a.png", b"gAMA", struct.pack(">I", 45455))
    assert np.array_equal(read(tmp_path / "a.png"), picture()) and not caplog.records
    chroma = struct.pack(">8I", 31270, 32900, 68000, 32000, 26500, 69000, 15000, 6000)
    with_chunk(tmp_path / "a.png", b"cHRM", chroma)
    read(tmp_path / "a.png")
    assert "a.png: its primaries are not sRGB's" in caplog.text


def test_adobe_rgb_by_exif(tmp_path, caplog):
    exif = Image.Exif()
    exif[0x8769] = {0xA001: 2}
    Image.fromarray(picture()).save(tmp_path / "a.jpg", exif=exif)
    read(tmp_path / "a.jpg")
    assert "a.jpg: its EXIF names AdobeRGB" in caplog.text


@pytest.mark.parametrize(
    ("transfer", "primaries", "says"),
    [
        (1, 1, []), (2, 2, []), (6, 6, []), (13, 5, []), (14, 1, []), (8, 1, []),
        (16, 9, ["is HDR"]), (18, 9, ["is HDR"]), (1, 9, ["BT.2020"]), (13, 12, ["Display P3"]), (4, 1, ["gamma 2.2"]),
        (99, 1, ["unknown transfer (99)"]), (1, 99, ["unknown primaries (99)"]), (9, 10, ["logarithmic", "XYZ"]),
    ],
)  # fmt: skip
def test_what_is_not_converted_is_said(transfer, primaries, says):
    lines = list(unconverted(transfer, primaries))
    assert len(lines) == len(says) and all(part in line for part, line in zip(says, lines, strict=True))


def test_tables():
    for levels in (256, 65536):
        table = srgb_table(levels)
        assert (table[0], table[-1], table.itemsize) == (0, levels - 1, 1 if levels == 256 else 2)
    assert abs(int(srgb_table(256, 2.2)[128]) - 128) < 3
    assert set(MATRICES.values()) == {1, 4, 5, 7, 9}
