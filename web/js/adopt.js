// "Use Zero-Waste VAE": puts this pack's nodes in the place of ComfyUI's own, with their links, values and looks.
import { app } from "../../../scripts/app.js";
import { allNodes, entersAt, leavesAt, linkOf, value } from "./graph.js";
import { isKnown } from "./plans.js";
import { isOurs, vaeFile } from "./question.js";
import { t } from "./strings.js";

const DECODE = "ZeroWasteVAEDecode";
const ENCODE = "ZeroWasteVAEEncode";
const OPTIMIZE = "ZeroWasteVAEOptimize";
const TO_VIDEO = "ZeroWasteVAEDecodeToVideo";
const REPLACED = {
  VAEDecode: DECODE, VAEDecodeTiled: DECODE, VHS_VAEDecodeBatched: DECODE,
  VAEEncode: ENCODE, VAEEncodeTiled: ENCODE, VHS_VAEEncodeBatched: ENCODE,
};
const TILED = ["VAEDecodeTiled", "VAEEncodeTiled"];
const LOADERS = ["VAELoader", "VAELoaderKJ"];
// Values of ComfyUI's tiled nodes, and the widgets of ours that mean the same.
const TILES = { tile_size: "tiling.tile", overlap: "tiling.overlap" };
const GAP = 50;
const BESIDE = 20;

/** What the menu of a node offers: nothing, or the one entry; another one on a loader, and on a decode before a video. */
export function menuItems(node) {
  const items = canAdopt(node) ? [{ content: t("adopt"), callback: () => adopt([node]) }] : [];
  if (items.length && LOADERS.includes(node.comfyClass)) {
    items.push({ content: t("adopt_8_bit"), callback: () => adopt([node], [], () => 0, "int8") });
  }
  if (videoBehind(node)) items.push({ content: t("adopt_video"), callback: () => adopt([], [node]) });
  return items;
}

function canAdopt(node) {
  if (REPLACED[node.comfyClass]) return true;
  if (!LOADERS.includes(node.comfyClass)) return false;
  return !node.outputs?.[0]?.links?.length || othersTake(node);
}

// Whether the VAE of a loader goes to a node that is not ours.
function othersTake(loader) {
  return targets(loader, 0).some(({ node, border }) => border || takesHostVAE(node));
}

/** Every node of the workflow that ours can stand for; returns how many it were. */
export async function adoptAll() {
  const nodes = allNodes().filter((node) => REPLACED[node.comfyClass]);
  const loaders = await which(allNodes().filter((node) => LOADERS.includes(node.comfyClass)), engineRuns);
  // After those, a loader needs Optimize only where its VAE goes to nodes of others.
  const done = await adopt(nodes, [], () => {
    const left = loaders.filter(othersTake);
    left.forEach((node) => insertOptimize(node));
    return left.length;
  });
  const [type, left] = [foreignVAE(), leftAlone()];
  const more = [type && t("foreign_vae", { type }), left.length && t("adopted_left", { names: left.join(", ") })].filter(Boolean);
  const detail = [done ? t("adopted", { n: done }) : t("adopted_none"), ...more].join(" ");
  app.extensionManager?.toast?.add?.({ severity: done ? "success" : "info", summary: t("adopt"), detail, life: more.length ? 12000 : 4000 });
  return done;
}

// Titles of ComfyUI's other nodes that decode or encode.
function leftAlone() {
  const others = allNodes().filter((node) => /^(?!ZeroWaste).*VAE(Decode|Encode)/.test(node.comfyClass ?? ""));
  return [...new Set(others.map((node) => node.constructor.title ?? node.comfyClass))];
}

// The VAE type of another pack's own in this workflow, which fits no socket of the host's or ours.
function foreignVAE() {
  const types = allNodes().flatMap((node) => (node.outputs ?? []).map((output) => output.type));
  return types.find((type) => /.VAE$/.test(type));
}

// Those of the nodes for which an answer of the server's is yes.
async function which(nodes, asked) {
  const answers = await Promise.all(nodes.map(asked));
  return nodes.filter((_, index) => answers[index]);
}

