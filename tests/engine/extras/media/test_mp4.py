"""MP4s that grow fragment by fragment: what is finished plays, and what was interrupted goes on."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction
from types import SimpleNamespace

import av
import pytest
import torch
from zerowaste_vae import InputError
from zerowaste_vae.engine.extras.media import fragments, mp4
from zerowaste_vae.engine.extras.media.clips import read_video
from zerowaste_vae.engine.extras.media.fragments import Appended, scan
from zerowaste_vae.engine.extras.media.mp4 import CODECS, PIXELS, Encoder, Format, Mp4Writer, part_of, write_mp4

from .numbered import counted, numbers, ramp, write


@pytest.fixture
def path(tmp_path):
    return tmp_path / "clip.mp4"


def test_dropped_alpha_said_once(path, monkeypatch):
    said = []
    monkeypatch.setattr("zerowaste_vae.engine.log.once", said.append)
    opaque = ramp(12)
    assert not write(path, opaque).transparent and not said
    clear = torch.cat((opaque, torch.rand(12, 48, 64, 1)), 3)
    writer = write(path.with_name("clear.mp4"), clear)
    assert writer.transparent and len(said) == 1
    assert said[0].startswith("clear.mp4: an MP4 holds no transparency") and "PNG" in said[0]
    assert numbers(writer.part) == counted(12)


def test_part_file_plays(path):
    """An unfinished file plays; the final name comes last."""
    writer = write(path, ramp(60))
    assert writer.done == 60 and writer.part == path.with_name("clip.part.mp4") == part_of(path)
    assert not path.exists()
    assert numbers(writer.part) == counted(60)
    writer.finish()
    assert numbers(path) == counted(60) and not writer.part.exists()
    with av.open(str(path)) as file:
        stream = file.streams.video[0]
        assert (stream.average_rate, stream.frames, stream.start_time) == (12, 60, 0)
        assert (stream.codec_context.color_range, stream.codec_context.colorspace) == (1, 1)
        assert (stream.codec_context.color_primaries, stream.codec_context.color_trc) == (1, 1)


def test_frames_are_copied_when_they_are_taken(path):
    """They wait for the encoder, and an iterable may fill one buffer again and again."""
    buffer = torch.empty(48, 64, 3)
    write_mp4(path, (buffer.copy_(frame) for frame in ramp(40)), 12)
    assert numbers(path) == counted(40)


@pytest.mark.parametrize("codec", list(CODECS))
@pytest.mark.parametrize("pixels", ["yuv420p", "yuv444p10"])
def test_a_file_goes_on_where_it_has_stopped(path, codec, pixels):
    pixels = "yuv420p10" if codec == "av1" and pixels == "yuv444p10" else pixels
    form = Format(Fraction(12), codec, pixels=pixels)
    write(path, ramp(30), form=form, identity="one clip")
    writer = write(path, ramp(31, 30), form=form, identity="one clip", resume=True)
    assert writer.done == 61
    writer.finish()
    assert numbers(path) == counted(61)
    with av.open(str(path)) as file:
        stream = file.streams.video[0]
        assert stream.codec_context.pix_fmt == PIXELS[pixels][0]
        times = [frame.pts * stream.time_base for frame in file.decode(stream)]
    assert times == [Fraction(n, 12) for n in range(61)]


def test_truncated_part_keeps_frames(path, tmp_path):
    """Whatever the number of lost bytes, whole frames are left."""
    whole = write(path, ramp(100)).part.read_bytes()
    header = len(scan(part_of(path)).header)
    for size in (0, header, header + 10, len(whole) // 3, len(whole) // 2, len(whole) - 1, len(whole)):
        (tmp_path / "cut.part.mp4").write_bytes(whole[:size])
        writer = Mp4Writer(tmp_path / "cut.mp4", Format(Fraction(12)), resume=True)
        there = writer.done
        assert there <= 100 and (there == 100) == (size == len(whole))
        with writer:
            writer.write(ramp(101 - there, there))
        writer.finish()
        assert numbers(tmp_path / "cut.mp4") == counted(101)


@pytest.mark.parametrize(("processors", "threads"), [(1, 1), (64, 16)])
def test_whole_frames_are_encoded_side_by_side(path, monkeypatch, processors, threads):
    """Threads that share each frame wait for each other."""
    monkeypatch.setattr(mp4, "cores", lambda: processors)
    makes, asked = Encoder.packets, set()

    def packets(self, *frame):
        context = self._stream.codec_context
        asked.add((context.thread_type.name, context.thread_count))
        return makes(self, *frame)

    monkeypatch.setattr(Encoder, "packets", packets)
    write(path, ramp(120))
    assert asked == {("FRAME", threads)}
    assert numbers(part_of(path)) == counted(120)


def test_another_clips_part_is_not_continued(path):
    write(path, ramp(20), identity="one clip")
    with pytest.raises(InputError, match=r"clip\.part\.mp4: is of another clip or was made with other settings"):
        Mp4Writer(path, Format(Fraction(12)), "another clip", resume=True)
    write(path.with_name("whole.mp4"), ramp(20), identity="another clip").finish()
    whole = path.with_name("whole.mp4").read_bytes()
    for foreign in (b"no video at all, but some bytes", whole, whole[:10]):  # a video that is in no fragments
        part_of(path).write_bytes(foreign)
        for identity in ("one clip", ""):
            if foreign is not whole or identity:
                with pytest.raises(InputError, match="is of another clip or was made with other settings"):
                    Mp4Writer(path, Format(Fraction(12)), identity, resume=True)
        assert part_of(path).read_bytes() == foreign


def test_damaged_fragment(path):
    """One that counts no samples, or whose boxes end behind it."""
    write(path, ramp(100))
    whole, complete = part_of(path).read_bytes(), scan(part_of(path))
    assert complete.fragments > 2
    at = whole.index(b"trun", whole.index(b"moof", whole.index(b"moof") + 4)) - 4
    traf = whole.rindex(b"traf", 0, at) - 4
    last = whole.rindex(b"moof") - 4
    for place, length, samples in ((at, 8, 24), (at, 15, 24), (traf, 1 << 31, 100)):
        part_of(path).write_bytes(whole[:place] + length.to_bytes(4, "big") + whole[place + 4 :])
        assert scan(part_of(path)).samples == samples
    part_of(path).write_bytes(whole[:last] + (20).to_bytes(4, "big") + b"moof\0\0\0\x0ctraf\0\0\0\x08trun")
    assert scan(part_of(path)).size == last


def refused_while_held(path, **options):
    """By the name of the part, which stays as it is."""
    before = part_of(path).read_bytes()
    with pytest.raises(InputError, match=r"clip\.part\.mp4: another run is writing it; wait for it or choose another"):
        Mp4Writer(path, Format(Fraction(12)), **options)
    assert part_of(path).read_bytes() == before


@pytest.mark.skipif(sys.platform == "win32", reason="nothing is locked there")
def test_two_runs_do_not_write_one_file(path):
    with Mp4Writer(path, Format(Fraction(12))) as writer:
        refused_while_held(path)
        writer.write(ramp(60))
        while not scan(part_of(path)).samples:
            time.sleep(0.01)
        for resume in (False, True):
            refused_while_held(path, resume=resume)
    refused_while_held(path, resume=True)  # until it has its name
    writer.finish()
    assert numbers(path) == counted(60)
    with pytest.raises(InputError, match="frame 5 is"), Mp4Writer(path, Format(Fraction(12))) as writer:
        writer.write(ramp(5))
        writer.write(torch.zeros(1, 32, 32, 3))
    assert Mp4Writer(path, Format(Fraction(12)), resume=True).done == writer.done


def no_locks(*_):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_what_nobody_can_lock_is_written(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", SimpleNamespace(flock=no_locks, LOCK_EX=2, LOCK_NB=4))
    first, second = write(path, ramp(30)), write(path, ramp(30, 30), resume=True)
    with pytest.raises(InputError, match=r"clip\.part\.mp4: holds 60 frames, not 30: another run has written to it"):
        first.finish()
    assert part_of(path).exists() and not path.exists()
    second.finish()
    assert numbers(path) == counted(60)


def test_stale_joined_parts_removed(path):
    """Remove stale parts of this file, and of no other."""
    left, others = f".{path.name}.0123456789abcdef.part", [".b.mp4.0123456789abcdef.part", f".{path.name}.1"]
    for name in (left, *others):
        path.with_name(name).write_bytes(b"half")
    write(path, ramp(20)).finish()
    assert {f.name for f in path.parent.iterdir()} == {path.name, *others}


def test_result_of_another_run_stays(path):
    writer = write(path, ramp(20), identity="one clip", force=False)
    path.write_bytes(b"another")
    with pytest.raises(InputError, match=r"clip\.mp4: another run has made it meanwhile; give --resume --force to"):
        writer.finish()
    assert path.read_bytes() == b"another" and {f.name for f in path.parent.iterdir()} == {path.name, writer.part.name}
    Mp4Writer(path, Format(Fraction(12)), "one clip", resume=True).finish()
    assert numbers(path) == counted(20)


def test_another_encoder_is_refused(path):
    write(path, ramp(20), identity="one clip")
    with pytest.raises(InputError, match="another version of the encoder wrote it"):
        write(path, ramp(5, 20, 64, 64), identity="one clip", resume=True)
    assert scan(part_of(path)).samples == 20


@pytest.mark.parametrize("pixels", ["yuv420p10", "yuv444p10"])
def test_small_h265_of_10_bits_is_written(tmp_path, pixels):
    """In a process of its own: with its usual blocks, x265 ends it (SIGSEGV or SIGABRT)."""
    sizes = [(32, 48), (320, 48), (64, 40), (48, 320)]
    program = f"""
