"""A call on one device, on several of this process, or on the ranks of torchrun: the same results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import call, log
from .copies import on
from .core import Core
from .errors import InputError
from .ranks import Ranks, RankSpread
from .report import Report
from .request import Request
from .run.plan import Plan
from .run.progress import Cancel, Progress, Ticker
from .run.results import Whole
from .spread import Spread, kind_of, resolve, same_kind
from .video import TensorVideo

#: Names of devices (also as one string with commas), "all", None or "auto" for the VAE's own alone; or ranks.
Devices = Ranks | Sequence[str | torch.device] | str | None


@dataclass(frozen=True)
class Told:
    """Whom a call tells of what it does, and asks whether to stop."""

    progress: Progress | None = None
    cancel: Cancel | None = None
    on_plan: Callable[[Plan], None] | None = None


def decode(
    vae: Core, devices: Devices, mixed: bool, z: Tensor, request: Request, out: Tensor, wanted: range,
    size: tuple[int, int, int, int], told: Told, plan: Plan | None, seed: int | None,
) -> None:  # fmt: skip
    """Latents as `Core.inside` has them into frames out [B, N, H, W, 3], which begins with wanted.start. size: for the
    report. seed: of noise that the decoder adds itself."""
    if seed is not None and devices not in (None, "auto"):
        log.once("this decoder adds noise by the frames that it has seen: one device decodes the clip")
        devices = None

    def operation(
        core: Core, clips: slice, tick: Ticker, results: Whole, wanted: range, on_plan: Any, policy: Any = None,
        made: Plan | None = None,
    ) -> Iterable[object]:  # fmt: skip
        return call.decode(core, z[clips], request, tick, results, wanted, size, on_plan, made, seed, policy)

    samples = functools.partial(call.decoder_samples, z)
    _run(vae, devices, mixed, "decoder", operation, out, wanted, tuple(z.shape[2:]), request, samples, size, told, plan)


def encode(
    vae: Core, devices: Devices, mixed: bool, video: Tensor, request: Request, out: Tensor, told: Told,
    plan: Plan | None,
) -> None:  # fmt: skip
    """Frames, checked, into moments out [B, T, h, w, 2C]."""
    still = vae.architecture.still

    def operation(
        core: Core, clips: slice, tick: Ticker, results: Whole, wanted: range, on_plan: Any, policy: Any = None,
        made: Plan | None = None,
    ) -> Iterable[object]:  # fmt: skip
        given = TensorVideo(video if still else video[clips], still)  # pictures are frames of one clip
        return call.encode(core, given, request, tick, results, wanted, on_plan, made, policy)

    given, size = TensorVideo(video, still), tuple(out.shape[1:4])
    samples = functools.partial(call.encoder_samples, given)
    _run(vae, devices, mixed, "encoder", operation, out, range(out.shape[1]), size, request, samples, given.size, told,
         plan)  # fmt: skip


def _run(
    vae: Core, devices: Devices, mixed: bool, half: str, operation: Callable[..., Iterable[object]], out: Tensor,
    wanted: range, latent: tuple[int, int, int], request: Request, samples: Callable[[Core], list[Tensor]],
    size: tuple[int, int, int, int], told: Told, plan: Plan | None,
) -> None:  # fmt: skip
    ranks = devices if isinstance(devices, Ranks) else None
    named = [vae.device] if ranks else _named(vae, devices, mixed)
    if not ranks and len(named) == 1:
        tick, results = Ticker(told.progress, told.cancel), Whole(out, wanted.start)
        for _ in operation(vae, slice(None), tick, results, wanted, told.on_plan, made=plan):
            pass
        return
    policy = vae.settled(half, samples) if ranks is None or ranks.rank == 0 else None
    report = vae._begin(half[:-1], size)
    ask = half, out, wanted, latent, request
    then = operation, told.progress, told.cancel, told.on_plan
    if ranks is None:
        spread = Spread(on(vae, named), *ask, policy, *then)
    else:
        ranks.agree(vae.device, mixed)
        spread = RankSpread([vae] * ranks.count, *ask, ranks.broadcast(policy), *then, ranks=ranks)
    _finish(vae, spread, report)


def _finish(vae: Core, spread: Spread, report: Report) -> None:
    try:
        spread.run(report)
    finally:
        vae._tell(report)  # in place of its own part's


def _named(vae: Core, devices: Devices, mixed: bool) -> list[torch.device]:
    """Raises InputError on devices that cannot be used together with the VAE's own."""
    named = resolve(devices, vae.device)
    same_kind([(device, kind_of(device)) for device in named], mixed)
    if vae.device not in named:
        names = ", ".join(map(str, named))
        raise InputError(f"devices names {names}, and this VAE is on {vae.device}: name that too")
    return named
