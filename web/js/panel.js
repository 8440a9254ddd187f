// The panel of a decode node: what its run will take, and afterwards what it took. An encode node has the second half.
import { api } from "../../../scripts/api.js";
import { addPanel, el } from "./dom.js";
import { drawMemory, drawPlan, drawSeconds, memoryLabel } from "./draw.js";
import { MAX_FRAMES, question, traceSize } from "./question.js";
import { gb, seconds, t } from "./strings.js";

const ROUTE = "/zerowaste_vae/plan";
// Milliseconds between two looks at the widgets, whichever way and renderer they were changed in.
const INTERVAL = 400;
const SIZES = [[832, 480], [1280, 720], [1920, 1080], [2560, 1440], [3840, 2160]];

export function attachPanel(node, { plan }) {
  const body = addPanel(node, plan ? "zerowaste_plan" : "zerowaste_result");
  const planned = el("div", { class: "zerowaste-section" });
  const ran = el("div", { class: "zerowaste-section" });
  const size = plan ? picker(node) : null;
  if (plan) body.append(size.row, planned);
  body.append(ran);
  body.hidden = !plan;
  let lastRun = null;
  const again = plan ? watch(node, planned, () => lastRun, size.show) : () => {};
  const executed = node.onExecuted;
  node.onExecuted = function (output, ...rest) {
    executed?.call(this, output, ...rest);
    const report = output?.zerowaste?.[0];
    if (!report?.seconds) return;
    const facts = report.plan_facts;
    if (facts) {
      const { width, height, frames } = facts;
      lastRun = { size: { width, height, frames }, model: facts.model, traced: traceSize(node) };
    }
    ran.replaceChildren(...result(report));
    body.hidden = false;
    again(); // the server may know more of the VAE now
  };
}

// -- before the run ----------------------------------------------------------------------------------------------------

function picker(node) {
  const choice = el("select", { title: t("size_help") }, el("option", { value: "" }, t("size_auto")));
  for (const [width, height] of SIZES) {
    choice.append(el("option", { value: `${width}x${height}` }, `${width} × ${height} px`));
  }
  const frames = el("input", { type: "number", min: 1, max: MAX_FRAMES, step: 4, title: t("frames_help") });
  const row = el("div", { class: "zerowaste-row" }, choice, frames, el("span", {}, t("frames")));
  // What the plan is for; the number of frames can be changed where nothing else gives it.
  const show = (count, open) => {
    const size = node.properties?.zerowaste_size;
    choice.value = size ? `${size.width}x${size.height}` : "";
    frames.value = count;
    frames.disabled = !open;
  };
  const pick = () => {
    const [width, height] = choice.value.split("x").map(Number);
    node.properties ??= {};
    if (choice.value) node.properties.zerowaste_size = { width, height };
    else delete node.properties.zerowaste_size;
    node.properties.zerowaste_frames = Math.min(MAX_FRAMES, Math.max(1, Math.round(Number(frames.value)) || 1));
  };
  choice.addEventListener("change", pick);
  frames.addEventListener("change", pick);
  for (const kind of ["pointerdown", "wheel", "keydown"]) row.addEventListener(kind, (event) => event.stopPropagation());
  return { row, show };
}

// Asks for a plan whenever the question changes; the function it returns asks again.
function watch(node, planned, lastRun, showSize) {
  let asked = "";
  let request = null;
  const look = async () => {
    if (!node.graph || document.hidden) return;
    const { query, source, open } = question(node, lastRun());
    const text = new URLSearchParams(query).toString();
    if (asked === `${source} ${text}`) return;
    asked = `${source} ${text}`;
    showSize(query.frames, open);
    request?.abort();
    request = new AbortController();
    planned.classList.add("zerowaste-waiting");
    if (!planned.childElementCount) planned.replaceChildren(el("div", { class: "zerowaste-line" }, t("planning")));
    try {
      const answer = await api.fetchApi(`${ROUTE}?${text}`, { signal: request.signal });
      const plan = await answer.json();
      if (answer.status === 429) asked = "";
      planned.replaceChildren(...(answer.ok ? outlook(plan, source) : [problem(plan.error)]));
    } catch (error) {
      if (error.name === "AbortError") return;
      planned.replaceChildren(problem(t("unreachable")));
    }
    planned.classList.remove("zerowaste-waiting");
  };
  const timer = setInterval(look, INTERVAL);
  const removed = node.onRemoved;
  node.onRemoved = function (...rest) {
    clearInterval(timer);
    request?.abort();
    removed?.apply(this, rest);
  };
  return () => {
    asked = "";
  };
}

