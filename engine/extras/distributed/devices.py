"""Devices that share a call: their names, kinds and relative speeds, the VAE's copies on them, and errors that concern
one of them alone."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Sequence

import torch

from ... import log
from ...errors import InputError, PlanError, ZeroWasteError
from ...execution.core import Core
from ...kernels.targets import ways
from ...network.offload import staying
from ...system.devices import synchronize

#: Rows and columns of the matrices whose product is timed, and the number of products.
_SIDE, _PRODUCTS = 2048, 4


def resolve(devices: str | Sequence[str | torch.device] | None, own: torch.device) -> list[torch.device]:
    """Return the devices that `devices` names.

    Args:
        devices: None or "auto" for the VAE's own device alone, "all" for all GPUs of the process with the VAE's own
            first, or a list of names, also as one string with commas.
        own: device of the VAE.

    Raises: InputError where it names no device, or one that torch does not have.
    """
    if devices is None or devices in ("auto", ""):
        return [own]
    if devices == "all":
        others = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if own.type == "cuda" else []
        return [own, *(d for d in others if d != own)]
    if isinstance(devices, str):
        devices = [n.strip() for n in devices.split(",")]
    names = list(devices) if isinstance(devices, Iterable) else []
    if not names:
        raise InputError("devices names none: give a list such as cuda:0,cuda:1, or all")
    return [_device(name) for name in names]


def _device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"devices: {name!r} is not a device torch knows: use cuda:N or cpu") from error
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise InputError(f"devices: {name} is not there: CUDA GPUs that torch sees: {count}")
        return torch.device("cuda", device.index or 0)
    return device


def same_kind(kinds: Sequence[tuple[object, str]], mixed: bool) -> None:
    """Refuse devices of different kinds, because they round differently, unless they were asked for.

    Args:
        kinds: name and kind of each device.
        mixed: only warn.

    Raises: InputError where the kinds differ and `mixed` is false.
    """
    (first, kind), *others = kinds
    other = next(((name, k) for name, k in others if k != kind), None)
    if other is None:
        return
    names = f"{first} is {kind} and {other[0]} is {other[1]}"
    if not mixed:
        raise InputError(f"devices of different kinds do not give the same bits ({names}): use one kind, or "
                         "mixed_devices (--mixed-devices) to have them all the same")  # fmt: skip
    log.warn(f"{names}: a part's bits are those of the kind that makes it")


def kind_of(device: torch.device, kernels: str | None = None) -> str:
    """Return the name of a device, on which bits depend.

    Args:
        device: any device; for a CPU the result is its type.
        kernels: where given (as `--kernels` has them), the name also lists what may launch these kernels on the device.
    """
    if device.type != "cuda":
        return device.type
    name = torch.cuda.get_device_name(device)
    return name if kernels is None else f"{name} ({', '.join(here.identity for here in ways(device, kernels))})"


def measured(cores: Sequence[Core]) -> list[float]:
    """Return the relative speeds of devices, 1 for the fastest: by timing a matrix product where their kinds differ."""
    if len({kind_of(core.device) for core in cores}) == 1:
        return [1.0] * len(cores)
    return relative([seconds(core) for core in cores])


def relative(times: Sequence[float]) -> list[float]:
    """Return speeds relative to the fastest, from times."""
    return [min(times) / spent for spent in times]


def seconds(core: Core) -> float:
    """Return the seconds that a device takes for the timed products."""
    x = torch.ones(_SIDE, _SIDE, dtype=core.dtype, device=core.device)
    for _ in range(2):  # the first one also loads libraries
        if core.device.type == "cuda":
            synchronize(core.device)
        start = time.perf_counter()
        for _ in range(_PRODUCTS):
            x @ x
        if core.device.type == "cuda":
            synchronize(core.device)
        spent = time.perf_counter() - start
    return spent


def of_a_device(error: Exception) -> bool:
    """Check whether another device may succeed where one failed with `error`."""
    if isinstance(error, ZeroWasteError):
        return isinstance(error, PlanError)
    return isinstance(error, RuntimeError | MemoryError)


def copies_on(vae: Core, devices: Sequence[torch.device]) -> list[Core]:
    """Return the VAE for each of the devices.

    Copies stay until its `release` or `release_copies`, or until its weights change."""
    out: list[Core] = []
    vae.follow()
    for device in devices:
        place = device, sum(o.device == device for o in out)
        if place == (vae.device, 0):
            out.append(vae)
            continue
        if place not in vae._copies:
            vae._copies[place] = _copied(vae, device)
        vae._copies[place].options = vae.options
        out.append(vae._copies[place])
    return out


def _copied(vae: Core, device: torch.device) -> Core:
    other = copy.copy(vae)
    other._separate()
    other.device, other.on_pressure, other.on_change = device, None, None
    there = next((c for c in (vae, *vae._copies.values()) if c.home == other.home), None)
    if there is None:
        shared = {id(p): p for p in staying(vae.model)}
        other.model = other._loaded = copy.deepcopy(vae.model, shared).to(device)
        other._identify()
        other._stored = vae._stored  # the same weights
    else:
        other.model, other._loaded, other._made_of = there.model, there._loaded, there._made_of
    other._use(vae.options)
    return other
