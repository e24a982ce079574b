// Opens the editor, loads a workflow from the template browser, and reports what came of it as JSON.
//   node check_editor.mjs URL CHROMIUM SCREENSHOT
import { chromium } from "playwright-core";

const PACK = "ComfyUI-FlashForward";
const WORKFLOW = "quickstart";
const FLAGS = [
  "--headless",
  "--no-sandbox",
  "--disable-gpu",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
];
const [url, executablePath, screenshot] = process.argv.slice(2);

async function openEditor(page) {
  const settings = JSON.stringify({ "Comfy.TutorialCompleted": true });
  await fetch(`${url}/settings`, { method: "POST", headers: { "Content-Type": "application/json" }, body: settings });
  await page.goto(url);
  await page.waitForFunction(
    () => window.app?.graph && window.LiteGraph?.registered_node_types.FlashForwardRender,
    null,
    { timeout: 90_000 },
  );
}

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

const browser = await chromium.launch({ executablePath, args: FLAGS });
try {
  const page = await browser.newPage({ viewport: { width: 1680, height: 950 } });
  const messages = [];
  page.on("console", (message) => {
    if (["error", "warning"].includes(message.type())) {
      messages.push(`${message.location().url} ${message.text()}`);
    }
  });
  page.on("pageerror", (error) => messages.push(`${error.message} ${error.stack}`));
  await openEditor(page);
  await loadTemplate(page);
  await page.evaluate(() => window.app.extensionManager.command.execute("Comfy.Canvas.FitView"));
  await page.waitForTimeout(1000);
  await page.screenshot({ path: screenshot });
  const prompt = await page.evaluate(async () => (await window.app.graphToPrompt()).output);
  const missing = await page.evaluate(() =>
    window.app.graph.nodes.filter((node) => node.has_errors || !node.constructor.type).map((node) => node.type),
  );
  // ComfyUI's own complaints are not ours: no user.css, and api.comfy.org, which it asks about every node.
  const ours = messages.filter((text) => /flashforward/i.test(text) && !text.includes("api.comfy.org"));
  console.log(JSON.stringify({ prompt, missing, messages: ours }));
} finally {
  await browser.close();
}
