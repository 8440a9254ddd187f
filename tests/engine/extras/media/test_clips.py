"""Clips written and read back: colours, sizes, order, and every kind of damaged input."""

import builtins
import errno
import io
import os
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from PIL import Image
from zerowaste_vae.engine import InputError, log
from zerowaste_vae.engine.extras.media.clips import DEFAULT_FPS, Clip, natural_key, read_video
from zerowaste_vae.engine.extras.media.mp4 import write_mp4
from zerowaste_vae.engine.extras.media.pngs import write_png_folder

av = pytest.importorskip("av", reason="the package av is not installed")


def moving_ramp(count=9, height=48, width=64):
    """Smooth colours that move, so that chroma subsampling costs little."""
    f, y, x = torch.meshgrid(*(torch.arange(n, dtype=torch.float32) for n in (count, height, width)), indexing="ij")
    return torch.stack([(x + f) / (width + count), y / height, 0.5 + 0.4 * torch.sin((x - y + f) / 20)], -1)


def psnr(a, b):
    return float(-10 * torch.log10((a - b).square().mean()))


def encode_yuv(path, planes, pix_fmt, matrix, full_range, rate=25, codec="libx264", options=None):
    """Frames [F, 3, H, W] of raw yuv444 samples, written losslessly with the given tags."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, options=options or {"crf": "0"})
        stream.height, stream.width = planes.shape[2:]
        stream.pix_fmt = pix_fmt
        stream.codec_context.colorspace = matrix
        stream.codec_context.color_range = 2 if full_range else 1
        for index, plane in enumerate(planes):
            frame = av.VideoFrame(planes.shape[3], planes.shape[2], pix_fmt)
            for target, samples in zip(frame.planes, plane, strict=True):
                rows = np.zeros((target.height, target.line_size), np.uint8)
                data = np.ascontiguousarray(samples).view(np.uint8)
                rows[:, : data.shape[1]] = data
                target.update(rows)
            frame.colorspace, frame.color_range = matrix, 2 if full_range else 1
            frame.pts = index
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def to_yuv(rgb, kr, kb, full_range, depth=8):
    """The standard's own formula (BT.709 clause 3, BT.601 clause 2.5): RGB [3] in 0..1 to sample values."""
    luma = kr * rgb[0] + (1 - kr - kb) * rgb[1] + kb * rgb[2]
    chroma = np.array([(rgb[2] - luma) / (2 * (1 - kb)), (rgb[0] - luma) / (2 * (1 - kr))])
    unit = 1 << (depth - 8)
    if full_range:
        return np.round([luma * 255 * unit, *(128 * unit + chroma * 255 * unit)])
    return np.round([(16 + 219 * luma) * unit, *((128 + 224 * chroma) * unit)])


def test_mp4_round_trip(tmp_path):
    clip = moving_ramp()
    write_mp4(tmp_path / "a.mp4", clip, Fraction(30000, 1001))
    back, fps = read_video(tmp_path / "a.mp4")
    assert back.shape == clip.shape and back.dtype == torch.float32 and fps == Fraction(30000, 1001)
    assert psnr(back, clip) > 38
    with av.open(str(tmp_path / "a.mp4")) as container:
        context = container.streams.video[0].codec_context
        assert (context.name, context.pix_fmt) == ("h264", "yuv420p")
        assert (context.colorspace, context.color_range) == (1, 1)
    assert [f.name for f in tmp_path.iterdir()] == ["a.mp4"]


def test_mp4_takes_uint8_and_iterables(tmp_path):
    clip = moving_ramp(5)
    write_mp4(tmp_path / "a.mp4", (frame.mul(255).round().byte() for frame in clip), 25)
    back, _ = read_video(tmp_path / "a.mp4")
    assert back.shape == clip.shape and psnr(back, clip) > 38


