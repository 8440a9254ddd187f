"""Ctrl-C ends a command in a line, whatever it meets."""

import os
import signal
import struct
import subprocess
import sys
import threading

import pytest
import torch
from safetensors.torch import save_file


@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent in another way there")
def test_ctrl_c_leaves_nothing(tmp_path, vae_file):
    import fcntl
    import termios

    save_file({"latent": torch.zeros(1, 16, 200, 8, 8)}, tmp_path / "l.safetensors")
    # Before the first frames are written, which a Ctrl-C would leave for --resume.
    command = [sys.executable, "-c", "import sys; from zerowaste_vae.engine.extras.cli import main; sys.exit(main())"]
    # A pseudo-terminal, so that the progress bar shows when the work has begun.
    controller, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    process = subprocess.Popen(
        [*command, "decode", "l.safetensors", "a.mp4", "--vae", str(vae_file), "--chunk", "100"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=terminal, text=True,
        # A shell that starts the tests in the background lets them ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    os.close(terminal)
    watchdog = threading.Timer(120, process.kill)
    watchdog.start()
    shown = b""
    try:
        while b"decode: 0" not in shown:
            shown += os.read(controller, 4096)
        process.send_signal(signal.SIGINT)
        while True:
            try:
                shown += os.read(controller, 4096)
            except OSError:  # Linux ends a pseudo-terminal so
                break
        out, _ = process.communicate()
    finally:
        watchdog.cancel()
        process.kill()
        os.close(controller)
    assert process.returncode == 130, shown
    assert out == "" and b"cancelled" in shown and b"Traceback" not in shown
    assert [f.name for f in tmp_path.iterdir()] == ["l.safetensors"]


SWALLOWED = """
import signal, sys
from zerowaste_vae.engine.extras.cli import main
from zerowaste_vae.engine.extras.cli import info
def run(args):
    try:
        if pressed:
            signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        pass
    raise ValueError("could not determine the shape")
info.run = run
signal.signal(signal.SIGINT, signal.default_int_handler)
code = main(["info"])
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
sys.exit(code)
"""


@pytest.mark.parametrize("pressed, code, said", [(True, 130, "cancelled"), (False, 1, "could not determine the shape")])
def test_ctrl_c_inside_c_code(pressed, code, said):
    done = subprocess.run([sys.executable, "-c", f"pressed = {pressed}{SWALLOWED}"], capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (code, not pressed), done.stderr
    assert done.stderr.rstrip().endswith(said)
