"""The other models on a run's card: what plans are told of them, and how ComfyUI is asked for room among them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import replace

import comfy.model_management as mm
import torch

from ..engine import VideoVAE, log
from ..engine.extras.residents import link
from ..engine.extras.residents.keeping import Keeping, Kept
from ..engine.extras.residents.residents import Card, Resident
from ..engine.planning.budget import Limits, Machine
from ..engine.planning.plan import Plan
from ..engine.planning.planner import Planner
from ..engine.request import Request
from ..engine.system.memory import GIB, in_gb

#: The host asks for this many times the weights that it is to load.
LOADING = 1.1


def card_of(device: torch.device, patcher: object, packed: int) -> Card:
    """Return the card as it is before a run of `patcher`, for plans among other models.

    It names no models where plans are as for an empty card: the host itself unloads all of them
    (--disable-smart-memory), or is from before models told what they hold (0.3.64).

    Args:
        packed: bytes of the VAE's packed weights there, which its plan counts.
    """
    told = device.type == "cuda" and not mm.DISABLE_SMART_MEMORY and hasattr(patcher, "is_dynamic")
    there = [entry for entry in _others(device, patcher) if entry.model.loaded_size() > 0] if told else []
    floor = math.ceil(LOADING * _unloaded(patcher, device) + mm.minimum_inference_memory())
    own = packed + patcher.loaded_size()
    return Card(mm.get_free_memory(device), own, floor, tuple(map(_resident, there)))


def _others(device: torch.device, patcher: object) -> list[mm.LoadedModel]:
    """Return the host's entries of other models on a device in the order in which they leave: text encoders, whose
    results the host keeps, then those whose last use is longest ago."""
    found = [e for e in reversed(mm.current_loaded_models) if e.device == device and e.model is not None]
    found = [entry for entry in found if entry.model.model is not patcher.model]
    return sorted(found, key=lambda entry: not getattr(entry.model, "is_clip", False))


def _movable(device: torch.device, patcher: object) -> list[mm.LoadedModel]:
    """Return those of `_others` with memory there that can leave: with --highvram models have no other place."""
    found = _others(device, patcher)
    return [e for e in found if e.model.loaded_size() > 0 and e.model.offload_device != device]


def _resident(entry: mm.LoadedModel) -> Resident:
    model, loaded = entry.model, int(entry.model.loaded_size())
    dynamic, size = model.is_dynamic(), max(1, model.model_size())
    name, again = type(model.model).__name__, not getattr(model, "is_clip", False)
    leaves = 0 if model.offload_device == entry.device else loaded
    if not dynamic:  # layers are copied to host memory, and page-locked there where the host does that
        pinned = float(getattr(mm, "MAX_PINNED_MEMORY", -1) > 0)
        return Resident(name, loaded, leaves, pinned, 1 - pinned, True, again)
    # Hosts from before May 2026 do not tell both: what they do not tell counts as read from the file.
    locked, held = (getattr(model, name, int)() / size for name in ("pinned_memory_size", "loaded_ram_size"))
    pinned = min(1.0, locked)
    buffered = min(1.0 - pinned, max(0.0, held - pinned))
    return Resident(name, loaded, leaves, pinned, buffered, False, again)


def _unloaded(patcher: object, device: torch.device) -> int:
    """Return the bytes of its weights that the host is going to load, as it counts them."""
    here = patcher.current_loaded_device() == device
    return patcher.model_size() - (patcher.loaded_size() if here else 0)


class Among:
    """One run among the models that are on its card."""

    def __init__(
        self, engine: VideoVAE, patcher: object, machine: Machine, half: str, size: tuple[int, int, int, int],
        request: Request, rest: tuple[int, int], keep: str,
    ) -> None:  # fmt: skip
        """Prepare to plan it.

        Args:
            engine: runs it, with the weights of `patcher`.
            machine: with an empty card.
            half, rest: as of `Planner.plan`.
            size: clips, latents, height and width in latent pixels.
            keep: one of `KEEP`; "": several GPUs run it, each as on an empty card.
        """
        self._engine, self._patcher, self._machine, self._keep = engine, patcher, machine, keep
        self._half, self._size, self._request, self._rest = half, size, request, rest
        self.kept: Kept | None = None  # the plan that is followed, with all that has left for this run

    def choose(self, planner: Planner) -> Kept:
        """Return the plan to follow now. planner: of the engine, or of a copy at another timestep."""

        def plan(request: Request, limits: Limits) -> Plan:
            return planner.plan(self._half, self._size[1:], request, limits, self._rest)

        device, (clips, latents, *_) = self._machine.device, self._size
        card = card_of(device, self._patcher, self._engine.packed_bytes)
        if not self._keep:
            card = replace(card, models=())
        choice = Keeping(plan, latents, clips, self._request, self._machine, card)
        self.kept = choice.choose(self._keep or "never", functools.partial(link.measured, device))
        return self.kept

    def again(self, planner: Planner) -> Plan:
        """Return the plan for operands that the clip has settled after the first plan, with room made for it."""
        first, kept = self.kept, self.choose(planner)
        if first is not None:
            out, seconds = first.out + kept.out, first.seconds + kept.seconds
            self.kept = replace(kept, out=out, seconds=seconds, note=kept.note or first.note)
        make_room(kept.needs, self._machine.device, self._patcher)
        return kept.plan

    def clear(self) -> None:
        """Have everything leave but this VAE; when that is back is not known."""
        gone = clear(self._machine.device, self._patcher)
        if self.kept is not None:
            self.kept = replace(self.kept, out=self.kept.out + gone, seconds=0.0)


def load(patcher: object, device: torch.device, needs: int) -> None:
    """Have the host load the VAE's weights, with `needs` bytes free for the run before them, weights included.

    The host adds its own reserve, and the weights 1.1 times: neither is asked for twice. What could not be made free is
    not asked for: the host would unload whole models for it, with their copies in host memory. The run then plans anew
    for what is free.
    """
    if device.type == "cpu":
        mm.load_models_gpu([patcher], memory_required=0, force_full_load=True)
        return
    make_room(needs, device, patcher)
    asked = min(needs, mm.get_free_memory(device)) - mm.extra_reserved_memory() - LOADING * _unloaded(patcher, device)
    loaded = patcher.loaded_size()
    mm.load_models_gpu([patcher], memory_required=max(0, int(asked)), force_full_load=True)
    make_room(needs - (patcher.loaded_size() - loaded), device, patcher)  # models may take more than they say


def make_room(needs: int, device: torch.device, patcher: object) -> None:
    """Have other models leave, as little of them as makes `needs` bytes free.

    Pages (of models in dynamic VRAM) or layers leave; a model's copies in host memory stay, page-locked ones too, so
    that it is back soon. Those pages would leave by themselves once they are in the way, but a run plans for what is
    free. A model that does not part with anything is unloaded whole, if that makes the room.
    """
    if mm.DISABLE_SMART_MEMORY:  # all of them leave when the host loads a model; on a run's other GPUs it loads none
        _unload(_movable(device, patcher), needs, device)
        return
    asked = []
    for entry in _movable(device, patcher):
        missing = needs - mm.get_free_memory(device)
        if missing <= 0:
            break
        entry.model.partially_unload(entry.model.offload_device, missing)
        asked.append(entry)
    missing = needs - _free(patcher, device)
    if missing > 0 and sum(entry.model.loaded_size() for entry in asked) >= missing:
        log.debug(f"{in_gb(missing)} are missing still: models that do not part with memory are unloaded whole")
        _unload([entry for entry in asked if entry.model.loaded_size() > 0], needs, device)
    if asked:
        mm.soft_empty_cache()


def _free(patcher: object, device: torch.device) -> int:
    """Return the bytes that are free or become free on demand, as the host counts them for models."""
    count = getattr(patcher, "get_free_memory", mm.get_free_memory)
    return count(device)


def clear(device: torch.device, patcher: object) -> int:
    """Have everything leave but this VAE: a run has met a real lack of memory. Return the bytes that were there."""
    there = _movable(device, patcher)
    gone = sum(entry.model.loaded_size() for entry in there)
    for entry in there:
        entry.model.partially_unload(entry.model.offload_device, 1e30)
    _unload(_movable(device, patcher), 1e30, device)
    mm.soft_empty_cache()
    return gone


def _unload(entries: Iterable[mm.LoadedModel], size: float, device: torch.device) -> None:
    """Have the host unload these models, until `size` bytes are free."""
    gone = list(map(id, entries))
    mm.free_memory(size, device, keep_loaded=[e for e in mm.current_loaded_models if id(e) not in gone])


class Before:
    """The models on a card before a run, to tell what it moves."""

    def __init__(self, device: torch.device, patcher: object) -> None:
        entries = _others(device, patcher) if device.type == "cuda" else []
        self._before = [(e.model, type(e.model.model).__name__, e.model.loaded_size()) for e in entries]

    def words(self, seconds: float) -> str:
        """Return in words which models stay and which have left by now; "" where none were there. seconds: until what
        left is back; 0: not known, or nothing is certain to come back."""
        stayed, left = dict[str, int](), dict[str, int]()
        for model, name, before in self._before:
            now = min(before, model.loaded_size())
            stayed[name], left[name] = stayed.get(name, 0) + now, left.get(name, 0) + before - now
        stayed, left = ({n: size for n, size in some.items() if size >= WORTH_SAYING} for some in (stayed, left))
        parts = []
        if stayed:
            parts.append(f"beside {', '.join(stayed)} ({sum(stayed.values()) / GIB:.1f} GB stay)")
        if left:
            size, names = sum(left.values()) / GIB, ", ".join(left)
            back = f"moves {size:.1f} GB of {names} out, {seconds:.1f} s to bring back"
            parts.append(back if seconds else f"moves {size:.1f} GB of {names} out")
        return "; ".join(parts)


#: Least bytes of a model that are told of.
WORTH_SAYING = GIB // 20
