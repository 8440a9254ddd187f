"""One decode or encode from what is asked for to its result: its plan, its attempts and its report, and what follows
when memory runs out or values overflow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import closing

from torch import Tensor

from . import log
from .core import Core
from .errors import PlanError
from .kernels.targets import target
from .memory import GIB
from .operands.policy import Policy
from .precision.sampling import latent_samples, video_samples
from .report import Report
from .request import Request
from .run import clip
from .run.devices import synchronize
from .run.guard import Guard, NonFinite
from .run.kept import KEPT
from .run.pixels import to_unit
from .run.plan import Plan
from .run.pressure import out_of_memory
from .run.progress import Ticker
from .run.results import Finished, Results
from .run.within import within
from .video import StreamVideo, TensorVideo

#: Called with the plan of each attempt before it begins.
OnPlan = Callable[[Plan], None]


def decode(
    core: Core, z: clip.Latents, request: Request, tick: Ticker, results: Results, wanted: range,
    on_plan: OnPlan | None = None, policy: Policy | None = None,
) -> Iterator[Finished]:  # fmt: skip
    """Host-scaled latents [B, C, T, h, w], checked -> the wanted frames of every clip, where `results` has them; yields
    what it hands on. policy: that of the whole clip, if it has been settled."""
    batch, _, count, h, w = z.shape
    report = core._begin("decode", (batch, len(wanted), core.spatial * h, core.spatial * w))
    guard = Guard(tick, core.device, report.events, core.on_pressure)
    first, last = core.model.decoder.program.window(wanted.start, wanted.stop, count)

    def plan(vae: Core, below: int) -> Plan:
        if not below:
            vae._settle("decoder", decoder_samples(vae, z), policy)
        return vae._plan("decoder", (batch, last - first, h, w), request, below, guard.tick.check)

    def attempt(vae: Core, plan: Plan) -> Iterator[int]:
        return clip.decode(vae._half("decoder", plan), z, plan, results, guard, wanted)

    with closing(_survive(core, report, guard, plan, attempt, on_plan)) as steps:
        for _ in steps:
            yield from results.ready()
    yield from results.ready()
    report.complete = True


def encode(
    core: Core, video: TensorVideo | StreamVideo, request: Request, tick: Ticker, results: Results, wanted: range,
    on_plan: OnPlan | None = None, policy: Policy | None = None,
) -> Iterator[Finished]:  # fmt: skip
    """Frames -> the wanted moments [n, h, w, 2C] of every clip, where `results` has them; yields what it hands on.
    policy: as for `decode`."""
    report = core._begin("encode", (video.batch, video.count or 0, video.height, video.width))
    size = video.height // core.spatial, video.width // core.spatial
    rest = video.height % core.spatial, video.width % core.spatial
    guard = Guard(tick, core.device, report.events, core.on_pressure)
    program = core.model.encoder.program

    def window(first: int) -> tuple[int, int]:
        latents = clip.UNKNOWN if video.count is None else (video.count - 1) // core.temporal + 1
        return program.window(first, min(wanted.stop, latents), latents)

    def plan(vae: Core, below: int) -> Plan:
        if not below:
            vae._settle("encoder", encoder_samples(vae, video), policy)
        first, last = window(wanted.start)
        return vae._plan("encoder", (video.batch, last - first, *size), request, below, guard.tick.check, rest)

    def attempt(vae: Core, plan: Plan) -> Iterator[int]:
        return clip.encode(vae._half("encoder", plan), video, plan, results, guard, wanted)

    with closing(_survive(core, report, guard, plan, attempt, on_plan)) as steps:
        for latents in steps:
            yield from results.ready()
            video.drop(core.temporal * window(guard.finished[0])[0])
            video.fill(core.temporal * (latents - 1) + 1)
    yield from results.ready()
    report.clip = video.batch, video.count, video.height, video.width
    report.complete = True


def decoder_samples(vae: Core, z: clip.Latents) -> Callable[[], list[Tensor]]:
    """What a policy is settled by."""
    return lambda: [p.to(vae.device).float() / vae.scale for p in latent_samples(z)]


def encoder_samples(vae: Core, video: TensorVideo | StreamVideo) -> Callable[[], list[Tensor]]:
    """What a policy is settled by."""
    return lambda: [to_unit(p.to(vae.device)) for p in video_samples(video.sample())]


def _survive(
    core: Core, report: Report, guard: Guard, plan: Callable[[Core, int], Plan],
    attempt: Callable[[Core, Plan], Iterator[int]], on_plan: OnPlan | None,
) -> Iterator[int]:
    """attempt(vae, plan) until it comes through: under leaner plans where memory runs out, and in a safer precision
    where values overflow. plan(vae, below) as in `plan_decode`; on_plan(plan) before each attempt."""
    with core._claimed() as vae, report.measured(core.device):
        while True:
            try:
                with report.stage("plan"):
                    first = _planned(functools.partial(plan, vae, 0), guard)
                describe(vae, report, first)
                if first.note:
                    log.once(f"{report.operation}: {first.note}")
                _, frames, height, width = report.clip
                log.debug(f"{report.operation} {width}x{height}, {frames} frames: {first.describe()}")
                leaner = functools.partial(_leaner, vae, plan)
                tries = guard.survive(functools.partial(_attempt, vae, report, attempt, on_plan), first, leaner)
                last = yield from within(vae._scope, tries)
            except NonFinite as error:
                where = error.where
            except Exception as error:
                if not vae._without_kernels(error):
                    raise
                report.precision = vae.precision
                continue
            else:
                describe(vae, report, last)
                _describe_graphs(vae, report, last)
                return
            guard.handover = None  # a clip's histories in another type, or 8 bit and of other scales
            vae = vae._safer(where)
            report.precision += f", then {vae.precision}"
            guard.events["nan_reruns"] += 1


def _attempt(
    vae: Core, report: Report, attempt: Callable[[Core, Plan], Iterator[int]], on_plan: OnPlan | None, plan: Plan
) -> Iterator[int]:
    if on_plan is not None:
        on_plan(plan)
    if plan.fused:
        _pack(vae, report, f"{report.operation}r")
    if plan.tiled or not plan.fused:
        KEPT.release()  # other runs take it up, or free it themselves
    # Its time is that of the steps: between them someone else is at work.
    yield from within(lambda: report.stage(report.operation), attempt(vae, plan))


def _planned(plan: Callable[[], Plan], guard: Guard) -> Plan:
    """plan(), which may measure on the device; once more if that finds no memory, after others have given some back."""
    try:
        return plan()
    except Exception as error:
        if not out_of_memory(error):
            raise
    guard.relieve_operator()
    return plan()


def _leaner(vae: Core, plan: Callable[[Core, int], Plan], failed: Plan) -> Plan | None:
    """A plan with less of a peak, by a tenth if there is one: parking goes in steps of megabytes. Blended tiles only
    where nothing else is left."""
    other = None
    for share in (0.9, 1.0):
        try:
            found = plan(vae, int(share * failed.peak_bytes))
        except PlanError:
            continue
        if found.tiled == failed.tiled:
            return found
        other = other or found
    return other


# -- what the report says ----------------------------------------------------------------------------------------------


def describe(vae: Core, report: Report, plan: Plan) -> None:
    """What the report says of a run before it starts; sets the plain modules' layout."""
    layout = "NDHWC" if plan.fused else vae._plain.set_layout(vae._options)
    if layout == "NDHWC":
        log.once("Channels_Last_3D Memory Format Applied.", log.info)
    if plan.fused and vae.device.type == "cuda":
        log.once("Triton kernel fusion enabled for GroupNorm + SiLU.", log.info)
    report.mode = f"fused kernels ({layout})" if plan.fused else f"plain torch ({layout})"
    report.plan = plan.describe()
    report.predicted_gb, report.parked_gb = plan.peak_bytes / GIB, plan.host_bytes / GIB
    report.off = list(vae.unused(plan.fused).items())
    if plan.fused:
        _describe_operands(vae, report)


