// Opening ComfyUI's editor in a browser, for the checks.
import { chromium } from "playwright-core";

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

/** Run `check(page)` in a fresh editor and return its answer with the console messages that are ours. */
export async function inEditor({ url, executablePath }, check) {
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
    await openEditor(page, url);
    const answer = await check(page);
    // ComfyUI's own complaints are not ours: no user.css, and api.comfy.org, which it asks about every node.
    const ours = messages.filter((text) => /flashforward/i.test(text) && !text.includes("api.comfy.org"));
    return { ...answer, messages: ours };
  } finally {
    await browser.close();
  }
}

async function openEditor(page, url) {
  const settings = JSON.stringify({ "Comfy.TutorialCompleted": true });
  await fetch(`${url}/settings`, { method: "POST", headers: { "Content-Type": "application/json" }, body: settings });
  await page.goto(url);
  await page.waitForFunction(
    () => window.app?.graph && window.LiteGraph?.registered_node_types.FlashForwardRender,
    null,
    { timeout: 90_000 },
  );
}

/** Show the whole graph and let it settle. */
export async function fitView(page) {
  await page.evaluate(() => window.app.extensionManager.command.execute("Comfy.Canvas.FitView"));
  await page.waitForTimeout(1000);
}
