"""Tiny autoencoders of video: TAEHV of Wan, HunyuanVideo, LTX-2 and MiniMax H3, LightTAE, and the larger "super" ones.
A latent is 8x8 pixels or a multiple, and 4 frames or 8."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...network.architecture import Architecture, Draws, KeySet, Published, Shapes, Widths, length
from ...network.program import STEP, TILES, Mark, Program, Step
from ...network.sectioned import Sectioned
from ...network.sections import Sections
from ...network.values import Style
from ..tae.rectified import LEAK as LEAK_OF
from ..tae.rectified import Rectified, Scaled
from .remembering import INNER, Grow, Led, Pool, Remember, WideRemember

#: Numbers of each level's blocks. An encoder's levels begin with a convolution that halves sides; a decoder's end with
#: one that doubles them, three numbers after the last block with the frames' convolution before it, or four in "super".
_ENCODER, _DECODER = ((4, 5, 6), (9, 10, 11), (14, 15, 16)), ((3, 4, 5), (9, 10, 11), (15, 16, 17))
_SUPER = (1, 2, 3), (8, 9, 10), (15, 16, 17)
SCALE, SHIFT, LEAK = "vae_scale", "vae_shift", "vae_leak"
_PLACES = f"/{SCALE}", f"/{SHIFT}"
COLOURS = 3
STYLE = Style(head="zero", single=True)
#: Channels of the latents of MiniMax H3, whose clips go through in sections, and pixels of a side of LTX-2's patches.
H3, LTX = 24, 4
H3_SECTIONS = Sections()
#: The VAEs that latents of so many channels belong to.
_LATENTS = {H3: "MiniMax H3", 32: "HunyuanVideo 1.5", 48: "Wan 2.2", 128: "LTX-2"}
#: Mean and deviation of each channel of the latents of Wan 2.1 and Wan 2.2.
_WAN21 = (
    (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508, 0.4134, -0.0715, 0.5517, -0.3632, -0.1922,
     -0.9497, 0.2503, -0.2921),
    (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743, 3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253,
     2.8251, 1.9160),
)  # fmt: skip
_WAN22 = (
    (-0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891, 0.1570,
     -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502, -0.2055, -0.0322,
     0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520,
     0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667),
    (0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165,
     0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659, 0.7069, 0.5338, 0.4889, 0.4917,
     0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600,
     0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744),
)  # fmt: skip
_HUNYUAN, _HUNYUAN15 = ((0.0,), (1 / 0.476986,)), ((0.0,), (1 / 1.03682,))
_AS_THEY_ARE = (0.0,), (1.0,)
_TAE = r"tae[ _.-]*"
#: (name of a file, channels of a latent, mean and deviation of the latents that it takes, its ReLU is leaky). TAEHV
#: takes latents as samplers have them, LightTAE those of Wan as the VAE has them.
_NAMED = (
    (rf"light[ _.-]*{_TAE}", 16, _AS_THEY_ARE, False), (rf"light[ _.-]*{_TAE}", 48, _AS_THEY_ARE, False),
    (rf"light[ _.-]*{_TAE}", 32, _HUNYUAN15, True), (rf"{_TAE}(hv|hy)", 32, _HUNYUAN15, False),
    (rf"{_TAE}w", 16, _WAN21, False), (rf"{_TAE}w", 48, _WAN22, False), (rf"{_TAE}hv", 16, _HUNYUAN, False),
    (rf"{_TAE}os", 16, _AS_THEY_ARE, False),
)  # fmt: skip
_COGVIDEOX = re.compile(rf"{_TAE}cv", re.IGNORECASE)


@dataclass(frozen=True)
class Config:
    """Widths from full to lowest resolution; None: that component is absent from the file.

    patch: rows, and columns, of pixels at full resolution. pools, grows: frames that become one at each level of the
    encoder, from full resolution, and that one becomes at each of the decoder, from the latent's. wide: the decoder is
    a "super" one. leaky: values below zero are kept in part, and pixels are in -1..1, not 0..1."""

    encoder_widths: Widths | None
    decoder_widths: Widths | None
    latent_channels: int = 16
    patch: int = 1
    pools: tuple[int, ...] = (2, 2, 1)
    grows: tuple[int, ...] = (1, 2, 2)
    wide: bool = False
    leaky: bool = False
    norm_groups: None = None

    @classmethod
    def from_shapes(cls, shapes: Shapes, norm_groups: int | None = None) -> Config:
        """Return the sizes of a file's networks; `norm_groups` has no meaning here. Raises InputError."""
        wide = "decoder.21.conv.weight" in shapes
        encoder = _widths(shapes, ["encoder.0.bias", *(f"encoder.{b[0]}.conv.0.bias" for b in _ENCODER)])
        ends = ("18", *(f"{b[0]}.conv.1" for b in _SUPER[::-1])) if wide else (f"{b[0]}.conv.0" for b in _DECODER[::-1])
        decoder = _widths(shapes, [f"decoder.{name}.bias" for name in ends])
        if wide and decoder is not None:
            decoder = tuple(w // INNER for w in decoder)
        elif decoder is not None:
            decoder = (_axis(shapes, "decoder.22.weight", 1, decoder[0]), *decoder)
        latent = _axis(shapes, f"decoder.{0 if wide else 1}.weight", 1, length(shapes, "encoder.17.bias", 16))
        made = length(shapes, "decoder.22.bias"), _axis(shapes, "encoder.0.weight", 1, 0)
        pixels = {n // COLOURS for n in made if n}
        patch = math.isqrt(max(pixels, default=1))
        if pixels != {patch**2}:
            raise InputError(f"its pictures have the shapes {shapes.get('encoder.0.weight')} before and "
                             f"{shapes.get('decoder.22.bias')} after; only networks of RGB are run")  # fmt: skip
        pools, grows = [1] * 3, [1] * 3
        for i, at in enumerate((2, 7, 12) if encoder else ()):
            pools[i] = _axis(shapes, f"encoder.{at}.conv.weight", 1, 0) // encoder[i]
        for i, at in enumerate(((7, 14, 21) if wide else (7, 13, 19)) if decoder else ()):
            width = decoder[2 - i] if wide else decoder[3 - i]
            # Files of one frame a latent at the first level may hold the weights of two, of which the last are used.
            grows[i] = _axis(shapes, f"decoder.{at}.conv.weight", 0, 0) // width if i or patch == LTX else 1
        rates = {math.prod(rate) for rate, half in ((pools, encoder), (grows, decoder)) if half}
        if len(rates) > 1 or not all(n in (1, 2) for n in (*pools, *grows)):
            raise InputError(f"its encoder makes one of {pools} frames and its decoder {grows} of one, level by level")
        return cls(encoder, decoder, latent, patch, tuple(pools) if encoder else cls.pools,
                   tuple(grows) if decoder else cls.grows, wide, LEAK in shapes)  # fmt: skip

    @property
    def rate(self) -> int:
        """Return the frames of a latent."""
        return math.prod(self.grows if self.decoder_widths else self.pools)

    @property
    def sections(self) -> Sections:
        """Return the sections in which frames are encoded: each latent is one, except MiniMax H3's."""
        if self.latent_channels == H3 and self.rate == H3_SECTIONS.rate:
            return H3_SECTIONS
        return Sections(frames=self.rate, latents=1, more=0, rate=self.rate, lead=0, drop=0)


def _widths(shapes: Shapes, names: list[str]) -> Widths | None:
    return tuple(length(shapes, n) for n in names) if all(n in shapes for n in names) else None


def _axis(shapes: Shapes, name: str, axis: int, absent: int) -> int:
    shape = shapes.get(name, ())
    return shape[axis] if len(shape) == 4 else absent


_conv = functools.partial(Rectified, flat=True)


def decoder(config: Config) -> Program:
    w, latent, leak = config.decoder_widths[::-1], config.latent_channels, f"/{LEAK}" if config.leaky else ""
    scaled = Scaled(*_PLACES, width=latent, limits=not config.wide)
    sections, rate = config.sections, config.rate
    # A clip's first latent is one frame: the others that are made of it are left out behind the last block.
    drop, period = rate - 1, sections.rate * sections.latents if sections.latents > 1 else 0
    first = _conv("1", latent, w[0], relu=True, leak=leak)
    items: list[Step | Mark] = [scaled, _conv("0", latent, w[0], side=1, bias=False) if config.wide else first]
    for i, blocks in enumerate(_SUPER if config.wide else _DECODER):
        last = i == 2
        how = {"count": config.grows[i], "drop": drop if last else 0, "period": period if last else 0}
        if config.wide:
            items += [WideRemember(str(n), w[i]) for n in blocks]
            up = _conv(str(blocks[-1] + 1), w[i], 4 * w[i + 1], relu=True, parted=2)
            resampled: list[Step | Mark] = [up, Grow(str(blocks[-1] + 4), w[i + 1], **how)]
        else:
            items += [Remember(str(n), w[i], leak) for n in blocks]
            up = _conv(str(blocks[-1] + 3), w[i], w[i + 1], relu=last, to="double", leak=leak if last else "")
            # The frames' convolution of single positions comes before pixels are repeated: a quarter of the products.
            resampled = [Grow(str(blocks[-1] + 2), w[i], **how), up]
        items += [*([] if i else [TILES]), *resampled, STEP]
    unit = "" if config.leaky else "after"
    items.append(_conv("22", w[3], COLOURS * config.patch**2, unit=unit, parted=config.patch))
    if period:
        return Sectioned("decoder", tuple(items), latent, STYLE, sections=sections)
    return Program("decoder", tuple(items), latent, STYLE)


def encoder(config: Config) -> Program:
    w, p, leak = config.encoder_widths, config.patch, f"/{LEAK}" if config.leaky else ""
    sections, latent = config.sections, config.latent_channels
    led = sections.latents > 1
    period = sections.rate * sections.latents
    items: list[Step | Mark] = [Led("black", sections.lead, sections.frames)] if led else []
    unit = "" if config.leaky else "before"
    items.append(_conv("0", COLOURS * p**2, w[0], relu=True, unit=unit, block=8 * p, joined=p, leak=leak))
    for i, blocks in enumerate(_ENCODER):
        period //= config.pools[i]
        items += [Pool(str(blocks[0] - 2), w[i], config.pools[i]),
                  _conv(str(blocks[0] - 1), w[i], w[i + 1], to="half"), *([] if i else [STEP])]  # fmt: skip
        items += [TILES] if i == 2 else []
        items += [Remember(str(n), w[i + 1], leak, period if led else 0) for n in blocks]
    items += [_conv("17", w[3], latent), Scaled(*_PLACES, leaves=True, width=latent)]
    return Sectioned("encoder", tuple(items), COLOURS, STYLE, sections=sections)


def prepared(tensors: Mapping[str, Tensor], file: str) -> dict[str, Tensor]:
    """Return a network's tensors with the mean and scale of its latents, and the factor of a leaky ReLU, where its file
    does not hold them. Raises InputError if nothing tells them."""
    out, config = dict(tensors), Config.from_shapes({name: tuple(t.shape) for name, t in tensors.items()})
    grown = "decoder.7.conv.weight"
    if config.decoder_widths and grown in out and not config.wide and config.grows[0] == 1:
        out[grown] = out[grown][-config.decoder_widths[-1] :]
    if SCALE in out and SHIFT in out:
        return out
    known, leaky = _told(file, config.latent_channels)
    for name, values in ((SHIFT, known[0]), (SCALE, tuple(1 / v for v in known[1]))):
        one = torch.tensor(values, dtype=torch.float32, device="cpu")
        out[name] = one.expand(config.latent_channels).contiguous()
    if leaky:
        out[LEAK] = torch.tensor(LEAK_OF, dtype=torch.float32, device="cpu")
    return out


def _told(file: str, channels: int) -> tuple[tuple[tuple[float, ...], tuple[float, ...]], bool]:
    """Return the mean and deviation of the latents that a file of this name takes, and if its ReLU is leaky. Raises
    InputError."""
    if _COGVIDEOX.search(file):
        raise InputError("CogVideoX's reduced VAE (TAECVX), which this pack does not run: its frames depend on the "
                         "number of a clip's latents")  # fmt: skip
    if channels in (H3, 128):
        return _AS_THEY_ARE, False
    named = (row for row in _NAMED if row[1] == channels and re.search(row[0], file, re.IGNORECASE))
    if (found := next(named, None)) is None:
        names = {16: "taehv, taew2_1 or lighttaew2_1", 32: "taehv1_5 or lighttaehy1_5", 48: "taew2_2 or lighttaew2_2"}
        raise InputError("the scale of its latents is not in the file, and only a name tells it: call the file "
                         f"{names.get(channels, 'as it was published')}, whichever it is")  # fmt: skip
    return found[2], found[3]


def sized(config: Config) -> dict[str, Any]:
    return {"spatial": 8 * config.patch, "temporal": config.rate, "sections": config.sections}


def variant(config: Config) -> str:
    """Return the VAE whose latents networks of these sizes take, where it is not Wan 2.1's or HunyuanVideo's, and
    "super" for the larger decoders."""
    names = [f"of {_LATENTS[config.latent_channels]}"] if config.latent_channels in _LATENTS else []
    return ", ".join([*names, *["super"] * config.wide])


def _published(latent: int, patch: int, **others: Any) -> Config:
    wide = others.get("wide", False)
    return Config((64,) * 4, (64, 128, 256, 512) if wide else (64, 64, 128, 256), latent, patch, **others)


_EVERY = {"pools": (2, 2, 2), "grows": (2, 2, 2)}
ARCHITECTURE = Architecture(
    KeySet("taehv", (
        ("decoder.22.bias", "decoder.19.conv.weight"), ("decoder.22.bias", "decoder.21.conv.weight"),
        ("encoder.17.bias", "encoder.2.conv.weight", "encoder.7.conv.weight"),
    )),
    8, 4, 1.0, Config.from_shapes, encoder, decoder, sized=sized, variant=variant, prepared=prepared,
    wide=(SCALE, SHIFT, LEAK), several=True,
    published=Published(
        "TAEHV", _published(16, 1), rf"{_TAE}(hv|hy|w|ltx|h3|os)", ("taehv", "lighttae"),
        # Random pictures lie around grey.
        draws=Draws(1.0, 0.1, 0.05, (("decoder.22.bias", 0.5, 0.05), (LEAK, LEAK_OF, 0.0)),
                    ((SCALE, (1.0,)), (SHIFT, (0.0,)))),
        others=(
            (rf"light[ _.-]*{_TAE}(hv|hy)", _published(32, 2, leaky=True)),
            (rf"{_TAE}hv[ _.-]*1.*super", _published(32, 2, wide=True)),
            (rf"{_TAE}w[ _.-]*2[ _.-]*2.*super", _published(48, 2, wide=True)),
            (rf"{_TAE}(hv|hy)[ _.-]*1", _published(32, 2)), (rf"{_TAE}w[ _.-]*2[ _.-]*2", _published(48, 2)),
            (rf"{_TAE}h3", _published(H3, 2)), (rf"{_TAE}ltx", _published(128, LTX, **_EVERY)),
        ),
    ),
)  # fmt: skip
