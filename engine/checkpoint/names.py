"""Tensor names: the key sets of known VAEs, and the prefix a container may have put before them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Containers: single-file checkpoints, stable-diffusion.cpp (--vae), trainers, DataParallel.
PREFIXES = ("first_stage_model.", "vae.", "model.", "module.")


@dataclass(frozen=True)
class KeySet:
    """A VAE family, recognised by any one of `keys` (decoder keys, and encoder keys for encoder-only files)."""

    name: str
    keys: tuple[str, ...]


# The order decides: a later family's keys may also occur in an earlier one (HunyuanVideo's in LTX, Wan 2.1's in 2.2).
KEY_SETS = (
    KeySet(
        "seedvr2",
        ("decoder.up_blocks.2.upsamplers.0.upscale_conv.weight", "encoder.down_blocks.1.downsamplers.0.conv.weight"),
    ),
    KeySet(
        "mochi",
        (
            "decoder.blocks.2.blocks.3.stack.5.weight",
            "blocks.2.blocks.3.stack.5.weight",
            "encoder.layers.4.layers.1.attn_block.attn.qkv.weight",
            "layers.4.layers.1.attn_block.attn.qkv.weight",
        ),
    ),
    KeySet(
        "ltx",
        (
            "decoder.up_blocks.0.res_blocks.0.conv1.conv.weight",
            "encoder.down_blocks.0.res_blocks.0.conv1.conv.weight",
        ),
    ),
    KeySet("hunyuanvideo", ("decoder.conv_in.conv.weight", "encoder.conv_in.conv.weight")),
    KeySet("cosmos", ("decoder.unpatcher3d.wavelets", "encoder.patcher3d.wavelets")),
    KeySet(
        "wan2.2",
        (
            "decoder.upsamples.0.upsamples.0.residual.2.weight",
            "encoder.downsamples.0.downsamples.0.residual.2.weight",
        ),
    ),
    KeySet("wan2.1", ("decoder.middle.0.residual.0.gamma", "encoder.middle.0.residual.0.gamma")),
    KeySet(
        "wan-diffusers", ("decoder.mid_block.resnets.0.norm1.gamma", "encoder.mid_block.resnets.0.norm1.gamma")
    ),
    KeySet("taehv", ("decoder.22.bias",)),
)


def find_key_set(names: Iterable[str]) -> KeySet | None:
    """The first family one of whose keys is among `names`."""
    present = set(names)
    return next((k for k in KEY_SETS if present.intersection(k.keys)), None)


def find_prefix(names: Iterable[str]) -> str:
    """The container's prefix: "" unless a known key set is found only behind one of PREFIXES."""
    names = list(names)
    if find_key_set(names):
        return ""
    for prefix in PREFIXES:
        if find_key_set(n[len(prefix) :] for n in names if n.startswith(prefix)):
            return prefix
    return ""
