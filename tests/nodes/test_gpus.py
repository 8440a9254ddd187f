"""GPUs beside the host's own: room is made on them, and nothing of ours stays."""

from types import SimpleNamespace

import pytest
import torch
from zerowaste_vae.nodes.gpus import others


class Engine:
    device = torch.device("cpu")
    released = 0

    def release_copies(self):
        self.released += 1


def test_auto_is_the_hosts_own_alone():
    engine = Engine()
    with others(engine, "auto", None, None) as gpus:
        assert gpus == {}
    assert engine.released == 0


def test_room_is_made_on_the_others_and_copies_go(monkeypatch):
    engine, asked = Engine(), []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    plan = SimpleNamespace(peak_bytes=7)
    with pytest.raises(KeyError), others(engine, "cpu,cuda:1", plan, lambda *of: asked.append(of)) as gpus:
        assert gpus == {"devices": "cpu,cuda:1"} and asked == [(7, torch.device("cuda", 1))]
        raise KeyError
    assert engine.released == 1
