"""How much memory a run may use."""

from __future__ import annotations

import math

import torch

from ..memory import GIB, available_ram
from ..request import check_sizes
from ..run.pinned import POOL

#: Of the whole card, when the user names no target: 13 of 16 GB.
DEFAULT_SHARE = 0.8125
#: Of the card, at most MARGIN_BYTES, that stays free beside what is measured as used. A driver that may fill up system
#: memory instead of failing (the default on Windows) begins to do so before the card is full, and is then many times
#: slower.
MARGIN_SHARE = 0.05
MARGIN_BYTES = 512 << 20


def memory_target(device: torch.device, vram_gb: float | None, ram_gb: float | None, held: int) -> int | None:
    """Bytes this process may reach on `device`, weights included; None where nothing can be found out.

    CUDA: vram_gb or 81.25 % of the card, never more than other processes leave less a margin, less what else this
    process holds (`held` are the bytes of the caller's own weights there). CPU: vram_gb, else ram_gb, else half of what
    is free.
    """
    check_sizes(vram_gb, ram_gb)
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        asked = vram_gb * GIB if vram_gb else DEFAULT_SHARE * total
        return _reachable(device, held, asked)
    if vram_gb or ram_gb:
        return int((vram_gb or ram_gb) * GIB)
    free_ram = available_ram()
    return None if free_ram is None else held + free_ram // 2


def memory_room(device: torch.device, vram_gb: float | None, held: int) -> int | None:
    """Bytes up to which the default target may be raised on CUDA: all that other processes leave less a margin, less
    what else this process holds. None where the user named a target, and on a CPU."""
    if vram_gb or device.type != "cuda":
        return None
    return _reachable(device, held, math.inf)


def card_room(total: int) -> int:
    """The same of a card of `total` bytes on which nothing else is."""
    return int(total - min(MARGIN_SHARE * total, MARGIN_BYTES))


def _reachable(device: torch.device, held: int, most: float) -> int:
    free, total = torch.cuda.mem_get_info(device)
    others = max(0, total - free - torch.cuda.memory_reserved(device))
    foreign = max(0, torch.cuda.memory_allocated(device) - held)
    return max(0, int(min(most, card_room(total) - others)) - foreign)


def host_budget(device: torch.device, ram_gb: float | None) -> int | None:
    """Bytes of host memory in which a run on `device` may park histories, besides its result: ram_gb, else half of what
    is free, or only kept for the next run; None where nothing can be found out."""
    if device.type != "cuda":
        return 0
    if ram_gb:
        return int(ram_gb * GIB)
    free = available_ram()
    return None if free is None else (free + POOL.idle_bytes) // 2
