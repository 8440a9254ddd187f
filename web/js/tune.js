// Optimize's button that lets this GPU choose its own schedules; its label says how that goes, and a click ends it.
import { api } from "../../../scripts/api.js";
import { sourceNode, value } from "./graph.js";
import { said, t } from "./strings.js";

const ROUTE = "/zerowaste_vae/tune";
const PAUSE = 1000;
const MAX_NODES = 64;

export function addTuning(node) {
  const button = node.addWidget("button", "tune", null, () => click(node, show), { serialize: false });
  button.serialize = false;
  const show = (label, tooltip = t("tune_help")) => {
    button.label = label;
    button.tooltip = tooltip;
    node.setDirtyCanvas?.(true, true);
  };
  show(t("tune"));
}

async function click(node, show) {
  try {
    if ((await ask("GET")).state === "running") await ask("DELETE"); // perhaps one of another page, or from before a reload
    else {
      show(t("tune_starts"));
      await ask("POST", { model: modelOf(node) });
    }
    await follow(show);
  } catch (error) {
    show(t("tune_not", { why: said(error.message) }), error.message);
  }
}

async function follow(show) {
  for (;;) {
    const { state, done, total, text } = await ask("GET");
    if (state !== "running") return show(state === "failed" ? t("tune_not", { why: said(text) }) : t(`tune_${state}`), text || undefined);
    show(total ? t("tune_runs", { done, total }) : t("tune_starts"));
    await new Promise((wait) => setTimeout(wait, PAUSE));
  }
}

async function ask(method, body) {
  const options = body ? { method, body: JSON.stringify(body), headers: { "Content-Type": "application/json" } } : { method };
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
