"""What the GPU tests get when only prebuilt kernels may run."""

import subprocess
import sys


def test_no_process_of_the_tests_imports_triton(load_tool, monkeypatch, tmp_path):
    tool = load_tool("run_prebuilt_tests")
    real, said = subprocess.run, []

    def run(command, cwd, env):
        code = "import os, subprocess, sys\ntry:\n    import triton\nexcept ImportError:\n    print('none')\n"
        code += "print(os.environ['ZEROWASTE_KERNELS'], os.environ['ZEROWASTE_SETS'])"
        child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
        said.append((command[1:3], command[-1], real([sys.executable, "-c", child], env=env, capture_output=True,
                                                     text=True).stdout.split()))  # fmt: skip
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(tool.subprocess, "run", run)
    assert tool.main(["--form", "A", "--sets", str(tmp_path)]) == 3
    assert tool.main(["--sets", str(tmp_path), "-x", "tests/engine/test_vae_gpu.py"]) == 3
    assert said == [(["-m", "pytest"], "tests/engine", ["none", "A", str(tmp_path)]),
                    (["-m", "pytest"], "tests/engine/test_vae_gpu.py", ["none", "C", str(tmp_path)])]  # fmt: skip


def test_warm(load_tool, monkeypatch, tmp_path, capsys):
    """Each model of the tests runs once, and one that fails is named."""
    tool, ran = load_tool("run_prebuilt_tests"), []

    def run(command, cwd, env, **_):
        ran.append((command[1].endswith("warm_kernels.py"), tuple(command[2:]), env["ZEROWASTE_KERNELS"]))
        failed = command[2:] == ["wan2.1", "fp8", "decode"]
        return subprocess.CompletedProcess(command, int(failed), "", "no room" if failed else "")

    monkeypatch.setattr(tool.subprocess, "run", run)
    assert tool.main(["--form", "B", "--warm", "3"]) == 1
    assert capsys.readouterr().out == "wan2.1 fp8 decode: no room\n"
    cells = [cell for script, cell, form in ran if script and form == "B"]
    assert len(cells) == len(set(cells)) == len(ran) > 60 and ("seedvr2", "fp16", "decode") in cells
