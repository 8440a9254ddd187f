"""The models of GPU tests are those whose kernels a build of the sets with `--tests` compiles."""

import pytest
import torch

from .gpu_models import MODELS, described


@pytest.mark.parametrize("name", MODELS)
def test_files_have_the_configuration(name):
    architecture, configuration, *arguments = MODELS[name]
    config = configuration(*arguments)
    with torch.device("meta"):
        model = architecture.build(config)
    shapes = {key: tuple(p.shape) for key, p in model.named_parameters()}
    assert architecture.config_of(shapes, described(name, config), config.norm_groups) == config
