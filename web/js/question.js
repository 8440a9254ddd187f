// What is asked of the planner for a decode node: the wishes of the nodes before it, and the size of the clip.

const VAE_NODES = { ZeroWasteVAELoader: "loader", ZeroWasteVAEOptimize: "optimize", VAELoader: "stock" };
const FRAME_WIDGETS = ["length", "frames", "num_frames", "video_length", "frame_count", "batch_size"];
// Optimisations that change what a run takes.
const PLANNED = ["channels_last_3d", "triton_fusion", "composed_upsample", "flash_attention", "async_offload"];
const DEMO = { width: 288, height: 176 };
const MAX_NODES = 64;
export const MAX_FRAMES = 100000;

export const EXAMPLE = { width: 1280, height: 720, frames: 21 };

export function value(node, name) {
  const linked = node.inputs?.some((input) => input.widget?.name === name && input.link != null);
  return linked ? undefined : node.widgets?.find((widget) => widget.name === name)?.value;
}

function inputNode(node, name) {
  const slot = node.inputs?.findIndex((input) => input.name === name) ?? -1;
  return slot < 0 ? null : node.getInputNode(slot);
}

// The decode node and what its VAE went through, nearest first; reroutes are passed through.
function vaeChain(node) {
  const chain = [node];
  let current = inputNode(node, "vae");
  for (let steps = 0; current && steps < MAX_NODES; steps += 1) {
    if (VAE_NODES[current.comfyClass]) chain.push(current);
    current = inputNode(current, "vae") ?? (current.inputs?.length === 1 ? current.getInputNode(0) : null);
  }
  return chain;
}

// As engine/vae.py has it: the toggle means fp8 where this machine has it and no other choice stands against it. Under a dB
// floor the plan is the 16-bit one, which takes most.
function eightBit(node, precision) {
  const spec = node.constructor.nodeData?.input?.optional?.fp8?.[1];
  const free = !precision || ["fp16", "bf16"].includes(precision);
  return free && !spec?.zerowaste_off && value(node, "fp8") === true && !(Number(value(node, "min_db")) > 0);
}

// As nodes/settings.py has it: the nearest node that has a wish; tile and overlap belong to the tiling they came with.
function wishes(chain) {
  const wish = {};
  for (const name of ["vram_gb", "ram_gb", "chunk"]) {
    const given = chain.map((node) => value(node, name)).find((number) => Number(number) > 0);
    if (given !== undefined) wish[name] = Number(given);
  }
  const tiling = (node) => value(node, "tiling") ?? "auto";
  const asked = chain.find((node) => tiling(node) !== "auto");
  if (asked) {
    wish.tiling = tiling(asked);
    for (const name of ["tile", "overlap"]) {
      const own = value(asked, `tiling.${name}`) ?? value(asked, name);
      if (own !== undefined && wish.tiling !== "untiled") wish[name] = Number(own);
    }
  }
  const precision = chain.slice(1).map((node) => value(node, "precision")).find((name) => name && name !== "auto");
  if (precision) wish.precision = precision;
  const output = value(chain[0], "output");
  if (output && output !== "auto") wish.output = output;
  const optimize = chain.find((node) => node.comfyClass === "ZeroWasteVAEOptimize");
  if (optimize && eightBit(optimize, wish.precision)) wish.precision = "fp8";
  const off = PLANNED.filter((name) => optimize && value(optimize, name) === false);
  if (off.length) wish.off = off.join(",");
  const file = chain.map((node) => value(node, "vae_name")).find((name) => name);
  if (file) wish.model = file;
  return wish;
}

// Width, height and, where they are known, frames from the widgets of the nodes before; the nearest one counts.
export function traceSize(node) {
  const size = {};
  const queue = [inputNode(node, "samples")];
  const seen = new Set();
  let repeats = 1;
  while (queue.length && seen.size < MAX_NODES) {
    const current = queue.shift();
    if (!current || seen.has(current)) continue;
    seen.add(current);
    const [width, height] = ["width", "height"].map((name) => Number(value(current, name)));
    if (!size.width && width >= 8 && height >= 8) Object.assign(size, { width, height });
    if (!size.width && current.comfyClass === "ZeroWasteVAEDemoClip") Object.assign(size, DEMO);
    if (current.comfyClass === "RepeatImageBatch") repeats *= Number(value(current, "amount")) || 1;
    const frames = FRAME_WIDGETS.map((name) => Number(value(current, name))).find((number) => number >= 1);
    if (!size.frames && frames) size.frames = Math.min(MAX_FRAMES, frames * repeats);
    for (let slot = 0; slot < (current.inputs?.length ?? 0); slot += 1) {
      if (["LATENT", "IMAGE", "VIDEO", "*"].includes(current.inputs[slot].type)) queue.push(current.getInputNode(slot));
    }
  }
  return size.width ? size : null;
}

// { query, source, open }: the size is picked in the panel, else traced if that changed since the last run, else of the
// last run. `open`: the number of frames is left to the panel.
export function question(node, lastRun) {
  const traced = traceSize(node);
  const picked = node.properties?.zerowaste_size;
  const moved = lastRun && traced && JSON.stringify(traced) !== JSON.stringify(lastRun.traced);
  let [size, source] = [EXAMPLE, "example"];
  if (picked) [size, source] = [picked, "picked"];
  else if (lastRun && !moved) [size, source] = [lastRun.size, "last_run"];
  else if (traced) [size, source] = [traced, "traced"];
  const wish = wishes(vaeChain(node));
  if (!wish.model && lastRun?.model) wish.model = lastRun.model;
  const open = Boolean(picked) || !size.frames;
  const frames = open ? (node.properties?.zerowaste_frames ?? EXAMPLE.frames) : size.frames;
  return { query: { ...wish, ...size, frames }, source, open };
}
