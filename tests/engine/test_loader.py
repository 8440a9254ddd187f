"""From file to VAE: what is accepted, and what each broken file is told."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from zerowaste_vae import Checkpoint, CheckpointError, InputError, demo_vae_path, load
from zerowaste_vae.engine import log
from zerowaste_vae.engine.families import ARCHITECTURES
from zerowaste_vae.engine.loader import encoder_only
from zerowaste_vae.engine.planning.choice import Choices

from .families.small import small


def decoder_only(tensors):
    return {k: v for k, v in tensors.items() if k.startswith("decoder.")}


def resave(path, target, change=lambda tensors: tensors, metadata=None):
    save_file(change(load_file(path)), target, metadata or {"norm_num_groups": "4"})
    return target


def test_attributes(vae, vae_file):
    assert (vae.arch, vae.precision, vae.dtype, vae.device.type) == ("seedvr2", "fp32", torch.float32, "cpu")
    assert (vae.can_encode, vae.can_decode, vae.path) == (True, True, vae_file)
    assert (vae.latent_channels, vae.spatial, vae.temporal, vae.scale) == (16, 8, 4, 0.9152)
    assert vae.to("cpu") is vae


def test_halves_may_differ_in_width(make_vae_file):
    vae = load(make_vae_file(encoder=(8, 8, 16, 24), decoder=(16, 16, 32, 8), groups=8), device="cpu")
    assert vae.decode(vae.encode(torch.rand(1, 16, 16, 3))).shape == (1, 1, 16, 16, 3)


def test_decode_only_file(vae, vae_file, tmp_path, noise):
    path = resave(vae_file, tmp_path / "d.safetensors", decoder_only)
    only = load(path, device="cpu")
    assert not only.can_encode
    z = noise(1, 16, 2, 3, 3)
    assert torch.equal(only.decode(z), vae.decode(z))
    with pytest.raises(InputError, match=r"d\.safetensors holds a decoder only"):
        only.encode(torch.rand(1, 16, 16, 3))
    with pytest.raises(InputError, match="decoder only"):
        only.plan_encode(1, 2, 2)


def test_texts_of_kernels_are_asked_for_at_loading(vae_file, tmp_path, monkeypatch):
    """And again under other options: a run would wait for them. Of components that are there, the decoder's first."""
    asked = []
    monkeypatch.setattr(Choices, "read_ahead", lambda self, halves: asked.append([self._walk.options, *halves]))
    vae = load(vae_file, device="cpu")
    vae.options = vae.options.switched(on=["winograd"])
    assert asked[0][1:] == ["decoder", "encoder"] and asked[-1] == [vae.options, "decoder", "encoder"]
    load(resave(vae_file, tmp_path / "d.safetensors", decoder_only), device="cpu")
    assert asked[-1][1:] == ["decoder"]


def test_incomplete_encoder_is_decode_only(vae_file, tmp_path):
    def drop(tensors):
        del tensors["encoder.conv_out.weight"]
        return tensors

    assert not load(resave(vae_file, tmp_path / "e.safetensors", drop), device="cpu").can_encode


def test_missing_decoder_keys_are_listed(vae_file, tmp_path):
    gone = ("decoder.conv_out.weight", "decoder.up_blocks.1.resnets.2.norm1.bias")
    path = resave(vae_file, tmp_path / "m.safetensors", lambda t: {k: v for k, v in t.items() if k not in gone})
    with pytest.raises(CheckpointError) as error:
        load(path)
    assert all(key in str(error.value) for key in gone)
    assert "2 decoder keys are missing" in str(error.value)
    assert str(path) in str(error.value)


def test_encoder_only_is_refused(vae_file, tmp_path):
    def encoder_only(tensors):
        return {k: v for k, v in tensors.items() if k.startswith("encoder.")}

    path = resave(vae_file, tmp_path / "e.safetensors", encoder_only)
    with pytest.raises(CheckpointError, match="decoder"):
        load(path)


def test_not_a_vae(tmp_path):
    save_file({"model.layers.0.weight": torch.zeros(2, 2)}, tmp_path / "llm.safetensors")
    with pytest.raises(CheckpointError, match=r"llm\.safetensors: not a VAE.*model\.layers\.0\.weight"):
        load(tmp_path / "llm.safetensors")


