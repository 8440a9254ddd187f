"""ComfyUI's quantised forms: against tensors of its own code, and against codes and scales laid out here one by one."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from zerowaste_vae.engine.checkpoints import read_checkpoint
from zerowaste_vae.engine.checkpoints.safetensors_file import power_of_two
from zerowaste_vae.engine.errors import CheckpointError

from ..families.small import small

N, K = 40, 256
E4M3 = torch.float8_e4m3fn


def told(**facts):
    return torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)


def codes(low, high, *shape):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(5))


def sizes(*shape):
    """Scales that fp8 holds."""
    return (torch.rand(shape, generator=torch.Generator().manual_seed(6)) + 0.5).to(E4M3).float()


def tiled(scales):
    """Scales [N, K / block] in tiles of 128 x 4, each put where cuBLAS looks for it."""
    rows, columns = -(-scales.shape[0] // 128), -(-scales.shape[1] // 4)
    flat = torch.zeros(rows * columns * 512, dtype=scales.dtype)
    for r in range(scales.shape[0]):
        for c in range(scales.shape[1]):
            tile = (r // 128) * columns + c // 4
            flat[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] = scales[r, c]
    return flat.view(rows * 128, columns * 4)


def nibbles(low, high):
    return (low + 16 * high).to(torch.uint8)


def hadamard():
    four = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]) / 2
    return torch.kron(torch.kron(four, four), torch.kron(four, four))


def read(path, tensors):
    save_file({name: t.contiguous() for name, t in tensors.items()}, path / "a.safetensors")
    return read_checkpoint(path / "a.safetensors").tensors


@pytest.mark.parametrize("as_bytes", [True, False])
def test_mxfp8(tmp_path, as_bytes):
    """More than one tile of scales in both directions, and padded rows, which the bias tells of."""
    rows = 160
    weight = torch.zeros(rows, K)
    weight[:150] = codes(-448, 449, 150, K).float().to(E4M3).float()
    exponents = codes(100, 140, rows, K // 32).to(torch.uint8)
    stored = weight.to(E4M3)
    made = read(tmp_path, {
        "a.weight": stored.view(torch.uint8) if as_bytes else stored, "a.weight_scale": tiled(exponents),
        "a.comfy_quant": told(format="mxfp8"), "a.bias": torch.zeros(150),
    })  # fmt: skip
    expected = weight * (2.0 ** (exponents.float() - 127)).repeat_interleave(32, 1)
    assert made.keys() == {"a.weight", "a.bias"} and made["a.weight"].dtype == torch.float32
    assert torch.equal(made["a.weight"], expected[:150])


@pytest.mark.parametrize("as_bytes", [True, False])
def test_nvfp4(tmp_path, as_bytes):
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    code, scales, whole = codes(0, 16, 48, K), sizes(48, K // 16), torch.tensor(0.37)
    scale = tiled(scales).to(E4M3)
    tensors = {
        "a.weight": nibbles(code[:, 1::2], code[:, ::2]), "a.weight_scale_2": whole,
        "a.weight_scale": scale.view(torch.uint8) if as_bytes else scale,
        "a.comfy_quant": told(format="nvfp4"), "a.bias": torch.zeros(N),
    }  # fmt: skip
    signed = values[code % 8] * (1 - 2 * (code // 8))
    expected = (signed * (whole * scales).repeat_interleave(16, 1))[:N]
    assert torch.equal(read(tmp_path, tensors)["a.weight"], expected)
    before = torch.linspace(0.5, 2, 250)
    made = read(tmp_path, {**tensors, "a.pre_quant_scale": before})
    assert made.keys() == {"a.weight", "a.bias"}
    assert torch.equal(made["a.weight"], expected[:, :250] * before)


def test_convrot_w4a4(tmp_path):
    code, scale = codes(-8, 8, N, K), sizes(N)
    tensors = {
        "a.weight": nibbles(code[:, ::2] % 16, code[:, 1::2] % 16).view(torch.int8), "a.weight_scale": scale,
        "a.comfy_quant": told(format="convrot_w4a4"),
    }  # fmt: skip
    assert torch.equal(read(tmp_path, tensors)["a.weight"], code.float() @ hadamard() * scale[:, None])


@pytest.mark.parametrize("with_book", [True, False])
def test_asym_w4a8_int8(tmp_path, with_book):
    code, relative, channel = codes(0, 16, N, K), sizes(N, K // 16) * 16, sizes(N) / 100
    book = torch.linspace(-7.3, 8.9, 16)
    tensors = {
        "a.weight": nibbles(code[:, ::2], code[:, 1::2]).view(torch.int8), "a.weight_s_rel": relative.to(E4M3),
        "a.weight_s_channel": channel, "a.comfy_quant": told(format="asym_w4a8_int8"),
    }  # fmt: skip
    values = book[code] if with_book else code.float() - 8
    whole = (values * relative.repeat_interleave(16, 1)).round().clamp(-127, 127)
    made = read(tmp_path, {**tensors, "a.weight_codebook": book} if with_book else tensors)
    assert whole.abs().max() == 127
    assert torch.equal(made["a.weight"], whole @ hadamard() * channel[:, None])


def test_fp8_in_bytes(tmp_path):
    """With a scale and without one."""
    values = torch.tensor([[448.0, 2.0**-9], [-1.75, 0.0]])
    raw = values.to(E4M3).view(torch.uint8)
    facts = told(format="float8_e4m3fn")
    made = read(tmp_path, {"a.weight": raw, "a.weight_scale": torch.tensor(0.3), "a.comfy_quant": facts,
                           "b.weight": raw.clone(), "b.comfy_quant": facts.clone()})  # fmt: skip
    assert made.keys() == {"a.weight", "b.weight"}
    assert torch.equal(made["a.weight"], values * torch.tensor(0.3)) and torch.equal(made["b.weight"].float(), values)


def test_powers_of_two_are_exact(tmp_path):
    """As bytes and as the type of their own."""
    every = torch.arange(255, dtype=torch.uint8)
    expected = torch.tensor([2.0 ** (e - 127) for e in range(255)])
    assert torch.equal(power_of_two(every), expected)
    assert power_of_two(torch.tensor([255], dtype=torch.uint8)).isnan().all()
    header = json.dumps({"a": {"dtype": "F8_E8M0", "shape": [255], "data_offsets": [0, 255]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(every.tolist()))
    assert torch.equal(read_checkpoint(tmp_path / "a.safetensors").tensors["a"], expected)


MX = {"a.weight": torch.zeros(32, 64, dtype=torch.uint8), "a.comfy_quant": told(format="mxfp8")}
NV = {"a.weight": torch.zeros(16, 32, dtype=torch.uint8), "a.comfy_quant": told(format="nvfp4"),
      "a.weight_scale": torch.zeros(128, 4, dtype=torch.uint8)}  # fmt: skip
W4 = {"a.weight": torch.zeros(2, 192, dtype=torch.int8), "a.comfy_quant": told(format="asym_w4a8_int8")}


@pytest.mark.parametrize("tensors, words", [
    (MX, "a.weight is in the form mxfp8, but its weight_scale is missing"),
    ({**MX, "a.weight_scale": torch.zeros(32, 2, dtype=torch.uint8)}, "its weight_scale has the shape (32, 2)"),
    ({**MX, "a.weight": torch.zeros(32, 40, dtype=torch.uint8)}, "its 40 columns are no blocks of 32"),
    ({**MX, "a.weight_scale": torch.full((128, 4), 255, dtype=torch.uint8)}, "a.weight contains NaN"),
    ({**MX, "a.weight": torch.zeros(32, 64)}, "a.weight is not of the form mxfp8: it is stored as float32 (32, 64)"),
    (NV, "its weight_scale_2 is missing"),
    ({**NV, "a.weight_scale_2": torch.ones(1), "a.pre_quant_scale": torch.ones(65)}, "has 65 values for 64 columns"),
    (W4, "its weight_s_rel is missing"),
    ({**W4, "a.weight_s_rel": torch.zeros(2, 16)}, "asym_w4a8_int8 with codes of 6 bits, which is not supported"),
    ({**W4, "a.weight_s_rel": torch.zeros(2, 24), "a.weight_s_channel": torch.ones(2)}, "in groups of 256 columns"),
    ({"a.weight": torch.zeros(2, 4, dtype=torch.int8), "a.comfy_quant": told(format="awq_w4a16"),
      "a.weight_zeros": torch.zeros(2), "a.weight_scale": torch.zeros(2)}, "a.weight is in the form awq_w4a16"),
    ({"a.weight": torch.zeros(2, 4, dtype=torch.int8), "a.comfy_quant": told(format="int8_tensorwise")},
     "its weight_scale is missing"),
    ({"a.weight": torch.zeros(0, 256, dtype=torch.int8), "a.comfy_quant": told(format="int8_tensorwise", convrot=True)},
     "it is stored as int8 (0, 256)"),
])  # fmt: skip
def test_what_a_form_does_not_have_is_refused(tmp_path, tensors, words):
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, tensors)
    assert str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("bias", [torch.zeros(1), torch.tensor(0.0), torch.zeros(32)])
def test_no_more_rows_are_cut_than_were_padded(tmp_path, bias):
    """A bias of another size is the file's error, which the network's shapes then show."""
    tensors = {**MX, "a.weight_scale": torch.zeros(128, 4, dtype=torch.uint8), "a.bias": bias}
    assert len(read(tmp_path, tensors)["a.weight"]) == (1 if bias.shape == (1,) else 32)
    code = torch.ones(4, 4, dtype=torch.int8)
    tensors = {"a.weight": code, "a.weight_scale": torch.ones(1), "a.comfy_quant": told(format="int8_tensorwise")}
    assert len(read(tmp_path, {**tensors, "a.bias": bias})["a.weight"]) == 4


@pytest.mark.parametrize(("family", "dtype"), [("minimaxh3", torch.float16), ("wan2.1", torch.float32)])
def test_a_network_made_for_fp16_gets_it(tmp_path, family, dtype):
    """Its file needs the memory of 16 bit, and its values are those that ComfyUI computes with."""
    tensors, code = dict(small(family).tensors), codes(-127, 128, 4, 8).to(torch.int8)
    tensors |= {"decoder.a.weight": code, "decoder.a.weight_scale": sizes(4, 1) / 3,
                "decoder.a.comfy_quant": told(format="int8_tensorwise")}  # fmt: skip
    made = read(tmp_path, tensors)["decoder.a.weight"]
    assert made.dtype == dtype and torch.equal(made, (code * (sizes(4, 1) / 3)).to(dtype))


@pytest.mark.parametrize("name", ["quant_formats", "scaled_fp8"])
def test_every_recorded_form_is_the_hosts(shared, name):
    """To the bit where nothing is turned; else fp32's sums over 256 columns in another order: exact ones differ from
    those recorded by 1.1e-5 of the deviation."""
    folder = shared / "golden" / "quantised"
    stored, expected = (load_file(folder / f"{name}{end}.safetensors") for end in ("", ".io"))
    made = read_checkpoint(folder / f"{name}.safetensors").tensors
    layers = [key.removesuffix(".expected") for key in expected if key.endswith(".expected")]
    assert len(layers) == (16 if name == "quant_formats" else 3)
    assert made.keys() == {n for n in stored if n.endswith((".weight", ".bias"))}
    for layer in layers:
        weight, recorded = made[f"{layer}.weight"].float(), expected[f"{layer}.expected"]
        before = stored.get(f"{layer}.pre_quant_scale")
        if before is not None:  # there the input's matter
            recorded = recorded * before
        if "convrot" in layer or "asym" in layer:
            torch.testing.assert_close(weight, recorded, rtol=0, atol=1.5e-5 * float(recorded.std()), msg=layer)
        else:
            assert torch.equal(weight, recorded), layer
        if f"{layer}.y" in expected:  # the host's product, whose inputs are in 4 or 8 bit where it does not say "full"
            difference = expected[f"{layer}.x"] @ weight.T + made[f"{layer}.bias"] - expected[f"{layer}.y"]
            bound = 4e-6 if "full" in layer else 0.5
            assert difference.abs().max() < bound * expected[f"{layer}.y"].std(), layer
