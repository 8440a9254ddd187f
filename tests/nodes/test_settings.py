"""Whose wish counts, Decode or Encode before Optimize before Loader, and what ComfyUI's start options order."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from zerowaste_vae import demo_vae_path, load
from zerowaste_vae.engine import InputError
from zerowaste_vae.engine.options import DEFAULTS, TOGGLES, Place
from zerowaste_vae.engine.planning import make
from zerowaste_vae.engine.planning.budget import Machine
from zerowaste_vae.engine.precision.modes import resolve
from zerowaste_vae.engine.request import Request
from zerowaste_vae.engine.system.memory import GIB
from zerowaste_vae.engine.system.orders import ORDERS, Orders
from zerowaste_vae.nodes.settings import Settings, from_widgets, obey, orders_of

OPTIMIZE = Settings(tiling="blended", tile=320, overlap=32, chunk=2, vram_gb=8)


def test_nothing_said_takes_the_node_before():
    assert Settings().over(OPTIMIZE) == OPTIMIZE


def test_each_wish_wins_on_its_own():
    assert Settings(vram_gb=4).over(OPTIMIZE) == Settings("blended", 320, 32, 2, 4)
    assert Settings(chunk=1).over(OPTIMIZE) == Settings("blended", 320, 32, 1, 8)
    assert Settings(tile=256).over(OPTIMIZE) == Settings("blended", 256, 32, 2, 8)


def test_a_tile_belongs_to_its_tiling():
    assert Settings("exact").over(OPTIMIZE) == Settings("exact", 0, None, 2, 8)
    assert Settings("blended", overlap=0).over(OPTIMIZE) == Settings("blended", 320, 0, 2, 8)


def test_three_nodes():
    loader, optimize, decode = Settings(vram_gb=12), Settings(chunk=2), Settings("untiled")
    assert decode.over(optimize.over(loader)) == Settings("untiled", chunk=2, vram_gb=12)


@pytest.mark.parametrize(
    ("widgets", "settings"),
    [
        ({}, Settings()),
        ({"tiling": {"tiling": "auto"}}, Settings()),
        ({"tiling": {"tiling": "exact", "tile": 128}}, Settings("exact", 128)),
        ({"tiling": {"tiling": "blended", "tile": 512, "overlap": 0}}, Settings("blended", 512, 0)),
        ({"tiling": "blended", "tile": 512, "overlap": 16}, Settings("blended", 512, 16)),
        ({"tiling": "auto", "tile": 0, "overlap": 64}, Settings()),
    ],
)
def test_widgets_nested_and_flat(widgets, settings):
    assert from_widgets(**widgets) == settings


@pytest.mark.parametrize("widgets", [{"tiling": "every"}, {"output": "uint8"}, {"output": "int4"}])
def test_what_a_link_brings_is_known_or_refused(widgets):
    with pytest.raises(InputError, match=r"=.* is not known: use one of auto, "):
        from_widgets(**widgets)


def test_the_engine_gets_the_default_overlap():
    asked = {"tiling": "blended", "tile": 0, "overlap": 64, "chunk": 0, "vram_gb": None, "ram_gb": None}
    assert Settings("blended").options() == asked
    assert Settings("blended", overlap=0).options()["overlap"] == 0


@pytest.mark.parametrize(("tile", "shared"), [(0, 64), (512, 64), (72, 64), (64, 32), (48, 24)])
def test_the_widgets_own_overlap_suits_every_tile(tile, shared):
    """Its value cannot be told from a user's, and is no wish."""
    wishes = from_widgets(tiling={"tiling": "blended", "tile": tile, "overlap": 64})
    asked = wishes.over(from_widgets()).options()
    assert asked["overlap"] == shared
    Request(**asked).check(8)


def test_gpus_are_the_last_nodes_word_on_them():
    base = from_widgets(gpus="all")
    assert base == Settings(gpus="all") and "GPUs all" in base.describe()
    assert from_widgets(gpus=" auto ").over(base).gpus == "all"
    assert from_widgets(gpus="cuda:0,cuda:1").over(base).gpus == "cuda:0,cuda:1"
    assert "gpus" not in base.options()  # devices are no part of a Request


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
        ({"disable_smart_memory": True}, {}, "--disable-smart-memory: ComfyUI unloads every model for a run"),
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


def test_start_option_for_the_type():
    """A type among the start options is what auto means; a named precision takes precedence."""
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


def test_report_says_why_no_half_sums():
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
