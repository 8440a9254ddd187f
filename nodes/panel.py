"""Answers for the panel on the nodes: plans of decodes, and the tuning of this GPU. No ComfyUI, no files."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..engine import InputError, PlanError, log
from ..engine.errors import Cancelled, ZeroWasteError
from ..engine.extras.bench.expected import Expected, expected, in_winograd
from ..engine.extras.distributed.devices import resolve
from ..engine.extras.tuning import kept
from ..engine.extras.tuning.tune import tune, why_not
from ..engine.families import by_file
from ..engine.kernels.cards import AUTO, CHOICES
from ..engine.kernels.gpus import find
from ..engine.loader import NAMES, PRECISIONS, named
from ..engine.network.architecture import Architecture, colours_of
from ..engine.options import DEFAULTS, PLAIN_TILES, Options
from ..engine.planning.budget import Machine
from ..engine.planning.fused_walk import FusedWalk
from ..engine.planning.make import decided, without_weights
from ..engine.planning.plan import Plan
from ..engine.request import NATIVE_BLENDS, OVERLAP, TILINGS, Request
from ..engine.runtime.pixels import OUTPUTS
from ..engine.system.memory import GIB
from ..engine.system.words import REFERENCE
from .frames import crowded
from .reports import labelled, naming_gpus
from .settings import DIRECT

#: Largest values a question may hold; sizes in pixels, memory in GB.
LIMITS = {"width": 16384, "height": 16384, "frames": 100_000, "batch": 4096, "tile": 16384, "overlap": 16384,
          "chunk": 4096, "channels": 4096, "draft": 2, "vram_gb": 1024.0, "ram_gb": 65536.0}  # fmt: skip
_CHOICES = {"tiling": TILINGS, "precision": NAMES, "output": ("auto", *OUTPUTS), "kernels": CHOICES}
#: Characters of texts, and of a list of optimisations.
_TEXTS, _NAMES = {"model": 512, "encoded_by": 512, "gpus": 200}, 200


@dataclass(frozen=True)
class Question:
    """A decode that may be run. Pixels, frames, latents per chunk, GB; 0 and "auto" are left to the planner.

    model: the name its file is listed under. channels: of the latent, or encoded_by: the name of the VAE that made it,
    where either is known. gpus: in the form of the widget. draft: 1 for one by the tiny decoder of its latents, 2 where
    another loader than this pack's reads the file.
    """

    model: str = ""
    precision: str = "auto"
    width: int = 1280
    height: int = 720
    frames: int = 21
    batch: int = 1
    tiling: str = "auto"
    tile: int = 0
    overlap: int = 64
    chunk: int = 0
    vram_gb: float = 0.0
    ram_gb: float = 0.0
    output: str = "auto"
    gpus: str = "auto"
    channels: int = 0
    encoded_by: str = ""
    draft: int = 0
    options: Options = DEFAULTS

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> Question:
        """Parse the texts of a query, in which `on` and `off` name optimisations, with commas between them.

        Raises InputError on unknown names, wrong types and values out of bounds.
        """
        values = {name: _value(name, text) for name, text in query.items()}
        toggles = {name: set(values.pop(name).split(",")) for name in ("on", "off") if name in values}
        if DIRECT in toggles.get("on", ()):  # Optimize's switch for it
            off = toggles.get("off", set()) | {"winograd"}
            toggles = {"on": toggles["on"] - {DIRECT, "winograd"}, "off": off}
        options = replace(DEFAULTS.switched(**toggles), kernels=values.pop("kernels", AUTO))
        return cls(**values, options=options)  # type: ignore[arg-type]


def _value(name: str, text: str) -> str | float | int:
    """Return a value of a query, checked. Raises InputError."""
    if name in ("on", "off"):
        if len(text) > _NAMES:
            raise InputError(f"{name} is a list of at most {_NAMES} characters")
        return text
    if name in _TEXTS:
        if len(text) > _TEXTS[name] or not text.isprintable():
            raise InputError(f"{name} is a text of at most {_TEXTS[name]} printable characters")
        return text
    if name in _CHOICES:
        if text not in _CHOICES[name]:
            raise InputError(f"{name}={text[:40]!r} is not one of {', '.join(_CHOICES[name])}")
        return text
    if name not in LIMITS:
        raise InputError(f"{name[:40]!r} is not one of on, off, {', '.join((*_TEXTS, *_CHOICES, *LIMITS))}")
    most, least = LIMITS[name], 8 if name in ("width", "height") else 1 if name in ("frames", "batch") else 0
    # int() and float() also take underscores, other scripts' digits and any length.
    if re.fullmatch("-[0-9.]{0,15}[1-9][0-9.]{0,15}", text):
        raise InputError(f"{name}={text} is below 0: give 0 or more")
    if not re.fullmatch("[0-9]{1,12}" if isinstance(most, int) else "[0-9]{1,12}([.][0-9]{1,20})?", text):
        raise InputError(f"{name}={text[:40]!r} is not a number")
    value = type(most)(text)
    if not least <= value <= most:
        raise InputError(f"{name}={text[:40]} is out of bounds: {least} to {most:g}")
    return value


class Known:
    """Architecture and sizes of the VAEs that nodes have loaded, by the name they are listed under; no weights."""

    def __init__(self, most: int = 1024) -> None:
        self._most = most
        self._facts: OrderedDict[str, tuple[Architecture, object] | None] = OrderedDict()
        self.quantised: set[str] = set()
        self.ours_only: set[str] = set()
        self.forgetful = False  # VAEs of this host do not know the file they were read from
        self._lock = threading.Lock()

    def learn(self, name: str, architecture: Architecture | None, config: object) -> None:
        """Store a VAE's facts. architecture None: a VAE whose network the engine does not have."""
        with self._lock:
            self._facts[name] = None if architecture is None else (architecture, config)
            self._facts.move_to_end(name)
            while len(self._facts) > self._most:
                self._facts.popitem(last=False)

    def find(self, name: str) -> tuple[Architecture, object] | None:
        """Return a VAE's facts; None for one that is not stored, or whose network the engine does not have."""
        with self._lock:
            return self._facts.get(name)

    def __contains__(self, name: str) -> bool:
        with self._lock:
            return name in self._facts

    def learn_quantised(self, name: str, quantised: bool, ours_only: bool = False) -> None:
        """Store whether this file has int8 codes, which "auto" multiplies as they are on a GPU, and whether only this
        pack's loader reads its codes right."""
        for names, holds in ((self.quantised, quantised), (self.ours_only, ours_only)):
            (names.add if holds else names.discard)(name)


