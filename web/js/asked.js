// What a run of a node depends on: as long as that is the same, its last run tells of the next one.
import { runName, sourceNode, sourceOf, value } from "./graph.js";
import { traceSize, vaeFile } from "./question.js";

// Change pictures and neither their size nor what a run takes; most change by themselves after every run.
const RANDOM = ["seed", "noise_seed", "control_after_generate"];

// Node -> { text, sources }, for one look at all the nodes.
let looked = new Map();

/** Before a look: everything may have changed. */
export function lookAgain() {
  looked = new Map();
}

/** A node and all those that it gets something from. */
export function upstream(node) {
  const found = new Set(node ? [node] : []);
  for (const one of found) for (const source of partsOf(one).sources) found.add(source);
  return found;
}

/**
 * What a run that is queued now asks of a node: { all, latent } as numbers to compare, of everything it depends on and of
 * what makes its latent alone; { traced, file }: the size that follows from the nodes before, and the VAE's file.
 */
export function askedOf(node) {
  const textOf = (nodes) => hash([...nodes].map((one) => partsOf(one).text).join("\n"));
  const latent = textOf(upstream(sourceNode(node, "samples")));
  return { name: runName(node), all: textOf(upstream(node)), latent, traced: traceSize(node), file: vaeFile(node) };
}

// Its class, values and links; texts that are written for a model are no part of it.
function partsOf(node) {
  if (!looked.has(node)) {
    const { required, optional } = node.constructor.nodeData?.input ?? {};
    const isText = (name) => ({ ...required, ...optional })[name]?.[1]?.multiline;
    const kept = ({ name, type, serialize }) => serialize !== false && type !== "button" && !RANDOM.includes(name) && !isText(name);
    const values = (node.widgets ?? []).filter(kept).map(({ name }) => [name, shown(value(node, name))]);
    const links = (node.inputs ?? []).map(({ name }, slot) => [name, sourceOf(node, slot)]).filter(([, source]) => source?.node);
    const from = links.map(([name, source]) => [name, source.node.graph?.id, source.node.id, source.slot]);
    const text = JSON.stringify([node.comfyClass ?? node.type, node.mode, values, from]);
    looked.set(node, { text, sources: links.map(([, source]) => source.node) });
  }
  return looked.get(node);
}

// Some packs keep objects in widgets, which need not have a text.
function shown(held) {
  if (typeof held !== "object" || held === null) return String(held);
  try {
    return JSON.stringify(held);
  } catch {
    return "";
  }
}

// A number for a text, in place of keeping it: of a large workflow it has some ten thousand characters.
function hash(text) {
  let [low, high] = [1, 1];
  for (let i = 0; i < text.length; i += 1) {
    low = Math.imul(low ^ text.charCodeAt(i), 0x01000193);
    high = Math.imul(high + low, 0x5bd1e995) ^ (high >>> 13);
  }
  return `${text.length} ${low} ${high}`;
}
