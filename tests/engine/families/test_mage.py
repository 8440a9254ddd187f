"""Mage-VAE: against recorded outputs of ComfyUI's class, its published sizes, tiles and pictures of a batch."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from zerowaste_vae import load
from zerowaste_vae.engine.execution import reuse
from zerowaste_vae.engine.extras.graphs import graphs
from zerowaste_vae.engine.families import by_file, detect, latent_space, mage, renamed
from zerowaste_vae.engine.families.mage.kernels.mixing import places_in, windows_of
from zerowaste_vae.engine.kernels.attention import scratch_bytes
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.planning.budget import Limits
from zerowaste_vae.engine.planning.make import make_planner
from zerowaste_vae.engine.planning.plain_walk import Torch
from zerowaste_vae.engine.precision.modes import Mode
from zerowaste_vae.engine.runtime.kept import KEPT
from zerowaste_vae.engine.system.memory import GIB

from ..extras.graphs.fake_graph import FakeClock, FakeGraph
from .originals import close

ARCHITECTURE = mage.ARCHITECTURE
#: The original's own fp32 differs from its fp64 by up to 7e-5 in decodes.
BOUND = 2e-4


@pytest.fixture(scope="module")
def golden(shared):
    """(VAE of the recorded weights, recorded tensors)"""
    folder = shared / "golden" / "mage"
    return load(folder / "mage.weights.safetensors", device="cpu"), load_file(folder / "mage.io.safetensors")


@pytest.fixture
def fused(golden, monkeypatch):
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    return golden[0].with_options(DEFAULTS)


@pytest.mark.parametrize("name", ["small", "pair", "wide"])
def test_decodes_are_the_originals(golden, fused, name):
    """The last one is two windows of attention wide; none is whole."""
    vae, tensors = golden
    assert (vae.arch, vae.spatial, vae.latent_channels) == ("mage", 16, 16)
    z, expected = tensors[f"{name}.z"][:, :, None], tensors[f"{name}.decoded"]
    close(vae.decode_raw(z)[:, :, 0], expected, BOUND)
    assert fused.plan_decode(*z.shape[2:]).fused
    pictures = expected.clamp(-1, 1).mul(0.5).add(0.5).permute(0, 2, 3, 1)
    torch.testing.assert_close(fused.decode(z)[:, 0], pictures, rtol=0, atol=BOUND / 2 * float(expected.std()))


@pytest.mark.parametrize("name", ["small", "pair"])
def test_encodes_are_the_originals(golden, fused, name):
    vae, tensors = golden
    x, expected = tensors[f"{name}.x"], tensors[f"{name}.latent"]
    moments = vae.encode_raw(x[:, :, None])
    assert moments.shape[1] == 2 * vae.latent_channels
    close(vae.model.sample(moments)[:, :, 0], expected)
    assert fused.plan_encode(1, *expected.shape[2:]).fused
    close(fused.encode(x.permute(0, 2, 3, 1).mul(0.5).add(0.5), any_range=True).view_as(expected), expected)


def test_whole_pictures_have_equal_bits(golden, fused):
    """However many go at once, in whatever bands; what fills no patch is left out."""
    z = torch.cat([golden[1]["small.z"], golden[1]["small.z"].flip(2, 3)])[:, :, None]
    whole = fused.decode(z)
    frames = torch.cat([whole[:, 0], whole[:1, 0].flip(1)])
    moments = fused.encode(frames)
    for options in ({"chunk": 1}, {"chunk": 2}, {"tiling": "exact", "tile": 32}):
        assert torch.equal(fused.decode(z, **options), whole), options
        assert torch.equal(fused.encode(frames, **options), moments), options
    assert torch.equal(fused.decode(z[1:]), whole[1:])
    odd = torch.nn.functional.pad(frames, (0, 0, 0, 5, 0, 9))
    assert torch.equal(fused.encode(odd), moments)


@pytest.mark.parametrize("which", ["plain", "fused"])
def test_tiles_see_the_whole_picture(golden, fused, which):
    """Means and attention come before the tiles, so that tiles only round where they overlap."""
    vae = golden[0] if which == "plain" else fused
    z = golden[1]["wide.z"][:, :, None]
    tiled = vae.decode(z, tiling="blended", tile=128, overlap=32)
    torch.testing.assert_close(tiled, vae.decode(z), rtol=0, atol=2e-4)  # weights of tiles are in 16 bit
    frames = vae.decode(z)[:, 0]
    found = vae.encode(frames, tiling="blended", tile=128, overlap=32)
    torch.testing.assert_close(found, vae.encode(frames), rtol=0, atol=1e-4)


def test_windows():
    """Each position is in one window, and those beyond the picture repeat its last row and column."""
    at, back = windows_of(3, 5, 2), places_in(3, 5, 2)
    assert at.tolist() == [
        [0, 1, 5, 6], [2, 3, 7, 8], [4, 4, 9, 9], [10, 11, 10, 11], [12, 13, 12, 13], [14, 14, 14, 14],
    ]  # fmt: skip
    assert torch.equal(at.flatten()[back], torch.arange(15))


def test_plans_without_flash_attention_count_windows():
    """A 2048x2048 picture: scores of one window after the other, not of all positions."""
    stated = []
    for options in (DEFAULTS, DEFAULTS.switched(off=["flash_attention"])):
        planner = make_planner(
            ARCHITECTURE, ARCHITECTURE.published.config, torch.bfloat16, options, Mode(), lambda: True, Torch
        )
        stated.append(planner.plan("decoder", (1, 128, 128), limits=Limits(8 * GIB)).peak_bytes)
    windows = 16 * 1024 * 384 * 2
    assert windows < stated[1] - stated[0] + scratch_bytes(1024, 2, 384) < 2 * windows


def test_a_picture_that_comes_again_is_replayed(golden, monkeypatch):
    """With equal bits, once a chunk's times say that it pays; other pictures of the size, too."""
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    monkeypatch.setattr(graphs, "CudaGraph", FakeGraph)
    monkeypatch.setattr(graphs, "Clock", FakeClock)
    monkeypatch.setattr(graphs, "pays", lambda times, *_: times is not None)
    monkeypatch.setattr(reuse, "why_not_on", lambda _: None)
    vae, z = golden[0].with_options(DEFAULTS), golden[1]["wide.z"][:, :, None]
    for turn, latent in enumerate((z, z.flip(3), z, z.flip(4))):
        plain = golden[0].with_options(DEFAULTS.switched(off=["cuda_graphs"])).decode(latent)
        made = vae.decode(latent)
        assert torch.equal(made, plain) and vae._fused.runs.replayed == (int(turn > 1), 1), turn
    KEPT.release()


