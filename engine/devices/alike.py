"""What all ranks must have alike: each makes parts of one result."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ..core import Core
from ..files.writing import stamp
from ..kernels.cards import AUTO
from ..network.stamp import Stamp
from ..options import Options
from ..precision import digest

#: Of networks, which are large, as long as their weights stay as they are.
_networks: WeakKeyDictionary[nn.Module, tuple[Stamp, str]] = WeakKeyDictionary()


def of_network(vae: Core) -> str:
    """Of what a VAE computes with, taken once: 0.4 s for the published half a gigabyte on one core."""
    model = vae.model
    if model not in _networks or not _networks[model][0].holds(model):
        _networks[model] = Stamp(model), digest.of_network(model, vae.arch)
    return _networks[model][1]


def of_contents(given: Any) -> str | None:
    """Of latents or a video [B, C or F, ...], or of latents in a file; None: nobody knows, as of frames that come one
    by one. Cores share the parts: a second for a gigabyte or two on one of them."""
    if isinstance(given, Tensor):
        return digest.digest({f"{i} {k}": part for i, clip in enumerate(given) for k, part in enumerate(clip)})
    path = getattr(given, "path", None)
    return None if path is None else of_file(path)


def of_bits(vae: Core) -> tuple[Options, dict[str, str]]:
    """Its options, but for those that move no bit, and what its kernels are where it has some: what runs counts, not
    what was asked for."""
    halves = {"decoder": vae.can_decode, "encoder": vae.can_encode}
    kernels = {half: here.identity for half, there in halves.items() if there and (here := vae.kernels(half))}
    return replace(vae.options, cuda_graphs=True, async_offload=True, kernels=AUTO), kernels


def of_file(path: Path) -> str:
    """Of all that a file, or the files of a folder hold: a second for a gigabyte or two, once in a process."""
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    return _of_files(path, tuple((each, stamp(each)) for each in files))


@functools.cache
def _of_files(path: Path, files: tuple[tuple[Path, object], ...]) -> str:
    found = hashlib.sha256()
    for each, _ in files:
        found.update(b"" if each is path else each.name.encode())
        with each.open("rb") as file:
            while piece := file.read(1 << 24):
                found.update(piece)
    return found.hexdigest()
