"""One decode or encode in several processes under torchrun, on one machine or more: each rank makes a part of the
results, bit by bit what one process makes of all, and rank 0 has them in the end."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import log
from .errors import ZeroWasteError
from .report import Report
from .spread import Spread, kind_of, same_kind

#: Seconds of silence after which a rank takes another one for lost. A rank waits at most as long as another one's part
#: takes longer than its own.
TIMEOUT = 1800.0
#: Bytes of results that go to rank 0 at once.
PIECE_BYTES = 64 << 20


class RankLost(ZeroWasteError):
    """Another rank has ended or answers no more."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of torchrun."""

    rank: int
    count: int
    #: Of the ranks on this machine.
    local: int

    @property
    def device(self) -> str | None:
        """Of this rank's own, where it is not named; None: there is no GPU."""
        gpus = torch.cuda.device_count()
        return f"cuda:{self.local % gpus}" if gpus else None

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's value, on every rank."""
        box = [value]
        with told(self.rank):
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        out: list[Any] = [None] * self.count
        with told(self.rank):
            dist.all_gather_object(out, value)
        return out

    def agree(self, device: torch.device, mixed: bool) -> None:
        """Raises InputError on every rank where their devices are of different kinds, unless that is asked for."""
        same_kind([(f"rank {i}", kind) for i, kind in enumerate(self.gather(kind_of(device)))], mixed)


@contextmanager
def told(rank: int) -> Iterator[None]:
    """What breaks the connection off becomes one line."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RankLost(f"rank {rank}: another rank has failed or ended, so this one stops too, and no output is "
                       f"written ({reason})") from error  # fmt: skip


def under_torchrun() -> bool:
    """Whether torchrun has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ and "MASTER_ADDR" in os.environ


@contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks, connected by gloo; results travel through host memory in any case."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    before = signal.signal(signal.SIGTERM, functools.partial(_ended, rank))
    with told(rank):
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    log.info(f"rank {rank} of {count}: process {os.getpid()}")
    try:
        yield Ranks(rank, count, int(os.environ.get("LOCAL_RANK", rank)))
    finally:
        signal.signal(signal.SIGTERM, before)
        dist.destroy_process_group()


def _ended(rank: int, *_: object) -> None:
    """torchrun ends the other ranks so when one of them has failed."""
    print(f"zerowaste-vae: error: rank {rank}: stopped by torchrun, as another rank has failed or ended; no output is "
          "written", file=sys.stderr, flush=True)  # fmt: skip
    os._exit(2)


@dataclass
class RankSpread(Spread):
    """As Spread, of which each rank makes one part: `cores` holds its own VAE once for every rank."""

    ranks: Ranks | None = None

    def run(self, report: Report) -> None:
        """Rank 0 has all results in `out` afterwards, the others their own parts."""
        ranks, rank = self.ranks, self.ranks.rank
        self.rates = [1.0] * ranks.count
        report.device = f"{ranks.count} ranks, this one on {self.cores[0].device}"
        parts = ranks.broadcast(self._first_parts() if rank == 0 else None)
        with report.stage(report.operation):
            while parts:
                for part in parts:
                    if part.device == rank:
                        whole = replace(part)
                        self._make(part, functools.partial(self._told, whole), self.cancel or _never)
                        if part.error is not None:
                            raise part.error
                self.finished = [p for own in ranks.gather([p for p in self.finished if p.device == rank]) for p in own]
                parts = self._too_narrow()
        with report.stage("gather"):
            self._collect(rank)
        self._describe(report)
        report.complete = True

    def _told(self, part: Any, message: tuple) -> None:
        kind, _, value = message
        if kind == "plan" and self.on_plan is not None:
            self.on_plan(value)
        elif kind == "progress" and self.progress is not None:
            total = part.end - part.first
            self.progress(int(value * total), total)

    def _collect(self, rank: int) -> None:
        """Results of the other ranks to rank 0, in their order."""
        for part in sorted(self.finished, key=lambda p: p.order):
            if part.device != 0 and rank in (0, part.device):
                results = self.out[part.clip, part.first - self.wanted.start : part.end - self.wanted.start]
                step = max(1, PIECE_BYTES // results[0].nbytes)
                for piece in results.split(step):
                    with told(rank):
                        _move(piece, part.device if rank == 0 else None)


def _move(piece: Tensor, source: int | None) -> None:
    """From rank `source` into `piece`, or (None) to rank 0."""
    if source is None:
        dist.send(piece.contiguous(), 0)
        return
    there = torch.empty(piece.shape, dtype=piece.dtype)
    dist.recv(there, source)
    piece.copy_(there)


def _never() -> bool:
    return False
