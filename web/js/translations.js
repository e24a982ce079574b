// Keeps the nodes' translations. Frontends such as 1.32 merge those of packs first and load a language of their own after
// that, which replaces them; later ones merge again themselves, and then this changes nothing.

import { app } from "../../../scripts/app.js";
import { api } from "../../../scripts/api.js";

const PATIENCE_MS = 5000;
const STEP_MS = 20;

/** The editor's messages, by a key that only its i18n library documents; undefined where that is not so. */
function editorMessages() {
  const vue = document.querySelector("#vue-app")?.__vue_app__;
  return vue?._context?.provides?.[vue.__VUE_I18N_SYMBOL__]?.global;
}

/** This pack's part of what ComfyUI serves: language -> messages. */
async function ownTranslations() {
  const response = await api.fetchApi("/i18n");
  const served = response.ok ? await response.json() : {};
  const isOurs = ([name]) => name.startsWith("FlashForward");
  const own = ({ nodeDefs = {} }) => ({ nodeDefs: Object.fromEntries(Object.entries(nodeDefs).filter(isOurs)) });
  return Object.fromEntries(Object.entries(served).map(([language, messages]) => [language, own(messages)]));
}

/** Nodes are registered next, with the messages that are there by then. */
async function languageLoaded(messages) {
  const wanted = app.extensionManager?.setting?.get("Comfy.Locale");
  for (let waited = 0; wanted && messages.locale.value !== wanted && waited < PATIENCE_MS; waited += STEP_MS) {
    await new Promise((resolve) => setTimeout(resolve, STEP_MS));
  }
}

app.registerExtension({
  name: "FlashForward.Translations",

  async init() {
    const messages = editorMessages();
    if (!messages?.setLocaleMessage || !messages.mergeLocaleMessage) return;
    const own = await ownTranslations();
    const set = messages.setLocaleMessage;
    messages.setLocaleMessage = (language, loaded) => {
      set(language, loaded);
      if (own[language]) messages.mergeLocaleMessage(language, own[language]);
    };
    await languageLoaded(messages);
    for (const [language, ours] of Object.entries(own)) messages.mergeLocaleMessage(language, ours);
  },
});
