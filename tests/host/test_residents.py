"""A run among other models on its card: the host's own calls (load_models_gpu, free_memory) on a ledger in place of a
GPU, and fake models."""

from running import inside

LEDGER = """
from types import SimpleNamespace
import comfy.model_management as mm
import torch
from zerowaste_vae.engine.planning.budget import Machine
from zerowaste_vae.engine.request import Request
from zerowaste_vae.nodes import residents
from zerowaste_vae.tests.nodes.ledger import (
    GIB, GPU, Card, Model, Planner, Way, listed, runs, scene,
)
assert Machine.spare(Machine(GPU, 16 * GIB, None), True) < GIB

def on(card, *models):
    mm.get_free_memory, mm.soft_empty_cache = card.free, lambda force=False: None
    mm.current_loaded_models[:] = [listed(model, mm) for model in models]

def prepare(card, vae, planner, keep="auto", packed=0):
    among = residents.Among(SimpleNamespace(packed_bytes=packed), vae, Machine.bare(GPU, card.size), "decoder",
                            (1, 4, 8, 8), Request(), (0, 0), keep)
    kept = among.choose(planner)
    residents.load(vae, GPU, kept.needs)
    return kept

def room(free, *models, others=0):
    card = Card(16 * GIB)
    vae = Model(card, GIB, dynamic=False)
    made = [Model(card, **model) for model in models]
    card.others = card.free() - free
    on(card, *made)
    return card, vae, made

"""

STEPS = LEDGER + """
# No shortage, no eviction: the request is exactly what is free.
big = {"size": 12 * GIB, "loaded": 10 * GIB, "pins": 12 * GIB}
one = Planner([Way(3 * GIB, 1.0)])
needs = 3 * GIB + Machine.bare(GPU, 16 * GIB).spare(True)
for keep in ("auto", "always", "never"):
    card, vae, (model,) = room(needs, big)
    prepare(card, vae, one, keep)
    assert model.calls == [] and runs(card, vae, prepare(card, vae, one, keep))
# A shortage below what a model holds: one partial unload, of the shortage, never a detach; its pins stay.
for kind in ({}, {"dynamic": False}):
    card, vae, (model,) = room(needs - GIB, big | kind)
    kept = prepare(card, vae, one)
    assert model.calls == [("part", GIB)] and model.loaded == 9 * GIB and model.pins == 12 * GIB, model.calls
    assert kept.out == GIB and runs(card, vae, kept)
# A shortage beyond it: the next one gives the rest, and nothing is detached.
card, vae, (first, second) = room(needs - 2 * GIB, big, {"size": 3 * GIB, "loaded": GIB, "pins": 9})
prepare(card, vae, one)
assert second.calls == [("part", 2 * GIB)] and first.calls == [("part", GIB)]  # listed last: used longest ago
assert second.pins == 9 and not second.loaded
# Text encoders leave first, wherever they stand.
card, vae, (encoder, model) = room(needs - GIB, {"size": 3 * GIB, "loaded": 2 * GIB, "clip": True}, big)
prepare(card, vae, one, "never")
assert encoder.calls == [("part", GIB)] and model.calls == []
# A model that parts with nothing is unloaded whole where that makes the room, and is left alone where it does not.
card, vae, (model,) = room(needs - GIB, big | {"gives": 0.0})
prepare(card, vae, one)
assert model.calls[-1] == ("detach", 10 * GIB) and card.free() >= needs - GIB
card, vae, (model,) = room(needs - GIB, big | {"gives": 0.0, "loaded": GIB // 2})
prepare(card, vae, one)
assert ("detach", GIB // 2) not in model.calls and model.pins == 12 * GIB
# More leaves where a model takes more than it says; it is known only once the weights are there.
card, vae, (model,) = room(needs, big)
load = mm.load_models_gpu
mm.load_models_gpu = lambda *a, **k: (load(*a, **k), setattr(model, "hidden", GIB))
prepare(card, vae, one)
mm.load_models_gpu = load
assert [n for kind, n in model.calls if kind == "part"] == [GIB] and card.free() >= 2 * GIB
# Everything only after a real lack of memory, and pins stay where models part with their memory.
card, vae, (model, stuck) = room(needs, big, {"size": GIB, "loaded": GIB, "gives": 0.0})
kept = prepare(card, vae, one)
assert model.calls == stuck.calls == []
residents.clear(GPU, vae)
assert model.loaded == stuck.loaded == 0 and model.pins == 12 * GIB and stuck.calls[-1] == ("detach", GIB)
assert vae.loaded == GIB and vae.calls == []
# The run's packed weights and loaded weights are asked for once.
card, vae, (model,) = room(needs - GIB - 300, big)
prepare(card, vae, one, packed=300)
assert model.calls == [("part", GIB)]
card, vae, (model,) = room(needs, big)
card.others -= GIB
vae.loaded = GIB
prepare(card, vae, one)
assert model.calls == []
# Models that have no other place (--highvram) stay; so does what plans beside them.
card, vae, (model,) = room(2 * GIB + GIB // 2, big | {"dynamic": False, "stays": True})
kept = prepare(card, vae, Planner([Way(3 * GIB, 1.0), Way(3 * GIB // 2, 2.0)]), "auto")
assert kept.plan.peak_bytes == 3 * GIB // 2 and kept.out == 0 and model.calls == []
residents.clear(GPU, vae)
assert model.calls == [] and model.loaded == 10 * GIB
# --reserve-vram: so much stays free besides.
from zerowaste_vae.engine.system.orders import ORDERS
before = mm.EXTRA_RESERVED_VRAM
ORDERS.reserved = mm.EXTRA_RESERVED_VRAM = 2 * GIB
card, vae, (model,) = room(needs + 2 * GIB, big)
prepare(card, vae, one)
assert model.calls == []
card, vae, (model,) = room(needs + GIB, big)
kept = prepare(card, vae, one)
assert model.calls == [("part", GIB)] and runs(card, vae, kept) and card.free() >= 2 * GIB
ORDERS.reserved, mm.EXTRA_RESERVED_VRAM = 0, before
# --disable-smart-memory: the host unloads everything, by its own rule.
mm.DISABLE_SMART_MEMORY = True
card, vae, (model,) = room(needs, big)
prepare(card, vae, one, "always")
assert model.calls == [("detach", 10 * GIB)]
# It does so on the GPU alone that it loads a model on; the other GPUs of a run have to be named.
card, vae, (model, away) = room(needs, big, {"size": GIB, "loaded": GIB})
mm.current_loaded_models[1].device = other = torch.device("cuda", 1)
residents.make_room(GIB, other, vae)
assert model.calls == [] and away.calls == [("detach", GIB)]
print("kept")
"""

