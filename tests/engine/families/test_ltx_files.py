"""LTX-Video's files: encoders, descriptions, commands; and the units of its latents."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from zerowaste_vae import CheckpointError, load
from zerowaste_vae.engine.extras.cli import main
from zerowaste_vae.engine.families import detect
from zerowaste_vae.engine.families.ltx import ARCHITECTURE, STRIDES, Block, Config
from zerowaste_vae.engine.network.ops.statistics import DEVIATION, MEAN, Statistics

from . import test_ltx
from .test_ltx import blocks, tiny

build = test_ltx.build  # a fixture


def test_encoders_are_of_their_description(seed_model, tmp_path, noise):
    """Both kinds of downsampling, in chunks; without a description the strides are those that shapes tell."""
    down = (
        Block(8, 1), Block(16, stride=STRIDES["space"], shortcut=True), Block(16, 1),
        Block(32, stride=STRIDES["time"], shortcut=True), Block(32, 1),
        Block(64, stride=STRIDES["all"], shortcut=True), Block(64, 1),
        Block(64, stride=STRIDES["all"]), Block(64, 1),
    )  # fmt: skip
    config = Config(down, blocks(64, "all all all"), 8, 64, 16, encoder_border="zero")
    model = ARCHITECTURE.build(config).requires_grad_(False)
    seed_model(model, 3)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    vae = load(tmp_path / "w.safetensors", device="cpu")
    assert vae.model.config.encoder_blocks == down
    x = noise(1, 3, 17, 64, 96)
    whole = vae.encode_raw(x)
    assert whole.shape == (1, 32, 3, 2, 3)
    assert torch.equal(vae.encode_raw(x, chunk=1, frames=2), whole)
    frames = x.mul(0.2).add(0.5).clamp(0, 1).permute(0, 2, 3, 4, 1)
    assert vae.encode(frames).shape == (1, 16, 3, 2, 3)
    assert vae.decode(vae.encode(frames[:, :9])).shape == (1, 9, 64, 96, 3)


@torch.no_grad()
@pytest.mark.parametrize("shortcut", [True, False])
def test_part_of_a_video_for_a_latent(build, noise, shortcut):
    """A part of a video is enough for a latent."""
    downs = tuple(Block(16, stride=STRIDES["all"], shortcut=shortcut) for _ in range(3))
    encoder = build(Config(downs, None, 16, 0, 4, encoder_border="zero", decoder_border="zero")).encoder
    a, b = encoder.program.window(8, 9, 9)
    assert 0 < a < 8 and b == 9
    x = noise(1, 3, 65, 32, 32)
    assert torch.equal(encoder(x[:, :, 8 * a :])[:, :, 8 - a], encoder(x)[:, :, 8])


def test_the_published_one():
    config = ARCHITECTURE.published.config
    with torch.device("meta"):
        model = ARCHITECTURE.build(config)
    shapes = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    assert 406e6 < sum(p.numel() for p in model.parameters()) < 408e6
    later = model.decoder.program.work(3, 22, 40).flop - model.decoder.program.work(2, 22, 40).flop
    assert later / (8 * 704 * 1280) == pytest.approx(2.46e6, rel=0.01)
    before, after = model.decoder.program.reach
    assert before == after == 6 + 5 / 2 + 9 / 4 + (13 + 9) / 8
    assert detect(shapes) is ARCHITECTURE
    assert ARCHITECTURE.config_of(shapes, {"config": '{"vae": {"spatial_padding_mode": "zeros"}}'}).decoder_widths == (
        1024, 512, 512, 256, 128,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("description", "says"),
    [
        ("not json", "no JSON"),
        ('{"vae": {"norm_layer": "group_norm"}}', "pixel_norm"),
        ('{"vae": {"spatial_padding_mode": "circular"}}', "circular"),
        ('{"vae": {"decoder_blocks": [["res_x", 1]]}}', "not in the file's description"),
        (json.dumps({"vae": {"decoder_blocks": [["res_x", 1], ["odd", {}]] * 3 + [["res_x", 1]]}}), "odd"),
        (json.dumps({"vae": {"decoder_blocks": [["res_x", 1], ["compress_time", {}]] * 3 + [["res_x", 1]]}}), "only"),
    ],
)
def test_strange_descriptions_are_refused(build, tmp_path, description, says):
    path = tmp_path / "w.safetensors"
    save_file(build(tiny(kinds="all all all")).state_dict(), path, {"config": description})
    with pytest.raises(CheckpointError, match=says):
        load(path, device="cpu")


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_the_commands_take_its_files(build, tmp_path, noise, kind, monkeypatch, capsys):
    """The description goes with the weights, into GGUF too."""
    monkeypatch.chdir(tmp_path)
    config = tiny("replicate", 0.1, kinds="all all all")
    said = json.dumps({"vae": {"spatial_padding_mode": "replicate", "decode_timestep": 0.1, "decode_noise_scale": 0.0}})
    save_file(build(config).state_dict(), "w.safetensors", {"config": said})
    assert main(["convert", "w.safetensors", "w.gguf", "--type", kind, "--quiet"]) == 0
    assert main(["info", "w.gguf"]) == 0
    shown = capsys.readouterr().out
    assert "ltx, 32x32 pixels and 8 frames per latent" in shown and "widths 64, 32, 16, 8" in shown
    vae = load("w.gguf", device="cpu")
    assert vae.model.config == config
    save_file({"latent": noise(1, 16, 2, 2, 3)}, "z.safetensors")
    assert main(["decode", "z.safetensors", "r.safetensors", "--vae", "w.gguf", "--quiet"]) == 0
    assert load_file("r.safetensors")["frames"].shape == (1, 9, 64, 96, 3)
    assert main(["decode", "z.safetensors", "n/", "--vae", "w.gguf", "--quiet", "--timestep", "0.5"]) == 0
    assert main(["decode", "z.safetensors", "m.safetensors", "--vae", "w.gguf", "--quiet", "--seed", "1"]) == 2
    assert "takes no noise" in capsys.readouterr().err
    assert main(["plan", "--vae", "w.gguf", "--size", "1280x704", "--frames", "121", "--vram-gb", "6"]) == 0
    assert "fused kernels" in capsys.readouterr().out


def test_units():
    """Latents change units by the names that upsamplers call."""
    found = Statistics(2).requires_grad_(False)
    getattr(found, MEAN).copy_(torch.tensor([1.0, -2.0]))
    getattr(found, DEVIATION).copy_(torch.tensor([2.0, 0.5]))
    z = torch.rand(1, 2, 3, 2, 2)
    plain = found.un_normalize(z)
    torch.testing.assert_close(plain[:, 0], 2 * z[:, 0] + 1)
    torch.testing.assert_close(plain[:, 1], 0.5 * z[:, 1] - 2)
    torch.testing.assert_close(found.normalize(plain), z)
