"""HunyuanImage 2.1's VAE: against recorded outputs of ComfyUI's class, its published sizes, and the fused walk."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from zerowaste_vae import load
from zerowaste_vae.engine.checkpoints import Checkpoint
from zerowaste_vae.engine.errors import InputError
from zerowaste_vae.engine.families import by_file, detect, hunyuan_image
from zerowaste_vae.engine.network.ops.ends import Moments
from zerowaste_vae.engine.network.ops.norm import Group

from .originals import close, rest_is_cut_off

ARCHITECTURE = hunyuan_image.ARCHITECTURE


@pytest.fixture(scope="module")
def weights(shared):
    folder = shared / "golden" / "hyimage21"
    parts = json.loads((folder / "index.json").read_text())["files"]["hyimage21_a"]["weights"]
    return {name: tensor for part in parts for name, tensor in load_file(folder / part).items()}


@pytest.fixture(scope="module")
def golden(shared, weights):
    """(VAE of the recorded weights, recorded tensors)"""
    io = load_file(shared / "golden" / "hyimage21" / "hyimage21_a.io.safetensors")
    return load(Checkpoint(dict(weights)), device="cpu"), io


@pytest.mark.parametrize("name", ["small", "batch", "odd"])
def test_decodes_are_the_originals(golden, name):
    vae, tensors = golden
    assert (vae.arch, vae.spatial, vae.latent_channels) == ("hunyuanimage", 32, 64)
    close(vae.decode_raw(tensors[f"{name}.latent"][:, :, None])[:, :, 0], tensors[f"{name}.decode"])


@pytest.mark.parametrize("name", ["e1", "e2"])
def test_encodes_are_the_originals(golden, name):
    vae, tensors = golden
    moments = vae.encode_raw(tensors[f"{name}.pixels"][:, :, None])
    close(moments[:, :, 0], tensors[f"{name}.moments"])
    close(vae.model.sample(moments)[:, :, 0], tensors[f"{name}.latent_out"])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("more", [(-1, -1), (1, 3), (2, 4)])
def test_sides_that_fill_no_latent(golden, monkeypatch, fused, more):
    rest_is_cut_off(golden[0], monkeypatch, fused, more)


def test_means_of_several_channels(shared):
    """The latent's end at a width of 256, where each moment adds the mean of two channels."""
    folder = shared / "golden" / "hyimage21"
    tensors = load_file(folder / "hyimage21_tail256.io.safetensors")
    step = Moments("norm_out", "conv_out", 256, 128, Group(32), means=True)
    style = ARCHITECTURE.encoder(hunyuan_image.Config((256,) * 6, None)).style
    modules = step.modules(style)
    for name, tensor in load_file(folder / "hyimage21_tail256.weights.safetensors").items():
        module, _, leaf = name.removeprefix("encoder.").rpartition(".")
        parameter = getattr(modules[module], leaf)
        parameter.data = tensor.float().reshape(parameter.shape)
    with torch.no_grad():
        close(step.plain(modules.__getitem__, tensors["x"][:, :, None], None)[:, :, 0], tensors["moments"])


def test_fused_walk(golden, monkeypatch, exact_sums):
    """It gives the same, in as many chunks and bands as are asked for, with equal bits."""
    vae, tensors = golden
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    fused = vae.with_options(vae.options.switched(off=["async_offload"]))
    z = torch.cat([tensors["small.latent"], tensors["small.latent"].flip(2)])
    assert fused.plan_decode(2, 2, 3).fused and fused.plan_encode(2, 2, 3).fused
    exact, made = vae.with_options(vae.options.switched(off=["triton_fusion"])), fused.decode(z)
    torch.testing.assert_close(made, exact.decode(z), rtol=0, atol=2e-5)
    x = made[:, 0]
    found = fused.encode(x)
    torch.testing.assert_close(found, exact.encode(x), rtol=0, atol=4e-5 * float(found.std()))
    for options in ({"chunk": 1}, {"tiling": "exact", "tile": 64}):
        assert torch.equal(fused.decode(z, **options), made), options
        assert torch.equal(fused.encode(x, **options), found), options


def test_published_sizes_and_names(weights):
    with torch.device("meta"):
        model = ARCHITECTURE.build(ARCHITECTURE.published.config)
    counts = [sum(p.numel() for p in half.parameters()) / 1e6 for half in (model.decoder, model.encoder)]
    assert [round(count, 1) for count in counts] == [260.6, 145.0]
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    assert detect(shapes) is ARCHITECTURE and ARCHITECTURE.config_of(shapes, {}) == ARCHITECTURE.published.config
    assert detect(weights) is ARCHITECTURE
    assert by_file("hunyuan_image_2.1_vae_fp16.safetensors") is ARCHITECTURE
    assert by_file("hunyuan_image_refiner_vae_fp16.safetensors").name == "hunyuanimage-refiner"
    halves = [{n for n in shapes if n.startswith(half)} for half in ("encoder.", "decoder.")]
    assert [detect(names) for names in halves] == [ARCHITECTURE, ARCHITECTURE]


def test_widths_that_shortcuts_cannot_divide_are_refused():
    shapes = {f"decoder.up.{i}.block.0.conv1.bias": (w,) for i, w in enumerate((128, 64, 64, 48, 48, 20))}
    with pytest.raises(InputError, match="as its shortcuts need"):
        hunyuan_image.Config.from_shapes(shapes | {"decoder.conv_in.weight": (128, 64, 3, 3)})
