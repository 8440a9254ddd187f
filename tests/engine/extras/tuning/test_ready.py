"""Tuning without Triton: schedules that a prebuilt set has are tried, and nothing is compiled."""

import pytest
import torch
from zerowaste_vae.engine.extras.tuning import ready
from zerowaste_vae.engine.extras.tuning.candidates import candidates
from zerowaste_vae.engine.extras.tuning.layers import layers
from zerowaste_vae.engine.extras.tuning.ready import Ready
from zerowaste_vae.engine.families import DEFAULT
from zerowaste_vae.engine.kernels.targets import prebuilt
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.planning.fused_walk import FusedWalk


@pytest.mark.parametrize("form", ["A", "C"])
def test_lacking_schedule(form, monkeypatch):
    """A schedule that the set lacks is not tried, and says so."""
    here = prebuilt("a GPU", 90, form)
    layer = layers(FusedWalk(DEFAULT, DEFAULT.published.config, torch.float16, DEFAULTS), here)[0]
    schedules = candidates(here, layer.kind)
    assert len(schedules) > 2
    lacking = dict(BM=schedules[1].positions, BN=schedules[1].columns, BK=schedules[1].depth,
                   num_warps=schedules[1].warps, STAGES=schedules[1].stages)  # fmt: skip

    class Library:
        def has(self, asked, wanted):
            return asked == form and not lacking.items() <= dict(wanted.constants).items()

    monkeypatch.setattr(ready, "library", Library)
    compiler = Ready(here)
    compiler.start([(layer, schedules)])
    found = compiler.wait(layer, 0.0)
    compiler.end()
    assert found[0] is None and found[1] == f"set {form} of the prebuilt kernels has no such schedule"
    assert sum(why is not None for why in found) == 1
