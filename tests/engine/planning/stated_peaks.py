"""Stated peaks of every component at its published widths, planned without a GPU, as data to compare with.

    python -m zerowaste_vae.tests.engine.planning.stated_peaks      write stated_peaks.json anew

Run it where the pack is importable as zerowaste_vae, after a change that is meant to change what is stated; the
difference of the file is then read as part of the change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from zerowaste_vae.engine.errors import PlanError
from zerowaste_vae.engine.families import ARCHITECTURES
from zerowaste_vae.engine.network.architecture import Architecture
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.planning.budget import Limits, Machine
from zerowaste_vae.engine.planning.cost import Rates
from zerowaste_vae.engine.planning.fusable import not_fused, why_no_8_bit
from zerowaste_vae.engine.planning.fused_walk import FusedWalk
from zerowaste_vae.engine.planning.make import make_planner
from zerowaste_vae.engine.planning.plain_walk import Torch
from zerowaste_vae.engine.precision.modes import PRECISIONS, Mode
from zerowaste_vae.engine.request import Request

RECORD = Path(__file__).with_suffix(".json")
#: Targets in GiB: one that leaves all room, then down to where bands, parking, passes and tiles are planned.
TARGETS = (80, 8, 4, 2)
#: Frames of a clip, and its size in pixels before it is filled up to whole latents.
FRAMES, HEIGHT, WIDTH = 25, 720, 1280
GIB = 1 << 30


def components() -> Iterator[tuple[str, Architecture, str, str, str]]:
    """Yield (name, architecture, half, precision, kind) of each component; 8 bit where it has it.

    kind: "fused", "plain", or "form" for fused with convolutions in Winograd form, where it has such."""
    for architecture in ARCHITECTURES:
        config = architecture.published.config
        programs = architecture.programs(config)
        for half in ("decoder", "encoder"):
            if half == "encoder" and config.encoder_widths is None:
                continue
            for kind, precision in (("fused", architecture.native), ("fused", "int8"), ("plain", architecture.native)):
                dtype = PRECISIONS[architecture.activations(precision, True)]
                if precision != "int8" or why_no_8_bit(programs, dtype, not_fused(programs, dtype)) is None:
                    yield f"{architecture.name} {half} {precision} {kind}", architecture, half, precision, kind
            dtype = PRECISIONS[architecture.activations(architecture.native, True)]
            walk = FusedWalk(architecture, config, dtype, replace(DEFAULTS, winograd=True))
            if half in walk.halves and walk.network(half).formed[0]:
                name = f"{architecture.name} {half} {architecture.native} form"
                yield name, architecture, half, architecture.native, "form"


def peaks(architecture: Architecture, half: str, precision: str, kind: str) -> dict[str, int | str]:
    """Return {target in GiB: stated peak in bytes, or "refused"}."""
    config = architecture.published.config
    dtype = PRECISIONS[architecture.activations(precision, True)]
    fused = kind != "plain" and not_fused(architecture.programs(config), dtype) is None
    mode = Mode(precision) if precision == "int8" else Mode()
    options = replace(DEFAULTS, winograd=kind == "form")
    planner = make_planner(
        architecture, config, dtype, options, mode, lambda: fused, lambda: Torch(products=False, reserves=True),
        Rates(), waits=True,
    )  # fmt: skip
    side = architecture.spatial * architecture.side
    height, width = ((n + -n % side) // architecture.spatial for n in (HEIGHT, WIDTH))
    latents = architecture.latents(architecture.filled(1 if architecture.still else FRAMES))
    host, found = Machine.bare(torch.device("cuda"), None).host(64.0), {}
    for target in TARGETS:
        try:
            plan = planner.plan(half, (latents, height, width), Request(), Limits(target * GIB, host=host))
        except PlanError:
            found[str(target)] = "refused"
        else:
            found[str(target)] = plan.peak_bytes
    return found


if __name__ == "__main__":
    lines = [f" {json.dumps(name)}: {json.dumps(peaks(*component))}" for name, *component in components()]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