@pytest.mark.parametrize("colour", [(0.9, 0.1, 0.1), (0.1, 0.8, 0.2), (0.15, 0.2, 0.9), (1, 1, 1), (0, 0, 0)])
def test_written_colours_are_bt709(tmp_path, colour):
    write_mp4(tmp_path / "a.mp4", torch.tensor(colour).expand(2, 32, 32, 3), 25)
    with av.open(str(tmp_path / "a.mp4")) as container:
        frame = next(container.decode(video=0))
    samples = [np.frombuffer(plane, np.uint8)[0] for plane in frame.planes]
    assert np.abs(samples - to_yuv(colour, 0.2126, 0.0722, False)).max() <= 2


@pytest.mark.parametrize(
    ("matrix", "height", "kr", "kb"),
    [(1, 32, 0.2126, 0.0722), (5, 32, 0.299, 0.114), (2, 32, 0.299, 0.114), (2, 720, 0.2126, 0.0722)],
    ids=["bt709", "bt601", "untagged small", "untagged HD"],
)
@pytest.mark.parametrize("full_range", [False, True])
def test_read_colours_follow_the_tags(tmp_path, matrix, height, kr, kb, full_range):
    colour = (0.8, 0.25, 0.1)
    samples = to_yuv(colour, kr, kb, full_range).astype(np.uint8)
    planes = np.broadcast_to(samples[None, :, None, None], (2, 3, height, 32))
    encode_yuv(tmp_path / "a.mp4", planes, "yuv444p", matrix, full_range)
    frames, _ = read_video(tmp_path / "a.mp4")
    assert (frames - torch.tensor(colour)).abs().max() < 2.5 / 255


def test_ten_bits_are_kept(tmp_path):
    luma = np.arange(64, 940, dtype=np.uint16)[None].repeat(16, 0)[:, :864]
    planes = np.stack([luma, np.full_like(luma, 512), np.full_like(luma, 512)])[None]
    options = {"level": "3", "coder": "1"}
    encode_yuv(tmp_path / "a.mkv", planes, "yuv444p10le", 1, False, codec="ffv1", options=options)
    frames, _ = read_video(tmp_path / "a.mkv")
    assert frames[0, 0, :, 1].unique().numel() > 600  # 8 bits would leave 220 gray levels


@pytest.mark.parametrize(("height", "width"), [(33, 48), (32, 49), (33, 49), (1, 1)])
def test_odd_sizes_are_padded_and_said(tmp_path, caplog, height, width):
    log._said.clear()
    clip = moving_ramp(3, height, width)
    write_mp4(tmp_path / "a.mp4", clip, 25)
    back, _ = read_video(tmp_path / "a.mp4")
    assert back.shape[1:3] == (height + height % 2, width + width % 2)
    assert psnr(back[:, :height, :width], clip) > 30
    assert f"{width}x{height} is padded" in caplog.text


def test_rotated_video_is_turned_upright(tmp_path):
    frame = torch.zeros(1, 32, 64, 3)
    frame[:, :16, :32] = 1.0  # top left
    write_mp4(tmp_path / "a.mp4", frame, 25)
    data = (tmp_path / "a.mp4").read_bytes()
    start = data.index(b"tkhd") + 4 + 40  # version 0: the matrix is 40 bytes after the box type
    one = (1 << 16).to_bytes(4, "big")
    # x' = -y, y' = x: what points right is shown pointing down, a quarter turn clockwise.
    quarter = b"".join([bytes(4), one, bytes(4), (-(1 << 16)).to_bytes(4, "big", signed=True), bytes(16)])
    assert data[start : start + 4] == one
    (tmp_path / "a.mp4").write_bytes(data[:start] + quarter + data[start + 32 :])
    turned, _ = read_video(tmp_path / "a.mp4")
    assert turned.shape[1:3] == (64, 32)
    corner = turned[0, :32, 16:].mean()
    assert corner > 0.9 and turned.mean() < 0.3  # top right


def test_max_frames(tmp_path):
    write_mp4(tmp_path / "a.mp4", moving_ramp(9), 25)
    assert read_video(tmp_path / "a.mp4", 4)[0].shape[0] == 4
    with pytest.raises(InputError, match="at least 1"):
        read_video(tmp_path / "a.mp4", 0)


