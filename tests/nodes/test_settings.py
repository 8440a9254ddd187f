"""Whose wish counts: Decode or Encode before Optimize before Loader before the default."""

from __future__ import annotations

import pytest
from zerowaste_vae.engine import InputError
from zerowaste_vae.engine.request import Request
from zerowaste_vae.nodes.settings import Settings, from_widgets

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
