"""Where a VAE's weights came from, for a run in a wider type than they were loaded in."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from .. import log
from ..errors import CheckpointError
from ..files.checkpoint import read_checkpoint, restore_shapes
from .digest import digest


@dataclass(frozen=True)
class Source:
    """A weight file, by its absolute path; None: tensors that are used up."""

    path: Path | None

    def weights(self, loaded: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
        """The weights of `loaded` as the file has them, in `dtype`, on the CPU.

        Raises CheckpointError where the file is not to be had, or its weights, rounded, are not those of `loaded`.
        """
        if self.path is None:
            raise CheckpointError("these weights: given as tensors, which are used up")
        mine = loaded.state_dict()
        checkpoint = restore_shapes(read_checkpoint(self.path), {key: tuple(t.shape) for key, t in mine.items()})
        stored = {key: checkpoint.tensors[key] for key in mine if key in checkpoint.tensors}
        if digest({key: t.to(mine[key].dtype) for key, t in stored.items()}) != digest(mine):
            raise CheckpointError(f"{self.path}: not what was loaded from it")
        return {key: tensor.to(dtype) for key, tensor in stored.items()}


def widened(loaded: nn.Module, source: Source | None, dtype: torch.dtype) -> nn.Module:
    """A copy of `loaded` in a wider type, with the weights as `source` has them: not rounded to a narrower one, nor to
    one that lay between. None: `loaded` has them so."""
    model = copy.deepcopy(loaded).to(dtype)
    if source is not None:
        try:
            model.load_state_dict(source.weights(loaded, dtype))
        except CheckpointError as error:
            kept = next(loaded.parameters()).dtype
            log.warn(f"{error}; the rerun has its weights as they were rounded to {kept}")
    return model
