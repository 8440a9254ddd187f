"""Safetensors files: the library checks the header, the data are read by ordinary reads."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from .reading import check_finite, failure, read_into, read_tensor_bytes

# Full checkpoints with thousands of tensors stay below 1 MB; the library would take 100 MB, ten times that parsed.
MAX_HEADER_BYTES = 16 << 20
# Limit for one tensor; no file is that large.
MAX_ELEMENTS = 1 << 40

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.uint8,  # torch 2.6 has no such type
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Entry:
    """One tensor: `offset` absolute in the file. `dtype` is the file's name for the type."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


def looks_like_safetensors(head: bytes) -> bool:
    """Return whether the first 9 bytes are a plausible header length and an opening brace."""
    return len(head) >= 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= MAX_HEADER_BYTES


def parse_header(file: BinaryIO, size: int, path: Path) -> tuple[dict[str, str], list[Entry]]:
    """Return metadata and tensors in file order. Raises CheckpointError for a file that the library would not
    accept."""
    prefix = bytearray(8)
    read_into(file, 0, memoryview(prefix), path, "the header length")
    length = int.from_bytes(prefix, "little")
    if 8 + length > size:
        raise failure(path, f"truncated safetensors: the header needs {length} bytes of a {size} byte file")
    text = bytearray(length)
    read_into(file, 8, memoryview(text), path, "the header")
    try:
        # Opening checks syntax, types, sizes, gaps, overlaps and the file's length. The library maps the file for this,
        # but only here and only the header is touched.
        with safe_open(path, framework="numpy"):
            pass
        header = json.loads(bytes(text))
        metadata = header.pop("__metadata__", None) or {}
        entries = [
            Entry(name, tuple(e["shape"]), e["dtype"], 8 + length + e["data_offsets"][0], _span(e["data_offsets"]))
            for name, e in header.items()
        ]
    except SafetensorError as error:
        raise failure(path, f"damaged or truncated safetensors: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise failure(path, f"damaged safetensors header ({type(error).__name__})") from error
    if not entries:
        raise failure(path, "contains no tensors")
    # The library read the file by its name, these are the bytes of the open file: accept only entries that fit both.
    for e in entries:
        if e.nbytes < 0 or e.offset < 8 + length or e.offset + e.nbytes > size:
            raise failure(path, f"tensor {e.name} lies outside the file; truncated download?")
        if math.prod(n or 1 for n in e.shape) >= MAX_ELEMENTS:  # torch counts strides even where there are no elements
            raise failure(path, f"damaged safetensors header: tensor {e.name} has the shape {e.shape}")
    return metadata, sorted(entries, key=lambda e: e.offset)


def read_tensor(file: BinaryIO, entry: Entry, path: Path) -> torch.Tensor:
    """Return the tensor in its stored type; fp8 becomes float16, and E8M0's powers of two float32, which hold every
    value exactly. NaN and infinity are refused."""
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise failure(path, f"tensor {entry.name} has the type {entry.dtype}, which is not supported")
    if math.prod(entry.shape) * dtype.itemsize != entry.nbytes:
        raise failure(path, f"tensor {entry.name} of shape {entry.shape} does not take {entry.nbytes} bytes")
    raw = read_tensor_bytes(file, entry.offset, entry.nbytes, path, f"tensor {entry.name}")
    tensor = raw.view(dtype).reshape(entry.shape)
    if dtype in FP8:
        tensor = tensor.to(torch.float16)
    elif entry.dtype == "F8_E8M0":
        tensor = power_of_two(tensor)
    check_finite(entry.name, tensor, path)
    return tensor


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2^(e - 127) in float32 of E8M0's bytes (uint8); 255 is NaN."""
    powers = exponents.int() << 23
    # The least of them is no normal number in float32.
    return powers.masked_fill(exponents == 0, 1 << 22).masked_fill(exponents == 255, 0x7FC00000).view(torch.float32)


def _span(offsets: list[int]) -> int:
    start, stop = offsets
    return stop - start
