"""The console command `zerowaste-vae`: find the subcommand, run it and turn errors into one line.

A subcommand is a file in engine/extras/cli with `add_parser(subparsers)` and `run(args) -> int`. Only the requested one
is imported, and torch only by its `run`.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from importlib import import_module
from typing import Any, TextIO

from ...errors import LINE, Cancelled, ZeroWasteError, one_line
from . import documented
from .parser import RED, Parser, paint, use_color

PROGRAM = "zerowaste-vae"
COMMANDS = {
    "info": "hardware, versions, which fast paths are on; what a VAE file is",
    "decode": "latent file -> .mp4, folder of PNG frames, or .safetensors",
    "encode": "video or folder of images -> latent file",
    "plan": "what a decode or encode would take under a memory target, without running it",
    "fits": "which VAEs and sizes fit a card, here or not, and how long they are expected to take",
    "demo": "encode and decode a small clip with the VAE that ships with the package",
    "convert": "rewrite a VAE file as safetensors or GGUF, plain or block-quantised",
    "tune": "let this GPU choose its own schedules, in two minutes",
    "calibrate": "measure what 8 bits cost a VAE, and keep it for later runs",
    "compare": "how two clips differ; whether tiles or chunks show",
    "bench": "measure what this machine reaches",
    "profile": "where the time of a decode or encode goes, by operator and stage",
    "completion": "a script that completes commands and options in bash, zsh or PowerShell",
}
EXIT_ERROR = 2
EXIT_CANCELLED = 130  # the shell's code for a program stopped by Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; return 0, 2 after an error (one line on stderr) or 130 after Ctrl-C."""
    _print_anything()
    with nullcontext() if sys.stdout is None else redirect_stdout(_Output(sys.stdout)):
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["--"]:  # launchers put it before the arguments meant for this program
        args = args[1:]
    parsed = None
    use_color("auto")
    try:
        if args and args[0].partition("=")[0] in documented.FLAGS:
            return documented.run(args, PROGRAM)
        parsed = parser_of(args[0] if args else None).parse_args(args)
        use_color(parsed.color)
        with _interruptible(), _said(parsed):
            code = parsed.run(parsed)
        if sys.stdout is not None:
            sys.stdout.flush()  # the interpreter would do it after the exit code is decided
        return code
    except ZeroWasteError as error:
        return _fail(_by_options(str(error), parsed))
    except (KeyboardInterrupt, Cancelled):
        print(f"{PROGRAM}: cancelled", file=sys.stderr)
        return EXIT_CANCELLED
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == (__package__ or "").partition(".")[0]:
            raise
        hint = " (torch and what it needs: https://pytorch.org/get-started/locally)" if error.name == "torch" else ""
        return _fail(f"the Python package {error.name!r} is not installed; install it with pip{hint}")
    except _Unread:
        return EXIT_ERROR
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        return _fail("out of memory; give a lower --vram-gb or --ram-gb, --tiling blended, or a shorter clip")


class _Unread(Exception):
    """The reader of standard output has closed it."""


class _Output:
    """Standard output whose errors name it, as those of files name theirs: the system's error of a write does not."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._naming():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._naming():
            self._stream.flush()

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # Else the interpreter would write what waits once more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if isinstance(error, BrokenPipeError):
                raise _Unread from error
            raise OSError(error.errno, f"cannot be written ({error.strerror})", "standard output") from error


def _print_anything() -> None:
    """Have consoles and pipes that are not UTF-8 print other characters as escapes: a name in another script would
    otherwise end a run whose work is done."""
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Keep Ctrl-C a KeyboardInterrupt where C code turns it into another error, as torch 2.13 does with a ValueError
    when it is interrupted while reading a storage's length."""
    pressed = False

    def press(*of: Any) -> None:
        nonlocal pressed
        pressed = True
        signal.default_int_handler(*of)

    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # another handler, or ignored
        yield
        return
    signal.signal(signal.SIGINT, press)
    try:
        yield
    except Exception as error:
        if pressed and not isinstance(error, Cancelled):
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _said(args: argparse.Namespace) -> Iterator[None]:
    """Print what a command says, more of it with -v; nothing on standard output with -q, and nothing but the JSON with
    `--json -`. The command finds the output itself in `args.stdout`."""
    args.stdout = sys.stdout
    with ExitStack() as stack:
        if args.quiet or "-" in (getattr(args, "json", None), getattr(args, "report", None)):
            nothing = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nothing))
        if args.verbose:
            logging.basicConfig(format="%(message)s")
            logging.getLogger("zerowaste_vae").setLevel(logging.INFO)
        yield


def parser_of(command: str | None) -> Parser:
    """Return the parser of a command line with the options of one command; None: of none, "": of all."""
    from .... import __version__

    parser = Parser(prog=PROGRAM, description="Decode and encode video VAE latents.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        if command in (name, ""):
            import_module(f".{name}", __package__).add_parser(subparsers)
            subparsers.choices[name].with_common()
        else:
            subparsers.add_parser(name, help=text)
    return parser


def _by_options(message: str, args: argparse.Namespace | None) -> str:
    """Return an error of the engine with options as the command line has them: "--vram-gb -1.0" for "vram_gb=-1.0"."""

    def option(found: re.Match[str]) -> str:
        name, value = found.groups()
        named = args is not None and name in vars(args)
        return f"--{name.replace('_', '-')} {value.strip(chr(39))}" if named else found[0]

    said = re.sub(r"(?<![\w-])(?:--)?([a-z]\w*)=('[^']*'|[^\s,;:]+)", option, message)
    known = "|".join(name for name in vars(args or argparse.Namespace()) if "_" in name) or "(?!)"
    alone = rf"(?<![\w/.-])({known})(?![\w/.=-])"
    return re.sub(alone, lambda found: f"--{found[0].replace('_', '-')}", said)


def _fail(message: str) -> int:
    print(f"{paint(f'{PROGRAM}: error:', RED, sys.stderr)} {one_line(message.strip(), LINE)}", file=sys.stderr)
    return EXIT_ERROR


def _out_of_memory(error: BaseException) -> bool:
    """Return True for an out-of-memory error: torch's own class on a GPU; on the CPU a plain RuntimeError from its
    allocator."""
    return isinstance(error, MemoryError) or "out of memory" in str(error) or "can't allocate memory" in str(error)
