"""A MiniMax H3 VAE of small tiles: in batches, parts and streams, in 8 bit, replayed, its encoder on the fused
operators, and profiles."""

import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from zerowaste_vae import Checkpoint, CheckpointError, load
from zerowaste_vae.engine.errors import InputError
from zerowaste_vae.engine.execution import core, reuse
from zerowaste_vae.engine.execution.call import encoder_samples
from zerowaste_vae.engine.execution.guard import Guard
from zerowaste_vae.engine.execution.progress import Ticker
from zerowaste_vae.engine.extras.bench.calibrate import calibrate
from zerowaste_vae.engine.extras.bench.profile import BETWEEN, profile
from zerowaste_vae.engine.extras.cli import main
from zerowaste_vae.engine.extras.eight_bit import sampling
from zerowaste_vae.engine.extras.graphs import graphs
from zerowaste_vae.engine.families.minimax_h3 import ARCHITECTURE, OWN, Config
from zerowaste_vae.engine.families.minimax_h3.running import components, decoder, transformer
from zerowaste_vae.engine.families.minimax_h3.running.components import FusedTileEncoder
from zerowaste_vae.engine.families.minimax_h3.running.transformer import TokenNetwork, tokens_of
from zerowaste_vae.engine.families.minimax_h3.tiles import NativeTiles
from zerowaste_vae.engine.network.fused import fuse
from zerowaste_vae.engine.network.products import product_rows
from zerowaste_vae.engine.options import DEFAULTS, unavailable
from zerowaste_vae.engine.runtime.kept import KEPT

from ..extras.graphs.fake_graph import FakeClock, FakeGraph
from .originals import close

CPU = torch.device("cpu")
#: Tiles of two latent pixels more than they share: many of them in few tokens.
SMALL = NativeTiles(size=64, least=32, mean=OWN.mean, deviation=OWN.deviation)


@pytest.fixture(scope="module")
def weights(seed_model):
    model = ARCHITECTURE.build(Config((8,) * 6, 128, 2, 128, norm_groups=8)).requires_grad_(False)
    seed_model(model, 5)
    model.latents_std.abs_().add_(0.5)
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.fixture
def make(weights, tmp_path, monkeypatch):
    """make(precision) -> VAE with SMALL tiles"""
    def small(program):
        return lambda config: replace(program(config), own=SMALL)

    halves = {half: small(getattr(ARCHITECTURE, half)) for half in ("encoder", "decoder")}
    architecture = replace(ARCHITECTURE, sections=SMALL, **halves)
    monkeypatch.setattr("zerowaste_vae.engine.loader.detect", lambda _: architecture)
    save_file(weights, tmp_path / "small.safetensors", {"norm_num_groups": "8"})
    return lambda precision="fp32": load(tmp_path / "small.safetensors", precision, "cpu")


@pytest.fixture
def with_plans(monkeypatch):
    """with_plans(vae, **of Own): what plans say from now on."""

    def change(vae, **own):
        plain = vae.planner.plan

        def plan(*args, **given):
            made = plain(*args, **given)
            return replace(made, own=replace(made.own, **own))

        monkeypatch.setattr(vae.planner, "plan", plan)

    return change


@pytest.mark.parametrize("precision", ["fp32", "fp16", "fp8", "int8"])
def test_batches_change_no_bit(make, noise, with_plans, precision):
    """Tiles at a time, within a section and across sections and clips."""
    vae, z = make(precision), noise(2, 24, 8, 5, 6)
    frames = vae.decode(z)
    assert frames.shape == (2, OWN.decoded(8), 80, 96, 3) and frames.std() > 0.05
    for tiles in (2, 7, 64):
        with_plans(vae, tiles=tiles)
        assert torch.equal(vae.decode(z), frames), tiles


