// A plan typed by hand: five latent frames in chunks of two, two stages, two anchors in one block, history of one chunk.
// Lane 0 has the planner and stage 0, lane 1 has stage 1; a task takes one round.

const task = (id, kind, role, index, stage, reads, writes) => ({ id, kind, role, index, stage, reads, writes });
const span = (id, lane, start) => ({ task: id, lane, start_s: start, end_s: start + 1 });
const ANCHOR_KV = ["anchor_kv/0/2/anchor", "anchor_kv/1/2/anchor"];

function chunkTasks(chunk) {
  return [0, 1].map((stage) => {
    const history = chunk ? [`kv/${chunk - 1}/${stage}/stage${stage}`] : [];
    const anchors = chunk === 0 ? ANCHOR_KV.slice(0, 1) : ANCHOR_KV;
    const reads = [`latent/${chunk}/${stage}`, ...history, ...anchors];
    const writes = [`latent/${chunk}/${stage + 1}`, `kv/${chunk}/${stage}/stage${stage}`];
    return task(`renderer/denoise/c${chunk}/s${stage}`, "denoise", "renderer", chunk, stage, reads, writes);
  });
}

const PLANNER = [
  task("planner/denoise/b0/s0", "denoise", "planner", 0, 0, ["anchor_latent/0/0"], ["anchor_latent/0/1"]),
  task("planner/denoise/b0/s1", "denoise", "planner", 0, 1, ["anchor_latent/0/1"], ["anchor_latent/0/2"]),
];
const COMMIT = task("planner/commit/b0", "commit", "planner", 0, 2, ["anchor_latent/0/2"], ANCHOR_KV);
const RENDER = [0, 1, 2].flatMap(chunkTasks);
const RENDER_SPANS = [
  span("renderer/denoise/c0/s0", 0, 1),
  span("renderer/denoise/c1/s0", 0, 2),
  span("renderer/denoise/c0/s1", 1, 2),
  span("renderer/denoise/c2/s0", 0, 3),
  span("renderer/denoise/c1/s1", 1, 3),
  span("renderer/denoise/c2/s1", 1, 4),
];
const LANES = [0, 1].map((n) => ({ name: `lane${n}`, device: "cpu" }));
const timeline = (lanes, spans, rounds) => ({ source: "simulated", lanes, spans, rounds, predicted_s: null, peak_kv_bytes: [2 ** 21, 2 ** 20] });

/** A fresh copy; Plan Anchors runs on its own, as in the quickstart. */
export function plan(changes = {}) {
  const made = {
    graph: { tasks: [COMMIT, ...RENDER] },
    timeline: timeline(LANES, [span("planner/commit/b0", 0, 0), ...RENDER_SPANS], 5),
    planner: {
      graph: { tasks: PLANNER },
      timeline: timeline(LANES.slice(0, 1), PLANNER.map(({ id }, start) => span(id, 0, start)), 2),
    },
    summary: "five latent frames",
    video: {
      latent_frames: 5,
      num_chunks: 3,
      seconds: 17 / 16,
      fps: 16,
      chunks: [[0, 2], [2, 4], [4, 5]],
      anchors: [0, 4],
      anchor_blocks: [[0, 1]],
      num_stages: 2,
    },
    totals: { forwards: { total: 9 }, rounds: 7, predicted_s: null, layout: "interleaved", model: "embedded", exact: true },
    ...changes,
  };
  return structuredClone(made);
}

/** A flashforward.span event of the render. */
export function spanEvent(run, spans, changes = {}) {
  const counts = { done: spans.length, total: 7 };
  return { node: "5", plan: "3", run, lanes: LANES, planner_only: false, given_anchors: true, ...counts, spans, ...changes };
}
