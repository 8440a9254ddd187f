"""LTX-2.5's diffusion decoder against recorded outputs of the original, in chunks, and with its noise."""

import dataclasses
import gc
import json
import math
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from zerowaste_vae import CheckpointError, InputError, load
from zerowaste_vae.engine.extras.bench.calibrate import calibrate
from zerowaste_vae.engine.families import by_file, detect, latent_space, ltx
from zerowaste_vae.engine.families.ltx_diffusion import (
    ARCHITECTURE,
    KERNELS,
    LAST_KERNEL,
    STRIDES,
    Config,
    block_weights,
    folded,
)
from zerowaste_vae.engine.families.ltx_diffusion.block_weights import Weights
from zerowaste_vae.engine.families.ltx_diffusion.diffusion import Given, NeighbourDecoder, Stage
from zerowaste_vae.engine.families.ltx_diffusion.diffusion import _weights as weights_of
from zerowaste_vae.engine.families.ltx_diffusion.kernels.blocks import angles, feed_forward
from zerowaste_vae.engine.families.ltx_diffusion.neighbours import Attend
from zerowaste_vae.engine.kernels.launching import recording
from zerowaste_vae.engine.kernels.prebuilt.errors import PrebuiltError
from zerowaste_vae.engine.kernels.targets import capabilities, prebuilt, using
from zerowaste_vae.engine.network.state import State
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.planning.dryrun import PeakMemory, peak_bytes
from zerowaste_vae.engine.planning.fusable import not_fused, why_no_8_bit
from zerowaste_vae.engine.planning.launches import launches

from .originals import close

GOLDEN = ("ltx25_a", "ltx25_v2")


@pytest.fixture(scope="module", params=GOLDEN)
def golden(request, shared):
    """(VAE of the recorded weights, recorded tensors)"""
    folder = shared / "golden" / "ltx25"
    vae = load(folder / f"{request.param}.weights.safetensors", device="cpu")
    return vae, load_file(folder / f"{request.param}.io.safetensors")


def file_of(folder, seed_model, widths, last, head):
    """A file of every kind of stage, with the published windows and 2 last blocks of `last` channels."""
    stages = tuple(Stage(w, 1, k, s) for w, k, s in zip(widths, KERNELS, STRIDES, strict=True))
    network = NeighbourDecoder(16, head, stages, last, 2, LAST_KERNEL, 4, 16)
    model = ARCHITECTURE.build(Config(ltx.Config(None, None, latent_channels=16), network)).requires_grad_(False)
    seed_model(model, 5)
    save_file(model.state_dict(), folder / "w.safetensors")
    return folder / "w.safetensors"


@pytest.fixture(scope="module")
def tiny_ltx25(seed_model, tmp_path_factory):
    return file_of(tmp_path_factory.mktemp("ltx25"), seed_model, (32, 16, 16, 16), 16, 16)


@pytest.fixture(scope="module")
def wide_ltx25(seed_model, tmp_path_factory):
    """With as many channels as 8-bit products need."""
    return file_of(tmp_path_factory.mktemp("ltx25-wide"), seed_model, (64, 32, 32, 32), 64, 32)


@pytest.fixture(scope="module")
def small(tiny_ltx25):
    return load(tiny_ltx25, device="cpu")


def test_original_decodes(golden):
    vae, tensors = golden
    assert vae.arch == "ltx-diffusion"
    for name in (n.partition(".")[0] for n in tensors if n.endswith(".decode") and not n.startswith("batch")):
        close(vae.decode_raw(tensors[f"{name}.latent"], chunk=1), tensors[f"{name}.decode"])


def test_original_encodes(shared):
    folder = shared / "golden" / "ltx25"
    vae = load(folder / "ltx25_a.weights.safetensors", device="cpu")
    tensors = load_file(folder / "ltx25_a.encode.safetensors")
    for name in ("E9", "E12"):
        moments = vae.encode_raw(tensors[f"{name}.pixels"])
        close(moments[:, :128], tensors[f"{name}.latent_out"])


