import assert from "node:assert/strict";
import { test } from "node:test";

import {
  applyDone,
  applyPictures,
  applySpans,
  applyStop,
  highlights,
  hitTest,
  indexPlan,
  layout,
  noRuns,
  numLanes,
  parseSlot,
  readsOf,
  sameItem,
  toneOf,
  wantedHeight,
} from "../../web/js/timeline_model.js";
import { plan, spanEvent } from "./plan.mjs";

const WIDTH = 360;
const index = indexPlan(plan());
const draw = (runs = noRuns(), at = index) => layout({ index: at, runs, width: WIDTH, height: 200 });
const taskOf = (view, id) => view.tasks.find((task) => task.task === id);
const sorted = (set) => [...set].sort();
const near = (a, b) => assert.ok(Math.abs(a - b) < 1e-6, `${a} is not ${b}`);

test("a slot's text is read back", () => {
  assert.deepEqual(parseSlot("kv/7/2/stage2"), { space: "kv", index: 7, level: 2, bank: "stage2" });
  assert.deepEqual(parseSlot("latent/0/4"), { space: "latent", index: 0, level: 4, bank: "" });
});

test("every task has a ghost in its lane's row, as long as its share of the prediction", () => {
  const view = draw();
  assert.equal(view.tasks.length, 9);
  const first = taskOf(view, "renderer/denoise/c0/s0");
  const second = taskOf(view, "renderer/denoise/c0/s1");
  near(second.ghost.x, first.ghost.x + first.ghost.w); // rounds 1 and 2
  assert.equal(first.ghost.y, view.area.y);
  assert.equal(second.ghost.y, view.area.y + view.area.row);
  const [planner, render] = view.sections;
  near(planner.w / render.w, 2 / 5);
  near(first.ghost.w, render.w / 5);
  near(render.x + render.w, WIDTH - 8);
});

test("tasks of a lane never overlap and stay inside the view", () => {
  const view = draw();
  for (const task of view.tasks) {
    assert.ok(task.ghost.x >= view.area.x && task.ghost.x + task.ghost.w <= WIDTH);
    const later = view.tasks.filter((other) => other !== task && other.ghost.y === task.ghost.y && other.ghost.x >= task.ghost.x);
    for (const other of later) assert.ok(other.ghost.x >= task.ghost.x + task.ghost.w - 1e-6, `${task.task} ${other.task}`);
  }
});

test("chunks and anchors lie at their latent frames", () => {
  const view = draw();
  const unit = (WIDTH - 16) / 5;
  near(view.chunks[1].x, 8 + 2 * unit);
  near(view.chunks[2].w, unit); // the last chunk is shorter
  near(view.anchors[1].x, 8 + 4.5 * unit);
});

test("a chunk lights up the history and the anchors that its forwards read", () => {
  const lit = highlights(index, draw().chunks[2]);
  assert.deepEqual(sorted(lit.chunks), [1]);
  assert.deepEqual(sorted(lit.anchors), [0, 1]);
  assert.deepEqual(sorted(lit.tasks), ["render:renderer/denoise/c2/s0", "render:renderer/denoise/c2/s1"]);
  const first = highlights(index, draw().chunks[0]);
  assert.deepEqual([sorted(first.chunks), sorted(first.anchors)], [[], [0]]);
});

test("an anchor lights up the chunks that read it", () => {
  const { chunks, anchors } = highlights(index, draw().anchors[1]);
  assert.deepEqual([sorted(chunks), sorted(anchors)], [[1, 2], [1]]);
});

test("a task lights up what wrote its reads", () => {
  const lit = highlights(index, taskOf(draw(), "renderer/denoise/c1/s1"));
  assert.deepEqual(sorted(lit.tasks), [
    "render:planner/commit/b0",
    "render:renderer/denoise/c0/s1",
    "render:renderer/denoise/c1/s0",
    "render:renderer/denoise/c1/s1",
  ]);
});

test("with a KV policy a chunk reads what is kept of all chunks before it", () => {
  const reads = ["latent/2/0", "anchor_kv/0/4/anchor", "policy_state/1/0/stage0", "policy_state/2/0/stage0.own"];
  const { chunks, anchors } = readsOf({ reads });
  assert.deepEqual([sorted(chunks), sorted(anchors)], [[0, 1], [0]]);
});

test("nothing is lit without a pointer", () => {
  assert.equal(highlights(index, null).tasks.size, 0);
});

test("a point is answered by what is drawn there", () => {
  const view = draw();
  const task = taskOf(view, "renderer/denoise/c1/s0");
  assert.equal(hitTest(view, task.ghost.x + 1, task.ghost.y + 1), task);
  assert.equal(hitTest(view, view.chunks[1].x + 1, view.chunks[1].y + 1), view.chunks[1]);
  assert.equal(hitTest(view, view.anchors[0].x, view.anchors[0].y + 2), view.anchors[0]);
  assert.equal(hitTest(view, 2, 2), null);
});

test("what is under the pointer survives a redraw", () => {
  const task = taskOf(draw(), "renderer/denoise/c1/s0");
  assert.equal(sameItem(draw(), task).task, task.task);
  assert.equal(sameItem(draw(), { kind: "chunk", index: 99 }), null);
});

const RAN = [
  { task: "planner/commit/b0", lane: 0, start_s: 0, end_s: 0.5 },
  { task: "renderer/denoise/c0/s0", lane: 0, start_s: 0.5, end_s: 0.9 },
];

