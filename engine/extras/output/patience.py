"""Rename and remove files that another program holds for a moment.

On Windows virus scanners and indexers open a file as soon as it is written. Until they have read it, it cannot be
renamed or removed (WinError 5 and 32), mostly for some milliseconds.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

#: Seconds before each further try: 2.8 in all.
WAITS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.2)
#: Waits; tests replace it.
pause = time.sleep


def patiently(call: Callable[[], T]) -> T:
    """Return call(), tried again while the system denies it. Raises the last PermissionError."""
    for seconds in WAITS:
        try:
            return call()
        except PermissionError:
            pause(seconds)
    return call()


def replace(source: Path, target: Path) -> None:
    """Rename a file or folder; a file at `target` is replaced. Raises OSError."""
    patiently(lambda: os.replace(source, target))


def remove(path: Path) -> None:
    """Remove a file or a folder with all that is in it, if it is there. Raises OSError."""
    with suppress(FileNotFoundError):
        patiently(lambda: shutil.rmtree(path) if path.is_dir() else path.unlink())


def clear(path: Path) -> str:
    """Remove a file or folder that is not needed any more; return why it is left where it is, "" if it is gone."""
    try:
        remove(path)
    except OSError as error:
        return error.strerror or str(error)
    return ""