def test_png_folder_round_trip_is_exact(tmp_path):
    clip = torch.randint(0, 256, (12, 5, 7, 3), dtype=torch.uint8)
    write_png_folder(tmp_path / "frames", clip)
    back, fps = read_video(tmp_path / "frames")
    assert torch.equal(back.mul(255).round().byte(), clip) and fps == DEFAULT_FPS
    write_png_folder(tmp_path / "frames", clip[:2])  # the longer clip's frames must not survive
    assert read_video(tmp_path / "frames")[0].shape[0] == 2
    assert [f.name for f in tmp_path.iterdir()] == ["frames"]


def test_png_folder_keeps_foreign_files(tmp_path):
    (tmp_path / "holiday.jpg").write_bytes(b"precious")
    with pytest.raises(InputError, match=r"holiday\.jpg"):
        write_png_folder(tmp_path, moving_ramp(1))
    assert (tmp_path / "holiday.jpg").read_bytes() == b"precious"


def test_natural_order(tmp_path):
    for value, name in enumerate(["f1.png", "f2.png", "f10.png", "F011.png", "g²0.png"]):
        Image.new("RGB", (4, 4), (value * 10,) * 3).save(tmp_path / name)
    (tmp_path / "._f0.png").write_bytes(b"a file manager's leftovers")
    (tmp_path / "notes.txt").write_text("not an image")
    frames, _ = read_video(tmp_path)
    assert frames[:, 0, 0, 0].mul(255).round().tolist() == [0, 10, 20, 30, 40]
    assert natural_key("a2b10") < natural_key("a10b2")


def test_kinds_of_images(tmp_path, caplog):
    log._said.clear()
    rgb = (200, 100, 50)
    Image.new("L", (4, 4), 77).save(tmp_path / "1.png")
    Image.new("RGBA", (4, 4), (*rgb, 128)).save(tmp_path / "2.png")
    Image.new("RGB", (4, 4), rgb).quantize(4).save(tmp_path / "3.png")
    Image.new("1", (4, 4), 1).save(tmp_path / "4.png")
    frames, _ = read_video(tmp_path)
    expected = [(77 / 255,) * 3, [v / 255 for v in rgb], [v / 255 for v in rgb], (1, 1, 1)]
    assert torch.allclose(frames[:, 2, 2], torch.tensor(expected), atol=1e-6)
    assert "transparency is dropped" in caplog.text
    Image.fromarray(np.full((4, 4), 40000, np.uint16)).save(tmp_path / "5.png")
    assert torch.allclose(read_video(tmp_path / "5.png")[0], torch.tensor(40000 / 65535), atol=1e-6)
    for read in (read_video, lambda path: torch.stack(list(Clip(path)))):
        with pytest.raises(InputError, match=r"5\.png has 16 bits per channel but 1\.png has 8; convert them to"):
            read(tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="no name has a colon there")
def test_names_with_colons(tmp_path, monkeypatch):
    """Names with colons are no protocols."""
    monkeypatch.chdir(tmp_path)
    write_mp4("take1:final.mp4", moving_ramp(3), 25)
    assert len(read_video("take1:final.mp4")[0]) == 3


def test_exif_orientation(tmp_path):
    image = Image.new("RGB", (8, 4))
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / "a.jpg", exif=exif)
    assert read_video(tmp_path / "a.jpg")[0].shape == (1, 8, 4, 3)


def test_different_sizes_are_refused(tmp_path):
    Image.new("RGB", (8, 4)).save(tmp_path / "a1.png")
    Image.new("RGB", (8, 6)).save(tmp_path / "a2.png")
    with pytest.raises(InputError, match=r"a2\.png is 8x6 but a1\.png is 8x4"):
        read_video(tmp_path)