def test_resident_weights(make, noise):
    """They are not what plain torch has no room for: its plan counts them, and the encoder's those of the decoder."""
    vae, z = make(), noise(1, 24, 1, 3, 3)
    alone = vae.plan_encode(1, 3, 3)
    vae.decode(z)
    kept = vae._family["decoder"]._tokens
    assert kept is not None and vae.plan_encode(1, 3, 3).peak_bytes == alone.peak_bytes + kept.nbytes
    vae.decode(z)
    assert vae._family["decoder"]._tokens is kept


def test_groups(make, noise, monkeypatch):
    """A group of tiles is padded to one size: no tile knows how many there are."""
    vae, z = make(), noise(9, 24, 7, 4, 4)
    network = TokenNetwork(vae.model.decoder, torch.float32, CPU)

    def decoded(tiles):
        run = network.memory((7, 4, 4), 9)
        run.allocate()
        return list(network.decode(list(tiles), 9, lambda: None, run))

    alone = decoded(z)
    monkeypatch.setattr("zerowaste_vae.engine.families.minimax_h3.running.transformer.tiles_together", lambda *_: 4)
    together = decoded(z)
    close(torch.stack(together), torch.stack(alone))
    for count in (1, 4, 6):
        assert all(torch.equal(a, b) for a, b in zip(decoded(z[:count]), together, strict=False))


def test_parts_and_streams(make, noise):
    """Parts streams and devices are those of one."""
    vae, z = make(), noise(1, 24, 13, 3, 5)
    whole = vae.decode(z)
    assert whole.shape[1] == 43
    for start, frames in ((0, 5), (16, 3), (22, 4), (34, None), (38, 5)):
        part = vae.decode(z, start=start, frames=frames)
        assert torch.equal(part, whole[:, start:][:, :frames]), start
    pieces = list(vae.stream(z, start=3))
    assert len(pieces) == 3 and torch.equal(torch.cat(pieces, 1), whole[:, 3:])
    assert torch.equal(vae.decode(z, devices=["cpu"] * 2), whole)
    assert len(vae.last_report.parts) == 2
    assert torch.equal(vae.decode(z, output="uint8").float(), (whole * 255).round())


def test_encode_streams(make, noise):
    """Encodes in streams and on devices are those of one."""
    vae, video = make(), noise(1, 39, 32, 80, 3).sigmoid()
    whole = vae.encode(video)
    assert whole.shape == (1, 24, 12, 2, 5)
    pieces = list(vae.encode_stream(iter(video[0])))
    assert [p.shape[2] for p in pieces] == [5, 5, 2] and torch.equal(torch.cat(pieces, 2), whole)
    assert torch.equal(vae.encode(video, devices=["cpu"] * 2), whole)
    assert not torch.equal(vae.encode(video, seed=1), whole)
    one = vae.encode(video[:, :1])
    assert torch.equal(torch.cat(list(vae.encode_stream(iter(video[0, :1]))), 2), one) and one.shape[2] == 1


def test_second_attempt(make, noise, monkeypatch):
    """An attempt goes on where one before ran out of memory."""
    vae, z = make(), noise(1, 24, 13, 3, 5)
    whole, plain, calls, failures = vae.decode(z), decoder._Canvas.add, Counter(), ["once"]

    def add(canvas, place, made):
        calls[place.section.index] += 1
        if calls[2] and failures:
            failures.clear()
            raise torch.cuda.OutOfMemoryError("no memory")
        return plain(canvas, place, made)

    monkeypatch.setattr(decoder._Canvas, "add", add)
    assert torch.equal(vae.decode(z), whole)
    assert vae.last_report.events["oom_step_downs"] == 1
    # The section in front is made again, for what the next one is blended with.
    assert calls[1] == 2 * calls[0] == 2 * (calls[2] - 1)


