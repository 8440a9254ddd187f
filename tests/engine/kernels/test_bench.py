import argparse

import pytest
import torch
from zerowaste_vae.engine.bench.kernels import HEADER, Row
from zerowaste_vae.engine.bench.timing import Ceilings, Time
from zerowaste_vae.engine.commands import bench
from zerowaste_vae.engine.errors import InputError


def parse(*argv):
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", "kernels", *argv])


def test_a_cpu_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(InputError, match="CUDA GPU"):
        bench.run_kernels(parse("--device", "cpu", "--json", str(tmp_path / "rows.json")))
    assert not list(tmp_path.iterdir())


def test_ceilings_and_lines():
    tops = Ceilings(700.0, 690.0, None, None, 1300.0, 4.0)
    assert "fp16 700" in tops.line() and "fp8" not in tops.line()
    row = Row("conv3d bias", "1x2x3 4->5", "fp16", "this pack", Time(2.0, 1.5, 3.0, 9), 350.0, "F", 700.0)
    assert "50.0 % of 700" in row.line() and len(HEADER) >= 100
    assert row.record()["time"] == {"median": 2.0, "low": 1.5, "high": 3.0, "runs": 9}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_rows_of_a_gpu(capsys, tmp_path):
    assert bench.run_kernels(parse("--only", "norm_act", "--json", str(tmp_path / "rows.json"))) == 0
    assert "this pack" in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir()] == ["rows.json"]
