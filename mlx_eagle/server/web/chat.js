// The conversation: questions, answers as they come, and the buttons below them.

const MOST_DRAFTED = 1000; // tokens of one draft
const ANSWERS_KEPT_OPEN = 60; // pixels from the end of the log at which it follows the text

const SAMPLES = [
  "List the twelve months of the year.",
  "Why is the sky blue?",
  "Write a Python function that says whether a number is prime.",
];

class Chat {
  constructor() {
    this.messages = []; // {role: "user", content} and {role: "assistant", answer}
    this.running = null; // the controller of the request that is being answered
    this.log = byId("log");
    this.all = new Conversations();
    this.undo = new Undo(this);
    this.open(this.all.id);
  }

  /** Show a conversation that is kept, or a new one. */
  open(id, kept = this.all.read(id)) {
    this.stop();
    this.all.open(id);
    this.messages = kept ?? [];
    this.rebuild();
    if (!kept) this.log.append(element("p", "note", "What was kept of this conversation could not be read, and is gone."));
    this.showList();
  }

  showList() {
    const entries = this.all.list.map(({ id, title }) => {
      const name = element("button", "title", title);
      const gone = element("button", "delete", "×");
      if (id === this.all.id) name.setAttribute("aria-current", "true");
      name.addEventListener("click", () => id !== this.all.id && this.open(id));
      gone.setAttribute("aria-label", `Delete "${title}"`);
      gone.addEventListener("click", () => {
        this.undo.keep(id, `"${title}" was deleted.`);
        this.all.remove(id);
        this.open(this.all.id);
        say(`"${title}" is deleted.`);
        byId("undo").focus();
      });
      for (const button of [name, gone]) button.type = "button";
      return element("li", "", name, gone);
    });
    byId("conversations").replaceChildren(...entries);
  }

  get answers() {
    return this.messages.filter((message) => message.answer).map((message) => message.answer);
  }

  save() {
    const isKept = this.all.write(this.all.id, this.messages);
    byId("history-note").textContent = isKept ? "" : "The browser has no room for this conversation: export some, and delete them.";
    this.showList();
  }

  /** What the server is sent: questions that have an answer, and the last one. */
  history() {
    const said = [];
    this.messages.forEach((message, i) => {
      const next = this.messages[i + 1];
      if (message.role === "user" && (!next || (next.answer && (next.answer.text || i + 2 === this.messages.length)))) {
        said.push({ role: "user", content: message.content });
      } else if (message.answer && message.answer.text) {
        said.push({ role: "assistant", content: message.answer.text });
      }
    });
    return withSystem(said);
  }

  rebuild() {
    this.log.replaceChildren();
    if (!this.messages.length) {
      this.log.append(this.emptyNode());
    }
    this.messages.forEach((message) => {
      if (message.role === "user") this.log.append(this.questionNode(message));
      else this.log.append(new AnswerView(message.answer).node);
    });
    this.addTools();
    showStrip(this.answers.at(-1), this.answers);
    this.log.scrollTop = this.log.scrollHeight;
  }

  /** What stands where nothing was asked yet. */
  emptyNode() {
    const samples = SAMPLES.map((text) => {
      const button = element("button", "", text);
      button.type = "button";
      button.addEventListener("click", () => this.send(text));
      return button;
    });
    const words = "Ask something. What the draft model guessed, and the target confirmed, is tinted as it comes.";
    return element("div", "empty", element("p", "", words), element("div", "samples", ...samples));
  }

  questionNode(message) {
    const edit = element("button", "", "Edit");
    edit.type = "button";
    const text = element("div", "text", message.content);
    const node = element("article", "message question", element("h3", "", "You"), text, element("div", "edits", edit));
    edit.addEventListener("click", () => this.edit(node, message));
    return node;
  }

