// What the timeline says, and what it saves to files. Pure, like timeline_model.js.

import { highlights } from "./timeline_model.js";

const MIB = 2 ** 20;
const SEPARATOR = " · ";

/** [3, 4, 5, 9] -> "3–5, 9". */
export function ranges(numbers) {
  const sorted = [...numbers].sort((a, b) => a - b);
  const found = [];
  for (const number of sorted) {
    const last = found.at(-1);
    if (last && number === last[1] + 1) last[1] = number;
    else found.push([number, number]);
  }
  return found.map(([from, to]) => (from === to ? `${from}` : `${from}–${to}`)).join(", ");
}

const fixed = (value) => value.toFixed(value < 10 ? 2 : 1);

export function bytes(value) {
  return value < 1024 * MIB ? `${Math.round(value / MIB)} MiB` : `${(value / (1024 * MIB)).toFixed(1)} GiB`;
}

/** Where latent frames [from, to) lie in the video; the first latent frame is one video frame, the others four. */
export function videoSeconds([from, to], fps) {
  return [from === 0 ? 0 : (4 * from - 3) / fps, (4 * to - 3) / fps];
}

/**
 * The lines over the timeline: what the video is, what it takes, and where it runs or how far the run is. `say` is a
 * speaker of words.js.
 */
export function headline(index, runs, say) {
  return [videoLine(index, say), workLine(index, say), runLine(index, runs, say) ?? lanesLine(index, say)];
}

const secondsIn = (say, value) => say("seconds", { n: fixed(value) });

function videoLine({ plan, totals, video }, say) {
  const frames = say("frames", { n: Math.round(video.seconds * video.fps) });
  const told = [say("plan.length", { seconds: secondsIn(say, video.seconds), frames }), say("chunks", { n: video.num_chunks })];
  if (video.anchors.length && totals.exact) told.push(say("anchors", { n: video.anchors.length }));
  if (!totals.exact) told.push(say("plan.shown", { n: video.chunks.length }));
  if (video.start_seconds === null) told.push(say("plan.start_unknown"));
  else if (video.start_seconds) told.push(say("plan.start", { seconds: secondsIn(say, video.start_seconds) }));
  const text = told.join(SEPARATOR);
  return plan.note ? say("plan.schedule", { schedule: totals.schedule, text }) : text; // the preset may have chosen another
}

function workLine({ parts, totals }, say) {
  const about = (text) => (totals.exact ? text : say("plan.about", { text }));
  const each = parts.map((part) => `${say(`part.${part.key}`)} ${part.timeline.rounds}`).join(" + ");
  const split = parts.length > 1 && totals.exact ? ` (${each})` : "";
  const told = [about(say("rounds", { n: totals.rounds })) + split, say("forwards", { n: totals.forwards.total })];
  if (totals.predicted_s !== null) told.push(say("plan.predicted", { seconds: about(secondsIn(say, totals.predicted_s)) }));
  return told.join(SEPARATOR);
}

/** Lanes, and the most memory in use per device: all of it where the server predicts that, else keys and values alone. */
function lanesLine({ parts, totals }, say) {
  const { lanes, peak_kv_bytes: kv, peak_bytes: peaks = {} } = parts.at(-1).timeline;
  const devices = Object.values(peaks);
  const { model } = totals;
  const memory = devices.length
    ? say("plan.memory", { size: peakWords(devices, "device", say), model })
    : say("plan.kv", { size: peakWords(kv, "lane", say), model });
  return [say("plan.where", { lanes: say("lanes", { n: lanes.length }), layout: totals.layout }), memory].join(SEPARATOR);
}

/** What each holds at most, in few words; one's own is told under the pointer. */
function peakWords(peaks, what, say) {
  const all = peaks.map(bytes);
  if (new Set(all).size === 1) return all.length > 1 ? say("plan.each", { size: all[0] }) : all[0];
  if (all.length < 4) return all.join(", ");
  return say(`plan.range_${what}`, { from: bytes(Math.min(...peaks)), to: bytes(Math.max(...peaks)) });
}

/** How far a run is or how long it took, and what it saved; null when nothing has run. */
function runLine(index, runs, say) {
  const parts = index.parts.map((part) => runs[part.key]).filter(Boolean);
  if (!parts.length) return null;
  const length = parts.reduce((sum, run) => sum + Math.max(...run.spans.map((span) => span.end_s), 0), 0);
  const { state, done, total, reused } = parts.at(-1);
  const seconds = secondsIn(say, length);
  if (state !== "done") return [say(`run.${state}`, { done, total }), seconds].join(SEPARATOR);
  const told = [say("run.measured", { seconds })];
  if (reused?.forwards) told.push(say("run.reused", { ...reused, total: index.video.num_chunks }));
  return told.join(SEPARATOR);
}

