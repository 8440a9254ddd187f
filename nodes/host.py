"""ComfyUI's VAE type and its runs; with fit.py, residents.py and services.py the only file that touches comfy."""

from __future__ import annotations

import copy
import functools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import comfy.model_management as mm
import comfy.model_patcher
import comfy.patcher_extension
import comfy.sd
import torch
from comfy_api.latest import ComfyExtension, io
from torch import Tensor

from ..engine import Cancelled, Checkpoint, InputError, VideoVAE, load, log
from ..engine.extras.media import latent_note
from ..engine.network.offload import moving_bytes
from ..engine.options import TOGGLES, Options
from ..engine.planning.fusable import availability
from ..engine.planning.plan import Plan
from ..engine.request import Request
from ..engine.runtime.kept import KEPT
from ..engine.runtime.pinned import POOL
from ..engine.runtime.pixels import OUTPUTS
from ..engine.system.devices import empty_host_cache
from ..engine.system.memory import GIB
from . import residents
from .fit import begin, own, own_or_refused
from .frames import Layout, held, strange, too_many
from .networks import Direct, altered, patched
from .panel import KNOWN, plan_facts, raised_facts
from .reports import Outcome, fitting
from .runs import Preview, Stages, others
from .services import Progress, bare, machine, native_blend, sampled, say_here, shows_previews, unrecorded
from .settings import Settings

__all__ = ["ComfyExtension", "EngineVAE", "io", "own_vae"]


@dataclass(frozen=True)
class Running:
    """One run of the engine: its options, its plans so far, the seconds for making room and loading weights, and its
    notes on the models that it runs beside."""

    options: dict[str, Any]
    plans: list[Plan]
    loaded: float
    notes: Callable[[], list[str]]


