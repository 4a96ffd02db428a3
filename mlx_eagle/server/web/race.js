// The race: one prompt without drafts, then with them, and whether both texts are the same.

class Race {
  constructor() {
    this.running = null;
  }

  async run(prompt) {
    const fields = optionsNow();
    if (Number(fields.temperature ?? server.temperature) > 0 && fields.seed === undefined) {
      fields.seed = Math.floor(Math.random() * 2 ** 32); // both draw the same noise
    }
    fields.reuse_caches = false; // an earlier chat may have left caches that serve one lane only
    // Nor may the second copy the first one's answer, or that of a chat: each lane knows its own alone.
    const salt = `${Date.now()} ${Math.random()}`;
    const drafted = { ...fields, cache_salt: `${salt} drafted` };
    if (drafted.num_draft_tokens === 0) delete drafted.num_draft_tokens;
    const plain = { ...fields, num_draft_tokens: 0, tree: null, cache_salt: `${salt} plain` };
    const messages = withSystem([{ role: "user", content: prompt }]);
    this.running = new AbortController();
    setBusy("race-start", "race-stop", true);
    const { signal } = this.running;
    const lanes = [new Lane("plain", signal), new Lane("drafted", signal)];
    byId("verdict").textContent = "Without drafts …";
    try {
      if (await lanes[0].run({ messages, ...plain })) {
        byId("verdict").textContent = "With drafts …";
        await lanes[1].run({ messages, ...drafted });
      }
      byId("verdict").textContent = verdict(lanes[0].answer, lanes[1].answer, fields.seed);
    } finally {
      this.running = null;
      setBusy("race-start", "race-stop", false);
    }
  }

  stop() {
    this.running?.abort();
  }
}

class Lane {
  constructor(name, signal) {
    this.clock = byId(`${name}-clock`);
    this.node = byId(`${name}-text`);
    this.signal = signal;
    this.answer = new Answer();
    this.node.replaceChildren();
    this.markdown = new MarkdownView(this.node);
    this.clock.textContent = "–";
  }

  /** Whether the answer is complete. */
  async run(body) {
    await follow(this.answer, body, this.signal, () => this.show());
    return this.answer.counts !== null;
  }

  show() {
    const { answer } = this;
    this.markdown.show(answer.reasoning ? `${answer.reasoning}\n\n${answer.text}` : answer.text,
      answer.reasoning ? [] : answer.marks.text);
    const { seconds, firstAfter, numTokens } = answer;
    const note = answer.finish === "length" ? "" : answer.note;
    const rest = `${answer.speed} tokens/s, ${numTokens} tokens; the first after ${firstAfter.toFixed(2)} s. ${note}`;
    this.clock.replaceChildren(element("b", "", `${(firstAfter + seconds).toFixed(2)} s `), rest);
  }
}

/** In words: identical or not, by token, and by how much the second was faster. */
function verdict(plain, drafted, seed) {
  if (plain.counts === null || drafted.counts === null) return "No verdict: one of the two is not complete.";
  const [left, right] = [plain.ids, drafted.ids];
  const drew = seed === undefined ? "" : ` Both drew with the seed ${seed}.`;
  if (left.length !== right.length || left.some((id, i) => id !== right[i])) {
    const at = left.findIndex((id, i) => id !== right[i]);
    return `Different, from token ${at < 0 ? left.length : at} on (counted from 0).${drew}`;
  }
  const whole = (answer) => answer.firstAfter + answer.seconds;
  const ratio = drafted.seconds > 0 ? whole(plain) / whole(drafted) : 0;
  plainSpeed = plain.tokensPerSecond || plainSpeed;
  const batched = drafted.counts.batched_tokens;
  const shared = batched ? ` ${batched} tokens of the second came from rounds that it shared, because others asked too.` : "";
  const speed = ratio ? ` With drafts ${ratio.toFixed(2)} times as fast, from the request to the last token.` : "";
  return `Identical: all ${left.length} tokens.${speed}${drew}${shared}`;
}
