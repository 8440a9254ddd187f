"""LightVAE of Wan: fewer channels, blocks without their main branch, other names."""

import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from zerowaste_vae import Checkpoint, load
from zerowaste_vae.engine.errors import CheckpointError
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.families import by_file, detect
from zerowaste_vae.engine.families.taehv import ARCHITECTURE as TAEHV
from zerowaste_vae.engine.families.wan import WAN21, WAN22, Config
from zerowaste_vae.engine.loader import encoder_only
from zerowaste_vae.engine.network.ops.norm import LengthNormAct
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.planning.fusable import half_not_fused

from ..checkpoints.test_shapes import wan_to_diffusers
from .originals import close

CONFIGS = {
    "wan2.1": Config((8, 16, 24, 24), (16, 32, 48, 48)),
    "wan2.2": Config((16, 32, 64, 64), (16, 32, 32, 64), 48, 2),
}
#: The first one, two whole levels, one that changes the width, the last one.
PRUNED = {
    "wan2.1": ("decoder.middle.0", *(f"decoder.upsamples.{i}" for i in (0, 1, 2, 4, 8, 9, 10, 14)),
               "encoder.middle.2", *(f"encoder.downsamples.{i}" for i in (0, 1, 3, 9))),
    "wan2.2": ("decoder.middle.2", *(f"decoder.upsamples.{i}.upsamples.{j}" for i, j in ((0, 0), (1, 0), (2, 1))),
               "encoder.middle.0", *(f"encoder.downsamples.{i}.downsamples.{j}" for i, j in ((0, 0), (1, 0), (3, 1)))),
}  # fmt: skip


def loaded(tensors):
    return load(Checkpoint(dict(tensors), {}), "fp32", "cpu")


def made(family, seed=0):
    architecture = {"wan2.1": WAN21, "wan2.2": WAN22}[family]
    return random_checkpoint(CONFIGS[family], seed, architecture).tensors


def pruned_pair(family, seed=0):
    """(tensors of a pruned file, of a whole one whose blocks add nothing in its place)"""
    whole = made(family, seed)
    gone = re.compile(rf"({'|'.join(map(re.escape, PRUNED[family]))})\.residual\.")
    for name, tensor in whole.items():
        if gone.match(name) and ".residual.6." in name:
            tensor.zero_()
    return {n: t for n, t in whole.items() if not gone.match(n)}, whole


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_pruned_blocks_are_their_shortcuts(family, fused, noise, monkeypatch):
    left, whole = map(loaded, pruned_pair(family))
    config = left.model.config
    assert left.arch == family and config == replace(whole.model.config, pruned=config.pruned)
    assert set(config.pruned) == set(PRUNED[family])
    if fused:
        monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
        left, whole = left.with_options(DEFAULTS), whole.with_options(DEFAULTS)
        assert left.plan_decode(3, 2, 3).fused
    z = noise(1, left.latent_channels, 3, 2, 3)
    frames = left.decode(z)
    close(frames, whole.decode(z), 1e-5)
    by_one = left.decode(z, chunk=1)
    assert torch.equal(by_one, frames) if fused else (by_one - frames).abs().max() < 1e-5
    close(left.encode(frames), whole.encode(frames), 1e-5)


@pytest.mark.parametrize("family", CONFIGS)
def test_halves_of_pruned_files(family, caplog):
    tensors = pruned_pair(family)[0]
    decoder = {n: t for n, t in tensors.items() if n.startswith(("decoder.", "conv2."))}
    assert loaded(decoder).arch == family
    encoder = {n: t for n, t in tensors.items() if n.startswith(("encoder.", "conv1."))}
    architecture, config = encoder_only(Checkpoint(encoder, {}))
    assert architecture.name == family and all(name.startswith("encoder.") for name in config.pruned)
    assert len(config.pruned) == sum(name.startswith("encoder.") for name in PRUNED[family])


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("gone", ["residual.0.gamma", "residual.2.bias", "residual.6.weight"])
def test_a_block_that_lacks_one_tensor_is_damaged(family, gone):
    whole = made(family)
    name = next(n for n in sorted(whole) if n.startswith("decoder.upsamples.0") and n.endswith(gone))
    for lost in (name, f"decoder.middle.0.{gone}"):
        with pytest.raises(CheckpointError) as error:
            loaded({n: t for n, t in whole.items() if n != lost})
        assert len(str(error.value).splitlines()) == 1


def test_reduced_decoders_are_named():
    assert WAN21.variant(WAN21.published.config) == WAN22.variant(WAN22.published.config) == ""
    light, half = (a.published.sizes(f) for a, f in ((WAN21, "lightvaew2_1"), (WAN22, "MG-LightVAE_v2")))
    assert WAN21.variant(light) == WAN22.variant(half) == "LightVAE with 1/4 of the channels"
    assert WAN22.variant(replace(half, decoder_widths=(128, 256, 512, 512))) == "LightVAE with 1/2 of the channels"
    named = WAN21.variant(replace(light, pruned=PRUNED["wan2.1"]))
    assert named == "LightVAE without 9 of the decoder's 14 residual blocks"
    files = {"lightvaew2_1.safetensors": WAN21, "MG-LightVAE.pth": WAN22, "lighttaew2_1.safetensors": TAEHV,
             "flashvaed_wan.safetensors": None, "taew2_1.safetensors": TAEHV}  # fmt: skip
    assert {file: by_file(file) for file in files} == files


