// Opens workflow files in the editor, and reports what came of each as JSON.
//   node check_workflows.mjs URL CHROMIUM FOLDER_FOR_SCREENSHOTS FILE...
import { readFileSync } from "node:fs";
import { basename, join } from "node:path";
import { fitView, inEditor } from "./editor.mjs";

const [url, executablePath, folder, ...files] = process.argv.slice(2);

async function open(page, file) {
  const graph = JSON.parse(readFileSync(file, "utf-8"));
  await page.evaluate((data) => window.app.loadGraphData(data), graph);
  await fitView(page);
  await page.screenshot({ path: join(folder, `${basename(file, ".json")}.png`) });
  return page.evaluate(async () => ({
    saved: window.app.graph.serialize(),
    prompt: (await window.app.graphToPrompt()).output,
    missing: window.app.graph.nodes.filter((node) => node.has_errors || !node.constructor.type).map((node) => node.type),
  }));
}

const seen = await inEditor({ url, executablePath }, async (page) => {
  const opened = {};
  for (const file of files) opened[basename(file, ".json")] = await open(page, file);
  return { opened };
});
console.log(JSON.stringify(seen));
