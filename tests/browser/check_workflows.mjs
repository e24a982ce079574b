// Opens workflow files in the editor, and reports what came of each as JSON.
//   node check_workflows.mjs URL CHROMIUM FOLDER_FOR_SCREENSHOTS FILE...
import { readFileSync } from "node:fs";
import { basename, join } from "node:path";
import { fitView, inEditor } from "./editor.mjs";

const MODULE = "/extensions/ComfyUI-FlashForward/js/extension.js";
const [url, executablePath, folder, ...files] = process.argv.slice(2);

/** What every Plan's timeline knows of what comes from elsewhere: the seconds that are given, the chunks that start anew. */
async function timelines(page) {
  await page.waitForFunction(async (path) => {
    const { timelineFor } = await import(path);
    const plans = window.app.graph.nodes.filter((node) => node.type === "FlashForwardPlan").map(timelineFor);
    return plans.every(({ asked, answered, view, index }) => asked && asked === answered && (index || view.error));
  }, MODULE, { polling: 150, timeout: 20_000 });
  return page.evaluate(async (path) => {
    const { timelineFor } = await import(path);
    const { readsOf } = await import(path.replace("extension.js", "timeline_model.js"));
    const scenes = ({ parts }) =>
      parts.at(-1).graph.tasks.filter((task) => task.role === "renderer" && task.stage === 0 && !readsOf(task).chunks.size);
    const plans = window.app.graph.nodes.filter((node) => node.type === "FlashForwardPlan");
    return Object.fromEntries(plans.map((node) => {
      const { index, view } = timelineFor(node);
      return [node.id, { error: view.error, start: index.video.start_seconds, scenes: scenes(index).map((task) => task.index) }];
    }));
  }, MODULE);
}

async function open(page, file) {
  const graph = JSON.parse(readFileSync(file, "utf-8"));
  await page.evaluate((data) => window.app.loadGraphData(data), graph);
  await fitView(page);
  const plans = await timelines(page);
  await page.screenshot({ path: join(folder, `${basename(file, ".json")}.png`) });
  const seen = await page.evaluate(async () => ({
    saved: window.app.graph.serialize(),
    prompt: (await window.app.graphToPrompt()).output,
    missing: window.app.graph.nodes.filter((node) => node.has_errors || !node.constructor.type).map((node) => node.type),
  }));
  return { ...seen, plans };
}

const seen = await inEditor({ url, executablePath }, async (page) => {
  const opened = {};
  for (const file of files) opened[basename(file, ".json")] = await open(page, file);
  return { opened };
});
console.log(JSON.stringify(seen));
