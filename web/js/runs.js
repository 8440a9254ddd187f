// What becomes of a node's run: its progress from the first second, the end of a cancelled or failed one.
import { api } from "../../../scripts/api.js";
import { nodeOfRun } from "./graph.js";
import { said, saidRunning, t } from "./strings.js";

// What the types of this pack's errors begin with.
const OURS = "Zero-Waste VAE.";

const listeners = new Map();
const prompts = new WeakMap();
let running = null;

/** The id of the prompt that last gave this node its result; undefined for results from before this page. */
export function promptOf(node) {
  return prompts.get(node);
}

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
    tell(detail.node, { state: "running", text: saidRunning(detail.text) });
  });
  api.addEventListener("executed", ({ detail }) => {
    const node = nodeOfRun(detail?.node ?? "");
    if (node) prompts.set(node, detail.prompt_id);
  });
  api.addEventListener("execution_interrupted", ({ detail }) => {
    const name = detail?.node_id ?? running;
    running = null;
    tell(name, { state: "cancelled", text: t("cancelled") });
  });
  api.addEventListener("execution_error", ({ detail }) => {
    running = null;
    const english = first(detail?.exception_message);
    const text = detail?.exception_type?.startsWith(OURS) ? said(english) : english;
    // Newer frontends keep this object and show its words when they are looked for.
    if (text !== english) detail.exception_message = detail.exception_message.replace(english, () => text);
    tell(detail?.node_id, { state: "failed", text: t("failed", { text }), full: text });
  });
}