def test_second_attempt_of_an_encode(make, noise, monkeypatch):
    """An attempt begins with the first section that is not finished."""
    vae, video = make(), noise(1, 52, 32, 48, 3).sigmoid()
    whole, plain, sections, failures = vae.encode(video), components.SectionPass._encode, [], ["once"]

    def encode(section, frames):
        sections.append(frames)
        if len(sections) == 3 and failures:
            failures.clear()
            raise torch.cuda.OutOfMemoryError("no memory")
        return plain(section, frames)

    monkeypatch.setattr(components.SectionPass, "_encode", encode)
    reports = []
    assert torch.equal(vae.encode(video, progress=lambda *step: reports.append(step)), whole)
    assert vae.last_report.events["oom_step_downs"] == 1 and reports == [(i, 4) for i in range(1, 5)]
    assert [s.shape[0] for s in sections] == [17, 17, 17, 17, 1] and torch.equal(sections[2], sections[3])


@pytest.mark.parametrize(("precision", "place"), [("fp8", "gated"), ("int8", "rounded")])
def test_what_is_not_finite_is_made_again(make, noise, monkeypatch, precision, place):
    """One infinity in front of a pass that rounds to 8 bit."""
    vae, z, plain, struck = make(precision), noise(1, 24, 2, 5, 6), getattr(transformer, place), []
    safer = vae._safer("").decode(z)

    def strike(x, *rest, **options):
        if not struck:
            x[3, 40] = math.inf
            struck.append(x.dtype)
        plain(x, *rest, **options)

    monkeypatch.setattr(transformer, place, strike)
    assert torch.equal(vae.decode(z), safer)
    assert struck and vae.last_report.events["nan_reruns"] == 1


@pytest.mark.parametrize("kind, least", [("fp8", 25), ("int8", 32)])
def test_8_bit_products_are_near(make, noise, kind, least):
    vae, z = make(kind), noise(1, 24, 7, 4, 4)
    exact = make().decode(z)
    error = (vae.decode(z) - exact).square().mean()
    assert 10 * torch.log10(1.0 / error) > least
    assert f"in {kind}" in vae.last_report.mode


@pytest.mark.parametrize("kind, least", [("fp8", 17), ("int8", 25)])
def test_encode_ranges(seed_model, noise, kind, least):
    """The first clips are measured, as by other encoders; nothing is measured of the decoder."""
    model = ARCHITECTURE.build(Config((32,) * 6, 64, 1, 64, norm_groups=8)).requires_grad_(False)
    seed_model(model, 6)
    model.latents_std.abs_().add_(0.5)
    values, groups = {k: v.clone() for k, v in model.state_dict().items()}, {"norm_num_groups": "8"}
    exact, vae = (load(Checkpoint(dict(values), groups), p, "cpu") for p in ("fp32", kind))
    video = noise(1, 32, 48, 3).sigmoid()
    want, found = exact.encode(video), vae.encode(video)
    assert vae.precision == kind and f"convolutions in {kind}" in vae.last_report.operands
    assert 10 * math.log10(want.square().mean() / (found - want).square().mean()) > least
    (sample,) = encoder_samples(SimpleNamespace(sample=lambda: video), vae, sampling.video_samples)
    assert torch.equal(sample, (video - torch.tensor(OWN.mean)) / torch.tensor(OWN.deviation))
    assert torch.equal(vae.encode(video), found)
    assert vae.decode(noise(1, 24, 1, 2, 2)).isfinite().all() and not vae._mixed.policy("decoder").kinds


def test_a_floor_leaves_8_bit_out(make, noise):
    vae = make("fp8")
    vae.options = replace(vae.options, min_db=40.0)
    assert vae.precision == "fp16"
    assert "min_db=40 is not measured" in vae.unused()["fp8"]


def test_wider_type(make, noise):
    """Values out of range go on in a wider type."""
    vae, z = make("fp16"), noise(1, 24, 2, 2, 2)
    assert vae.decode(1e6 * z).isfinite().all()
    assert vae.last_report.events["nan_reruns"] == 1 and vae.last_report.precision == "fp16, then bf16"


# -- replayed layers ---------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(monkeypatch):
    """Graphs on a CPU, recorded whenever a batch of a kind comes again."""
    monkeypatch.setattr(graphs, "CudaGraph", FakeGraph)
    monkeypatch.setattr(graphs, "Clock", FakeClock)
    monkeypatch.setattr(graphs, "pays", lambda *_: True)
    monkeypatch.setattr(reuse, "why_not_on", lambda _: None)
    monkeypatch.setattr(core, "unavailable", lambda *args: unavailable(*args) | {"cuda_graphs": None})
    yield
    KEPT.release()


