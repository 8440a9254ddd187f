"""A call on one device, on several of this process, or on the ranks of torchrun: the results are the same."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import log
from ..errors import InputError, PlanError
from ..execution import call
from ..execution.core import Core
from ..execution.progress import Callbacks, Ticker
from ..execution.results import Finished, Target
from ..execution.video import StreamVideo, TensorVideo
from ..network.steps import Latents
from ..network.tiles import grid
from ..planning.plan import Plan
from ..request import OVERLAP, Request
from .consistency import of_bits, of_contents, of_file, of_network
from .devices import copies_on, kind_of, resolve, same_kind
from .parts import GIVEN, Feed, Streamed
from .ranks import Ranks, RankSpread
from .spread import Operation, Spread

#: Names of devices (also as one string with commas), "all", None or "auto" for the VAE's own alone; or ranks.
Devices = Ranks | Sequence[str | torch.device] | str | None


def decode(
    vae: Core, devices: Devices, mixed: bool, z: Tensor | Latents, request: Request, into: Target, wanted: range,
    size: tuple[int, int, int, int], callbacks: Callbacks, plan: Plan | None, seed: int | None,
) -> Generator[Finished, None, None]:  # fmt: skip
    """Decode latents into frames on the given devices.

    Args:
        vae: the loaded VAE.
        devices: devices or ranks that share the call.
        mixed: allow devices of different kinds, whose bits differ.
        z: latents as `Core.inside` returns them.
        request: options of the call.
        into: target of the frames.
        wanted: frames to make, of each clip.
        size: batch, frames, height and width in pixels, for the report.
        callbacks: of the caller.
        plan: a plan made before, or None.
        seed: seed of the noise that some decoders add themselves; one device then decodes the clip, unless the noise
            goes by the place of a frame.

    Returns: an iterator over the finished frames that `into` hands on.
    """
    by_place = getattr(vae.model.config, "begins_with_noise", False)
    if seed is not None and not by_place and devices not in (None, "auto"):
        log.once("this decoder adds noise by the frames that it has seen: one device decodes the clip")
        if isinstance(devices, Ranks) and devices.rank:
            return
        devices = None

    def operation(core: Core, clips: slice, tick: Ticker, *rest: Any, made: Plan | None = None) -> Iterator[Finished]:
        results, wanted, on_plan, policy, request = rest
        these = z[clips] if isinstance(z, Tensor) else z  # files are read by one clip
        return call.decode(core, these, request, tick, results, wanted, size, on_plan, made, seed, policy)

    samples = functools.partial(call.decoder_samples, z)
    asked = "decoder", into, z.shape[0], wanted, tuple(z.shape[2:]), request
    yield from _run(vae, devices, mixed, operation, asked, samples, size, callbacks, plan, {"latent": z})


def encode(
    vae: Core, devices: Devices, mixed: bool, video: TensorVideo | StreamVideo, request: Request, into: Target,
    size: tuple[int, int, int], callbacks: Callbacks, plan: Plan | None,
) -> Generator[Finished, None, None]:  # fmt: skip
    """Encode checked frames into moments [T, h, w, 2C] of each clip, on the given devices.

    Args: as of `decode`, besides
        video: the frames, as a tensor or as a stream.
        size: T, h and w. Where T is not known, one device encodes alone.

    Returns: an iterator over the finished moments that `into` hands on.
    """

    def operation(core: Core, clips: slice, tick: Ticker, *rest: Any, made: Plan | None = None) -> Iterator[Finished]:
        results, wanted, on_plan, policy, request = rest
        return call.encode(core, video.of(clips), request, tick, results, wanted, on_plan, made, policy)

    samples = functools.partial(call.encoder_samples, video)
    asked, feed = ("encoder", into, video.batch, range(size[0]), size, request), GIVEN
    if isinstance(video, StreamVideo):
        feed = Streamed(vae, video)
    given = {"video": video.all if isinstance(video, TensorVideo) else None}
    yield from _run(vae, devices, mixed, operation, asked, samples, video.size, callbacks, plan, given, feed)


def _run(
    vae: Core, devices: Devices, mixed: bool, operation: Operation, asked: tuple[Any, ...],
    samples: Callable[[Core], list[Tensor]], size: tuple[int, int, int, int], callbacks: Callbacks, plan: Plan | None,
    given: dict[str, Any], feed: Feed = GIVEN,
) -> Generator[Finished, None, None]:  # fmt: skip
    """Run a call on one device or share it.

    Args:
        asked: the arguments of Spread from `half` to `request`.
        given: the input by name, which ranks compare.
    """
    ranks = devices if isinstance(devices, Ranks) else None
    named = [vae.device] if ranks else _named(vae, devices, mixed)
    half, into, clips, wanted, latents, request = asked
    if not ranks and len(named) == 1:
        yield from _alone(vae, operation, into, wanted, request, callbacks, plan)
        return
    policy = vae.settled(half, samples) if ranks is None or ranks.rank == 0 else None
    report = vae._begin(half[:-1], size)
    if ranks is None:
        asked = half, into, clips, wanted, latents, in_tiles_of(vae, half, latents, request)
        spread = Spread(copies_on(vae, named), *asked, policy, operation, callbacks, feed)
    else:
        _check_alike(vae, ranks, mixed, given, clip=(size, clips, latents), part=wanted, output=request.output)
        shared = (in_tiles_of(vae, half, latents, request), policy) if ranks.rank == 0 else None
        request, policy = ranks.broadcast(shared)
        asked = half, into, clips, wanted, latents, request
        spread = RankSpread([vae] * ranks.count, *asked, policy, operation, callbacks, feed, ranks)
    if into.room is not None:  # a part that is the whole stream would have to be held whole
        alone = spread.alone
        if ranks.broadcast(alone) if ranks else alone:
            if ranks is None or ranks.rank == 0:
                yield from _alone(vae, operation, into, wanted, request, callbacks, None)
            return
    try:
        with closing(spread.run(report)) as done:
            yield from done
    finally:
        vae._tell(report)  # replaces the report of this VAE's own part


def _check_alike(vae: Core, ranks: Ranks, mixed: bool, given: dict[str, Any], **asked: Any) -> None:
    """Raise InputError on all ranks where one has another input, VAE, precision, option or request."""
    network = of_network(vae) if not mixed else None if vae.path is None else of_file(vae.path)
    contents = {name: of_contents(what) for name, what in given.items()}
    precision = None if mixed else vae.precision
    ranks.agree(vae.device, mixed, **asked, precision=precision, VAE=network, options=of_bits(vae), **contents)


def _alone(
    vae: Core, operation: Operation, into: Target, wanted: range, request: Request, callbacks: Callbacks,
    plan: Plan | None,
) -> Iterator[Finished]:  # fmt: skip
    results, on_plan = into.whole(wanted.start), callbacks.on_plan
    return operation(vae, slice(None), callbacks.ticker, results, wanted, on_plan, None, request, made=plan)


def in_tiles_of(vae: Core, half: str, size: tuple[int, int, int], request: Request) -> Request:
    """Return the request with the tiles that one device would choose.

    All devices use them, because memory that is free on another one must not change the bits. size: latents, rows and
    columns of latent pixels."""
    if request.tiling not in ("auto", "blended") or vae.architecture.own is not None:
        return request
    try:
        plan = vae._plan(half, size, request)
    except PlanError:  # another device may be able to
        return request
    if not plan.tiled:
        return request
    s = vae.architecture.spatial
    tile = s * max(plan.grid.rows.size, plan.grid.cols.size)
    overlaps = (min(o, tile - 1) for o in (request.overlap, OVERLAP, s))  # `tile` may be less than was asked for
    shared = next(o for o in overlaps if grid(*size[1:], tile, o, s) == plan.grid)
    return replace(request, tiling="blended", tile=tile, overlap=shared, chunk=0)


def _named(vae: Core, devices: Devices, mixed: bool) -> list[torch.device]:
    """Return the devices that are named; raise InputError where they cannot be used together with the VAE's own."""
    named = resolve(devices, vae.device)
    same_kind([(device, kind_of(device, vae.options.kernels)) for device in named], mixed)
    if vae.device not in named:
        names = ", ".join(map(str, named))
        raise InputError(f"devices names {names}, and this VAE is on {vae.device}: name that too")
    return named
