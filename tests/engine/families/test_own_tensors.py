"""Every tensor of a file's VAE is read, or the file is refused by the tensor's name."""

import pytest
import torch
from zerowaste_vae.engine.checkpoints import Checkpoint
from zerowaste_vae.engine.errors import CheckpointError
from zerowaste_vae.engine.families import ARCHITECTURES, lies_beside
from zerowaste_vae.engine.loader import load

from .small import SMALL, small

#: A part of each family's published files, or of ComfyUI's networks, on which no frame depends.
UNUSED = {
    "ltx": "per_channel_statistics.mean-of-stds", "ltx-diffusion": "per_channel_statistics.channel",
    "wan2.2": "dynamic_feature_projection_heads.0.weight",
    "cosmos": "decoder.unpatcher3d._arange", "hunyuanvideo1.5": "decoder.mid.block_1.temb_proj.weight",
    "hunyuanvideo": "decoder.mid.block_2.temb_proj.bias",
    "hunyuanimage": "encoder.mid.block_2.temb_proj.bias", "hunyuanimage-refiner": "decoder.mid.block_1.temb_proj.bias",
    "qwenimage2.1": "decoder.upsamples.0.upsamples.3.time_conv.weight",
    "mage": "decoder.y_embedder.bottleneck.weight", "svd": "post_quant_conv.weight", "flux2": "bn.num_batches_tracked",
}  # fmt: skip


def loaded(family: str, *more: str):
    whole = small(family)
    return load(Checkpoint({**whole.tensors, **{name: torch.ones(3) for name in more}}, whole.metadata), "fp32", "cpu")


@pytest.mark.parametrize("family", SMALL)
def test_a_tensor_without_a_place_is_named(family):
    for name in ("decoder.additional.weight", "scale", "decoder.conv_in.weight_scale_inv"):
        with pytest.raises(CheckpointError, match=rf"the network {family} would leave out 1 of its tensors: {name};"):
            loaded(family, name)


@pytest.mark.parametrize("family", UNUSED)
def test_what_no_frame_depends_on_may_be_there(family):
    assert set(loaded(family, UNUSED[family]).model.state_dict()) == set(loaded(family).model.state_dict())
    assert set(UNUSED) >= {a.name for a in ARCHITECTURES if a.unused != "(?!)"}


@pytest.mark.parametrize("name", [
    "loss.discriminator.main.0.weight", "loss.logvar", "optimizer.state.0", "optimizer_states.0", "optimizer_d.step",
    "loss_fn.weight", "ema_decoder.weight",
    "ema.decay", "model_ema.num_updates", "model_ema.decay", "discriminator.main.0.weight", "epoch", "global_step",
    "decoder.norm.num_batches_tracked",
    "model.diffusion_model.input_blocks.0.0.weight", "cond_stage_model.transformer.weight", "text_encoders.t5.weight",
    "conditioner.embedders.0.weight", "audio_vae.decoder.conv_in.weight", "vocoder.conv_pre.weight", "alphas_cumprod",
])  # fmt: skip
def test_leftovers_of_training_and_other_parts_of_a_checkpoint(name):
    assert lies_beside(name)
    assert loaded("wan2.1", name).can_decode


@pytest.mark.parametrize("name", [
    "decoder.loss.weight", "decoder.step", "encoder.ema", "lossy.weight", "stepper.weight", "emancipated", "conv3.bias",
    "decoder.up.0.attn.0.q.weight", "temporal_decoder.weight",
])  # fmt: skip
def test_parts_of_a_vae_are_no_leftovers(name):
    assert not lies_beside(name)


def test_what_follows_an_encoder_that_is_not_there():
    """Decoders are published with the convolution that follows their encoder, too."""
    assert not loaded("sd", "quant_conv.weight_of_old").can_encode
    assert not loaded("wan2.1", "conv1.weight", "conv1.bias").can_encode
    with pytest.raises(CheckpointError, match=r"conv2\.scale"):
        loaded("wan2.1", "conv2.scale")


def test_missing_and_unknown_tensors_are_told_together():
    whole = small("flux")
    tensors = {n.replace("decoder.mid.block_1.conv1", "decoder.mid.block_1.first"): t for n, t in whole.tensors.items()}
    with pytest.raises(CheckpointError, match=r"2 decoder keys are missing: .*conv1.*; 2 are unknown: .*first\.bias"):
        load(Checkpoint(tensors, whole.metadata), "fp32", "cpu")
