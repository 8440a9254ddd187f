"""Locks by which two runs do not write one output at the same time. The system frees them when a process ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

from ...errors import InputError
from .patience import patiently


@contextmanager
def held(part: Path) -> Iterator[None]:
    """Lock an unfinished file or folder against other runs, until the body or the process ends. Where a file system
    can lock nothing, this has no effect. Raises InputError if another run has the lock."""
    lock = _lock_beside(part) if sys.platform == "win32" else _lock(part)
    if lock is None:
        raise InputError(f"{part}: another run is writing it; wait for it or choose another name")
    try:
        yield
    finally:
        os.close(lock)
        if sys.platform == "win32":
            with suppress(OSError):  # another run may have opened it by now
                os.unlink(_beside(part))


def _lock(part: Path) -> int | None:
    """Return a descriptor that holds the lock; None if another run has it."""
    import fcntl

    lock = os.open(part, os.O_RDONLY if part.is_dir() else os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = os.path.samestat(os.fstat(lock), part.stat())  # not renamed since it was opened
    except (BlockingIOError, FileNotFoundError):
        free = False
    except OSError:
        free = True
    if free:
        return lock
    os.close(lock)
    return None


def _lock_beside(part: Path) -> int | None:
    """Do the same on Windows, by a file of its own: there a locked byte cannot be written through another handle, a
    folder cannot be opened, and a folder with an open file cannot be renamed."""
    import msvcrt

    lock = patiently(lambda: os.open(_beside(part), os.O_RDWR | os.O_CREAT))
    try:
        msvcrt.locking(lock, msvcrt.LK_NBLCK, 1)
    except PermissionError:
        os.close(lock)
        return None
    except OSError:
        pass
    if not part.exists():  # the run that had the lock has finished it
        os.close(lock)
        return None
    return lock


def _beside(part: Path) -> Path:
    """Return the file that is locked for `part`: its name is shorter than that of a temporary file."""
    name = blake2b(os.path.normcase(part.name).encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return part.with_name(f".{name}.lock")
