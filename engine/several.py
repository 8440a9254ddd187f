"""A call on one device, on several of this process, or on the ranks of torchrun: the same results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import call
from .core import Core
from .errors import InputError
from .ranks import Ranks, RankSpread
from .request import Request
from .run.progress import Ticker
from .run.results import Whole
from .spread import Spread, kind_of, resolve, same_kind
from .video import TensorVideo

#: Names of devices (also as one string with commas), "all", None or "auto" for the VAE's own alone; or ranks.
Devices = Ranks | Sequence[str | torch.device] | str | None


def decode(
    vae: Core, devices: Devices, mixed: bool, z: Tensor, request: Request, out: Tensor, wanted: range, *told: Any
) -> None:
    """Latents, checked, into frames out. told: progress, cancel and on_plan."""

    def operation(core: Core, clip: slice, *rest: Any) -> Iterable[object]:
        return call.decode(core, z[clip], *rest)

    size = tuple(z.shape[2:])
    _run(vae, devices, mixed, "decoder", operation, out, wanted, size, request,
         lambda v: call.decoder_samples(v, z), told)  # fmt: skip


def encode(
    vae: Core, devices: Devices, mixed: bool, video: Tensor, request: Request, out: Tensor, *told: Any
) -> None:
    """Frames [B, F, H, W, 3], checked, into moments out [B, T, h, w, 2C]. told: as for `decode`."""

    def operation(core: Core, clip: slice, *rest: Any) -> Iterable[object]:
        return call.encode(core, TensorVideo(video[clip]), *rest)

    _run(vae, devices, mixed, "encoder", operation, out, range(out.shape[1]), tuple(out.shape[1:4]), request,
         lambda v: call.encoder_samples(v, TensorVideo(video)), told, video.shape[:4])  # fmt: skip


def _run(
    vae: Core, devices: Devices, mixed: bool, half: str, operation: Callable[..., Iterable[object]], out: Tensor,
    wanted: range, size: tuple[int, int, int], request: Request, samples: Callable[[Core], Any], told: tuple,
    clip: tuple[int, ...] = (),
) -> None:  # fmt: skip
    """clip: what the report calls the clip's size; that of `out` if not given."""
    ranks = devices if isinstance(devices, Ranks) else None
    named = [vae.device] if ranks else _named(vae, devices, mixed)
    if not ranks and len(named) == 1:
        progress, cancel, on_plan = told
        ticker, results = Ticker(progress, cancel), Whole(out, wanted.start)
        for _ in operation(vae, slice(None), request, ticker, results, wanted, on_plan):
            pass
        return
    policy = None
    if ranks is None or ranks.rank == 0:
        with vae._claimed() as claimed:
            policy = claimed._settle(half, samples(claimed))
    report = vae._begin(half[:-1], clip or tuple(out.shape[:4]))
    if ranks is None:
        spread = Spread(vae.on(named), half, out, wanted, size, request, policy, operation, *told)
    else:
        ranks.agree(vae.device, mixed)
        policy, cores = ranks.broadcast(policy), [vae] * ranks.count
        spread = RankSpread(cores, half, out, wanted, size, request, policy, operation, *told, ranks=ranks)
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
