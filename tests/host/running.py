"""A real ComfyUI, started headless with this pack alone and driven over HTTP and websocket."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import newer_host
import numpy as np
import pytest
import torch
from events import Socket
from PIL import Image
from safetensors.torch import save_file
from zerowaste_vae import demo_vae_path
from zerowaste_vae.engine.extras.media.mp4 import write_mp4
from zerowaste_vae.engine.families.seedvr2 import ARCHITECTURE, Config

REPOSITORY = Path(__file__).resolve().parents[2]
CACHE = Path.home() / ".cache" / "zerowaste-vae"
PACK = "ComfyUI-ZeroWasteVAE"
PROGRESS = "zerowaste_vae.progress"
#: Folders of other packs -> a node, or an address of the server, that shows that it has loaded.
PACKS = {
    "ComfyUI-KJNodes": "VAELoaderKJ",
    "ComfyUI-VideoHelperSuite": "VHS_VideoCombine",
    "ComfyUI-GGUF": "UnetLoaderGGUF",
    "ComfyUI-WanVideoWrapper": "WanVideoVAELoader",
    "ComfyUI-Impact-Pack": "LatentPixelScale",
    "ComfyUI_UltimateSDUpscale": "UltimateSDUpscale",
    "ComfyUI-SeedVR2_VideoUpscaler": "SeedVR2VideoUpscaler",
    "ComfyUI-Manager": "/manager/version",
}
FINAL = {"execution_success": "success", "execution_error": "error", "execution_interrupted": "interrupted"}

# Weights under which every layer counts and frames use the whole range.
TINY_WAN = """
import sys
target, sys.argv = sys.argv[1], ["main.py", "--cpu"]
import comfy.options
comfy.options.enable_args_parsing()
import torch
from comfy.ldm.wan.vae import WanVAE
from safetensors.torch import save_file
vae = WanVAE(
    dim=16, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[],
    temperal_downsample=[False, True, True], image_channels=3, conv_out_channels=3,
)
generator = torch.Generator().manual_seed(0)
weights = {}
for name, p in vae.state_dict().items():
    noise = torch.randn(p.shape, generator=generator)
    gain = p[0].numel() ** -0.5 if p.ndim > 1 else 0.1
    weights[name] = (1 + 0.1 * noise if name.endswith("gamma") else noise * gain).half()
