"""A run among other models on its card, by rules like a host's (tests/host/test_residents.py: by its own)."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from zerowaste_vae.engine import demo_vae_path
from zerowaste_vae.engine.planning.budget import Machine
from zerowaste_vae.engine.request import Request

from .ledger import GIB, GPU, Card, Model, Planner, Rules, Way, runs

SPARE = Machine.bare(GPU, 16 * GIB).spare(True)
BIG = {"size": 12 * GIB, "loaded": 10 * GIB, "pins": 12 * GIB}
WAYS = [Way(4 * GIB, 1.0), Way(3 * GIB, 1.5)]


class Scene:
    """A card of 16 GiB with models on it and `free` bytes left; another process holds the rest."""

    def __init__(self, pack, free, *models, ways=WAYS):
        self.card, self.mm, self.pack = Card(16 * GIB), pack.comfy.model_management, pack
        self.vae = Model(self.card, GIB, dynamic=False)
        self.models = [Model(self.card, **model) for model in models]
        self.card.others, self.planner = self.card.free() - free, Planner(ways)
        Rules(self.mm, self.card, self.models)

    def prepare(self, keep="auto", **request):
        before = self.pack.residents.Before(GPU, self.vae)
        engine = SimpleNamespace(packed_bytes=0)
        self.among = self.pack.residents.Among(engine, self.vae, Machine.bare(GPU, 16 * GIB), "decoder", (1, 4, 8, 8),
                                               Request(**request), (0, 0), keep)  # fmt: skip
        kept = self.among.choose(self.planner)
        self.pack.residents.load(self.vae, GPU, kept.needs)
        self.words = before.words(kept.seconds)
        return kept


@pytest.mark.parametrize("keep", ["auto", "always", "never", ""])
def test_no_shortage_no_eviction(pack, keep):
    scene = Scene(pack, 4 * GIB + SPARE, BIG)
    kept = scene.prepare(keep)
    assert scene.models[0].calls == [] and kept.plan.peak_bytes == 4 * GIB
    assert runs(scene.card, scene.vae, kept) and scene.words == "beside WAN22 (10.0 GB stay)"


def test_a_shortage_is_one_partial_unload(pack):
    scene = Scene(pack, 3 * GIB + SPARE, BIG)
    kept, model = scene.prepare("never"), scene.models[0]
    assert model.calls == [("part", GIB)] and model.pins == 12 * GIB and runs(scene.card, scene.vae, kept)
    assert scene.words == "beside WAN22 (9.0 GB stay); moves 1.0 GB of WAN22 out, 0.0 s to bring back"


def test_everything_stays_where_it_is_asked_for(pack):
    scene = Scene(pack, 3 * GIB + SPARE, BIG)
    kept = scene.prepare("always")
    assert scene.models[0].calls == [] and kept.plan.peak_bytes == 3 * GIB and runs(scene.card, scene.vae, kept)


def test_a_plan_that_turns_out_larger_has_room_made_for_it(pack):
    """Its 8-bit layers are settled by the clip: more of them in 16 bit take more memory."""
    scene = Scene(pack, 4 * GIB + SPARE, BIG)
    scene.prepare()
    plan = scene.among.again(Planner([Way(5 * GIB, 1.0)], 64 << 20))
    assert plan.peak_bytes == 5 * GIB and scene.models[0].calls == [("part", GIB)]
    assert scene.card.free() >= 4 * GIB + SPARE


def test_what_leaves_later_is_told_with_what_left_before(pack):
    scene = Scene(pack, 3 * GIB + SPARE, BIG)
    first = scene.prepare("never")
    scene.among.again(Planner([Way(5 * GIB, 1.0)]))
    assert (first.out, scene.among.kept.out) == (GIB, 2 * GIB)
    assert scene.among.kept.seconds == pytest.approx(2 * first.seconds) and first.seconds > 0
    scene.among.clear()
    assert scene.models[0].loaded == 0 and scene.among.kept.out == 10 * GIB
    assert scene.among.kept.seconds == 0  # of all that, nobody has said


def test_without_smart_memory_the_other_gpus_of_a_run_are_emptied(pack):
    """The host itself unloads models of the GPU alone that it loads a model on."""
    scene = Scene(pack, GIB, *2 * [{"size": 2 * GIB, "loaded": 2 * GIB}])
    scene.mm.DISABLE_SMART_MEMORY, other = True, torch.device("cuda", 1)
    scene.mm.current_loaded_models[1].device = other
    pack.residents.make_room(GIB, other, scene.vae)
    assert [model.calls for model in scene.models] == [[], [("detach", 2 * GIB)]]


def test_several_gpus_plan_as_on_an_empty_card(pack):
    scene = Scene(pack, 3 * GIB + SPARE, BIG)
    assert scene.prepare("").plan.peak_bytes == 4 * GIB and scene.planner.asked == 1
    assert scene.models[0].calls == [("part", GIB)]


def test_a_host_that_does_not_say_what_models_hold(pack, monkeypatch):
    """It is from before dynamic models: plans are those of an empty card, and the shortage leaves all the same."""
    monkeypatch.delattr(Model, "is_dynamic")
    scene = Scene(pack, 3 * GIB + SPARE, BIG)
    assert scene.prepare("always").plan.peak_bytes == 4 * GIB and scene.planner.asked == 1
    assert scene.models[0].calls == [("part", GIB)]


@pytest.mark.parametrize("missing", [("loaded_ram_size",), ("loaded_ram_size", "pinned_memory_size")])
def test_a_host_that_does_not_say_where_copies_are(pack, monkeypatch, missing):
    """Those of early 2026 with dynamic models: what they do not tell is read from the file."""
    for name in missing:
        monkeypatch.delattr(Model, name)
    scene = Scene(pack, 3 * GIB + SPARE, {"size": 12 * GIB, "loaded": 10 * GIB, "pins": 3 * GIB})
    (model,) = pack.residents.card_of(GPU, scene.vae, 0).models
    assert (model.pinned, model.buffered) == (0.25 if len(missing) == 1 else 0.0, 0.0)
    assert scene.prepare("always").plan.peak_bytes == 3 * GIB and scene.models[0].calls == []


def test_another_device_is_no_ones_business(pack):
    """Models of other devices, dead entries, and the run's own VAE stay out of it."""
    scene = Scene(pack, 3 * GIB + SPARE, BIG, BIG | {"loaded": 0})
    elsewhere, dead = (copy.copy(scene.mm.current_loaded_models[1]) for _ in range(2))
    elsewhere.device, dead.model = torch.device("cuda", 1), None
    scene.mm.current_loaded_models += [elsewhere, dead]
    found = pack.residents.card_of(GPU, scene.vae, 5)
    assert [m.loaded for m in found.models] == [10 * GIB] and found.own == 5
    scene.prepare("never")
    assert scene.models[1].calls == []