def test_norm_groups(vae_file, tmp_path, noise):
    path = resave(vae_file, tmp_path / "g.safetensors", metadata={"unrelated": "1"})
    with pytest.raises(CheckpointError, match="norm_groups=N"):
        load(path)
    four, two = (load(path, device="cpu", norm_groups=n) for n in (4, 2))
    z = noise(1, 16, 1, 3, 3)
    assert not torch.allclose(four.decode(z), two.decode(z))
    assert torch.equal(load(vae_file, device="cpu", norm_groups=2).decode(z), two.decode(z))
    with pytest.raises(CheckpointError, match="norm_groups=3"):
        load(path, norm_groups=3)
    with pytest.raises(CheckpointError, match="norm_num_groups='many'"):
        load(resave(vae_file, tmp_path / "h.safetensors", metadata={"norm_num_groups": "many"}))


def test_norm_groups_that_have_no_effect_are_said(caplog, vae_file):
    log._said.clear()
    load(small("wan2.1"), device="cpu", norm_groups=4)
    assert "norm_groups=4 is not used: wan2.1 has no norms of groups" in caplog.text
    log._said.clear()
    caplog.clear()
    load(small("wan2.1"), device="cpu")
    load(vae_file, device="cpu", norm_groups=2)
    assert "norm_groups" not in caplog.text


def test_weights_beyond_fp16_are_refused_there(vae_file, tmp_path):
    def enlarge(tensors):
        tensors["decoder.conv_in.weight"][0, 0, 0, 0, 0] = 1e5
        return tensors

    path = resave(vae_file, tmp_path / "big.safetensors", enlarge)
    with pytest.raises(CheckpointError, match=r"decoder\.conv_in\.weight is beyond the range of torch\.float16"):
        load(path, precision="fp16", device="cpu")
    assert load(path, device="cpu").precision == "fp32"


def test_wrong_shape_is_refused(vae_file, tmp_path):
    def transpose(tensors):
        key = "decoder.up_blocks.3.resnets.0.conv1.weight"
        return {**tensors, key: tensors[key].transpose(0, 1).contiguous()}

    with pytest.raises(CheckpointError, match=r"t\.safetensors"):
        load(resave(vae_file, tmp_path / "t.safetensors", transpose))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"precision": "fp4"}, "precision='fp4'"),
        ({"device": "gpu9"}, "device='gpu9'"),
        ({"device": "cuda:99"}, "device='cuda:99' is not there"),
        ({"device": "meta"}, "device='meta': torch cannot compute there; use cpu, cuda or cuda:N"),
        ({"device": "vulkan"}, "device='vulkan': torch cannot compute there"),
    ],
)
def test_impossible_options(vae_file, options, says):
    with pytest.raises(InputError, match=says):
        load(vae_file, **options)


def test_missing_file():
    with pytest.raises(CheckpointError, match=r"nowhere\.safetensors"):
        load("nowhere.safetensors")


def test_demo_path_is_in_assets():
    assert demo_vae_path().parts[-2:] == ("assets", "demo_vae.safetensors")


@pytest.mark.parametrize(
    "architecture", [a for a in ARCHITECTURES if a.published.config.encoder_widths], ids=lambda a: a.name
)
def test_an_encoder_alone_is_known_for_what_it_is(architecture):
    """The published sizes need no memory here; a decoder's first tensor makes it no encoder alone."""
    config = architecture.published.config
    with torch.device("meta"):
        tensors = dict(architecture.build(config).state_dict())
    tensors |= {name: torch.tensor(values) for name, values in architecture.constants}
    encoder = {key: t for key, t in tensors.items() if not key.startswith("decoder.")}
    found, sizes = encoder_only(Checkpoint(dict(encoder), dict(architecture.published.metadata)))
    assert (found.name, sizes.encoder_widths, sizes.decoder_widths) == (architecture.name, config.encoder_widths, None)
    first = next(key for key in tensors if key.startswith("decoder."))
    assert encoder_only(Checkpoint(encoder | {first: tensors[first]}, {})) is None
    missing = next(key for key in encoder if key.startswith("encoder.") and key.endswith("bias"))
    assert encoder_only(Checkpoint({k: t for k, t in encoder.items() if k != missing}, {})) is None
