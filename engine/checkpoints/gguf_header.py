"""GGUF header parser: every count, length and offset is checked against the file before it is used.

Layout (little endian): magic, version, tensor count, key/value count, key/values, tensor infos, padding, data. A reader
that trusts these numbers can be made to hang, to allocate without end or to read outside the data.
"""

from __future__ import annotations

import math
import struct
import unicodedata
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, NoReturn

import numpy as np

from .gguf_types import GGUFType, refusal, types
from .reading import failure, os_failure

# A VAE has 100 to 700 tensors and a few dozen keys; the limits leave room for full checkpoints with tokenizers.
MAX_TENSORS = 20_000
MAX_KEYS = 65_536
MAX_HEADER_BYTES = 64 << 20
MAX_STRING_BYTES = 1 << 20
# Limits for all arrays of a file together: each number costs up to 40 bytes in a Python list, each string about 60.
MAX_ARRAY_NUMBERS = 4 << 20
MAX_ARRAY_STRINGS = 1 << 20
MAX_NAME_BYTES = 512
MAX_DIMS = 8
MAX_ELEMENTS = 1 << 31
MAX_ALIGNMENT = 1 << 20

_BOOL, _STRING, _ARRAY = 7, 8, 9
# Value type id -> struct format; numpy reads the same letters for arrays.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}
_INTEGER_TYPES = (0, 1, 2, 3, 4, 5, 10, 11)
_UINT32 = 4


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: `shape` in torch order, `offset` absolute in the file."""

    name: str
    shape: tuple[int, ...]
    type: GGUFType
    offset: int
    nbytes: int


@dataclass
class Header:
    """Key/values as Python values, the value type ids (element type for arrays), and the tensors in file order."""

    values: dict[str, object] = field(default_factory=dict)
    value_types: dict[str, int] = field(default_factory=dict)
    tensors: list[TensorInfo] = field(default_factory=list)

    def is_integer_array(self, key: str) -> bool:
        return isinstance(self.values.get(key), list) and self.value_types[key] in _INTEGER_TYPES


class _Cursor:
    """Sequential reads that never pass the end of the file or the header limit."""

    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self.file, self.size, self.path, self.offset = file, size, path, 0
        self.numbers = self.strings = 0  # elements of arrays so far

    def fail(self, message: str) -> NoReturn:
        raise failure(self.path, message)

    def require(self, count: int, what: str) -> None:
        if self.offset + count > self.size:
            self.fail(f"truncated or damaged GGUF: {what} needs {count} bytes at offset {self.offset} of {self.size}")
        if self.offset + count > MAX_HEADER_BYTES:
            self.fail(f"GGUF header is larger than {MAX_HEADER_BYTES >> 20} MiB (at {what})")

    def take(self, count: int, what: str) -> bytes:
        self.require(count, what)
        try:
            data = self.file.read(count)
        except OSError as error:
            raise os_failure(self.path, error, f"read {what}") from error
        if len(data) != count:
            self.fail(f"the file shrank while {what} was being read; copy or download it again")
        self.offset += count
        return data

    def number(self, form: str, what: str) -> int | float:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form), what))[0]

    def text(self, what: str, low: int, high: int) -> str:
        length = self.number("Q", f"the length of {what}")
        if not low <= length <= high:
            self.fail(f"{what} is {length} bytes long, expected {low} to {high}")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not valid UTF-8")


def parse_header(file: BinaryIO, size: int, path: Path) -> Header:
    """Parse and check everything before the data. `file` is at its start. Raises CheckpointError."""
    cursor = _Cursor(file, size, path)
    tensor_count, key_count = _parse_counts(cursor)
    header = Header()
    for i in range(key_count):
        key = cursor.text(f"key {i}", 1, 65_535)
        if key in header.values:
            cursor.fail(f"key {key} occurs twice")
        kind = cursor.number("I", f"the type of {key}")
        header.value_types[key], header.values[key] = _parse_value(cursor, kind, key)
    alignment = _alignment(cursor, header)
    shards = header.values.get("split.count")
    if isinstance(shards, int) and shards > 1:
        cursor.fail(f"is one of {shards} shards of a split GGUF; merge the shards into one file first")

    raw = [_parse_tensor_info(cursor, i) for i in range(tensor_count)]
    base = -(-cursor.offset // alignment) * alignment
    seen: set[str] = set()
    for name, shape, type_, offset in raw:
        if name in seen:
            cursor.fail(f"tensor {name} occurs twice")
        seen.add(name)
        nbytes = type_.nbytes(math.prod(shape))
        if offset % alignment:
            cursor.fail(f"tensor {name} starts at offset {offset}, not a multiple of the alignment {alignment}")
        if base + offset + nbytes > size:
            end = base + offset + nbytes
            cursor.fail(f"tensor {name} ends at byte {end} of a {size} byte file; truncated download?")
        header.tensors.append(TensorInfo(name, shape, type_, base + offset, nbytes))
    _refuse_overlaps(cursor, header.tensors)
    return header


def _parse_counts(cursor: _Cursor) -> tuple[int, int]:
    if cursor.take(4, "the magic number") != b"GGUF":
        cursor.fail("is not a GGUF file")
    version = cursor.number("I", "the version")
    if version not in (2, 3):
        if int.from_bytes(struct.pack("<I", version), "big") in (2, 3):
            cursor.fail("big-endian GGUF is not supported; convert the file to little endian")
        cursor.fail(f"GGUF version {version} is not supported (2 and 3 are)")
    tensor_count = cursor.number("Q", "the tensor count")
    key_count = cursor.number("Q", "the key count")
    if tensor_count == 0:
        cursor.fail("contains no tensors")
    # The smallest tensor info takes 24 bytes and the smallest key/value 13: larger counts cannot fit the file.
    if tensor_count > MAX_TENSORS or tensor_count * 24 > cursor.size:
        cursor.fail(f"claims {tensor_count} tensors in {cursor.size} bytes; truncated or damaged")
    if key_count > MAX_KEYS or key_count * 13 > cursor.size:
        cursor.fail(f"claims {key_count} keys in {cursor.size} bytes; truncated or damaged")
    return tensor_count, key_count


def _parse_value(cursor: _Cursor, kind: int, key: str) -> tuple[int, object]:
    """Return (type id, value); for an array the id is its element type."""
    if kind == _ARRAY:
        return _parse_array(cursor, key)
    if kind == _STRING:
        return kind, cursor.text(f"the value of {key}", 0, MAX_STRING_BYTES)
    if kind not in _SCALARS:
        cursor.fail(f"key {key} has the unknown value type {kind}")
    value = cursor.number(_SCALARS[kind], f"the value of {key}")
    if kind != _BOOL:
        return kind, value
    if value > 1:
        cursor.fail(f"key {key} is a boolean with the value {value}")
    return kind, bool(value)


def _parse_array(cursor: _Cursor, key: str) -> tuple[int, list]:
    kind = cursor.number("I", f"the element type of {key}")
    count = cursor.number("Q", f"the length of {key}")
    if kind == _ARRAY:
        cursor.fail(f"key {key} is a nested array, which is not supported")
    if kind != _STRING and kind not in _SCALARS:
        cursor.fail(f"key {key} is an array of the unknown type {kind}")
    cursor.strings += count if kind == _STRING else 0
    cursor.numbers += count if kind != _STRING else 0
    if cursor.strings > MAX_ARRAY_STRINGS or cursor.numbers > MAX_ARRAY_NUMBERS:
        limit = MAX_ARRAY_STRINGS if kind == _STRING else MAX_ARRAY_NUMBERS
        cursor.fail(f"key {key} is an array of {count} elements; all arrays together have more than {limit}")
    if kind == _STRING:
        cursor.require(count * 8, f"the array {key}")
        return kind, [cursor.text(f"an element of {key}", 0, MAX_STRING_BYTES) for _ in range(count)]
    item = np.dtype("<" + _SCALARS[kind])
    items = np.frombuffer(cursor.take(count * item.itemsize, f"the array {key}"), dtype=item)
    if kind == _BOOL:
        if items.size and items.max() > 1:
            cursor.fail(f"key {key} is an array of booleans with the value {items.max()}")
        items = items.astype(bool)
    return kind, items.tolist()


def _alignment(cursor: _Cursor, header: Header) -> int:
    alignment = header.values.get("general.alignment", 32)
    if "general.alignment" in header.values and header.value_types["general.alignment"] != _UINT32:
        cursor.fail("general.alignment is not a 32-bit unsigned integer")
    if not isinstance(alignment, int) or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        cursor.fail(f"general.alignment is {alignment}, expected a power of two from 8 to {MAX_ALIGNMENT}")
    return alignment


def _parse_tensor_info(cursor: _Cursor, index: int) -> tuple[str, tuple[int, ...], GGUFType, int]:
    name = cursor.text(f"the name of tensor {index}", 1, MAX_NAME_BYTES)
    if any(unicodedata.category(c) == "Cc" for c in name):
        cursor.fail(f"the name of tensor {index} contains control characters")
    dims = cursor.number("I", f"the rank of {name}")
    # Rank 0 is a scalar as gguf-py writes it (ggml itself writes [1]).
    if dims > MAX_DIMS:
        cursor.fail(f"tensor {name} has {dims} dimensions, more than {MAX_DIMS}")
    shape = struct.unpack(f"<{dims}Q", cursor.take(8 * dims, f"the shape of {name}"))[::-1]
    if 0 in shape:
        cursor.fail(f"tensor {name} has the empty shape {shape}")
    # Python integers do not wrap, so a product that would overflow 64 bits is exact.
    count = math.prod(shape)
    if count > MAX_ELEMENTS:
        cursor.fail(f"tensor {name} has {count} elements, more than {MAX_ELEMENTS}")
    type_id = cursor.number("I", f"the type of {name}")
    type_ = types().get(type_id)
    if type_ is None:
        cursor.fail(f"tensor {name} has a type that cannot be read: {refusal(type_id)}")
    if type_.block > 1 and (not shape or shape[-1] % type_.block):
        cursor.fail(f"tensor {name} of shape {shape} does not divide into {type_.name} blocks of {type_.block}")
    return name, shape, type_, cursor.number("Q", f"the offset of {name}")


def _refuse_overlaps(cursor: _Cursor, tensors: list[TensorInfo]) -> None:
    """Refuse tensors that share bytes; gaps between tensors are legal."""
    ordered = sorted(tensors, key=lambda t: t.offset)
    for before, after in pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            cursor.fail(f"tensors {before.name} and {after.name} overlap in the file")
