"""The cache folder: found again, keyed by content, indifferent to damage."""

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from zerowaste_vae.engine import load, log
from zerowaste_vae.engine.extras.eight_bit import prepared, store
from zerowaste_vae.engine.extras.eight_bit.store import Store
from zerowaste_vae.engine.extras.eight_bit.table import Table
from zerowaste_vae.engine.families.seedvr2 import ARCHITECTURE, Config
from zerowaste_vae.engine.loader import demo_vae_path
from zerowaste_vae.engine.network.fused import FusedDecoder
from zerowaste_vae.engine.network.gathered import tensors_of
from zerowaste_vae.engine.precision.digest import digest
from zerowaste_vae.engine.precision.forms import Operands
from zerowaste_vae.engine.precision.policy import Policy, Range, eligible, united


@pytest.fixture
def table():
    ranges = {"a": Range((1.0, 2.0), (0.5, 0.5)), "b": Range((3.0,), (1.0,)), "c": Range((1.0,), (1.0,))}
    return Table("clip", ranges, {"a": 10, "b": 80, "c": 10}, {"fp8": {"a": 1e-6, "b": 2e-6, "c": 5e-6}})


def filed(content="weights"):
    """A store of weights with this digest."""
    return Store(lambda: content.ljust(64, "0"))


def test_found_by_digest(cache, table):
    """Tables are found by the digest of the weights."""
    assert filed().table("decoder") is None
    filed().measured("decoder", table)
    filed().calibrate("encoder", table)
    assert filed().table("decoder") == table == filed().table("encoder")
    assert filed("other").table("decoder") is None
    assert Store(None).measured("decoder", table) == table
    assert not list(cache.rglob("*.part"))


@pytest.mark.parametrize("damage", [
    "", "{", "[]", '{"format": 2}', '{"format":2,"weights":"FILE","halves":{"decoder":3}}', "NaN", "Infinity",
    "1" + "0" * 400, "[" * 100_000,
])  # fmt: skip
@pytest.mark.parametrize("origin", ["calibrated", "measured"])
def test_damaged_table(table, damage, origin, caplog, monkeypatch):
    """Damaged tables are measured anew."""
    monkeypatch.setattr(log, "_said", set())
    kept = filed()
    kept.calibrate("decoder", table)
    place = (kept.folder / "decoder.calibrated.json").replace(kept.folder / f"decoder.{origin}.json")
    number, text = damage in ("NaN", "Infinity") or damage.isdigit(), place.read_text()
    place.write_text(text.replace("2.0", damage) if number else damage.replace("FILE", kept.digest))
    again = filed()
    assert again.table("decoder") is None
    assert [r.message.count("measured anew") for r in caplog.records] == [1]
    again.measured("decoder", table)
    assert filed().table("decoder") == table


def test_calibration_stays(table):
    """Not even where the run began before the calibration did, in another process."""
    automatic, running = replace(table, source="first clip", ranges=wider(table)), filed()
    running.measured("decoder", automatic)
    filed().calibrate("decoder", table)
    assert running.measured("decoder", replace(automatic, source="first 2 clips")) == table
    assert running.table("decoder") == table == filed().table("decoder")
    # What convolutions cost by themselves is added to it, and belongs to it alone.
    costs = filed().measured("decoder", table.with_errors("int8", {"a": 1e-3}))
    assert filed().table("decoder") == costs
    newer = replace(table, source="a better clip", ranges=wider(table))
    filed().calibrate("decoder", newer)
    assert filed().table("decoder") == newer


def wider(table):
    return {key: found.scaled(2.0) for key, found in table.ranges.items()}


