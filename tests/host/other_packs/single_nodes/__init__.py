"""Single nodes of packs, by their sockets, widgets and what they do to a VAE: LTXVideo's decodes in tiles (aceeae96),
MultiGPU's loader (a38cbda5), KJNodes' PatchTritonVAE (3f200542), and the loaders of HunyuanVideoWrapper (3ce96404) and
CogVideoXWrapper (fdb8abd2), whose VAE is an object of diffusers' kind."""

from __future__ import annotations

import copy

import torch

from nodes import VAELoader

COUNT = ("INT", {"default": 1, "min": 1})
REST = {"last_frame_fix": ("BOOLEAN", {"default": False})}
AUTO = {"default": "auto"}
WHERE = {"working_device": (["cpu", "auto"], AUTO), "working_dtype": (["float32", "auto"], AUTO)}


class TiledDecode:
    @classmethod
    def INPUT_TYPES(cls):
        tiles = dict.fromkeys(("horizontal_tiles", "vertical_tiles", "overlap"), COUNT)
        return {"required": {"vae": ("VAE",), "latents": ("LATENT",), **tiles, **REST}, "optional": WHERE}

    RETURN_TYPES, FUNCTION, CATEGORY = ("IMAGE",), "decode", "Lightricks"

    def decode(self, vae, latents, **rest):
        return (vae.decode(latents["samples"]).flatten(0, -4),)


class ChunkedDecode(TiledDecode):
    @classmethod
    def INPUT_TYPES(cls):
        names = ("spatial_tiles", "spatial_overlap", "temporal_tile_length", "temporal_overlap")
        return {"required": {"vae": ("VAE",), "latents": ("LATENT",), **dict.fromkeys(names, COUNT), **REST, **WHERE}}


class MultiLoader(VAELoader):
    @classmethod
    def INPUT_TYPES(cls):
        return {**super().INPUT_TYPES(), "optional": {"device": (["cpu"],)}}

    FUNCTION = "load"

    def load(self, vae_name, device="cpu"):
        return self.load_vae(vae_name)


class Patch:
    """An object patch on a clone of the patcher."""

    @classmethod
    def INPUT_TYPES(cls):
        flags = ("fuse_norm_silu", "channels_last", "int8_conv", "autotune")
        return {"required": {"vae": ("VAE",), **{name: ("BOOLEAN", {"default": name != "autotune"}) for name in flags}}}

    RETURN_TYPES, FUNCTION, CATEGORY = ("VAE",), "patch", "KJNodes"

    def patch(self, vae, **rest):
        vae = copy.copy(vae)
        vae.patcher = vae.patcher.clone()
        name, layer = next((n, m) for n, m in vae.first_stage_model.named_modules() if isinstance(m, torch.nn.SiLU))
        vae.patcher.add_object_patch(name, copy.deepcopy(layer))
        return (vae,)


def loader(kind: str) -> type:
    """A loader of a module that is no VAE of the host's."""
    network = type(kind, (torch.nn.Module,), {"dtype": torch.float32})
    inputs = classmethod(lambda cls: {"required": {}})
    return type("Loader", (), {"INPUT_TYPES": inputs, "RETURN_TYPES": ("VAE",), "FUNCTION": "load",
                               "CATEGORY": kind, "load": lambda self: (network(),)})  # fmt: skip


NODE_CLASS_MAPPINGS = {
    "LTXVTiledVAEDecode": TiledDecode, "LTXVSpatioTemporalTiledVAEDecode": ChunkedDecode,
    "VAELoaderMultiGPU": MultiLoader, "PatchTritonVAE": Patch, "HyVideoVAELoader": loader("AutoencoderKLCausal3D"),
    "CogVideoXVAELoader": loader("AutoencoderKLCogVideoX"),
}  # fmt: skip
