"""Networks of a test module's own sizes."""

import pytest
from zerowaste_vae.engine.network.plain import Network


@pytest.fixture(scope="module")
def build(request, seed_model):
    """build(program, dtype) -> a seeded decoder of the module's `Config`."""

    def make(program, dtype):
        model = Network(request.module.Config(), None, program).requires_grad_(False)
        seed_model(model, 5)
        return model.to(dtype).decoder

    return make
