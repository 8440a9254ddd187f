"""The sound of a video file, or of a part of it."""

from __future__ import annotations

import io
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from zerowaste_vae.engine.errors import InputError
from zerowaste_vae.engine.extras.media.mp4 import write_mp4
from zerowaste_vae.engine.extras.media.sound import read_sound, write_sound

from .stamped import RATE, STAMPED, levels, stamped


def write(path, seconds: float = 2.0) -> np.ndarray:
    """A file of uncompressed sound, two channels: a ramp, and its negative; returns the samples [2, n]."""
    ramp = np.linspace(-0.9, 0.9, int(seconds * RATE), dtype=np.float32)
    samples = np.stack([ramp, -ramp])
    with av.open(str(path), "w", format="matroska") as file:
        stream = file.add_stream("pcm_f32le", rate=RATE, layout="stereo")
        for at in range(0, samples.shape[1], 1000):
            packed = np.ascontiguousarray(samples[:, at : at + 1000].T).reshape(1, -1)
            frame = av.AudioFrame.from_ndarray(packed, format="flt", layout="stereo")
            frame.sample_rate, frame.pts, frame.time_base = RATE, at, Fraction(1, RATE)
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return samples


@pytest.mark.parametrize("begins, lasts", [(0.0, 0.0), (0.5, 0.0), (0.25, 0.5), (0.0, 1.0), (1.5, 9.0)])
def test_a_part_is_cut_to_the_sample(tmp_path, begins, lasts):
    samples = write(tmp_path / "ramp.mkv")
    sound, rate = read_sound(tmp_path / "ramp.mkv", begins, lasts)
    end = int((begins + lasts) * RATE) if lasts else None
    assert rate == RATE
    assert torch.equal(sound, torch.from_numpy(samples[:, int(begins * RATE) : end]))


def test_open_file_read_from_start(tmp_path):
    samples = write(tmp_path / "ramp.mkv")
    opened = io.BytesIO((tmp_path / "ramp.mkv").read_bytes())
    opened.read(100)
    assert torch.equal(read_sound(opened)[0], torch.from_numpy(samples))


def test_files_and_parts_without_sound(tmp_path):
    write(tmp_path / "ramp.mkv")
    assert read_sound(tmp_path / "ramp.mkv", 5.0) is None
    write_mp4(tmp_path / "silent.mp4", torch.zeros(3, 16, 16, 3), 8)
    assert read_sound(tmp_path / "silent.mp4") is None


def test_sound_is_written_and_read_back(tmp_path):
    """The first of a batch, louder than 1 cut off; what is no sound is refused."""
    given = torch.stack([torch.linspace(-2, 2, 4001).expand(2, -1), torch.zeros(2, 4001)])
    write_sound(tmp_path / "a.wav", given, RATE)
    sound, rate = read_sound(tmp_path / "a.wav")
    assert rate == RATE and (sound - given[0].clamp(-1, 1)).abs().max() < 2 / 32768
    for wrong, rate in ((given[0], RATE), (given[:0], RATE), (given, 0)):
        with pytest.raises(InputError, match="is no sound"):
            write_sound(tmp_path / "b.wav", wrong, rate)
    assert not (tmp_path / "b.wav").exists()


@pytest.mark.parametrize("case", STAMPED)
def test_every_frame_lies_where_its_time_stamp_says(tmp_path, case):
    blocks, want = STAMPED[case]
    stamped(tmp_path / "a.mkv", blocks)
    sound, rate = read_sound(tmp_path / "a.mkv")
    assert levels(sound, rate, want) == list(want.values())
    assert sound.shape[1] / rate == pytest.approx(blocks[-1][0] + blocks[-1][1], abs=0.02)
    for begins in (0.4, 0.9):  # in the middle
        part, _ = read_sound(tmp_path / "a.mkv", begins, 0.5)
        assert part.shape[1] == min(round(0.5 * rate), sound.shape[1] - round(begins * rate))
        assert torch.equal(part, sound[:, round(begins * rate) :][:, : part.shape[1]])


def test_a_part_within_a_hole_is_silent(tmp_path):
    stamped(tmp_path / "a.mkv", [(0, 0.5, 0.5), (2, 0.5, 0.5)])
    sound, rate = read_sound(tmp_path / "a.mkv", 1, 0.5)
    assert sound.shape == (1, rate // 2) and not sound.any()


@pytest.mark.parametrize("kind, picture", [("matroska", 0), ("matroska", 0.6), ("mpegts", 0), ("mpegts", 3)])
def test_sound_is_counted_from_the_first_picture(tmp_path, kind, picture):
    """As frames are, wherever the clock of a format begins."""
    stamped(tmp_path / "a", [(picture + 0.4, 0.64, 0.6)], kind, "aac", picture)
    sound, rate = read_sound(tmp_path / "a")
    loud = (sound[0].abs() > 0.3).nonzero() / rate
    assert loud[0].item() == pytest.approx(0.4, abs=0.05) and loud[-1].item() == pytest.approx(1.04, abs=0.15)


@pytest.mark.parametrize("clocks", [(100, 3), (3, 9000)])
def test_another_clock_is_taken_as_it_comes(tmp_path, caplog, clocks):
    """Recordings joined byte by byte: neither hours of silence nor a loss of all that follows."""
    for clock, level in zip(clocks, (0.2, 0.6), strict=True):
        stamped(tmp_path / "part", [(clock, 0.64, level)], "mpegts", "aac", clock)
        with (tmp_path / "a.ts").open("ab") as file:
            file.write((tmp_path / "part").read_bytes())
    sound, rate = read_sound(tmp_path / "a.ts")
    assert sound.shape[1] / rate == pytest.approx(2 * 0.64, abs=0.4)
    first, second = sound[0].abs().tensor_split(2)
    assert 0.1 < first.median() < 0.3 and 0.4 < second.median() < 0.7
    assert caplog.text.count("the time stamps of its sound jump") == 1


def test_pieces_that_cannot_be_decoded_are_silent(tmp_path, caplog):
    stamped(tmp_path / "a.mkv", [(n * 0.1, 0.1, 0.5) for n in range(20)], codec="flac")
    data = bytearray((tmp_path / "a.mkv").read_bytes())
    whole, _ = read_sound(tmp_path / "a.mkv")
    with av.open(str(tmp_path / "a.mkv")) as file:
        packet = [p for p in file.demux(audio=0) if p.size][2]
        at, size = data.find(bytes(packet)), packet.size
    data[at : at + size] = bytes(size)
    (tmp_path / "a.mkv").write_bytes(data)
    sound, _ = read_sound(tmp_path / "a.mkv")
    assert sound.shape == whole.shape
    assert 0 < (sound != whole).any(0).sum() <= 4608
    assert caplog.text.count("1 pieces of its sound cannot be decoded and are silent") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_full_disk_is_named():
    with pytest.raises(OSError) as raised:
        write_sound(Path("/dev/full"), torch.zeros(1, 1, 100), RATE)
    assert raised.value.filename == "/dev/full" and raised.value.strerror.startswith("cannot be written")
