"""The tensor types that a GGUF file may hold: ids, names and block sizes are those of the gguf package."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

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


@functools.cache
def types() -> dict[int, GGUFType]:
    """Return the types by their ids."""
    # Imported here: a safetensors file should load without it.
    from gguf import GGML_QUANT_SIZES

    known = (GGUFType(int(kind), kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items())
    return {t.id: t for t in known if t.name not in _INTERMEDIATE}


def named(name: str) -> GGUFType:
    """Return the type of this name, in capitals."""
    return next(t for t in types().values() if t.name == name)


def refusal(type_id: int) -> str:
    """Return the reason why tensors of an unknown type cannot be read."""
    from gguf import GGMLQuantizationType

    name = next((kind.name for kind in GGMLQuantizationType if kind == type_id), None)
    if name in _INTERMEDIATE:
        return f"{name} is an intermediate type without a decoder"
    return f"type {type_id} was removed from the format, or needs a newer gguf package (pip install -U gguf)"
