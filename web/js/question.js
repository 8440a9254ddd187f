// What is asked of the planner for a decode node: the wishes of the nodes before it, and the size of what it gets.
import { linkInto, sourceNode, sourceOf, UNKNOWN, value } from "./graph.js";

const FRAME_WIDGETS = ["length", "frames", "num_frames", "video_frames", "video_length", "frame_count"];
const DEMO = { width: 288, height: 176 };
// Nodes that change a size in a way their widgets do not tell.
const CHANGES = /scale|upsampl|resize|crop|pad|rotate|composite|trim|slice|cut|concat|stitch|select|batch|range|interpolat/i;
// Channels of what these make.
const CHANNELS = {
  EmptyLatentImage: 4, EmptySD3LatentImage: 16, EmptyFlux2LatentImage: 128, EmptyHunyuanImageLatent: 64,
  EmptyHunyuanLatentVideo: 16, EmptyHunyuanVideo15Latent: 32, EmptyMochiLatentVideo: 12, EmptyCosmosLatentVideo: 16,
  EmptyLTXVLatentVideo: 128,
};
const ENCODES = ["VAEEncode", "VAEEncodeTiled", "ZeroWasteVAEEncode", "ZeroWasteVAEEncodeFromVideo"];
// Leave a latent's channels as they are. Samplers do not: they make an empty one fit their model.
const CARRY = ["RepeatLatentBatch", "LatentFromBatch", "LatentUpscale", "LatentUpscaleBy", "LatentCrop", "LatentFlip",
  "LatentRotate", "SetLatentNoiseMask"];
const MAX_NODES = 64;
// As the server has them.
const MAX_FRAMES = 100000;
const MAX_BATCH = 4096;

