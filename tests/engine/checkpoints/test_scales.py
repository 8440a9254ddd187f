"""fp8 with scales, and ComfyUI's int8 with its description beside the weight or in the metadata."""

import json

import pytest
import torch
from safetensors.torch import save_file
from zerowaste_vae.engine.checkpoints import quantised, read_checkpoint

from .test_forms import told
from .test_reader import refusal


def test_fp8_is_exact_and_scales_are_applied(tmp_path):
    values = torch.tensor([[448.0, 2.0**-9], [-1.75, 0.0]])
    tensors = {
        "a.weight": values.to(torch.float8_e4m3fn),
        "b.weight": values.to(torch.float8_e5m2),
        "b.weight_scale": torch.tensor([2.0, 4.0]),
        "c.weight": values.to(torch.float8_e4m3fn),
        "c.scale_weight": torch.tensor(0.25),
        "c.scale_input": torch.tensor(3.0),
        "scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn),
    }
    path = tmp_path / "a.safetensors"
    save_file(tensors, path)
    read = read_checkpoint(path).tensors
    assert read.keys() == {"a.weight", "b.weight", "c.weight"}
    assert read["a.weight"].dtype == torch.float16 and torch.equal(read["a.weight"].float(), values)
    by_row = values.to(torch.float8_e5m2).float() * torch.tensor([[2.0], [4.0]])
    assert torch.equal(read["b.weight"], by_row) and torch.equal(read["c.weight"], values * 0.25)


@pytest.mark.parametrize("group", [4, 64, None])
def test_comfyui_int8(tmp_path, group):
    """Columns are rotated in groups before they are rounded: 256 where the file does not say of how many."""
    size = group or 256
    turn = four = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]) / 2
    while len(turn) < size:
        turn = torch.kron(turn, four)
    weight = torch.randn(6, 2 * size, generator=torch.Generator().manual_seed(1)) * torch.logspace(-2, 1, 6)[:, None]
    rotated = (weight.view(6, 2, size) @ turn.T).view(6, -1)
    scale = rotated.abs().amax(1, keepdim=True) / 127
    groups = {} if group is None else {"convrot_groupsize": group}
    plain = (weight / scale).round().clamp(-127, 127).to(torch.int8)
    tensors = {
        "a.weight": (rotated / scale).round().to(torch.int8),
        "a.weight_scale": scale,
        "a.comfy_quant": told(format="int8_tensorwise", convrot=True, **groups),
        "a.bias": torch.ones(6),
        "b.weight": plain,
        "b.weight_scale": scale,
        "b.comfy_quant": told(format="int8_tensorwise"),
        "c.weight": (rotated / scale).round().to(torch.int8),
        "c.weight_scale": scale,
        "c.comfy_quant": told(format="int8_tensorwise", params={"convrot": True, **groups}),
    }
    path = tmp_path / "a.safetensors"
    save_file({name: t.clone() for name, t in tensors.items()}, path)
    read = read_checkpoint(path).tensors
    assert read.keys() == {"a.weight", "a.bias", "b.weight", "c.weight"}
    error = (read["a.weight"].float() - weight).norm(dim=1) / weight.norm(dim=1)
    assert read["a.weight"].dtype == torch.float32 and error.max() < 0.01
    assert torch.equal(read["c.weight"], read["a.weight"])
    assert torch.equal(read["b.weight"], plain * scale)


@pytest.mark.parametrize("facts, words", [
    ({"format": "awq_w4a16"}, "a.weight is in the form awq_w4a16, which is not supported"),
    ({"format": ["int8_tensorwise"]}, "which is not supported"),
    ({"form": "int8_tensorwise"}, "a.weight is quantised in a way"),
    ({"format": "int8_tensorwise", "convrot": True}, "groups of 256 columns"),
    ({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 8}, "groups of 8 columns"),
    ({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 4.0}, "groups of 4.0 columns"),
    ({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": [4]}, "groups of"),
])  # fmt: skip
def test_other_int8_is_refused(tmp_path, facts, words):
    path, tensors = tmp_path / "a.safetensors", {"a.weight": torch.ones(2, 8, dtype=torch.int8)}
    save_file({**tensors, "a.weight_scale": torch.ones(2, 1), "a.comfy_quant": told(**facts)}, path)
    assert words in refusal(path)


@pytest.mark.parametrize("damaged", [torch.tensor([91, 93]), torch.tensor([91] * 100_000), torch.ones(2) * 5])
def test_unreadable_int8_description(tmp_path, damaged):
    path = tmp_path / "a.safetensors"
    damaged = damaged if damaged.is_floating_point() else damaged.to(torch.uint8)
    tensors = {"a.weight": torch.ones(2, 8, dtype=torch.int8), "a.weight_scale": torch.ones(2, 1)}
    save_file({**tensors, "a.comfy_quant": damaged}, path)
    assert "how a.weight is quantised cannot be read" in refusal(path)


def test_int8_described_by_metadata(tmp_path):
    """By the file's own names, whatever they stand behind."""
    codes, scale = torch.tensor([[3, -7], [127, 1]], dtype=torch.int8), torch.tensor([[0.5], [2.0]])
    facts = {"format_version": "1.0", "layers": {"vae.a": {"format": "int8_tensorwise"}}}
    vae = {"vae.decoder.22.bias": torch.ones(2), "vae.a.weight": codes, "vae.a.weight_scale": scale}
    path = tmp_path / "a.safetensors"
    save_file(vae, path, {"_quantization_metadata": json.dumps(facts)})
    assert torch.equal(read_checkpoint(path).tensors["a.weight"], codes * scale)
    for damaged in ("[", "[]", '{"layers": 3}', '{"layers": {"vae.a": 3}}'):
        save_file(vae, path, {"_quantization_metadata": damaged})
        assert "a.weight is quantised in a way" in refusal(path)


@pytest.mark.parametrize("name", [
    "weight_scale_inv", "weight_quantizer._scale", "weights_scaling_factor", "scale", "weight.scale", "scales",
    "weight_quantizer._amax", "input_quantizer._amax",
])  # fmt: skip
def test_scales_under_other_programs_names_are_refused(tmp_path, name):
    """Whether such a tensor multiplies, divides or means something else is for that program to know."""
    path = tmp_path / "a.safetensors"
    weight = torch.ones(4, 4).to(torch.float8_e4m3fn)
    # Modules inside one with a weight of its own are no scales of it.
    tensors = {"a.conv.weight": weight, "a.conv.bias": torch.ones(4), "a.conv.mix.weight": torch.ones(3)}
    save_file(tensors, path)
    assert read_checkpoint(path).tensors.keys() == tensors.keys()
    save_file(tensors | {f"a.conv.{name}": torch.ones(1)}, path)
    assert f"a.conv.{name} lies beside the 8-bit weight a.conv.weight" in refusal(path)


def test_names_tell_of_codes():
    """In a file and in a network's state; H3's own scales are weights."""
    for name in ("a.comfy_quant", "a.weight_scale", "a.scale_weight", "a.weight_s_rel"):
        assert quantised(["a.weight", name])
    assert not quantised(["a.weight", "a.bias", "decoder.transformer_blocks.0.scale1", "weight_scale_a"])
