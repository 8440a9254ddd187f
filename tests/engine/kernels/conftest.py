"""Kernels run in Triton's interpreter here. It decides when triton is imported, so the switch is set before that."""

import os

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")

FP8 = torch.float8_e4m3fn


@pytest.fixture
def interpreter(monkeypatch):
    """Small tiles on the interpreter: several per plane, rows shared between tiles, a ragged last one."""
    pytest.importorskip("triton", reason="the kernels need Triton; the references are tested without it")
    from zerowaste_vae.engine.kernels.conv3d import schedules

    tiles = {key: schedules.Schedule(32, 32, 32, 4, 2) for key in schedules.SCHEDULES[90]}
    monkeypatch.setitem(schedules.SCHEDULES, 90, tiles)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(7)
