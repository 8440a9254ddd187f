"""Clips and images that are not what they look like: mirrored, cut off, or said in a line."""

import os
import struct
from fractions import Fraction

import numpy as np
import pytest
from PIL import Image
from zerowaste_vae.engine import InputError, log
from zerowaste_vae.engine.extras.media.clips import Clip
from zerowaste_vae.engine.extras.media.mp4_finish import check_audio

av = pytest.importorskip("av", reason="the package av is not installed")

ONE = 1 << 16


@pytest.fixture(autouse=True)
def _anew():
    log._said.clear()


def corners():
    """Four grey levels, [32, 48, 3]."""
    picture = np.zeros((32, 48, 3), np.uint8)
    picture[:16, :24], picture[:16, 24:], picture[16:, :24] = 240, 160, 80
    return picture


def write(path, count=3, codec="libx264", pixels="yuv420p", streams=1, options=None, given="rgb24", **settings):
    picture = corners()
    if given == "rgba":
        picture = np.dstack([picture, np.full(picture.shape[:2], 128, np.uint8)])
    with av.open(str(path), "w") as container:
        made = [container.add_stream(codec, rate=25, options=options or {}) for _ in range(streams)]
        for stream in made:
            stream.height, stream.width, stream.pix_fmt = 32, 48, pixels
            for name, value in settings.items():
                setattr(stream.codec_context, name, value)
        for stream in made:
            for index in range(count):
                frame = av.VideoFrame.from_ndarray(picture, format=given).reformat(format=pixels)
                frame.pts = index
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))


@pytest.mark.parametrize(
    ("matrix", "shown"),
    [
        ((ONE, 0, 0, ONE), lambda p: p),
        ((0, ONE, -ONE, 0), lambda p: np.rot90(p, -1)),
        ((-ONE, 0, 0, -ONE), lambda p: np.rot90(p, 2)),
        ((0, -ONE, ONE, 0), lambda p: np.rot90(p)),
        ((-ONE, 0, 0, ONE), np.fliplr),
        ((ONE, 0, 0, -ONE), np.flipud),
        ((0, ONE, ONE, 0), lambda p: p.transpose(1, 0, 2)),
        ((0, -ONE, -ONE, 0), lambda p: np.rot90(p, 2).transpose(1, 0, 2)),
    ],
)
def test_rotation_and_mirroring(tmp_path, matrix, shown):
    """Frames are upright, as players show them."""
    write(tmp_path / "a.mp4")
    data = (tmp_path / "a.mp4").read_bytes()
    start = data.index(b"tkhd") + 4 + 40
    a, b, c, d = matrix
    own = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    (tmp_path / "a.mp4").write_bytes(data[:start] + own + data[start + 36 :])
    expected = shown(corners())
    for pixels in Clip(tmp_path / "a.mp4").integers():
        assert pixels.shape == expected.shape
        for y, x in ((8, 8), (8, -8), (-8, 8), (-8, -8)):
            assert abs(int(pixels[y, x, 0]) - int(expected[y, x, 0])) < 8


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("plain.mp4", {}, None),
        ("two.mkv", {"streams": 2}, "holds 2 video streams; the first is read"),
        ("alpha.mkv", {"codec": "ffv1", "pixels": "bgra", "given": "rgba"}, "transparency is dropped"),
        ("fields.mp4", {"options": {"x264-params": "tff=1"}}, "is interlaced"),
        ("wide.mp4", {"sample_aspect_ratio": Fraction(4, 3)}, "its pixels are not square (4/3)"),
        ("hdr.mp4", {"pixels": "yuv420p10le", "color_trc": 16}, "is HDR"),
    ],
)
def test_what_frames_do_not_show_is_said_once(tmp_path, caplog, name, settings, says):
    write(tmp_path / name, **settings)
    clip = Clip(tmp_path / name)
    assert len(list(clip)) == len(list(clip)) == 3
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (says is not None) and all(f"{name}: {says}" in line for line in said), said


def test_a_matroska_that_is_cut_off_is_said(tmp_path, caplog):
    write(tmp_path / "a.mkv", 100, codec="ffv1", options={"g": "1"})
    assert len(list(Clip(tmp_path / "a.mkv"))) == 100 and not caplog.records
    data = (tmp_path / "a.mkv").read_bytes()
    (tmp_path / "a.mkv").write_bytes(data[: len(data) // 2])
    assert 0 < len(list(Clip(tmp_path / "a.mkv"))) < 75
    assert "a.mkv: announces 4.0 seconds, its frames end at" in caplog.text


def test_images_that_hold_more_than_is_read(tmp_path, caplog):
    picture = Image.fromarray(corners())
    (tmp_path / "folder").mkdir()
    for name, source in (("folder/a.webp", "folder"), ("a.tif", "a.tif")):  # an animation is a clip by itself alone
        picture.save(tmp_path / name, save_all=True, append_images=[picture.transpose(Image.Transpose.ROTATE_180)])
        assert len(list(Clip(tmp_path / source))) == 1
        assert f"{name}: holds 2 pictures, and only the first is read" in caplog.text
    context = av.CodecContext.create("png", "w")
    context.width, context.height, context.pix_fmt, context.time_base = 48, 32, "rgb48be", Fraction(1, 25)
    deep = av.VideoFrame.from_ndarray(corners().astype(np.uint16) * 257, format="rgb48le").reformat(format="rgb48be")
    (tmp_path / "deep.png").write_bytes(b"".join(map(bytes, context.encode(deep))))
    assert np.array_equal(next(Clip(tmp_path / "deep.png").integers()), corners())
    assert "deep.png: 8 of its 16 bits per channel are read" in caplog.text


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ((1, 2, 3, 4), None),
        ((10, 20, 30, 40), None),
        ((7,), None),
        ((1, 2, 4, 5), "f2.png is followed by f4.png"),
        ((98, 99, 100, 102), "f100.png is followed by f102.png"),
    ],
)
def test_a_number_that_lacks_is_said(tmp_path, caplog, numbers, says):
    for number in numbers:
        Image.new("RGB", (4, 4)).save(tmp_path / f"f{number}.png")
    assert Clip(tmp_path).count == len(numbers)
    assert (says in caplog.text) if says else not caplog.records


def test_a_frame_that_is_there_twice_is_said(tmp_path, caplog):
    for name in ("f1.png", "f2.jpg", "f2.png", "f3.png"):
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    assert Clip(tmp_path).count == 4 and "f2.jpg is followed by f2.png" in caplog.text


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.mp4")
    with pytest.raises(InputError, match=r"a\.mp4: is a pipe or a device"):
        Clip(tmp_path / "a.mp4")
    with pytest.raises(InputError, match=r"a\.mp4: is a pipe or a device"):
        check_audio(tmp_path / "a.mp4")


def test_trimmed_clip(tmp_path, caplog):
    """An edit list shows a part of what the file holds."""
    write(tmp_path / "a.mp4", 30)
    data = bytearray((tmp_path / "a.mp4").read_bytes())
    place = data.index(b"elst") + 12
    lasts, begins = struct.unpack(">Ii", data[place : place + 8])
    with av.open(str(tmp_path / "a.mp4")) as container:
        ten = int(10 / 25 / container.streams.video[0].time_base)
    data[place : place + 8] = struct.pack(">Ii", lasts * 20 // 30, begins + ten)
    (tmp_path / "b.mp4").write_bytes(data)
    assert Clip(tmp_path / "a.mp4").count == 30
    clip = Clip(tmp_path / "b.mp4")
    assert clip.count == len(list(clip)) == 20 and not caplog.records