save_file(weights, target)
"""


@dataclass
class Run:
    """Results of one prompt."""

    status: str
    events: list[tuple[str, dict]] = field(default_factory=list)
    outputs: dict = field(default_factory=dict)
    error: str = ""
    binary: list[bytes] = field(default_factory=list)

    def previews(self) -> list[bytes]:
        """Pictures sent while it ran, as files (binary events of type 1: type, format, file)."""
        return [m[8:] for m in self.binary if struct.unpack(">I", m[:4]) == (1,)]

    def texts(self, node: str) -> list[str]:
        """Lines shown on a node while it ran."""
        return [data["text"] for kind, data in self.events if kind == PROGRESS and data["node"] == node]

    def cached(self) -> set[str]:
        return {node for kind, data in self.events if kind == "execution_cached" for node in data["nodes"]}

    def executed(self) -> set[str]:
        return {data["node"] for kind, data in self.events if kind == "executing" and data.get("node")}

    def progress(self, node: str) -> list[tuple[int, int]]:
        return [(d["value"], d["max"]) for kind, d in self.events if kind == "progress" and d.get("node") == node]


def python_of(venv: Path) -> Path:
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def printed(
    places: tuple[Path, Path], script: str, *arguments: str, given: str | None = None, folder: Path | None = None
) -> str:
    """Return what `script` prints, run by a host's Python in its checkout. given: its standard input. folder: to
    import from as well."""
    checkout, venv = places
    paths = os.pathsep.join(str(path) for path in (checkout, folder) if path is not None)
    ran = subprocess.run(
        [python_of(venv), "-c", script, *arguments], input=given, text=True, capture_output=True, cwd=checkout,
        env={**os.environ, "PYTHONPATH": paths}, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout


class Comfy:
    """A running ComfyUI; its folders lie in `base`."""

    def __init__(
        self, checkout: Path, venv: Path, base: Path, packs: Sequence[str] = (PACK,), device: Sequence[str] = ("--cpu",)
    ) -> None:
        """device: arguments of the server that say where and how models run."""
        self.base, self.others = base, set()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        python = python_of(venv)
        self._log_path = base / "server.log"
        arguments = [*device, "--listen", "127.0.0.1", "--port", str(self.port), "--base-directory", str(base)]
        arguments += ["--disable-api-nodes", "--database-url", "sqlite:///:memory:"]
        arguments += ["--disable-all-custom-nodes", "--whitelist-custom-nodes", *packs]
        # Networks on a CPU here are tiny: on a busy machine a second thread costs more in waiting than it computes.
        environment = os.environ | ({"OMP_NUM_THREADS": "1"} if "--cpu" in device else {})
        self._command = {"args": [python, "main.py", *arguments], "cwd": checkout, "env": environment}
        self.start()

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(**self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + 180
        while True:
            try:
                self.get("/system_stats")
                return
            except (urllib.error.URLError, ConnectionError):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.stop()
                    pytest.fail(f"ComfyUI did not start:\n{self.log()[-3000:]}")
                time.sleep(0.25)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)

    def die(self) -> None:
        """End the server as a crash does."""
        self._process.kill()
        self._process.wait(30)

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def bytes(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return answer.read()

    def text(self, path: str) -> str:
        return self.bytes(path).decode()

    def get(self, path: str) -> dict:
        return json.loads(self.text(path))

    def post(self, path: str, body: dict) -> dict:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read() or "{}")

    def free(self) -> None:
        """Twice: what asks while the host collects garbage behind a prompt is looked at only when somebody asks
        again."""
        for _ in range(2):
            self.post("/free", {"unload_models": True, "free_memory": True})
            time.sleep(2)  # the host frees in its own loop

    def interrupt(self) -> None:
        self.post("/interrupt", {})

    def run(
        self, prompt: dict, at: str | None = None, do: Callable[[], None] | None = None, timeout: float = 300,
        only: Sequence[str] | None = None, **extra: object,
    ) -> Run:
        """Queue an API-format prompt and follow it to its end; `do` something at the first progress of node `at`.

        only: run no more than these outputs need. extra: what the frontend sends besides, such as preview_method.
        """
        client = uuid.uuid4().hex
        events = Socket(self.port, f"/ws?clientId={client}")
        try:
            try:
                asked = {"prompt": prompt, "client_id": client, "extra_data": extra}
                asked |= {} if only is None else {"partial_execution_targets": list(only)}
                queued = self.post("/prompt", asked)["prompt_id"]
            except urllib.error.HTTPError as refused:
                return Run("invalid", error=refused.read().decode())
            run = Run("running")
            deadline = time.monotonic() + timeout
            while run.status == "running":
                message = events.message(max(1.0, deadline - time.monotonic()))
                if isinstance(message, bytes):
                    run.binary.append(message)
                    continue
                if message is None or message.get("data", {}).get("prompt_id", queued) != queued:
                    continue
                kind, data = message["type"], message["data"]
                run.events.append((kind, data))
                if do and kind == "progress" and data.get("node") == at:
                    do()
                    do = None
                run.status = FINAL.get(kind, run.status)
                run.error = data.get("exception_message", "")
        finally:
            events.close()
        for _ in range(100):
            if queued in (history := self.get(f"/history/{queued}")):
                run.outputs = history[queued]["outputs"]
                break
            time.sleep(0.1)
        return run

    def images(self, run: Run, node: str) -> np.ndarray:
        """Return what a SaveImage node of `run` wrote: uint8 [F, H, W, 3]."""
        paths = [self.base / "output" / i["subfolder"] / i["filename"] for i in run.outputs[node]["images"]]
        return np.stack([np.asarray(Image.open(path).convert("RGB")) for path in paths])


def newest() -> tuple[Path, Path]:
    """(checkout, virtual environment) of the newest host; skips the test where there is none."""
    return found("COMFYUI_DIR", "COMFY_VENV", "ComfyUI", "venv")


def newer(folder: Path) -> tuple[Path, Path]:
    """The same of a copy, in `folder`, of 0.33.0 with what later versions ask of a VAE. Skips the test where the newest
    host is another one, which the changes do not fit."""
    checkout, venv = newest()
    if "0.33.0" not in (checkout / "comfyui_version.py").read_text():
        pytest.skip("needs ComfyUI 0.33.0, which is made newer")
    return newer_host.make(checkout, folder / "ComfyUI"), venv


def oldest() -> tuple[Path, Path]:
    """The same of the oldest host, from before the native SeedVR2 VAE."""
    return found("COMFYUI_OLD_DIR", "COMFY_OLD_VENV", "ComfyUI-0.3.64", "venv-0.3.64")


def frontend() -> Path:
    """The page of the newest comfyui-frontend-package; skips the test where there is none."""
    folder = Path(os.environ.get("COMFY_FRONTEND") or CACHE / "frontend" / "comfyui_frontend_package" / "static")
    if not (folder / "index.html").is_file():
        pytest.skip(f"needs the newest frontend: {folder} is missing (set COMFY_FRONTEND, or see tools/host_ci.sh)")
    return folder


def page() -> tuple[str, ...]:
    """Options of a host on a CPU, with the page that COMFY_PAGE names in the place of its own, if any."""
    folder = os.environ.get("COMFY_PAGE")
    return ("--cpu", "--front-end-root", folder) if folder else ("--cpu",)


def found(directory: str, environment: str, checkout: str, venv: str) -> tuple[Path, Path]:
    paths = Path(os.environ.get(directory) or CACHE / checkout), Path(os.environ.get(environment) or CACHE / venv)
    for path, variable in zip(paths, (directory, environment), strict=True):
        if not path.is_dir():
            pytest.skip(f"needs a real ComfyUI: {path} is missing (set {variable}, or see tools/host_ci.sh)")
    return paths


def random_weights(config: Config) -> dict[str, torch.Tensor]:
    """Seeded fp16 weights under which every layer counts and frames use the whole range."""
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in ARCHITECTURE.build(config).state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        is_norm = len(shape) == 1 and name.endswith("weight")
        weights[name] = (
            1 + 0.1 * noise if is_norm else noise * (shape[1:].numel() ** -0.5 if len(shape) > 1 else 0.1)
        ).half()
    return weights


@contextmanager
def crowded(base: Path, places: tuple[Path, Path]) -> Iterator[Comfy]:
    """A host with other packs beside this one, whose names are in `others`: COMFY_PACKS names a folder of their
    checkouts; what they need is in the host's environment. Skips the test where none is there."""
    folder = Path(os.environ.get("COMFY_PACKS") or "nowhere")
    others = [folder / name for name in PACKS if (folder / name).is_dir()]
    if not others:
        pytest.skip("needs checkouts of other packs (COMFY_PACKS)")
    with serving(base, places, others=others) as server:
        server.others = {path.name for path in others}
        write_tiny_wan(places, base / "models" / "vae" / "tiny_wan.safetensors")
        yield server


