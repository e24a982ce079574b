// Puts the timeline on Plan nodes: asks the server for a plan when a value changes, and shows runs as they happen.

import { app } from "../../../scripts/app.js";
import { api } from "../../../scripts/api.js";
import { FOLD, foldAdvanced } from "./folding.js";
import { requestOf, typeOf } from "./plan_request.js";
import { fitShownText } from "./shown_text.js";
import { applyDone, applyPictures, applySpans, applyStop, indexPlan, noRuns, numLanes, wantedHeight } from "./timeline_model.js";
import { TimelineView } from "./timeline_view.js";
import { chromeTrace, exportJson } from "./timeline_words.js";
import { speaker, speakerFor } from "./words.js";

const PLAN = "FlashForwardPlan";
const WIDGET = "flashforward_timeline";
const SHOW_VIDEO = ["FlashForwardDecodeVideo", "FlashForwardRenderVideo"];
const DEBOUNCE_MS = 120;
const WIDTH = 340; // of a new Plan: the timeline's lines fit; a saved one has its own
const VIDEO_LOADS_MS = [300, 1000, 3000]; // when a finished video may have been put on its node
const MENU = ["png", "json", "trace"];
const timelines = new Map(); // Plan node -> its Timeline
let say = speaker({}); // until the words are there

/** The page's words, in the language that the editor has. */
async function loadWords() {
  const response = await api.fetchApi("/i18n");
  if (response.ok) say = speakerFor(await response.json(), app.extensionManager?.setting?.get("Comfy.Locale") ?? "en");
}

class Timeline {
  constructor(node) {
    this.node = node;
    this.view = new TimelineView({ zoom: () => app.canvas.ds.scale, say });
    this.runs = noRuns();
    this.index = null;
    this.asked = ""; // the latest request
    this.answered = ""; // the request that what is shown answers
    this.run = ""; // the latest run
    this.answer = ""; // to that request
    this.ran = ""; // the request that stood when what is shown as measured began to run
    this.ranAnswer = ""; // to that request, once known
    this.timer = 0;
    this.abort = null;
    const options = { serialize: false, hideOnZoom: false, getMinHeight: () => this.height(), getValue: () => "", setValue() {} };
    this.widget = node.addDOMWidget(WIDGET, "flashforward", this.view.element, options);
    this.widget.serialize = false;
    this.view.canvas.addEventListener("wheel", (event) => app.canvas.processMouseWheel(event));
  }

  height() {
    return wantedHeight(this.index ? numLanes(this.index, this.runs) : 1);
  }

  /** Ask for a new plan if a value has changed; the last of several quick changes wins. */
  check() {
    this.view.checkZoom();
    const body = JSON.stringify(requestOf(this.node));
    if (body === this.asked) return;
    this.asked = body;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask(body), DEBOUNCE_MS);
  }

  async ask(body) {
    this.abort?.abort();
    this.abort = new AbortController();
    try {
      const options = { method: "POST", body, headers: { "Content-Type": "application/json" }, signal: this.abort.signal };
      const response = await api.fetchApi("/flashforward/plan", options);
      const answer = await response.text();
      if (body === this.asked) this.take(body, response.ok, answer);
    } catch (error) {
      if (error.name !== "AbortError" && body === this.asked) this.view.setError(say("error.silent"));
    }
  }

  take(body, isPlan, text) {
    const answer = JSON.parse(text);
    this.answered = body;
    this.answer = text;
    if (!isPlan) {
      this.view.setError(answer.error ?? say("error.unclear"));
      return;
    }
    this.index = indexPlan(answer);
    if (body === this.ran) this.ranAnswer = text;
    if (text !== this.ranAnswer) this.setRuns(noRuns()); // what ran was another plan, not only other words
    this.view.setPlan(this.index);
    this.fit();
  }

  setRuns(runs) {
    this.runs = runs;
    this.view.setRuns(runs);
  }

  /** Take in an event of a run. */
  follow(apply, event) {
    this.setRuns(apply(this.runs, event));
    if (event.run === this.run) return;
    this.run = event.run;
    this.check(); // a value may have changed right before the run
    this.ran = this.asked;
    this.ranAnswer = this.answered === this.asked ? this.answer : "";
  }

  /** Make room for the lanes; never take any away that the artist gave. */
  fit() {
    this.view.element.style.minHeight = `${this.height()}px`; // where the page lays the node out
    const [width, height] = this.node.computeSize();
    if (this.node.size[1] < height) this.node.setSize([Math.max(this.node.size[0], width), height]);
    this.node.setDirtyCanvas(true, true);
  }

  async export(kind) {
    const png = kind === "png";
    const text = { json: exportJson, trace: chromeTrace }[kind]?.(this.index, this.runs);
    const blob = png ? await this.view.toPng() : new Blob([text], { type: "application/json" });
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = { png: "timeline.png", json: "timeline.json", trace: "timeline-trace.json" }[kind];
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  dispose() {
    clearTimeout(this.timer);
    this.abort?.abort();
    this.view.dispose();
  }
}