def test_chunks(small, noise):
    """Any chunks and parts of a clip have the bits of the whole."""
    z = noise(1, 16, 3, 2, 2)
    whole = small.decode_raw(z)
    assert whole.shape == (1, 3, 17, 64, 64)
    for chunk, frames in ((1, 0), (2, 3), (3, 1)):
        assert torch.equal(small.decode_raw(z, chunk=chunk, frames=frames), whole)
    frames = small.decode(z, chunk=2)
    assert torch.equal(frames, whole.movedim(1, -1).float().mul(0.5).add(0.5).clamp(0, 1))
    assert torch.equal(small.decode(z, start=9, frames=5), frames[:, 9:14])


def test_kernels_that_run_are_named(small, noise, monkeypatch):
    """Nothing says that kernels are off where eager execution launches them."""
    z = noise(1, 16, 1, 2, 2)
    small.decode(z)
    assert small.last_report.mode.startswith("plain torch") and "triton_fusion" in dict(small.last_report.off)
    monkeypatch.setattr(type(small), "kernels", lambda self, half: prebuilt("RTX 5070 Ti", 120, "C"))
    small.decode(z)
    assert small.last_report.mode.startswith("torch with kernels of its own")
    assert small.last_report.plan.startswith("steps with kernels of their own, untiled")
    assert small.last_report.kernels == "prebuilt kernels, set C" and "triton_fusion" not in dict(small.last_report.off)
    small.triton_fusion = False
    small.decode(z)
    assert small.last_report.mode.startswith("plain torch")
    small.triton_fusion = True


def test_kernels_that_fail_are_given_up(small, monkeypatch):
    """Eager execution launches them: a decode goes on in the next way, as of fused networks."""
    refused, asked = PrebuiltError("the driver refuses it"), []
    assert not small._without_kernels("decoder", refused)  # nothing is launched on a CPU
    monkeypatch.setattr(type(small), "kernels", lambda self, half: prebuilt("RTX 5070 Ti", 120, "C"))
    monkeypatch.setattr(small._choices, "give_up", lambda *what: not asked.append(what))
    assert small._without_kernels("decoder", refused) and asked == [("decoder", refused)]
    assert not small._without_kernels("decoder", ValueError("of a frame's size"))


def test_noise(small, noise):
    """Every clip of a batch has that of a single one; a seed's noise goes by its place, whatever follows."""
    z = noise(2, 16, 2, 2, 2)
    both = small.decode(z)
    assert all(torch.equal(small.decode(z[i : i + 1])[0], both[i]) for i in range(2))
    assert "seed 0, as ComfyUI's; 0.00 GB of host memory" in small.last_report.text()
    seeded = small.decode(z[:1], seed=3)
    assert small.last_report.noise == "of seed 3, by the place of each frame"
    assert not torch.equal(seeded, both[:1]) and not torch.equal(seeded, small.decode(z[:1], seed=4))
    assert torch.equal(small.decode(z[:1], seed=3), seeded)
    with pytest.raises(InputError, match="no share of noise"):
        small.decode(z[:1], noise=0.1)


def block_weights_in(kept):
    """Blocks' weights among what a component keeps; each is there with the kernels that it was made for."""
    return [w for one in kept.values() if isinstance(one, tuple) for w in one if isinstance(w, Weights)]


