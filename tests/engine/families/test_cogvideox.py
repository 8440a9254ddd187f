"""CogVideoX's VAE: against recorded outputs of ComfyUI's class, in its pieces, under every plan, and its published
sizes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from zerowaste_vae import Cancelled, load
from zerowaste_vae.engine.checkpoints import Checkpoint
from zerowaste_vae.engine.errors import InputError
from zerowaste_vae.engine.extras.bench.subject import copy_of, random_checkpoint
from zerowaste_vae.engine.extras.cli import main
from zerowaste_vae.engine.extras.cli.options import check_frames
from zerowaste_vae.engine.extras.media.pngs import write_png_folder
from zerowaste_vae.engine.families import by_file, cogvideox, detect, find_key_set
from zerowaste_vae.engine.families.registry import KEY_SETS
from zerowaste_vae.engine.network.steps import Steps
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.planning.budget import Limits
from zerowaste_vae.engine.planning.make import make_planner
from zerowaste_vae.engine.planning.plain_walk import Torch
from zerowaste_vae.engine.precision.modes import Mode
from zerowaste_vae.engine.request import Request
from zerowaste_vae.engine.runtime.parking import Parking

from .originals import BOUND, close
from .small import SMALL

ARCHITECTURE = cogvideox.ARCHITECTURE
DECODES, ENCODES = ("T1", "T2", "T3", "T5"), ("F1", "F9", "F13")


@pytest.fixture(scope="module")
def weights(shared):
    folder = shared / "golden" / "cogvideox"
    parts = json.loads((folder / "index.json").read_text())["files"]["cogvideox_a"]["weights"]
    return {name: tensor for part in parts for name, tensor in load_file(folder / part).items()}


@pytest.fixture(scope="module")
def golden(shared, weights):
    """(VAE of the recorded weights, recorded tensors)"""
    folder = shared / "golden" / "cogvideox"
    tensors = load_file(folder / "cogvideox_a.io.safetensors") | load_file(folder / "cogvideox_a.encode.safetensors")
    return load(Checkpoint(dict(weights)), device="cpu"), tensors


@pytest.fixture
def fused(golden, monkeypatch):
    """The VAE on the fused walk, through the reference operators."""
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    return golden[0].with_options(DEFAULTS.switched(off=["async_offload"]))


@pytest.fixture(scope="module")
def tiny(seed_model):
    """(VAE on plain torch, VAE on the fused walk) with seeded weights."""
    model = ARCHITECTURE.build(cogvideox.Config((16,) * 4, (16,) * 4, 4, 1, norm_groups=4)).requires_grad_(False)
    seed_model(model, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
        vae = load(Checkpoint(dict(model.state_dict()), {"norm_num_groups": "4"}), device="cpu")
        assert vae.arch == "cogvideox" and vae.model.config == model.config
        yield vae.with_options(DEFAULTS.switched(off=["triton_fusion"])), vae


def pictures(video):
    return video.clamp(-1, 1).mul(0.5).add(0.5).permute(0, 2, 3, 4, 1)


@pytest.mark.parametrize("name", DECODES)
def test_decodes_are_the_originals(golden, name):
    vae, tensors = golden
    z, expected = tensors[f"{name}.latent"], tensors[f"{name}.decode"]
    assert vae.frames(z.shape[2]) == expected.shape[2]
    close(vae.decode_raw(z), expected)
    assert torch.equal(vae.decode_raw(z, chunk=1, frames=1), vae.decode_raw(z))
    with torch.no_grad():
        assert torch.equal(vae.model.decoder(z), vae.decode_raw(z))


@pytest.mark.parametrize("off", [(), ("composed_upsample",)])
@pytest.mark.parametrize("name", DECODES)
def test_fused_decodes_are_the_originals(golden, fused, name, off):
    fused.options = fused.options.switched(off=off)
    z, expected = golden[1][f"{name}.latent"], golden[1][f"{name}.decode"]
    assert fused.plan_decode(*z.shape[2:]).fused
    torch.testing.assert_close(fused.decode(z), pictures(expected), rtol=0, atol=BOUND / 2 * float(expected.std()))


@pytest.mark.parametrize("name", ENCODES)
def test_encodes_are_the_originals(golden, fused, name):
    vae, tensors = golden
    x, expected = tensors[f"{name}.pixels"], tensors[f"{name}.latent_out"]
    close(vae.model.sample(vae.encode_raw(x)), expected)
    with torch.no_grad():
        assert torch.equal(vae.model.encoder(x), vae.encode_raw(x, chunk=1, frames=1))
    close(fused.encode(x.permute(0, 2, 3, 4, 1) * 0.5 + 0.5), expected)
    assert "reference" in fused.last_report.mode


def test_pieces():
    """4 frames decode together and 8 are encoded together, the rest first: every frame once."""
    config = ARCHITECTURE.published.config
    decoder, encoder = cogvideox.decoder(config), cogvideox.encoder(config)
    assert decoder.fixed(13) == Steps(13, 4, pieces=True)
    for frames in (decoder.frames, ARCHITECTURE.frames):
        assert [frames(n) for n in (1, 2, 3, 13)] == [1, 8, 9, 49]
    assert encoder.spans(49) == [(0, 1), *((n, n + 8) for n in range(1, 49, 8))]
    assert encoder.spans(13) == [(0, 5), (5, 13)] and encoder.spans(16) == [(0, 8), (8, 16)]
    assert encoder.spans(3) == [(0, 3)] and encoder.spans(1) == [(0, 1)] and encoder.spans(11) == [(0, 3), (3, 11)]
    for count in range(1, 40):
        latents = ARCHITECTURE.latents(count)
        assert sum(b - a for a, b in encoder.spans(count)) == count and encoder.fixed(latents).spans(latents)
        filled = ARCHITECTURE.filled(count)
        assert filled >= count and ARCHITECTURE.frames(ARCHITECTURE.latents(filled)) == filled
        assert filled == count or ARCHITECTURE.frames(latents) != count


@pytest.mark.parametrize("latents", [1, 2, 4, 5])
def test_every_plan_decodes_equal_bits(tiny, noise, latents):
    plain, fused = tiny
    z = noise(2, 4, latents, 3, 5)
    expected = fused.decode(z)
    torch.testing.assert_close(expected, plain.decode(z), rtol=0, atol=1e-5)
    plan = fused.plan_decode(latents, 3, 5)
    assert plan.fused and plan.parking is None and plan.steps == Steps(latents, 4, pieces=True)
    for parking in (Parking(None, 0), Parking(None, 1 << 20, rows=16), Parking(None, 1 << 30)):
        found = replace(plan, parking=parking)
        assert torch.equal(fused.decode(z, plan=found), expected), parking
        assert fused.last_report.plan == found.describe()
    assert torch.equal(fused.decode(z, chunk=1), expected)
    assert torch.equal(fused.decode(z, tiling="exact", tile=16), expected)
    assert torch.equal(torch.cat(list(fused.stream(z[:1])), 1), expected[:1])
    if latents > 1:
        for vae, whole in ((fused, expected), (plain, plain.decode(z))):
            assert torch.equal(vae.decode(z, start=3, frames=4), whole[:, 3:7])


@pytest.mark.parametrize("frames", [1, 2, 3, 6, 8, 9, 13, 16, 19])
def test_every_plan_encodes_equal_bits(tiny, noise, frames):
    """Clips of any length, whole: pieces that begin a clip with one frame leave no history."""
    plain, fused = tiny
    x = noise(1, 3, frames, 24, 40)
    video = pictures(x)
    expected = fused.encode(video)
    assert "reference" in fused.last_report.mode and expected.shape[2] == ARCHITECTURE.latents(frames)
    close(expected, plain.encode(video))
    close(plain.encode(video), plain.model.sample(plain.model.encoder(x.clamp(-1, 1))))
    plan = fused.plan_encode(expected.shape[2], 3, 5)
    for parking in (Parking(None, 0), Parking(None, 1 << 20, rows=16)):
        assert torch.equal(fused.encode(video, plan=replace(plan, parking=parking)), expected), parking
    assert torch.equal(fused.encode(video, chunk=1), expected)
    for vae in (plain, fused):
        whole = vae.encode(video)
        assert torch.equal(torch.cat(list(vae.encode_stream(iter(video[0]))), 2), whole)
        assert vae.last_report.dropped == 0


def test_the_first_frame_alone_leaves_no_history(tiny, noise):
    """As in ComfyUI's class: 8 frames behind a single one begin anew."""
    plain, fused = tiny
    video = pictures(noise(1, 3, 9, 16, 16))
    other = video.clone()
    other[:, 0] = 1 - other[:, 0]
    for vae in (plain, fused):
        first, second = vae.encode(video), vae.encode(other)
        assert not torch.equal(first[:, :, 0], second[:, :, 0]) and torch.equal(first[:, :, 1:], second[:, :, 1:])


