// Opens every node's help panel in one language, and reports what it and the node show as JSON.
//   node check_help.mjs URL CHROMIUM LANGUAGE FOLDER_FOR_SCREENSHOTS
import { join } from "node:path";
import { inEditor } from "./editor.mjs";

const [url, executablePath, language, folder] = process.argv.slice(2);
const PATIENCE = { timeout: 20_000 };

/** Put one node of a type on an empty canvas, select it, and say what is written on it. */
function addAlone(type) {
  const { app, LiteGraph } = window;
  app.graph.clear();
  const node = LiteGraph.createNode(type);
  node.pos = [700, 60];
  app.graph.add(node);
  app.canvas.ds.scale = 1;
  app.canvas.ds.offset = [0, 100];
  app.canvas.selectNode(node);
  app.canvas.setDirty(true, true);
  const label = (slot) => slot.label ?? slot.localized_name ?? slot.name;
  const widgets = (node.widgets ?? []).filter((widget) => widget.options?.serialize !== false && !widget.name.startsWith("control_"));
  return {
    title: node.title,
    description: node.constructor.nodeData.description,
    labels: Object.fromEntries([
      ...widgets.map((widget) => [widget.name, widget.label ?? widget.name]),
      ...(node.inputs ?? []).map((slot) => [slot.name, label(slot)]),
    ]),
    outputs: node.outputs.map(label),
  };
}

async function help(page, type) {
  const shown = await page.evaluate(addAlone, type);
  await page.click("[data-testid=info-button]", PATIENCE);
  await page.waitForFunction((name) => {
    const image = document.querySelector(".node-help-content .markdown-content img");
    return image?.complete && image.naturalWidth > 0 && image.src.includes(`/${name}/`);
  }, type, PATIENCE);
  await page.screenshot({ path: join(folder, `help-${language}-${type}.png`) });
  return { ...shown, ...(await page.evaluate(() => {
    const panel = document.querySelector(".node-help-content .markdown-content");
    return { heading: panel.querySelector("h1").textContent, picture: new URL(panel.querySelector("img").src).pathname, text: panel.innerText };
  })) };
}

const body = JSON.stringify({ "Comfy.Locale": language });
await fetch(`${url}/settings`, { method: "POST", headers: { "Content-Type": "application/json" }, body });
const seen = await inEditor({ url, executablePath }, async (page) => {
  const types = await page.evaluate(() => Object.keys(window.LiteGraph.registered_node_types).filter((name) => name.startsWith("FlashForward")));
  const nodes = {};
  for (const type of types) nodes[type] = await help(page, type);
  return { nodes };
});
console.log(JSON.stringify(seen));
