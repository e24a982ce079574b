// What a Plan node's prediction depends on, gathered from the graph around it: values of nodes, never a schedule.

const PLAN = "FlashForwardPlan";
const ANCHORS = "FlashForwardPlanAnchors";
const SET_ANCHOR = "FlashForwardSetAnchor";
const DEVICES = "FlashForwardDevices";
const LOADER = "FlashForwardLoadBackbone";
const POLICY = "FlashForwardKVPolicy";
const LORA = "FlashForwardApplyLoRA";
const PROMPTS = ["FlashForwardEncodePrompt", "FlashForwardPromptSchedule"];
const MAX_HOPS = 50;
const MUTED = 2; // LiteGraph's modes of nodes
const BYPASSED = 4;

export const typeOf = (node) => node?.constructor?.comfyClass ?? node?.type;
const isSaved = (widget) => widget.serialize !== false && widget.options?.serialize !== false; // others only show things
export const valuesOf = (node) =>
  Object.fromEntries((node.widgets ?? []).filter(isSaved).map(({ name, value }) => [name, value]));

/** The node that feeds an input, looking through reroutes and bypassed nodes; null when nothing that runs does. */
export function sourceOf(node, name) {
  let slot = node.inputs?.findIndex((input) => input.name === name) ?? -1;
  let from = slot < 0 ? null : node.getInputNode(slot);
  const type = node.inputs?.[slot]?.type;
  for (let hops = 0; from && hops < MAX_HOPS; hops += 1) {
    if (from.mode === MUTED) return null;
    if (typeOf(from) === "Reroute") slot = 0;
    else if (from.mode === BYPASSED) slot = from.inputs?.findIndex((input) => input.type === type) ?? -1;
    else return from;
    from = slot < 0 ? null : from.getInputNode(slot);
  }
  return null;
}

/** The renders that read this plan and run. */
function rendersOf(node) {
  const others = (node.graph?.nodes ?? []).filter((other) => ![MUTED, BYPASSED].includes(other.mode));
  return others.filter((other) => /^FlashForwardRender/.test(typeOf(other)) && sourceOf(other, "plan") === node);
}

/** The node of a type behind an input, through a chain of nodes that pass the same thing on; null when there is none. */
function behind(node, input, type, passing) {
  let from = sourceOf(node, input);
  for (let hops = 0; typeOf(from) === passing && hops < MAX_HOPS; hops += 1) from = sourceOf(from, input);
  return typeOf(from) === type ? from : null;
}

/** The prompt's text, where a node of ours holds it; times and hard cuts are in it. */
function promptsOf(render) {
  const from = sourceOf(render, "positive");
  if (!PROMPTS.includes(typeOf(from)) || sourceOf(from, "text")) return null;
  const { text, fps } = valuesOf(from);
  return fps === undefined ? { text } : { text, fps };
}

/**
 * What a render's video begins with: {frames} of latents, {plan} of the render that makes them, or {unknown} where that
 * shows only when it runs; null when it begins with nothing.
 */
function startOf(render) {
  const samples = sourceOf(render, "start_samples");
  if (samples) {
    if (typeOf(samples) === "VAEEncode") return pictures(sourceOf(samples, "pixels"));
    const plan = /^FlashForwardRender/.test(typeOf(samples)) ? sourceOf(samples, "plan") : null;
    return typeOf(plan) === PLAN ? { plan: valuesOf(plan) } : { unknown: true };
  }
  const anchors = behind(render, "anchors", ANCHORS, SET_ANCHOR);
  const image = anchors && sourceOf(anchors, "start_image");
  return image ? pictures(image) : null;
}

/** One picture is one latent frame; how many others are shows only when they are there. */
function pictures(node) {
  const isOne = typeOf(node) === "LoadImage" || (typeOf(node) === "ImageFromBatch" && valuesOf(node).length === 1);
  return isOne ? { frames: 1 } : { unknown: true };
}

/** Everything that the prediction depends on. */
export function requestOf(node) {
  const renders = rendersOf(node);
  const [render] = renders; // several renders of one plan are predicted as the first
  const given = renders.some((other) => sourceOf(other, "anchors") !== null);
  const body = { ...valuesOf(node), given_anchors: given };
  const devices = sourceOf(node, "devices");
  if (typeOf(devices) === DEVICES) Object.assign(body, valuesOf(devices));
  const policy = sourceOf(node, "kv_policy");
  if (typeOf(policy) === POLICY) body.kv_policy = valuesOf(policy);
  const backbone = behind(node, "backbone", LOADER, LORA);
  if (backbone) body.backbone = valuesOf(backbone);
  const prompts = render && promptsOf(render);
  if (prompts) body.prompts = prompts;
  const start = render && startOf(render);
  if (start) body.start = start;
  return body;
}
