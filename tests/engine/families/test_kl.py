"""Image VAEs of the KL family against the recorded outputs of the originals, and as a user loads them."""

from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from zerowaste_vae import Checkpoint, CheckpointError, InputError, load
from zerowaste_vae.engine.extras.cli import main
from zerowaste_vae.engine.families import by_file, detect
from zerowaste_vae.engine.families.kl import FLUX, FLUX2, SD, Config
from zerowaste_vae.engine.network.steps import Steps
from zerowaste_vae.engine.runtime.parking import Parking

from .originals import close, close_when_fused

FAMILIES = {"sd": SD, "flux": FLUX, "flux2": FLUX2}
#: The published widths' parameters, with the statistics of Flux.2's latents.
PUBLISHED = {"sd": 83_653_863, "flux": 83_819_683, "flux2": 84_046_115 + 256}


@pytest.fixture(scope="module", params=FAMILIES)
def golden(request, shared):
    """(family, VAE of the recorded weights, recorded tensors with an axis for time)"""
    folder = shared / "golden" / "image"
    vae = load(folder / f"image_{request.param}.weights.safetensors", device="cpu")
    tensors = load_file(folder / f"image_{request.param}.io.safetensors")
    return request.param, vae, {k: v.unsqueeze(2) for k, v in tensors.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_published_sizes(family):
    architecture = FAMILIES[family]
    config = architecture.published.config
    with torch.device("meta"):
        state = architecture.build(config).state_dict()
    assert sum(t.numel() for t in state.values()) == PUBLISHED[family]
    shapes = {k: tuple(v.shape) for k, v in state.items()}
    assert architecture.configure(shapes, None) == config
    assert detect(shapes) is architecture


def test_decodes_are_the_originals(golden):
    family, vae, tensors = golden
    assert (vae.arch, vae.temporal, vae.spatial) == (family, 1, 16 if family == "flux2" else 8)
    for name in ("small", "batch", "odd"):
        z, expected = tensors[f"{name}.z"], tensors[f"{name}.decoded"]
        close(vae.decode_raw(z), expected)
        shown = vae.decode(z)
        assert shown.shape == (z.shape[0], 1, *expected.shape[3:], 3)
        close(shown, expected.clamp(-1, 1).mul(0.5).add(0.5).permute(0, 2, 3, 4, 1))


def test_encodes_are_the_originals(golden):
    _, vae, tensors = golden
    for name in ("e1", "e2"):
        x = tensors[f"{name}.x"]
        if f"{name}.moments" in tensors:
            close(vae.encode_raw(x), tensors[f"{name}.moments"])
        close(vae.encode(x.permute(0, 2, 3, 4, 1).mul(0.5).add(0.5)), tensors[f"{name}.latent"])


def test_small_decoder(shared, monkeypatch):
    """FLUX.2-small-decoder: half the encoder's widths."""
    folder = shared / "golden" / "flux2_small"
    vae = load(folder / "flux2_small.weights.safetensors", device="cpu")
    config = vae.model.config
    assert vae.arch == "flux2" and config.encoder_widths == (64,) * 4 and config.decoder_widths == (32,) * 4
    tensors = {k: v.unsqueeze(2) for k, v in load_file(folder / "flux2_small.io.safetensors").items()}
    close(vae.encode(tensors["a.x"].permute(0, 2, 3, 4, 1).mul(0.5).add(0.5)), tensors["a.latent"])
    for name in "ab":
        z, expected = tensors[f"{name}.z"], tensors[f"{name}.decoded"]
        close(vae.decode_raw(z), expected)
        close_when_fused(vae, z, expected, monkeypatch)


#: Narrow, and with other numbers of levels and blocks than the published ones.
CONFIGS = {
    "sd": Config((8, 12, 16), (8, 16, 16), 4, 6, quantised=True, resnets=(1, 2), norm_groups=4),
    "flux": Config((8, 16, 16, 24), (12, 16, 16, 24), 5, 5, resnets=(1, 1), norm_groups=4),
    "flux2": Config((8, 8, 16), (4, 8, 16), 3, 3, quantised=True, resnets=(1, 2), norm_groups=4),
}


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request, seed_model):
    """(family, seeded network)"""
    config = CONFIGS[request.param]
    model = FAMILIES[request.param].build(config).requires_grad_(False)
    seed_model(model, 5)
    if model.packing is not None:
        model.packing.running_var += 1.5
        model.packing.running_mean += torch.linspace(-1, 1, 12)
    return request.param, model


def saved(model, path, names=lambda name: name, **change):
    state = {names(k): v for k, v in model.state_dict().items()}
    save_file(state | change, path, {"norm_num_groups": "4"})
    return path


