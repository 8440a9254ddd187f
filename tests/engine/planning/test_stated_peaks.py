"""What is stated for every component, fused and plain, in 16 and 8 bit, under four targets: to the byte as recorded."""

import json

import pytest

from .stated_peaks import RECORD, components, peaks

RECORDED = json.loads(RECORD.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def found():
    return {name: component for name, *component in components()}


def test_all_are_recorded(found):
    assert list(RECORDED) == list(found)


@pytest.mark.parametrize("name", RECORDED)
def test_peaks_are_those_recorded(found, name):
    assert peaks(*found[name]) == RECORDED[name]
