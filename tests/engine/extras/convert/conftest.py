"""As those of the tests of reading."""

from ...checkpoints.conftest import craft, save, wan_shapes, wan_weights

__all__ = ["craft", "save", "wan_shapes", "wan_weights"]