test("measured spans lie over their ghosts, to one scale", () => {
  const runs = applySpans(noRuns(), spanEvent("a", RAN));
  const view = draw(runs);
  const commit = taskOf(view, "planner/commit/b0");
  const denoise = taskOf(view, "renderer/denoise/c0/s0");
  near(denoise.box.x + denoise.box.w, denoise.ghost.x + denoise.ghost.w); // 0.9 s is where two rounds end
  near(commit.box.w / denoise.box.w, 0.5 / 0.4);
  assert.equal(taskOf(view, "renderer/denoise/c2/s1").box, null);
});

test("a render that reuses its beginning starts over its first own ghost", () => {
  const late = [
    { task: "renderer/denoise/c2/s0", lane: 0, start_s: 0.1, end_s: 0.3 },
    { task: "renderer/denoise/c2/s1", lane: 1, start_s: 0.3, end_s: 0.5 },
  ];
  const view = draw(applySpans(noRuns(), spanEvent("a", late)));
  for (const { task } of late) {
    const { box, ghost } = taskOf(view, task);
    near(box.x, ghost.x);
    near(box.w, ghost.w);
  }
});

test("batches of one run add up; another run starts anew", () => {
  let runs = applySpans(noRuns(), spanEvent("a", RAN.slice(0, 1)));
  runs = applySpans(runs, spanEvent("a", RAN.slice(1), { done: 2 }));
  assert.equal(runs.render.spans.length, 2);
  assert.equal(runs.render.done, 2);
  assert.equal(applySpans(runs, spanEvent("b", RAN.slice(0, 1))).render.spans.length, 1);
});

test("a new planner's run forgets the render, whose anchors have changed; a render keeps the planner's", () => {
  const planned = applySpans(noRuns(), spanEvent("p", RAN.slice(0, 1), { planner_only: true }));
  const rendered = applySpans(planned, spanEvent("a", RAN));
  assert.equal(rendered.planner.id, "p");
  assert.equal(applySpans(rendered, spanEvent("q", RAN, { planner_only: true })).render, null);
});

test("events leave the state before them alone", () => {
  const before = noRuns();
  applyPictures(applySpans(before, spanEvent("a", RAN)), { pictures: [{ kind: "chunk", frame: 1, image: "x" }] });
  assert.deepEqual(before, noRuns());
});

test("the full timeline replaces the batches; another run's end changes nothing", () => {
  const runs = applySpans(noRuns(), spanEvent("a", RAN.slice(0, 1)));
  const event = { run: "a", planner_only: false, sha256: "f00", timeline: { spans: RAN } };
  assert.equal(applyDone(runs, { ...event, run: "b" }), runs);
  const done = applyDone(runs, event);
  assert.deepEqual([done.render.state, done.render.spans.length, done.render.sha256], ["done", 2, "f00"]);
  assert.equal(applyStop(done).render.state, "done");
  assert.equal(applyStop(runs).render.state, "stopped");
});

test("the planner's run ends as the render's does", () => {
  const runs = applySpans(noRuns(), spanEvent("p", RAN.slice(0, 1), { planner_only: true }));
  const done = applyDone(runs, { run: "p", planner_only: true, sha256: null, timeline: { spans: RAN } });
  assert.deepEqual([done.planner.state, done.planner.spans.length, done.render], ["done", 2, null]);
});

test("tasks that only change what is kept have a colour of their own", () => {
  const tones = ["denoise", "commit", "compact"].map((kind) => toneOf({ kind, role: "renderer", stage: 1 }));
  assert.deepEqual(tones, ["stage1", "commit", "commit"]);
  assert.equal(toneOf({ kind: "denoise", role: "planner", stage: 1 }), "planner");
});

test("a chunk shows its own picture, and until there is one that of its anchor", () => {
  const anchor = applyPictures(noRuns(), { pictures: [{ kind: "anchor", frame: 4, image: "anchor" }] });
  assert.deepEqual(draw(anchor).chunks.map((chunk) => chunk.picture), [null, null, "anchor"]);
  const own = applyPictures(anchor, { pictures: [{ kind: "chunk", frame: 4, image: "own" }] });
  assert.equal(draw(own).chunks[2].picture, "own");
  const middle = applyPictures(anchor, { pictures: [{ kind: "chunk", frame: 1, image: "middle" }] });
  assert.equal(draw(middle).chunks[0].picture, "middle"); // of its frames 0 and 1
});

test("more lanes ask for more height, and each has a row", () => {
  assert.equal(numLanes(index, noRuns()), 2);
  assert.ok(wantedHeight(8) > wantedHeight(2));
  const view = layout({ index, runs: noRuns(), width: WIDTH, height: wantedHeight(2) });
  assert.ok(view.area.y + view.area.row * view.area.count <= view.infoY);
});

test("a plan without a planner's run is one section", () => {
  const alone = draw(noRuns(), indexPlan(plan({ planner: null })));
  assert.equal(alone.sections.length, 1);
  near(alone.sections[0].w, alone.area.w);
});

test("a view too small for anything is still laid out", () => {
  const view = layout({ index, runs: noRuns(), width: 1, height: 1 });
  assert.ok(view.tasks.every((task) => Number.isFinite(task.ghost.x) && task.ghost.w > 0));
});

test("a lane's name can be pointed at, and lights up its tasks", () => {
  const view = draw();
  const lane = hitTest(view, view.lanes[1].x + 1, view.lanes[1].y + 2);
  assert.deepEqual([lane.kind, lane.index], ["lane", 1]);
  assert.equal(sameItem(draw(), lane).index, 1);
  const { tasks } = highlights(index, lane);
  assert.deepEqual(sorted(tasks), [0, 1, 2].map((chunk) => `render:renderer/denoise/c${chunk}/s1`));
});
