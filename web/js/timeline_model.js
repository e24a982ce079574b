// The timeline without the page: a plan's JSON and a run's events in; rectangles, labels and answers about a point out.
// Nothing here computes a schedule: the server's simulation is drawn as it comes.

export const HEADLINES = 3; // lines of text above the picture
export const SIZES = { pad: 8, line: 15, gutter: 50, strip: 28, marker: 9, gap: 12, minRow: 10, maxRow: 34, minWidth: 220 };

/** A run's events so far: measured spans of the two parts, and pictures by latent frame. */
export function noRuns() {
  return { planner: null, render: null, pictures: { anchor: {}, chunk: {} }, active: null };
}

/** Take in one flashforward.span event. A new run replaces its part; a new planner's run starts all over. */
export function applySpans(runs, event) {
  const key = event.planner_only ? "planner" : "render";
  const before = runs[key]?.id === event.run ? runs[key] : null;
  const kept = before || key === "render" ? runs : noRuns();
  const run = {
    id: event.run,
    lanes: event.lanes,
    givenAnchors: Boolean(event.given_anchors),
    spans: [...(before?.spans ?? []), ...event.spans],
    done: event.done,
    total: event.total,
    state: "running",
    sha256: null,
    reused: null,
  };
  return { ...kept, [key]: run, active: key };
}

/** Take in one flashforward.preview event. */
export function applyPictures(runs, event) {
  const pictures = { anchor: { ...runs.pictures.anchor }, chunk: { ...runs.pictures.chunk } };
  for (const { kind, frame, image } of event.pictures) pictures[kind][frame] = image;
  return { ...runs, pictures };
}

/** Take in flashforward.done: the full timeline replaces what came in batches. */
export function applyDone(runs, event) {
  const key = event.planner_only ? "planner" : "render";
  if (runs[key]?.id !== event.run) {
    if (!event.reused?.forwards) return runs;
    return applyDone(applySpans(runs, { ...event, spans: [], done: 0, total: 0 }), event); // all of it was there already
  }
  const spans = event.timeline?.spans ?? runs[key].spans;
  return { ...runs, [key]: { ...runs[key], spans, sha256: event.sha256, reused: event.reused ?? null, state: "done" } };
}

/** The run was cancelled or failed. */
export function applyStop(runs) {
  const stopped = (run) => (run?.state === "running" ? { ...run, state: "stopped" } : run);
  return { ...runs, planner: stopped(runs.planner), render: stopped(runs.render) };
}

/** "kv/7/2/stage2" -> {space, index, level, bank}. */
export function parseSlot(text) {
  const [space, index, level, bank = ""] = text.split("/");
  return { space, index: Number(index), level: Number(level), bank };
}

/** The plan's runs in the order in which they happen. */
export function partsOf(plan) {
  const render = { key: "render", title: "render", graph: plan.graph, timeline: plan.timeline };
  return plan.planner ? [{ key: "planner", title: "anchors", ...plan.planner }, render] : [render];
}

/** Prepare a plan for drawing and for questions; done once per plan. */
export function indexPlan(plan) {
  const parts = partsOf(plan).map((part) => {
    const spans = new Map(part.timeline.spans.map((span) => [span.task, span]));
    const tasks = new Map(part.graph.tasks.map((task) => [task.id, task]));
    const writers = new Map(part.graph.tasks.flatMap((task) => task.writes.map((slot) => [slot, task.id])));
    return { ...part, spans, tasks, writers, extent: Math.max(...part.timeline.spans.map((s) => s.end_s), 1e-9) };
  });
  return { plan, parts, video: plan.video, totals: plan.totals };
}

/**
 * What a task's attention reads besides its own keys: chunks and anchors, by index. What a KV policy keeps up to a chunk
 * may come from any chunk before it.
 */
export function readsOf(task) {
  const chunks = new Set();
  const anchors = new Set();
  for (const { space, index, bank } of task.reads.map(parseSlot)) {
    if (space === "anchor_kv") anchors.add(index);
    else if (space === "kv") chunks.add(index);
    else if (space === "policy_state" && !bank.endsWith(".own")) for (let n = 0; n <= index; n += 1) chunks.add(n);
  }
  return { chunks, anchors };
}

const key = (part, task) => `${part}:${task}`;
const union = (sets) => new Set(sets.flatMap((set) => [...set]));

