// Looks through the wires of a graph: reroutes, bypassed nodes, Set and Get nodes, and the borders of subgraphs.

const INPUT_BORDER = "-10";
const OUTPUT_BORDER = "-20";
const BYPASSED = 4;
const MAX_STEPS = 64;

/** What a widget holds when the node that feeds it computes it only in a run. */
export const UNKNOWN = Symbol("unknown");

export function rootGraph() {
  const { app } = window;
  return app.rootGraph ?? app.graph?.rootGraph ?? app.graph;
}

export function linkOf(graph, id) {
  if (id === null || id === undefined || !graph) return null;
  return graph.getLink?.(id) ?? graph.links?.get?.(id) ?? graph.links?.[id] ?? null;
}

/** The link into input `slot`. Asked of LiteGraph's own class: nodes that stand for others answer for those. */
export function linkInto(node, slot) {
  if (!node.inputs?.[slot] || !node.graph) return null;
  return window.LiteGraph.LGraphNode.prototype.getInputLink.call(node, slot) ?? null;
}

/** The links out of output `slot`, oldest first. */
export function linksFrom(node, slot) {
  const all = [...(node.graph?.links?.values() ?? [])];
  const ours = all.filter((link) => String(link.origin_id) === String(node.id) && link.origin_slot === slot);
  return ours.sort((a, b) => a.id - b.id);
}

export const entersAt = (link) => String(link.origin_id) === INPUT_BORDER;
export const leavesAt = (link) => String(link.target_id) === OUTPUT_BORDER;

/** Every node of the workflow, those of subgraphs too, each subgraph once. */
export function allNodes() {
  const root = rootGraph();
  if (!root) return [];
  const inner = [...(root.subgraphs?.values?.() ?? [])];
  return [root, ...inner].flatMap((graph) => [...(graph.nodes ?? graph._nodes ?? [])]);
}

/** The node that a run names "66:55": node 55 of the subgraph that node 66 stands for. */
export function nodeOfRun(name) {
  let graph = rootGraph();
  let node = null;
  for (const id of String(name).split(":")) {
    node = graph?.getNodeById?.(id) ?? graph?.getNodeById?.(Number(id)) ?? null;
    graph = node?.subgraph;
  }
  return node;
}

/** What a run calls a node; of a subgraph used several times, in the first of its places. */
export function runName(node) {
  const [outer] = instancesOf(node.graph);
  return outer ? `${runName(outer)}:${node.id}` : String(node.id);
}

/** The nodes that stand for this graph in others; none for the workflow itself. */
function instancesOf(graph) {
  return graph === rootGraph() ? [] : allNodes().filter((node) => node.subgraph && node.subgraph === graph);
}

/** Where the input `slot` of `node` comes from: { node, slot }, { widget } of a promoted input, or null. */
export function sourceOf(node, slot, steps = 0) {
  const graph = node.graph;
  const link = linkInto(node, slot);
  if (!link || steps > MAX_STEPS) return null;
  if (!entersAt(link)) return origin(graph.getNodeById(link.origin_id), link.origin_slot, steps + 1);
  const [outer, ...others] = instancesOf(graph);
  if (!outer) return null;
  const border = graph.inputs?.[link.origin_slot]?.name;
  const index = Math.max(outer.inputs?.findIndex((input) => input.name === border) ?? -1, -1);
  if (index < 0) return null;
  if (linkInto(outer, index)) return sourceOf(outer, index, steps + 1);
  const name = outer.inputs[index].widget?.name ?? border;
  const widget = outer.widgets?.find((entry) => entry.name === name) ?? null;
  // One subgraph used several times has one panel, and as many values.
  return widget && { widget: others.length ? { value: UNKNOWN } : widget };
}

function origin(node, slot, steps) {
  if (!node || steps > MAX_STEPS) return null;
  if (node.subgraph) {
    const link = linkOf(node.subgraph, node.subgraph.outputs?.[slot]?.linkIds?.[0]);
    return link && origin(node.subgraph.getNodeById(link.origin_id), link.origin_slot, steps + 1);
  }
  if (node.mode === BYPASSED) {
    const type = node.outputs?.[slot]?.type;
    const through = node.inputs?.findIndex((input) => input.type === type) ?? -1;
    return through < 0 ? null : sourceOf(node, through, steps + 1);
  }
  if (node.isVirtualNode && node.getInputLink) {
    const link = node.getInputLink(slot);
    return link ? origin(node.graph.getNodeById(link.origin_id), link.origin_slot, steps + 1) : null;
  }
  if (node.inputs?.length === 1 && ["*", node.outputs?.[slot]?.type].includes(node.inputs[0].type) && !node.widgets?.length) {
    return sourceOf(node, 0, steps + 1) ?? { node, slot };
  }
  if (node.comfyClass === "ComfySwitchNode") {
    const chosen = value(node, "switch", steps + 1);
    if (typeof chosen !== "boolean") return null;
    return sourceOf(node, node.inputs.findIndex((input) => input.name === `on_${chosen}`), steps + 1);
  }
  return { node, slot };
}

export function sourceNode(node, name) {
  const slot = node.inputs?.findIndex((input) => input.name === name) ?? -1;
  return slot < 0 ? null : sourceOf(node, slot)?.node ?? null;
}

/** What a widget of a node holds: its own value, that of the node it is linked to, or UNKNOWN. */
export function value(node, name, steps = 0) {
  const own = node.widgets?.find((widget) => widget.name === name);
  const slot = node.inputs?.findIndex((input) => (input.widget?.name ?? input.name) === name) ?? -1;
  if (slot < 0 || !linkInto(node, slot)) return own?.value;
  const source = sourceOf(node, slot, steps);
  if (source?.widget) return source.widget.value;
  // A primitive holds its value in its only widget; whatever else computes is not known before a run.
  const primitive = source?.node && /^Primitive/.test(source.node.comfyClass ?? source.node.type ?? "");
  return primitive ? value(source.node, source.node.widgets?.[0]?.name, steps + 1) ?? UNKNOWN : UNKNOWN;
}
