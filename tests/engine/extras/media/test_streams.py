"""Streams as cameras, recorders and accidents leave them: joined, damaged, mislabelled, or no videos at all."""

import io
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open
from zerowaste_vae.engine import InputError, log
from zerowaste_vae.engine.extras.cli import main
from zerowaste_vae.engine.extras.media.clips import Clip
from zerowaste_vae.engine.extras.media.streams import chosen, is_text

av = pytest.importorskip("av", reason="the package av is not installed")


@pytest.fixture(autouse=True)
def _anew():
    log._said.clear()


def write(path, count=20, size=(48, 64), codec="libx264", pixels="yuv420p", first=0, step=1, clock=None, rate=25):
    """Moving pictures, a whole one every ten; clock: of their time stamps, `step` of it apart."""
    y, x = np.mgrid[0 : size[0], 0 : size[1]]
    with av.open(str(path), "w", format="mpegts" if path.suffix == ".ts" else None) as container:
        stream = container.add_stream(codec, rate=rate, options={"g": "10"})
        stream.height, stream.width, stream.pix_fmt = *size, pixels
        if clock:
            stream.codec_context.time_base = clock
        for index in range(count):
            rgb = np.stack([(x * 3 + 5 * index) % 256, (y * 3 + 3 * index) % 256, (x * y) % 256], -1).astype(np.uint8)
            frame = av.VideoFrame.from_ndarray(rgb, format="rgb24").reformat(format=pixels)
            frame.pts = first + index * step
            frame.time_base = clock or Fraction(1, rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def lines(caplog):
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("name", ["a.txt", "a.nfo", "a.ans", "a.mp4", "a", "a.m3u8", "a.ffconcat", "a.sdp", "a.csv"])
def test_a_text_is_no_clip(tmp_path, name):
    """Nor a playlist: nobody opens the addresses in it."""
    beginning = {"a.m3u8": "#EXTM3U\n#EXTINF:9,\nhttp://127.0.0.1:9/x.ts\n", "a.ffconcat": "ffconcat version 1.0\n"}
    (tmp_path / name).write_text(beginning.get(name, "") + "Grüße, no video at all\n" * 300, encoding="utf-8")
    with pytest.raises(InputError, match="cannot be read as a video or an image: it is a text"):
        Clip(tmp_path / name)
    with pytest.raises(InputError, match=r"the video: cannot be read .* it is a text"):
        Clip(io.BytesIO((tmp_path / name).read_bytes()))


def test_what_a_text_is():
    assert is_text("Grüße".encode() * 900) and is_text("€".encode() * 1000 + b"\xe2\x82")
    others = (b"", b"YUV4MPEG2 W64 H48\n", b"P6\n9 9\n255\n" + b"Z" * 243, b"RIFF\0", b"\xff\xd8\xff", b"\xff" * 99)
    assert not any(map(is_text, others))


@pytest.mark.parametrize("second", [0, 90_000])
def test_joined_transport_stream(tmp_path, second):
    write(tmp_path / "1.ts")
    write(tmp_path / "2.ts", first=second)
    (tmp_path / "a.ts").write_bytes((tmp_path / "1.ts").read_bytes() + (tmp_path / "2.ts").read_bytes())
    joined = list(Clip(tmp_path / "a.ts").integers())
    apart = [f for name in ("1.ts", "2.ts") for f in Clip(tmp_path / name).integers()]
    assert len(joined) == 40 and all(map(np.array_equal, joined, apart))


def test_a_change_of_size_is_scaled_and_said(tmp_path, caplog):
    write(tmp_path / "1.ts")
    write(tmp_path / "2.ts", size=(96, 128))
    (tmp_path / "a.ts").write_bytes((tmp_path / "1.ts").read_bytes() + (tmp_path / "2.ts").read_bytes())
    assert {f.shape for f in Clip(tmp_path / "a.ts").integers()} == {(48, 64, 3)}
    (line,) = [line for line in lines(caplog) if "and later ones are" in line]
    assert line.endswith("a.ts: frame 20 and later ones are 128x96; they are scaled to the first one's 64x48")


@pytest.mark.parametrize(("name", "codec"), [("a.mp4", "libx264"), ("a.avi", "mpeg4"), ("a.ts", "mpeg2video")])
def test_concealed_damage(tmp_path, caplog, name, codec):
    path = tmp_path / name
    write(path, 30, (96, 128), codec)
    whole = list(Clip(path).integers())
    assert not caplog.records
    data = path.read_bytes()
    for start in range(len(data) // 3, len(data) * 3 // 4, 997):  # somewhere inside a picture
        log._said.clear()
        caplog.clear()
        broken = bytearray(data)
        broken[start : start + 30] = bytes(b ^ 0x5A for b in broken[start : start + 30])
        path.write_bytes(broken)
        try:
            frames = list(Clip(path).integers())
        except InputError:
            continue
        wrong = sum(not np.array_equal(a, b) for a, b in zip(whole, frames, strict=False))
        assert bool(caplog.records) or not wrong
        if any("is damaged, and what lacks is made up" in line for line in lines(caplog)):
            return
    pytest.fail("nothing of it was damaged")


def test_undecodable_piece_left_out(tmp_path, caplog):
    """The piece is left out, and a line says so."""
    buffer = io.BytesIO()
    Image.new("RGB", (64, 48), (9, 90, 200)).save(buffer, "JPEG")
    with av.open(str(tmp_path / "a.avi"), "w") as out:
        stream = out.add_stream("mjpeg", rate=24)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
        for index in range(5):
            packet = av.Packet(buffer.getvalue() if index != 2 else b"\xff\xd8" + b"\x11" * 300)
            packet.stream, packet.pts, packet.dts, packet.time_base = stream, index, index, Fraction(1, 24)
            packet.is_keyframe = True
            out.mux(packet)
    assert len(list(Clip(tmp_path / "a.avi"))) == 4
    assert any("1 of its pieces cannot be decoded; their frames are missing" in line for line in lines(caplog))


def test_undecodable_video(tmp_path):
    """Nothing can be decoded: one line says so."""
    with av.open(str(tmp_path / "a.avi"), "w") as out:
        stream = out.add_stream("mjpeg", rate=24)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
        for index in range(3):
            packet = av.Packet(b"\xff\xd8" + b"\x11" * 300)
            packet.stream, packet.pts, packet.dts, packet.time_base = stream, index, index, Fraction(1, 24)
            out.mux(packet)
    with pytest.raises(InputError, match=r"a\.avi: cannot be read as a video \(none of its 3 pieces can be decoded\)"):
        list(Clip(tmp_path / "a.avi"))


@pytest.mark.parametrize("count", [12, 40])
def test_time_stamps_are_believed(tmp_path, caplog, count):
    """A Matroska file says 25 frames a second, and they are 20 ms apart."""
    write(tmp_path / "a.mkv", count, step=20, clock=Fraction(1, 1000))
    clip = Clip(tmp_path / "a.mkv")
    assert clip.fps == 25 and len(list(clip)) == count and clip.fps == 50
    assert lines(caplog)[-1].endswith("says that it has 25 frames a second, its time stamps that it has 50; the time "
                                      "stamps are believed, as players do")  # fmt: skip


@pytest.mark.parametrize("rate", [24, 25, 30, Fraction(30000, 1001), Fraction(24000, 1001), 60])
@pytest.mark.parametrize("name", ["a.mkv", "a.mp4", "a.ts", "a.avi"])
def test_rates_that_agree_stay(tmp_path, caplog, name, rate):
    write(tmp_path / name, 30, clock=1 / Fraction(rate), rate=rate)
    clip = Clip(tmp_path / name)
    before = clip.fps
    list(clip)
    assert clip.fps == before and abs(before / rate - 1) < 1e-3 and not caplog.records


def test_latent_notes_real_rate(tmp_path, capsys):
    """The latent file notes the rate of the time stamps."""
    write(tmp_path / "a.mkv", 9, size=(32, 32), step=20, clock=Fraction(1, 1000))
    assert main(["encode", str(tmp_path / "a.mkv"), str(tmp_path / "a.safetensors")]) == 0
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata()["fps"] == "50"


def container(*dispositions, brand="isom"):
    streams = [SimpleNamespace(disposition=av.stream.Disposition(d), index=i) for i, d in enumerate(dispositions)]
    return SimpleNamespace(format=SimpleNamespace(name="mov,mp4"), metadata={"major_brand": brand},
                           streams=SimpleNamespace(video=streams))  # fmt: skip


def test_heic_tiles_and_thumbnails():
    """FFmpeg marks tiles of HEIC and AVIF as dependent, and the picture that a file is about as the default."""
    with pytest.raises(InputError, match="photo: is a picture in 4 tiles, as phones write HEIC"):
        chosen(container(*[0x80000] * 4, brand="heic"), "photo")
    assert chosen(container(0, 1, brand="heic"), "photo").index == 1
    assert chosen(container(0, 0, brand="heic"), "photo").index == 0
    assert chosen(container(0, 1), "clip").index == 0
    with pytest.raises(InputError, match="holds no video stream"):
        chosen(container(0x400), "sound")