/** What to light up when `item` is under the pointer: the chunks, anchors and tasks it reads, or that read it. */
export function highlights(index, item) {
  if (!item) return { chunks: new Set(), anchors: new Set(), tasks: new Set() };
  if (item.kind === "task") return taskHighlights(index, item);
  if (item.kind === "lane") return laneHighlights(index, item);
  const render = index.parts.at(-1);
  const all = [...render.tasks.values()].filter((task) => task.role === "renderer");
  if (item.kind === "anchor") {
    const readers = all.filter((task) => readsOf(task).anchors.has(item.index));
    const own = index.parts.flatMap((part) => ownAnchorTasks(index, part, item.index));
    return {
      chunks: new Set(readers.map((task) => task.index)),
      anchors: new Set([item.index]),
      tasks: new Set([...own, ...readers.map((task) => key("render", task.id))]),
    };
  }
  const own = all.filter((task) => task.index === item.index);
  const reads = own.map(readsOf);
  return {
    chunks: union(reads.map((read) => read.chunks)),
    anchors: union(reads.map((read) => read.anchors)),
    tasks: new Set(own.map((task) => key("render", task.id))),
  };
}

function ownAnchorTasks(index, part, anchor) {
  const block = index.video.anchor_blocks.findIndex((members) => members.includes(anchor));
  const tasks = [...part.tasks.values()].filter((task) => task.role === "planner" && task.index === block);
  return tasks.map((task) => key(part.key, task.id));
}

function laneHighlights(index, item) {
  const own = index.parts.flatMap((part) =>
    [...part.spans.values()].filter((span) => span.lane === item.index).map((span) => key(part.key, span.task)),
  );
  return { chunks: new Set(), anchors: new Set(), tasks: new Set(own) };
}

function taskHighlights(index, item) {
  const part = index.parts.find((candidate) => candidate.key === item.part);
  const task = part.tasks.get(item.task);
  const parents = task.reads.map((slot) => part.writers.get(slot)).filter(Boolean);
  return { ...readsOf(task), tasks: new Set([item.task, ...parents].map((id) => key(item.part, id))) };
}

/** Whether a task's rectangle is lit by `lit`. */
export const isLit = (lit, item) => lit.tasks.has(key(item.part, item.task));

/** The colour group of a task: planner, its stage, or commit for what only changes KV. */
export function toneOf(task) {
  if (task.kind === "commit" || task.kind === "compact") return "commit";
  return task.role === "planner" ? "planner" : `stage${task.stage}`;
}

export function numLanes(index, runs) {
  const measured = index.parts.map((part) => runs[part.key]?.lanes.length ?? 0);
  return Math.max(...index.parts.map((part) => part.timeline.lanes.length), ...measured, 1);
}

/** The height in pixels that shows every lane well. */
export function wantedHeight(lanes) {
  const { pad, line, strip, marker, gap } = SIZES;
  return 2 * pad + (HEADLINES + 3) * line + strip + marker + 2 * gap + Math.max(40, Math.min(lanes, 8) * 20);
}

/** Everything to draw, in pixels from the top left of a `width` x `height` view. */
export function layout({ index, runs, width, height }) {
  const { pad, line, strip, marker, gap, gutter } = SIZES;
  const top = pad + HEADLINES * line + 2;
  const lanesTop = top + strip + marker + gap + line;
  const bottom = height - pad - 2 * line;
  const count = numLanes(index, runs);
  const row = Math.max(SIZES.minRow, Math.min(SIZES.maxRow, (bottom - lanesTop) / count));
  const area = { x: pad + gutter, y: lanesTop, w: Math.max(1, width - 2 * pad - gutter), row, count };
  const sections = sectionsOf(index, area);
  return {
    width,
    height,
    area,
    sections,
    tasks: sections.flatMap((section) => taskItems(section, runs, area)),
    ...stripItems(index, runs, { x: pad, y: top, w: width - 2 * pad, h: strip }),
    lanes: laneLabels(index, runs, area),
    infoY: height - pad - line,
  };
}

/** Where each part lies: side by side, as wide as it is long. */
function sectionsOf(index, area) {
  const gap = index.parts.length > 1 ? SIZES.gap : 0;
  const total = index.parts.reduce((sum, part) => sum + part.extent, 0);
  const unit = (area.w - gap * (index.parts.length - 1)) / total;
  let x = area.x;
  return index.parts.map((part) => {
    const section = { part, key: part.key, title: part.title, x, w: part.extent * unit, unit };
    x += section.w + gap;
    return section;
  });
}

/**
 * How measured seconds become the prediction's units: what has run lies over its ghosts, from the first one's start to
 * the last one's end. A render that reuses an earlier one's beginning starts late in the prediction.
 */
