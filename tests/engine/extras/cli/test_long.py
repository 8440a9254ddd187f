"""decode and encode from file to file: parts of a clip, runs that go on, formats; bits where there are bits."""

import errno
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from zerowaste_vae import load
from zerowaste_vae.engine.extras.media.clips import read_video
from zerowaste_vae.engine.extras.media.latents import read_latent, write_latent
from zerowaste_vae.engine.extras.media.mp4 import Mp4Writer
from zerowaste_vae.engine.extras.media.pngs import PngWriter
from zerowaste_vae.engine.planning.budget import Limits
from zerowaste_vae.engine.planning.planner import Planner

from .said import pngs


def same(a, b):
    return a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)


def interrupt(monkeypatch, writer, after):
    """KeyboardInterrupt when so many frames have been written."""
    write, seen = writer.write, [0]

    def interrupted(self, frames):
        write(self, frames)
        seen[0] += len(frames)
        if seen[0] >= after:
            raise KeyboardInterrupt

    monkeypatch.setattr(writer, "write", interrupted)


def test_frames_are_those_of_a_decode(place, vae_file, capsys):
    assert place("decode", "l.safetensors", "frames", "--chunk", 1) == 0
    assert "latents before them" not in capsys.readouterr().out
    whole = load(vae_file, device="cpu").decode(read_latent("l.safetensors"), output="uint8", chunk=1)[0, :19, :15, :30]
    found = pngs("frames")
    assert sorted(found) == [f"frame_{n:06d}.png" for n in range(19)]
    assert all((found[f"frame_{n:06d}.png"] == whole[n].numpy()).all() for n in range(19))
    assert place("decode", "l.safetensors", "part", "--chunk", 1, "--start", 7, "--frames", 4) == 0
    assert "with 2 earlier latents computed again for their history" in capsys.readouterr().out
    assert same(pngs("part"), {name: p for name, p in found.items() if 7 <= int(name[6:12]) < 11})
    assert place("decode", "l.safetensors", "f.safetensors", "--chunk", 1, "--start", 17, "--output", "uint8") == 0


