"""Tiny autoencoders of pictures: against recorded outputs of the originals, in all forms of their files."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from zerowaste_vae import Checkpoint, load
from zerowaste_vae.engine.errors import CheckpointError
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.families import by_file, detect
from zerowaste_vae.engine.families.tae import SCALE, SHIFT, TAEF2, TAESANA, TAESD, Config
from zerowaste_vae.engine.loader import encoder_only
from zerowaste_vae.engine.planning.fusable import half_not_fused

from .originals import close

WIDTHS = (8, 12, 16, 20)
#: Parameters of TAESANA's decoder, whose lowest levels have 256 and 128 channels: three blocks of three convolutions
#: and one without a bias at each of five levels, one block at the last, and both ends.
SANA = (
    sum(9 * (9 * w * w + w) + 9 * w * v for w, v in ((256, 128), (128, 64), (64, 64), (64, 64), (64, 64)))
    + 3 * (9 * 64 * 64 + 64) + (9 * 32 * 256 + 256) + (9 * 64 * 3 + 3)
)  # fmt: skip
FAMILIES = {
    "taesd": (TAESD, Config(WIDTHS, WIDTHS[::-1], 5)), "taef2": (TAEF2, Config(WIDTHS, WIDTHS, 6, pooled=True)),
    "taesana": (TAESANA, Config((4, *WIDTHS), (*WIDTHS, 12, 8), 5, deep=True)),
}  # fmt: skip


def made(family, seed=0):
    architecture, config = FAMILIES[family]
    return random_checkpoint(config, seed, architecture).tensors


def loaded(tensors, precision="fp32"):
    return load(Checkpoint(dict(tensors), {}), precision, "cpu")


def without_scale(tensors, half=""):
    return {n: t for n, t in tensors.items() if n.startswith(half) and n not in (SCALE, SHIFT)}


@pytest.mark.parametrize("family", FAMILIES)
def test_published_widths_and_names(family):
    architecture, config = FAMILIES[family]
    with torch.device("meta"):
        model = architecture.build(architecture.published.config)
    halves = [sum(p.numel() for p in half.parameters()) for half in (model.encoder, model.decoder)]
    published = {
        "taesd": [1_222_532, 1_222_531], "taef2": [1_338_528, 1_338_499], "taesana": [1_256_288, SANA],
    }  # fmt: skip
    assert halves == published[family]
    tensors = made(family)
    assert detect(tensors) is architecture and loaded(tensors).model.config == config
    assert by_file(f"{family}_decoder.safetensors") is architecture
    for name in ("taesdxl_decoder", "taesd3_encoder", "taef1_decoder"):
        assert by_file(f"{name}.safetensors") is TAESD


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_do_not_depend_on_those_beside_them(family, noise):
    vae = loaded(made(family))
    z = noise(3, vae.latent_channels, 3, 4)
    frames = vae.decode(z)
    assert frames.shape == (3, 1, 3 * vae.spatial, 4 * vae.spatial, 3)
    assert torch.equal(vae.decode(z, chunk=1), frames) and torch.equal(vae.decode(z[1:2]), frames[1:2])
    assert vae.last_report.plan.startswith("plain torch")
    pictures = frames[:, 0]
    assert torch.equal(vae.encode(pictures[2:3]), vae.encode(pictures)[2:3])
    assert torch.equal(vae.encode(torch.nn.functional.pad(pictures, (0, 0, 0, 5, 0, 3))), vae.encode(pictures))


def test_latents_are_scaled(noise):
    tensors = made("taesd")
    plain, z = loaded(tensors), noise(1, 5, 2, 3)
    other = loaded(tensors | {SCALE: torch.tensor(0.5), SHIFT: torch.tensor(0.25)})
    assert torch.equal(other.decode(z / 0.5 + 0.25), plain.decode(z))
    pictures = plain.decode(z)[:, 0]
    close(other.encode(pictures), plain.encode(pictures) / 0.5 + 0.25, 1e-6)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_scale_stays_in_fp32(precision):
    vae = loaded(made("taesd") | {SCALE: torch.tensor(0.18215)}, precision)
    assert vae.model.vae_scale.dtype == torch.float32 and float(vae.model.vae_scale) == pytest.approx(0.18215, rel=1e-6)
    assert vae.model.decoder.get_submodule("19").weight.dtype == vae.dtype


def test_the_norm_of_a_pool_keeps_tiles_after_it(noise):
    """Blended tiles divide the picture behind the blocks that see all of it."""
    vae = loaded(made("taef2"))
    z = noise(1, vae.latent_channels, 10, 12)
    whole, tiled = vae.decode(z), vae.decode(z, tiling="blended", tile=128, overlap=64)
    assert "blended tiles" in vae.last_report.plan
    assert (tiled - whole).square().mean().sqrt() < 0.05 * whole.std()


@pytest.mark.parametrize("family", FAMILIES)
def test_no_kernels_and_a_line_why(family):
    architecture, _ = FAMILIES[family]
    for program in architecture.programs(architecture.published.config):
        assert "only plain torch does" in half_not_fused(program, torch.float16)


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_comfyuis_combined_form(family):
    tensors = made(family)
    vae = loaded({n if n in (SCALE, SHIFT) else f"taesd_{n}": t for n, t in tensors.items()})
    state = vae.model.state_dict()
    assert vae.arch == family and vae.can_encode and state.keys() == tensors.keys()
    assert all(torch.equal(state[n], t.float()) for n, t in tensors.items())


@pytest.mark.parametrize(("file", "scale", "shift"), [
    ("taesd_decoder", 0.18215, 0.0), ("TAESDXL-decoder", 0.13025, 0.0), ("taesd3_decoder", 1.5305, 0.0609),
    ("taef1_decoder", 0.3611, 0.1159), ("taesana_decoder", 0.41407, 0.0),
])  # fmt: skip
def test_a_decoder_alone_is_scaled_by_its_name(file, scale, shift, tmp_path):
    family = "taesana" if "sana" in file else "taesd"
    tensors = {n.removeprefix("decoder."): t for n, t in without_scale(made(family), "decoder.").items()}
    save_file(tensors, tmp_path / f"{file}.safetensors")
    vae = load(tmp_path / f"{file}.safetensors", "fp32", "cpu")
    assert (vae.arch, vae.can_encode) == (family, False)
    assert float(vae.model.vae_scale) == pytest.approx(scale) and float(vae.model.vae_shift) == pytest.approx(shift)
    assert set(vae.source.weights(vae.model, torch.float32) if vae.source else vae.model.state_dict()) == {
        SCALE, SHIFT, *(f"decoder.{name}" for name in tensors)
    }  # fmt: skip
    save_file(tensors, tmp_path / "mine.safetensors")
    with pytest.raises(CheckpointError, match=r"mine\.safetensors: the scale of its latents is not in the file"):
        load(tmp_path / "mine.safetensors", device="cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_an_encoder_alone_is_known(family, tmp_path):
    path = tmp_path / f"{family}_encoder.safetensors"
    tensors = {n.removeprefix("encoder."): t for n, t in without_scale(made(family), "encoder.").items()}
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match="the decoder is missing"):
        load(path, device="cpu")
    named = {f"encoder.{n}": t for n, t in tensors.items()}
    architecture, config = encoder_only(Checkpoint(named, {}, path))
    assert (architecture.name, config) == (family, replace(FAMILIES[family][1], decoder_widths=None))


# -- the originals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["taesd", "taef1", "taef2", "taesana"])
def test_outputs_are_the_originals(shared, name):
    """In pictures of 0..1; latents of Flux.2 as the network has them, 32 channels."""
    tensors = load_file(shared / "golden" / "distilled" / f"{name}.safetensors")
    weights = {n[2:]: t.float() for n, t in tensors.items() if n.startswith("w.")}
    if name != "taef2":
        weights |= {SCALE: torch.tensor(1.0), SHIFT: torch.tensor(0.0)}
    vae = loaded(weights)
    with torch.no_grad():
        picture = vae.model.decoder(tensors["in.latent"].float()[:, :, None])[:, :, 0] * 0.5 + 0.5
        moments = vae.model.encoder(tensors["in.picture"].float()[:, :, None] * 2 - 1)
    close(picture, tensors["out.picture"])
    close(vae.model.sample(moments)[:, :, 0], tensors["out.latent"])


def test_trained_weights_bring_a_picture_back(shared):
    """TAEF2's published halves, put together: smooth colours survive 48 values becoming 8."""
    halves = {h: load_file(shared / "golden" / "real" / f"taef2_{h}.safetensors") for h in ("encoder", "decoder")}
    vae = loaded({f"{half}.{n}": t for half, tensors in halves.items() for n, t in tensors.items()})
    assert vae.arch == "taef2" and vae.can_encode and vae.latent_channels == 128
    y, x = torch.meshgrid(torch.linspace(0, 1, 128), torch.linspace(0, 1, 96), indexing="ij")
    picture = torch.stack((x, y, 0.5 + 0.4 * (6 * x).sin() * (5 * y).cos()), -1)[None]
    again = vae.decode(vae.encode(picture))[:, 0]
    assert -10 * (again - picture).square().mean().log10() > 25
