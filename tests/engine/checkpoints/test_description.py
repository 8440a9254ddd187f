"""The description in the folder of a file: norm groups and activation, if it is about this file."""

import json

import pytest
import torch
from safetensors.torch import save_file
from zerowaste_vae import CheckpointError, load, read_checkpoint
from zerowaste_vae.engine.extras.convert import convert_checkpoint
from zerowaste_vae.engine.loader import encoder_only
from zerowaste_vae.engine.network.architecture import BESIDE

from ..families.small import WIDTHS, small

SAID = {"_class_name": "AutoencoderKL", "norm_num_groups": 8, "act_fn": "silu", "block_out_channels": list(WIDTHS)}


@pytest.fixture
def file(tmp_path):
    """Its own metadata name no groups."""
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    save_file(small("flux").tensors, path)
    return path


def describe(file, **said):
    (file.parent / BESIDE).write_text(json.dumps(SAID | said))


def test_groups_are_read(file, noise):
    with pytest.raises(CheckpointError, match="norm_groups=N"):
        load(file, device="cpu")
    describe(file)
    z = noise(1, 16, 1, 3, 3)
    eight, four = (load(file, device="cpu", norm_groups=n).decode_raw(z) for n in (8, 4))
    assert torch.equal(load(file, device="cpu").decode_raw(z), eight) and not torch.equal(eight, four)
    describe(file, norm_num_groups=4)
    assert torch.equal(load(file, device="cpu").decode_raw(z), four)
    assert read_checkpoint(file, shapes_only=True).metadata[BESIDE]


def test_the_files_own_metadata_come_first(file, noise):
    describe(file)
    save_file(small("flux").tensors, file, {"norm_num_groups": "4"})
    assert load(file, device="cpu").model.config.norm_groups == 4


def test_it_goes_with_a_converted_file(file, tmp_path, noise):
    describe(file)
    (tmp_path / "elsewhere").mkdir()
    convert_checkpoint(file, tmp_path / "elsewhere" / "a.gguf", "f16")
    z = noise(1, 16, 1, 3, 3)
    converted = load(tmp_path / "elsewhere" / "a.gguf", device="cpu")
    assert torch.equal(converted.decode_raw(z), load(file, device="cpu").decode_raw(z))


def test_an_encoder_alone(file):
    describe(file)
    tensors = {name: t for name, t in small("flux").tensors.items() if name.startswith("encoder.")}
    save_file(tensors, file)
    assert encoder_only(read_checkpoint(file))[1].norm_groups == 8


@pytest.mark.parametrize("act", ["mish", "relu", "gelu", None])
def test_other_activations_are_refused(file, act):
    describe(file, act_fn=act)
    with pytest.raises(CheckpointError, match=rf"config\.json beside it says act_fn={act!r}"):
        load(file, device="cpu", norm_groups=8)
    describe(file, act_fn="swish")
    assert load(file, device="cpu").model.config.norm_groups == 8


def test_groups_that_are_no_number(file):
    describe(file, norm_num_groups="many")
    with pytest.raises(CheckpointError, match="norm_num_groups='many', which is no number"):
        load(file, device="cpu")


@pytest.mark.parametrize("said", [
    {"block_out_channels": [128, 256, 512, 512], "act_fn": "mish"}, {"_class_name": "UNet2DConditionModel"},
    {"_class_name": 3},
], ids=str)  # fmt: skip
def test_descriptions_of_other_networks_do_not_count(file, said):
    describe(file, **said)
    with pytest.raises(CheckpointError, match="norm_groups=N"):
        load(file, device="cpu")
    assert load(file, device="cpu", norm_groups=4).model.config.norm_groups == 4


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b"{}" + b" " * (1 << 19)])
def test_unreadable_descriptions_do_not_count(file, text):
    (file.parent / BESIDE).write_bytes(text)
    assert load(file, device="cpu", norm_groups=4).model.config.norm_groups == 4


def test_a_folder_of_that_name(file):
    (file.parent / BESIDE).mkdir()
    assert load(file, device="cpu", norm_groups=4).model.config.norm_groups == 4
