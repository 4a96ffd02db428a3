// What was deleted, edited or made again can be had back, also after a reload of the tab.

const MOST_STEPS = 20;

class Undo {
  constructor(chat) {
    this.chat = chat;
    const areSteps = (kept) => Array.isArray(kept) && kept.every(isStep);
    const kept = stored("undo", {}, sessionStorage);
    this.done = areSteps(kept.done) ? kept.done : []; // the latest last: {id, said, messages before it}
    this.undone = areSteps(kept.undone) ? kept.undone : [];
    for (const name of ["undo", "redo"]) byId(name).addEventListener("click", () => this[name]());
    this.show();
  }

  /** Keep a conversation as it is, before what the sentence `said` says happens to it. */
  keep(id, said) {
    this.done.push(this.step(id, said));
    this.undone = [];
    this.show();
  }

  undo() {
    this.go(this.done, this.undone, "Undone");
  }

  redo() {
    this.go(this.undone, this.done, "Done again");
  }

  /** Put back the latest step of `from`; what there was in its place goes to `to`. */
  go(from, to, word) {
    const { id, said, messages } = from.pop();
    this.chat.stop();
    this.chat.save();
    to.push(this.step(id, said));
    this.chat.open(id, messages.map(restored));
    this.chat.save();
    this.show();
    say(`${word}: ${said}`);
    byId("question").focus();
  }

  step(id, said) {
    const messages = id === this.chat.all.id ? this.chat.messages : this.chat.all.read(id) ?? [];
    return { id, said, messages: JSON.parse(JSON.stringify(messages)) };
  }

  show() {
    const isKept = () => store("undo", { done: this.done, undone: this.undone }, sessionStorage);
    this.done.splice(0, this.done.length - MOST_STEPS);
    while (!isKept() && this.done.length > 1) this.done.shift();
    byId("undo-bar").hidden = !this.done.length && !this.undone.length;
    byId("undo").hidden = !this.done.length;
    byId("redo").hidden = !this.undone.length;
    byId("undo-text").textContent = this.done.at(-1)?.said ?? `Undone: ${this.undone.at(-1)?.said}`;
  }
}

function isStep(kept) {
  return typeof kept?.id === "string" && typeof kept.said === "string" && Array.isArray(kept.messages) && kept.messages.every(isMessage);
}
