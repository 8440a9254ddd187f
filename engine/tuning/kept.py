"""What a tuning found, on disk: by GPU, driver, torch, kernels and version of this pack, in the cache folder. A file
that cannot be used costs a line, and the table's schedules run."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import log
from ..files.writing import write_json
from ..kernels.cards import FORMS, TRITON
from ..kernels.conv3d.schedules import Schedule
from ..kernels.conv3d.tuned import Kind, offer
from ..kernels.targets import Target, capabilities, prebuilt, target, triton_version
from ..planning.cost import Rates
from ..precision.store import cache_folder, say_unkept
from .candidates import candidates

FORMAT = 1
_WRONG = (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class Tuning:
    """Of one machine. machine: what it is for. times: ms of a layer's call with its schedule, and with the table's
    (None: that is wrong here). link: bytes per second from host memory while as many go back. work: operations per
    second of the layers with most work."""

    machine: dict[str, Any]
    schedules: dict[Kind, Schedule] = field(default_factory=dict)
    times: dict[Kind, tuple[float, float | None]] = field(default_factory=dict)
    #: (kind of layer, schedule, why) of what is wrong here, and what keeps the table's, in words.
    dropped: list[tuple[str, str, str]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    link: float | None = None
    work: float | None = None

    def rates(self) -> Rates:
        """For plans."""
        known = {name: rate for name in ("work", "link") if (rate := getattr(self, name))}
        return Rates(**known)

    def as_dict(self) -> dict[str, Any]:
        layers = [{"kind": list(kind), "schedule": asdict(s), "ms": self.times.get(kind)}
                  for kind, s in self.schedules.items()]  # fmt: skip
        rest = {"dropped": [list(d) for d in self.dropped], "left": self.left, "link": self.link, "work": self.work}
        return {"format": FORMAT, "machine": self.machine, "layers": layers, **rest}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], machine: Mapping[str, Any], sm: int) -> Tuning:
        """Raises ValueError or its like for what is not of this machine or was not written by this version."""
        if values["format"] != FORMAT or values["machine"] != machine:
            raise ValueError("it is another machine's or version's")
        here, made = target_of(sm, machine.get("kernels", TRITON)), cls(dict(machine))
        for layer in values["layers"]:
            kind, schedule = Kind(*layer["kind"]), Schedule(**layer["schedule"])
            # Plans count on what candidates keep to.
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
    """What candidates depend on. kernels: as `Target.identity` has them."""
    way = kernels.partition(" ")[0]
    return prebuilt(f"sm_{sm}", sm, way) if way in FORMS else capabilities(f"sm_{sm}", sm, triton_version())


def machine(device: torch.device, here: Target | None = None) -> dict[str, Any]:
    """What a tuning on a CUDA device is for: another of these values makes it worthless. here: what runs there, if that
    is not the device's first way."""
    from ... import __version__

    here = here or target(device)
    return {"gpu": torch.cuda.get_device_name(device), "sm": here.sm, "driver": driver(), "torch": torch.__version__,
            "kernels": here.identity, "zerowaste_vae": __version__}  # fmt: skip


@functools.cache
def driver() -> str:
    """NVIDIA's, as the system tells it; the version of CUDA that it has where it does not."""
    try:
        if found := version_in(Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")):
            return found
    except OSError:
        pass
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            lines = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
        except (OSError, subprocess.SubprocessError):
            lines = []
        if lines:
            return lines[0]
    return str(torch.cuda.driver_version()) if hasattr(torch.cuda, "driver_version") else "unknown"


def version_in(text: str) -> str:
    """The driver's in what Linux says of it; empty where there is none."""
    found = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)\s", text)
    return found[1] if found else ""


def place(machine: Mapping[str, Any]) -> Path | None:
    """The file of a machine; None where there is no place for it."""
    folder, name = cache_folder(), re.sub(r"[^a-z0-9]+", "-", str(machine["gpu"]).lower()).strip("-")
    code = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:12]
    return folder and folder / "tuning" / f"{name}-{code}.json"


def read(machine: Mapping[str, Any]) -> Tuning | None:
    """What is kept for a machine. A file that is no such thing is named in one line."""
    path = place(machine)
    try:
        if path is None:
            return None
        return Tuning.from_dict(json.loads(path.read_text(encoding="utf-8")), machine, machine["sm"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except _WRONG as error:
        reason = str(error) if type(error) is ValueError else type(error).__name__
        why = " ".join(reason.split())[:200]
        log.once(f"{path}: not usable ({why}); the schedules of the table run until `zerowaste-vae tune` is run again")
        return None


def write(tuning: Tuning) -> Path | None:
    """Keep it, whole or not at all; None where it cannot be kept."""
    path = place(tuning.machine)
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, tuning.as_dict())
        return path
    except OSError as error:
        say_unkept(error)
        return None


_lock = threading.Lock()
_known: dict[tuple[torch.device, str], Tuning | None] = {}


def of(device: torch.device, here: Target | None = None) -> Tuning | None:
    """What counts on a device for kernels as `here` launches them (None: its first way), read once in a process; None:
    nothing is kept, or it is no GPU with kernels."""
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
    """From now on, for kernels launched this way; runs under way end with what they began with."""
    with _lock:
        _known[device, way] = tuning
    offer(device, tuning.schedules, way)


def rates(device: torch.device) -> Rates:
    """Of the machine, or what is taken where nobody has measured it."""
    found = of(device)
    return Rates() if found is None else found.rates()


def words(device: torch.device, here: Target | None = None) -> str:
    """Where the schedules of a device are from, for kernels as `here` launches them (None: its first way); empty
    without kernels."""
    if device.type != "cuda" or not torch.cuda.is_available() or not (here := here or target(device)).kernels:
        return ""
    found = of(device, here)
    if found is not None and found.schedules:
        return f"tuned on this GPU ({len(found.schedules)} kinds of layers)"
    if 90 <= here.sm < 100:
        return "as measured on an H200"
    return "schedules chosen without measuring"
