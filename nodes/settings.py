"""Settings of a VAE's runs: the wishes of nodes, their precedence, and ComfyUI's start options. No ComfyUI."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, fields, replace
from typing import Any

from ..engine import InputError, log
from ..engine.extras.residents.keeping import KEEP
from ..engine.request import OVERLAP, TILINGS, usual_overlap
from ..engine.system.memory import GIB
from ..engine.system.orders import ORDERS, Orders
from ..engine.system.words import many

DEFAULT_OVERLAP = OVERLAP  # of the widgets: who leaves it means the engine's own default
#: Optimize's switch for direct convolutions on every card.
DIRECT = "direct"
#: Number types of the frames that nodes output.
FRAMES = ("auto", "float32", "float16")


@dataclass(frozen=True)
class Settings:
    """The wishes of one node: tile and overlap in pixels, chunk in latents, vram_gb and ram_gb in GB (2^30).

    "auto", 0 and (for the overlap) None mean that the node leaves the choice to the one before it.
    """

    tiling: str = "auto"
    tile: int = 0
    overlap: int | None = None
    chunk: int = 0
    vram_gb: float = 0.0
    ram_gb: float = 0.0
    output: str = "auto"
    gpus: str = "auto"
    keep_models: str = "auto"

    def over(self, base: Settings) -> Settings:
        """Return these wishes where given, else those of `base`; a tile size stays with the tiling it was given for."""
        own = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}
        if own.get("tiling", base.tiling) != base.tiling:
            base = replace(base, tile=0, overlap=None)
        return replace(base, **own)

    def options(self) -> dict[str, Any]:
        """Return the options of the engine's decode and encode."""
        overlap = usual_overlap(self.tile) if self.overlap in (None, DEFAULT_OVERLAP) else self.overlap
        return {"tiling": self.tiling, "tile": self.tile, "overlap": overlap, "chunk": self.chunk,
                "vram_gb": self.vram_gb or None, "ram_gb": self.ram_gb or None}  # fmt: skip

    def describe(self) -> str:
        return ", ".join(filter(None, (
            f"tiling {self.tiling}", self.tile and f"tile {self.tile} px",
            self.overlap is not None and f"overlap {self.overlap} px",
            self.chunk and f"{many(self.chunk, 'latent')} per chunk",
            self.vram_gb and f"at most {self.vram_gb:g} GB",
            self.ram_gb and f"at most {self.ram_gb:g} GB of host memory",
            self.output != "auto" and f"frames in {self.output}", self.gpus != "auto" and f"GPUs {self.gpus}",
            self.keep_models != "auto" and f"keep models: {self.keep_models}",
        )))  # fmt: skip


def from_widgets(
    tiling: str | dict[str, object] = "auto", tile: int = 0, overlap: int = DEFAULT_OVERLAP, chunk: int = 0,
    vram_gb: float = 0.0, ram_gb: float = 0.0, output: str = "auto", gpus: str = "auto", keep_models: str = "auto",
    **_: object,
) -> Settings:  # fmt: skip
    """Return settings from widget values; `tiling` is a dict (mode and its own widgets) where the host nests widgets.

    Other inputs of a prompt are ignored. Raises InputError on a choice that is not known.
    """
    if isinstance(tiling, dict):
        tile, overlap = tiling.get("tile", 0), tiling.get("overlap", DEFAULT_OVERLAP)
        tiling = tiling["tiling"]
    if tiling not in TILINGS:
        raise InputError(f"tiling={tiling!r} is not known: use one of {', '.join(TILINGS)}")
    if output not in FRAMES:
        raise InputError(f"output={output!r} is not known: use one of {', '.join(FRAMES)}")
    if keep_models not in KEEP:
        raise InputError(f"keep_models={keep_models!r} is not known: use one of {', '.join(KEEP)}")
    overlap_wish = overlap if tiling == "blended" else None
    return Settings(tiling, tile, overlap_wish, chunk, vram_gb, ram_gb, output, gpus.strip() or "auto", keep_models)


#: The host's option for a VAE's type -> our name of the type.
_TYPES = {"fp16_vae": "fp16", "bf16_vae": "bf16", "fp32_vae": "fp32"}
_WHOLE = "this pack's VAEs are on the GPU whole while they run; a VRAM limit makes a decode take less"
#: Options that change nothing here -> why.
_NOTHING = {"lowvram": _WHOLE, "novram": _WHOLE,
            "cache_none": "VAEs are loaded, and their weights packed, anew for every run",
            "disable_smart_memory": "ComfyUI unloads every model for a run, whatever Keep models says"}  # fmt: skip


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
