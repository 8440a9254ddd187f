"""Sound that a finished MP4 takes along."""

import sys
import wave
from fractions import Fraction
from pathlib import Path

import av
import pytest
import torch
from zerowaste_vae import InputError
from zerowaste_vae.engine.extras.media.mp4 import Format
from zerowaste_vae.engine.extras.media.mp4_finish import check_audio
from zerowaste_vae.engine.extras.media.sound import read_sound

from .numbered import counted, numbers, ramp, write
from .stamped import STAMPED, levels, stamped


@pytest.fixture
def path(tmp_path):
    return tmp_path / "clip.mp4"


def test_sound_goes_with_the_frames(path, tmp_path):
    with wave.open(str(tmp_path / "sound.wav"), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(torch.randint(-9000, 9000, (8000 * 5, 2)).short().numpy().tobytes())
    for audio in (tmp_path / "sound.wav", tmp_path / "first.mp4"):  # encoded, then taken over as it is
        out = tmp_path / "first.mp4" if audio.suffix == ".wav" else path
        writer = write(out, ramp(36))
        writer.finish(audio, Fraction(1))
        with av.open(str(out)) as file:
            sound = file.streams.audio[0]
            assert sound.codec_context.name == "aac"
            packets = [p for p in file.demux(sound) if p.pts is not None]
            seconds = float(packets[-1].pts * sound.time_base)
            assert abs(float(packets[0].pts * sound.time_base)) < 0.2
        assert seconds == pytest.approx(3.0 if audio.suffix == ".wav" else 2.0, abs=0.3)
        assert numbers(out) == counted(36)
    check_audio(path)
    write(tmp_path / "silent.mp4", ramp(2)).finish()
    with pytest.raises(InputError, match=r"silent\.mp4: holds no audio stream"):
        check_audio(tmp_path / "silent.mp4")
    with pytest.raises(InputError, match=r"gone\.wav: no such file"):
        check_audio(tmp_path / "gone.wav")


def clicks(path, kind, offset, rate=8000):
    """A file of three seconds whose picture and sound begin `offset` seconds late, with a click a second later."""
    with av.open(str(path), "w", format=kind) as file:
        video, sound = file.add_stream("libx264", rate=10), file.add_stream("aac", rate=rate, layout="mono")
        video.width, video.height, video.pix_fmt = 64, 48, "yuv420p"
        packets = []
        for n in range(30):
            picture = av.VideoFrame(64, 48, "yuv420p")
            picture.pts, picture.time_base = n, Fraction(1, 10)
            packets += video.encode(picture)
        samples = torch.zeros(1, 3 * rate)
        samples[:, rate : rate + rate // 10] = torch.arange(rate // 10).mul(0.7).sin()
        for n, part in enumerate(samples.split(1000, 1)):
            frame = av.AudioFrame.from_ndarray(part.numpy(), format="fltp", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = rate, 1000 * n, Fraction(1, rate)
            packets += sound.encode(frame)
        for packet in [*packets, *video.encode(None), *sound.encode(None)]:
            packet.pts += int(offset / packet.time_base)
            packet.dts += int(offset / packet.time_base)
            file.mux(packet)


def clicked(path):
    """The second of the click."""
    with av.open(str(path)) as file:
        for frame in file.decode(audio=0):
            loud = torch.from_numpy(frame.to_ndarray()).abs().amax(0) > 0.3
            if loud.any():
                return float(frame.pts * frame.time_base) + int(loud.nonzero()[0]) / frame.sample_rate
    return None


@pytest.mark.parametrize("kind, offset", [("mp4", 0), ("mpegts", 3), ("matroska", 1.5)])
def test_sound_begins_with_the_first_picture(path, tmp_path, kind, offset):
    """Wherever its clock begins."""
    clicks(tmp_path / "source", kind, offset)
    for start in (0, 0.5):
        write(path, ramp(20), form=Format(Fraction(10))).finish(tmp_path / "source", Fraction(start))
        assert clicked(path) == pytest.approx(1 - start, abs=0.02)


@pytest.mark.parametrize("codec", ["pcm_s16le", "flac"])
@pytest.mark.parametrize("case", STAMPED)
def test_every_time_stamp_of_sound_counts(path, tmp_path, case, codec):
    """Holes, overlaps and a late beginning: of sound that is encoded anew, and of packets taken over as they are."""
    blocks, want = STAMPED[case]
    stamped(tmp_path / "a.mkv", blocks, codec=codec)
    write(path, ramp(48)).finish(tmp_path / "a.mkv")
    sound, rate = read_sound(path)
    held, _ = read_sound(tmp_path / "a.mkv")
    assert levels(sound, rate, want) == pytest.approx(levels(held, rate, want), abs=0.11)
    loud = [(s[0].abs() > 0.5).nonzero() / rate for s in (sound, held)]
    for end in (0, -1):
        assert loud[0][end].item() == pytest.approx(loud[1][end].item(), abs=0.02)


def test_a_file_that_cannot_be_read_is_named(path, tmp_path):
    """Not the output, which can be written."""
    clicks(tmp_path / "source", "mp4", 0)
    writer = write(path, ramp(12))
    (tmp_path / "source").unlink()
    with pytest.raises(InputError, match=r"source: cannot be read \(No such file"):
        writer.finish(tmp_path / "source")
    assert writer.part.exists()
    writer.discard()


def test_sound_is_reencoded(path, tmp_path):
    """A rate that AAC lacks, and channels without names; none that can be read is a line."""
    with wave.open(str(tmp_path / "odd.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(37800)
        file.writeframes(bytes(2 * 37800))
    writer = write(path, ramp(12))
    (tmp_path / "broken.wav").write_bytes(b"RIFF and no more")
    with pytest.raises(InputError, match=r"broken\.wav: cannot be taken into an MP4 \(.*\); give other sound, or none"):
        writer.finish(tmp_path / "broken.wav")
    assert not path.exists() and writer.part.exists()
    writer.finish(tmp_path / "odd.wav")
    with av.open(str(path)) as file:
        context = file.streams.audio[0].codec_context
        assert (context.sample_rate, context.layout.name) == (48000, "mono")
        assert file.streams.video[0].frames == 12


@pytest.mark.parametrize("kind", ["pcm", "aac"])
def test_short_sound_is_said(path, tmp_path, monkeypatch, kind):
    """Sound that ends before the frames is said."""
    said = []
    monkeypatch.setattr("zerowaste_vae.engine.log.warn", said.append)
    source = tmp_path / "short.wav"
    with wave.open(str(source), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(2 * 8000))
    if kind == "aac":
        source = tmp_path / "short.mp4"
        write(source, ramp(12)).finish(tmp_path / "short.wav")
    write(path, ramp(12)).finish(source)
    assert not said
    write(path, ramp(12)).finish(source, Fraction(5))
    assert numbers(path) == counted(12)
    assert said == [f"{source}: no sound of it can be read from second 5 on; the MP4 is silent"]


@pytest.mark.skipif(sys.platform == "win32", reason="no name has a colon there")
def test_sound_of_a_name_with_a_colon(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    clicks("take1.mp4", "mp4", 0)
    Path("take1.mp4").rename("take1:final.mp4")
    check_audio("take1:final.mp4")
    write(Path("take2:final.mp4"), ramp(12)).finish("take1:final.mp4")
    assert numbers("take2:final.mp4") == counted(12) and clicked(tmp_path / "take2:final.mp4") is not None
