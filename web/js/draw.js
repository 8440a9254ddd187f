// The drawings: a frame with its tiles and the chunks in time, both to scale; bars of memory and of seconds.
import { el, svg } from "./dom.js";
import { gb, seconds, t } from "./strings.js";

const WIDTH = 260;
const MAX_FRAME_HEIGHT = 96;
// More lines than this cannot be told apart at this size.
const MAX_LINES = 64;
// Readable on light and dark alike.
const COLOURS = ["#3b82f6", "#d97706", "#10a37f", "#a855f7", "#e11d48", "#64748b"];
// A stage keeps its colour from run to run.
const STAGES = ["load", "plan", "decode", "gather", "weights"];

function colour(stage, index) {
  const known = STAGES.indexOf(stage === "encode" ? "decode" : stage);
  return COLOURS[(known < 0 ? STAGES.length + index : known) % COLOURS.length];
}

function tiles(plan, scale) {
  const shapes = [];
  const { columns, rows } = plan;
  if (columns.length > MAX_LINES || rows.length > MAX_LINES) return shapes;
  for (const y of rows) {
    for (const x of columns) {
      // Half-transparent: where tiles overlap, the colours add up.
      shapes.push(
        svg("rect", {
          class: "zerowaste-tile", x: x * scale, y: y * scale,
          width: plan.tile_width * scale, height: plan.tile_height * scale,
        }),
      );
    }
  }
  return shapes;
}

function chunks(plan, top) {
  const count = Math.min(plan.chunks, MAX_LINES);
  const width = (WIDTH * plan.chunk_latents) / plan.latents;
  const shapes = [svg("rect", { class: "zerowaste-outline", x: 0.5, y: top + 0.5, width: WIDTH - 1, height: 7 })];
  for (let i = 0; i < plan.chunks && plan.chunks <= count; i += 1) {
    const x = i * width;
    const shown = Math.min(width, WIDTH - x) - 1;
    shapes.push(svg("rect", { class: "zerowaste-tile", x: x + 0.5, y: top + 0.5, width: Math.max(0.5, shown), height: 7 }));
  }
  return shapes;
}

export function drawPlan(plan) {
  const scale = Math.min(WIDTH / plan.width, MAX_FRAME_HEIGHT / plan.height);
  const [width, height] = [plan.width * scale, plan.height * scale];
  const frame = svg(
    "g",
    { transform: `translate(${(WIDTH - width) / 2} 0)` },
    ...(plan.fits ? tiles(plan, scale) : []),
    svg("rect", { class: plan.fits ? "zerowaste-outline" : "zerowaste-outline zerowaste-bad", x: 0.5, y: 0.5,
      width: Math.max(1, width - 1), height: Math.max(1, height - 1) }),
  );
  const total = height + (plan.fits ? 16 : 2);
  return svg(
    "svg",
    { class: "zerowaste-plan", viewBox: `0 0 ${WIDTH} ${total}`, role: "img" },
    frame,
    ...(plan.fits ? chunks(plan, height + 6) : []),
  );
}

// Predicted memory against the target; the mark is the target.
export function drawMemory(used, target, label) {
  const most = Math.max(used, target ?? 0) * 1.02 || 1;
  const over = target && used > target;
  const bar = el("div", { class: "zerowaste-bar" });
  const part = el("div", { class: over ? "zerowaste-part zerowaste-over" : "zerowaste-part" });
  part.style.width = `${(100 * used) / most}%`;
  part.style.background = over ? "" : COLOURS[0];
  bar.append(part);
  if (target) {
    const mark = el("div", { class: "zerowaste-mark" });
    mark.style.left = `${(100 * target) / most}%`;
    bar.append(mark);
  }
  return el("div", {}, el("div", { class: "zerowaste-line" }, label), bar);
}

// One bar of all stages, and what the colours mean.
export function drawSeconds(stages) {
  const total = stages.reduce((sum, [, time]) => sum + time, 0) || 1;
  const bar = el("div", { class: "zerowaste-bar" });
  const legend = el("div", { class: "zerowaste-legend" });
  stages.forEach(([name, time], index) => {
    const part = el("div", { class: "zerowaste-part", title: `${name}: ${seconds(time)}` });
    part.style.width = `${(100 * time) / total}%`;
    part.style.background = colour(name, index);
    bar.append(part);
    const dot = el("span", { class: "zerowaste-dot" });
    dot.style.background = colour(name, index);
    legend.append(el("span", { class: "zerowaste-entry" }, dot, `${t(`stage_${name}`)} ${seconds(time)}`));
  });
  return el("div", {}, bar, legend);
}

export function memoryLabel(plan) {
  const target = plan.target_gb ? ` ${t("of")} ${gb(plan.target_gb)}` : "";
  const text = `${t("predicted")} ${gb(plan.predicted_gb)}${target}`;
  return target ? t("aside", { text, more: t(`target_${plan.target_source}`) }) : text;
}
