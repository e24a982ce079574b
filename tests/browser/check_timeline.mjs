// Drives the Plan node's timeline as an artist would, and reports what it showed as JSON.
//   node check_timeline.mjs URL CHROMIUM WORKFLOW.json FOLDER
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { fitView, inEditor } from "./editor.mjs";

const [url, executablePath, workflow, folder] = process.argv.slice(2);
const MODULE = "/extensions/ComfyUI-FlashForward/js/extension.js";
const [ALWAYS, MUTED, BYPASSED] = [0, 2, 4]; // LiteGraph's modes of nodes
const PATIENCE = { timeout: 20_000 };
const LONG = { timeout: 180_000 }; // for what is computed: a busy machine takes its time

/** Load the workflow and put the Plan node and its timeline into the page's globals. */
async function load(page) {
  await page.evaluate((graph) => window.app.loadGraphData(graph), JSON.parse(readFileSync(workflow, "utf8")));
  await page.evaluate(async (path) => {
    const { timelineFor } = await import(path);
    window.planNode = window.app.graph.nodes.find((node) => node.type === "FlashForwardPlan");
    window.timeline = timelineFor(window.planNode);
  }, MODULE);
  await settled(page);
  await fitView(page);
}

/** Wait until the answer to the latest change is drawn. */
async function settled(page) {
  await page.waitForFunction(() => {
    const { timeline } = window;
    timeline.check();
    const { view, index, answered, asked } = timeline;
    const now = answered === asked && (index !== null || view.error) && !view.pending && view.draws;
    const isSame = now && window.lastDraws === view.draws;
    window.lastDraws = view.draws;
    return isSame;
  }, null, { polling: 150, ...PATIENCE });
}

const set = async (page, name, value) => {
  await page.evaluate(([widgetName, to]) => {
    const widget = window.planNode.widgets.find((candidate) => candidate.name === widgetName);
    widget.value = to;
    widget.callback?.(to);
  }, [name, value]);
  await settled(page);
};

/** What the timeline shows now: the model's state and the pixels. */
const look = (page) =>
  page.evaluate(() => {
    const { index, view, runs } = window.timeline;
    return {
      error: view.error,
      rounds: index.totals.rounds,
      anchors: index.video.anchors,
      lanes: view.view.area.count,
      tasks: view.view.tasks.length,
      measured: view.view.tasks.filter((task) => task.box).length,
      pictures: view.view.chunks.filter((chunk) => chunk.picture).length,
      states: [runs.planner?.state, runs.render?.state],
      pixels: view.canvas.toDataURL(),
      density: view.canvas.width / view.element.clientWidth,
      values: window.planNode.serialize().widgets_values,
      height: window.planNode.size[1],
      minimum: window.planNode.computeSize()[1],
    };
  });

async function connectDevices(page, devices) {
  await page.evaluate((text) => {
    const node = window.LiteGraph.createNode("FlashForwardDevices");
    node.pos = [40, 620];
    window.app.graph.add(node);
    node.widgets.find((widget) => widget.name === "devices").value = text;
    node.connect(0, window.planNode, window.planNode.findInputSlot("devices"));
    window.devicesNode = node;
  }, devices);
  await settled(page);
}

/** Mute or bypass the Devices node, or let it run again. */
async function setMode(page, mode) {
  await page.evaluate((to) => {
    window.devicesNode.mode = to;
  }, mode);
  await settled(page);
  return look(page);
}

async function hoverChunk(page, chunk) {
  const at = await page.evaluate((index) => {
    const box = window.timeline.view.canvas.getBoundingClientRect();
    const { chunks, width } = window.timeline.view.view;
    const zoom = box.width / width;
    return [box.x + (chunks[index].x + chunks[index].w / 2) * zoom, box.y + (chunks[index].y + 6) * zoom];
  }, chunk);
  await page.mouse.move(...at);
  await page.waitForTimeout(300);
  const hover = await page.evaluate(() => window.timeline.view.hover);
  return { hover, ...(await look(page)) };
}

/** The saved values of every node. */
const savedValues = (page) =>
  page.evaluate(() => window.app.graph.serialize().nodes.map(({ type, widgets_values: values }) => [type, values]));

async function setPalette(page, name) {
  await page.evaluate((palette) => window.app.extensionManager.setting.set("Comfy.ColorPalette", palette), name);
  await page.waitForTimeout(700);
}

