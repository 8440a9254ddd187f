"""Damage of FFV1 files, which FFmpeg's decoder fills in without a mark."""

from fractions import Fraction

import numpy as np
import pytest
from zerowaste_vae.engine import log
from zerowaste_vae.engine.extras.media.clips import Clip
from zerowaste_vae.engine.extras.media.ffv1 import Checksums, whole

av = pytest.importorskip("av", reason="the package av is not installed")


def write(path, options):
    with av.open(str(path), "w") as out:
        stream = out.add_stream("ffv1", rate=25, options=options)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for index in range(6):
            pixels = np.random.default_rng(index).integers(0, 255, (48, 64, 3), np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="yuv420p")
            frame.pts, frame.time_base = index, Fraction(1, 25)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))


def packets(path):
    with av.open(str(path)) as container:
        return [bytes(p) for p in container.demux(video=0) if p.size]


SUMMED = ({"level": "3"}, {"level": "3", "slices": "4"}, {"level": "3", "slices": "16", "coder": "1"})


@pytest.mark.parametrize("options", SUMMED)
def test_damage_is_said(tmp_path, caplog, options):
    log._said.clear()
    path = tmp_path / "a.mkv"
    write(path, options)
    assert all(map(whole, packets(path))) and len(list(Clip(path))) == 6 and not caplog.records
    fourth, data = packets(path)[3], path.read_bytes()
    place = data.index(fourth) + len(fourth) // 2
    path.write_bytes(data[:place] + bytes(b ^ 0x5A for b in data[place : place + 30]) + data[place + 30 :])
    assert len(list(Clip(path))) == 6
    assert [r.getMessage().partition("a.mkv: ")[2][:19] for r in caplog.records] == ["frame 3 is damaged,"]


@pytest.mark.parametrize("options", [{"level": "1"}, {"level": "3", "slicecrc": "0"}])
def test_without_checksums(tmp_path, caplog, options):
    log._said.clear()
    write(tmp_path / "a.mkv", options)
    sums = Checksums()
    assert not any(map(sums.differ, packets(tmp_path / "a.mkv")))
    assert len(list(Clip(tmp_path / "a.mkv"))) == 6 and not caplog.records


def test_packets_that_end_early_are_not_whole():
    assert whole(b"") and not any(map(whole, (b"abc", b"\0" * 7 + b"1", b"\xff" * 40)))