@pytest.mark.parametrize("trouble", ["not a folder", "full", "no home"])
def test_no_cache_folder(tmp_path, monkeypatch, table, caplog, trouble):
    """Without a cache folder results stay the same."""
    monkeypatch.setattr(log, "_said", set())
    if trouble == "not a folder":
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("ZEROWASTE_CACHE", str(tmp_path / "file" / "folder"))
    elif trouble == "full":
        def full(*_, **__):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Path, "write_text", full)
    else:
        monkeypatch.delenv("ZEROWASTE_CACHE")
        for name in ("HOME", "XDG_CACHE_HOME", "LOCALAPPDATA", "USERPROFILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(Path, "home", lambda: no_home())
    kept = filed()
    kept.measured("decoder", table)
    kept.measured("decoder", table)
    assert kept.table("decoder") == table
    assert kept.table("encoder") is None
    assert (kept.prepared("decoder") is None) == (trouble == "no home")
    assert len(caplog.records) == 1


def no_home():
    raise RuntimeError("Could not determine home directory.")


def test_shipped_table(tmp_path, monkeypatch, table):
    """A user's calibration comes before the shipped table."""
    made = filed()
    made.calibrate("decoder", table)
    assets = tmp_path / "assets"
    assets.mkdir()
    (assets / "v.calibration.json").write_text(made.document())
    monkeypatch.setattr(store, "ASSETS", assets)
    monkeypatch.setenv("ZEROWASTE_CACHE", str(tmp_path / "empty"))
    assert filed().table("decoder") == table
    assert filed("other").table("decoder") is None
    assert filed().measured("decoder", replace(table, ranges=wider(table))) == table
    own = Table("mine", wider(table), table.work)
    filed().calibrate("decoder", own)
    assert filed().table("decoder") == own


def test_demo_table():
    """The shipped table belongs to the demo VAE."""
    for precision in ("fp32", "int8"):
        vae = load(demo_vae_path(), precision=precision, device="cpu")
        assert vae.store.table("decoder").source == vae.store.table("encoder").source == "demo_clip.mp4"


def test_one_odd_clip(table):
    """Ten times too bright: in a run on that clip its own ranges count, for all others it is bounded."""
    plain = {"a": Range((1.0, 2.0), (0.5, 0.5))}
    bright, dark = ({"a": plain["a"].scaled(factor)} for factor in (10.0, 0.1))
    for others in (1, 3):
        for at in range(others + 1):
            clips = [plain] * others
            clips.insert(at, bright)
            ranges = united(clips)["a"]
            assert ranges.largest == (2.0, 4.0)
            known = Table("", {"a": ranges}, {"a": 1}, seen={str(i): clip for i, clip in enumerate(clips)})
            assert known.on(str(at)).ranges == bright
            assert known.on("another").ranges == {"a": ranges}
    assert united([dark, plain, plain])["a"] == plain["a"]
    assert united([plain, {"a": plain["a"].scaled(1.5)}])["a"] == plain["a"].scaled(1.5)


def test_digest():
    """The digest is of values, names and shapes."""
    one = {"a": torch.arange(6.0), "b": torch.ones(2, 3)}
    assert digest(one) == digest(dict(reversed([*one.items()])))
    for other in (
        {**one, "b": torch.ones(3, 2)}, {**one, "c": torch.ones(())}, {"x": one["a"], "b": one["b"]},
        {**one, "a": torch.arange(6.0) + torch.tensor([0, 0, 0, 0, 0, 1e-6])}, {**one, "b": one["b"].half()},
    ):  # fmt: skip
        assert digest(other) != digest(one)
    assert digest({**one, "b": one["b"].half()}, torch.float16) == digest(one, torch.float16)
    assert digest({"a": torch.arange(6.0).view(2, 3).t()}) == digest({"a": torch.arange(6.0).view(2, 3).t().clone()})


def test_choice(table):
    """The choice takes the most work for the least error."""
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
def test_prepared(tmp_path, seed_model, kind):
    """Prepared weights are the packed ones."""
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
    mine, theirs = tensors_of(network), tensors_of(again)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert theirs[name].stride() == tensor.stride(), name
        assert torch.equal(theirs[name].float(), tensor.float()), name
    assert again.nbytes == network.nbytes
    assert prepared.load(plan, path, prepared.recipe(operands, False), cpu) is None
    whole = path.read_bytes()
    for place in (-1, -len(whole) // 3):
        bit = bytearray(whole)
        bit[place] ^= 1
        path.write_bytes(bit)
        assert prepared.load(plan, path, made_from, cpu) is None
    path.write_bytes(whole)
    assert prepared.load(plan, path, made_from, cpu) is not None
    path.write_bytes(whole[:-100])
    assert prepared.load(plan, path, made_from, cpu) is None


@pytest.mark.parametrize("replaced", [False, True])
def test_prepared_replaced(tmp_path, monkeypatch, caplog, replaced):
    """The library opens a file twice, for its header and for its tensors: between them there can be another file."""
    plan, path = [torch.zeros(4)], tmp_path / "decoder.safetensors"
    prepared.save(plan, path, "mine")

    def opened(*_, **__):
        if replaced:
            prepared.save([torch.zeros(2)], path, "another's")
        raise RuntimeError("file <decoder.safetensors> size <84> is smaller than the required mapping size <92>")

    monkeypatch.setattr("safetensors.safe_open", opened)
    assert prepared.load(plan, path, "mine", torch.device("cpu")) is None
    assert ("packed anew" in caplog.text) != replaced


def test_without_8_bit_no_file_is_looked_for(cache, monkeypatch):
    """The report of a picture's decode must not wait for files that it has no use for."""
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    monkeypatch.setattr(Store, "table", lambda *_: pytest.fail("the store was read"))
    vae = load(demo_vae_path(), "fp32", "cpu")
    assert vae.decode(torch.zeros(1, vae.latent_channels, 1, 2, 2)).isfinite().all()
    assert vae.last_report.mode == "reference operators (NDHWC)" and not vae.last_report.operands
