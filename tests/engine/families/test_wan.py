"""Wan 2.1 and 2.2 against the recorded outputs of the originals, whole and streamed, and as a user loads them."""

import json

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from zerowaste_vae import CheckpointError, InputError, load
from zerowaste_vae.engine.extras.cli import main
from zerowaste_vae.engine.extras.media.pngs import write_png, write_png_folder
from zerowaste_vae.engine.families import by_file, detect
from zerowaste_vae.engine.families.wan import WAN21, WAN22, Config
from zerowaste_vae.engine.network.fused import fuse
from zerowaste_vae.engine.network.ops.ends import patches, pixels

from . import originals

ATOL = 5e-5
VERSIONS = {"2.1": WAN21, "2.2": WAN22}
#: The published widths and their parameter counts.
PUBLISHED = {
    "2.1": (Config((96, 192, 384, 384), (96, 192, 384, 384)), 126_892_531),
    "2.2": (Config((160, 320, 640, 640), (256, 512, 1024, 1024), 48, 2), 704_688_668),
}
#: [B, C, T, h, w] in latents.
SIZES = {"2.1": (16, 4, 5), "2.2": (48, 3, 4)}


def close(actual, expected, atol=ATOL):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


@pytest.fixture(scope="module", params=["2.1", "2.2"])
def golden(request, shared):
    """(version, VAE of the recorded weights, recorded tensors)"""
    folder = shared / "golden" / "other"
    path = folder / f"wan{request.param}.weights.safetensors"
    return request.param, load(path, device="cpu"), load_file(folder / f"wan{request.param}.io.safetensors")


@pytest.fixture(scope="module", params=["2.1", "2.2"])
def tiny(request, seed_model):
    """Seeded weights and widths that are no powers of two (2.2's shortcuts need each to divide the next)."""
    configs = {
        "2.1": Config((4, 6, 10, 12), (6, 10, 12, 12)),
        "2.2": Config((6, 12, 24, 24), (6, 12, 24, 24), 48, 2),
    }
    model = WAN21.build(configs[request.param]).requires_grad_(False)
    seed_model(model, 5)
    return request.param, model


@pytest.mark.parametrize("version", ["2.1", "2.2"])
def test_published_sizes(version):
    config, count = PUBLISHED[version]
    with torch.device("meta"):
        model = VERSIONS[version].build(config)
    assert sum(p.numel() for p in model.parameters()) == count
    shapes = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    assert VERSIONS[version].configure(shapes, None) == config
    assert detect(shapes) is VERSIONS[version]


def test_decodes_are_the_originals(golden):
    version, vae, tensors = golden
    assert vae.arch == f"wan{version}"
    lengths = [name.partition(".")[0] for name in tensors if name.endswith(".decode")]
    assert len(lengths) == 4
    for name in lengths:
        z, expected = tensors[f"{name}.latent"], tensors[f"{name}.decode"]
        for chunk, frames in ((0, 0), (1, 0), (2, 0), (3, 2), (1, 1)):
            close(vae.decode_raw(z, chunk=chunk, frames=frames), expected)


def test_encodes_are_the_originals(golden):
    _, vae, tensors = golden
    for count in (1, 5, 9):
        video, expected = tensors[f"enc{count}.pixels"], tensors[f"enc{count}.latent"]
        for chunk, frames in ((0, 0), (1, 0), (2, 3), (1, 1)):
            close(vae.model.sample(vae.encode_raw(video, chunk=chunk, frames=frames)), expected)
        pictures = video.permute(0, 2, 3, 4, 1).mul(0.5).add(0.5)
        close(vae.encode(pictures), expected)


