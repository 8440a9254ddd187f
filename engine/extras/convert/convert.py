"""Convert and save VAEs: safetensors <-> GGUF, plain or block-quantised; each result is read back and compared."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from ...checkpoints.gguf_types import GGUFType
from ...checkpoints.reader import read_checkpoint
from ...checkpoints.reading import ProgressCallback, failure
from ...checkpoints.shapes import ORIG_SHAPE, restore_shapes
from ...checkpoints.types import Checkpoint
from ...errors import CheckpointError, InputError, one_line
from ...families import detect, find_key_set, kind_of
from ...runtime.scope import as_usual
from ..output.writing import check_target, replacing, write_tensors
from .gguf_writer import TensorPlan, write_gguf
from .quantize import PLAIN, TYPES, encode, stored_shape, stored_type

# GGUF file-type codes; informative only, readers use each tensor's own type.
_FILE_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10, "q3_k": 12, "q4_k": 15,
    "q5_k": 17, "q6_k": 18, "bf16": 32,
}  # fmt: skip
_GENERATED = ("general.architecture", "general.quantization_version", "general.file_type", "general.alignment")


@dataclass
class Conversion:
    """Result of a conversion. `errors`: relative RMS error of each tensor that is not stored bit for bit."""

    path: Path
    type: str
    bytes_written: int
    types: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    def summary(self) -> list[str]:
        """Return lines for people: counts per type, size, and the error of the read-back file."""
        counts = {t: list(self.types.values()).count(t) for t in dict.fromkeys(self.types.values())}
        lines = [
            f"{self.path}: {self.bytes_written / 2**20:.1f} MiB, "
            + ", ".join(f"{n} tensors {t}" for t, n in counts.items())
        ]
        if not self.errors:
            return [*lines, "read back: every value equal to the source"]
        worst = max(self.errors, key=lambda n: self.errors[n])
        mean = sum(self.errors.values()) / len(self.errors)
        exact = len(self.types) - len(self.errors)
        lines.append(
            f"read back: {exact} tensors equal to the source, relative RMS error of the other {len(self.errors)}: "
            f"mean {mean:.2e}, largest {self.errors[worst]:.2e} ({one_line(worst, 100)})"
        )
        return lines


@as_usual()
def convert_checkpoint(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    type: str,
    force: bool = False,
    progress: ProgressCallback | None = None,
) -> Conversion:
    """Read `src` (safetensors or GGUF) and write `dst` (by its suffix) with weights as `type`. `src` is never changed.

    Args:
        type: one of TYPES.
        force: replace an existing `dst`.
        progress: called with (tensors done, tensors in all).

    Raises:
        CheckpointError: unreadable source, full disk, or the file read back differs.
        InputError: impossible option, or an existing target without `force`.
    """
    src, dst = Path(src), Path(dst)
    check_conversion(dst, type, force, src)
    return save_checkpoint(_with_known_shapes(read_checkpoint(src, native_names=False)), dst, type, force, progress)


def save_checkpoint(
    checkpoint: Checkpoint,
    dst: str | PathLike[str],
    type: str,
    force: bool = False,
    progress: ProgressCallback | None = None,
) -> Conversion:
    """Write a checkpoint (any device) as `convert_checkpoint` does."""
    dst = Path(dst)
    check_conversion(dst, type, force)
    tensors = {n: t.detach().cpu() for n, t in checkpoint.tensors.items()}
    try:
        plan = {n: stored_type(n, t, type) for n, t in tensors.items()}
    except KeyError as error:
        raise InputError(f"{one_line(str(dst))}: tensors of {error} cannot be converted") from error
    _refuse_overflow(tensors, plan, dst)
    try:
        with replacing(dst) as temporary:
            if dst.suffix.lower() == ".gguf":
                _write_gguf(temporary, dst, tensors, plan, checkpoint.metadata, type, progress)
            else:
                _write_safetensors(temporary, tensors, plan, checkpoint.metadata)
                if progress:
                    progress(len(plan), len(plan))
            return _read_back(temporary, dst, tensors, plan, type)
    except OSError as error:
        raise failure(dst, error.strerror or str(error)) from error


def check_conversion(dst: Path, type: str, force: bool, src: Path | None = None) -> None:
    """Refuse an impossible conversion before anything is read. Raises InputError."""
    if type not in TYPES:
        raise InputError(f"type {one_line(type)!r} is not one of {', '.join(TYPES)}")
    suffix = dst.suffix.lower()
    if suffix not in (".gguf", ".safetensors"):
        raise InputError(f"{one_line(str(dst))}: the output must end in .gguf or .safetensors")
    if suffix == ".safetensors" and type not in PLAIN:
        raise InputError(f"{one_line(str(dst))}: safetensors cannot hold {type}; write .gguf or use {', '.join(PLAIN)}")
    check_target(dst, force, inputs=(src,))


def _with_known_shapes(checkpoint: Checkpoint) -> Checkpoint:
    """Restore shapes that only the architecture knows (flat rows without a record), if the engine knows it."""
    architecture = detect(checkpoint.tensors)
    if architecture is None and find_key_set(checkpoint.tensors) is None and (kind := kind_of(checkpoint.tensors)):
        raise CheckpointError(f"{checkpoint.path}: not a VAE but {kind}; this converts VAEs")
    if architecture is None:
        return checkpoint
    shapes = {n: tuple(t.shape) for n, t in checkpoint.tensors.items()}
    try:
        with torch.device("meta"):
            # Shapes do not depend on norm groups.
            model = architecture.build(architecture.config_of(shapes, checkpoint.metadata, 1))
    except InputError as error:
        raise failure(checkpoint.path or Path("checkpoint"), str(error)) from error
    return restore_shapes(checkpoint, {n: tuple(t.shape) for n, t in model.state_dict().items()})


def _refuse_overflow(tensors: Mapping[str, Tensor], plan: Mapping[str, GGUFType], dst: Path) -> None:
    for name, tensor in tensors.items():
        if plan[name].dtype == torch.float16 and tensor.numel() and max(abs(v) for v in torch.aminmax(tensor)) > 65504:
            raise failure(dst, f"tensor {name} has values beyond fp16's 65504; convert to bf16 or f32")


def _write_gguf(
    temporary: Path,
    dst: Path,
    tensors: Mapping[str, Tensor],
    types: Mapping[str, GGUFType],
    metadata: Mapping[str, object],
    kind: str,
    progress: ProgressCallback | None,
) -> None:
    shapes = {n: tuple(t.shape) for n, t in tensors.items()}
    plans = [TensorPlan(n, stored_shape(shapes[n], t), t) for n, t in types.items()]
    key_set = find_key_set(tensors)
    values: dict[str, object] = {
        "general.architecture": key_set.name if key_set else metadata.get("general.architecture", "unknown"),
        "general.quantization_version": 2,
        "general.file_type": _FILE_TYPES[kind],
    }
    values |= {k: v for k, v in metadata.items() if k and k not in _GENERATED and not k.startswith(ORIG_SHAPE)}
    values |= {ORIG_SHAPE + p.name: shapes[p.name] for p in plans if p.shape != shapes[p.name]}

    def data() -> Iterator[Tensor]:
        for i, (name, type_) in enumerate(types.items()):
            yield encode(tensors[name], type_)
            if progress:
                progress(i + 1, len(types))

    try:
        with open(temporary, "wb") as file:
            write_gguf(file, values, plans, data())
    except ValueError as error:
        raise failure(dst, f"cannot be written as GGUF: {error}") from error


def _write_safetensors(
    temporary: Path, tensors: Mapping[str, Tensor], types: Mapping[str, GGUFType], metadata: Mapping[str, object]
) -> None:
    text = {
        k: v if isinstance(v, str) else json.dumps(v)
        for k, v in metadata.items()
        if not k.startswith((ORIG_SHAPE, "general.", "GGUF."))
    }
    # Copies: the library refuses tensors that share memory.
    write_tensors(temporary, {n: t.to(types[n].dtype, copy=True) for n, t in tensors.items()}, text)


def _read_back(
    temporary: Path, dst: Path, tensors: Mapping[str, Tensor], types: Mapping[str, GGUFType], kind: str
) -> Conversion:
    """Read the finished file as a user would and compare it with the source, tensor by tensor."""
    written = read_checkpoint(temporary, native_names=False).tensors
    result = Conversion(dst, kind, temporary.stat().st_size, {n: t.name for n, t in types.items()})
    if written.keys() != tensors.keys():
        raise failure(dst, "the written file does not read back with the same tensor names")
    for name, source in tensors.items():
        copy = written.pop(name)
        if copy.shape != source.shape or (types[name].dtype and not torch.equal(copy, source.to(types[name].dtype))):
            raise failure(dst, f"tensor {name} does not read back as it was written")
        common = torch.promote_types(copy.dtype, source.dtype)
        difference = copy.to(common) - source.to(common)
        if source.is_floating_point() and difference.any():
            norm = torch.linalg.vector_norm(source, dtype=torch.float64)
            result.errors[name] = float(torch.linalg.vector_norm(difference, dtype=torch.float64) / norm)
    return result
