// Below the toggles of the optimise node: those that can do nothing on this machine, and why.
import { addPanel, el } from "./dom.js";
import { t } from "./strings.js";

export function attachReasons(node) {
  const inputs = { ...node.constructor.nodeData?.input?.required, ...node.constructor.nodeData?.input?.optional };
  const off = Object.entries(inputs).filter(([, spec]) => spec[1]?.zerowaste_off);
  if (!off.length) return;
  const byReason = new Map();
  for (const [name, spec] of off) {
    const reason = spec[1].zerowaste_off;
    byReason.set(reason, [...(byReason.get(reason) ?? []), name]);
  }
  const entries = [...byReason].map(([reason, names]) => el("li", {}, el("b", {}, names.join(", ")), `: ${reason}`));
  addPanel(node, "zerowaste_reasons").append(
    el("div", { class: "zerowaste-line zerowaste-head" }, t("not_here")),
    el("ul", {}, ...entries),
  );
}
