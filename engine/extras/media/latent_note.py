"""The note on a latent that names the VAE that made it: set on the tensor and in its file, checked by decodes."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ... import log
from ...errors import InputError, one_line
from ...families import latent_space
from ...network.architecture import Architecture
from ...request import NOTE

#: Keys of a note, and of the same entries in a file's metadata.
KEYS = ("family", "scale", "version", "vae", "encoder", "decoder")
#: The default advice for a latent of another VAE.
CURE = "decode it with the VAE that made it, or allow any with any_vae=True"
#: Weights of each component that a note keeps, and the least cosine between those of one VAE in any type or
#: quantisation. Random weights have 0 with a deviation of 0.09; the demo VAE's, in 4 bit with one scale for a whole
#: layer, 0.83 and 0.95.
SAMPLES, ALIKE = 128, 0.5


class VAE(Protocol):
    """The part of a loaded VAE that a note describes."""

    arch: str
    scale: float
    path: Path | None
    architecture: Architecture
    model: nn.Module


def note_of(vae: VAE) -> dict[str, str]:
    """Return the note of latents that `vae` makes: its family, the scale of its latents, the pack's version, the name
    of its file, and a few weights next to the latents, which tell VAEs of the same layout apart."""
    from .... import __version__

    note = {"family": vae.arch, "scale": f"{vae.scale:g}", "version": __version__}
    if vae.path is not None:
        note["vae"] = vae.path.name.encode(errors="replace").decode()  # a name need not be UTF-8, a file's header is
    for half, at in (("encoder", -1), ("decoder", 0)):
        if samples := _samples(getattr(vae.model, half), at):
            note[half] = samples
    return note


def marked(latent: Tensor, note: Mapping[str, str]) -> Tensor:
    """Set a note on a new latent, which no other code holds yet, and return it."""
    setattr(latent, NOTE, dict(note))
    return latent


def found(latent: Any) -> dict[str, str]:
    """Return the note on a latent, or on a LatentFile; empty where there is none."""
    return getattr(latent, NOTE, {})


def in_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the note among a file's metadata; empty where there is none."""
    return {key: metadata[key] for key in KEYS if key in metadata} if metadata.get("family") else {}


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
    here = note_of(vae)
    other = made != own or not _same_scale(note.get("scale"), vae.scale)
    weights = not other and _other_weights(note, here)
    if other or (weights and vae.architecture.several):
        raise InputError(f"{what} was made by {_named(note)}, and the VAE here is {_named(here)}: {cure}")
    if weights:
        log.once(f"{what} was made by {_named(note)}, and the VAE here has other weights "
                 f"({_named(here)}): check that their latents are the same")  # fmt: skip


def _named(note: Mapping[str, str]) -> str:
    """Return the family, with the file and a scale other than the network's own; texts from files may be of any
    form."""
    family, file, scale = (one_line(note.get(key, "").strip(), 100) for key in ("family", "vae", "scale"))
    parts = [file] if file else []
    parts += [f"scale {scale}"] if scale not in ("", "1") else []
    return f"{family} ({', '.join(parts)})" if parts else family


def _same_scale(noted: str | None, scale: float) -> bool:
    try:
        return noted is None or abs(float(noted) - scale) <= 1e-4 * abs(scale)
    except ValueError:
        return True


def _other_weights(note: Mapping[str, str], own: Mapping[str, str]) -> bool:
    """Return True if neither component is the same: a VAE may have a decoder of its own with another VAE's encoder."""
    known = [alike for half in ("encoder", "decoder") if (alike := _alike(note.get(half), own.get(half))) is not None]
    return bool(known) and not any(known)


def _samples(half: nn.Module | None, at: int) -> str:
    """Return evenly spaced weights of the large layer at index `at` of a component, as bytes in base64; "" where there
    is none."""
    large = [] if half is None else [p for p in half.parameters() if p.ndim > 1 and p.numel() >= SAMPLES]
    if not large or large[at].is_meta:
        return ""
    weight = large[at].detach().reshape(-1)
    places = torch.linspace(0, weight.numel() - 1, SAMPLES, dtype=torch.float64, device="cpu").long()
    picked = weight[places.to(weight.device)].float().cpu()
    scaled = (127 * picked / picked.abs().max().clamp(min=1e-30)).round().to(torch.int8)
    return base64.b64encode(scaled.numpy().tobytes()).decode()


def _alike(a: str | None, b: str | None) -> bool | None:
    """Return True if two samples are of the same weights; None if that cannot be known."""
    try:
        x, y = (np.frombuffer(base64.b64decode(text or "", validate=True), np.int8).astype(float) for text in (a, b))
    except (binascii.Error, ValueError):
        return None
    if len(x) != SAMPLES or len(y) != SAMPLES:
        return None
    return float(x @ y) > ALIKE * float(np.linalg.norm(x) * np.linalg.norm(y))