import torch
from zerowaste_vae.engine.extras.media.mp4 import Format, Mp4Writer
for height, width in {sizes}:
    print(height, width, flush=True)
    writer = Mp4Writer(f"{{height}}.mp4", Format(25, "h265", None, {pixels!r}))
    with writer:
        writer.write(torch.rand(40, height, width, 3, generator=torch.Generator().manual_seed(0)))
    writer.finish()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout, done.stderr)
    for height, width in sizes:
        assert read_video(tmp_path / f"{height}.mp4")[0].shape == (40, height, width, 3)


@pytest.mark.parametrize(("codec", "pixels"), [("h265", "yuv420p10"), ("h265", "yuv420p"), ("av1", "yuv420p")])
def test_sizes_below_an_encoders_are_one_line(tmp_path, codec, pixels):
    form = Format(Fraction(25), codec, None, pixels)
    with pytest.raises(InputError, match="the encoder refused the clip"), Mp4Writer(tmp_path / "a.mp4", form) as writer:
        writer.write(torch.zeros(3, 2, 2, 3))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("run", "share"), [(1, 0), (2, 0), (3, 0.7)])
def test_a_full_disk_keeps_what_is_complete(path, monkeypatch, run, share):
    """In the first bytes of a first run, and of a second one, which begins anew, and late in a third."""
    put, written, noise = Appended._put, {}, torch.rand(90, 48, 64, 3, generator=torch.Generator().manual_seed(0))
    write(path, noise, form=Format(Fraction(12), crf=40))
    full, some = share * part_of(path).stat().st_size + 40, share > 0

    def limited(self, data):
        written[self] = written.get(self, 0) + len(data)
        if len(written) == run and written[self] > full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(Appended, "_put", limited)
        with pytest.raises(OSError, match=r"cannot be written \(No space left on device") as raised:
            for _ in range(run):
                write(path, noise, form=Format(Fraction(12), crf=40))
    assert len(written) == run
    assert raised.value.filename == str(part_of(path))
    assert part_of(path).exists() == some  # else no frame is complete
    assert not some or scan(part_of(path)).size == part_of(path).stat().st_size
    there = Mp4Writer(path, Format(Fraction(12), crf=40), resume=True).done
    assert there < 90 and (there > 0) == some
    writer = write(path, noise[there:], form=Format(Fraction(12), crf=40), resume=True)
    assert writer.done == 90


