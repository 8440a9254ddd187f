// One switch for everything but the first settings, in both renderers; saved values do not depend on it.
import { inputTexts, said, t } from "./strings.js";

/** Hides the advanced widgets of a drawn node until its switch is pressed; nodes of elements have their own. */
export function addExpertSwitch(node) {
  const advanced = (node.widgets ?? []).filter((widget) => widget.options?.advanced);
  if (!advanced.length) return;
  // Not `advanced`: a drawn node keeps the room of such widgets.
  for (const widget of advanced) {
    if (widget.visibility) continue; // newer frontends: see below
    const hidden = () => !window.LiteGraph.vueNodesMode && !node.showAdvanced;
    Object.defineProperty(widget, "hidden", { get: hidden, set: () => {}, configurable: true });
    // Older frontends keep the room of hidden ones too, and 4 pixels below each: the node would grow when it is drawn.
    // Nodes of elements hide them by themselves, and grow from the size set here to what they show.
    const own = widget.computeSize;
    const size = () => (node.showAdvanced ? own : () => [0, -4]);
    Object.defineProperty(widget, "computeSize", { get: size, set: () => {}, configurable: true });
  }
  const show = () => {
    for (const { visibility } of advanced) if (visibility) visibility.surfaces.canvas = node.showAdvanced ? "shown" : "never";
    button.label = t(node.showAdvanced ? "expert_less" : "expert_more");
  };
  const fit = () => {
    const wide = node.size[0];
    node.setSize([wide, node.computeSize()[1]]);
    node.setDirtyCanvas?.(true, true);
  };
  const button = node.addWidget("button", "expert", null, () => {
    node.showAdvanced = !node.showAdvanced;
    show();
    fit();
  }, { serialize: false, canvasOnly: true });
  button.serialize = false;
  show();
  const configured = node.onConfigure;
  node.onConfigure = function (...rest) {
    configured?.apply(this, rest);
    show();
    fit(); // one that was saved higher has nothing to fill its lower end with
  };
  node.setSize([node.size[0], node.computeSize()[1]]);
}

/** Switches that can do nothing on this machine are grey and say so in their labels; the tooltip has the reason. */
export function markUseless(node) {
  const inputs = { ...node.constructor.nodeData?.input?.required, ...node.constructor.nodeData?.input?.optional };
  for (const [name, spec] of Object.entries(inputs)) {
    const widget = spec[1]?.zerowaste_off && node.widgets?.find((entry) => entry.name === name);
    if (!widget) continue;
    widget.label = t("no_effect", { label: widget.label ?? name });
    widget.disabled = true;
    widget.tooltip = t("no_effect_why", { reason: said(spec[1].zerowaste_off) });
  }
}

/** Hosts without nested widgets have those of tiles beside the choice, under names that no translation has. */
export function nameTiles(node) {
  for (const name of ["tile", "overlap"]) {
    const texts = inputTexts(node.comfyClass, `tiling_${name}`);
    const widget = texts && node.widgets?.find((entry) => entry.name === name);
    if (widget) Object.assign(widget, { label: texts.name, tooltip: texts.tooltip });
  }
}
