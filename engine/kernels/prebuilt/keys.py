"""The key of a compiled kernel: its name, its constants, and the types of its other arguments."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import torch

#: Triton's names of element types, as pointers and descriptors spell them.
TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.int8: "i8",
    torch.uint8: "u8", torch.float8_e4m3fn: "fp8e4nv", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
_POINTERS = {dtype: f"*{name}" for dtype, name in TYPES.items()}


class Key(NamedTuple):
    """One compiled kernel. constants: constexprs, num_warps and num_stages, sorted by name, booleans as 0 and 1. types:
    of the arguments that are passed at run time, in order: "*fp16" for a pointer, "i32", "i64", "fp32", and
    "map:fp16[128,64]" for a descriptor and its block."""

    kernel: str
    constants: tuple[tuple[str, int | float | str], ...]
    types: tuple[str, ...]

    @property
    def digest(self) -> str:
        """The key's name in an index: 16 hexadecimal digits."""
        return _digest(self)

    def __str__(self) -> str:
        constants = ",".join(f"{name}={value}" for name, value in self.constants)
        return f"{self.kernel}({','.join(self.types)};{constants})"


def key(kernel: str, args: Sequence[Any], constants: Mapping[str, Any]) -> Key:
    """Return the key of a launch.

    Args:
        kernel: a name from `launching.SOURCES`.
        args: what the kernel gets by position: tensors, descriptors (anything with `base` and `block_shape`), ints and
            floats.
        constants: what it gets by name, with num_warps and num_stages.
    """
    return _key(kernel, tuple(map(type_of, args)), tuple(constants), tuple(constants.values()))


def type_of(value: Any) -> str:
    """Return the type of an argument as a `Key` has it."""
    kind = type(value)
    if kind is int:
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if kind is float:
        return "fp32"
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    return _map(value.base.dtype, tuple(value.block_shape))


@functools.lru_cache(maxsize=4096)
def _map(dtype: torch.dtype, block: tuple[int, ...]) -> str:
    return f"map:{TYPES[dtype]}[{','.join(map(str, block))}]"


@functools.lru_cache(maxsize=1 << 14)
def _key(kernel: str, types: tuple[str, ...], names: tuple[str, ...], values: tuple[Any, ...]) -> Key:
    plain = (int(value) if isinstance(value, bool) else value for value in values)
    return Key(kernel, tuple(sorted(zip(names, plain, strict=True))), types)


@functools.lru_cache(maxsize=1 << 14)
def _digest(key: Key) -> str:
    return blake2b(str(key).encode(), digest_size=8).hexdigest()


def takes(key: Key) -> tuple[str, ...]:
    """Return what the compiled entry takes, in order: "pointer", "i32", "i64", "fp32", "map" (a tensor map by value);
    a map is followed by its tensor's sizes ("i32" each) and strides ("i64" each). Two "scratch" pointers come last;
    null serves for them."""
    found: list[str] = []
    for one in key.types:
        if one.startswith("*"):
            found.append("pointer")
        elif one.startswith("map:"):
            rank = one.count(",") + 1
            found += ["map", *["i32"] * rank, *["i64"] * rank]
        else:
            found.append(one)
    return (*found, "scratch", "scratch")


#: Where kernels store or load single values, at whatever address: kernel -> places of these tensors (None: of all).
_LOOSE: dict[str, tuple[int, ...] | None] = {
    "to_pixels.gather_kernel": None, "tokens.gated_kernel": (2,), "tokens.normalised_kernel": (5,),
    "tokens.rounded_kernel": (2,),
}  # fmt: skip


def aligned(key: Key) -> tuple[int, ...]:
    """Return the places of the tensors whose addresses a kernel counts on to be multiples of 16. Where strides are none
    either (UNIT is 1), it counts on none."""
    tensors = [i for i, one in enumerate(key.types) if one.startswith(("*", "map:"))]
    if ("UNIT", 1) in key.constants:
        copies = key.kernel in ("conv3d.mma_kernel", "conv3d.taps_kernel")  # 16 bytes at a time
        operands = (0, 1) if copies else ()
        return tuple(i for i in tensors if key.types[i].startswith("map:") or i in operands)
    loose = _LOOSE.get(key.kernel, ())
    return () if loose is None else tuple(i for i in tensors if i not in loose)