// The decode node and what its VAE went through, nearest first.
function vaeChain(node) {
  const chain = [node];
  let current = sourceNode(node, "vae");
  for (let steps = 0; current && steps < MAX_NODES; steps += 1) {
    chain.push(current);
    current = sourceNode(current, "vae");
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

// Optimisations that change what a run takes, as the server says, and are set other than by default; fp8 is a precision.
// A loader without its fast path has none of them.
function switched(optimize, loader) {
  const kind = optimize?.constructor ?? window.LiteGraph?.registered_node_types?.ZeroWasteVAEOptimize;
  const without = !optimize && value(loader, "optimise") === false;
  const found = { on: [], off: [] };
  for (const [name, [, spec]] of Object.entries(kind?.nodeData?.input?.optional ?? {})) {
    if (!spec?.zerowaste_planned || name === "fp8") continue;
    const wanted = without ? false : optimize && value(optimize, name);
    if (wanted === false && spec.default !== false) found.off.push(name);
    if (wanted === true && spec.default === false && !spec.zerowaste_off) found.on.push(name);
  }
  return found;
}

// Number type of the frames that a video of this pixel format is written from; undefined where none is.
function videoType(pixels) {
  return pixels && (pixels.endsWith("10") ? "float32" : "uint8");
}

// As nodes/settings.py has it: the nearest node that has a wish; tile and overlap belong to the tiling they came with.
// `unknown` gathers the names of what other nodes compute in the run.
function wishes(chain, unknown) {
  const ask = (node, name) => {
    const found = value(node, name);
    if (found !== UNKNOWN) return found;
    unknown.add(name);
    return undefined;
  };
  const ours = chain.filter((node) => node.comfyClass?.startsWith("ZeroWaste"));
  const wish = {};
  for (const name of ["vram_gb", "ram_gb", "chunk"]) {
    const given = ours.map((node) => ask(node, name)).find((number) => Number(number) > 0);
    if (given !== undefined) wish[name] = Number(given);
  }
  const tiling = (node) => ask(node, "tiling") ?? "auto";
  const asked = ours.find((node) => tiling(node) !== "auto");
  if (asked) {
    wish.tiling = tiling(asked);
    for (const name of ["tile", "overlap"]) {
      const own = ask(asked, `tiling.${name}`) ?? ask(asked, name);
      if (own !== undefined && wish.tiling !== "untiled") wish[name] = Number(own);
    }
  }
  const precision = ours.slice(1).map((node) => ask(node, "precision")).find((name) => name && name !== "auto");
  if (precision) wish.precision = precision;
  const output = ask(chain[0], "output") ?? videoType(ask(chain[0], "pixels"));
  if (output && output !== "auto") wish.output = output;
  const optimize = chain.find((node) => node.comfyClass === "ZeroWasteVAEOptimize");
  if (optimize && eightBit(optimize, wish.precision)) wish.precision = "fp8";
  const last = chain.at(-1);
  for (const [which, names] of Object.entries(switched(optimize, last))) if (names.length) wish[which] = names.join(",");
  const kernels = optimize && ask(optimize, "kernels");
  if (kernels && kernels !== "auto") wish.kernels = kernels;
  const gpus = ask(chain[0], "gpus")?.trim?.();
  if (gpus && gpus !== "auto") wish.gpus = gpus;
  const file = vaeFile(chain[0]);
  if (file) wish.model = file;
  if (ask(chain[0], "draft") === true) wish.draft = readByUs(chain[0]) ? 1 : 2;
  return wish;
}

// What a node says of the clip that leaves it: { width, height, frames, batch }, null where it says nothing (look before
// it), or UNKNOWN where it changes the clip in a way that only a run knows.
function told(node) {
  const number = (name) => value(node, name);
  const [width, height] = [number("width"), number("height")];
  const frames = FRAME_WIDGETS.map(number).find((count) => count === UNKNOWN || Number(count) >= 1);
  const batch = number("batch_size");
  if ([width, height, frames, batch].includes(UNKNOWN)) return UNKNOWN;
  // Layers of one picture lie along the axis of time, or beside each other.
  if (number("layers") !== undefined) return UNKNOWN;
  if (node.comfyClass === "ZeroWasteVAEDemoClip") return { ...DEMO, frames: Math.min(25, frames), batch: 1 };
  if (Number(width) >= 8 && Number(height) >= 8) {
    const said = { width: Number(width), height: Number(height) };
    if (frames) said.frames = Number(frames);
    if (batch !== undefined) said.batch = Number(batch);
    // An empty latent of images has no length: one frame each.
    if (batch !== undefined && !frames) said.frames = 1;
    return said;
  }
  if (node.comfyClass === "LoadImage") {
    const picture = node.imgs?.[0];
    return picture?.naturalWidth ? { width: picture.naturalWidth, height: picture.naturalHeight, frames: 1, batch: 1 } : UNKNOWN;
  }
  return null;
}

const FACTORS = {
  RepeatImageBatch: (clip, node) => ({ ...clip, frames: clip.frames * (Number(value(node, "amount")) || 1) }),
  // The sound goes beside the frames.
  LTXVConcatAVLatent: (clip) => clip,
  RepeatLatentBatch: (clip, node) => ({ ...clip, batch: clip.batch * (Number(value(node, "amount")) || 1) }),
  LatentUpscaleBy: (clip, node) => scaled(clip, Number(value(node, "scale_by")), 8),
  ImageScaleBy: (clip, node) => scaled(clip, Number(value(node, "scale_by")), 1),
};

function scaled(clip, by, unit) {
  const side = (length) => unit * Math.max(1, Math.round((length / unit) * by));
  return by > 0 ? { ...clip, width: side(clip.width), height: side(clip.height) } : null;
}

// { width, height, frames, batch } of the clip at the input `name` of `node`, from the nodes before it; null: not known.
export function traceSize(node, name = "samples", depth = 0, seen = new Set()) {
  const source = sourceOf(node, node.inputs?.findIndex((input) => input.name === name) ?? -1);
  const current = source?.node;
  if (!current || depth > MAX_NODES || seen.has(current)) return null;
  seen.add(current);
  const said = told(current);
  if (said === UNKNOWN) return null;
  // A latent comes from a latent where the node takes one: pictures beside it are put into it.
  const type = current.outputs?.[source.slot]?.type;
  const all = (current.inputs ?? []).filter((input) => ["LATENT", "IMAGE", "VIDEO", "*"].includes(input.type));
  const alike = all.filter((input) => input.type === type);
  const carried = alike.length ? alike : all;
  const before = () => {
    for (const input of carried) {
      const found = traceSize(current, input.name, depth + 1, seen);
      if (found) return found;
    }
    return null;
  };
  if (said?.frames) return bounded({ batch: 1, ...said });
  if (said) {
    // A size without a number of frames (Upscale Image): those come from before.
    const rest = before();
    return rest && bounded({ ...rest, ...said });
  }
  const rest = before();
  if (!rest) return null;
  const factor = FACTORS[current.comfyClass];
  if (factor) return bounded(factor(rest, current));
  return CHANGES.test(current.comfyClass ?? "") ? null : rest;
}

// What made the latent that a decode gets, as far as its channels follow from that: { channels } or { encoded_by } a file.
function maker(node, steps = 0) {
  const source = sourceNode(node, "samples");
  if (!source || steps > MAX_NODES) return {};
  if (CARRY.includes(source.comfyClass)) return maker(source, steps + 1);
  if (ENCODES.includes(source.comfyClass)) {
    const file = vaeFile(source);
    return file ? { encoded_by: file } : {};
  }
  const channels = CHANNELS[source.comfyClass];
  return channels ? { channels } : {};
}

function bounded(clip) {
  return clip && { ...clip, frames: Math.min(MAX_FRAMES, Math.round(clip.frames)), batch: Math.min(MAX_BATCH, Math.round(clip.batch)) };
}

const connected = (node, name) => {
  const slot = node.inputs?.findIndex((input) => input.name === name) ?? -1;
  return slot >= 0 && Boolean(linkInto(node, slot) && sourceOf(node, slot));
};

/** The file that the loader before a node names; undefined where none does. */
export function vaeFile(node) {
  const last = vaeChain(node).at(-1);
  const file = [value(last, "vae_name"), value(last, "ckpt_name")].find((name) => name !== undefined);
  return typeof file === "string" && file ? file : undefined;
}

/** Whether this pack's own loader reads the file. */
export function readByUs(node) {
  return vaeChain(node).at(-1).comfyClass === "ZeroWasteVAELoader";
}

/** Whether the VAE of a node goes through this pack's own nodes. */
export function isOurs(node) {
  return vaeChain(node).slice(1).some((one) => one.comfyClass?.startsWith("ZeroWaste"));
}

/**
 * { query, source } of a plan to ask for, or { why } where there is nothing to ask: "unconnected", "no_size", "no_vae"
 * or "computed" (with `names` of the widgets). The size is that of the last run as long as the traced one is as it was
 * then, and where none can be traced, what makes the latent (`unmoved`).
 */
export function question(node, lastRun, unmoved = true) {
  if (!connected(node, "samples") || !connected(node, "vae")) return { why: "unconnected" };
  const traced = traceSize(node);
  const as = lastRun && (traced ? JSON.stringify(traced) === JSON.stringify(lastRun.traced) : unmoved);
  const size = as ? lastRun.size : traced;
  const unknown = new Set();
  const wish = wishes(vaeChain(node), unknown);
  // What ran is known better than what its file's name says; a draft depends on that name.
  if (lastRun?.model && wish.model === lastRun.file && !wish.draft) wish.model = lastRun.model;
  if (!size) return { why: "no_size" };
  if (unknown.size) return { why: "computed", names: [...unknown] };
  if (!wish.model) return { why: "no_vae" };
  return { query: { ...wish, ...maker(node), ...size }, source: as ? "last_run" : "traced" };
}
