"""Image VAEs with attention after each block of some levels, under both sets of names."""

import pytest
import torch
import torch.nn.functional as F
from zerowaste_vae import CheckpointError, load
from zerowaste_vae.engine.checkpoints import Checkpoint
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.families import kl
from zerowaste_vae.engine.options import DEFAULTS

from .originals import close

WIDTHS = (16, 16, 32)
#: Levels of the encoder and the decoder that attend: the lowest alone, as those who train such VAEs do, and others.
LEVELS = [((2,), (2,)), ((1, 2), (1, 2)), ((), (0,))]
PARTS = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}


def config(attends):
    return kl.Config(WIDTHS, WIDTHS, 4, 4, quantised=True, norm_groups=4, attends=attends)


def checkpoint(attends):
    return random_checkpoint(config(attends), architecture=kl.SD)


def to_diffusers(name: str) -> str:
    for half, row, count in (("encoder", "down", 0), ("decoder", "up", len(WIDTHS) - 1)):
        for level in range(len(WIDTHS)):
            name = name.replace(f"{half}.{row}.{level}.", f"{half}.{row}_blocks.{abs(count - level)}.")
    for j in range(3):
        name = name.replace(f".block.{j}.", f".resnets.{j}.").replace(f".attn.{j}.", f".attentions.{j}.")
    name = name.replace(".upsample.", ".upsamplers.0.").replace(".downsample.", ".downsamplers.0.")
    for i in (1, 2):
        name = name.replace(f".mid.block_{i}.", f".mid_block.resnets.{i - 1}.")
    name = name.replace(".mid.attn_1.", ".mid_block.attentions.0.").replace(".nin_shortcut.", ".conv_shortcut.")
    if "attentions" in name:
        place, part, leaf = name.rsplit(".", 2)
        return f"{place}.{PARTS[part]}.{leaf}"
    return name.replace(".norm_out.", ".conv_norm_out.")


def written_out(w, z):
    """The decoder in plain words, for latents [1, 4, h, w]."""

    def norm(name, x):
        return F.group_norm(x, 4, w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)

    def conv(name, x):
        weight = w[f"{name}.weight"]
        return F.conv2d(x, weight, w[f"{name}.bias"], padding=weight.shape[-1] // 2)

    def block(name, x):
        y = conv(f"{name}.conv1", F.silu(norm(f"{name}.norm1", x)))
        y = conv(f"{name}.conv2", F.silu(norm(f"{name}.norm2", y)))
        return y + (conv(f"{name}.nin_shortcut", x) if f"{name}.nin_shortcut.weight" in w else x)

    def attention(name, x):
        q, k, v = (conv(f"{name}.{part}", norm(f"{name}.norm", x)).flatten(2) for part in "qkv")
        weights = (q.transpose(1, 2) @ k / q.shape[1] ** 0.5).softmax(-1)
        return x + conv(f"{name}.proj_out", (v @ weights.transpose(1, 2)).view_as(x))

    x = conv("decoder.conv_in", conv("post_quant_conv", z))
    x = block("decoder.mid.block_2", attention("decoder.mid.attn_1", block("decoder.mid.block_1", x)))
    for level in (2, 1, 0):
        for j in range(3):
            x = block(f"decoder.up.{level}.block.{j}", x)
            if f"decoder.up.{level}.attn.{j}.q.weight" in w:
                x = attention(f"decoder.up.{level}.attn.{j}", x)
        if level:
            x = conv(f"decoder.up.{level}.upsample.conv", F.interpolate(x, scale_factor=2.0))
    return conv("decoder.conv_out", F.silu(norm("decoder.norm_out", x)))


@pytest.mark.parametrize("attends", LEVELS, ids=str)
def test_both_dialects_are_run(attends, noise):
    native = checkpoint(attends)
    weights = {name: t.float() for name, t in native.tensors.items()}
    z = noise(1, 4, 1, 4, 5)
    vae = load(checkpoint(attends), "fp32", "cpu")
    assert vae.arch == "sd" and vae.model.config == config(attends)
    expected = written_out(weights, z[:, :, 0])
    decoded = vae.decode_raw(z)
    close(decoded[:, :, 0], expected)
    linear = {to_diffusers(n): t.flatten(1) if "attn" in n and t.ndim > 1 else t for n, t in native.tensors.items()}
    assert not attends[1] or any("up_blocks.0.attentions.2.to_out.0" in n for n in linear) == (2 in attends[1])
    again = load(Checkpoint(linear, native.metadata), "fp32", "cpu")
    assert torch.equal(again.decode_raw(z), decoded)
    x = noise(1, 3, 1, 16, 20)
    assert torch.equal(again.encode_raw(x), vae.encode_raw(x))


@pytest.mark.parametrize("attends", LEVELS, ids=str)
def test_fused_operators_and_tiles(attends, noise, monkeypatch):
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    fused = load(checkpoint(attends), "fp32", "cpu")
    plain = fused.with_options(DEFAULTS.switched(off=["triton_fusion"]))
    z = noise(1, 4, 1, 6, 7)
    for tiling in ({}, {"tiling": "blended", "tile": 16, "overlap": 4}):
        close(fused.decode(z, **tiling), plain.decode(z, **tiling), 1e-4)
    x = torch.rand(1, 1, 24, 28, 3, generator=torch.Generator().manual_seed(2))
    close(fused.encode(x), plain.encode(x), 1e-4)


def test_every_attention_of_a_level_is_needed():
    whole = checkpoint(((2,), (2,)))
    for gone in ("decoder.up.2.attn.1.q.weight", "decoder.up.2.attn.2.norm.bias"):
        tensors = {name: t for name, t in whole.tensors.items() if name != gone}
        with pytest.raises(CheckpointError, match=f"1 decoder keys are missing: {gone}"):
            load(Checkpoint(tensors, whole.metadata), "fp32", "cpu")
