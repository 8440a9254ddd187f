"""MiniMax H3 with fewer layers, pruned encoders, other tiles and diffusers' names."""

import itertools
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from zerowaste_vae import Checkpoint, load
from zerowaste_vae.engine.errors import CheckpointError, InputError
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.extras.cli import main
from zerowaste_vae.engine.families import by_file
from zerowaste_vae.engine.families.minimax_h3 import ARCHITECTURE, LYNNREAL, OWN, PUBLISHED, Config, variant
from zerowaste_vae.engine.families.minimax_h3.tiles import Blend, NativeTiles, mix
from zerowaste_vae.engine.loader import encoder_only
from zerowaste_vae.engine.network.plain import Network
from zerowaste_vae.engine.options import DEFAULTS

from .originals import close

WIDTHS = (8, 16, 16, 16, 16, 8)
CONFIG = Config(WIDTHS, 64, 2, 96, norm_groups=4)
#: One that changes the width, two of a level without a downsampler, one that keeps the width.
PRUNED = ("down.1.block.0", "down.4.block.0", "down.4.block.1", "down.5.block.0", "down.2.block.1")


def made(config=CONFIG, seed=0):
    return random_checkpoint(config, seed, ARCHITECTURE).tensors


def loaded(tensors):
    return load(Checkpoint(dict(tensors), {"norm_num_groups": "4"}), "fp32", "cpu")


def in_pruned(name):
    block = re.match(r"encoder\.(down\.\d\.block\.\d)\.(?!nin_shortcut)", name)
    return block is not None and block[1] in PRUNED


def pruned_pair(seed=0):
    """(tensors of a pruned encoder, of a whole one whose blocks add nothing in its place)"""
    whole = made(seed=seed)
    for name, tensor in whole.items():
        if in_pruned(name) and ".conv2." in name:
            tensor.zero_()
    return {n: t for n, t in whole.items() if not in_pruned(n)}, whole


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("frames", [1, 22])
def test_pruned_blocks_are_their_shortcuts(fused, frames, noise, monkeypatch):
    left, whole = map(loaded, pruned_pair(seed=frames))
    assert left.model.config.encoder_widths == WIDTHS
    assert set(left.model.config.pruned) == {f"encoder.{name}" for name in PRUNED}
    if fused:
        monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
        left, whole = left.with_options(DEFAULTS), whole.with_options(DEFAULTS)
        assert left.plan_encode(7, 2, 3).fused
    video = noise(frames, 32, 48, 3).sigmoid()
    close(left.encode(video), whole.encode(video), 1e-5)


def test_a_pruned_encoder_alone_is_known():
    tensors = {n: t for n, t in pruned_pair()[0].items() if not re.match(r"decoder|post_quant", n)}
    architecture, config = encoder_only(Checkpoint(tensors, {"norm_num_groups": "4"}))
    assert (architecture.name, len(config.pruned)) == ("minimaxh3", len(PRUNED))


def test_a_block_that_lacks_one_tensor_is_damaged(caplog):
    whole = made()
    for gone in ("encoder.down.1.block.0.conv1.bias", "encoder.down.3.block.1.norm2.weight"):
        assert not loaded({n: t for n, t in whole.items() if n != gone}).can_encode
    assert not loaded({n: t for n, t in whole.items() if ".block." not in n}).can_encode
    assert "encoder incomplete" in caplog.text


def to_diffusers(tensors):
    """The same weights as LightX2V and diffusers store them."""
    out = {}
    for name, t in tensors.items():
        name = re.sub(r"encoder\.down\.(\d)\.block\.(\d)\.", r"encoder.down_blocks.\1.resnets.\2.", name)
        name = re.sub(r"encoder\.down\.(\d)\.downsample\.", r"encoder.down_blocks.\1.downsamplers.0.", name)
        name = name.replace("nin_shortcut", "conv_shortcut").replace("x_embedder", "proj_in")
        name = name.replace(".to_out.", ".to_out.0.").replace(".ff.w2.", ".ff.net.2.")
        if ".to_qkv." in name:
            rows = t.view(-1, 3, 64, *t.shape[1:])
            out |= {name.replace("to_qkv", f"to_{p}"): rows[:, i].flatten(0, 1) for i, p in enumerate("qkv")}
        elif ".ff.w1." in name:
            gates, values = t.chunk(2)
            out[name.replace("w1", "net.0.proj")] = torch.cat((values, gates))
        elif name != "decoder.mask_token":
            out[name] = t
    return out


@pytest.mark.parametrize(("name", "to", "why"), [
    ("decoder.register_tokens", None, r"lacks|missing"),
    ("decoder.transformer_blocks.1.attn.to_q.weight", (100, 128), r"\[100, 128\].* no heads of 64 channels"),
    ("decoder.transformer_blocks.0.attn.to_v.bias", (64,), r"\[64\], which are no heads of 64 channels"),
])  # fmt: skip
def test_damaged_files_under_diffusers_names(name, to, why):
    tensors = to_diffusers(made(replace(CONFIG, encoder_widths=None, width=128)))
    assert name in tensors
    if to is None:
        del tensors[name]
    else:
        tensors[name] = torch.zeros(to)
    with pytest.raises(CheckpointError, match=why):
        loaded(tensors)


