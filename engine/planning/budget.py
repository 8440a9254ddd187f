"""How much memory a run may use."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from pathlib import Path, PurePosixPath

import torch

from ..errors import InputError
from ..run.pinned import POOL

GIB = 1 << 30
#: Where Linux shows control groups, and in which of them this process is.
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
#: Of the whole card, when the user names no target: 13 of 16 GB.
DEFAULT_SHARE = 0.8125
#: Of the card, at most MARGIN_BYTES, that stays free beside what is measured as used. A driver that may fill up system
#: memory instead of failing (the default on Windows) begins to do so before the card is full, and is then many times
#: slower.
MARGIN_SHARE = 0.05
MARGIN_BYTES = 512 << 20


def check_sizes(vram_gb: float | None, ram_gb: float | None) -> None:
    """Raises InputError where one of them is negative or no finite number."""
    for name, value in (("vram_gb", vram_gb), ("ram_gb", ram_gb)):
        if value is not None and not 0 <= value < math.inf:
            raise InputError(f"{name}={value} is not a size: give GB (2^30 bytes), or 0 for automatic")


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


def available_ram() -> int | None:
    """Bytes of host memory a process can still get without swapping, or within its container's limit; None where the
    system does not tell."""
    if sys.platform == "win32":
        return _windows_available()
    known = [size for size in (_system_available(), _container_available()) if size is not None]
    return min(known, default=None)


def _system_available() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def _container_available(root: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int | None:
    """What the tightest memory limit of this process' control groups leaves, the file cache that it can drop included.
    /proc/meminfo shows a container the whole machine, and beyond the limit the system ends the process."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines() if line.count(":") > 1]
    except (OSError, ValueError):
        lines = []
    left = []
    for mounted, controller, *names in (
        (root, "", "memory.max", "memory.current", "inactive_file"),
        (root / "memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        # The group's path is the host's; where the container sees only its own groups, the mounted one is its top.
        paths = {path for _, kinds, path in lines if controller in kinds.split(",")}
        groups = {mounted, *(mounted / str(part).lstrip("/") for path in paths for part in _with_parents(path))}
        left += [size for group in groups if (size := _left_in(group, *names)) is not None]
    return min(left, default=None)


def _with_parents(path: str) -> list[PurePosixPath]:
    """A control group and those it is in; none of a group outside of what is mounted ("/../..")."""
    own = PurePosixPath(path)
    return [] if ".." in own.parts else [own, *own.parents]


def _left_in(group: Path, limit: str, usage: str, cache: str) -> int | None:
    try:
        most = int((group / limit).read_text())  # the word "max" where there is none
        used = int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, most - used + int(stat.get(cache, 0)))
    except (OSError, ValueError):
        return None


def _windows_available() -> int | None:
    class MemoryStatus(ctypes.Structure):
        _fields_ = (
            ("length", ctypes.c_ulong),
            ("load", ctypes.c_ulong),
            *((name, ctypes.c_ulonglong) for name in ("total", "available", "t1", "a1", "t2", "a2", "extended")),
        )

    status = MemoryStatus(length=ctypes.sizeof(MemoryStatus))
    if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return None
    return int(status.available)
