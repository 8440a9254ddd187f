"""Recovery of a decode or encode: smaller steps when memory runs out, a safer precision when values are not finite.

Finished results stay finished."""

from __future__ import annotations

import functools
import gc
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Hashable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

from .. import log
from ..errors import PlanError
from ..network.steps import Steps
from ..planning.plan import Plan
from ..runtime.handover import Handover
from ..runtime.kept import KEPT
from ..runtime.pinned import POOL
from ..runtime.pressure import Pressure, out_of_memory
from ..system.devices import empty_device_cache
from ..system.memory import in_gb
from .progress import Ticker

T = TypeVar("T")
R = TypeVar("R")
#: Type of the next wider range for values that overflow, and its name as a precision. fp32 has none.
SAFER = {torch.float16: (torch.bfloat16, "bf16"), torch.bfloat16: (torch.float32, "fp32")}


class NonFinite(Exception):
    """Frames (or latents) [first, first + count) of a part hold NaN or Inf; `where` names them as text."""

    def __init__(self, part: Hashable, first: int, count: int) -> None:
        clip, *tile = part if isinstance(part, tuple) else (part,)
        tiles = f" in tile {tuple(tile)}" if tile else ""
        self.where = f"clip {clip}, {first} to {first + count - 1}{tiles},"
        super().__init__(self.where)


