"""ComfyUI's start options: what each orders, and that whatever a run asks for by itself goes before it."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from zerowaste_vae import demo_vae_path, load
from zerowaste_vae.engine.memory import GIB
from zerowaste_vae.engine.options import DEFAULTS, TOGGLES, Place
from zerowaste_vae.engine.orders import ORDERS, Orders
from zerowaste_vae.engine.planning import make
from zerowaste_vae.engine.planning.budget import Machine
from zerowaste_vae.engine.precision.modes import resolve
from zerowaste_vae.nodes.flags import obey, orders_of

CUDA = torch.device("cuda", 0)


class Feature:
    """As the host's own, whose value is the name."""

    def __init__(self, value: str) -> None:
        self.value = value


@pytest.fixture(autouse=True)
def afterwards(monkeypatch):
    for name, value in vars(Orders()).items():
        monkeypatch.setattr(ORDERS, name, value)


def test_without_options_nothing_is_ordered_or_said():
    """Nor by hosts that have none of them, or have them switched off."""
    assert orders_of(Namespace()) == (Orders(), [])
    off = {"fp16_vae": False, "fast": set(), "disable_async_offload": False, "reserve_vram": None, "novram": False}
    assert orders_of(Namespace(**off)) == (Orders(), [])


@pytest.mark.parametrize(
    ("given", "order", "words"),
    [
        ({"fp16_vae": True}, {"precision": "fp16"}, "--fp16-vae: precision auto is fp16"),
        ({"bf16_vae": True}, {"precision": "bf16"}, "--bf16-vae: precision auto is bf16"),
        ({"fp32_vae": True}, {"precision": "fp32"}, "--fp32-vae: precision auto is fp32"),
        ({"fast": {Feature("fp16_accumulation"), Feature("autotune")}}, {"half_sums": True}, "is fp16_fast where"),
        ({"fast": {Feature("autotune")}}, {}, None),
        ({"disable_async_offload": True}, {"no_overlap": "--disable-async-offload"}, "copies wait for the GPU"),
        ({"reserve_vram": 1.5}, {"reserved": 3 * GIB // 2}, "leave 1.5 GB of the card free"),
        ({"lowvram": True}, {}, "--lowvram: this pack's VAEs are on the GPU whole"),
        ({"novram": True}, {}, "--novram: this pack's VAEs are on the GPU whole"),
        ({"cache_none": True}, {}, "--cache-none: VAEs are loaded"),
    ],
)
def test_each_option_is_obeyed_or_its_reason_said(given, order, words):
    found, lines = orders_of(Namespace(**given))
    assert found == Orders(**order)
    assert len(lines) == (words is not None)
    assert words is None or words in lines[0]
    obey(Namespace(**given))
    assert found == ORDERS
    obey(Namespace())
    assert Orders() == ORDERS


def test_a_type_is_what_auto_means_and_a_named_one_goes_before_it():
    ORDERS.precision = "bf16"
    assert load(demo_vae_path(), device="cpu").precision == "bf16"
    assert load(demo_vae_path(), "fp32", "cpu").precision == "fp32"


@pytest.mark.parametrize(
    ("asked", "options", "dtype", "half_sums"),
    [
        ("auto", DEFAULTS, torch.float16, True),
        ("fp16", DEFAULTS, torch.float16, False),
        ("int8", DEFAULTS, torch.float16, False),
        ("auto", DEFAULTS.switched(on=["fp8"]), torch.float16, False),
    ],
)
def test_half_sums_are_for_auto_alone(monkeypatch, asked, options, dtype, half_sums):
    """On a card that is faster with them (sm_120); 8 bit that was switched on goes before them, as does a type."""
    seen = []
    monkeypatch.setattr(make, "resolve", lambda name, *rest: seen.append(name) or resolve("fp16", *rest))
    ORDERS.half_sums = True
    make.mode_of(asked, "fp16", dtype, CUDA, options, None)
    assert (seen == ["fp16_fast"]) == half_sums
    ORDERS.half_sums = False
    make.mode_of(asked, "fp16", dtype, CUDA, options, None)
    assert seen[1] != "fp16_fast"


def test_a_floor_goes_before_half_sums(monkeypatch):
    seen = []
    monkeypatch.setattr(make, "resolve", lambda name, *rest: seen.append(name) or resolve("fp16", *rest))
    ORDERS.half_sums = True
    make.mode_of("auto", "fp16", torch.float16, CUDA, DEFAULTS.__class__(min_db=45), None)
    assert seen == ["auto"]


def test_where_half_sums_are_not_to_be_had_the_report_says_why():
    """A CPU is no faster with them, and the VAE runs as it does by default."""
    ORDERS.half_sums = True
    vae = load(demo_vae_path(), device="cpu")
    assert vae.precision == "fp32"
    assert vae.unused()["fp16_fast"] == "fp16_fast is for models made for fp16: fp32 runs instead"
    ORDERS.half_sums = False
    assert "fp16_fast" not in load(demo_vae_path(), device="cpu").unused()


def test_copies_do_not_overlap_and_the_switch_says_why():
    assert DEFAULTS.overlap and not DEFAULTS.switched(off=["async_offload"]).overlap
    ORDERS.no_overlap = "--disable-async-offload"
    assert not DEFAULTS.overlap
    assert TOGGLES["async_offload"].here(Place(CUDA, torch.float16, None)) == "--disable-async-offload"
    vae = load(demo_vae_path(), device="cpu")
    assert vae.unused(fused=True)["async_offload"] == "--disable-async-offload"


def test_what_is_reserved_stays_free():
    card = Machine(CUDA, 16 * GIB, None, others=GIB)
    target, room = card.target(None, None)[0], card.room(None)
    ORDERS.reserved = 4 * GIB
    # The default target leaves 3 GB by itself; here others hold 1 of them.
    assert room - card.room(None) == 4 * GIB
    assert card.target(None, None)[0] == card.room(None) < target
    assert card.target(100, None)[0] == card.room(None)
    assert card.target(2, None)[0] == 2 * GIB
