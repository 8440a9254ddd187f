"""Checks that all ranks of torchrun have the same input, weights and options, since each makes parts of one result."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ...execution.core import Core
from ...kernels.cards import AUTO
from ...network.stamp import Stamp
from ...options import Options
from ...precision import digest
from ..output.writing import stamp

#: Digests of networks, which are large. One is valid as long as its `Stamp` holds, i.e. the weights are unchanged.
_networks: WeakKeyDictionary[nn.Module, tuple[Stamp, str]] = WeakKeyDictionary()


def of_network(vae: Core) -> str:
    """Return the digest of all that a VAE computes with.

    Taken once while the weights are unchanged: 0.4 s for the published half a gigabyte on one core."""
    model = vae.model
    if model not in _networks or not _networks[model][0].holds(model):
        _networks[model] = Stamp(model), digest.of_network(model, vae.arch)
    return _networks[model][1]


def of_contents(given: Any) -> str | None:
    """Return the SHA-256 of an input, or None where it cannot be known, as for frames that come one by one.

    It takes a second per one or two gigabytes on one core; cores share the parts.

    Args:
        given: latents or a video [B, C or F, ...], or latents in a file.
    """
    if isinstance(given, Tensor):
        return digest.digest({f"{i} {k}": part for i, clip in enumerate(given) for k, part in enumerate(clip)})
    path = getattr(given, "path", None)
    return None if path is None else of_file(path)


def of_bits(vae: Core) -> tuple[Options, dict[str, str]]:
    """Return all that decides the bits of a VAE besides its weights.

    Kernels count as they run, not as they were asked for.

    Returns: the options, with those that move no bit set to their defaults, and the identity of the kernels of each
    component (encoder, decoder) that has some.
    """
    halves = {"decoder": vae.can_decode, "encoder": vae.can_encode}
    kernels = {half: here.identity for half, there in halves.items() if there and (here := vae.kernels(half))}
    return replace(vae.options, cuda_graphs=True, async_offload=True, kernels=AUTO), kernels


def of_file(path: Path) -> str:
    """Return the SHA-256 of a file, or of all files of a folder.

    It takes a second per one or two gigabytes, once in a process while the files are unchanged."""
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
