// What becomes of a node's run: its progress from the first second, its report, the end of a cancelled or failed one.
// Each is kept with the workflow that the run was queued from: another tab may have nodes of the same names.
import { app } from "../../../scripts/app.js";
import { api } from "../../../scripts/api.js";
import { askedOf, lookAgain, upstream } from "./asked.js";
import { nodeOfRun, runName } from "./graph.js";
import { forgetPlans } from "./plans.js";
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

const prompts = new Map(); // prompt id -> { workflow, asked: what was asked of its nodes by their names, refused }
const origins = new Map(); // text of a report, which has its times -> prompt id
const listeners = new Map();
const runs = new PerNode();
const reports = new PerNode();
let queueing = null;
let prompt = null;
let running = null;
// Of the server: whether the page has lost it, how often it came back, and the prompts that it then still had.
let away = false;
let returns = 0;
let alive = [];

export const isAway = () => away;

/**
 * { state: "running" | "cached" | "cancelled" | "failed", text, full } of a node's last run, or null: how a run ended is
 * of interest until something else is `asked`, or another server may have come.
 */
export function runOf(node, asked) {
  const run = runs.of(node);
  if (!run) return null;
  run.asked ??= asked;
  const old = run.returns < returns;
  const over = run.state === "running" ? old && !alive.includes(run.prompt) : old || run.asked.all !== asked.all;
  if (over) runs.set(openWorkflow(), run.name, null);
  return over ? null : run;
}

/**
 * { report, asked, same } of a node's last run: as this page saw it, else what the host keeps. `same`: the next run is
 * `asked` for the same.
 */
export function resultOf(node, asked) {
  const found = reports.of(node) ?? keptOf(node);
  if (!found) return null;
  found.asked ??= asked;
  return { ...found, same: found.asked.all === asked.all && found.returns === returns };
}

function keptOf(node) {
  const { id, graph } = node;
  const inner = graph && graph !== (graph.rootGraph ?? graph);
  const report = app.nodeOutputs?.[inner ? `${graph.id}:${id}` : String(id)]?.zerowaste?.[0];
  if (!report?.seconds) return null;
  // The host gives a result to whichever workflow is open.
  const owner = prompts.get(origins.get(report.text))?.workflow;
  if (owner && owner !== openWorkflow()) return null;
  reports.set(openWorkflow(), runName(node), { report, returns });
  return reports.of(node);
}

/** The id of the prompt that last gave this node its result; undefined for results from before this page. */
export const promptOf = (node) => reports.of(node)?.prompt;

/** Calls back each time something of the node's run changes. */
export function onRuns(node, changed) {
  listeners.set(node, changed);
  const removed = node.onRemoved;
  node.onRemoved = function (...rest) {
    listeners.delete(node);
    removed?.apply(this, rest);
  };
}

function tellAll() {
  for (const changed of listeners.values()) changed();
}

// Prompts from before this page belong to whatever is open, as far as anyone can say.
const of = (id) => prompts.get(id) ?? queueing ?? { workflow: openWorkflow(), asked: new Map() };

function tell(id, name, run) {
  if (!name) return;
  const { workflow, asked } = of(id);
  const known = asked.get(String(name)) ?? runs.named(workflow, name)?.asked;
  runs.set(workflow, name, run && { ...run, name, prompt: id, asked: known, returns });
  if (workflow === openWorkflow()) listeners.get(nodeOfRun(name))?.();
}

// A node that another one follows, or the end of the prompt, has finished.
function moveTo(name) {
  if (running && running !== name) tell(prompt, running, null);
  running = name;
  tell(prompt, name, { state: "running", text: t("starting") });
}

// Neither this node nor one that needs something of it has a result.
function stop(id, name, text) {
  if (!name) return;
  const failed = { state: "failed", text: t("failed", { text }), full: text };
  tell(id, name, failed);
  const broken = of(id).workflow === openWorkflow() && nodeOfRun(name);
  if (!broken) return;
  lookAgain();
  for (const node of listeners.keys()) if (node !== broken && upstream(node).has(broken)) tell(id, runName(node), failed);
}

// { name: { errors: [{ message, details }] } } of nodes that the server does not run.
function refuse(id, errors) {
  for (const [name, { errors: [error] = [] }] of Object.entries(errors ?? {})) {
    // The details of a choice that is none end with all there are.
    const details = error?.details?.split(" not in ")[0];
    stop(id, name, [error?.message, details].filter(Boolean).join(": "));
  }
}

function remember(map, key, held) {
  map.set(key, held);
  if (map.size > MOST) map.delete(map.keys().next().value);
}

const first = (text) => String(text ?? "").trim().split("\n")[0];

// No event says which workflow a prompt is of, nor what was asked of a node that has changed since.
function followQueue() {
  const queue = api.queuePrompt;
  api.queuePrompt = async function (...rest) {
    lookAgain();
    const asked = new Map([...listeners.keys()].map((node) => askedOf(node)).map((one) => [one.name, one]));
    const entry = { workflow: openWorkflow(), asked };
    const own = this === api; // not a comparison
    queueing = entry; // its first events may come before the answer
    try {
      const reply = await queue.apply(this, rest);
      if (reply?.prompt_id) remember(prompts, reply.prompt_id, Object.assign(entry, own && { refused: reply.node_errors }));
      refuse(reply?.prompt_id, entry.refused);
      return reply;
    } catch (error) {
      if (own) refuse(null, error?.response?.node_errors);
      throw error;
    } finally {
      queueing = null;
    }
  };
}

// What ran in a server that is gone will never end.
async function followServer() {
  api.addEventListener("reconnecting", () => {
    away = true;
    tellAll();
  });
  api.addEventListener("reconnected", async () => {
    const reply = await api.fetchApi("/queue", { timeoutMs: null }).catch(() => null);
    const queue = reply?.ok ? await reply.json() : { queue_running: [], queue_pending: [] };
    alive = [...queue.queue_running, ...queue.queue_pending].map((entry) => entry[1]);
    if (!alive.includes(prompt)) running = null;
    returns += 1;
    away = false;
    forgetPlans();
    tellAll();
  });
}

export function followRuns() {
  followQueue();
  followServer();
  api.addEventListener("execution_start", ({ detail }) => {
    [prompt, running] = [detail?.prompt_id, null];
    runs.clear(of(prompt).workflow);
    refuse(prompt, of(prompt).refused);
    tellAll();
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
    const { workflow, asked } = of(detail.prompt_id);
    const known = asked.get(String(detail.node));
    reports.set(workflow, detail.node, { report, prompt: detail.prompt_id, asked: known, returns });
    tell(detail.prompt_id, detail.node, null);
  });
  api.addEventListener("execution_interrupted", ({ detail }) => {
    const name = detail?.node_id ?? running;
    running = null;
    tell(detail?.prompt_id, name, { state: "cancelled", text: t("cancelled") });
  });
  api.addEventListener("execution_error", ({ detail }) => {
    const name = detail?.node_id ?? running;
    running = null;
    const english = first(detail?.exception_message);
    const text = detail?.exception_type?.startsWith(OURS) ? said(english) : english;
    // Newer frontends keep this object and show its words when they are looked for.
    if (text !== english) detail.exception_message = detail.exception_message.replace(english, () => text);
    stop(detail?.prompt_id, name, text);
  });
}
