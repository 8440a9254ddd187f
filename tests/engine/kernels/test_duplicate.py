"""Repeated channels shuffled into samples: the kernel and its reference against the plain modules of both families."""

import pytest
import torch
from zerowaste_vae.engine.families.wan.around import duplicate_up
from zerowaste_vae.engine.kernels.duplicate import duplicate
from zerowaste_vae.engine.network.ops.shortcut import shuffled

# D, H, W, C, K, frames, drop
SHAPES = [(3, 4, 5, 8, 2, 2, 1), (3, 4, 5, 8, 8, 2, 0), (2, 3, 7, 12, 24, 1, 0), (1, 5, 1, 16, 48, 2, 1),
          (0, 4, 5, 8, 8, 1, 0)]  # fmt: skip


def plain(x, k, frames, drop, samples_first):
    x = x.permute(3, 0, 1, 2)[None]
    if samples_first:
        y = shuffled(x.repeat_interleave(4 * frames * k // x.shape[1], 1), frames)[:, :, drop:]
    else:
        y = duplicate_up(x, k, frames == 2, drop == 1)
    return y[0].permute(1, 2, 3, 0)


def compare(shape, samples_first, backend):
    d, h, w, c, k, frames, drop = shape
    x = torch.randn(d, h + 1, w, c + 4).half()[:, 1:, :, :c]  # rows of a larger frame
    wanted = plain(x, k, frames, drop, samples_first)
    room = torch.full((frames * d - drop, 2 * h + 3, 2 * w, k), 9.0).half()
    duplicate(x, room[:, 1:-2], frames=frames, drop=drop, samples_first=samples_first, backend=backend)
    assert torch.equal(room[:, 1:-2], wanted)
    assert (room[:, :1] == 9).all()
    assert (room[:, -2:] == 9).all()


@pytest.mark.parametrize("samples_first", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_reference(shape, samples_first):
    compare(shape, samples_first, "reference")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("samples_first", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel(shape, samples_first):
    compare(shape, samples_first, "triton")


@pytest.mark.parametrize(
    ("out", "more"),
    [((2, 8, 10, 8), {"frames": 2}), ((4, 8, 9, 8), {"frames": 2}), ((4, 8, 10, 3), {"frames": 2}),
     ((2, 8, 10, 8), {"frames": 2, "drop": 2})],
)  # fmt: skip
def test_other_shapes_are_refused(out, more):
    with pytest.raises(ValueError, match="cannot fill"):
        duplicate(torch.zeros(2, 4, 5, 16), torch.zeros(out), **more)


def test_other_layouts_are_refused():
    out = torch.zeros(2, 8, 10, 8)
    with pytest.raises(ValueError, match="one type"):
        duplicate(torch.zeros(2, 4, 5, 16, dtype=torch.float16), out)
    with pytest.raises(ValueError, match="one type"):
        duplicate(torch.zeros(2, 16, 4, 5).permute(0, 2, 3, 1), out)
