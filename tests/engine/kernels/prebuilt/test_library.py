"""Sets of compiled kernels: what is read, and what is said where they are damaged."""

import json
import lzma
from hashlib import sha256

import pytest
import torch
from zerowaste_vae.engine.kernels.prebuilt.keys import key
from zerowaste_vae.engine.kernels.prebuilt.library import Library, SetError

X = torch.empty(4, device="meta")
FIRST, SECOND, EIGHT = (key("probe.doubling_kernel", [X, X], {"N": n}) for n in (128, 256, 512))
EIGHT_TEXT = b"eight .entry doubling_kernel("


@pytest.fixture
def folder(tmp_path):
    """Sets A, with two kernels in one part, and B, with one of its own."""
    sets = {}
    for name, texts in {"A": {FIRST: b"first text", SECOND: b"second"}, "B": {EIGHT: EIGHT_TEXT}}.items():
        packed, kernels, at = lzma.compress(b"".join(texts.values())), {}, 0
        for one, text in texts.items():
            kernels[one.digest] = ["x", at, len(text), 1024, 4, [0]]
            at += len(text)
        (tmp_path / f"{name}.x.xz").write_bytes(packed)
        parts = {"x": {"file": f"{name}.x.xz", "sha256": sha256(packed).hexdigest()}}
        sets[name] = {"parts": parts, "kernels": kernels}
    index = {"format": 1, "triton": "3.6.0", "code": "0", "maps": [[2, 6, 2, [128, 32]]], "sets": sets}
    (tmp_path / "index.json").write_text(json.dumps(index), encoding="utf-8")
    return tmp_path


def test_kernels_of_shared_forms(folder):
    """Kernels come from the form and from the one that it shares."""
    found = Library(folder)
    assert found.kernel("A", SECOND).ptx == b"second"
    both = found.kernels("B", [FIRST, EIGHT])
    assert both[FIRST].ptx == b"first text" and both[EIGHT].ptx == EIGHT_TEXT
    one = both[FIRST]
    assert (one.symbol, one.shared, one.warps) == ("doubling_kernel", 1024, 4)
    assert one.parameters == ("pointer", "pointer", "scratch", "scratch")
    assert found.has("B", FIRST) and not found.has("A", EIGHT)
    with pytest.raises(KeyError):
        found.kernel("A", EIGHT)


def test_form_knows_its_models(folder):
    """Kernels are numbered by the sets of a form and their digests: B's own first, then A's."""
    path = folder / "index.json"
    index = json.loads(path.read_text())
    order = [EIGHT.digest, *sorted((FIRST.digest, SECOND.digest))]
    index["sets"]["B"]["covers"] = {"one": [order.index(SECOND.digest), 0], "none": []}
    path.write_text(json.dumps(index))
    found = Library(folder)
    assert [found.covers("B", use) for use in ("one", "none", "two")] == [True, True, False]
    texts = found.texts("B", "one")
    assert sorted(text.ptx for text in texts) == [EIGHT_TEXT, b"second"]
    assert {text.digest for text in texts} == {EIGHT.digest, SECOND.digest}
    assert [(text.symbol, text.shared) for text in texts if text.digest == EIGHT.digest] == [("doubling_kernel", 1024)]
    assert found.texts("B", "two") == found.texts("A", "one") == [] and not found.covers("A", "one")


def test_gpus_are_served_by_what_is_there(folder):
    found = Library(folder)
    assert found.serves(86) == ("A",) and found.serves(89) == ("B", "A")
    assert found.serves(120) == ("B", "A") and found.serves(75) == ()


def refused(folder, act):
    with pytest.raises(SetError) as error:
        act(Library(folder))
    text = str(error.value)
    assert "\n" not in text and str(folder) in text and "install this pack again" in text
    return text


@pytest.mark.parametrize("left", [0, 10, -1])
def test_a_truncated_file_is_named(folder, left):
    path = folder / "A.x.xz"
    path.write_bytes(path.read_bytes()[:left])
    assert "A.x.xz" in refused(folder, lambda found: found.kernel("A", FIRST))
    assert Library(folder).kernel("B", EIGHT).ptx == EIGHT_TEXT


def test_a_changed_file_is_named(folder):
    (folder / "A.x.xz").write_bytes(lzma.compress(b"other text"))
    assert "changed" in refused(folder, lambda found: found.kernel("A", FIRST))


def test_a_missing_file_is_named(folder):
    (folder / "A.x.xz").unlink()
    assert "A.x.xz" in refused(folder, lambda found: found.kernel("A", FIRST))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 99}', '"x"', "null"])
def test_a_damaged_index_is_named(folder, text):
    (folder / "index.json").write_text(text, encoding="utf-8")
    assert "index.json" in refused(folder, lambda found: None)


def test_an_index_whose_kernels_have_no_part_is_damaged(folder):
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    index["sets"]["A"]["kernels"][FIRST.digest][0] = "y"
    (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")
    assert "damaged" in refused(folder, lambda found: None)


def test_no_folder_is_one_line(tmp_path):
    assert "no compiled kernels" in refused(tmp_path / "none", lambda found: None)
