"""Pictures known by their content, of several sizes, very large ones, and with alpha."""

import io

import numpy as np
import pytest
from PIL import Image
from zerowaste_vae.engine import InputError, log
from zerowaste_vae.engine.extras.media import pictures
from zerowaste_vae.engine.extras.media.clips import Clip

av = pytest.importorskip("av", reason="the package av is not installed")


@pytest.fixture(autouse=True)
def _anew():
    log._said.clear()


def exif(orientation=None):
    made = Image.Exif()
    made[0x110] = "Camera"
    if orientation:
        made[0x0112] = orientation
    return made


def gray(size=(96, 64), value=90):
    return Image.new("RGB", size, (value,) * 3)


@pytest.mark.parametrize("name", ["photo.jfif", "photo.jpe", "photo", "photo.dat", "photo.mp4"])
def test_photo_known_by_content(tmp_path, caplog, name):
    """With EXIF, which FFmpeg hands over in a form that PyAV has no name for."""
    gray().save(tmp_path / name, "JPEG", exif=exif(6))
    frames = list(Clip(tmp_path / name))
    assert [tuple(f.shape) for f in frames] == [(96, 64, 3)] and not caplog.records  # turned upright


def test_rows_of_jpegs_are_videos(tmp_path):
    buffer = io.BytesIO()
    gray().save(buffer, "JPEG")
    (tmp_path / "a.mjpeg").write_bytes(buffer.getvalue() * 3)
    assert len(list(Clip(tmp_path / "a.mjpeg"))) == 3


@pytest.mark.parametrize(("name", "side"), [("a.ico", 256), ("a.icns", 1024)])
def test_the_largest_of_several_sizes(tmp_path, caplog, name, side):
    gray((256, 256)).save(tmp_path / name, sizes=[(16, 16), (256, 256), (64, 64)])
    frame = next(iter(Clip(tmp_path / name)))
    assert tuple(frame.shape) == (side, side, 3) and (frame == 90).all()
    assert f"{name}: holds" in caplog.text and f"the largest is read ({side}x{side})" in caplog.text


def test_picture_size_limit(tmp_path, monkeypatch, recwarn):
    """Pillow's own limit and its text are not used."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # Pillow warns above this and refuses twice as much
    for width in (40, 70, 3000):
        gray((width, 30)).save(tmp_path / "a.png")
        assert next(iter(Clip(tmp_path / "a.png"))).shape == (30, width, 3)
    assert Image.MAX_IMAGE_PIXELS == 1000 and not recwarn.list
    monkeypatch.setattr(pictures, "LARGEST", 80_000)
    with pytest.raises(InputError, match=r"a\.png: 3000x30 is more than 0 million pixels; scale it down or cut it"):
        list(Clip(tmp_path / "a.png"))


def test_memory_that_runs_out_is_one_line(tmp_path, monkeypatch):
    gray().save(tmp_path / "a.png")

    def none(*_, **__):
        raise MemoryError

    monkeypatch.setattr(Image.Image, "convert", none)
    with pytest.raises(InputError, match=r"a\.png: cannot be read as an image \(not enough memory\)"):
        list(Clip(tmp_path / "a.png"))


def test_alpha_where_it_is_asked_for(tmp_path, caplog):
    colours = np.full((8, 12, 4), (200, 100, 50, 255), np.uint8)
    colours[:, :6, 3] = 30
    Image.fromarray(colours).save(tmp_path / "1.png")
    gray((12, 8)).save(tmp_path / "2.png")
    Image.fromarray(colours[..., :3]).quantize(4).save(tmp_path / "3.png", transparency=0)
    Image.new("LA", (12, 8), (7, 9)).save(tmp_path / "4.png")
    frames = [f.numpy() for f in Clip(tmp_path, colours=4)]
    assert not caplog.records
    assert np.array_equal(frames[0], colours) and (frames[1][..., 3] == 255).all()
    assert (frames[2][..., 3] == 0).all() and (frames[3] == (7, 7, 7, 9)).all()
    Image.fromarray(np.full((8, 12), 40000, np.uint16)).save(tmp_path / "deep.png")
    assert tuple(next(Clip(tmp_path / "deep.png", 4).integers())[0, 0]) == (40000,) * 3 + (65535,)
    assert next(iter(Clip(tmp_path / "1.png"))).shape == (8, 12, 3)
    assert "1.png: transparency is dropped" in caplog.text


@pytest.mark.parametrize(("value", "read"), [(0, True), (65535, True), (65536, False), (-1, False)])
def test_whole_numbers_of_32_bit(tmp_path, value, read):
    """Of unknown range where they are no 16-bit ones."""
    Image.fromarray(np.full((8, 12), value, np.int32)).save(tmp_path / "a.tif")
    if read:
        assert (next(Clip(tmp_path / "a.tif").integers()) == value).all()
    else:
        with pytest.raises(InputError, match=r"a\.tif: image of 32-bit whole numbers"):
            next(Clip(tmp_path / "a.tif").integers())
