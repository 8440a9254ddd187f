"""Find the memory target."""

import sys

import pytest
import torch
from zerowaste_vae.engine.planning import budget
from zerowaste_vae.engine.request import Request
from zerowaste_vae.engine.system.devices import Counters
from zerowaste_vae.engine.system.memory import GIB

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_cpu_target(monkeypatch):
    monkeypatch.setattr(budget, "available_ram", lambda: 8 * GIB)
    assert budget.Machine.now(CPU, GIB).target(None, None)[0] == 5 * GIB
    assert budget.Machine.now(CPU, GIB).target(0, 0)[0] == 5 * GIB
    assert budget.Machine.now(CPU, 0).target(None, 3)[0] == 3 * GIB
    assert budget.Machine.now(CPU, 0).target(2, 3)[0] == 2 * GIB
    assert budget.Machine.now(CPU, 0, GIB).target(2, 3)[0] == GIB
    for asked, option in (((None, None), "ram_gb"), ((0, 3), "ram_gb"), ((2, 3), "vram_gb")):
        assert budget.Machine.now(CPU).limits(Request(vram_gb=asked[0], ram_gb=asked[1])).option == option
    monkeypatch.setattr(budget, "available_ram", lambda: None)
    assert budget.Machine.now(CPU, 0).target(None, None)[0] is None


@pytest.mark.parametrize(
    ("free", "reserved", "allocated", "asked", "expected"),
    [
        (16, 0, 0, None, 13.0),  # an empty 16 GB card
        (16, 0, 0, 8, 8.0),
        (10, 0, 0, None, 9.5),  # another process holds 6 GB, and a margin stays free
        (12, 4, 3, None, 11.0),  # 3 GB are ours, 1 GB of it this VAE's weights
        (16, 0, 0, 40, 15.5),  # no more than the card less the margin
        (1, 14, 14, 2, 0.0),  # nothing left: never less than nothing
    ],
)
def test_cuda_target(monkeypatch, free, reserved, allocated, asked, expected):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda d: (free * GIB, 16 * GIB))
    monkeypatch.setattr(budget, "counters", lambda d: Counters(allocated * GIB, reserved * GIB, 0, 0, 0))
    held = min(allocated, 1) * GIB
    limits = budget.Machine.now(GPU, held).limits(Request(vram_gb=asked, ram_gb=3))
    room = limits.room
    assert (limits.target, limits.host, limits.option) == (expected * GIB, 3 * GIB, "vram_gb")
    assert limits.beside == (allocated * GIB - held)
    if asked:
        assert room is None  # the user's word is not raised
    else:
        assert room == {16: 15.5, 10: 9.5, 12: 13.5}[free] * GIB


@pytest.mark.parametrize(("card", "kept"), [(16, 700), (15.5, 700), (15, 600), (12, 600), (4, 600)])
def test_windows_keeps_more_free(monkeypatch, card, kept):
    """As much as ComfyUI keeps there, where the user names no target: the default and what `auto` raises it to."""
    here, free = budget.Machine(GPU, int(card * GIB), None), int(card * GIB) - (kept << 20)
    usual, named = here.room(None), here.target(40, None)
    monkeypatch.setattr(sys, "platform", "win32")
    assert here.room(None) == free < usual
    assert here.target(None, None) == (min(free, int(0.8125 * card * GIB)), "card")
    assert here.target(40, None) == named == (usual, "vram_gb")
    busy = budget.Machine(GPU, int(card * GIB), None, others=GIB)
    assert busy.room(None) == free - GIB and busy.target(None, None)[0] == min(free - GIB, int(0.8125 * card * GIB))


def test_plan_before_a_run():
    """The panel's figures, for which no GPU is asked."""
    card = budget.Machine(GPU, 16 * GIB, 10 * GIB)
    assert card.target(None, None) == (13 * GIB, "card")
    assert card.target(8, 2) == (8 * GIB, "vram_gb")
    assert card.target(40, None) == (15.5 * GIB, "vram_gb")  # no more than the card has
    assert (card.room(None), card.room(8)) == (15.5 * GIB, None)
    assert (card.host(None), card.host(3)) == (10 * GIB, 3 * GIB)
    ram = budget.Machine(CPU, None, 4 * GIB)
    assert ram.target(0, 2) == (2 * GIB, "ram_gb")
    assert ram.target(0, 0) == (4 * GIB, "half_ram")
    assert (ram.room(None), ram.host(2)) == (None, 0)
