"""The sets of compiled kernels that ship with this pack: `sets/index.json` and files of PTX beside it.

A set is one form of the kernels, for the GPUs that it serves. Its PTX lies in parts, each one LZMA stream of kernels
that are used together; a part is read when one of its kernels is asked for, or in a thread before that (`read_ahead`).
"""

from __future__ import annotations

import functools
import json
import lzma
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import InputError
from ..cards import card
from .driver import ptx_version
from .keys import Key, takes

#: Where the sets are.
FOLDER = Path(__file__).with_name("sets")
#: Environment variable that names another folder, such as `tools/build_kernels.py --tests` makes.
VARIABLE = "ZEROWASTE_SETS"
#: Sets that a form is made of: its own, and those whose kernels it shares, as PTX runs on every later card.
MADE_OF = {"A": ("A",), "B": ("B", "A"), "C": ("C", "B", "A"), "D": ("D", "C", "B", "A")}
_FORMAT = 1
_CURE = "install this pack again"
#: Parts whose whole text stays in memory (up to 72 MB each), for kernels that are asked for one by one.
_KEPT = 4
#: Uses whose texts (some 8 MB each) wait in memory until they are loaded: those of the latest models.
_WAITING = 4
#: Bytes of a part that are unpacked at once. The largest part takes 0.11 s in pieces and 0.18 as a whole, whose pages
#: are new memory.
_PIECE = 256 << 10


class SetError(InputError):
    """A set cannot be used. Its text is one line with the reason and the cure."""


class Map(NamedTuple):
    """How a tensor map is encoded: the driver's swizzle mode and element type, bytes of an element, and the box."""

    swizzle: int
    element_type: int
    element_bytes: int
    box: tuple[int, ...]


class Text(NamedTuple):
    """A kernel as the driver loads it. origin: the set that it is of. digest: of its key. ptx, symbol, shared: as in
    `Compiled`."""

    origin: str
    digest: str
    ptx: bytes
    symbol: str
    shared: int


@dataclass(frozen=True)
class Entry:
    """How one kernel is launched.

    symbol: its name in the text. shared: bytes of dynamic shared memory. warps: of a block. parameters: as `takes`
    says. maps: one for each "map" in them, in order.
    """

    symbol: str
    shared: int
    warps: int
    parameters: tuple[str, ...]
    maps: tuple[Map, ...]


@dataclass(frozen=True)
class Compiled(Entry):
    """One kernel, ready for the driver. ptx: text, without a final zero."""

    ptx: bytes


