// What becomes of a node's run: its progress from the first second, the end of a cancelled or failed one.
import { api } from "../../../scripts/api.js";
import { nodeOfRun } from "./graph.js";
import { t } from "./strings.js";

const listeners = new Map();
let running = null;

/** Calls back with { state: "running" | "cancelled" | "failed", text, full } or null, each time that changes. */
export function onRuns(node, changed) {
  listeners.set(node, changed);
  const removed = node.onRemoved;
  node.onRemoved = function (...rest) {
    listeners.delete(node);
    removed?.apply(this, rest);
  };
}

function tell(name, run) {
  listeners.get(name && nodeOfRun(name))?.(run);
}

// A node that another one follows, or the end of the prompt, has finished.
function moveTo(name) {
  if (running && running !== name) tell(running, null);
  running = name;
  if (name) tell(name, { state: "running", text: t("starting") });
}

const first = (text) => String(text ?? "").trim().split("\n")[0];

export function followRuns() {
  api.addEventListener("execution_start", () => {
    running = null;
    for (const changed of listeners.values()) changed(null);
  });
  api.addEventListener("executing", ({ detail }) => moveTo(typeof detail === "object" ? detail?.node ?? null : detail));
  api.addEventListener("zerowaste_vae.progress", ({ detail }) => {
    tell(detail.node, { state: "running", text: detail.text });
  });
  api.addEventListener("execution_interrupted", ({ detail }) => {
    const name = detail?.node_id ?? running;
    running = null;
    tell(name, { state: "cancelled", text: t("cancelled") });
  });
  api.addEventListener("execution_error", ({ detail }) => {
    running = null;
    const text = first(detail?.exception_message);
    tell(detail?.node_id, { state: "failed", text: t("failed", { text }), full: text });
  });
}
