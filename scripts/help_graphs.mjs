// The small graphs in the help pages' pictures: for each node, columns of nodes from left to right.
// A node is {type, id, values, inputs: {name: id of the node that feeds it}, collapsed, size}. Helpers are there for the run
// and gone in the picture.

const PROMPT = "a red balloon drifts right over green hills at dusk";
const loader = { id: "loader", type: "FlashForwardLoadBackbone" };
const prompt = {
  id: "prompt", type: "FlashForwardEncodePrompt", values: { text: PROMPT }, inputs: { backbone: "loader" }, size: [270, 130],
};
const plan = {
  id: "plan", type: "FlashForwardPlan", inputs: { backbone: "loader" }, values: { width: 192, height: 128, seconds: 20 },
};
const shortPlan = { ...plan, values: { ...plan.values, seconds: 3 } };
const common = { backbone: "loader", plan: "plan", positive: "prompt" };
const anchors = { id: "anchors", type: "FlashForwardPlanAnchors", inputs: common, values: { seed: 7, control_after_generate: "fixed" } };
const render = {
  id: "render", type: "FlashForwardRender", inputs: { ...common, anchors: "anchors" },
  values: { seed: 7, control_after_generate: "fixed" },
};
const film = {
  id: "film", type: "FlashForwardRenderVideo", inputs: common, values: { seed: 7, control_after_generate: "fixed" }, size: [320, 400],
};
const decode = {
  id: "decode", type: "FlashForwardDecodeVideo", inputs: { samples: "render", backbone: "loader" }, size: [320, 330],
};
const wan = { ...loader, values: { backbone: "wan2.1_t2v_1.3B_self_forcing.safetensors" }, size: [330, 200] };
const small = (node) => ({ ...node, collapsed: true });
const shows = (id) => ({ id: "shows", type: "PreviewAny", inputs: { source: id } }); // makes the editor run a node
const lora = (id, from, values) => ({ id, type: "FlashForwardApplyLoRA", inputs: { backbone: from }, values, size: [270, 170] });

export const GRAPHS = {
  FlashForwardLoadBackbone: { columns: [[loader], [prompt]] },
  FlashForwardBackboneFromModel: {
    columns: [
      [{ id: "model", type: "UNETLoader", values: { unet_name: "wan2.1_t2v_1.3B_bf16.safetensors" }, size: [310, 90] }],
      [{
        id: "style", type: "LoraLoaderModelOnly", inputs: { model: "model" }, values: { lora_name: "watercolour.safetensors" },
        size: [280, 90],
      }],
      [{ id: "backbone", type: "FlashForwardBackboneFromModel", inputs: { model: "style" }, values: { preset: "self_forcing" } }],
    ],
  },
  FlashForwardApplyLoRA: {
    columns: [
      [wan],
      [lora("style", "loader", { lora: "watercolour.safetensors", strength: 0.8 })],
      [lora("motion", "style", { lora: "slow_camera.safetensors", role: "renderer" })],
    ],
  },
  FlashForwardEncodePrompt: { columns: [[loader], [prompt], [{ ...anchors, inputs: { backbone: "loader", positive: "prompt" } }]] },
  FlashForwardPromptSchedule: {
    columns: [
      [loader],
      [{
        id: "prompt", type: "FlashForwardPromptSchedule", inputs: { backbone: "loader" }, size: [320, 210],
        values: { text: `${PROMPT} [5s] |\n${PROMPT.replace("dusk", "night")} [10s#] |\n${PROMPT.replace("dusk", "dawn")}` },
      }],
      [{ ...anchors, inputs: { backbone: "loader", positive: "prompt" } }],
    ],
  },
  FlashForwardPlan: { columns: [[loader], [plan], [{ ...anchors, inputs: { backbone: "loader", plan: "plan" } }]] },
  FlashForwardPlanAnchors: { columns: [[loader, prompt], [shortPlan], [anchors]], helpers: [shows("anchors")], run: true },
  FlashForwardSetAnchor: {
    columns: [
      [anchors, { id: "picture", type: "LoadImage", values: { image: "example.png" }, size: [270, 300] }],
      [{
        id: "set", type: "FlashForwardSetAnchor", inputs: { anchors: "anchors", image: "picture" }, values: { seconds: 3 }, size: [320, 260],
      }],
      [{ ...render, inputs: { ...common, anchors: "set" } }],
    ],
    helpers: [loader, prompt, shortPlan, shows("set")],
    run: true,
  },
  FlashForwardDevices: {
    columns: [
      [small(loader), { id: "devices", type: "FlashForwardDevices", values: { devices: "cpu*4" }, size: [270, 110] }],
      [{ ...plan, inputs: { backbone: "loader", devices: "devices" } }],
    ],
  },
  FlashForwardKVPolicy: {
    columns: [
      [small(loader), { id: "policy", type: "FlashForwardKVPolicy" }],
      [{ ...plan, inputs: { backbone: "loader", kv_policy: "policy" }, values: { ...plan.values, schedule: "self_forcing" } }],
    ],
  },
  FlashForwardRender: {
    columns: [[loader, prompt], [small(shortPlan), anchors], [render]],
    helpers: [shows("render")],
    run: true,
  },
  FlashForwardRenderVideo: { columns: [[loader, prompt], [small(shortPlan)], [film]], run: true },
  FlashForwardDecodeVideo: { columns: [[loader, render], [decode]], helpers: [prompt, shortPlan, anchors], run: true },
  FlashForwardReport: {
    columns: [
      [small(shortPlan), render, decode],
      [{ id: "report", type: "FlashForwardReport", inputs: { timeline: "render", video: "decode", plan: "plan" }, size: [600, 400] }],
    ],
    helpers: [loader, prompt, anchors],
    run: true,
  },
};
