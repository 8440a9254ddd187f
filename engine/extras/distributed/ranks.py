"""One decode or encode in several processes under torchrun, on one machine or more.

Each rank makes parts of the results, equal bit by bit to those of a single process, and rank 0 has them in order."""

from __future__ import annotations

import functools
import os
import queue
import signal
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ... import log
from ...errors import Cancelled, InputError, PlanError, ZeroWasteError
from ...execution.progress import Ticker
from ...execution.results import Finished, Results
from ...report import Report
from .devices import kind_of, of_a_device, relative, same_kind, seconds
from .parts import Part
from .spread import Spread
from .watch import Watch, end

#: Timeout of waiting for other ranks: none in effect, because `Watch` finds ranks that do not come.
UNLIMITED = timedelta(days=365)


class RankLost(ZeroWasteError):
    """Another rank has ended or no longer answers."""


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks of torchrun."""

    rank: int
    count: int
    #: Number of this rank among those on this machine, and how many there are.
    local: int
    neighbours: int = 1
    watch: Watch | None = field(default=None, compare=False)

    @property
    def device(self) -> str | None:
        """Return the device of this rank where none is named, or None where there is no GPU."""
        gpus = torch.cuda.device_count()
        return f"cuda:{self.local % gpus}" if gpus else None

    def broadcast(self, value: Any = None) -> Any:
        """Return rank 0's value on every rank."""
        box = [value]
        with _rank_lost():
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value on every rank."""
        out: list[Any] = [None] * self.count
        with _rank_lost():
            dist.all_gather_object(out, value)
        return out

    def check_same(self, **had: Any) -> None:
        """Raise InputError on every rank where one has another value than rank 0."""
        _same(self.gather(had))

    def agree(self, device: torch.device, mixed: bool, **had: Any) -> None:
        """Raise InputError on every rank where one has another value than rank 0, or a device of another kind.

        Args:
            device: device of this rank.
            mixed: allow devices of different kinds.
            had: values to compare, by the name that an error gives them.
        """
        every = self.gather((kind_of(device), had))
        same_kind([(f"rank {i}", kind) for i, (kind, _) in enumerate(every)], mixed)
        _same([had for _, had in every])


def _same(every: Sequence[Mapping[str, Any]]) -> None:
    first, *others = every
    for rank, there in enumerate(others, 1):
        if other := [name for name in first if there[name] != first[name]]:
            raise InputError(f"rank {rank} has another {other[0]} than rank 0; give all ranks the same")


@contextmanager
def _rank_lost() -> Iterator[None]:
    """Turn errors of the connection into a one-line RankLost."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RankLost(f"another rank has failed or ended ({reason})") from error


