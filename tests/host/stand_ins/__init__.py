"""Stands in for the Impact Pack and UltimateSDUpscale: nodes that call the host's own nodes with a VAE, as those do it
(read in their files: Impact's utils.py at d47c85be, and the upscaler's tile loop). Nothing is sampled between."""

import nodes

TILE = 512


class Detailer:
    """Impact's way: a crop is encoded, plainly or in tiles, with the tile size by its place, and decoded again."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"image": ("IMAGE",), "vae": ("VAE",), "tiled": ("BOOLEAN", {"default": False})}}

    RETURN_TYPES = ("IMAGE", "LATENT")
    FUNCTION = "run"
    CATEGORY = "stand-ins"

    def run(self, image, vae, tiled):
        if tiled:
            latent = nodes.VAEEncodeTiled().encode(vae, image, TILE, overlap=64)[0]
            return nodes.VAEDecodeTiled().decode(vae, latent, TILE)[0], latent
        latent = nodes.VAEEncode().encode(vae, image)[0]
        return nodes.VAEDecode().decode(vae, latent)[0], latent


class Inpainting(Detailer):
    """Impact's inpainting: encoded with a mask, whose sides follow from the VAE."""

    def run(self, image, vae, tiled):
        mask = image[..., 0] > 0.5
        latent = nodes.VAEEncodeForInpaint().encode(vae, image, mask.float(), 6)[0]
        return nodes.VAEDecode().decode(vae, latent)[0], latent


class Upscaler(Detailer):
    """UltimateSDUpscale's way: tiles of a picture as one batch, decoded whole or in tiles, and pasted back."""

    def run(self, image, vae, tiled):
        half = image.shape[2] // 2
        tiles = image.unfold(2, half, half).permute(0, 2, 1, 4, 3).flatten(0, 1).contiguous()
        latent = nodes.VAEEncode().encode(vae, tiles)[0]
        decode = nodes.VAEDecodeTiled() if tiled else nodes.VAEDecode()
        (made,) = decode.decode(vae, latent, TILE) if tiled else decode.decode(vae, latent)
        return made.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2, 3), latent


NODE_CLASS_MAPPINGS = {"StandInDetailer": Detailer, "StandInInpainting": Inpainting, "StandInUpscaler": Upscaler}
