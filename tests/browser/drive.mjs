// Drives the real frontend in a headless Chromium: reads one JSON task per line from stdin, answers one line each.
// Needs playwright-core (NODE_PATH or node_modules beside it) and CHROMIUM (default /usr/bin/chromium).
import { createRequire } from "node:module";
import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import readline from "node:readline";

const require = createRequire(path.join(process.env.PLAYWRIGHT_DIR ?? process.cwd(), "x.js"));
const { chromium } = require("playwright-core");

const profile = fs.mkdtempSync(path.join(os.tmpdir(), "zerowaste-browser-"));
const context = await chromium.launchPersistentContext(profile, {
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  headless: true,
  viewport: { width: 1500, height: 950 },
  args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync"],
});
const page = context.pages()[0] ?? (await context.newPage());
let problems = [];
let current = "";
page.on("pageerror", (error) => {
  // The oldest frontend applies its settings before it has a graph.
  const early = error.message.includes("reading 'id'") && /at onChange .*\/assets\//.test(error.stack);
  if (!early) problems.push(`page error: ${error.stack}`);
});
page.on("console", (message) => {
  const where = message.location().url ?? "";
  // What the server refuses, with the reason that the line or the button then shows, is no error of the page.
  const refused = where.includes("/zerowaste_vae/") && /status of 4(00|09)/.test(message.text());
  // Of an error's details the newest frontend asks a registry whose pack the node is of.
  const registry = message.text().includes("//api.comfy.org/nodes");
  if (message.type() === "error" && !refused && !registry && /zerowaste/i.test(`${message.text()} ${where}`)) problems.push(message.text());
});

// Milliseconds; a machine that is busy with other tests is slow.
const PATIENCE = Number(process.env.PATIENCE ?? 300000);

