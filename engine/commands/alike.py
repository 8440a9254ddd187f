"""What all ranks of one command must have alike: they make parts of one result."""

from __future__ import annotations

import argparse
import functools
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..files.writing import stamp

if TYPE_CHECKING:
    from ..devices.ranks import Ranks
    from ..options import Options
    from ..vae import VideoVAE


def check_alike(args: argparse.Namespace, ranks: Ranks | None, vae: VideoVAE, **files: Path) -> None:
    """Raises InputError on all ranks where one would make parts of something else."""
    if ranks is not None:
        ranks.check_same(VAE=digest(vae.path), options=of_bits(vae), norm_groups=args.norm_groups,
                         **{name: digest(path) for name, path in files.items()})  # fmt: skip


def of_bits(vae: VideoVAE) -> Options:
    """Its options, but for those that move no bit."""
    return replace(vae.options, cuda_graphs=True, async_offload=True)


def digest(path: Path) -> str:
    """Of all that a file, or the files of a folder hold: a second for a gigabyte or two, once in a process."""
    return _digest(path, stamp(path))


@functools.cache
def _digest(path: Path, _: object) -> str:
    found = hashlib.sha256()
    for each in sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]:
        found.update(b"" if each is path else each.name.encode())
        with each.open("rb") as file:
            while piece := file.read(1 << 24):
                found.update(piece)
    return found.hexdigest()
