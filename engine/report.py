"""Report of a decode or encode as it really ran: kernels, time, memory, and what was off and why."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from .errors import LINE, one_line
from .system.devices import counters, synchronize
from .system.memory import GIB
from .system.words import html_table

#: Counted events -> their wording in a report.
EVENTS = {
    "oom_retries": "an operator found no memory and was tried again",
    "oom_step_downs": "out of memory, continued in smaller steps",
    "replayed_chunks": "chunk run again after trouble; finished frames were kept",
    "nan_reruns": "frames not finite, run again in a safer precision",
    "saturated": "8-bit value saturated",
    "handed_over": "a device failed, others made the rest of its part",
}


@dataclass
class Report:
    """Filled while the run goes on; `complete` once it has ended well. Sizes in GB (2^30 bytes), times in seconds."""

    operation: str  # "decode" or "encode"
    clip: tuple[int, int, int, int]  # batch, frames (without `dropped` ones), height, width
    architecture: str
    precision: str
    device: str
    operands: str = ""  # the convolutions that took 8-bit operands
    mode: str = ""  # the path: "fused kernels (NDHWC)", "plain torch (NCDHW)", ...
    plan: str = ""
    kernels: str = ""  # their launcher: prebuilt ones, Triton, or none, and why
    schedules: str = ""  # the origin of the fused kernels' schedules
    predicted_gb: float | None = None
    parked_gb: float = 0.0  # host memory of parked histories, as planned
    #: CUDA: peaks of the process as torch counts them, and its allocated memory before the run. See `measured`.
    reserved_gb: float | None = None
    allocated_gb: float | None = None
    before_gb: float | None = None
    #: Stage -> seconds, in order.
    seconds: dict[str, float] = field(default_factory=dict)
    #: PSNR (peak 2.0) against the exact path, where it was measured.
    db: float | None = None
    #: (optimisation, why the run did not use it).
    off: list[tuple[str, str]] = field(default_factory=list)
    events: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(EVENTS, 0)))
    complete: bool = False
    #: Encode: the number of frames at the end that fill no latent and were not read, and of copies of the last frame
    #: that the caller added to fill one.
    dropped: int = 0
    repeated: int = 0
    #: Decode of a part of a clip: the number of earlier latents that it depends on, which are computed again (warm-up).
    lead: int = 0
    #: Decode that begins with noise: what it is, and where it waits.
    noise: str = ""
    #: Several devices: the results that each one made, and its report.
    parts: list[tuple[range, Report]] = field(default_factory=list)

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the enclosed block; a stage entered twice adds up."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @contextmanager
    def measured(self, device: torch.device) -> Iterator[None]:
        """Read torch's memory counters around a run on CUDA, without resetting them: other code may use them.

        Reserved memory stays reserved until the cache is emptied, so its value at the end is the peak. Allocated memory
        does not: where an earlier peak of the process was higher, this run's is hidden and stays None.
        """
        if device.type != "cuda":
            yield
            return
        synchronize(device)
        before = counters(device)
        self.before_gb = before.allocated / GIB
        try:
            yield
        finally:
            synchronize(device)
            now = counters(device)
            self.allocated_gb = now.most_allocated / GIB if now.most_allocated > before.most_allocated else None
            self.reserved_gb = (now.most_reserved if now.most_reserved > before.most_reserved else now.reserved) / GIB

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict that JSON can hold."""
        out = dict(vars(self))
        out["clip"] = dict(zip(("batch", "frames", "height", "width"), self.clip, strict=True))
        out["db"] = None if self.db is None or not math.isfinite(self.db) else self.db  # JSON knows no infinity
        out["seconds"] = dict(self.seconds)
        out["total_seconds"] = self.total_seconds
        out["off"] = [{"name": name, "reason": reason} for name, reason in self.off]
        out["events"] = dict(self.events)
        out["parts"] = [{"first": r.start, "end": r.stop, **part.as_dict()} for r, part in self.parts]
        return out

    def __repr__(self) -> str:
        """Return the report's first line, time and memory, for people."""
        found = dict(self._rows())
        return f"<Report {found['run']}; {found['time']}; {found['memory'] or 'no memory stated'}>"

    def _repr_html_(self) -> str:
        """Return the report as a table, for notebooks."""
        return html_table("Report", [(name, one_line(text, LINE)) for name, text in self._rows()])

    def text(self) -> str:
        """Return the report as text, one line per topic."""
        return "\n".join(f"{name:<8}{one_line(text, LINE)}" for name, text in self._rows() if text)

    def _rows(self) -> list[tuple[str, str]]:
        """Return (topic, text) pairs; a text may be empty."""
        batch, frames, height, width = self.clip
        count = f"{batch} x {frames}" if batch > 1 else str(frames)
        ended = "" if self.complete else ", NOT FINISHED"
        lines = [
            ("run", f"{self.operation} {count} frames of {width}x{height}{ended}"),
            ("mode", f"{self.mode}; {self.architecture}, {self.precision} on {self.device}"),
            ("8 bit", self.operands),
            ("warm-up", f"{self.lead} latents before these frames are computed again" if self.lead else ""),
            ("noise", self.noise),
            ("plan", self.plan),
            ("kernels", "; ".join(filter(None, (self.kernels, self.schedules)))),
            ("time", self._times()),
            ("memory", self._memory()),
        ]
        if self.dropped:
            given = frames + self.dropped
            lines.append(("frames", f"the last {self.dropped} of {given} fill no latent and were left out"))
        if self.repeated:
            lines.append(("frames", f"the last one was repeated {self.repeated} times to fill a latent"))
        if self.db is not None:
            found = f"{self.db:.1f} dB against" if math.isfinite(self.db) else "equal to"
            lines.append(("quality", f"{found} the exact path"))
        lines += [("part", f"{r.start} to {r.stop - 1} on {p.device}: {p._times()}; {p.plan}") for r, p in self.parts]
        lines += [("off", f"{name}: {reason}") for name, reason in self.off]
        lines += [("event", f"{number} x {EVENTS.get(name, name)}") for name, number in self.events.items() if number]
        return lines

    def _times(self) -> str:
        total = self.total_seconds
        each = 1e3 * total / max(self.clip[0] * self.clip[1], 1)
        parts = ", ".join(f"{name} {value:.2f} s" for name, value in self.seconds.items())
        return f"{total:.2f} s ({each:.1f} ms per frame): {parts}"

    def _memory(self) -> str:
        parts = [] if self.predicted_gb is None else [f"planned {self.predicted_gb:.2f} GB"]
        if self.parked_gb:
            parts.append(f"{self.parked_gb:.2f} GB parked in host memory")
        if self.reserved_gb is not None:
            parts.append(f"process peak {self.reserved_gb:.2f} GB reserved")
        if self.allocated_gb is not None:
            parts.append(f"{self.allocated_gb:.2f} GB allocated")
        if self.before_gb is not None:
            parts.append(f"{self.before_gb:.2f} GB allocated before the run")
        return ", ".join(parts)
