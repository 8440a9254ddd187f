"""The tensor types that a GGUF file may hold: ids, names and block sizes are those of the gguf package."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from types import ModuleType

import torch

from ..errors import InputError

_PLAIN = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
}  # fmt: skip
#: Results of ggml's own steps, which no file holds and nothing decodes.
_INTERMEDIATE = ("Q8_1", "Q8_K")


@dataclass(frozen=True)
class GGUFType:
    """`block` elements take `block_bytes` bytes. `dtype` is set for plain types, None for block-quantised ones."""

    id: int
    name: str
    block: int
    block_bytes: int

    @property
    def dtype(self) -> torch.dtype | None:
        return _PLAIN.get(self.name)

    def nbytes(self, count: int) -> int:
        """Return the bytes of so many elements."""
        return count // self.block * self.block_bytes


def package() -> ModuleType:
    """Return the package gguf, which safetensors files load without. Raises InputError, with the command for it."""
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise InputError("GGUF files need the Python package gguf, which is missing. Install it with: "
                         f'"{sys.executable}" -m pip install "gguf>=0.13.0"') from error  # fmt: skip
    return gguf


@functools.cache
def types() -> dict[int, GGUFType]:
    """Return the types by their ids."""
    known = (GGUFType(int(kind), kind.name, *sizes) for kind, sizes in package().GGML_QUANT_SIZES.items())
    return {t.id: t for t in known if t.name not in _INTERMEDIATE}


def named(name: str) -> GGUFType:
    """Return the type of this name, in capitals."""
    return next(t for t in types().values() if t.name == name)


def refusal(type_id: int) -> str:
    """Return the reason why tensors of an unknown type cannot be read."""
    name = next((kind.name for kind in package().GGMLQuantizationType if kind == type_id), None)
    if name in _INTERMEDIATE:
        return f"{name} is an intermediate type without a decoder"
    return f"type {type_id} was removed from the format, or needs a newer gguf package (pip install -U gguf)"