/** Find the timeline of a Plan by the id that the server knows, which is a path through subgraphs. */
function timelineOf(id) {
  for (const [node, timeline] of timelines) {
    if (String(node.id) === String(id).split(":").at(-1) && node.graph) return timeline;
  }
  return null;
}

function follow(event, apply) {
  api.addEventListener(event, ({ detail }) => {
    const timeline = timelineOf(detail.plan);
    timeline?.follow(apply, detail);
  });
}

/** Run `after` whenever a method has run. */
function chain(target, name, after) {
  const before = target[name];
  target[name] = function (...rest) {
    const result = before?.apply(this, rest);
    after(...rest);
    return result;
  };
}

/**
 * Save no values of widgets that only show something (texts, pictures, the timeline): values are saved by position, so
 * those would land in an input that a later version appends.
 */
function saveInputsOnly(node) {
  chain(node, "onSerialize", (saved) => {
    const shown = node.widgets?.findIndex((widget) => [WIDGET, FOLD].includes(widget.name) || widget.name.startsWith("$$")) ?? -1;
    if (shown >= 0) saved.widgets_values = saved.widgets_values?.slice(0, shown);
  });
}

function attach(node) {
  const timeline = new Timeline(node);
  timelines.set(node, timeline);
  if (node.size[0] < WIDTH) node.setSize([WIDTH, node.size[1]]);
  const soon = () => queueMicrotask(() => timeline.check());
  for (const widget of node.widgets ?? []) if (widget !== timeline.widget) chain(widget, "callback", soon);
  chain(node, "onConfigure", soon);
  chain(node, "onConnectionsChange", soon);
  chain(node, "onDrawForeground", () => timeline.check()); // also sees what changes on other nodes
  chain(node, "onRemoved", () => {
    timeline.dispose();
    timelines.delete(node);
  });
  soon();
}

/**
 * Draw the graph again once a video is there: the editor puts it on the node without a redraw, and until there is one, such
 * as for a moving pointer, the video covers the page.
 */
function redrawWithVideo(node) {
  const redraw = () => node.setDirtyCanvas(true, true);
  chain(node, "onExecuted", () => VIDEO_LOADS_MS.forEach((delay) => setTimeout(redraw, delay)));
}

function repaintOnThemeChange() {
  const repaint = () => timelines.forEach(({ view }) => view.invalidate());
  const observer = new MutationObserver(repaint);
  for (const element of [document.documentElement, document.body]) {
    observer.observe(element, { attributes: true, attributeFilter: ["class", "style"] });
  }
}

app.registerExtension({
  name: "FlashForward.Timeline",

  init: loadWords,

  setup() {
    follow("flashforward.span", applySpans);
    follow("flashforward.preview", applyPictures);
    follow("flashforward.done", applyDone);
    for (const end of ["execution_interrupted", "execution_error"]) {
      api.addEventListener(end, () => timelines.forEach((timeline) => timeline.setRuns(applyStop(timeline.runs))));
    }
    repaintOnThemeChange();
  },

  nodeCreated(node) {
    if (!String(typeOf(node)).startsWith("FlashForward")) return;
    saveInputsOnly(node);
    foldAdvanced(node, say);
    chain(node, "onDrawForeground", () => fitShownText(node));
    if (typeOf(node) === PLAN) attach(node);
    if (SHOW_VIDEO.includes(typeOf(node))) redrawWithVideo(node);
  },

  getNodeMenuItems(node) {
    const timeline = timelines.get(node);
    if (!timeline?.index) return [];
    return MENU.map((kind) => ({ content: say(`menu.${kind}`), callback: () => timeline.export(kind) }));
  },
});

/** For the browser's console and tests: what the timeline of a Plan node shows. */
export function timelineFor(node) {
  return timelines.get(node) ?? null;
}
