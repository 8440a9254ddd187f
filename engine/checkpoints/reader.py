"""Read any weight file: the content decides the format, everything is checked, every error names the file."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import BinaryIO

import torch

from .. import log
from ..errors import InputError
from ..families import detect, find_key_set, other_vaes, unwrapped
from ..families import native_names as to_native
from ..network.codes import Codes
from ..runtime.scope import as_usual
from . import dequantize, gguf_header, safetensors_file
from .description import text_beside
from .reading import Progress, ProgressCallback, failure, open_regular, read_into
from .scales import apply_scales, told_by
from .shapes import original_shape, split_merged_convs
from .types import Checkpoint

# Files given instead of a weight file, by their first bytes.
_FOREIGN = (
    (b"PK\x03\x04", "is a zip archive (a PyTorch .pt/.ckpt pickle?); pickles can run code and are never opened"),
    (b"\x80", "is a Python pickle (.pt/.ckpt); pickles can run code and are never opened"),
    (b"version https://git-lfs", "is a Git LFS pointer, not the weights; download the real file (git lfs pull)"),
    (b"<", "is a web page, not weights; the download went wrong"),
    (b"{", "is a JSON text (an index of shards?), not weights; merge the shards into one file"),
    (b"\x89HDF", "is an HDF5 file, which is not supported"),
)
# One shard of several holds only some of the tensors (a split GGUF says so in its metadata instead).
_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.safetensors$")
_EXPECTED = "expected .safetensors or .gguf"


@as_usual()
def read_checkpoint(
    path: str | PathLike[str],
    *,
    native_names: bool = True,
    progress: ProgressCallback | None = None,
    shapes_only: bool = False,
) -> Checkpoint:
    """Read a safetensors or GGUF file (distinguished by content) into CPU tensors.

    Any well-formed file is accepted. If it holds the keys of a known VAE, a container's prefix is stripped from the
    names, other models' tensors are left out and unread, and convolution shapes are restored. Tensors keep the stored
    float type; block-quantised ones become float32, fp8 without a scale float16, and ComfyUI's int8 and smaller forms
    float16 in a network made for fp16, float32 in others. Memory: the result, and one tensor more while 8 bit is
    converted. The file is read, not mapped.

    Args:
        native_names: replace the diffusers names of a network by its original ones.
        progress: called with (bytes done, bytes in all).
        shapes_only: read only the header; tensors are on the meta device, int8 codes as such and all others float16
            whatever the file's type, quantised ones in the shape they are stored in.

    Raises:
        CheckpointError: one line that starts with the path.
    """
    path = Path(path)
    with open_regular(path) as (file, size):
        head = bytearray(min(size, 64))
        read_into(file, 0, memoryview(head), path, "the first bytes")
        if head.startswith(b"GGUF"):
            return _read_gguf(file, size, path, native_names, progress, shapes_only)
        if safetensors_file.looks_like_safetensors(head):
            return _read_safetensors(file, size, path, native_names, progress, shapes_only)
    if not head:
        raise failure(path, f"is empty, {_EXPECTED}")
    for magic, reason in _FOREIGN:
        if head.lstrip().startswith(magic):
            raise failure(path, f"{reason} ({_EXPECTED})")
    raise failure(path, f"is neither a safetensors nor a GGUF file, or its beginning is damaged ({_EXPECTED})")


def _read_gguf(
    file: BinaryIO, size: int, path: Path, native: bool, progress: ProgressCallback | None, shapes_only: bool
) -> Checkpoint:
    file.seek(0)
    header = gguf_header.parse_header(file, size, path)
    infos = {t.name: t for t in header.tensors}
    shapes = {name: original_shape(header, info, path) for name, info in infos.items()}
    names = wanted_names(infos, native, path)
    metadata = {**text_beside(path), **header.values}
    if shapes_only:
        return _finish({name: _shape(shapes[old]) for old, name in names.items()}, metadata, path)
    tick = Progress(path, sum(infos[n].nbytes for n in names), progress)
    tensors: dict[str, torch.Tensor] = {}
    for stored, name in names.items():
        tensors[name] = dequantize.read_tensor(file, infos[stored], path).reshape(shapes[stored])
        tick.add(infos[stored].nbytes)
    return _finish(tensors, metadata, path)


def _read_safetensors(
    file: BinaryIO, size: int, path: Path, native: bool, progress: ProgressCallback | None, shapes_only: bool
) -> Checkpoint:
    shard = _SHARD.search(path.name)
    if shard and int(shard[1]) > 1:
        raise failure(path, f"is one of {int(shard[1])} shards; merge the shards into one file first")
    said, entries = safetensors_file.parse_header(file, size, path)
    metadata: dict[str, object] = {**text_beside(path), **said}
    stored = {e.name: e for e in entries}
    names = wanted_names(stored, native, path)
    if shapes_only:
        kinds = {old: torch.int8 if entry.dtype == "I8" else torch.float16 for old, entry in stored.items()}
        return _finish({n: _shape(stored[old].shape, kinds[old]) for old, n in names.items()}, metadata, path)
    tick = Progress(path, sum(stored[n].nbytes for n in names), progress)
    tensors: dict[str, torch.Tensor] = {}
    for old, name in names.items():
        tensors[name] = safetensors_file.read_tensor(file, stored[old], path)
        tick.add(stored[old].nbytes)
    fp8 = {name for old, name in names.items() if safetensors_file.DTYPES[stored[old].dtype] in safetensors_file.FP8}
    return from_stored(tensors, metadata, path, fp8, told_by(metadata, names))


@as_usual()
def from_stored(
    tensors: dict[str, torch.Tensor], metadata: dict[str, object], path: Path, fp8: Collection[str] = (),
    told: Mapping[str, Mapping[str, object]] | None = None,
) -> Checkpoint:  # fmt: skip
    """Return the checkpoint of tensors as a safetensors file stores them, which are used up.

    Args:
        tensors: by the network's names.
        metadata: of the file.
        path: of the file, for messages.
        fp8: names of tensors that were stored as fp8.
        told: descriptions of quantised weights, beside those among the tensors.

    Raises:
        CheckpointError: a quantised form that is not supported, or a damaged one.
    """
    architecture = detect(tensors)
    # As ComfyUI computes with them. A network made for bf16 may need values that float16 does not hold.
    dtype = torch.float16 if architecture is not None and architecture.native == "fp16" else torch.float32
    codes: dict[str, Codes] | None = {} if architecture is not None and architecture.coded else None
    apply_scales(tensors, fp8, path, told, dtype, codes)
    return replace(_finish(tensors, metadata, path), codes=codes or {})


def _shape(shape: tuple[int, ...], dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _finish(tensors: dict[str, torch.Tensor], metadata: dict[str, object], path: Path) -> Checkpoint:
    if find_key_set(tensors):
        for name, shape in split_merged_convs({n: tuple(t.shape) for n, t in tensors.items()}).items():
            tensors[name] = tensors[name].reshape(shape)
    return Checkpoint(tensors, metadata, path)


def wanted_names(stored: Collection[str], native: bool, path: Path) -> dict[str, str]:
    """Return {name in the file: name in the checkpoint} of the tensors to read, in the file's order."""
    names = unwrapped(stored)
    if others := other_vaes(stored, names):
        log.once(f"{path}: holds more than one VAE; not read: {', '.join(others)}")
    key_set = find_key_set(names.values())
    if native and key_set:
        try:
            renamed = to_native(names.values(), key_set)
        except InputError as error:
            raise failure(path, str(error)) from error
        if renamed:
            names = {old: renamed[name] for old, name in names.items()}
    return names
