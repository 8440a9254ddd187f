"""Stable Video Diffusion's VAE: against recorded outputs of ComfyUI's classes, its names, and the fused walk of whole
clips."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from zerowaste_vae import load
from zerowaste_vae.engine.checkpoints import Checkpoint
from zerowaste_vae.engine.errors import CheckpointError
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.extras.cli import main
from zerowaste_vae.engine.extras.media.pngs import write_png_folder
from zerowaste_vae.engine.families import by_file, detect, kl, latent_space, svd
from zerowaste_vae.engine.network import chain
from zerowaste_vae.engine.network.fused import fuse
from zerowaste_vae.engine.runtime.parking import Parking

from .originals import close
from .small import SMALL, WIDTHS, small

ARCHITECTURE, CPU = svd.ARCHITECTURE, torch.device("cpu")
CLIPS = ("F1", "F5", "F14")


@pytest.fixture(scope="module")
def weights(shared):
    folder = shared / "golden" / "svd"
    parts = json.loads((folder / "index.json").read_text())["files"]["svd_a"]["weights"]
    return {name: tensor for part in parts for name, tensor in load_file(folder / part).items()}


@pytest.fixture(scope="module")
def golden(shared, weights):
    """(VAE of the recorded weights, recorded tensors as the API has them)"""
    tensors = load_file(shared / "golden" / "svd" / "svd_a.io.safetensors")
    clips = {name: frames.movedim(0, 1)[None] for name, frames in tensors.items()}
    return load(Checkpoint(dict(weights)), device="cpu"), clips


@pytest.fixture
def fused(monkeypatch):
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    vae = load(small("svd"), device="cpu")
    return vae.with_options(vae.options.switched(off=["async_offload"]))


@pytest.mark.parametrize("name", CLIPS)
def test_decodes_are_the_originals(golden, name):
    vae, tensors = golden
    assert (vae.arch, vae.spatial, vae.temporal, vae.latent_channels) == ("svd", 8, 1, 4)
    whole = vae.decode_raw(tensors[f"{name}.latent"])
    close(whole, tensors[f"{name}.decode"])
    for steps in ({"chunk": 1}, {"chunk": 3, "frames": 2}):
        assert torch.equal(vae.decode_raw(tensors[f"{name}.latent"], **steps), whole), steps


def test_encodes_are_the_originals(golden):
    vae, tensors = golden
    close(vae.model.sample(vae.encode_raw(tensors["e1.pixels"])), tensors["e1.latent_out"])


@pytest.mark.parametrize("name", CLIPS)
def test_fused_walk_is_the_original(golden, monkeypatch, name):
    vae, tensors = golden
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    fused = vae.with_options(vae.options.switched(off=["async_offload"]))
    z = tensors[f"{name}.latent"]
    plan = fused.plan_decode(*z.shape[2:])
    assert plan.fused and plan.steps.latents == z.shape[2]
    close(fused.decode(z), tensors[f"{name}.decode"].movedim(1, 4).mul(0.5).add(0.5).clamp(0, 1))


def test_every_way_through_a_clip_gives_equal_bits(fused, noise):
    """Chunks, streams and parts of a clip, in plain torch and on the fused operators; and in the encoder."""
    exact, z = fused.with_options(fused.options.switched(off=["triton_fusion"])), noise(1, 4, 5, 9, 6)
    made = []
    for vae in (fused, exact):
        whole = vae.decode(z)
        made.append(whole)
        for options in ({"chunk": 1}, {"chunk": 2}, {"tiling": "untiled"}):
            assert torch.equal(vae.decode(z, **options), whole), options
        assert torch.equal(torch.cat(list(vae.stream(z, chunk=2)), 1), whole)
        assert torch.equal(vae.decode(z, start=1, frames=3), whole[:, 1:4])
        assert torch.equal(vae.decode(torch.cat((z.flip(2), z)))[1:], whole)
    torch.testing.assert_close(*made, rtol=0, atol=2e-5)
    blended = [vae.decode(z, tiling="blended", tile=40, overlap=16) for vae in (fused, exact)]
    torch.testing.assert_close(*blended, rtol=0, atol=2e-5)


def test_encoders_of_every_kind_give_equal_bits(golden, monkeypatch):
    vae, tensors = golden
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    fused = vae.with_options(vae.options.switched(off=["async_offload"]))
    exact = vae.with_options(vae.options.switched(off=["triton_fusion"]))
    video = tensors["e1.pixels"].movedim(1, 4).mul(0.5).add(0.5).clamp(0, 1)
    video = torch.cat((video, video.flip(2)), 1)
    made = []
    for one in (fused, exact):
        whole = one.encode(video)
        assert torch.equal(one.encode(video, chunk=1), whole)
        assert torch.equal(torch.cat(list(one.encode_stream(video[0])), 2), whole)
        made.append(whole)
    torch.testing.assert_close(*made, rtol=0, atol=4e-5 * float(made[0].std()))


@torch.no_grad()
def test_bands_and_groups_of_frames_are_the_whole_clip(fused, noise, monkeypatch):
    """Whole clips, frames in groups between the blocks in time, and plans that spare memory, in bands of 32 rows and of
    64; each takes the memory that its dry run states."""
    network, z, made, sizes = fuse(fused.model.decoder, torch.float32), noise(5, 9, 6, 4), [], []
    few = 2 * 72 * 48  # of the last level's positions: two of its frames
    for group, parking in ((chain.GROUP, None), (few, None), (few, Parking(None, 0, rows=64)), (few, Parking(None, 0))):
        monkeypatch.setattr(chain, "GROUP", group)
        run = network.plan(5, 9, 6, 5, torch.float32, CPU, parking)
        planned = run.nbytes
        run.allocate()
        network.chunk(run, z, 5, torch.float32, lambda pixels: made.append(pixels.clone()), True)
        assert run.nbytes == planned
        sizes.append(planned)
        run.free()
    assert all(torch.equal(one, made[0]) for one in made[1:])
    assert sorted(sizes, reverse=True) == sizes and len(set(sizes)) == len(sizes)


def test_every_frame_depends_on_every_other(golden):
    """By the norms, which span the clip, and not by the taps alone."""
    vae, tensors = golden
    z = tensors["F14.latent"].clone()
    before = vae.decode_raw(z)
    z[:, :, -1] *= 3
    assert ((vae.decode_raw(z) - before).abs().amax((0, 1, 3, 4)) > 1e-4).all()


def test_names_of_diffusers_and_of_a_whole_model(weights, golden, tmp_path):
    vae, tensors = golden
    z, expected = tensors["F5.latent"], vae.decode_raw(tensors["F5.latent"])
    model = {f"first_stage_model.{name}": tensor for name, tensor in weights.items()}
    model["model.diffusion_model.input_blocks.0.0.weight"] = torch.zeros(4, 8, 3, 3)
    model["first_stage_model.quant_conv.weight"] = torch.ones(8, 8, 1, 1)  # ComfyUI's network has none
    save_file(model, tmp_path / "svd.safetensors")
    found = load(tmp_path / "svd.safetensors", device="cpu")
    assert found.arch == "svd" and not found.model.config.quantised
    assert torch.equal(found.decode_raw(z), expected)

    theirs = {diffusers(name): tensor for name, tensor in weights.items()}
    assert len(theirs) == len(weights) and "decoder.up_blocks.3.resnets.0.temporal_res_block.conv2.bias" in theirs
    theirs |= {"quant_conv.weight": 2 * torch.eye(8)[..., None, None], "quant_conv.bias": torch.zeros(8)}
    save_file({name: tensor.contiguous() for name, tensor in theirs.items()}, tmp_path / "diffusers.safetensors")
    found = load(tmp_path / "diffusers.safetensors", device="cpu")
    assert found.arch == "svd" and found.model.config.quantised
    assert torch.equal(found.decode_raw(z), expected)
    close(found.encode_raw(tensors["e1.pixels"]), 2 * vae.encode_raw(tensors["e1.pixels"]))


def diffusers(name: str) -> str:
    """Return diffusers' name of a parameter, by its documentation's own table."""
    name = re.sub(r"\.up\.(\d)\.", lambda m: f".up_blocks.{3 - int(m[1])}.", name)
    name = re.sub(r"\.down\.(\d)\.", r".down_blocks.\1.", name)
    name = re.sub(r"\.block\.(\d)\.", r".resnets.\1.", name)
    name = re.sub(r"\.(up|down)sample\.", r".\1samplers.0.", name)
    name = re.sub(r"\.mid\.block_(\d)\.", lambda m: f".mid_block.resnets.{int(m[1]) - 1}.", name)
    for theirs, ours in zip(("norm1", "conv1", "norm2", "conv2"), svd.PARTS, strict=True):
        name = name.replace(f".time_stack.{ours}.", f".temporal_res_block.{theirs}.")
    name = name.replace(".mix_factor", ".time_mixer.mix_factor").replace(".nin_shortcut.", ".conv_shortcut.")
    if name.startswith("decoder."):
        name = re.sub(r"(\.resnets\.\d\.)(norm|conv)", r"\1spatial_res_block.\2", name)
    for part, theirs in (("norm", "group_norm"), ("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("proj_out", "to_out.0")):
        name = name.replace(f".mid.attn_1.{part}.", f".mid_block.attentions.0.{theirs}.")
    name = name.replace(".conv_out.time_mix_conv.", ".time_conv_out.")
    return name.replace(".norm_out.", ".conv_norm_out.")


def test_published_sizes_and_what_is_told_apart(weights):
    with torch.device("meta"):
        model = ARCHITECTURE.build(ARCHITECTURE.published.config)
    counts = [sum(p.numel() for p in half.parameters()) / 1e6 for half in (model.decoder, model.encoder)]
    assert [round(count, 1) for count in counts] == [63.6, 34.2]
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    assert detect(shapes) is ARCHITECTURE and ARCHITECTURE.config_of(shapes, {}) == ARCHITECTURE.published.config
    for files in (weights, {diffusers(name) for name in weights}):
        assert detect(files) is ARCHITECTURE or svd.DIFFUSERS.fits(set(files))
    # A stray name makes no other family's file one of these; without the blocks in time it is Stable Diffusion's.
    image = {name for name in weights if "time" not in name and "mix_factor" not in name}
    image |= {"post_quant_conv.weight", "post_quant_conv.bias"}
    assert detect(image) is kl.SD and detect(image | {"decoder.mid.block_1.mix_factor"}) is kl.SD
    assert by_file("svd_xt_1_1.safetensors") is ARCHITECTURE
    assert by_file("vae-ft-mse-840000-ema-pruned.safetensors") is kl.SD
    assert latent_space("svd") == latent_space("sd")


def test_command_line(tmp_path):
    """A clip in each direction: latents in ComfyUI's form are one clip, and a part of it keeps its bits."""
    checkpoint = random_checkpoint(replace(SMALL["svd"], encoder_widths=WIDTHS), architecture=ARCHITECTURE)
    vae, folder = load(checkpoint, device="cpu"), tmp_path / "in"
    save_file(checkpoint.tensors, tmp_path / "svd.safetensors", checkpoint.metadata)
    write_png_folder(folder, torch.rand(3, 16, 24, 3))
    given, z = ["--vae", str(tmp_path / "svd.safetensors"), "--device", "cpu"], tmp_path / "z.latent"
    assert main(["encode", str(folder), str(z), *given]) == 0
    batch = load_file(z)["latent_tensor"]
    assert batch.shape == (3, 4, 2, 3)
    for name, more in (("a", []), ("b", ["--start", "1", "--frames", "1"])):
        assert main(["decode", str(z), str(tmp_path / f"{name}.safetensors"), *given, *more]) == 0
    whole, part = (load_file(tmp_path / f"{name}.safetensors")["frames"] for name in "ab")
    assert torch.equal(whole, vae.decode(batch.movedim(0, 1)[None])) and torch.equal(part, whole[:, 1:2])


def test_a_missing_factor_is_told(weights, tmp_path):
    save_file({n: t for n, t in weights.items() if n != "decoder.up.0.block.2.mix_factor"}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"1 decoder keys are missing: decoder\.up\.0\.block\.2\.mix_factor"):
        load(tmp_path / "x.safetensors")