SETS = LEDGER + """
moved, stayed, kinds = 0, 0, set()
for seed in range(1000):
    s = scene(seed)
    on(s.card, *s.models, *[s.vae] * bool(s.vae.loaded))
    least = min(way.peak for way in s.planner.ways) - s.packed - s.vae.loaded
    reserve = 1.1 * (s.vae.size - s.vae.loaded) + mm.minimum_inference_memory()
    before = s.card.free()
    kept = prepare(s.card, s.vae, s.planner, s.keep, s.packed)
    holds = sum(m.holds for m in s.models)
    assert not kept.plan.tiled, (seed, kept)
    assert runs(s.card, s.vae, kept, s.packed), (seed, kept)
    assert s.planner.asked <= 8
    for m in s.models:
        whole = [n for kind, n in m.calls if kind == "detach"]
        assert not whole or m.gives < 1 or before + sum(m.before for m in s.models) < reserve, (seed, m.calls)
    least = max(least + Machine.bare(GPU, s.card.size).spare(True), reserve)
    if kept.needs <= before or (s.keep == "always" and least <= before):
        assert not any(m.calls for m in s.models), seed
    gone = sum(m.before - m.loaded for m in s.models)
    moved, stayed = moved + (gone > 0), stayed + (holds > 0)
    kinds.add((s.keep, gone > 0))
assert moved > 100 and stayed > 300 and len(kinds) == 6, (moved, stayed, kinds)
print("sets", moved, stayed)
"""


def test_only_what_is_missing_leaves(host_places, pack_folder):
    assert "kept" in inside(host_places, pack_folder, STEPS)


def test_random_sets_of_models(host_places, pack_folder):
    """1,000 of them: every run finds its memory, under the plan it was prepared for, and an exact one."""
    assert "sets" in inside(host_places, pack_folder, SETS)
