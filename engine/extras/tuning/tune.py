"""One tuning: measure the layers of a VAE on a GPU of this machine, and store the result."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import torch

from ...errors import Cancelled, InputError
from ...kernels.cards import AUTO
from ...kernels.conv3d.tuned import Kind
from ...kernels.probe import proven
from ...kernels.targets import Target
from ...planning.fused_walk import FusedWalk
from ...runtime.kept import KEPT
from ...system.devices import empty_device_cache
from . import kept
from .candidates import candidates, table
from .kept import Tuning
from .layers import Layer, layers
from .processes import Gpu, Pool
from .ready import Ready
from .search import Outcome, search

#: Seconds that a tuning may take, and the part of them reserved for its end.
BUDGET, MARGIN = 120.0, 3.0
Progress = Callable[[int, int], None]


def why_not(device: torch.device, kernels: str = AUTO) -> str | None:
    """Return why nothing can be tuned on a device, in one line, or None where it can. kernels: those asked for."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "tuning needs a CUDA GPU: a CPU runs torch's own operators"
    here = proven(device, kernels)
    return None if here.kernels else here.notes[0] if here.notes else "the fused kernels are off here"


def tune(
    walk: FusedWalk, device: torch.device, *, budget: float = BUDGET, again: bool = False,
    progress: Progress = lambda *_: None, cancel: Callable[[], bool] = lambda: False, began: float | None = None,
) -> tuple[Tuning, Outcome]:  # fmt: skip
    """Measure the layers of a VAE, store the best schedules, and use them in this process once no run is in progress.

    Schedules known for layers of other VAEs stay.

    Args:
        walk: dry run of the VAE.
        device: the GPU.
        budget: seconds, from `began` on.
        again: also measure layers that have been measured before.
        progress: called as progress(done, total), in layers.
        cancel: returns True to cancel.
        began: start in time.monotonic(); None for now.

    Raises: InputError where there is nothing to tune, and Cancelled when cancel() is true; neither leaves anything
    behind.
    """
    began = time.monotonic() if began is None else began
    kernels = walk.options.kernels
    if why := why_not(device, kernels):
        raise InputError(why)
    if not walk.halves:
        raise InputError(f"{walk.architecture.name} runs plain torch; only the fused kernels have schedules")

    def check() -> None:
        if cancel():
            raise Cancelled("tuning was cancelled; the schedules are as before")

    check()
    here = proven(device, kernels)
    before = kept.of(device, here) or Tuning(kept.machine(device, here))
    wanted = [layer for layer in layers(walk, here) if again or layer.kind not in before.schedules]
    jobs = [(layer, candidates(here, layer.kind)) for layer in wanted]
    KEPT.release(device)
    empty_device_cache()
    with ExitStack() as stack:
        gpu, pool = Gpu(device, here.way), Pool(here.sm) if here.set is None else Ready(here)
        stack.callback(gpu.end)
        stack.callback(pool.end)
        pool.start(jobs)
        until = began + budget - MARGIN
        link = before.link if before.link and not again else gpu.link(until, check) or before.link
        found = search(jobs, pool, gpu, time.monotonic, max(0.0, until - time.monotonic()), check, progress)
        check()
    tuning = _merged(before, found, wanted, here, link, again)
    kept.write(tuning)
    kept.take_up(device, tuning, here.way)
    return tuning, found


def _merged(
    before: Tuning, found: Outcome, wanted: list[Layer], here: Target, link: float | None, again: bool
) -> Tuning:
    """Return the known tuning with the new results; `again`: a new work rate replaces the old one."""
    asked = {str(layer.kind) for layer in wanted}
    dropped = [entry for entry in before.dropped if entry[0] not in asked]
    dropped += [(str(kind), _tile(schedule), why) for kind, schedule, why in found.dropped]
    left = [name for name in before.left if name not in asked] + [str(kind) for kind in (*found.left, *found.broken)]
    rates = [found.rates[layer.kind] for layer in wanted if layer.kind in found.rates and _counts(layer.kind, here)]
    work = sum(rates[:3]) / len(rates[:3]) if rates and (again or not before.work) else before.work
    return replace(
        before, schedules={**before.schedules, **found.chosen}, times={**before.times, **found.times},
        dropped=dropped, left=left, link=link, work=work,
    )  # fmt: skip


def _counts(kind: Kind, here: Target) -> bool:
    """Check whether a layer's rate is one of 16-bit products, which plans count in."""
    return kind.dtype.itemsize == 2 and not kind.small and kind.accumulate == here.accumulate(kind.dtype, False)


def _tile(s: object) -> str:
    names = ("positions", "columns", "depth", "warps", "stages", "slices", "group", "tail", "rest")
    return " ".join(f"{name} {getattr(s, name)}" for name in names if getattr(s, name))


def lines(tuning: Tuning, found: Outcome, here: Target) -> list[str]:
    """Return the results of a tuning as text for people."""
    out = []
    for kind, (spent, was) in found.times.items():
        same = found.chosen[kind] == table(here, kind)
        what = "the table's" if same else _tile(found.chosen[kind])
        beside = f", the table's {was:.3g} ms" if was is not None and not same else ""
        out.append(f"{kind}: {spent:.3g} ms{beside}: {what}")
    out += [f"dropped for {kind}: {_tile(schedule)}: {why}" for kind, schedule, why in found.dropped]
    out += [f"kept from the table, no time was left: {kind}" for kind in found.left]
    out += [f"no schedule is right here for {kind}: run with --off triton_fusion, and open an issue"
            for kind in found.broken]  # fmt: skip
    if tuning.link:
        out.append(f"host memory: {tuning.link / 1e9:.1f} GB/s each way at once")
    return out
