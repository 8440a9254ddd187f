"""The record of small networks' digests: the same twice, and every difference is printed."""

import json

from . import digests


def test_records(tmp_path, monkeypatch, capsys):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    monkeypatch.setattr(digests, "SMALL", {"flux": digests.SMALL["flux"]})
    monkeypatch.setattr(digests, "INT8", ())
    assert digests.main([str(old)]) == 0
    assert digests.main([str(new), "--compare", str(old)]) == 0
    record = json.loads(old.read_text())
    assert len(record) == 14 and record["flux fp32 fused decode whole"] != record["flux fp32 plain decode whole"]
    moved, gone = list(record)[:2]
    record |= {moved: "0"}
    record["another"] = record.pop(gone)
    old.write_text(json.dumps(record))
    capsys.readouterr()
    assert digests.main([str(new), "--compare", str(old)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.partition(":")[0] for line in lines) == sorted([moved, gone, "another"])