export function liveScale(part, spans) {
  const ghosts = spans.map((span) => part.spans.get(span.task)).filter(Boolean);
  const measured = [Math.min(...spans.map((span) => span.start_s)), Math.max(...spans.map((span) => span.end_s))];
  const predicted = ghosts.length
    ? [Math.min(...ghosts.map((ghost) => ghost.start_s)), Math.max(...ghosts.map((ghost) => ghost.end_s))]
    : [0, part.extent];
  const length = measured[1] - measured[0];
  const scale = length > 0 ? (predicted[1] - predicted[0]) / length : 0;
  return { scale, offset: predicted[0] - measured[0] * scale };
}

function taskItems(section, runs, area) {
  const { part } = section;
  const spans = runs[part.key]?.spans ?? [];
  const { scale, offset } = liveScale(part, spans);
  const measured = new Map(spans.map((span) => [span.task, span]));
  const at = (span, { scale: by, offset: from }, inset) => ({
    x: section.x + (from + span.start_s * by) * section.unit,
    y: area.y + span.lane * area.row + inset,
    w: Math.max(0.5, (span.end_s - span.start_s) * by * section.unit),
    h: area.row - 2 - inset,
  });
  return part.graph.tasks.map((task) => {
    const ran = measured.get(task.id);
    const ghost = part.spans.get(task.id);
    return {
      kind: "task",
      part: part.key,
      task: task.id,
      tone: toneOf(task),
      index: task.index,
      label: task.role === "planner" ? `b${task.index}` : String(task.index),
      predicted: ghost,
      measured: ran ?? null,
      ghost: at(ghost, { scale: 1, offset: 0 }, 0),
      box: ran ? at(ran, { scale, offset }, Math.round(area.row / 4)) : null,
    };
  });
}

function stripItems(index, runs, box) {
  const { video } = index;
  const unit = box.w / video.latent_frames;
  const chunks = video.chunks.map(([start, stop], chunk) => ({
    kind: "chunk",
    index: chunk,
    frames: [start, stop],
    x: box.x + start * unit,
    y: box.y,
    w: (stop - start) * unit,
    h: box.h,
    picture: pictureOf(runs.pictures, video.anchors, start, stop),
  }));
  const anchors = video.anchors.map((frame, anchor) => ({
    kind: "anchor",
    index: anchor,
    frame,
    x: box.x + (frame + 0.5) * unit,
    y: box.y + box.h + 1,
    w: SIZES.marker,
    h: SIZES.marker,
  }));
  return { chunks, anchors };
}

/** A chunk's own picture; before there is one, that of an anchor that lies in it. */
function pictureOf(pictures, anchors, start, stop) {
  const own = pictures.chunk[start + Math.floor((stop - start) / 2)];
  const anchor = anchors.find((frame) => frame >= start && frame < stop && pictures.anchor[frame]);
  return own ?? pictures.anchor[anchor] ?? null;
}

function laneLabels(index, runs, area) {
  const known = runs.render?.lanes ?? index.parts.at(-1).timeline.lanes;
  return Array.from({ length: area.count }, (_, lane) => {
    const device = known[lane]?.device || `lane${lane}`;
    const shared = known.filter((other) => other.device === device).length > 1;
    const text = shared ? `${device} ·${lane}` : device;
    return { kind: "lane", index: lane, text, x: SIZES.pad, y: area.y + lane * area.row, w: SIZES.gutter, h: area.row };
  });
}

const inside = (box, x, y) => box && x >= box.x && x <= box.x + box.w && y >= box.y && y <= box.y + box.h;

/** What is at a point, or null. Measured boxes lie over ghosts; anchors over chunks. */
export function hitTest(view, x, y) {
  const near = view.anchors.filter((anchor) => inside({ ...anchor, x: anchor.x - anchor.w / 2 }, x, y));
  return (
    near[0] ??
    view.chunks.find((chunk) => inside(chunk, x, y)) ??
    view.tasks.find((task) => inside(task.box, x, y)) ??
    view.tasks.find((task) => inside(task.ghost, x, y)) ??
    view.lanes.find((lane) => inside(lane, x, y)) ??
    null
  );
}

/** The task that an item still stands for in a fresh layout, after a redraw. */
export function sameItem(view, item) {
  if (!item) return null;
  const list = { task: view.tasks, chunk: view.chunks, anchor: view.anchors, lane: view.lanes }[item.kind];
  return list.find((other) => other.index === item.index && other.task === item.task && other.part === item.part) ?? null;
}
