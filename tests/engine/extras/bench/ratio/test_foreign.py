"""Decodes whose products torch's own libraries make are refused."""

import pytest
import torch
from zerowaste_vae.engine.extras.bench.ratio.foreign import refuse_foreign
from zerowaste_vae.engine.extras.bench.ratio.text import RatioError

FLOP = 2.0 * 32**3


@pytest.mark.parametrize("product", [
    lambda: torch.ones(32, 32) @ torch.ones(32, 32),
    lambda: torch._int_mm(*[torch.ones(32, 32, dtype=torch.int8)] * 2),
    lambda: torch.nn.functional.conv2d(torch.ones(1, 32, 32, 1), torch.ones(32, 32, 1, 1)),
])  # fmt: skip
def test_products_of_torch_are_found(product):
    with torch.inference_mode(), pytest.raises(RatioError, match="% of its products are torch's own"):
        refuse_foreign(product, 4 * FLOP)
    refuse_foreign(product, 200 * FLOP)


def test_other_operators_count_nothing():
    refuse_foreign(lambda: (torch.ones(64) + 1).sum(), 1.0)
