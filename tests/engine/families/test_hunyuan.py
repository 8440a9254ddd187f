"""HunyuanVideo 1.0 and 1.5 against the recorded outputs of the originals, whole, streamed and fused."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from zerowaste_vae import Checkpoint, InputError, load
from zerowaste_vae.engine.extras.cli import main
from zerowaste_vae.engine.extras.media.pngs import write_png_folder
from zerowaste_vae.engine.families import by_file, detect, find_key_set, hunyuan, hunyuan15, hunyuan_refiner
from zerowaste_vae.engine.options import DEFAULTS

from .originals import BOUND, close

VERSIONS = {"1.0": hunyuan, "1.5": hunyuan15, "refiner": hunyuan_refiner}
#: Parameters of the published decoder and encoder, with what lies beside them.
PUBLISHED = {
    "1.0": (146_136_339, 100_342_464), "1.5": (871_309_571, 389_324_544), "refiner": (871_332_483, 389_342_464),
}  # fmt: skip


@pytest.fixture(scope="module", params=["1.0", "1.5"])
def golden(request, shared):
    """(version, VAE of the recorded weights, recorded tensors)"""
    folder = shared / "golden" / "other"
    names = [f"hunyuan{request.param}.weights", *(["hunyuan1.0.encoder.weights"] if request.param == "1.0" else [])]
    weights = {key: value for name in names for key, value in load_file(folder / f"{name}.safetensors").items()}
    tensors = load_file(folder / f"hunyuan{request.param}.io.safetensors")
    return request.param, load(Checkpoint(weights), device="cpu"), tensors


@pytest.fixture(scope="module")
def lengths(golden):
    return [name.partition(".")[0] for name in golden[2] if name.endswith(".decode")]


@pytest.fixture
def fused(golden, monkeypatch):
    """The VAE on the fused walk, through the reference operators."""
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    return golden[1].with_options(DEFAULTS)


@pytest.fixture(scope="module", params=["1.0", "1.5"])
def tiny(request, seed_model):
    """(version, model) of seeded weights."""
    config = {
        "1.0": hunyuan.Config((8, 16, 16, 24), (8, 16, 16, 24), 4, norm_groups=4),
        "1.5": hunyuan15.Config((8, 8, 16, 32, 64), (8, 16, 32, 32, 64), 16),
    }[request.param]
    model = VERSIONS[request.param].ARCHITECTURE.build(config).requires_grad_(False)
    seed_model(model, 5)
    return request.param, model


@pytest.mark.parametrize("version", VERSIONS)
def test_published_sizes(version):
    architecture = VERSIONS[version].ARCHITECTURE
    with torch.device("meta"):
        model = architecture.build(architecture.published.config)
    shapes = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    counts = [sum(model.state_dict()[key].numel() for key in model.names(half)) for half in ("decoder", "encoder")]
    assert tuple(counts) == PUBLISHED[version]
    assert len(shapes["decoder.mid.attn_1.q.weight"]) == 5  # as the files have it
    assert architecture.configure(shapes, None) == architecture.published.config
    assert detect(shapes) is architecture
    for half in ("decoder", "encoder"):
        assert detect(k for k in shapes if k.startswith(half)) is architecture


@pytest.mark.parametrize(
    ("file", "module"),
    [
        ("hunyuan_video_vae_bf16.safetensors", hunyuan),
        ("hunyuanvideo15_vae_fp16.safetensors", hunyuan15),
        ("hunyuan-video-1.5-vae.gguf", hunyuan15),
        ("hunyuan_image_refiner_vae_fp16.safetensors", hunyuan_refiner),
    ],
)
def test_its_files_are_known_by_name(file, module):
    assert by_file(file) is module.ARCHITECTURE


def test_decodes_are_the_originals(golden, lengths):
    _, vae, tensors = golden
    assert len(lengths) == 4
    for name in lengths:
        for chunk, frames in ((0, 0), (1, 0), (2, 0), (3, 2), (1, 1)):
            close(vae.decode_raw(tensors[f"{name}.latent"], chunk=chunk, frames=frames), tensors[f"{name}.decode"])


@pytest.mark.parametrize("off", [(), ("composed_upsample",), ("flash_attention",)])
def test_fused_decodes_are_the_originals(golden, lengths, fused, off):
    fused.options = DEFAULTS.switched(off=off)
    for name in lengths:
        z, expected = golden[2][f"{name}.latent"], golden[2][f"{name}.decode"]
        pictures = expected.clamp(-1, 1).mul(0.5).add(0.5).permute(0, 2, 3, 4, 1)
        for chunk in (0, 1) if golden[0] == "1.5" else (0,):
            assert fused.plan_decode(*z.shape[2:], chunk=chunk).fused
            actual = fused.decode(z, chunk=chunk)
            torch.testing.assert_close(actual, pictures, rtol=0, atol=BOUND / 2 * float(expected.std()))


def test_encodes_are_the_originals(golden, fused):
    version, vae, tensors = golden
    if version == "1.5":
        assert not vae.can_encode  # nothing is recorded: its encoder meets the original in tests/host
        return
    for count in (1, 5, 9):
        video, expected = tensors[f"enc{count}.pixels"], tensors[f"enc{count}.latent"]
        for chunk, frames in ((0, 0), (1, 0), (2, 3), (1, 1)):
            close(vae.model.sample(vae.encode_raw(video, chunk=chunk, frames=frames)), expected)
        pictures = video.permute(0, 2, 3, 4, 1).mul(0.5).add(0.5)
        close(vae.encode(pictures), expected)
        close(fused.encode(pictures), expected)
        assert "reference" in fused.last_report.mode


@pytest.mark.parametrize("count", [1, 3, 6, 8, 13])
def test_odd_clips_encode_as_whole_latents(tiny, noise, count, tmp_path, monkeypatch):
    """Trailing frames, rows and columns that fill no latent are left out, in every chunking and on the fused walk."""
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    version, model = tiny
    groups = "4" if version == "1.0" else ""
    save_file(model.state_dict(), tmp_path / "w.safetensors", {"norm_num_groups": groups} if groups else None)
    vae = load(tmp_path / "w.safetensors", device="cpu")
    s = vae.spatial
    x = noise(1, 3, count, 2 * s + s // 2 + 1, 3 * s + 3)
    whole = vae.model.encoder(x)
    assert whole.shape == (1, 2 * vae.latent_channels, (count - 1) // 4 + 1, 2, 3)
    for chunk, frames in ((1, 0), (1, 1), (2, 3)):
        close(vae.encode_raw(x, chunk=chunk, frames=frames), whole)
    pictures = x.clamp(-1, 1).mul(0.5).add(0.5).permute(0, 2, 3, 4, 1)
    expected = vae.model.sample(vae.model.encoder(x.clamp(-1, 1)))
    close(vae.encode(pictures), expected)
    assert "reference" in vae.last_report.mode


@pytest.mark.parametrize("walk", ["plain", "reference"])
def test_streams_and_parts_see_the_whole_clip(tiny, noise, walk, monkeypatch):
    """All of it has to be there: latents of a part depend on all others, frames of a stream are waited for."""
    if walk == "reference":
        monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    vae = load(Checkpoint(dict(tiny[1].state_dict()), {"norm_num_groups": "4"}), device="cpu")
    z = noise(1, vae.latent_channels, 4, 2, 3)
    frames = vae.decode(z)
    assert torch.equal(vae.decode(z, start=6, frames=3), frames[:, 6:9])
    assert torch.equal(torch.cat(list(vae.stream(z)), 1), frames)
    latent = vae.encode(frames)
    assert torch.equal(torch.cat(list(vae.encode_stream(iter(frames[0]))), 2), latent)
    assert (walk in vae.last_report.mode) and latent.shape == z.shape


def test_chunks_of_norms():
    """Norms over chunks tell the planner their size."""
    programs = [half(hunyuan.ARCHITECTURE.published.config) for half in (hunyuan.decoder, hunyuan.encoder)]
    assert [p.chunk for p in programs] == [(2, 2), (1, 2)]
    assert all(p.gathers for p in programs)
    assert hunyuan15.decoder(hunyuan15.ARCHITECTURE.published.config).chunk is None


def test_blended_tiles_on_either_walk(tiny, noise, tmp_path, monkeypatch):
    save_file(tiny[1].state_dict(), tmp_path / "w.safetensors", {"norm_num_groups": "4"})
    vae = load(tmp_path / "w.safetensors", device="cpu")
    s, z = vae.spatial, noise(1, vae.latent_channels, 3, 2, 3)
    options = {"tiling": "blended", "tile": 2 * s, "overlap": s}
    plain = vae.decode(z, **options)
    assert vae.plan_decode(3, 2, 3, **options).tiled
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    for chunk in (0, 1, 2):  # the middle sees whole clips, tiles a chunk
        torch.testing.assert_close(vae.decode(z, chunk=chunk, **options), plain, rtol=0, atol=1e-5)
        some = vae.decode(z, chunk=chunk, start=3, frames=5, **options)
        torch.testing.assert_close(some, plain[:, 3:8], rtol=0, atol=1e-5)
    video = torch.rand(1, 9, 2 * s, 3 * s, 3, generator=torch.Generator().manual_seed(0))
    assert vae.encode(video, tiling="blended", tile=2 * s, overlap=s).shape[2:] == (3, 2, 3)


def test_the_commands_take_its_files(tiny, tmp_path, monkeypatch, capsys):
    version, model = tiny
    monkeypatch.chdir(tmp_path)
    save_file(model.state_dict(), "w.safetensors", {"norm_num_groups": "4"})
    write_png_folder("in", torch.rand(3, 19, 29, 3, generator=torch.Generator().manual_seed(0)))
    assert main(["convert", "w.safetensors", "w.gguf", "--type", "f16", "--quiet"]) == 0
    assert main(["info", "w.gguf"]) == 0
    assert f"hunyuanvideo{version.removeprefix('1.0')}, " in capsys.readouterr().out
    assert main(["encode", "in", "z.safetensors", "--vae", "w.gguf", "--quiet"]) == 0
    assert main(["decode", "z.safetensors", "r.safetensors", "--vae", "w.gguf", "--quiet"]) == 0
    assert load_file("r.safetensors")["frames"].shape == (1, 3, 19, 29, 3)


@pytest.mark.parametrize("version", ["1.0", "1.5"])
def test_8_bit_stays_close(version, seed_model, noise):
    """On a CPU: the same numbers as on a GPU. Ranges come from samples, which are whole clips of their own."""
    config = {
        "1.0": hunyuan.Config((32, 32, 32, 64), (32, 32, 32, 64), 16, norm_groups=8),
        "1.5": hunyuan15.Config((32, 32, 32, 32, 64), (32, 32, 32, 32, 64), 16),
    }[version]
    model = VERSIONS[version].ARCHITECTURE.build(config).requires_grad_(False)
    seed_model(model, 5)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    exact, vae = (load(Checkpoint(dict(weights), {"norm_num_groups": "8"}), p, "cpu") for p in ("fp32", "fp8"))
    z = noise(1, 16, 3, 3, 4)
    frames, expected = vae.decode(z), exact.decode(z)
    assert "convolutions in fp8" in vae.last_report.operands
    assert 25 < -10 * float((frames - expected).square().mean().log10()) < 60
    video = expected[:, :5]
    latent, expected = vae.encode(video), exact.encode(video)
    assert "convolutions in fp8" in vae.last_report.operands
    assert 15 < -10 * float(((latent - expected) / expected.std()).square().mean().log10()) < 60


def test_unused_keys_of_a_file_are_no_trouble(tiny):
    """Some files of 1.5 hold projections of a timestep that nobody gives."""
    model = tiny[1]
    weights = model.state_dict() | {"decoder.mid.block_1.temb_proj.weight": torch.zeros(4, 4)}
    vae = load(Checkpoint(weights, {"norm_num_groups": "4"}), device="cpu")
    assert vae.model.config == model.config


def test_the_refiner_makes_pictures(seed_model, noise, tmp_path):
    """One by one, whole or in blended tiles; what it gives is compared with the original in tests/host."""
    config = hunyuan_refiner.Config((8, 8, 16, 32, 32), (8, 16, 16, 32, 32), 16, norm_groups=8)
    model = hunyuan_refiner.ARCHITECTURE.build(config).requires_grad_(False)
    seed_model(model, 5)
    save_file(model.state_dict(), tmp_path / "w.safetensors", {"norm_num_groups": "8"})
    vae = load(tmp_path / "w.safetensors", device="cpu")
    assert (vae.arch, vae.model.config) == ("hunyuanimage-refiner", config)
    z = noise(2, 16, 3, 4)
    pictures = vae.decode(z)
    assert pictures.shape == (2, 1, 48, 64, 3)
    torch.testing.assert_close(vae.decode(z[1:])[0], pictures[1], rtol=0, atol=1e-5)
    assert vae.decode(z, tiling="blended", tile=48, overlap=16).shape == pictures.shape
    assert vae.encode(pictures[:, 0]).shape == (2, 16, 1, 3, 4)
    assert not vae.plan_decode(2, 3, 4).fused


def test_hunyuanimage():
    """Hunyuanimages own vae is not its refiners."""
    keys = ["decoder.up.0.upsample.conv.weight", "decoder.up.5.block.0.conv1.weight"]
    assert find_key_set(keys[:1]).name == "hunyuanimage-refiner"
    assert find_key_set(keys).name == "hunyuanimage"


def test_wrong_widths():
    """Widths that shortcuts cannot divide are refused."""
    shapes = {f"decoder.up.{i}.block.0.conv1.conv.bias": (w,) for i, w in enumerate((64, 48, 16, 8, 8))}
    with pytest.raises(InputError, match="as its shortcuts need"):
        hunyuan15.Config.from_shapes(shapes | {"decoder.conv_in.conv.weight": (64, 32, 3, 3, 3)})
