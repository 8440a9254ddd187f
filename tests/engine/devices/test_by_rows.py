"""Rows of every frame on each rank: when that is chosen."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from zerowaste_vae import Cancelled
from zerowaste_vae.engine.archs import seedvr2, wan
from zerowaste_vae.engine.devices import by_rows, several
from zerowaste_vae.engine.devices.chunks import LATENTS_OF_ROWS
from zerowaste_vae.engine.devices.ranks import Ranks
from zerowaste_vae.engine.devices.spread import Told
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.planning.budget import Limits
from zerowaste_vae.engine.planning.fused_walk import FusedWalk
from zerowaste_vae.engine.planning.planner import Planner
from zerowaste_vae.engine.request import Request
from zerowaste_vae.engine.run.rows import Planned


@pytest.mark.parametrize("fused", [True])
def test_why_rows_are_not_shared(small, vae):
    def why(of=small, half="decoder", height=90, **options):
        return by_rows.why_not(of, half, Request(**options), height, 2)

    assert why() is None
    assert why(half="encoder", height=1080) is None
    assert "360 rows are too few for 4 parts" in by_rows.why_not(small, "encoder", Request(), 360, 4)
    assert "tiling 'blended'" in why(tiling="blended")
    assert "4 rows are too few" in why(height=4)
    assert "composed_upsample" in why(small.with_options(small.options.switched(off=["composed_upsample"])))
    assert "fused kernels" in why(small.with_options(small.options.switched(off=["triton_fusion"])))


@pytest.mark.parametrize("fused", [True])
def test_rows_that_do_not_fit_are_not_chosen(small):
    size, whole = (3, 70, 4), small.plan_decode(3, 70, 4).peak_bytes
    target = whole / 2**30
    assert by_rows.fits(small, "decoder", size, Request(vram_gb=target), 2, print)
    assert not by_rows.fits(small, "decoder", size, Request(vram_gb=0.5 * target), 2, print)
    assert small.plan_decode(3, 70, 4).peak_bytes == whole


@pytest.mark.parametrize("fused", [True])
def test_a_plan_for_rows_stops_when_it_is_told_to(small, monkeypatch):
    """What is planned next is for whole frames."""
    size, whole = (3, 70, 4), small.plan_decode(3, 70, 4)
    monkeypatch.setattr(by_rows, "sooner", lambda *_: True)
    asked = small, Ranks(0, 2, 0, 2, "auto"), "decoder", 70, 1, range(9), size, Request()
    assert several._by_rows(*asked, Told(cancel=lambda: False).check)
    with pytest.raises(Cancelled):
        several._by_rows(*asked, Told(cancel=lambda: True).check)
    assert small.plan_decode(3, 70, 4) == whole


@pytest.mark.parametrize("fused", [True])
def test_chunks_are_long_where_they_fit(small):
    """What sees whole frames is launched less often then."""
    planner, peers = small.planner, SimpleNamespace(agreed=lambda limits, plan: plan(limits))

    def plan(target=None, **asked):
        return by_rows._Agreed(planner, peers).plan("decoder", (6, 90, 160), Request(**asked), Limits(target, host=0))

    short = plan(chunk=1)
    assert plan().steps.latents == LATENTS_OF_ROWS > 1 == short.steps.latents
    assert plan(short.peak_bytes) == short


def test_steps_are_longer_where_the_host_launches_for_longer():
    """Where there is room for them; one device's plans are as they were."""
    planner = Planner(FusedWalk(wan.WAN21, wan.WAN21.published.config, torch.bfloat16, DEFAULTS), lambda: True)

    def plan(target=None):
        return planner.plan("decoder", (6, 90, 160), Request(tiling="untiled", chunk=4), Limits(target, host=0))

    one = plan()
    planner.walk.share(Planned(0, 2))
    rows = plan()
    assert (one.steps.frames, rows.steps.frames) == (1, wan.LONGER_BY_ROWS) == (1, 2)
    assert plan(rows.peak_bytes - 1).steps.frames == 1 and rows.peak_bytes < one.peak_bytes
    planner.walk.share(None)
    assert plan() == one


@pytest.mark.parametrize("half", ["decoder", "encoder"])
def test_rows_take_less_time_for_short_clips_and_more_for_long_ones(half):
    program = getattr(seedvr2, half)(seedvr2.PUBLISHED.config)
    size = (90, 160) if half == "decoder" else (1080, 1920)
    assert 0.5 < by_rows.duration(program, *size, 2) < by_rows.duration(program, *size, 2, eight_bit=True) < 0.85
    assert by_rows.sooner(program, *size, 2, 6)
    assert not by_rows.sooner(program, *size, 2, 150)
    assert by_rows.sooner(program, *size, 2, 150, (140, 146))  # of a long clip a few


@pytest.mark.parametrize(("count", "eight_bit", "measured"), [(2, False, 1.683), (2, True, 1.459), (4, False, 1.686),
                                                              (4, True, 0.969)])  # fmt: skip
def test_hosts_do_not_launch_faster_for_more_ranks(count, eight_bit, measured):
    """SeedVR2 at 1280x720 on H200s; of four, 21 and 81 frames. Segments of 81 frames made four 1.97 times as fast."""
    program = seedvr2.decoder(seedvr2.PUBLISHED.config)
    assert 1 / by_rows.duration(program, 90, 160, count, eight_bit) == pytest.approx(measured, rel=0.1)
    assert by_rows.sooner(program, 90, 160, count, 21, eight_bit=eight_bit) == (count == 2 and not eight_bit)


@pytest.mark.parametrize("fused", [True])
@pytest.mark.parametrize("asked, sooner, by", [("segments", True, False), ("rows", False, True), ("auto", True, True),
                                              ("auto", False, False), (None, True, True)])  # fmt: skip
def test_auto_takes_what_is_computed_to_be_done_sooner(small, monkeypatch, asked, sooner, by):
    """Also where nobody says anything, but not for ranks on several machines."""
    ranks = Ranks(0, 2, 0, 2, asked) if asked else Ranks(0, 2, 0, 2)
    monkeypatch.setattr(by_rows, "sooner", lambda *_: sooner)
    size = (6, 90, 4)
    about = "decoder", 90, 1, range(21), size, Request(), Told().check
    assert several._by_rows(small, ranks, *about) == by
    assert several._by_rows(small, replace(ranks, neighbours=1), *about) == (asked == "rows")
