"""Sockets, signatures and calls of WanVideoWrapper 1.4.5 (commit 19bcee67) and of MultiGPU 2.6.3 (a38cbda5) beside it,
around any network that encodes [B, 3, F, H, W] to moments or latents and decodes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

#: Models by name; a test fills them in, or `fill` does within ComfyUI.
NETWORKS: dict[str, nn.Module] = {}


class WanVideoVAE(nn.Module):
    def __init__(self, network: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dtype, self.z_dim, self.upsampling_factor = dtype, 16, 8
        self.mean = torch.linspace(-1, 1, 16).view(1, 16, 1, 1, 1)
        self.inv_std = torch.linspace(0.5, 2, 16).view(1, 16, 1, 1, 1)
        self.model = network.eval().requires_grad_(False)

    def encode(
        self, videos, device, tiled=False, end_=False, tile_size=None, tile_stride=None, pbar=True, sample=False
    ) -> Tensor:
        return torch.stack([(self.model.encode(x[None]) - self.mean)[0] * self.inv_std[0] for x in videos])

    def decode(
        self, hidden_states, device, tiled=False, end_=False, tile_size=(34, 34), tile_stride=(18, 16), pbar=True
    ) -> list[Tensor]:
        return [self.model.decode(z[None] / self.inv_std + self.mean)[0] for z in hidden_states]


class WanVideoVAE38(WanVideoVAE):
    pass


class TAEHV(nn.Module):
    """Its small decoder, which no node of ours replaces."""

    dtype = torch.float32

    def decode_video(self, x, parallel=True, cond=None):
        return torch.zeros(1, 4 * x.shape[1] - 3, 3, 8 * x.shape[3], 8 * x.shape[4])


def fill() -> None:
    """Add a small Wan 2.1 of the host's."""
    from comfy.ldm.wan.vae import WanVAE

    network = WanVAE(dim=16, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[],
                     temperal_downsample=[False, True, True], image_channels=3, conv_out_channels=3)  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for p in network.parameters():
        p.data = torch.randn(p.shape, generator=generator) * (p[0].numel() ** -0.5 if p.ndim > 1 else 1)
    NETWORKS["small"] = network


def sockets(**inputs: object) -> classmethod:
    return classmethod(lambda cls: {"required": inputs})


class Loader:
    INPUT_TYPES = sockets(model_name=(["small"],), precision=(["fp32", "bf16"],))
    RETURN_TYPES, FUNCTION, CATEGORY = ("WANVAE",), "loadmodel", "WanVideoWrapper"

    def loadmodel(self, model_name, precision, compile_args=None, use_cpu_cache=False):
        if model_name not in NETWORKS:
            fill()
        return (WanVideoVAE(NETWORKS[model_name]),)


class TinyLoader:
    INPUT_TYPES = sockets(model_name=(["small"],))
    RETURN_TYPES, FUNCTION, CATEGORY = ("WANVAE",), "loadmodel", "WanVideoWrapper"

    def loadmodel(self, model_name):
        return (TAEHV(),)


class MultiLoader(Loader):
    RETURN_TYPES, FUNCTION = ("WANVAE", "MULTIGPUDEVICE"), "load"

    def load(self, model_name, precision):
        return self.loadmodel(model_name, precision), "cpu"


class Decode:
    INPUT_TYPES = sockets(
        vae=("WANVAE",), samples=("LATENT",), enable_vae_tiling=("BOOLEAN", {"default": False}),
        tile_x=("INT", {"default": 272}), tile_y=("INT", {"default": 272}), tile_stride_x=("INT", {"default": 144}),
        tile_stride_y=("INT", {"default": 128}),
    )  # fmt: skip
    RETURN_TYPES, FUNCTION, CATEGORY = ("IMAGE",), "decode", "WanVideoWrapper"

    def decode(self, vae, samples, enable_vae_tiling, tile_x, tile_y, tile_stride_x, tile_stride_y):
        vae.to("cpu")
        latents = samples["samples"].to("cpu", vae.dtype)
        if type(vae).__name__ == "TAEHV":
            images = vae.decode_video(latents.movedim(1, 2))[0].movedim(0, 1)
        else:
            images = vae.decode(
                latents, device=torch.device("cpu"), end_=False, tiled=enable_vae_tiling,
                tile_size=(tile_x // 8, tile_y // 8), tile_stride=(tile_stride_x // 8, tile_stride_y // 8),
            )[0]  # fmt: skip
        vae.to("cpu")
        return (((images.cpu().float().clamp(-1, 1) + 1) / 2).permute(1, 2, 3, 0),)


class MultiDecode(Decode):
    FUNCTION = "inner"

    def inner(self, vae, **rest):
        return self.decode(vae[0], **rest)


class Encode:
    INPUT_TYPES = sockets(vae=("WANVAE",), image=("IMAGE",), enable_vae_tiling=("BOOLEAN", {"default": False}))
    RETURN_TYPES, FUNCTION, CATEGORY = ("LATENT",), "encode", "WanVideoWrapper"

    def encode(self, vae, image, enable_vae_tiling):
        vae.to("cpu")
        x = image[..., :3].permute(3, 0, 1, 2)[None].to("cpu", vae.dtype)
        latents = vae.encode(x * 2 - 1, device=torch.device("cpu"), tiled=enable_vae_tiling, tile_size=(34, 34),
                             tile_stride=(18, 16))  # fmt: skip
        vae.to("cpu")
        return ({"samples": latents},)


NODE_CLASS_MAPPINGS = {
    "WanVideoVAELoader": Loader, "WanVideoTinyVAELoader": TinyLoader, "WanVideoVAELoaderMultiGPU": MultiLoader,
    "WanVideoDecode": Decode, "WanVideoDecodeMultiGPU": MultiDecode, "WanVideoEncode": Encode,
}  # fmt: skip
