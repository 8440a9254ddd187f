"""Memory limits of a run, from the user's options and the machine."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace

import torch

from ..request import Request
from ..runtime.pinned import POOL
from ..system.devices import counters
from ..system.memory import GIB, available_ram
from ..system.orders import ORDERS
from .plan import Plan

#: Default target as a part of the whole card, when the user names none: 13 of 16 GB.
DEFAULT_SHARE = 0.8125
#: Part of the card, at most MARGIN_BYTES, that stays free in addition to what is measured as used. A driver that may
#: spill into system memory instead of failing (the default on Windows) begins to do so before the card is full, and is
#: then many times slower.
MARGIN_SHARE = 0.05
MARGIN_BYTES = 512 << 20
#: What stays free on Windows where the user names no target: as much as ComfyUI keeps, up to LARGE_CARD and above it.
#: There a driver spills sooner, for the desktop takes of the card, too.
WINDOWS_BYTES = 600 << 20, 700 << 20
LARGE_CARD = 15 * GIB


@dataclass(frozen=True)
class Limits:
    """Limits in bytes that a plan must keep.

    target: bytes on the device, weights included; None: no limit. room: bytes up to which "auto" may raise the target;
    None: it may not. host: bytes of histories parked in host memory; None: no limit, 0: no parking, as on a CPU.
    option: name of the option that raises the target, for refusals. cpu: the device is the CPU, so that what waits in
    host memory takes of the target, too. beside: bytes that this process holds apart from the run, which target and
    room leave out.
    """

    target: int | None = None
    room: int | None = None
    host: int | None = 0
    option: str = "vram_gb"
    cpu: bool = False
    beside: int = 0

    def shared(self, runs: int, device: torch.device) -> Limits:
        """Return the limits of one of `runs` simultaneous runs, each on its own device; they share host memory."""
        host = self.host and self.host // runs
        target = self.target // runs if self.target and device.type == "cpu" else self.target
        return replace(self, target=target, host=host)

    def tries(self, auto: bool) -> list[int | None]:
        """Return the target and, with "auto", the room up to which it may be raised if that is more."""
        raised = auto and self.target is not None and (self.room or 0) > self.target
        return [self.target, self.room] if raised else [self.target]

    def below(self, size: int) -> Limits:
        """Return limits for a peak of less than `size` bytes on the device."""
        return replace(self, target=size - 1, room=None)

    def hold(self, plan: Plan) -> bool:
        """Check that a plan made for other limits keeps these."""
        most = self.target if plan.raised is None else self.room
        return (most is None or plan.own_bytes <= most) and (self.host is None or plan.host_bytes <= self.host)


@dataclass(frozen=True)
class Machine:
    """Memory of the machine that runs use, in bytes.

    card: size of the GPU's memory; None: a CPU. half_ram: half of the free host memory; None: unknown. others: bytes
    that other processes hold on the card. foreign: bytes that this process holds on the device apart from the run's
    own. held: bytes of the run's own weights, on a CPU.
    """

    device: torch.device
    card: int | None
    half_ram: int | None
    others: int = 0
    foreign: int = 0
    held: int = 0

    @classmethod
    def bare(cls, device: torch.device, card: int | None) -> Machine:
        """Return the machine with an empty card of `card` bytes; no GPU is queried."""
        return cls(device, card, _half_ram(device))

    @classmethod
    def now(cls, device: torch.device, held: int = 0, beside: int = 0) -> Machine:
        """Return the machine for a run that starts now.

        Args:
            device: where it runs.
            held: bytes of its own weights on the device.
            beside: bytes of the VAE's other weights on a device that is no GPU, as far as they are known.
        """
        if device.type != "cuda":
            return cls(device, None, _half_ram(device), foreign=beside, held=held)
        free, total = torch.cuda.mem_get_info(device)
        own = counters(device)
        others, foreign = max(0, total - free - own.reserved), max(0, own.allocated - held)
        return cls(device, total, _half_ram(device), others, foreign)

    def limits(self, request: Request) -> Limits:
        """Return the limits of a run with the memory options of this request."""
        r = request
        option = "vram_gb" if self.card is not None or r.vram_gb else "ram_gb"
        target, host = self.target(r.vram_gb, r.ram_gb)[0], self.host(r.ram_gb)
        return Limits(target, self.room(r.vram_gb), host, option, self.device.type == "cpu", self.foreign)

    def target(self, vram_gb: float | None, ram_gb: float | None) -> tuple[int | None, str]:
        """Return the bytes that a run may use on the device, weights included (None: unknown), and the figure's origin.

        On a card: vram_gb or 81.25 % of it, at most what other processes leave minus a margin, minus the bytes that
        this process already holds for other things. On a CPU: vram_gb, else ram_gb, else half of what is free. The
        origin is "vram_gb", "ram_gb", "card" or "half_ram".
        """
        if self.card is not None:
            most, source = (vram_gb * GIB, "vram_gb") if vram_gb else (DEFAULT_SHARE * self.card, "card")
            return self._reachable(most, auto=not vram_gb), source
        if vram_gb or ram_gb:
            return max(0, int((vram_gb or ram_gb) * GIB) - self.foreign), "vram_gb" if vram_gb else "ram_gb"
        return None if self.half_ram is None else self.held + self.half_ram, "half_ram"

    def room(self, vram_gb: float | None) -> int | None:
        """Return the bytes up to which the default target may be raised on a card.

        This is all that other processes leave minus a margin, minus the bytes that this process already holds for other
        things. None where the user named a target, and on a CPU."""
        return None if vram_gb or self.card is None else self._reachable(math.inf, auto=True)

    def host(self, ram_gb: float | None) -> int | None:
        """Return the bytes of host memory in which a run may park histories, in addition to its result.

        This is ram_gb, else half of what is free or only pooled for the next run; 0 on a CPU; None where the free
        memory is unknown."""
        if self.device.type != "cuda":
            return 0
        return int(ram_gb * GIB) if ram_gb else self.half_ram

    def spare(self, auto: bool) -> int:
        """Return the bytes of a card that every run leaves free. auto: the user named no target."""
        margin = min(MARGIN_SHARE * self.card, MARGIN_BYTES)
        if auto and sys.platform == "win32":
            margin = WINDOWS_BYTES[self.card > LARGE_CARD]
        return math.ceil(margin + ORDERS.reserved)

    def _reachable(self, most: float, auto: bool) -> int:
        free = self.card - self.spare(auto)
        return max(0, int(min(most, free - self.others)) - self.foreign)


def _half_ram(device: torch.device) -> int | None:
    free = available_ram()
    return None if free is None else (free + (POOL.idle_bytes if device.type == "cuda" else 0)) // 2
