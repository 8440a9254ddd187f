"""Expected time of a decode on a card that is not here, computed from times that were measured at its ratio.

Never a measurement, and always called computed. `ratio.json` beside this file holds, for each operator of a decode, the
clocks of a processor that it takes at a card's ratio (tools/measure_ratio.py writes it); docs/ratio.md has the formula,
what it misses, and how far it is off where two cards can be compared.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...kernels.gpus import Gpu
from ...network.architecture import Architecture
from ...network.program import Program
from ...options import Options

DATA = Path(__file__).with_name("ratio.json")
_FORMAT = 1
#: Share of its bandwidth that a card's memory gives.
_BANDWIDTH = 0.9
#: Share of an operator's bytes that is not moved beside its products, where one block runs on a processor.
_ALONE = 0.3
#: Bytes that a processor of a GeForce gets from L2 in a clock.
_L2 = 15.0
#: How far a card may be below and above the range, by the kind of sums, as a share; judged, not measured: int8 is what
#: a limit of power slows most, fp16 sums what has the least slack. Cards with a few MB of L2 read weights more often.
BARS = {"f32": (0.10, 0.15), "f16": (0.10, 0.25), "s32": (0.10, 0.45)}
_SMALL_L2, _SMALL_MB = 0.30, 6
_KINDS = {"fp16_fast": "f16", "int8": "s32"}


@dataclass(frozen=True)
class Expected:
    """Seconds of a whole decode, from `low` to `high`, and its frames. below, above: how far a card may be outside, as
    shares. source: what was measured."""

    low: float
    high: float
    frames: int
    below: float
    above: float
    source: str

    @property
    def text(self) -> str:
        """One line for people."""
        ms = f"{1e3 * self.low / self.frames:.3g} to {1e3 * self.high / self.frames:.3g} ms a frame"
        bars = f"-{100 * self.below:.0f} to +{100 * self.above:.0f} % not excluded"
        seconds = f"{self.low:.3g} to {self.high:.3g} s ({ms})"
        return f"expected {seconds}: computed, not measured on it ({bars}; {self.source})"


def expected(
    gpu: Gpu, architecture: Architecture, config: Any, half: str, precision: str, latents: int, height: int, width: int,
    winograd: bool = False, data: Mapping[str, Any] | None = None,
) -> Expected | str:  # fmt: skip
    """Return the expected time of a clip in whole frames on a card, or why there is none.

    Args:
        gpu: the card.
        architecture, config: of the model.
        half: "decoder" or "encoder".
        precision: one of `loader.NAMES` except "auto".
        latents, height, width: of the clip, in latent pixels.
        winograd: as `in_winograd` returns it.
        data: contents of `ratio.json`, None: the file's.
    """
    found = _entry(data or _read(), gpu, architecture.name, half, precision, ["winograd"] * winograd)
    if found is None:
        return f"not timed: {architecture.name} {precision} {half} at the ratio of cards like the {gpu.name}"
    if config != architecture.published.config:
        return f"not timed: {architecture.name} with other widths than the published ones"
    program, (of, tall, wide) = architecture.program(half, config), found["latents"]
    # Operators with products grow as the clip's products, the others as the values that they read and write.
    asked, known = program.work(latents, height, width), program.work(of, tall, wide)
    products = asked.composed_flop / known.composed_flop
    growth = products, asked.values / known.values if known.values else products
    frames = architecture.frames(latents)
    edges = [  # what passes before the first operator and after the last is the host's
        found["frames"] * (1e-3 * growth[1] * found["host_ms"]
                           + sum(_seconds(row, gpu, mhz, growth, late) for row in found["rows"]))
        for mhz, late in ((max(gpu.mhz, gpu.real), False), (min(gpu.mhz, gpu.real), True))
    ]
    below, above = BARS[_KINDS.get(precision, "f32")]
    above += _SMALL_L2 if gpu.l2 <= _SMALL_MB else 0.0
    return Expected(edges[0], edges[1], frames, below, above, found["source"])


def in_winograd(options: Options, program: Program, precision: str) -> bool:
    """Return whether most products of a decode are in Winograd form. options: decided. precision: as `expected` takes
    it."""
    return options.winograd is True and precision in ("fp16", "bf16") and not program.style.direct


def _seconds(row: Mapping[str, Any], gpu: Gpu, mhz: int, growth: tuple[float, float], late: bool) -> float:
    """Return the seconds a frame of the measured clip that one operator takes on a card.

    Args:
        row: of the data, a frame: `clocks` (millions, of a processor), `gb`, `l2_gb`, `products` (it holds some).
        gpu, mhz: the card and its clock.
        growth: how many times as many products and values the clip has.
        late: bytes are partly moved when no products are made.
    """
    by = growth[0] if row["products"] else growth[1]
    processors = gpu.processors * mhz * 1e6
    made = by * row["clocks"] * 1e6 / processors
    moved = by * row["gb"] * 1e9 / (_BANDWIDTH * gpu.bandwidth * 1e9)
    fetched = by * row["l2_gb"] * 1e9 / (_L2 * processors)
    most = max(made, moved, fetched)
    return max(most, made + _ALONE * moved) if late and row["products"] else most


def _entry(
    data: Mapping[str, Any], gpu: Gpu, family: str, half: str, precision: str, on: list[str]
) -> dict[str, Any] | None:
    wanted = family, half, precision, gpu.rates, on
    for one in data["entries"]:
        if (one["family"], one["half"], one["precision"], one["rates"], one["on"]) == wanted:
            return one
    return None


@functools.cache
def _read() -> dict[str, Any]:
    found = json.loads(DATA.read_text(encoding="utf-8"))
    if found["format"] != _FORMAT:
        raise ValueError(f"{DATA} has format {found['format']}, this pack reads {_FORMAT}")
    return found
