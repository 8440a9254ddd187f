"""The tiny decoders (TAEHV, TAESD and their like) that take other families' latents, and how to tell them apart."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ..network.architecture import Architecture
from .registry import by_name


@dataclass(frozen=True)
class Latents:
    """One kind of latents: the families of VAEs that make it, and the tiny decoders that take it.

    tiny, channels: family of those decoders, and channels of their network's latents. file: the name of a published
    one. Where other kinds have the same layout, only names tell them apart: files, a regular expression for those of
    the tiny decoders; vaes, for those of the VAEs, which counts where a family makes several kinds.
    """

    title: str
    families: tuple[str, ...]
    tiny: str
    channels: int
    file: str
    files: str = ""
    vaes: str = ""

    def read_by(self, architecture: Architecture, config: Any, name: str) -> bool:
        """Return whether the VAE of a file of this name takes these latents."""
        same = (architecture.name, config.latent_channels) == (self.tiny, self.channels)
        return same and config.decoder_widths is not None and _named(self.files, name)

    def looks_like(self, name: str) -> bool:
        """Return whether a file that nobody reads has the name of such a decoder."""
        return _named(self.files or re.escape(self.file.partition(".")[0]), name)


KINDS = (
    Latents("Wan 2.1", ("wan2.1",), "taehv", 16, "taew2_1.safetensors", r"tae[ _.-]*w"),
    Latents("Wan 2.2", ("wan2.2",), "taehv", 48, "taew2_2.safetensors"),
    # A name with both, as of a folder TAEHV that was flattened, is Wan's: its file is loaded as that.
    Latents("HunyuanVideo", ("hunyuanvideo",), "taehv", 16, "taehv.safetensors", r"^(?!.*tae[ _.-]*w).*tae[ _.-]*hv"),
    Latents("HunyuanVideo 1.5", ("hunyuanvideo1.5",), "taehv", 32, "taehv1_5.safetensors"),
    Latents("MiniMax H3", ("minimaxh3",), "taehv", 24, "taeh3.safetensors"),
    # Before LTX-2 latents were others, of which no tiny decoder is known here.
    Latents("LTX-2", ("ltx",), "taehv", 128, "taeltx_2.safetensors",
            r"ltx[ _.-]*2(?![ _.-]*[35])", r"ltx[a-z _.-]*2(?!b|[ _.-]*[35])"),
    Latents("LTX-2.3", ("ltx", "ltx-diffusion"), "taehv", 128, "taeltx2_3.safetensors",
            r"ltx[ _.-]*2[ _.-]*[35]", r"ltx[a-z _.-]*2[ _.-]*[35]"),
    Latents("Stable Diffusion", ("sd", "svd"), "taesd", 4, "taesd_decoder.safetensors",
            r"taesd(?!xl|3)", r"sd[ _.-]*[12]|v[12]-|1[._-]5|ft[ _.-]*(mse|ema)"),
    Latents("SDXL", ("sd",), "taesd", 4, "taesdxl_decoder.safetensors", r"taesdxl", r"xl|pony|illustrious"),
    Latents("Flux.1", ("flux",), "taesd", 16, "taef1_decoder.safetensors",
            r"taef1", r"(?<![a-z])ae(?![a-z])|flux|z[ _.-]*image|chroma|lumina|hidream"),
    Latents("SD3", ("flux",), "taesd", 16, "taesd3_decoder.safetensors",
            r"taesd3", r"sd[ _.-]*3|stable[ _.-]*diffusion[ _.-]*3"),
    Latents("Flux.2", ("flux2",), "taef2", 32, "taef2_decoder.safetensors"),
)  # fmt: skip
#: The families of tiny VAEs.
TINY = {kind.tiny for kind in KINDS} | {"taesana"}


def latents_of(family: str, vae: str) -> Latents | str:
    """Return the kind of latents of a family's VAE, or in words why no tiny decoder is known to take them.

    vae: the name of its file, "" where that is not known.
    """
    kinds = [kind for kind in KINDS if family in kind.families]
    if not kinds:
        known = by_name(family)
        return f"no tiny decoder of {known.published.title if known else family}'s latents is known"
    if len(kinds) == 1:
        return kinds[0]
    named = [kind for kind in kinds if _named(kind.vaes, vae)]
    if len(named) == 1:
        return named[0]
    titles = " or ".join(kind.title for kind in kinds)
    if not vae:
        return f"its file is not known, whose name would tell whose latents this VAE decodes, {titles}"
    return f"the name {vae} does not tell whose latents this VAE decodes, {titles}"


def _named(pattern: str, name: str) -> bool:
    """Return whether a file's name fits. Its folders do not count: people call them after one of the files in them."""
    return re.search(pattern, re.split(r"[/\\]", name)[-1], re.IGNORECASE) is not None
