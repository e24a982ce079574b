import assert from "node:assert/strict";
import { test } from "node:test";

import { applyDone, applySpans, indexPlan, layout, noRuns } from "../../web/js/timeline_model.js";
import { bytes, chromeTrace, describe, exportJson, headline, ranges, videoSeconds } from "../../web/js/timeline_words.js";
import { plan, spanEvent } from "./plan.mjs";

const index = indexPlan(plan());
const view = layout({ index, runs: noRuns(), width: 360, height: 200 });
const RAN = [{ task: "renderer/denoise/c0/s0", lane: 0, start_s: 0.5, end_s: 0.9 }];

test("neighbouring numbers are joined", () => {
  assert.equal(ranges(new Set([5, 3, 9, 4])), "3–5, 9");
  assert.equal(ranges([]), "");
});

test("sizes are told in the unit that fits", () => {
  assert.equal(bytes(3 * 2 ** 20), "3 MiB");
  assert.equal(bytes(1.5 * 2 ** 30), "1.5 GiB");
});

test("the first latent frame is one video frame and every other one four", () => {
  assert.deepEqual(videoSeconds([0, 1], 1), [0, 1]);
  assert.deepEqual(videoSeconds([0, 3], 1), [0, 9]);
  assert.deepEqual(videoSeconds([3, 6], 1), [9, 21]);
});

test("the headline gives counts, lanes and memory, and no seconds where none are known", () => {
  const [first, second] = headline(index, noRuns());
  assert.equal(first, "7 rounds · 9 forwards · 3 chunks · 2 anchors");
  assert.equal(second, "2 lanes, interleaved · KV 2 MiB, 1 MiB (embedded)");
});

test("known seconds are predicted; a long video's are marked as estimates", () => {
  const totals = { ...plan().totals, predicted_s: 12.34 };
  assert.match(headline(indexPlan(plan({ totals })), noRuns())[1], /^12\.3 s · 2 lanes/);
  const long = indexPlan(plan({ totals: { ...totals, exact: false } }));
  assert.match(headline(long, noRuns())[0], /^≈ 7 rounds .* first 3 chunks shown$/);
});

test("a schedule that the backbone's preset chose is named", () => {
  const totals = { ...plan().totals, schedule: "hiar" };
  assert.match(headline(indexPlan(plan({ totals, note: "preset hiar" })), noRuns())[0], /^hiar: 7 rounds/);
});

test("a run tells how far it is, then how long it took", () => {
  const running = applySpans(noRuns(), spanEvent("a", RAN));
  assert.equal(headline(index, running)[1], "running: 1/7 tasks · 0.90 s");
  const done = applyDone(running, { run: "a", planner_only: false, timeline: null, sha256: "f00" });
  assert.equal(headline(index, done)[1], "measured 0.90 s");
});

test("what a chunk reads is said in frames and chunks", () => {
  assert.equal(describe(index, view.chunks[2]), "chunk 2 (0.8–1.1 s) · reads chunks 1 and anchors at 0, 4");
  assert.equal(describe(index, view.anchors[1]), "anchor 1 at latent frame 4 · read by chunks 1–2");
  assert.equal(describe(index, null), "");
});

test("a task says when it is predicted, and when it ran once it has", () => {
  const find = (runs) =>
    layout({ index, runs, width: 360, height: 200 }).tasks.find((task) => task.task === "renderer/denoise/c0/s0");
  assert.match(describe(index, find(noRuns())), /from round 1 · reads anchors at 0$/);
  assert.match(describe(index, find(applySpans(noRuns(), spanEvent("a", RAN)))), /· 0\.40 s at 0\.50 s · reads/);
});

test("the Chrome trace has a process per prediction and per run, in microseconds", () => {
  const runs = applySpans(noRuns(), spanEvent("a", RAN));
  const { traceEvents } = JSON.parse(chromeTrace(index, runs));
  const names = traceEvents.filter((event) => event.name === "process_name").map((event) => event.args.name);
  assert.deepEqual(names, ["anchors: predicted (1 round = 1 s)", "render: predicted (1 round = 1 s)", "render: measured"]);
  const [measured] = traceEvents.filter((event) => event.ph === "X" && event.pid === 3);
  assert.deepEqual([measured.ts, measured.tid], [0.5e6, 0]);
  assert.ok(Math.abs(measured.dur - 0.4e6) < 1e-3);
});

test("the JSON holds the plan as it came and the measured spans, without the pictures", () => {
  const runs = applySpans(noRuns(), spanEvent("a", RAN));
  const saved = JSON.parse(exportJson(index, runs));
  assert.deepEqual(saved.plan, plan());
  assert.deepEqual(saved.measured.render.spans, RAN);
  assert.ok(!("pictures" in saved.measured));
});
