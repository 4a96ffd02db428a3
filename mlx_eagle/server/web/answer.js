// An answer as it comes: its text, where each token stands in it, and what was drafted.

const TOKEN_ID = 0, DEPTH = 1, LENGTH = 2, START = 3, END = 4, KIND = 5; // of a token kept as a list
const COPIED = ["copied_tokens", "accepted_copied_tokens"];
const COUNTED = ["drafted_tokens", "accepted_tokens", ...COPIED, "target_passes", "emitted_tokens", "batched_tokens"];
const SHORTEST = 0.01; // seconds: no pass of a model takes less, so what came sooner had waited on its way
const IN_TEXT = 0, IN_REASONING = 1, IN_BATCH = 2; // bits of KIND

class Answer {
  constructor(kept = {}) {
    this.text = "";
    this.reasoning = "";
    this.tokens = []; // lists, see above; a token whose text came in parts is there once per part
    this.indexes = []; // their numbers
    this.events = [];
    this.counts = null; // the server's, once the answer is complete
    this.seconds = 0; // from the first token to the latest
    this.firstAfter = 0; // seconds from the request to the first token
    this.finish = null;
    this.note = ""; // why it is not complete
    this.isBad = false; // whether that is an error
    Object.assign(this, kept);
    this.times = null; // of a running answer: asked, first
    this.before = null; // of one that goes on after its end: what it had been
    this.tally = new Tally();
    this.marks = { text: [], reasoning: [] };
    this.waiting = { text: [], reasoning: [] }; // tokens without text of their own
    this.tokens.forEach((token, i) => this.count(token, this.indexes[i]));
  }

  begin() {
    this.times = { asked: performance.now(), first: null };
    this.before = this.tokens.length
      ? { seconds: this.seconds, firstAfter: this.firstAfter, counts: this.figures, index: this.indexes.at(-1) + 1 } : null;
    this.counts = this.finish = null;
    this.note = "";
    this.isBad = false;
  }

  /** Take a chunk of the server's stream. */
  take(chunk) {
    const now = performance.now();
    const choice = chunk.choices[0];
    if (!choice) return;
    const delta = choice.delta || {};
    if (this.times && this.times.first === null && (delta.content || delta.reasoning || chunk.draft?.tokens.length)) {
      this.times.first = now;
      this.firstAfter = this.before?.firstAfter ?? (now - this.times.asked) / 1000;
    }
    if (this.times && this.times.first !== null) this.seconds = (this.before?.seconds ?? 0) + (now - this.times.first) / 1000;
    if (chunk.draft) {
      for (const token of chunk.draft.tokens) this.add(token);
      this.events.push(...chunk.draft.drafting_events);
      if (chunk.draft.counts) this.counts = this.before ? addedCounts(this.before.counts, chunk.draft.counts) : chunk.draft.counts;
    } else {
      this.text += delta.content || "";
      this.reasoning += delta.reasoning || "";
    }
    if (choice.finish_reason) this.finish = choice.finish_reason;
  }

  add(reported) {
    const place = reported.reasoning ? "reasoning" : "text";
    const start = this[place].length;
    this[place] += reported.text;
    const kind = (reported.reasoning ? IN_REASONING : IN_TEXT) | (reported.batched ? IN_BATCH : 0);
    const token = [reported.id, reported.depth, reported.length, start, this[place].length, kind];
    const index = reported.index + (this.before?.index ?? 0);
    this.tokens.push(token);
    this.indexes.push(index);
    this.count(token, index);
  }

  count(token, index) {
    const isNew = index !== this.lastIndex;
    this.lastIndex = index;
    if (isNew) this.tally.add(token, index);
    const place = token[KIND] & IN_REASONING ? "reasoning" : "text";
    const group = this.waiting[place];
    group.push(token);
    if (token[START] === token[END]) return;
    this.waiting[place] = [];
    const depths = group.filter((part) => part[DEPTH] > 0).map((part) => part[DEPTH]);
    if (!depths.length) return;
    this.marks[place].push({
      start: token[START],
      end: token[END],
      depth: depths.at(-1),
      label: labelOf(group, depths),
      token: index,
    });
  }

  get numTokens() {
    return this.tally.numTokens;
  }

  get tokensPerSecond() {
    return this.seconds > SHORTEST ? (this.numTokens - 1) / this.seconds : 0;
  }

  get speed() {
    return this.tokensPerSecond > 0 ? this.tokensPerSecond.toFixed(1) : "–";
  }

  /** The server's counts, or what has been seen so far. */
  get figures() {
    return this.counts || this.tally.counts;
  }

  get ids() {
    return this.tokens.filter((_, i) => this.indexes[i] !== this.indexes[i - 1]).map((token) => token[TOKEN_ID]);
  }

  /** What is kept over a reload. */
  toJSON() {
    const { text, reasoning, tokens, indexes, events, counts, seconds, firstAfter, finish, note, isBad } = this;
    return { text, reasoning, tokens, indexes, events, counts, seconds, firstAfter, finish, note, isBad };
  }
}

/** The counts of two parts of an answer. */
function addedCounts(one, other) {
  const found = { ...other, ...sumOf([one, other]) };
  for (const name of ["drafted_by_position", "accepted_by_position"]) {
    const [left, right] = [one[name] ?? [], other[name] ?? []];
    found[name] = Array.from({ length: Math.max(left.length, right.length) }, (_, i) => (left[i] ?? 0) + (right[i] ?? 0));
  }
  found.acceptance_by_position = found.drafted_by_position.map((n, i) => (n ? found.accepted_by_position[i] / n : 0));
  found.draft_lengths = [...one.draft_lengths, ...other.draft_lengths];
  return found;
}

/** In words: which positions of which draft. A letter may consist of several tokens. */
function labelOf(group, depths) {
  const length = Math.max(...group.map((token) => token[LENGTH]));
  const where = depths.length === 1 ? `position ${depths[0]}` : `positions ${depths.join(", ")}`;
  const rest = depths.length < group.length ? "; partly the target's own" : "";
  return `Drafted: ${where} of ${length}${rest}`;
}

/** What can be counted while an answer comes: a pass of the target ends with its own token. */
class Tally {
  constructor() {
    this.numTokens = 0;
    this.numBatched = 0;
    this.run = 0; // draft tokens since the last token of the target's own
    this.emitted = 0;
    this.lengths = [];
    this.accepted = []; // by position
    this.drafted = [];
  }

  add(token, index) {
    this.numTokens += 1;
    if (token[KIND] & IN_BATCH) this.numBatched += 1;
    if (token[DEPTH] > 0) {
      this.run = token[DEPTH];
      return;
    }
    if (index === 0) return; // it ends the prompt
    this.lengths.push(token[LENGTH]);
    for (let i = 0; i < token[LENGTH]; i += 1) {
      this.drafted[i] = (this.drafted[i] || 0) + 1;
      this.accepted[i] = (this.accepted[i] || 0) + (i < this.run ? 1 : 0);
    }
    this.emitted += this.run + 1;
    this.run = 0;
  }

  get counts() {
    const passes = this.lengths.length;
    const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
    return {
      drafted_tokens: sum(this.drafted),
      accepted_tokens: sum(this.accepted),
      target_passes: passes,
      emitted_tokens: this.emitted,
      batched_tokens: this.numBatched,
      mean_acceptance_length: passes ? this.emitted / passes : 1,
      drafted_by_position: this.drafted,
      accepted_by_position: this.accepted,
      acceptance_by_position: this.drafted.map((n, i) => this.accepted[i] / n),
      draft_lengths: this.lengths,
    };
  }
}
