// Room for a node that is put in: the page is parted beside it and below it, as rows are put into a table. What lies
// beyond moves on by the same way, a group that reaches over the gap grows by it, and so nothing comes to lie on another.

// Pixels beside a neighbour, above the next node, and from a node to the edge of its group.
const BESIDE = 20;
const BELOW = 10;
const EDGE = 10;
// A new node of elements has a badge and a footer, which the host does not count.
const FOOTER = 40;

const titleHeight = () => window.LiteGraph.NODE_TITLE_HEIGHT ?? 30;

/** { from, to }: corners of what a node takes with its title, or of a group. */
export function boxOf(thing) {
  const [x, y] = thing.pos;
  if (isGroup(thing)) return { from: [x, y], to: [x + thing.size[0], y + thing.size[1]] };
  const folded = thing.flags?.collapsed;
  const [width, height] = folded ? [thing._collapsed_width ?? thing.size[0], 0] : thing.size;
  return { from: [x, y - titleHeight()], to: [x + width, y + height] };
}

const isGroup = (thing) => thing.recomputeInsideNodes !== undefined;

/** The groups that a node belongs to. */
export function groupsOf(node) {
  return [...(node.graph.groups ?? [])].filter((group) => holds(group, node));
}

// A group holds what has its middle in it.
function holds(group, thing) {
  const [{ from, to }, box] = [boxOf(thing), boxOf(group)];
  return [0, 1].every((axis) => {
    const middle = (from[axis] + to[axis]) / 2;
    return thing !== group && middle >= box.from[axis] && middle <= box.to[axis];
  });
}

/** Make room for a new node. corner: lower right end of what stood there before; groups: those that hold the node. */
export function makeRoom(node, corner, groups) {
  const others = [...node.graph.nodes, ...(node.graph.groups ?? [])].filter((other) => other !== node && !groups.includes(other));
  const inside = others.filter((other) => groups.some((group) => holds(group, other)));
  for (const axis of [0, 1]) {
    free(node, axis, corner, inside);
    for (const group of groups) {
      const end = boxOf(group).to[axis];
      const missing = newBox(node).to[axis] + EDGE - end;
      if (missing > 0) part(node, axis, end, missing);
    }
    free(node, axis, corner, others);
  }
}

// Moves on what the node would cover of these, if it began beyond the corner.
function free(node, axis, corner, others) {
  const { from, to } = newBox(node);
  const across = 1 - axis;
  // A title that stands in what was there before was covered before.
  const begin = corner[axis] - (axis ? titleHeight() : 0);
  const beyond = others.map(boxOf).filter(
    (box) => box.from[axis] >= begin && box.from[across] < to[across] && box.to[across] > from[across],
  );
  const first = Math.min(...beyond.map((box) => box.from[axis]));
  const missing = to[axis] + (axis ? BELOW : BESIDE) - first;
  // Columns of nodes that are nearly in line stay so.
  if (beyond.length && missing > 0) part(node, axis, axis ? first : first - BESIDE, missing);
}

function newBox(node) {
  const { from, to } = boxOf(node);
  return { from, to: [to[0], to[1] + (window.LiteGraph.vueNodesMode ? FOOTER : 0)] };
}

// All that begins at `line` or beyond, but `kept`, moves by so many pixels.
function part(kept, axis, line, by) {
  const { graph } = kept;
  const moved = ([...at]) => {
    at[axis] += by;
    return at;
  };
  for (const group of graph.groups ?? []) {
    const { from, to } = boxOf(group);
    if (from[axis] >= line) group.pos = moved(group.pos);
    else if (to[axis] >= line) group.size = moved(group.size);
  }
  for (const node of graph.nodes) if (node !== kept && boxOf(node).from[axis] >= line) node.pos = moved(node.pos);
  const points = [...(graph.reroutes?.values() ?? []), ...[graph.inputNode, graph.outputNode].filter(Boolean)];
  for (const point of points) if (point.pos[axis] >= line) point.pos = moved(point.pos);
}