def why_no_graphs(vae):
    return dict(vae.last_report.off).get("cuda_graphs")


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_replayed_layers_have_the_same_bits(make, noise, recorded, precision):
    """Replay layers of a picture from call to call, and of one batch after the other; the last one is smaller."""
    vae = make(precision)
    plain = vae.with_options(DEFAULTS.switched(off=["cuda_graphs"]))
    pictures = [noise(1, 24, 1, 3, 4, seed=seed) for seed in range(3)]
    expected = [plain.decode(z) for z in pictures]
    assert not torch.equal(expected[1], expected[2]) and why_no_graphs(plain) == "switched off"
    for z, frames, count in zip(pictures, expected, (0, 1, 1), strict=True):
        assert torch.equal(vae.decode(z), frames) and vae._family["decoder"].runs.replayed == (count, 1)
    assert "1 of 1 chunks replayed" in vae.last_report.mode and why_no_graphs(vae) is None
    clip = noise(1, 24, 8, 3, 5)
    assert torch.equal(vae.decode(clip), plain.decode(clip)) and vae._family["decoder"].runs.replayed == (3, 4)


def test_graphs_go_with_the_weights_they_read(make, noise, recorded):
    vae, z, other = make(), noise(1, 24, 1, 3, 4), noise(1, 24, 1, 4, 3)
    frames, size = vae.decode(z), KEPT.nbytes(CPU)
    assert not size
    vae.decode(z)
    assert KEPT.nbytes(CPU) > 0 and torch.equal(vae.decode(z), frames)
    vae.release()
    assert KEPT.nbytes(CPU) == 0
    assert torch.equal(vae.decode(z), frames) and torch.equal(vae.decode(z), frames)
    # As many tokens, elsewhere in the frame.
    turned = vae.with_options(DEFAULTS.switched(off=["cuda_graphs"])).decode(other)
    assert torch.equal(vae.decode(other), turned) and torch.equal(vae.decode(z), frames)


def test_streamed_weights_are_not_recorded(make, noise, recorded, with_plans):
    vae, z = make(), noise(1, 24, 1, 3, 4)
    with_plans(vae, resident=1)
    for _ in range(3):
        vae.decode(z)
    assert why_no_graphs(vae) == "weights come from host memory in every chunk"
    frames = vae.encode(noise(1, 32, 32, 3).sigmoid())
    assert frames.isfinite().all() and "tiles" in why_no_graphs(vae)


# -- the encoder on the fused operators --------------------------------------------------------------------------------


def test_the_fused_encoder_is_the_plain_one(make, noise):
    vae = make()
    encoder, guard = vae.model.encoder, Guard(Ticker(None, None), CPU, Counter())
    assert encoder.program.why_not_fused() is None
    network = fuse(encoder, torch.float32)
    for frames, height, width, step in ((17, 32, 48, 4), (17, 32, 33, 0), (1, 64, 32, 0)):
        tile = noise(frames, height, width, 3)
        want = encoder(tile.permute(3, 0, 1, 2)[None])[0].permute(1, 2, 3, 0)
        half = FusedTileEncoder(network, encoder.program, DEFAULTS, step)
        with half.memory(guard):
            first, health = half.encode(tile)
            first = first.clone()
            close(first, want)
            assert health == 0
            assert torch.equal(half.encode(tile)[0], first)


@pytest.mark.parametrize("frames", [1, 5])
def test_samples_are_encoded_as_sections_are(make, noise, frames):
    """Ranges are measured on samples that are encoded like sections."""
    vae, sample = make(), noise(frames, 32, 32, 3)
    encoder = vae.model.encoder
    want = encoder(sample.permute(3, 0, 1, 2)[None])[0].permute(1, 2, 3, 0)[..., :24]
    close(sampling.encode(fuse(encoder, torch.float32), sample), want)


