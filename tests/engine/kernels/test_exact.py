"""The sum of products is the convolution."""

import pytest
import torch
from zerowaste_vae.engine.kernels import exact


@pytest.mark.parametrize(
    ("kernel", "stride", "padding"),
    [
        ((3, 3, 3), (1, 1, 1), (0, 1, 1)),
        ((1, 1, 1), (1, 1, 1), (0, 0, 0)),
        ((1, 3, 3), (1, 2, 2), (0, 0, 0)),
        ((3, 3, 3), (2, 2, 2), (0, 0, 0)),
    ],
)
def test_equals_torch(noise, kernel, stride, padding):
    x, weight, bias = noise(2, 5, 5, 7, 8), noise(6, 5, *kernel, seed=1), noise(6, seed=2)
    expected = torch.nn.functional.conv3d(x, weight, bias, stride, padding)
    bound = 1e-5 * expected.std().item()  # sums of up to 135 products, in whatever order this CPU takes them
    torch.testing.assert_close(exact.conv3d(x, weight, bias, stride, padding), expected, rtol=0, atol=bound)
