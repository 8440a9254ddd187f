"""How a decode or encode is carried through: its report, its weights, and what follows when memory runs out or values
overflow."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from . import log
from .errors import CheckpointError, NonFiniteError, PlanError
from .hardware import GIB
from .kernels.probe import from_triton, give_up
from .kernels.targets import target
from .planning.planner import Plan
from .report import Report
from .run.caches import synchronize
from .run.guard import SAFER, Guard, NonFinite, out_of_memory
from .run.kept import KEPT
from .run.scope import scoped_math

if TYPE_CHECKING:
    from .vae import VideoVAE


class Attempts:
    """The part of a VideoVAE between a checked request and its result."""

    def _separate(self) -> None:
        """Make what calls write to this object's own."""
        #: Held by the call that uses the packed weights, plans and graphs.
        self._busy = threading.Lock()
        self._own = threading.local()
        self._latest: Report | None = None

    @property
    def last_report(self) -> Report | None:
        """What this thread's latest decode or encode did, or where it has had none, any thread's. Filled from the start
        of a run on; None before the first."""
        return getattr(self._own, "report", self._latest)

    @contextmanager
    def _claimed(self) -> Iterator[VideoVAE]:
        """This VAE for one call. Where another call has it, in whatever thread, one with the same weights that packs
        and plans for itself: calls share nothing that they write to, and none waits for another."""
        if self._busy.acquire(blocking=False):
            try:
                yield self
            finally:
                self._busy.release()
        else:
            other = copy.copy(self)
            other._use(self._options)
            yield other

    def _scope(self) -> AbstractContextManager[None]:
        """torch's settings as the options want them, for the time of a run."""
        o = self._options
        return scoped_math(
            self.device, tf32=o.tf32, cudnn_benchmark=o.cudnn_benchmark, flash_attention=o.flash_attention
        )

    def _begin(self, operation: str, clip: tuple[int, int, int, int]) -> Report:
        """The report of a run that starts; clip: batch, frames, height and width in pixels."""
        name = f" ({torch.cuda.get_device_name(self.device)})" if self.device.type == "cuda" else ""
        report = Report(operation, clip, self.arch, self.precision, f"{self.device}{name}")
        self._own.report = self._latest = report
        return report

    def _describe(self, report: Report, plan: Plan) -> None:
        """What the report says of a run before it starts; sets the plain modules' layout."""
        layout = "NDHWC" if plan.fused else self._plain.set_layout(self._options)
        if layout == "NDHWC":
            log.once("Channels_Last_3D Memory Format Applied.", log.info)
        if plan.fused and self.device.type == "cuda":
            log.once("Triton kernel fusion enabled for GroupNorm + SiLU.", log.info)
        report.mode = f"fused kernels ({layout})" if plan.fused else f"plain torch ({layout})"
        report.plan = plan.describe()
        report.predicted_gb, report.parked_gb = plan.peak_bytes / GIB, plan.host_bytes / GIB
        report.off = list(self.unused(plan.fused).items())
        if plan.fused:
            self._describe_operands(report)

    def _describe_operands(self, report: Report) -> None:
        half = "decoder" if report.operation == "decode" else "encoder"
        report.operands = self._mixed.describe(half)
        self._mixed.note(report, half)
        if self.device.type == "cpu" and self._mixed.mode.kind:
            report.mode = "fused network on the reference operators (NDHWC)"
        elif "fp8" in self._mixed.policy(half).kinds.values():
            log.once(f"sm_{target(self.device).sm} FP8 Path Activated.", log.info)

    def _describe_graphs(self, report: Report, plan: Plan) -> None:
        """What the report says of CUDA graphs after a run."""
        runs = self._fused.runs
        if not plan.fused or "cuda_graphs" in dict(report.off):
            return
        if runs.no_graphs:
            report.off.append(("cuda_graphs", runs.no_graphs))
            return
        report.mode += ", {} of {} chunks replayed from CUDA graphs".format(*runs.replayed)
        log.once("CUDA Graph Captured (Decoding Latency Optimized).", log.info)

    def _pack(self, report: Report, half: str) -> None:
        """Pack the weights of "decoder" or "encoder" for the fused kernels, if they are not, under their own time."""
        if not self._fused.packed_bytes(half):
            with report.stage("weights"):
                getattr(self._fused, half)()
                if self.device.type == "cuda":
                    synchronize(self.device)

    def _survive(
        self, report: Report, guard: Guard, plan: Callable[[VideoVAE, int], Plan],
        attempt: Callable[[VideoVAE, Plan], None],
    ) -> None:
        """attempt(vae, plan) until it comes through: under leaner plans where memory runs out, and in a safer precision
        where values overflow. plan(vae, below) as in `plan_decode`."""
        with self._claimed() as vae, report.measured(self.device):
            while True:
                try:
                    with report.stage("plan"):
                        first = _planned(functools.partial(plan, vae, 0), guard)
                    vae._describe(report, first)
                    if first.note:
                        log.once(f"{report.operation}: {first.note}")
                    _, frames, height, width = report.clip
                    log.debug(f"{report.operation} {width}x{height}, {frames} frames: {first.describe()}")
                    leaner = functools.partial(_leaner, vae, plan)
                    with vae._scope():
                        last = guard.survive(functools.partial(vae._attempt, report, attempt), first, leaner)
                except NonFinite as error:
                    where = error.where
                except Exception as error:
                    if not vae._without_kernels(error):
                        raise
                    report.precision = vae.precision
                    continue
                else:
                    vae._describe(report, last)
                    vae._describe_graphs(report, last)
                    return
                guard.handover = None  # a clip's histories in another type, or 8 bit and of other scales
                vae = vae._safer(where)
                report.precision += f", then {vae.precision}"
                guard.events["nan_reruns"] += 1

    def _attempt(self, report: Report, attempt: Callable[[VideoVAE, Plan], None], plan: Plan) -> None:
        if plan.fused:
            self._pack(report, f"{report.operation}r")
        if plan.tiled or not plan.fused:
            KEPT.release()  # other runs take it up, or free it themselves
        with report.stage(report.operation):
            attempt(self, plan)

    def _without_kernels(self, error: Exception) -> bool:
        """Whether `error` is one of Triton's that plain torch can do without. The kernels are then off on this device,
        for this call and all later ones."""
        if self.fused() is None or not from_triton(error) or out_of_memory(error):
            return False
        give_up(self.device, error)
        if self.fused() is not None:
            return False
        self.release()
        self._use(self._options)
        return True

    def _safer(self, where: str) -> VideoVAE:
        """This VAE without approximations or, if it has none, in the type of the next wider range, for a run in which
        `where` was not finite. Raises NonFiniteError where there is none."""
        exact = self._mixed.mode.plain
        if exact and self.dtype not in SAFER:
            raise NonFiniteError(f"{where} came out as NaN or Inf in {self.precision}: weights or latent are damaged")
        dtype, name = SAFER[self.dtype] if exact else (self.dtype, self._float)
        log.warn(f"{where} came out as NaN or Inf in {self.precision}; going on from there in {name}")
        self.release()
        other = copy.copy(self)
        other._asked, other._float, other.dtype = name, name, dtype
        if exact:
            other.model = self._in_type(dtype)
        other._use(self._options.switched(off=["fp8"]))
        return other


    def _in_type(self, dtype: torch.dtype) -> nn.Module:
        """The model in a wider type, with the weights as the file has them: not rounded to a narrower one, nor to one
        that lay between."""
        model = copy.deepcopy(self._loaded).to(dtype)
        if self.source is not None:
            try:
                model.load_state_dict(self.source.weights(self._loaded, dtype))
            except CheckpointError as error:
                kept = next(self._loaded.parameters()).dtype
                log.warn(f"{error}; the rerun has its weights as they were rounded to {kept}")
        return model


def _planned(plan: Callable[[], Plan], guard: Guard) -> Plan:
    """plan(), which may measure on the device; once more if that finds no memory, after others have given some back."""
    try:
        return plan()
    except Exception as error:
        if not out_of_memory(error):
            raise
    guard.relieve_operator()
    return plan()


def _leaner(vae: VideoVAE, plan: Callable[[VideoVAE, int], Plan], failed: Plan) -> Plan | None:
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
