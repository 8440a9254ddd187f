"""The parser of command lines: errors are one line and say what was likely meant, and every command has -q, -v and
--color."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, NoReturn, TextIO

from ...errors import InputError

#: Values of --color.
COLORS = ("auto", "always", "never")
RED, YELLOW, BOLD = "31;1", "33", "1"
_INVALID = re.compile(r"argument (?P<name>.+?): invalid (?P<kind>\w+) value: (?P<value>.+)", re.DOTALL)
_CHOICE = re.compile(r"argument (?P<name>.+?): invalid choice: (?P<value>.+?) \(choose from (?P<known>.+)\)", re.DOTALL)
_KINDS = {"int": "a whole number", "float": "a number"}
_when = COLORS[0]


class Parser(argparse.ArgumentParser):
    """A parser that raises InputError in place of printing its usage and ending the process."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.set_defaults(quiet=False, verbose=False, color=COLORS[0])

    def add_subparsers(self, **options: Any) -> argparse._SubParsersAction:
        return super().add_subparsers(parser_class=type(self), **options)

    def with_common(self) -> Parser:
        """Add the options of every command to this parser, or to those of its own commands; return it."""
        nested = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        for parser in (p for action in nested for p in action.choices.values()):
            parser.with_common()
        if not nested:
            group = self.add_argument_group("every command")
            said = group.add_mutually_exclusive_group()
            said.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors and warnings")
            said.add_argument("-v", "--verbose", action="store_true",
                              help="print more of the log, and what a run did: path, time, memory, what was "
                              "off")  # fmt: skip
            group.add_argument("--color", choices=COLORS, default=COLORS[0],
                               help="colours: auto (on a terminal, unless $NO_COLOR is set), always or "
                               "never")  # fmt: skip
        return self

    def parse_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:
        self.refuse_before(args)
        found, left = self.parse_known_args(args, namespace)
        if left and not left[0].startswith("-") and getattr(found, "out", "") is None:
            found.out = left.pop(0)  # argparse fills an argument that may be missing no more after an option
        if left:
            raise InputError(self._unknown(str(left[0]), args))
        return found

    def _unknown(self, word: str, args: Any) -> str:
        parser = self.leaf(args)
        if not word.startswith("-"):
            return f"{word!r} is one argument too many; {parser.prog} --help lists them"
        name = word.partition("=")[0]
        near = difflib.get_close_matches(name, parser._option_string_actions, 1, 0.6)
        meant = f"did you mean {near[0]}?" if near else f"{parser.prog} --help lists its options"
        return f"{name} is no option of {parser.prog.partition(' ')[2] or parser.prog}; {meant}"

    def refuse_before(self, words: Any) -> None:
        """Refuse an unknown option before the command's name. Raises InputError."""
        if words and str(words[0]).startswith("-") and str(words[0]) not in self._option_string_actions:
            raise InputError(self._unknown(str(words[0]), ()))

    def leaf(self, args: Any) -> Parser:
        """Return the parser of the command that a command line names."""
        words = [word for word in args or () if not str(word).startswith("-")]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and words and words[0] in action.choices:
                return action.choices[words[0]].leaf(words[1:])
        return self

    def error(self, message: str) -> NoReturn:
        """Raise InputError with argparse's message in plain words."""
        raise InputError(self._worded(message))

    def _worded(self, message: str) -> str:
        if found := _INVALID.fullmatch(message):
            kind = _KINDS.get(found["kind"], f"a {found['kind'].replace('_', ' ').strip()}")
            return f"{_name(found['name'])} {found['value'].strip(chr(39))}: give {kind}"
        if found := _CHOICE.fullmatch(message):
            value = found["value"].strip("'")
            known = [word.strip(" '") for word in found["known"].split(",")]
            near = difflib.get_close_matches(value, known, 1, 0.6)
            there = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            return f"{_name(found['name'])} {value} is unknown; {there}"
        if message.startswith("the following arguments are required: "):
            missing = message.partition(": ")[2]
            if missing in ("COMMAND", "WHAT"):
                there = next(a.choices for a in self._actions if isinstance(a, argparse._SubParsersAction))
                return f"name a command of {self.prog}: {', '.join(there)}; --help says what they do"
            verb, them = ("are", "they are") if "," in missing else ("is", "it is")
            return f"{_name(missing)} {verb} missing; {self.prog} --help says what {them}"
        return _name(message.removeprefix("argument ")) if message.startswith("argument ") else message


def _name(text: str) -> str:
    """Return argparse's name of an option, "-o/--out", by its longest form alone."""
    first, colon, rest = text.partition(": ")
    return max(first.split("/"), key=len) + colon + rest if first.startswith("-") and " " not in first else text


def every(parser: argparse.ArgumentParser) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Yield the words of each command under a parser, with its parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield (name,), below
                yield from (((name, *words), leaf) for words, leaf in every(below))


def use_color(when: str) -> None:
    """Set when output is coloured: one of COLORS."""
    global _when
    _when = when


def paint(text: str, code: str, stream: TextIO | None) -> str:
    """Return a text in a colour, where the stream shows colours and they are wanted."""
    terminal = stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    auto = terminal and not os.environ.get("NO_COLOR")
    on = _when == "always" or (_when == "auto" and auto)
    return f"\x1b[{code}m{text}\x1b[0m" if on and text else text


def heading(text: str, width: int = 0) -> str:
    """Return the name of a line on standard output, padded, in bold where colours are on."""
    return paint(f"{text:<{width}}", BOLD, sys.stdout)
