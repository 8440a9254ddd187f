"""One decode or encode from request to result: plan, attempts, report, and the rescue when memory runs out or values
overflow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import log
from ..errors import PlanError
from ..kernels.conv3d.tuned import held
from ..kernels.targets import target
from ..planning.cost import tuned
from ..planning.plain_walk import SLACK, needs_length
from ..planning.plan import Plan
from ..precision.policy import Policy
from ..report import Report
from ..request import Request
from ..runtime.allowance import Allowance, enforced
from ..runtime.kept import KEPT
from ..runtime.pressure import out_of_memory
from ..system.devices import empty_device_cache, free_cached, synchronize
from ..system.memory import GIB
from . import clip
from .components import other_half
from .core import Core
from .guard import Guard, NonFinite, scoped
from .identity import WeightsChanged
from .progress import OnPlan, Ticker
from .results import Finished, Results
from .video import StreamVideo, TensorVideo

#: cut(clip) returns the parts of a clip that samples are (precision/policies.Samples).
Cut = Callable[[Any], list[Tensor]]
#: Part of its memory by which a run of plain torch is allowed more.
MORE = 8


def decode(
    core: Core, z: clip.Latents, request: Request, tick: Ticker, results: Results, wanted: range,
    size: tuple[int, int, int, int], on_plan: OnPlan | None = None, made: Plan | None = None, seed: int | None = None,
    policy: Policy | None = None,
) -> Iterator[Finished]:  # fmt: skip
    """Decode latents to the wanted frames of every clip, into `results`; yield the finished ones that `results` passes
    on.

    Args:
        z: latents in the form that `Core.inside` returns.
        wanted: frames of each clip.
        size: clips, frames, height and width for the report.
        on_plan: called with the plan of each attempt.
        made: a plan for this call.
        seed: of noise that the decoder adds itself.
        policy: the operands of the whole clips, where they have been settled.
    """
    report = core._begin("decode", size)
    count, h, w = z.shape[2:]
    guard = Guard(tick, core.device, report.events, core.asks())
    guard.alone = policy is None
    first, last = core.model.decoder.program.window(wanted.start, wanted.stop, count)
    report.lead = core.model.decoder.program.warm_up(wanted.start, first)
    if (component := core._family.get("decoder")) is not None:
        component.begin(report, (count, h, w), seed)

    def attempt(vae: Core, plan: Plan) -> Iterator[int]:
        return vae._half("decoder", plan, seed).through(z, plan, results, guard, wanted)

    samples = functools.partial(decoder_samples, z)
    planning = functools.partial(
        _planning, core, "decoder", lambda: (last - first, h, w), request, (0, 0), samples, guard.tick.check, made,
        policy, drawn=count if seed is None else 0,
    )  # fmt: skip
    with closing(_survive(core, report, guard, request, planning, attempt, on_plan)) as steps:
        for _ in steps:
            yield from results.ready()
    yield from results.ready()
    report.complete = True


def encode(
    core: Core, video: TensorVideo | StreamVideo, request: Request, tick: Ticker, results: Results, wanted: range,
    on_plan: OnPlan | None = None, made: Plan | None = None, policy: Policy | None = None,
) -> Iterator[Finished]:  # fmt: skip
    """Encode frames to the wanted moments [n, h, w, 2C] of every clip, into `results`; yield the finished ones that
    `results` passes on. made, policy: as in `decode`."""
    report = core._begin("encode", video.size)
    s, program, reads = core.architecture.spatial, core.model.encoder.program, core.architecture.reads
    guard = Guard(tick, core.device, report.events, core.asks())
    guard.alone = policy is None

    def window(first: int) -> tuple[int, int]:
        latents = clip.UNKNOWN if video.count is None else core.architecture.latents(video.count)
        return program.window(first, min(wanted.stop, latents), latents)

    def size() -> tuple[int, int, int]:
        first, last = window(wanted.start)
        return last - first, video.height // s, video.width // s

    def attempt(vae: Core, plan: Plan) -> Iterator[int]:
        return vae._half("encoder", plan).through(video, plan, results, guard, wanted)

    if program.unstreamed or (video.count is None and needs_length(core.architecture, program)):
        video.fill(clip.UNKNOWN)
    rest = video.height % s, video.width % s
    samples = functools.partial(encoder_samples, video)
    planning = functools.partial(
        _planning, core, "encoder", size, request, rest, samples, guard.tick.check, made, policy
    )
    with closing(_survive(core, report, guard, request, planning, attempt, on_plan)) as steps:
        for needed in steps:
            yield from results.ready()
            video.drop(reads(window(guard.finished[0])[0], needed)[0])
            video.fill(reads(0, needed)[1])
    yield from results.ready()
    report.clip = video.size
    report.complete = True


def decoder_samples(z: clip.Latents, vae: Core, cut: Cut, device: torch.device | None = None) -> list[Tensor]:
    """Return the samples that settle the decoder's operands, cut from `z`, unscaled, on `device` (None: the VAE's)."""
    return [p.to(device or vae.device).float() / vae.scale for p in cut(z)]


def encoder_samples(
    video: TensorVideo | StreamVideo, vae: Core, cut: Cut, device: torch.device | None = None
) -> list[Tensor]:
    """Return the samples that settle the encoder's operands, cut from `video`, on `device` (None: the VAE's)."""
    in_units = vae.model.encoder.program.in_units
    return [in_units(p.to(device or vae.device)) for p in cut(video.sample())]


def _planning(
    core: Core, half: str, size: Callable[[], tuple[int, int, int]], request: Request, rest: tuple[int, int],
    samples: Callable[..., list[Tensor]], check: Callable[[], None], made: Plan | None, policy: Policy | None,
    drawn: int | None = None,
) -> Callable[[Core, int], Plan]:  # fmt: skip
    """Return plan(vae, below), which settles the operands by `samples` of the clip and then calls `Core._plan`. `made`
    is for the first attempt, if the VAE and the operands are those it was planned with. drawn: as in `Planner.plan`."""

    def plan(vae: Core, below: int) -> Plan:
        nonlocal made
        kept, made = made, None
        changed = not below and vae._settle(half, functools.partial(samples, vae), policy)
        if changed and kept is not None and vae is core and core.on_change is not None:
            kept, changed = core.on_change(vae.planner), False
        again = functools.partial(vae._plan, half, size(), request, rest, below, check, drawn)
        try:
            return again(None if changed or vae is not core else kept)
        except PlanError:
            # Weights that wait on the device for the next decode may be all that is in the way.
            if half == "decoder" or not sum(c.release(keep=half) for c in vae._family.values()):
                raise
        return again()

    return plan


def _survive(
    core: Core, report: Report, guard: Guard, request: Request, planning: Callable[[], Callable[[Core, int], Plan]],
    attempt: Callable[[Core, Plan], Iterator[int]], on_plan: OnPlan | None,
) -> Iterator[int]:
    """Repeat attempt(vae, plan) until it succeeds: under leaner plans where memory runs out, and in a safer precision
    where values overflow. planning() returns plan(vae, below) of `_planning`; on_plan(plan) is called before each
    attempt."""
    half, tried = f"{report.operation}r", list[Plan]()
    if (measured := tuned(core.device)) is not None:
        measured.of(core.device, core.kernels(half))  # a clip keeps the schedules that it began with
    with core._claimed(half, confirms=True) as vae, report.measured(core.device), held(core.device):
        report.precision = vae.precision
        own, guard.confirm, plan = vae, vae.confirm, planning()
        while True:
            try:
                with report.stage("plan"):
                    first = _planned(functools.partial(plan, vae, 0), guard)
                describe(vae, report, first)
                if first.note:
                    log.once(f"{report.operation}: {first.note}")
                _, frames, height, width = report.clip
                log.debug(f"{report.operation} {width}x{height}, {frames} frames: {first.describe()}")
                leaner = functools.partial(_leaner, vae, half, request, plan, tried)
                tries = guard.survive(functools.partial(_attempt, vae, report, attempt, on_plan), first, leaner)
                last = yield from scoped(functools.partial(vae._scope, half), tries)
            except NonFinite as error:
                where = error.where
            except WeightsChanged:
                vae, plan, guard.handover = own, planning(), None
                vae._follow(half)
                report.precision = vae.precision
                continue
            except Exception as error:
                if not vae._without_kernels(half, error):
                    raise
                report.precision = vae.precision
                continue
            else:
                describe(vae, report, last)
                _describe_graphs(vae, report, last)
                return
            guard.handover = None  # its histories have another type, or are 8 bit with other scales
            vae = vae._safer(where)
            report.precision += f", then {vae.precision}"
            guard.events["nan_reruns"] += 1


def _attempt(
    vae: Core, report: Report, attempt: Callable[[Core, Plan], Iterator[int]], on_plan: OnPlan | None, plan: Plan
) -> Iterator[int]:
    if on_plan is not None:
        on_plan(plan)
    half = f"{report.operation}r"
    if plan.fused:
        if vae._plain.release(keep=other_half(half)):  # plans count a component's weights in one form
            empty_device_cache()
        _pack(vae, report, half, plan)
    else:
        vae._fused.release(keep=other_half(half))
    if plan.tiled or not plan.kept:
        KEPT.release(vae.device)  # other runs reuse it, or free it themselves
    if not plan.kept:
        free_cached(vae.device, getattr(vae.model, half))
    limits = plan.plain and enforced(vae.device)
    held = vae._held(half) + vae._plain.gaps(half) if limits else 0
    # Elsewhere cuDNN's choices follow its blocks, and tiles and passes each begin without.
    alike = plan.launches and not plan.tiled and plan.steps.passes == 1
    again = (id(getattr(vae.model, half)), plan) if alike else None
    with Allowance(vae.device, plan.own_bytes, held, limits, again) as allowance:
        steps = scoped(allowance.step, attempt(vae, plan))
        # Only the steps are timed: between them the caller works.
        yield from scoped(lambda: report.stage(report.operation), steps)


def _planned(plan: Callable[[], Plan], guard: Guard) -> Plan:
    """Call plan(), which may measure on the device; call it once more if that finds no memory, after others have freed
    some."""
    try:
        return plan()
    except Exception as error:
        if not out_of_memory(error):
            raise
    guard.relieve_operator()
    return plan()


def _leaner(
    vae: Core, half: str, request: Request, plan: Callable[[Core, int], Plan], tried: list[Plan], failed: Plan
) -> Plan | None:
    """Return the plan to go on with after one that found no memory. tried: the work of those that failed before.

    Plain torch is first allowed more, if the target and the card have it: its libraries may have taken more than its
    plan counts. Otherwise the plan has a lower peak, by a tenth if there is one, as parking goes in steps of megabytes;
    blended tiles only where nothing else is left."""
    if failed.plain and enforced(vae.device):
        more = replace(failed, peak_bytes=failed.peak_bytes + failed.own_bytes // MORE)
        if vae._limits(half, request).hold(more):
            return more
    tried.append(failed.work)
    other = None
    for share in (0.9, 1.0):
        found = _untried(functools.partial(plan, vae), int(share * failed.peak_bytes), tried)
        if found is not None and found.tiled == failed.tiled:
            return found
        other = other or found
    return other


def _untried(plan: Callable[[int], Plan], below: int, tried: list[Plan]) -> Plan | None:
    """Return the first plan with a peak below so many bytes that does other work than those in `tried`, or None."""
    while True:
        try:
            found = plan(below)
        except PlanError:
            return None
        if found.work not in tried:
            return found
        below = int(found.peak_bytes / (1 + SLACK))  # plain torch states up to so much more than it counts


# -- what the report says ----------------------------------------------------------------------------------------------


def describe(vae: Core, report: Report, plan: Plan) -> None:
    """Fill in the report of a run before it starts."""
    half = f"{report.operation}r"
    layout = "NDHWC" if plan.fused else vae._plain.layout
    if layout == "NDHWC":
        log.once("Channels_Last_3D Memory Format Applied.", log.info)
    if plan.fused and vae.device.type == "cuda":
        log.once("Triton kernel fusion enabled for GroupNorm + SiLU.", log.info)
    here = vae.kernels(half)
    report.kernels = "" if here is None or (here.kernels and plan.bare) else here.words
    report.mode = f"fused kernels ({layout})" if plan.fused else f"plain torch ({layout})"
    if plan.fused and plan.reference:
        report.mode = f"reference operators ({layout})"
    if launches := not plan.fused and vae.launches(half):
        report.mode = f"torch with kernels of its own ({layout})"
    if plan.plain and vae.fused() is not None and (why := vae.planner.walk.why_not(half)):
        log.once(f"{vae.arch} {half}: plain torch instead of the fused kernels: {why}")
    report.plan = plan.describe()
    report.predicted_gb, report.parked_gb = plan.peak_bytes / GIB, plan.host_bytes / GIB
    off = vae.unused(plan.fused or plan.own is not None)
    if vae.options.triton_fusion is not False and not plan.fused and here is not None and not here.kernels:
        off["triton_fusion"] = "; ".join(here.notes)  # of this component: others may have kernels on this device
    if launches:
        off.pop("triton_fusion", None)
    if plan.own is not None:
        graphs = vae.device.type == "cuda" and vae.options.cuda_graphs
        plan.own.report(report, vae._mixed.mode.kind or vae.precision, off, graphs)
    if plan.fused and "winograd" not in off:
        count, of = vae.planner.walk.network(half).formed
        form = f"{count} of {of} convolutions in Winograd form" if count else ""
        report.kernels = "; ".join(filter(None, (report.kernels, form)))
        if why := vae.planner.walk.no_winograd(half):
            off["winograd"] = why
    report.off = list(off.items())
    if plan.fused:
        measured = tuned(vae.device)
        report.schedules = "" if measured is None else measured.words(vae.device, vae.kernels(half))
        _describe_operands(vae, report)


def _describe_operands(vae: Core, report: Report) -> None:
    half = f"{report.operation}r"
    vae._mixed.describe(half, report)
    if vae.device.type == "cuda" and "fp8" in vae._mixed.policy(half).kinds.values():
        log.once(f"sm_{target(vae.device).capability} FP8 Path Activated.", log.info)


def _describe_graphs(vae: Core, report: Report, plan: Plan) -> None:
    """Fill in the report's part on CUDA graphs after a run."""
    if not plan.kept or "cuda_graphs" in dict(report.off):
        return
    runs = vae._component(f"{report.operation}r", plan).runs
    if runs.no_graphs:
        report.off.append(("cuda_graphs", runs.no_graphs))
        return
    done, chunks = runs.replayed
    report.mode = f"{report.mode}, {done} of {chunks} chunks replayed from CUDA graphs"
    log.once("CUDA Graph Captured (Decoding Latency Optimized).", log.info)


def _pack(vae: Core, report: Report, half: str, plan: Plan) -> None:
    """Compile the kernels of "decoder" or "encoder" and pack its weights, if they are not packed, timed as a stage of
    its own."""
    if not vae._fused.packed_bytes(half):
        vae.confirm()
        with report.stage("weights"):
            with vae._choices.loading(half):
                vae._fused.pack(half, plan.own_bytes)
            if vae.device.type == "cuda":
                synchronize(vae.device)