@pytest.mark.parametrize(("chunk", "frames"), [(1, 0), (2, 0), (3, 1), (1, 3), (5, 2), (99, 0)])
def test_every_chunking_is_the_whole_clip(golden, noise, chunk, frames):
    version, vae, _ = golden
    c, h, w = SIZES[version]
    z = noise(2, c, 5, h, w)
    close(vae.decode_raw(z, chunk=chunk, frames=frames), vae.model.decoder(z))


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 13])
def test_odd_clips_encode_as_whole_latents(golden, noise, count):
    """Trailing frames, rows and columns that fill no latent are left out."""
    _, vae, _ = golden
    s = vae.spatial
    x = noise(1, 3, count, 2 * s + s // 2 + 1, 3 * s + 3)
    whole = vae.model.encoder(x)
    assert whole.shape == (1, 2 * vae.latent_channels, (count - 1) // 4 + 1, 2, 3)
    for chunk, frames in ((1, 0), (1, 1), (2, 3)):
        close(vae.encode_raw(x, chunk=chunk, frames=frames), whole)


def test_any_width_reads_its_shapes(tiny, noise, tmp_path):
    version, model = tiny
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    vae = load(tmp_path / "w.safetensors", device="cpu")
    assert (vae.arch, vae.model.config) == (f"wan{version}", model.config)
    c, h, w = SIZES[version]
    z = noise(1, c, 2, h, w)
    close(vae.decode_raw(z, chunk=1), model.decoder(z))
    frames = vae.decode(z)
    assert frames.shape == (1, 5, vae.spatial * h, vae.spatial * w, 3)
    close(frames, model.decoder(z).clamp(-1, 1).mul(0.5).add(0.5).permute(0, 2, 3, 4, 1))
    assert vae.encode(frames).shape == z.shape


def test_blended_tiles_meet_without_a_seam(tiny, noise, tmp_path):
    _, model = tiny
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    vae = load(tmp_path / "w.safetensors", device="cpu")
    s = vae.spatial
    z = noise(1, vae.latent_channels, 2, 7, 9)
    whole = vae.decode(z)
    tiled = vae.decode(z, tiling="blended", tile=6 * s, overlap=4 * s)
    # No statistics reach beyond a position here, so only the receptive field at a tile's edge is missing.
    assert (tiled - whole).square().mean().sqrt() < 0.05
    assert torch.equal(vae.decode(z, tiling="blended", tile=16 * s, overlap=s), whole)
    video = torch.rand(1, 5, 3 * s, 4 * s, 3, generator=torch.Generator().manual_seed(0))
    assert vae.encode(video, tiling="blended", tile=3 * s, overlap=2 * s).shape[-2:] == (3, 4)
    with pytest.raises(InputError, match=f"at least {2 * s} pixels"):
        vae.decode(z, tiling="blended", tile=s)


def test_the_commands_take_its_files(tiny, tmp_path, monkeypatch, capsys):
    """Sides are repeated up to whole latents, of 16 pixels for 2.2, and cut back."""
    version, model = tiny
    monkeypatch.chdir(tmp_path)
    save_file(model.state_dict(), "w.safetensors")
    write_png_folder("in", torch.rand(3, 19, 29, 3, generator=torch.Generator().manual_seed(0)))
    assert main(["convert", "w.safetensors", "w.gguf", "--type", "f16", "--quiet"]) == 0
    assert main(["info", "w.gguf"]) == 0
    shown = capsys.readouterr().out
    assert f"wan{version}, {model.config.patch * 8}x" in shown
    assert "the network's own" in shown
    assert "norm groups" not in shown
    assert main(["encode", "in", "z.safetensors", "--vae", "w.gguf", "--quiet"]) == 0
    latent = load_file("z.safetensors")["latent"]
    assert latent.shape[1:] == ((16, 2, 3, 4) if version == "2.1" else (48, 2, 2, 2))
    assert main(["decode", "z.safetensors", "r.safetensors", "--vae", "w.gguf", "--quiet"]) == 0
    assert load_file("r.safetensors")["frames"].shape == (1, 3, 19, 29, 3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precisions_stay_close(golden, noise, precision):
    version, vae, _ = golden
    low = load(vae.path, precision=precision, device="cpu")
    c, h, w = SIZES[version]
    z = noise(1, c, 2, h, w)
    z[..., 0, 0] = 0  # a dark position must not turn into NaN
    difference = (low.decode(z) - vae.decode(z)).square().mean().sqrt()
    assert 0 < difference < (0.02 if precision == "bf16" else 0.003)


def test_a_silent_position_is_zero_in_fp16(tiny):
    norm = tiny[1].decoder.middle[0].norm1.half()
    x = torch.zeros(1, norm.gamma.shape[0], 1, 2, 2, dtype=torch.float16)
    assert torch.equal(norm(x), x)


def test_decoder_only_files(tiny, noise, tmp_path):
    """conv1 and conv2 belong to a half although they lie beside it."""
    version, model = tiny
    weights = model.state_dict()
    decoder = {k: v for k, v in weights.items() if not k.startswith(("encoder.", "conv1."))}
    save_file(decoder, tmp_path / "d.safetensors")
    only = load(tmp_path / "d.safetensors", device="cpu")
    assert not only.can_encode
    c, h, w = SIZES[version]
    z = noise(1, c, 2, h, w)
    close(only.decode_raw(z), model.decoder(z))
    with pytest.raises(InputError, match="decoder only"):
        only.encode(torch.rand(1, 32, 32, 3))
    save_file({k: v for k, v in weights.items() if not k.startswith("conv1.")}, tmp_path / "e.safetensors")
    assert not load(tmp_path / "e.safetensors", device="cpu").can_encode
    save_file({k: v for k, v in weights.items() if not k.startswith("conv2.")}, tmp_path / "f.safetensors")
    with pytest.raises(CheckpointError, match=r"conv2\.weight"):
        load(tmp_path / "f.safetensors")


@pytest.fixture(scope="module", params=[(4, 4), (3, 12)], ids=str)
def colourful(request, seed_model):
    """A narrow 2.1 decoder beside an encoder of other widths, for (colours in, colours out)."""
    config = Config((4, 6, 10, 12), (16, 16, 32, 32), 16, 1, *request.param)
    model = WAN21.build(config).requires_grad_(False)
    seed_model(model, 5)
    return request.param, model


def test_other_colours_are_read_from_shapes(colourful, noise, tmp_path, capsys):
    """Transparency (Qwen-Image-Layered), and four pixels in one; on the fused walk, too."""
    (takes, gives), model = colourful
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    vae = load(tmp_path / "w.safetensors", device="cpu")
    assert (vae.model.config, vae.colours) == (model.config, (takes, gives))
    z = noise(1, 16, 2, 3, 2)
    frames = vae.decode(z)
    assert frames.shape == (1, 5, 24, 16, gives)
    expected = model.decoder(z).clamp(-1, 1).mul(0.5).add(0.5).permute(0, 2, 3, 4, 1)
    close(frames, expected)
    network = fuse(model.decoder, torch.float32)
    run, out = network.plan(2, 3, 2, 0, torch.float32, torch.device("cpu")), []
    run.allocate()
    with torch.no_grad():
        network.chunk(run, z[0].permute(1, 2, 3, 0), 0, torch.float32, lambda pixels: out.append(pixels.clone()))
    close(out[0][None], expected)
    video = torch.rand(5, 24, 16, 3, generator=torch.Generator().manual_seed(0))
    latent = vae.encode(video)
    if takes == 4:
        opaque = torch.cat((video, torch.ones(5, 24, 16, 1)), 3)
        assert torch.equal(vae.encode(opaque), latent)
        assert not torch.allclose(vae.encode(opaque * 0.5), latent)
        write_png(tmp_path / "p.png", frames[0, 0])
        assert Image.open(tmp_path / "p.png").mode == "RGBA"
    with pytest.raises(InputError, match=rf"\[B, F, H, W, {takes}\]"):
        vae.encode(torch.rand(1, 24, 16, 5))
    capsys.readouterr()
    plan = ["plan", "--vae", str(tmp_path / "w.safetensors"), "--size", "64x64", "--frames", "5", "--vram-gb", "8"]
    assert main([*plan, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["result_gb"] * 2**30 == 5 * 64 * 64 * gives * 4


def test_alpha_command(colourful, tmp_path):
    """A picture's own, or a full one; an encoder of three colours gets three."""
    (takes, _), model = colourful
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    vae = load(tmp_path / "w.safetensors", device="cpu")
    pixels = torch.randint(0, 255, (24, 16, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(tmp_path / "clear.png")
    Image.fromarray(pixels[..., :3].numpy()).save(tmp_path / "opaque.png")
    for name, expected in (("clear", pixels[..., :takes]), ("opaque", pixels[..., :3])):
        picture, latent = str(tmp_path / f"{name}.png"), str(tmp_path / f"{name}.safetensors")
        assert main(["encode", picture, latent, "--vae", str(tmp_path / "w.safetensors"), "--device", "cpu"]) == 0
        assert torch.equal(load_file(latent)["latent"], vae.encode(expected[None]))


def test_alpha_decode(shared, monkeypatch):
    """Ming-Image's and Qwen-Image-Layered's, whose layers are a batch."""
    folder = shared / "golden" / "wan_rgba"
    vae = load(folder / "wan_rgba.weights.safetensors", device="cpu")
    assert (vae.arch, vae.colours) == ("wan2.1", (4, 4))
    tensors = load_file(folder / "wan_rgba.io.safetensors")
    for name in ("a", "layers"):
        z, expected, pixels = (tensors[f"{name}.{part}"] for part in ("latent", "decode", "pixels"))
        originals.close(vae.decode_raw(z), expected)
        originals.close_when_fused(vae, z, expected, monkeypatch)
        originals.close(vae.model.sample(vae.encode_raw(pixels)), tensors[f"{name}.latent_out"])
        originals.close(vae.encode(pixels.permute(0, 2, 3, 4, 1).mul(0.5).add(0.5)), tensors[f"{name}.latent_out"])


@pytest.mark.parametrize("file", [
    "ming_image_vae_bf16", "qwen_image_vae", "qwen_image_layered_vae", "marigold_v2_depth_log_stage2_vae",
    "marigold_v2_normals_vae", "wan_alpha_2.1_vae_rgb_channel", "wan_alpha_2.1_vae_alpha_channel",
])  # fmt: skip
def test_names(file):
    """Files of the same layout are known by their names."""
    assert by_file(f"{file}.safetensors") is WAN21


def test_odd_colours_are_refused():
    with torch.device("meta"):
        shapes = {k: tuple(v.shape) for k, v in WAN21.build(PUBLISHED["2.1"][0]).state_dict().items()}
    shapes["decoder.head.2.bias"] = (1,)
    with pytest.raises(InputError, match=r"head\.2\.bias is for 1 colour"):
        Config.from_shapes(shapes)
    shapes["decoder.head.2.bias"] = (16,)
    with pytest.raises(InputError, match="only RGB"):
        Config.from_shapes(shapes, patch=2)


@pytest.mark.parametrize("sample", ["flat-q8_0", "gc_t1-bf16", "pig_fp32-f16"])
def test_gguf_files_decode(shared, sample):
    reference = load(shared / "golden" / "other" / "wan2.1.weights.safetensors", device="cpu")
    z = load_file(shared / "golden" / "other" / "wan2.1.io.safetensors")["T2.latent"]
    vae = load(shared / "gguf" / "samples" / f"wan21.{sample}.gguf", device="cpu")
    assert (vae.arch, vae.can_encode) == ("wan2.1", False)
    difference = (vae.decode_raw(z) - reference.decode_raw(z)).square().mean().sqrt()
    assert difference < {"flat-q8_0": 0.02, "gc_t1-bf16": 0.01, "pig_fp32-f16": 1e-6}[sample]


def test_patches_and_pixels_are_inverse(noise):
    x = noise(2, 3, 2, 6, 4)
    assert patches(x).shape == (2, 12, 2, 3, 2)
    assert torch.equal(pixels(patches(x)), x)
    # Channel (c * 2 + column) * 2 + row.
    assert torch.equal(patches(x)[:, 1 * 4 + 1 * 2 + 0], x[:, 1, :, 0::2, 1::2])
