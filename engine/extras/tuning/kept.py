"""Store of tunings on disk, in the cache folder: one file per GPU, driver, torch, kernels and version of this pack.

A file that cannot be used costs a line in the log, and the table's schedules run."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...kernels.cards import FORMS, TRITON
from ...kernels.conv3d.schedules import Schedule
from ...kernels.conv3d.tuned import Kind, offer
from ...kernels.prebuilt.driver import driver as cuda_driver
from ...kernels.prebuilt.errors import PrebuiltError
from ...kernels.targets import MADE_WITH, Target, capabilities, prebuilt, target, triton_version
from ...planning.cost import Rates
from ...system.hardware import no_window
from ..output.cache import cache_folder, keep, stored
from ..output.writing import write_json
from .candidates import candidates

FORMAT = 2


@dataclass(frozen=True)
class Tuning:
    """Tuning of one machine.

    machine: the GPU and versions that it is valid for. times: ms of a layer's call with its schedule, and with the
    table's (None: that one is wrong here). link: bytes per second from host memory while as many go back. work:
    operations per second of the layers with most work."""

    machine: dict[str, Any]
    schedules: dict[Kind, Schedule] = field(default_factory=dict)
    times: dict[Kind, tuple[float, float | None]] = field(default_factory=dict)
    #: (kind of layer, schedule, reason) of schedules that are wrong here, and layers that keep the table's, as text.
    dropped: list[tuple[str, str, str]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    link: float | None = None
    work: float | None = None

    def rates(self) -> Rates:
        """Return the measured rates for plans."""
        known = {name: rate for name in ("work", "link") if (rate := getattr(self, name))}
        return Rates(**known)

    def as_dict(self) -> dict[str, Any]:
        layers = [{"kind": list(kind), "schedule": asdict(s), "ms": self.times.get(kind)}
                  for kind, s in self.schedules.items()]  # fmt: skip
        rest = {"dropped": [list(d) for d in self.dropped], "left": self.left, "link": self.link, "work": self.work}
        return {"format": FORMAT, "machine": self.machine, "layers": layers, **rest}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], machine: Mapping[str, Any], sm: int) -> Tuning:
        """Read a tuning from JSON; raise ValueError or a similar error if it is not of this machine and version.

        Args:
            values: result of `as_dict`.
            machine: result of `machine` for the device.
            sm: its compute capability, such as 90.
        """
        if values["format"] != FORMAT or values["machine"] != machine:
            raise ValueError("it is another machine's or version's")
        here, made = target_of(sm, machine.get("kernels", TRITON)), cls(dict(machine))
        for layer in values["layers"]:
            kind, schedule = Kind(*layer["kind"]), Schedule(**layer["schedule"])
            # Plans count on the limits that candidates keep.
            if schedule not in candidates(here, kind):
                raise ValueError(f"{kind}: no schedule of this version")
            made.schedules[kind] = schedule
            if layer["ms"] is not None:
                spent, table = layer["ms"]
                made.times[kind] = float(spent), None if table is None else float(table)
        made.dropped.extend((str(a), str(b), str(c)) for a, b, c in values["dropped"])
        made.left.extend(map(str, values["left"]))
        link, work = (None if values[name] is None else float(values[name]) for name in ("link", "work"))
        if any(rate is not None and not 0 < rate < float("inf") for rate in (link, work)):
            raise ValueError("a rate is none")
        return cls(made.machine, made.schedules, made.times, made.dropped, made.left, link, work)


def target_of(sm: int, kernels: str) -> Target:
    """Return the capabilities that candidates depend on: without Triton, those under the one that sets are made with.

    Args:
        sm: compute capability, such as 90.
        kernels: a `Target.identity`.
    """
    way = kernels.partition(" ")[0]
    if way in FORMS:
        return prebuilt(f"sm_{sm}", sm, way)
    return capabilities(f"sm_{sm}", sm, triton_version() or MADE_WITH)


def machine(device: torch.device, here: Target | None = None) -> dict[str, Any]:
    """Return the values that a tuning on a CUDA device is valid for: if one differs, it is worthless.

    here: target that runs there, if that is not the device's first way."""
    from .... import __version__

    here = here or target(device)
    return {"gpu": torch.cuda.get_device_name(device), "sm": here.sm, "driver": driver(), "torch": torch.__version__,
            "kernels": here.identity, "zerowaste_vae": __version__}  # fmt: skip


