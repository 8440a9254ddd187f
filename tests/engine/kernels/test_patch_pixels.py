"""The network of a pixel against its reference, and what its bits may depend on."""

import sys
from pathlib import Path

import pytest
import torch
from zerowaste_vae.engine.families.mage.kernels.patch_pixels import PatchNetwork, patch_pixels
from zerowaste_vae.engine.families.mage.kernels.patch_pixels.schedules import Schedule
from zerowaste_vae.engine.kernels.to_pixels import BYTES, RAW, UNIT

sys.path.insert(0, str(Path(__file__).parent))
from helpers import error

SCHEDULE = Schedule(16, 32, 4, 1)


def network(dtype, channels=48, features=16, real=16, patch=2, blocks=2):
    g, p = torch.Generator().manual_seed(7), patch**2

    def draw(*shape, fan=1.0):
        made = torch.randn(*shape, generator=g) / fan**0.5
        made[..., real:] *= made.shape[-1] != features
        return made

    streams = [draw(p, features, channels, fan=channels) for _ in range(2)]
    for stream in streams:
        stream[:, real:] = 0
    products = draw(blocks, 5, features, features, fan=real)
    products[..., real:, :] = 0
    vectors = draw(blocks, 7, features) * 0.2
    vectors[:, 1, :real] += 1
    vectors[:, 3, :real] += 1
    first, second = (s.to(dtype) for s in streams)
    return PatchNetwork(first, draw(p, features), second, draw(p, features), products.to(dtype), vectors,
                        draw(3, features, fan=real), torch.randn(3, generator=g) * 0.1, real)  # fmt: skip


@pytest.mark.parametrize("stored, pixels", [(torch.float32, RAW), (torch.float16, UNIT), (torch.uint8, BYTES)], ids=str)
@pytest.mark.parametrize("dtype, real", [(torch.float16, 16), (torch.bfloat16, 16), (torch.float16, 8)], ids=str)
def test_pixels(interpreter, dtype, real, stored, pixels):
    weights, x = network(dtype, real=real), torch.randn(2, 3, 5, 96).to(dtype)
    out, want = (torch.zeros(2, 6, 10, 3, dtype=kind) for kind in (stored, torch.float32))
    patch_pixels(x, weights, 1e-6, out, pixels=pixels, backend="triton", schedule=SCHEDULE)
    patch_pixels.reference(x, weights, 1e-6, want, pixels=pixels)
    assert want.std() > 0.2
    # Values between products are rounded to operands, where sums in another order may fall on the other side.
    assert error(out, want) < {torch.uint8: 5e-3}.get(stored, 1e-3 if dtype == torch.float16 else 6e-3)


def test_a_position_does_not_depend_on_the_others(interpreter):
    """Neither on the size of the picture, nor on pictures before it, nor on its place in a program."""
    weights, x = network(torch.float16), torch.randn(2, 4, 6, 96).half()
    whole = torch.empty(2, 8, 12, 3)
    patch_pixels(x, weights, 1e-6, whole, pixels=RAW, backend="triton", schedule=SCHEDULE)
    for rows, columns in ((slice(1, 4), slice(2, 5)), (slice(0, 1), slice(5, 6))):
        part = x[1:, rows, columns].contiguous()
        out = torch.empty(1, 2 * part.shape[1], 2 * part.shape[2], 3)
        patch_pixels(part, weights, 1e-6, out, pixels=RAW, backend="triton", schedule=SCHEDULE)
        own = whole[1:, 2 * rows.start : 2 * rows.stop, 2 * columns.start : 2 * columns.stop]
        assert torch.equal(out, own)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_a_clamp_hides_shows_in_health(backend, value):
    weights, x, health = network(torch.float16), torch.randn(1, 2, 3, 96).half(), torch.zeros(())
    out = torch.empty(1, 4, 6, 3, dtype=torch.uint8)
    patch_pixels(x, weights, 1e-6, out, pixels=BYTES, health=health, backend=backend, schedule=SCHEDULE)
    assert health == 0
    for stream in (0, 48):
        bad = x.clone()
        bad[0, 1, 2, stream + 4] = value
        found = torch.zeros(())
        patch_pixels(bad, weights, 1e-6, out, pixels=BYTES, health=found, backend=backend, schedule=SCHEDULE)
        assert found.isnan()


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match="cannot fill"):
        patch_pixels(torch.zeros(1, 2, 3, 96).half(), network(torch.float16), 1e-6, torch.empty(1, 4, 4, 3), pixels=RAW)
