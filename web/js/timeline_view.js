// Draws a timeline on a canvas and follows the pointer. It draws when something has changed and can be seen, never else.

import { SIZES, highlights, hitTest, isLit, layout, noRuns, sameItem } from "./timeline_model.js";
import { describe, headline } from "./timeline_words.js";

const FONT = "11px Inter, system-ui, sans-serif";
const DARK = {
  planner: "#e8a33d",
  commit: "#b58cd9",
  stages: ["#3f74bd", "#3f9bc0", "#48b99a", "#a8d15c"],
  error: "#ff8a7a",
};
const LIGHT = {
  planner: "#c77f12",
  commit: "#8a5cb8",
  stages: ["#2c5796", "#2c86a8", "#2f9277", "#6f9f2a"],
  error: "#b3261e",
};

/** Read the editor's colours, and choose a palette that shows on them. */
export function readTheme(element, context) {
  const style = getComputedStyle(element);
  const read = (name, otherwise) => style.getPropertyValue(name).trim() || otherwise;
  const background = read("--comfy-input-bg", "#222222");
  context.fillStyle = "#222222";
  context.fillStyle = background; // a colour that cannot be read leaves the one before
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(String(context.fillStyle).slice(at, at + 2), 16));
  const isDark = !(0.2126 * r + 0.7152 * g + 0.0722 * b > 128);
  return {
    ...(isDark ? DARK : LIGHT),
    isDark,
    background,
    text: read("--input-text", isDark ? "#dddddd" : "#222222"),
    muted: read("--descrip-text", "#888888"),
    line: read("--border-color", "#888888"),
  };
}

const toneColour = (theme, tone) => theme[tone] ?? theme.stages[Number(tone.slice(5)) % theme.stages.length];

function fitText(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let end = text.length;
  while (end > 1 && context.measureText(`${text.slice(0, end)}…`).width > width) end -= 1;
  return `${text.slice(0, end)}…`;
}

/** Break a text into at most `count` lines. */
function wrap(context, text, width, count) {
  const lines = [""];
  for (const word of text.split(" ")) {
    const longer = lines.at(-1) ? `${lines.at(-1)} ${word}` : word;
    if (lines.length < count && lines.at(-1) && context.measureText(longer).width > width) lines.push(word);
    else lines[lines.length - 1] = longer;
  }
  return lines.map((line) => fitText(context, line, width));
}

export class TimelineView {
  /** `zoom` tells how much the page enlarges the element; `say` is a speaker of words.js. */
  constructor({ zoom, say }) {
    this.zoom = zoom;
    this.say = say;
    this.element = document.createElement("div");
    this.element.className = "flashforward-timeline";
    this.element.style.cssText = "position:relative;width:100%;height:100%;overflow:hidden";
    this.canvas = document.createElement("canvas");
    this.canvas.style.cssText = "position:absolute;inset:0;width:100%;height:100%;border-radius:6px";
    this.element.append(this.canvas);
    this.index = null;
    this.runs = noRuns();
    this.error = "";
    this.hover = null;
    this.view = null;
    this.draws = 0;
    this.drawnRatio = 0;
    this.images = new Map();
    this.visible = true;
    this.pending = 0;
    this.watch();
  }

