"""GB in README and docs/memory.md are what the planner states today."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from zerowaste_vae.engine.families import by_words
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.planning.budget import Limits
from zerowaste_vae.engine.planning.make import make_planner
from zerowaste_vae.engine.planning.plain_walk import Torch
from zerowaste_vae.engine.precision.modes import PRECISIONS, Mode
from zerowaste_vae.engine.request import Request

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")
MEMORY = (ROOT / "docs" / "memory.md").read_text("utf-8")
GIB = 1 << 30
#: A row of README's table: family, size, limit, GB.
ROW = re.compile(r"^\| ([\w .-]+), \w+, (\d+)x(\d+) \| (none|\d+ GB) \| [\d.]+ \| [^|]+ \| ([\d.]+) \|", re.M)
#: Frames that its rows were measured with, as docs/benchmarks.md has them.
FRAMES = {"SeedVR2": 21, "Flux": 1, "HunyuanVideo 1.0": 33, "HunyuanVideo 1.5": 33, "LTX-2.3": 121, "MiniMax H3": 90}


def stated(name, width, height, frames, gb, waits=True):
    """(GB of the plan of an exact decode, of host memory) under a limit in GB; waits: weights lie in host memory."""
    family = by_words(name)
    planner = make_planner(
        family, family.published.config, PRECISIONS[family.activations(family.native, True)],
        replace(DEFAULTS, winograd=False), Mode(), lambda: True, lambda: Torch(products=False, reserves=True),
        waits=waits,
    )  # fmt: skip
    shape = (family.latents(family.filled(frames)), height // family.spatial, width // family.spatial)
    plan = planner.plan("decoder", shape, Request(), Limits(int(gb * GIB), host=64 * GIB))
    assert not plan.tiled
    return plan.peak_bytes / GIB, plan.host_bytes / GIB


def test_rows_of_the_table(load_tool):
    """Every fourth row, as the tool writes it."""
    tool = load_tool("memory_table")
    labels = tool.labels(MEMORY)
    assert len(labels) > 25
    for label in labels[::4]:
        assert tool.row(label) in MEMORY


def test_a_row_of_families_that_differ_is_refused(load_tool):
    with pytest.raises(ValueError, match="Mage"):
        load_tool("memory_table").row("Mage-VAE, Flux, 1024x1024")


def test_measured_gb_of_the_readme_are_those_of_plans():
    """Within 5 %: what was reserved, with the weights on the GPU."""
    rows = ROW.findall(README)
    assert {row[0] for row in rows} == set(FRAMES)
    for name, width, height, limit, gb in rows:
        target = 80 if limit == "none" else int(limit.split()[0])
        known = {"HunyuanVideo 1.0": "HunyuanVideo", "LTX-2.3": "LTX"}.get(name, name)
        peak, _ = stated(known, int(width), int(height), FRAMES[name], target, waits=False)
        assert peak == pytest.approx(float(gb), rel=0.05), name


def test_what_fits_by_the_readme():
    found = re.search(r"decodes 720p in (\d+) GB, and 2160p in (\d+) GB with (\d+) GB of RAM", README)
    small, large, host = map(int, found.groups())
    assert stated("SeedVR2", 1280, 720, 81, small)[0] <= small
    assert stated("SeedVR2", 3840, 2160, 81, large)[1] == pytest.approx(host, abs=0.6)


def test_gb_of_recomputed_pictures():
    said = r"Under (\d+) GB the plan for that decode in bf16 states ([\d.]+) GB, without a limit ([\d.]+) "
    target, under, none = re.search(said, " ".join(MEMORY.split())).groups()
    for limit, gb in ((int(target), under), (80, none)):
        assert f"{stated('Flux', 4096, 4096, 1, limit)[0]:.1f}" == gb
