// The conversation: questions, answers as they come, and the buttons below them.

const MOST_DRAFTED = 1000; // tokens of one draft
const ANSWERS_KEPT_OPEN = 60; // pixels from the end of the log at which it follows the text

class Chat {
  constructor() {
    this.messages = []; // {role: "user", content} and {role: "assistant", answer}
    this.running = null; // the controller of the request that is being answered
    this.log = byId("log");
    const kept = stored("conversation", []);
    const isWhole = Array.isArray(kept) && kept.every(isMessage);
    if (isWhole) this.messages = kept.map(restored);
    this.rebuild();
    if (!isWhole) this.log.append(element("p", "note", "What was kept of a conversation here could not be read, and is gone."));
  }

  get answers() {
    return this.messages.filter((message) => message.answer).map((message) => message.answer);
  }

  save() {
    keep(this.messages);
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
      const words = "Tokens that the draft model guessed, and the target confirmed, are marked as they come.";
      this.log.append(element("p", "empty", words));
    }
    this.messages.forEach((message) => {
      if (message.role === "user") this.log.append(questionNode(message.content));
      else this.log.append(new AnswerView(message.answer).node);
    });
    this.addTools();
    showStrip(this.answers.at(-1), this.answers);
    this.log.scrollTop = this.log.scrollHeight;
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
      }
      for (const button of tools.children) button.type = "button";
      node.append(tools);
    });
  }

  send(text) {
    this.messages.push({ role: "user", content: text });
    this.log.querySelector(".empty")?.remove();
    this.log.append(questionNode(text));
    return this.answer();
  }

  regenerate() {
    if (this.running || this.messages.at(-1)?.role !== "assistant") return undefined;
    this.messages.pop();
    this.log.lastElementChild.remove();
    byId("question").focus();
    return this.answer();
  }

  forget() {
    this.stop();
    this.messages = [];
    this.save();
    this.rebuild();
  }

  stop() {
    this.running?.abort();
  }

  async answer() {
    const body = { messages: this.history(), ...optionsNow() };
    const answer = new Answer();
    const message = { role: "assistant", answer };
    const messages = this.messages;
    const view = new AnswerView(answer);
    messages.push(message);
    this.save();
    for (const node of this.log.querySelectorAll("#again")) node.remove();
    this.log.append(view.node);
    this.log.scrollTop = this.log.scrollHeight;
    this.running = new AbortController();
    setBusy("send", "stop", true);
    say("The answer has begun.");
    await follow(answer, body, this.running.signal, () => {
      if (messages !== this.messages) return;
      const follows = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < ANSWERS_KEPT_OPEN;
      view.show();
      showStrip(answer, this.answers);
      if (follows) this.log.scrollTop = this.log.scrollHeight;
    });
    this.running = null;
    setBusy("send", "stop", false);
    if (messages !== this.messages) return;
    this.addTools();
    this.log.scrollTop = this.log.scrollHeight;
    this.save();
    if (!answer.isBad) say(answer.note || `The answer is complete: ${answer.numTokens} tokens.`);
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
  const numbers = ["drafted_tokens", "accepted_tokens", "target_passes", "emitted_tokens", "batched_tokens"];
  return typeof counts === "object" && numbers.every((name) => isCount(counts[name])) &&
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

/** For screen readers. */
function say(text) {
  byId("status").textContent = text;
}

function questionNode(text) {
  return element("article", "message question", element("h3", "", "You"), element("div", "text", text));
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
    this.thoughts = element("div", "plain");
    this.reasoning = element("details", "reasoning", element("summary", "", "Reasoning"), this.thoughts);
    this.node = element("article", "message answer", element("h3", "", "Model"), this.reasoning, this.text, this.note);
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
    this.note.textContent = answer.note;
    this.note.hidden = !answer.note;
    this.note.classList.toggle("bad", answer.isBad);
    if (answer.isBad) this.note.setAttribute("role", "alert");
  }
}
