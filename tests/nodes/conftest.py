"""The pack beside a host that is not there."""

from __future__ import annotations

import pytest

from .fake_host import beside
from .tiny_files import Folders


@pytest.fixture
def pack():
    with beside() as found:
        yield found


@pytest.fixture
def folders(pack, tmp_path):
    """Its folders of VAEs."""
    return Folders(pack, tmp_path)
