"""Conversion of VAEs that other nodes made: those of a known network become engine VAEs, once as long as their weights
stay as they are; the others run by ComfyUI's own code."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..engine import InputError
from ..engine.network.stamp import Stamp
from ..engine.precision.digest import digest
from ..engine.report import Report
from .direct import SETTINGS
from .frames import of_frames
from .host import EngineVAE
from .making import follows, follows_vae, from_host_vae
from .reports import Outcome
from .settings import DEFAULT_OVERLAP, Settings

CONVERTED = (
    "another node's VAE: the engine runs it on a copy of its weights, kept as long as that VAE is; "
    "Zero-Waste VAE Optimize gives it a precision and optimisations of its own"
)

UNKNOWN = "ComfyUI's own code, because the engine does not know this network"
CHANGED = "ComfyUI's own code, because another node has changed this VAE"


class _Conversion(NamedTuple):
    """An engine VAE made of a host VAE, and the weights it was made of."""

    vae: EngineVAE
    stamp: Stamp
    held: str
    settings: tuple[object, ...]


# The conversions hold the networks they were made from, never the VAE objects: those would live as long as their keys.
_converted: WeakKeyDictionary[object, _Conversion] = WeakKeyDictionary()


def check_vae(vae: object) -> None:
    """Refuse an input where a loader gave no VAE, as checkpoints without one do. Raises InputError."""
    if getattr(vae, "first_stage_model", None) is None:
        raise InputError("There is no VAE at this input: choose a file that holds one in the loader")


def engine_vae(vae: object) -> EngineVAE | None:
    """Return `vae` itself if it is an engine VAE, or an engine VAE converted from it.

    The conversion has the defaults of Zero-Waste VAE Optimize, and is made anew whenever the network, weights or device
    change. None: the engine does not know its network, or nodes have changed it. Raises InputError where there is no
    VAE.
    """
    check_vae(vae)
    if not follows_vae(vae):
        return None
    if isinstance(vae, EngineVAE):
        return vae
    network, known = vae.first_stage_model, _converted.get(vae)
    settings = type(network), vae.device, *(getattr(network, name, None) for name in SETTINGS)
    if known is not None and known.settings == settings and known.stamp.holds(network, closely=True):
        return known.vae if follows(network) else None
    # Hosts that load weights piece by piece put other tensors with the same values in their place.
    stamp = Stamp(network)
    if known is not None and known.settings == settings and known.held == _held(network, known.vae):
        _converted[vae] = known._replace(stamp=stamp)
        return known.vae if follows(network) else None
    del known  # its weights, before others take their place
    _converted.pop(vae, None)
    converted = from_host_vae(vae, "auto")
    if converted is not None:
        _converted[vae] = _Conversion(converted, stamp, _held(network, converted), settings)
    return converted


def _held(network: object, vae: EngineVAE) -> str:
    """Return a digest of the values in a host's network, as the engine rounds them."""
    return digest(network.state_dict(), vae.engine.dtype)


def host_decode(vae: object, samples: Tensor, settings: Settings) -> tuple[Tensor, Outcome]:
    """Decode with the host's VAE Decode: images [F, H, W, C] in 0..1; the report says which wishes had no effect."""
    samples = of_frames(samples)
    report = _report(vae, "decode")
    with report.measured(torch.device(vae.device)), report.stage("decode"):
        images = _decode(vae, samples, settings)
    if images.ndim not in (4, 5):
        raise InputError(f"this VAE makes {list(images.shape)}, no images: decode it with the node made for it")
    report.clip = tuple(images.shape[:4]) if images.ndim == 5 else (1, *images.shape[:3])
    return images.reshape(-1, *images.shape[-3:]), _outcome(report, settings)


def _decode(vae: object, samples: Tensor, settings: Settings) -> Tensor:
    """Decode whole, or in the host's own tiles where tiles of a size were requested."""
    if settings.tiling not in ("blended", "exact") or not settings.tile:
        return vae.decode(samples)
    unit = max(1, vae.spacial_compression_decode())
    overlap = DEFAULT_OVERLAP if settings.overlap is None else settings.overlap
    tile = max(settings.tile // unit, 1)
    return vae.decode_tiled(samples, tile_x=tile, tile_y=tile, overlap=min(overlap // unit, tile // 4))


def host_encode(vae: object, images: Tensor, settings: Settings) -> tuple[Tensor, Outcome]:
    """Encode images [F, H, W, C] or [B, F, H, W, C] with the host's VAE Encode; return the samples."""
    if images.ndim not in (4, 5) or 0 in images.shape:
        raise InputError(f"There are no frames in these images: connect [F, H, W, 3], not {list(images.shape)}")
    images = images.flatten(0, -4)
    report = _report(vae, "encode")
    report.clip = (1, *images.shape[:3])
    with report.stage("encode"):
        samples = vae.encode(images[..., :3])
    return samples, _outcome(report, settings)


def _report(vae: object, operation: str) -> Report:
    precision = str(vae.vae_dtype).removeprefix("torch.")
    network = type(vae.first_stage_model).__name__
    mode = UNKNOWN if follows_vae(vae) and follows(vae.first_stage_model) else CHANGED
    return Report(operation, (0, 0, 0, 0), network, precision, str(vae.device), mode=mode)


def _outcome(report: Report, settings: Settings) -> Outcome:
    report.complete = True
    rest = settings
    if report.operation == "decode" and settings.tile:
        rest = replace(settings, tiling="auto", tile=0, overlap=None)
        report.mode = f"{report.mode}, in its own tiles of {settings.tile} pixels"
    ignored = [] if rest == Settings() else [f"without effect on it: {rest.describe()}"]
    return Outcome(report, None, notes=ignored)