def test_the_text_of_sizes_tells_of_pruned_blocks_only():
    """It names the uses of prebuilt kernels, which whole networks have had before there were pruned ones."""
    config = WAN21.published.config
    assert "pruned" not in repr(config) and repr(config).startswith("Config(encoder_widths=(96, ")
    assert repr(replace(config, pruned=("decoder.middle.0",))).endswith(", pruned=('decoder.middle.0',))")


def test_24_channels_run_in_plain_torch_and_say_why():
    """Their rows of 48 bytes are no whole 32 bytes, which the kernels copy and multiply."""
    light = WAN21.published.sizes("lightvaew2_1")
    for program in WAN21.programs(light):
        assert half_not_fused(program, torch.bfloat16) == "widths [24] are no multiples of 16"
        assert half_not_fused(program, torch.float32) is None


def test_names_of_matrix_game():
    """Diffusers' names under `generator`, with what its training left there."""
    config = replace(CONFIGS["wan2.2"], encoder_widths=None)
    whole = random_checkpoint(config, 0, WAN22).tensors
    names = {name: f"generator.{wan_to_diffusers(name)}" for name in whole}
    assert "generator.decoder.up_blocks.0.upsampler.resample.1.weight" in names.values()
    heads = {f"generator.dynamic_feature_projection_heads.{n}": torch.ones(3) for n in ("0.weight", "0.bias")}
    vae = loaded({names[name]: tensor for name, tensor in whole.items()} | heads)
    state = vae.model.state_dict()
    assert vae.arch == "wan2.2" and state.keys() == whole.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in whole.items())


# -- goldens -----------------------------------------------------------------------------------------------------------


def golden(shared, name):
    tensors = load_file(shared / "golden" / "distilled" / f"{name}.safetensors")
    return {n[2:]: t.float() for n, t in tensors.items() if n.startswith("w.")}, tensors


def in_network(tensors, z, back=False):
    """Latents in the network's units: the sampler applies the mean and deviation."""
    mean, deviation = (tensors[f"in.{name}"].float().view(1, -1, 1, 1, 1) for name in ("mean", "deviation"))
    return (z - mean) / deviation if back else z.float() * deviation + mean


@pytest.mark.parametrize("chunk", [0, 1])
@pytest.mark.parametrize("name", ["lightvae_wan21_width", "lightvae_wan21_pruned_decoder"])
def test_decodes_are_the_originals(shared, name, chunk):
    weights, tensors = golden(shared, name)
    vae = loaded(weights)
    assert len(vae.model.config.pruned) == (8 if "pruned" in name else 0)
    close(vae.decode_raw(in_network(tensors, tensors["in.latent"]), chunk=chunk), tensors["out.frames"])


def with_epsilon(norm, x, state=None):
    """The norm of LightX2V's class of Wan 2.2."""
    y = x / (x.pow(2).mean(1, keepdim=True) + 1e-6).sqrt() * norm.gamma.view(-1, 1, 1, 1)
    return torch.nn.functional.silu(y) if norm.act else y


@pytest.mark.parametrize("chunk", [0, 1])
def test_matrix_games_decodes_are_the_originals(shared, chunk, monkeypatch):
    """LightX2V adds 1e-6 to the mean square of a position, which Wan's own and ComfyUI's classes do not: at a width of
    4 channels it changes frames by up to 1.8e-4 of their deviation."""
    weights, tensors = golden(shared, "mg_lightvae_wan22_width")
    vae, z = loaded(weights), in_network(tensors, tensors["in.latent"])
    close(vae.decode_raw(z, chunk=chunk), tensors["out.frames"], 2e-4)
    monkeypatch.setattr(LengthNormAct, "forward", with_epsilon)
    close(vae.decode_raw(z, chunk=chunk), tensors["out.frames"])


@pytest.mark.parametrize("name", ["lightvae_wan21_width", "lightvae_wan21_pruned_encoder"])
def test_encodes_are_the_originals(shared, name):
    weights, tensors = golden(shared, name)
    if "pruned" in name:
        weights |= golden(shared, "lightvae_wan21_pruned_decoder")[0]
    vae = loaded(weights)
    z = vae.model.sample(vae.encode_raw(tensors["in.frames"].float()))
    close(in_network(tensors, z, back=True), tensors["out.latent"])


@pytest.mark.parametrize(("name", "says"), [
    ("flashvaed_wan21", "Flash-VAED's decoder of Wan"), ("flashvaed_ltx", "Flash-VAED's decoder of LTX-Video"),
])  # fmt: skip
def test_flash_vaed_is_refused_by_name(shared, name, says):
    weights, _ = golden(shared, name)
    assert detect(weights) is None
    with pytest.raises(CheckpointError, match=f"{says}, which this pack does not run"):
        loaded(weights)