/** Run the workflow and note how many tasks were shown as measured while it ran. */
async function run(page) {
  const counts = [];
  await page.evaluate(() => window.app.queuePrompt(0));
  for (let tries = 0; tries < 1800; tries += 1) {
    const { states, measured } = await look(page);
    if (counts.at(-1) !== measured) counts.push(measured);
    if (states[1] === "done") break;
    await page.waitForTimeout(100);
  }
  return counts;
}

/** Play the video that Decode & Save Video shows, for a moment. */
async function play(page) {
  await page.waitForFunction(() => document.querySelector("video")?.readyState >= 2, null, LONG);
  return page.evaluate(async () => {
    const video = document.querySelector("video");
    video.muted = true;
    await video.play();
    await new Promise((resolve) => setTimeout(resolve, 500));
    return { width: video.videoWidth, height: video.videoHeight, length: video.duration, at: video.currentTime };
  });
}

/** Show or fold the expert inputs; what the Plan node shows and saves then. */
const fold = (page) =>
  page.evaluate(() => {
    const node = window.planNode;
    node.widgets.find((widget) => widget.name === "more inputs").callback();
    const shown = node.widgets.filter((widget) => !widget.hidden).map((widget) => widget.name);
    const saved = node.serialize();
    return { shown, values: saved.widgets_values, state: saved.showAdvanced ?? false };
  });

/** How high the Plan's text is, and the place that it has on the node. */
const shownText = (page) =>
  page.evaluate(() => {
    const place = [...document.querySelectorAll(".dom-widget")].find((each) => each.innerText.includes("latent frames in"));
    const text = place.firstElementChild;
    const widget = window.planNode.widgets.find(({ name }) => name === "$$node-text-preview");
    return {
      lines: widget.value.split("\n").length,
      needs: text.scrollHeight,
      has: Math.min(text.clientHeight, place.clientHeight),
      bottom: widget.y + widget.computedHeight,
      node: window.planNode.size[1],
    };
  });

async function save(page, title) {
  const [download] = await Promise.all([
    page.waitForEvent("download", PATIENCE),
    page.evaluate((content) => {
      const items = window.app.collectNodeMenuItems(window.planNode);
      items.find((item) => item?.content === content).callback();
    }, title),
  ]);
  const path = join(folder, download.suggestedFilename());
  await download.saveAs(path);
  return path;
}

const seen = await inEditor({ url, executablePath }, async (page) => {
  const told = {};
  await setPalette(page, "dark");
  await load(page);
  told.first = await look(page);
  told.unfolded = await fold(page);
  told.folded = await fold(page);
  await settled(page);
  await set(page, "anchor_stride", 2);
  told.denser = await look(page);
  await set(page, "anchor_stride", 10);
  told.again = await look(page);
  await set(page, "sink", 30);
  told.wrong = await look(page);
  await set(page, "sink", 0);
  await connectDevices(page, "cpu*4");
  told.four = await look(page);
  await page.evaluate(() => {
    window.devicesNode.widgets.find((widget) => widget.name === "devices").value = "cpu*2";
  });
  await settled(page);
  told.two = await look(page);
  told.off = [];
  for (const mode of [MUTED, BYPASSED]) told.off.push((await setMode(page, mode)).lanes);
  await setMode(page, ALWAYS);
  told.hover = await hoverChunk(page, 2);
  await page.mouse.move(5, 400);
  const before = await savedValues(page);
  told.live = await run(page);
  told.saved = { before, after: await savedValues(page) };
  told.ran = await look(page);
  told.text = await shownText(page);
  told.video = await play(page);
  await page.screenshot({ path: join(folder, "dark.png") });
  await setPalette(page, "light");
  told.light = await look(page);
  await page.screenshot({ path: join(folder, "light.png") });
  await setPalette(page, "dark");
  await page.evaluate(() => {
    window.app.canvas.ds.scale *= 2;
    window.app.canvas.ds.offset = [-window.planNode.pos[0] + 40, -window.planNode.pos[1] + 40];
    window.app.canvas.setDirty(true, true);
  });
  await page.waitForTimeout(1000);
  told.near = await look(page);
  told.files = [];
  for (const kind of ["PNG", "JSON", "Chrome trace"]) told.files.push(await save(page, `Save timeline as ${kind}`));
  await set(page, "seconds", 3);
  told.changed = await look(page);
  return told;
});
console.log(JSON.stringify(seen));