def damaged(tmp_path):
    """Name -> a file or folder that is no clip."""
    write_mp4(tmp_path / "good.mp4", torch.rand(12, 64, 64, 3), 25)
    good = (tmp_path / "good.mp4").read_bytes()
    (tmp_path / "truncated.mp4").write_bytes(good[: len(good) * 2 // 3])
    (tmp_path / "header only.mp4").write_bytes(good[:200])
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "text.mp4").write_text("no video at all\n" * 50)
    (tmp_path / "empty folder").mkdir()
    Image.new("RGB", (64, 64), (9, 8, 7)).save(tmp_path / "whole.png")
    (tmp_path / "broken.png").write_bytes((tmp_path / "whole.png").read_bytes()[:60])
    (tmp_path / "fake.jpg").write_text("not a picture")
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 44100
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return ["truncated.mp4", "header only.mp4", "empty.mp4", "text.mp4", "empty folder", "broken.png", "fake.jpg",
            "sound.mp4", "missing.mp4"]  # fmt: skip


def test_unreadable_input(tmp_path):
    for name in damaged(tmp_path):
        with pytest.raises(InputError) as caught:
            read_video(tmp_path / name)
        message = str(caught.value)
        assert name in message and "\n" not in message, name


def test_writers_refuse_bad_frames(tmp_path):
    nan = moving_ramp(4)
    nan[2, 0, 0, 0] = float("nan")
    cases = {
        "NaN": nan,
        "no frames": torch.empty(0, 8, 8, 3),
        "first one": [torch.zeros(8, 8, 3), torch.zeros(8, 10, 3)],
        "shape": torch.zeros(2, 8, 8, 5),
    }
    for reason, frames in cases.items():
        with pytest.raises(InputError, match=reason):
            write_mp4(tmp_path / "a.mp4", frames, 25)
        if reason != "first one":  # a folder of PNGs may hold any sizes
            with pytest.raises(InputError, match=reason):
                write_png_folder(tmp_path / "frames", frames)
    with pytest.raises(InputError, match="frame rate"):
        write_mp4(tmp_path / "a.mp4", moving_ramp(1), 0)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_keeps_the_earlier_file(tmp_path):
    def stops():
        yield torch.zeros(8, 8, 3)
        raise KeyboardInterrupt

    write_mp4(tmp_path / "a.mp4", moving_ramp(2), 25)
    before = (tmp_path / "a.mp4").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        write_mp4(tmp_path / "a.mp4", stops(), 25)
    write_png_folder(tmp_path / "frames", moving_ramp(2))
    with pytest.raises(KeyboardInterrupt):
        write_png_folder(tmp_path / "frames", stops())
    assert (tmp_path / "a.mp4").read_bytes() == before
    assert len(list((tmp_path / "frames").iterdir())) == 2
    assert sorted(f.name for f in tmp_path.iterdir()) == ["a.mp4", "frames"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")
def test_reading_needs_about_the_result_only(tmp_path):
    clip = moving_ramp(1, 480, 640).mul(255).byte()
    write_mp4(tmp_path / "a.mp4", (clip[0] for _ in range(48)), 25)
    program = """
import re, sys, torch
from zerowaste_vae.engine.extras.media.clips import read_video
def status(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
read_video(sys.argv[1], 2)
before = status("VmRSS")
frames, _ = read_video(sys.argv[1])
print((status("VmHWM") - before) / frames.nbytes)
"""
    command = [sys.executable, "-c", program, tmp_path / "a.mp4"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.4  # the frames as uint8 are a quarter; a second float copy would make it 2


@pytest.mark.parametrize("name", ["a.mp4", "a.png", "a.webp"])
def test_a_file_that_cannot_be_read_is_no_damaged_one(tmp_path, monkeypatch, name):
    """The system's error, with the file's name."""

    class Failing(io.FileIO):
        def read(self, *_):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    (tmp_path / name).write_bytes(b"\0" * 100)
    opened = builtins.open
    monkeypatch.setattr(
        builtins, "open", lambda path, *a, **k: Failing(path) if str(path).endswith(name) else opened(path, *a, **k)
    )
    with pytest.raises(InputError, match=rf"{name}: cannot be read \({os.strerror(errno.EIO)}\)"):
        Clip(tmp_path / name)