  watch() {
    this.resizes = new ResizeObserver(() => this.invalidate());
    this.resizes.observe(this.element);
    this.sights = new IntersectionObserver((entries) => {
      this.visible = entries.at(-1).isIntersecting;
      if (this.visible) this.invalidate();
    });
    this.sights.observe(this.element);
    this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX, event.offsetY));
    this.canvas.addEventListener("pointerleave", () => this.point(-1, -1));
  }

  dispose() {
    this.resizes.disconnect();
    this.sights.disconnect();
    cancelAnimationFrame(this.pending);
  }

  /** Show another plan; the pointer keeps what it is on where that still exists. */
  setPlan(index) {
    this.index = index;
    this.error = "";
    this.invalidate();
  }

  setError(text) {
    this.error = text;
    this.invalidate();
  }

  setRuns(runs) {
    this.runs = runs;
    this.invalidate();
  }

  point(x, y) {
    const item = this.view && hitTest(this.view, x, y);
    if (item === this.hover) return;
    this.hover = item;
    this.invalidate();
  }

  /** Draw again with the next frame, if it can be seen then. */
  invalidate() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      if (this.visible && this.element.clientWidth) this.draw();
    });
  }

  /** Pixels per CSS pixel, with the graph's zoom. */
  ratio() {
    return Math.min(4, Math.max(0.5, this.zoom() * (window.devicePixelRatio || 1)));
  }

  /** Draw again when the graph's zoom has changed: a scaled picture is blurred. */
  checkZoom() {
    if (this.ratio() !== this.drawnRatio) this.invalidate();
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.element;
    const ratio = this.ratio();
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.paint(this.canvas.getContext("2d"), { width, height, ratio });
    this.drawnRatio = ratio;
    this.draws += 1;
  }

  /** Paint everything on a context; also what is saved as a PNG. */
  paint(context, { width, height, ratio }) {
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const theme = readTheme(this.element, context);
    context.fillStyle = theme.background;
    context.fillRect(0, 0, width, height);
    context.font = FONT;
    context.textBaseline = "middle";
    this.view = this.index ? layout({ index: this.index, runs: this.runs, width, height }) : null;
    if (this.view) {
      this.hover = sameItem(this.view, this.hover);
      context.globalAlpha = this.error ? 0.25 : 1;
      this.paintView(context, theme);
      context.globalAlpha = 1;
    }
    if (this.error) this.paintError(context, theme, { width, height });
  }

  paintView(context, theme) {
    const { view, index } = this;
    const lit = this.hover ? highlights(index, this.hover) : null;
    const text = (words, x, y, colour, room) => {
      context.fillStyle = colour;
      context.fillText(fitText(context, words, room), x, y);
    };
    const room = view.width - 2 * SIZES.pad;
    headline(index, this.runs, this.say).forEach((words, order) => {
      text(words, SIZES.pad, SIZES.pad + 6 + order * SIZES.line, order ? theme.muted : theme.text, room);
    });
    this.paintStrip(context, theme, lit);
    this.paintLanes(context, theme, lit);
    if (!this.hover) paintLegend(context, theme, this);
    const told = wrap(context, describe(index, this.hover, this.say), room, 2);
    told.forEach((words, order) => text(words, SIZES.pad, view.infoY - 2 + order * SIZES.line, theme.text, room));
  }

  paintStrip(context, theme, lit) {
    for (const chunk of this.view.chunks) {
      const isHovered = this.hover?.kind === "chunk" && this.hover.index === chunk.index;
      const isRead = isHovered || lit?.chunks.has(chunk.index);
      context.fillStyle = toneColour(theme, "stage1");
      fade(context, this.error ? 0.1 : isRead ? 0.9 : lit ? 0.18 : 0.4, () => {
        context.fillRect(chunk.x, chunk.y, Math.max(0.5, chunk.w - 1), chunk.h);
      });
      if (chunk.picture) fade(context, lit && !isRead ? 0.35 : 1, () => this.paintPicture(context, chunk));
      if (isRead) outline(context, chunk, isHovered ? theme.text : toneColour(theme, "stage3"));
    }
    for (const anchor of this.view.anchors) {
      const isRead = lit?.anchors.has(anchor.index);
      context.fillStyle = theme.planner;
      fade(context, isRead || !lit ? 1 : 0.3, () => triangle(context, anchor, isRead ? 1.35 : 1));
    }
  }

  paintPicture(context, chunk) {
    const image = this.image(chunk.picture);
    if (!image.complete || !image.naturalWidth) return;
    const { naturalWidth: width, naturalHeight: height } = image;
    const shown = Math.min(width, (height * chunk.w) / chunk.h);
    context.drawImage(image, (width - shown) / 2, 0, shown, height, chunk.x, chunk.y, Math.max(0.5, chunk.w - 1), chunk.h);
  }

  image(url) {
    if (!this.images.has(url)) {
      const image = new Image();
      image.onload = () => this.invalidate();
      image.src = url;
      this.images.set(url, image);
    }
    return this.images.get(url);
  }

  paintLanes(context, theme, lit) {
    const { view } = this;
    for (const lane of view.lanes) {
      const isHovered = this.hover?.kind === "lane" && this.hover.index === lane.index;
      context.fillStyle = isHovered ? theme.text : theme.muted;
      context.fillText(fitText(context, lane.text, SIZES.gutter - 4), lane.x, lane.y + lane.h / 2);
      context.fillStyle = theme.line;
      fade(context, 0.35, () => context.fillRect(view.area.x, lane.y + lane.h - 1, view.area.w, 1));
    }
    if (view.sections.length > 1) {
      for (const section of view.sections) {
        context.fillStyle = theme.muted;
        context.fillText(fitText(context, this.say(`part.${section.key}`), section.w), section.x, view.area.y - SIZES.line / 2);
      }
    }
    for (const task of view.tasks) this.paintTask(context, theme, task, lit);
  }

  paintTask(context, theme, task, lit) {
    const colour = toneColour(theme, task.tone);
    const hasRun = this.runs[task.part] !== null;
    const strength = lit && !isLit(lit, task) ? 0.2 : 1;
    context.fillStyle = colour;
    fade(context, strength * (hasRun ? 0.28 : 0.75), () => bar(context, task.ghost));
    if (task.box) fade(context, strength, () => bar(context, task.box));
    if (this.hover?.kind === "task" && this.hover.task === task.task && this.hover.part === task.part) {
      outline(context, task.box ?? task.ghost, theme.text);
    }
    const box = task.box ?? task.ghost;
    if (box.w > 9 + 5 * task.label.length && box.h > 9) {
      context.fillStyle = hasRun && !task.box ? theme.muted : theme.isDark ? "#101418" : "#ffffff";
      fade(context, strength, () => context.fillText(task.label, box.x + 3, box.y + box.h / 2));
    }
  }

  paintError(context, theme, { width, height }) {
    context.fillStyle = theme.error;
    const lines = wrap(context, this.error, width - 2 * SIZES.pad, 4);
    const top = height / 2 - ((lines.length - 1) * SIZES.line) / 2;
    lines.forEach((line, order) => context.fillText(line, SIZES.pad, top + order * SIZES.line));
  }

  /** A picture of what is shown, twice as fine, as a Blob. */
  toPng() {
    const { clientWidth: width, clientHeight: height } = this.element;
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [2 * width, 2 * height];
    this.paint(canvas.getContext("2d"), { width, height, ratio: 2 });
    return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  }
}