/** One line about what is under the pointer. */
export function describe(index, item, say) {
  if (!item) return "";
  const lit = highlights(index, item);
  if (item.kind === "anchor") return describeAnchor(index, item, lit, say);
  if (item.kind === "chunk") return describeChunk(index, item, lit, say);
  if (item.kind === "lane") return describeLane(index, item, say);
  const when = item.measured
    ? say("item.ran", {
        length: secondsIn(say, item.measured.end_s - item.measured.start_s),
        start: secondsIn(say, item.measured.start_s),
      })
    : say("item.predicted", { start: predictedAt(index, item, say) });
  return [item.task, when, ...reads(index, lit, say)].join(SEPARATOR);
}

function describeAnchor(index, { index: anchor, frame }, lit, say) {
  const at = (4 * frame) / index.video.fps; // the last of its four video frames
  const seconds = say("seconds", { n: at.toFixed(2) });
  const readers = lit.chunks.size ? say("item.read_by", { chunks: ranges(lit.chunks) }) : say("item.read_by_none");
  return [say("item.anchor", { index: anchor, seconds, frame }), readers].join(SEPARATOR);
}

function describeChunk(index, item, lit, say) {
  const { fps } = index.video;
  const [from, to] = videoSeconds(item.frames, fps);
  const frames = { first: Math.round(from * fps), last: Math.round(to * fps) - 1 };
  const chunk = say("item.chunk", { index: item.index, from: from.toFixed(1), to: to.toFixed(1), ...frames });
  return [chunk, ...reads(index, lit, say)].join(SEPARATOR);
}

function describeLane(index, item, say) {
  const { spans, timeline, extent } = index.parts.at(-1);
  const own = [...spans.values()].filter((span) => span.lane === item.index);
  const busy = own.reduce((sum, span) => sum + span.end_s - span.start_s, 0) / extent;
  const told = [say("tasks", { n: own.length }), say("item.busy", { percent: Math.round(100 * busy) })];
  const kv = timeline.peak_kv_bytes[item.index];
  if (kv !== undefined) told.push(say("item.kv", { size: bytes(kv) }));
  const device = timeline.lanes[item.index]?.device;
  const all = timeline.peak_bytes?.[device];
  if (all !== undefined) told.push(say("item.held", { size: bytes(all), device }));
  return say("item.lane", { index: item.index, name: item.text, facts: told.join(SEPARATOR) });
}

function reads(index, lit, say) {
  const chunks = ranges(lit.chunks);
  const places = [...lit.anchors].map((anchor) => index.video.anchors[anchor]);
  const frames = places.sort((a, b) => a - b).join(", ");
  if (!chunks && !frames) return [];
  const form = chunks && frames ? "reads_both" : chunks ? "reads_chunks" : "reads_anchors";
  return [say("item.reads", { what: say(`item.${form}`, { chunks, frames }) })];
}

function predictedAt(index, item, say) {
  const { start_s: start } = item.predicted;
  return index.totals.predicted_s === null ? say("item.round", { n: start }) : secondsIn(say, start);
}

/** The plan and the runs as a JSON text. */
export function exportJson(index, runs) {
  const { pictures: _, active: __, ...measured } = runs;
  return JSON.stringify({ plan: index.plan, measured }, null, 1);
}

/** A trace for chrome://tracing and Perfetto: one process for each part's prediction and measurement. */
export function chromeTrace(index, runs) {
  const events = [];
  const add = (pid, name, lanes, spans, toMicroseconds) => {
    events.push({ ph: "M", name: "process_name", pid, tid: 0, args: { name } });
    lanes.forEach((lane, tid) => {
      events.push({ ph: "M", name: "thread_name", pid, tid, args: { name: `${lane.name} ${lane.device}` } });
    });
    for (const { task, lane, start_s: start, end_s: end } of spans) {
      const times = { ts: start * toMicroseconds, dur: (end - start) * toMicroseconds };
      events.push({ ph: "X", name: task, cat: task.split("/")[0], pid, tid: lane, ...times });
    }
  };
  index.parts.forEach((part, order) => {
    const unit = index.totals.predicted_s === null ? " (1 round = 1 s)" : "";
    add(2 * order, `${part.title}: predicted${unit}`, part.timeline.lanes, part.timeline.spans, 1e6);
    const run = runs[part.key];
    if (run) add(2 * order + 1, `${part.title}: measured`, run.lanes, run.spans, 1e6);
  });
  return JSON.stringify({ traceEvents: events, displayTimeUnit: "ms" });
}
