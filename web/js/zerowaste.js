// The pack's part of the frontend: status lines, the expert switch, "Use Zero-Waste VAE", refresh of the file list.
import { app } from "../../../scripts/app.js";
import { api } from "../../../scripts/api.js";
import { adoptAll, menuItems } from "./adopt.js";
import { addExpertSwitch, markUseless, nameTiles } from "./expert.js";
import { attachPanel } from "./panel.js";
import { forgetAssumed } from "./plans.js";
import { followRuns } from "./runs.js";
import { keepValues } from "./saved.js";
import { loadStrings, t } from "./strings.js";
import { addTuning } from "./tune.js";

const FIRST = "Try it - demo clip";
const EVERYWHERE = "ZeroWasteVAE.UseEverywhere";
const PANELS = {
  ZeroWasteVAEDecode: { plan: true },
  ZeroWasteVAEDecodeToVideo: { plan: true, streams: true },
  ZeroWasteVAEEncode: {},
  ZeroWasteVAEEncodeFromVideo: {},
};

function addStyle() {
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = new URL("../css/zerowaste.css", import.meta.url).href;
  document.head.append(link);
}

function addRefresh(node) {
  const button = node.addWidget("button", "refresh", null, () => app.refreshComboInNodes(), { serialize: false });
  button.label = t("refresh");
  button.serialize = false;
}

// The host lists templates in the order of the file system.
function orderTemplates() {
  const pack = decodeURIComponent(new URL("..", import.meta.url).pathname.split("/").at(-2));
  const list = api.getWorkflowTemplates;
  api.getWorkflowTemplates = async function (...rest) {
    const all = await list?.apply(this, rest);
    all?.[pack]?.sort((a, b) => (b === FIRST) - (a === FIRST) || a.localeCompare(b));
    return all;
  };
}

app.registerExtension({
  name: "ZeroWasteVAE",
  // Its words in other languages are in locales/*/commands.json.
  commands: [{ id: EVERYWHERE, label: "Use Zero-Waste VAE in the whole workflow", icon: "pi pi-bolt", function: adoptAll }],
  menuCommands: [{ path: ["Extensions", "Zero-Waste VAE"], commands: [EVERYWHERE] }],
  async init() {
    addStyle();
    orderTemplates();
    await loadStrings();
    followRuns();
  },
  refreshComboInNodes: forgetAssumed, // files may have come
  getNodeMenuItems: menuItems,
  getCanvasMenuItems: () => [null, { content: t("adopt_all"), callback: () => adoptAll() }],
  beforeRegisterNodeDef(kind, { name }) {
    if (name.startsWith("ZeroWasteVAE")) keepValues(kind);
    if (app.collectNodeMenuItems) return;
    // Frontends from before getNodeMenuItems ask the node.
    const before = kind.prototype.getExtraMenuOptions;
    kind.prototype.getExtraMenuOptions = function (canvas, options) {
      const more = before?.call(this, canvas, options);
      options.push(...menuItems(this));
      return more;
    };
  },
  nodeCreated(node) {
    if (!node.comfyClass?.startsWith("ZeroWasteVAE")) return;
    if (node.comfyClass === "ZeroWasteVAELoader") addRefresh(node);
    if (node.comfyClass === "ZeroWasteVAEOptimize") markUseless(node);
    nameTiles(node);
    addExpertSwitch(node);
    if (node.comfyClass === "ZeroWasteVAEOptimize") addTuning(node);
    const panel = PANELS[node.comfyClass];
    if (panel) attachPanel(node, panel);
  },
});
