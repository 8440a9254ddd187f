// "Use Zero-Waste VAE": puts this pack's nodes in the place of ComfyUI's own, with their links, values and looks.
import { app } from "../../../scripts/app.js";
import { allNodes, entersAt, leavesAt, linkOf, sourceNode, value } from "./graph.js";
import { t } from "./strings.js";

const DECODE = "ZeroWasteVAEDecode";
const ENCODE = "ZeroWasteVAEEncode";
const OPTIMIZE = "ZeroWasteVAEOptimize";
const REPLACED = { VAEDecode: DECODE, VAEDecodeTiled: DECODE, VAEEncode: ENCODE, VAEEncodeTiled: ENCODE };
const TILED = ["VAEDecodeTiled", "VAEEncodeTiled"];
const LOADERS = ["VAELoader"];
// Values of ComfyUI's tiled nodes, and the widgets of ours that mean the same.
const TILES = { tile_size: "tiling.tile", overlap: "tiling.overlap" };
// Where no file tells: the networks the engine knows, by how their files are named.
const KNOWN_NAMES = /seedvr|ema_vae|wan|qwen/i;
const GAP = 50;
// In which a status line can be read to its end.
const WIDTH = 320;

/** What the menu of a node offers: nothing, or the one entry. */
export function menuItems(node) {
  if (!canAdopt(node)) return [];
  return [{ content: t("adopt"), callback: () => adopt([node]) }];
}

export function canAdopt(node) {
  if (REPLACED[node.comfyClass]) return true;
  if (!LOADERS.includes(node.comfyClass)) return false;
  return !node.outputs?.[0]?.links?.length || othersTake(node);
}

// Whether the VAE of a loader goes to a node that is not ours.
function othersTake(loader) {
  return targets(loader, 0).some(({ node, border }) => border || takesHostVAE(node));
}

/** Every node of the workflow that ours can stand for; returns how many it were. */
export function adoptAll() {
  const nodes = allNodes().filter((node) => REPLACED[node.comfyClass]);
  // After those, a loader needs Optimize only where its VAE goes to nodes of others.
  const done = adopt(nodes, () => {
    const loaders = allNodes().filter((node) => LOADERS.includes(node.comfyClass) && othersTake(node));
    loaders.forEach(insertOptimize);
    return loaders.length;
  });
  const detail = done ? t("adopted", { n: done }) : t("adopted_none");
  app.extensionManager?.toast?.add?.({ severity: done ? "success" : "info", summary: t("adopt"), detail, life: 4000 });
  return done;
}

// One step for undo, however many nodes it changes.
function adopt(nodes, more = () => 0) {
  const tracker = app.extensionManager?.workflow?.activeWorkflow?.changeTracker;
  if (tracker?.beforeChange) tracker.beforeChange();
  else app.canvas.emitBeforeChange?.();
  try {
    for (const node of nodes) {
      if (REPLACED[node.comfyClass]) replace(node);
      else insertOptimize(node);
    }
    return nodes.length + more();
  } finally {
    if (tracker?.afterChange) tracker.afterChange();
    else app.canvas.emitAfterChange?.();
    app.canvas.setDirty(true, true);
  }
}

// -- links -------------------------------------------------------------------------------------------------------------

// Whoever takes output `slot`: { node, slot, reroute } or { border, reroute } where the link leaves a subgraph.
function targets(node, slot) {
  return [...(node.outputs?.[slot]?.links ?? [])].map((id) => linkOf(node.graph, id)).filter(Boolean).map((link) => ({
    node: leavesAt(link) ? null : node.graph.getNodeById(link.target_id),
    border: leavesAt(link) ? node.graph.outputs[link.target_slot] : null,
    slot: link.target_slot,
    reroute: link.parentId,
  }));
}

function takesHostVAE(user) {
  return Boolean(user) && ![DECODE, ENCODE, OPTIMIZE].includes(user.comfyClass);
}

function connectInput(graph, link, node, slot) {
  if (entersAt(link)) graph.inputs[link.origin_slot].connect(node.inputs[slot], node);
  else graph.getNodeById(link.origin_id)?.connect(link.origin_slot, node, slot, link.parentId);
}

