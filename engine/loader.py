"""Loading: from a weight file to a VAE object."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from . import log
from .checkpoints import Checkpoint, in_memory, read_checkpoint, restore_shapes
from .checkpoints.description import Description
from .checkpoints.memory import NAME
from .checkpoints.source import Source
from .errors import CheckpointError, InputError, one_line
from .families import detect, find_key_set, kind_of, lies_beside
from .families.registry import of_encoder
from .kernels.targets import target
from .network.architecture import Architecture, Shapes, holds
from .network.plain import Network
from .precision.modes import MIXED, PRECISIONS
from .runtime.scope import as_usual
from .system.devices import numbered
from .system.finite import all_finite
from .system.orders import ORDERS
from .vae import VideoVAE

#: The precisions that `load` takes.
NAMES = ("auto", *PRECISIONS, *MIXED)
#: Names of an encoder, and of the convolutions that follow some encoders outside.
_ENCODER = re.compile(r"(encoder|quant_conv|conv1)\.")


def demo_vae_path() -> Path:
    """Return the path of the small VAE that ships with the package (assets/demo_vae.safetensors)."""
    return Path(__file__).resolve().parent.parent / "assets" / "demo_vae.safetensors"


def demo_clip_path() -> Path:
    """Return the path of the clip that ships with the package (assets/demo_clip.mp4)."""
    return demo_vae_path().with_name("demo_clip.mp4")


@as_usual()
def load(
    path: str | os.PathLike[str] | Checkpoint | Mapping[str, Tensor] | nn.Module,
    precision: str = "auto",
    device: torch.device | str | None = None,
    norm_groups: int | None = None,
    *,
    min_db: float = 0.0,
    weights_on: torch.device | None = None,
    as_in_diffusers: bool = False,
) -> VideoVAE:
    """Load a VAE from a .safetensors or .gguf file, or from weights in memory.

    Args:
        path: of the file; or a Checkpoint (whose tensors are then used up), a state dict, or a module that has one,
            such as a diffusers VAE, under any names that files have. Weights in memory that need no conversion are
            shared, not copied; for a state dict or a module a log line names the family that was found.
        precision: "auto" (on CUDA fp16, or bf16 where the model was made for it; fp32 on the CPU), "fp32", "bf16",
            "fp16", and approximate: "fp8", "int8", "fp16_fast".
        device: the device of its runs; None: CUDA if there is one.
        norm_groups: for files of unusual widths that do not name `norm_num_groups` themselves.
        min_db: PSNR in dB against the exact path that approximate precisions keep, and that "auto" may go down to on a
            GPU; 0: none, and "auto" stays exact.
        weights_on: the device of the weights until the model's holder moves them to the run's; None: they stay in host
            memory, from where each run on a GPU takes those that it reads.
        as_in_diffusers: give diffusers' numbers, of families that have others there than in ComfyUI (HunyuanVideo,
            CogVideoX).

    Raises:
        CheckpointError: unreadable file, no known VAE, or missing keys.
        InputError: an impossible option.
    """
    where = placement(precision, device)
    unnamed = isinstance(path, Mapping | nn.Module)
    checkpoint = in_memory(path) if unnamed or isinstance(path, Checkpoint) else read_checkpoint(path)
    path = checkpoint.path or NAME
    architecture = detect(checkpoint.tensors)
    if architecture is None:
        _refuse(path, checkpoint)
    try:
        checkpoint = _prepared(architecture, checkpoint)
    except InputError as e:
        raise CheckpointError(f"{path}: {e}") from e
    codes = {name: held for name, held in checkpoint.codes.items() if name in checkpoint.tensors}
    precision, name = named(precision, where, architecture, bool(codes))
    dtype = PRECISIONS[name]
    shapes = {key: tuple(t.shape) for key, t in checkpoint.tensors.items()}
    try:
        config = sizes(architecture, shapes, checkpoint, norm_groups)
        if as_in_diffusers and architecture.in_diffusers is not None:
            config = architecture.in_diffusers(config)
        with torch.device("meta"):
            model = architecture.build(config)
            architecture = architecture.of(config)
    except InputError as e:
        raise CheckpointError(f"{path}: {e}") from e
    if norm_groups and config.norm_groups is None:
        log.once(f"norm_groups={norm_groups} is not used: {architecture.name} has no norms of groups")
    expected = {key: tuple(t.shape) for key, t in model.state_dict().items()}
    encoder = model.names("encoder")
    whole = bool(encoder) and all(key in shapes for key in encoder)
    _check_tensors(checkpoint, architecture, model, whole, shapes)
    if encoder and not whole:
        model.drop("encoder")
        expected = {key: tuple(t.shape) for key, t in model.state_dict().items()}
    if not whole and holds(shapes, "encoder"):
        log.once(f"{path}: encoder incomplete, loaded for decoding only")
    checkpoint = restore_shapes(checkpoint, expected)
    rounded = any(torch.promote_types(checkpoint.tensors[key].dtype, dtype) != dtype for key in expected)
    exact = {*model.outside(), *architecture.wide}
    weights = {key: _cast(checkpoint, key, torch.float32 if key in exact else dtype) for key in expected}
    model.load_state_dict(weights, assign=True)
    model.requires_grad_(False).eval()
    # Codes are as large as half the weights: without a host, which may change the precision later, int8 alone reads
    # them.
    for key, found in codes.items() if precision == "int8" or weights_on is not None else ():
        found.attach(model.get_submodule(key.removesuffix(".weight")))
    waits = weights_on is None
    here = weights_on or ("cpu" if where.type == "cuda" else where)
    vae = VideoVAE(model.to(here), architecture, name, dtype, where, checkpoint.path, precision, waits)
    if rounded:
        vae.source = Source(checkpoint.path and Path(os.path.abspath(checkpoint.path)),
                            architecture.preparing(checkpoint.path))  # fmt: skip
    vae.options = replace(vae.options, min_db=min_db)
    if unnamed:
        log.info(f"{path}: {architecture.name}, {' and '.join(h for h in ('encoder', 'decoder') if model.names(h))}")
    if where.type == "cpu" and vae.precision in ("fp16", "bf16"):
        log.once(f"{vae.precision} on a CPU: many compute it far slower than fp32 (138 s for a decode instead of 2.6); "
                 "use fp32, or auto")  # fmt: skip
    return vae


@as_usual()
def encoder_only(checkpoint: Checkpoint, norm_groups: int | None = None) -> tuple[Architecture, Any] | None:
    """Return the architecture and the sizes of a file that holds a whole encoder and nothing of a decoder, which `load`
    refuses; None for other files."""
    architecture = detect(checkpoint.tensors)
    if architecture is None or holds(checkpoint.tensors, "decoder"):
        return None
    try:
        checkpoint = _prepared(architecture, checkpoint)
        shapes = {key: tuple(t.shape) for key, t in checkpoint.tensors.items()}
        architecture = of_encoder(architecture, sizes(architecture, shapes, checkpoint, norm_groups))
        config = sizes(architecture, shapes, checkpoint, norm_groups)
        with torch.device("meta"):
            encoder = architecture.build(config).names("encoder")
    except InputError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    return (architecture.of(config), config) if encoder and all(key in shapes for key in encoder) else None


def _prepared(architecture: Architecture, checkpoint: Checkpoint) -> Checkpoint:
    prepare = architecture.preparing(checkpoint.path)
    return checkpoint if prepare is None else replace(checkpoint, tensors=prepare(checkpoint.tensors))


def _refuse(path: object, checkpoint: Checkpoint) -> NoReturn:
    family = find_key_set(checkpoint.tensors)
    if family is not None:
        title = family.title or f"a VAE of the family {family.name}"
        raise CheckpointError(f"{path}: {title}, which this pack does not run; ComfyUI's own VAE loader may")
    kind, keys = kind_of(checkpoint.tensors), _some(sorted(checkpoint.tensors))
    if kind is not None:
        raise CheckpointError(f"{path}: not a VAE this pack knows but {kind} (keys: {keys})")
    raise CheckpointError(f"{path}: not a VAE this pack knows (keys: {keys})")


def placement(precision: str, device: torch.device | str | None) -> torch.device:
    """Return the device that `load` would use. Raises InputError."""
    if precision not in NAMES:
        raise InputError(f"precision={precision!r} is not one of {', '.join(NAMES)}")
    try:
        where = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    except RuntimeError as e:
        raise InputError(f"device={device!r} is not a device torch knows: use cpu, cuda or cuda:N") from e
    if where.type == "cuda" and (not torch.cuda.is_available() or (where.index or 0) >= torch.cuda.device_count()):
        count = torch.cuda.device_count()
        raise InputError(f"device={device!r} is not there: CUDA GPUs that torch sees: {count}; use device='cpu'")
    if where.type not in ("cpu", "cuda") and not _holds_values(where):
        raise InputError(f"device={device!r}: torch cannot compute there; use cpu, cuda or cuda:N")
    return numbered(where)


def _holds_values(device: torch.device) -> bool:
    try:
        return not torch.empty(0, device=device, dtype=torch.float32).is_meta
    except (RuntimeError, AssertionError):  # this build or machine has none
        return False


def named(precision: str, device: torch.device, architecture: Architecture, codes: bool) -> tuple[str, str]:
    """Return a precision as `load` takes it on a device, and the type of its activations. codes: the file has int8
    codes to multiply as they are."""
    if precision == "auto" and codes and device.type == "cuda" and not ORDERS.precision:
        precision = "int8"  # as ComfyUI runs the file; a CPU is faster in fp32
    if precision in MIXED:
        half_sums = precision == "fp16_fast" and target(device).half_accumulate
        return precision, architecture.activations(precision, half_sums)
    return precision, auto_precision(device, architecture) if precision == "auto" else precision


def auto_precision(device: torch.device, architecture: Architecture) -> str:
    """Return the meaning of "auto" on a device: the type that the process was ordered to use, else the fastest one
    without approximations of its own."""
    if ORDERS.precision:
        return ORDERS.precision
    if device.type != "cuda":
        return "fp32"
    # Before sm_80, GPUs compute in fp16 but not in bf16.
    return architecture.native if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"


def sizes(
    architecture: Architecture, shapes: Shapes, checkpoint: Checkpoint, norm_groups: int | None = None
) -> Any:
    """Return the sizes of a file's networks. Raises InputError.

    norm_groups: as the user says; None: as the file does, or the description beside it if it is about this file.
    """
    metadata, beside = checkpoint.metadata, Description.of(checkpoint.metadata)
    groups = norm_groups or stored_groups(checkpoint)
    # One group divides all widths.
    if beside.said and beside.fits(architecture.config_of(shapes, metadata, 1)):
        beside.check_activation()
        groups = groups or beside.groups()
    return architecture.config_of(shapes, metadata, groups)


def stored_groups(checkpoint: Checkpoint) -> int | None:
    """Return the norm groups in a file's metadata, or None. Raises InputError for a value that is no number."""
    stored = checkpoint.metadata.get("norm_num_groups")
    if stored is None:
        return None
    try:
        return int(str(stored))
    except ValueError:
        given = one_line(repr(stored), 40)
        raise InputError(f"metadata norm_num_groups={given} is not a number; pass norm_groups=N") from None


