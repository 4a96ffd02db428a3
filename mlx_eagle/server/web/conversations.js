// Conversations: their list, each under a name of its own in the browser, and files of them.

const MOST_KEPT = 60; // messages of one conversation
const MOST_LETTERS = 1_500_000; // of one conversation
const MOST_CONVERSATIONS = 200;
const MOST_BYTES = 50_000_000; // of a file to import
const TITLE_LETTERS = 48;
const FORMAT = "mlx-eagle conversations 1";

class Conversations {
  constructor() {
    this.id = String(stored("current", ""));
    const kept = stored("conversation", null); // a page of before had one
    if (Array.isArray(kept) && kept.every(isMessage)) this.write(newId(), kept);
    forgetStored("conversation");
    this.id ||= this.list[0]?.id ?? newId();
  }

  /** Entries {id, title, changed}, the latest first; read anew, for other tabs write too. */
  get list() {
    const kept = stored("conversations", []);
    const isEntry = (each) => typeof each?.id === "string" && typeof each.title === "string" && Number.isFinite(each.changed);
    return Array.isArray(kept) ? kept.filter(isEntry).sort((a, b) => b.changed - a.changed) : [];
  }

  /** The messages of a conversation; null where they cannot be read. */
  read(id) {
    const kept = stored(`conversation.${id}`, []);
    return Array.isArray(kept) && kept.every(isMessage) ? kept.map(restored) : null;
  }

  /** False where the browser has no room. */
  write(id, messages) {
    const others = this.list.filter((each) => each.id !== id);
    if (!messages.length) {
      forgetStored(`conversation.${id}`);
      return store("conversations", others);
    }
    let kept = messages.slice(-MOST_KEPT);
    while (kept.length > 1 && JSON.stringify(kept).length > MOST_LETTERS) kept = kept.slice(1);
    const entry = { id, title: titleOf(messages), changed: Date.now() };
    for (const { id: old } of others.splice(MOST_CONVERSATIONS - 1)) forgetStored(`conversation.${old}`);
    return store(`conversation.${id}`, kept) && store("conversations", [entry, ...others]);
  }

  open(id) {
    this.id = id;
    store("current", id);
  }

  remove(id) {
    this.write(id, []);
    if (id === this.id) this.open(this.list[0]?.id ?? newId());
  }

  /** All of them as the text of a file. */
  get file() {
    const conversations = this.list.map(({ id, title, changed }) => ({ title, changed, messages: this.read(id) ?? [] }));
    return JSON.stringify({ format: FORMAT, conversations }, null, 1);
  }

  /** Take those of a file; a sentence on what became of it. */
  import(text) {
    let found;
    try {
      found = JSON.parse(text);
    } catch {
      return "This file is not JSON: choose one that was exported here.";
    }
    const given = found?.conversations;
    if (found?.format !== FORMAT || !Array.isArray(given)) return "This file holds no conversations: choose one that was exported here.";
    const good = given.filter((each) => Array.isArray(each?.messages) && each.messages.length && each.messages.every(isMessage));
    const written = good.reverse().filter((each) => this.write(newId(), each.messages)).length;
    const left = given.length - written;
    return `${written} of ${given.length} conversations were imported.${left ? " The others are damaged, or the browser has no room." : ""}`;
  }
}

const newId = () => `${Date.now().toString(36)}-${Math.floor(Math.random() * 2 ** 40).toString(36)}`;

function titleOf(messages) {
  const first = messages.find((message) => message.role === "user")?.content.trim().replace(/\s+/g, " ") || "Untitled";
  return first.length > TITLE_LETTERS ? `${first.slice(0, TITLE_LETTERS)}…` : first;
}
