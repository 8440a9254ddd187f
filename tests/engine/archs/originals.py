"""How near outputs come to those that the original implementations gave."""

import torch

#: Of an output's standard deviation.
BOUND = 4e-5


def close(actual, expected, bound=BOUND):
    torch.testing.assert_close(actual, expected, rtol=0, atol=bound * float(expected.std()))
