"""On a real GPU: the Winograd form in registers against its reference, and the same bits in every call."""

import pytest
import torch
import torch.nn.functional as F
from zerowaste_vae.engine.kernels.conv3d import Epilogue, Geometry, conv3d, pack_tiles
from zerowaste_vae.engine.kernels.conv3d.winograd2d import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
#: D, H, W, C, K, frames of the window, slots, first slot, origin.
CALLS = [
    (3, 37, 75, 64, 256, 3, 5, 3, (0, 0)),
    (1, 3, 5, 64, 192, 1, 1, 0, (0, 0)),
    (2, 20, 101, 96, 96, 3, 4, 2, (2, 1)),
    (2, 17, 33, 128, 64, 2, 4, 3, (0, 2)),
    (1, 300, 420, 80, 96, 1, 1, 0, (0, 0)),
]


def case(call, dtype):
    d, h, w, c, k, kt, slots, start, (top, left) = call
    x = F.silu(torch.randn(slots, h + 2 + top, w + 2 + left, c, device="cuda")).to(dtype)
    weight = pack_tiles(torch.randn(k, c, kt, 3, 3, device="cuda") * (2 / (9 * kt * c)) ** 0.5, dtype)
    whole = torch.full((d, h + 2, w + 2, k), torch.nan, device="cuda", dtype=dtype)
    return x, weight, whole[:, 1:-1, 1:-1], {"geometry": Geometry(origin=(top, left)), "start": start}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("groups", [0, 8])
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
def test_kernel_is_the_reference(call, dtype, groups, residual):
    x, weight, out, how = case(call, dtype)
    added = torch.randn(out.shape, device="cuda").to(dtype) if residual else None
    epilogue = Epilogue(bias=torch.randn(out.shape[3], device="cuda"), residual=added, groups=groups)
    expected = torch.empty_like(out)
    conv3d(x, weight, expected, epilogue=epilogue, backend="reference", **how)
    partials = launch.launch(x, weight, out, how["geometry"], epilogue, how["start"])
    # Sums in another order may round to the next value.
    step = 2.0 ** (-10 if dtype == torch.float16 else -7)
    largest = expected.abs().max().item()
    torch.testing.assert_close(out.float(), expected.float(), rtol=1.01 * step, atol=step * largest / 8)
    assert (out != expected).float().mean() < 0.02
    if groups:
        d, h, w, k = out.shape
        stored = out.double().reshape(d, h * w, k // partials.span, partials.span)
        for at, exact in enumerate((stored.sum((1, 3)), stored.square().sum((1, 3)))):
            found = partials.data[..., at].double().sum(1)
            assert (found - exact).abs().max() < 1e-5 * stored.square().sum((1, 3)).max()


def test_residual_may_be_the_output():
    x, weight, out, how = case(CALLS[0], torch.float16)
    added = torch.randn(out.shape, device="cuda").half()
    launch.launch(x, weight, out, how["geometry"], Epilogue(residual=added), how["start"])
    launch.launch(x, weight, added, how["geometry"], Epilogue(residual=added), how["start"])
    assert torch.equal(out, added)


def test_phases():
    """A launch for each, into every second row and column."""
    x = torch.randn(3, 23, 19, 64, device="cuda").half()
    weight = pack_tiles(torch.randn(4 * 128, 64, 3, 3, 3, device="cuda") * 0.03, torch.float16, (1, 2, 2))
    out, expected = torch.full((2, 1, 42, 34, 128), torch.nan, device="cuda", dtype=torch.float16)
    epilogue = Epilogue(bias=torch.randn(4 * 128, device="cuda"))
    launch.launch(x, weight, out, Geometry(), epilogue, 0)
    conv3d(x, weight, expected, epilogue=epilogue, backend="reference")
    assert (out.float() - expected.float()).abs().max() < 2**-8 * expected.abs().max()


@pytest.mark.parametrize("k", [96, 128])
def test_bands_and_frames_have_the_same_bits(k):
    """Sums too."""
    x = torch.randn(6, 199, 162, 64, device="cuda").half()
    weight = pack_tiles(torch.randn(k, 64, 3, 3, 3, device="cuda") * 0.04, torch.float16)
    whole = torch.empty(4, 197, 160, k, device="cuda", dtype=torch.float16)
    epilogue = Epilogue(groups=8)
    sums = launch.launch(x, weight, whole, Geometry(), epilogue, 0).data
    for d, (first, last) in [(0, (0, 64)), (2, (64, 197)), (3, (192, 197))]:
        part, band = x[d : d + 3, first : last + 2].contiguous(), torch.empty_like(whole[d : d + 1, first:last])
        found = launch.launch(part, weight, band, Geometry(first_row=first, frame_rows=197), epilogue, 0).data
        assert torch.equal(band[0], whole[d, first:last])
        blocks = sums.shape[1] // -(-197 // 8)
        assert torch.equal(found[0], sums[d, first // 8 * blocks : -(-last // 8) * blocks])
