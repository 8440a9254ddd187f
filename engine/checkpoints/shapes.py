"""Restore convolution shapes that a file format has lost, without guessing.

Every writer keeps row-major torch order, so recovery is always a reshape, never a transposition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from ..log import once
from .gguf_header import Header, TensorInfo
from .reading import failure
from .types import Checkpoint

ORIG_SHAPE = "comfy.gguf.orig_shape."
MAX_ORIG_DIMS = 6
# Width of the rows that GGUF converters flatten convolutions to, so that block types divide them.
FLAT_ROW = 256

Shape = tuple[int, ...]


def original_shape(header: Header, info: TensorInfo, path: Path) -> Shape:
    """Return the shape recorded in the file's metadata if there is one and it is right, else the stored shape."""
    key = ORIG_SHAPE + info.name
    recorded = header.values.get(key)
    if recorded is None:
        return info.shape
    if not header.is_integer_array(key) or not 1 <= len(recorded) <= MAX_ORIG_DIMS or min(recorded) <= 0:
        raise failure(path, f"{key} is not a list of 1 to {MAX_ORIG_DIMS} positive integers")
    shape, count = tuple(recorded), math.prod(info.shape)
    if math.prod(shape) == count:
        return shape
    # One converter records the shape of the bytes instead of the elements (seen for BF16): the stored shape is right.
    if info.shape and shape == (*info.shape[:-1], info.type.nbytes(info.shape[-1])):
        return info.shape
    raise failure(path, f"{key} is {shape} ({math.prod(shape)} elements), but the tensor holds {count}")


def split_merged_convs(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Undo the four-dimension limit of ggml: (O*I, kt, kh, kw) becomes (O, I, kt, kh, kw), with O from the bias.

    Returns only the shapes that change. A true 2-D convolution keeps its shape, its first size is O itself.
    """
    changed = {}
    for name, shape in shapes.items():
        if len(shape) != 4 or not name.endswith(".weight"):
            continue
        bias = shapes.get(name[: -len("weight")] + "bias")
        if bias is None or len(bias) != 1:
            continue
        out = bias[0]
        if out and shape[0] != out and shape[0] % out == 0:
            changed[name] = (out, shape[0] // out, *shape[1:])
    return changed


def restore_shapes(checkpoint: Checkpoint, expected: Mapping[str, Shape]) -> Checkpoint:
    """Return the checkpoint with every tensor that `expected` names reshaped to its expected shape.

    Only reshapes that some writer's layout explains are made; anything else (a transposed weight, another size) raises
    CheckpointError. Tensors absent from `expected`, and expected ones absent from the file, are left alone.
    """
    path = checkpoint.path or Path("checkpoint")
    tensors = dict(checkpoint.tensors)
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is not None and tuple(tensor.shape) != tuple(shape):
            tensors[name] = _restore(name, tensor, tuple(shape), path)
    return Checkpoint(tensors, checkpoint.metadata, checkpoint.path)


def _restore(name: str, tensor: torch.Tensor, expected: Shape, path: Path) -> torch.Tensor:
    stored = tuple(tensor.shape)
    if tensor.numel() == math.prod(expected):
        # Axes of length 1 may be missing, or added, but not moved past others: the weight could be a transposed one.
        if _without_ones(stored, expected) or _without_ones(expected, stored):
            return tensor.reshape(expected)
        # stable-diffusion.cpp merges the two channel dimensions of a convolution.
        if len(expected) > 3 and _squeeze(stored) == _squeeze((expected[0] * expected[1], *expected[2:])):
            return tensor.reshape(expected)
        # A permutation of the same sizes is a transposed layout, even if it also looks like flat rows.
        permuted = sorted(_squeeze(stored)) == sorted(_squeeze(expected))
        flat = len(stored) == 1 or (len(stored) == 2 and stored[1] == FLAT_ROW)
        if len(expected) > 2 and flat and not permuted:
            once(f"{path.name}: convolutions are stored as flat rows without their shapes; the architecture's are used")
            return tensor.reshape(expected)
    raise failure(path, f"tensor {name} has the shape {stored}, expected {expected}")


def _without_ones(short: Shape, long: Shape) -> bool:
    """Return whether `short` is `long` without some of its axes of length 1."""
    rest = iter(long)
    return _squeeze(short) == _squeeze(long) and all(any(n == size for n in rest) for size in short)


def _squeeze(shape: Shape) -> Shape:
    return tuple(n for n in shape if n != 1)
