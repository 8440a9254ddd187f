"""The cache folder: found again, keyed by content, indifferent to damage."""

import json

import pytest
import torch
from zerowaste_vae.engine.archs.seedvr2 import ARCHITECTURE, Config
from zerowaste_vae.engine.network.fused import FusedDecoder
from zerowaste_vae.engine.precision import prepared, store
from zerowaste_vae.engine.precision.operands import Operands
from zerowaste_vae.engine.precision.policy import Policy, Range, eligible
from zerowaste_vae.engine.precision.store import Store
from zerowaste_vae.engine.precision.table import Table


@pytest.fixture
def table():
    ranges = {"a": Range((1.0, 2.0), (0.5, 0.5)), "b": Range((3.0,), (1.0,)), "c": Range((1.0,), (1.0,))}
    return Table("clip", ranges, {"a": 10, "b": 80, "c": 10}, {"fp8": {"a": 1e-6, "b": 2e-6, "c": 5e-6}})


def test_tables_are_found_by_the_files_content(tmp_path, cache, table):
    path = tmp_path / "v.safetensors"
    path.write_bytes(b"weights")
    assert Store(path).table("decoder") is None
    Store(path).keep("decoder", table)
    Store(path).keep("encoder", table)
    assert Store(path).table("decoder") == table == Store(path).table("encoder")
    copy = tmp_path / "other name.safetensors"
    copy.write_bytes(b"weights")
    assert Store(copy).table("decoder") == table
    path.write_bytes(b"other weights")
    assert Store(path).table("decoder") is None
    assert not list(cache.rglob("*.part"))


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"format": 1}', '{"format":1,"file":"FILE","halves":{"a":3}}'])
def test_damaged_tables_are_measured_anew(tmp_path, table, damage):
    path = tmp_path / "v.safetensors"
    path.write_bytes(b"weights")
    kept = Store(path)
    kept.keep("decoder", table)
    (kept.folder / "tables.json").write_text(damage.replace("FILE", kept.digest))
    again = Store(path)
    assert again.table("decoder") is None
    again.keep("decoder", table)
    assert Store(path).table("decoder") == table


def test_a_folder_that_cannot_be_written_costs_no_result(tmp_path, monkeypatch, table):
    path = tmp_path / "v.safetensors"
    path.write_bytes(b"weights")
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("ZEROWASTE_CACHE", str(blocked / "folder"))
    kept = Store(path)
    kept.keep("decoder", table)
    assert kept.table("decoder") == table
    assert Store(None).table("decoder") is None


def test_shipped_tables_come_after_the_users_own(tmp_path, monkeypatch, table):
    path = tmp_path / "v.safetensors"
    path.write_bytes(b"weights")
    made = Store(path)
    made.keep("decoder", table)
    assets = tmp_path / "assets"
    assets.mkdir()
    (assets / "v.calibration.json").write_text(made.document())
    monkeypatch.setattr(store, "ASSETS", assets)
    monkeypatch.setenv("ZEROWASTE_CACHE", str(tmp_path / "empty"))
    assert Store(path).table("decoder") == table
    own = Table("mine", table.ranges, table.work)
    Store(path).keep("decoder", own)
    assert Store(path).table("decoder") == own


def test_choice_takes_the_most_work_for_the_least_error(table):
    assert set(table.choose("fp8", 3e-6).kinds) == {"a", "b"}
    assert set(table.choose("fp8", 2.5e-6).kinds) == {"b"}
    assert not table.choose("fp8", 1e-7).kinds
    assert table.share(["b"]) == 0.8
    everything = table.choose("fp8", 1.0)
    assert set(everything.kinds) == {"a", "b", "c"}
    assert set(table.stricter(everything, "fp8", 0.5).kinds) == {"a", "b"}
    assert set(table.stricter(everything, "fp8", 1.0).kinds) == {"a", "b"}
    assert not table.stricter(Policy({"c": "fp8"}), "fp8", 1.0).kinds
    assert json.loads(json.dumps(table.as_dict()))["errors"]["fp8"]["b"] == 2e-6


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_prepared_weights_are_the_packed_ones(tmp_path, seed_model, kind):
    model = ARCHITECTURE.build(Config(None, (8, 8, 32, 32), 16, 4)).requires_grad_(False)
    seed_model(model, 1)
    keys = eligible(model.decoder)
    widths = {c.key: c.in_channels for c in model.decoder.modules() if getattr(c, "key", "")}
    policy = Policy(dict.fromkeys(keys, kind), {k: Range((1.5,) * widths[k], (0.5,) * widths[k]) for k in keys})
    operands = Operands(torch.float16, policy)
    network = FusedDecoder(model.decoder, torch.float16, operands=operands)
    with torch.device("meta"):
        plan = ARCHITECTURE.build(Config(None, (8, 8, 32, 32), 16, 4))
        plan = FusedDecoder(plan.decoder, torch.float16, operands=Operands(torch.float16, policy))
    path, made_from = tmp_path / "p" / "decoder.safetensors", prepared.recipe(operands, True)
    cpu = torch.device("cpu")
    assert prepared.load(plan, path, made_from, cpu) is None
    prepared.save(network, path, made_from)
    again = prepared.load(plan, path, made_from, cpu)
    mine, theirs = prepared._tensors(network), prepared._tensors(again)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert theirs[name].stride() == tensor.stride(), name
        assert torch.equal(theirs[name].float(), tensor.float()), name
    assert again.nbytes == network.nbytes
    assert prepared.load(plan, path, prepared.recipe(operands, False), cpu) is None
    path.write_bytes(path.read_bytes()[:-100])
    assert prepared.load(plan, path, made_from, cpu) is None