def test_full_disk_at_fragment_end(path, monkeypatch):
    """Not what the muxer makes of it when it is closed."""
    end = Appended._end

    def full(self):
        if self._kind == b"mdat":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        end(self)

    monkeypatch.setattr(Appended, "_end", full)
    with pytest.raises(OSError, match=r"cannot be written \(No space left on device"):
        write(path, torch.rand(90, 48, 64, 3, generator=torch.Generator().manual_seed(0)))


def test_second_interrupt_keeps_frames(path, monkeypatch):
    """Finished frames stay after a second Ctrl-C."""
    join = threading.Thread.join

    def impatient(self, *wait):
        if not self.name.startswith("encodes"):
            return join(self, *wait)
        while not part_of(path).exists() or not scan(part_of(path)).samples:
            time.sleep(0.01)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "join", impatient)
        writer = Mp4Writer(path, Format(Fraction(1)))
        with writer:
            writer.write(ramp(300))
            raise KeyboardInterrupt
    assert writer.done
    writer._thread.join()


KILLED = """
import sys
from fractions import Fraction
import torch
from zerowaste_vae.engine.extras.media.mp4 import Format, Mp4Writer
with Mp4Writer(sys.argv[1], Format(Fraction(12)), resume=True) as writer:
    first = writer.done
    print("begun", flush=True)
    for n in range(first, 100000):
        writer.write(torch.full((1, 48, 64, 3), n % 80 * 3).byte())
"""


