"""A folder of the pack's own for what it measured and prepared of each weight file. Nothing is written beside the
user's files, and a folder that cannot be written costs time, not results."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import log
from ..files import replacing
from .table import Table

#: Tables of other formats are measured anew.
FORMAT = 1
ASSETS = Path(__file__).resolve().parents[2] / "assets"
_WRONG = (OSError, ValueError, KeyError, TypeError, AttributeError)


def cache_folder() -> Path:
    """$ZEROWASTE_CACHE, else the system's place for caches."""
    if named := os.environ.get("ZEROWASTE_CACHE"):
        return Path(named)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "zerowaste-vae"


class Store:
    """What is kept of one weight file. Without a file (`path` None) it remembers nothing beyond its own life."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._digest: str | None = None
        self._tables: dict[str, Table] = {}

    def table(self, half: str) -> Table | None:
        """Measurements of "encoder" or "decoder": the user's own, else those that ship with the pack."""
        if half not in self._tables and self._path is not None:
            places = [self.folder / "tables.json", *sorted(ASSETS.glob("*.calibration.json"))]
            found = next((t for t in map(self._read, places) if half in t), {})
            self._tables.update({h: t for h, t in found.items() if h not in self._tables})
        return self._tables.get(half)

    def keep(self, half: str, table: Table) -> None:
        """Remember measurements, on disk too where there is a file to file them under."""
        self._tables[half] = table
        if self._path is not None:
            place = self.folder / "tables.json"
            self._write(place, self._document({**self._read(place), half: table}))

    def document(self) -> str:
        """All tables known of the file, as JSON; what ships in assets/ is such a document."""
        for half in ("encoder", "decoder"):
            self.table(half)
        return self._document(self._tables)

    def prepared(self, half: str) -> Path | None:
        """Where packed weights of a half are kept; None without a file to file them under."""
        return None if self._path is None else self.folder / f"{half}.safetensors"

    @property
    def folder(self) -> Path:
        return cache_folder() / self.digest[:16]

    @property
    def digest(self) -> str:
        """SHA-256 of the file; a note of size and time saves reading it again."""
        if self._digest is None:
            stat = self._path.stat()
            state = [stat.st_size, stat.st_mtime_ns]
            index = cache_folder() / "files.json"
            try:
                known = dict(json.loads(index.read_text(encoding="utf-8")))
            except _WRONG:
                known = {}
            name = str(self._path.resolve())
            entry = known.get(name)
            if isinstance(entry, list) and entry[:2] == state and len(entry) == 3:
                self._digest = str(entry[2])
            else:
                self._digest = _sha256(self._path)
                self._write(index, json.dumps({**known, name: [*state, self._digest]}))
        return self._digest

    def _document(self, tables: Mapping[str, Table]) -> str:
        halves = {half: table.as_dict() for half, table in sorted(tables.items())}
        return json.dumps({"format": FORMAT, "file": self.digest, "halves": halves}, separators=(",", ":")) + "\n"

    def _read(self, place: Path) -> dict[str, Table]:
        try:
            document: Any = json.loads(place.read_text(encoding="utf-8"))
            if document["format"] != FORMAT or document["file"] != self.digest:
                return {}
            return {half: Table.from_dict(values) for half, values in document["halves"].items()}
        except FileNotFoundError:
            return {}
        except _WRONG as error:
            log.once(f"{place}: not usable ({type(error).__name__}), measured anew")
            return {}

    @staticmethod
    def _write(place: Path, text: str) -> None:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with replacing(place) as temporary:
                temporary.write_text(text, encoding="utf-8")
        except OSError as error:
            log.once(f"{place}: {error.strerror or error}; measurements are made again at the next start")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
