// "Use Zero-Waste VAE": puts this pack's nodes in the place of ComfyUI's own, with their links, values and looks.
import { app } from "../../../scripts/app.js";
import { allNodes, entersAt, leavesAt, linkInto, linkOf, linksFrom, sourceOf, value } from "./graph.js";
import { isKnown } from "./plans.js";
import { isOurs, vaeFile } from "./question.js";
import { boxOf, groupsOf, makeRoom } from "./room.js";
import { t } from "./strings.js";

const DECODE = "ZeroWasteVAEDecode";
const ENCODE = "ZeroWasteVAEEncode";
const OPTIMIZE = "ZeroWasteVAEOptimize";
const TO_VIDEO = "ZeroWasteVAEDecodeToVideo";
const REPLACED = {
  VAEDecode: DECODE, VAEDecodeTiled: DECODE, VHS_VAEDecodeBatched: DECODE,
  VAEEncode: ENCODE, VAEEncodeTiled: ENCODE, VHS_VAEEncodeBatched: ENCODE,
  LTXVTiledVAEDecode: DECODE, LTXVSpatioTemporalTiledVAEDecode: DECODE, PatchTritonVAE: OPTIMIZE,
};
const TILED = ["VAEDecodeTiled", "VAEEncodeTiled"];
// Widgets of LTXVideo's decodes in tiles, which whole frames have no use for.
const PIECES = [
  "horizontal_tiles", "vertical_tiles", "overlap", "spatial_tiles", "spatial_overlap", "temporal_tile_length",
  "temporal_overlap", "last_frame_fix", "working_device", "working_dtype",
];
const inPieces = (node) => /^LTXV.*TiledVAEDecode$/.test(node.comfyClass);
// Loaders, and the node that goes behind each: packs with a VAE type of their own have one for it.
const [FOR_WAN, FOR_SEEDVR2] = ["ZeroWasteVAEForWanVideo", "ZeroWasteVAEForSeedVR2"];
const BEHIND = {
  VAELoader: OPTIMIZE, VAELoaderKJ: OPTIMIZE, VAELoaderMultiGPU: OPTIMIZE, VAELoaderDisTorch2MultiGPU: OPTIMIZE,
  WanVideoVAELoader: FOR_WAN, WanVideoVAELoaderMultiGPU: FOR_WAN, SeedVR2LoadVAEModel: FOR_SEEDVR2,
};
const isForeign = (node) => [FOR_WAN, FOR_SEEDVR2].includes(BEHIND[node.comfyClass]);
const FOREIGN_TYPES = ["WANVAE", "SEEDVR2_VAE"];
// Values of ComfyUI's tiled nodes, and the widgets of ours that mean the same.
const TILES = { tile_size: "tiling.tile", overlap: "tiling.overlap" };
// An input of theirs, and ours that means the same.
const RENAMED = { ...TILES, latents: "samples" };
// What nodes of ours take from those they stand for.
const CARRIED = ["samples", "latents", "pixels", "vae", "fps", "bit_depth", "images", "audio"];
const GAP = 50;
// Milliseconds that a message with more than one sentence can be read.
const LONG = 12000;

/**
 * What the menu of a node offers: nothing, or the one entry, which on a user of another pack's VAE is for its loader;
 * another one on a loader, and on a decode before a video. For loaders of small decoders it is grey and says why.
 */
export function menuItems(node) {
  if (/^WanVideo(TinyVAE|FlashVSRDecoder)Loader/.test(node.comfyClass)) return [{ content: t("adopt_small"), disabled: true }];
  const one = loaderOf(node) ?? node;
  const items = canAdopt(one) ? [{ content: t("adopt"), callback: () => adopt([one]) }] : [];
  if (items.length && BEHIND[node.comfyClass]) {
    items.push({ content: t("adopt_8_bit"), callback: () => adopt([node], [], () => 0, "int8") });
  }
  if (videoBehind(node)) items.push({ content: t("adopt_video"), callback: () => adopt([], [node]) });
  return items;
}

// A host may leave out single nodes of a pack.
const isHere = (kind) => Boolean(window.LiteGraph.registered_node_types[kind]);

// LTXVideo's decodes can make their last frame from a latent that is repeated, as ours does not.
function canReplace(node) {
  const kind = REPLACED[node.comfyClass];
  return Boolean(kind) && isHere(kind) && !value(node, "last_frame_fix");
}

const isLoader = (node) => Boolean(BEHIND[node.comfyClass]) && isHere(BEHIND[node.comfyClass]);

