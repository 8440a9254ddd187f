"""Plans among other models on a card: what moves, by the whole cost."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from zerowaste_vae.engine import load, log
from zerowaste_vae.engine.errors import PlanError
from zerowaste_vae.engine.extras.residents import link
from zerowaste_vae.engine.extras.residents.keeping import Keeping, crossing, run_seconds
from zerowaste_vae.engine.extras.residents.link import Link
from zerowaste_vae.engine.extras.residents.residents import Card, Resident
from zerowaste_vae.engine.families import by_name
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.planning.budget import Machine
from zerowaste_vae.engine.planning.make import make_planner
from zerowaste_vae.engine.planning.plain_walk import Torch
from zerowaste_vae.engine.planning.planner import DEFAULT
from zerowaste_vae.engine.precision.modes import Mode
from zerowaste_vae.engine.request import Request
from zerowaste_vae.engine.system.memory import GIB

from ....nodes.ledger import GPU, Planner, Way

LINK = Link(pinned=10 * GIB, pageable=5 * GIB, disk=GIB)
EMPTY = Machine(GPU, 16 * GIB, 32 * GIB)
SPARE = EMPTY.spare(True)
WAN = Resident("WAN22", 12 * GIB, 12 * GIB, pinned=1.0)
#: The quickest plan, a leaner one and the leanest one.
WAYS = [Way(8 * GIB, 1.0), Way(5 * GIB, 1.2), Way(3 * GIB, 1.6)]


def chosen(keep, free, model=WAN, planner=None, request=DEFAULT, **card):
    def plan(request, limits):
        return (planner or Planner(WAYS)).plan("decoder", (1, 8, 8), request, limits)

    there = Card(free + SPARE, models=(model,) if model else (), **card)
    return Keeping(plan, 1, 1, request, EMPTY, there).choose(keep, lambda: LINK)


@pytest.mark.parametrize("keep", ["auto", "always", "never"])
def test_without_a_shortage_nothing_moves(keep):
    for model in (WAN, None):
        kept = chosen(keep, 8 * GIB, model)
        assert (kept.plan.peak_bytes, kept.out, kept.note) == (8 * GIB, 0, "")
    assert chosen(keep, 2 * GIB, None).plan.peak_bytes == 8 * GIB  # as ever, where nothing is known of other models


def test_what_is_on_the_card_is_not_asked_for_again():
    assert chosen("never", 6 * GIB, own=2 * GIB).out == 0
    assert chosen("never", 6 * GIB, own=GIB).out == GIB


def test_always_moves_only_what_no_plan_does_without():
    kept = chosen("always", 3 * GIB)
    assert (kept.plan.peak_bytes, kept.out, kept.note) == (3 * GIB, 0, "")
    kept = chosen("always", 2 * GIB)
    assert (kept.plan.peak_bytes, kept.out) == (3 * GIB, GIB)
    assert kept.note == "not all models can stay on the card: exact frames need 1.00 GB of them to leave at least"


def test_never_runs_as_on_an_empty_card():
    kept = chosen("never", 2 * GIB)
    assert (kept.plan.peak_bytes, kept.out) == (8 * GIB, 6 * GIB)
    assert kept.seconds == pytest.approx(0.6)
    small = replace(WAN, loaded=2 * GIB, leaves=2 * GIB)  # another process holds the rest
    assert chosen("never", 3 * GIB, small).plan.peak_bytes == 5 * GIB


#: Cost in seconds of a GiB that comes back -> the plan of least whole cost, with 3 GiB free: 8 GiB move 5, 5 move 2.
@pytest.mark.parametrize(
    ("model", "peak"),
    [
        (WAN, 5),  # 0.1: 1.5, 1.4, 1.6
        (replace(WAN, pinned=0.0, buffered=1.0), 3),  # 0.2: 2.0, 1.6, 1.6
        (replace(WAN, pinned=0.0), 3),  # 1, from disk
        (replace(WAN, copied=True), 3),  # 0.1 + 0.2: 2.5, 1.8, 1.6
        (replace(WAN, again=False), 8),
    ],
)
def test_auto_takes_the_least_whole_cost(model, peak):
    assert chosen("auto", 3 * GIB, model).plan.peak_bytes == peak * GIB


def test_the_order_of_models_is_that_of_their_cost():
    text = Resident("T5", 2 * GIB, 2 * GIB, again=False)
    card = Card(0, models=(text, WAN))
    assert card.seconds(2 * GIB, LINK) == 0 and card.seconds(3 * GIB, LINK) == pytest.approx(0.1)
    assert card.leaves == 14 * GIB


def test_the_cost_of_auto_is_never_above_that_of_the_others():
    for free in range(3, 9):
        for bad in (0.0, 0.5, 1.0):
            model = replace(WAN, pinned=1.0 - bad)
            costs = {}
            for keep in ("auto", "always", "never"):
                kept = chosen(keep, free * GIB, model)
                costs[keep] = run_seconds(kept.plan, 1, LINK) + kept.seconds
            assert costs["auto"] <= min(costs.values()) + 1e-9


def test_the_users_limit_and_tiling_win():
    kept = chosen("never", 2 * GIB, request=Request(vram_gb=4))
    assert (kept.plan.peak_bytes, kept.out) == (3 * GIB, kept.needs - 2 * GIB - SPARE)
    with pytest.raises(PlanError):
        chosen("always", 2 * GIB, request=Request(vram_gb=2))
    # Of blended tiles the frames depend on the target, so they are those of an empty card.
    tiles = Planner([Way(99 * GIB, 1.0)], 6 * GIB)
    for planner, request in ((tiles, Request()), (None, Request(tiling="blended"))):
        kept = chosen("always", 2 * GIB, planner=planner, request=request)
        assert kept.plan.peak_bytes > 5 * GIB and kept.out == kept.plan.peak_bytes - 2 * GIB
        assert kept.note == "not all models can stay on the card: blended tiles are planned as on an empty one"
        assert not chosen("auto", 2 * GIB, planner=planner, request=request).note


def test_an_exact_plan_is_found_before_tiles():
    kept = chosen("auto", GIB, planner=Planner(WAYS, 64 << 20))
    assert not kept.plan.tiled and kept.out >= 2 * GIB


def test_plans_that_are_only_looked_at_log_nothing(caplog, monkeypatch):
    class Loud(Planner):
        def plan(self, half, size, request, limits, rest=(0, 0)):
            log.once(f"{self.asked} plans before")
            return super().plan(half, size, request, limits, rest)

    monkeypatch.setattr(log, "_said", set())
    assert chosen("auto", 3 * GIB, planner=(planner := Loud(WAYS))).out and planner.asked == 3
    assert [record.message.endswith(" 0 plans before") for record in caplog.records] == [True]


def test_what_the_host_asks_for_at_least_counts():
    kept = chosen("always", 3 * GIB, floor=4 * GIB + SPARE)
    assert (kept.plan.peak_bytes, kept.needs, kept.out) == (3 * GIB, 4 * GIB + SPARE, GIB)


# -- real plans --------------------------------------------------------------------------------------------------------


def real(name, fused):
    a = by_name(name)
    config = a.published.config
    return make_planner(a, config, torch.float16, DEFAULTS, Mode(), lambda: fused, lambda: Torch(reserves=True))


@pytest.fixture(scope="module")
def wan():
    return real("wan2.1", True)


def among(planner, latents, free, keep, model=WAN, clips=1, sides=(60, 104)):  # 832x480 for most
    def plan(request, limits):
        return planner.plan("decoder", (latents, *sides), request, limits)

    card = Card(free + SPARE, models=(model,))
    return Keeping(plan, latents, clips, Request(), EMPTY, card).choose(keep, lambda: LINK)


def test_eviction_pays_from_the_crossing_point_on(wan):
    """Clips shorter than it stay beside the model, longer ones move it out; several clips count together."""
    free, file = 2 * GIB, replace(WAN, pinned=0.0)
    lean, quick = (among(wan, 9, free, keep, file) for keep in ("always", "never"))
    assert lean.plan.parking is not None and not lean.out and quick.plan.parking is None and quick.out > GIB // 4
    assert lean.plan.seconds > quick.plan.seconds > 0
    at = crossing(lean.plan, quick.plan, 9, quick.seconds, LINK)
    assert 4 < at < 9
    assert among(wan, math.floor(at), free, "auto", file).out == 0
    assert among(wan, math.ceil(at), free, "auto", file).out == quick.out
    assert among(wan, 3, free, "auto", file, clips=math.ceil(at / 3)).out == quick.out
    assert crossing(quick.plan, quick.plan, 9, 1.0, LINK) == math.inf


def test_weights_layer_by_layer_are_a_leaner_way():
    h3 = real("minimaxh3", False)
    lean, quick = among(h3, 6, 3 * GIB, "always"), among(h3, 6, 3 * GIB, "never")
    assert lean.out == 0 and lean.plan.own.resident < lean.plan.own.layers
    assert quick.out > 2 * GIB and quick.plan.own.resident == quick.plan.own.layers
    assert lean.plan.seconds > quick.plan.seconds > 0


def test_frames_beside_a_model_have_the_same_bits(vae_file, noise):
    vae, z, frames = load(vae_file, device="cpu"), noise(1, 16, 8, 8, 8), []
    machine = replace(EMPTY, half_ram=0)  # nothing is parked: this runs on a CPU

    def plan(request, limits):
        return vae.planner.plan("decoder", (8, 8, 8), request, limits)

    quick, short = (plan(request, machine.limits(DEFAULT)).peak_bytes for request in (DEFAULT, Request(chunk=1)))
    card, told = Card((quick + short) // 2 + SPARE, models=(WAN,)), []
    for keep in ("never", "always"):
        kept = Keeping(plan, 8, 1, DEFAULT, machine, card).choose(keep, lambda: LINK)
        frames.append(vae.decode(z, plan=kept.plan, on_plan=told.append))
        assert told[-1] is kept.plan and bool(kept.out) == (keep == "never")
    assert told[0].steps != told[1].steps and torch.equal(*frames)


def test_times_that_are_not_known_are_not_compared():
    """Of plain torch's shorter chunks: `auto` moves what the quickest plan lacks. Passes, whose copies are known, do
    compare."""
    plain, passes = real("wan2.1", False), real("ltx-diffusion", False)
    ends = {keep: among(plain, 9, 4 * GIB, keep) for keep in ("always", "never", "auto")}
    assert ends["always"].out < ends["auto"].out == ends["never"].out
    file = replace(WAN, pinned=0.0)
    ends = {keep: among(passes, 9, 6 * GIB, keep, file, sides=(22, 40)) for keep in ("always", "never", "auto")}
    assert ends["always"].plan.steps.passes > 1 and ends["always"].out == ends["auto"].out < ends["never"].out


def test_plans_with_copies_take_as_long_as_their_link():
    plan = Planner(WAYS).plan("decoder", (), Request(), EMPTY.limits(Request()))
    assert run_seconds(plan, 1, LINK) == 1.0
    assert run_seconds(replace(plan, far_bytes=2 * GIB), 10, LINK) == pytest.approx(2.0)
    passes = replace(plan, steps=replace(plan.steps, passes=3), host_bytes=10 * GIB)
    assert run_seconds(passes, 10, LINK) == pytest.approx(2.0)


def test_no_link_is_measured_without_a_gpu():
    assert link.measured(torch.device("cpu")) == Link()


def test_a_link_is_not_judged_for_good_while_memory_is_short(monkeypatch):
    """The first call finds no memory; the next one measures, and later ones know."""
    speeds, empty = iter([torch.OutOfMemoryError("CUDA out of memory"), 2e10, 3e10]), torch.empty

    def speed(*_):
        if isinstance(found := next(speeds), Exception):
            raise found
        return found

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **how: empty(*size, device="cpu", **how))
    monkeypatch.setattr(link, "COPIED", 1)
    monkeypatch.setattr(link, "staging", lambda shape, dtype: empty(shape, dtype=dtype, device="cpu"))
    monkeypatch.setattr(link, "_speed", speed)
    link._measured.cache_clear()
    device = torch.device("cuda", 0)
    try:
        assert link.measured(device) == Link()
        assert link.measured(device) == link.measured(device) == Link(3e10, 2e10)
    finally:
        link._measured.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_the_link_is_measured_once():
    device = torch.device("cuda", 0)
    found = link.measured(device)
    assert found is link.measured(device)
    assert 1e9 < found.pageable <= 1.2 * found.pinned < 1e12 and found.disk == Link.disk
