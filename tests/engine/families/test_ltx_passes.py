"""LTX-2.5's diffusion decoder in several passes of the whole clip, and the noise that waits beside it."""

import math
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from zerowaste_vae import Cancelled, PlanError, load
from zerowaste_vae.engine.execution.staging import StagedReader
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.families import ltx
from zerowaste_vae.engine.families.ltx_diffusion import (
    ARCHITECTURE,
    KERNELS,
    LAST_KERNEL,
    STRIDES,
    Config,
    block_weights,
    neighbours,
    passes,
    sampling,
)
from zerowaste_vae.engine.families.ltx_diffusion.diffusion import Given, NeighbourDecoder, Sampling, Stage
from zerowaste_vae.engine.families.ltx_diffusion.kernels.blocks import angles
from zerowaste_vae.engine.families.ltx_diffusion.running.noise import PART, FrameNoise
from zerowaste_vae.engine.kernels import operators
from zerowaste_vae.engine.kernels.targets import interpreted
from zerowaste_vae.engine.network.state import State
from zerowaste_vae.engine.network.steps import Steps
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.planning.budget import Limits
from zerowaste_vae.engine.planning.dryrun import PeakMemory, peak_bytes
from zerowaste_vae.engine.planning.make import make_planner
from zerowaste_vae.engine.planning.plain_walk import Torch
from zerowaste_vae.engine.precision.modes import Mode
from zerowaste_vae.engine.request import Request
from zerowaste_vae.engine.runtime.pinned import ON_THEIR_WAY, page_locked

GIB, META, ONE_STEP, RESERVES = 1 << 30, torch.device("meta"), Sampling(), Torch(reserves=True)
#: 1280x704 x 121 frames.
SIZE = 16, 22, 40


def small(sampling=ONE_STEP, width=16, blocks=3, precision="fp32"):
    """A VAE of every kind of stage, and its decoder."""
    stages = tuple(Stage(w, 1, k, s) for w, k, s in zip((32, width, width, width), KERNELS, STRIDES, strict=True))
    decoder = NeighbourDecoder(16, width, stages, width, blocks, LAST_KERNEL, 4, 16, sampling)
    config = Config(ltx.Config(None, None, latent_channels=16), decoder)
    vae = load(random_checkpoint(config, architecture=ARCHITECTURE), precision, "cpu")
    program = vae.model.decoder.program  # files without a description have the published sampling
    items = tuple(decoder if isinstance(i, NeighbourDecoder) else i for i in program.items)
    vae.model.decoder.program = replace(program, items=items)
    return vae, decoder


def in_passes(vae, z, count):
    """The plan for a clip that goes through in so many passes."""
    plan = vae.plan_decode(*z.shape[2:])
    return replace(plan, steps=Steps(z.shape[2], 8, pieces=True, passes=count))


@pytest.mark.parametrize("sampling, all_passes", [
    (ONE_STEP, (1, 2, 3, 4)), (Sampling(2, 1.0, True), (1, 2, 3, 4, 7)), (Sampling(2), (1, 2, 3, 4, 7)),
])  # fmt: skip
def test_bits(noise, sampling, all_passes):
    """Any number of passes gives the bits of one, also where a pass ends between two steps of the sampling."""
    vae, decoder = small(sampling)
    assert decoder.passes == all_passes
    for latents in (1, 3):
        z = noise(1, 16, latents, 2, 2)
        whole = vae.decode(z)
        for count in all_passes[1:]:
            told = []
            made = vae.decode(z, plan=in_passes(vae, z, count), progress=lambda *at, told=told: told.append(at))
            assert torch.equal(made, whole)
            assert not any(vae.last_report.events.values())  # no part of a piece is one that was made again
            assert told == sorted(set(told)) and told[-1] == (latents, latents)
    parts = list(vae.stream(z, plan=in_passes(vae, z, 3), start=3, frames=11))
    assert len(parts) > 1 and torch.equal(torch.cat(parts, 1), whole[:, 3:14])
    assert f"{count} passes of the whole clip" in replace(in_passes(vae, z, count), host_bytes=GIB).describe()


@pytest.mark.parametrize("precision", ["bf16", "int8", "fp8"])
def test_bits_of_kernels(noise, monkeypatch, precision):
    """Triton's kernels give equal bits, too, and about the numbers of their references."""
    pytest.importorskip("triton", reason="its interpreter runs the kernels")
    if not interpreted():
        pytest.skip("a GPU is here: test_ltx_diffusion_gpu.py compares bits there")
    vae, _ = small(width=32, blocks=2, precision=precision)
    z, launched = noise(1, 16, 1, 2, 2), []
    expected = vae.decode(z)
    for module in (operators, block_weights):
        there = module.kernels_for
        monkeypatch.setattr(module, "kernels_for", lambda device, backend, there=there: launched.append(1) or there(
            device, "triton" if device.type == "cpu" else backend))  # fmt: skip
    whole = vae.decode(z)
    assert launched and (whole - expected).square().mean() < 10**-3.5
    assert torch.equal(vae.decode(z, plan=in_passes(vae, z, 3)), whole)