  /** Ask a question again in other words: what came after it goes. */
  edit(node, message) {
    if (this.running) return;
    const field = element("textarea", "editor");
    field.value = message.content;
    field.setAttribute("aria-label", "Your message, in other words");
    const send = element("button", "main", "Send");
    const cancel = element("button", "", "Cancel");
    for (const button of [send, cancel]) button.type = "button";
    const form = element("div", "edits", field, element("div", "buttons", send, cancel));
    const close = () => node.replaceWith(this.questionNode(message));
    const done = () => {
      const text = field.value.trim();
      if (!text || !areOptionsGood()) return;
      this.undo.keep(this.all.id, "The question was asked in other words.");
      this.messages.splice(this.messages.indexOf(message));
      this.rebuild();
      this.send(text);
    };
    send.addEventListener("click", done);
    cancel.addEventListener("click", close);
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      done();
    });
    node.replaceChildren(node.firstChild, form);
    grow(field);
    field.focus();
  }

  addTools() {
    for (const node of this.log.querySelectorAll(".tools")) node.remove();
    this.log.querySelectorAll(".answer").forEach((node, i, nodes) => {
      const tools = element("div", "tools");
      const copy = element("button", "", "Copy");
      copy.dataset.copies = "answer";
      copy.setAttribute("aria-label", "Copy this answer");
      tools.append(copy);
      if (i + 1 === nodes.length && node === this.log.lastElementChild) {
        const again = element("button", "", "Regenerate");
        again.id = "again";
        again.addEventListener("click", () => this.regenerate());
        tools.append(again);
        if (node.answer.text && node.answer.finish !== "stop") {
          const more = element("button", "", "Continue");
          more.id = "continue";
          more.addEventListener("click", () => this.goOn());
          tools.append(more);
        }
      }
      for (const button of tools.children) button.type = "button";
      node.append(tools);
    });
  }

  send(text) {
    if (this.running || !areOptionsGood()) return undefined;
    this.log.querySelector(".empty")?.remove();
    this.log.querySelector(".problem")?.remove();
    const message = { role: "user", content: text };
    this.messages.push(message);
    this.log.append(this.questionNode(message));
    return this.answer();
  }

  regenerate() {
    if (this.running || !areOptionsGood()) return undefined;
    if (this.messages.at(-1)?.role === "assistant") {
      this.undo.keep(this.all.id, "The answer was made again.");
      this.messages.pop();
    }
    this.log.lastElementChild.remove();
    byId("question").focus();
    return this.answer();
  }

  /** Have the last answer go on where it was cut. */
  goOn() {
    const last = this.messages.at(-1);
    if (this.running || !last?.answer || !areOptionsGood()) return undefined;
    this.log.lastElementChild.remove();
    byId("question").focus();
    return this.answer(last);
  }

  begin() {
    this.open(newId());
    byId("question").focus();
  }

  stop() {
    this.running?.abort();
  }

  /** Have the model answer, or go on with ``started``. */
  async answer(started = null) {
    const body = { messages: this.history(), ...optionsNow() };
    const message = started ?? { role: "assistant", answer: new Answer() };
    if (started) body.continue_final_message = true;
    else this.messages.push(message);
    const { answer } = message;
    const { messages } = this;
    const view = new AnswerView(answer);
    this.save();
    for (const node of this.log.querySelectorAll("#again, #continue")) node.remove();
    this.log.append(view.node);
    this.log.scrollTop = this.log.scrollHeight;
    this.running = new AbortController();
    setBusy("send", "stop-answer", true);
    say("The answer has begun.");
    await follow(answer, body, this.running.signal, () => {
      if (messages !== this.messages) return;
      const follows = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < ANSWERS_KEPT_OPEN;
      view.show();
      showStrip(answer, this.answers);
      if (follows) this.log.scrollTop = this.log.scrollHeight;
    });
    this.running = null;
    setBusy("send", "stop-answer", false);
    if (messages !== this.messages) return;
    if (answer.isBad && !answer.text && !answer.reasoning) this.showProblem(view, message);
    else this.addTools();
    this.log.scrollTop = this.log.scrollHeight;
    this.save();
    if (!answer.isBad) say(answer.note || `The answer is complete: ${answer.numTokens} tokens.`);
  }

  /** An error that came in place of an answer is none. */
  showProblem(view, message) {
    this.messages.splice(this.messages.indexOf(message));
    const again = element("button", "", "Try again");
    again.id = "again";
    again.type = "button";
    again.addEventListener("click", () => this.regenerate());
    const note = element("p", "note bad", message.answer.note);
    note.setAttribute("role", "alert");
    view.node.replaceWith(element("div", "problem", note, again));
  }
}

const isCount = (value) => Number.isInteger(value) && value >= 0 && value < 1e7;
const isRate = (value) => Number.isFinite(value) && value >= 0;
const areAll = (values, test) => Array.isArray(values) && values.length < 1e6 && values.every(test);