def test_sizes_are_read_from_shapes(tiny, tmp_path, noise):
    family, model = tiny
    vae = load(saved(model, tmp_path / "w.safetensors"), device="cpu")
    assert (vae.arch, vae.model.config) == (family, model.config)
    assert vae.spatial == {"sd": 4, "flux": 8, "flux2": 8}[family]
    z = noise(2, vae.latent_channels, 1, 3, 2)
    frames = vae.decode(z)
    assert frames.shape == (2, 1, 3 * vae.spatial, 2 * vae.spatial, 3)
    assert torch.equal(vae.decode(z[:, :, 0]), frames)
    assert vae.encode(frames).shape == z.shape
    torch.testing.assert_close(vae.encode(frames[:, 0]), vae.encode(frames))
    raw = vae.decode_raw(z).clamp(-1, 1).mul(0.5).add(0.5).permute(0, 2, 3, 4, 1)
    torch.testing.assert_close(frames, raw, rtol=0, atol=1e-5)
    with pytest.raises(InputError, match=r"or \[B, \d+, h, w\]"):
        vae.decode(z[:, 0])


def test_out(tiny, noise, tmp_path):
    """Several pictures and several frames of one latent alike, in chunks, with a report and into a given tensor."""
    _, model = tiny
    vae = load(saved(model, tmp_path / "w.safetensors"), device="cpu")
    z, done = noise(3, vae.latent_channels, 2, 2, 3), []
    out = torch.empty(3, 2, 2 * vae.spatial, 3 * vae.spatial, 3)
    assert vae.decode(z, out=out, chunk=1, progress=lambda *at: done.append(at)) is out
    assert done[-1] == (6, 6)
    assert vae.last_report.clip == tuple(out.shape[:4])
    for b in range(3):
        for t in range(2):
            assert torch.equal(vae.decode(z[b : b + 1, :, t : t + 1]), out[b, t][None, None])
    one = vae.encode(out, seed=3)
    assert one.shape == z.shape
    assert torch.equal(vae.encode(out[:1], seed=3), one[:1])
    assert torch.equal(vae.decode(z, start=1, frames=1), vae.decode(z[:, :, 1:]))
    with pytest.raises(InputError, match="out is"):
        vae.decode(z, out=torch.empty(1))
    tiled = vae.decode(noise(1, vae.latent_channels, 1, 9, 8), tiling="blended", tile=4 * vae.spatial, overlap=8)
    assert tiled.shape[2:4] == (9 * vae.spatial, 8 * vae.spatial)
    plan = vae.plan_decode(6, 2, 3)
    assert (plan.steps.latents, plan.fused) == (1, False)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fused_walk_gives_the_same(family, seed_model, tmp_path, noise, monkeypatch):
    """Whole, in blended tiles and in as many chunks as are asked for; of Flux.2's packed latents, too."""
    config = Config((16, 16, 32), (16, 16, 32), 4, 4, quantised=family != "flux", resnets=(1, 1), norm_groups=4)
    model = FAMILIES[family].build(config).requires_grad_(False)
    seed_model(model, 7)
    plain = load(saved(model, tmp_path / "w.safetensors"), device="cpu")
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    fused, z = load(tmp_path / "w.safetensors", device="cpu"), noise(3, plain.latent_channels, 1, 6, 5)
    assert fused.plan_decode(3, 6, 5).fused
    x = torch.rand(3, 6 * plain.spatial + 3, 5 * plain.spatial, 3, generator=torch.Generator().manual_seed(0))
    tiles = {"tiling": "blended", "tile": 4 * plain.spatial, "overlap": plain.spatial}
    for options in ({}, {"chunk": 1}, {"tiling": "exact", "tile": 64}, tiles):
        torch.testing.assert_close(fused.decode(z, **options), plain.decode(z, **options), rtol=0, atol=2e-5)
        torch.testing.assert_close(fused.encode(x, **options), plain.encode(x, **options), rtol=0, atol=5e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputing(family, seed_model, tmp_path, noise, monkeypatch, exact_sums):
    """Parts of pictures are computed again where a plan says so."""
    config = Config((16, 16, 32), (16, 16, 32), 4, 4, quantised=family != "flux", resnets=(1, 1), norm_groups=4)
    model = FAMILIES[family].build(config).requires_grad_(False)
    seed_model(model, 7)
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    vae = load(saved(model, tmp_path / "w.safetensors"), device="cpu")
    z = noise(2, vae.latent_channels, 1, 200 // vae.spatial, 2)  # more rows than are there at once
    frames, plan = vae.decode(z), vae.planner.plan
    latent, again = vae.encode(frames), {"steps": Steps(1, 0), "parking": Parking(None, 0, streams=0)}
    monkeypatch.setattr(vae.planner, "plan", lambda *a, **k: replace(plan(*a, **k), **again))
    for run, given, expected in ((vae.decode, z, frames), (vae.encode, frames, latent)):
        torch.testing.assert_close(run(given), expected, rtol=0, atol=5e-5)
        assert "recomputed band by band" in vae.last_report.plan


def diffusers(name):
    """As diffusers has it, levels of the decoder counted from the latent."""
    levels = {"sd": 3, "flux": 4, "flux2": 3}[diffusers.family]
    half, _, rest = name.partition(".")
    parts = rest.split(".")
    if parts[0] in ("up", "down"):
        at = levels - 1 - int(parts[1]) if parts[0] == "up" else int(parts[1])
        kind = f"resnets.{parts[3]}" if parts[2] == "block" else f"{parts[0]}samplers.0"
        tail = parts[4 if parts[2] == "block" else 3 :]
        rest = ".".join([f"{parts[0]}_blocks.{at}", kind, *tail]).replace("nin_shortcut", "conv_shortcut")
    elif parts[0] == "mid" and parts[1].startswith("block"):
        rest = ".".join([f"mid_block.resnets.{int(parts[1][-1]) - 1}", *parts[2:]])
    elif parts[0] == "mid":
        known = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}
        rest = ".".join(["mid_block.attentions.0", known[parts[2]], parts[3]])
    elif parts[0] == "norm_out":
        rest = f"conv_{rest}"
    return f"{half}.{rest}"


def test_diffusers_files_are_the_same(tiny, noise, tmp_path):
    """Their attention has matrices without the 1x1 of convolutions."""
    family, model = tiny
    diffusers.family = family
    path = saved(model, tmp_path / "d.safetensors", diffusers)
    state = {k: v[:, :, 0, 0] if ".to_" in k and v.ndim == 4 else v for k, v in load_file(path).items()}
    save_file(state, path, {"norm_num_groups": "4"})
    assert "decoder.up_blocks.0.upsamplers.0.conv.weight" in state
    z = noise(1, model.config.latent_channels * (4 if family == "flux2" else 1), 1, 2, 2)
    expected = load(saved(model, tmp_path / "w.safetensors"), device="cpu").decode_raw(z)
    vae = load(path, device="cpu")
    assert (vae.arch, vae.can_encode) == (family, True)
    assert torch.equal(vae.decode_raw(z), expected)
    for given in (state, Checkpoint(dict(state), {"norm_num_groups": "4"})):  # in memory
        assert torch.equal(load(given, device="cpu", norm_groups=4).decode_raw(z), expected)
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    for new, name in old.items():
        state = {k.replace(f".attentions.0.{new}.", f".attentions.0.{name}."): v for k, v in state.items()}
    save_file(state, path, {"norm_num_groups": "4"})
    assert torch.equal(load(path, device="cpu").decode_raw(z), expected)


def test_the_commands_take_pictures(tiny, tmp_path, monkeypatch, capsys, caplog):
    """A picture, a folder of them, latents with four axes; sides are repeated up to whole latents and cut back."""
    family, model = tiny
    monkeypatch.chdir(tmp_path)
    saved(model, "w.safetensors")
    if family != "flux":  # whose 5 channels fill no block, which others show
        assert main(["convert", "w.safetensors", "w.gguf", "--type", "f16", "--quiet"]) == 0
    vae = "w.gguf" if family != "flux" else "w.safetensors"
    assert main(["info", vae]) == 0
    assert "of one picture per latent" in capsys.readouterr().out
    (tmp_path / "in").mkdir()
    for i in range(2):
        Image.new("RGB", (21, 19), (40 * i, 90, 200)).save(f"in/{i}.png")
    assert main(["encode", "in", "z.safetensors", "--vae", vae, "--quiet"]) == 0
    channels = model.config.latent_channels * (4 if family == "flux2" else 1)
    assert load_file("z.safetensors")["latent"].shape[:2] == (2, channels)
    assert load_file("z.safetensors")["latent"].ndim == 4
    assert main(["decode", "z.safetensors", "r.safetensors", "--vae", vae, "--quiet"]) == 0
    assert load_file("r.safetensors")["frames"].shape == (2, 19, 21, 3)
    assert main(["decode", "z.safetensors", "out/", "--vae", vae, "--quiet", "--resume"]) == 0
    assert "--resume finds nothing and starts over" in caplog.text
    caplog.clear()
    assert main(["decode", "z.safetensors", "out/", "--vae", vae, "--resume"]) == 0
    assert "is complete (2 frames 21x19)" in capsys.readouterr().out and not caplog.text
    assert [Image.open(p).size for p in sorted((tmp_path / "out").iterdir())] == [(21, 19)] * 2
    assert main(["encode", "in/1.png", "one.latent", "--vae", vae, "--quiet"]) == 0
    assert main(["decode", "one.latent", "one.png", "--vae", vae, "--quiet"]) == 0
    assert Image.open("one.png").size == (21, 19)
    for out, reason in (("z.mp4", "makes pictures"), ("z.png", "--item")):
        assert main(["decode", "z.safetensors", out, "--vae", vae, "--quiet"]) == 2
        assert reason in capsys.readouterr().err
    assert main(["plan", "--size", "64x64", "--vae", vae, "--precision", "bf16", "--vram-gb", "2", "--plain"]) == 0
    assert "64x64, 1 frame," in capsys.readouterr().out


def test_decoder_only_files(tiny, noise, tmp_path):
    _, model = tiny
    state = {k: v for k, v in model.state_dict().items() if not k.startswith(("encoder.", "quant_conv."))}
    save_file(state, tmp_path / "d.safetensors", {"norm_num_groups": "4"})
    vae = load(tmp_path / "d.safetensors", device="cpu")
    assert not vae.can_encode
    z = noise(1, vae.latent_channels, 1, 2, 2)
    assert vae.decode(z).shape[2:4] == (2 * vae.spatial, 2 * vae.spatial)
    save_file({k: v for k, v in state.items() if "running_mean" not in k and "conv_in.bias" not in k},
              tmp_path / "e.safetensors", {"norm_num_groups": "4"})  # fmt: skip
    with pytest.raises(CheckpointError, match=r"conv_in\.bias"):
        load(tmp_path / "e.safetensors", device="cpu")


#: A key of another network -> what the refusal calls it.
OTHERS = {
    "decoder.layers.1.layers.0.beta": "an audio VAE",
    "vocoder.backbone.channel_layers.0.0.bias": "an audio VAE",
    "vquantizer.codebook.weight": "Stable Cascade",
    "decoder.mid_block.resnets.0.norm1.norm_layer.weight": "MoVQ",
    "taesd_decoder.1.weight": "TAESD",
    "decoder.transformer_blocks.0.attn.to_q.weight": "not a VAE this pack knows",
}


@pytest.mark.parametrize("key", OTHERS)
def test_other_networks_are_refused_in_one_line(key, tmp_path, seed_model):
    """Beside keys that they share with ours: HunyuanVideo's first, an image VAE's."""
    shared = {"decoder.conv_in.weight", "decoder.conv_out.bias"}
    if "norm_layer" in key:
        shared = {"decoder.conv_in.weight", "decoder.mid_block.resnets.0.norm1.conv_y.weight"}
    save_file({k: torch.zeros(4, 4, 3, 3) for k in {key, *shared}}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / "x.safetensors")
    assert OTHERS[key] in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(str(tmp_path / "x.safetensors"))


def test_odd_files_of_the_family_are_refused(tiny, tmp_path):
    _, model = tiny
    gray = saved(model, tmp_path / "g.safetensors", **{"decoder.conv_out.bias": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="1 colour channels"):
        load(gray)
    deep = saved(model, tmp_path / "v.safetensors", **{"decoder.conv_in.weight": torch.zeros(16, 3, 3, 3, 3)})
    with pytest.raises(CheckpointError, match="in time too"):
        load(deep)


@pytest.mark.parametrize(("file", "family"), [
    ("ae.safetensors", "flux"), ("flux1-vae.gguf", "flux"), ("flux2-vae.safetensors", "flux2"),
    ("sdxl_vae.safetensors", "sd"), ("vae-ft-mse-840000-ema-pruned.safetensors", "sd"), ("taesd.safetensors", "taesd"),
])  # fmt: skip
def test_files_are_known_by_their_names(file, family):
    found = by_file(file)
    assert (found and found.name) == family


def test_statistics_are_not_rounded(tiny):
    """In a 16-bit model those of the latents stay as they are."""
    family, model = tiny
    if family != "flux2":
        pytest.skip("has none")
    state = {k: v.clone() for k, v in model.state_dict().items()}
    vae = load(Checkpoint(state, {"norm_num_groups": "4"}), "bf16", "cpu")
    assert vae.model.packing.running_mean.dtype == torch.float32
    assert torch.equal(vae.model.packing.running_mean, model.packing.running_mean)
    assert vae.model.bfloat16().packing.running_var.dtype == torch.float32
    z = torch.randn(2, 3, 1, 6, 5)
    packed = vae.model.packing.pack(z)
    assert packed.shape == (2, 12, 1, 3, 2)
    torch.testing.assert_close(vae.model.packing.unpack(packed), z[..., :4])
