"""Make the planner and the precision of a model as it will run, for the VAE object, the panel and the command line."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..kernels.targets import target
from ..network.architecture import Architecture
from ..network.program import Program
from ..options import OFF, Options
from ..precision.modes import MIXED, Mode, resolve, scaled_mode
from ..precision.policies import unsettled
from ..system.orders import ORDERS
from .choice import Choices
from .cost import Rates
from .fusable import why_no_8_bit, why_off
from .fused_walk import FusedWalk
from .meta import meta_model
from .plain_walk import Torch
from .planner import Planner


def make_planner(
    architecture: Architecture, config: Any, dtype: torch.dtype, options: Options, mode: Mode,
    fused: Callable[[], bool], how: Callable[[], Torch], rates: Rates | None = None, waits: bool = False,
) -> Planner:
    """Return the planner of a model.

    Args:
        architecture, config: of the model.
        dtype: of activations.
        options: optimisations that are switched on.
        mode: precision of convolutions; the choice that depends on a clip is set later (`Planner.walk`).
        fused, how, waits: as for `Planner`.
        rates: as for `FusedWalk`.
    """
    walk = FusedWalk(architecture, config, dtype, options, rates)
    if not mode.plain:
        model = meta_model(architecture, config)
        for half in ("encoder", "decoder"):
            if getattr(model, half) is not None:
                walk.use(half, unsettled(mode, options.min_db, getattr(model, half)))
    return Planner(walk, fused, how, mode.kind, waits)


@functools.lru_cache(maxsize=16)
def without_weights(
    architecture: Architecture, config: Any, asked: str, plain: str, dtype: torch.dtype, device: torch.device,
    options: Options, rates: Rates,
) -> tuple[Planner, Choices, str, Mode]:  # fmt: skip
    """Return a planner of a model that is not loaded, the choices of its kernels, why its fused kernels are off ("":
    they are on), and its mode. Arguments: as for `make_planner` and `mode_of`; options: `decided`."""
    here = architecture.name, config, dtype, device
    switched = switched_off(options)
    exact = why_no_8_bit(architecture.programs(config), dtype, switched or why_off(*here, True, False, options.kernels))
    mode = mode_of(asked, plain, dtype, device, options, exact, architecture.programs(config))
    off = switched or why_off(*here, mode.kind is not None, False, options.kernels)
    planner = make_planner(
        architecture, config, dtype, options, mode, lambda: off is None,
        lambda: Torch.on(device, dtype, options.tf32), rates,
    )
    choices = Choices(planner.walk, device, mode, probe=False)
    planner.walk.lacks = choices.lacks
    return planner, choices, off or "", mode


def decided(options: Options, device: torch.device) -> Options:
    """Return `Options.decided` for a device; for a GPU that is not here as for a CPU."""
    there = device if device.type != "cuda" or torch.cuda.is_available() else "cpu"
    return options.decided(target(there, options.kernels))


def mode_of(
    asked: str, plain: str, dtype: torch.dtype, device: torch.device, options: Options, off: str | None,
    programs: Sequence[Program] = (),
) -> Mode:  # fmt: skip
    """Return the mode of a model on a device, as `resolve`, with what `options` ask for.

    Args:
        asked: precision that the user named; with `options.fp8`, fp8 replaces one that asks for no 8 bit.
        plain: name of the type of activations.
        dtype: of activations.
        device: where the model runs.
        options: `fp8`, `min_db` and `kernels` count.
        off: reason that the fused kernels cannot run the model on the device (a CPU may emulate them), or None.
        programs: its components.
    """
    if options.fp8 and device.type == "cuda" and asked not in MIXED and dtype != torch.float32:
        asked = "fp8"
    if asked == "auto" and ORDERS.half_sums and not options.min_db:
        asked = "fp16_fast"
    mode = resolve(asked, device, options.min_db, off, plain, options.kernels)
    scaled = [p for p in programs if p.scales]
    if scaled:
        mode = scaled_mode(mode, device, options.min_db, plain, not any(p.launches for p in scaled))
    return replace(mode, asked=asked) if asked in MIXED else mode


def mode_here(
    asked: str, plain: str, dtype: torch.dtype, device: torch.device, options: Options, off: str | None,
    architecture: Architecture, config: Any, halves: Sequence[str],
) -> Mode:  # fmt: skip
    """Return the mode as `mode_of` does, or a refused one where this machine lacks kernels for it.

    Args:
        asked, plain, dtype, device, options, off: as for `mode_of`.
        architecture, config: of the model.
        halves: components that the model has.
    """
    mode = mode_of(asked, plain, dtype, device, options, off, architecture.programs(config))
    if mode.plain:
        return mode
    why = Choices(FusedWalk(architecture, config, dtype, options), device, mode).lacks_any(halves)
    name = "fp16_fast" if mode.half_accumulate else asked
    refusal = f"{name} is unavailable ({why}): {plain} runs instead"
    return mode if why is None else Mode(refused=refusal, asked=mode.asked)


def switched_off(options: Options) -> str | None:
    """Return the reason that the options switch the fused kernels off, or None."""
    if not options.triton_fusion:
        return OFF
    if options.channels_last_3d is False:
        return "channels_last_3d is switched off, and they know no other layout"
    return None