// The loader of another pack's VAE that a node of that pack gets it from, past reroutes and out of subgraphs.
function loaderOf(node) {
  const slot = node.comfyClass?.startsWith("ZeroWaste") ? -1 : node.inputs?.findIndex(({ type }) => FOREIGN_TYPES.includes(type)) ?? -1;
  const found = slot < 0 ? null : sourceOf(node, slot)?.node;
  return found && isForeign(found) ? found : null;
}

function canAdopt(node) {
  if (canReplace(node)) return true;
  if (!isLoader(node)) return false;
  return !linksFrom(node, 0).length || othersTake(node);
}

// Whether the VAE of a loader goes to a node that is not ours.
function othersTake(loader) {
  return targets(loader, 0).some(({ node, border }) => border || takesHostVAE(node));
}

/** Every node of the workflow that ours can stand for; returns how many it were. */
export async function adoptAll() {
  const nodes = allNodes().filter(canReplace);
  const loaders = await which(allNodes().filter(isLoader), engineRuns);
  // After those, a loader needs a node behind it only where its VAE goes to nodes of others.
  const { done, lost } = await replaceAll(nodes, [], () => {
    const left = loaders.filter(othersTake);
    left.forEach((node) => insertBehind(node));
    return left.length;
  });
  const [type, left] = [foreignVAE(), leftAlone()];
  const more = [
    lost.length && t("adopted_lost", { names: lost.join(t("semicolon")) }),
    type && t("foreign_vae", { type }),
    left.length && t("adopted_left", { names: listed(left) }),
  ].filter(Boolean);
  tell(done ? "success" : "info", [done ? t("adopted", { n: done }) : t("adopted_none"), ...more]);
  return done;
}

// One action; says what was not carried over.
async function adopt(...wanted) {
  const { done, lost } = await replaceAll(...wanted);
  if (lost.length) tell("info", [t("adopted", { n: done }), t("adopted_lost", { names: lost.join(t("semicolon")) })]);
}

function tell(severity, sentences) {
  const life = sentences.length > 1 ? LONG : 4000;
  app.extensionManager?.toast?.add?.({ severity, summary: t("adopt"), detail: sentences.join(" "), life });
}

const listed = (names) => names.join(t("comma"));

const namesOf = (nodes) => [...new Set(nodes.map((node) => node.constructor.title ?? node.comfyClass))];

// Titles of ComfyUI's other nodes that decode or encode.
function leftAlone() {
  return namesOf(allNodes().filter(
    (node) => /^(?!ZeroWaste).*VAE(Decode|Encode)/.test(node.comfyClass ?? "") && !canReplace(node),
  ));
}

// The VAE type of another pack's own in this workflow, which fits no socket of the host's or ours.
function foreignVAE() {
  const others = allNodes().filter((node) => !isLoader(node) && !node.comfyClass?.startsWith("ZeroWaste"));
  const types = others.flatMap((node) => (node.outputs ?? []).map((output) => output.type));
  return types.find((type) => /.VAE$/.test(type));
}

// Those of the nodes for which an answer of the server's is yes.
async function which(nodes, asked) {
  const answers = await Promise.all(nodes.map(asked));
  return nodes.filter((_, index) => answers[index]);
}

