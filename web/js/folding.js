// Folds expert inputs away, with a button that shows them. Their values are saved and sent as before, folded or not.

/** The button's name; it is only shown, so no value of it is saved. */
export const FOLD = "more inputs";
const GAP = 4; // pixels, which the editor leaves after every widget

/**
 * Hide the inputs that the server calls advanced until the button is pressed; the node keeps, and saves, which it is. In
 * Nodes 2.0, where the page and not the canvas lays inputs out, all are shown. `say` is a speaker of words.js.
 */
export function foldAdvanced(node, say) {
  if (globalThis.LiteGraph?.vueNodesMode) return;
  const folded = (node.widgets ?? []).filter((widget) => widget.options?.advanced);
  if (!folded.length) return;
  const button = node.addWidget("button", FOLD, null, () => toggle(), { serialize: false });
  button.serialize = false;
  button.tooltip = folded.map(({ name }) => name).join(", ");
  const show = () => {
    for (const widget of folded) fold(widget, !node.showAdvanced);
    button.label = node.showAdvanced ? say("inputs.fewer") : say("inputs.more", { n: folded.length });
  };
  const toggle = () => {
    node.showAdvanced = !node.showAdvanced;
    show();
    makeRoom(node);
  };
  const configured = node.onConfigure;
  node.onConfigure = function (...rest) {
    const result = configured?.apply(this, rest);
    show();
    return result;
  };
  show();
}

/** Hide a number, choice or text field, or show it again; the editor would leave the place of a hidden one empty. */
function fold(widget, isHidden) {
  widget.hidden = isHidden;
  if (isHidden) widget.computeSize = () => [0, -GAP];
  else delete widget.computeSize; // such fields have none of their own
}

/** Grow a node that is too small for its widgets; never take room away that the artist gave. */
export function makeRoom(node) {
  const [width, height] = node.computeSize();
  node.setSize([Math.max(node.size[0], width), Math.max(node.size[1], height)]);
  node.setDirtyCanvas(true, true);
}
