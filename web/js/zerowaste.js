// The pack's part of the frontend: plan and result panels, reasons for toggles, refresh of the file list.
import { app } from "../../../scripts/app.js";
import { attachPanel } from "./panel.js";
import { attachReasons } from "./reasons.js";
import { loadStrings, t } from "./strings.js";

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

app.registerExtension({
  name: "ZeroWasteVAE",
  async init() {
    addStyle();
    await loadStrings();
  },
  nodeCreated(node) {
    if (node.comfyClass === "ZeroWasteVAEDecode") attachPanel(node, { plan: true });
    if (node.comfyClass === "ZeroWasteVAEEncode") attachPanel(node, { plan: false });
    if (node.comfyClass === "ZeroWasteVAEOptimize") attachReasons(node);
    if (node.comfyClass === "ZeroWasteVAELoader") addRefresh(node);
  },
});
