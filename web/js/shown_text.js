// Makes room for the text that the editor shows on a node once it runs. The editor reserves a few lines, whatever the
// text, and the rest of it would have to be scrolled to.

import { makeRoom } from "./folding.js";

/** The editor's name for the widget with the text. */
export const TEXT = "$$node-text-preview";
const STYLE = { font: 12, line: 16, above: 16, beside: 32, margin: 20, max: 200 }; // pixels, of the editor's style sheet
const SPARE = 2; // browsers round lines up
const FEW_LINES = 2; // which the editor's own place holds whole

/** How many lines a text takes where lines break at any letter; `measure(text)` is its width in pixels. */
export function countLines(text, width, measure) {
  return text.split("\n").reduce((sum, line) => sum + linesOf(line, width, measure), 0);
}

function linesOf(line, width, measure) {
  let count = 1;
  let used = 0;
  for (const letter of line) {
    const step = measure(letter);
    if (used + step > width && used > 0) [count, used] = [count + 1, 0];
    used += step;
  }
  return count;
}

/** The height of the text's widget on a node of this width; what is longer than the editor shows stays to be scrolled to. */
export function textHeight(text, nodeWidth, measure) {
  const { line, above, beside, margin, max } = STYLE;
  const lines = countLines(text, Math.max(1, nodeWidth - margin - beside), measure);
  return Math.min(max, lines * line + above + SPARE) + margin;
}

let ruler = null;
function measureLetter(letter) {
  ruler ??= document.createElement("canvas").getContext("2d");
  ruler.font = `${STYLE.font}px ${getComputedStyle(document.body).fontFamily}`;
  return ruler.measureText(letter).width;
}

/** Give a long text the height that it needs, whenever it or the node's width changes; call it as the node is drawn. */
export function fitShownText(node) {
  const widget = node.widgets?.find(({ name }) => name === TEXT);
  if (!widget || globalThis.LiteGraph?.vueNodesMode) return;
  const shown = `${node.size[0]} ${widget.value}`;
  if (widget.fittedTo === shown) return;
  widget.fittedTo = shown;
  const height = textHeight(String(widget.value), node.size[0], measureLetter);
  if (height <= textHeight("\n".repeat(FEW_LINES - 1), node.size[0], measureLetter)) return;
  widget.options.getMinHeight = () => height;
  widget.options.getMaxHeight = () => height;
  makeRoom(node);
}