def test_its_files_are_not_calibrated(make):
    vae = make("int8")
    with pytest.raises(InputError, match="its encoder measures the first clips"):
        next(calibrate(vae, "a clip", torch.zeros(1, 32, 32, 3), None, False, lambda: None))


def test_encoder_plans(make):
    """Plans of the fused encoder are what it takes."""
    vae = make()
    network = fuse(vae.model.encoder, torch.float32)
    run = network.tile_run(17, 32, 48, 4, CPU)
    stated = run.nbytes
    run.allocate()
    assert run.nbytes == stated
    assert network.tile_run(17, 32, 48, 1, CPU).nbytes < stated


# -- profiles ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp8", "int8"])
def test_profiles_of_decodes_have_all_work(make, noise, precision):
    """Products and attention of every tile, and the rest of a layer beside them."""
    vae = make(precision)
    found = profile(vae, "decode", noise(1, 24, 7, 3, 5), 1)
    assert found.frames == 22 and [s["name"] for s in found.stages()] == ["1x", "16x", BETWEEN]
    calls = Counter()
    for row in found.rows:
        calls[row.operator] += row.calls
    tiles, layers = 2, 2
    assert calls["product"] == tiles * (4 * layers + 1) and calls["attention"] == tiles * layers
    passes = {"fp32": (1, 1), "fp8": (1, 1), "int8": (0, 2)}[precision]  # int8 products make the gates
    assert (calls["gated"], calls["rounded"]) == tuple(tiles * layers * n for n in passes)
    assert calls["normalised"] == 2 * tiles * layers and calls["blend"] == tiles
    work = vae.model.decoder.program.work(7, 3, 5).flop
    # What the program counts besides are products of latents, and those of registers at the end; products in 8 bit
    # have rows that hold nothing.
    decoder = vae._family["decoder"]
    tokens = tokens_of(decoder._tokens.step, 7, 3, 4)  # of one of its tiles
    assert 0.95 * work < sum(r.flop for r in found.rows) <= work * product_rows(tokens, decoder._kind) / tokens


def test_profiles_of_encodes_are_those_of_tiles(make, noise):
    found = profile(make(), "encode", noise(1, 32, 80, 3).sigmoid(), 1)
    assert {r.operator for r in found.rows} >= {"conv3d", "norm_act", BETWEEN}
    assert [s["name"] for s in found.stages()] == ["1x", "2x", "4x", "8x", "16x", BETWEEN]


def test_profile(weights, tmp_path, capsys):
    """Profiles are of frames that latents decode to."""
    save_file(weights, tmp_path / "small.safetensors", {"norm_num_groups": "8"})
    common = ["profile", "decode", "--weights", str(tmp_path / "small.safetensors"), "--device", "cpu"]
    common += ["--size", "32x32", "--runs", "1"]
    assert main(common) == 0
    assert "decode of 5 frames" in capsys.readouterr().out
    assert main([*common, "--frames", "6"]) == 2
    assert "give 17n+5 of them, such as 22" in capsys.readouterr().err


# -- files -------------------------------------------------------------------------------------------------------------


def test_info_says_how_it_cuts(weights, tmp_path, capsys):
    save_file(weights, tmp_path / "small.safetensors", {"norm_num_groups": "8"})
    assert main(["info", str(tmp_path / "small.safetensors")]) == 0
    said = capsys.readouterr().out
    assert "its own, of 256 pixels in sections of 17 frames" in said and "each row as it comes" in said


def test_what_no_such_network_can_be_is_refused(weights, tmp_path):
    path, groups = tmp_path / "odd.safetensors", {"norm_num_groups": "8"}
    save_file({**weights, "decoder.x_embedder.bias": torch.zeros(100)}, path, groups)
    with pytest.raises(CheckpointError, match="100 channels are no heads of 64"):
        load(path, device="cpu")
    save_file({k: v for k, v in weights.items() if not k.startswith("encoder")}, path, groups)
    assert not load(path, device="cpu").can_encode
