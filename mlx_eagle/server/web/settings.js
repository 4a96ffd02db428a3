// The settings, and what is kept over a reload: the key in this tab alone, the rest in the browser.

const OPTIONS = ["system", "temperature", "max_tokens", "num_draft_tokens", "tree", "seed"];
const WHOLE = /^\d{1,20}$/;
const MOST_KEPT = 60; // messages
const MOST_LETTERS = 1_500_000; // of all that is kept

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

/** Keep messages, the oldest left out where they are too many or too long. */
function keep(messages) {
  let kept = messages.slice(-MOST_KEPT);
  while (kept.length && JSON.stringify(kept).length > MOST_LETTERS) kept = kept.slice(1);
  while (!store("conversation", kept) && kept.length) kept = kept.slice(Math.ceil(kept.length / 2));
}

function setUpOptions() {
  const values = stored("options", {});
  for (const name of OPTIONS) {
    const field = byId(name);
    field.value = typeof values[name] === "string" ? values[name] : "";
    if (server[name] !== undefined && server[name] !== null) field.placeholder = String(server[name]);
    field.addEventListener("change", () => {
      store("options", Object.fromEntries(OPTIONS.map((each) => [each, byId(each).value])));
    });
  }
  byId("tree").placeholder = server.tree || "none, or such as 4x4:16";
  byId("key").value = stored("key", "", sessionStorage);
  byId("key").addEventListener("change", () => store("key", byId("key").value, sessionStorage));
  byId("key-label").hidden = !server.needs_key;
  byId("model").textContent = server.model || "";
  const marks = byId("marks");
  marks.checked = stored("marks", true) !== false;
  const mark = () => document.body.classList.toggle("marked", marks.checked);
  marks.addEventListener("change", () => {
    store("marks", marks.checked);
    mark();
  });
  mark();
  if (matchMedia("(max-width: 52rem)").matches) {
    for (const name of ["strip", "settings"]) byId(name).open = false;
    if (server.needs_key && !byId("key").value) byId("settings").open = true;
  }
}

const theKey = () => byId("key").value.trim();

/** The fields of a request as the settings say; what is left open, the server decides. */
function optionsNow() {
  const number = (text) => (text !== "" && Number.isFinite(Number(text)) ? Number(text) : text);
  const fields = {};
  for (const name of OPTIONS) {
    const text = byId(name).value.trim();
    if (name === "system" || text === "") continue;
    if (name === "tree") fields.tree = text;
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
