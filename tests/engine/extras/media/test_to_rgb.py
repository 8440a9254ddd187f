"""Frames to RGB: matrices, linear light, alpha, and side data that PyAV has no name for."""

import io
from fractions import Fraction

import numpy as np
import pytest
from PIL import Image
from zerowaste_vae.engine import InputError, log
from zerowaste_vae.engine.extras.media.clips import Clip

av = pytest.importorskip("av", reason="the package av is not installed")


@pytest.fixture(autouse=True)
def _anew():
    log._said.clear()


def write(path, pixels="yuv444p", codec="ffv1", samples=(100, 50, 200), **context):
    with av.open(str(path), "w") as out:
        stream = out.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, pixels
        for name, value in context.items():
            setattr(stream.codec_context, name, value)
        for index in range(2):
            frame = av.VideoFrame(64, 48, pixels)
            for plane, value in zip(frame.planes, samples, strict=True):
                plane.update(bytes([value]) * plane.buffer_size)
            frame.colorspace, frame.color_range = context.get("colorspace", 2), context.get("color_range", 1)
            frame.pts = index
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))


@pytest.mark.parametrize(
    ("matrix", "called"),
    [(0, "RGB in the places of YUV"), (8, "YCgCo"), (10, "BT.2020 with constant luminance"), (14, "ICtCp")],
)
def test_unconvertible_matrices(tmp_path, matrix, called):
    write(tmp_path / "a.mkv", colorspace=matrix, color_range=2)
    with pytest.raises(InputError, match=f"a.mkv: its colours are stored as {called}, which cannot be read here; "):
        list(Clip(tmp_path / "a.mkv"))


def test_rgb_that_cannot_be_is_said(tmp_path, caplog):
    """Halved colours are never RGB, whatever the tag."""
    write(tmp_path / "a.mkv", "yuv420p", colorspace=0)
    write(tmp_path / "b.mkv", "yuv420p", colorspace=5)
    assert all(map(np.array_equal, Clip(tmp_path / "a.mkv").integers(), Clip(tmp_path / "b.mkv").integers()))
    assert [r.getMessage().partition("a.mkv: ")[2] for r in caplog.records] == [
        "frame 0 says that it is RGB, which it is not; its colours are taken as YUV's"
    ]


@pytest.mark.parametrize("pixels", ["gbrp", "bgra", "gray"])
def test_rgb_and_gray_matrices(tmp_path, pixels):
    planes = {"gbrp": (10, 20, 30), "bgra": (77,), "gray": (77,)}[pixels]
    path = tmp_path / ("a.avi" if pixels == "gbrp" else "a.mkv")
    write(path, pixels, "utvideo" if pixels == "gbrp" else "ffv1", samples=planes, color_range=2)
    expected = {"gbrp": (30, 10, 20)}.get(pixels, (77, 77, 77))
    assert tuple(next(Clip(path).integers())[5, 5]) == expected


@pytest.mark.parametrize(("name", "primaries", "transfer", "says"), [
    ("a", 9, 14, "a.mkv: its colours are of BT.2020"), ("b", 12, 13, "Display P3"), ("c", 9, 16, "is HDR"),
    ("d", 1, 5, "gamma 2.8"), ("e", 1, 1, None), ("f", 5, 6, None),
])  # fmt: skip
def test_unconverted_colours_said(tmp_path, caplog, name, primaries, transfer, says):
    write(tmp_path / f"{name}.mkv", colorspace=1, color_primaries=primaries, color_trc=transfer)
    list(Clip(tmp_path / f"{name}.mkv"))
    assert len(caplog.records) == (says is not None) and (says or "") in caplog.text


