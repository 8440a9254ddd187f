"""LTX-2.5's VAE with the diffusion decoder: it has LTX-2.3's latents and encoder, and its decoder is a transformer over
patches of 4x4 pixels that attend to the patches around them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...errors import InputError, one_line
from ...network.architecture import Architecture, Draws, KeySet, Published, Shapes, length, rows
from ...network.ops.statistics import Denormalise
from ...network.program import TILES, Program, Step
from .. import ltx
from ..ltx.description import number, vae_of
from .diffusion import COLOURS, NeighbourDecoder, Sampling, Stage

#: Windows of the published decoder's stages and last blocks, and samples of each token behind a stage.
KERNELS = ((3, 7, 7), (3, 7, 7), (3, 5, 5), (3, 5, 5))
LAST_KERNEL = (11, 11, 11)
STRIDES = ((1, 2, 2), (2, 1, 1), (2, 2, 2), (2, 2, 2))
_FIRST, _SECOND = "decoder.det_stages.0.0.attn.qkv.weight", "decoder.conv_in_x_t.weight"


@dataclass(frozen=True)
class Config:
    """The sizes of LTX's encoder, and of the decoder; None where the file has none."""

    others: ltx.Config
    decoder: NeighbourDecoder | None
    norm_groups: None = None
    #: The decoder begins with noise, but its latents have none.
    begins_with_noise = True

    @property
    def latent_channels(self) -> int:
        return self.others.latent_channels

    @property
    def encoder_widths(self) -> tuple[int, ...] | None:
        return self.others.encoder_widths

    @property
    def decoder_widths(self) -> tuple[int, ...] | None:
        return None if self.decoder is None else (*(s.width for s in self.decoder.stages), self.decoder.width)

    @classmethod
    def from_shapes(cls, shapes: Shapes, norm_groups: int | None = None) -> Config:
        """Return the sizes without metadata: windows and steps that shapes do not show are the published ones."""
        return cls.described(shapes, {})

    @classmethod
    def described(cls, shapes: Shapes, metadata: Mapping[str, object]) -> Config:
        """Return the sizes from shapes, and the rest from the JSON text that files have under "config". Raises
        InputError."""
        given = vae_of(metadata)
        encoder = given.get("encoder")
        others = ltx.Config.described(shapes, {"config": {"vae": encoder}} if isinstance(encoder, Mapping) else {})
        return cls(others, _decoder(shapes, given))