function fade(context, alpha, paint) {
  const before = context.globalAlpha;
  context.globalAlpha = before * alpha;
  paint();
  context.globalAlpha = before;
}

function bar(context, { x, y, w, h }) {
  context.fillRect(x, y, w > 3 ? w - 0.75 : w, h);
}

function outline(context, { x, y, w, h }, colour) {
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.strokeRect(x + 0.5, y + 0.5, Math.max(1, w - 1.5), h - 1);
}

function triangle(context, { x, y, w, h }, scale) {
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(x + (w / 2) * scale, y + h * scale);
  context.lineTo(x - (w / 2) * scale, y + h * scale);
  context.fill();
}

function paintLegend(context, theme, { view, index, say }) {
  const tones = new Set(view.tasks.map((task) => task.tone));
  const stages = Array.from({ length: index.video.num_stages }, (_, stage) => `stage${stage}`);
  const stageWords = stages.map((stage, n) => [stage, n ? `${n}` : say("legend.first_stage", { n })]);
  const entries = [["planner", say("legend.planner")], ["commit", say("legend.commit")], ...stageWords];
  let x = SIZES.pad;
  for (const [tone, words] of entries.filter(([name]) => tones.has(name))) {
    context.fillStyle = toneColour(theme, tone);
    context.fillRect(x, view.infoY, 8, 8);
    context.fillStyle = theme.muted;
    context.fillText(words, x + 12, view.infoY + 4);
    x += 22 + context.measureText(words).width;
  }
}
