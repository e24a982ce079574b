// The page's words in every language, and a speaker for each.
import { readFileSync } from "node:fs";
import { OWN, speaker } from "../../web/js/words.js";

export const LANGUAGES = ["en", "ko", "zh"];
const read = (language) => JSON.parse(readFileSync(new URL(`../../locales/${language}/main.json`, import.meta.url), "utf8"));

export const messages = Object.fromEntries(LANGUAGES.map((language) => [language, read(language)[OWN]]));
export const say = Object.fromEntries(LANGUAGES.map((language) => [language, speaker(messages[language], { language })]));