function connectOutput(node, slot, target) {
  if (target.border) target.border.connect(node.outputs[slot], node);
  else if (target.node) node.connect(slot, target.node, target.slot, target.reroute);
}

// -- in place ----------------------------------------------------------------------------------------------------------

function create(kind, like) {
  const node = window.LiteGraph.createNode(kind);
  node.pos = [...like.pos];
  node.mode = like.mode;
  if (like.color) node.color = like.color;
  if (like.bgcolor) node.bgcolor = like.bgcolor;
  if (like.title && like.title !== like.constructor.title) node.title = like.title;
  return node;
}

function replace(old) {
  const { graph } = old;
  const links = (old.inputs ?? []).map((input) => ({ name: input.name, link: linkOf(graph, input.link) })).filter(({ link }) => link);
  const users = targets(old, 0);
  const node = create(REPLACED[old.comfyClass], old);
  graph.add(node);
  node.setSize([Math.max(old.size[0], node.size[0], WIDTH), node.computeSize()[1]]);
  keepTiles(old, node, links);
  for (const { name, link } of links) {
    const slot = node.inputs.findIndex((input) => input.name === (TILES[name] ?? name));
    if (slot >= 0) connectInput(graph, link, node, slot);
  }
  for (const target of users) connectOutput(node, 0, target);
  graph.remove(old);
  if (old.flags?.collapsed) node.collapse?.(true);
  else makeRoom(node, old.pos[1] + old.size[1]);
  app.canvas.selectNode?.(node);
  return node;
}

// The engine plans whole frames by itself. A network that stays ComfyUI's own keeps the tiles it was given, as do tiles
// that another node gives.
function keepTiles(old, node, links) {
  if (!TILED.includes(old.comfyClass)) return;
  const linked = links.some(({ name }) => TILES[name]);
  if (!linked && engineRuns(old)) return;
  const set = (name, to) => {
    const widget = node.widgets.find((entry) => entry.name === name);
    if (!widget || typeof to === "symbol" || to === undefined) return;
    widget.value = to;
    widget.callback?.(to, app.canvas, node);
  };
  set("tiling", "blended");
  for (const [theirs, ours] of Object.entries(TILES)) set(ours, old.widgets?.find((entry) => entry.name === theirs)?.value);
}

function engineRuns(node) {
  let source = sourceNode(node, "vae");
  for (let steps = 0; source && source.inputs?.some((input) => input.name === "vae") && steps < 8; steps += 1) {
    source = sourceNode(source, "vae");
  }
  if (!source) return false;
  if (source.comfyClass?.startsWith("ZeroWaste")) return true;
  const file = value(source, "vae_name");
  return typeof file === "string" && KNOWN_NAMES.test(file);
}

function insertOptimize(loader) {
  const { graph } = loader;
  const users = targets(loader, 0).filter(({ node, border }) => border || takesHostVAE(node));
  const node = create(OPTIMIZE, loader);
  node.title = node.constructor.title;
  graph.add(node);
  node.pos = [loader.pos[0], loader.pos[1] + loader.size[1] + GAP];
  loader.connect(0, node, node.inputs.findIndex((input) => input.name === "vae"));
  for (const target of users) connectOutput(node, 0, target);
  makeRoom(node, loader.pos[1] + loader.size[1]);
  return node;
}

// What the new node would cover moves down, and what stands below that with it.
function makeRoom(node, from) {
  const [left, right] = [node.pos[0], node.pos[0] + node.size[0]];
  const title = window.LiteGraph.NODE_TITLE_HEIGHT ?? 30;
  const below = [...node.graph.nodes].filter(
    (other) => other !== node && other.pos[1] >= from - title && other.pos[0] < right && other.pos[0] + other.size[0] > left,
  );
  if (!below.length) return;
  const top = Math.min(...below.map((other) => other.pos[1]));
  const missing = node.pos[1] + node.size[1] + title + 10 - top;
  if (missing <= 0) return;
  for (const other of below) other.pos = [other.pos[0], other.pos[1] + missing];
}
