"""Every name of ComfyUI and of its frontend that this pack uses: where it was seen, and what happens where it is not.

Each entry is (oldest version it was seen in, what happens without it, names). Names of Python are those that nodes/
imports or reads; start options are attributes of comfy.cli_args.args. Names of the frontend are those of web/js:
`app`, `api` and `LiteGraph` with what follows, methods of nodes, graphs and canvases, and events of `api`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from zerowaste_vae.engine.families import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[2]
MODULES = {"comfy", "comfy_api", "comfy_execution", "folder_paths", "server"}
ARGS = "comfy.cli_args.args"
NO_PACK = "the pack does not load; ComfyUI's log says which name is missing"
NO_RUN = "a run ends with an error that names it"
OWN_CODE = "ComfyUI's own code runs every VAE, and a line says so (nodes/fit.py; also where it takes other arguments)"

PYTHON = [
    ("0.3.64", NO_PACK, """comfy.model_management comfy.model_patcher comfy.model_patcher.ModelPatcher
        comfy.patcher_extension comfy.sd comfy.sd.VAE comfy.utils comfy.cli_args.LatentPreviewMethod
        comfy.cli_args.args comfy_api.latest.ComfyExtension comfy_api.latest.InputImpl comfy_api.latest.io
        comfy_api.latest.io.ComfyNode comfy_api.latest.io.Input comfy_api.latest.io.Schema
        comfy_api.latest.io.Schema.__dataclass_fields__ comfy_api.latest.io.NodeOutput
        comfy_api.latest.io.Boolean.Input comfy_api.latest.io.Combo.Input comfy_api.latest.io.Float.Input
        comfy_api.latest.io.Float.Output comfy_api.latest.io.Image.Input comfy_api.latest.io.Image.Output
        comfy_api.latest.io.Int.Input comfy_api.latest.io.Latent.Input comfy_api.latest.io.Latent.Output
        comfy_api.latest.io.String.Input comfy_api.latest.io.String.Output comfy_api.latest.io.Vae.Input
        comfy_api.latest.io.Vae.Output comfy_api.latest.io.Video.Input comfy_api.latest.io.Video.Output
        comfy_api.latest.io.Audio.Input comfy_api.latest.ui comfy_execution.utils.get_executing_context folder_paths
        comfy_api.latest.io.Audio.Output comfy_execution.progress.get_progress_state
        comfy_api.latest.io.Custom"""),
    ("0.3.64", OWN_CODE, """comfy.model_management.load_models_gpu comfy.model_management.free_memory
        comfy.model_management.get_free_memory comfy.model_management.soft_empty_cache
        comfy.model_management.minimum_inference_memory comfy.model_management.extra_reserved_memory
        comfy.model_patcher.ModelPatcher.model_size comfy.model_patcher.ModelPatcher.current_loaded_device
        comfy.model_management.processing_interrupted
        comfy.model_management.throw_exception_if_processing_interrupted comfy.model_patcher.ModelPatcher.add_callback
        comfy.model_patcher.ModelPatcher.loaded_size comfy.model_patcher.ModelPatcher.partially_unload
        comfy.sd.VAE.__init__ comfy.utils.ProgressBar comfy.model_management.vae_device
        comfy.model_management.get_total_memory comfy.model_management.vae_offload_device"""),
    ("0.3.64", NO_RUN, """comfy.model_management.current_loaded_models comfy.model_management.LoadedModel
        comfy.model_management.DISABLE_SMART_MEMORY comfy.model_management.InterruptProcessingException
        comfy.model_management.interrupt_current_processing
        comfy.patcher_extension.CallbacksMP.ON_DETACH comfy_api.latest.ui.PreviewImage
        comfy_api.latest.InputImpl.VideoFromFile comfy.cli_args.LatentPreviewMethod.NoPreviews
        comfy.cli_args.args.preview_method folder_paths.get_full_path_or_raise folder_paths.get_output_directory
        folder_paths.get_save_image_path folder_paths.get_temp_directory folder_paths.get_input_directory"""),
    ("0.3.64", "the list of files is empty, with an error in the log", """folder_paths.get_filename_list
        folder_paths.get_folder_paths folder_paths.recursive_search"""),
    ("0.33.0", "memory that the pack page-locks is not counted with the host's", """
        comfy.model_management.MAX_PINNED_MEMORY comfy.model_management.TOTAL_PINNED_MEMORY
        comfy.model_management.ensure_pin_registerable"""),
    ("0.33.0", "VAEs run in the device context of torch", "comfy.model_management.cuda_device_context"),
    ("0.33.0", "frames are float32", "comfy.model_management.intermediate_dtype"),
    ("0.33.0", "quantised files of most families need this pack's loader", "comfy.sd.load_vae_patcher"),
    ("0.33.0", "native tiles blend by the newest rule", "comfy.ldm.minimax.vae.MiniMaxH3VideoVAE"),
    ("0.33.0", "tile and overlap stand beside tiling, always", """comfy_api.latest.io.DynamicCombo
        comfy_api.latest.io.DynamicCombo.Input comfy_api.latest.io.DynamicCombo.Option"""),
    ("0.38", "nothing records allocations", "comfy.model_prefetch.pause_malloc_graph"),
    ("0.3.64", "the option was not given", """comfy.cli_args.args.fp16_vae comfy.cli_args.args.bf16_vae
        comfy.cli_args.args.fp32_vae comfy.cli_args.args.fast comfy.cli_args.args.reserve_vram
        comfy.cli_args.args.lowvram comfy.cli_args.args.novram comfy.cli_args.args.cache_none
        comfy.cli_args.args.disable_smart_memory"""),
    ("0.33.0", "the option was not given", """comfy.cli_args.args.disable_pinned_memory
        comfy.cli_args.args.disable_async_offload"""),
]  # fmt: skip

#: What hosts ask of our VAE and its patcher, with the version it was seen in (read, not run, after 0.33.0), and what a
#: pack without it meets. "After 0.38": of a release between 0.38 and 0.45.
ASKED = [
    ("0.3.64", "stock nodes do not run", """EngineVAE.decode(vae_options) EngineVAE.decode_tiled(tile_x)
        EngineVAE.encode_tiled(tile_x) EngineVAE.first_stage_model EngineVAE.patcher _Patcher.partially_unload"""),
    ("0.38", "a copy of the VAE cannot be made", "_Patcher.clone(**options)"),
    ("0.38", "the cache under pressure counts a VAE as 0.05 bytes", "EngineVAE._comfy_cache_tensors"),
    ("after 0.38", "every VAE Encode raises, or encodes pictures as one clip", """EngineVAE.encode(not_video)
        EngineVAE.encode_tiled(not_video) EngineVAE.not_video"""),
    ("after 0.38", "nodes that call the network raise", "Direct.decode(output_buffer) Direct.encode(**_)"),
]
#: The version of each host that tests run in.
HOSTS = {"oldest": "0.3.64", "newest": "0.33.0", "newer": "0.38"}

#: Of the frontend: 1.27 is the oldest host's, 1.49 the newest host's.
FRONTEND = [
    ("1.27", "the pack's script does not load; its nodes work without lines, switches and menu entries", """
        app.registerExtension api.addEventListener api.fetchApi api.queuePrompt node.addDOMWidget node.addWidget
        node.setSize node.computeSize LiteGraph.NODE_FONT LiteGraph.NODE_TEXT_SIZE LiteGraph.registered_node_types"""),
    ("1.27", "a comparison gives an error", "app.graphToPrompt api.apiURL"),
    ("1.27", "the pack's templates are in the order of the file system", "api.getWorkflowTemplates"),
    ("1.27", "the list of files is read again when the page is", "app.refreshComboInNodes"),
    ("1.27", "texts are English", "app.extensionManager.setting.get"),
    ("1.27", "no message says how many nodes were replaced", "app.extensionManager.toast.add"),
    ("1.27", "a result from before the page was opened is not shown", "app.nodeOutputs"),
    ("1.27", "runs are shown in every workflow", "app.extensionManager.workflow.activeWorkflow"),
    ("1.27", "each replaced node is a step of undo of its own", """
        app.extensionManager.workflow.activeWorkflow.changeTracker app.canvas.emitBeforeChange
        app.canvas.emitAfterChange graph.updateExecutionOrder"""),
    ("1.27", "nodes are drawn anew when the canvas next is", "app.canvas app.canvas.setDirty node.setDirtyCanvas"),
    ("1.27", "a replaced node is not selected, or not collapsed as the old one", "app.canvas.selectNode node.collapse"),
    ("1.27", "a title is taken as 30 pixels high", "LiteGraph.NODE_TITLE_HEIGHT"),
    ("1.27", "nodes are replaced by nobody", """LiteGraph.createNode graph.add graph.remove graph.getNodeById
        graph.getLink node.connect LiteGraph.LGraphNode.prototype.getInputLink"""),
    ("1.27", "a node that stands for a pinned one is not pinned", "node.pin"),
    ("1.27", "subgraphs are taken for the workflow itself", "app.graph app.graph.rootGraph"),
    ("1.49", "the workflow is taken from the graph that is open", "app.rootGraph"),
    ("1.49", "nodes are asked for their menu entries themselves", "app.collectNodeMenuItems"),
    ("1.27", "nodes are drawn", "LiteGraph.vueNodesMode"),
    ("1.27", "the line does not follow runs", """event execution_start, event execution_cached, event executing,
        event executed, event execution_error, event execution_interrupted, event zerowaste_vae.progress"""),
    ("1.27", "a lost server is not noticed before a plan is asked for", "event reconnecting, event reconnected"),
]  # fmt: skip
#: Of widgets, elements and other packs' virtual nodes; no names of the frontend's objects.
_OTHERS = {"addEventListener", "callback", "getInputLink"}


def names(table: list[tuple[str, str, str]]) -> dict[str, str]:
    """Name -> oldest version it was seen in."""
    parts = [(version, re.findall(r"event [\w.]+|[\w.]+", text)) for version, _, text in table]
    listed = [(name, version) for version, found in parts for name in found]
    assert len(listed) == len(dict(listed)), "a name stands twice"
    return dict(listed)


def later(host: str) -> list[str]:
    """Names of Python that were seen in later versions only than that of a host of `HOSTS`."""

    def of(version: str) -> list[int]:
        return list(map(int, version.split(".")))

    return [name for name, version in names(PYTHON).items() if of(version) > of(HOSTS[host])]


def used_in_python() -> set[str]:
    """Names of ComfyUI that nodes/ imports or reads, getattr and hasattr included."""
    found = {name for path in sorted((ROOT / "nodes").glob("*.py")) for name in _of(ast.parse(path.read_text()))}
    options = ast.parse((ROOT / "nodes" / "settings.py").read_text())
    tables = [n.value for n in options.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Dict)]
    listed = {key.value for table in tables for key in table.keys}
    found |= {architecture.host for architecture in ARCHITECTURES if architecture.host}
    return found | {f"{ARGS}.{name}" for name in listed | _read(options, "args")}


def _of(tree: ast.Module) -> Iterator[str]:
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                if one.name.split(".")[0] in MODULES:
                    yield one.name
                    known[one.asname or one.name.split(".")[0]] = one.name if one.asname else one.name.split(".")[0]
        if isinstance(node, ast.ImportFrom) and not node.level and node.module.split(".")[0] in MODULES:
            for one in node.names:
                yield f"{node.module}.{one.name}"
                known[one.asname or one.name] = f"{node.module}.{one.name}"
        if isinstance(node, ast.ImportFrom) and node.level and node.module == "host":
            known |= {"io": "comfy_api.latest.io"} if any(one.name == "io" for one in node.names) else {}
    outer = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    inner = {id(node.value) for node in outer}
    for node in outer:
        base, dotted = node, []
        while isinstance(base, ast.Attribute):
            dotted.insert(0, base.attr)
            base = base.value
        if id(node) not in inner and isinstance(base, ast.Name) and base.id in known:
            yield ".".join([known[base.id], *dotted])
    for alias, name in known.items():
        yield from (f"{name}.{read}" for read in _read(tree, alias))


def _read(tree: ast.Module, name: str) -> set[str]:
    """Return the names that getattr and hasattr ask `name` for."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    asked = [c.args for c in calls if c.func.id in ("getattr", "hasattr") and isinstance(c.args[0], ast.Name)]
    return {args[1].value for args in asked if args[0].id == name and isinstance(args[1], ast.Constant)}


def used_in_frontend() -> set[str]:
    found = set()
    for path in (ROOT / "web" / "js").glob("*.js"):
        text = re.sub(r"//.*|/\*.*?\*/|^import .*$", "", path.read_text(), flags=re.MULTILINE)
        for base, rest in re.findall(r"(?<![\w.])(?:window\.)?(app|api|LiteGraph)((?:\??\.\w+)+)", text):
            found.add(re.sub(r"\.(call|ZeroWaste\w+)$", "", base + rest.replace("?", "")))
        found |= {f"event {name}" for name in re.findall(r'api\.addEventListener\("([\w.]+)"', text)}
        for name in re.findall(r"\b(?:node|old|loader|origin_node)\??\.(\w+)\??\.?\(", text):
            found |= {f"node.{name}"} - {f"node.{other}" for other in _OTHERS}
        for name in re.findall(r"\bgraph\??\.(\w+)\??\.?\(", text):
            found.add(f"graph.{name}")
    return found