const tasks = {
  // Open the frontend with these settings; the page that is open stays where they are the same.
  async open({ url, settings = {}, width = 1500, height = 950 }) {
    problems = [];
    if (current === JSON.stringify([url, settings, width, height])) return null;
    current = JSON.stringify([url, settings, width, height]);
    await page.setViewportSize({ width, height });
    const ready = async () => {
      await page.goto(url, { waitUntil: "domcontentloaded" });
      await page.waitForFunction(() => window.app?.extensionManager && window.app.graph && window.app.vueAppReady, null,
        { timeout: PATIENCE });
    };
    await ready();
    await page.evaluate(async (all) => {
      for (const [id, value] of Object.entries(all)) await window.app.extensionManager.setting.set(id, value);
    }, { "Comfy.TutorialCompleted": true, ...settings });
    problems = [];
    await ready();
    await page.keyboard.press("Escape");
    return page.evaluate(() => window.__COMFYUI_FRONTEND_VERSION__ ?? null);
  },
  // A page that was just opened restores its last workflow when it gets to it, and may put that over this one.
  async load({ workflow }) {
    const mark = `${Date.now()} ${Math.random()}`;
    const marked = { ...workflow, extra: { ...workflow.extra, zerowaste_test: mark } };
    for (const end = Date.now() + PATIENCE; Date.now() < end;) {
      await page.evaluate(async (graph) => { await window.app.loadGraphData(graph); }, marked);
      await page.waitForTimeout(1500);
      await page.keyboard.press("Escape");
      if (await page.evaluate(() => window.app.graph.extra?.zerowaste_test) === mark) return tasks.nodes();
    }
    throw new Error("the page does not keep the workflow it was given");
  },
  async nodes() {
    return page.evaluate(() => window.app.graph.nodes.map((node) => ({
      id: String(node.id), type: node.type, known: node.type in window.LiteGraph.registered_node_types, errors: Boolean(node.has_errors), size: [...node.size], pos: [...node.pos],
      widgets: (node.widgets ?? []).map((widget) => [widget.name, widget.type, widget.value]),
    })));
  },
  async set({ node, widget, value }) {
    return page.evaluate(([id, name, to]) => {
      const target = window.app.graph.nodes.find((n) => String(n.id) === String(id));
      const found = target.widgets.find((w) => w.name === name);
      found.value = to;
      found.callback?.(to, window.app.canvas, target);
    }, [node, widget, value]);
  },
  async options({ node, widget }) {
    return page.evaluate(([id, name]) => {
      const target = window.app.graph.nodes.find((n) => String(n.id) === String(id));
      const { values } = target.widgets.find((w) => w.name === name).options;
      return typeof values === "function" ? values() : values;
    }, [node, widget]);
  },
  // Press a button widget and wait until the list of another one holds `until`.
  async press({ node, widget, listed, until }) {
    await page.evaluate(([id, name]) => {
      const target = window.app.graph.nodes.find((n) => String(n.id) === String(id));
      return target.widgets.find((w) => w.name === name).callback();
    }, [node, widget]);
    await page.waitForFunction(([id, name, value]) => {
      const target = window.app.graph.nodes.find((n) => String(n.id) === String(id));
      const { values } = target.widgets.find((w) => w.name === name).options;
      return (typeof values === "function" ? values() : values).includes(value);
    }, [node, listed, until], { timeout: PATIENCE });
  },
  // A real click on a button widget: of a drawn node, or of one made of elements. With `entry`, of a drawn node, on a
  // widget that opens a list, and then on that entry of it.
  async click({ node, widget, entry = null }) {
    const at = await page.evaluate(async ([id, name]) => {
      const { canvas, graph } = window.app;
      const target = graph.nodes.find((n) => String(n.id) === String(id));
      const button = target.widgets.find((w) => w.name === name);
      canvas.ds.scale = 1;
      canvas.ds.offset[0] = -target.pos[0] + 500;
      canvas.ds.offset[1] = -target.pos[1] + 300;
      canvas.setDirty(true, true);
      await new Promise((done) => setTimeout(done, 700));
      if (window.LiteGraph.vueNodesMode) {
        const all = [...document.querySelectorAll(`[data-node-id="${id}"] button`)];
        const box = all.find((e) => e.innerText.trim() === button.label)?.getBoundingClientRect();
        return box && [box.left + box.width / 2, box.top + box.height / 2];
      }
      const rect = canvas.canvas.getBoundingClientRect();
      return [rect.left + 500 + target.size[0] / 2, rect.top + 300 + button.y + 10];
    }, [node, widget]);
    if (!at) throw new Error(`no button shows the label of ${widget}`);
    await page.mouse.click(...at);
    if (entry) await page.locator(".litemenu-entry", { hasText: entry }).first().click();
  },
  // Waits until a widget's label, in the page where the node is made of elements, holds `until`; gives its tooltip.
  async label({ node, widget, until, timeout = PATIENCE }) {
    const found = await page.waitForFunction(([id, name, text]) => {
      const target = window.app.graph.nodes.find((n) => String(n.id) === String(id));
      const { label, tooltip } = target.widgets.find((w) => w.name === name);
      const shown = window.LiteGraph.vueNodesMode ? document.querySelector(`[data-node-id="${id}"]`)?.innerText ?? "" : label;
      return shown.includes(text) && label.includes(text) && { tooltip };
    }, [node, widget, until], { timeout });
    return (await found.jsonValue()).tooltip;
  },
  async prompt() {
    return page.evaluate(async () => (await window.app.graphToPrompt()).output);
  },
  // In a second tab: this workflow, a run of it, and [state, text] of its lines then.
  async beside({ url, workflow }) {
    const other = await context.newPage();
    try {
      await other.goto(url, { waitUntil: "domcontentloaded" });
      await other.waitForFunction(() => window.app?.extensionManager && window.app.graph && window.app.vueAppReady, null,
        { timeout: PATIENCE });
      await other.waitForTimeout(1500);
      await other.evaluate((graph) => window.app.loadGraphData(graph), workflow);
      await tasks.run({ on: other });
      return await other.evaluate(() => [...document.querySelectorAll('[data-zerowaste="status"]')]
        .map((e) => [e.dataset.state, e.innerText]));
    } finally {
      await other.close();
    }
  },
  async run({ timeout = PATIENCE, on = page }) {
    await on.evaluate(() => {
      window.__outcome = null;
      for (const kind of ["execution_success", "execution_error"]) {
        window.app.api.addEventListener(kind, (event) => { window.__outcome ??= [kind, event.detail?.exception_message]; });
      }
    });
    await on.evaluate(() => window.app.queuePrompt(0, 1));
    await on.waitForFunction(() => window.__outcome, null, { timeout });
    await on.waitForTimeout(700);
    return on.evaluate(() => window.__outcome);
  },
  // A picture of the whole graph, or of the nodes named (by id) with a margin.
  async shot({ file, nodes = null, scale = 1, margin = 24 }) {
    const clip = await page.evaluate(async ([ids, zoom, edge]) => {
      const { canvas, graph } = window.app;
      const chosen = graph.nodes.filter((n) => !ids || ids.includes(String(n.id)));
      const left = Math.min(...chosen.map((n) => n.pos[0]));
      const top = Math.min(...chosen.map((n) => n.pos[1] - 34));
      const right = Math.max(...chosen.map((n) => n.pos[0] + n.size[0]));
      const bottom = Math.max(...chosen.map((n) => n.pos[1] + n.size[1]));
      const rect = canvas.canvas.getBoundingClientRect();
      canvas.ds.scale = zoom;
      canvas.ds.offset[0] = -left + (edge + 70) / zoom;
      canvas.ds.offset[1] = -top + (edge + 110) / zoom;
      canvas.setDirty(true, true);
      await new Promise((done) => setTimeout(done, 900));
      return { x: rect.left + 70, y: rect.top + 110, width: (right - left) * zoom + 2 * edge, height: (bottom - top) * zoom + 2 * edge };
    }, [nodes, scale, margin]);
    const view = page.viewportSize();
    clip.width = Math.min(clip.width, view.width - clip.x);
    clip.height = Math.min(clip.height, view.height - clip.y);
    fs.mkdirSync(path.dirname(file), { recursive: true });
    await page.screenshot({ path: file, clip: nodes ? clip : undefined });
    return clip;
  },
  // What an expression in the page gives; it may wait.
  async js({ source }) {
    return page.evaluate(source);
  },
  // A real right click on the title of a node, or where none is, and a click on one entry of the menu that opens.
  async menu({ node = null, entry = null }) {
    const at = await page.evaluate(async (id) => {
      const { canvas } = window.app;
      const found = canvas.graph.nodes.find((n) => String(n.id) === String(id));
      const target = found ?? { pos: [-5000, -5000], size: [240, 0] };
      canvas.deselectAll?.();
      canvas.ds.scale = 1;
      canvas.ds.offset[0] = -target.pos[0] + 500;
      canvas.ds.offset[1] = -target.pos[1] + 300;
      canvas.setDirty(true, true);
      await new Promise((done) => setTimeout(done, 700));
      const rect = canvas.canvas.getBoundingClientRect();
      return [rect.left + 500 + Math.min(120, target.size[0] / 2), rect.top + 300 - 12];
    }, node);
    await page.evaluate(() => window.LiteGraph.closeAllContextMenus?.(window));
    await page.mouse.click(at[0], at[1], { button: "right" });
    await page.waitForTimeout(700);
    const items = page.locator('[role="menuitem"], .litemenu-entry, .p-contextmenu-item, .p-menuitem');
    const texts = (await items.allInnerTexts()).map((text) => text.trim().split("\n")[0]);
    if (!entry) {
      await page.keyboard.press("Escape");
      return texts;
    }
    await items.filter({ hasText: entry }).first().click();
    await page.waitForTimeout(600);
    return texts;
  },
  async button({ selector }) {
    await page.locator(selector).click();
  },
  // Moves the real mouse to a place of the page, and clicks there with `button`, if given.
  async mouse({ x, y, button = null }) {
    await page.mouse.move(x, y);
    if (button) await page.mouse.click(x, y, { button });
  },
  async key({ keys }) {
    await page.keyboard.press(keys);
    await page.waitForTimeout(800);
  },
  // The first status line that holds `until`, once there is one.
  async line({ until = "", timeout = PATIENCE }) {
    const find = (text) => [...document.querySelectorAll('[data-zerowaste="status"]')].find((e) => e.innerText.includes(text));
    const line = await page.waitForFunction(find, until, { timeout });
    return line.evaluate((e) => {
      const { left, top, right, bottom } = e.getBoundingClientRect();
      const style = getComputedStyle(e);
      return { text: e.innerText, mood: e.dataset.mood, box: [left, top, right, bottom], font: style.fontFamily,
        page: getComputedStyle(document.body).fontFamily, colour: style.color, ground: style.backgroundColor,
        cut: e.scrollWidth > e.clientWidth };
    });
  },
  async lines() {
    return page.evaluate(() => [...document.querySelectorAll('[data-zerowaste="status"]')].map((e) => [e.innerText, e.dataset.mood]));
  },
  // A real click on a status line opens its sheet.
  async details({ until = "" }) {
    const line = page.locator('[data-zerowaste="status"]', { hasText: until }).first();
    if (!(await page.locator('[data-zerowaste="details"]').count())) await line.click();
    await page.waitForTimeout(500);
    return page.evaluate(() => {
      const sheet = document.querySelector('[data-zerowaste="details"]');
      const box = (e) => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
      const parts = [...sheet.querySelectorAll(".zerowaste-line, .zerowaste-plan, .zerowaste-bar, li, button")];
      return {
        text: sheet.innerText, box: box(sheet), parts: parts.map(box),
        lines: parts.filter((e) => e.matches(".zerowaste-line")).map(box),
        clipped: parts.filter((e) => e.scrollWidth > e.clientWidth + 1 && e.clientWidth).map((e) => e.textContent),
        tiles: sheet.querySelectorAll("svg g .zerowaste-tile").length,
        colour: getComputedStyle(sheet).color, ground: getComputedStyle(sheet).backgroundColor,
      };
    });
  },
  // Everything the node search lists for these words.
  async search({ words }) {
    await page.evaluate(() => window.app.extensionManager.command.execute("Workspace.SearchBox.Toggle"));
    const box = page.locator('input[placeholder*="Add a node" i], .comfy-vue-node-search-container input').first();
    await box.fill(words);
    await page.waitForTimeout(900);
    const text = await page.evaluate(async () => {
      const dialog = document.querySelector('[role="dialog"]') ?? document.body;
      const list = [...dialog.querySelectorAll("*")].filter((e) => e.scrollHeight > e.clientHeight + 20 && e.clientHeight > 100);
      let all = dialog.innerText;
      for (const one of list) {
        for (let top = 0; top < one.scrollHeight; top += one.clientHeight / 2) {
          one.scrollTop = top;
          await new Promise((done) => setTimeout(done, 60));
          all += `\n${dialog.innerText}`;
        }
      }
      return all;
    });
    await page.keyboard.press("Escape");
    return text;
  },
  async view({ file }) {
    fs.mkdirSync(path.dirname(file), { recursive: true });
    await page.screenshot({ path: file });
  },
  // Errors of the page since it was opened, or since they were forgotten.
  async problems({ forget = false }) {
    const found = problems;
    if (forget) problems = [];
    return found;
  },
};

for await (const line of readline.createInterface({ input: process.stdin })) {
  if (!line.trim()) continue;
  const { task, ...rest } = JSON.parse(line);
  if (task === "quit") break;
  try {
    console.log(JSON.stringify({ ok: (await tasks[task](rest)) ?? null }));
  } catch (error) {
    console.log(JSON.stringify({ error: String(error.message ?? error) }));
  }
}
await context.close();
fs.rmSync(profile, { recursive: true, force: true });
process.exit(0);
