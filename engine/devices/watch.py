"""Whether the ranks of torchrun are all there and come on: one that is lost ends the others, with a line."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

#: Seconds between two signs of life, and of silence after which a rank is taken for lost: its process stands still, or
#: its machine is gone. Others wait for rank 0 twice as long, which may be about to name the one that is.
PULSE, SILENCE = 1.0, 60.0
#: Seconds that a chunk may take, the first one's compilers included, by the kind of device.
CHUNK, CHUNK_CPU = 600.0, 1800.0
#: Seconds for rank 0 to close what it writes: torchrun waits for 30.
GRACE = 20.0

_ending = threading.Lock()


class Watch(threading.Thread):
    """Rank 0 hears of every other rank, and they of rank 0, over connections that nothing else uses.

    on_lost(why) is called where a rank is lost, in this thread; what then does not end within GRACE seconds on rank 0,
    or at once elsewhere, ends here.
    """

    def __init__(self, rank: int, count: int) -> None:
        """Called by all ranks."""
        super().__init__(name="zerowaste watches ranks", daemon=True)
        self._rank, self._peers = rank, list(range(1, count)) if rank == 0 else [0]
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * SILENCE))
        self._leaving, self._since = threading.Event(), (0.0, 0.0)
        self.lost: str | None = None
        self._left: list[int] = []
        self.on_lost: Callable[[str], Any] | None = None

    def at_work(self, device: torch.device) -> bool:
        """This rank has come to a chunk's end or begun with one. Always false."""
        self._since = time.monotonic(), CHUNK if device.type == "cuda" else CHUNK_CPU
        return False

    def idle(self) -> None:
        """This rank waits to be asked."""
        self._since = 0.0, 0.0

    def leave(self) -> None:
        """This rank is done with the others."""
        self._leaving.set()
        self.join()

    def who(self) -> str | None:
        """Which rank is lost or has left, where a few signs of life tell."""
        end = time.monotonic() + 3 * PULSE
        while self.lost is None and not self._left and time.monotonic() < end:
            time.sleep(PULSE / 10)
        return self.lost or (f"rank {self._left[0]} has stopped" if self._left else None)

    def run(self) -> None:
        while self._peers and self.lost is None:
            last = self._leaving.wait(PULSE)
            for peer in list(self._peers):
                self._talk(peer)
            if last:
                return
        if self.lost is not None and not self._leaving.is_set():
            if self.on_lost is not None:
                self.on_lost(self.lost)
            if self._rank or not self._leaving.wait(GRACE):
                end(self._rank, self.lost)

    def _talk(self, peer: int) -> None:
        try:
            if self._rank:
                self._say(peer)
            leaves, spent, limit = self._hear(peer)
            if not self._rank:
                self._say(peer)
        except (RuntimeError, ValueError) as error:
            gone = f"has said nothing for {SILENCE:g} s" if "imed out" in str(error) else "has ended"
            self.lost = self.lost or f"rank {peer} {gone}"
            return
        if leaves:
            self._peers.remove(peer)
            self._left.append(peer)
        elif spent > limit:
            self.lost = self.lost or f"rank {peer} has not come to the end of a chunk for {limit:g} s"

    def _say(self, peer: int) -> None:
        since, limit = self._since
        spent = time.monotonic() - since if since else 0.0
        state = torch.tensor([float(self._leaving.is_set()), spent, limit], dtype=torch.float64)
        dist.send(state, peer, group=self._group)

    def _hear(self, peer: int) -> list[float]:
        state = torch.empty(3, dtype=torch.float64)
        dist.irecv(state, peer, group=self._group).wait(timedelta(seconds=SILENCE if self._rank == 0 else 2 * SILENCE))
        return state.tolist()


def end(rank: int, why: str) -> NoReturn:
    """With a line, and without waiting for threads that wait for other ranks."""
    with _ending:  # whoever comes second says nothing
        sys.stdout.flush()
        print(f"zerowaste-vae: error: rank {rank}: {why}, so this one stops too; of the output there is what was "
              "finished, with .part in its name", file=sys.stderr, flush=True)  # fmt: skip
        os._exit(2)
