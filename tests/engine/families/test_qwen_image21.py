"""Qwen-Image 2.1's VAE: against recorded outputs of ComfyUI's class, its published sizes, and the fused walk."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from zerowaste_vae import load
from zerowaste_vae.engine.checkpoints import Checkpoint
from zerowaste_vae.engine.errors import CheckpointError, InputError
from zerowaste_vae.engine.extras.cli import main
from zerowaste_vae.engine.families import by_file, detect, qwen_image21, wan
from zerowaste_vae.engine.network.fused import fuse
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.planning import fused_walk
from zerowaste_vae.engine.planning.budget import Limits
from zerowaste_vae.engine.planning.make import make_planner
from zerowaste_vae.engine.planning.plain_walk import Torch
from zerowaste_vae.engine.precision.modes import Mode
from zerowaste_vae.engine.runtime.parking import Parking
from zerowaste_vae.nodes.frames import Layout

from .originals import close, rest_is_cut_off
from .small import small

ARCHITECTURE = qwen_image21.ARCHITECTURE
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def weights(shared):
    folder = shared / "golden" / "qwen21"
    parts = json.loads((folder / "index.json").read_text())["files"]["qwen21_a"]["weights"]
    return {name: tensor for part in parts for name, tensor in load_file(folder / part).items()}


@pytest.fixture(scope="module")
def golden(shared, weights):
    """(VAE of the recorded weights, recorded tensors)"""
    io = load_file(shared / "golden" / "qwen21" / "qwen21_a.io.safetensors")
    return load(Checkpoint(dict(weights)), device="cpu"), io


@pytest.mark.parametrize("name", ["small", "batch"])
def test_decodes_are_the_originals(golden, name):
    vae, tensors = golden
    assert (vae.arch, vae.spatial, vae.latent_channels, vae.colours) == ("qwenimage2.1", 16, 64, (4, 4))
    close(vae.decode_raw(tensors[f"{name}.latent"][:, :, None])[:, :, 0], tensors[f"{name}.decode"])


@pytest.mark.parametrize("name", ["e1", "e2"])
def test_encodes_are_the_originals(golden, name):
    vae, tensors = golden
    moments = vae.encode_raw(tensors[f"{name}.pixels"][:, :, None])
    close(vae.model.sample(moments)[:, :, 0], tensors[f"{name}.latent_out"])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("more", [(-1, -1), (1, 3), (2, 4)])
def test_sides_that_fill_no_latent(golden, monkeypatch, fused, more):
    rest_is_cut_off(golden[0], monkeypatch, fused, more)


@pytest.mark.parametrize("off", [(), ("composed_upsample",)])
def test_fused_walk(golden, monkeypatch, off):
    """It gives the originals' values, in as many chunks and bands as are asked for, with equal bits."""
    vae, tensors = golden
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    fused = vae.with_options(vae.options.switched(off=["async_offload", *off]))
    assert fused.plan_decode(2, 3, 5).fused and fused.plan_encode(2, 3, 5).fused
    expected = tensors["small.decode"]
    pictures = expected.clamp(-1, 1).mul(0.5).add(0.5).movedim(1, -1)
    torch.testing.assert_close(fused.decode(tensors["small.latent"])[:, 0], pictures, rtol=0,
                               atol=2e-5 * float(expected.std()))  # fmt: skip
    found = fused.encode(tensors["e2.pixels"].movedim(1, -1).mul(0.5).add(0.5)[:, None])
    close(found[:, :, 0], tensors["e2.latent_out"])


def test_equal_bits(golden, monkeypatch, noise, exact_sums):
    """Pictures are the same whatever goes with them: both halves, fused and plain."""
    vae = golden[0]
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    z = noise(3, 64, 4, 2)
    for off in (("async_offload",), ("async_offload", "triton_fusion")):
        here = vae.with_options(vae.options.switched(off=off))
        made = here.decode(z)
        x = made.clone()
        found = here.encode(x)
        for options in ({"chunk": 1}, {"chunk": 2}, {"tiling": "untiled"}):
            assert torch.equal(here.decode(z, **options), made), options
            assert torch.equal(here.encode(x, **options), found), options
        assert torch.equal(here.decode(z[1:2]), made[1:2])
        assert torch.equal(here.encode(x[1:2]), found[1:2])
        blended = here.decode(z, tiling="blended", tile=32, overlap=16)
        assert not torch.equal(blended, made)