def test_killed_at_any_moment(path):
    """Again and again, and the frames that were finished are there, each once."""
    draw, before = torch.Generator().manual_seed(0), 0
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", KILLED, path], env=environment, stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(0.1 + float(torch.rand((), generator=draw)))
        process.send_signal(signal.SIGKILL)
        process.wait()
        found = scan(part_of(path)) if part_of(path).exists() else fragments.Scan(0, 0, 0, b"")
        assert found.samples >= before
        before = found.samples
    if before:
        assert numbers(part_of(path))[:before] == counted(before)


def test_ten_bits_keep_what_eight_lose(path):
    frames = torch.linspace(0.4, 0.42, 64)[None, None, :, None].expand(3, 32, 64, 3)
    errors = {}
    for pixels in ("yuv444p", "yuv444p10"):
        write(path, frames, form=Format(Fraction(24), crf=0, pixels=pixels)).finish()
        errors[pixels] = (read_video(path)[0] - frames).abs().max().item()
    assert errors["yuv444p10"] < 0.7 * errors["yuv444p"]
    byte = frames.mul(255).round().byte()
    write(path, byte, form=Format(Fraction(24), crf=0, pixels="yuv444p10")).finish()
    assert (read_video(path)[0] * 255 - byte).abs().max() < 1.5


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"codec": "h266"}, "codec='h266' is not one of h264, h265, av1"),
        ({"pixels": "rgb"}, "pixels='rgb' is not one of"),
        ({"crf": 52}, "crf=52: h264 takes 0 .best. to 51"),
        ({"codec": "av1", "pixels": "yuv444p"}, "libsvtav1 does not make yuv444p: use yuv420p, yuv420p10"),
        ({"fps": Fraction(0)}, "must be above 0"),
        ({"fps": Fraction(10**400)}, "at most 10000"),
    ],
)
def test_formats_that_nobody_makes(options, says):
    with pytest.raises(InputError, match=says):
        Format(**{"fps": Fraction(24), **options})


def test_an_encoder_that_is_not_there(monkeypatch):
    monkeypatch.setattr(av, "codecs_available", {"libsvtav1"})
    with pytest.raises(InputError, match="has no libx264 encoder: use codec av1"):
        Format(Fraction(24))


def test_errors_in_between_end_the_thread(path):
    with pytest.raises(InputError, match="frame 5 is 32x32, the first one 64x48"):
        write(path, torch.zeros(5, 48, 64, 3).byte()) and None
        with Mp4Writer(path, Format(Fraction(12))) as writer:
            writer.write(ramp(5))
            writer.write(torch.zeros(1, 32, 32, 3))
    with pytest.raises(KeyboardInterrupt), Mp4Writer(path, Format(Fraction(12))) as writer:
        writer.write(ramp(40))
        raise KeyboardInterrupt
    assert writer.done == 40 and not writer._thread.is_alive()


def test_overwrite(tmp_path):
    """By default replaced, as its docstring says."""
    path, frames = tmp_path / "a.mp4", torch.rand(2, 16, 16, 3)
    write_mp4(path, frames, 24, overwrite=False)
    before = path.read_bytes()
    with pytest.raises(InputError, match=r"a\.mp4: exists already; .*overwrite=True"):
        write_mp4(path, iter(()), 24, overwrite=False)
    assert path.read_bytes() == before and [f.name for f in tmp_path.iterdir()] == ["a.mp4"]
    write_mp4(path, 1 - frames, 24)
    assert path.read_bytes() != before and "replaced" in write_mp4.__doc__
