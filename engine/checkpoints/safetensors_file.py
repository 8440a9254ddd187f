"""Safetensors files: checked as the library does, and read by ordinary reads.

The library maps a whole file even to check its header. Some network shares cannot map files, and a whole checkpoint may
be larger than the address space that a process is given.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch

from .reading import check_finite, failure, open_regular, read_into, read_tensor_bytes

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
#: Bits a value of the types that files may have and torch, or this package, has not.
_OTHERS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "U16": 16, "U32": 32, "U64": 64,
           "C64": 64}  # fmt: skip


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
    """Return metadata and tensors in file order. Raises CheckpointError for a file that the library would not accept:
    the tensors must lie one after the other, from the header's end to the file's, in the room that their shapes
    take."""
    prefix = bytearray(8)
    read_into(file, 0, memoryview(prefix), path, "the header length")
    length = int.from_bytes(prefix, "little")
    if 8 + length > size:
        raise failure(path, f"truncated safetensors: the header needs {length} bytes of a {size} byte file")
    if length > MAX_HEADER_BYTES:
        raise failure(path, f"damaged safetensors header: it is {length} bytes long")
    text = bytearray(length)
    read_into(file, 8, memoryview(text), path, "the header")
    try:
        header = json.loads(text.decode(), object_pairs_hook=_once, parse_constant=_no_json)
        metadata = header.pop("__metadata__", None) or {}
        entries = [_entry(name, e, 8 + length) for name, e in header.items()]
        texts = [*metadata, *metadata.values(), *header]
        if not all(isinstance(t, str) for t in texts):
            raise TypeError("a text is none")
        "".join(texts).encode()  # half of a pair of code units is no text
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise failure(path, f"damaged safetensors header ({type(error).__name__})") from error
    if not entries:
        raise failure(path, "contains no tensors")
    end = 8 + length
    for e in sorted(entries, key=lambda e: (e.offset, e.nbytes)):
        if e.offset + e.nbytes > size:
            raise failure(path, f"tensor {e.name} lies outside the file; truncated download?")
        if e.offset != end or e.nbytes < 0:
            raise failure(path, f"damaged safetensors header: tensor {e.name} does not follow the one before it")
        if math.prod(n or 1 for n in e.shape) >= MAX_ELEMENTS:  # torch counts strides even where there are no elements
            raise failure(path, f"damaged safetensors header: tensor {e.name} has the shape {e.shape}")
        bits = _bits(e.dtype)
        if bits is None:
            raise failure(path, f"tensor {e.name} has the type {e.dtype}, which is not known")
        if math.prod(e.shape) * bits != 8 * e.nbytes:
            raise failure(path, f"damaged safetensors header: tensor {e.name} of shape {e.shape} in {e.dtype} does not "
                                f"take {e.nbytes} bytes")  # fmt: skip
        end = e.offset + e.nbytes
    if end != size:
        raise failure(path, f"damaged or truncated safetensors: its tensors end at byte {end} of {size}")
    return metadata, sorted(entries, key=lambda e: e.offset)


def _entry(name: str, given: dict[str, Any], start: int) -> Entry:
    """Return a header's entry; raises TypeError, ValueError or KeyError where it is none."""
    (first, end), shape, dtype = given["data_offsets"], given["shape"], given["dtype"]
    # bool is no number here, and torch has no tensors of more axes
    if not isinstance(dtype, str) or len(shape) > 64 or any(type(n) is not int for n in (first, end, *shape)):
        raise TypeError(f"no entry: {name}")
    if not all(0 <= n < 1 << 64 for n in (first, end, *shape)):
        raise TypeError(f"no entry: {name}")
    return Entry(name, tuple(shape), dtype, start + first, end - first)


def _bits(dtype: str) -> int | None:
    return 8 * DTYPES[dtype].itemsize if dtype in DTYPES else _OTHERS.get(dtype)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _no_json(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


@contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, dict[str, str], dict[str, Entry]]]:
    """Provide an open file, its metadata and its tensors by their names. Raises CheckpointError."""
    with open_regular(path) as (file, size):
        head = bytearray(min(size, 9))
        read_into(file, 0, memoryview(head), path, "the first bytes")
        if not looks_like_safetensors(head):
            raise failure(path, "is not a safetensors file, or its beginning is damaged")
        metadata, entries = parse_header(file, size, path)
        yield file, metadata, {e.name: e for e in entries}


def read_values(file: BinaryIO, entry: Entry, first: int, count: int, path: Path) -> torch.Tensor:
    """Return `count` values of a tensor, from the one with number `first` on, as a row in their stored type."""
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise failure(path, f"tensor {entry.name} has the type {entry.dtype}, which is not supported")
    offset, size = entry.offset + first * dtype.itemsize, count * dtype.itemsize
    return read_tensor_bytes(file, offset, size, path, f"tensor {entry.name}").view(dtype)


def read_tensor(file: BinaryIO, entry: Entry, path: Path) -> torch.Tensor:
    """Return the tensor in its stored type; fp8 becomes float16, and E8M0's powers of two float32, which hold every
    value exactly. NaN and infinity are refused."""
    tensor = read_values(file, entry, 0, math.prod(entry.shape), path).reshape(entry.shape)
    if tensor.dtype in FP8:
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