KNOWN = Known()


def network_of(model: str) -> tuple[Architecture, object] | None:
    """Return (architecture, sizes) of a VAE that a node has loaded, else those published under such a name; None for a
    VAE that is not known, or whose network the engine does not have."""
    if model in KNOWN:
        return KNOWN.find(model)
    named = by_file(model)
    return named and (named, named.published.sizes(model))


def _channels_of(model: str) -> int:
    """Return the channels of a latent of this VAE; 0 where it is not known."""
    network = network_of(model)
    return 0 if network is None else network[1].latent_channels * network[0].side ** 2


def walk_of(model: str, device: torch.device) -> tuple[FusedWalk, str]:
    """Return the dry run that plans of a VAE in its default precision follow on a device, and why its fused kernels are
    off ("": they are on). Raises InputError for a VAE that no node has loaded, unless it is known by its name."""
    network = network_of(model)
    if network is None:
        raise InputError(f"{model[:80] or 'this VAE'} is not known: run a workflow that loads it first")
    architecture, config = network
    plain = named("auto", device, architecture, False)[1]
    here, options = (plain, PRECISIONS[plain], device), decided(DEFAULTS, device)
    planner, _, off, _ = without_weights(architecture, config, "auto", *here, options, kept.rates(device))
    return planner.walk, off


