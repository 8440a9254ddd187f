"""Calibration: measure from a clip or a latent the range of each convolution and its cost in 8 bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import InputError
from ...network.fused import fuse
from ...planning.fusable import no_8_bit, why_off
from ...precision.policy import KINDS, Policy, eligible, finite
from ...runtime.pixels import to_unit
from ...vae import VideoVAE
from ..eight_bit.sampling import SIDE, Trials, encode, latent_samples, video_samples
from ..eight_bit.table import Table

#: Side of a sample in latent pixels where errors are measured on a CPU: a pass per convolution, for two kinds.
CPU_SIDE = 16


@dataclass(frozen=True)
class Outcome:
    """One component's table, and per kind (dB with every eligible convolution in 8 bit, saturated operands, all
    operands)."""

    half: str
    table: Table
    whole: dict[str, tuple[float, int, int]]


@torch.no_grad()
def calibrate(
    vae: VideoVAE, source: str, video: Tensor | None, latent: Tensor | None, errors: bool, tick: Callable[[], None]
) -> Iterator[Outcome]:
    """Measure a clip or a latent, one component (encoder or decoder) at a time; store and yield each table.

    Args:
        source: the name of the clip or latent, for messages and the table.
        video: [F, H, W, 3], calibrates the encoder and the decoder; or None.
        latent: host-scaled [B, C, T, h, w], calibrates the decoder alone.
        errors: also measure every convolution by itself, which a dB floor needs.
        tick: called after each pass.

    Raises:
        InputError: the VAE has no 8-bit path, or the clip's values overflow.
    """
    if any(p.scales for p in vae.architecture.programs(vae.model.config)):
        rest = "" if not vae.architecture.in_tiles else ", and its encoder measures the first clips it sees"
        raise InputError(f"{vae.path}: is not calibrated: its decoder scales each row as it comes{rest}")
    reason = why_off(vae.arch, vae.model.config, vae.dtype, vae.device, emulate=True)
    reason = reason or no_8_bit(vae.architecture.programs(vae.model.config), vae.dtype)
    if reason:
        raise InputError(f"{vae.path}: cannot be calibrated here, its 8-bit path is off ({reason})")
    side = CPU_SIDE if errors and vae.device.type == "cpu" else SIDE
    if video is not None:
        frames = [to_unit(p.to(vae.device)) for p in video_samples(video)]
        small = [to_unit(p.to(vae.device)) for p in video_samples(video, side=side)]
        network = fuse(vae.model.encoder, vae.dtype, vae.options, device=vae.device)
        latents = [encode(network, x) for x in frames], [encode(network, x) for x in small]
        yield _half(vae, "encoder", source, frames, small, errors, tick)
    else:
        clip = vae.inside(latent)
        latents = tuple(
            [p.to(vae.device).float() / vae.scale for p in latent_samples(clip, side=s)] for s in (SIDE, side)
        )
    yield _half(vae, "decoder", source, *latents, errors, tick)


def passes(vae: VideoVAE, halves: tuple[str, ...], errors: bool) -> int:
    """Return how often `calibrate` will call `tick`."""
    each = (len(eligible(getattr(vae.model, half))) if errors else 0 for half in halves)
    return sum(1 + len(KINDS) * (n + 1) for n in each)


def _half(
    vae: VideoVAE, half: str, source: str, samples: list[Tensor], small: list[Tensor], errors: bool,
    tick: Callable[[], None],
) -> Outcome:
    table = Trials(vae.model, half, vae.dtype, vae.options, samples).table(source)
    if not finite(table.ranges):
        raise InputError(f"{source}: values of its {half} overflow in {vae.dtype}; calibrate on another clip")
    tick()
    trials = Trials(vae.model, half, vae.dtype, vae.options, small)
    keys, whole = eligible(getattr(vae.model, half)), {}
    for kind in KINDS:
        if errors:
            table = table.with_errors(kind, trials.errors(kind, table.ranges, tick))
        db, saturation = trials.quality(Policy(dict.fromkeys(keys, kind), table.ranges))
        whole[kind] = db, saturation.count, saturation.total
        tick()
    vae.store.calibrate(half, table)
    return Outcome(half, table, whole)
