"""All architectures and the keys that files are known by."""

from __future__ import annotations

import re
from collections.abc import Iterable

from . import cosmos, hunyuan, hunyuan15, hunyuan_refiner, kl, ltx, minimax_h3, mochi, seedvr2, wan
from .arch import Architecture, KeySet

ARCHITECTURES: tuple[Architecture, ...] = (
    seedvr2.ARCHITECTURE, wan.WAN21, wan.WAN22, kl.SD, kl.FLUX, kl.FLUX2,
    ltx.ARCHITECTURE, mochi.ARCHITECTURE, cosmos.ARCHITECTURE,
    hunyuan.ARCHITECTURE, hunyuan15.ARCHITECTURE, hunyuan_refiner.ARCHITECTURE,
    minimax_h3.ARCHITECTURE,
)  # fmt: skip
#: What plans, benchmarks and reasons are about where no file is named.
DEFAULT = ARCHITECTURES[0]
#: What people search for.
WORDS = tuple(dict.fromkeys(word for a in ARCHITECTURES if a.published for word in a.published.words))
#: In the names of reduced decoders, which are other networks than those they are named after.
_REDUCED = re.compile(r"tae|lighttae|lightvae", re.IGNORECASE)
# Containers: single-file checkpoints, stable-diffusion.cpp (--vae), trainers, DataParallel.
PREFIXES = ("first_stage_model.", "vae.", "model.", "module.")
# Families that are named in messages, and read from their files with shapes restored, but not run.
_TAEHV = KeySet("taehv", ("decoder.22.bias",), title="a reduced video VAE (TAEHV)")
_COGVIDEOX = KeySet(
    "cogvideox",
    ("decoder.mid_block.resnets.0.norm1.norm_layer.weight", "decoder.up_blocks.0.resnets.0.norm1.norm_layer.weight"),
    title="CogVideoX's VAE",
)
_TEMPORAL_SD = KeySet(
    "svd", ("decoder.mid.block_1.mix_factor", "decoder.time_conv_out.weight"), title="Stable Video Diffusion's VAE"
)
_HUNYUAN_IMAGE = KeySet(
    "hunyuanimage", ("decoder.up.0.upsample.conv.weight", "encoder.down.5.block.0.conv1.weight"),
    title="HunyuanImage 2.1's VAE",
)  # fmt: skip
_OTHERS = (
    KeySet(
        "audio",
        (
            "decoder.layers.1.layers.0.beta",
            "vocoder.backbone.channel_layers.0.0.bias",
            "vocoder.activation_post.downsample.lowpass.filter",
            "vocoder.resblocks.0.convs1.0.weight",
            "vocoder.vocoder.resblocks.0.convs1.0.weight",
            "dec_in_proj.weight",
        ),
        title="an audio VAE",
    ),
    KeySet(
        "cascade",
        (
            "vquantizer.codebook.weight",
            "backbone.1.0.block.0.1.num_batches_tracked",
            "encoder.backbone.1.0.block.0.1.num_batches_tracked",
            "blocks.11.num_batches_tracked",
        ),
        title="a stage of Stable Cascade",
    ),
    KeySet("taesd", ("taesd_decoder.1.weight",), title="a reduced image VAE (TAESD)"),
    KeySet("mage", ("student.dconv_encoder.proj_out.weight",), title="Mage-VAE"),
    KeySet("ltx-diffusion", ("decoder.conv_in_x_t.weight",), title="LTX's diffusion decoder"),
    KeySet("shapes", ("geo_decoder.cross_attn_decoder.ln_1.bias",), title="a VAE of 3-D shapes"),
)
# The order decides: a later family's keys may also occur in an earlier one (HunyuanVideo's in 1.5, Wan 2.1's in 2.2).
KEY_SETS = (
    seedvr2.KEYS, *_OTHERS, minimax_h3.ARCHITECTURE.keys, mochi.ARCHITECTURE.keys, ltx.ARCHITECTURE.keys, _COGVIDEOX,
    hunyuan15.ARCHITECTURE.keys, hunyuan.ARCHITECTURE.keys,
    cosmos.ARCHITECTURE.keys, wan.WAN22.keys, wan.WAN21.keys, wan.DIFFUSERS,
    _TAEHV, _TEMPORAL_SD, hunyuan_refiner.ARCHITECTURE.keys, _HUNYUAN_IMAGE, kl.DIFFUSERS, seedvr2.ENCODER_KEYS,
    kl.FLUX2.keys, kl.SD.keys, kl.FLUX.keys,
)  # fmt: skip


def detect(keys: Iterable[str]) -> Architecture | None:
    """The architecture whose key set is among `keys`, or None."""
    found = find_key_set(keys)
    return None if found is None else by_name(found.name)


def by_name(name: str) -> Architecture | None:
    """The architecture of this name; None for families that are not run."""
    return next((a for a in ARCHITECTURES if a.name == name), None)


def by_file(file: str) -> Architecture | None:
    """The architecture of the published VAE that a file of this name holds, or None: for what is said before a file is
    read. Later families come first: their files' names hold those of earlier ones ("wan" in Wan 2.2's)."""
    known = (a for a in reversed(ARCHITECTURES) if a.published and re.search(a.published.files, file, re.IGNORECASE))
    return None if _REDUCED.search(file) else next(known, None)


def find_key_set(names: Iterable[str]) -> KeySet | None:
    """The first family one of whose keys is among `names`."""
    present = set(names)
    return next((k for k in KEY_SETS if present.intersection(k.keys) and not present.intersection(k.without)), None)


def find_prefix(names: Iterable[str]) -> str:
    """The container's prefix: "" unless a known key set is found only behind one of PREFIXES."""
    names = list(names)
    if find_key_set(names):
        return ""
    for prefix in PREFIXES:
        if find_key_set(n[len(prefix) :] for n in names if n.startswith(prefix)):
            return prefix
    return ""


def native_names(names: Iterable[str], key_set: KeySet) -> dict[str, str] | None:
    """{file name: original name} when every name has a counterpart and no two coincide, else None."""
    names = list(names)
    if key_set.native is None:
        return None
    mapped = key_set.native(names)
    values = set(mapped.values())
    return mapped if None not in values and len(values) == len(names) else None  # type: ignore[return-value]