def test_pages_and_layers_cost_what_their_way_back_does(pack):
    scene = Scene(pack, GIB, {"size": 4 * GIB, "loaded": 2 * GIB, "pins": GIB},
                  {"size": 2 * GIB, "loaded": GIB, "dynamic": False},
                  {"size": 2 * GIB, "loaded": GIB, "dynamic": False, "stays": True},
                  {"size": GIB, "loaded": GIB, "clip": True})  # fmt: skip
    text, fixed, layers, pages = pack.residents.card_of(GPU, scene.vae, 0).models
    assert (text.again, text.leaves) == (False, GIB)
    assert (fixed.leaves, layers.leaves, pages.leaves) == (0, GIB, 2 * GIB)
    assert (pages.pinned, pages.buffered, pages.copied) == (0.25, 0.0, False)
    assert (layers.pinned, layers.buffered, layers.copied) == (0.0, 1.0, True)
    scene.mm.MAX_PINNED_MEMORY = 1 << 40
    assert pack.residents.card_of(GPU, scene.vae, 0).models[2].pinned == 1.0


def test_everything_leaves_after_a_real_lack_of_memory(pack):
    """Pins stay where a model parts with its memory; what others took meanwhile is taken from them as well."""
    scene = Scene(pack, 4 * GIB + SPARE, BIG, {"size": GIB, "loaded": GIB, "gives": 0.0})
    kept, (model, stuck) = scene.prepare(), scene.models
    scene.card.others += 2 * GIB
    with pytest.raises(torch.OutOfMemoryError):
        runs(scene.card, scene.vae, kept)
    assert model.calls == stuck.calls == []
    pack.residents.clear(GPU, scene.vae)
    assert (model.loaded, model.pins, stuck.loaded, scene.vae.loaded) == (0, 12 * GIB, 0, GIB)
    runs(scene.card, scene.vae, kept)


@pytest.mark.parametrize("pressed", [False, True])
def test_a_run_that_ends_early_leaves_pins_as_they_are(pack, monkeypatch, pressed):
    """Stopped, failed or out of memory, and no lack of memory is answered afterwards."""
    vae = pack.conversion.from_file(demo_vae_path(), "auto", None, pack.settings.Settings())
    scene = Scene(pack, 4 * GIB + SPARE, BIG)
    monkeypatch.setattr(scene.mm, "load_models_gpu", lambda *_, **__: None)
    scene.mm.current_loaded_models[0].device, scene.models[0].offload_device = vae.device, GPU

    def ends(*_, **__):
        if pressed:
            vae.engine.on_pressure()
        raise KeyboardInterrupt

    monkeypatch.setattr(vae.engine, "decode", ends)
    with pytest.raises(KeyboardInterrupt):
        vae.decode(torch.zeros(1, 16, 1, 4, 4))
    (model,) = scene.models
    assert vae.engine.on_pressure is vae.engine.on_change is None and model.pins == 12 * GIB
    assert [kind for kind, _ in model.calls] == ["part"] * pressed and model.loaded == 10 * GIB * (not pressed)


def test_the_wish_is_carried_from_node_to_node(pack):
    settings = pack.settings
    optimize, decode = settings.from_widgets(keep_models="always"), settings.from_widgets()
    assert decode.over(optimize).keep_models == "always"
    assert settings.from_widgets(keep_models="never").over(optimize).keep_models == "never"
    assert "keep models: always" in optimize.describe() and "keep_models" not in optimize.options()
    with pytest.raises(ValueError, match="keep_models='often' is not known: use one of auto, always, never"):
        settings.from_widgets(keep_models="often")
