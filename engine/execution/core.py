"""A loaded VAE under its options: precision, components (encoder and decoder), plans and memory."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from .. import log
from ..archs import Architecture, colours_of
from ..calibration.mixed import Mixed
from ..checkpoints.source import Source, widened
from ..errors import InputError, NonFiniteError
from ..kernels.probe import from_kernels
from ..kernels.targets import Target, using
from ..options import DEFAULTS, Options, unavailable, unused
from ..planning.budget import Limits, Machine
from ..planning.choice import Choices
from ..planning.fusable import why_no_8_bit, why_off
from ..planning.make import make_planner, mode_here, switched_off
from ..planning.plain_walk import Torch
from ..planning.plan import Plan
from ..precision.policy import Policy
from ..report import Report
from ..request import Request
from ..runtime.kept import KEPT
from ..runtime.pinned import POOL
from ..runtime.pressure import out_of_memory
from ..runtime.scope import scoped_math
from ..system.devices import empty_host_cache, numbered
from ..tuning import kept
from .guard import SAFER
from .halves import FusedHalves, PlainHalves, other_half
from .identity import Following
from .own_clip import OwnHalf
from .own_halves import OwnHalves
from .passes import Half


def no_check() -> None:
    """Never cancel: for the raw pair and for plans made outside a call."""


class Core(Following):
    """Weights in one precision on one device, under one set of options: the object that calls (call.py) work with."""

    def __init__(
        self, model: nn.Module, architecture: Architecture, precision: str, dtype: torch.dtype, device: torch.device,
        path: Path | None = None, asked: str | None = None, waits: bool = False,
    ) -> None:  # fmt: skip
        """precision: the name of `dtype`. asked: the precision as the user named it, such as "auto" or "fp8". waits:
        keep the weights in host memory for runs on a GPU; otherwise the model's holder moves them there."""
        self.asked, self._waits = asked or precision, waits
        self.model = self._loaded = model
        #: The source to read `model` again from without the rounding to `dtype`; None: it was not rounded.
        self.source: Source | None = None
        self.architecture, self.arch = architecture, architecture.name
        self._float = precision
        self.dtype, self.device, self.path = dtype, numbered(device), path
        #: Sizes of host-side latents; the network's own are those of `architecture` and `model.config`.
        self.latent_channels: int = model.config.latent_channels * architecture.side**2
        self.spatial = architecture.spatial * architecture.side
        #: Channels of an input pixel and of an output pixel.
        self.colours = colours_of(model.config)
        self.temporal, self.scale = architecture.temporal, architecture.scale
        self._identify()
        self._separate()
        #: Callback that frees memory of other owners when a run finds none; None: there is none.
        self.on_pressure: Callable[[], None] | None = None
        self._use(DEFAULTS)

    def _use(self, options: Options) -> None:
        """Set the options and make the objects for packed weights and plans anew."""
        self._timed = None
        self._options = options
        model, dtype = self.model, self.dtype
        self._parameters = tuple(model.parameters())  # every plan counts their bytes; collecting them takes longer
        self._plain = PlainHalves(model, self.architecture, dtype, options)
        self._mixed = self._mode_of(options)
        here = weakref.proxy(self)  # no cycle: an unused VAE is freed at once, with its weights
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
        """Return the computing precision: "fp32", "bf16", "fp16", or one of `MIXED` where this machine runs that."""
        mode = self._mixed.mode
        return mode.kind or ("fp16_fast" if mode.half_accumulate else self._float)

    @property
    def options(self) -> Options:
        """Return the optimisations it may use. Assigning others drops packed weights and plans, which depend on
        them."""
        return self._options

    @options.setter
    def options(self, options: Options) -> None:
        if options != self._options:
            self._use(options)

    def with_options(self, options: Options) -> Core:
        """Return a VAE with the same weights (shared, not copied) under other options; this one stays as it is."""
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
        """Return the device that holds the weights. From host memory a run on a GPU takes those of its component,
        packed or, for plain torch, as they are; they stay on the GPU until the component runs the other way, or
        `release`."""
        return torch.device("cpu") if self._waits and self.device.type == "cuda" else self.device

    def to(self, device: torch.device | str) -> Core:
        """Move the weights to the device of the runs, or let them wait in host memory for it; return self."""
        there = numbered(torch.device(device))
        if there != self.device:
            self.release()
            self.device = there
            self._use(self._options)
        self.model.to(self.home)
        return self

    def fused(self) -> FusedHalves | None:
        """Return the fused kernels, or None where they are switched off or cannot run; the reason is logged once."""
        reason = self._kernels_off(emulate=self._mixed.mode.kind is not None)
        if reason:
            if self.device.type == "cuda":
                log.once(f"fused kernels off: {reason}")
            return None
        return self._fused

    def kernels(self, half: str) -> Target | None:
        """Return the launcher of the kernels of "encoder" or "decoder"; None: there is nothing to choose, on a CPU."""
        return self._choices.of(half)

    def unused(self, fused: bool | None = None) -> dict[str, str]:
        """Return optimisation -> reason, for each one that runs do not use. fused: runs on the fused kernels (True),
        others (False), or the kind that untiled runs are (None)."""
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
        """Choose the operands of a component for a clip before it is planned, or take those `given`; return True if
        they changed."""
        if getattr(self.model, half).program.scales or (self.architecture.own is not None and self.fused() is None):
            return False  # its products' inputs are scaled as they come, or plain torch runs
        if given is None or self._mixed.mode.plain:
            with torch.no_grad(), self._scope(half):
                given = self._mixed.settle(half, samples)
        return self._fused.use(half, given)

    def settled(self, half: str, samples: Callable[..., list[Tensor]]) -> Policy:
        """Return the operands of a component ("encoder" or "decoder") for a clip; samples(vae, *device) gives its
        samples."""
        with self._claimed() as vae:
            vae._settle(half, lambda *there: samples(vae, *there))
            return vae._mixed.policy(half)

    def asks(self) -> Callable[[], None] | None:
        """Return `on_pressure`; in the threads of several devices, the callback that goes by way of the caller's
        thread."""
        return getattr(self._own, "asks", self.on_pressure)

    def release(self) -> int:
        """Free the memory that only makes the next run start sooner: graphs, packed weights, copies on other devices
        and page-locked host memory, torch's own included. Return the bytes of the packed weights."""
        timed, self._timed = self._timed, None
        if timed is not None:
            timed[1].release()
        self.release_copies()
        return self._release_here()

    def release_copies(self) -> None:
        """Do the part of `release` on other devices."""
        for copied in self._copies.values():
            copied.release_packed()
        self._copies.clear()

    def _release_here(self) -> int:
        POOL.release()
        empty_host_cache()
        return self.release_packed()

    def release_packed(self, keep: str = "") -> int:
        """Do the part of `release` on this device: free graphs, and the packed weights except those of the component
        `keep`; return their bytes."""
        return self._tiled.release(keep) + self._fused.release(keep) + self._plain.release(keep)

    @property
    def packed_bytes(self) -> int:
        """Return the bytes of weights on the device, packed or copied, in addition to the model's own."""
        return sum(map(self._packed, ("encoder", "decoder")))

    def frames(self, latents: int) -> int:
        """Return how many frames `latents` decode to."""
        return self.architecture.frames(latents)

    def _held(self, half: str) -> int:
        """Return the bytes on its device that a plan for `half` counts, or that are freed before it runs: not foreign
        memory."""
        own = sum(p.nbytes for p in self._parameters if p.device.type == self.device.type)
        return own + self._packed(half) + KEPT.nbytes(self.device)

    def _packed(self, half: str) -> int:
        return self._tiled.nbytes * (half == "decoder") + self._fused.packed_bytes(half) + self._plain.nbytes(half)

    def _plan(
        self, half: str, size: tuple[int, int, int], request: Request, rest: tuple[int, int] = (0, 0), below: int = 0,
        check: Callable[[], None] = no_check, made: Plan | None = None,
    ) -> Plan:
        """Return a plan. size, rest, check: as for `Planner.plan`. below: take the first plan whose peak is less than
        so many bytes, whatever is free; 0: the one for the free memory. made: a plan for the same clip, kept where it
        still fits."""
        self.planner.walk.rates = kept.rates(self.device)
        beside, limits = self._packed(other_half(half)), self._limits(half, request)
        if below:
            limits = limits.below(below - beside)
        elif made is not None and limits.hold(made):
            return made.with_beside(beside)
        return self.planner.plan(half, size, request, limits, rest, check).with_beside(beside)

    def _limits(self, half: str, request: Request) -> Limits:
        """Return the limits of a run that starts now."""
        machine = Machine.now(self.device, self._held(half), self._packed(other_half(half)))
        return machine.limits(request).shared(self.sharing, self.device)

    def _half(self, name: str, plan: Plan, seed: int | None = None) -> Half | OwnHalf:
        """Return a component for one run. seed: of the noise that a decoder adds between its convolutions."""
        if plan.own is not None:
            return self._tiled.half(name, plan, self.device, self._fused.encoder, self._plain.there)
        if plan.fused:
            return self._fused.half(name, self.scale, self.device)
        return self._plain.half(name, self.scale, self.device, seed)

    def inside(self, z: Tensor) -> Tensor:
        """Return latents [B, C, T, h, w] from outside in the form of the network and its plans. Pictures become one
        clip: none depends on another, and as frames of a clip they share steps."""
        if self.model.packing is not None:
            z = self.model.packing.unpack(z)
        return z.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] if self.architecture.still else z

    def at(self, timestep: float | None) -> Core:
        """Return this VAE with its decoder at another timestep in 0..1 (None: the file's); the weights are shared.
        Raises InputError where the decoder takes none."""
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
        return timed[1]  # another thread may have replaced `_timed` by now

    # -- calls --------------------------------------------------------------------------------------------------------

    def _separate(self) -> None:
        """Give this object its own copy of everything that calls write to."""
        #: Copies of this VAE on other devices, by device and number on it.
        self._copies: dict[tuple[torch.device, int], Core] = {}
        #: The number of runs that share this machine's memory, each on its device.
        self.sharing = 1
        #: Held by the call that uses the packed weights, plans and graphs.
        self._busy = threading.Lock()
        self._own = threading.local()
        #: The latest VAE that `at` made, with its timestep.
        self._timed: tuple[float, Core] | None = None
        self._latest: Report | None = None

    @property
    def last_report(self) -> Report | None:
        """Return the report of this thread's latest decode or encode, or where it has had none, of any thread's. It is
        filled from the start of a run on; None before the first."""
        return getattr(self._own, "report", self._latest)

    @contextmanager
    def _claimed(self) -> Iterator[Core]:
        """Yield this VAE for one call. Where another call has it, in any thread, yield one with the same weights that
        packs and plans for itself: calls share nothing that they write to, and none waits for another."""
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
        """Apply the options to torch's settings, and choose a component's kernels, for the duration of its run."""
        o = self._options
        math = scoped_math(self.device, tf32=o.tf32, cudnn_benchmark=o.cudnn_benchmark,
                           flash_attention=o.flash_attention)  # fmt: skip
        with math, using(self.kernels(half) if half else None):
            yield

    def _begin(self, operation: str, clip: tuple[int, int, int, int]) -> Report:
        """Start the report of a run; clip: batch, frames, height and width in pixels."""
        name = f" ({torch.cuda.get_device_name(self.device)})" if self.device.type == "cuda" else ""
        return self._tell(Report(operation, clip, self.arch, self.precision, f"{self.device}{name}"))

    def _tell(self, report: Report) -> Report:
        """Make `report` the last one."""
        self._own.report = self._latest = report
        return report

    def _without_kernels(self, half: str, error: Exception) -> bool:
        """Switch the failed kernels off on this device, for this and all later calls, and return True, if `error` is
        theirs and other kernels or plain torch can run the component without them."""
        if self.fused() is None or not from_kernels(error) or out_of_memory(error):
            return False
        if not self._choices.give_up(half, error) or (self.kernels(half) is None and self.fused() is not None):
            return False
        self._release_here()
        self._use(self._options)
        return True

    def _safer(self, where: str) -> Core:
        """Return this VAE without approximations or, if it has none, in the type of the next wider range, after a run
        in which `where` was not finite. Raises NonFiniteError where there is none."""
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
