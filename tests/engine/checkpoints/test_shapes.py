"""Shapes and names that file formats lose: recorded shapes, merged channels, flat rows, diffusers names."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from zerowaste_vae.engine import load
from zerowaste_vae.engine.checkpoints import Checkpoint, read_checkpoint, restore_shapes
from zerowaste_vae.engine.checkpoints.gguf_types import types
from zerowaste_vae.engine.checkpoints.shapes import split_merged_convs
from zerowaste_vae.engine.errors import CheckpointError
from zerowaste_vae.engine.families import find_key_set, native_names
from zerowaste_vae.engine.families.wan import DIFFUSERS

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

Q = gguf.GGMLQuantizationType


class Anonymous(gguf.GGUFWriter):
    """Writes no `general.architecture`."""

    def add_architecture(self) -> None:
        pass


def write(path, tensors: dict, architecture: str | None = "pig", arrays: dict | None = None):
    """Write with the gguf package, as the converters in the field do. tensors: name -> (array, type or None)."""
    writer = (gguf.GGUFWriter if architecture else Anonymous)(path, architecture or "")
    for key, items in (arrays or {}).items():
        writer.add_array(key, items)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_equal(tensors: dict, expected: dict) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].shape == tensor.shape, name
        assert torch.equal(tensors[name].float(), tensor.float()), name


def test_native_five_dimensions(tmp_path, wan_weights):
    path = write(tmp_path / "a.gguf", {n: (t.numpy(), None) for n, t in wan_weights.items()})
    assert_equal(read_checkpoint(path).tensors, wan_weights)


def test_byte_shape_recorded_for_bf16(tmp_path, wan_weights):
    """One converter records the shape after quantising: for BF16 the last size is doubled."""
    weights = {n: t.bfloat16() for n, t in wan_weights.items()}
    raw = {n: gguf.quants.quantize(t.float().numpy(), Q.BF16) for n, t in weights.items()}
    path = write(
        tmp_path / "a.gguf",
        {n: (array, Q.BF16) for n, array in raw.items()},
        None,
        {f"comfy.gguf.orig_shape.{n}": list(array.shape) for n, array in raw.items()},
    )
    assert_equal(read_checkpoint(path).tensors, weights)


def test_merged_channels_without_metadata(tmp_path, wan_weights):
    """stable-diffusion.cpp: (O, I, t, h, w) becomes (O*I, t, h, w), with `vae.` before the names and no keys at all."""
    merged = {"vae." + n: (t.flatten(0, 1) if t.ndim == 5 else t).numpy() for n, t in wan_weights.items()}
    path = write(tmp_path / "a.gguf", {n: (a, None) for n, a in merged.items()}, None)
    assert_equal(read_checkpoint(path).tensors, wan_weights)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_flat_rows_with_recorded_shape(tmp_path, kind):
    weight = torch.randn(16, 16, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    raw = gguf.quants.quantize(weight.reshape(-1, 256).numpy(), Q[kind])
    path = write(
        tmp_path / "a.gguf", {"a.weight": (raw, Q[kind])}, arrays={"comfy.gguf.orig_shape.a.weight": [16, 16, 3, 3, 3]}
    )
    read = read_checkpoint(path).tensors["a.weight"]
    assert read.dtype == torch.float32 and read.shape == weight.shape
    assert torch.equal(read.reshape(-1, 256), torch.from_numpy(gguf.quants.dequantize(raw, Q[kind])))


def test_every_block_type_the_package_decodes(tmp_path, craft):
    """Random bytes of each type, through our long rows and through the package's own: the same values.

    The tensor is longer than one decoding step (2^16 values) and does not end at one.
    """
    rng = np.random.default_rng(0)
    checked = 0
    for kind in types().values():
        if kind.dtype is not None:
            continue
        blocks = (2**17 + 2**15) // kind.block
        raw = rng.integers(0, 256, (blocks, kind.block_bytes), dtype=np.uint8)
        with np.errstate(all="ignore"):
            try:
                values = gguf.quants.dequantize(raw, Q[kind.name])
            except NotImplementedError:
                continue
        # Bytes that happen to spell a NaN or infinite scale would be refused.
        raw = raw[np.isfinite(values).all(1) & (np.abs(values).max(1) < 1e30)]
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(raw, Q[kind.name])
        assert values.size > 2**17
        path = tmp_path / "a.gguf"
        path.write_bytes(craft.build([], [craft.tensor("a", (raw.shape[0] * kind.block,), kind.id)], raw.tobytes()))
        assert np.array_equal(read_checkpoint(path).tensors["a"].numpy(), values.reshape(-1)), kind.name
        checked += 1
    assert checked >= 20


def checkpoint(**tensors) -> Checkpoint:
    return Checkpoint({n.replace("_", "."): t for n, t in tensors.items()})


W = (8, 16, 3, 3, 3)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (W, W),
        ((128, 3, 3, 3), W),  # merged channels
        ((3456,), W),  # flat
        ((27, 256), (16, 16, 3, 3, 3)),  # flat rows
        ((1,), ()),  # a scalar as ggml writes it
        ((8,), (8, 1, 1, 1)),  # a norm
        ((8, 16), (8, 16, 1, 1, 1)),  # a linear layer for a 1x1x1 convolution
        ((128, 1, 1, 1), (8, 16, 1, 1, 1)),
    ],
)
def test_restore_shapes(stored, expected):
    tensor = torch.arange(float(torch.Size(stored).numel())).reshape(stored)
    original = checkpoint(a_weight=tensor, other=torch.ones(3))
    restored = restore_shapes(original, {"a.weight": expected, "absent": (1,)})
    assert restored.tensors["a.weight"].shape == expected
    assert torch.equal(restored.tensors["a.weight"].flatten(), tensor.flatten())
    assert restored.tensors["other"].shape == (3,) and original.tensors["a.weight"].shape == stored


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ((16, 8, 3, 3, 3), W),  # transposed channels
        ((3, 3, 3, 16, 8), W),  # channels last
        ((16, 8), (8, 16)),  # transposed linear layer
        ((512, 256), (256, 512, 1, 1, 1)),  # transposed 1x1x1 that looks like flat rows
        ((27, 256), (27 * 256,)),  # rows where no convolution is
        ((8, 16, 3, 3), W),  # other element count
        ((64, 54), W),  # arbitrary reshape
    ],
)
def test_shapes_no_writer_makes_are_refused(stored, expected):
    with pytest.raises(CheckpointError, match=r"a\.weight has the shape"):
        restore_shapes(checkpoint(a_weight=torch.zeros(stored)), {"a.weight": expected})


def test_flat_rows_without_a_record_load(tmp_path, vae_file, vae, craft):
    """Only the architecture can tell: the loader reshapes, and the decode is the original's."""
    weights = load_file(vae_file)
    flat = {n: t.reshape(-1, 256) if t.ndim == 5 and t.numel() % 256 == 0 else t for n, t in weights.items()}
    assert sum(flat[n].ndim != t.ndim for n, t in weights.items()) > 20
    path = write(tmp_path / "a.gguf", {n: (t.numpy(), None) for n, t in flat.items()}, arrays={})
    z = torch.randn(1, 16, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(load(path, device="cpu", norm_groups=4).decode_raw(z), vae.decode_raw(z))


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("decoder.up_blocks.2.upsamplers.0.upscale_conv.weight", "seedvr2"),
        ("decoder.middle.0.residual.0.gamma", "wan2.1"),
        ("decoder.upsamples.0.upsamples.0.residual.2.weight", "wan2.2"),
        ("decoder.up_blocks.0.res_blocks.0.conv1.conv.weight", "ltx"),
        ("decoder.mid.block_1.conv1.conv.weight", "hunyuanvideo"),
        ("decoder.mid.attn_1.norm.gamma", "hunyuanvideo1.5"),
        ("decoder.unpatcher3d.wavelets", "cosmos"),
        ("decoder.blocks.2.blocks.3.stack.5.weight", "mochi"),
        ("decoder.22.bias", "taehv-other"),
    ],
)
def test_known_key_sets(key, name):
    assert find_key_set([key, "x"]).name == name
    assert find_key_set(["x." + key]) is None


