"""The limit that torch keeps while plain torch runs, with a fake card of 1000 bytes."""

from dataclasses import replace

import pytest
import torch
from zerowaste_vae import load
from zerowaste_vae.engine.execution import call
from zerowaste_vae.engine.runtime import allowance
from zerowaste_vae.engine.runtime.allowance import Allowance, find_workspace, reuses_blocks
from zerowaste_vae.engine.system.devices import Counters

CARD = torch.device("cuda", 0)


class Card:
    """torch's counters and limit of one device."""

    def __init__(self):
        self.reserved, self.allocated, self.fraction, self.emptied, self.failures = 300, 250, 1.0, 0, 0

    def empty(self):
        self.emptied += 1

    def limit(self, fraction, device):
        assert device == CARD and 0 < fraction <= 1
        self.fraction = fraction


@pytest.fixture
def card(monkeypatch):
    fake = Card()
    for name, value in {
        "mem_get_info": lambda device: (0, 1000), "set_per_process_memory_fraction": fake.limit,
        "get_per_process_memory_fraction": lambda device: fake.fraction,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value, raising=False)
    monkeypatch.setattr(allowance, "counters", lambda _: Counters(fake.allocated, fake.reserved, 0, 0, fake.failures))
    monkeypatch.setattr(allowance, "empty_device_cache", fake.empty)
    monkeypatch.setattr(allowance, "_LIMITS", type(allowance._LIMITS)(allowance._Limit))
    monkeypatch.setattr(allowance, "_LEFT", {})
    return fake


def test_limit_in_steps(card):
    """The limit holds in steps and ends with them."""
    with Allowance(CARD, 400, held=100) as run:
        assert card.fraction == 1 and card.emptied == 1
        for _ in range(2):
            with run.step():
                assert card.fraction == pytest.approx(0.6)  # 200 are others'
            assert card.fraction == 1
    assert card.emptied == 1


def test_limit_ends(card):
    """The limit ends with errors and cancelled runs."""
    with pytest.raises(torch.OutOfMemoryError), Allowance(CARD, 400) as run, run.step():
        raise torch.OutOfMemoryError
    assert card.fraction == 1

    def steps():
        with Allowance(CARD, 400) as run:
            for _ in range(2):
                with run.step():
                    yield

    left = steps()
    next(left)
    assert card.fraction == pytest.approx(0.7)
    left.close()
    assert card.fraction == 1


def test_a_run_like_the_last_one(card, monkeypatch):
    """It begins with the blocks that this left, and with its limit, if nothing has taken or freed memory since."""

    def empty():
        card.emptied, card.reserved = card.emptied + 1, 300

    def reuses(again):
        with Allowance(CARD, 400, held=100, again=again) as run:
            with run.step():
                assert card.fraction == pytest.approx(0.6)  # 200 are others'
                found, card.reserved = reuses_blocks(), 650
            assert not reuses_blocks()
        return found

    monkeypatch.setattr(allowance, "empty_device_cache", empty)
    assert not reuses("a") and card.emptied == 1
    assert reuses("a") and reuses("a") and card.emptied == 1
    assert not reuses("b") and reuses("b") and card.emptied == 2
    card.reserved -= 10  # something has freed blocks
    assert not reuses("b") and card.emptied == 3
    card.allocated += 10  # something has taken some
    assert not reuses("b") and card.emptied == 4
    assert not reuses(None) and not reuses(None) and card.emptied == 6


def test_memory_of_the_caller(card):
    """Memory that the caller takes between steps comes on top."""
    with Allowance(CARD, 400) as run:
        card.allocated = 350  # before the first step: weights that the run has moved to the device
        with run.step():
            card.allocated += 200
        card.allocated += 50
        with run.step():
            assert card.fraction == pytest.approx(0.75)
        card.allocated = 0
        with run.step():
            assert card.fraction == pytest.approx(0.75)


def test_a_lower_limit_of_the_host_stays(card):
    card.fraction = 0.5
    with Allowance(CARD, 400) as run, run.step():
        assert card.fraction == 0.5
    assert card.fraction == 0.5
    with Allowance(CARD, 100) as run:
        with run.step():
            assert card.fraction == pytest.approx(0.4)
        assert card.fraction == 0.5


@pytest.mark.parametrize("told", [None, 122_888_273.8])
def test_unknown_limit(card, monkeypatch, told):
    """torch before 2.8, and what cudaMallocAsync says."""
    if told is None:
        monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    else:
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: told)
    with Allowance(CARD, 400) as run, run.step():
        assert card.fraction == pytest.approx(0.7)
    assert card.fraction == 1


def test_more_than_the_card_has_is_no_limit(card):
    with Allowance(CARD, 4000) as run, run.step():
        assert card.fraction == 1


@pytest.mark.parametrize("limits", [True, False])
def test_two_runs(card, limits):
    """There is no limit while another run has begun."""
    with Allowance(CARD, 300) as one, one.step():
        assert card.fraction == pytest.approx(0.6)
        with Allowance(CARD, 100, limits=limits) as other:
            assert card.fraction == 1
            with other.step():
                assert card.fraction == 1
        assert card.fraction == pytest.approx(0.6)
    assert card.fraction == 1


def test_workspace(card, monkeypatch):
    """Convolutions find their workspace in steps only."""
    taken = []
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: taken.append(size))
    big = allowance.SMALL + 1
    find_workspace(CARD, 10, big)
    with Allowance(CARD, 300) as run:
        find_workspace(CARD, 10, big)
        with run.step():
            find_workspace(CARD, 10, 100)
            assert not taken
            find_workspace(CARD, 10, big)
    find_workspace(CARD, 10, big)
    assert taken == [10, big]


def test_fused_runs_alone_have_no_limit(card):
    with Allowance(CARD, 400, limits=False) as run, run.step():
        assert card.fraction == 1 and not card.emptied


def test_a_cpu_has_no_limit(card):
    with Allowance(torch.device("cpu"), 400) as run, run.step():
        assert card.fraction == 1 and not card.emptied


def test_slower_algorithms(card, monkeypatch):
    """Slower algorithms for want of memory are said."""
    said = []
    monkeypatch.setattr(allowance.log, "once", said.append)
    for failures in (0, 3):
        with Allowance(CARD, 400) as run, run.step():
            card.failures += failures
    assert len(said) == 1 and "raise vram_gb" in said[0]


def test_no_memory(make_vae_file, monkeypatch):
    """If the target has room, the same plan runs, restated. Then, and for fused plans, a leaner one."""
    vae = load(make_vae_file(), device="cpu")
    monkeypatch.setattr(call, "enforced", lambda device: True)
    request = call.Request(vram_gb=1.0)
    plan = vae.planner.plan("decoder", (2, 8, 8), request)
    tight = call.replace(plan, peak_bytes=(1 << 30) - 1)

    less = vae.planner.plan("decoder", (2, 8, 8), replace(request, chunk=1))

    def leaner(vae, below):
        return less

    more = call._leaner(vae, "decoder", request, leaner, [], plan)
    assert call.replace(more, peak_bytes=plan.peak_bytes) == plan
    assert more.peak_bytes == plan.peak_bytes + plan.peak_bytes // call.MORE
    assert call._leaner(vae, "decoder", request, leaner, [], tight) is less
    assert call._leaner(vae, "decoder", request, leaner, [], call.replace(plan, fused=True)) is less
