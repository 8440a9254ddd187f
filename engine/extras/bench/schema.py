"""The JSON that `bench` writes: its fields, their units, and a check.

A file is {"schema": "zerowaste-vae/bench", "version": 1, "environment": {...}, "settings": {...}, "rows": [...]}. The
version goes up when a field changes its meaning or goes away; new fields may come without that."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import InputError

NAME, VERSION = "zerowaste-vae/bench", 1
#: `who` of this pack's own rows; every other name is a peer.
OURS = "this pack"
_NUMBER = int | float
#: Numbers must be smaller than this.
_MOST = 1e18

PARTS = {
    "kind": (str, "decode, encode or load"),
    "environment": (dict, "hardware and versions"),
    "settings": (dict, "what was asked for"),
    "rows": (list, "measurements"),
}
#: Fields of every row of decode and encode: (type, meaning).
ROW = {
    "half": (str, "decoder or encoder"),
    "who": (str, "this pack, or the peer"),
    "precision": (str, "what was asked for"),
    "width": (int, "pixels"),
    "height": (int, "pixels"),
    "frames": (int, "frames of the clip"),
    "target_gb": (_NUMBER | None, "memory target, None: automatic"),
    "skipped": (str | None, "why there are no figures; None: it ran"),
    "floor_s": (_NUMBER, "speed limit: composed FLOP / product rate + bytes / copy rate, seconds per clip"),
    "tflop": (_NUMBER, "TFLOP of the clip as the published network is written"),
    "composed_tflop": (_NUMBER, "TFLOP with composed upsamplers"),
    "values": (_NUMBER, "activations read and written at least"),
    "ceilings": (dict, "product: type, matrix: TFLOP/s, copy: TB/s (read + written)"),
}
#: Fields of a row that ran.
RAN = {
    "ran": (str, "what ran, in words"),
    "first_s": (_NUMBER, "first call, seconds"),
    "median_s": (_NUMBER, "median of the steady calls, seconds, host memory to host memory"),
    "low_s": (_NUMBER, "fastest"),
    "high_s": (_NUMBER, "slowest"),
    "runs": (int, "steady calls"),
    "ms_per_frame": (_NUMBER, "median / frames"),
    "floor_share": (_NUMBER, "speed limit / median, 1 is the speed limit"),
    "allocated_gb": (_NUMBER | None, "peak of torch's allocator; None on a CPU"),
    "reserved_gb": (_NUMBER | None, "peak that it reserved"),
    "process_gb": (_NUMBER | None, "CPU: largest resident size seen"),
    "trace": (list, "[seconds, allocated GB, reserved GB] of one watched call"),
    "db": (_NUMBER | None, "against fp32; None: see db_note"),
    "db_note": (str, "what db is, or why there is none"),
    "stated_gb": (_NUMBER | None, "peak that the plan stated"),
}
#: Fields of every row of load, and of one that ran.
LOAD = {
    "file": (str, "name of the file"),
    "file_gb": (_NUMBER, "its size"),
    "precision": (str, "what was asked for"),
    "skipped": (str | None, "why there are no figures"),
}
LOADED = {name: RAN[name] for name in ("first_s", "median_s", "low_s", "high_s", "runs")}
#: Fields of `ceilings`.
CEILINGS = {
    "product": (str, "type of the products"),
    "matrix": (_NUMBER, "TFLOP/s"),
    "copy": (_NUMBER, "TB/s, read + written"),
}
#: Fields of `settings` of decode and encode.
SETTINGS = {
    "weights": (str, "a name"),
    "architecture": (str, "family of the VAE"),
    "widths": (list, "of the decoder, from full to lowest resolution"),
    "runs": (int, "steady calls"),
    "input": (str, "what was decoded or encoded"),
}
#: Fields of each of the `stages` of a profile.
STAGE = {
    "name": (str, "the stage"),
    "ms": (_NUMBER, "milliseconds per frame"),
    "floor_ms": (_NUMBER | None, "speed limit"),
}
#: Numbers that may be below 0, divisors, which must not be 0, and fields that rows of peers and old files lack.
_SIGNED, _DIVISORS = frozenset({"db"}), frozenset({"width", "height", "frames", "ms_per_frame", "floor_share"})
_LACKING = frozenset({"stated_gb", "floor_ms"})
Fields = Mapping[str, tuple[Any, str]]


def report(kind: str, environment: Mapping[str, Any], settings: Mapping[str, Any], rows: list[Any]) -> dict[str, Any]:
    """Return a checked report.

    Args:
        kind: "decode", "encode" or "load".
        environment: result of `environment`.
        settings: fields as in SETTINGS.
        rows: measured rows.

    Raises: InputError if a field is missing or impossible.
    """
    made = {"schema": NAME, "version": VERSION, "kind": kind, "environment": dict(environment),
            "settings": dict(settings), "rows": rows}
    check(made, "this report")
    return made


def read(path: Path) -> dict[str, Any]:
    """Read a report from a file. Raises InputError where the file is not one."""
    found = read_json(path)
    check(found, str(path))
    if found["kind"] != "load":
        _check(found["settings"], SETTINGS, f"{path}: settings")
    return found


def read_profile(path: Path) -> dict[str, Any]:
    """Read the JSON of `profile`, of which the `stages` are used. Raises InputError where the file is not one."""
    found = read_json(path)
    stages = found.get("stages") if isinstance(found, dict) else None
    if not isinstance(stages, list) or not stages:
        raise InputError(f"{path}: holds no stages; give the JSON of `profile`")
    for number, stage in enumerate(stages):
        _check(stage, STAGE, f"{path}: stage {number}")
    return found


def read_json(path: Path) -> Any:
    """Read any JSON file. Raises InputError."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))  # editors on Windows begin files with a mark
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is no JSON ({error})") from error


