// The page's words in the editor's language: `locales/<language>/main.json`, as the server hands them out.

export const OWN = "flashforward"; // our part of the editor's messages

const find = (messages, key) => key.split(".").reduce((at, name) => at?.[name], messages);

/**
 * Make `say(key, values)` of the messages of one language, with `otherwise` for what they lack. A message with forms
 * ({one, other}) takes the form for `values.n`; `{name}` in it becomes the value of that name.
 */
export function speaker(messages, { language = "en", otherwise = {} } = {}) {
  const forms = new Intl.PluralRules(language);
  return (key, values = {}) => {
    const found = find(messages, key) ?? find(otherwise, key) ?? key;
    const text = typeof found === "string" ? found : (found[forms.select(values.n)] ?? found.other);
    return text.replace(/\{(\w+)\}/g, (hole, name) => String(values[name] ?? hole));
  };
}

/** The speaker for the editor's language, out of what the server answers at /i18n: language -> messages. */
export function speakerFor(served, language) {
  const otherwise = served?.en?.[OWN] ?? {};
  const known = served?.[language]?.[OWN] ? language : "en";
  return speaker(served?.[known]?.[OWN] ?? {}, { language: known, otherwise });
}
