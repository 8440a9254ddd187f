// The line of a node that decodes or encodes: what its run will take, how it goes, what it took. A click shows the rest.
import { comparison } from "./compare.js";
import { addLine, el, Sheet } from "./dom.js";
import { outlook, result } from "./details.js";
import { askedOf, lookAgain } from "./asked.js";
import { linkInto } from "./graph.js";
import { isAway, onRuns, resultOf, runOf } from "./runs.js";
import { forgetAssumed, planFor } from "./plans.js";
import { question, readByUs } from "./question.js";
import { refusal, stateOf } from "./states.js";
import { gb, perFrame, said, t } from "./strings.js";

// Milliseconds between two looks at all the nodes, whichever way and renderer they were changed in.
const INTERVAL = 400;
// Of a new node: the line can be read to its end.
const WIDTH = 380;
const APPROXIMATE = ["fp8", "int8", "fp16_fast"];

const panels = new Set();
let timer = null;

/** `plan`: whether runs are planned before; `streams`: its frames go to a file as they are made. */
export function attachPanel(node, { plan = false, streams = false } = {}) {
  const panel = new Panel(node, plan, streams);
  panels.add(panel);
  node.setSize([Math.max(node.size[0], WIDTH), node.size[1]]);
  const removed = node.onRemoved;
  node.onRemoved = function (...rest) {
    panels.delete(panel);
    panel.sheet.close();
    removed?.apply(this, rest);
  };
  timer ??= setInterval(lookAtAll, INTERVAL);
  queueMicrotask(() => panel.lookNow());
}

function lookAtAll() {
  if (document.hidden) return;
  lookAgain();
  for (const panel of panels) panel.look();
}

class Panel {
  constructor(node, plans, streams) {
    this.node = node;
    this.plans = plans;
    this.streams = streams;
    this.run = null;
    this.report = null;
    this.asked = { why: "unconnected" };
    this.answer = null;
    this.shown = "";
    this.line = addLine(node, "zerowaste_status");
    this.full = el("button", { class: "zerowaste-button zerowaste-full", "data-zerowaste": "full", type: "button" }, t("draft_off"));
    this.full.title = t("draft_off_help");
    this.full.addEventListener("click", (event) => {
      event.stopPropagation();
      const widget = draftOf(this.node);
      widget.value = false;
      widget.callback?.(false);
      this.lookNow();
    });
    this.line.after(this.full);
    this.sheet = new Sheet(this.line, (element) => element.append(...this.details()));
    this.line.addEventListener("click", (event) => {
      event.stopPropagation();
      this.sheet.toggle();
    });
    this.line.addEventListener("pointerdown", (event) => event.button === 0 && event.stopPropagation());
    onRuns(node, () => this.lookNow());
  }

  lookNow() {
    lookAgain();
    this.look();
  }

  look() {
    if (!this.node.graph) return;
    const now = askedOf(this.node);
    this.run = runOf(this.node, now);
    const result = resultOf(this.node, now);
    const { report = null } = result ?? {};
    this.same = Boolean(result?.same);
    if (report?.text !== this.report?.text) {
      this.report = report;
      this.lastRun = this.plans ? lastRun(result) : null;
      forgetAssumed();
    }
    this.away = isAway();
    if (this.plans && !this.away) {
      this.asked = question(this.node, this.lastRun, result?.asked.latent === now.latent);
      this.answer = this.asked.query ? planFor(this.asked.query) ?? null : null;
    }
    this.readByUs = readByUs(this.node);
    const { text, mood, state } = this.say();
    this.full.hidden = !draftOf(this.node)?.value;
    const shown = JSON.stringify([text, mood, state, this.asked, this.answer, this.report?.text]);
    if (shown === this.shown) return;
    this.shown = shown;
    this.line.textContent = text;
    this.line.title = text;
    Object.assign(this.line.dataset, { mood, state });
    this.sheet.refresh();
  }

  // This is what the states are judged by: run, report, same, away, plans, asked, answer, streams and readByUs.
  say() {
    const { name, mood: own } = stateOf(this);
    const { plan } = this.answer ?? {};
    const told = name === "ran" ? [this.report.plan_facts, this.report.precision] : [plan, plan?.precision];
    return { text: this.words(name, plan), mood: own ?? mood(...told), state: name };
  }

