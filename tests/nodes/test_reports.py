"""Messages in the words of the nodes, and what is said where a package is missing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from zerowaste_vae.engine import InputError, PlanError
from zerowaste_vae.engine.families import ARCHITECTURES
from zerowaste_vae.engine.planning.fusable import half_not_fused
from zerowaste_vae.engine.precision.modes import PRECISIONS
from zerowaste_vae.nodes.reports import counted, fitting, labelled
from zerowaste_vae.nodes.settings import from_widgets

ROOT = Path(__file__).resolve().parents[2]


def test_options_are_named_by_their_labels():
    said = labelled("needs 3 GB and the target is 1 GB: use a smaller tile, tile=0 for automatic, or raise vram_gb")
    assert said.endswith("use a smaller Tile size (tile), tile=0 for automatic, or raise VRAM limit (vram_gb)")
    assert labelled("ram_gb, vram_gb_like and titles") == "RAM limit (ram_gb), vram_gb_like and titles"


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_reasons_of_families_in_chinese(architecture):
    """The panel says so beside the plan."""
    known = json.loads((ROOT / "locales" / "zh" / "main.json").read_text("utf-8"))["zerowaste"]["said"]
    programs, dtype = architecture.programs(architecture.published.config), PRECISIONS[architecture.native]
    reasons = {reason for program in programs if (reason := half_not_fused(program, dtype))}
    assert {re.sub(r"\d+", "#", reason) for reason in reasons} <= known.keys()


def test_counts():
    text = "1 latents per chunk, 1 frames of 64x1 frames, 21 frames, 1.1 frames, 0 clips"
    assert counted(text) == "1 latent per chunk, 1 frame of 64x1 frames, 21 frames, 1.1 frames, 0 clips"


def test_what_does_not_fit_says_so_first():
    first = r"^This encode does not fit into its memory limit\. raise VRAM limit"
    with pytest.raises(PlanError, match=first), fitting("encode"):
        raise PlanError("raise vram_gb")


def test_devices_are_named_by_their_widget():
    """Whatever else a refusal says stays, and so do other errors."""
    for said, shown in (("devices: cuda:9 is not there", "GPUs (gpus): cuda:9 is not there"),
                        ("devices of different kinds", "GPUs (gpus) of different kinds"),
                        ("two devices: none", "two devices: none"), ("tile=8 is too small", "tile=8 is too small")):
        with pytest.raises(InputError) as found, fitting("decode"):
            raise InputError(said)
        assert str(found.value) == shown


@pytest.mark.parametrize("tiling", ["everything", "", {"tiling": "Auto"}])
def test_a_tiling_nobody_knows_is_an_error(tiling):
    with pytest.raises(InputError, match="is not known: use one of auto, untiled, exact, blended"):
        from_widgets(tiling=tiling)
