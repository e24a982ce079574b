// What the timeline says, and what it saves to files. Pure, like timeline_model.js.

import { highlights } from "./timeline_model.js";

const MIB = 2 ** 20;

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

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
const seconds = (value) => `${value.toFixed(value < 10 ? 2 : 1)} s`;

export function bytes(value) {
  return value < 1024 * MIB ? `${Math.round(value / MIB)} MiB` : `${(value / (1024 * MIB)).toFixed(1)} GiB`;
}

/** Where latent frames [from, to) lie in the video; the first latent frame is one video frame, the others four. */
export function videoSeconds([from, to], fps) {
  return [from === 0 ? 0 : (4 * from - 3) / fps, (4 * to - 3) / fps];
}

/** The two lines over the timeline. */
export function headline(index, runs) {
  const { totals, video } = index;
  const about = totals.exact ? "" : "≈ ";
  const anchors = video.anchors.length && totals.exact ? ` · ${plural(video.anchors.length, "anchor")}` : "";
  const schedule = index.plan.note ? `${totals.schedule}: ` : ""; // the backbone's preset may have chosen another
  const first = `${schedule}${about}${plural(totals.rounds, "round")} · ${totals.forwards.total} forwards · ${plural(video.num_chunks, "chunk")}${anchors}`;
  const cut = totals.exact ? "" : ` · first ${video.chunks.length} chunks shown`;
  return [first + cut, runLine(index, runs) ?? planLine(index)];
}

function planLine(index) {
  const { totals } = index;
  const { lanes, peak_kv_bytes: peaks } = index.parts.at(-1).timeline;
  const predicted = totals.predicted_s === null ? "" : `${totals.exact ? "" : "≈ "}${seconds(totals.predicted_s)} · `;
  const alike = peaks.every((peak) => peak === peaks[0]);
  const kv = alike ? `${bytes(peaks[0])}${peaks.length > 1 ? " each" : ""}` : peaks.map(bytes).join(", ");
  return `${predicted}${plural(lanes.length, "lane")}, ${totals.layout} · KV ${kv} (${totals.model})`;
}

/** How far a run is or how long it took; null when nothing has run. */
function runLine(index, runs) {
  const parts = index.parts.map((part) => runs[part.key]).filter(Boolean);
  if (!parts.length) return null;
  const length = parts.reduce((sum, run) => sum + Math.max(...run.spans.map((span) => span.end_s)), 0);
  const last = parts.at(-1);
  if (last.state === "running") return `running: ${last.done}/${last.total} tasks · ${seconds(length)}`;
  if (last.state === "stopped") return `stopped at ${last.done}/${last.total} tasks · ${seconds(length)}`;
  const predicted = index.totals.predicted_s;
  return `measured ${seconds(length)}` + (predicted === null ? "" : ` · predicted ${seconds(predicted)}`);
}

/** One line about what is under the pointer. */
export function describe(index, item) {
  if (!item) return "";
  const lit = highlights(index, item);
  if (item.kind === "anchor") {
    return `anchor ${item.index} at latent frame ${item.frame} · read by chunks ${ranges(lit.chunks) || "none"}`;
  }
  if (item.kind === "chunk") return describeChunk(index, item, lit);
  const when = item.measured
    ? `${seconds(item.measured.end_s - item.measured.start_s)} at ${seconds(item.measured.start_s)}`
    : `from ${predictedAt(index, item)}`;
  return `${item.task} · ${when}${reads(index, lit)}`;
}

function describeChunk(index, item, lit) {
  const [from, to] = videoSeconds(item.frames, index.video.fps);
  return `chunk ${item.index} (${from.toFixed(1)}–${to.toFixed(1)} s)${reads(index, lit)}`;
}

function reads(index, lit) {
  const frames = [...lit.anchors].map((anchor) => index.video.anchors[anchor]);
  const parts = [
    lit.chunks.size ? `chunks ${ranges(lit.chunks)}` : "",
    frames.length ? `anchors at ${frames.sort((a, b) => a - b).join(", ")}` : "",
  ].filter(Boolean);
  return parts.length ? ` · reads ${parts.join(" and ")}` : "";
}

function predictedAt(index, item) {
  const { start_s: start } = item.predicted;
  return index.totals.predicted_s === null ? `round ${start}` : seconds(start);
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
