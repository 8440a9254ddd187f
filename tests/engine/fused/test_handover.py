"""A clip that changes Runs between two chunks: other chunks, other parking, the same frames."""

import pytest
import torch
from zerowaste_vae.engine.archs import wan
from zerowaste_vae.engine.archs.seedvr2 import ARCHITECTURE, Config
from zerowaste_vae.engine.fused.handover import hand_over, take_over
from zerowaste_vae.engine.fused.parking import Parking
from zerowaste_vae.engine.network.fused import FusedDecoder, FusedEncoder

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
    assert set(clip.histories) == {key for key, visit in run.visits.items() if visit.halo}
    assert all(h.device.type == "cpu" and h.shape[0] == run.visits[key].halo for key, h in clip.histories.items())


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
