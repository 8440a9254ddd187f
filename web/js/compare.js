// "Compare with ComfyUI's own": queues the decode's own part of the prompt once more, with a node that runs both.
import { app } from "../../../scripts/app.js";
import { api } from "../../../scripts/api.js";
import { el } from "./dom.js";
import { runName } from "./graph.js";
import { openWorkflow, PerNode, promptOf } from "./runs.js";
import { gb, said, t } from "./strings.js";

const NAME = "zerowaste-compare";
const PAUSE = 700;
// So many looks at the history for one at the queue.
const RARELY = 10;
// { parts } of each that ran, {} of one that runs.
const kept = new PerNode();

/**
 * { result, button } of a node's comparison, lists of sections each. facts: of the node's last run; `changed` is called
 * when another result is there.
 */
export function comparison(node, facts, changed) {
  const found = kept.of(node);
  const result = found?.parts ? [el("div", { class: "zerowaste-section zerowaste-compare" }, ...found.parts)] : [];
  const running = found && !found.parts;
  const words = running ? t("comparing") : facts.compare_off && t("compare_off", { why: said(facts.compare_off) });
  const button = el("button", { class: "zerowaste-button", type: "button", "data-zerowaste": "compare",
    disabled: Boolean(words) }, t("compare"));
  button.addEventListener("click", () => start(node, changed));
  return { result, button: [el("div", { class: "zerowaste-section" }, button, words && el("div", { class: "zerowaste-line" }, words))] };
}

async function start(node, changed) {
  const [workflow, name] = [openWorkflow(), runName(node)];
  kept.set(workflow, name, {});
  changed();
  let parts;
  try {
    parts = outcome(await run(node, name));
  } catch (error) {
    parts = [el("div", { class: "zerowaste-line zerowaste-problem" }, said(String(error.message ?? error)))];
  }
  kept.set(workflow, name, { parts });
  changed();
}

function partOf(prompt, name, found = {}) {
  if (found[name] || !prompt[name]) return found;
  found[name] = prompt[name];
  for (const input of Object.values(prompt[name].inputs)) {
    if (Array.isArray(input) && input.length === 2) partOf(prompt, String(input[0]), found);
  }
  return found;
}

// The prompt of the run that is on show, so that nothing before the decode has to run again; a seed that changes after
// each run would be another one by now. Else what the graph says.
async function promptFor(node) {
  const { output, workflow } = await app.graphToPrompt();
  const id = promptOf(node);
  const ran = id && (await json(`/history/${id}`))[id]?.prompt?.[2];
  return { output: ran || output, workflow };
}

async function run(node, name) {
  const { output, workflow } = await promptFor(node);
  if (!output[name]) throw new Error(t("compare_gone"));
  const { [name]: decode, ...before } = partOf(output, name);
  // The same inputs under the same names: what the run computed before is still in the host's cache.
  const prompt = { ...before, [NAME]: { class_type: "ZeroWasteVAECompare", inputs: decode.inputs } };
  // Under a name of its own: the frontend hears nothing of a node that is in no graph.
  const apart = Object.create(api, { clientId: { value: `${NAME}-${Date.now()}` } });
  const { prompt_id: id } = await api.queuePrompt.call(apart, 0, { output: prompt, workflow });
  return reportOf(await finished(id));
}

// What the host's history has of a prompt, once it is there.
async function finished(id) {
  for (let looks = 1; ; looks += 1) {
    await new Promise((done) => setTimeout(done, PAUSE));
    const waits = looks % RARELY || isQueued(await json("/queue"), id);
    const entry = (await json(`/history/${id}`))[id];
    if (entry) return entry;
    if (!waits) throw new Error(t("cancelled"));
  }
}

async function json(path) {
  return (await api.fetchApi(path, { timeoutMs: null })).json();
}

function isQueued(queue, id) {
  return [...queue.queue_running, ...queue.queue_pending].some((entry) => entry[1] === id);
}

function reportOf({ outputs, status }) {
  const messages = Object.fromEntries(status?.messages ?? []);
  const error = messages.execution_error?.exception_message;
  if (error) throw new Error(String(error).trim().split("\n")[0]);
  if (messages.execution_interrupted) throw new Error(t("cancelled"));
  if (!outputs[NAME]) throw new Error(t("compare_gone"));
  return outputs[NAME];
}

function outcome(output) {
  const facts = output.zerowaste[0];
  const row = (name, side) => el("tr", {}, el("th", {}, name), el("td", {}, side.ms.toFixed(side.ms < 10 ? 1 : 0)),
    el("td", {}, side.gb ? gb(side.gb) : "–"), el("td", {}, said(side.mode)));
  const pictures = (output.images ?? []).map(({ filename, subfolder, type }, index) => {
    const query = new URLSearchParams({ filename, subfolder, type });
    return el("figure", {}, el("img", { src: api.apiURL(`/view?${query}`), alt: "" }),
      el("figcaption", {}, t(["compare_ours", "compare_theirs"][index])));
  });
  return [
    el("div", { class: "zerowaste-head" }, t("compare_title")),
    el("div", { class: "zerowaste-pictures" }, ...pictures),
    el("table", { class: "zerowaste-table" },
      el("tr", {}, el("th", {}, ""), el("th", {}, t("compare_ms")), el("th", {}, t("compare_memory")), el("th", {}, t("compare_mode"))),
      row(t("compare_ours"), facts.ours), row(t("compare_theirs"), facts.theirs)),
    ...facts.lines.map((text) => el("div", { class: "zerowaste-line" }, said(text))),
  ];
}
