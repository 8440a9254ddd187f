"""A card with models on it, counted in bytes: a test bed for how a host makes room. No torch device, no values."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import torch
from zerowaste_vae.engine import PlanError
from zerowaste_vae.engine.network.steps import Steps
from zerowaste_vae.engine.network.tiles import grid
from zerowaste_vae.engine.planning.budget import Limits, Machine
from zerowaste_vae.engine.planning.plan import Plan
from zerowaste_vae.engine.request import Request

GIB, PAGE = 1 << 30, 32 << 20
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@dataclass
class Card:
    """size: bytes. others: of other processes. run: of the run, apart from its weights."""

    size: int
    others: int = 0
    run: int = 0
    models: list[Model] = field(default_factory=list)

    def free(self, dev: object = None, torch_free_too: bool = False) -> object:
        """As mm.get_free_memory."""
        left = self.size - self.others - self.run - sum(m.holds for m in self.models)
        return (left, 0) if torch_free_too else left

    def allocate(self, size: int) -> None:
        """Take memory for a run, as torch does."""
        if size > self.free():
            raise torch.OutOfMemoryError(f"{size - self.free()} bytes are missing")
        self.run += size


class Model:
    """A fake patcher of the host's. gives: share of it that leaves piece by piece. hidden: bytes that it holds and does
    not say so. calls: what the host or the pack did to it."""

    def __init__(
        self, card: Card, size: int, loaded: int = 0, dynamic: bool = True, pins: int = 0, gives: float = 1.0,
        hidden: int = 0, clip: bool = False, kind: str = "WAN22", stays: bool = False,
    ) -> None:  # fmt: skip
        self.card, self.size, self.loaded, self.dynamic, self.pins = card, size, loaded, dynamic, pins
        self.gives, self.hidden, self.is_clip, self.before = gives, hidden * (loaded > 0), clip, loaded
        self.model, self.parent = type(kind, (), {})(), None
        self.model.dynamic_pins = {GPU: {"active": False, "current_prompt": False}}
        self.load_device, self.offload_device, self.stays = GPU, GPU if stays else CPU, stays
        self.calls: list[tuple[str, int]] = []
        card.models.append(self)

    @property
    def holds(self) -> int:
        return self.loaded + self.hidden

    def is_dynamic(self) -> bool:
        return self.dynamic

    def is_clone(self, other: object) -> bool:
        return self.model is getattr(other, "model", None)

    def model_patches_models(self) -> list:
        return []

    def model_patches_to(self, device: object) -> None:
        pass

    def model_dtype(self) -> torch.dtype:
        return torch.float16

    def lowvram_patch_counter(self) -> int:
        return 0

    def model_size(self) -> int:
        return self.size

    def loaded_size(self) -> int:
        return self.loaded

    def loaded_ram_size(self) -> int:
        return self.pins

    def pinned_memory_size(self) -> int:
        return self.pins

    def current_loaded_device(self) -> torch.device:
        return GPU if self.loaded else CPU

    def partially_unload_ram(self, size: float, subsets: object = ()) -> int:
        return 0

    def unregister_inactive_pins(self, size: float, subsets: object = ()) -> int:
        return 0

    def partially_unload(self, device_to: object, memory_to_free: float = 0) -> int:
        self.calls.append(("part", int(min(memory_to_free, 1 << 60))))
        kept = self.loaded if self.stays else int((1 - self.gives) * self.before)
        freed = int(min(-(-memory_to_free // PAGE) * PAGE, max(0, self.loaded - kept)))
        self.loaded -= freed
        return freed

    def partially_load(self, device_to: object, extra: float = 0, force_patch_weights: bool = False) -> int:
        more = int(min(extra, self.size - self.loaded))
        if more > self.card.free():
            raise torch.OutOfMemoryError("no room for the weights")
        self.loaded += more
        return more

    def detach(self, unpatch_all: bool = True) -> object:
        if not unpatch_all:  # the host lists it anew
            return self.model
        self.calls.append(("detach", self.loaded))
        if not self.stays:
            self.loaded = self.hidden = 0
        self.pins = 0
        return self.model


def listed(model: Model, mm: object) -> object:
    """Return the host's entry of a model that it has loaded."""
    entry = mm.LoadedModel(model)
    entry.real_model, entry.model_finalizer = (lambda: model.model), SimpleNamespace(detach=lambda: None)
    return entry


