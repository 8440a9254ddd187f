"""Map diffusers' names of LTX-Video's and LTX-2's networks to the original ones."""

from __future__ import annotations

import re

# The parts of a decoder's and an encoder's block in the order of the data. The original names number all of a
# component's blocks in one row.
_ORDER = {"decoder": ("conv_in", "upsamplers.0", "resnets"), "encoder": ("resnets", "downsamplers.0", "conv_out")}
_ROW = {"decoder": "up_blocks", "encoder": "down_blocks"}
_BLOCK = re.compile(
    r"(?P<half>encoder|decoder)\.(?P<block>mid_block|(up|down)_blocks\.(?P<number>\d{1,3}))"
    r"\.(?P<part>conv_in|conv_out|upsamplers\.0|downsamplers\.0|resnets|time_embedder)\.(?P<rest>.+)"
)
_BESIDE = {
    "latents_mean": "per_channel_statistics.mean-of-means",
    "latents_std": "per_channel_statistics.std-of-means",
    "decoder.scale_shift_table": "decoder.last_scale_shift_table",
}


def native(names: list[str]) -> dict[str, str | None]:
    """Return {diffusers' name: original name}; other names stay as they are."""
    found = {name: m for name in names if (m := _BLOCK.fullmatch(name))}
    places = sorted({_place(m) for m in found.values()})
    numbers = {place: sum(p[0] == place[0] for p in places[:i]) for i, place in enumerate(places)}
    return {name: _inside(found[name], numbers) if name in found else _outside(name) for name in names}


def _place(m: re.Match[str]) -> tuple[str, int, int]:
    """Return (component, number of the block, number of its part), in the order of the data."""
    half, part = m["half"], "resnets" if m["part"] == "time_embedder" else m["part"]
    number = int(m["number"]) if m["number"] else -1 if half == "decoder" else 1000
    return half, number, _ORDER[half].index(part) if part in _ORDER[half] else len(_ORDER[half])


def _inside(m: re.Match[str], numbers: dict[tuple[str, int, int], int]) -> str:
    rest = re.sub(r"(^|\.)norm3\.", r"\1norm3.norm.", m["rest"]).replace("conv_shortcut.conv.", "conv_shortcut.")
    part = {"resnets": "res_blocks.", "time_embedder": "time_embedder."}.get(m["part"], "")
    return f"{m['half']}.{_ROW[m['half']]}.{numbers[_place(m)]}.{part}{rest}"


def _outside(name: str) -> str:
    return _BESIDE.get(name, re.sub(r"^decoder\.time_embedder\.", "decoder.last_time_embedder.", name))
