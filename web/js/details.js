// What a click on the line shows: the plan to scale, and the figures of the last run.
import { el } from "./dom.js";
import { drawMemory, drawPlan, drawSeconds, memoryLabel } from "./draw.js";
import { gb, perFrame, said, seconds, t } from "./strings.js";

// What a user can change about an optimisation that was not in use: a switch, a start option, an installation.
const CHANGEABLE = /switched off|install|older than \d|cudaMallocAsync|--/;

// Those that are approximate or of no use by default are off because nobody asked for them.
function offByDefault(name) {
  const optimize = window.LiteGraph.registered_node_types.ZeroWasteVAEOptimize;
  return optimize?.nodeData?.input?.optional?.[name]?.[1]?.default === false;
}

function line(text, kind = "line") {
  return el("div", { class: `zerowaste-line zerowaste-${kind}` }, text);
}

/** `streams`: its frames go to a file and are not held. */
export function outlook(plan, source, streams) {
  const parts = [line(t("aside", { text: clip(plan), more: t(`source_${source}`) })), drawPlan(plan)];
  if (plan.needs_channels) {
    const problem = t("channels", { has: plan.channels, needs: plan.needs_channels });
    return [...parts, line(problem, "problem"), line(t("help_channels")), ...footnotes(plan)];
  }
  if (!plan.fits) return [...parts, line(said(plan.text), "problem"), ...footnotes(plan)];
  parts.push(drawMemory(plan.predicted_gb, plan.target_gb, memoryLabel(plan)));
  parts.push(line(t("layout", { frames: layout(plan), steps: chunking(plan) })));
  if (plan.expected_high_s) {
    parts.push(line(t("expected", { low: seconds(plan.expected_low_s), high: seconds(plan.expected_high_s) })));
  }
  if (plan.parked_gb >= 0.01) parts.push(line(t("memory_parked", { size: gb(plan.parked_gb) })));
  if (plan.waiting_gb >= 0.01) parts.push(line(t("memory_waiting", { size: gb(plan.waiting_gb) })));
  if (streams) parts.push(line(t("memory_streamed")));
  else if (plan.crowded) parts.push(line(said(plan.crowded), "problem"));
  else if (plan.result_gb >= 0.01) parts.push(line(t("memory_result", { size: gb(plan.result_gb) })));
  return [...parts, ...footnotes(plan)];
}

function clip({ width, height, frames, batch, still }) {
  if (frames === 1 && batch === 1) return t(still ? "picture" : "image", { width, height });
  if (frames === 1) return t("images", { width, height, batch });
  return t(batch > 1 ? "clips" : "clip", { width, height, frames, batch });
}

function layout(plan) {
  if (plan.mode === "untiled") return t(plan.still ? "untiled_images" : "untiled");
  if (plan.mode === "parked" || plan.mode === "rolled") return t(plan.mode);
  return t("blended", { n: plan.tiles, width: plan.tile_width, height: plan.tile_height });
}

function chunking(plan) {
  if (plan.still) return t(plan.chunk_latents === 1 ? "one_at_a_time" : "at_a_time", { n: plan.chunk_latents });
  if (plan.passes > 1) return t("passes", { n: plan.passes });
  if (plan.chunks === 1) return t("one_chunk");
  return t(plan.chunk_latents === 1 ? "small_chunks" : "chunks", { n: plan.chunks, latents: plan.chunk_latents });
}

function footnotes(plan) {
  const kernels = plan.kernels_off ? t("plain_torch", { reason: said(plan.kernels_off) }) : said(plan.kernels) || t("fused");
  const notes = [t("computed", { precision: plan.precision, device: plan.device, kernels })];
  if (plan.note) notes.push(said(plan.note));
  if (plan.variant) notes.push(t("variant", { name: said(plan.variant) }));
  if (plan.assumed) notes.push(t("assumed", { name: plan.assumed_as ?? "" }));
  return notes.map((note) => line(note, "note"));
}

export function result(report) {
  const stages = [["load", report.load_seconds], ...Object.entries(report.seconds)].filter(([, time]) => time >= 0.005);
  const total = report.total_seconds + report.load_seconds;
  const parts = [line(t(report.plan_facts?.still ? "ran_images" : "ran", { time: seconds(total), each: perFrame(report) })), drawSeconds(stages)];
  const used = report.reserved_gb;
  if (used) parts.push(drawMemory(used, report.predicted_gb, t("used", { used: gb(used), planned: gb(report.predicted_gb) })));
  else if (report.predicted_gb) parts.push(line(t("not_measured", { planned: gb(report.predicted_gb) })));
  if (report.db !== null) parts.push(line(t("quality", { db: report.db.toFixed(1) })));
  parts.push(line(t("ran_as", { mode: said(report.mode), precision: report.precision }), "note"));
  for (const [name, n] of Object.entries(report.events)) {
    if (n) parts.push(line(t(n === 1 ? `event_${name}_one` : `event_${name}`, { n }), "problem"));
  }
  for (const note of report.notes) parts.push(line(said(note), "note"));
  const off = report.off.filter(({ name, reason: why }) => CHANGEABLE.test(why) && !offByDefault(name));
  if (off.length) parts.push(offList(off));
  return parts;
}

function offList(off) {
  const entries = off.map(({ name, reason: why }) => el("li", {}, el("b", {}, name), `: ${said(why)}`));
  return el("div", { class: "zerowaste-off" }, line(t(off.length === 1 ? "off_one" : "off", { n: off.length })), el("ul", {}, ...entries));
}
