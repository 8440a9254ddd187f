"""Files of tiny decoders (TAEHV, TAESD and their like) in the host's folders, for the latents of other VAEs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..engine.families import latents_of
from . import files

#: Where people keep these files, as messages name it.
PLACE = "models/vae_approx"
#: Files of torch, which nobody opens here: they may run code.
_PICKLED = (".pth", ".pt", ".ckpt")


@dataclass(frozen=True)
class Found:
    """A tiny decoder's file: as the host lists it, where it lies, and the title of its family."""

    name: str
    path: Path
    title: str


def find(family: str, vae: str) -> Found | str:
    """Return the tiny decoder of the latents of a family's VAE, or in words why there is none.

    The file is known by what it holds; its name counts only where several kinds of latents have one layout.

    vae: the name of the VAE's file, "" where it is not known.
    """
    latents = latents_of(family, vae)
    if isinstance(latents, str):
        return latents
    for name in files.all_files():
        network = files.learnt(name)
        if network is not None and latents.read_by(*network, name):
            return Found(name, files.path_of(name), network[0].published.title)
    pickled = next(filter(latents.looks_like, files.all_files(_PICKLED)), None)
    why = f"{pickled} is pickled, and never opened" if pickled else f"a tiny decoder of {latents.title}'s latents"
    return f"put {latents.file} into {PLACE} ({why})"
