// "Compare with ComfyUI's own": queues the decode's own part of the prompt once more, with a node that runs both.
import { app } from "../../../scripts/app.js";
import { api } from "../../../scripts/api.js";
import { el } from "./dom.js";
import { allNodes, nodeOfRun } from "./graph.js";
import { promptOf } from "./runs.js";
import { gb, said, t } from "./strings.js";

const NAME = "zerowaste-compare";
const results = new WeakMap();

/** The button and, once it ran, what came out. `changed` is called when the content grew. */
export function compareButton(node, changed) {
  const place = el("div", { class: "zerowaste-section zerowaste-compare" });
  const draw = (content) => {
    place.replaceChildren(...content);
    changed();
  };
  const button = el("button", { class: "zerowaste-button", type: "button", "data-zerowaste": "compare" }, t("compare"));
  button.addEventListener("click", async () => {
    draw([el("div", { class: "zerowaste-line" }, t("comparing"))]);
    let parts;
    try {
      parts = outcome(await run(node));
    } catch (error) {
      parts = [el("div", { class: "zerowaste-line zerowaste-problem" }, String(error.message ?? error))];
    }
    results.set(node, parts);
    if (place.isConnected) draw([...parts, button]);
  });
  const before = results.get(node);
  place.append(...(before ?? []), button);
  return place;
}

// The names that a prompt has for `node`: "55", or "66:55" in a subgraph.
function runName(prompt, node) {
  return Object.keys(prompt).find((name) => nodeOfRun(name) === node);
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
  const ran = id && (await (await api.fetchApi(`/history/${id}`)).json())[id]?.prompt?.[2];
  return { output: ran || output, workflow };
}

async function run(node) {
  const { output, workflow } = await promptFor(node);
  const name = runName(output, node);
  if (!name || !allNodes().includes(node)) throw new Error(t("compare_gone"));
  const { [name]: decode, ...before } = partOf(output, name);
  // The same inputs under the same names: what the run computed before is still in the host's cache.
  const prompt = { ...before, [NAME]: { class_type: "ZeroWasteVAECompare", inputs: decode.inputs } };
  const done = finished();
  const { prompt_id: id } = await api.queuePrompt(0, { output: prompt, workflow });
  return done(id);
}

// Resolves with what the comparing node said in the prompt of that id.
function finished() {
  const kinds = ["executed", "execution_error", "execution_interrupted", "execution_success"];
  const events = [];
  let check = () => {};
  const listen = (event) => {
    events.push([event.type, event.detail]);
    check();
  };
  kinds.forEach((kind) => api.addEventListener(kind, listen));
  const stop = () => kinds.forEach((kind) => api.removeEventListener(kind, listen));
  return (id) => new Promise((resolve, reject) => {
    let report = null;
    check = () => {
      for (const [kind, detail] of events.splice(0)) {
        if (detail?.prompt_id !== id) continue;
        if (kind === "executed" && String(detail.node) === NAME) report = detail.output;
        if (kind === "execution_error") reject(new Error(String(detail.exception_message).trim().split("\n")[0]));
        if (kind === "execution_interrupted") reject(new Error(t("cancelled")));
        if (kind === "execution_success") report ? resolve(report) : reject(new Error(t("compare_gone")));
        if (kind !== "executed") stop();
      }
    };
    check();
  });
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
