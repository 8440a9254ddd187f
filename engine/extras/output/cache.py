"""Cache folder of the pack: measurements and packed weights, which are made again where they are lost.

Nothing is written next to the user's files. A folder that is missing or cannot be written costs time, not results."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ... import log
from .patience import clear
from .writing import Unplaced

T = TypeVar("T")


def cache_folder() -> Path | None:
    """Return $ZEROWASTE_CACHE, else the system's place for caches; log and return None without a home folder."""
    if named := os.environ.get("ZEROWASTE_CACHE"):
        return Path(named)
    try:
        if sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        log.once("no home folder to keep measurements and packed weights in; both are made again at every start. Name "
                 "a folder in $ZEROWASTE_CACHE")  # fmt: skip
        return None
    return base / "zerowaste-vae"


def stored(place: Path | None, parse: Callable[[Any], T], cure: str) -> T | None:
    """Return `parse` of a JSON file of the cache folder; None where there is none, or it is damaged.

    A damaged file is named in one line of the log, which ends in `cure`. parse: may raise a ValueError with a reason,
    or any error that wrong values cause.
    """
    try:
        return None if place is None else parse(json.loads(place.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = str(error) if type(error) is ValueError else type(error).__name__
        log.once(f"{place}: not usable ({' '.join(reason.split())[:200]}), {cure}")
        return None


def keep(place: Path | None, write: Callable[[Path], None]) -> None:
    """Make the folder of `place` and call write(place); log once where it cannot be written, or there is none."""
    try:
        if place is not None:
            place.parent.mkdir(parents=True, exist_ok=True)
            write(place)
    except OSError as error:
        if isinstance(error, Unplaced):  # it is made again
            clear(error.kept)
        reason = getattr(error, "why", error.strerror) or error
        log.once(f"{cache_folder()}: {reason}; what is measured and packed is made again at every start")
