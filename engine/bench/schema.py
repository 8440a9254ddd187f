"""The JSON that `bench` writes: what is in it, in which unit, and a check.

A file is {"schema": "zerowaste-vae/bench", "version": 1, "environment": {...}, "settings": {...}, "rows": [...]}.
The version goes up when a field changes its meaning or goes away; new fields may come without that.
"""

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
LOADED = {name: RAN[name] for name in ("first_s", "median_s", "low_s", "high_s", "runs")}


def report(kind: str, environment: Mapping[str, Any], settings: Mapping[str, Any], rows: list[Any]) -> dict[str, Any]:
    """A checked report of `kind` decode, encode or load."""
    made = {"schema": NAME, "version": VERSION, "kind": kind, "environment": dict(environment),
            "settings": dict(settings), "rows": rows}
    check(made, "this report")
    return made


def read(path: Path) -> dict[str, Any]:
    """A report from a file. Raises InputError where it is none."""
    found = read_json(path)
    check(found, str(path))
    return found


def read_profile(path: Path) -> dict[str, Any]:
    """The JSON of `profile`, of which `stages` [{name, ms, floor_ms or None}], per frame, are used. Raises InputError.
    """
    found = read_json(path)
    stages = found.get("stages") if isinstance(found, dict) else None
    wanted = (("name", _TEXT), ("ms", _NUMBER), ("floor_ms", _NUMBER))
    if not isinstance(stages, list) or not stages:
        raise InputError(f"{path}: holds no stages; give the JSON of `profile`")
    for stage in stages:
        known = isinstance(stage, dict) and {"floor_ms": 0, **{k: v for k, v in stage.items() if v is not None}}
        if not known or not all(isinstance(known.get(name), types) for name, types in wanted):
            raise InputError(f"{path}: a stage needs name, ms and floor_ms, not {stage!r}")
    return found


def read_json(path: Path) -> Any:
    """Any JSON file. Raises InputError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (ValueError, OSError) as error:
        raise InputError(f"{path}: is no JSON ({error})") from error


def check(found: Any, name: str) -> None:
    """Raise InputError, naming the field, unless `found` is a report of this version."""
    if not isinstance(found, dict) or found.get("schema") != NAME:
        raise InputError(f"{name}: is not a result of `bench decode`, `encode` or `load`")
    if found.get("version") != VERSION:
        raise InputError(f"{name}: has version {found.get('version')!r} of the format, this program reads {VERSION}")
    for part, kind in (("environment", dict), ("settings", dict), ("rows", list), ("kind", str)):
        if not isinstance(found.get(part), kind):
            raise InputError(f"{name}: {part} is missing or no {kind.__name__}")
    always, ran = (LOAD, LOADED) if found["kind"] == "load" else (ROW, RAN)
    for number, row in enumerate(found["rows"]):
        if not isinstance(row, dict):
            raise InputError(f"{name}: row {number} is no object")
        fields = always if row.get("skipped") is not None else {**always, **ran}
        for field, (types, optional, meaning) in fields.items():
            value = row.get(field)
            right = isinstance(value, types) and not isinstance(value, bool)
            if not right and not (optional and field in row and value is None):
                raise InputError(f"{name}: row {number}: {field} ({meaning}) is {value!r}")
