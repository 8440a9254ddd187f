"""`encode` of parts, of unusual files and onto a full disk."""

import errno
import os
import tempfile
from pathlib import Path

import av
import numpy as np
import torch
from zerowaste_vae import load
from zerowaste_vae.engine.extras.media.latents import read_latent
from zerowaste_vae.engine.extras.media.mp4 import write_mp4
from zerowaste_vae.engine.extras.media.pngs import write_png_folder

from .said import pngs


def test_encode_reads_a_part_as_it_goes(place, vae_file, noise):
    clip = (noise(13, 16, 24, 3) * 60 + 128).clamp(0, 255).byte()
    write_png_folder("clip", clip)
    vae = load(vae_file, device="cpu")
    assert place("encode", "clip", "a.safetensors", "--start", 3, "--frames", 9, "--chunk", 1) == 0
    assert torch.equal(read_latent("a.safetensors"), vae.encode(clip[3:12].float() / 255, chunk=1))
    assert place("encode", "clip", "b.latent", "--seed", 5, "--chunk", 1) == 0
    assert torch.equal(read_latent("b.latent"), vae.encode(clip.float() / 255, seed=5, chunk=1))
    assert place("encode", "clip", "c.safetensors", "--start", 13) == 2
    assert place("encode", "clip", "c.safetensors", "--start", -1) == 2
    assert not Path("c.safetensors").exists()


def test_what_other_inputs_become(place, capsys, caplog):
    """Turned, odd, 10 bits: as a player shows them. Sound alone, and frames that come unevenly: a line."""
    clip = torch.rand(5, 18, 34, 3, generator=torch.Generator().manual_seed(0))
    write_mp4("odd.mp4", clip[:, :17, :33], 8)
    assert place("encode", "odd.mp4", "odd.safetensors") == 0
    assert place("decode", "odd.safetensors", "odd") == 0
    assert next(iter(pngs("odd").values())).shape == (18, 34, 3)  # padded to even sizes when it was written
    uneven(clip)
    assert place("encode", "uneven.mkv", "uneven.safetensors", "--frames", 4) == 0  # not all that varies is read
    assert "uneven.mkv: its frame rate varies" in caplog.text
    capsys.readouterr()
    with av.open("sound.m4a", "w", format="mp4") as file:
        stream = file.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            file.mux(packet)
    assert place("encode", "sound.m4a", "sound.safetensors") == 2
    assert "sound.m4a: holds no video stream" in capsys.readouterr().err


def uneven(clip):
    with av.open("uneven.mkv", "w") as file:
        stream = file.add_stream("libx264", rate=10)
        stream.height, stream.width, stream.pix_fmt = 18, 34, "yuv420p"
        for n, time_ in enumerate((0, 1, 2, 7, 9)):
            picture = av.VideoFrame.from_ndarray((clip[n] * 255).byte().numpy(), format="rgb24")
            picture = picture.reformat(format="yuv420p")
            picture.pts = time_
            file.mux(stream.encode(picture))
        file.mux(stream.encode(None))


def test_a_full_disk_leaves_no_latents(place, monkeypatch, capsys):
    write_png_folder("clip", torch.zeros(9, 16, 24, 3, dtype=torch.uint8))
    files = tempfile.TemporaryFile

    class Full:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda *a, **k: Full(files(*a, **k)))
    assert place("encode", "clip", "z.safetensors") == 2
    err = capsys.readouterr().err
    assert "z.safetensors: cannot be written (No space left on device)" in err and "Traceback" not in err
    assert sorted(f.name for f in Path().iterdir()) == ["clip", "l.safetensors"]