def test_weights_are_made_once(tiny_ltx25, noise, monkeypatch):
    """What a block's products take is made for the first clip and kept until the weights change or are released; it
    holds no parameter, and nothing else of a clip stays."""
    vae, z = load(tiny_ltx25, device="cpu"), noise(1, 16, 2, 2, 2)
    made, states, weights_of, begin = [], [], Weights.of, State.__init__
    monkeypatch.setattr(Weights, "of", lambda *given: made.append(given[0]) or weights_of(*given))
    monkeypatch.setattr(State, "__init__", lambda self, *given: states.append(weakref.ref(self)) or begin(self, *given))
    gc.disable()
    try:
        frames = vae.decode(z)
        count = len(made)
        assert count and torch.equal(vae.decode(z), frames) and len(made) == count
        assert not any(state() for state in states)
    finally:
        gc.enable()
    (_, kept), parameters = vae._family["decoder"]._kept, {id(p) for p in vae.model.parameters()}
    large = [t for w in block_weights_in(kept) for t in (w.qkv, w.proj, w.down, *(w.gates or ()))]
    assert all(t is None or id(t) not in parameters for t in large) and None in large
    with torch.no_grad():
        vae.model.decoder.det_stages[0][0].attn.proj.bias.add_(1.0)
    changed = vae.decode(z)
    assert len(made) == 2 * count and not torch.equal(changed, frames)
    vae.release()
    assert torch.equal(vae.decode(z), changed) and len(made) == 3 * count


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("second", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_weights_in_any_mode(tiny_ltx25, noise, first, second):
    """What a call in one mode of torch keeps serves those in others."""
    vae, z = load(tiny_ltx25, device="cpu"), noise(1, 16, 2, 2, 2)
    with first():
        frames = vae.decode(z)
    with second():
        assert torch.equal(vae.decode(z), frames)
    kept = block_weights_in(vae._family["decoder"]._kept[1])
    assert kept and not any(w.norm1.is_inference() or w.qkv_bias.requires_grad for w in kept)


def test_weights_of_other_kernels():
    """What is kept has the order of the kernels that it was made for: others take the weights made anew, and launch
    only kernels that they have. One of the two is in memory at a time."""
    triton, other = capabilities("H200", 90, (3, 6)), prebuilt("H200", 90, "C")
    with torch.device("meta"):
        block = block_weights.Block(256, 64).to(torch.bfloat16)
    norms, given = block_weights.Norms.of([block])[0], Given()
    fed = []
    for here in (triton, other, other, triton):
        with using(here):
            weights = weights_of(given, "a block", block, norms)
            fed.append((weights.fed, _weights_kept_once(given.kept, weights)))
            if weights.fed:
                x = torch.empty(128, 256, dtype=torch.bfloat16, device="meta")
                with recording(here) as calls:
                    feed_forward(x, weights.gates[0], None, 1e-6, weights.down, (x, weights.proj, weights.proj_bias))
                assert [call.kernel for call in calls] == ["blocks.feed_kernel"]
    assert fed == [(True, True), (False, True), (False, True), (True, True)]


def _weights_kept_once(kept, weights):
    one, = block_weights_in(kept)
    return one.norm1 is weights.norm1


def test_weights_of_another_stream(small, monkeypatch):
    """What was made on another stream may not be complete: it is made anew."""
    streams = iter(("one", "one", "other"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: next(streams))
    first, second, third = (small._family["decoder"].kept(torch.device("cuda", 0)) for _ in range(3))
    small._family["decoder"].release()
    assert first is second and third is not first


def test_tiles_have_noise_of_their_place(small, noise, monkeypatch):
    """Every tile sees the part of the whole clip's noise that lies where it does."""
    z = noise(1, 16, 1, 4, 4)
    seen = {}
    enter = type(small.model.decoder.program.steps[-1])._pictures

    def watched(self, part, given, begins):
        seen[given.noise(0).data_ptr()] = given.noise(0)[:, :64, :64].clone()
        return enter(self, part, given, begins)

    monkeypatch.setattr(type(small.model.decoder.program.steps[-1]), "_pictures", watched)
    small.decode(z, tiling="blended", tile=64, overlap=0)
    parts = list(seen.values())
    whole = torch.randn(1, 3, 1, 128, 128, generator=torch.Generator().manual_seed(0))[0, :, 0]
    assert len(parts) == 4
    for part, (y, x) in zip(parts, ((0, 0), (0, 64), (64, 0), (64, 64)), strict=True):
        assert torch.equal(part, whole[:, y : y + 64, x : x + 64])


def test_gates_of_older_files(tiny_ltx25, tmp_path, noise):
    """Gate vectors are part of the products that they follow."""
    tensors, z = load_file(tiny_ltx25), noise(1, 16, 1, 2, 2)
    gates = {"gate_msa": "attn.proj", "gate_mlp": "mlp.w_down", "gate_ctx": "context_proj"}
    older = tensors | {"decoder.coarse_head.weight": torch.ones(2)}
    for gate, product in gates.items():
        block = "decoder.diff_blocks.0"
        factor = torch.rand(tensors[f"{block}.attn.proj.weight"].shape[0]) + 0.5
        older[f"{block}.{gate}"] = factor
        for name in (f"{block}.{product}.weight", f"{block}.{product}.bias"):
            if name in older:
                older[name] = older[name] / (factor[:, None] if older[name].dim() == 2 else factor)
    save_file(older, tmp_path / "older.safetensors", {"config": json.dumps({"vae": {}})})
    assert folded(older).keys() == tensors.keys()
    expected = load(tiny_ltx25, device="cpu").decode(z)
    made = load(tmp_path / "older.safetensors", device="cpu").decode(z)
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-4)
    rounded = load(tmp_path / "older.safetensors", "bf16", "cpu")  # a rerun in fp32 reads the file the same way
    exact = load(tmp_path / "older.safetensors", "fp32", "cpu").model.state_dict()
    again = rounded.source.weights(rounded.model, torch.float32)
    assert all(torch.equal(again[name], t) for name, t in exact.items())


@pytest.mark.parametrize("kind, least", [("int8", 40.0), ("fp8", 34.0)])
def test_8_bit(wide_ltx25, noise, kind, least):
    """The last blocks are in 8 bit, as near to fp32 as that lets them, and every chunking has the same bits."""
    z = noise(1, 16, 2, 2, 2)
    made, exact = (load(wide_ltx25, device="cpu", precision=p) for p in (kind, "fp32"))
    assert made.precision == kind and made.dtype == torch.bfloat16
    got = made.decode(z, seed=3)
    report = made.last_report
    assert f"{kind} on cpu" in report.text() and not {"fp8", kind} & set(dict(report.off))
    error = (got - exact.decode(z, seed=3)).square().mean().item()
    assert -10 * math.log10(error) > least  # a peak of 1: as decibels of -1..1
    planner = made.planner
    assert torch.equal(made.decode(z, chunk=1, seed=3), got)
    assert torch.equal(made.decode(z, start=3, frames=4, seed=3), got[:, 3:7])
    assert made.planner is planner  # all that was made for one call serves the next, such as weights on a GPU
    half = made.model.decoder
    given = Given(lambda frame: torch.zeros(3, 64, 64), kind=kind)
    blocks = [s._w for s in half.program.steps[-1]._pictures(half.part, given) if isinstance(s, Attend)]
    assert len(blocks) == 2 and all(w.down.dtype.itemsize == 1 and w.proj.dtype == torch.bfloat16 for w in blocks)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_mlp_in_one(wide_ltx25, noise, kind, monkeypatch):
    """Where one kernel runs all of an MLP, its last product is in 16 bit; this CPU runs that kernel's reference."""
    z = noise(1, 16, 2, 2, 2)
    vaes = [load(wide_ltx25, device="cpu", precision=p) for p in (kind, kind, "fp32")]
    apart = vaes[0].decode(z, seed=3)
    monkeypatch.setattr(block_weights, "feeds", lambda *_: True)
    made, exact = (v.decode(z, seed=3) for v in vaes[1:])
    assert not torch.equal(made, apart)
    assert (made - exact).square().mean() < (apart - exact).square().mean()


def test_8_bit_that_is_not_to_be_had(wide_ltx25, tiny_ltx25):
    """It needs its kernels, or a CPU to show their numbers; a floor is for convolutions."""
    small = load(tiny_ltx25, device="cpu", precision="int8")
    assert small.precision == "bf16" and "its products and its attention" in dict(small.unused())["int8"]
    vae = load(wide_ltx25, device="cpu", precision="int8")
    for off in ({"triton_fusion": False}, {"min_db": 40.0}):
        with_less = vae.with_options(dataclasses.replace(vae.options, **off))
        assert with_less.precision == "bf16" and "int8 is unavailable" in dict(with_less.unused())["int8"]
    with pytest.raises(InputError, match=r"scales each row as it comes$"):
        next(calibrate(vae, "a latent", None, torch.zeros(1, 16, 1, 2, 2), False, lambda: None))
    programs = vae.architecture.programs(vae.model.config)
    assert why_no_8_bit(programs, torch.bfloat16, "no Triton") == "no Triton"
    assert why_no_8_bit(programs, torch.bfloat16, not_fused(programs, torch.bfloat16)) is None


def test_8_bit_launches():
    """The kernels that the published decoder launches in 8 bit are those of 16 bit, and three more."""
    config, here = ARCHITECTURE.published.config, prebuilt("RTX 5070 Ti", 120, "C")
    exact, *eight = (
        {one.kernel for one in launches(ARCHITECTURE, config, "decoder", torch.bfloat16, DEFAULTS, here=here, kind=k)}
        for k in (None, "int8", "fp8")
    )
    narrow = {f"blocks.narrow_{name}_kernel" for name in ("added", "gated", "projected")}
    assert all(found - exact == narrow for found in eight)
    assert exact - eight[0] == {"blocks.gated_kernel", "blocks.projected_kernel"}


def test_published():
    with torch.device("meta"):
        model = ARCHITECTURE.build(ARCHITECTURE.published.config)
    shapes = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    assert ARCHITECTURE.config_of(shapes, {}).decoder == ARCHITECTURE.published.config.decoder
    assert detect(shapes) is ARCHITECTURE and latent_space("ltx-diffusion") == "ltx"
    assert sum(p.numel() for p in model.decoder.parameters()) == pytest.approx(417.1e6, abs=5e4)
    program = model.decoder.program
    a_frame = (program.work(17, 22, 40).flop - program.work(16, 22, 40).flop) / 8
    assert a_frame == pytest.approx(1.94e12, rel=0.01)
    # Of a frame's 56,320 tokens: 8 blocks of 12 vectors each; all before them is an eighth of the whole.
    values = (program.work(17, 22, 40).values - program.work(16, 22, 40).values) / 8
    assert values == pytest.approx(8 * 12 * 256 * 56320 / 0.875, rel=0.01)
    assert by_file("ltx-2.5-video-vae-bf16.safetensors") is ARCHITECTURE
    assert by_file("ltx-2.5-video-vae-conv-bf16.safetensors") is ltx.ARCHITECTURE


def test_memory():
    """The step states at least what its tensors take at once, at most 15 % more, and a longer clip takes no more."""
    config, meta = ARCHITECTURE.published.config, torch.device("meta")
    with meta:
        decoder = ARCHITECTURE.build(config).decoder.to(torch.bfloat16)
    for positions in (16, 32, 64, 128):
        angles(positions, 64, meta)  # the dry run below would compute them on two devices
    taken = []
    for latents in (12, 14):
        memory, state = PeakMemory(), State()

        def run(latents=latents, state=state):
            for i in range(latents):
                state.ending = i == latents - 1
                z = decoder.low(torch.empty(1, 128, 1, 8, 9, device="meta", dtype=torch.bfloat16), state)
                for _ in decoder.each(z, state):
                    pass

        with torch.no_grad():
            peak_bytes(run, memory)
        taken.append(memory.live)
    stated = config.decoder.memory(14, 8, 9, 2, kernels=False)
    assert max(taken) <= stated <= 1.15 * max(taken)
    assert taken[1] <= 1.01 * taken[0]


@pytest.mark.parametrize("given, words", [
    ({"model_output_type": "eps"}, "neither x0 nor v"),
    ({"decoder": {"default_num_inference_steps": 0}}, "at least 1"),
    ({"decoder": {"upsamples": [[[1, 2, 2], 2]]}}, "4 stages, its description 1"),
])  # fmt: skip
def test_impossible(tiny_ltx25, tmp_path, given, words):
    save_file(load_file(tiny_ltx25), tmp_path / "w.safetensors", {"config": json.dumps({"vae": given})})
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path / "w.safetensors", device="cpu")