class EngineVAE(comfy.sd.VAE):
    """A ComfyUI VAE whose work is done by the engine.

    `settings` are the wishes of the nodes that made it; stock nodes run with them. `not_video` is the host's: images
    that it encodes are pictures, each a clip of one frame. `source()` returns the weights it was made from, as they are
    stored. The weights it runs with stay in the host's hands: its patcher loads and offloads them. `name` is the name
    its file is listed under; the panel asks for plans by it.
    """

    not_video = False  # of hosts that do not set it

    def __init__(
        self, source: Callable[[], Checkpoint], precision: str, settings: Settings, name: str = "",
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        """device: of its runs; None: the host's for VAEs. Raises Unfit where this host cannot hold one."""
        begin(self, device)
        # The host moves the weights before a run; plans are made earlier, and depend on the run's device.
        checkpoint = source()
        shapes = {key: torch.empty(t.shape, dtype=t.dtype, device="meta") for key, t in checkpoint.tensors.items()}
        engine = load(checkpoint, precision, self.device, weights_on=mm.vae_offload_device())
        self.outline = Checkpoint(shapes, checkpoint.metadata)
        self.source, self.settings = source, settings
        self.decoder: dict[str, float] = {}  # see Direct
        self.notes: list[str] = []  # on each of its runs
        config = engine.model.config
        self.file = name  # of its file, as far as it is known
        self.name = name or f"{engine.arch} {config.decoder_widths or config.encoder_widths or ''}"
        KNOWN.learn(self.name, engine.architecture, config)
        self.patcher = _Patcher(engine.model, load_device=self.device, offload_device=mm.vae_offload_device())
        self.patcher.size = moving_bytes(engine.model)  # weights that stay in host memory need no room
        self._engines = self.patcher.engines = engines = weakref.WeakSet()
        # Each time it loads a model, the host detaches it first, but leaves the weights where they are.
        self.patcher.add_callback(
            comfy.patcher_extension.CallbacksMP.ON_DETACH, lambda _, away=True: _give_back(engines) if away else None
        )
        self._use(engine)
        self.size = None
        self.vae_dtype, self.working_dtypes = engine.dtype, [engine.dtype]
        self.latent_channels, self.output_channels = engine.latent_channels, engine.colours[0]
        t, s, self.pad_channel_value = engine.temporal, engine.spatial, 1.0
        self.layout = Layout(engine.architecture, engine.latent_channels, engine.colours[0])
        if self.layout.still or self.layout.joined:
            self.upscale_ratio = self.downscale_ratio = s
        else:
            self.latent_dim, times = 3, engine.architecture
            self.upscale_ratio = (lambda a: times.frames(a) if a > 0 else 0, s, s)
            self.downscale_ratio = (lambda a: times.latents(a) if a > 0 else 0, s, s)
            self.upscale_index_formula = self.downscale_index_formula = (t, s, s)
        self.crop_input = engine.architecture.crops  # as the host's own VAE of each does
        # Otherwise a host short of memory loads only part of the weights, which plain modules cannot run with.
        self.disable_offload = True
        log.info(f"{engine.arch} VAE ready: {engine.precision}, runs on {self.device}")

    def _use(self, engine: VideoVAE) -> None:
        self.engine, here = engine, weakref.proxy(self)  # nothing in it keeps it alive
        self.first_stage_model = engine.model
        self._engines.add(engine)
        self.memory_used_decode = lambda shape, dtype: here._peak("decoder", here.layout.latent_size(shape))
        self.memory_used_encode = lambda shape, dtype: here._peak("encoder", here.layout.pixel_size(shape))

    def __setattr__(self, name: str, value: object) -> None:
        # Select VAE Device gives its copy the network that the patcher holds.
        if name == "first_stage_model" and "engine" in vars(self) and value is self.engine.model:
            value = Direct(value, weakref.proxy(self))
        super().__setattr__(name, value)

    def __copy__(self) -> EngineVAE:
        """Return the same VAE: weights and packed weights are shared."""
        vae = object.__new__(type(self))
        vars(vae).update(vars(self))
        vae._use(self.engine)
        return vae

    def __deepcopy__(self, memo: dict[int, Any]) -> EngineVAE:
        """Return a VAE with weights of its own: those that this one was made from."""
        vae = EngineVAE(self.source, self.engine.asked, self.settings, self.name, self.device)
        vae.decoder, vae.not_video, vae.file = self.decoder, self.not_video, self.file
        return vae.with_wishes(self.settings, self.engine.options)

    def with_wishes(self, settings: Settings, options: Options | None = None) -> EngineVAE:
        """Return the same VAE (weights shared) under other settings, and with other optimisations if any are given."""
        vae = copy.copy(self)
        vae.settings = settings
        if options is not None:
            vae._use(self.engine.with_options(options))
        return vae

    def _comfy_cache_tensors(self) -> list[Tensor]:
        """Return its weights, which the host's cache counts: it drops what is large when memory is short (0.38 on)."""
        return [*self.engine.model.state_dict().values()]

    def describe(self) -> str:
        """Return its report: network, precision, device, wishes, and unused optimisations with reasons."""
        engine = self.engine
        reasons = availability(self.device, engine.arch, engine.model.config, engine.dtype, engine.options.kernels)
        off = {n: TOGGLES[n].off(n) if getattr(engine.options, n) is False else r for n, r in reasons.items()}
        head = f"{self.name}: {engine.arch} in {engine.precision} on {self.device}; {self.settings.describe()}"
        return "\n".join([head, *(f"off     {name}: {reason}" for name, reason in off.items() if reason)])

    def decode(self, samples_in: Tensor, vae_options: dict | None = None) -> Tensor:
        """Decode LATENT samples to frames [B, F, H, W, 3], or to pictures or frames of one clip [B, H, W, 3], in 0..1,
        in the host's type."""
        return self._shown(samples_in, self.settings)

    def decode_tiled(self, samples: Tensor, tile_x: int | None = None, **_: object) -> Tensor:
        """Decode in exact tiles of `tile_x` latent pixels: tiles along time would cut the causal history."""
        return self._shown(samples, Settings("exact", (tile_x or 0) * self.engine.spatial).over(self.settings))

    def _shown(self, samples: Tensor, settings: Settings) -> Tensor:
        latent_note.check(latent_note.found(samples), self.engine)
        return self.layout.shown(self.run_decode(samples, settings)[0])

    def encode(self, pixel_samples: Tensor, not_video: bool | None = None) -> Tensor:
        """Encode an IMAGE [F, H, W, C] or [B, F, H, W, C] to samples [B, C, T, h, w], pictures to [B, C, h, w].
        not_video: whether images [F, H, W, C] are clips of one frame each; None: as the VAE's own attribute says."""
        return self.run_encode(self._clip(pixel_samples, not_video), self.settings)[0]

    def encode_tiled(
        self, pixel_samples: Tensor, tile_x: int | None = None, not_video: bool | None = None, **_: object
    ) -> Tensor:
        """Encode in exact tiles of `tile_x` pixels."""
        tiles = Settings("exact", tile_x or 0).over(self.settings)
        return self.run_encode(self._clip(pixel_samples, not_video), tiles)[0]

    def run_decode(self, samples: Tensor, settings: Settings, pictures: bool = True) -> tuple[Tensor, Outcome]:
        """Decode under `settings`; return the frames and the outcome of the run. pictures: show finished frames where
        the user wants previews."""
        latent = self.layout.latent(samples)
        size, output = self.layout.latent_size(latent.shape), settings.output
        if output == "auto":
            output = "float16" if self._output_dtype() is torch.float16 else "float32"
        s, colours, images = self.engine.spatial, self.engine.colours[1], []
        shape = latent.shape[0], self.engine.frames(latent.shape[2]), *(s * n for n in latent.shape[3:]), colours
        kept = shape, OUTPUTS[output], shape[0] == 1 and not self.layout.still
        crowded = too_many(*kept)

        def preview(plan: Plan) -> Preview | None:
            clips = images[0].view(size[0], -1, *shape[2:])
            shown = pictures and shows_previews()
            return Preview(clips, plan, size[1], self.engine.frames, self._on_gpu) if shown else None

        with self.running("decode", size, settings, {"output": output}, preview=preview) as run:
            images.append(held(*kept))
            self.engine.decode(latent, out=images[0], any_vae=True, **run.options)
        outcome = self.outcome(run, size, settings)
        outcome.notes += crowded
        return images[0].to(self.output_device), outcome

    def run_encode(self, clip: Tensor, settings: Settings) -> tuple[Tensor, Outcome]:
        """Encode [B, F, H, W, 3] under `settings`; return the samples and the outcome of the run."""
        size = self.layout.clip_size(*clip.shape[:4])
        rest = tuple(n % self.engine.architecture.spatial for n in clip.shape[2:4])
        with self.running("encode", size, settings, rest=rest) as run:
            latent = self.engine.encode(clip, any_range=True, **run.options)
        samples = self.given_back(self.layout.samples(latent))
        return samples, Outcome(self.engine.last_report, run.loaded, notes=self.notes + run.notes())

    def given_back(self, latent: Tensor) -> Tensor:
        """Return a latent on the device and in the type that the host wants."""
        return latent.to(self.output_device, self._output_dtype())

    def outcome(self, run: Running, size: tuple[int, int, int, int], settings: Settings) -> Outcome:
        """Return the outcome of a decode."""
        plan, engine = run.plans[-1], self.engine
        facts = plan_facts(plan, *size[:2], engine.architecture, engine.colours[1], OUTPUTS[run.options["output"]])
        facts |= self._facts(settings) | raised_facts(plan)
        outcome = Outcome(engine.last_report, run.loaded, facts, self.notes + run.notes())
        if settings.tiling == "exact" and settings.tile and plan.parking is None:
            outcome.notes.append(f"bands of {settings.tile} pixels were not used: this plan gives the same frames")
        return outcome

    @contextmanager
    def running(
        self, operation: str, size: tuple[int, int, int, int], settings: Settings, more: dict[str, str] | None = None,
        rest: tuple[int, int] = (0, 0), preview: Callable[[Plan], Preview | None] = lambda plan: None,
        told: bool = True,
    ) -> Iterator[Running]:  # fmt: skip
        """Prepare a "decode" or "encode" of this size: room and weights, the host's bar and its stop button. more: of
        the Request, besides `settings`; rest: as for plans; told: on the node, with the bar and lines."""
        options, gpus = settings.options() | (more or {}), settings.gpus
        keep = settings.keep_models if gpus == "auto" else ""
        if operation == "encode" and not self.engine.can_encode:
            raise InputError(f"{self.engine.path or 'this VAE'} holds a decoder only: encode with the whole VAE's file")
        if operation == "decode" and self.engine.architecture.in_tiles:
            options = options | {"native_blend": native_blend(self.engine.architecture)}
        shown, plans, started = Progress(told), [], time.perf_counter()
        say = say_here if told else _nothing

        def begin(plan: Plan) -> None:
            if gpus != "auto":  # each has its own plan; results are counted, at any place in the clip
                if not plans:
                    shown.start(1, lambda done, total: f"{operation}: {done} of {total}", None)
            elif not plans or plan.grid != plans[-1].grid:  # else the count of steps goes on
                stages = Stages(operation, plan, size[1])
                shown.start(size[0] * stages.ticks, stages, preview(plan))
            plans.append(plan)

        say(f"{operation}: making room and loading the weights", activity="loading")
        with (
            unrecorded(),
            fitting(operation),
            self._loaded(f"{operation}r", size, options, rest, keep) as (made, notes),
            others(self.engine, gpus, made, functools.partial(residents.make_room, patcher=self.patcher)) as shared,
        ):
            loaded = time.perf_counter() - started
            say(f"{operation}: planning")
            say("; ".join(notes()))  # what else is on the card, if anything
            watched = {"progress": shown, "cancel": mm.processing_interrupted, "on_plan": begin, "plan": made}
            try:
                direct = self.decoder if operation == "decode" else {}
                yield Running(options | watched | shared | direct, plans, loaded, notes)
            except Cancelled:
                mm.throw_exception_if_processing_interrupted()
                raise
            finally:
                # Packed weights stay while the host keeps the VAE loaded. Memory for parking, up to tens of GB, does
                # not, nor a run's memory with its graphs, 1 GB and more: the host does not know of it.
                POOL.release()
                KEPT.release()

    @contextmanager
    def _loaded(
        self, half: str, size: tuple[int, int, int, int], options: dict[str, Any], rest: tuple[int, int] = (0, 0),
        keep: str = "auto",
    ) -> Iterator[tuple[Plan | None, Callable[[], list[str]]]]:
        """Have the host make room for the plan and load the weights; yield that plan, and a function that gives the
        notes on other models of the card, inside the context of the run. keep: as of `residents.choose`."""
        here = sampled()
        if here.device != self.device:
            here = bare(self.device)
        for engine in self._engines:  # packed weights that this run's plan does not count
            engine.release_packed(keep=half if engine is self.engine else "")
        before, kept = residents.Before(self.device, self.patcher), None
        among = residents.Among(self.engine, self.patcher, here, half, size, Request(**options), rest, keep)
        if self._on_gpu:
            kept = among.choose(self.engine.planner)
        residents.load(self.patcher, self.device, kept.needs if kept else 0)
        self.engine.patches = patched(self.patcher)  # the patches are on the weights only now
        if layer := altered(self.engine.model):
            raise InputError(f"Another node has changed the layer {layer} of this VAE, which the engine does not "
                             "follow: use Load VAE in front of that node, and no node of this pack")  # fmt: skip
        self.engine.to(self.device)

        def notes() -> list[str]:
            now = among.kept
            return [note for note in (before.words(now.seconds), now.note) if note] if now else []

        context = getattr(mm, "cuda_device_context", None)
        with context(self.device) if context else nullcontext():
            try:
                self.engine.on_pressure, self.engine.on_change = among.clear, among.again
                yield kept and kept.plan, notes
            finally:
                self.engine.on_pressure = self.engine.on_change = None
                if among.kept and among.kept.out:  # it comes back into the memory that torch would keep
                    mm.soft_empty_cache()

    @property
    def _on_gpu(self) -> bool:
        return self.device.type != "cpu"

    def _peak(self, half: str, size: tuple[int, int, int, int]) -> int:
        return self.engine.planner.plan(half, size[1:]).peak_bytes

    def clip(self, images: Tensor, not_video: bool | None = None) -> Tensor:
        """Return any IMAGE as [B, F, H, W, colours]; not_video: as for `encode`."""
        return self.layout.clip(images, self.not_video if not_video is None else not_video)

    def _clip(self, images: Tensor, not_video: bool | None) -> Tensor:
        """Return `clip`, cropped as the host crops before it encodes."""
        clip = self.clip(images, not_video)
        strange(clip)
        return self.vae_encode_crop_pixels(clip.flatten(0, 1)).unflatten(0, clip.shape[:2])

    def _output_dtype(self) -> torch.dtype:
        choose = getattr(mm, "intermediate_dtype", None)
        return choose() if choose else torch.float32

    def _facts(self, settings: Settings) -> dict[str, object]:
        """Return the facts that the panel shows besides the plan of a run."""
        target, source = machine().target(settings.vram_gb, settings.ram_gb)
        return {"model": self.name, "precision": self.engine.precision, "device": str(self.device),
                "target_gb": target and target / GIB, "target_source": source,
                "compare_off": self.why_no_own}  # fmt: skip

    @functools.cached_property
    def why_no_own(self) -> str:
        """Return why this host has no network of its own for this VAE, judged by sizes; "" where no reason is known."""
        try:
            with torch.device("meta"):
                own(self.outline.tensors, self.outline.metadata)
        except RuntimeError as error:
            if "size mismatch" in str(error):
                return "this ComfyUI has no network of its own for a VAE of these sizes"
        return ""


def _nothing(*_: object, **__: object) -> None:
    pass


class _Patcher(comfy.model_patcher.ModelPatcher):
    """A patcher that first unloads memory the host does not see: the packed weights of the engines that run this
    model."""

    engines: Iterable[VideoVAE] = ()

    def clone(self, *args: Any, **options: Any) -> _Patcher:
        other = super().clone(*args, **options)
        other.engines = self.engines
        return other

    def partially_unload(self, device_to: torch.device, memory_to_free: float = 0, **options: object) -> int:
        freed = sum(engine.release() for engine in self.engines)
        if freed < memory_to_free:
            freed += super().partially_unload(device_to, memory_to_free - freed, **options)
        return freed


def _give_back(engines: Iterable[VideoVAE]) -> None:
    """Free, when the host unloads a VAE, memory it does not see: packed weights and page-locked memory."""
    for engine in engines:
        engine.release()
    POOL.release()
    empty_host_cache()


def own_vae(vae: comfy.sd.VAE) -> comfy.sd.VAE:
    """Return the host's own VAE with the weights of `vae`: itself, or made anew from the source of an engine VAE.

    Raises InputError where this host has no network for them.
    """
    if not isinstance(vae, EngineVAE):
        return vae
    stored = vae.source()
    return own_or_refused(stored.tensors, stored.metadata, vae.name)
