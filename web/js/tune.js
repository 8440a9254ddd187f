// Optimize's button that lets this GPU choose its own schedules; its label says how that goes, and a click ends it.
import { api } from "../../../scripts/api.js";
import { sourceNode, value } from "./graph.js";
import { said, t } from "./strings.js";

const ROUTE = "/zerowaste_vae/tune";
const PAUSE = 1000;
const MAX_NODES = 64;
// Pixels beside a button's text.
const MARGINS = 40;

export function addTuning(node) {
  const tuning = { node, button: node.addWidget("button", "tune", null, () => click(tuning), { serialize: false }), turn: 0 };
  tuning.button.serialize = false;
  show(tuning, t("tune"));
  // One may be under way since before this page or this node was there.
  ask("GET").then(({ state }) => state === "running" && follow(tuning)).catch(() => {});
}

function show({ node, button }, label, tooltip = t("tune_help")) {
  button.label = fitting(label, node.size[0] - MARGINS);
  button.tooltip = tooltip;
  node.setDirtyCanvas?.(true, true);
}

// A drawn button writes over its edges and the node's: what has no room is in the tooltip.
function fitting(text, width) {
  const context = document.createElement("canvas").getContext("2d");
  context.font = `${window.LiteGraph.NODE_TEXT_SIZE}px ${window.LiteGraph.NODE_FONT}`;
  const fits = (shown) => context.measureText(shown).width <= width;
  let end = text.length;
  while (end > 1 && !fits(`${text.slice(0, end)}…`)) end -= 1;
  return fits(text) ? text : `${text.slice(0, end).trimEnd()}…`;
}

async function click(tuning) {
  try {
    const stopping = (await ask("GET")).state === "running";
    show(tuning, t(stopping ? "tune_stops" : "tune_starts"));
    if (stopping) await ask("DELETE");
    else await ask("POST", { model: modelOf(tuning.node) });
    await follow(tuning, stopping);
  } catch (error) {
    const why = said(error.message);
    show(tuning, t("tune_not", { why }), why);
  }
}

// Until it ends, or another click has somebody else follow it. What is to stop still measures the layer it is at.
async function follow(tuning, stopping = false) {
  const turn = (tuning.turn += 1);
  for (;;) {
    const { state, done, total, text } = await ask("GET");
    if (turn !== tuning.turn) return;
    const why = said(text);
    if (state !== "running") return show(tuning, state === "failed" ? t("tune_not", { why }) : t(`tune_${state}`), why || undefined);
    show(tuning, stopping ? t("tune_stops") : total ? t("tune_runs", { done, total }) : t("tune_starts"));
    await new Promise((wait) => setTimeout(wait, PAUSE));
    if (!tuning.node.graph) return;
  }
}

async function ask(method, body) {
  const options = { method, timeoutMs: null };
  if (body) Object.assign(options, { body: JSON.stringify(body), headers: { "Content-Type": "application/json" } });
  const reply = await api.fetchApi(ROUTE, options);
  const answer = await reply.json();
  if (!reply.ok) throw new Error(answer.error);
  return answer;
}

// The file of the VAE that comes in; what a run computes has none.
function modelOf(node) {
  let last = node;
  for (let steps = 0, current = node; current && steps < MAX_NODES; steps += 1) {
    last = current;
    current = sourceNode(current, "vae");
  }
  const name = value(last, "vae_name");
  return typeof name === "string" ? name : "";
}