// One step for undo, however many nodes it changes. `decodes` become videos; `precision` is for what loaders load.
async function adopt(nodes, decodes = [], more = () => 0, precision = undefined) {
  const whole = new Set(await which([...nodes, ...decodes].filter((node) => TILED.includes(node.comfyClass)), engineRuns));
  const graphs = new Set([app.rootGraph, ...[...nodes, ...decodes].map((node) => node.graph)]);
  const tracker = app.extensionManager?.workflow?.activeWorkflow?.changeTracker;
  if (tracker?.beforeChange) tracker.beforeChange();
  else app.canvas.emitBeforeChange?.();
  try {
    for (const node of nodes) {
      if (REPLACED[node.comfyClass]) replace(node, REPLACED[node.comfyClass], whole.has(node));
      else set(insertOptimize(node), "precision", precision);
    }
    decodes.forEach((node) => replaceByVideo(node, whole.has(node)));
    return nodes.length + decodes.length + more();
  } finally {
    // Else the next run numbers the nodes anew, and that would be the step that is undone first.
    for (const graph of graphs) graph?.updateExecutionOrder?.();
    if (tracker?.afterChange) tracker.afterChange();
    else app.canvas.emitAfterChange?.();
    app.canvas.setDirty(true, true);
  }
}

// -- links -------------------------------------------------------------------------------------------------------------

// Whoever takes output `slot`: { link, node, slot, reroute } or { link, border, reroute } where it leaves a subgraph.
function targets(node, slot) {
  return [...(node.outputs?.[slot]?.links ?? [])].map((id) => linkOf(node.graph, id)).filter(Boolean).map((link) => ({
    link,
    node: leavesAt(link) ? null : node.graph.getNodeById(link.target_id),
    border: leavesAt(link) ? node.graph.outputs[link.target_slot] : null,
    slot: link.target_slot,
    reroute: link.parentId,
  }));
}

// Nodes of sound take a VAE that no engine of pictures runs.
function takesHostVAE(user) {
  return Boolean(user) && !user.comfyClass?.startsWith("ZeroWaste") && !/audio/i.test(user.comfyClass ?? "");
}

function connectInput(graph, link, node, slot) {
  if (entersAt(link)) graph.inputs[link.origin_slot].connect(node.inputs[slot], node);
  else graph.getNodeById(link.origin_id)?.connect(link.origin_slot, node, slot, link.parentId);
}

function connectOutput(node, slot, target) {
  if (target.border) target.border.connect(node.outputs[slot], node);
  else if (target.node?.comfyDynamic?.autogrow && linkOf(node.graph, target.link.id)) moveOrigin(target.link, node, slot);
  else if (target.node) node.connect(slot, target.node, target.slot, target.reroute);
}

