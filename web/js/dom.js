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

const HEIGHT = 26;
const MARGIN = 4;

/** One line below a node's other widgets, always as high: the node never grows by what it says. */
export function addLine(node, name) {
  const line = el("button", { class: "zerowaste-status", "data-zerowaste": "status", type: "button" });
  const element = el("div", { class: "zerowaste-holder" }, line);
  const height = HEIGHT + 2 * MARGIN;
  const widget = node.addDOMWidget(name, name, element, {
    serialize: false,
    hideOnZoom: false,
    // Not one of the node's values: the Parameters tab leaves it out.
    hideInPanel: true,
    margin: MARGIN,
    getMinHeight: () => height,
    getMaxHeight: () => height,
    getValue: () => "",
    setValue: () => {},
  });
  widget.serialize = false;
  // The frontend's side panel writes the width of its own column here, and the line would keep it.
  Object.defineProperty(widget, "width", { get: () => undefined, set: () => {}, configurable: true });
  return line;
}

const LEAVING = ["pointerdown", "wheel", "keydown"];

/** A sheet over the page, below `anchor`: closed by a click elsewhere, Escape, or when the anchor moves away. */
export class Sheet {
  constructor(anchor, fillIn) {
    this.anchor = anchor;
    this.fillIn = fillIn;
    this.element = null;
  }

  get open() {
    return this.element !== null;
  }

  toggle() {
    if (this.open) this.close();
    else this.show();
  }

  show() {
    this.element = el("div", { class: "zerowaste-sheet", "data-zerowaste": "details", role: "dialog" });
    this.fillIn(this.element);
    document.body.append(this.element);
    this.place();
    // Pictures come later than the rest.
    this.grown = new ResizeObserver(() => this.open && this.place());
    this.grown.observe(this.element);
    this.away = (event) => {
      if (event.type !== "keydown") {
        if (this.element.contains(event.target) || this.anchor.contains(event.target)) return;
      } else if (event.key !== "Escape") {
        return;
      } else {
        // In a subgraph the frontend would leave it.
        event.stopImmediatePropagation();
        event.preventDefault();
      }
      this.close();
    };
    for (const kind of LEAVING) window.addEventListener(kind, this.away, { capture: true, passive: kind === "wheel" });
  }

  place() {
    const at = this.anchor.getBoundingClientRect();
    const { offsetWidth, offsetHeight } = this.element;
    const below = at.bottom + 6;
    const top = below + offsetHeight > window.innerHeight ? Math.max(8, at.top - 6 - offsetHeight) : below;
    this.element.style.left = `${Math.max(8, Math.min(at.left, window.innerWidth - offsetWidth - 8))}px`;
    this.element.style.top = `${top}px`;
  }

  refresh() {
    if (!this.open) return;
    const at = this.anchor.getBoundingClientRect();
    if (!this.anchor.isConnected || !at.width) return void this.close();
    this.element.replaceChildren();
    this.fillIn(this.element);
    this.place();
  }

  close() {
    if (!this.open) return;
    for (const kind of LEAVING) window.removeEventListener(kind, this.away, { capture: true });
    this.grown.disconnect();
    this.element.remove();
    this.element = null;
  }
}