def test_published_sizes_and_names():
    with torch.device("meta"):
        model = ARCHITECTURE.build(ARCHITECTURE.published.config)
    assert sum(p.numel() for p in model.parameters()) == 138_052_035
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    assert detect(shapes) is ARCHITECTURE and ARCHITECTURE.config_of(shapes, {}) == ARCHITECTURE.published.config
    assert by_file("mage_flow_vae_bf16.safetensors") is ARCHITECTURE
    assert by_file("qwen_image_vae.safetensors") is not ARCHITECTURE
    assert latent_space("mage") == "mage"  # Flux.2's in kind, but neither packed nor normalised


@pytest.mark.parametrize("saved", [False, True])
def test_names_in_files(golden, shared, tmp_path, saved):
    """The published ones and, in a container, those that ComfyUI saves; with the decoder alone, too."""
    vae, tensors = golden
    weights = load_file(shared / "golden" / "mage" / "mage.weights.safetensors")
    assert detect(weights) is ARCHITECTURE
    if saved:
        names = {n: n.replace("pipeline.", "decoder_model.").replace("student.", "") for n in weights}
        shapes = {names[n]: tuple(t.shape) for n, t in weights.items()}
        assert ARCHITECTURE.config_of(renamed(shapes), {}) == vae.model.config
        weights = {f"first_stage_model.{names[n]}": t for n, t in weights.items() if ".y_embedder.encoder." not in n}
    decoder = {n: t for n, t in weights.items() if "dconv_encoder" not in n}
    z, x = tensors["small.z"][:, :, None], tensors["small.x"][:, :, None]
    for tensors_of, encodes in ((weights, True), (decoder, False)):
        save_file(tensors_of, tmp_path / "w.safetensors")
        other = load(tmp_path / "w.safetensors", device="cpu")
        assert other.can_encode is encodes and torch.equal(other.decode_raw(z), vae.decode_raw(z))
        assert not encodes or torch.equal(other.encode_raw(x), vae.encode_raw(x))