class Rules:
    """How hosts load and unload by arithmetic, for tests without one (0.33.0's own run in tests/host)."""

    def __init__(self, mm: object, card: Card, models: list[Model]) -> None:
        """Give `mm`, a stand-in of comfy.model_management, these rules, the card, and the models that are loaded."""
        self.mm, self.card = mm, card
        mm.current_loaded_models[:] = [SimpleNamespace(model=model, device=GPU) for model in models]
        mm.get_free_memory, mm.free_memory, mm.load_models_gpu = card.free, self.free_memory, self.load_models_gpu

    def free_memory(self, memory_required: float, device: torch.device, keep_loaded: object = ()) -> None:
        mm = self.mm
        for entry in [e for e in mm.current_loaded_models if e not in keep_loaded]:
            missing = 1e32 if mm.DISABLE_SMART_MEMORY else memory_required - self.card.free()
            if missing <= 0 or (missing < entry.model.loaded_size()
                                and entry.model.partially_unload(CPU, missing) >= missing):  # fmt: skip
                continue
            entry.model.detach()
            mm.current_loaded_models.remove(entry)

    def load_models_gpu(self, models: list[Model], memory_required: int = 0, force_full_load: bool = False) -> None:
        mm, (model,) = self.mm, models
        own = [e for e in mm.current_loaded_models if e.model is model] or [SimpleNamespace(model=model, device=GPU)]
        most = max(mm.minimum_inference_memory(), memory_required + mm.extra_reserved_memory())
        self.free_memory(1.1 * (model.size - model.loaded) + most, GPU, own)
        model.partially_load(GPU, 1e32)
        mm.current_loaded_models[:] = own + [e for e in mm.current_loaded_models if e not in own]


@dataclass
class Way:
    """An exact plan: its peak in bytes, and its seconds."""

    peak: int
    seconds: float


class Planner:
    """Plans of fake sizes: the quickest exact one that fits, else tiles."""

    def __init__(self, ways: list[Way], tiles: int = 0) -> None:
        self.ways, self.tiles, self.asked = ways, tiles, 0

    def plan(self, half: str, size: object, request: Request, limits: Limits, rest: object = (0, 0)) -> Plan:
        self.asked += 1
        for limit in limits.tries(request.tiling == "auto"):
            for way in self.ways:
                if limit is None or way.peak <= limit:
                    raised = limit if limit != limits.target else None
                    whole = grid(8, 8, 64, 0, 8)
                    return Plan(Steps(1), whole, way.peak, True, seconds=way.seconds, raised=raised)
        if request.tiling == "auto" and self.tiles and self.tiles <= limits.tries(True)[-1]:
            return Plan(Steps(1), grid(8, 8, 32, 0, 8), self.tiles)
        raise PlanError("nothing fits")


def runs(card: Card, vae: Model, kept: object, packed: int = 0, auto: bool = True) -> bool:
    """Allocate what a run of the plan takes, and say whether the engine takes it without planning anew."""
    own = packed + vae.loaded
    held = replace(Machine.bare(GPU, card.size), others=card.size - card.free() - own)
    request = Request() if auto else Request(vram_gb=card.size / GIB)
    fits = held.limits(request).hold(kept.plan)
    card.allocate(kept.plan.peak_bytes - own)
    return fits


@dataclass
class Scene:
    """A random card with models, a VAE, and a clip."""

    card: Card
    vae: Model
    models: list[Model]
    planner: Planner
    packed: int
    keep: str


def scene(seed: int) -> Scene:
    """Return a random scene whose clip fits, exactly, once every model has left."""
    of = random.Random(seed)
    card = Card(of.choice([8, 12, 16, 24, 80]) * GIB)
    card.others = int(of.uniform(0, 0.3) * card.size)
    vae = Model(card, of.randrange(64 << 20, 2 * GIB), dynamic=False, kind="VAE")
    packed = of.choice([0, 300 << 20])
    card.run = packed
    if of.random() < 0.3:
        vae.loaded = vae.size
    models, room = [], card.free() - vae.size
    for kind in of.sample(["WAN22", "T5", "ControlNet", "Flux"], of.randrange(5)):
        loaded = int(of.uniform(0, 1.1) * room)
        if loaded > card.free():
            break
        size = int(loaded * of.uniform(1, 2)) + 1
        dynamic = of.random() < 0.6
        gives = of.choice([1.0, 1.0, 0.5, 0.0])
        models.append(Model(card, size, loaded, dynamic, int(of.random() * size) * dynamic, gives,
                            clip=kind == "T5", kind=kind))  # fmt: skip
    most = card.size - card.others - vae.size - packed
    most = min(int(0.8125 * card.size), most) - Machine.bare(GPU, card.size).spare(True)
    peaks = sorted((int(of.uniform(0.1, 0.95) * most) + vae.size + packed for _ in range(4)), reverse=True)
    times = itertools.accumulate(of.uniform(0, 0.3) for _ in peaks)
    ways = [Way(peak, 1.0 + more) for peak, more in zip(peaks, times, strict=True)]
    return Scene(card, vae, models, Planner(ways, vae.size), packed, of.choice(["auto", "auto", "always", "never"]))
