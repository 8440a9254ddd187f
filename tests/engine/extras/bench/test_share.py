"""Files on GPUs, and the table that is made of them."""

import json

import pytest
import torch
from zerowaste_vae.engine.extras.bench import schema, share
from zerowaste_vae.engine.extras.cli import main

CPU = torch.device("cpu")


def test_gpu_table(gpu_report):
    """The table has a row for each decode of this pack."""
    gpu_report["environment"] |= {"schedules": "tuned on this GPU (5 kinds of layers)", "triton": "3.7.1"}
    head, rule, *rows = share.gpus([gpu_report])
    assert head.count("|") == rule.count("|") == 10
    assert len(rows) == 2  # two targets; a peer and what did not run have no place
    first = [c.strip() for c in rows[0].strip("|").split("|")]
    assert first[:2] == ["Made-up GPU", "seedvr2"] and first[4:7] == ["25.00", "4.00", "65.00"]
    assert first[7] == "tuned on this GPU (5 kinds of layers)" and "triton 3.7.1" in first[8]
    assert "under 13 GB" in "".join(rows) and all(row.count("|") == 10 for row in rows)


@pytest.mark.parametrize("name", ["a|b", "<img src=x onerror=alert(1)>", "[a](http://b)", "`x`\n| y", "x" * 5000, 7])
def test_gpu_table_is_text(gpu_report, name):
    """Text of strangers cannot break the table."""
    gpu_report["environment"]["gpu"] = name
    rows = list(share.gpus([gpu_report]))[2:]
    assert all(row.count("|") == 10 and len(row) < 1000 for row in rows)
    assert not any(c in row.strip("| ") for row in rows for c in "<>[]`\n")


def test_command(gpu_report, tmp_path, capsys):
    """The command prints the table."""
    path = tmp_path / "r.json"
    path.write_text(json.dumps(gpu_report))
    assert main(["bench", "report", "--gpus", str(path), str(path)]) == 0
    assert capsys.readouterr().out.count("Made-up GPU") == 4


def test_untuned(measured):
    """A device that was not tuned adds nothing to a report."""
    assert share.with_tuning(measured, CPU) is measured


def test_shared_file(monkeypatch, tiny):
    """A shared file is a valid report."""
    monkeypatch.setattr(share, "read_weights", lambda weights: tiny)
    monkeypatch.setattr(share, "CLIP", (5, 24, 16))
    monkeypatch.setattr(share, "RUNS", 1)
    monkeypatch.setattr(share, "COMPARED", 1)
    report = share.measured("random", "fp32", CPU, None)
    schema.check(json.loads(json.dumps(report)), "it")
    assert len(list(share.gpus([report]))) == 3