@contextmanager
def serving(
    base: Path, places: tuple[Path, Path], pack: Path = REPOSITORY, others: Sequence[Path] = (),
    device: Sequence[str] = ("--cpu",),
) -> Iterator[Comfy]:  # fmt: skip
    """A host with its folders in `base`: tiny VAEs, on a CPU a clip of nine frames, and this pack (or what lies at
    `pack`), with `others` beside it."""
    for folder in ("models/vae", "input", "custom_nodes"):
        (base / folder).mkdir(parents=True)
    (base / "custom_nodes" / PACK).symlink_to(pack, target_is_directory=True)
    weights = random_weights(Config((16, 32, 64, 64), (16, 32, 64, 64), norm_groups=8))
    vaes = base / "models" / "vae"
    save_file(weights, vaes / "tiny.safetensors", {"norm_num_groups": "8"})
    save_file({"encoder.weight": torch.zeros(4, 4)}, vaes / "not_a_vae.safetensors")
    writer = gguf.GGUFWriter(vaes / "tiny.gguf", "vae")
    writer.add_uint32("norm_num_groups", 8)
    for name, tensor in weights.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if "--cpu" in device:  # what runs on a GPU here are latents alone, where there may be no PyAV
        write_mp4(base / "input" / "clip.mp4", moving_waves(), 8)
    for other in others:
        (base / "custom_nodes" / other.name).symlink_to(other, target_is_directory=True)
    server = Comfy(*places, base, (PACK, *(other.name for other in others)), device)
    try:
        yield server
    finally:
        server.stop()


def moving_waves() -> torch.Tensor:
    """Nine frames [9, 48, 64, 3] in 0..1."""
    y, x, t = torch.meshgrid(torch.linspace(0, 3, 48), torch.linspace(0, 4, 64), torch.arange(9.0), indexing="ij")
    waves = torch.stack([torch.sin(x + t / 3), torch.cos(y - t / 4), torch.sin(x * y)], -1)
    return waves.permute(2, 0, 1, 3) / 2 + 0.5


def write_tiny_wan(places: tuple[Path, Path], path: Path) -> None:
    """A small Wan 2.1 VAE of the host's own class, which its stock loader loads."""
    printed(places, TINY_WAN, str(path))


#: What scripts within the host begin with: it has read its options, and the demo VAE's path. After `claim_gpus` the
#: host and torch say that GPUs are here, with all that loading a VAE asks of them.
START = """
import sys
from pathlib import Path
sys.argv[:1] = ["main.py", "--cpu"]
import comfy.options
comfy.options.enable_args_parsing()
vae_file = Path(sys.stdin.read())

def claim_gpus(count=1):
    import comfy.model_management as mm
    import torch
    mm.vae_device = lambda: torch.device("cuda", 0)
    torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: count
    torch.cuda.get_device_capability, torch.cuda.get_device_name = lambda *_: (9, 0), lambda *_: "GPU"

"""


def inside(host_places, pack_folder, script: str, *options: str) -> str:
    """Return what `script` prints behind START, run by the host's Python in its checkout; options: more of the
    host's."""
    return printed(host_places, START + script, *options, given=str(demo_vae_path()), folder=pack_folder)
