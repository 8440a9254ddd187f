"""Options of Zero-Waste VAE Save, the check of its file name, and the text of its report."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

from ..engine import Checkpoint, InputError
from ..engine.files.checkpoint.convert import Conversion
from ..engine.files.checkpoint.quantize import PLAIN, TYPES
from ..engine.files.checkpoint.reading import one_line

#: Characters of a file's name before the counter; file systems take 255 bytes, counter and suffix among them.
MOST_CHARACTERS = 150
_SUFFIXES = (".safetensors", ".sft", ".gguf")
DEFAULT_TYPE = "safetensors f16"
#: Widget value -> (file suffix, type of the weights). Only GGUF can hold block types.
SAVE_TYPES = {
    **{f"safetensors {t}": (".safetensors", t) for t in PLAIN},
    **{f"gguf {t}": (".gguf", t) for t in TYPES},
}


def without_suffix(prefix: str) -> str:
    """Return a prefix without the suffix of a file, which is added anyway."""
    for suffix in _SUFFIXES:
        if prefix.lower().endswith(suffix):
            return prefix[: -len(suffix)]
    return prefix


def dated(prefix: str, now: datetime) -> str:
    """Return a prefix with its %date:FORMAT% filled in as ComfyUI's frontend does for its own nodes: d, dd, M, MM, yy,
    yyyy, h, hh, m, mm, s and ss stand for numbers, everything else for itself."""

    def filled(found: re.Match[str]) -> str:
        part = found.group()
        if part[0] == "y":
            return f"{now.year:04}"[-len(part) :]
        number = {"d": now.day, "M": now.month, "h": now.hour, "m": now.minute, "s": now.second}[part[0]]
        return f"{number:0{len(part)}}"

    return re.sub(r"%date:([^%]*)%", lambda date: re.sub(r"yyyy|yy|dd?|MM?|hh?|mm?|ss?", filled, date[1]), prefix)


def check_prefix(output: Path, prefix: str) -> None:
    """Refuse a prefix that names no file, or one outside `output` (through links as well). Raises InputError."""
    if not prefix.isprintable():
        raise InputError(f"filename_prefix={prefix!r}: line breaks and control characters cannot be in a file's name")
    longest = max(len(part.encode()) for part in re.split(r"[/\\]", prefix))
    if longest > MOST_CHARACTERS:
        raise InputError(
            f"filename_prefix={prefix[:40]!r}... is too long: a name of {longest} bytes, and at most {MOST_CHARACTERS} "
            "leave room for the counter and the suffix"
        )
    try:
        folder, target = output.resolve(), (output / prefix).resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"filename_prefix={prefix!r} is not a path on this system: {one_line(str(error))}") from error
    if target == folder:
        raise InputError(f"filename_prefix={prefix!r} names no file: write a name, or folder/name")
    if folder not in target.parents:
        raise InputError(f"filename_prefix={prefix!r} leads out of the output folder: write a name, or folder/name")


def describe(result: Conversion, checkpoint: Checkpoint, seconds: float) -> str:
    """Return one line: file, type, size, that size relative to two bytes per value, time."""
    share = result.bytes_written / (2 * sum(t.numel() for t in checkpoint.tensors.values()))
    return (
        f"{one_line(str(result.path))}: {result.type}, {result.bytes_written / 2**20:.1f} MiB, {share:.1%} of f16, "
        f"written and read back in {seconds:.2f} s"
    )
