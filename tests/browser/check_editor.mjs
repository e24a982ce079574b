// Loads a workflow from the template browser, and reports what came of it as JSON.
//   node check_editor.mjs URL CHROMIUM SCREENSHOT
import { fitView, inEditor } from "./editor.mjs";

const PACK = "ComfyUI-FlashForward";
const WORKFLOW = "quickstart";
const [url, executablePath, screenshot] = process.argv.slice(2);

async function loadTemplate(page) {
  await page.evaluate(() => window.app.extensionManager.command.execute("Comfy.BrowseTemplates"));
  const dialog = page.getByRole("dialog");
  await dialog.getByText(PACK, { exact: true }).first().click();
  await dialog.getByText(WORKFLOW, { exact: true }).first().click();
  await page.waitForFunction(
    () => window.app.graph.nodes.some((node) => node.type === "FlashForwardRender"),
    null,
    { timeout: 30_000 },
  );
  await page.waitForTimeout(1000); // let widgets draw before the screenshot
}

const seen = await inEditor({ url, executablePath }, async (page) => {
  await loadTemplate(page);
  await fitView(page);
  await page.screenshot({ path: screenshot });
  const prompt = await page.evaluate(async () => (await window.app.graphToPrompt()).output);
  const missing = await page.evaluate(() =>
    window.app.graph.nodes.filter((node) => node.has_errors || !node.constructor.type).map((node) => node.type),
  );
  return { prompt, missing };
});
console.log(JSON.stringify(seen));