def test_memory_is_free_again(noise, monkeypatch):
    """When a pass begins, none before it holds keys or frames."""
    vae, _ = small()
    made, holding, init, settle = [], [], neighbours.Attend.__init__, passes.Waiting.settle

    def noted(self, *given, **named):
        made.append(self)
        init(self, *given, **named)

    def settled(self):
        holding.append([b for b in made if b._keys is not None or b._waiting])
        settle(self)

    monkeypatch.setattr(neighbours.Attend, "__init__", noted)
    monkeypatch.setattr(passes.Waiting, "settle", settled)
    z = noise(1, 16, 2, 2, 2)
    vae.decode(z, plan=in_passes(vae, z, 4))
    assert len(made) == 4 + 3 and holding == [[], [], []]


def test_cancelling(noise, monkeypatch):
    """Passes without results look for it, too."""
    vae, _ = small()
    z, begun, settle = noise(1, 16, 2, 2, 2), [], passes.Waiting.settle
    monkeypatch.setattr(passes.Waiting, "settle", lambda self: begun.append(1) or settle(self))
    with pytest.raises(Cancelled):
        vae.decode(z, plan=in_passes(vae, z, 4), cancel=lambda: len(begun) == 2)
    assert len(begun) == 2


def published_decoder(monkeypatch, kernels=True):
    """The published network on the meta device, whose kernels do nothing."""
    # Frames between passes are in host memory.
    monkeypatch.setattr(passes, "_parked", lambda x: x.shape)
    monkeypatch.setattr(passes, "uploaded", lambda shape, device: torch.empty(shape, device=META, dtype=torch.bfloat16))
    with META:
        decoder = ARCHITECTURE.build(ARCHITECTURE.published.config).decoder.to(torch.bfloat16)
    for positions in (32, 64, 128, 256, 512):
        angles(positions, 64, META)  # the dry run below would compute them on two devices
    if kernels:
        monkeypatch.setattr(block_weights, "kernels_for", lambda *given: object())
        for module, names in ((neighbours, ("normalised", "gated", "turned")), (sampling, ("normalised",))):
            for name in names:
                monkeypatch.setattr(module, name, lambda *given, **named: None)
    return decoder


def goes_through(decoder, latents, count):
    """Return a call that takes a clip through in so many passes."""
    state = State(given=Given(passes=count))

    def run():
        for i in range(latents):
            state.ending = i == latents - 1
            z = decoder.low(torch.empty(1, 128, 1, *SIZE[1:], device=META, dtype=torch.bfloat16), state)
            for _ in decoder.each(z, state):
                pass

    def asked_for_noise(self, frames):
        raise LookupError

    return run


@pytest.mark.parametrize("latents, count, kernels, most", [
    (2, 1, True, 1.22), (14, 1, True, 1.02), (8, 3, True, 1.1), (8, 9, True, 1.24), (8, 3, False, 1.3),
    (2, 0, True, 2), (14, 0, True, 1.5), (14, 0, False, 3),
])  # fmt: skip
def test_memory(latents, count, kernels, most, monkeypatch):
    """A clip states at least what its tensors take on the GPU at once, and little more, in passes and without kernels
    too; and what it takes before its first frames meet their noise (0 passes). Reference attention, which takes more,
    does not run dry."""
    decoder, memory = published_decoder(monkeypatch, kernels), PeakMemory()
    run = goes_through(decoder, latents, count or 1)

    def asked_for_noise(self, frames):
        raise LookupError

    with torch.no_grad(), suppress(LookupError):
        if not count:
            monkeypatch.setattr(sampling.Enter, "push", asked_for_noise)
        peak_bytes(run, memory)
    stated = ARCHITECTURE.published.config.decoder.memory(latents, *SIZE[1:], 2, count, kernels=kernels)
    # Results that are being copied are not in the dry run.
    copied = ON_THEIR_WAY * 4 * neighbours.GROUP * 3 * 32**2 * math.prod(SIZE[1:])
    assert memory.live <= stated <= most * memory.live + bool(count) * copied


