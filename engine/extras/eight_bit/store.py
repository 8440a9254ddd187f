"""Measurements and packed weights of each VAE, in the cache folder."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..output.cache import cache_folder, keep, stored
from ..output.writing import write_text
from .table import Table

#: Version of the files. Tables of other versions are ignored and measured again.
FORMAT = 2
ASSETS = Path(__file__).resolve().parents[3] / "assets"


class Store:
    """Store of one VAE's measurements and packed weights, in a folder named after the digest of its weights.

    A table that `calibrate` made and one that 8-bit runs measure by themselves are separate files, so that the latter,
    whichever process writes it and however old it is, never replaces the former.
    """

    def __init__(self, digest: Callable[[], str] | None = None) -> None:
        """Prepare a store.

        digest: returns the digest of the weights (digest.digest); it is called when something is first stored or looked
        up, and by `holds`. None: nothing is kept beyond this object's life."""
        self._digest = digest
        self._tables: dict[str, Table] = {}

    def table(self, half: str) -> Table | None:
        """Return the measurements of "encoder" or "decoder", or None.

        They are those of `calibrate`, the user's or the ones shipped with the pack, else those of the first clips."""
        if half not in self._tables and self._digest is not None:
            calibrated, measured = self._calibrated(half), self._read(self._place(half, "measured")).get(half)
            # Runs also add errors of convolutions to a calibrated table: use them as long as its ranges are the same.
            if calibrated is None or (measured is not None and measured.ranges == calibrated.ranges):
                calibrated = measured
            if calibrated is not None:
                self._tables[half] = calibrated
        return self._tables.get(half)

    def calibrate(self, half: str, table: Table) -> None:
        """Store a table that the user has asked to measure."""
        self._tables[half] = table
        self._write(half, "calibrated", table)

    def measured(self, half: str, table: Table) -> Table:
        """Store a table that a run has measured, unless any process has calibrated the VAE meanwhile.

        Returns:
            The table that is valid from now on.
        """
        self._tables[half] = table
        calibrated = None if self._digest is None else self._calibrated(half)
        if calibrated is not None and calibrated.ranges != table.ranges:
            self._tables[half] = calibrated
        else:
            self._write(half, "measured", table)
        return self._tables[half]

    def document(self) -> str:
        """Return all known tables of the VAE as JSON; the files in assets/ are such documents."""
        for half in ("encoder", "decoder"):
            self.table(half)
        return self._document(self._tables)

    def prepared(self, half: str) -> Path | None:
        """Return the file for a component's packed weights; None where there is no cache folder."""
        return self.folder and self.folder / f"{half}.safetensors"

    @property
    def folder(self) -> Path | None:
        """Return the VAE's folder; None where there is no cache folder."""
        cache = None if self._digest is None else cache_folder()
        return cache and cache / self.digest[:16]

    @functools.cached_property
    def digest(self) -> str:
        """Return the digest of the weights; empty where nothing is kept."""
        return "" if self._digest is None else self._digest()

    @property
    def holds(self) -> bool:
        """Check that the weights still have the digest that this folder is named after; reads all of them."""
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
        def tables(document: Any) -> dict[str, Table]:
            if document["format"] != FORMAT or document["weights"] != self.digest:
                return {}
            return {half: Table.from_dict(values) for half, values in document["halves"].items()}

        return stored(place, tables, "measured anew") or {}

    def _write(self, half: str, origin: str, table: Table) -> None:
        keep(self._place(half, origin), lambda place: write_text(place, self._document({half: table})))
