"""A loaded VAE under its options: precision, components (encoder and decoder), plans and memory."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from .. import log
from ..checkpoints.source import Source
from ..errors import InputError
from ..kernels.targets import Target
from ..network import codes
from ..network.architecture import Architecture, colours_of
from ..options import DEFAULTS, Options, unavailable, unused
from ..planning.budget import Limits, Machine
from ..planning.choice import Choices
from ..planning.cost import Rates, tuned
from ..planning.fusable import why_no_8_bit, why_off
from ..planning.make import decided, make_planner, mode_here, switched_off
from ..planning.plain_walk import Torch
from ..planning.plan import Plan
from ..planning.planner import Planner
from ..precision.policies import Fixed, Policies, Samples
from ..precision.policy import Policy
from ..request import Request
from ..runtime.kept import KEPT
from ..runtime.pinned import POOL
from ..system.devices import empty_host_cache, numbered
from ..system.extension import needed
from .calls import Calls
from .components import FusedComponents, PlainComponents, of_family, other_half
from .passes import Component, Ready

T = TypeVar("T", bound="Core")


def no_check() -> None:
    """Never cancel: for the raw pair and for plans made outside a call."""


class Core(Calls):
    """Weights in one precision on one device, under one set of options, as `execution/call.py` uses them."""

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
        self._identify(later=not codes.there(model))
        self._separate()
        #: Callback that frees memory of other owners when a run finds none; None: there is none.
        self.on_pressure: Callable[[], None] | None = None
        #: Callback that makes room and plans a clip again whose operands are others than a given plan was made for, by
        #: the planner that knows them; None: it is planned for what is free.
        self.on_change: Callable[[Planner], Plan] | None = None
        self._use(DEFAULTS)

    def _use(self, options: Options) -> None:
        """Set the options and make the objects for packed weights and plans anew."""
        self._timed = None
        self._options = options
        options = self._decided = decided(options, self.device)
        model, dtype = self.model, self.dtype
        self._parameters = tuple(model.parameters())  # every plan counts their bytes; collecting them takes longer
        self._mixed = self._mode_of(options)
        self._plain = PlainComponents(model, self.architecture, dtype, options)
        here = weakref.proxy(self)  # no cycle: an unused VAE is freed at once, with its weights
        self.planner = make_planner(
            self.architecture, model.config, dtype, options, self._mixed.mode, lambda: here.fused() is not None,
            lambda: Torch.on(here.device, dtype, options.tf32), waits=self.home != self.device,
        )  # fmt: skip
        self._choices = Choices(self.planner.walk, self.device, self._mixed.mode)
        self._choices.read_ahead(half for half in ("decoder", "encoder") if getattr(model, half) is not None)
        self.planner.walk.lacks = self._choices.lacks
        self._fused = FusedComponents(model, self.planner.walk, self.device, self._mixed)
        #: What runs the components that their family runs itself.
        self._family = of_family(model, dtype, options, self._mixed.mode.kind, self._fused, self._plain)

    def _mode_of(self, options: Options) -> Policies:
        arch, off = self.architecture, self._no_8_bit()
        halves = [half for half in ("encoder", "decoder") if getattr(self.model, half) is not None]
        here = self.asked, self._float, self.dtype, self.device, options, off
        mode = mode_here(*here, arch, self.model.config, halves)
        if mode.refused:
            log.once(mode.refused)
        elif mode.kind and self.device.type == "cpu":
            log.once(f"{mode.kind} on a CPU: the same numbers as on a GPU, but slower than fp32")
        if mode.kind is None and not (mode.half_accumulate and options.min_db):
            return Fixed(mode)
        return needed("operands").Mixed(mode, self.model, self.dtype, options, self.store)

    @property
    def precision(self) -> str:
        """Return the computing precision: "fp32", "bf16", "fp16", or one of `MIXED` where this machine runs that."""
        mode = self._mixed.mode
        return mode.kind or ("fp16_fast" if mode.half_accumulate else self._float)

    @property
    def options(self) -> Options:
        """Return the optimisations it may use. Assigning others drops packed weights and plans, which depend on
        them; where they cannot be used, it raises InputError and keeps its own."""
        return self._options

    @options.setter
    def options(self, options: Options) -> None:
        if not isinstance(options, Options):
            raise InputError(f"options is an Options, not {type(options).__name__}: give "
                             "vae.options.switched(on=[...], off=[...])")  # fmt: skip
        if options == self._options:
            return
        before = self._options
        try:
            self._use(options)
        except BaseException:
            self._use(before)
            raise

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

    def fused(self) -> FusedComponents | None:
        """Return the fused kernels, or None where they are switched off or cannot run; the reason is logged once."""
        reason = self._kernels_off(emulate=self._mixed.mode.kind is not None)
        if reason:
            programs = [half.program for half in (self.model.encoder, self.model.decoder) if half is not None]
            launching = any(p.launches and p.why_not_fused() == reason for p in programs)
            if self.device.type == "cuda" and not launching:
                log.once(f"fused kernels off: {reason}")
            return None
        return self._fused

    def kernels(self, half: str) -> Target | None:
        """Return the launcher of the kernels of "encoder" or "decoder"; None: there is nothing to choose, on a CPU."""
        return self._choices.of(half)

    def launches(self, half: str) -> bool:
        """Return True if eager execution of a component launches kernels of ours on this device."""
        if not (self._options.triton_fusion and getattr(self.model, half).program.launches):
            return False
        here = self.kernels(half)
        return here is not None and bool(here.kernels)

    def unused(self, fused: bool | None = None) -> dict[str, str]:
        """Return optimisation -> reason, for each one that runs do not use. fused: runs on the fused kernels (True),
        others (False), or the kind that untiled runs are (None)."""
        mode, fused = self._mixed.mode, self.fused() is not None if fused is None else fused
        kernels = self._options.kernels
        kernels_off = why_off(self.arch, self.model.config, self.dtype, self.device, False, False, kernels)
        reasons = unavailable(self.device, self.dtype, kernels_off, kernels)
        off = unused(self._options, reasons, self.dtype, fused, self._decided.winograd)
        if mode.kind and (fused or any(p.scales for p in self.architecture.programs(self.model.config))):
            off.pop("fp8", None)
        if mode.kind and fused and self.device.type == "cpu":
            off.pop("composed_upsample", None)
        if mode.refused:
            off[mode.asked] = mode.refused
        return off

    def _no_8_bit(self) -> str | None:
        """Return the reason that 8-bit operands are unavailable at present, or None."""
        programs = self.architecture.programs(self.model.config)
        return why_no_8_bit(programs, self.dtype, self._kernels_off(emulate=True))

    def _kernels_off(self, emulate: bool = False) -> str | None:
        here = self.arch, self.model.config, self.dtype, self.device
        return switched_off(self._options) or why_off(*here, emulate, True, self._options.kernels)

    def _settle(self, half: str, samples: Samples, given: Policy | None = None) -> bool:
        """Choose the operands of a component for a clip before it is planned, or take those `given`; return True if
        they changed."""
        program = getattr(self.model, half).program

        def confirmed(cut: Callable[..., list[Tensor]], *there: torch.device) -> list[Tensor]:
            if not there:
                self.confirm()  # the model runs: scales are made of its weights
            return samples(cut, *there)

        if program.scales or program.why_not_fused() or self.fused() is None:
            return False  # its products' inputs are scaled as they come, or plain torch runs
        if given is None or self._mixed.mode.plain:
            with torch.no_grad(), self._scope(half):
                given = self._mixed.settle(half, confirmed)
        return self._fused.use(half, given)

    def settled(self, half: str, samples: Callable[..., list[Tensor]]) -> Policy:
        """Return the operands of a component ("encoder" or "decoder") for a clip; samples(vae, cut, *device) gives its
        samples."""
        with self._claimed(half) as vae:
            vae._settle(half, functools.partial(samples, vae))
            return vae._mixed.policy(half)

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
        return sum(component.release(keep) for component in self._components())

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
        kind = self.device.type
        own = sum(p.nbytes for p in self._parameters if p.device.type == kind)
        return own + self._packed(half) + KEPT.nbytes(self.device)

    def _packed(self, half: str) -> int:
        return sum(component.packed_bytes(half) for component in self._components())

    def _plan(
        self, half: str, size: tuple[int, int, int], request: Request, rest: tuple[int, int] = (0, 0), below: int = 0,
        check: Callable[[], None] = no_check, drawn: int | None = None, made: Plan | None = None,
    ) -> Plan:
        """Return a plan. size, rest, check, drawn: as for `Planner.plan`. below: take the first plan whose peak is less
        than so many bytes, whatever is free; 0: the one for the free memory. made: a plan for the same clip, kept where
        it still fits and is in the tiles that are asked for."""
        measured = tuned(self.device)
        self.planner.walk.rates = Rates() if measured is None else measured.rates(self.device)
        beside, limits = self._packed(other_half(half)), self._limits(half, request)
        if below:
            limits = limits.below(below - beside)
        elif made is not None and limits.hold(made) and (half == "encoder" or made.tiles_as(request)):
            return made.with_beside(beside)
        return self.planner.plan(half, size, request, limits, rest, check, drawn).with_beside(beside)

    def _limits(self, half: str, request: Request) -> Limits:
        """Return the limits of a run that starts now."""
        machine = Machine.now(self.device, self._held(half), self._packed(other_half(half)))
        return machine.limits(request).shared(self.sharing, self.device)

    def _half(self, name: str, plan: Plan, seed: int | None = None) -> Ready:
        """Return a component for one run. seed: of the noise that a decoder adds between its convolutions."""
        return self._component(name, plan).half(name, plan, self.device, self.scale, seed)

    def _component(self, half: str, plan: Plan) -> Component:
        """Return what runs a plan of "encoder" or "decoder"."""
        return self._family.get(half) or (self._fused if plan.fused else self._plain)

    def _components(self) -> tuple[Component, ...]:
        return *dict.fromkeys(self._family.values()), self._fused, self._plain

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
            model = copy.deepcopy(self.model, {id(p): p for p in self.model.parameters()})
            for module in model.modules():
                if getattr(module, "timestep", None) is not None:
                    module.timestep = timestep
            timed = self._timed = timestep, self._with_model(model)
        timed[1].on_pressure, timed[1].on_change = self.on_pressure, self.on_change  # of this call
        return timed[1]  # another thread may have replaced `_timed` by now

    def _with_model(self: T, model: nn.Module) -> T:
        """Return a copy of this VAE with another model and nothing packed."""
        other = copy.copy(self)
        other._separate()
        other.model = other._loaded = model
        other._identify()
        other._use(self._options)
        return other