@functools.cache
def driver() -> str:
    """Return the version of NVIDIA's driver; where the system does not tell it, that of the CUDA it supports.

    Every plan for a GPU asks this, so no process is started."""
    try:
        if found := version_in(Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")):
            return found
    except OSError:
        pass
    try:
        return _by_nvml() or f"CUDA {cuda_driver().version()}"
    except PrebuiltError:
        return "unknown"


def _by_nvml() -> str:
    """Return the driver's version by the library that comes with it, as nvidia-smi says it; empty where there is none.
    Linux has none in /proc under WSL, Windows never."""
    try:
        library = ctypes.WinDLL("nvml.dll") if sys.platform == "win32" else ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2():
            return ""
        said = ctypes.create_string_buffer(80)
        failed = library.nvmlSystemGetDriverVersion(said, len(said))
        library.nvmlShutdown()
    except (AttributeError, OSError):
        return ""
    return "" if failed else said.value.decode(errors="replace")


def nvidia_smi(figures: str, *options: str) -> list[str]:
    """Return nvidia-smi's answer, a line for each GPU; empty where there is none. figures: names, with commas."""
    # Windows would look for a bare name in the current folder, too.
    windows = Path(os.environ.get("SYSTEMROOT", r"C:\Windows"), "System32", "nvidia-smi.exe")
    program = str(windows) if sys.platform == "win32" else "nvidia-smi"
    command = [program, f"--query-gpu={figures}", "--format=csv,noheader,nounits", *options]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True, creationflags=no_window()
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.strip().splitlines()


def version_in(text: str) -> str:
    """Return the driver's version from the text of Linux's /proc file; empty where there is none."""
    found = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)\s", text)
    return found[1] if found else ""


def place(machine: Mapping[str, Any]) -> Path | None:
    """Return the file of a machine; None where there is no cache folder."""
    folder, name = cache_folder(), re.sub(r"[^a-z0-9]+", "-", str(machine["gpu"]).lower()).strip("-")
    code = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:12]
    return folder and folder / "tuning" / f"{name}-{code}.json"


def read(machine: Mapping[str, Any]) -> Tuning | None:
    """Return the stored tuning of a machine, or None. An unusable file is named in one line of the log."""
    cure = "the schedules of the table run until `zerowaste-vae tune` is run again"
    return stored(place(machine), lambda values: Tuning.from_dict(values, machine, machine["sm"]), cure)


def write(tuning: Tuning) -> None:
    """Store a tuning, whole or not at all; where the cache folder cannot be written a line is logged."""
    keep(place(tuning.machine), lambda path: write_json(path, tuning.as_dict()))


_lock = threading.Lock()
_known: dict[tuple[torch.device, str], Tuning | None] = {}


def of(device: torch.device, here: Target | None = None) -> Tuning | None:
    """Return the tuning in use on a device, read once in a process.

    Args:
        device: any device.
        here: target whose kernels run there; None for the device's first way.

    Returns: None where nothing is stored, or the device is not a GPU with kernels.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
    here = here or target(device)
    with _lock:
        if (device, here.way) not in _known:
            found = read(machine(device, here)) if here.kernels else None
            _known[device, here.way] = found
            if found is not None:
                offer(device, found.schedules, here.way)
        return _known[device, here.way]


def take_up(device: torch.device, tuning: Tuning, way: str = TRITON) -> None:
    """Use a tuning from now on for kernels launched in this way; current runs keep the schedules they began with."""
    with _lock:
        _known[device, way] = tuning
    offer(device, tuning.schedules, way)


def rates(device: torch.device) -> Rates:
    """Return the measured rates of the machine, or the defaults where it was not measured."""
    found = of(device)
    return Rates() if found is None else found.rates()


def words(device: torch.device, here: Target | None = None) -> str:
    """Return where the schedules of a device come from, as text; empty without kernels.

    here: target whose kernels run there; None for the device's first way."""
    if device.type != "cuda" or not torch.cuda.is_available() or not (here := here or target(device)).kernels:
        return ""
    found = of(device, here)
    if found is not None and found.schedules:
        return f"tuned on this GPU ({len(found.schedules)} kinds of layers)"
    if 90 <= here.sm < 100:
        return "as measured on an H200"
    return "schedules chosen without measuring"
