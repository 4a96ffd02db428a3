// The settings, and what is kept over a reload: the key in this tab alone, the rest in the browser.

const OPTIONS = ["system", "temperature", "max_tokens", "stop", "num_draft_tokens", "tree", "seed"];
const WHOLE = /^\d{1,20}$/;
const PRESETS = {
  "Brief answers": "Answer in as few words as the question allows.",
  "Programmer": "You are a careful programmer. Show complete code, and say what you are not sure of.",
  "Plain English": "Rewrite what the user sends in plain, idiomatic English, and add nothing.",
};
// What a field must look like, where it is filled in, and how that is said.
const CHECKS = {
  temperature: [(text) => /^\d{1,3}(\.\d{1,9})?$/.test(text), "The temperature is a number from 0 on, such as 0.7."],
  max_tokens: [(text) => WHOLE.test(text) && Number(text) > 0, "The maximum of tokens is a whole number from 1 on."],
  num_draft_tokens: [(text) => text === "auto" || WHOLE.test(text), "The draft length is a whole number, or auto."],
  tree: [(text) => ["auto", "none"].includes(text) || /^\d+x\d+:\d+$/.test(text), "A tree is WIDTHxDEPTH:NODES, such as 4x4:16."],
  seed: [(text) => WHOLE.test(text), "The seed is a whole number."],
};

const server = JSON.parse(document.querySelector('meta[name="mlx-eagle"]').content);

/** What is stored under a name, or `otherwise` where there is nothing usable. */
function stored(name, otherwise, area = localStorage) {
  try {
    return JSON.parse(area.getItem(`mlx-eagle.${name}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

/** False where the browser keeps nothing: a private window, or no room. */
function store(name, value, area = localStorage) {
  try {
    area.setItem(`mlx-eagle.${name}`, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

function forgetStored(name, area = localStorage) {
  try {
    area.removeItem(`mlx-eagle.${name}`);
  } catch {
    // a browser that keeps nothing has nothing to forget
  }
}

function setUpOptions() {
  const values = stored("options", {});
  for (const name of OPTIONS) {
    const field = byId(name);
    field.value = typeof values[name] === "string" ? values[name] : "";
    if (server[name] !== undefined && server[name] !== null) field.placeholder = String(server[name]);
    field.addEventListener("change", keepOptions);
    field.addEventListener("input", wrongOption);
  }
  setUpPresets();
  wrongOption();
  byId("tree").placeholder = server.tree || "none, or such as 4x4:16";
  byId("key").value = stored("key", "", sessionStorage);
  byId("key").addEventListener("change", () => store("key", byId("key").value, sessionStorage));
  byId("key-label").hidden = !server.needs_key;
  const name = /^[/~.]/.test(server.model) ? server.model.split("/").filter(Boolean).pop() : server.model;
  byId("model").textContent = [name, server.draft_model && `drafts by ${server.draft_model}`].filter(Boolean).join(" · ");
  byId("model").title = server.model;
  byId("address").textContent = new URL("v1", location.href).href;
  const marks = byId("marks");
  marks.checked = stored("marks", true) !== false;
  const mark = () => document.body.classList.toggle("marked", marks.checked);
  marks.addEventListener("change", () => {
    store("marks", marks.checked);
    mark();
  });
  mark();
  if (matchMedia("(max-width: 52rem)").matches) byId("history").open = false;
  if (server.needs_key && !byId("key").value) byId("settings").open = true;
}

function keepOptions() {
  store("options", Object.fromEntries(OPTIONS.map((each) => [each, byId(each).value])));
}

/** The first field that cannot be sent as it is, or null; all such fields are marked. */
function wrongOption() {
  let first = null;
  for (const [name, [isGood, sentence]] of Object.entries(CHECKS)) {
    const field = byId(name);
    const text = field.value.trim();
    const isWrong = text !== "" && !isGood(text);
    field.setAttribute("aria-invalid", String(isWrong));
    if (isWrong) first ??= { field, sentence };
  }
  byId("options-note").textContent = first ? first.sentence : "";
  return first;
}

/** Whether the settings can be sent; where not, the first wrong one is shown. */
function areOptionsGood() {
  const wrong = wrongOption();
  if (!wrong) return true;
  byId("settings").open = true;
  wrong.field.focus();
  return false;
}

/** System prompts by name: ours, and those that were saved here. */
function setUpPresets() {
  const kept = stored("presets", {});
  const saved = Object.fromEntries(Object.entries(Object(kept)).filter(([, text]) => typeof text === "string"));
  const choice = byId("preset");
  const show = () => {
    const names = [...Object.keys(PRESETS), ...Object.keys(saved)];
    choice.replaceChildren(...["", ...names].map((name) => new Option(name || "Presets …", name)));
  };
  choice.addEventListener("change", () => {
    byId("system").value = saved[choice.value] ?? PRESETS[choice.value] ?? "";
    keepOptions();
  });
  byId("save-preset").addEventListener("click", () => {
    const text = byId("system").value.trim();
    if (!text) return;
    const name = text.length > 30 ? `${text.slice(0, 30)}…` : text;
    saved[name] = text;
    store("presets", saved);
    show();
    choice.value = name;
  });
  show();
}

const theKey = () => byId("key").value.trim();

/** The fields of a request as the settings say; what is left open, the server decides. */
function optionsNow() {
  const number = (text) => (text !== "" && Number.isFinite(Number(text)) ? Number(text) : text);
  const fields = {};
  for (const name of OPTIONS) {
    const text = byId(name).value.trim();
    if (name === "system" || text === "") continue;
    if (name === "tree") fields.tree = text === "none" ? null : text;
    else if (name === "stop") fields.stop = text.split(",").map((word) => word.trim()).filter(Boolean);
    else if (name === "seed" && WHOLE.test(text)) fields.seed = Number(text);
    else fields[name] = number(text);
  }
  return fields;
}

/** Messages for the server, the system prompt first. */
function withSystem(messages) {
  const system = byId("system").value.trim();
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}