@pytest.mark.parametrize("after", [1, 9])
def test_png_resume(place, vae_file, monkeypatch, capsys, after):
    """PNGs of an interrupted run stay, and --resume does not make them again."""
    weights = bytearray(Path(vae_file).read_bytes())
    weights[len(weights) // 2] ^= 1  # of the same name and size as the VAE's
    Path(Path(vae_file).name).write_bytes(weights)
    assert place("decode", "l.safetensors", "whole", "--chunk", 1) == 0
    with monkeypatch.context() as patch:
        interrupt(patch, PngWriter, after)
        assert place("decode", "l.safetensors", "frames", "--chunk", 1) == 130
    err = capsys.readouterr().err
    there = pngs("frames.part")
    assert f"frames.part: {len(there)} of 19 frames; the same command with --resume goes on from there" in err
    assert not Path("frames").exists() and len(there) >= after
    assert place("decode", "l.safetensors", "frames", "--chunk", 1) == 2
    assert "an interrupted run has left it; give --resume to continue it, or --force" in capsys.readouterr().err
    for other in (("--start", 1), ("--off", "composed_upsample"), ("--vae", Path(vae_file).name)):
        assert place("decode", "l.safetensors", "frames", "--chunk", 1, *other, "--resume") == 2
        assert "is of another clip or was made with other settings" in capsys.readouterr().err
    assert place("decode", "l.safetensors", "frames", "--chunk", 1, "--resume", "--off", "cuda_graphs") == 0
    assert f", {len(there)} of them from the interrupted run, the others decoded in" in capsys.readouterr().out
    assert same(pngs("frames"), pngs("whole")) and not Path("frames.part").exists()


def test_a_second_interrupt_keeps_pngs_too(place, monkeypatch, capsys):
    shut = ThreadPoolExecutor.shutdown

    def impatient(self, **how):
        shut(self, **how)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        interrupt(patch, PngWriter, 4)
        patch.setattr("zerowaste_vae.engine.extras.media.pngs.ThreadPoolExecutor.shutdown", impatient)
        assert place("decode", "l.safetensors", "frames", "--chunk", 1) == 130
    assert f"frames.part: {len(pngs('frames.part'))} of 19 frames; the same" in capsys.readouterr().err
    Path("empty.part").mkdir()  # killed before its first frame
    assert place("decode", "l.safetensors", "empty", "--chunk", 1, "--frames", 1, "--resume") == 0


def test_other_sums_of_a_cpu_are_not_mixed(place, monkeypatch, capsys):
    """Products of matrices are summed by threads."""
    with monkeypatch.context() as patch:
        interrupt(patch, PngWriter, 4)
        assert place("decode", "l.safetensors", "frames", "--chunk", 1) == 130
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    assert place("decode", "l.safetensors", "frames", "--chunk", 1, "--resume") == 2
    assert "was made with other settings" in capsys.readouterr().err


def test_resume_keeps_tiles(place, monkeypatch, capsys):
    """Automatic ones depend on what is free. Whole frames are the same, however they are asked for."""
    tiles = "--tiling", "blended", "--chunk", 1
    with monkeypatch.context() as patch:
        interrupt(patch, PngWriter, 5)
        assert place("decode", "l.safetensors", "blended", *tiles, "--tile", 16, "--overlap", 8) == 130
        interrupt(patch, PngWriter, 5)
        assert place("decode", "l.safetensors", "frames", "--chunk", 1, "--tiling", "untiled") == 130
    capsys.readouterr()
    for other in (("--tiling", "untiled"), (), (*tiles, "--tile", 16, "--overlap", 0)):
        assert place("decode", "l.safetensors", "blended", *other, "--resume") == 2
        assert "is of another clip or was made with other settings" in capsys.readouterr().err
    assert place("decode", "l.safetensors", "blended", *tiles, "--tile", 16, "--overlap", 8, "--resume") == 0
    assert place("decode", "l.safetensors", "whole", *tiles, "--tile", 16, "--overlap", 8) == 0
    assert same(pngs("blended"), pngs("whole"))
    assert place("decode", "l.safetensors", "frames", "--chunk", 2, "--resume") == 0


def test_resume_refuses_other_auto_tiles(place, monkeypatch, capsys):
    """Refuse other tiles than the begun clip's, from the start or once the run plans for itself."""
    monkeypatch.setattr("zerowaste_vae.engine.execution.results.block_of", lambda program: 4)
    plan, grids, arguments = Planner.plan, [], ("decode", "l.safetensors", "frames", "--chunk", 1)

    def planned(self, half, size, request, *rest):
        return plan(self, half, size, replace(request, tiling="blended", tile=grids.pop(0), overlap=8), *rest)

    monkeypatch.setattr(Planner, "plan", planned)
    with monkeypatch.context() as patch:
        interrupt(patch, PngWriter, 4)
        grids[:] = [16]
        assert place(*arguments) == 130
    assert not grids and 4 <= len(pngs("frames.part")) < 19
    grids[:] = [24]
    assert place(*arguments, "--resume") == 2
    assert "is of another clip or was made with other settings" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(Limits, "hold", lambda *_: False)
        grids[:] = [16, 24]
        assert place(*arguments, "--resume") == 2
    assert "needs other tiles than its frames have; free some" in capsys.readouterr().err
    grids[:] = [16]
    assert place(*arguments, "--resume") == 0
    grids[:] = [16]
    assert place(*arguments[:2], "whole", *arguments[3:]) == 0
    assert same(pngs("frames"), pngs("whole"))


def test_8_bit_resume_needs_same_ranges(place, make_vae_file, monkeypatch, tmp_path, capsys):
    """Another clip in between has widened them."""
    monkeypatch.setenv("ZEROWASTE_CACHE", str(tmp_path / "cache"))
    wide = make_vae_file((16, 16, 32, 32), (16, 16, 32, 32), 4, 6)
    eight = "--precision", "int8", "--chunk", 1, "--vae", wide
    with monkeypatch.context() as patch:
        interrupt(patch, PngWriter, 5)
        assert place("decode", "l.safetensors", "frames", *eight) == 130
    vae = load(wide, precision="int8", device="cpu")
    vae.decode(1.5 * torch.randn(1, 16, 2, 3, 4, generator=torch.Generator().manual_seed(9)), chunk=1)
    capsys.readouterr()
    assert place("decode", "l.safetensors", "frames", *eight, "--resume") == 2
    assert "is of another clip or was made with other settings" in capsys.readouterr().err


def test_an_mp4_of_an_interrupted_run_goes_on(place, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        interrupt(patch, Mp4Writer, 8)
        assert place("decode", "l.safetensors", "a.mp4", "--pixels", "yuv444p", "--crf", 0) == 130
    assert not Path("a.mp4").exists() and read_video("a.part.mp4")[0].shape[1:] == (15, 30, 3)
    there = len(read_video("a.part.mp4")[0])
    assert f"a.part.mp4: {there} of 19 frames" in capsys.readouterr().err
    assert place("decode", "l.safetensors", "a.mp4", "--pixels", "yuv444p", "--crf", 0, "--resume") == 0
    assert place("decode", "l.safetensors", "b.mp4", "--pixels", "yuv444p", "--crf", 0, "--resume") == 0
    (a, fps), (b, _) = read_video("a.mp4"), read_video("b.mp4")
    assert a.shape == b.shape == (19, 15, 30, 3) and fps == 12
    assert (a - b).abs().max() < 0.03  # another group of pictures begins
    assert sorted(f.name for f in Path().iterdir()) == ["a.mp4", "b.mp4", "l.safetensors"]


def test_several_devices_resume(place, monkeypatch, capsys):
    monkeypatch.setattr(
        "zerowaste_vae.engine.extras.distributed.shares.Leads.__call__", lambda self, first: 0.1 * bool(first)
    )
    monkeypatch.setattr("zerowaste_vae.engine.execution.results.waiting_room", lambda _: 3 * 4 * 3 * (16 * 32))
    assert place("decode", "l.safetensors", "whole", "--chunk", 1) == 0
    with monkeypatch.context() as patch:
        interrupt(patch, PngWriter, 9)
        assert place("decode", "l.safetensors", "frames", "--chunk", 1, "--devices", "cpu,cpu") == 130
    there = pngs("frames.part")
    assert 9 <= len(there) < 19
    both = "--devices", "cpu,cpu", "--verbose"
    assert place("decode", "l.safetensors", "frames", "--chunk", 1, "--resume", *both) == 0
    out = capsys.readouterr().out
    assert f", {len(there)} of them from the interrupted run, the others decoded in" in out
    assert "2 devices, " in out and "frames waiting" in out
    assert same(pngs("frames"), pngs("whole"))


def test_force_begins_anew(place, monkeypatch):
    for name, writer in (("a.mp4", Mp4Writer), ("frames", PngWriter)):
        with monkeypatch.context() as patch:
            interrupt(patch, writer, 4)
            assert place("decode", "l.safetensors", name) == 130
        own = Path(f"{name}.part", "mine.txt")
        if name == "frames":  # nobody's folder is emptied
            own.write_text("")
            assert place("decode", "l.safetensors", name, "--force") == 2
            own.unlink()
        assert place("decode", "l.safetensors", name, "--start", 2, "--force") == 0
    assert len(read_video("a.mp4")[0]) == 17 and len(pngs("frames")) == 17


@pytest.mark.skipif(sys.platform == "win32", reason="nothing is locked there")
@pytest.mark.parametrize("out, part", [("frames", "frames.part"), ("a.mp4", "a.part.mp4")])
def test_second_run_is_refused(place, monkeypatch, capsys, out, part):
    writer = Mp4Writer if out == "a.mp4" else PngWriter
    write, codes = writer.write, []

    def twice(self, frames):
        write(self, frames)
        if not codes:
            codes.extend(place("decode", "l.safetensors", out, *more) for more in ((), ("--resume",), ("--force",)))

    monkeypatch.setattr(writer, "write", twice)
    assert place("decode", "l.safetensors", out, "--chunk", 1) == 0
    assert codes == [2, 2, 2]
    assert capsys.readouterr().err.count(f"{part}: another run is writing it; wait for it or choose another name") == 3
    assert len(read_video(out)[0]) == 19 and not Path(part).exists()


@pytest.mark.parametrize("out, part", [("frames", "frames.part"), ("a.mp4", "a.part.mp4")])
def test_result_made_meanwhile_stays(place, monkeypatch, capsys, out, part):
    writer = Mp4Writer if out == "a.mp4" else PngWriter
    finish = writer.finish

    def late(self, *sound):
        Path(out).mkdir()
        finish(self, *sound)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "finish", late)
        assert place("decode", "l.safetensors", out) == 2
    assert f"{out}: another run has made it meanwhile; give --resume --force to replace it by {part}" in (
        capsys.readouterr().err
    )
    assert not any(Path(out).iterdir())
    Path(out).rmdir()
    assert place("decode", "l.safetensors", out, "--resume") == 0
    assert ", 19 of them from the interrupted run, the others decoded in" in capsys.readouterr().out


@pytest.mark.parametrize("out", ["frames", "a.mp4"])
def test_killed_at_random_moments(tmp_path, vae_file, out):
    """Ten, five of each: what is finished stays, the name is there when all is, frames are those of a whole run."""
    write_latent(tmp_path / "z.safetensors", torch.randn(1, 16, 12, 2, 4, generator=torch.Generator().manual_seed(0)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, Path(__file__).parents[2] / "killed.py", vae_file, "z.safetensors", out, "5"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    before = 0
    for left, complete in found["left"]:
        assert left >= before or complete, found
        before = left
    assert found["again"] == 0 and any(left or complete for left, complete in found["left"]), found
    if out == "frames":
        assert same(pngs(tmp_path / out), pngs(tmp_path / "whole"))
    else:
        (a, fps), (b, _) = read_video(tmp_path / out), read_video(tmp_path / "whole.mp4")
        assert a.shape == b.shape == (45, 16, 32, 3) and fps == 8
        assert (a - b).abs().max() < 0.2  # other groups of pictures
    kept = {f.name for f in tmp_path.iterdir() if not f.name.startswith("done")}
    assert kept == {"z.safetensors", out, f"whole{Path(out).suffix}"}


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_a_full_disk_keeps_what_is_finished(place, monkeypatch, capsys, devices):
    save = Image.Image.save

    def full(self, file, **kind):
        if int(Path(file).stem[-6:]) >= 7:  # not by a count of calls: frames are written side by side
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(self, file, **kind)

    monkeypatch.setattr(
        "zerowaste_vae.engine.extras.distributed.shares.Leads.__call__", lambda self, first: 0.1 * bool(first)
    )
    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "save", full)
        assert place("decode", "l.safetensors", "frames", "--chunk", 1, "--devices", devices) == 2
    err = capsys.readouterr().err
    assert "frames.part: cannot be written (No space left on device)" in err and "Traceback" not in err
    assert "frames.part: 7 of 19 frames; the same command with --resume goes on from there" in err
    assert sorted(f.name for f in Path("frames.part").iterdir()) == [".zerowaste", *sorted(pngs("frames.part"))]
    assert not any(t.name.startswith("zerowaste") for t in threading.enumerate())
    assert place("decode", "l.safetensors", "frames", "--chunk", 1, "--resume") == 0
    assert len(pngs("frames")) == 19


def test_nobody_reads_what_is_said(place, vae_file):
    """The output is complete; there is no traceback."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "zerowaste_vae", "decode", "l.safetensors", "a.mp4", "--vae", vae_file, "--device",
         "cpu", "--verbose"],
        env=environment, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120,
    )  # fmt: skip
    os.close(write)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert len(read_video("a.mp4")[0]) == 19 and not Path("a.part.mp4").exists()


@pytest.mark.parametrize("out", ["a.mp4", "frames", "frames/"])
def test_resuming_what_is_complete_says_so(place, capsys, out):
    arguments = "decode", "l.safetensors", out, "--chunk", 1
    assert place(*arguments) == 0
    before = {f: f.stat().st_mtime_ns for f in Path().rglob("*")}
    capsys.readouterr()
    assert place(*arguments, "--resume") == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{out}: is complete (19 frames 30x15), nothing is left to resume") and said.count("\n") == 1
    assert place(*arguments, "--resume", "--quiet") == 0 and capsys.readouterr().out == ""
    assert place(*arguments, "--resume", "--start", 3) == 2
    assert "is another clip (19 frames of 30x1" in capsys.readouterr().err  # an MP4 has even sizes
    assert before == {f: f.stat().st_mtime_ns for f in Path().rglob("*")}
    assert place(*arguments, "--resume", "--force") == 0
    assert "decoded in" in capsys.readouterr().out