@pytest.mark.parametrize("half", ["decoder", "both"])
def test_diffusers_names(half, tmp_path):
    """Of a file of one half, as LightX2V's are, and of both."""
    config = CONFIG if half == "both" else replace(CONFIG, encoder_widths=None)
    whole = made(replace(config, width=128))
    metadata = {"model_type": "minimax_h3_pruned_vae", "norm_num_groups": "4"}
    metadata["architecture"] = '{"kept_layers": [0, 1]}'
    save_file({n: t.contiguous() for n, t in to_diffusers(whole).items()}, tmp_path / "a.safetensors", metadata)
    vae = load(tmp_path / "a.safetensors", "fp32", "cpu")
    state = vae.model.state_dict()
    assert state.keys() == whole.keys() and vae.can_encode == (half == "both")
    assert all(torch.equal(state[n], t) for n, t in whole.items() if n != "decoder.mask_token")


def test_diffusers_encoder_alone_is_known(tmp_path):
    tensors = {n: t for n, t in to_diffusers(pruned_pair()[0]).items() if not re.match(r"decoder|post_quant", n)}
    save_file(tensors, tmp_path / "e.safetensors", {"model_type": "minimax_h3_pruned_encoder", "norm_num_groups": "4"})
    with pytest.raises(CheckpointError, match="the decoder is missing"):
        load(tmp_path / "e.safetensors", device="cpu")


def test_damaged_files_of_diffusers_names_are_refused():
    whole = to_diffusers(made())
    for gone in ("attn.to_k.weight", "ff.net.0.proj.bias", "to_q.bias"):
        with pytest.raises(CheckpointError) as error:
            loaded({n: t for n, t in whole.items() if not n.endswith(f"1.{gone}") and not n.endswith(f"1.attn.{gone}")})
        assert "missing" in str(error.value) and len(str(error.value).splitlines()) == 1


# -- LynnReal's tiles -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("height", "width", "rows", "columns"), [
    (768, 1344, (272, 3), (208, 7)), (1344, 768, (208, 7), (272, 3)), (272, 224, (208, 2), (224, 1)),
    (288, 288, (288, 1), (288, 1)), (304, 304, (272, 2), (272, 2)),
])  # fmt: skip
def test_trained_tiles(height, width, rows, columns):
    for spans, length, (size, count) in zip(LYNNREAL.decoded_spans(height, width), (height, width),
                                            (rows, columns), strict=True):  # fmt: skip
        assert len(spans) == count and {s.end - s.start for s in spans} == {size}
        assert spans[0].start == 0 and spans[-1].end == length
        assert all(b.shared == a.end - b.start for a, b in itertools.pairwise(spans))
    assert OWN.decoded_spans(height, width) == (OWN.spans(height), OWN.spans(width))


@pytest.fixture(scope="module")
def lynnreal():
    return loaded(made(Config(None, 64, 26, 64), seed=3))


def test_trained_tiles_are_used_where_they_are_named(lynnreal, noise):
    """Against the tiles decoded one by one, and put together by hand."""
    z = noise(1, 24, 1, 14, 18)
    usual, trained = (lynnreal.decode(z, native_tiles=name, range="signed") for name in ("family", "trained"))
    assert "as it was trained" in lynnreal.last_report.plan and not torch.equal(usual, trained)
    # A tile each: 208 of 288 pixels, 128 shared.
    a, b = (lynnreal.decode(z[..., at : at + 13], range="signed") for at in (0, 5))
    family = lynnreal.plan_decode(1, 14, 18)  # of other tiles than those that are asked for: not followed
    assert torch.equal(lynnreal.decode(z, plan=family, native_tiles="trained", range="signed"), trained)
    mix(a[:, :, :, -128:], b[:, :, :, :128], 3)
    torch.testing.assert_close(trained, torch.cat((a[:, :, :, :80], b), 3), rtol=0, atol=1e-6)


@pytest.mark.parametrize("assembled", [False, True])
def test_sides_without_overlap_are_put_side_by_side(assembled):
    rows, columns = NativeTiles(sides=((32, 0), (48, 16), (32, 16))).decoded_spans(64, 80)
    assert [s.shared for s in rows + columns] == [0, 0, 0, 16]
    blend, made = Blend(rows, columns, assembled=assembled), torch.zeros(64, 80)
    for (i, row), (j, column) in itertools.product(enumerate(rows), enumerate(columns)):
        part = blend.add(i, j, torch.full((32, 48), 2.0 * i + j))
        made[row.start : row.start + part.shape[0], column.start : column.start + part.shape[1]] = part
    across = torch.cat((torch.zeros(32), torch.arange(16) / 16, torch.ones(32)))
    torch.testing.assert_close(made, torch.cat((across.expand(32, -1), 2 + across.expand(32, -1))))


