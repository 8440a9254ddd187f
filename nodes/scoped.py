"""Settings of torch that hold during the calls of one VAE only."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import ExitStack

from torch import Tensor

from ..engine.kernels.precision import fp32_math
from ..engine.options import Options
from ..engine.planning.fusable import availability
from ..engine.run.scope import CUDNN_BENCHMARK


def with_scoped_settings(vae: object, options: Options) -> tuple[object, list[str]]:
    """Return a VAE the engine does not know, with the settings of torch that `options` name in force during its own
    calls.

    Also return the settings that apply here. Weights and network are shared, and the given VAE is not changed; where no
    setting applies it is returned itself.
    """
    reasons = availability(vae.device, "", None, vae.vae_dtype)
    names = [n for n in ("tf32", "cudnn_benchmark") if getattr(options, n) and reasons[n] is None]
    if not names:
        return vae, []
    scoped = copy.copy(vae)
    for method in ("decode", "decode_tiled", "encode", "encode_tiled"):
        setattr(scoped, method, _scoped(getattr(vae, method), names))
    return scoped, names


def _scoped(call: Callable[..., Tensor], names: list[str]) -> Callable[..., Tensor]:
    @functools.wraps(call)
    def scoped(*args: object, **kwargs: object) -> Tensor:
        with ExitStack() as stack:
            if "tf32" in names:
                stack.enter_context(fp32_math(tf32=True))
            if "cudnn_benchmark" in names:
                stack.enter_context(CUDNN_BENCHMARK.hold(True))
            return call(*args, **kwargs)

    return scoped
