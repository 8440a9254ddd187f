"""Recognise the network of a file, however it is wrapped, and under whatever names."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from zerowaste_vae.engine import log
from zerowaste_vae.engine.checkpoints import Checkpoint, read_checkpoint
from zerowaste_vae.engine.errors import CheckpointError
from zerowaste_vae.engine.families import find_key_set, unwrapped
from zerowaste_vae.engine.families.registry import KEY_SETS
from zerowaste_vae.engine.loader import load

from .small import SMALL, small

EVERY = sorted({name for k in KEY_SETS for names in k.keys for name in names})


def loaded(tensors, metadata=None):
    return load(Checkpoint(dict(tensors), metadata or {}), "fp32", "cpu")


@pytest.fixture(scope="module")
def small_files():
    return {name: small(name) for name in SMALL}


@pytest.mark.parametrize("family", SMALL)
def test_extra_name(small_files, family):
    """One name too many makes no file another familys."""
    names = set(small_files[family].tensors)
    assert find_key_set(names).name == family
    assert {find_key_set({*names, extra}).name for extra in EVERY} == {family}


@pytest.mark.parametrize("extra", [
    "bn.running_mean", "decoder.22.bias", "decoder.up.5.block.0.conv1.weight", "post_quant_conv.weight",
    "quantize.embedding.weight", "vocoder.resblocks.0.convs1.0.weight",
])  # fmt: skip
@pytest.mark.parametrize("family", ["flux", "sd", "wan2.1", "hunyuanvideo"])
def test_one_tensor_too_many(small_files, family, extra):
    """It makes no file another family's: it is named, unless it belongs to another part of a checkpoint."""
    whole = small_files[family]
    tensors = {extra: torch.zeros(7), **whole.tensors}
    if extra not in whole.tensors and not extra.startswith("vocoder."):
        with pytest.raises(CheckpointError, match=f"the network {family} would leave out 1 of its .* {extra};"):
            loaded(tensors, whole.metadata)
        return
    vae = loaded(tensors, whole.metadata)
    assert vae.arch == family
    z = torch.randn(1, vae.model.config.latent_channels, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(vae.decode_raw(z), loaded(whole.tensors, whole.metadata).decode_raw(z))


@pytest.mark.parametrize("wrap", [
    lambda name: f"vae.{name}",
    lambda name: f"autoencoder.{name}",
    lambda name: f"model.vae.{name}",
    lambda name: f"state_dict.first_stage_model.{name}",
    lambda name: f"_orig_mod.{name}",
    lambda name: f"module._orig_mod.{name}",
    lambda name: name.replace("coder.", "coder._orig_mod.", 1),
    lambda name: name.replace("coder.", "coder.module.", 1),
])  # fmt: skip
@pytest.mark.parametrize("family", SMALL)
def test_wrapped_names_are_unwrapped(small_files, family, wrap):
    names = list(small_files[family].tensors)
    assert unwrapped(map(wrap, names)) == {wrap(name): name for name in names}


def test_what_lies_beside_a_vae_is_left_out(small_files):
    """LTX-2's audio VAE has HunyuanVideo's layers, and neighbours have names of their own."""
    names = [f"vae.{name}" for name in small_files["ltx"].tensors]
    beside = ["vocoder.resblocks.0.convs1.0.weight", "vocoder.vocoder.resblocks.0.convs1.0.weight",
              "audio_vae.decoder.mid.block_1.conv1.conv.weight", "audio_vae.decoder.mid.block_1.conv2.conv.weight",
              "audio_vae.per_channel_statistics.mean-of-means", "text_embedding_projection.aggregate_embed.weight",
              "model.diffusion_model.transformer_blocks.0.attn1.to_q.weight"]  # fmt: skip
    assert list(unwrapped([*beside, *names])) == names
    audio = unwrapped(beside).values()
    assert find_key_set(audio).title == "an audio VAE"


@pytest.mark.parametrize(("prefixes", "says"), [
    ({"vae.": "wan2.1", "first_stage_model.": "flux"}, "not read: wan2.1 under vae."),
    ({"": "wan2.1", "first_stage_model.": "flux"}, "not read: flux under first_stage_model."),
    ({"ema._orig_mod.": "wan2.1", "vae._orig_mod.": "wan2.1"}, "not read: wan2.1 under ema."),
    ({"first_stage_model.": "svd"}, None),
    ({"": "ltx"}, None),
])  # fmt: skip
def test_a_second_vae_in_a_file_is_said(small_files, tmp_path, caplog, prefixes, says):
    log._said.clear()
    tensors = {p + n: t.clone() for p, name in prefixes.items() for n, t in small_files[name].tensors.items()}
    # Of a Stable Video Diffusion checkpoint: the encoder of its conditioning.
    halves = {f"conditioner.encoder.{n}": t for n, t in small("flux").tensors.items() if n.startswith("encoder.")}
    save_file({**tensors, **halves, "model.diffusion_model.input_blocks.0.0.weight": torch.zeros(2)},
              tmp_path / "a.safetensors", dict(small_files[next(iter(prefixes.values()))].metadata))  # fmt: skip
    read_checkpoint(tmp_path / "a.safetensors")
    assert (says in caplog.text) if says else not caplog.records


def to_diffusers(name: str) -> str:
    """HunyuanVideo's original name -> diffusers', by the rules of its published conversion."""
    name = re.sub(r"\.mid\.block_(\d)\.", lambda m: f".mid_block.resnets.{int(m[1]) - 1}.", name)
    name = re.sub(r"^decoder\.up\.(\d)\.", lambda m: f"decoder.up_blocks.{3 - int(m[1])}.", name)
    name = re.sub(r"^encoder\.down\.", "encoder.down_blocks.", name)
    name = re.sub(r"_blocks\.(\d)\.block\.", r"_blocks.\1.resnets.", name)
    name = re.sub(r"_blocks\.(\d)\.(up|down)sample\.", r"_blocks.\1.\2samplers.0.", name)
    for old, new in {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}.items():
        name = name.replace(f".mid.attn_1.{old}.", f".mid_block.attentions.0.{new}.")
    return name.replace(".nin_shortcut.", ".conv_shortcut.").replace(".norm_out.", ".conv_norm_out.")


def test_hunyuanvideo_under_diffusers_names(tmp_path, shared):
    """The recorded weights, renamed: the same tensors, and the recorded frames."""
    folder = shared / "golden" / "other"
    weights = {**load_file(folder / "hunyuan1.0.weights.safetensors"),
               **load_file(folder / "hunyuan1.0.encoder.weights.safetensors")}  # fmt: skip
    renamed = {to_diffusers(name): t for name, t in weights.items()}
    attention = re.compile(r"attentions\.0\.to_\w+(\.0)?\.weight")  # as linear layers there
    renamed = {n: t.flatten(1) if attention.search(n) else t for n, t in renamed.items()}
    assert "decoder.up_blocks.1.resnets.0.conv1.conv.weight" in renamed and len(renamed) == len(weights)
    save_file({**renamed, "decoder.up_blocks.4.something": torch.zeros(1)}, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"decoder\.up_blocks\.4\.something"):
        load(tmp_path / "b.safetensors", device="cpu")
    save_file(renamed, tmp_path / "a.safetensors")
    vae = load(tmp_path / "a.safetensors", device="cpu")
    state = vae.model.state_dict()
    assert vae.arch == "hunyuanvideo" and state.keys() == weights.keys()
    assert all(torch.equal(state[name].flatten(), t.float().flatten()) for name, t in weights.items())
    recorded = load_file(folder / "hunyuan1.0.io.safetensors")
    case = min((n for n in recorded if n.endswith(".decode")), key=lambda n: recorded[n].numel()).partition(".")[0]
    assert torch.equal(vae.decode_raw(recorded[f"{case}.latent"]),
                       load(Checkpoint(weights), device="cpu").decode_raw(recorded[f"{case}.latent"]))  # fmt: skip


def test_wan_diffusers(tmp_path, small_files):
    """Wan under diffusers names with more tensors."""
    from ..checkpoints.test_shapes import wan_to_diffusers

    whole = small_files["wan2.1"].tensors
    renamed = {wan_to_diffusers(n): t for n, t in whole.items()}
    more = {n: torch.zeros(2) for n in ("decoder.mid_block.attentions.0.extra.weight", "loss.logvar")}
    save_file({**renamed, **more}, tmp_path / "a.safetensors")
    assert read_checkpoint(tmp_path / "a.safetensors").tensors.keys() == whole.keys() | more.keys()
    with pytest.raises(CheckpointError, match=r"1 of its tensors: decoder\.mid_block\.attentions\.0\.extra\.weight;"):
        load(tmp_path / "a.safetensors", device="cpu")
    save_file({**renamed, "loss.logvar": torch.zeros(2)}, tmp_path / "b.safetensors")
    z = torch.randn(1, 16, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(load(tmp_path / "b.safetensors", device="cpu").decode_raw(z), loaded(whole).decode_raw(z))
    assert torch.equal(loaded(renamed).decode_raw(z), loaded(whole).decode_raw(z))  # given as tensors
    both = {**renamed, "decoder.head.0.gamma": torch.zeros(2)}
    save_file(both, tmp_path / "c.safetensors")
    for refused in (lambda: load(tmp_path / "c.safetensors", device="cpu"), lambda: loaded(both)):
        with pytest.raises(CheckpointError, match=r"decoder\.\S+ and decoder\.\S+ are two names of one tensor"):
            refused()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        # Both of a VQ model: as many moments as latents, or the codes without an encoder.
        (lambda t: t | {"encoder.conv_out.bias": torch.zeros(16), "encoder.conv_out.weight": torch.zeros(16, 16, 3, 3)},
         "a VQ model"),
        (lambda t: {**{n: x for n, x in t.items() if not n.startswith("encoder.")},
                    "quantize.embedding.weight": torch.zeros(64, 16)}, "a VQ model"),
        (lambda t: {**t, "decoder.up.3.attn.0.q.weight": torch.zeros(16, 16, 1, 1)}, "decoder keys are missing"),
    ],
)  # fmt: skip
def test_same_names(small_files, change, says):
    """Networks under the same names that compute something else."""
    whole = small_files["flux"]
    with pytest.raises(CheckpointError, match=says):
        loaded(change(whole.tensors), whole.metadata)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["decoder.mid_block.resnets.0.norm1.norm_layer.weight", "decoder.mid_block.resnets.0.norm1.conv_y.weight",
          "decoder.up_blocks.0.upsamplers.0.conv.weight"], "MoVQ"),
        (["decoder.mid_block.resnets.0.norm1.gamma", "decoder.mid_block.resnets.0.conv1.conv.weight"],
         "HunyuanVideo 1.5's VAE under diffusers' names (take the file with the original ones)"),
        (["model.diffusion_model.input_blocks.0.weight"], "a diffusion model without a VAE"),
        (["blocks.0.attn.lora_A.weight"], "a LoRA"),
        (["down_blocks.0.resnets.0.conv1.weight"], "under diffusers' names"),
        (["quantize.embedding.weight", "decoder.blocks.0.weight"], "a VQ model"),
        (["decoder.temp_conv_in.weight", "decoder.temp_conv_out.weight", "encoder.conv_in.weight",
          "decoder.up_blocks.0.upsamplers.0.conv.weight", "decoder.up_blocks.0.resnets.0.conv1.weight"],
         "Allegro's video VAE"),
        (["latents_mean", "latents_std", "decoder.mid.block_1.conv1.conv.weight"], "an audio VAE"),
        (["decoder.conv_in_x_t.weight", "latents_mean", "latents_std",
          *(f"decoder.det_stages.0.0.attn.to_{part}.weight" for part in "qkv")],
         "LTX-2.5's diffusion decoder under diffusers' names"),
        (["decoder.mid.block_1.conv1.conv.weight", "decoder.mid.block_1.conv2.conv.weight",
          "decoder.mid.attn_1.norm.norm.weight", "decoder.mid.attn_1.q.conv.weight"], "VidTok"),
        (["encoder.down_blocks.1.downsamplers.0.conv.weight", "encoder.down_blocks.0.downsamplers.0.conv.weight",
          "decoder_unet.conv_in.weight", "decoder_unet.time_proj.weight"], "a consistency decoder"),
    ],
)  # fmt: skip
def test_other_files_are_named_in_one_line(names, says):
    with pytest.raises(CheckpointError) as error:
        loaded({name: torch.zeros(1) for name in names})
    assert says in str(error.value) and "\n" not in str(error.value)
