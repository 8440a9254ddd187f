// The line of a node that decodes or encodes: what its run will take, how it goes, what it took. A click shows the rest.
import { comparison } from "./compare.js";
import { addLine, el, Sheet } from "./dom.js";
import { outlook, result } from "./details.js";
import { forgetRun, onRuns, reportOf, runOf } from "./runs.js";
import { forgetAssumed, planFor } from "./plans.js";
import { question, readByUs, traceSize, vaeFile, wished } from "./question.js";
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
  queueMicrotask(() => panel.look());
}

function lookAtAll() {
  if (document.hidden) return;
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
    this.sheet = new Sheet(this.line, (element) => element.append(...this.details()));
    this.line.addEventListener("click", (event) => {
      event.stopPropagation();
      this.sheet.toggle();
    });
    this.line.addEventListener("pointerdown", (event) => event.button === 0 && event.stopPropagation());
    onRuns(node, () => this.look());
  }

  look() {
    if (!this.node.graph) return;
    this.run = this.lastingRun();
    const report = reportOf(this.node);
    if (report?.text !== this.report?.text) {
      this.report = report;
      this.lastRun = lastRun(report, this.node, this.plans);
      forgetAssumed();
    }
    if (this.plans) {
      this.asked = question(this.node, this.lastRun);
      this.answer = this.asked.query ? planFor(this.asked.query) ?? null : null;
    }
    const { text, mood } = this.say();
    const state = JSON.stringify([text, mood, this.asked, this.answer, this.report?.text]);
    if (state === this.shown) return;
    this.shown = state;
    this.line.textContent = text;
    this.line.title = text;
    this.line.dataset.mood = mood;
    this.sheet.refresh();
  }

  // How a run ended is of interest until something else is asked for.
  lastingRun() {
    const run = runOf(this.node);
    if (!run) return null;
    const asked = wished(this.node);
    run.asked ??= asked;
    if (run.state === "running" || run.asked === asked) return run;
    forgetRun(this.node);
    return null;
  }

  say() {
    const cached = this.run?.state === "cached";
    if (this.run && !cached) return { text: this.run.text, mood: { running: "busy", cancelled: "quiet", failed: "bad" }[this.run.state] };
    const { plan, error } = this.answer ?? {};
    if (this.report && (!this.plans || this.asked.source === "last_run" || !this.asked.query)) {
      return { text: summary(this.report), mood: mood(this.report.plan_facts, this.report.precision) };
    }
    if (cached && !this.plans) return { text: this.run.text, mood: "quiet" };
    if (!this.plans) return { text: t("no_run"), mood: "quiet" };
    if (this.asked.why) return { text: t(`why_${this.asked.why}`, { names: this.asked.names?.join(", ") }), mood: "quiet" };
    if (error !== undefined) return { text: said(error) || t("unreachable"), mood: error ? "bad" : "quiet" };
    if (!plan) return { text: t("planning"), mood: "quiet" };
    if (plan.unknown) return { text: t(plan.host ? "host_network" : "why_no_vae"), mood: "quiet" };
    if (this.needsOurLoader) return { text: t("ours_only"), mood: "bad" };
    if (plan.needs_channels) return { text: t("channels_short", { has: plan.channels, needs: plan.needs_channels }), mood: "bad" };
    if (!plan.fits) return { text: t("fits_not", { target: gb(plan.target_gb) }), mood: "bad" };
    if (this.streams && (plan.still || plan.batch > 1)) return { text: t("no_video"), mood: "bad" };
    const numbers = { used: number(plan.predicted_gb), target: `${number(plan.target_gb)} GB`, how: layout(plan), exact: exactness(plan) };
    const key = plan.gpus > 1 ? "fits_gpus" : plan.target_gb ? "fits" : "takes";
    return { text: t(key, { ...numbers, n: plan.gpus, all: gb(plan.predicted_gb) }), mood: mood(plan, plan.precision) };
  }

  get needsOurLoader() {
    return Boolean(this.answer?.plan?.ours_only) && !readByUs(this.node);
  }

  details() {
    const { plan, error } = this.answer ?? {};
    const facts = this.plans && !this.streams ? this.report?.plan_facts : null;
    const compare = facts ? comparison(this.node, facts, () => this.sheet.open && this.sheet.refresh()) : { result: [], button: [] };
    const parts = [...compare.result];
    if (this.needsOurLoader) parts.push(section(t("before"), [el("div", { class: "zerowaste-line" }, t("help_ours_only"))]));
    else if (plan && !plan.unknown) parts.push(section(t("before"), outlook(plan, this.asked.source, this.streams)));
    else if (this.plans && !this.report) {
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

function lastRun(report, node, plans) {
  const facts = plans ? report?.plan_facts : null;
  if (!facts) return null;
  const { width, height, frames, batch } = facts;
  return { size: { width, height, frames, batch: batch ?? 1 }, model: facts.model, traced: traceSize(node), file: vaeFile(node) };
}

function number(value) {
  return Number(value).toFixed(value < 1 ? 2 : 1);
}

function layout(plan) {
  if (plan.mode === "blended") return t("blended_short", { n: plan.tiles });
  return t(plan.still ? "whole_images" : "whole_frames");
}

// facts: of a plan, which ComfyUI's own code has none of.
const isApproximate = (facts, precision) => facts?.mode === "blended" || APPROXIMATE.includes(precision);

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
  return parts.join(" · ");
}