// Such a node throws where its links are not all of one type, as in templates of ComfyUI: it need not know of the move.
function moveOrigin(link, node, slot) {
  const output = node.graph.getNodeById(link.origin_id)?.outputs?.[link.origin_slot];
  if (output) output.links = (output.links ?? []).filter((id) => id !== link.id);
  [link.origin_id, link.origin_slot] = [node.id, slot];
  node.outputs[slot].links = [...(node.outputs[slot].links ?? []), link.id];
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

function replace(old, kind, whole) {
  const { graph } = old;
  const links = linksInto(old);
  const users = (old.outputs ?? []).map((_, slot) => targets(old, slot));
  const node = create(kind, old);
  graph.add(node);
  node.setSize([Math.max(old.size[0], node.size[0]), node.computeSize()[1]]);
  keepValues(old, node);
  // The engine plans whole frames by itself. A network that stays ComfyUI's own keeps the tiles it was given, as do
  // tiles that another node gives.
  if (TILED.includes(old.comfyClass) && (!whole || links.some(({ name }) => TILES[name]))) keepTiles(old, node);
  for (const { name, link } of links) {
    const slot = node.inputs.findIndex((input) => input.name === (TILES[name] ?? name));
    if (slot >= 0) connectInput(graph, link, node, slot);
  }
  users.forEach((some, slot) => some.forEach((user) => connectOutput(node, slot, user)));
  graph.remove(old);
  if (old.flags?.collapsed) node.collapse?.(true);
  else {
    makeRoomBeside(node, old.pos[0] + old.size[0]);
    makeRoom(node, old.pos[1] + old.size[1]);
  }
  app.canvas.selectNode?.(node);
  return node;
}

function linksInto(node) {
  return (node.inputs ?? []).map((input) => ({ name: input.name, link: linkOf(node.graph, input.link) })).filter(({ link }) => link);
}

function set(node, name, to) {
  const widget = node.widgets.find((entry) => entry.name === name);
  if (!widget || typeof to === "symbol" || to === undefined) return;
  widget.value = to;
  widget.callback?.(to, app.canvas, node);
}

// What a node of ours had, in another of ours; widgets that a choice brings come after it.
function keepValues(old, node) {
  if (!old.comfyClass.startsWith("ZeroWaste")) return;
  for (const { name, value: held, serialize } of [...(old.widgets ?? [])]) if (serialize !== false) set(node, name, held);
}

function keepTiles(old, node) {
  set(node, "tiling", "blended");
  for (const [theirs, ours] of Object.entries(TILES)) set(node, ours, old.widgets?.find((entry) => entry.name === theirs)?.value);
}

// Through this pack's own nodes, or known by its file.
async function engineRuns(node) {
  const file = vaeFile(node);
  return isOurs(node) || Boolean(file && (await isKnown(file)));
}

// The node that makes a video of what a decode gives, if nobody else takes that.
function videoBehind(node) {
  if (node.comfyClass !== DECODE && REPLACED[node.comfyClass] !== DECODE) return null;
  const [user, ...others] = targets(node, 0);
  return !others.length && user?.node?.comfyClass === "CreateVideo" ? user.node : null;
}

function replaceByVideo(old, whole) {
  const maker = videoBehind(old);
  const { graph } = maker;
  const given = linksInto(maker).filter(({ name }) => ["fps", "audio"].includes(name));
  const users = targets(maker, 0);
  const [fps, depth] = ["fps", "bit_depth"].map((name) => value(maker, name));
  graph.remove(maker);
  const node = replace(old, TO_VIDEO, whole);
  set(node, "fps", fps);
  if (depth > 8) set(node, "pixels", "yuv420p10");
  for (const { name, link } of given) connectInput(graph, link, node, node.inputs.findIndex((input) => input.name === name));
  for (const user of users) connectOutput(node, 0, user);
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

// Where a new node will end: its badge and footer make one of elements up to 40 pixels higher than the host computes.
function end(node) {
  return node.pos[1] + node.size[1] + (window.LiteGraph.vueNodesMode ? 40 : 0);
}

// Where a neighbour on the right would be covered, all that begins there moves on, with its groups.
function makeRoomBeside(node, from) {
  const { graph } = node;
  const title = window.LiteGraph.NODE_TITLE_HEIGHT ?? 30;
  const [top, bottom] = [node.pos[1] - title, end(node)];
  const beside = [...graph.nodes].filter(
    (other) => other !== node && other.pos[0] >= from && other.pos[1] - title < bottom && other.pos[1] + other.size[1] > top,
  );
  const first = Math.min(...beside.map((other) => other.pos[0]));
  const missing = node.pos[0] + node.size[0] + BESIDE - first;
  if (!beside.length || missing <= 0) return;
  const border = graph.outputNode ? [graph.outputNode] : [];
  for (const other of [...graph.nodes, ...(graph.groups ?? []), ...border]) {
    if (other !== node && other.pos[0] >= first - BESIDE) other.pos = [other.pos[0] + missing, other.pos[1]];
  }
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
  const missing = end(node) + title + 10 - top;
  if (missing <= 0) return;
  for (const other of below) other.pos = [other.pos[0], other.pos[1] + missing];
}