def test_blended_tiles_on_either_walk(tiny, noise):
    plain, fused = tiny
    z, options = noise(1, 4, 3, 3, 5), {"tiling": "blended", "tile": 24, "overlap": 8}
    expected = plain.decode(z, **options)
    assert fused.plan_decode(3, 3, 5, **options).tiled
    torch.testing.assert_close(fused.decode(z, **options), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(fused.decode(z, start=3, frames=5, **options), expected[:, 3:8], rtol=0, atol=1e-5)
    video = plain.decode(z)
    close(fused.encode(video, **options), plain.encode(video, **options))


def test_pieces_are_counted(tiny, noise):
    """Progress goes on within the one chunk of each clip, and a decode can be cancelled there."""
    for vae in tiny:
        seen = []
        vae.decode(noise(2, 4, 3, 2, 2), progress=lambda *counts: seen.append(counts))  # noqa: B023
        assert seen == [(i, 6) for i in range(1, 7)] and not any(vae.last_report.events.values())
        made, stopped = [], noise(1, 4, 4, 2, 2)
        with pytest.raises(Cancelled):
            vae.decode(stopped, progress=lambda *counts: made.append(counts), cancel=lambda: len(made) > 1)  # noqa: B023
        assert made == [(1, 4), (2, 4)]


def test_frames_that_no_latents_decode_to_are_named():
    with pytest.raises(InputError, match=r"give 8n or 8n\+1 of them, such as 16"):
        check_frames(ARCHITECTURE, 13)
    check_frames(ARCHITECTURE, 49)


def test_several_devices(tiny, noise):
    fused, z = tiny[1], noise(1, 4, 4, 3, 5)
    frames = fused.decode(z)
    assert torch.equal(fused.decode(z, devices=["cpu", "cpu"]), frames)
    assert torch.equal(fused.encode(frames, devices=["cpu", "cpu"]), fused.encode(frames))


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_8_bit_stays_close(precision, noise, monkeypatch):
    """On a CPU: the same numbers as on a GPU."""
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    weights = random_checkpoint(cogvideox.Config((32,) * 4, (32,) * 4, 16, 1), architecture=ARCHITECTURE)
    exact, vae = (load(copy_of(weights), p, "cpu") for p in ("fp32", precision))
    z = noise(1, 16, 3, 3, 4)
    frames, expected = vae.decode(z), exact.decode(z)
    assert f"convolutions in {precision}" in vae.last_report.operands
    assert 25 < -10 * float((frames - expected).square().mean().log10()) < 60
    latent, right = vae.encode(expected), exact.encode(expected)
    assert f"convolutions in {precision}" in vae.last_report.operands
    assert 15 < -10 * float(((latent - right) / right.std()).square().mean().log10()) < 60


def test_the_commands_take_its_files(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_file(tiny[0].model.state_dict(), "w.safetensors", {"norm_num_groups": "4"})
    write_png_folder("in", torch.rand(3, 35, 45, 3, generator=torch.Generator().manual_seed(0)))
    assert main(["convert", "w.safetensors", "w.gguf", "--type", "f16", "--quiet"]) == 0
    assert main(["info", "w.gguf"]) == 0
    assert "cogvideox, " in capsys.readouterr().out
    assert main(["encode", "in", "z.safetensors", "--vae", "w.gguf", "--quiet"]) == 0
    assert load_file("z.safetensors")["latent"].shape == (1, 4, 2, 5, 6)
    assert main(["decode", "z.safetensors", "r.safetensors", "--vae", "w.gguf", "--quiet"]) == 0
    assert load_file("r.safetensors")["frames"].shape == (1, 3, 35, 45, 3)
    assert main(["plan", "--vae", "w.gguf", "--size", "64x48", "--frames", "9", "--vram-gb", "8"]) == 0


def test_winograd_is_for_its_encoder(tiny, noise):
    """Under --on winograd the decoder keeps its bits."""
    fused, z = tiny[1], noise(1, 4, 2, 3, 5)
    assert torch.equal(fused.with_options(fused.options.switched(on=["winograd"])).decode(z), fused.decode(z))
    config = ARCHITECTURE.published.config
    assert cogvideox.decoder(config).style.direct and not cogvideox.encoder(config).style.direct


def test_whole_frames_within_a_limit():
    """Of 49 frames of 720x480, whose pieces take more than 7 GB, histories are parked; an encoder takes the same for
    any length."""
    planner = make_planner(ARCHITECTURE, ARCHITECTURE.published.config, torch.bfloat16, DEFAULTS, Mode(),
                           lambda: True, Torch)  # fmt: skip
    untiled, limit = Request(tiling="untiled"), 3 << 30
    for half in ("decoder", "encoder"):
        free = planner.plan(half, (13, 60, 90), untiled)
        lean = planner.plan(half, (13, 60, 90), untiled, Limits(int(free.peak_bytes * 0.7), host=None))
        assert free.fused and lean.fused and lean.parking is not None and lean.steps == free.steps
        assert lean.peak_bytes <= int(free.peak_bytes * 0.7) and lean.host_bytes > 0
    assert planner.plan("decoder", (13, 60, 90), untiled, Limits(limit, host=None)).peak_bytes <= limit
    assert len({planner.plan("encoder", (n, 60, 90), untiled).peak_bytes for n in (13, 25)}) == 1


def test_published_sizes_and_names(weights):
    with torch.device("meta"):
        model = ARCHITECTURE.build(ARCHITECTURE.published.config)
    counts = [sum(p.numel() for p in half.parameters()) for half in (model.decoder, model.encoder)]
    assert sum(counts) == 215_583_907
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    assert detect(shapes) is ARCHITECTURE and ARCHITECTURE.config_of(shapes, {}) == ARCHITECTURE.published.config
    assert detect(weights) is ARCHITECTURE and set(weights) == {n for n in shapes if "conv_shortcut" not in n}
    for half in ("encoder.", "decoder."):
        names = {n: shape for n, shape in shapes.items() if n.startswith(half)}
        assert detect(names) is ARCHITECTURE
        assert ARCHITECTURE.config_of(names, {}).latent_channels == 16
    assert by_file("cogvideox_vae.safetensors") is ARCHITECTURE is by_file("CogVideoX-5b-vae-bf16.safetensors")
    assert SMALL["cogvideox"].layers == 1


def test_others_are_not_taken_for_it():
    """A norm that is conditioned by frames, not clips, is MoVQ's; no single key decides."""
    norm = "decoder.mid_block.resnets.0.norm1"
    assert find_key_set([f"{norm}.norm_layer.weight", f"{norm}.conv_y.weight"]).name == "movq"
    keys = ["encoder.norm_out.weight", "encoder.mid_block.resnets.1.conv2.conv.weight", f"{norm}.norm_layer.weight"]
    assert not any(k.name == "cogvideox" and k.fits(set(keys)) for k in KEY_SETS)
