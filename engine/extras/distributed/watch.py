"""Supervision of torchrun's ranks: one that is lost or stands still ends the others, with a line that names it.

torch's own timeouts name no rank, and cannot tell a chunk that takes long from a process that stands still."""

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

#: Seconds between two signs of life, and of silence after which a rank counts as lost: its process stands still, or its
#: machine is gone. Others wait for rank 0 twice as long, because it may be about to name the rank that is lost.
PULSE, SILENCE = 1.0, 60.0
#: Seconds that a chunk may take on a GPU and on a CPU, compiling for the first one included.
CHUNK, CHUNK_CPU = 600.0, 1800.0
#: Seconds for rank 0 to close the files it writes: torchrun waits for 30.
GRACE = 20.0

_ending = threading.Lock()


class Watch(threading.Thread):
    """Thread that exchanges signs of life between rank 0 and every other rank, over connections of its own.

    on_lost(why) is called in this thread where a rank is lost. If the call then does not end, this thread ends the
    process: after GRACE seconds on rank 0, at once elsewhere."""

    def __init__(self, rank: int, count: int) -> None:
        """Connect this rank; all ranks must call it."""
        super().__init__(name="zerowaste watches ranks", daemon=True)
        self._rank, self._peers = rank, list(range(1, count)) if rank == 0 else [0]
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * SILENCE))
        self._silence = 2 * SILENCE if rank else SILENCE
        self._leaving, self._since = threading.Event(), (0.0, 0.0)
        self.lost: str | None = None
        self._left: list[int] = []
        self.on_lost: Callable[[str], Any] | None = None

    def at_work(self, device: torch.device) -> bool:
        """Note that this rank has finished or begun a chunk. Always returns False."""
        self._since = time.monotonic(), CHUNK if device.type == "cuda" else CHUNK_CPU
        return False

    def idle(self) -> None:
        """Note that this rank waits for a request."""
        self._since = 0.0, 0.0

    def leave(self) -> None:
        """Tell the others that this rank is done, and end the thread."""
        self._leaving.set()
        self.join()

    def who(self) -> str | None:
        """Return which rank is lost or has left, after at most three signs of life; None where that stays unknown."""
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
            gone = f"has said nothing for {self._silence:g} s" if "imed out" in str(error) else "has ended"
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
        state = torch.tensor([float(self._leaving.is_set()), spent, limit], dtype=torch.float64, device="cpu")
        dist.send(state, peer, group=self._group)

    def _hear(self, peer: int) -> list[float]:
        state = torch.empty(3, dtype=torch.float64, device="cpu")
        dist.irecv(state, peer, group=self._group).wait(timedelta(seconds=self._silence))
        return state.tolist()


def end(rank: int, why: str) -> NoReturn:
    """Print one line and end the process, without waiting for threads that wait for other ranks."""
    with _ending:  # a second thread prints nothing
        sys.stdout.flush()
        print(f"zerowaste-vae: error: rank {rank}: {why}, so this one stops too; of the output there is what was "
              "finished, with .part in its name", file=sys.stderr, flush=True)  # fmt: skip
        os._exit(2)