def test_other_decoders_have_no_trained_tiles(vae):
    for other in (vae, loaded(made())):
        with pytest.raises(InputError, match="native_tiles='trained' is for decoders that were trained in other tiles"):
            other.plan_decode(1, 8, 8, native_tiles="trained")
    with pytest.raises(InputError, match="native_blend is for VAEs that tile themselves"):
        vae.decode(torch.zeros(1, 16, 1, 2, 2), plan=vae.plan_decode(1, 2, 2), native_blend="separate")
    with pytest.raises(InputError, match="native_tiles='own' is not one of family, trained"):
        vae.plan_decode(1, 8, 8, native_tiles="own")


# -- what is not run yet ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rename", [lambda tensors: tensors, to_diffusers])
def test_a_decoder_of_24_layers_is_never_run_as_h3s(rename):
    with pytest.raises(CheckpointError, match=r"has 24 layers, as Sol-H3's has, .* not yet run here"):
        loaded(rename(made(Config(None, 64, 24, 64))))


@pytest.mark.parametrize("prefix", ["", "decoder.", "model."])
def test_streaming_decoders_are_named(prefix):
    """Sana's names, which are as near to Sol-H3's as is known."""
    names = ("register_tokens", "x_embedder.weight", "post_quant_conv.weight", "norm_out.weight", "proj_out.weight")
    layer = ("norm1.weight", "attn.to_qkv.weight", "attn.to_out.weight", "scale1", "ff.w1.weight", "ff.w2.weight")
    tensors = {f"{prefix}{n}": torch.ones(2) for n in (*names, *(f"blocks.0.{n}" for n in layer))}
    with pytest.raises(CheckpointError, match=r"windows of whole frames \(Sol-H3: not yet; Sana's causal one\), which"):
        loaded(tensors)


# -- names and goldens -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("file", "layers"), [
    ("minimax_h3_video_vae_fp16", 36), ("minimax_h3_lynnreal_light_vae_int8_convrot", 26),
    ("minimax_h3_lightvae_lite_vae_int8_convrot", 12), ("MiniMax-H3-FastH3-8L", 8),
])  # fmt: skip
def test_files_are_planned_with_their_layers(file, layers):
    assert by_file(f"{file}.safetensors").published.sizes(file) == replace(PUBLISHED, layers=layers)


def test_reduced_decoders_are_named(tmp_path, capsys):
    def run(*args):
        return main([str(arg) for arg in args]), capsys.readouterr().out

    assert by_file("minimax_h3_sol_vae_int8_convrot.safetensors") is None
    assert variant(PUBLISHED) == "" and variant(replace(PUBLISHED, layers=12)) == "LightVAE Lite (12 of 36 layers)"
    assert variant(replace(PUBLISHED, layers=9)) == "9 of 36 layers"
    save_file(made(Config(None, 64, 26, 64)), tmp_path / "lynnreal.safetensors")
    code, out = run("info", tmp_path / "lynnreal.safetensors")
    assert code == 0 and "variant         LynnReal (26 of 36 layers)" in out and "tiles of 272 pixels" in out
    code, out = run("plan", "--vae", tmp_path / "lynnreal.safetensors", "--size", "512x256", "--vram-gb", "4")
    assert code == 0 and ", LynnReal (26 of 36 layers): decode to" in out


def weights_of(shared, name):
    tensors = load_file(shared / "golden" / "distilled" / f"{name}.safetensors")
    return {n[2:]: t.float() for n, t in tensors.items() if n.startswith("w.")}, tensors


def test_fewer_layers_are_the_originals(shared):
    weights, tensors = weights_of(shared, "h3_fewer_layers")
    made = loaded(weights).decode(tensors["in.latent"].float(), native_blend="separate")
    close(made.movedim(-1, 1)[..., ::4], tensors["out.frames_every_4th_column"])


@pytest.mark.parametrize("fused", [False, True])
def test_the_pruned_encoder_is_the_originals(shared, fused, monkeypatch):
    """Of the recorded clip's latents an encode leaves out the last three."""
    decoder, tensors = weights_of(shared, "h3_fewer_layers")[0], weights_of(shared, "h3_pruned_encoder")
    if fused:
        monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    vae = load(Checkpoint(decoder | tensors[0], {}), "fp32", "cpu")
    assert isinstance(vae.model, Network) and len(vae.model.config.pruned) == 9
    deviation, mean = (torch.tensor(v).view(3, 1, 1, 1) for v in (OWN.deviation, OWN.mean))
    moments = vae.encode_raw((tensors[1]["in.units"] * deviation + mean) * 2 - 1)
    units = (vae.model.latents_mean, vae.model.latents_std)
    means, deviations = (t.view(1, -1, 1, 1, 1) for t in units)
    expected = tensors[1]["out.moments"].chunk(2, 1)
    close(moments[:, :24], ((expected[0] - means) / deviations)[:, :, :2])
    close(moments[:, 24:], (expected[1] - 2 * deviations.abs().log())[:, :, :2])
