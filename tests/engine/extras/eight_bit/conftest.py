"""As those of the other tests of 8 bit."""

from ...precision.conftest import cache, wide_file

__all__ = ["cache", "wide_file"]
