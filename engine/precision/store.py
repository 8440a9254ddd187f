"""A folder of the pack's own for what it measured and prepared of each VAE. Nothing is written beside the user's files,
and a folder that is not there or cannot be written costs time, not results."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import log
from ..files.writing import replacing
from .table import Table

#: Tables of other formats are measured anew.
FORMAT = 2
ASSETS = Path(__file__).resolve().parents[2] / "assets"
_WRONG = (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError)


def cache_folder() -> Path | None:
    """$ZEROWASTE_CACHE, else the system's place for caches; None, and a line, where the user has no home folder."""
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


def say_unkept(error: OSError) -> None:
    """One line for all that a cache folder does not take."""
    log.once(f"{cache_folder()}: {error.strerror or error}; what is measured and packed is made again at every start")


class Store:
    """What is kept of one VAE, filed under what its weights hold.

    A table that `calibrate` made and one that 8-bit runs measure by themselves are files of their own, so that none of
    the latter, whichever process writes it and however old it is, takes the place of the former.
    """

    def __init__(self, digest: Callable[[], str] | None = None) -> None:
        """digest: of the weights (digest.digest), asked for once, when something is kept or looked up. None: nothing is
        remembered beyond this object's life."""
        self._digest = digest
        self._tables: dict[str, Table] = {}

    def table(self, half: str) -> Table | None:
        """Measurements of "encoder" or "decoder": from `calibrate`, the user's own or shipped with the pack, else those
        of the first clips."""
        if half not in self._tables and self._digest is not None:
            calibrated, measured = self._calibrated(half), self._read(self._place(half, "measured")).get(half)
            # Runs add what convolutions cost to a calibrated table, too: worth having as long as it is still that one.
            if calibrated is None or (measured is not None and measured.ranges == calibrated.ranges):
                calibrated = measured
            if calibrated is not None:
                self._tables[half] = calibrated
        return self._tables.get(half)

    def calibrate(self, half: str, table: Table) -> None:
        """Keep what the user has had measured."""
        self._tables[half] = table
        self._write(half, "calibrated", table)

    def measured(self, half: str, table: Table) -> Table:
        """Keep what a run has measured, unless `calibrate` has been here meanwhile, in whatever process. Returns the
        table that counts from now on."""
        self._tables[half] = table
        calibrated = None if self._digest is None else self._calibrated(half)
        if calibrated is not None and calibrated.ranges != table.ranges:
            self._tables[half] = calibrated
        else:
            self._write(half, "measured", table)
        return self._tables[half]

    def document(self) -> str:
        """All tables known of the VAE, as JSON; what ships in assets/ is such a document."""
        for half in ("encoder", "decoder"):
            self.table(half)
        return self._document(self._tables)

    def prepared(self, half: str) -> Path | None:
        """Where packed weights of a half are kept; None where there is no place for them."""
        return self.folder and self.folder / f"{half}.safetensors"

    @property
    def folder(self) -> Path | None:
        """Where all this is kept; None where there is no place for it."""
        cache = None if self._digest is None else cache_folder()
        return cache and cache / self.digest[:16]

    @functools.cached_property
    def digest(self) -> str:
        """Of the weights; empty where nothing is remembered."""
        return "" if self._digest is None else self._digest()

    @property
    def holds(self) -> bool:
        """Check whether the weights, which are all read, still are those that all this is filed under."""
        return self._digest is not None and self._digest() == self.digest

    def _calibrated(self, half: str) -> Table | None:
        places = [self._place(half, "calibrated"), *sorted(ASSETS.glob("*.calibration.json"))]
        return next((found[half] for found in map(self._read, places) if half in found), None)

    def _place(self, half: str, origin: str) -> Path | None:
        return self.folder and self.folder / f"{half}.{origin}.json"

    def _document(self, tables: Mapping[str, Table]) -> str:
        halves = {half: table.as_dict() for half, table in sorted(tables.items())}
        document = {"format": FORMAT, "weights": self.digest, "halves": halves}
        return json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"

    def _read(self, place: Path | None) -> dict[str, Table]:
        try:
            if place is None:
                return {}
            document: Any = json.loads(place.read_text(encoding="utf-8"))
            if document["format"] != FORMAT or document["weights"] != self.digest:
                return {}
            return {half: Table.from_dict(values) for half, values in document["halves"].items()}
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except _WRONG as error:
            reason = error if isinstance(error, ValueError) and "finite" in str(error) else type(error).__name__
            log.once(f"{place}: not usable ({reason}), measured anew")
            return {}

    def _write(self, half: str, origin: str, table: Table) -> None:
        place = self._place(half, origin)
        if place is None:
            return
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with replacing(place) as temporary:
                temporary.write_text(self._document({half: table}), encoding="utf-8")
        except OSError as error:
            say_unkept(error)
