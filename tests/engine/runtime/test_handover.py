"""A clip that changes Runs between two chunks: other chunks, other parking, the same frames."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from zerowaste_vae.engine.execution.guard import Guard
from zerowaste_vae.engine.execution.progress import Ticker
from zerowaste_vae.engine.families import wan
from zerowaste_vae.engine.families.seedvr2 import ARCHITECTURE, Config
from zerowaste_vae.engine.network.fused import FusedDecoder, FusedEncoder
from zerowaste_vae.engine.runtime import handover
from zerowaste_vae.engine.runtime.handover import hand_over, take_over
from zerowaste_vae.engine.runtime.parking import Parked, Parking
from zerowaste_vae.engine.runtime.pinned import POOL

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(seed_model):
    model = ARCHITECTURE.build(Config((8, 8, 16, 16), (8, 8, 16, 16), 16, 4)).requires_grad_(False)
    seed_model(model, 3)
    return model


def relay(legs, plan, step):
    """Run after Run, each over the chunks of its leg (chunk, frames, parking, chunk sizes), and then freed."""
    out, clip = [], None
    for chunk, frames, parking, sizes in legs:
        run = plan(chunk, frames, parking)
        run.allocate()
        if clip is not None:
            take_over(run, clip)
        for size in sizes:
            assert hand_over(run) is not None or not out
            with run.chunk():
                assert hand_over(run) is None
                step(run, size, frames, out)
        clip = hand_over(run)
        run.free()
    return torch.cat(out), clip


LEGS = [
    [(2, 4, None, [2]), (1, 1, None, [1, 1]), (2, 2, None, [1])],
    [(1, 1, None, [1, 1]), (1, 2, Parking(None, 0), [1, 1]), (1, 4, None, [1])],
    [(2, 2, Parking(None, 0), [2]), (3, 4, Parking(None, 1 << 30, buffers=3, near=200_000), [3])],
]


@pytest.mark.parametrize("legs", LEGS)
@torch.no_grad()
def test_decoder(model, noise, legs, atol):
    fused, z = FusedDecoder(model.decoder, torch.float32), noise(5, 9, 3, 16)

    def plan(chunk, frames, parking):
        return fused.plan(chunk, 9, 3, frames, torch.float32, CPU, parking)

    def step(run, size, frames, out):
        done = run.done["latents"]
        fused.chunk(run, z[done : done + size], frames, torch.float32, lambda pixels: out.append(pixels.clone()))

    expected, _ = relay([(5, 0, None, [5])], plan, step)
    actual, clip = relay(legs, plan, step)
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)
    # Every convolution with a history is there, and nothing else.
    run = plan(1, 1, None)
    assert set(clip.histories) == {key for key, visit in run.visits.items() if visit.history}
    assert all(h.device.type == "cpu" and h.shape[0] == run.visits[key].history for key, h in clip.histories.items())


@pytest.mark.parametrize("legs", LEGS)
@torch.no_grad()
def test_encoder(model, noise, legs, atol):
    fused, video = FusedEncoder(model.encoder, torch.float32), noise(17, 70, 18, 3)

    def plan(chunk, frames, parking):
        return fused.plan(chunk, 70, 18, frames, CPU, parking)

    def step(run, size, frames, out):
        done = run.done["frames"]
        out.append(fused.chunk(run, video[done : done + 4 * size - 3 * (done == 0)], frames).clone())

    expected, _ = relay([(5, 0, None, [5])], plan, step)
    torch.testing.assert_close(relay(legs, plan, step)[0], expected, rtol=0, atol=atol)


@pytest.mark.parametrize("config", [
    wan.Config((8, 8, 16, 16), (8, 16, 16, 16)),
    wan.Config((8, 16, 32, 32), (8, 16, 32, 32), 48, 2),
])  # fmt: skip
@torch.no_grad()
def test_wan_decoder(seed_model, noise, config, atol):
    """Whose first frames of a clip take another way than the later ones."""
    network = wan.WAN21.build(config).requires_grad_(False)
    seed_model(network, 3)
    fused, z = FusedDecoder(network.decoder, torch.float32), noise(4, 3, 2, config.latent_channels)

    def plan(chunk, frames, parking):
        return fused.plan(chunk, 3, 2, frames, torch.float32, CPU, parking)

    def step(run, size, frames, out):
        done = run.done["latents"]
        fused.chunk(run, z[done : done + size], frames, torch.float32, lambda pixels: out.append(pixels.clone()))

    expected, _ = relay([(4, 0, None, [4])], plan, step)
    legs = [(1, 1, None, [1]), (2, 4, Parking(None, 0), [2]), (1, 2, None, [1])]
    torch.testing.assert_close(relay(legs, plan, step)[0], expected, rtol=0, atol=atol)


@torch.no_grad()
def test_the_same_run_goes_on_with_the_same_bits(model, noise):
    fused, z = FusedDecoder(model.decoder, torch.float32), noise(4, 3, 3, 16)
    run = fused.plan(1, 3, 3, 2, torch.float32, CPU)

    def decode(between):
        run.allocate()
        out = []
        for part in z.split(1):
            with run.chunk():
                fused.chunk(run, part, 2, torch.float32, lambda pixels: out.append(pixels.clone()))
            between()
        run.free()
        return torch.cat(out)

    def move():
        clip = hand_over(run)
        run.free()
        run.allocate()
        take_over(run, clip)

    assert torch.equal(decode(move), decode(lambda: None))


@pytest.fixture
def parked(model, noise):
    """A run between two chunks, with all its histories in host memory."""
    fused = FusedDecoder(model.decoder, torch.float32)
    run = fused.plan(1, 9, 3, 4, torch.float32, CPU, Parking(None, 0))
    run.allocate()
    for part in noise(2, 9, 3, 16).split(1):
        with run.chunk(), torch.no_grad():
            fused.chunk(run, part, 4, torch.float32, lambda pixels: None)
    yield run
    run.free()


class Copies(TorchDispatchMode):
    """Bytes of the host tensors made inside, all of them and at most at once."""

    def __init__(self):
        super().__init__()
        self.made = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and all(r.alias_info is None for r in func._schema.returns):
            self.made += out.nbytes
        return out


def size(run):
    return sum(p.rows.nbytes for holder, key in run.holders() for p in holder.history(key))


def test_room_before_copies(parked, monkeypatch):
    """Room is asked for before anything is copied."""
    monkeypatch.setattr(handover, "available_ram", lambda: size(parked))  # as much, and nothing to spare
    with Copies() as copies, pytest.raises(MemoryError, match="histories"):
        hand_over(parked)
    assert copies.made == 0


def test_copied_once(parked):
    """Histories are copied once and freed as they arrive."""
    whole = size(parked)
    assert whole > 0
    with Copies() as copies:
        clip = hand_over(parked)
    assert copies.made == whole == sum(h.nbytes for h in clip.histories.values())
    there, adopt = [], Parked.adopt

    def counted(self, key, frames):
        there.append(sum(h.nbytes for h in clip.histories.values()))
        assert key not in clip.histories
        adopt(self, key, frames)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parked, "adopt", counted)
        take_over(parked, clip)
    assert not clip.histories and there == sorted(there, reverse=True) and there[-1] == 0


def test_idle_blocks_make_room(parked, monkeypatch):
    """Memory that is only kept for a next run is given back before the host is asked."""
    monkeypatch.setattr(handover, "available_ram", lambda: 0 if POOL.idle_bytes else 1 << 40)
    POOL.give(POOL.take(1 << 16))
    assert hand_over(parked) is not None


def test_a_guard_gives_a_clip_away():
    """Else its histories stay to the clip's end."""
    guard = Guard(Ticker(None, None), CPU, Counter())
    guard.part = 1
    guard.keep(lambda: "the clip")
    assert guard.taken_over(1) == "the clip" and guard.handover is None and guard.taken_over(1) is None
    guard.keep(lambda: "the clip")
    assert guard.taken_over(2) is None and guard.handover is None
