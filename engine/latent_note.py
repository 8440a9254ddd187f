"""What a latent remembers of the VAE that made it: a note on the tensor and in its file, which decodes check."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from . import log
from .archs import Architecture, latent_space
from .errors import InputError

#: Attribute of a latent tensor. Whatever makes a new tensor of it leaves it behind.
ATTRIBUTE = "vae_note"
#: Entries of a note, in the words that a file's metadata has them in.
KEYS = ("family", "scale", "version", "vae", "encoder", "decoder")
#: What to do about a latent of another VAE, where nobody says more.
CURE = "decode it with the VAE that made it, or allow any with any_vae=True"
#: Weights of each half that a note keeps, and the least cosine of those of one VAE in any type or quantisation. Random
#: ones have 0 with a deviation of 0.09; the demo VAE's, in 4 bit with one scale for a whole layer, 0.83 and 0.95.
SAMPLES, ALIKE = 128, 0.5


class VAE(Protocol):
    """What a note is about: a loaded VAE."""

    arch: str
    scale: float
    path: Path | None
    architecture: Architecture
    model: nn.Module


def note_of(vae: VAE) -> dict[str, str]:
    """Return the note of latents that `vae` makes: its family, the scale of its latents, the pack's version, the name
    of its file, and a few weights beside the latents, by which VAEs of the same layout are told apart."""
    from .. import __version__

    note = {"family": vae.arch, "scale": f"{vae.scale:g}", "version": __version__}
    if vae.path is not None:
        note["vae"] = vae.path.name.encode(errors="replace").decode()  # a name need not be UTF-8, a file's header is
    for half, at in (("encoder", -1), ("decoder", 0)):
        if samples := _samples(getattr(vae.model, half), at):
            note[half] = samples
    return note


def marked(latent: Tensor, note: Mapping[str, str]) -> Tensor:
    """Put a note on a latent that nobody else has yet, and return it."""
    setattr(latent, ATTRIBUTE, dict(note))
    return latent


def found(latent: Any) -> dict[str, str]:
    """Return the note on a latent, or on a LatentFile; empty where there is none."""
    return getattr(latent, ATTRIBUTE, {})


def in_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the note among a file's metadata; empty where there is none."""
    return {key: metadata[key] for key in KEYS if key in metadata} if "family" in metadata else {}


def check(
    note: Mapping[str, str], vae: VAE, any_vae: bool = False, what: str = "this latent", cure: str = CURE
) -> None:
    """Refuse a latent that another VAE has made.

    The pack's version does not matter, nor do families whose latents are the same. Weights decide only in families of
    several VAEs with latents of their own (Flux and SD3); in others they are worth a line.

    Args:
        note: as `note_of` makes it; empty where nothing is known.
        vae: the VAE that is to decode it.
        any_vae: accept every latent.
        what, cure: for messages, the latent or its file, and what to do.

    Raises:
        InputError: the note names another family, scale or, as above, other weights.
    """
    if any_vae or not note.get("family"):
        return
    made, own = latent_space(note["family"]), latent_space(vae.arch)
    other = made != own or not _same_scale(note.get("scale"), vae.scale)
    weights = not other and _other_weights(note, vae)
    if other or (weights and vae.architecture.several):
        raise InputError(f"{what} was made by {_named(note)}, and the VAE here is {_named(note_of(vae))}: {cure}")
    if weights:
        log.once(f"{what} was made by {_named(note)}, and the VAE here has other weights "
                 f"({_named(note_of(vae))}): check that their latents are the same")  # fmt: skip


def _named(note: Mapping[str, str]) -> str:
    """The family, with the file and a scale that is none of the network's own; files can say anything of themselves."""
    family, file, scale = (" ".join(note.get(key, "").split())[:100] for key in ("family", "vae", "scale"))
    parts = [file] if file else []
    parts += [f"scale {scale}"] if scale not in ("", "1") else []
    return f"{family} ({', '.join(parts)})" if parts else family


def _same_scale(noted: str | None, scale: float) -> bool:
    try:
        return noted is None or abs(float(noted) - scale) <= 1e-4 * abs(scale)
    except ValueError:
        return True


def _other_weights(note: Mapping[str, str], vae: VAE) -> bool:
    """Return whether neither half is the same: a VAE may have a decoder of its own behind another one's encoder."""
    own = note_of(vae)
    known = [alike for half in ("encoder", "decoder") if (alike := _alike(note.get(half), own.get(half))) is not None]
    return bool(known) and not any(known)


def _samples(half: nn.Module | None, at: int) -> str:
    """Return evenly spaced weights of the layer `at` in a half, as bytes in base64; "" where it has none."""
    large = [] if half is None else [p for p in half.parameters() if p.ndim > 1 and p.numel() >= SAMPLES]
    if not large or large[at].is_meta:
        return ""
    weight = large[at].detach().reshape(-1)
    places = torch.linspace(0, weight.numel() - 1, SAMPLES, dtype=torch.float64).long()
    picked = weight[places.to(weight.device)].float().cpu()
    scaled = (127 * picked / picked.abs().max().clamp(min=1e-30)).round().to(torch.int8)
    return base64.b64encode(scaled.numpy().tobytes()).decode()


def _alike(a: str | None, b: str | None) -> bool | None:
    """None: nobody knows."""
    try:
        x, y = (np.frombuffer(base64.b64decode(text or "", validate=True), np.int8).astype(float) for text in (a, b))
    except (binascii.Error, ValueError):
        return None
    if len(x) != SAMPLES or len(y) != SAMPLES:
        return None
    return float(x @ y) > ALIKE * float(np.linalg.norm(x) * np.linalg.norm(y))
