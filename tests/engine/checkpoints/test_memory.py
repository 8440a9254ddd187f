"""Weights in memory load like those of a file: state dicts, modules, Checkpoints, under any names that files have."""

import pytest
import torch
from safetensors.torch import load_file
from zerowaste_vae import CheckpointError, load, read_checkpoint
from zerowaste_vae.engine.checkpoints import Checkpoint


@pytest.fixture
def z(noise):
    return noise(1, 16, 2, 4, 5)


@pytest.fixture
def wanted(vae_file, z):
    return load(vae_file, device="cpu").decode(z)


@pytest.mark.parametrize("prefix", ["", "vae.", "first_stage_model.", "model._orig_mod."])
def test_a_state_dict(vae_file, z, wanted, prefix):
    tensors = {prefix + name: tensor for name, tensor in load_file(vae_file).items()}
    given = dict(tensors)
    vae = load(tensors, device="cpu", norm_groups=4)
    assert (vae.arch, vae.path) == ("seedvr2", None)
    assert torch.equal(vae.decode(z), wanted)
    assert tensors == given, "the caller's dict is not used up"


def test_a_module_and_a_checkpoint_of_renamed_tensors(vae_file, z, wanted):
    model = load(vae_file, device="cpu").model
    module = torch.nn.Module()
    module.vae, module.config = model, {"norm_num_groups": 4, "block_out_channels": [8, 16, 16, 16]}
    assert torch.equal(load(module, device="cpu").decode(z), wanted)
    read = read_checkpoint(vae_file)
    renamed = Checkpoint({f"vae.{n}": t for n, t in read.tensors.items()}, read.metadata)
    assert torch.equal(load(renamed, device="cpu").decode(z), wanted)


def test_parameters_stay_their_owners(vae_file):
    """Those of a model that goes on training."""
    given = {name: torch.nn.Parameter(tensor) for name, tensor in load_file(vae_file).items()}
    vae = load(given, device="cpu", norm_groups=4)
    assert all(each.requires_grad for each in given.values())
    assert not any(each.requires_grad for each in vae.model.parameters())


def test_fp8_without_scales(vae_file, z):
    stored = load_file(vae_file).items()
    tensors = {n: t.to(torch.float8_e4m3fn) if n.endswith("conv1.weight") else t for n, t in stored}
    rounded = {name: tensor.float() for name, tensor in tensors.items()}
    wanted = load(rounded, device="cpu", norm_groups=4).decode(z)
    assert torch.equal(load(tensors, device="cpu", norm_groups=4).decode(z), wanted)


def test_the_family_is_logged(vae_file, caplog):
    with caplog.at_level("INFO"):
        load(load_file(vae_file), device="cpu", norm_groups=4)
    assert "these weights: seedvr2, encoder and decoder" in caplog.text


def test_what_is_no_vae(vae_file):
    tensors = load_file(vae_file)
    name = next(iter(tensors))
    for given, why in (
        ({}, "these weights: there are none"),
        ({"a": 1}, "'a' is int, give a dict of tensors by name"),
        (tensors | {name: tensors[name].to("meta")}, f"{name} is on the meta device"),
        (tensors | {name: torch.full_like(tensors[name], torch.nan)}, f"{name} holds NaN or Inf"),
        (torch.nn.Linear(2, 2), "these weights: not a VAE this pack knows"),
    ):
        with pytest.raises(CheckpointError, match="these weights") as caught:
            load(given, device="cpu", norm_groups=4)
        assert why in str(caught.value) and "\n" not in str(caught.value)


DIFFUSERS = {
    "AutoencoderKLWan": (
        "wan2.1", {"base_dim": 8, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2,
                   "temperal_downsample": [False, True, True]},
    ),
    "AutoencoderKLQwenImage": (
        "wan2.1", {"base_dim": 8, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2,
                   "temperal_downsample": [False, True, True]},
    ),
    "AutoencoderKL": (
        "flux", {"block_out_channels": (16, 16, 32, 32), "layers_per_block": 2, "norm_num_groups": 8,
                 "latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False,
                 "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFUSERS)
def test_a_vae_of_diffusers(name, seed_model, noise):
    """Its own outputs: raw latents in, frames in -1..1 out (Wan's classes clamp them), moments out."""
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed (pip install diffusers)")
    arch, sizes = DIFFUSERS[name]
    theirs = getattr(diffusers, name)(**sizes).eval()
    seed_model(theirs, 5)
    vae = load(theirs, device="cpu")
    assert vae.arch == arch
    still = vae.architecture.still
    z = noise(1, 16, *(() if still else (2,)), 4, 6)
    x = noise(1, 3, *(() if still else (5,)), 32, 48)
    with torch.no_grad():
        frames, moments = theirs.decode(z).sample, theirs.encode(x).latent_dist.parameters
    ours = vae.decode(z * vae.scale, range="signed").movedim(-1, 1)
    ours = ours[:, :, 0] if still else ours.clamp(-1, 1)
    assert ours.sub(frames).abs().max() < 4e-5 * frames.std()
    ours = vae.encode(x.movedim(1, -1), range="signed", moments=True)
    assert ours.reshape(moments.shape).sub(moments).abs().max() < 4e-5 * moments.std()
