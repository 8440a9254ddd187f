// Small helpers for building elements; every text goes in as text, never as HTML.
const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

// A DOM widget below a node's other widgets that is as high as its content, in both renderers. Returns the element to
// fill; the node follows when the content changes.
export function addPanel(node, name) {
  const body = el("div", { class: "zerowaste-body" });
  const element = el("div", { class: "zerowaste-panel", "data-zerowaste": name }, body);
  let height = 0;
  const margin = 6;
  const widget = node.addDOMWidget(name, name, element, {
    serialize: false,
    hideOnZoom: false,
    margin,
    getMinHeight: () => height,
    getMaxHeight: () => height,
    getValue: () => "",
    setValue: () => {},
  });
  widget.serialize = false;
  const grow = () => {
    if (!body.offsetHeight) return; // hidden, or not on the page yet
    const content = Math.ceil(body.offsetHeight) + 2 * margin;
    if (Math.abs(content - height) < 2) return;
    const free = node.size[1] - node.computeSize()[1];
    height = content;
    // Nodes made of elements grow by themselves; only drawn ones have to be told.
    if (window.LiteGraph?.vueNodesMode) return;
    node.setSize([node.size[0], node.computeSize()[1] + Math.max(0, free)]);
    node.setDirtyCanvas?.(true, true);
  };
  const watcher = new ResizeObserver(grow);
  watcher.observe(body);
  const removed = node.onRemoved;
  node.onRemoved = function (...rest) {
    watcher.disconnect();
    removed?.apply(this, rest);
  };
  return body;
}
