"""The pack beside a host that is not there."""

from __future__ import annotations

import pytest

from .fake_host import beside


@pytest.fixture
def pack():
    with beside() as found:
        yield found
