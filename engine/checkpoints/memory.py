"""Weights that are in memory already: a state dict, a module, or the tensors of a Checkpoint, under any known names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from ..errors import CheckpointError
from ..families import detect
from ..network.architecture import BESIDE
from ..system.finite import all_finite
from .reader import from_stored, wanted_names
from .safetensors_file import FP8
from .types import Checkpoint

#: In the place of a file's path, in messages.
NAME = Path("these weights")


def in_memory(given: Checkpoint | Mapping[str, Tensor] | nn.Module) -> Checkpoint:
    """Return weights in memory as `read_checkpoint` returns those of a file.

    A container's prefix is stripped from the names, and those of another dialect (diffusers') become the original
    ones. The tensors are those given, not copies.

    Args:
        given: a Checkpoint; a state dict; or a module, a diffusers VAE for one, whose `config` counts as the
            config.json beside a file does.

    Raises:
        CheckpointError: no tensors by name, tensors without values, or NaN or Inf.
    """
    if isinstance(given, Checkpoint):
        if detect(given.tensors) is not None:  # its names are the original ones, as read_checkpoint gives them
            return given
        names = wanted_names(given.tensors, True, given.path or NAME)
        tensors, metadata = given.tensors, given.metadata
    else:
        module = isinstance(given, nn.Module)
        tensors, metadata = given.state_dict() if module else given, _metadata(given) if module else {}
        names = wanted_names(_checked(tensors), True, NAME)
    fp8 = {new for old, new in names.items() if tensors[old].dtype in FP8}
    # As the reader gives those of a file; without a scale beside them they are the weights.
    found = {new: tensors[old].half() if new in fp8 else tensors[old] for old, new in names.items()}
    for name in fp8:
        _check_finite(name, found[name])
    path = given.path if isinstance(given, Checkpoint) else None
    return replace(from_stored(found, dict(metadata), path or NAME, fp8), path=path)


def _checked(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if not tensors:
        raise CheckpointError(f"{NAME}: there are none, give a state dict with the VAE's tensors by name")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise CheckpointError(f"{NAME}: {name!r} is {type(tensor).__name__}, give a dict of tensors by name")
        if tensor.is_meta:
            raise CheckpointError(f"{NAME}: {name} is on the meta device, which holds no values: load them first")
        if tensor.dtype not in FP8:
            _check_finite(name, tensor)
    return tensors


def _check_finite(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() and not all_finite(tensor):
        raise CheckpointError(f"{NAME}: {name} holds NaN or Inf")


def _metadata(module: nn.Module) -> dict[str, object]:
    """Return what a module's configuration says that its tensors' shapes do not."""
    config = getattr(module, "config", None)
    return {BESIDE: json.dumps(dict(config), default=str)} if isinstance(config, Mapping) else {}