def _decoder(shapes: Shapes, described: Mapping[str, Any]) -> NeighbourDecoder | None:
    if _FIRST not in shapes or _SECOND not in shapes:
        return None
    given = described.get("decoder")
    given = given if isinstance(given, Mapping) else {}
    width, values = shapes[_SECOND]
    strides = [tuple(stride) for stride, _ in given.get("upsamples", ())] or STRIDES
    kernels = [tuple(kernel) for kernel in given.get("stage_kernels", ())][: len(strides)] or KERNELS
    count = rows(shapes, "decoder.det_stages")
    if count != len(strides) or len(kernels) != count:
        raise InputError(f"its decoder has {count} stages, its description {len(strides)}")
    stages = tuple(
        Stage(length(shapes, f"decoder.det_stages.{i}.0.norm1.weight"), rows(shapes, f"decoder.det_stages.{i}"), kernel,
              stride)
        for i, (kernel, stride) in enumerate(zip(kernels, strides, strict=True))
    )  # fmt: skip
    patch = math.isqrt(values // COLOURS)
    kind = described.get("model_output_type", "x0")
    if kind not in ("x0", "v"):
        raise InputError(f"model_output_type={one_line(repr(kind), 40)} is neither x0 nor v")
    steps, multiplier = (
        number(given, key, usual)
        for key, usual in (("default_num_inference_steps", 1), ("timestep_scale_multiplier", 1000.0))
    )
    sampling = Sampling(int(steps), multiplier, kind == "v")
    if sampling.steps < 1:
        raise InputError(f"default_num_inference_steps={sampling.steps} must be at least 1")
    made = NeighbourDecoder(
        shapes["decoder.conv_in.weight"][1], length(shapes, "decoder.det_stages.0.0.attn.q_norm.weight"), stages, width,
        rows(shapes, "decoder.diff_blocks"), tuple(given.get("stage5_kernel", LAST_KERNEL)), patch,
        length(shapes, "decoder.t_embedder.mlp.0.bias"), sampling,
    )  # fmt: skip
    if (made.time[0], made.space[0]) != (ltx.FRAMES, ltx.PIXELS):
        raise InputError(
            f"its decoder has {made.time[0]} frames of {made.space[0]}x{made.space[0]} pixels for a latent; only "
            f"networks with {ltx.FRAMES} of {ltx.PIXELS}x{ltx.PIXELS} are run"
        )
    return made


class DiffusionProgram(Program):
    """The decoder's Program: all after the latents' statistics is one step."""

    def parts(self) -> tuple[tuple[Step, ...], ...]:
        at = self.before(TILES)
        return self.steps[:at], (), self.steps[at:]


def decoder(config: Config) -> Program:
    latent = config.latent_channels
    items = Denormalise(ltx.STATISTICS, latent), TILES, config.decoder
    return DiffusionProgram.of("decoder", latent, *items, component=__name__, single=True)


def encoder(config: Config) -> Program:
    return ltx.encoder(config.others)


def folded(tensors: Mapping[str, Tensor], file: str = "") -> dict[str, Tensor]:
    """Multiply the gates of older files into the products that they follow, and leave out what only training needs."""
    out = {name: t for name, t in tensors.items() if not name.startswith("decoder.coarse_")}
    for name in [n for n in out if n.rpartition(".")[2] in _GATES]:
        block, _, gate = name.rpartition(".")
        factor = out.pop(name)
        for product in (f"{block}.{_GATES[gate]}.{kind}" for kind in ("weight", "bias")):
            if product in out:
                made = out[product].float() * factor.float().view(-1, *[1] * (out[product].dim() - 1))
                out[product] = made.to(out[product].dtype)
    return out


_GATES = {"gate_msa": "attn.proj", "gate_mlp": "mlp.w_down", "gate_ctx": "context_proj"}


def _published() -> Config:
    stages = tuple(map(Stage, (2048, 1024, 512, 512), (4, 6, 4, 2), KERNELS, STRIDES))
    return Config(ltx.Config(None, None), NeighbourDecoder(128, 64, stages, 256, 8, LAST_KERNEL, 4, 384))


#: The encoder in it is a dummy: ComfyUI builds no VAE without one.
_METADATA = json.dumps({
    "vae": {
        "_class_name": "CausalDiffusionVAE", "model_output_type": "x0",
        "encoder": {
            "dims": 3, "in_channels": 3, "out_channels": 128, "patch_size": 4, "latent_log_var": "constant",
            "norm_layer": "pixel_norm", "base_channels": 16, "spatial_padding_mode": "zeros",
            "blocks": [["res_x", {"num_layers": 1}], ["compress_all", {}], ["res_x", {"num_layers": 1}]],
        },
        "decoder": {"default_num_inference_steps": 1, "timestep_scale_multiplier": 1000.0},
    }
})  # fmt: skip
ARCHITECTURE = Architecture(
    KeySet("ltx-diffusion", ((_SECOND, _FIRST),)),
    ltx.PIXELS, ltx.FRAMES, 1.0, Config.from_shapes, encoder, decoder, native="bf16",
    published=Published(
        "LTX-2.5", _published(), r"ltx[a-z _.-]*2[._]?5(?!.*conv)", ("ltx-2.5",),
        (("config", _METADATA),), Draws(matrices=1.0),
    ),
    described=Config.described, prepared=folded, unused=ltx.UNUSED,
)  # fmt: skip