class Library:
    """The sets in a folder."""

    def __init__(self, folder: Path = FOLDER) -> None:
        """Read the index. Raises SetError where it is missing or damaged."""
        self.folder = folder
        path = folder / "index.json"
        try:
            found = json.loads(path.read_bytes())
            if found["format"] != _FORMAT:
                raise SetError(f"{path} has format {found['format']}, this pack reads {_FORMAT}; {_CURE}")
            #: Version of Triton that compiled the sets, and a digest of the code that it lowered.
            self.triton, self.code = str(found["triton"]), str(found["code"])
            self._maps = [Map(*one[:3], tuple(one[3])) for one in found["maps"]]
            #: Set -> use -> the numbers of its kernels among all of the form's, in the order of `_digests`.
            self._covers = {name: dict(one.get("covers", {})) for name, one in found["sets"].items()}
            self._sets: dict[str, dict[str, Any]] = {name: _checked(one) for name, one in found["sets"].items()}
        except SetError:
            raise
        except OSError as error:
            raise SetError(f"no compiled kernels at {folder} ({error.strerror or error}); {_CURE}") from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise SetError(f"{path} is damaged ({type(error).__name__}); {_CURE}") from error
        self._lock = threading.Lock()
        self._recent: dict[tuple[str, str], bytes] = {}
        #: (form, use) -> result of `version`.
        self._newest: dict[tuple[str, str], str] = {}
        #: (form, use) -> the texts of its kernels, which a thread unpacks.
        self._ahead: dict[tuple[str, str], Future[list[Text]]] = {}

    @property
    def sets(self) -> tuple[str, ...]:
        """The sets that are here."""
        return tuple(self._sets)

    def serves(self, sm: int) -> tuple[str, ...]:
        """Return the forms that a GPU of this compute capability (86: 8.6) runs and that are here, best first."""
        return tuple(form for form in card(sm).forms if all(name in self._sets for name in MADE_OF[form]))

    def identity(self, form: str) -> str:
        """Return a short digest of what a form's kernels compute: of their texts, and of the code they are made of."""
        parts = [part["sha256"] for name in MADE_OF[form] for _, part in sorted(self._sets[name]["parts"].items())]
        return sha256(" ".join((self.code, *parts)).encode()).hexdigest()[:12]

    def covers(self, form: str, use: str) -> bool:
        """Return whether a form was made for a use (`planning.launches.use_id`): it has all kernels of that."""
        return use in self._covers.get(form, ())

    def read_ahead(self, form: str, uses: Iterable[str]) -> None:
        """Unpack the kernels of uses in a thread, one use after the other, so that `texts` finds them. They stay in
        memory until `forget`. What is wrong with a file is raised by `texts`."""
        with self._lock:
            new = [use for use in uses if self.covers(form, use) and (form, use) not in self._ahead]
            pool = ThreadPoolExecutor(1)
            self._ahead.update({(form, use): pool.submit(self._unpacked, form, use) for use in new})
            pool.shutdown(wait=False)  # its thread ends after them
            while len(self._ahead) > _WAITING:
                del self._ahead[next(iter(self._ahead))]

    def texts(self, form: str, use: str) -> list[Text]:
        """Return all kernels of a use that the form was made for; none of another. Raises SetError."""
        with self._lock:
            ahead = self._ahead.get((form, use))
        return self._unpacked(form, use) if ahead is None else ahead.result()

    def forget(self, form: str, use: str) -> None:
        """Free the texts that are kept in memory of a use, which has been loaded, and of parts."""
        with self._lock:
            self._ahead.pop((form, use), None)
            self._recent.clear()

    def _unpacked(self, form: str, use: str) -> list[Text]:
        digests = [(name, digest) for name in MADE_OF[form] for digest in sorted(self._sets[name]["kernels"])]
        parts: dict[tuple[str, str], list[tuple[int, int, str, int]]] = defaultdict(list)
        for name, digest in (digests[number] for number in self._covers.get(form, {}).get(use, ())):
            part, at, length, shared = self._sets[name]["kernels"][digest][:4]
            parts[name, part].append((at, length, digest, shared))
        texts = []
        for (name, part), kernels in sorted(parts.items()):
            kernels.sort()
            places = [(at, length) for at, length, *_ in kernels]
            for ptx, (_, _, digest, shared) in zip(self._pieces(name, part, places), kernels, strict=True):
                symbol = ptx.partition(b".entry ")[2].partition(b"(")[0].decode()
                texts.append(Text(name, digest, ptx, symbol, shared))
        return texts

    def has(self, form: str, key: Key) -> bool:
        """Return whether a form ("A" to "D") has a kernel."""
        return self._place(form, key) is not None

    def origin(self, form: str, key: Key) -> str:
        """Return the set that a form has a kernel from. Raises KeyError where the form does not have it."""
        return self._found(form, key)[0]

    def versions(self, form: str) -> set[str]:
        """Return the versions of PTX ("8.5") that a form's kernels are written in."""
        return {version for name in MADE_OF[form] for version in self._sets[name].get("versions", ())}

    def version(self, form: str, use: str, keys: Callable[[], Iterable[Key]]) -> str:
        """Return the newest version of PTX among the kernels of a use. It reads them, once for each use.

        keys: the kernels of a use that the form was not made for.
        Raises: KeyError, SetError as `kernel`.
        """
        known = form, use
        if known not in self._newest:
            made = self.texts(form, use) if self.covers(form, use) else self.kernels(form, keys()).values()
            self._newest[known] = max((ptx_version(one.ptx) for one in made), key=_numbers, default="")
        return self._newest[known]

    def entry(self, form: str, key: Key) -> Entry:
        """Return how one kernel is launched, from the index alone. Raises KeyError where the form does not have it."""
        *_, shared, warps, maps = self._found(form, key)[1]
        return Entry(key.kernel.rpartition(".")[2], shared, warps, takes(key), tuple(self._maps[i] for i in maps))

    def kernel(self, form: str, key: Key) -> Compiled:
        """Return one kernel. Raises KeyError where the form does not have it, SetError where its file is damaged."""
        return self.kernels(form, [key])[key]

    def kernels(self, form: str, keys: Iterable[Key]) -> dict[Key, Compiled]:
        """Return several kernels, each part read once. Raises as `kernel`."""
        places = {key: self._found(form, key) for key in keys}
        found = {}
        for one, (name, (part, at, length, *_)) in sorted(
            places.items(), key=lambda item: (item[1][0], item[1][1][0])
        ):
            found[one] = Compiled(**vars(self.entry(form, one)), ptx=self._text(name, part)[at : at + length])
        return found

    def _found(self, form: str, key: Key) -> tuple[str, list[Any]]:
        place = self._place(form, key)
        if place is None:
            raise KeyError(f"form {form} has no {key}")
        return place

    def _place(self, form: str, key: Key) -> tuple[str, list[Any]] | None:
        for name in MADE_OF[form]:
            place = self._sets[name]["kernels"].get(key.digest) if name in self._sets else None
            if place is not None:
                return name, place
        return None

    def _text(self, name: str, part: str) -> bytes:
        """All PTX of a part. The last ones stay in memory: a half's kernels lie in a few."""
        with self._lock:
            text = self._recent.pop((name, part), None)
            if text is None:
                with self._opened(name, part) as packed:
                    text = lzma.decompress(packed)
            self._recent[name, part] = text
            while len(self._recent) > _KEPT:
                del self._recent[next(iter(self._recent))]
            return text

    def _pieces(self, name: str, part: str, places: Iterable[tuple[int, int]]) -> list[bytes]:
        """Return pieces of a part's text, each from an offset on, of a length; in the order of their offsets. No more
        is unpacked than up to the last of them."""
        with self._lock:
            whole = self._recent.get((name, part))
        if whole is not None:
            return [whole[at : at + length] for at, length in places]
        with self._opened(name, part) as packed:
            unpacker, held, begin, pieces = lzma.LZMADecompressor(), bytearray(), 0, []
            for at, length in places:
                while begin + len(held) < at + length:
                    if unpacker.eof or (unpacker.needs_input and not packed):
                        raise lzma.LZMAError("it ends early")
                    passed = min(at - begin, len(held))
                    del held[:passed]
                    begin += passed
                    held += unpacker.decompress(packed, _PIECE)
                    packed = b""
                pieces.append(bytes(held[at - begin : at - begin + length]))
            return pieces

    @contextmanager
    def _opened(self, name: str, part: str) -> Iterator[bytes]:
        """Yield a part's bytes, as they are packed; its errors in the block are one line."""
        path = self.folder / self._sets[name]["parts"][part]["file"]
        try:
            packed = path.read_bytes()
            if sha256(packed).hexdigest() != self._sets[name]["parts"][part]["sha256"]:
                raise SetError(f"{path} is not the file that its index names (damaged or changed); {_CURE}")
            yield packed
        except OSError as error:
            raise SetError(f"{path} cannot be read ({error.strerror or error}); {_CURE}") from error
        except lzma.LZMAError as error:
            raise SetError(f"{path} is damaged ({error}); {_CURE}") from error


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdecimal()]


def _checked(one: dict[str, Any]) -> dict[str, Any]:
    """A set's part of the index. Raises KeyError or ValueError."""
    parts = one["parts"]
    if not all(set(part) >= {"file", "sha256"} for part in parts.values()):
        raise ValueError
    if not all(place[0] in parts and len(place) == 6 for place in one["kernels"].values()):
        raise ValueError
    return one


@functools.cache
def library() -> Library:
    """Return the sets of this installation, or of the folder that ZEROWASTE_SETS names, read once. Raises SetError."""
    return Library(Path(os.environ.get(VARIABLE) or FOLDER))
