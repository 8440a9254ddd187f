import argparse

import pytest
import torch
from zerowaste_vae.engine.errors import InputError
from zerowaste_vae.engine.extras.bench import kernels, rows, winograd
from zerowaste_vae.engine.extras.bench.calls import Spread
from zerowaste_vae.engine.extras.bench.rows import HEADER, Row
from zerowaste_vae.engine.extras.bench.timing import Ceilings
from zerowaste_vae.engine.extras.cli import bench
from zerowaste_vae.engine.kernels.prebuilt.errors import PrebuiltError
from zerowaste_vae.engine.kernels.targets import triton_version


def parse(*argv):
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", "kernels", *argv])


def test_cpu(tmp_path):
    """A CPU is refused, and nothing is written."""
    with pytest.raises(InputError, match="CUDA GPU"):
        bench.run_kernels(parse("--device", "cpu", "--json", str(tmp_path / "rows.json")))
    assert not list(tmp_path.iterdir())


def test_lines():
    """Ceilings and rows read as text."""
    tops = Ceilings(700.0, 690.0, None, None, 1300.0, 4.0)
    assert "fp16 700" in tops.line() and "fp8" not in tops.line()
    row = Row("conv3d bias", "1x2x3 4->5", "fp16", "this pack", Spread(2.0, 1.5, 3.0, 9), 350.0, "F", 700.0)
    assert "50.0 % of 700" in row.line() and len(HEADER) >= 100
    assert row.record()["time"] == {"median": 2.0, "low": 1.5, "high": 3.0, "runs": 9}


def test_forms(monkeypatch):
    """On a CPU through the references: which calls a case makes, with which arguments."""
    monkeypatch.setattr(rows, "measure", lambda call, device: (call(), Spread(1.0, 1.0, 1.0, 1))[1])
    monkeypatch.setattr(winograd, "matrix_rate", lambda *_: None)
    cases = winograd.layer(kernels.Bench(torch.device("cpu")), (1, 5, 7, 64), torch.float16)
    by = [(row.operator, row.who) for row in cases]
    forms = ["direct", "Winograd", "direct"]
    assert [who for what, who in by if what == "winograd layer"] == forms
    assert [who for what, who in by if what == "winograd conv3d"] == forms
    assert len(by) == 3 + 3


def test_kernels_that_no_set_has(monkeypatch):
    """Without Triton a case ends with a line, and the next ones are measured."""
    row = Row("norm_act", "1x2x3 4", "fp16", "this pack", Spread(2.0, 1.5, 3.0, 9), 3.0, "B", 4.0)

    def norm_act(self, d, *rest):
        yield row
        if (d, *rest[:3]) == kernels.NORMS[0]:
            raise PrebuiltError("set C lacks a kernel that this run needs (norm)")

    monkeypatch.setattr(kernels.Bench, "norm_act", norm_act)
    found = list(kernels.Bench(torch.device("cpu")).rows(["norm_act"]))
    lines = [one for one in found if isinstance(one, str)]
    assert [*map(type, found)][:3] == [Row, str, Row] and len(found) - len(lines) == len(kernels.NORMS) * len(lines)
    assert lines[0].startswith("norm_act: left out: set C lacks a kernel that this run needs (norm); without Triton ")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.skipif(triton_version() is None, reason="Triton's compiler makes the kernels that only benchmarks launch")
def test_rows_gpu(capsys, tmp_path, monkeypatch):
    """On a GPU rows are printed and written."""
    monkeypatch.setattr(kernels, "NORMS", kernels.NORMS[1:])
    assert bench.run_kernels(parse("--only", "norm_act", "--json", str(tmp_path / "rows.json"))) == 0
    assert "this pack" in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir()] == ["rows.json"]
