// What buttons, keys and the mouse do.

setUpOptions();
const chat = new Chat();
const race = new Race();

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("question").value.trim();
  if (!text || chat.running || race.running || !areOptionsGood()) return;
  byId("question").value = "";
  grow(byId("question"));
  forgetStored("typed.question", sessionStorage);
  chat.send(text);
});
byId("stop-answer").addEventListener("click", () => chat.stop());
byId("new").addEventListener("click", () => chat.begin());
byId("question").addEventListener("input", () => grow(byId("question")));
for (const name of ["question", "race-question"]) { // what is typed outlives a reload
  const field = byId(name);
  field.value = String(stored(`typed.${name}`, field.value, sessionStorage));
  field.addEventListener("input", () => store(`typed.${name}`, field.value, sessionStorage));
}
grow(byId("question"));
byId("export").addEventListener("click", () => {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([chat.all.file], { type: "application/json" }));
  link.download = `mlx-eagle-${new Date().toISOString().slice(0, 10)}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
});
byId("import").addEventListener("click", () => byId("import-file").click());
byId("import-file").addEventListener("change", async (event) => {
  const [file] = event.target.files;
  if (!file) return;
  const isTooLarge = file.size > MOST_BYTES;
  const found = isTooLarge ? "This file is larger than 50 MB: choose one that was exported here." : chat.all.import(await file.text());
  event.target.value = "";
  chat.showList();
  byId("history-note").textContent = found;
});
byId("race-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("race-question").value.trim();
  if (text && !race.running && !chat.running && areOptionsGood()) race.run(text);
});
byId("race-stop").addEventListener("click", () => race.stop());
byId("options").addEventListener("submit", (event) => event.preventDefault());

for (const [field, form] of [["question", "composer"], ["race-question", "race-form"]]) {
  byId(field).addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId(form).requestSubmit();
  });
}
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  chat.stop();
  race.stop();
});
addEventListener("pagehide", () => chat.running && chat.save());

// Tabs, as the pattern for them has it: arrows change, Tab goes on.
const tabs = [byId("tab-chat"), byId("tab-race")];
function choose(tab) {
  for (const each of tabs) {
    const isChosen = each === tab;
    each.setAttribute("aria-selected", String(isChosen));
    each.tabIndex = isChosen ? 0 : -1;
    byId(each.getAttribute("aria-controls")).hidden = !isChosen;
  }
}
tabs.forEach((tab, i) => {
  tab.addEventListener("click", () => choose(tab));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = tabs[1 - i];
    choose(other);
    other.focus();
  });
});

// Copying: also where the page did not come over TLS and the browser gives no clipboard.
document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copies]");
  if (!button) return;
  const text = button.dataset.copies === "code"
    ? button.parentElement.querySelector("code").textContent
    : button.closest(".answer").answer.text;
  button.textContent = (await copied(text)) ? "Copied" : "Not copied";
  setTimeout(() => {
    button.textContent = "Copy";
  }, 1500);
});

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = element("textarea", "reported");
    field.value = text;
    document.body.append(field);
    field.select();
    const isDone = document.execCommand("copy");
    field.remove();
    return isDone;
  }
}

// Where a drafted token stood in its draft: under the mouse, or with the arrows in an answer.
const tip = byId("tip");
let here = null;

function point(span) {
  here?.classList.remove("here");
  here = span;
  tip.hidden = !span;
  byId("where").textContent = span ? span.dataset.label : "";
  if (!span) return;
  tip.textContent = span.dataset.label;
  const box = span.getClientRects()[0] || span.getBoundingClientRect();
  const top = box.top > 40 ? box.top - tip.offsetHeight - 4 : box.bottom + 4;
  tip.style.top = `${top}px`;
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 4))}px`;
}

const isMarked = () => document.body.classList.contains("marked");
document.addEventListener("mouseover", (event) => {
  const span = event.target.closest?.(".text .drafted, .plain .drafted");
  if (span !== here) point(span && isMarked() ? span : null);
});
document.addEventListener("keydown", (event) => {
  const text = event.target.closest?.(".answer > .text");
  if (!text || event.target !== text || !isMarked()) return;
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const spans = [...text.querySelectorAll(".drafted")];
  if (!spans.length) return;
  const at = spans.indexOf(here);
  const next = at < 0 ? (step > 0 ? 0 : spans.length - 1) : Math.max(0, Math.min(spans.length - 1, at + step));
  spans[next].scrollIntoView({ block: "nearest" });
  point(spans[next]);
  spans[next].classList.add("here");
});
document.addEventListener("focusout", () => point(null));
document.addEventListener("scroll", () => here && point(null), true);

byId("question").focus();
