"""Numbers with their words."""

import pytest
from zerowaste_vae.engine.system.words import many


@pytest.mark.parametrize("count, text", [(0, "0 frames"), (1, "1 frame"), (2, "2 frames"), (21, "21 frames")])
def test_a_number_with_its_word(count, text):
    assert many(count, "frame") == text