/** Whether something that was kept is a message: whoever wrote it, and whatever became of it. */
function isMessage(kept) {
  if (kept?.role === "user") return typeof kept.content === "string";
  if (kept?.role !== "assistant" || typeof kept.answer !== "object" || kept.answer === null) return false;
  const { text, reasoning, tokens, indexes, events, counts, seconds, firstAfter, note } = kept.answer;
  return [text, reasoning, note].every((value) => typeof value === "string") &&
    isRate(seconds) && isRate(firstAfter) &&
    areAll(tokens, (token) => areAll(token, isCount) && token.length === 6 && token[LENGTH] <= MOST_DRAFTED) &&
    areAll(indexes, isCount) && indexes.length === tokens.length &&
    areAll(events, (event) => typeof event?.what === "string" && typeof event.reason === "string" && isCount(event.num_tokens)) &&
    (counts === null || areCounts(counts));
}

function areCounts(counts) {
  // What was kept before copies were counted has no counts of them.
  return typeof counts === "object" && COUNTED.every((name) => isCount(counts[name]) || (COPIED.includes(name) && !(name in counts))) &&
    isRate(counts.mean_acceptance_length) && areAll(counts.draft_lengths, isCount) &&
    areAll(counts.acceptance_by_position, isRate) && counts.acceptance_by_position.length <= MOST_DRAFTED;
}

/** A message as it was kept. */
function restored({ role, content, answer }) {
  if (role === "user") return { role, content: String(content) };
  const found = new Answer(answer);
  if (found.finish === null) found.note ||= "The page was left before it was complete.";
  return { role, answer: found };
}

/** Fill an answer from the server; `show` is called at most once per frame, and at the end. */
async function follow(answer, body, signal, show) {
  let frame = 0;
  const soon = () => {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      show();
    });
  };
  answer.begin();
  try {
    await ask(
      body,
      theKey(),
      signal,
      (chunk) => {
        answer.note = "";
        answer.take(chunk);
        soon();
      },
      (done, total) => {
        answer.note = `Reading the prompt: ${done} of ${total} tokens.`;
        soon();
      },
    );
    if (answer.finish === "length") answer.note = "It ends here because of the maximum of tokens.";
  } catch (error) {
    if (signal.aborted) {
      answer.note = "Stopped.";
    } else if (error instanceof Failure) {
      answer.note = error.message;
      answer.isBad = true;
      if (error.status === 401) askForKey();
    } else {
      throw error;
    }
  } finally {
    answer.times = null;
    cancelAnimationFrame(frame);
    show();
  }
}

function askForKey() {
  byId("key-label").hidden = false;
  byId("settings").open = true;
  byId("key").focus();
}

function setBusy(start, stop, isBusy) {
  byId(start).hidden = isBusy;
  byId(stop).hidden = !isBusy;
}

/** As high as its text, up to two fifths of the window. */
function grow(field) {
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, 0.4 * innerHeight)}px`;
}

/** For screen readers. */
function say(text) {
  byId("status").textContent = text;
}

/** One answer on the page. */
class AnswerView {
  constructor(answer) {
    this.answer = answer;
    this.text = element("div", "text");
    this.text.tabIndex = 0;
    this.text.setAttribute("role", "group");
    this.text.setAttribute("aria-label", "Answer. Left and right arrows go through its drafted tokens.");
    this.markdown = new MarkdownView(this.text);
    this.note = element("p", "note");
    this.line = element("p", "line");
    this.thoughts = element("div", "plain");
    this.reasoning = element("details", "reasoning", element("summary", "", "Reasoning"), this.thoughts);
    this.node = element("article", "message answer", element("h3", "", "Model"), this.reasoning, this.text, this.note, this.line);
    this.node.answer = answer;
    this.show();
  }

  show() {
    const { answer } = this;
    this.reasoning.hidden = !answer.reasoning;
    if (answer.reasoning) {
      this.thoughts.replaceChildren();
      new Renderer(answer.marks.reasoning).text(this.thoughts, answer.reasoning, 0);
    }
    this.markdown.show(answer.text, answer.marks.text);
    this.line.textContent = lineOf(answer);
    this.note.textContent = answer.note;
    this.note.hidden = !answer.note;
    this.note.classList.toggle("bad", answer.isBad);
    if (answer.isBad) this.note.setAttribute("role", "alert");
  }
}