def _describe_operands(vae: Core, report: Report) -> None:
    half = "decoder" if report.operation == "decode" else "encoder"
    report.operands = vae._mixed.describe(half)
    vae._mixed.note(report, half)
    if vae.device.type == "cpu" and vae._mixed.mode.kind:
        report.mode = "fused network on the reference operators (NDHWC)"
    elif "fp8" in vae._mixed.policy(half).kinds.values():
        log.once(f"sm_{target(vae.device).sm} FP8 Path Activated.", log.info)


def _describe_graphs(vae: Core, report: Report, plan: Plan) -> None:
    """What the report says of CUDA graphs after a run."""
    runs = vae._fused.runs
    if not plan.fused or "cuda_graphs" in dict(report.off):
        return
    if runs.no_graphs:
        report.off.append(("cuda_graphs", runs.no_graphs))
        return
    report.mode += ", {} of {} chunks replayed from CUDA graphs".format(*runs.replayed)
    log.once("CUDA Graph Captured (Decoding Latency Optimized).", log.info)


def _pack(vae: Core, report: Report, half: str) -> None:
    """Pack the weights of "decoder" or "encoder" for the fused kernels, if they are not, under their own time."""
    if not vae._fused.packed_bytes(half):
        with report.stage("weights"):
            getattr(vae._fused, half)()
            if vae.device.type == "cuda":
                synchronize(vae.device)
