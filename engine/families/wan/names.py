"""Map diffusers' names of Wan's networks to the original ones."""

from __future__ import annotations

import re

# The parts of a resnet.
_LEAVES = {
    "norm1": "residual.0",
    "conv1": "residual.2",
    "norm2": "residual.3",
    "conv2": "residual.6",
    "conv_shortcut": "shortcut",
}
_TOP = {
    "quant_conv": "conv1",
    "post_quant_conv": "conv2",
    "encoder.conv_in": "encoder.conv1",
    "encoder.norm_out": "encoder.head.0",
    "encoder.conv_out": "encoder.head.2",
    "decoder.conv_in": "decoder.conv1",
    "decoder.norm_out": "decoder.head.0",
    "decoder.conv_out": "decoder.head.2",
}
_ATTENTION = ("norm", "to_qkv", "proj")
_RESAMPLE = r"(resample\.1|time_conv)"


def native(names: list[str]) -> dict[str, str | None]:
    """Return {diffusers' name: original name, None if there is none}."""
    # Wan 2.1 numbers all layers of a component in one row, Wan 2.2 nests them per level.
    nested = any(".upsampler." in n or ".downsampler." in n for n in names)
    blocks = (re.match(r"decoder\.up_blocks\.\d{1,3}\.resnets\.(\d{1,3})\.", n) for n in names)
    resnets = 1 + max([2, *(int(m[1]) for m in blocks if m)])
    return {n: _name(n, nested, resnets) for n in names}


def _name(name: str, nested: bool, resnets: int) -> str | None:
    module, _, leaf = name.rpartition(".")
    if module in _TOP:
        return f"{_TOP[module]}.{leaf}"
    half, _, inner = module.partition(".")
    found = _inner(inner, nested, resnets) if half in ("encoder", "decoder") else None
    return None if found is None else f"{half}.{found}.{leaf}"


def _inner(name: str, nested: bool, resnets: int) -> str | None:
    """Map the part between `encoder.`/`decoder.` and the parameter's last name. resnets: of a decoder's level."""
    if m := re.fullmatch(r"mid_block\.resnets\.([01])\.(\w+)", name):
        return _resnet(f"middle.{2 * int(m[1])}", m[2])
    if m := re.fullmatch(r"mid_block\.attentions\.0\.(\w+)", name):
        return f"middle.1.{m[1]}" if m[1] in _ATTENTION else None
    if m := re.fullmatch(rf"up_blocks\.(\d{{1,3}})\.upsamplers?(?:\.0)?\.{_RESAMPLE}", name):
        return f"{_level('up', m[1], resnets, nested, resnets)}.{m[2]}"
    if m := re.fullmatch(r"up_blocks\.(\d{1,3})\.resnets\.(\d{1,3})\.(\w+)", name):
        return _resnet(_level("up", m[1], int(m[2]), nested, resnets), m[3])
    if m := re.fullmatch(rf"down_blocks\.(\d{{1,3}})\.downsampler\.{_RESAMPLE}", name):
        return f"{_level('down', m[1], 2, nested)}.{m[2]}"
    if m := re.fullmatch(r"down_blocks\.(\d{1,3})\.resnets\.(\d{1,3})\.(\w+)", name):
        return _resnet(_level("down", m[1], int(m[2]), nested), m[3])
    if m := re.fullmatch(rf"down_blocks\.(\d{{1,3}})\.{_RESAMPLE}", name):
        return f"downsamples.{m[1]}.{m[2]}"
    if m := re.fullmatch(r"down_blocks\.(\d{1,3})\.(\w+)", name):
        return _resnet(f"downsamples.{m[1]}", m[2])
    return None


def _level(direction: str, level: str, index: int, nested: bool, resnets: int = 2) -> str:
    row = f"{direction}samples"
    return f"{row}.{level}.{row}.{index}" if nested else f"{row}.{(resnets + 1) * int(level) + index}"


def _resnet(prefix: str, part: str) -> str | None:
    return f"{prefix}.{_LEAVES[part]}" if part in _LEAVES else None