def check(found: Any, name: str) -> None:
    """Raise InputError, naming the field, unless `found` is a report of this version."""
    if not isinstance(found, dict) or found.get("schema") != NAME:
        raise InputError(f"{name}: is not a result of `bench decode`, `encode` or `load`")
    if found.get("version") != VERSION:
        raise InputError(f"{name}: has version {found.get('version')!r} of the format, this program reads {VERSION}")
    _check(found, PARTS, name)
    load = found["kind"] == "load"
    always, ran = (LOAD, LOADED) if load else (ROW, RAN)
    for number, row in enumerate(found["rows"]):
        place = f"{name}: row {number}"
        _check(row, always, place)
        if row["skipped"] is None:
            _check(row, ran, place)
        if load:
            continue
        if row["half"] not in ("decoder", "encoder"):
            raise InputError(f"{place}: half ({ROW['half'][1]}) is {row['half']!r}")
        _check(row["ceilings"], CEILINGS, f"{place}: ceilings")
        for point in row["trace"] if row["skipped"] is None else ():
            if not isinstance(point, list | tuple) or len(point) != 3 or not all(_fits(n, _NUMBER) for n in point):
                raise InputError(f"{place}: trace ({RAN['trace'][1]}) holds {repr(point)[:40]}")


def _check(given: Any, fields: Fields, place: str) -> None:
    if not isinstance(given, dict):
        raise InputError(f"{place} is no object: {repr(given)[:40]}")
    for field, (kind, meaning) in fields.items():
        value = given.get(field)
        if (field not in given and field not in _LACKING) or not _fits(value, kind, field):
            raise InputError(f"{place}: {field} ({meaning}) is {repr(value)[:40]}")


def _fits(value: Any, kind: Any, field: str = "") -> bool:
    """Check that a value has a type and, if a number, lies in the range that a measurement can have."""
    if isinstance(value, bool) or not isinstance(value, kind):
        return False
    if not isinstance(value, _NUMBER):
        return True
    least = -_MOST if field in _SIGNED else 0
    return least <= value < _MOST and (value > 0 or field not in _DIVISORS)
