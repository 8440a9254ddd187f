// What becomes of a node's run: its progress from the first second, its report, the end of a cancelled or failed one.
// Each is kept with the workflow that the run was queued from: another tab may have nodes of the same names.
import { app } from "../../../scripts/app.js";
import { api } from "../../../scripts/api.js";
import { nodeOfRun } from "./graph.js";
import { said, saidRunning, t } from "./strings.js";

// What the types of this pack's errors begin with.
const OURS = "Zero-Waste VAE.";
const MOST = 256;
// Stands for the one workflow of frontends without tabs.
const ONLY = {};

/** Values by node, of the workflow that is open when they are asked for. */
export class PerNode {
  #all = new WeakMap();

  /** name: what a run calls the node ("66:55" in a subgraph). */
  set(workflow, name, value) {
    if (!this.#all.has(workflow)) this.#all.set(workflow, new Map());
    this.#all.get(workflow).set(String(name), value);
  }

  named(workflow, name) {
    return this.#all.get(workflow)?.get(String(name)) ?? null;
  }

  of(node) {
    for (const [name, value] of this.#all.get(openWorkflow()) ?? []) if (value && nodeOfRun(name) === node) return value;
    return null;
  }

  clear(workflow) {
    this.#all.delete(workflow);
  }
}

export function openWorkflow() {
  return app.extensionManager?.workflow?.activeWorkflow ?? ONLY;
}

const owners = new Map(); // prompt id -> workflow
const origins = new Map(); // text of a report, which has its times -> prompt id
const listeners = new Map();
const runs = new PerNode();
const reports = new PerNode(); // { report, prompt }
let queueing = null;
let prompt = null;
let running = null;

/** { state: "running" | "cached" | "cancelled" | "failed", text, full, asked } of a node's last run, or null. */
export const runOf = (node) => runs.of(node);

/** The report of a node's last run: as this page saw it, else what the host keeps. */
export function reportOf(node) {
  const seen = reports.of(node)?.report;
  if (seen) return seen;
  const { id, graph } = node;
  const inner = graph && graph !== (graph.rootGraph ?? graph);
  const kept = app.nodeOutputs?.[inner ? `${graph.id}:${id}` : String(id)]?.zerowaste?.[0];
  // The host gives a result to whichever workflow is open.
  return kept?.seconds && [undefined, openWorkflow()].includes(owners.get(origins.get(kept.text))) ? kept : null;
}

/** The id of the prompt that last gave this node its result; undefined for results from before this page. */
export const promptOf = (node) => reports.of(node)?.prompt;

/** Forget how the last run of a node ended. */
export function forgetRun(node) {
  const run = runs.of(node);
  if (run) runs.set(openWorkflow(), run.name, null);
}

/** Calls back each time something of the node's run changes. */
export function onRuns(node, changed) {
  listeners.set(node, changed);
  const removed = node.onRemoved;
  node.onRemoved = function (...rest) {
    listeners.delete(node);
    removed?.apply(this, rest);
  };
}

// Prompts from before this page belong to whatever is open, as far as anyone can say.
const ownerOf = (id) => owners.get(id) ?? queueing ?? openWorkflow();

function tell(id, name, run) {
  if (!name) return;
  const owner = ownerOf(id);
  const { asked } = runs.named(owner, name) ?? {};
  runs.set(owner, name, run && { ...run, name, asked });
  if (owner === openWorkflow()) listeners.get(nodeOfRun(name))?.();
}

// A node that another one follows, or the end of the prompt, has finished.
function moveTo(name) {
  if (running && running !== name) tell(prompt, running, null);
  running = name;
  tell(prompt, name, { state: "running", text: t("starting") });
}

function remember(map, key, value) {
  map.set(key, value);
  if (map.size > MOST) map.delete(map.keys().next().value);
}

const first = (text) => String(text ?? "").trim().split("\n")[0];

// No event says which workflow a prompt is of.
function followQueue() {
  const queue = api.queuePrompt;
  api.queuePrompt = async function (...rest) {
    const workflow = openWorkflow();
    queueing = workflow; // its first events may come before the answer
    try {
      const reply = await queue.apply(this, rest);
      if (reply?.prompt_id) remember(owners, reply.prompt_id, workflow);
      return reply;
    } finally {
      queueing = null;
    }
  };
}

export function followRuns() {
  followQueue();
  api.addEventListener("execution_start", ({ detail }) => {
    [prompt, running] = [detail?.prompt_id, null];
    runs.clear(ownerOf(prompt));
    for (const changed of listeners.values()) changed();
  });
  api.addEventListener("execution_cached", ({ detail }) => {
    for (const name of detail?.nodes ?? []) tell(detail.prompt_id, name, { state: "cached", text: t("cached") });
  });
  api.addEventListener("executing", ({ detail }) => moveTo(typeof detail === "object" ? detail?.node ?? null : detail));
  api.addEventListener("zerowaste_vae.progress", ({ detail }) => {
    tell(prompt, detail.node, { state: "running", text: saidRunning(detail.text) });
  });
  api.addEventListener("executed", ({ detail }) => {
    const report = detail?.output?.zerowaste?.[0];
    if (!report?.seconds) return;
    remember(origins, report.text, detail.prompt_id);
    reports.set(ownerOf(detail.prompt_id), detail.node, { report, prompt: detail.prompt_id });
    tell(detail.prompt_id, detail.node, null);
  });
  api.addEventListener("execution_interrupted", ({ detail }) => {
    const name = detail?.node_id ?? running;
    running = null;
    tell(detail?.prompt_id, name, { state: "cancelled", text: t("cancelled") });
  });
  api.addEventListener("execution_error", ({ detail }) => {
    running = null;
    const english = first(detail?.exception_message);
    const text = detail?.exception_type?.startsWith(OURS) ? said(english) : english;
    // Newer frontends keep this object and show its words when they are looked for.
    if (text !== english) detail.exception_message = detail.exception_message.replace(english, () => text);
    tell(detail?.prompt_id, detail?.node_id, { state: "failed", text: t("failed", { text }), full: text });
  });
}
