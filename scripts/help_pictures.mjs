// Draws the help pages' graphs in the editor and takes a PNG of each.
//   node scripts/help_pictures.mjs URL CHROMIUM LANGUAGE FOLDER [NODE...]
import { join } from "node:path";
import { inEditor } from "../tests/browser/editor.mjs";
import { GRAPHS } from "./help_graphs.mjs";

const [url, executablePath, language, folder, ...only] = process.argv.slice(2);
const ROOM = { x: 90, y: 150, width: 1400, height: 780 }; // of the page's 1680 x 950, free of menus
const MARGIN = 14;

const settings = { "Comfy.Locale": language, "Comfy.Minimap.Visible": false, "Comfy.Graph.CanvasInfo": false };
await fetch(`${url}/settings`, {
  method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(settings),
});

/** Build the graph in the page: nodes by columns, values, links. */
function build({ columns, helpers = [] }) {
  const made = {};
  const graph = window.app.graph;
  graph.clear();
  window.app.nodeOutputs = {}; // of the nodes that had these ids before
  window.app.nodePreviewImages = {};
  for (const spec of [...columns.flat(), ...helpers]) {
    const node = window.LiteGraph.createNode(spec.type);
    graph.add(node);
    made[spec.id] = node;
    for (const [name, value] of Object.entries(spec.values ?? {})) {
      const widget = node.widgets.find((candidate) => candidate.name === name);
      widget.value = value;
      widget.callback?.(value);
    }
    if (spec.size) node.setSize(spec.size);
  }
  for (const spec of [...columns.flat(), ...helpers]) {
    for (const [name, source] of Object.entries(spec.inputs ?? {})) {
      const target = made[spec.id];
      const slot = target.findInputSlot(name);
      const from = made[source];
      const fitting = from.outputs.findIndex((candidate) => candidate.type === target.inputs[slot].type);
      from.connect(Math.max(0, fitting), target, slot);
    }
  }
  window.pictured = columns.map((column) => column.map(({ id, collapsed }) => {
    if (collapsed) made[id].collapse();
    return made[id];
  }));
  window.helpers = helpers.map(({ id }) => made[id]);
}

/** Put the nodes where they belong, with the sizes that they have now, and return the picture's size at scale 1. */
function arrange() {
  const TITLE = 30, GAP_X = 70, GAP_Y = 26;
  let x = 0, height = 0;
  for (const column of window.pictured) {
    let y = TITLE, width = 0;
    for (const node of column) {
      node.pos = [x, y];
      const [nodeWidth, nodeHeight] = node.flags.collapsed ? [node._collapsed_width ?? 140, 0] : node.size;
      width = Math.max(width, nodeWidth);
      y += nodeHeight + TITLE + GAP_Y;
    }
    x += width + GAP_X;
    height = Math.max(height, y - TITLE - GAP_Y);
  }
  return [x - GAP_X, height + 4];
}

async function place(page, [width, height]) {
  const scale = Math.min(1, ROOM.width / width, ROOM.height / height);
  await page.evaluate(([zoom, { x, y }]) => {
    const { ds } = window.app.canvas;
    ds.scale = zoom;
    ds.offset = [x / zoom, y / zoom];
    window.app.canvas.deselectAll();
    window.app.canvas.setDirty(true, true);
  }, [scale, ROOM]);
  await page.waitForTimeout(900);
  return scale;
}

async function run(page) {
  const forget = JSON.stringify({ free_memory: true }); // what is cached shows no previews
  await fetch(`${url}/free`, { method: "POST", headers: { "Content-Type": "application/json" }, body: forget });
  await page.evaluate(() => {
    window.ended = null;
    for (const event of ["execution_success", "execution_error", "execution_interrupted"]) {
      window.app.api.addEventListener(event, ({ detail }) => { window.ended = [event, detail.exception_message]; }, { once: true });
    }
    return window.app.queuePrompt(0);
  });
  await page.waitForFunction(() => window.ended, null, { timeout: 600_000 }); // a busy machine takes its time
  const [event, why] = await page.evaluate(() => window.ended);
  if (event !== "execution_success") throw new Error(`${event}: ${why}`);
  await page.waitForTimeout(3000); // the page loads results and previews
  await page.evaluate(() => window.helpers.forEach((node) => window.app.graph.remove(node)));
  await page.waitForTimeout(800);
}

async function picture(page, name) {
  await page.evaluate(build, GRAPHS[name]);
  await page.waitForTimeout(1200); // the timeline asks the server
  if (GRAPHS[name].run) await run(page);
  await place(page, await page.evaluate(arrange)); // collapsed widths are known once drawn
  const size = await page.evaluate(arrange);
  const scale = await place(page, size);
  const [width, height] = size.map((side) => Math.ceil(side * scale) + 2 * MARGIN);
  await page.screenshot({
    path: join(folder, `${name}.png`),
    clip: { x: ROOM.x - MARGIN, y: ROOM.y - MARGIN - 22 * scale, width, height: height + 22 * scale },
  });
}

const seen = await inEditor({ url, executablePath }, async (page) => {
  const names = only.length ? only : Object.keys(GRAPHS);
  for (const name of names) await picture(page, name);
  return { names };
});
if (seen.messages.length) console.error(seen.messages.join("\n"));
