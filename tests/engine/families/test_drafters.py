"""Whose latents a VAE decodes, and which tiny decoders take them."""

from __future__ import annotations

import pytest
from zerowaste_vae.engine.families import ARCHITECTURES, TINY, by_name, drafters, latents_of, tae, taehv


@pytest.mark.parametrize(("family", "name", "title"), [
    ("sd", "vae-ft-mse-840000-ema-pruned.safetensors", "Stable Diffusion"),
    ("sd", "sd_xl_base_1.0.safetensors", "SDXL"),
    ("sd", "v1-5-pruned-emaonly.safetensors", "Stable Diffusion"), ("sd", "ponyDiffusionV6.safetensors", "SDXL"),
    ("sd", "vae.safetensors", ""), ("sd", "", ""), ("svd", "", "Stable Diffusion"),
    ("flux", "ae.safetensors", "Flux.1"), ("flux", "flux/vae.safetensors", ""),
    ("flux", "sd3/ae.safetensors", "Flux.1"), ("flux", r"sd3\flux.safetensors", "Flux.1"),
    ("flux", "sd3_vae.safetensors", "SD3"), ("flux", "stable_diffusion_3.5.safetensors", "SD3"),
    ("flux", "vae.safetensors", ""),
    ("ltx", "LTX23_video_vae_bf16.safetensors", "LTX-2.3"), ("ltx", "ltx-2.3-22b-dev.safetensors", "LTX-2.3"),
    ("ltx", "ltx-2-19b-dev-fp8.safetensors", "LTX-2"), ("ltx", "LTX2_video_vae_bf16.safetensors", "LTX-2"),
    ("ltx", "ltx-video-2b-v0.9.5.safetensors", ""), ("ltx", "ltxv-13b-0.9.7-dev.safetensors", ""),
    ("ltx-diffusion", "", "LTX-2.3"),
])  # fmt: skip
def test_vaes_of_one_layout(family, name, title):
    """Where the name does not tell, there is none; LTX-Video's latents are neither of LTX-2's."""
    found = latents_of(family, name)
    others = {"sd": "Stable Diffusion or SDXL", "flux": "Flux.1 or SD3", "ltx": "LTX-2 or LTX-2.3"}
    assert found.title == title if title else found.endswith(f"whose latents this VAE decodes, {others[family]}")


@pytest.mark.parametrize(("family", "vae", "name", "takes"), [
    ("hunyuanvideo", "", "taehv/taehv.safetensors", True), ("hunyuanvideo", "", "taehv/taew2_1.safetensors", False),
    ("hunyuanvideo", "", "taehv_taew2_1.safetensors", False), ("wan2.1", "", "taehv_taew2_1.safetensors", True),
    ("wan2.1", "", r"taew\taehv.safetensors", False),
    ("sd", "sd15.safetensors", "taesd/taesdxl_decoder.safetensors", False),
    ("sd", "sdxl.safetensors", "taesd/taesdxl_decoder.safetensors", True),
])  # fmt: skip
def test_folders_of_tiny_decoders_do_not_count(family, vae, name, takes):
    """A folder is called after one of its files; a network is loaded by the file's own name."""
    kind = latents_of(family, vae)
    video, still = taehv.Config(None, (8, 8, 8, 16)), tae.Config(None, (8, 8, 8, 8))
    config = video if kind.tiny == "taehv" else still
    assert kind.read_by(by_name(kind.tiny), config, name) is takes


def test_an_encoder_alone_decodes_nothing():
    kind = latents_of("sd", "sd15.safetensors")
    assert not kind.read_by(by_name("taesd"), tae.Config((8, 8, 8, 8), None), "taesd_encoder.safetensors")


def test_every_family_has_kinds_or_a_reason():
    names = {a.name for a in ARCHITECTURES}
    assert {name for kind in drafters.KINDS for name in (*kind.families, kind.tiny)} <= names and names >= TINY
    for name in names - {name for kind in drafters.KINDS for name in kind.families}:
        assert latents_of(name, "").startswith("no tiny decoder of ")
    # Its published file is one of those decoders by its name, too.
    assert all(kind.looks_like(kind.file) for kind in drafters.KINDS)
