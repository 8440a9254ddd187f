"""ComfyUI's start options: their meaning for this pack's VAEs, and a log line for those that change nothing."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import fields

from ..engine import log
from ..engine.memory import GIB
from ..engine.orders import ORDERS, Orders

#: The host's option for a VAE's type -> our name of the type.
_TYPES = {"fp16_vae": "fp16", "bf16_vae": "bf16", "fp32_vae": "fp32"}
_WHOLE = "this pack's VAEs are on the GPU whole while they run; a VRAM limit makes a decode take less"
#: Options that change nothing here -> why.
_NOTHING = {
    "lowvram": _WHOLE,
    "novram": _WHOLE,
    "cache_none": "VAEs are loaded, and their weights packed, anew for every run",
}


def orders_of(args: Namespace) -> tuple[Orders, list[str]]:
    """Return the orders to the engine that these start options mean, and a line on each of them for the log.

    Hosts have more or fewer options; one that is missing was not given.
    """
    found, lines = Orders(), []
    for option, name in _TYPES.items():
        if getattr(args, option, False):
            found.precision = name
            lines.append(f"{_flag(option)}: precision auto is {name}, for plans and runs alike")
    # The host has turned names into members of its own; `--fast` alone means all of them.
    if any(getattr(one, "value", one) == "fp16_accumulation" for one in getattr(args, "fast", None) or ()):
        found.half_sums = True
        lines.append("--fast fp16_accumulation: precision auto is fp16_fast where the VAE and the card allow it")
    if getattr(args, "disable_async_offload", False):
        found.no_overlap = _flag("disable_async_offload")
        lines.append("--disable-async-offload: copies wait for the GPU: slower, the same frames")
    reserved = getattr(args, "reserve_vram", None)
    if reserved:
        found.reserved = int(reserved * GIB)
        lines.append(f"--reserve-vram: runs leave {reserved:g} GB of the card free")
    return found, lines + [f"{_flag(name)}: {why}" for name, why in _NOTHING.items() if getattr(args, name, False)]


def obey(args: Namespace) -> None:
    """Give the engine its orders, and log once the meaning of each option."""
    found, lines = orders_of(args)
    for field in fields(Orders):
        setattr(ORDERS, field.name, getattr(found, field.name))
    for line in lines:
        log.once(line, log.info)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
