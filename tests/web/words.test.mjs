import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import { test } from "node:test";

import { applyDone, applySpans, applyStop, indexPlan, layout, noRuns } from "../../web/js/timeline_model.js";
import { describe, headline } from "../../web/js/timeline_words.js";
import { speaker, speakerFor } from "../../web/js/words.js";
import { LANGUAGES, messages, say } from "./locales.mjs";
import { plan, spanEvent } from "./plan.mjs";

const JS = new URL("../../web/js/", import.meta.url);
const RAN = [{ task: "renderer/denoise/c0/s0", lane: 0, start_s: 0.5, end_s: 0.9 }];
const OTHERS = LANGUAGES.filter((language) => language !== "en");
const FORMS = new Set(["zero", "one", "two", "few", "many", "other"]);
const isForms = (value) => typeof value === "object" && Object.keys(value).every((name) => FORMS.has(name));

/** Every message by its key, with its forms together. */
function flat(at, prefix = "") {
  return Object.entries(at).flatMap(([name, value]) =>
    typeof value === "string" || isForms(value) ? [[prefix + name, value]] : flat(value, `${prefix}${name}.`),
  );
}

const holes = (text) => [...new Set([...text.matchAll(/\{(\w+)\}/g)].map(([, name]) => name))].sort();
const texts = (value) => (typeof value === "string" ? [value] : Object.values(value));

test("every language has every message, with the same values in it", () => {
  const english = new Map(flat(messages.en));
  for (const language of OTHERS) {
    const found = new Map(flat(messages[language]));
    assert.deepEqual([...found.keys()].sort(), [...english.keys()].sort(), language);
    for (const [key, value] of found) {
      for (const text of texts(value)) assert.deepEqual(holes(text), holes(texts(english.get(key)).at(-1)), `${language}: ${key}`);
    }
  }
});

test("every language has the forms that it needs", () => {
  for (const language of LANGUAGES) {
    const needed = new Intl.PluralRules(language).resolvedOptions().pluralCategories;
    for (const [key, value] of flat(messages[language]).filter(([, each]) => isForms(each))) {
      assert.deepEqual(Object.keys(value).sort(), [...needed].sort(), `${language}: ${key}`);
    }
  }
});

test("what the page says is among the messages, and every message is said", () => {
  const source = readdirSync(JS).map((file) => readFileSync(new URL(file, JS), "utf8")).join("\n");
  const said = [...source.matchAll(/say\(\s*["`]([^"`]+)["`]/g)].map(([, key]) => key);
  const patterns = said.map((key) => new RegExp(`^${key.replaceAll(".", "\\.").replace(/\$\{[^}]+\}/g, "\\w+")}$`));
  const known = flat(messages.en).map(([key]) => key);
  for (const pattern of patterns) assert.ok(known.some((key) => pattern.test(key)), `${pattern} is no message`);
  for (const key of known) assert.ok(patterns.some((pattern) => pattern.test(key)), `${key} is never said`);
});

test("one and several, and places that move with the language", () => {
  assert.deepEqual([1, 2].map((n) => say.en("chunks", { n })), ["1 chunk", "2 chunks"]);
  assert.deepEqual([1, 2].map((n) => say.ko("chunks", { n })), ["청크 1개", "청크 2개"]);
  const values = { chunks: 2, total: 3, forwards: 5 };
  assert.equal(say.ko("run.reused", values), "청크 3개 중 2개 재사용, 순전파 5회 절약");
  assert.equal(say.zh("run.reused", values), "3 个分块中复用 2 个，省去 5 次前向计算");
});

test("a value is put in as it is, whatever is written in it", () => {
  assert.equal(speaker({ a: "{x} {y}" })("a", { x: "{y}", y: "$&" }), "{y} $&");
});

test("what a language lacks is said in English, and what nobody knows by its key", () => {
  const served = { en: { flashforward: messages.en }, ko: { flashforward: { part: { planner: "앵커" } } }, fr: {} };
  assert.equal(speakerFor(served, "ko")("part.planner"), "앵커");
  assert.equal(speakerFor(served, "ko")("part.render"), "render");
  assert.equal(speakerFor(served, "fr")("chunks", { n: 1 }), "1 chunk");
  assert.equal(speakerFor(null, "ko")("part.render"), "part.render");
});

/** Everything that a timeline says of a plan: before, during and after a run, and of every item. */
function all(speak) {
  const known = plan({ totals: { ...plan().totals, predicted_s: 12.5, exact: false, schedule: "hiar" }, note: "preset hiar" });
  known.timeline.peak_bytes = { cpu: 2 ** 30 };
  const many = plan();
  many.timeline.peak_kv_bytes = [4, 3, 2, 1].map((n) => n * 2 ** 20);
  const running = applySpans(noRuns(), spanEvent("a", RAN));
  const done = applyDone(running, { run: "a", timeline: null, sha256: "f", reused: { chunks: 2, forwards: 5 } });
  const starts = [1.5, null].map((seconds) => plan({ video: { ...plan().video, start_seconds: seconds } }));
  const plans = [plan(), known, many, ...starts].map((each) => headline(indexPlan(each), noRuns(), speak));
  const runs = [running, applyStop(running), done].map((each) => headline(indexPlan(plan()), each, speak));
  const index = indexPlan(known);
  const view = layout({ index, runs: running, width: 360, height: 200 });
  const items = [...view.tasks, ...view.chunks, ...view.anchors, ...view.lanes].map((item) => describe(index, item, speak));
  return [...plans.flat(), ...runs.flat(), ...items].map((text) => text.replace(/(planner|renderer)\/\w+\/\S+/g, ""));
}

test("no message has a hole left open, in any language", () => {
  for (const language of LANGUAGES) {
    const open = all(say[language]).filter((text) => /[{}]|undefined|NaN|\w+\.\w+_\w+/.test(text));
    assert.deepEqual(open, [], language);
  }
});

test("a Korean or Chinese timeline has no English words but names", () => {
  const names = /\b(cpu|MiB|GiB|KV|hiar|embedded|interleaved|latent|s)\b/g;
  for (const language of OTHERS) {
    const english = all(say[language]).filter((text) => /[A-Za-z]/.test(text.replace(names, "")));
    assert.deepEqual(english, [], language);
  }
});

test("a given start is told, and so is one whose length is not known", () => {
  const first = (seconds) => headline(indexPlan(plan({ video: { ...plan().video, start_seconds: seconds } })), noRuns(), say.en)[0];
  assert.match(first(5.0625), / · 5\.06 s given$/);
  assert.match(first(null), / · start not counted$/);
  assert.doesNotMatch(first(0), /given|start/);
});