function problem(text) {
  return el("div", { class: "zerowaste-line zerowaste-problem" }, text);
}

function outlook(plan, source) {
  const clip = t(plan.frames === 1 ? "image" : "clip", { width: plan.width, height: plan.height, frames: plan.frames });
  const parts = [el("div", { class: "zerowaste-line" }, `${clip} (${t(`source_${source}`)})`), drawPlan(plan)];
  if (!plan.fits) return [...parts, problem(plan.text), ...footnotes(plan)];
  parts.push(drawMemory(plan.predicted_gb, plan.target_gb, memoryLabel(plan)));
  parts.push(el("div", { class: "zerowaste-line" }, `${layout(plan)}; ${chunking(plan)}`));
  for (const name of ["parked", "result"]) {
    const size = plan[`${name}_gb`];
    if (size >= 0.01) parts.push(el("div", { class: "zerowaste-line" }, t(`memory_${name}`, { size: gb(size) })));
  }
  return [...parts, ...footnotes(plan)];
}

function layout(plan) {
  if (plan.mode === "untiled") return t("untiled");
  if (plan.mode === "parked") return t("parked");
  return t("blended", { n: plan.tiles, width: plan.tile_width, height: plan.tile_height });
}

function chunking(plan) {
  if (plan.chunks === 1) return t("one_chunk");
  return t(plan.chunk_latents === 1 ? "small_chunks" : "chunks", { n: plan.chunks, latents: plan.chunk_latents });
}

function footnotes(plan) {
  const kernels = plan.kernels_off ? t("plain_torch", { reason: plan.kernels_off }) : t("fused");
  const notes = [`${plan.precision}, ${plan.device}: ${kernels}`];
  if (plan.note) notes.push(plan.note);
  if (plan.assumed) notes.push(t("assumed"));
  return notes.map((note) => el("div", { class: "zerowaste-note" }, note));
}

// -- after the run -----------------------------------------------------------------------------------------------------

function result(report) {
  const stages = [["load", report.load_seconds], ...Object.entries(report.seconds)].filter(([, time]) => time >= 0.005);
  const total = report.total_seconds + report.load_seconds;
  const { batch, frames } = report.clip;
  const each = (1000 * report.total_seconds) / (batch * frames);
  const parts = [
    el("div", { class: "zerowaste-line zerowaste-head" },
      t("ran", { time: seconds(total), each: each < 10 ? each.toFixed(1) : each.toFixed(0) })),
    drawSeconds(stages),
  ];
  const used = report.reserved_gb;
  if (used) parts.push(drawMemory(used, report.predicted_gb, t("used", { used: gb(used), planned: gb(report.predicted_gb) })));
  else if (report.predicted_gb) parts.push(el("div", { class: "zerowaste-line" }, t("not_measured", { planned: gb(report.predicted_gb) })));
  if (report.db !== null) parts.push(el("div", { class: "zerowaste-line" }, t("quality", { db: report.db.toFixed(1) })));
  parts.push(el("div", { class: "zerowaste-line" }, `${report.mode}, ${report.precision}`));
  for (const [name, count] of Object.entries(report.events)) {
    if (count) parts.push(problem(t(`event_${name}`, { n: count })));
  }
  for (const note of report.notes) parts.push(el("div", { class: "zerowaste-note" }, note));
  if (report.off.length) parts.push(offList(report.off));
  return parts;
}

function offList(off) {
  const entries = off.map(({ name, reason }) => el("li", {}, el("b", {}, name), `: ${reason}`));
  return el("details", { class: "zerowaste-off" }, el("summary", {}, t("off", { n: off.length })), el("ul", {}, ...entries));
}