class Guard:
    """One decode or encode through all its attempts.

    A result has parts (its clips, or tiles of them), and each is finished from its first frame (or latent) on. Attempts
    begin a part at its start, or where `handover` stands, and deliver only the frames that `skip` leaves: values never
    depend on chunks, so a replay makes the finished frames equal."""

    def __init__(
        self, tick: Ticker, device: torch.device, events: Counter[str], on_pressure: Callable[[], None] | None = None
    ) -> None:
        """Prepare for the first attempt.

        Args:
            tick: progress and cancellation.
            device: device of the run.
            events: counts "oom_retries" (operators), "oom_step_downs" (leaner plans), "replayed_chunks" and
                "nan_reruns".
            on_pressure: called to free memory that is not the engine's.
        """
        self.tick = tick
        self.device = device
        self.events = events
        #: Of each part, the result after the last one that is finished.
        self.finished: defaultdict[Hashable, int] = defaultdict(int)
        #: The first result that this layout has to make.
        self.first = 0
        #: The result for which the current part began, and the steps whose chunks it keeps to (None: its own).
        self.origin = 0
        self.chunks: Steps | None = None
        #: Raises an error unless the run's results are those of the present weights; called before any is delivered.
        self.confirm: Callable[[], None] = lambda: None
        #: No other device makes parts of the same results. Otherwise parts keep to their own chunks, by which the
        #: shares of devices are weighed.
        self.alone = True
        #: The part that passes the network now.
        self.part: Hashable = None
        #: A part that a failed attempt left between two chunks, and where it stood.
        self.handover: tuple[Hashable, Handover] | None = None
        self._on_pressure = on_pressure
        self._layout: Hashable = None
        self._counted: Hashable = None
        self._step_down: Callable[[], Plan | None] = lambda: None  # outside of `survive`

    def begin(self, layout: Hashable, given: int) -> bool:
        """Start an attempt, and return whether it starts from nothing because it is the first one of this layout.

        Args:
            layout: the tiles; tiles of another size give another result.
            given: results before this one are finished in any case.
        """
        fresh = layout != self._layout
        if fresh:
            self.first = given
            self.finished = defaultdict(lambda: given)
            self.handover = None
        self._layout = layout
        return fresh

    def count(self, latents: int | None, chunk: int, passes: int) -> None:
        """Set up the ticker, which goes on counting if only the chunk has changed. Args: those of `Ticker.begin`."""
        if (self._layout, passes) != self._counted:
            self.tick.begin(latents, chunk, passes)
            self._counted = self._layout, passes

    # -- what is finished ------------------------------------------------------------------------------------------

    def skip(self, part: Hashable, first: int, count: int) -> int:
        """Return how many of the frames [first, first + count) are finished already."""
        return min(max(self.finished[part] - first, 0), count)

    def inspect(self, part: Hashable, first: int, count: int, health: float) -> None:
        """Raise NonFinite if `health`, a sum over the frames [first, first + count), is not finite."""
        if not math.isfinite(health):
            raise NonFinite(part, first, count)

    def finish(self, part: Hashable, first: int, count: int, health: float = 0.0) -> None:
        """Inspect frames [first, first + count), which have reached their destination, and count them as finished."""
        self.inspect(part, first, count, health)
        self.finished[part] = max(self.finished[part], first + count)

    def reach(self, index: int, latents: int, left: int) -> None:
        """Note that a chunk has passed the network. Args: those of `Ticker.reach`."""
        if not self.tick.reach(index, latents, left):
            self.events["replayed_chunks"] += 1

    def taken_over(self, part: Hashable) -> Handover | None:
        """Return where an earlier attempt left `part`, which begins now; None for its start.

        The guard keeps no copy: the caller uses it up."""
        left, self.handover = self.handover, None
        self.part = part
        return left[1] if left is not None and left[0] == part else None

    def keep(self, hand_over: Callable[[], Handover | None]) -> None:
        """Keep the result of `hand_over` for the current part, unless the host has no room for it.

        The part is replayed then."""
        try:
            handover = hand_over()
        except Exception as error:
            if not out_of_memory(error):
                raise
            return
        if handover is not None:
            self.handover = self.part, handover

    # -- out of memory ---------------------------------------------------------------------------------------------

    def survive(
        self, attempt: Callable[[Plan], Iterator[T]], plan: Plan, leaner: Callable[[Plan], Plan | None]
    ) -> Generator[T, None, Plan]:
        """Run attempt(plan), and repeat it under ever leaner plans as long as memory runs out.

        The leanest plan is tried twice, because other programs may have freed memory meanwhile.

        Args:
            attempt: runs a plan and yields its results.
            plan: the first plan.
            leaner: returns a plan with a lower peak than the given one, or None.

        Returns: the plan that came through.
        Raises: PlanError when the leanest plan fails too; other errors pass.
        """
        again = True
        while True:
            # Computed only after a failure: it is a search among dry runs.
            self._step_down = functools.cache(functools.partial(leaner, plan))
            try:
                yield from attempt(plan)
                return plan
            except Exception as error:
                if not out_of_memory(error):
                    raise
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            # Only now is the traceback gone, and with it the memory that the failed attempt still held.
            gc.collect()
            self.relieve()
            smaller = self._step_down()
            if smaller is None and not again:
                raise PlanError(
                    f"out of memory in the smallest steps ({in_gb(plan.peak_bytes)} planned; {reason}): close "
                    "other programs that use the device, lower the size, or use tiling='blended' with a smaller tile"
                )
            again = smaller is not None
            plan = smaller or plan
            self.events["oom_step_downs"] += 1
            log.warn(f"out of memory; what is finished is kept, going on: {plan.describe()}")

    def relieve(self) -> None:
        """Free memory that only makes runs faster, and have `on_pressure` free more."""
        POOL.release()
        KEPT.release(self.device)
        if self._on_pressure is not None:
            self._on_pressure()
        if self.device.type == "cuda":
            empty_device_cache()

    def relieve_operator(self) -> None:
        """Free memory as `relieve`, before an operator is tried again."""
        self.events["oom_retries"] += 1
        self.relieve()

    def settle(self, recover: Callable[[], bool]) -> None:
        """Decide between two chunks, after an operator was tried twice, whether to go on.

        It goes on if `recover` finds the memory it had kept in reserve, or if there is no leaner plan.

        Raises: Pressure, otherwise.
        """
        if not recover() and self._step_down() is not None:
            raise Pressure("an operator found memory only at the second attempt")


def scoped(
    context: Callable[[], AbstractContextManager[object]], steps: Generator[T, None, R]
) -> Generator[T, None, R]:
    """Run each step of `steps`, and its end, inside a `context()` of its own, which is left between them: it does not
    affect the code that takes what is yielded."""
    over = False
    try:
        while True:
            with context():
                over = True  # with an error, too
                try:
                    item = next(steps)
                except StopIteration as end:
                    return end.value
                over = False
            yield item
    finally:
        if not over:
            with context():
                steps.close()
