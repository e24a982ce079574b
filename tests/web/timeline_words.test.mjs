import assert from "node:assert/strict";
import { test } from "node:test";

import { applyDone, applySpans, indexPlan, layout, noRuns } from "../../web/js/timeline_model.js";
import * as words from "../../web/js/timeline_words.js";
import { plan, spanEvent } from "./plan.mjs";
import { say } from "./locales.mjs";

const { bytes, chromeTrace, exportJson, ranges, videoSeconds } = words;
const headline = (of, runs) => words.headline(of, runs, say.en);
const describe = (of, item) => words.describe(of, item, say.en);

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

test("the headline gives length, counts, lanes and memory, and no seconds of work where none are known", () => {
  assert.deepEqual(headline(index, noRuns()), [
    "1.06 s = 17 frames · 3 chunks · 2 anchors",
    "7 rounds (anchors 2 + render 5) · 9 forwards",
    "2 lanes, interleaved · KV 2 MiB, 1 MiB (embedded)",
  ]);
});

test("a render that plans its own anchors is one part", () => {
  const alone = indexPlan(plan({ planner: null, totals: { ...plan().totals, rounds: 5 } }));
  assert.equal(headline(alone, noRuns())[1], "5 rounds · 9 forwards");
});

test("many lanes' memory is told as a range", () => {
  const many = plan();
  many.timeline.peak_kv_bytes = [4, 3, 2, 1].map((n) => n * 2 ** 20);
  assert.match(headline(indexPlan(many), noRuns())[2], /KV 1 MiB to 4 MiB a lane/);
});

test("known seconds are predicted; a long video's are marked as estimates", () => {
  const totals = { ...plan().totals, predicted_s: 12.34 };
  assert.match(headline(indexPlan(plan({ totals })), noRuns())[1], /· predicted 12\.3 s$/);
  const [video, work] = headline(indexPlan(plan({ totals: { ...totals, exact: false } })), noRuns());
  assert.match(video, /first 3 chunks shown$/);
  assert.equal(work, "≈ 7 rounds · 9 forwards · predicted ≈ 12.3 s");
});

test("a schedule that the backbone's preset chose is named", () => {
  const totals = { ...plan().totals, schedule: "hiar" };
  assert.match(headline(indexPlan(plan({ totals, note: "preset hiar" })), noRuns())[0], /^hiar: 1\.06 s/);
});

test("a run tells how far it is, then how long it took and what it saved", () => {
  const running = applySpans(noRuns(), spanEvent("a", RAN));
  assert.equal(headline(index, running)[2], "running: 1/7 tasks · 0.90 s");
  const done = { run: "a", planner_only: false, timeline: null, sha256: "f00" };
  assert.equal(headline(index, applyDone(running, done))[2], "measured 0.90 s");
  const saved = applyDone(running, { ...done, reused: { chunks: 2, forwards: 5 } });
  assert.equal(headline(index, saved)[2], "measured 0.90 s · 2 of 3 chunks reused, 5 forwards saved");
});

test("a run that reuses everything says so, though no task of it ran", () => {
  const event = { ...spanEvent("a", []), timeline: { spans: [] }, sha256: "f00", reused: { chunks: 3, forwards: 7 } };
  assert.equal(headline(index, applyDone(noRuns(), event))[2], "measured 0.00 s · 3 of 3 chunks reused, 7 forwards saved");
});

test("a lane says how busy it is and what it and its device hold", () => {
  assert.equal(describe(index, view.lanes[0]), "lane 0 (cpu ·0): 4 tasks · busy 80 % · KV 2 MiB");
  const known = plan();
  known.timeline.peak_bytes = { cpu: 3 * 2 ** 30 };
  assert.match(describe(indexPlan(known), view.lanes[1]), /^lane 1 .* KV 1 MiB · 3\.0 GiB on cpu at most$/);
  assert.match(headline(indexPlan(known), noRuns())[2], /interleaved · memory 3\.0 GiB \(embedded\)$/);
});

test("what a chunk reads is said in frames and chunks", () => {
  assert.equal(describe(index, view.chunks[2]), "chunk 2 (0.8–1.1 s, frames 13–16) · reads chunks 1 and anchors at 0, 4");
  assert.equal(describe(index, view.anchors[1]), "anchor 1 at 1.00 s (latent frame 4) · read by chunks 1–2");
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