def _check_tensors(
    checkpoint: Checkpoint, architecture: Architecture, model: Network, whole: bool, shapes: Shapes
) -> None:
    """Refuse a file without the whole decoder, and one with tensors of its VAE that the built network would not read:
    its frames would be wrong. A file may leave the encoder out, or hold a part of it that is not `whole`."""
    decoder, path = model.names("decoder"), checkpoint.path or "these weights"
    if not decoder:
        raise CheckpointError(f"{path}: the decoder is missing or its biases are (keys: {_some(shapes)})")
    missing = [key for key in decoder if key not in shapes]
    known = model.state_dict()
    unknown = [
        key for key in shapes
        if key not in known and not lies_beside(key) and not re.match(architecture.unused, key)
        and (whole or not _ENCODER.match(key))
    ]  # fmt: skip
    if missing and unknown:
        raise CheckpointError(f"{path}: {len(missing)} decoder keys are missing: {_some(missing)}; {len(unknown)} are "
                              f"unknown: {_some(unknown)}")  # fmt: skip
    if missing:
        raise CheckpointError(f"{path}: {len(missing)} decoder keys are missing: {', '.join(missing)}")
    if unknown:
        raise CheckpointError(
            f"{path}: the network {architecture.name} would leave out {len(unknown)} of its tensors: {_some(unknown)}; "
            "take the file that its model was published with, or the program that it came with"
        )


def _cast(checkpoint: Checkpoint, key: str, dtype: torch.dtype) -> Tensor:
    tensor = checkpoint.tensors.pop(key).detach()  # a Parameter in memory stays its owner's
    if not tensor.is_floating_point():
        raise CheckpointError(f"{checkpoint.path}: {key} holds {tensor.dtype}, not floating-point weights")
    weight = tensor.to(dtype)
    # The reader has refused NaN and Inf; only a narrower type can make new ones.
    if weight.dtype != tensor.dtype and not all_finite(weight):
        raise CheckpointError(f"{checkpoint.path}: {key} is beyond the range of {dtype}; use fp32 or bf16")
    return weight.contiguous()


def _some(names: object) -> str:
    listed = list(names)  # type: ignore[call-overload]
    first = ", ".join(one_line(name, 80) for name in listed[:6])
    return first + (f", ... {len(listed)} in all" if len(listed) > 6 else "")
