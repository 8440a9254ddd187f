"""`completion` in real shells: the script is read, words and the Tab key are typed, and a line is run."""

import os
import re
import select
import shutil
import subprocess
import time

import pytest
from zerowaste_vae.engine.extras.cli.completion import script

#: What is typed, with its Tab -> the command line that then runs. The folder holds one file.
TYPED = {
    "dec\t": "decode",
    "deco\t--vr\t8": "decode --vram-gb 8",
    "bench rep\t": "bench report",
    "decode cli\t": "decode clip_latent.safetensors",
    "decode \t--resu\t": "decode clip_latent.safetensors --resume",
    "decode --vae \t": "decode --vae clip_latent.safetensors",
    "completion zs\t": "completion zs",
}
#: Shell -> how it starts without its user's settings, and its first line.
SHELLS = {
    "bash": (("bash", "--norc", "--noprofile", "-i"), "bind 'set enable-bracketed-paste off'"),
    "zsh": (("zsh", "-f", "-i"), "unset zle_bracketed_paste"),
}


@pytest.mark.parametrize("shell", SHELLS)
def test_tab(shell, tmp_path):
    if os.name == "nt" or shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    import pty

    (tmp_path / "words").write_text(script(shell))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "clip_latent.safetensors").touch()
    control, terminal = pty.openpty()
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TERM": "dumb", "PS1": "$ ", "COLUMNS": "300"}
    command, first = SHELLS[shell]
    process = subprocess.Popen(command, cwd=tmp_path / "folder", env=env, stdin=terminal, stdout=terminal,
                               stderr=terminal, start_new_session=True)  # fmt: skip
    os.close(terminal)
    try:
        lines = [first, ". ../words", "zerowaste-vae() { printf '%s\\n' \"<$*>\"; }"]
        for line in (*lines, *(f"zerowaste-vae {typed}" for typed in TYPED), "zerowaste-vae end"):
            os.write(control, f"{line}\n".encode())
        said, until = "", time.monotonic() + 20
        while "<end>" not in said and time.monotonic() < until and select.select([control], [], [], 20)[0]:
            said += os.read(control, 4096).decode(errors="replace")
    finally:
        process.kill()
        process.wait()
        os.close(control)
    ran = [line.strip() for line in re.findall(r"<([^<>$]+)>\r?$", said, re.M)]
    assert ran == [*TYPED.values(), "end"], said