def test_hunyuanvideos_versions_are_told_apart():
    keys = ["decoder.mid.block_1.conv1.conv.weight", "decoder.mid.attn_1.norm.gamma"]
    assert find_key_set(keys).name == "hunyuanvideo1.5"
    # Names that LTX and CogVideoX have too are not enough.
    assert find_key_set(["decoder.conv_in.conv.weight", "decoder.conv_out.conv.weight"]) is None


PARTS = {"residual.0": "norm1", "residual.2": "conv1", "residual.3": "norm2", "residual.6": "conv2"}


def wan_to_diffusers(name: str) -> str:
    """The published conversion's direction (original -> diffusers), by its rules."""
    for old, new in (("conv1", "quant_conv"), ("conv2", "post_quant_conv")):
        if re.match(rf"{old}\.", name):
            return name.replace(old, new, 1)
    half, rest = name.split(".", 1)
    for old, new in (("conv1.", "conv_in."), ("head.0.", "norm_out."), ("head.2.", "conv_out.")):
        if rest.startswith(old):
            return f"{half}.{rest.replace(old, new, 1)}"
    for old, new in PARTS.items():
        rest = rest.replace(f".{old}.", f".{new}.")
    rest = rest.replace(".shortcut.", ".conv_shortcut.")
    rest = rest.replace("middle.0.", "mid_block.resnets.0.").replace("middle.2.", "mid_block.resnets.1.")
    rest = rest.replace("middle.1.", "mid_block.attentions.0.")
    if m := re.match(r"(up|down)samples\.(\d+)\.\1samples\.(\d+)\.(.*)", rest):  # Wan 2.2
        resample = m[4].startswith(("resample", "time_conv"))
        return f"{half}.{m[1]}_blocks.{m[2]}." + (f"{m[1]}sampler.{m[4]}" if resample else f"resnets.{m[3]}.{m[4]}")
    rest = rest.replace("downsamples.", "down_blocks.")
    if m := re.match(r"upsamples\.(\d+)\.(.*)", rest):
        level, index = divmod(int(m[1]), 4)
        rest = f"up_blocks.{level}." + (f"upsamplers.0.{m[2]}" if index == 3 else f"resnets.{index}.{m[2]}")
    return f"{half}.{rest}"


