"""Files that lack a tensor, or hold one of no use, are refused in one line, or lose their encoder and say so: no
smaller network is made of what is left."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from zerowaste_vae.engine.checkpoints import Checkpoint, read_checkpoint
from zerowaste_vae.engine.errors import CheckpointError, InputError
from zerowaste_vae.engine.extras.output.writing import write_tensors
from zerowaste_vae.engine.families import ARCHITECTURES
from zerowaste_vae.engine.loader import load

from .small import SMALL, small


def told(checkpoint: Checkpoint) -> str:
    """Return the messages of loading; the empty text where all of the file is used."""
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("zerowaste_vae.engine.log.once", lines.append)
        try:
            load(checkpoint, "fp32", "cpu")
        except CheckpointError as error:
            lines.append(str(error))
    assert all(len(line.splitlines()) == 1 for line in lines)
    return "".join(lines)


@pytest.mark.parametrize("name", SMALL)
def test_a_missing_bias_is_never_passed_over(name):
    """Sizes are read from biases: without one, the rest can look like a smaller network."""
    whole = small(name)
    assert told(Checkpoint(dict(whole.tensors), whole.metadata)) == ""
    ends = (".bias", ".scale1", "_scale1", "multiplier")
    passed_over = [
        gone for gone in whole.tensors if gone.endswith(ends)
        and not told(Checkpoint({n: t for n, t in whole.tensors.items() if n != gone}, whole.metadata))
    ]  # fmt: skip
    assert not passed_over


@pytest.mark.parametrize("shape", [(), (0,), (1 << 20, 0)], ids=["scalar", "empty", "no columns"])
@pytest.mark.parametrize("name", SMALL)
def test_biases_of_no_length_are_named(name, shape, recwarn):
    whole = small(name)
    sizing = [n for n in whole.tensors if n.startswith("decoder.") and n.endswith(".bias") and "norm" not in n]
    for damaged in sizing[:: max(1, len(sizing) // 6)]:
        said = told(Checkpoint({**whole.tensors, damaged: torch.zeros(shape)}, whole.metadata))
        assert said and ("shape" in said or "width" in said), damaged
    assert not [w for w in recwarn if "zero-element" in str(w.message)]


@pytest.mark.parametrize("name", SMALL)
def test_wrong_sizes(name):
    """Tensors as a scalar, as nothing, and as one number: each an InputError or sizes that can be built."""
    architecture = next(a for a in ARCHITECTURES if a.name == name)
    shapes = {key: tuple(t.shape) for key, t in small(name).tensors.items()}
    # What sizes are read from most of all.
    first = [key for key in shapes if key.endswith((".bias", "tokens", "_mean")) and "norm" not in key]
    weights = [key for key in shapes if "conv_in" in key or "quant" in key or ".0.weight" in key]
    for key in (*first[:: max(1, len(first) // 4)], *weights[:: max(1, len(weights) // 2)]):
        for shape in ((), (0,), (1,), (1 << 40, 0), (1,) * 6):
            try:
                with torch.device("meta"):
                    architecture.build(architecture.config_of({**shapes, key: shape}, {}, 1))
            except InputError as error:
                assert len(str(error).splitlines()) == 1


def test_numbers_beyond_any_network_make_none(tmp_path):
    """A name alone must not make a row of a billion blocks, nor a number that Python refuses to read."""
    for row in ("decoder.up_blocks.0.res_blocks", "decoder.up_blocks"):
        for number in ("999999999", "9" * 5000):
            whole = small("ltx")
            whole.tensors[f"{row}.{number}.conv1.conv.bias"] = torch.zeros(16)
            assert f"would leave out 1 of its tensors: {row}.{number[:9]}" in told(whole)
    names = ("decoder.up_blocks.0.upsamplers.0.conv.weight", f"decoder.up_blocks.{'9' * 5000}.resnets.0.conv1.weight")
    for key in (names[0], "decoder.mid_block.resnets.0.norm1.gamma"):
        path = tmp_path / "long.safetensors"
        write_tensors(path, {key: torch.zeros(4), names[1]: torch.zeros(4)})
        assert len(read_checkpoint(path).tensors) == 2


@pytest.mark.parametrize(
    "vae",
    [
        {"decode_timestep": float("nan")}, {"decode_noise_scale": "much"}, {"decoder_blocks": 7},
        {"decoder_blocks": [[]]}, {"decoder_blocks": [[3, 4]] * 9}, {"spatial_padding_mode": []}, {"blocks": "abc"},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_descriptions(vae):
    """Descriptions that say nothing usable are refused."""
    whole = small("ltx")
    whole.metadata["config"] = json.dumps({"vae": vae})
    assert "metadata" in (said := told(whole)) or "decoder" in said


def test_a_lost_encoder_is_told(caplog):
    whole = small("flux")
    del whole.tensors["encoder.down.1.block.0.conv1.bias"]
    with caplog.at_level(logging.INFO):
        assert "encoder incomplete" in told(whole)
