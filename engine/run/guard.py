"""What a decode or encode does about trouble: out of memory it goes on in smaller steps, and what is not finite is made
again in a safer precision. What is finished stays finished."""

from __future__ import annotations

import functools
import gc
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Hashable, Iterator
from typing import TypeVar

import torch

from .. import log
from ..errors import PlanError
from ..memory import in_gb
from .devices import empty_device_cache
from .handover import Handover
from .kept import KEPT
from .pinned import POOL
from .plan import Plan, Steps
from .pressure import Pressure, out_of_memory
from .progress import Ticker

T = TypeVar("T")
#: Where values overflow: the type of the next wider range, and its name as a precision. fp32 is the end of it.
SAFER = {torch.float16: (torch.bfloat16, "bf16"), torch.bfloat16: (torch.float32, "fp32")}


class NonFinite(Exception):
    """Frames (or latents) [first, first + count) of a part hold NaN or Inf; `where` says so in words."""

    def __init__(self, part: Hashable, first: int, count: int) -> None:
        clip, *tile = part if isinstance(part, tuple) else (part,)
        tiles = f" in tile {tuple(tile)}" if tile else ""
        self.where = f"clip {clip}, {first} to {first + count - 1}{tiles},"
        super().__init__(self.where)


class Guard:
    """One decode or encode through all its attempts.

    A result has parts (its clips, or tiles of them), and each is finished from its first frame (or latent) on. Attempts
    begin a part at its start, or where `handover` says, and deliver only what `skip` leaves: values never depend on
    chunks, so a replay meets the frames that are there with equal ones.
    """

    def __init__(
        self, tick: Ticker, device: torch.device, events: Counter[str], on_pressure: Callable[[], None] | None = None
    ) -> None:
        """events counts "oom_retries" (operators), "oom_step_downs" (leaner plans), "replayed_chunks" and "nan_reruns".
        on_pressure: asked to free memory that is not the engine's."""
        self.tick = tick
        self.device = device
        self.events = events
        #: Of each part, the result behind the last one that is finished.
        self.finished: defaultdict[Hashable, int] = defaultdict(int)
        #: The first result that this layout is asked for.
        self.first = 0
        #: The result that the part under way began for, and the steps with whose chunks it did (None: with its own).
        self.origin = 0
        self.chunks: Steps | None = None
        #: Whether no other device makes parts of the same results: theirs are weighed by what they take by themselves.
        self.alone = True
        #: The part that goes through the network.
        self.part: Hashable = None
        #: A part that a failed attempt left between two chunks, and where it stood.
        self.handover: tuple[Hashable, Handover] | None = None
        self._on_pressure = on_pressure
        self._layout: Hashable = None
        self._counted: Hashable = None
        self._step_down: Callable[[], Plan | None] = _no_plan

    def begin(self, layout: Hashable, given: int) -> bool:
        """Every attempt's start: whether it has to start from nothing, being the first one of this layout (tiles of
        another size give another result). given: results in front of this one are finished in any case."""
        fresh = layout != self._layout
        if fresh:
            self.first = given
            self.finished = defaultdict(lambda: given)
            self.handover = None
        self._layout = layout
        return fresh

    def count(self, latents: int | None, chunk: int, passes: int) -> None:
        """As for the ticker, which goes on where nothing but the chunk is new."""
        if (self._layout, passes) != self._counted:
            self.tick.begin(latents, chunk, passes)
            self._counted = self._layout, passes

    # -- what is finished ------------------------------------------------------------------------------------------

    def skip(self, part: Hashable, first: int, count: int) -> int:
        """How many of the frames [first, first + count) are finished already."""
        return min(max(self.finished[part] - first, 0), count)

    def inspect(self, part: Hashable, first: int, count: int, health: float) -> None:
        """Raises NonFinite if `health`, a sum over the frames [first, first + count), is not finite."""
        if not math.isfinite(health):
            raise NonFinite(part, first, count)

    def finish(self, part: Hashable, first: int, count: int, health: float = 0.0) -> None:
        """Frames [first, first + count) are where they belong; inspects them."""
        self.inspect(part, first, count, health)
        self.finished[part] = max(self.finished[part], first + count)

    def reach(self, index: int, latents: int, left: int) -> None:
        """A chunk has been through the network, as the ticker counts."""
        if not self.tick.reach(index, latents, left):
            self.events["replayed_chunks"] += 1

    def taken_over(self, part: Hashable) -> Handover | None:
        """Where an attempt before left `part`, which now begins; None at its start. Given away: the caller uses it
        up."""
        left, self.handover = self.handover, None
        self.part = part
        return left[1] if left is not None and left[0] == part else None

    def keep(self, hand_over: Callable[[], Handover | None]) -> None:
        """Keep what `hand_over` gives of the current part, unless the host has no room for it: then it is replayed."""
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
        """attempt(plan), again under ever leaner plans as long as memory runs out; returns the one that came through.

        leaner(plan) is one with a lower peak, or None. The leanest is tried twice: others may have given memory back.
        Raises PlanError when that fails too; other errors pass.
        """
        again = True
        while True:
            # Asked for only in trouble: it is a search among dry runs.
            self._step_down = functools.cache(functools.partial(leaner, plan))
            try:
                yield from attempt(plan)
                return plan
            except Exception as error:
                if not out_of_memory(error):
                    raise
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            # Only now is the traceback gone, and with it what the failed attempt still held.
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
        """Give back what only makes things faster, and ask others to."""
        POOL.release()
        KEPT.release(self.device)
        if self._on_pressure is not None:
            self._on_pressure()
        if self.device.type == "cuda":
            empty_device_cache()

    def relieve_operator(self) -> None:
        """As `relieve`, for an operator that is about to be tried again."""
        self.events["oom_retries"] += 1
        self.relieve()

    def settle(self, recover: Callable[[], bool]) -> None:
        """Between two chunks, after operators had to be tried again: go on if `recover` finds the memory it had kept in
        reserve, or if there is nothing leaner. Raises Pressure."""
        if not recover() and self._step_down() is not None:
            raise Pressure("an operator found memory only at the second attempt")


def _no_plan() -> None:
    """Outside of `survive` there is nothing to step down to."""
