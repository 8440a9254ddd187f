"""Read a VAE's weights again from their file, for a run in a wider type than they were loaded in."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from .. import log
from ..errors import CheckpointError
from ..precision.digest import digest
from . import read_checkpoint, restore_shapes


@dataclass(frozen=True)
class Source:
    """Weight file, by its absolute path; None: the weights were given as tensors, which no longer exist.

    prepared: what loading did with the file's parameters before it built the network (as in `Architecture`)."""

    path: Path | None
    prepared: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None = None

    def weights(self, loaded: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the weights of `loaded` as the file stores them, converted to `dtype`, on the CPU.

        Raises:
            CheckpointError: the file cannot be read, or its weights, rounded, differ from those of `loaded`.
        """
        if self.path is None:
            raise CheckpointError("these weights: given as tensors, which are used up")
        mine = loaded.state_dict()
        checkpoint = read_checkpoint(self.path)
        if self.prepared is not None:
            checkpoint = replace(checkpoint, tensors=self.prepared(checkpoint.tensors))
        checkpoint = restore_shapes(checkpoint, {key: tuple(t.shape) for key, t in mine.items()})
        stored = {key: checkpoint.tensors[key] for key in mine if key in checkpoint.tensors}
        if digest({key: t.to(mine[key].dtype) for key, t in stored.items()}) != digest(mine):
            raise CheckpointError(f"{self.path}: not what was loaded from it")
        return {key: tensor.to(dtype) for key, tensor in stored.items()}


def widened(loaded: nn.Module, source: Source | None, dtype: torch.dtype) -> nn.Module:
    """Return a copy of a network in a wider type, with weights that were not rounded to a narrower one.

    Args:
        loaded: the network.
        source: file that has the weights; None: those of `loaded` are not rounded. Where the file cannot be used, a
            warning is logged and the rounded weights are taken.
        dtype: the wider type.
    """
    model = copy.deepcopy(loaded).to(dtype)
    if source is not None:
        try:
            model.load_state_dict(source.weights(loaded, dtype))
        except CheckpointError as error:
            kept = next(loaded.parameters()).dtype
            log.warn(f"{error}; the rerun has its weights as they were rounded to {kept}")
    return model