// One step for undo, however many nodes it changes: { done, lost }, the number of nodes, and what none of ours has in
// words. `decodes` become videos; `precision` is for what loaders load.
async function replaceAll(nodes, decodes = [], more = () => 0, precision = undefined) {
  const tiled = [...nodes, ...decodes].filter((node) => TILED.includes(node.comfyClass) || inPieces(node));
  const whole = new Set(await which(tiled, engineRuns));
  const graphs = new Set([app.rootGraph, ...[...nodes, ...decodes].map((node) => node.graph)]);
  const tracker = app.extensionManager?.workflow?.activeWorkflow?.changeTracker;
  if (tracker?.beforeChange) tracker.beforeChange();
  else app.canvas.emitBeforeChange?.();
  const lost = [];
  try {
    for (const node of nodes) {
      if (REPLACED[node.comfyClass]) replace(node, REPLACED[node.comfyClass], whole.has(node), lost);
      else set(insertBehind(node), "precision", precision);
    }
    decodes.forEach((node) => replaceByVideo(node, whole.has(node), lost));
    return { done: nodes.length + decodes.length + more(), lost: [...new Set(lost)] };
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
  return linksFrom(node, slot).map((link) => ({
    link,
    node: leavesAt(link) ? null : node.graph.getNodeById(link.target_id),
    border: leavesAt(link) ? node.graph.outputs[link.target_slot] : null,
    slot: link.target_slot,
    reroute: link.parentId,
  }));
}

// Nodes of sound take a VAE that no engine of pictures runs, and Easy-Use's IC-Light no other object than the host's.
function takesHostVAE(user) {
  return Boolean(user) && !user.comfyClass?.startsWith("ZeroWaste") && !/audio|icLight/i.test(user.comfyClass ?? "");
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
  if (link.updateEndpoints) return link.updateEndpoints({ originNodeId: node.id, originSlot: slot });
  // Older frontends keep the numbers of links at the outputs.
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
  if (like.shape !== undefined) node.shape = like.shape;
  if (like.title && like.title !== like.constructor.title) node.title = like.title;
  return node;
}

function replace(old, kind, whole, lost) {
  const { graph } = old;
  const [groups, corner] = [groupsOf(old), boxOf(old).to];
  const links = linksInto(old);
  const users = (old.outputs ?? []).map((_, slot) => targets(old, slot));
  const node = create(kind, old);
  graph.add(node);
  node.setSize([Math.max(old.size[0], node.size[0]), node.computeSize()[1]]);
  keepValues(old, node);
  set(node, "encode_as", value(old, "encode_as"));
  if (value(old, "int8_conv") === true) set(node, "precision", "int8");
  // The engine plans whole frames by itself. A network that stays ComfyUI's own keeps the tiles it was given, as do
  // tiles that another node gives.
  const tiles = TILED.includes(old.comfyClass) && (!whole || links.some(({ name }) => TILES[name]));
  if (tiles) keepTiles(old, node);
  lost.push(...lostBy(old, node, tiles ? Object.keys(TILES) : whole && inPieces(old) ? PIECES : []));
  for (const { name, link } of links) {
    const slot = node.inputs.findIndex((input) => input.name === (RENAMED[name] ?? name));
    if (slot >= 0) connectInput(graph, link, node, slot);
  }
  users.forEach((some, slot) => some.forEach((user) => connectOutput(node, slot, user)));
  graph.remove(old);
  if (old.flags?.collapsed) node.collapse?.(true);
  else makeRoom(node, corner, groups);
  if (old.flags?.pinned) node.pin?.(true);
  app.canvas.selectNode?.(node);
  return node;
}

function linksInto(node) {
  return (node.inputs ?? []).map(({ name }, slot) => ({ name, link: linkInto(node, slot) })).filter(({ link }) => link);
}

// "Node: widget, widget" of what a node had and ours does not, if anything.
function lostBy(old, node, more) {
  const held = (old.widgets ?? []).filter(({ type, serialize, value: at }) => type !== "button" && serialize !== false && !/^auto$/i.test(at));
  const names = new Map(held.map((widget) => [widget.name, widget.label ?? widget.name]));
  for (const { name } of linksInto(old)) names.set(name, names.get(name) ?? name);
  const ours = [...CARRIED, ...more, ...[...(node.widgets ?? []), ...node.inputs].map(({ name }) => name)];
  ours.forEach((name) => names.delete(name));
  return names.size ? [t("lost_by", { node: namesOf([old])[0], names: listed([...names.values()]) })] : [];
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

// Through this pack's own nodes, known by its file, or of a pack that ours decides on when it runs.
async function engineRuns(node) {
  if (isForeign(node)) return true;
  const file = vaeFile(node);
  return isOurs(node) || Boolean(file && (await isKnown(file)));
}

// The node that makes a video of what a decode gives, if nobody else takes that.
function videoBehind(node) {
  if (![node.comfyClass, REPLACED[node.comfyClass]].includes(DECODE) || !isHere(TO_VIDEO)) return null;
  const [user, ...others] = targets(node, 0);
  return !others.length && user?.node?.comfyClass === "CreateVideo" ? user.node : null;
}

function replaceByVideo(old, whole, lost) {
  const maker = videoBehind(old);
  const { graph } = maker;
  const given = linksInto(maker).filter(({ name }) => ["fps", "audio"].includes(name));
  const users = targets(maker, 0);
  const [fps, depth] = ["fps", "bit_depth"].map((name) => value(maker, name));
  graph.remove(maker);
  const node = replace(old, TO_VIDEO, whole, lost);
  set(node, "fps", fps);
  if (depth > 8) set(node, "pixels", "yuv420p10");
  for (const { name, link } of given) connectInput(graph, link, node, node.inputs.findIndex((input) => input.name === name));
  for (const user of users) connectOutput(node, 0, user);
}

function insertBehind(loader) {
  const { graph } = loader;
  const users = targets(loader, 0).filter(({ node, border }) => border || takesHostVAE(node));
  const node = create(BEHIND[loader.comfyClass], loader);
  node.title = node.constructor.title;
  graph.add(node);
  const corner = boxOf(loader).to;
  node.pos = [loader.pos[0], corner[1] + GAP];
  loader.connect(0, node, node.inputs.findIndex((input) => input.name === "vae"));
  for (const target of users) connectOutput(node, 0, target);
  makeRoom(node, corner, groupsOf(loader));
  return node;
}