  words(state, plan) {
    if (this.run && ["running", "failed", "cancelled", "cached"].includes(state)) return this.run.text;
    if (state === "ran") return summary(this.report);
    const why = this.asked.why ?? "no_vae";
    if (state === "unknown") return t(`why_${why}`, { names: this.asked.names?.join(", ") });
    if (state === "foreign") return t("host_network");
    if (state === "refused") return this.refusal(plan);
    return state === "planned" ? outcome(plan) : t(`state_${state}`);
  }

  refusal(plan) {
    const key = refusal(this);
    if (key === "error") return said(this.answer.error);
    return t(key, { has: plan.channels, needs: plan.needs_channels, target: gb(plan.target_gb), size: gb(plan.result_gb) });
  }

  details() {
    const { plan, error } = this.answer ?? {};
    const facts = this.plans && !this.streams ? this.report?.plan_facts : null;
    const compare = facts ? comparison(this.node, facts, () => this.sheet.open && this.sheet.refresh()) : { result: [], button: [] };
    const parts = [...compare.result];
    const ours = plan?.ours_only && !this.readByUs;
    if (ours) parts.push(section(t("before"), [el("div", { class: "zerowaste-line" }, t("help_ours_only"))]));
    else if (this.away) parts.push(section(t("before"), [el("div", { class: "zerowaste-line" }, t("help_away"))]));
    else if (plan && !plan.unknown) parts.push(section(t("before"), outlook(plan, this.asked.source, this.streams)));
    else if (this.plans && !this.same) {
      const why = said(error ?? "") || (this.asked.why ? t(`help_${this.asked.why}`) : plan?.host ? t("help_host_network") : this.say().text);
      parts.push(section(t("before"), [el("div", { class: "zerowaste-line" }, why)]));
    }
    if (this.run?.state === "failed") parts.push(section(t("stopped"), [el("div", { class: "zerowaste-line" }, this.run.full)]));
    if (this.report) parts.push(section(t("after"), result(this.report)));
    else if (!this.plans) parts.push(el("div", { class: "zerowaste-line" }, this.say().text));
    return [...parts, ...compare.button];
  }
}

function section(title, parts) {
  return el("div", { class: "zerowaste-section" }, el("div", { class: "zerowaste-head" }, title), ...parts);
}

function lastRun(result) {
  const facts = result?.report.plan_facts;
  if (!facts) return null;
  const { width, height, frames, batch } = facts;
  const { traced, file } = result.asked;
  return { size: { width, height, frames, batch: batch ?? 1 }, model: facts.model, traced, file };
}

function outcome(plan) {
  const numbers = { used: number(plan.predicted_gb), target: `${number(plan.target_gb)} GB`, how: layout(plan), exact: exactness(plan) };
  const key = plan.gpus > 1 ? "fits_gpus" : plan.target_gb ? "fits" : "takes";
  return named(plan, t(key, { ...numbers, n: plan.gpus, all: gb(plan.predicted_gb) }));
}

// First of all whose frames they are.
const named = (facts, text) => (facts?.draft ? `${t("draft", { name: facts.draft })} · ${text}` : text);

// The widget of a node, if it has one and no other node sets it.
function draftOf(node) {
  const slot = node.inputs?.findIndex((input) => (input.widget?.name ?? input.name) === "draft") ?? -1;
  return slot >= 0 && linkInto(node, slot) ? undefined : node.widgets?.find(({ name }) => name === "draft");
}

function number(value) {
  return Number(value).toFixed(value < 1 ? 2 : 1);
}

function layout(plan) {
  if (plan.mode === "blended") return t("blended_short", { n: plan.tiles });
  return t(plan.still ? "whole_images" : "whole_frames");
}

// facts: of a plan, which ComfyUI's own code has none of.
const isApproximate = (facts, precision) => facts?.draft || facts?.mode === "blended" || APPROXIMATE.includes(precision);

const mood = (facts, precision) => (isApproximate(facts, precision) ? "approximate" : "good");

function exactness(plan) {
  return t(isApproximate(plan, plan.precision) ? "approximate" : "exact");
}

function summary(report) {
  const facts = report.plan_facts;
  const parts = [t(facts?.still ? "each_image" : "each", { each: perFrame(report) })];
  if (report.reserved_gb) parts.push(gb(report.reserved_gb));
  else if (report.predicted_gb) parts.push(t("about", { size: gb(report.predicted_gb) }));
  if (facts) parts.push(layout(facts), exactness({ ...facts, precision: report.precision }));
  else parts.push(report.load_seconds === null ? t("host_short") : report.precision);
  return named(facts, parts.join(" · "));
}
