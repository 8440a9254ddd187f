"""The whole network against the original: keys, full width from its seed, and every recorded reduced-width case."""

import functools
import json

import pytest
import torch
from safetensors.torch import load_file
from zerowaste_vae.engine.errors import InputError
from zerowaste_vae.engine.families.seedvr2 import ARCHITECTURE, Config
from zerowaste_vae.engine.network.plain import Network
from zerowaste_vae.engine.network.state import State

FULL = Config((128, 256, 512, 512), (128, 256, 512, 512))


def by_case(tensors):
    cases = {}
    for key, tensor in tensors.items():
        case, _, what = key.rpartition(".")
        cases.setdefault(case, {})[what] = tensor
    return cases


def close(actual, expected, atol):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def close_to_scale(actual, expected, atol):
    """The bound is that of outputs, which are of order one; stages between have deviations of up to 8."""
    close(actual, expected, atol * max(1.0, expected.std().item()))


def test_keys_and_shapes_are_the_published_ones(fixtures):
    expected = json.loads((fixtures / "seedvr2" / "keys.json").read_text())
    with torch.device("meta"):
        model = ARCHITECTURE.build(FULL)
    assert {k: list(v.shape) for k, v in model.state_dict().items()} == expected
    assert len(expected) == 250
    assert sum(p.numel() for p in model.parameters()) == 250_648_227


@torch.no_grad()
def test_full_width_equals_original(fixtures, seed_model, atol):
    cases = by_case(load_file(fixtures / "seedvr2" / "fullwidth_io.safetensors"))
    model = ARCHITECTURE.build(FULL).requires_grad_(False)
    seed_model(model, 1234)
    probe = model.get_parameter("decoder.conv_norm_out.weight")[:4]
    # The generator's logarithms and cosines may round the other way on another CPU.
    close(probe, torch.tensor([1.4071482419967651, 1.2282196283340454, 1.1367831230163574, 0.6498697996139526]), 2e-7)
    for name in ("T1", "T3"):
        close(model.decoder(cases[name]["z"]), cases[name]["unsliced"], atol)
    for name in ("F1", "F5"):
        close(model.encoder(cases[name]["x"]), cases[name]["moments"], atol)
    state = State()
    sliced = [model.decoder(z, state) for z in cases["T3"]["z"].split([2, 1], 2)]
    close(torch.cat(sliced, 2), cases["T3"]["sliced"], atol)


@pytest.fixture(scope="module")
def reduced(shared):
    golden = shared / "golden" / "seedvr2"
    weights = {}
    for half in ("encoder", "decoder"):
        weights.update(load_file(golden / f"r16_weights_{half}.safetensors"))
    config = Config.from_shapes({k: tuple(v.shape) for k, v in weights.items()}, 8)
    model = ARCHITECTURE.build(config).requires_grad_(False)
    model.load_state_dict({k: v.float() for k, v in weights.items()})
    return model, golden


@torch.no_grad()
def test_every_recorded_decode(reduced, atol):
    model, golden = reduced
    for case in by_case(load_file(golden / "r16_decode.safetensors")).values():
        close(model.decoder(case["z"]), case["unsliced"], atol)
        if "sliced" in case:
            state = State()
            parts = case["z"][:, :, :2], *case["z"][:, :, 2:].split(1, 2)
            close(torch.cat([model.decoder(p, state) for p in parts if p.shape[2]], 2), case["sliced"], atol)


@torch.no_grad()
def test_every_recorded_encode(reduced, atol):
    model, golden = reduced
    for case in by_case(load_file(golden / "r16_encode.safetensors")).values():
        close(model.encoder(case["x"]), case["moments_unsliced"], atol)
        if "moments_sliced" in case:
            state = State()
            parts = case["x"][:, :, :5], *case["x"][:, :, 5:].split(4, 2)
            close(torch.cat([model.encoder(p, state) for p in parts if p.shape[2]], 2), case["moments_sliced"], atol)


@torch.no_grad()
def test_every_stage(reduced, atol):
    model, golden = reduced
    dec, enc = (load_file(golden / f"r16_stages_{half}.safetensors") for half in ("decoder", "encoder"))
    d, e = model.decoder, model.encoder

    def named(half, prefix):
        return functools.partial(half.run, [s for s in half.program.steps if s.name.startswith(prefix)])

    for part, source, result in [
        (d.conv_in, "z", "conv_in"),
        (d.mid_block.resnets[0], "conv_in", "mid.resnets.0"),
        (d.mid_block.attentions[0], "mid.resnets.0", "mid.attentions.0"),
        (d.mid_block.resnets[1], "mid.attentions.0", "mid"),
        (d.low, "z", "up0.resnets"),
        (d.up_blocks[0].upsamplers[0], "up0.resnets", "up0.upsampled"),
        (named(d, "up_blocks.1."), "up0.upsampled", "up1.upsampled"),
        (named(d, "up_blocks.2."), "up1.upsampled", "up2.upsampled"),
        (d.high, "up1.upsampled", "out"),
    ]:
        close_to_scale(part(dec[f"dec.{source}"]), dec[f"dec.{result}"], atol)
    for part, source, result in [
        (e.conv_in, "x", "conv_in"),
        (e.high, "x", "down0.downsampled"),
        (named(e, "down_blocks.1."), "down0.downsampled", "down1.downsampled"),
        (e.between, "down0.downsampled", "down2.downsampled"),
        (named(e, "down_blocks.3."), "down2.downsampled", "down3.resnets"),
        (named(e, "mid_block."), "down3.resnets", "mid"),
        (e.low, "down2.downsampled", "moments"),
    ]:
        close_to_scale(part(enc[f"enc.{source}"]), enc[f"enc.{result}"], atol)


def test_config_reads_widths_and_groups():
    with torch.device("meta"):
        model = ARCHITECTURE.build(Config((8, 16, 24, 32), (8, 8, 16, 16), 4, 4))
    shapes = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    assert Config.from_shapes(shapes, 4) == Config((8, 16, 24, 32), (8, 8, 16, 16), 4, 4)
    with pytest.raises(InputError, match="norm_groups=N"):
        Config.from_shapes(shapes)
    with pytest.raises(InputError, match="norm_groups=3"):
        Config.from_shapes(shapes, 3)
    decoder_only = {k: v for k, v in shapes.items() if k.startswith("decoder.")}
    assert Config.from_shapes(decoder_only, 4).encoder_widths is None
    with torch.device("meta"):
        assert ARCHITECTURE.build(Config.from_shapes(decoder_only, 4)).encoder is None


def test_sampling_is_mean_or_seeded():
    moments = torch.cat((torch.full((1, 2, 1, 3, 3), 0.5), torch.full((1, 2, 1, 3, 3), -60.0)), 1)
    assert torch.equal(Network.sample(moments), torch.full((1, 2, 1, 3, 3), 0.5))
    # logvar is clamped to -30: what is left of the noise is 3e-7 of it.
    close(Network.sample(moments, 1), torch.full((1, 2, 1, 3, 3), 0.5), 5e-6)
    moments[:, 2:] = 0
    a, b, c = (Network.sample(moments, seed) for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert (a - 0.5).std() > 0.3