@pytest.mark.parametrize("latents, passes", [(16, 1), (31, 1), (16, 3), (16, 9)])
@pytest.mark.parametrize("fed", [True, False])
def test_reserved(latents, passes, fed, monkeypatch):
    """torch's allocator cuts blocks for what is smaller and reserves more than is in use: a plan allows for that."""
    plan = published().plan("decoder", (latents, *SIZE[1:]), Request(), Limits(({1: 13.5, 3: 8, 9: 4}[passes]) * GIB,
                                                                             host=20 * GIB))  # fmt: skip
    assert plan.steps.passes == passes
    decoder, memory = published_decoder(monkeypatch), PeakMemory(reserves=True)
    if fed:
        monkeypatch.setattr(block_weights, "feeds", lambda *given: True)
        monkeypatch.setattr(neighbours, "feed_forward", lambda *given: None)
    with torch.no_grad():
        peak_bytes(goes_through(decoder, latents, passes), memory)
    assert memory.peak <= plan.own_bytes - sum(p.nbytes for p in decoder.parameters())


def published(how=RESERVES):
    """The planner of the published network in bf16 on a GPU, its weights waiting in host memory."""
    return make_planner(ARCHITECTURE, ARCHITECTURE.published.config, torch.bfloat16, DEFAULTS, Mode(), lambda: False,
                        lambda: how, waits=True)  # fmt: skip


def test_plans():
    """Whole frames at every target down to 4 GB, in as few passes as it allows, however long the clip is."""
    plan = published().plan
    made = [plan("decoder", SIZE, Request(), Limits(gb * GIB, host=20 * GIB)) for gb in (13, 10.5, 8, 6, 4)]
    assert [p.steps.passes for p in made] == [1, 3, 3, 5, 9] and not any(p.tiled for p in made)
    assert made[2].peak_bytes < 7.8 * GIB
    longer = plan("decoder", (31, *SIZE[1:]), Request(), Limits(8 * GIB, host=20 * GIB))
    assert longer.peak_bytes == made[2].peak_bytes and longer.host_bytes > made[2].host_bytes
    # One pass keeps none of its frames, only the noise.
    assert made[0].host_bytes == page_locked(3 * 121 * 704 * 1280 * 2)
    seeded = plan("decoder", SIZE, Request(), Limits(8 * GIB, host=20 * GIB), drawn=0)
    assert seeded.host_bytes == made[2].host_bytes - made[0].host_bytes