def answer(
    question: Question, machine: Machine, native_blend: Callable[[Architecture], str] = lambda _: NATIVE_BLENDS[0]
) -> dict[str, object]:
    """Return the plan of a decode for the panel. Raises InputError where the options contradict each other.

    A file that no node has loaded yet is planned as the published VAE of its name, and the answer says so; there is no
    plan for any other: `unknown`, with `host` where it is known that ComfyUI's own code runs it.
    """
    network, loaded = network_of(question.model), question.model in KNOWN
    if network is None:
        return {"unknown": True, "host": loaded, "model": question.model}
    (architecture, config), here, q = network, machine.device, question
    with naming_gpus():
        devices = resolve(q.gpus, here)
    if here not in devices:
        raise InputError(f"ComfyUI runs this VAE on {here}: name that GPU too, or all")
    asked, plain = named(q.precision, here, architecture, q.model in KNOWN.quantised)
    precision = plain if asked == "auto" else asked
    options = decided(q.options, here)
    chosen = asked, plain, PRECISIONS[plain], here, options
    planner, choices, off, mode = without_weights(architecture, config, *chosen, kept.rates(here))
    if asked == "auto" and mode.half_accumulate:
        precision = "fp16_fast"
    target, source = machine.target(q.vram_gb, q.ram_gb)
    output = "float32" if q.output == "auto" else q.output
    overlap = None if q.overlap == OVERLAP else q.overlap  # the widget's default is no wish
    blend = native_blend(architecture) if architecture.in_tiles else NATIVE_BLENDS[0]
    request = Request(q.tiling, q.tile, overlap, q.chunk, q.vram_gb, q.ram_gb, output, blend)
    latents, batch = architecture.latents(architecture.filled(q.frames)), q.batch
    if architecture.still or architecture.joined:
        latents, batch = latents * batch, 1
    height, width = (-(-n // architecture.spatial) for n in (q.height, q.width))
    limits = machine.limits(request).shared(len(devices), here)
    facts = {
        "model": q.model, "assumed": not loaded, "assumed_as": "" if loaded else architecture.published.title,
        "variant": architecture.variant(config),
        "precision": precision, "device": str(here), "gpus": len(devices), "target_gb": _gb(target),
        "target_source": source, "kernels_off": off, "ours_only": q.model in KNOWN.ours_only,
        "kernels": "" if off or (runs := choices.of("decoder")) is None else runs.words,
    }  # fmt: skip
    has, needs = q.channels or _channels_of(q.encoded_by), _channels_of(q.model)
    if has and has != needs:
        facts |= {"channels": has, "needs_channels": needs}
    try:
        plan = planner.plan("decoder", (latents, height, width), request, limits)
    except PlanError as error:
        sides = {"width": architecture.spatial * width, "height": architecture.spatial * height}
        return {"fits": False, "text": labelled(str(error)), "frames": q.frames, "batch": q.batch, **sides, **facts}
    if plan.reference:
        facts["kernels"] = REFERENCE
    if plan.bare and plan.tiled and facts["kernels"]:
        facts |= {"kernels": "", "kernels_off": PLAIN_TILES}
    shown = plan_facts(plan, batch, latents, architecture, colours_of(config)[1], request.dtype)
    if shown["fused"] and not plan.tiled and plan.parking is None:
        model = here, architecture, config, precision
        facts |= expected_facts(*model, (latents, height, width), batch, options)
    count, free = shown["batch"] * shown["frames"], None if machine.half_ram is None else 2 * machine.half_ram
    clip = shown["batch"] == 1 and not architecture.still
    short = crowded(count, int(shown["result_gb"] * GIB), free, clip)
    return {**shown, **facts, **raised_facts(plan), "crowded": short}


def expected_facts(
    device: torch.device, architecture: Architecture, config: object, precision: str, size: tuple[int, int, int],
    batch: int, options: Options,
) -> dict[str, float]:  # fmt: skip
    """Return the seconds that a decode in whole frames is expected to take on this GPU, from and to: computed, and
    empty where its operators were not timed at the ratio of such a card.

    size: latents of each of `batch` clips, height and width in latent pixels."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return {}
    try:
        gpu = find(torch.cuda.get_device_name(device), "GPU").gpu
    except InputError:
        return {}
    form = in_winograd(options, architecture.program("decoder", config), precision)
    found = gpu and expected(gpu, architecture, config, "decoder", precision, *size, form)
    if not isinstance(found, Expected):
        return {}
    return {"expected_low_s": batch * found.low * (1 - found.below),
            "expected_high_s": batch * found.high * (1 + found.above)}  # fmt: skip


def raised_facts(plan: Plan) -> dict[str, object]:
    """Return the target and its source, if "auto" had to raise it."""
    return {} if plan.raised is None else {"target_gb": _gb(plan.raised), "target_source": "free"}


def plan_facts(
    plan: Plan, batch: int, latents: int, architecture: Architecture, colours: int, output: torch.dtype
) -> dict[str, object]:
    """Return the facts of a plan that the panel draws: sizes in pixels, memory in GB. colours: channels of a pixel."""
    s, still = architecture.spatial, architecture.still
    rows, cols = plan.grid.rows, plan.grid.cols
    # The planner orders pictures in time, a user in a batch.
    frames, batch = (1, batch * latents) if still else (architecture.frames(latents), batch)
    width, height = s * cols.length, s * rows.length
    facts: dict[str, object] = {
        "fits": True, "text": labelled(plan.describe()), "note": labelled(plan.note),
        "mode": "blended" if plan.tiled else "untiled", "fused": plan.fused and not plan.reference,
        "spatial": s, "still": still,
        "batch": batch, "frames": frames, "latents": latents, "width": width, "height": height,
        "tile_width": s * cols.size, "tile_height": s * rows.size, "tiles": len(plan.grid),
        "columns": [s * x for x in cols.starts], "rows": [s * y for y in rows.starts],
        "chunk_latents": plan.steps.latents, "chunks": -(-latents // plan.steps.latents),
        "frames_per_step": plan.steps.frames, "predicted_gb": _gb(plan.peak_bytes),
        "result_gb": _gb(batch * frames * height * width * colours * output.itemsize),
    }  # fmt: skip
    if plan.parking is not None:
        mode = "rolled" if plan.rolls else "untiled" if still or architecture.joined else "parked"
        facts |= {"mode": mode, "parked_gb": _gb(plan.host_bytes), "band_rows": plan.parking.rows}
    elif plan.host_bytes and plan.own is None:
        facts |= {"waiting_gb": _gb(plan.host_bytes), "passes": plan.steps.passes}
    return facts


def _gb(size: int | None) -> float | None:
    return None if size is None else size / GIB


class Tuner:
    """One tuning in a thread of its own, and its state for those that poll."""

    def __init__(self, run: Callable[..., Any] = tune, why: Callable[[torch.device], str | None] = why_not) -> None:
        self._run, self._why = run, why
        self._lock = threading.Lock()
        self._cancel = threading.Event()
        self._thread: threading.Thread | None = None
        self._state: dict[str, Any] = {"state": "idle", "done": 0, "total": 0, "text": ""}

    def state(self) -> dict[str, Any]:
        """Return the state (idle, running, done, cancelled, failed), layers done and in all, and the result's line."""
        with self._lock:
            return dict(self._state)

    def start(self, model: str, busy: Callable[[], bool], device: torch.device) -> None:
        """Start a tuning. busy: returns True if a workflow runs or waits to; one that begins later ends the tuning,
        whose times it would spoil. Raises InputError, with the reason in one line, where it cannot begin."""
        if why := self._why(device):
            raise InputError(why)
        walk, off = walk_of(model, device)
        if off:
            raise InputError(off)
        _check_queue(busy)
        with self._lock:
            if self._state["state"] == "running":
                raise InputError("a tuning is under way already")
            self._cancel.clear()
            self._state = {"state": "running", "done": 0, "total": 0, "text": ""}
        work = walk, device, busy
        self._thread = threading.Thread(target=self._work, args=work, name="zerowaste-tune", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Stop the tuning as soon as the present layer is done."""
        self._cancel.set()

    def _work(self, walk: Any, device: torch.device, busy: Callable[[], bool]) -> None:
        def cancel() -> bool:
            _check_queue(busy)
            return self._cancel.is_set()

        try:
            tuning, found = self._run(walk, device, progress=self._progress, cancel=cancel)
        except Cancelled:
            state, text = "cancelled", ""
        except ZeroWasteError as error:
            state, text = "failed", str(error)
        except Exception as error:
            log.warn(f"tuning failed: {type(error).__name__}: {error}")
            state, text = "failed", f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            without_weights.cache_clear()  # plans know the link's rate from now on
            ends = [f"kinds of layers tuned on this GPU: {len(tuning.schedules)}"]
            ends += [f"left as they were, for lack of time: {len(found.left)}"] if found.left else []
            ends += [f"schedules dropped: {len(found.dropped)}"] if found.dropped else []
            state, text = "done", "; ".join(ends)
        with self._lock:
            self._state |= {"state": state, "text": text}

    def _progress(self, done: int, total: int) -> None:
        with self._lock:
            self._state |= {"done": done, "total": total}


def _check_queue(busy: Callable[[], bool]) -> None:
    if busy():
        raise InputError("a workflow is running: tune when the queue is empty")


TUNER = Tuner()
