"""Kernels run in Triton's interpreter here (tests/conftest.py switches it on). Not on a machine with a GPU: the switch
holds for the whole process, and there test_gpu.py runs the real thing."""

import os

import pytest
import torch


@pytest.fixture
def interpreter(monkeypatch):
    """Small tiles on the interpreter: several per plane, rows shared between tiles, a ragged last one."""
    pytest.importorskip("triton", reason="the kernels need Triton; the references are tested without it")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("a GPU is here: test_gpu.py checks the kernels on it")
    from zerowaste_vae.engine.kernels.conv3d import schedules

    small = schedules.Schedule(positions=32, columns=32, depth=32, warps=4, stages=2)
    monkeypatch.setitem(schedules.SCHEDULES, 90, dict.fromkeys(schedules.SCHEDULES[90], small))


@pytest.fixture(params=["reference", "triton"])
def backend(request):
    """Its name; kernels run in the interpreter."""
    if request.param == "triton":
        request.getfixturevalue("interpreter")
    return request.param


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(7)