@pytest.mark.parametrize(
    ("version", "example"),
    [
        ("2.1", "decoder.up_blocks.1.resnets.0.conv_shortcut.weight"),
        ("2.2", "decoder.up_blocks.1.upsampler.time_conv.weight"),
    ],
)
def test_wan_diffusers_names(tmp_path, shared, version, example):
    weights = load_file(shared / "golden" / "other" / f"wan{version}.weights.safetensors")
    path = tmp_path / "a.safetensors"
    renamed = {wan_to_diffusers(n): t for n, t in weights.items()}
    assert len(renamed) == len(weights) and example in renamed
    save_file(renamed, path)
    assert_equal(read_checkpoint(path).tensors, weights)
    assert read_checkpoint(path, native_names=False).tensors.keys() == renamed.keys()


def test_diffusers_names_small():
    pairs = {
        "decoder.mid_block.resnets.0.norm1.gamma": "decoder.middle.0.residual.0.gamma",
        "decoder.mid_block.attentions.0.to_qkv.weight": "decoder.middle.1.to_qkv.weight",
        "decoder.up_blocks.1.resnets.0.conv_shortcut.bias": "decoder.upsamples.4.shortcut.bias",
        "decoder.up_blocks.2.upsamplers.0.resample.1.weight": "decoder.upsamples.11.resample.1.weight",
        "encoder.down_blocks.5.time_conv.weight": "encoder.downsamples.5.time_conv.weight",
        "encoder.down_blocks.4.conv2.weight": "encoder.downsamples.4.residual.6.weight",
        "decoder.norm_out.gamma": "decoder.head.0.gamma",
        "post_quant_conv.weight": "conv2.weight",
    }
    assert native_names(pairs, DIFFUSERS) == pairs
    nested = {
        "decoder.mid_block.resnets.1.conv2.weight": "decoder.middle.2.residual.6.weight",
        "decoder.up_blocks.2.resnets.1.norm2.gamma": "decoder.upsamples.2.upsamples.1.residual.3.gamma",
        "decoder.up_blocks.0.upsampler.time_conv.bias": "decoder.upsamples.0.upsamples.3.time_conv.bias",
        "encoder.down_blocks.1.resnets.0.conv1.weight": "encoder.downsamples.1.downsamples.0.residual.2.weight",
        "encoder.down_blocks.1.downsampler.resample.1.bias": "encoder.downsamples.1.downsamples.2.resample.1.bias",
    }
    assert native_names(nested, DIFFUSERS) == nested


def test_a_name_without_a_counterpart_stays():
    names = ["decoder.mid_block.resnets.0.norm1.gamma", "decoder.something.else", "decoder.middle.0.residual.0.gamma"]
    assert native_names(names, DIFFUSERS) == {names[0]: names[2], names[1]: names[1]}


def test_old_attention_names_of_seedvr2_load(tmp_path, vae_file, vae):
    old = {".to_q.": ".query.", ".to_k.": ".key.", ".to_v.": ".value.", ".to_out.0.": ".proj_attn."}
    weights = load_file(vae_file)
    for new, name in old.items():
        weights = {n.replace(new, name): t for n, t in weights.items()}
    save_file(weights, tmp_path / "a.safetensors")
    z = torch.randn(1, 16, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(load(tmp_path / "a.safetensors", device="cpu", norm_groups=4).decode_raw(z), vae.decode_raw(z))


def test_a_bias_of_nothing_splits_nothing():
    assert split_merged_convs({"a.weight": (4, 1, 1, 1), "a.bias": (0,)}) == {}
    assert split_merged_convs({"a.weight": (4, 1, 1, 1), "a.bias": (2,)}) == {"a.weight": (2, 2, 1, 1, 1)}
