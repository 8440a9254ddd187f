"""Host memory of this machine, and the text form of sizes."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path, PurePosixPath

GIB = 1 << 30
#: Linux' folder of control groups, and the file that names those of this process.
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
#: Limits of control groups from so many bytes on are none: the first version has a number there.
NO_LIMIT = 1 << 60


def in_gb(size: int | None) -> str:
    """Return bytes (None: 0) as text in GB (2^30), such as "1.50 GB"."""
    return f"{(size or 0) / GIB:.2f} GB"


def available_ram() -> int | None:
    """Return the bytes of host memory that a process can still get without swapping, or within its container's limit;
    None where the system does not tell."""
    if sys.platform == "win32":
        return _windows("available")
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


def _container_available() -> int | None:
    """Return the bytes left by the tightest memory limit of this process' control groups, with the file cache that it
    can drop.

    /proc/meminfo shows a container the whole machine, and beyond the limit the system ends the process.
    """
    try:
        lines = [line.split(":", 2) for line in OWN_CGROUPS.read_text().splitlines() if line.count(":") > 1]
    except (OSError, ValueError):
        lines = []
    left = []
    for mounted, controller, *names in (
        (CGROUPS, "", "memory.max", "memory.current", "inactive_file"),
        (CGROUPS / "memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        # The group's path is the host's; where the container sees only its own groups, the mounted one is its top.
        paths = {path for _, kinds, path in lines if controller in kinds.split(",")}
        groups = {mounted, *(mounted / str(part).lstrip("/") for path in paths for part in _with_parents(path))}
        left += [size for group in groups if (size := _left_in(group, *names)) is not None]
    return min(left, default=None)


def _with_parents(path: str) -> list[PurePosixPath]:
    """Return a control group and the groups around it; none for a group outside of what is mounted ("/../..")."""
    own = PurePosixPath(path)
    return [] if ".." in own.parts else [own, *own.parents]


def _left_in(group: Path, limit: str, usage: str, cache: str) -> int | None:
    try:
        most = int((group / limit).read_text())  # the word "max" where there is none
        if most >= NO_LIMIT:
            return None
        used = int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, most - used + int(stat.get(cache, 0)))
    except (OSError, ValueError):
        return None


def lockable_ram() -> int | None:
    """Return the bytes of host memory that this process may page-lock; None: as many as the system grants.

    Windows grants more than its desktop and its drivers can do without: a quarter of all is taken there.
    """
    total = _windows("total") if sys.platform == "win32" else None
    return None if total is None else total // 4


def _windows(figure: str) -> int | None:
    """Return "total" or "available" bytes of host memory; None if the system does not tell."""
    class MemoryStatus(ctypes.Structure):
        _fields_ = (
            ("length", ctypes.c_ulong),
            ("load", ctypes.c_ulong),
            *((name, ctypes.c_ulonglong) for name in ("total", "available", "t1", "a1", "t2", "a2", "extended")),
        )

    status = MemoryStatus(length=ctypes.sizeof(MemoryStatus))
    if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return None
    return int(getattr(status, figure))
