"""Latent files: our own safetensors and ComfyUI's `.latent`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from .. import log
from ..errors import InputError
from .writing import write_tensors

_LEGACY_SCALE = 1 / 0.18215  # ComfyUI's Load Latent applies it to files without the version marker


def write_latent(path: str | Path, latent: torch.Tensor, metadata: Mapping[str, str] | None = None) -> None:
    """Write a host-scaled latent [B, C, T, h, w], or pictures' [B, C, h, w], with optional text metadata (`fps`, ...).

    The tensor is called `latent`; in a file ending in .latent it is `latent_tensor` beside the version marker, which is
    what ComfyUI's Load Latent reads.
    """
    if latent.ndim not in (4, 5):
        raise InputError(f"{path}: latent shape {list(latent.shape)} is not [batch, channels, time, height, width]")
    if Path(path).suffix.lower() == ".latent":
        tensors = {"latent_tensor": latent, "latent_format_version_0": torch.empty(0)}
    else:
        tensors = {"latent": latent}
    write_tensors(path, tensors, metadata)


def read_latent(path: str | Path, channels: int = 16, still: bool = False) -> torch.Tensor:
    """Read a latent file as float32 [B, C, T, h, w], host-scaled. still: four axes are pictures, [B, C, h, w].

    Reads our own key `latent` and ComfyUI's `latent_tensor` (as in ComfyUI, a file without the marker
    `latent_format_version_0` is multiplied by 1/0.18215). SeedVR2's collapsed form [B, C*T, h, w] is unfolded,
    [C, T, h, w] gets a batch axis; a shape that could be both is refused. Raises InputError for anything else, and for
    NaN or infinite values.
    """
    tensors, _ = _load_latent_file(Path(path), with_tensors=True)
    comfy = "latent" not in tensors
    latent = tensors["latent_tensor" if comfy else "latent"]
    if not latent.is_floating_point():
        raise InputError(f"{path}: the latent is {str(latent.dtype).removeprefix('torch.')}; a float type is needed")
    latent = latent.float()
    if comfy and "latent_format_version_0" not in tensors:
        log.once(f"{path}: no latent_format_version_0 marker, so it is multiplied by 1/0.18215 as ComfyUI does")
        latent = latent * _LEGACY_SCALE
    latent = latent.unsqueeze(2) if still and latent.ndim == 4 else _five_axes(path, latent, channels, batched=comfy)
    if latent.shape[1] != channels:
        raise InputError(f"{path}: has {latent.shape[1]} channels, not {channels} (shape {list(latent.shape)})")
    if not latent.numel():
        raise InputError(f"{path}: the latent is empty (shape {list(latent.shape)})")
    if not torch.isfinite(latent).all():
        raise InputError(f"{path}: the latent holds NaN or infinite values; it was broken before it was saved")
    return latent


def latent_metadata(path: str | Path) -> dict[str, str]:
    """The text metadata of a latent file (header only), empty for most files made elsewhere."""
    return _load_latent_file(Path(path), with_tensors=False)[1]


def _load_latent_file(path: Path, with_tensors: bool) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise InputError(f"{path}: no such file" if not path.exists() else f"{path}: is a folder, not a latent file")
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if not names & {"latent", "latent_tensor"}:
                found = ", ".join(sorted(names)[:3]) or "nothing"
                raise InputError(f"{path}: not a latent file, it has no tensor latent or latent_tensor (found {found})")
            wanted = names & {"latent", "latent_tensor", "latent_format_version_0"} if with_tensors else set()
            return {name: file.get_tensor(name) for name in wanted}, dict(file.metadata() or {})
    except SafetensorError as error:
        raise InputError(f"{path}: not a readable safetensors latent file ({error})") from error


def _five_axes(path: str | Path, latent: torch.Tensor, channels: int, batched: bool) -> torch.Tensor:
    shape = list(latent.shape)
    if latent.ndim == 5:
        return latent
    if latent.ndim == 4:
        collapsed = shape[1] > 0 and shape[1] % channels == 0
        unbatched = shape[0] == channels and not batched
        if collapsed and unbatched:
            raise InputError(
                f"{path}: shape {shape} may mean [channels, time, height, width] or"
                f" [batch, {channels} x time, height, width]; save it with five axes"
            )
        if collapsed:
            return latent.unflatten(1, (channels, -1))
        if unbatched:
            return latent.unsqueeze(0)
    raise InputError(f"{path}: shape {shape} is not [batch, {channels}, time, height, width]")
