"""SeedVR2's video VAE (`video_vae_v3`): 8x8 spatial and 4x causal temporal compression into 16 channels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from ..errors import InputError
from ..layers import CausalConv3d, Downsample, MidBlock, NormAct, ResnetBlock, Upsample, name_halos
from ..runtime.state import State
from .arch import Architecture, Network

#: The published network normalises 32 groups; files of other widths name theirs in this metadata key.
DEFAULT_GROUPS = 32


@dataclass(frozen=True)
class Config:
    """Widths from full to lowest resolution, e.g. (128, 256, 512, 512). None: that half is absent from the file."""

    encoder_widths: tuple[int, int, int, int] | None
    decoder_widths: tuple[int, int, int, int] | None
    latent_channels: int = 16
    norm_groups: int = DEFAULT_GROUPS

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]], norm_groups: int | None = None) -> Config:
        """Read the widths from biases (they survive every file dialect); `norm_groups` None means 32 if it divides."""

        def widths(pattern: str) -> tuple[int, int, int, int] | None:
            names = [pattern.format(i) for i in range(4)]
            if not all(n in shapes for n in names):
                return None
            a, b, c, d = (shapes[n][0] for n in names)
            return a, b, c, d

        encoder = widths("encoder.down_blocks.{}.resnets.0.conv1.bias")
        decoder = widths("decoder.up_blocks.{}.resnets.0.conv1.bias")
        if decoder is not None:
            decoder = (decoder[3], decoder[2], decoder[1], decoder[0])
        normed = [*(encoder or ()), *(decoder or ())]
        if norm_groups is None:
            if any(w % DEFAULT_GROUPS for w in normed):
                raise InputError(
                    f"widths {normed} do not all divide into {DEFAULT_GROUPS} norm groups and the file names no "
                    "norm_num_groups; pass norm_groups=N"
                )
            norm_groups = DEFAULT_GROUPS
        if norm_groups < 1 or any(w % norm_groups for w in normed):
            raise InputError(f"norm_groups={norm_groups} does not divide all widths {normed}")
        latent = 16
        if "decoder.conv_in.weight" in shapes and len(shapes["decoder.conv_in.weight"]) == 5:
            latent = shapes["decoder.conv_in.weight"][1]
        elif "encoder.conv_out.bias" in shapes:
            latent = shapes["encoder.conv_out.bias"][0] // 2
        return cls(encoder, decoder, latent, norm_groups)

    @property
    def stream_widths(self) -> set[int]:
        """Of every residual stream."""
        return {*(self.encoder_widths or ()), *(self.decoder_widths or ())}


class DownBlock(nn.Module):
    """Two resnets, then a downsampler except in the lowest block."""

    def __init__(self, c_in: int, c_out: int, groups: int, down: bool, temporal: bool) -> None:
        super().__init__()
        self.resnets = nn.ModuleList([ResnetBlock(c_in, c_out, groups), ResnetBlock(c_out, c_out, groups)])
        self.downsamplers = nn.ModuleList([Downsample(c_out, temporal)] if down else [])

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        for layer in (*self.resnets, *self.downsamplers):
            x = layer(x, state)
        return x


class UpBlock(nn.Module):
    """Three resnets, then an upsampler except in the full-resolution block."""

    def __init__(self, c_in: int, c_out: int, groups: int, up: bool, temporal: bool) -> None:
        super().__init__()
        widths = [(c_in, c_out), (c_out, c_out), (c_out, c_out)]
        self.resnets = nn.ModuleList([ResnetBlock(a, b, groups) for a, b in widths])
        self.upsamplers = nn.ModuleList([Upsample(c_out, temporal)] if up else [])

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        for layer in (*self.resnets, *self.upsamplers):
            x = layer(x, state)
        return x


class Encoder(nn.Module):
    """[B, 3, F, H, W] in -1..1 -> moments [B, 2 * latent, T, H // 8, W // 8], T = (F - 1) // 4 + 1.

    Three parts with their own granularity: `high` (8x and its downsampler) takes any number of frames per call,
    `mid` (4x and 2x, with the temporal strides) takes 1 + 4n frames first and 4n later, `low` (1x) takes latents.
    """

    def __init__(self, widths: tuple[int, int, int, int], latent: int, groups: int) -> None:
        super().__init__()
        self.conv_in = CausalConv3d(3, widths[0])
        self.down_blocks = nn.ModuleList(
            DownBlock(widths[max(i - 1, 0)], widths[i], groups, down=i < 3, temporal=i > 0) for i in range(4)
        )
        self.mid_block = MidBlock(widths[3], groups)
        self.conv_norm_out = NormAct(widths[3], groups)
        self.conv_out = CausalConv3d(widths[3], 2 * latent)

    def high(self, x: Tensor, state: State | None = None) -> Tensor:
        return self.down_blocks[0](self.conv_in(x, state), state)

    def mid(self, x: Tensor, state: State | None = None) -> Tensor:
        return self.down_blocks[2](self.down_blocks[1](x, state), state)

    def low(self, x: Tensor, state: State | None = None) -> Tensor:
        x = self.mid_block(self.down_blocks[3](x, state), state)
        return self.conv_out(self.conv_norm_out(x), state)

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        return self.low(self.mid(self.high(x, state), state), state)


class Decoder(nn.Module):
    """[B, latent, T, h, w] (unscaled) -> [B, 3, 4(T - 1) + 1, 8h, 8w], about -1..1, not clamped.

    Three parts with their own granularity: `low` (1x: everything that sees the whole frame at once in attention)
    and `mid` (up to 2x, with the temporal upsamplers) take latents, `high` (4x and 8x) takes single frames too.
    """

    def __init__(self, widths: tuple[int, int, int, int], latent: int, groups: int) -> None:
        super().__init__()
        w = widths[::-1]
        self.conv_in = CausalConv3d(latent, w[0])
        self.mid_block = MidBlock(w[0], groups)
        self.up_blocks = nn.ModuleList(
            UpBlock(w[max(i - 1, 0)], w[i], groups, up=i < 3, temporal=i < 2) for i in range(4)
        )
        self.conv_norm_out = NormAct(w[3], groups)
        self.conv_out = CausalConv3d(w[3], 3)

    def low(self, z: Tensor, state: State | None = None) -> Tensor:
        x = self.mid_block(self.conv_in(z, state), state)
        for resnet in self.up_blocks[0].resnets:
            x = resnet(x, state)
        return x

    def mid(self, x: Tensor, state: State | None = None) -> Tensor:
        return self.up_blocks[1](self.up_blocks[0].upsamplers[0](x, state), state)

    def high(self, x: Tensor, state: State | None = None) -> Tensor:
        x = self.up_blocks[3](self.up_blocks[2](x, state), state)
        return self.conv_out(self.conv_norm_out(x), state)

    def forward(self, z: Tensor, state: State | None = None) -> Tensor:
        return self.high(self.mid(self.low(z, state), state), state)


class SeedVR2(Network):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        latent, groups = config.latent_channels, config.norm_groups
        self.encoder = Encoder(config.encoder_widths, latent, groups) if config.encoder_widths else None
        self.decoder = Decoder(config.decoder_widths, latent, groups) if config.decoder_widths else None
        name_halos(self)


ARCHITECTURE = Architecture(
    name="seedvr2",
    spatial=8,
    temporal=4,
    scale=0.9152,
    configure=Config.from_shapes,
    build=SeedVR2,
)
