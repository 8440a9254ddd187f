"""The JSON that `bench` writes: its fields, their units, and a check.

A file is {"schema": "zerowaste-vae/bench", "version": 1, "environment": {...}, "settings": {...}, "rows": [...]}. The
version goes up when a field changes its meaning or goes away; new fields may come without that."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import InputError

NAME, VERSION = "zerowaste-vae/bench", 1
#: `who` of this pack's own rows; every other name is a peer.
OURS = "this pack"
_NUMBER, _TEXT = (int, float), (str,)
#: Numbers must be smaller than this.
_MOST = 1e18

#: Fields of every row of decode and encode: (types, may be None, meaning).
ROW = {
    "half": (_TEXT, False, "decoder or encoder"),
    "who": (_TEXT, False, "this pack, or the peer"),
    "precision": (_TEXT, False, "what was asked for"),
    "width": ((int,), False, "pixels"),
    "height": ((int,), False, "pixels"),
    "frames": ((int,), False, "frames of the clip"),
    "target_gb": (_NUMBER, True, "memory target, None: automatic"),
    "skipped": (_TEXT, True, "why there are no figures; None: it ran"),
    "floor_s": (_NUMBER, False, "speed limit: composed FLOP / product rate + bytes / copy rate, seconds per clip"),
    "tflop": (_NUMBER, False, "TFLOP of the clip as the published network is written"),
    "composed_tflop": (_NUMBER, False, "TFLOP with composed upsamplers"),
    "values": (_NUMBER, False, "activations read and written at least"),
    "ceilings": ((dict,), False, "product: type, matrix: TFLOP/s, copy: TB/s (read + written)"),
}
#: Fields of a row that ran.
RAN = {
    "ran": (_TEXT, False, "what ran, in words"),
    "first_s": (_NUMBER, False, "first call, seconds"),
    "median_s": (_NUMBER, False, "median of the steady calls, seconds, host memory to host memory"),
    "low_s": (_NUMBER, False, "fastest"),
    "high_s": (_NUMBER, False, "slowest"),
    "runs": ((int,), False, "steady calls"),
    "ms_per_frame": (_NUMBER, False, "median / frames"),
    "floor_share": (_NUMBER, False, "speed limit / median, 1 is the speed limit"),
    "allocated_gb": (_NUMBER, True, "peak of torch's allocator; None on a CPU"),
    "reserved_gb": (_NUMBER, True, "peak that it reserved"),
    "process_gb": (_NUMBER, True, "CPU: largest resident size seen"),
    "trace": ((list,), False, "[seconds, allocated GB, reserved GB] of one watched call"),
    "db": (_NUMBER, True, "against fp32; None: see db_note"),
    "db_note": (_TEXT, False, "what db is, or why there is none"),
}
#: Fields of every row of load.
LOAD = {
    "file": (_TEXT, False, "name of the file"),
    "file_gb": (_NUMBER, False, "its size"),
    "precision": (_TEXT, False, "what was asked for"),
    "skipped": (_TEXT, True, "why there are no figures"),
}
#: Fields that only some rows have: may be None.
SOME = {"stated_gb": (_NUMBER, True, "peak that the plan stated")}
#: Fields of `ceilings`.
CEILINGS = {
    "product": (_TEXT, False, "type of the products"),
    "matrix": (_NUMBER, False, "TFLOP/s"),
    "copy": (_NUMBER, False, "TB/s, read + written"),
}
#: Fields of `settings` of decode and encode.
SETTINGS = {
    "weights": (_TEXT, False, "a name"),
    "architecture": (_TEXT, False, "family of the VAE"),
    "widths": ((list,), False, "of the decoder, from full to lowest resolution"),
    "runs": ((int,), False, "steady calls"),
    "input": (_TEXT, False, "what was decoded or encoded"),
}
#: Numbers that may be below 0, and divisors, which must not be 0.
_SIGNED, _DIVISORS = frozenset({"db"}), frozenset({"width", "height", "frames", "ms_per_frame", "floor_share"})
LOADED = {name: RAN[name] for name in ("first_s", "median_s", "low_s", "high_s", "runs")}


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
        _check_fields(found["settings"], SETTINGS, f"{path}: settings")
    return found


def read_profile(path: Path) -> dict[str, Any]:
    """Read the JSON of `profile`. Raises InputError.

    Its `stages` [{name, ms, floor_ms or None}], in ms per frame, are used."""
    found = read_json(path)
    stages = found.get("stages") if isinstance(found, dict) else None
    wanted = (("name", _TEXT), ("ms", _NUMBER), ("floor_ms", _NUMBER))
    if not isinstance(stages, list) or not stages:
        raise InputError(f"{path}: holds no stages; give the JSON of `profile`")
    for stage in stages:
        known = isinstance(stage, dict) and {"floor_ms": 0, **{k: v for k, v in stage.items() if v is not None}}
        if not known or not all(_fits(known.get(name), types) for name, types in wanted):
            raise InputError(f"{path}: a stage needs name, ms and floor_ms, not {repr(stage)[:80]}")
    return found


def read_json(path: Path) -> Any:
    """Read any JSON file. Raises InputError."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))  # editors on Windows begin files with a mark
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (ValueError, OSError, RecursionError) as error:
        raise InputError(f"{path}: is no JSON ({getattr(error, 'strerror', None) or error})") from error


def check(found: Any, name: str) -> None:
    """Raise InputError, naming the field, unless `found` is a report of this version."""
    if not isinstance(found, dict) or found.get("schema") != NAME:
        raise InputError(f"{name}: is not a result of `bench decode`, `encode` or `load`")
    if found.get("version") != VERSION:
        raise InputError(f"{name}: has version {found.get('version')!r} of the format, this program reads {VERSION}")
    for part, kind in (("environment", dict), ("settings", dict), ("rows", list), ("kind", str)):
        if not isinstance(found.get(part), kind):
            raise InputError(f"{name}: {part} is missing or no {kind.__name__}")
    load = found["kind"] == "load"
    always, ran = (LOAD, LOADED) if load else (ROW, {**RAN, **SOME})
    for number, row in enumerate(found["rows"]):
        if not isinstance(row, dict):
            raise InputError(f"{name}: row {number} is no object")
        place = f"{name}: row {number}"
        _check_fields(row, always if row.get("skipped") is not None else {**always, **ran}, place)
        if load:
            continue
        if row["half"] not in ("decoder", "encoder"):
            raise InputError(f"{place}: half ({ROW['half'][2]}) is {row['half']!r}")
        _check_fields(row["ceilings"], CEILINGS, f"{place}: ceilings")
        for point in row["trace"] if row["skipped"] is None else ():
            if not isinstance(point, list | tuple) or len(point) != 3 or not all(_fits(n, _NUMBER) for n in point):
                raise InputError(f"{place}: trace ({RAN['trace'][2]}) holds {repr(point)[:40]}")


def _check_fields(given: Mapping[str, Any], fields: Mapping[str, tuple], place: str) -> None:
    for field, (types, optional, meaning) in fields.items():
        value = given.get(field)
        absent = value is None and optional and (field in given or field in SOME)
        if not absent and not _fits(value, types, field):
            raise InputError(f"{place}: {field} ({meaning}) is {repr(value)[:40]}")


def _fits(value: Any, types: tuple[type, ...], field: str = "") -> bool:
    """Check that a value has one of the types and, if a number, lies in the range that a measurement can have."""
    if not isinstance(value, types) or isinstance(value, bool):
        return False
    if not isinstance(value, _NUMBER):
        return True
    least = -_MOST if field in _SIGNED else 0
    return least <= value < _MOST and (value > 0 or field not in _DIVISORS)
