"""A loaded VAE under its options: its precision, halves, plans and memory."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from . import log
from .archs import Architecture, colours_of
from .errors import InputError, NonFiniteError
from .halves import FusedHalves, PlainHalves, other_half
from .identity import Following
from .kernels.probe import from_kernels
from .kernels.targets import Target, using
from .operands.policy import Policy
from .options import DEFAULTS, Options, unavailable, unused
from .own_halves import OwnHalves
from .planning.budget import Machine
from .planning.choice import Choices
from .planning.fusable import why_no_8_bit, why_off
from .planning.make import make_planner, mode_here, switched_off
from .planning.plain_walk import Torch
from .precision.mixed import Mixed
from .precision.source import Source, widened
from .report import Report
from .request import Request
from .run.devices import empty_host_cache, numbered
from .run.guard import SAFER
from .run.kept import KEPT
from .run.own_clip import OwnHalf
from .run.passes import Half
from .run.pinned import POOL
from .run.plan import Plan
from .run.pressure import out_of_memory
from .run.scope import scoped_math
from .tuning import kept


def no_check() -> None:
    """Nothing cancels the raw pair, or a plan on its own."""


class Core(Following):
    """Weights in one precision on one device, under one set of options: what calls (call.py) work with."""

    def __init__(
        self, model: nn.Module, architecture: Architecture, precision: str, dtype: torch.dtype, device: torch.device,
        path: Path | None = None, asked: str | None = None, waits: bool = False,
    ) -> None:  # fmt: skip
        """precision: the name of `dtype`. asked: the precision as the user named it, such as "auto" or "fp8". waits:
        for runs on a GPU the weights stay in host memory; else whoever has the model moves it there."""
        self.asked, self._waits = asked or precision, waits
        self.model = self._loaded = model
        #: Where `model` can be read again without the rounding to `dtype`; None: it was not rounded.
        self.source: Source | None = None
        self.architecture, self.arch = architecture, architecture.name
        self._float = precision
        self.dtype, self.device, self.path = dtype, numbered(device), path
        #: Of latents outside; the network's own are those of `architecture` and `model.config`.
        self.latent_channels: int = model.config.latent_channels * architecture.side**2
        self.spatial = architecture.spatial * architecture.side
        #: Channels of a pixel that goes in and of one that comes out.
        self.colours = colours_of(model.config)
        self.temporal, self.scale = architecture.temporal, architecture.scale
        self._identify()
        self._separate()
        #: Asked to free memory that is not the engine's when a run finds none; None: there is nobody to ask.
        self.on_pressure: Callable[[], None] | None = None
        self._use(DEFAULTS)

    def _use(self, options: Options) -> None:
        """Set the options, with packed weights and plans made for them."""
        self._timed = None
        self._options = options
        model, dtype = self.model, self.dtype
        self._parameters = tuple(model.parameters())  # every plan counts their bytes; to look for them takes longer
        self._plain = PlainHalves(model, self.architecture, dtype, options)
        self._mixed = self._mode_of(options)
        here = weakref.proxy(self)  # a VAE that nobody has any more is gone at once, with its weights
        self.planner = make_planner(
            self.architecture, model.config, dtype, options, self._mixed.mode, lambda: here.fused() is not None,
            lambda: Torch.on(here.device, dtype, options.tf32), waits=self.home != self.device,
        )  # fmt: skip
        self._choices = Choices(self.planner.walk, self.device, self._mixed.mode)
        self.planner.walk.lacks = self._choices.lacks
        self._fused = FusedHalves(model, self.planner.walk, self.device, self.store)
        self._tiled = OwnHalves(model, dtype, options, self._mixed.mode.kind)

    def _mode_of(self, options: Options) -> Mixed:
        arch = self.architecture
        off = why_no_8_bit(arch.programs(self.model.config), self.dtype, self._kernels_off(emulate=True))
        halves = [half for half in ("encoder", "decoder") if getattr(self.model, half) is not None]
        here = self.asked, self._float, self.dtype, self.device, options, off
        mode = mode_here(*here, arch, self.model.config, halves)
        if mode.refused:
            log.once(mode.refused)
        elif mode.kind and self.device.type == "cpu":
            log.once(f"{mode.kind} on a CPU: the same numbers as on a GPU, but slower than fp32")
        return Mixed(mode, self.model, self.dtype, options, self.store)

    @property
    def precision(self) -> str:
        """What it computes in: "fp32", "bf16", "fp16", or one of `MIXED` where this machine runs that."""
        mode = self._mixed.mode
        return mode.kind or ("fp16_fast" if mode.half_accumulate else self._float)

    @property
    def options(self) -> Options:
        """The optimisations it may use. Assigning others drops packed weights and plans, which depend on them."""
        return self._options

    @options.setter
    def options(self, options: Options) -> None:
        if options != self._options:
            self._use(options)

    def with_options(self, options: Options) -> Core:
        """A VAE with the same weights (shared, not copied) under other options; this one stays as it is."""
        other = copy.copy(self)
        other._separate()
        other._use(options)
        return other

    @property
    def can_decode(self) -> bool:
        return self.model.decoder is not None

    @property
    def can_encode(self) -> bool:
        return self.model.encoder is not None

    @property
    def home(self) -> torch.device:
        """Where the weights lie. From host memory a run on a GPU takes those of its half, packed or for plain torch as
        they are; what it took stays there until the half runs the other way, or `release`."""
        return torch.device("cpu") if self._waits and self.device.type == "cuda" else self.device

    def to(self, device: torch.device | str) -> Core:
        """Move the weights to where the runs will be, or wait in host memory for them; returns self."""
        there = numbered(torch.device(device))
        if there != self.device:
            self.release()
            self.device = there
            self._use(self._options)
        self.model.to(self.home)
        return self

    def fused(self) -> FusedHalves | None:
        """The fused kernels, or None where they are switched off or cannot run; the reason is logged once."""
        reason = self._kernels_off(emulate=self._mixed.mode.kind is not None)
        if reason:
            if self.device.type == "cuda":
                log.once(f"fused kernels off: {reason}")
            return None
        return self._fused

    def kernels(self, half: str) -> Target | None:
        """Return what launches the kernels of "encoder" or "decoder"; None: there is nothing to choose, on a CPU."""
        return self._choices.of(half)

    def unused(self, fused: bool | None = None) -> dict[str, str]:
        """Optimisation -> why runs do not use it. fused: those on the fused kernels, or those that are not (None:
        untiled runs, whichever they are)."""
        mode, fused = self._mixed.mode, self.fused() is not None if fused is None else fused
        kernels = self._options.kernels
        kernels_off = why_off(self.arch, self.model.config, self.dtype, self.device, False, False, kernels)
        off = unused(self._options, unavailable(self.device, self.dtype, kernels_off, kernels), self.dtype, fused)
        if mode.kind and fused:
            off.pop("fp8", None)
            if self.device.type == "cpu":
                off.pop("composed_upsample", None)
        if mode.refused:
            off[mode.asked] = mode.refused
        return off

    def _kernels_off(self, emulate: bool = False) -> str | None:
        here = self.arch, self.model.config, self.dtype, self.device
        return switched_off(self._options) or why_off(*here, emulate, True, self._options.kernels)

    def _settle(self, half: str, samples: Callable[..., list[Tensor]], given: Policy | None = None) -> bool:
        """Choose the operands of a half for a clip, before it is planned, or take those `given`. Returns whether they
        are others now."""
        if getattr(self.model, half).program.scales or (self.architecture.own is not None and self.fused() is None):
            return False  # what its products read is scaled as it comes, or plain torch runs
        if given is None or self._mixed.mode.plain:
            with torch.no_grad(), self._scope(half):
                given = self._mixed.settle(half, samples)
        return self._fused.use(half, given)

    def settled(self, half: str, samples: Callable[..., list[Tensor]]) -> Policy:
        """The operands of a half for a clip."""
        with self._claimed() as vae:
            vae._settle(half, lambda *there: samples(vae, *there))
            return vae._mixed.policy(half)

    def asks(self) -> Callable[[], None] | None:
        """`on_pressure`, in threads of several devices by way of the caller's."""
        return getattr(self._own, "asks", self.on_pressure)

    def release(self) -> int:
        """Give back the memory that only makes the next run start sooner: graphs, packed weights, copies on other
        devices and page-locked host memory, torch's own included. Returns the bytes of the packed weights."""
        timed, self._timed = self._timed, None
        if timed is not None:
            timed[1].release()
        self.release_copies()
        return self._release_here()

    def release_copies(self) -> None:
        """The part of `release` on other devices."""
        for copied in self._copies.values():
            copied.release_packed()
        self._copies.clear()

    def _release_here(self) -> int:
        POOL.release()
        empty_host_cache()
        return self.release_packed()

    def release_packed(self, keep: str = "") -> int:
        """The part of `release` on the device: graphs, and weights but those of the half `keep`."""
        return self._tiled.release(keep) + self._fused.release(keep) + self._plain.release(keep)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the weights now on the device, packed or copied, beside the model's own."""
        return sum(map(self._packed, ("encoder", "decoder")))

    def frames(self, latents: int) -> int:
        """That `latents` decode to."""
        return self.architecture.frames(latents)

    def _held(self, half: str) -> int:
        """Bytes on its device that a plan for `half` counts, or that are freed before it runs: they are not foreign."""
        own = sum(p.nbytes for p in self._parameters if p.device.type == self.device.type)
        return own + self._packed(half) + KEPT.nbytes(self.device)

    def _packed(self, half: str) -> int:
        return self._tiled.nbytes * (half == "decoder") + self._fused.packed_bytes(half) + self._plain.nbytes(half)

    def _plan(
        self, half: str, size: tuple[int, int, int], request: Request, rest: tuple[int, int] = (0, 0), below: int = 0,
        check: Callable[[], None] = no_check, made: Plan | None = None,
    ) -> Plan:
        """size, rest, check: as for `Planner.plan`. below: the first plan whose peak is less than so many bytes,
        whatever is free; 0: the one for what is free. made: one for the same clip, to be kept where it still fits."""
        self.planner.walk.rates = kept.rates(self.device)
        beside = self._packed(other_half(half))
        limits = Machine.now(self.device, self._held(half), beside).limits(request).shared(self.sharing, self.device)
        if below:
            limits = limits.below(below - beside)
        elif made is not None and limits.hold(made):
            return made.with_beside(beside)
        return self.planner.plan(half, size, request, limits, rest, check).with_beside(beside)

    def _half(self, name: str, plan: Plan, seed: int | None = None) -> Half | OwnHalf:
        """seed: of noise that a decoder adds between its convolutions."""
        if plan.own is not None:
            return self._tiled.half(name, plan, self.device, self._fused.encoder, self._plain.there)
        if plan.fused:
            return self._fused.half(name, self.scale, self.device)
        return self._plain.half(name, self.scale, self.device, seed)

    def inside(self, z: Tensor) -> Tensor:
        """Latents [B, C, T, h, w] from outside as the network and its plans know them. Pictures become one clip: none
        knows of another, and as frames of a clip they share steps."""
        if self.model.packing is not None:
            z = self.model.packing.unpack(z)
        return z.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] if self.architecture.still else z

    def at(self, timestep: float | None) -> Core:
        """This VAE with its decoder at another timestep (None: what the file says); the weights are shared. Raises
        InputError where its decoder takes none."""
        usual = getattr(self.model.config, "timestep", None)
        if timestep is None or timestep == usual:
            return self
        if usual is None:
            raise InputError(f"the decoder of {self.arch} takes no timestep: leave it out")
        if not 0.0 <= timestep <= 1.0:
            raise InputError(f"timestep={timestep} is none: give 0 to 1")
        self.follow()
        timed = self._timed
        if timed is None or timed[0] != timestep:
            other = copy.copy(self)
            other._separate()
            other.model = other._loaded = copy.deepcopy(self.model, {id(p): p for p in self.model.parameters()})
            for module in other.model.modules():
                if getattr(module, "timestep", None) is not None:
                    module.timestep = timestep
            other._identify()
            other._use(self._options)
            timed = self._timed = timestep, other
        return timed[1]  # another thread may have asked for another one by now

    # -- calls --------------------------------------------------------------------------------------------------------

    def _separate(self) -> None:
        """Make what calls write to this object's own."""
        #: Of the same VAE on other devices, by device and number on it.
        self._copies: dict[tuple[torch.device, int], Core] = {}
        #: Runs that share this machine's memory, each on its device.
        self.sharing = 1
        #: Held by the call that uses the packed weights, plans and graphs.
        self._busy = threading.Lock()
        self._own = threading.local()
        #: The latest one that `at` made, with its timestep.
        self._timed: tuple[float, Core] | None = None
        self._latest: Report | None = None

    @property
    def last_report(self) -> Report | None:
        """What this thread's latest decode or encode did, or where it has had none, any thread's. Filled from the start
        of a run on; None before the first."""
        return getattr(self._own, "report", self._latest)

    @contextmanager
    def _claimed(self) -> Iterator[Core]:
        """This VAE for one call. Where another call has it, in whatever thread, one with the same weights that packs
        and plans for itself: calls share nothing that they write to, and none waits for another."""
        if self._busy.acquire(blocking=False):
            try:
                self._follow()
                if self._mixed.mode.kind and self.architecture.own is None and self.fused() is None:
                    self._use(self._options)  # another VAE has found that the kernels fail: no 8 bit without them
                yield self
            finally:
                self._busy.release()
        else:
            other = copy.copy(self)
            if not self._made_of.holds(self.model, self.patches):
                other._identify()
            other._use(self._options)
            yield other

    @contextmanager
    def _scope(self, half: str = "") -> Iterator[None]:
        """torch's settings as the options want them, and the kernels of a half, for the time of its run."""
        o = self._options
        math = scoped_math(self.device, tf32=o.tf32, cudnn_benchmark=o.cudnn_benchmark,
                           flash_attention=o.flash_attention)  # fmt: skip
        with math, using(self.kernels(half) if half else None):
            yield

    def _begin(self, operation: str, clip: tuple[int, int, int, int]) -> Report:
        """The report of a run that starts; clip: batch, frames, height and width in pixels."""
        name = f" ({torch.cuda.get_device_name(self.device)})" if self.device.type == "cuda" else ""
        return self._tell(Report(operation, clip, self.arch, self.precision, f"{self.device}{name}"))

    def _tell(self, report: Report) -> Report:
        """From now on the last one."""
        self._own.report = self._latest = report
        return report

    def _without_kernels(self, half: str, error: Exception) -> bool:
        """Whether `error` is one of the kernels that run a half, and other kernels or plain torch can do without them.
        They are then off on this device, for this call and all later ones."""
        if self.fused() is None or not from_kernels(error) or out_of_memory(error):
            return False
        if not self._choices.give_up(half, error) or (self.kernels(half) is None and self.fused() is not None):
            return False
        self._release_here()
        self._use(self._options)
        return True

    def _safer(self, where: str) -> Core:
        """This VAE without approximations or, if it has none, in the type of the next wider range, for a run in which
        `where` was not finite. Raises NonFiniteError where there is none."""
        exact = self._mixed.mode.plain
        if exact and self.dtype not in SAFER:
            raise NonFiniteError(f"{where} came out as NaN or Inf in {self.precision}: weights or latent are damaged")
        dtype, name = SAFER[self.dtype] if exact else (self.dtype, self._float)
        log.warn(f"{where} came out as NaN or Inf in {self.precision}; going on from there in {name}")
        self._release_here()
        other = copy.copy(self)
        other.asked, other._float, other.dtype = name, name, dtype
        if exact:
            other.model = widened(self._loaded, self.source, dtype)
            other._identify()
        other._use(self._options.switched(off=["fp8"]))
        return other
