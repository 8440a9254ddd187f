"""How much memory a run may use."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from ..memory import GIB, available_ram
from ..orders import ORDERS
from ..request import Request
from ..run.pinned import POOL
from ..run.plan import Plan

#: Of the whole card, when the user names no target: 13 of 16 GB.
DEFAULT_SHARE = 0.8125
#: Of the card, at most MARGIN_BYTES, that stays free beside what is measured as used. A driver that may fill up system
#: memory instead of failing (the default on Windows) begins to do so before the card is full, and is then many times
#: slower.
MARGIN_SHARE = 0.05
MARGIN_BYTES = 512 << 20


@dataclass(frozen=True)
class Limits:
    """Bytes that a plan may take.

    target: on the device, weights included; None: no limit. room: up to which "auto" may raise that; None: it may not.
    host: of histories that wait in host memory; None: no limit, 0: none may, as on a CPU. option: the one that raises
    the target, for refusals.
    """

    target: int | None = None
    room: int | None = None
    host: int | None = 0
    option: str = "vram_gb"

    def shared(self, runs: int, device: torch.device) -> Limits:
        """Of one among so many runs at once, each on a device of its own: the host's memory is for all of them."""
        host = self.host and self.host // runs
        target = self.target // runs if self.target and device.type == "cpu" else self.target
        return replace(self, target=target, host=host)

    def below(self, size: int) -> Limits:
        """With a peak of less than so many bytes on the device."""
        return replace(self, target=size - 1, room=None)

    def hold(self, plan: Plan) -> bool:
        """Whether a plan that was made for others keeps within these."""
        most = self.target if plan.raised is None else self.room
        return (most is None or plan.own_bytes <= most) and (self.host is None or plan.host_bytes <= self.host)


@dataclass(frozen=True)
class Machine:
    """Where runs are, in bytes; what is not given is not known, or not there.

    card: of the whole GPU; None: a CPU. half_ram: of the free host memory. others: what other processes hold on the
    card. foreign: what this one holds there besides a run's own. held: a run's own weights, on a CPU.
    """

    device: torch.device
    card: int | None
    half_ram: int | None
    others: int = 0
    foreign: int = 0
    held: int = 0

    @classmethod
    def bare(cls, device: torch.device, card: int | None) -> Machine:
        """With the card as it is once all others have given theirs back; asks no GPU."""
        return cls(device, card, _half_ram(device))

    @classmethod
    def now(cls, device: torch.device, held: int = 0, beside: int = 0) -> Machine:
        """For a run that starts now. held: bytes of its own weights on the device. beside: of others of its VAE there,
        as far as those are known."""
        if device.type != "cuda":
            return cls(device, None, _half_ram(device), foreign=beside, held=held)
        free, total = torch.cuda.mem_get_info(device)
        others = max(0, total - free - torch.cuda.memory_reserved(device))
        foreign = max(0, torch.cuda.memory_allocated(device) - held)
        return cls(device, total, _half_ram(device), others, foreign)

    def limits(self, request: Request) -> Limits:
        """Of a run that asks for this."""
        r = request
        option = "vram_gb" if self.card is not None or r.vram_gb else "ram_gb"
        return Limits(self.target(r.vram_gb, r.ram_gb)[0], self.room(r.vram_gb), self.host(r.ram_gb), option)

    def target(self, vram_gb: float | None, ram_gb: float | None) -> tuple[int | None, str]:
        """Bytes this process may reach on the device, weights included (None: nothing is known), and the name of where
        that figure is from.

        A card: vram_gb or 81.25 % of it, never more than other processes leave less a margin, less what else this
        process holds. A CPU: vram_gb, else ram_gb, else half of what is free.
        """
        if self.card is not None:
            most, source = (vram_gb * GIB, "vram_gb") if vram_gb else (DEFAULT_SHARE * self.card, "card")
            return self._reachable(most), source
        if vram_gb or ram_gb:
            return max(0, int((vram_gb or ram_gb) * GIB) - self.foreign), "vram_gb" if vram_gb else "ram_gb"
        return None if self.half_ram is None else self.held + self.half_ram, "half_ram"

    def room(self, vram_gb: float | None) -> int | None:
        """Bytes up to which the default target may be raised on a card: all that other processes leave less a margin,
        less what else this process holds. None where the user named a target, and on a CPU."""
        return None if vram_gb or self.card is None else self._reachable(math.inf)

    def host(self, ram_gb: float | None) -> int | None:
        """Bytes of host memory in which a run may park histories, besides its result: ram_gb, else half of what is
        free, or only kept for the next run; None where nothing can be found out."""
        if self.device.type != "cuda":
            return 0
        return int(ram_gb * GIB) if ram_gb else self.half_ram

    def _reachable(self, most: float) -> int:
        free = self.card - min(MARGIN_SHARE * self.card, MARGIN_BYTES) - ORDERS.reserved
        return max(0, int(min(most, int(free) - self.others)) - self.foreign)


def _half_ram(device: torch.device) -> int | None:
    free = available_ram()
    return None if free is None else (free + (POOL.idle_bytes if device.type == "cuda" else 0)) // 2