def light(path, values, codec="exr"):
    """A picture of floats: one value each of green, blue and red."""
    with av.open(str(path), "w", format="image2", options={"update": "1"}) as out:
        stream = out.add_stream(codec, rate=1)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "gbrpf32le"
        frame = av.VideoFrame(96, 64, "gbrpf32le")
        for plane, value in zip(frame.planes, values, strict=True):
            plane.update(np.full(plane.buffer_size // 4, value, np.float32).tobytes())
        for packet in (*stream.encode(frame), *stream.encode(None)):
            out.mux(packet)


@pytest.mark.parametrize("suffix", ["exr", "hdr"])
def test_linear_light_becomes_srgb(tmp_path, caplog, suffix):
    """0.2140 of the light is the middle of sRGB, 0.0331 its value 51."""
    light(tmp_path / f"a.{suffix}", (0.2140, 0.0331, 1.0), suffix)
    pixels = next(Clip(tmp_path / f"a.{suffix}").integers())
    assert np.abs(pixels[9, 9] / 65535 * 255 - (255, 127.5, 51)).max() < 2 and not caplog.records
    light(tmp_path / f"b.{suffix}", (0.2140, 0.0331, 3.0), suffix)
    assert np.abs(next(Clip(tmp_path / f"b.{suffix}").integers())[9, 9] / 65535 - (1, 0.5, 0.2)).max() < 0.02
    assert f"b.{suffix}: frame 0 has light beyond white, which is cut off there" in caplog.text


def test_alpha_of_videos(tmp_path, caplog):
    picture = np.full((32, 48, 4), (240, 120, 60, 30), np.uint8)
    with av.open(str(tmp_path / "a.mkv"), "w") as out:
        stream = out.add_stream("ffv1", rate=25)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "bgra"
        frame = av.VideoFrame.from_ndarray(picture, format="rgba").reformat(format="bgra")
        frame.pts = 0
        out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    assert np.array_equal(next(Clip(tmp_path / "a.mkv", 4).integers()), picture) and not caplog.records
    assert np.array_equal(next(Clip(tmp_path / "a.mkv").integers()), picture[..., :3])
    assert "transparency is dropped" in caplog.text
    for pixels, full in (("yuv420p", 255), ("yuv420p10le", 65535)):
        write(tmp_path / "b.mkv", pixels, color_range=1)
        opaque = next(Clip(tmp_path / "b.mkv", 4).integers())
        assert opaque.shape == (48, 64, 4) and (opaque[..., 3] == full).all()
        assert np.array_equal(opaque[..., :3], next(Clip(tmp_path / "b.mkv").integers()))


@pytest.mark.parametrize("clear", [False, True])
def test_transparency_of_a_gif_is_said(tmp_path, caplog, clear):
    """All frames of a GIF have an alpha channel; some have places that nothing covers."""
    frames = [Image.new("RGB", (12, 8), (200, 0, 0)).quantize(4) for _ in range(2)]
    frames[1].putpixel((0, 0), 1)
    told = {"transparency": 0, "disposal": 2} if clear else {}
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:], **told)
    assert len(list(Clip(tmp_path / "a.gif").integers())) == 2
    assert ("a.gif: frame 0 has transparency, which is dropped" in caplog.text) == clear
    caplog.clear()
    log._said.clear()
    assert next(Clip(tmp_path / "a.gif", 4).integers())[..., 3].min() == (0 if clear else 255) and not caplog.records


@pytest.mark.parametrize("orientation", [None, 2, 6])
def test_unnamed_side_data(tmp_path, orientation):
    """EXIF on frames, which newer FFmpegs hand over: pictures stay upright."""
    exif = Image.Exif()
    exif[0x110] = "Camera"
    if orientation:
        exif[0x0112] = orientation
    pixels = np.zeros((48, 64, 3), np.uint8)
    pixels[:24, :32] = 240
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", exif=exif, quality=95)
    with av.open(str(tmp_path / "a.avi"), "w") as out:
        stream = out.add_stream("mjpeg", rate=24)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
        for index in range(3):
            packet = av.Packet(buffer.getvalue())
            packet.stream, packet.pts, packet.dts, packet.time_base = stream, index, index, Fraction(1, 24)
            packet.is_keyframe = True
            out.mux(packet)
    expected = {None: pixels, 2: pixels[:, ::-1], 6: np.rot90(pixels, -1)}[orientation]
    frames = list(Clip(tmp_path / "a.avi").integers())
    assert len(frames) == 3
    if frames[0].shape == pixels.shape and orientation == 6:
        expected = pixels  # FFmpegs that leave EXIF alone show it lying
    assert np.abs(frames[0].astype(int) - expected).mean() < 4