@torch.no_grad()
def test_bands(golden, noise):
    """Pictures of 160 rows, two bands of 64 and a rest, are the whole picture's, whatever the memory for them."""
    model = golden[0].model
    ways = Parking(None, 1 << 20), Parking(None, 0, rows=64), Parking(None, 0, rows=128), Parking(None, 0, streams=0)
    z, x = noise(2, 10, 3, 64), noise(2, 160, 48, 4)

    def decoded(network, parking=None):
        run, out = network.plan(2, 10, 3, 0, torch.float32, CPU, parking), []
        run.allocate()
        network.chunk(run, z, 0, torch.float32, lambda pixels: out.append(pixels.clone()))
        return torch.cat(out)

    def encoded(network, parking=None):
        run = network.plan(2, 160, 48, 0, CPU, parking)
        run.allocate()
        return network.chunk(run, x, 0).clone()

    for half, made in ((model.decoder, decoded), (model.encoder, encoded)):
        network = fuse(half, torch.float32)
        whole = made(network)
        for parking in ways:
            close(made(network, parking), whole, bound=1e-5)  # products of fewer rows: other sums on a CPU


def test_alpha_command(weights, golden, tmp_path):
    """A picture's transparency is encoded and decoded; one without it is opaque."""
    vae = golden[0]
    save_file(weights, tmp_path / "w.safetensors")
    pixels = torch.randint(0, 256, (32, 48, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    opaque = torch.cat((pixels[..., :3], torch.full((32, 48, 1), 255, dtype=torch.uint8)), 2)
    on_cpu = ["--vae", str(tmp_path / "w.safetensors"), "--device", "cpu"]
    for name, given, expected in (("clear", pixels, pixels), ("opaque", pixels[..., :3], opaque)):
        picture, latent, out = (str(tmp_path / f"{name}{end}") for end in (".png", ".safetensors", "-out.png"))
        Image.fromarray(given.numpy()).save(picture)
        assert main(["encode", picture, latent, *on_cpu]) == 0
        stored = load_file(latent)["latent"]
        assert torch.equal(stored, vae.encode(expected[None])[:, :, 0])
        assert torch.equal(stored, vae.encode(given[None])[:, :, 0])
        assert main(["decode", latent, out, *on_cpu]) == 0
        with Image.open(out) as made:
            assert made.mode == "RGBA"
            assert torch.equal(torch.from_numpy(np.array(made)), vae.decode(stored, output="uint8")[0, 0])
    assert not torch.equal(*(load_file(tmp_path / f"{n}.safetensors")["latent"] for n in ("clear", "opaque")))


def test_published_sizes_and_names():
    with torch.device("meta"):
        model = ARCHITECTURE.build(ARCHITECTURE.published.config)
    counts = [sum(p.numel() for n, p in model.state_dict().items() if n in model.names(half)) / 1e6
              for half in ("decoder", "encoder")]  # fmt: skip
    # The files also hold convolutions in time of 6.8 M parameters that nothing uses.
    unused = [sum(2 * c * (c + 1) for c in (1152, 1152, 576)) / 1e6, sum(c * (c + 1) for c in (192, 384, 768)) / 1e6]
    assert [round(count + rest, 1) for count, rest in zip(counts, unused, strict=True)] == [259.0, 78.7]
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    assert detect(shapes) is ARCHITECTURE and ARCHITECTURE.config_of(shapes, {}) == ARCHITECTURE.published.config
    assert by_file("qwen_image_2.1_vae_bf16.safetensors") is ARCHITECTURE
    for name in ("qwen_image_vae.safetensors", "qwen_image_2512_vae.safetensors", "qwen_image_layered_vae.safetensors"):
        assert by_file(name) is wan.WAN21, name
    assert by_file("wan2.2_vae.safetensors") is wan.WAN22


def test_wan_and_this_are_told_apart(weights):
    """Each half alone, and with one tensor of the other family."""
    with torch.device("meta"):
        others = wan.WAN22.build(wan.WAN22.published.config).state_dict()
    for own, rest, architecture in ((weights, others, ARCHITECTURE), (others, weights, wan.WAN22)):
        for half in ("encoder.", "decoder."):
            names = {name for name in own if name.startswith(half)}
            assert detect(names) is architecture
            for more in {name for name in rest if name.startswith(half)} - names:
                assert detect(names | {more}) is architecture, more


def test_it_is_read_from_diffusers_names(weights, golden, tmp_path):
    """Which name the layers of Wan 2.2's copy there; its convolutions are 2-D."""
    tensors = {_diffusers(n): t.squeeze(2) if t.ndim == 5 else t for n, t in weights.items()}
    assert len(tensors) == len(weights) and not tensors.keys() & {n for n in weights if "coder" in n}
    save_file(tensors, tmp_path / "w.safetensors")
    vae, recorded = load(tmp_path / "w.safetensors", device="cpu"), golden[1]
    assert (vae.arch, vae.model.config) == ("qwenimage2.1", golden[0].model.config)
    z = recorded["small.latent"]
    assert torch.equal(vae.decode(z), golden[0].decode(z))


def _diffusers(name):
    leaves = {"residual.0": "norm1", "residual.2": "conv1", "residual.3": "norm2", "residual.6": "conv2",
              "shortcut": "conv_shortcut"}  # fmt: skip
    name = re.sub(r"(?<=\.)(residual\.\d|shortcut)(?=\.)", lambda m: leaves[m[1]], name)
    name = re.sub(r"middle\.([02])", lambda m: f"mid_block.resnets.{int(m[1]) // 2}", name)
    name = name.replace("middle.1.", "mid_block.attentions.0.")
    name = re.sub(r"(up|down)samples\.(\d)\.\1samples\.\d\.(resample|time)", r"\1_blocks.\2.\1sampler.\3", name)
    name = re.sub(r"(up|down)samples\.(\d)\.\1samples\.(\d)", r"\1_blocks.\2.resnets.\3", name)
    name = name.replace("coder.conv1.", "coder.conv_in.").replace("head.0", "norm_out").replace("head.2", "conv_out")
    return re.sub(r"^conv([12])", lambda m: ("quant_conv", "post_quant_conv")[int(m[1]) - 1], name)


def test_decoders_alone_and_halves_that_are_no_such_network(weights):
    tensors = {name: tensor for name, tensor in weights.items() if not name.startswith(("encoder.", "conv1."))}
    half = load(Checkpoint(tensors), device="cpu")
    assert (half.can_encode, half.latent_channels) == (False, 64)
    timed = weights | {"decoder.head.2.weight": torch.zeros(4, 8, 3, 3, 3)}
    with pytest.raises(CheckpointError, match=r"decoder\.head\.2\.weight is a convolution in time"):
        load(Checkpoint(timed), device="cpu")
    shapes = {name: tuple(t.shape) for name, t in weights.items()}
    for changed, said in (
        ({"decoder.upsamples.4.upsamples.0.residual.2.bias": (5,)}, "do not divide each other"),
        ({"encoder.downsamples.4.downsamples.0.residual.2.bias": (128,)}, "last two have to be equal"),
        ({"decoder.head.2.bias": (1,)}, "is for 1 colour channels"),
    ):
        with pytest.raises(InputError, match=said):
            qwen_image21.Config.from_shapes(shapes | changed)


def test_latents_of_the_older_qwen_image_are_refused(golden):
    """And those of this VAE by the older one, which would read 64 channels as four latents of a clip."""
    older = small("wan2.1")
    for vae, latent, channels in ((golden[0], torch.zeros(1, 16, 1, 3, 5), 64),
                                  (load(older, device="cpu"), torch.zeros(1, 64, 3, 5), 16)):  # fmt: skip
        with pytest.raises(InputError, match=rf"\[B, {channels}, "):
            vae.decode(latent)
        layout = Layout(vae.architecture, vae.latent_channels, vae.colours[0])
        with pytest.raises(InputError, match="comes from another kind of model"):
            layout.latent(latent)
    assert Layout(ARCHITECTURE, 64, 4).latent(torch.zeros(2, 64, 3, 5)).shape == (2, 64, 1, 3, 5)


def test_plans_have_room_for_torchs_attention(monkeypatch):
    """A head of 1152 is too large for our kernels: 2048x2048 took 5.87 GB on an H200 where 5.82 were stated."""
    def peak():
        return make_planner(
            ARCHITECTURE, ARCHITECTURE.published.config, torch.bfloat16, DEFAULTS, Mode(), lambda: True,
            lambda: Torch(reserves=True),
        ).plan("decoder", (1, 128, 128)).peak_bytes  # fmt: skip

    stated = peak()
    monkeypatch.setattr(fused_walk, "torch_bytes", lambda *_: 0)
    assert stated - peak() == 128 * 128 * 1152 * (2 + 4) and stated > 5.87 * 2**30


@pytest.mark.parametrize("half", ["decoder", "encoder"])
def test_plans_of_a_large_picture(half):
    """2048x2048 in bf16 takes less than the 7.5 GB that ComfyUI states for the decode alone, and tiles are blended only
    where less is allowed."""
    planner = make_planner(ARCHITECTURE, ARCHITECTURE.published.config, torch.bfloat16, DEFAULTS, Mode(), lambda: True,
                           lambda: Torch(reserves=True))  # fmt: skip
    side = 2048 // 16
    whole = planner.plan(half, (1, side, side))
    assert whole.fused and not whole.tiled and whole.peak_bytes < 7.5e9
    assert not planner.plan(half, (1, side, side), limits=Limits(whole.peak_bytes)).tiled
    less = planner.plan(half, (1, side, side), limits=Limits(int(0.8 * whole.peak_bytes)))
    assert less.tiled and less.peak_bytes <= 0.8 * whole.peak_bytes
