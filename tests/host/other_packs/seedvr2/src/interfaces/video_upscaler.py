"""Loader and upscaler."""

from types import SimpleNamespace

import torch

from ..core.model_configuration import _initialize_cache_context
from ..optimization.compatibility import COMPUTE_DTYPE
from ..utils.constants import find_model_file

SCALE = 0.9152
FLAG = ("BOOLEAN", {"default": False})


class OwnVAE(torch.nn.Module):
    """Stands for the pack's own network: it only shows that it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1), requires_grad=False)

    def encode(self, x, tiled=False, tile_size=None, tile_overlap=None):
        return SimpleNamespace(latent=torch.zeros(1, 16, (x.shape[2] + 3) // 4, *(n // 8 for n in x.shape[3:])))

    def decode(self, z, tiled=False, tile_size=None, tile_overlap=None):
        z = z if z.ndim == 5 else z[:, :, None]
        return SimpleNamespace(sample=torch.zeros(1, 3, 4 * z.shape[2] - 3, *(8 * n for n in z.shape[3:])))


class Loader:
    @classmethod
    def INPUT_TYPES(cls):
        tiles = {f"{way}_tiled": FLAG for way in ("encode", "decode")}
        return {"required": {"model": ("STRING", {"default": "tiny.safetensors"}), "device": (["cpu"],),
                             "cache_model": FLAG, **tiles}, "hidden": {"node": "UNIQUE_ID"}}  # fmt: skip

    RETURN_TYPES, FUNCTION, CATEGORY = ("SEEDVR2_VAE",), "execute", "SEEDVR2"

    def execute(self, model, device, cache_model=False, encode_tiled=False, decode_tiled=False, node="1"):
        tiles = {"encode_tile_size": 1024, "encode_tile_overlap": 128, "decode_tile_size": 1024,
                 "decode_tile_overlap": 128, "tile_debug": "false"}  # fmt: skip
        return ({"model": model, "device": device, "offload_device": "none", "cache_model": cache_model,
                 "encode_tiled": encode_tiled, "decode_tiled": decode_tiled, **tiles, "torch_compile_args": None,
                 "node_id": node},)  # fmt: skip


def cleanup(runner, cache_model):
    if runner.vae is None:
        return
    if next(runner.vae.parameters()).device.type not in ("meta", "cpu"):
        runner.vae.to(torch.device("cpu"))
        runner.vae.zero_grad(set_to_none=True)
    if not cache_model:
        runner.vae = None


class Upscaler:
    @classmethod
    def INPUT_TYPES(cls):
        fails = (["never", "before", "between"],)
        return {"required": {"image": ("IMAGE",), "vae": ("SEEDVR2_VAE",), "batch_size": ("INT", {"default": 5}),
                             "fails": fails}}  # fmt: skip

    RETURN_TYPES, FUNCTION, CATEGORY = ("IMAGE",), "execute", "SEEDVR2"

    def execute(self, image, vae, batch_size=5, fails="never"):
        vae_model, _, vae_id = vae["model"], torch.device(vae["device"]), vae["node_id"]
        vae_cache = vae.get("cache_model", False)
        tiles = [
            {"tiled": vae.get(f"{way}_tiled", False), "tile_size": (vae.get(f"{way}_tile_size", 512),) * 2,
             "tile_overlap": (vae.get(f"{way}_tile_overlap", 64),) * 2} for way in ("encode", "decode")
        ]  # fmt: skip
        runner = None
        try:
            context = _initialize_cache_context(False, vae_cache, "2", vae_id, "dit", vae_model, None)
            cache = context["global_cache"]
            runner = cache.get_runner("2", vae_id) or SimpleNamespace(vae=None)
            if context["cached_vae"] is not None:
                runner.vae, runner._vae_checkpoint = context["cached_vae"], find_model_file(vae_model)
                runner._vae_tiling_config = getattr(runner.vae, "_config_tiling", None)
            elif runner.vae is None:
                runner.vae = OwnVAE()
            runner.vae._config_tiling = tiles
            if fails == "before":
                raise RuntimeError("CUDA out of memory: before")
            if vae_cache and not context["cached_vae"]:
                runner.vae._model_name = vae_model
                cache.set_vae({"node_id": vae_id, "cache_model": True}, runner.vae, vae_model)
            latents = []
            for batch in image.split(batch_size):
                kept = len(batch)
                batch = torch.cat([batch, *[batch[-1:]] * (-(kept - 1) % 4)])
                x = (batch[..., :3] * 2 - 1).permute(3, 0, 1, 2)[None].to(COMPUTE_DTYPE)
                latent = runner.vae.encode(x, **tiles[0]).latent
                latents.append(((latent if latent.ndim == 5 else latent[:, :, None]) * SCALE, kept))
            cache.set_runner("2", vae_id, runner)
            if fails == "between":
                raise RuntimeError("CUDA out of memory: between")
            frames = []
            for latent, kept in latents:
                sample = runner.vae.decode((latent / SCALE).squeeze(2), **tiles[1]).sample
                sample = sample if sample.ndim == 5 else sample[:, :, None]
                frames.append(sample[0, :, :kept].movedim(0, -1))
            cleanup(runner, vae_cache)
            return (((torch.cat(frames).float().clamp(-1, 1) + 1) / 2),)
        except Exception:
            if runner is not None:
                cleanup(runner, vae_cache)
            raise


NODE_CLASS_MAPPINGS = {"SeedVR2LoadVAEModel": Loader, "SeedVR2VideoUpscaler": Upscaler}