def test_host_memory():
    """It is for noise and frames together; where it does not do, the plan says how much would."""
    plan = published().plan
    tiles = plan("decoder", SIZE, Request(), Limits(8 * GIB, host=2 * GIB))
    enough = plan("decoder", SIZE, Request(), Limits(8 * GIB, host=6.25 * GIB))
    assert tiles.tiled and enough.steps.passes == 3 and enough.host_bytes <= 6.25 * GIB
    assert f"ram_gb to {enough.host_bytes / GIB:.2f} GB (it is 2.00 GB" in tiles.note
    with pytest.raises(PlanError, match=r"noise of this clip takes 1\.00 GB .* ram_gb allows 0\.50 GB: raise ram_gb"):
        plan("decoder", SIZE, Request(), Limits(13 * GIB, host=GIB // 2))
    assert not plan("decoder", SIZE, Request(), Limits(13 * GIB, host=GIB // 2), drawn=0).tiled


def test_noise_is_drawn_before_the_run():
    """It may be more than the run itself takes: plans count it on the device, once, and on a CPU as it stays there."""
    planner, long = published(Torch()), (4000, 2, 2)
    drawn, weights = 3 * (8 * 4000 - 7) * 64 * 64 * 2, planner._besides("decoder", False)
    run = planner.plan("decoder", long, drawn=0).peak_bytes
    assert run < drawn + weights
    assert planner.plan("decoder", long, limits=Limits(None, host=None)).peak_bytes == drawn + weights
    assert planner.plan("decoder", long, limits=Limits(cpu=True)).peak_bytes == 2 * drawn + weights


def test_one_draw():
    """Noise is that of one draw, whatever parts it is copied in."""
    frames = 2 * PART + 3
    made = FrameNoise(None, frames, 8, 6, torch.bfloat16, torch.device("cpu"), 2)
    whole = torch.randn(2, 3, frames, 8, 6, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    for clip in range(2):
        assert torch.equal(torch.stack([made(i, clip) for i in range(frames)], 1), whole[clip])


def test_room_for_noise():
    """The host goes on while noise is copied if plan and weights leave room for it; not where it waits for copies."""
    vae, decoder = small()
    plan = replace(vae.plan_decode(3, 2, 2), peak_bytes=GIB)
    clips, half = SimpleNamespace(plan=plan, latents=3, height=2, width=2), vae._half("decoder", plan)
    assert half.ahead
    weights = sum(p.nbytes for p in vae.model.decoder.parameters())
    assert half._room(clips) == GIB - weights - decoder.memory(3, 2, 2, 4, 0, kernels=False)
    half.ahead = False
    assert half._room(clips) == 0
    # A draw for which the host waits leaves nothing behind.
    made = FrameNoise(None, 3, 8, 6, torch.float32, torch.device("cpu"), room=GIB)
    assert not made.copying


def test_latents_are_read_ahead(noise, monkeypatch):
    """No latent waits for the GPU: as many as pass the first blocks together go through page-locked memory, in one
    piece, although the clip's channels lie far apart."""
    vae, _ = small()
    read, parts = StagedReader.read, []

    def watched(self, part):
        parts.append((tuple(part.shape), part.is_contiguous()))
        return read(self, part)

    monkeypatch.setattr(StagedReader, "read", watched)
    vae.decode(noise(1, 16, 9, 2, 2))
    assert parts == [((1, 16, n, 2, 2), True) for n in (4, 4, 1)]


def test_weights_wait_for_frames(noise, monkeypatch):
    """The host asks for the norms' largest values twice a clip, and makes a block's weights when its first frames
    come."""
    vae, decoder = small()
    norms_of, weights_of, asked, made = block_weights.Norms.of, block_weights.Weights.of, [], []
    monkeypatch.setattr(block_weights.Norms, "of", lambda blocks: asked.append(len(blocks)) or norms_of(blocks))
    monkeypatch.setattr(block_weights.Weights, "of", lambda *given: made.append(given[0]) or weights_of(*given))
    half, state = vae.model.decoder, State(given=Given(lambda frame: torch.zeros(3, 64, 64)))
    for i, z in enumerate(noise(1, 16, 9, 2, 2).split(1, 2)):
        state.ending = i == 8
        frames = sum(x.shape[2] for x in decoder.each(half.part, z, state))
        if not i:
            assert not frames and not made and asked == [4, 3]
    assert frames == 65 and asked == [4, 3] and len(made) == 4 + 3
    assert made[-1] is half.part("diff_blocks.2")


@torch.no_grad()
def test_bounds():
    """No query and key, as normalised, have a larger product than their block's bound."""
    block = block_weights.Block(64, 32).requires_grad_(False)
    torch.nn.init.normal_(block.attn.q_norm.weight)
    torch.nn.init.normal_(block.attn.k_norm.weight)
    one, (values, bound) = block_weights.Norms.of([block_weights.Block(64, 32), block])
    assert one.bound == pytest.approx(32**0.5)
    query, key = values
    i = (query * key).abs().argmax()
    assert torch.equal(key, block.attn.k_norm.weight) and torch.allclose(query, block.attn.q_norm.weight * 32**-0.5)
    assert 32 * (query * key)[i].abs() <= bound == pytest.approx(32 * float(query.abs().max() * key.abs().max()))


def test_pixels_in_their_places():
    """The result in the order of pixels has the pictures, and the bits, of that in the order of patches."""
    linear, tokens = torch.nn.Linear(16, 48).requires_grad_(False), torch.randn(2, 3, 5, 16)
    made = sampling.Leave(4, torch.ones(16), linear, ONE_STEP, 0)
    (found,) = made.push(neighbours.Frames(tokens, True))
    normed = tokens * (tokens.square().mean(3, keepdim=True) + 1e-6).rsqrt()
    want = torch.stack([sampling.from_patches(one, 4) for one in linear(normed)])
    assert found.ends and found.tokens.shape == (2, 12, 20, 3)
    torch.testing.assert_close(found.tokens, want)
    x = torch.randn(2, 3, 5, 48)
    rows = x.unflatten(3, (3, 4, 4)).transpose(3, 5).flatten(3)
    placed = torch.stack([sampling.from_patches(one, 4) for one in x])
    assert torch.equal(sampling.from_rows(rows, 4), placed)


def test_keys_of_whole_groups(noise, monkeypatch):
    """In the first stages one product makes the keys of a group when it comes; the last blocks make no more than the
    windows of the group that goes on hold. No block after which nothing needs the context keeps it."""
    vae, _ = small()
    made, kept, projected, finish = {}, [], neighbours.Attend._projected, neighbours.Attend._finish

    def watched(self, x, first, query, keys):
        if keys is not None:
            made.setdefault(self, []).append(len(x))
        projected(self, x, first, query, keys)

    def finished(self, frames, window):
        kept.append((self._after is None, [f.context is None for f in (frames, *self._waiting)]))
        finish(self, frames, window)

    monkeypatch.setattr(neighbours.Attend, "_projected", watched)
    monkeypatch.setattr(neighbours.Attend, "_finish", finished)
    vae.decode(noise(1, 16, 3, 2, 2))
    early, (_, *blocks) = list(made.values())[:3], list(made.values())[3:]
    assert [sum(counts) for counts in early] == [5, 5, 9] and all(set(counts[:-1]) == {4} for counts in early)
    assert all(sum(counts) == 17 for counts in blocks) and {4, 1} <= {n for counts in blocks for n in counts}
    assert {tuple(set(gone)) for is_last, gone in kept if not is_last} == {(False,)}
    assert all(gone == [True] * len(gone) for is_last, gone in kept if is_last)