def under_torchrun() -> bool:
    """Check whether torchrun has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ and "MASTER_ADDR" in os.environ


@contextmanager
def joined() -> Iterator[Ranks]:
    """Connect the ranks by gloo: results travel through host memory in any case.

    Yields: this process's rank. A lost rank ends the process with one line that names it.
    """
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    before = signal.signal(signal.SIGTERM, functools.partial(_ended, rank))
    with _rank_lost():
        dist.init_process_group("gloo", timeout=UNLIMITED)
        watch = Watch(rank, count)
    watch.start()
    try:
        local, neighbours = os.environ.get("LOCAL_RANK", rank), os.environ.get("LOCAL_WORLD_SIZE", 1)
        ranks = Ranks(rank, count, int(local), int(neighbours), watch=watch)
        ranks.gather(None)  # all have a watch by now: a rank that is lost from here on is named
        log.info(f"rank {rank} of {count}: process {os.getpid()}")
        yield ranks
    except RankLost as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's signal does not name the lost rank
        end(rank, watch.who() or str(error))
    finally:
        signal.signal(signal.SIGTERM, before)
        watch.leave()
        dist.destroy_process_group()


def _ended(rank: int, *_: object) -> None:
    """Handle SIGTERM: torchrun sends it when another rank has failed, and when torchrun itself is ended."""
    why = "stopped by torchrun, as another rank has failed or ended, or it was interrupted"
    if rank:
        end(rank, why)
    raise RankLost(why)  # an exception, so that rank 0 closes the files it writes


@dataclass
class RankSpread(Spread):
    """A Spread whose devices are the ranks; `cores` holds this rank's own VAE once for every rank.

    Rank 0 has the results: one thread for each other rank asks it for parts, and the others answer."""

    ranks: Ranks

    def run(self, report: Report) -> Generator[Finished, None, None]:
        """Yield the finished results, on rank 0 alone."""
        #: Ranks that do not receive messages now: they make a part, or are lost.
        self._deaf: set[int] = set()
        yield from super().run(report)

    def measured(self) -> list[float]:
        own = self.cores[0]
        if len(set(self.ranks.gather(kind_of(own.device)))) == 1:
            return [1.0] * self.ranks.count
        return relative(self.ranks.gather(seconds(own)))

    @property
    def neighbours(self) -> int:
        return self.ranks.neighbours

    @property
    def threads(self) -> int:
        return 1

    def first_parts(self) -> list[Part]:
        return super().first_parts() if self.ranks.rank == 0 else []

    def describe_devices(self) -> str:
        return f"{self.ranks.count} ranks, rank 0 on {self.cores[0].device}"

    # -- rank 0 ----------------------------------------------------------------------------------------------------

    def results(self) -> Generator[Finished, None, None]:
        if self.ranks.rank:
            self._serve()
            return
        if self.ranks.watch is not None:
            self.ranks.watch.on_lost = lambda why: self._messages.put(("fatal", None, RankLost(why)))
        try:
            yield from super().results()
        finally:
            if self.ranks.watch is not None:
                self.ranks.watch.on_lost = None
            for peer in set(range(1, self.ranks.count)) - self._deaf if self._patient else ():
                with suppress(RankLost):
                    self._say(peer, None)

    def made(self, part: Part, results: Results, tick: Ticker) -> Generator[Finished, None, None]:
        peer = part.device
        if peer == 0:
            try:
                yield from super().made(part, results, tick)
            finally:
                self._idle()
            return
        self._deaf.add(peer)
        self._say(peer, (part.clip, part.first, part.end, part.level, self.parts[self._front].first))
        cancelled = None
        while True:
            kind, value = self._hear(peer)
            if kind == "ended":
                part.report, failed = value
                break
            if kind == "results":
                first, shape = value
                there = torch.empty(shape, dtype=self.job.into.dtype, device="cpu")
                with _rank_lost():
                    dist.recv(there, peer)
                room = results.room(0, first, len(there))
                room.copy_(there)
                results.land(0, first, room)
                yield from results.ready()
            elif kind == "progress":
                self._messages.put(("progress", part, value))
            try:
                tick.check()
            except Cancelled as error:
                cancelled = error
            self._say(peer, cancelled is None)
        self._deaf.discard(peer)
        if cancelled is not None:
            raise cancelled
        if failed is not None:
            of_a_device, text = failed
            raise (PlanError if of_a_device else InputError)(f"rank {peer}: {text}")

    @property
    def _patient(self) -> bool:
        return self.ranks.watch is None or self.ranks.watch.lost is None

    def _stops(self, part: Part) -> bool:
        return (part.device == 0 and self._at_work()) or super()._stops(part)

    def _at_work(self) -> bool:
        return self.ranks.watch is not None and self.ranks.watch.at_work(self.cores[0].device)

    def _idle(self) -> None:
        if self.ranks.watch is not None:
            self.ranks.watch.idle()

    # -- the others ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Make the parts that rank 0 asks for, until it asks for none."""
        while (asked := self._hear(0)) is not None:
            clip, first, end, level, front = asked
            self.feed.drop(front)
            self.feed.fill(first, end)
            part, said = Part(clip, first, end, self.ranks.rank, level), queue.SimpleQueue()
            teller = _Teller(self, said)
            teller.start()
            failed = self._answer(part, said, teller)
            self._idle()
            said.put(("ended", (part.report, failed), None))
            teller.join()
            if teller.error is not None:
                raise teller.error

    def _answer(self, part: Part, said: queue.SimpleQueue, teller: _Teller) -> tuple[bool, str] | None:
        """Make a part; return None, or (whether another device may succeed, the reason) where it failed."""

        def progress(done: int, total: int) -> None:
            said.put(("progress", done / max(total, 1), None))

        def stop() -> bool:
            cancel = self.job.callbacks.cancel
            return self._at_work() or teller.stop.is_set() or (cancel is not None and cancel())

        results, tick = self.job.into.handed(part.first), Ticker(progress, stop)
        try:
            with closing(super().made(part, results, tick)) as done:
                for finished in done:
                    said.put(("results", (finished.first, tuple(finished.results.shape)), finished.results))
        except Cancelled:
            return False, "cancelled"
        except Exception as error:
            if teller.error is not None:
                raise teller.error from error
            return of_a_device(error), str(error)
        finally:
            for finished in results.ready():
                said.put(("results", (finished.first, tuple(finished.results.shape)), finished.results))
        return None

    # -- messages --------------------------------------------------------------------------------------------------

    def _say(self, peer: int, value: Any) -> None:
        with _rank_lost():
            dist.send_object_list([value], peer)

    def _hear(self, peer: int) -> Any:
        box = [None]
        with _rank_lost():
            dist.recv_object_list(box, peer)
        return box[0]


class _Teller(threading.Thread):
    """Thread that sends rank 0 the progress and results of a part while the next chunk is computed."""

    def __init__(self, spread: RankSpread, said: queue.SimpleQueue) -> None:
        super().__init__(name="zerowaste tells rank 0", daemon=True)
        self._spread, self._said, self.stop = spread, said, threading.Event()
        self.error: RankLost | None = None

    def run(self) -> None:
        kind = ""
        try:
            while kind != "ended":
                kind, value, results = self._said.get()
                self._spread._say(0, (kind, value))
                if results is not None:
                    with _rank_lost():
                        dist.send(results.contiguous(), 0)
                if kind != "ended" and not self._spread._hear(0):
                    self.stop.set()
        except RankLost as error:
            self.error = error
            self.stop.set()
