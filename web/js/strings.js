// Texts of the panels, from locales/<language>/main.json (section "zerowaste"), which the server hands out as /i18n.
import { app } from "../../../scripts/app.js";
import { api } from "../../../scripts/api.js";
import { translated, translatedAll } from "./said.js";

let own = {};
let english = {};
let nodes = {};

export async function loadStrings() {
  try {
    const all = await (await api.fetchApi("/i18n")).json();
    english = all.en?.zerowaste ?? {};
    const chosen = all[app.extensionManager?.setting?.get("Comfy.Locale")] ?? {};
    own = chosen.zerowaste ?? {};
    nodes = chosen.nodeDefs ?? {};
  } catch (error) {
    console.warn("[Zero-Waste VAE] no texts:", error);
  }
}

// t("chunks", { n: 3 }) -> the text of that key with {n} filled in.
// Keys made of a name of the server's (stages, events) fall back to that name.
export function t(key, values = {}) {
  const text = own[key] ?? english[key] ?? key.replace(/^(stage|event)_/, "");
  return text.replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole);
}

/** Name and tooltip of an input of a node, where the user's language has them: { name, tooltip }. */
export function inputTexts(kind, input) {
  return nodes[kind]?.inputs?.[input];
}

/** What the server says, in the user's language where it is known there. */
export function said(text) {
  return translatedAll(text, own.said);
}

/** The line of a running node: a sentence of its report, or one whose parts are known, not their every combination. */
export function saidRunning(text) {
  const whole = said(text);
  return whole !== text ? whole : text.split(/(: |, )/).map((part) => translated(part, own.running)).join("");
}

// Three significant digits are as many as a plan is good for.
export function gb(value) {
  return `${Number(value).toFixed(value < 10 ? 2 : 1)} GB`;
}

export function seconds(value) {
  return `${Number(value).toFixed(value < 10 ? 2 : 1)} s`;
}

/** Time per frame of a run, without that in which the host loads the weights. */
export function perFrame(report) {
  const { batch, frames } = report.clip;
  const each = (1000 * report.total_seconds) / (batch * frames);
  return each < 1000 ? `${each.toFixed(each < 10 ? 1 : 0)} ms` : seconds(each / 1000);
}
