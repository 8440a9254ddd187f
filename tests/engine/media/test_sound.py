"""The sound of a video file, or of a part of it."""

from __future__ import annotations

import io
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from zerowaste_vae.engine.errors import InputError
from zerowaste_vae.engine.media.mp4 import write_mp4
from zerowaste_vae.engine.media.sound import read_sound, write_sound

RATE = 8000


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
