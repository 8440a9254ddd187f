"""Two runs do not write one output at the same time, on Windows either: its way to lock stands on Linux' here."""

import errno
import os
import subprocess
import sys
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from zerowaste_vae.engine import InputError
from zerowaste_vae.engine.extras.media.mp4 import Mp4Writer
from zerowaste_vae.engine.extras.media.mp4_format import Format
from zerowaste_vae.engine.extras.media.pngs import PngWriter
from zerowaste_vae.engine.extras.output.locks import held

fcntl = pytest.importorskip("fcntl", reason="what Windows has is simulated on another system")
BUSY = "another run is writing it; wait for it or choose another name"


def locking(descriptor, mode, count):
    """msvcrt's, which refuses as C does there."""
    assert (mode, count) == (2, 1)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PermissionError(errno.EACCES, "Permission denied") from None


@pytest.fixture(params=["here", "win32"])
def system(request, monkeypatch):
    if request.param == "win32":
        monkeypatch.setattr(sys, "platform", "win32")
        monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(LK_NBLCK=2, locking=locking))
        monkeypatch.setitem(sys.modules, "fcntl", None)
    return request.param


@pytest.mark.parametrize("kind", ["clip.mp4", "frames"])
def test_two_runs_exclude_each_other(tmp_path, system, kind):
    """The second one is refused in one line, whatever it would do, and changes nothing; a third one may go on."""
    def writer(**options):
        if kind == "frames":
            return PngWriter(tmp_path / kind, **options)
        return Mp4Writer(tmp_path / kind, Format(Fraction(24)), **options)

    with writer() as first:
        first.write(torch.rand(3, 16, 16, 3))
        for resume in (False, True):
            with pytest.raises(InputError, match=BUSY):
                writer(resume=resume)
    with pytest.raises(InputError, match=BUSY):
        writer(resume=True)  # until it has its name
    first.finish()
    assert [each.name for each in tmp_path.iterdir()] == [kind]
    with writer() as third:
        third.write(torch.rand(2, 16, 16, 3))
    third.finish()
    assert [each.name for each in tmp_path.iterdir()] == [kind]


def test_the_lock_of_a_process_that_ended(tmp_path, system):
    """It is free, although its file is still there."""
    part = tmp_path / "a.part"
    part.touch()
    program = f"""
import os, sys
from pathlib import Path
if {system == "win32"}:
    import fcntl
    from types import SimpleNamespace
    sys.platform, sys.modules["msvcrt"] = "win32", SimpleNamespace(
        LK_NBLCK=2, locking=lambda lock, mode, count: fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB))
from zerowaste_vae.engine.extras.output.locks import held
lock = held(Path({str(part)!r}))
lock.__enter__()
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert len(list(tmp_path.iterdir())) == (2 if system == "win32" else 1)
    with held(part):
        pass
    assert [each.name for each in tmp_path.iterdir()] == ["a.part"]


def test_a_file_system_without_locks(tmp_path, system, monkeypatch):
    """Both runs go on, as nothing can be known."""
    def none(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", none)
    part = tmp_path / "a.part"
    part.touch()
    with held(part), held(part):
        pass
