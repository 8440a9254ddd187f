"""The toggles of Optimize, without a host: where a new one goes, and what widgets say of them."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from zerowaste_vae.engine import options
from zerowaste_vae.engine.kernels.targets import capabilities
from zerowaste_vae.engine.options import TOGGLES, Toggle

ROOT, NODE = Path(__file__).resolve().parents[2], "ZeroWasteVAEOptimize"
#: Optimize's widgets by place, as saved workflows know them.
SAVED = [
    "vae", "precision", "vram_gb", "chunk", "tiling", "min_db", "fp8", "channels_last_3d", "triton_fusion",
    "composed_upsample", "cuda_graphs", "flash_attention", "tf32", "cudnn_benchmark", "async_offload", "ram_gb",
    "winograd", "kernels", "direct", "keep_models",
]  # fmt: skip


@dataclass
class Widget:
    id: str
    options: dict
    advanced: bool = False
    extra_dict: dict = field(default_factory=dict)


@dataclass
class Schema:
    node_id: str
    display_name: str
    category: str
    description: str
    inputs: list
    outputs: list


def _kind(**parts: object) -> SimpleNamespace:
    return SimpleNamespace(Input=lambda id="", **options: Widget(id, options), Output=SimpleNamespace, **parts)


@pytest.fixture
def optimize(monkeypatch):
    """nodes/loader.py beside a host that builds plain widgets, on a machine that lacks fp8."""
    host = ModuleType("zerowaste_vae.nodes.host")
    kinds = {name: _kind() for name in ("Float", "Boolean", "Int", "String", "Vae", "Combo", "Latent")}
    kinds["DynamicCombo"] = _kind(Option=SimpleNamespace)
    kinds["DynamicCombo"].Option = lambda *args, **rest: None
    host.io = SimpleNamespace(ComfyNode=object, Schema=Schema, NodeOutput=SimpleNamespace, **kinds)
    host.__getattr__ = lambda name: object
    services = ModuleType("zerowaste_vae.nodes.services")
    services.unavailable = lambda: {name: "no GPU" if name == "fp8" else None for name in TOGGLES}
    services.__getattr__ = lambda name: object
    fit = ModuleType("zerowaste_vae.nodes.fit")
    fit.__getattr__ = lambda name: object
    for name in [m for m in sys.modules if m.startswith("zerowaste_vae.nodes.")]:
        monkeypatch.delitem(sys.modules, name)
    for module in (fit, host, services, ModuleType("folder_paths")):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield importlib.import_module("zerowaste_vae.nodes.loader")
    for name in [m for m in sys.modules if m.startswith("zerowaste_vae.nodes.")]:
        monkeypatch.delitem(sys.modules, name)


def inputs(optimize) -> list[Widget]:
    return optimize.Optimize.define_schema().inputs


def test_saved_workflows_find_every_widget_where_it_was(optimize):
    assert [widget.id for widget in inputs(optimize)][: len(SAVED)] == SAVED


def test_a_toggle_that_comes_later_shifts_none(optimize, monkeypatch):
    before = [widget.id for widget in inputs(optimize)]
    monkeypatch.setitem(options.TOGGLES, "later", Toggle("Later", "Does nothing.", False))
    monkeypatch.setattr(options.Options, "later", False, raising=False)
    assert [widget.id for widget in inputs(optimize)] == [*before, "later"]


def test_texts_of_toggles_are_in_both_languages():
    """Without a host, which would show the English ones only."""
    english, chinese = (
        json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text("utf-8"))[NODE]["inputs"]
        for language in ("en", "zh")
    )
    pages = [
        " ".join((ROOT / "web" / "docs" / page).read_text("utf-8").split()) for page in (f"{NODE}.md", f"{NODE}/zh.md")
    ]
    for name, toggle in TOGGLES.items():
        assert english[name] == {"name": toggle.label, "tooltip": toggle.text}
        assert chinese[name]["name"] and chinese[name]["tooltip"] != toggle.text
        assert f"**{toggle.label}** (`{name}`)" in pages[0]
        assert f"**{chinese[name]['name']}**(`{name}`)" in pages[1], name


def test_reasons_of_toggles_are_known_in_chinese(monkeypatch):
    """All but those that name the card."""
    known = json.loads((ROOT / "locales" / "zh" / "main.json").read_text("utf-8"))["zerowaste"]["said"]
    said = {toggle.off(name) for name, toggle in TOGGLES.items()}
    types, devices = (torch.float16, torch.float32), (torch.device("cpu"), torch.device("cuda"))
    for sm, dtype, device in itertools.product((75, 90), types, devices):
        monkeypatch.setattr(options, "target", lambda *_, sm=sm: capabilities("card", sm, (3, 6)))
        said |= {toggle.here(options.Place(device, dtype, None)) for toggle in TOGGLES.values()}
    asked = [options.DEFAULTS, options.DEFAULTS.switched(off=["channels_last_3d"])]
    for dtype, fused, chosen in itertools.product(types, (True, False), asked):
        said |= {toggle.walk(options.Walk(chosen, dtype, fused, False)) for toggle in TOGGLES.values()}
    said = {reason for reason in said if reason and not reason.startswith("card ")}
    assert len(said) > 8
    assert [text for text in said if text not in known and re.sub(r"\d+(\.\d+)?", "#", text) not in known] == []


def test_saved_values_of_the_winograd_switch(optimize):
    """On is every card's; off, as all workflows were saved that did not ask for it, is what the table of cards says."""
    (widget,) = (one for one in inputs(optimize) if one.id == "winograd")
    assert widget.options["default"] is False
    made = importlib.import_module("zerowaste_vae.nodes.widgets").options_from
    assert [made(winograd=value).winograd for value in (True, False)] == [True, None] and made() == options.DEFAULTS
    assert [made(winograd=value, direct=True).winograd for value in (True, False)] == [False, False]


def test_widgets_say_what_the_engine_says(optimize):
    shown = {widget.id: widget for widget in inputs(optimize) if widget.id in TOGGLES}
    assert list(shown) == list(TOGGLES)
    for name, toggle in TOGGLES.items():
        assert shown[name].options["display_name"] == toggle.label
        assert shown[name].options["tooltip"].startswith(toggle.text)
        assert shown[name].extra_dict.get("zerowaste_planned", False) is toggle.memory
    assert shown["fp8"].options["tooltip"].endswith(" Not in use here: no GPU.")
    assert [name for name, widget in shown.items() if "zerowaste_off" in widget.extra_dict] == ["fp8"]
