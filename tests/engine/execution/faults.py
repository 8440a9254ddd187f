"""Injected trouble, and what tests look at afterwards."""

from __future__ import annotations

import gc

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from zerowaste_vae import PlanError
from zerowaste_vae.engine.execution.guard import Guard
from zerowaste_vae.engine.execution.staging import StagedWriter
from zerowaste_vae.engine.request import Request
from zerowaste_vae.engine.runtime.context import ExecutionContext
from zerowaste_vae.engine.runtime.pinned import POOL

#: Batch, channels, latents, height and width of most tests' latent.
SIZE = (1, 16, 3, 2, 2)


class Allocations(TorchDispatchMode):
    """Counts the operators that make a tensor (not on the meta device); those named in `failing` find no memory."""

    def __init__(self, failing=()):
        super().__init__()
        self.failing = frozenset(failing)
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        fresh = isinstance(out, torch.Tensor) and all(r.alias_info is None for r in func._schema.returns)
        if fresh and out.device.type != "meta":
            self.count += 1
            if self.count in self.failing:
                raise torch.OutOfMemoryError(f"injected: allocation {self.count}")
        return out


def inject(monkeypatch, failing=()) -> Allocations:
    """Watch over every attempt of a guard, and make the allocations of these numbers fail."""
    mode, survive = Allocations(failing), Guard.survive

    def watched(self, attempt, plan, leaner):
        def under(plan):
            with mode:
                yield from attempt(plan)

        return survive(self, under, plan, leaner)

    monkeypatch.setattr(Guard, "survive", watched)
    return mode


def fail_calls(monkeypatch, where, name, failing, before=True):
    """The calls of `where.name` with these numbers (from 1) raise out of memory; returns the list of calls so far."""
    original, calls = getattr(where, name), []

    def call(*args, **options):
        calls.append(name)
        if len(calls) in failing:
            raise torch.OutOfMemoryError(f"injected: {name} {len(calls)}")
        return original(*args, **options)

    monkeypatch.setattr(where, name, call)
    return calls


def forget_others() -> None:
    """Free what tests of other things in this process have left behind."""
    gc.collect()
    for run in (o for o in gc.get_objects() if type(o) is ExecutionContext):
        run.free()
    POOL.release()
    POOL.nbytes = 0


def leftovers() -> list[object]:
    """Return what a run failed to give back: runs that still hold memory, blocks of the pool still in use."""
    runs = [o for o in gc.get_objects() if type(o) is ExecutionContext]
    holding = [r for r in runs if r.arena._block is not None or any(g.data is not None for g in r.rings.values())]
    used = POOL.nbytes - sum(b.numel() for b in POOL._idle)
    return [*holding, *([used] if used else [])]


def events(vae):
    """Return the counts of the last run, without zeros."""
    return {name: count for name, count in vae.last_report.events.items() if count}


def leanest(vae, z, **options):
    """The plan of the least peak with whole frames."""
    options["tiling"] = "untiled"
    plan, request = vae.plan_decode(*z.shape[2:], **options), Request(**options)
    while True:
        try:
            plan = vae._plan("decoder", z.shape[2:], request, below=plan.peak_bytes)
        except PlanError:
            return plan


def record_plans(monkeypatch):
    plans, survive = [], Guard.survive

    def watched(self, attempt, plan, leaner):
        def seen(plan):
            plans.append(plan)
            yield from attempt(plan)

        return survive(self, seen, plan, leaner)

    monkeypatch.setattr(Guard, "survive", watched)
    return plans


def record_writes(monkeypatch):
    """(clip, frame) of everything that is written to the result."""
    written, write = [], StagedWriter.write

    def recorded(self, clip, first, pixels, health):
        count = pixels.shape[0]
        write(self, clip, first, pixels, health)
        written.extend((clip, first + i) for i in range(count))

    monkeypatch.setattr(StagedWriter, "write", recorded)
    return written
