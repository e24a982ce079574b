import assert from "node:assert/strict";
import { test } from "node:test";

import { countLines, textHeight } from "../../web/js/shown_text.js";

const measure = () => 10; // every letter is ten pixels wide

test("lines break where they are full, at any letter, and where the text says so", () => {
  assert.equal(countLines("", 50, measure), 1);
  assert.equal(countLines("12345", 50, measure), 1);
  assert.equal(countLines("123456", 50, measure), 2);
  assert.equal(countLines("12345\n\n1234567890", 50, measure), 1 + 1 + 2);
});

test("a letter wider than the node has a line of its own", () => {
  assert.equal(countLines("한글", 5, measure), 2);
});

test("a text's height grows with its lines, up to what the editor shows", () => {
  const width = 20 + 32 + 50; // margins, paddings, five letters
  assert.equal(textHeight("123456", width, measure) - textHeight("12345", width, measure), 16);
  assert.equal(textHeight("1234567890".repeat(9), width, measure), 200 + 20);
});
