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

/** The lines over the timeline: what the video is, what it takes, and where it runs or how far the run is. */
export function headline(index, runs) {
  return [videoLine(index), workLine(index), runLine(index, runs) ?? lanesLine(index)];
}

function videoLine({ plan, totals, video }) {
  const schedule = plan.note ? `${totals.schedule}: ` : ""; // the backbone's preset may have chosen another
  const frames = plural(Math.round(video.seconds * video.fps), "frame");
  const anchors = video.anchors.length && totals.exact ? ` · ${plural(video.anchors.length, "anchor")}` : "";
  const cut = totals.exact ? "" : ` · first ${video.chunks.length} chunks shown`;
  return `${schedule}${seconds(video.seconds)} = ${frames} · ${plural(video.num_chunks, "chunk")}${anchors}${cut}`;
}

function workLine({ parts, totals }) {
  const about = totals.exact ? "" : "≈ ";
  const each = parts.map((part) => `${part.title} ${part.timeline.rounds}`).join(" + ");
  const split = parts.length > 1 && totals.exact ? ` (${each})` : "";
  const predicted = totals.predicted_s === null ? "" : ` · predicted ${about}${seconds(totals.predicted_s)}`;
  return `${about}${plural(totals.rounds, "round")}${split} · ${totals.forwards.total} forwards${predicted}`;
}

/** Lanes, and the most memory in use per device: all of it where the server predicts that, else keys and values alone. */
function lanesLine({ parts, totals }) {
  const { lanes, peak_kv_bytes: kv, peak_bytes: peaks = {} } = parts.at(-1).timeline;
  const devices = Object.entries(peaks);
  const memory = devices.length
    ? `memory ${peakWords(devices.map(([, peak]) => peak), "device")}`
    : `KV ${peakWords(kv, "lane")}`;
  return `${plural(lanes.length, "lane")}, ${totals.layout} · ${memory} (${totals.model})`;
}

/** What each holds at most, in few words; one's own is told under the pointer. */
function peakWords(peaks, what) {
  const all = peaks.map(bytes);
  if (new Set(all).size === 1) return all.length > 1 ? `${all[0]} each` : all[0];
  return all.length < 4 ? all.join(", ") : `${bytes(Math.min(...peaks))} to ${bytes(Math.max(...peaks))} a ${what}`;
}

/** How far a run is or how long it took, and what it saved; null when nothing has run. */
function runLine(index, runs) {
  const parts = index.parts.map((part) => runs[part.key]).filter(Boolean);
  if (!parts.length) return null;
  const length = parts.reduce((sum, run) => sum + Math.max(...run.spans.map((span) => span.end_s), 0), 0);
  const last = parts.at(-1);
  if (last.state === "running") return `running: ${last.done}/${last.total} tasks · ${seconds(length)}`;
  if (last.state === "stopped") return `stopped at ${last.done}/${last.total} tasks · ${seconds(length)}`;
  const { chunks, forwards } = last.reused ?? { chunks: 0, forwards: 0 };
  const saved = forwards ? ` · ${chunks} of ${index.video.num_chunks} chunks reused, ${forwards} forwards saved` : "";
  return `measured ${seconds(length)}${saved}`;
}

/** One line about what is under the pointer. */
export function describe(index, item) {
  if (!item) return "";
  const lit = highlights(index, item);
  if (item.kind === "anchor") {
    const at = (4 * item.frame) / index.video.fps; // the last of its four video frames
    return `anchor ${item.index} at ${at.toFixed(2)} s (latent frame ${item.frame}) · read by chunks ${ranges(lit.chunks) || "none"}`;
  }
  if (item.kind === "chunk") return describeChunk(index, item, lit);
  if (item.kind === "lane") return describeLane(index, item);
  const when = item.measured
    ? `${seconds(item.measured.end_s - item.measured.start_s)} at ${seconds(item.measured.start_s)}`
    : `from ${predictedAt(index, item)}`;
  return `${item.task} · ${when}${reads(index, lit)}`;
}

function describeChunk(index, item, lit) {
  const { fps } = index.video;
  const [from, to] = videoSeconds(item.frames, fps);
  const frames = `frames ${Math.round(from * fps)}–${Math.round(to * fps) - 1}`;
  return `chunk ${item.index} (${from.toFixed(1)}–${to.toFixed(1)} s, ${frames})${reads(index, lit)}`;
}

function describeLane(index, item) {
  const { spans, timeline, extent } = index.parts.at(-1);
  const own = [...spans.values()].filter((span) => span.lane === item.index);
  const busy = own.reduce((sum, span) => sum + span.end_s - span.start_s, 0) / extent;
  const told = [plural(own.length, "task"), `busy ${Math.round(100 * busy)} %`];
  const kv = timeline.peak_kv_bytes[item.index];
  if (kv !== undefined) told.push(`KV ${bytes(kv)}`);
  const device = timeline.lanes[item.index]?.device;
  const all = timeline.peak_bytes?.[device];
  if (all !== undefined) told.push(`${bytes(all)} on ${device} at most`);
  return `lane ${item.index} (${item.text}): ${told.join(" · ")}`;
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
