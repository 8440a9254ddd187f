"""Networks that are named in messages but not run, and other tensors that files hold beside a VAE's own."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..network.architecture import KeySet

_MIDDLE = "decoder.mid_block.resnets.0"
_ORIGINAL = "under diffusers' names (take the file with the original ones)"


def _known(name: str, title: str, *keys: str) -> KeySet:
    """Return a family that is identified by all of these names."""
    return KeySet(name, (keys,), title=title)


def _other(name: str, title: str, *any_of: str, both: tuple[tuple[str, ...], ...] = ()) -> KeySet:
    """Return a family that is identified by any one name of `any_of`, or by all of an entry of `both`."""
    return KeySet(name, (*((key,) for key in any_of), *both), title=title)


MOVQ = _known("movq", "a VQ model (MoVQ, Kandinsky 2's)", f"{_MIDDLE}.norm1.norm_layer.weight",
              f"{_MIDDLE}.norm1.conv_y.weight")  # fmt: skip
HUNYUAN15_DIFFUSERS = _known("hunyuanvideo1.5-diffusers", f"HunyuanVideo 1.5's VAE {_ORIGINAL}",
                             f"{_MIDDLE}.norm1.gamma", f"{_MIDDLE}.conv1.conv.weight")  # fmt: skip
#: Networks whose files also have the names by which families that are run are known. None of those has these names.
NEIGHBOURS = (
    _known("flash-vaed", "Flash-VAED's decoder of Wan", *(f"decoder.middle.0.residual.2.{part}_conv.weight"
                                                          for part in ("depthwise", "pointwise"))),
    _known("flash-vaed-ltx", "Flash-VAED's decoder of LTX-Video", *(f"{_MIDDLE}.conv1.{part}.weight"
                                                                    for part in ("depthwise", "pointwise"))),
    _known("allegro", "Allegro's video VAE", "decoder.temp_conv_in.weight", "decoder.temp_conv_out.weight"),
    _known("asymmetric", "an asymmetric VAE for inpainting, whose decoder takes the masked picture too",
           *(f"decoder.condition_encoder.layers.{i}.weight" for i in (0, 1))),
    _known("consistency", "a consistency decoder", "decoder_unet.conv_in.weight", "decoder_unet.time_proj.weight"),
    _known("kvae", "KVAE's image VAE", "decoder.mid.block_1.norm1.norm_layer.weight",
           "decoder.mid.block_1.norm1.conv_b.weight"),
    _known("kvae-video", "KVAE's video VAE", "decoder.mid.block_1.norm1.norm_layer.norm_layer.weight",
           "decoder.mid.block_1.norm1.conv_b.weight"),
    _known("vidtok", "a video tokenizer (VidTok)", "decoder.mid.attn_1.norm.norm.weight",
           "decoder.mid.attn_1.q.conv.weight"),
    _known("hunyuanimage-diffusers", f"HunyuanImage 2.1's VAE {_ORIGINAL}", "decoder.up_blocks.0.norm1.weight",
           "decoder.up_blocks.0.conv1.weight"),
    KeySet("minimaxh3-streaming", tuple(
        tuple(f"{half}{part}" for part in ("register_tokens", "blocks.0.scale1", "blocks.0.attn.to_qkv.weight"))
        for half in ("", "decoder.")
    ), title="a decoder of MiniMax H3 in windows of whole frames (Sol-H3: not yet; Sana's causal one)"),
    _known("ltx-diffusion-diffusers", f"LTX-2.5's diffusion decoder {_ORIGINAL}",
           *(f"decoder.det_stages.0.0.attn.to_{part}.weight" for part in "qk")),
    _known("mochi-diffusers", f"Mochi's VAE {_ORIGINAL}", "decoder.block_in.resnets.0.norm1.norm_layer.weight",
           "decoder.block_in.resnets.0.conv1.conv.weight"),
    _known("cosmos-diffusers", f"Cosmos' VAE {_ORIGINAL}", *(f"{_MIDDLE}.conv1.conv_{part}.weight" for part in "st")),
    _known("magvit", "EasyAnimate's video VAE", *(f"decoder.mid_block.convs.0.{part}.weight" for part in
                                                  ("norm1", "conv1"))),
    _known("dc", "a deep compression VAE (DC-AE, Sana's)", *(f"decoder.up_blocks.0.1.{part}.weight" for part in
                                                             ("conv1", "norm"))),
)  # fmt: skip
#: No network that is run has these names; they come last, to decide only if nothing else does.
OTHERS = (
    _other(
        "audio", "an audio VAE", "decoder.layers.1.layers.0.beta", "vocoder.backbone.channel_layers.0.0.bias",
        "vocoder.activation_post.downsample.lowpass.filter", "vocoder.resblocks.0.convs1.0.weight",
        "vocoder.vocoder.resblocks.0.convs1.0.weight", "dec_in_proj.weight", "decoder.block.0.snake1.alpha",
        "bottleneck.running_std",
        # LTX-2's audio VAE, without its vocoder.
        both=tuple(("decoder.mid.block_1.conv1.conv.weight", means) for means in
                   ("per_channel_statistics.mean-of-means", "latents_mean")),
    ),
    _other(
        "cascade", "a stage of Stable Cascade", "vquantizer.codebook.weight",
        "backbone.1.0.block.0.1.num_batches_tracked", "encoder.backbone.1.0.block.0.1.num_batches_tracked",
        "blocks.11.num_batches_tracked",
    ),
    _other("taehv-other", "a reduced video VAE (TAEHV) of another layout", "decoder.22.bias"),
    _other("taesd-other", "a reduced image VAE (TAESD)", "taesd_decoder.1.weight",
           both=(("decoder.layers.0.weight", "decoder.layers.2.conv.0.weight"),)),
    _other("shapes", "a VAE of 3-D shapes", "geo_decoder.cross_attn_decoder.ln_1.bias"),
    _other("vq", "a VQ model", "quantize.embedding.weight"),
)  # fmt: skip
#: Kinds of files without a VAE, by a part of their names.
_KINDS = (
    (re.compile(r"\.lora_?(up|down|A|B)\b|\.hada_w1_a$|\.lokr_w1"), "a LoRA"),
    (re.compile(r"^(model\.)?diffusion_model\.|^(double|transformer|joint)_?blocks\.\d"),
     "a diffusion model without a VAE"),
    (re.compile(r"^(text_model|encoder\.block|model\.layers|blk|cond_stage_model|text_encoders)\."), "a text encoder"),
    (re.compile(r"^discriminator\.|^loss\."), "a part of a training run"),
    (re.compile(r"(^|\.)(up|down|mid)_blocks?\."), "a network under diffusers' names: take the VAE's file for ComfyUI, "
                                                   "with the original ones"),
)  # fmt: skip
#: What training leaves in files.
_TRAINING = re.compile(
    r"(^|\.)(num_batches_tracked|position_ids)$"
    r"|^(loss(es|_\w+)?|perceptual_loss|lpips|discriminator\w*|optimizers?(_\w+)?|lr_schedulers?|grad_scaler"
    r"|callbacks|loops|hyper_parameters|ema(_\w+)?|model_ema|teacher|epoch|global_step|step)(\.|$)"
)
#: Other components of a whole checkpoint.
_COMPONENTS = re.compile(
    r"^(model\.diffusion_model|diffusion_model|unet|transformer|denoiser|control_model|cond_stage_model|conditioner"
    r"|embedder|text_encoders?|text_encoder_\d|text_model|clip_\w+|t5\w*|audio_vae|vocoder|vae|first_stage_model"
    r"|autoencoder|module|text_embedding_projection|\w+_embeddings_connector|safety_checker"
    r"|(log_|sqrt_|alphas_|betas|posterior_)\w*)(\.|$)"
)


def kind_of(names: Iterable[str]) -> str | None:
    """Return what a file without a known VAE holds, in words; None if its names do not show it."""
    names = list(names)
    return next((said for pattern, said in _KINDS if any(pattern.search(n) for n in names)), None)


def lies_beside(name: str) -> bool:
    """Return whether a tensor of this name belongs to no VAE: leftovers of training, other parts of a checkpoint."""
    return bool(_TRAINING.search(name) or _COMPONENTS.match(name))
