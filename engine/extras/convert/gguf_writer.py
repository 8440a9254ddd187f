"""GGUF version 3 writer: header first (all sizes are known), then the tensors one at a time.

The writer of the gguf package (0.13 to 0.19) keeps neither the types of metadata lists nor empty ones, and does not say
why a disk refuses.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from math import prod
from typing import BinaryIO, NamedTuple

from torch import Tensor

from ...checkpoints.gguf_header import MAX_DIMS, MAX_NAME_BYTES, MAX_STRING_BYTES
from ...checkpoints.gguf_types import GGUFType

ALIGNMENT = 32
_UINT32, _INT32, _BOOL, _STRING, _ARRAY, _UINT64, _INT64, _FLOAT64 = 4, 5, 7, 8, 9, 10, 11, 12


class TensorPlan(NamedTuple):
    """Storage of one tensor; `shape` in torch order."""

    name: str
    shape: tuple[int, ...]
    type: GGUFType


def write_gguf(file: BinaryIO, metadata: Mapping[str, object], plans: list[TensorPlan], data: Iterable[Tensor]) -> None:
    """Write a whole file.

    Args:
        metadata: text, numbers, booleans, lists of one of these, and tuples of numbers, which other loaders want as
            INT32 (recorded shapes).
        data: the bytes (uint8) of each plan in order.

    Raises:
        ValueError: GGUF cannot hold one of the values.
    """
    header = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(plans), len(metadata)))
    for key, value in metadata.items():
        header += _string(key, 65_535) + _value(key, value)
    offset, sizes = 0, [plan.type.nbytes(prod(plan.shape)) for plan in plans]
    for plan, size in zip(plans, sizes, strict=True):
        if len(plan.shape) > MAX_DIMS:
            raise ValueError(f"tensor {plan.name} has more than {MAX_DIMS} dimensions")
        header += _string(plan.name, MAX_NAME_BYTES) + struct.pack("<I", len(plan.shape))
        header += struct.pack(f"<{len(plan.shape)}Q", *reversed(plan.shape))
        header += struct.pack("<IQ", plan.type.id, offset)
        offset += size + _padding(size)
    file.write(header + bytes(_padding(len(header))))
    for plan, size, raw in zip(plans, sizes, data, strict=True):
        if raw.numel() != size:
            raise ValueError(f"tensor {plan.name} has {raw.numel()} bytes, planned {size}")
        file.write(memoryview(raw.numpy()))
        file.write(bytes(_padding(size)))


def _padding(length: int) -> int:
    return -length % ALIGNMENT


def _string(text: str, limit: int) -> bytes:
    raw = text.encode("utf-8")
    if len(raw) > limit:
        raise ValueError(f"the text {text[:60]}… has {len(raw)} bytes, GGUF readers accept {limit}")
    return struct.pack("<Q", len(raw)) + raw


def _value(key: str, value: object) -> bytes:
    """Return type id and value."""
    if isinstance(value, tuple):
        return struct.pack(f"<IIQ{len(value)}i", _ARRAY, _INT32, len(value), *value)
    if isinstance(value, list):
        kinds = {_kind(key, v) for v in value} or {_UINT32}
        kind = kinds.pop() if len(kinds) == 1 else _INT64 if kinds <= {_UINT32, _UINT64, _INT64} else _FLOAT64
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + b"".join(_scalar(kind, v) for v in value)
    kind = _kind(key, value)
    return struct.pack("<I", kind) + _scalar(kind, value)


def _kind(key: str, value: object) -> int:
    if isinstance(value, str):
        return _STRING
    if isinstance(value, bool):
        return _BOOL
    if isinstance(value, int):
        return _UINT32 if 0 <= value < 2**32 else _INT64 if value < 2**63 else _UINT64
    if isinstance(value, float):
        return _FLOAT64
    raise ValueError(f"the metadata {key} is a {type(value).__name__}, which GGUF cannot hold")


def _scalar(kind: int, value: object) -> bytes:
    if kind == _STRING:
        return _string(str(value), MAX_STRING_BYTES)
    return struct.pack({_UINT32: "<I", _BOOL: "<?", _INT64: "<q", _UINT64: "<Q", _FLOAT64: "<d"}[kind], value)
