"""Sets of compiled kernels: what is read, and what is said where they are damaged."""

import json
import lzma
import threading
from hashlib import sha256

import pytest
import torch
from zerowaste_vae.engine.kernels.prebuilt import library as module
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


def test_versions_of_ptx(folder):
    """Of all that a form has, from the index; of one use, from its kernels' texts, which are read once."""
    path = folder / "index.json"
    index = json.loads(path.read_text())
    index["sets"]["A"]["versions"], index["sets"]["B"]["versions"] = ["8.5"], ["8.5", "8.10"]
    index["sets"]["A"]["covers"], texts = {"old": [0]}, []
    for name, text in (("A", b".version 8.5\n.entry a("), ("B", b".version 8.10\n.entry b(")):
        packed = lzma.compress(text)
        (folder / f"{name}.x.xz").write_bytes(packed)
        index["sets"][name]["parts"]["x"]["sha256"] = sha256(packed).hexdigest()
        for place in index["sets"][name]["kernels"].values():
            place[1:3] = 0, len(text)
        texts.append(text)
    index["sets"]["B"]["covers"] = {"old": [1], "new": [0, 1]}
    path.write_text(json.dumps(index))
    found = Library(folder)
    assert found.versions("A") == {"8.5"} and found.versions("B") == {"8.5", "8.10"}
    assert (found.origin("A", FIRST), found.origin("B", FIRST), found.origin("B", EIGHT)) == ("A", "A", "B")

    def no_keys():
        pytest.fail("the form was made for this use")

    for _ in range(2):
        assert [found.version("B", use, no_keys) for use in ("old", "new")] == ["8.5", "8.10"]
        assert found.version("A", "old", no_keys) == "8.5"
        assert found.version("B", "other widths", lambda: [FIRST, EIGHT]) == "8.10"
        assert found.version("B", "nothing", list) == ""
        for name in "AB":
            (folder / f"{name}.x.xz").unlink(missing_ok=True)


@pytest.fixture
def covered(folder):
    """The sets, made for uses "one" and "two" of form B: kernels of both sets, and of A alone."""
    path = folder / "index.json"
    index = json.loads(path.read_text())
    order = [EIGHT.digest, *sorted((FIRST.digest, SECOND.digest))]
    both = [order.index(SECOND.digest), order.index(FIRST.digest)]
    index["sets"]["B"]["covers"] = {"one": [*both, 0], "two": both}
    path.write_text(json.dumps(index))
    return folder


def test_texts_wait_in_memory_until_they_are_loaded(covered):
    """Then they are gone: the files are read again."""
    found, usual = Library(covered), Library(covered).texts("B", "one")
    found.read_ahead("B", ["one", "two", "none"])
    assert found.texts("B", "one") == usual and len(found.texts("B", "two")) == 2 and found.texts("B", "none") == []
    (covered / "A.x.xz").unlink()
    assert found.texts("B", "one") == usual
    found.forget("B", "one")
    with pytest.raises(SetError, match=r"A\.x\.xz"):
        found.texts("B", "one")
    assert len(found.texts("B", "two")) == 2


def test_texts_of_few_models_wait(covered, monkeypatch):
    monkeypatch.setattr(module, "_WAITING", 1)
    found = Library(covered)
    found.read_ahead("B", ["one", "two"])
    assert list(found._ahead) == [("B", "two")] and len(found.texts("B", "one")) == 3


def test_damage_found_ahead_is_said_where_texts_are_asked_for(covered):
    """And a file that is whole again is read again."""
    path = covered / "A.x.xz"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    found = Library(covered)
    found.read_ahead("B", ["one"])
    for _ in range(2):
        with pytest.raises(SetError) as error:
            found.texts("B", "one")
        text = str(error.value)
        assert "\n" not in text and str(path) in text and text.endswith("(damaged or changed); install this pack again")
    path.write_bytes(whole)
    found.forget("B", "one")
    assert len(found.texts("B", "one")) == 3


def test_reading_ahead_holds_nothing_up(covered, monkeypatch):
    """Kernels, texts of others and the caller itself go on meanwhile; the same texts are unpacked once."""
    go, begun, asked = threading.Event(), threading.Event(), []
    usual = Library._unpacked

    def slowly(self, form, use):
        asked.append(use)
        if use == "one":
            begun.set()
            assert go.wait(10)
        return usual(self, form, use)

    monkeypatch.setattr(Library, "_unpacked", slowly)
    found = Library(covered)
    found.read_ahead("B", ["one"])
    assert begun.wait(10)
    assert found.kernel("B", EIGHT).ptx == EIGHT_TEXT and len(found.texts("B", "two")) == 2
    found.read_ahead("B", ["one"])
    results = []
    threads = [threading.Thread(target=lambda: results.append(found.texts("B", "one"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join()
    assert [len(texts) for texts in results] == [3, 3, 3] and asked == ["one", "two"]


@pytest.mark.parametrize("piece", [1, 3, 6, 10, 11, 1000])
def test_pieces_are_those_of_the_whole_text(folder, monkeypatch, piece):
    """However much is unpacked at once."""
    monkeypatch.setattr(module, "_PIECE", piece)
    found = Library(folder)
    for places in ([(0, 10), (10, 6)], [(10, 6)], [(3, 2), (7, 5)], [(0, 0), (2, 3), (2, 3)], []):
        assert found._pieces("A", "x", places) == [b"first textsecond"[at : at + n] for at, n in places]
    with pytest.raises(SetError, match=r"A\.x\.xz is damaged \(it ends early\); install"):
        found._pieces("A", "x", [(10, 7)])


@pytest.mark.parametrize("left", [0, 20, -1])
def test_a_file_that_was_packed_badly_is_named(folder, left):
    """Its digest is right, its contents are no whole stream."""
    index = json.loads((folder / "index.json").read_text())
    packed = (folder / "A.x.xz").read_bytes()[:left]
    (folder / "A.x.xz").write_bytes(packed)
    index["sets"]["A"]["parts"]["x"]["sha256"] = sha256(packed).hexdigest()
    (folder / "index.json").write_text(json.dumps(index))
    assert "A.x.xz is damaged" in refused(folder, lambda found: found._pieces("A", "x", [(0, 17)]))
    assert "A.x.xz is damaged" in refused(folder, lambda found: found.kernel("A", FIRST))


def test_how_a_kernel_is_launched_needs_no_file(folder):
    (folder / "A.x.xz").unlink()
    entry = Library(folder).entry("B", FIRST)
    assert (entry.symbol, entry.shared, entry.warps, entry.maps) == (
        "doubling_kernel", 1024, 4, ((2, 6, 2, (128, 32)),))  # fmt: skip
    with pytest.raises(KeyError):
        Library(folder).entry("A", EIGHT)


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
