// Markdown as nodes of the document. Text of a model only ever becomes text nodes: no HTML is
// parsed, no image is loaded, and only http and https addresses become links.
//
// Each text node knows where in the source it comes from, so that tokens can be marked in it.
// A line is {s, at}: its text without what marks the block, and where that begins in the source.
//
// A model may write anything, and the page must not freeze: all of it takes time in proportion to
// the length of the text, and what is longer than these limits is shown as it stands.

const DEEPEST = 12; // quotes and lists inside each other
const FARTHEST = 2000; // letters between the two ends of an emphasis
const MOST_INLINE = 20_000; // letters of one paragraph, heading or cell in which marks are looked for
const MOST_PARSED = 200_000; // letters of one text
const MOST_CELLS = 100; // of one row of a table
const PART = 500; // lines of plain text or code that are laid out together, once they are seen
const MOST_NODES = 1000; // elements of one text; a browser lays one out in up to 75 microseconds
const COLOURED = 0.25; // of an element is a word with a colour

function element(name, className, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,5})([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const DELIMITER = /^:?-+:?$/;
const TASK = /^\[([ xX])\][ \t]+/;
const MATHS = { "\\(": "\\)", "\\[": "\\]", "$$": "$$", "$": "$" }; // what opens TeX, and what closes it
const SPACE = /\s/;
const LETTER = /\w/;

/** The lines of a text that begins at `at` in the source. */
function linesOf(source, at = 0) {
  const lines = [];
  for (const s of source.split("\n")) {
    lines.push({ s, at });
    at += s.length + 1;
  }
  return lines;
}

const without = (line, count) => ({ s: line.s.slice(count), at: line.at + count });
const isBlank = (line) => line.s.trim() === "";

function beginsBlock(lines, i) {
  const s = lines[i].s;
  return FENCE.test(s) || HEADING.test(s) || RULE.test(s) || QUOTE.test(s) || ITEM.test(s);
}

function isTable(lines, i) {
  return i + 1 < lines.length && lines[i].s.includes("|") && lines[i + 1].s.includes("|") &&
    areDelimiters(lines[i + 1].s);
}

/** Whether a line stands between the head and the body of a table: |---|:-:| */
function areDelimiters(s) {
  const cells = s.split("|").map((cell) => cell.trim());
  if (cells[0] === "") cells.shift();
  if (cells.at(-1) === "") cells.pop();
  return cells.length > 0 && !/^ {4}/.test(s) && cells.every((cell) => DELIMITER.test(cell));
}

/** For each column of a table where its cells stand: ":-:|-:" -> ["center", "right"] */
function alignmentsOf(cells) {
  const ends = cells.map(({ s }) => [s.startsWith(":"), s.endsWith(":")]);
  return ends.map(([left, right]) => (right ? (left ? "center" : "right") : ""));
}

/** A heading's text without the signs that may close it: "a ## " -> "a" */
function withoutClosing(s) {
  const end = endBefore(s, s.length, " \t");
  const signs = endBefore(s, end, "#");
  const blank = endBefore(s, signs, " \t");
  return s.slice(0, blank < signs || signs === 0 ? blank : end);
}

/** The end of `s` without the letters of `left` before `end`. */
function endBefore(s, end, left) {
  let last = end;
  while (last > 0 && left.includes(s[last - 1])) last -= 1;
  return last;
}

/** [{kind, lines, ...}] of lines; `from` and `to` are numbers of lines. */
function blocksOf(lines) {
  const blocks = [];
  let i = 0;
  while (i < lines.length) {
    if (isBlank(lines[i])) {
      i += 1;
      continue;
    }
    const block = blockAt(lines, i);
    blocks.push(block);
    i = block.to;
  }
  return blocks;
}

function blockAt(lines, i) {
  const s = lines[i].s;
  const fence = FENCE.exec(s);
  if (fence) return codeAt(lines, i, fence);
  const heading = HEADING.exec(s);
  if (heading) {
    const line = without(lines[i], heading[0].length);
    line.s = withoutClosing(line.s);
    return { kind: "heading", level: heading[1].length, lines: [line], from: i, to: i + 1 };
  }
  if (RULE.test(s)) return { kind: "rule", lines: [], from: i, to: i + 1 };
  if (QUOTE.test(s)) {
    const taken = [];
    let to = i;
    for (; to < lines.length && QUOTE.test(lines[to].s); to += 1) {
      taken.push(without(lines[to], QUOTE.exec(lines[to].s)[0].length));
    }
    return { kind: "quote", lines: taken, from: i, to };
  }
  if (ITEM.test(s)) return listAt(lines, i);
  if (isTable(lines, i)) {
    let to = i + 2;
    while (to < lines.length && lines[to].s.includes("|")) to += 1;
    return { kind: "table", lines: lines.slice(i, to), from: i, to };
  }
  let to = i;
  let close = null; // of maths on lines of their own, none of which begins a block
  do {
    const text = lines[to].s.trim();
    const open = text.slice(0, 2);
    if (close !== null) close = text.includes(close) ? null : close;
    else if (open in MATHS && open !== "\\(" && !text.includes(MATHS[open], 2)) close = MATHS[open];
    to += 1;
  } while (to < lines.length && !isBlank(lines[to]) && (close !== null || !beginsBlock(lines, to)));
  return { kind: "paragraph", lines: lines.slice(i, to), from: i, to };
}

function codeAt(lines, i, fence) {
  const mark = fence[1];
  let to = i + 1;
  const closes = (s) => {
    const text = s.trim();
    return text.length >= mark.length && text === mark[0].repeat(text.length);
  };
  while (to < lines.length && !closes(lines[to].s)) to += 1;
  const taken = lines.slice(i + 1, to);
  return { kind: "code", language: fence[2], lines: taken, from: i, to: Math.min(to + 1, lines.length) };
}

/** Items of one list: a line that is set in belongs to the item above it. */
function listAt(lines, i) {
  const first = ITEM.exec(lines[i].s);
  const indent = first[1].length;
  const isOrdered = /\d/.test(first[2]);
  const items = [];
  let to = i;
  while (to < lines.length) {
    const found = ITEM.exec(lines[to].s);
    const depth = /^ */.exec(lines[to].s)[0].length;
    if (found && depth <= indent + 1) {
      if (/\d/.test(found[2]) !== isOrdered || RULE.test(lines[to].s) || depth < indent) break;
      items.push({ width: found[0].length, lines: [without(lines[to], found[0].length)] });
    } else if (isBlank(lines[to])) {
      const next = lines[to + 1];
      const goesOn = next && !isBlank(next) &&
        (/^ {2,}/.test(next.s) || (ITEM.test(next.s) && !RULE.test(next.s)));
      if (!goesOn) break;
      items.at(-1).lines.push({ s: "", at: lines[to].at });
    } else if (depth > indent || !beginsBlock(lines, to)) {
      items.at(-1).lines.push(without(lines[to], Math.min(depth, items.at(-1).width)));
    } else {
      break;
    }
    to += 1;
  }
  const start = isOrdered ? parseInt(first[2], 10) : 1;
  return { kind: "list", isOrdered, start, items: items.map((item) => item.lines), lines: [], from: i, to };
}

/** Makes nodes of one source text, with its drafted tokens marked. */
class Renderer {
  constructor(marks, left = MOST_NODES) {
    this.marks = marks; // [{start, end, label, depth}], in order
    this.left = left; // elements that may still be made
  }

  block(block, depth = 0) {
    this.left -= 1;
    switch (block.kind) {
      case "heading":
        return this.inlined(element(`h${block.level}`), block.lines);
      case "rule":
        return element("hr");
      case "code":
        return this.code(block);
      case "quote":
        return this.nested(element("blockquote"), block.lines, depth);
      case "list":
        return this.list(block, depth);
      case "table":
        return this.table(block.lines);
      default:
        return this.inlined(element("p"), block.lines);
    }
  }

  nested(parent, lines, depth) {
    if (depth >= DEEPEST) return this.inlined(parent, lines);
    const blocks = blocksOf(lines);
    if (parent.tagName === "LI" && blocks.length && blocks[0].kind === "paragraph") {
      this.item(parent, blocks.shift().lines);
    }
    for (const block of blocks) {
      if (this.left <= 0) {
        parent.append(this.plain(lines.slice(block.from)));
        break;
      }
      parent.append(this.block(block, depth + 1));
    }
    return parent;
  }

  /** The first lines of an item, which may be a task: [ ] or [x]. */
  item(parent, lines) {
    const task = TASK.exec(lines[0].s);
    if (!task) return this.inlined(parent, lines);
    const box = element("input");
    box.type = "checkbox";
    box.disabled = true;
    box.checked = task[1] !== " ";
    box.setAttribute("aria-label", box.checked ? "Done" : "To do");
    this.left -= 1;
    parent.className = "task";
    parent.append(box);
    return this.inlined(parent, [without(lines[0], task[0].length), ...lines.slice(1)]);
  }

  /** Lines as they stand. */
  plain(lines, name = "p") {
    const node = element(name, "plain");
    let part = node;
    lines.forEach((line, i) => {
      if (lines.length > PART && i % PART === 0) node.append((part = element("span", "part")));
      this.text(part, line.s + (i + 1 < lines.length ? "\n" : ""), line.at);
    });
    return node;
  }

  list(block, depth) {
    const list = element(block.isOrdered ? "ol" : "ul");
    if (block.start !== 1) list.start = block.start;
    for (const [i, lines] of block.items.entries()) {
      this.left -= 1;
      if (this.left <= 0) {
        list.append(this.plain(block.items.slice(i).flat(), "li"));
        break;
      }
      list.append(this.nested(element("li"), lines, depth));
    }
    return list;
  }

  code(block) {
    const code = element("code");
    const [first, last] = [block.lines[0], block.lines.at(-1)];
    let texts = block.lines.map((line) => line.s + (line === last ? "" : "\n"));
    const whole = texts.join("");
    // One text where the lines follow each other in the source too, as they do but in quotes.
    const isWhole = last && last.at - first.at === whole.length - last.s.length;
    if (isWhole && texts.length <= PART) texts = [whole];
    const pieces = coloured(whole, block.language);
    let piece = 0;
    let before = 0; // letters of the lines above
    let part = code;
    texts.forEach((text, i) => {
      if (texts.length > PART && i % PART === 0) code.append((part = element("span", "part")));
      for (let from = 0; from < text.length; ) {
        const { end, kind } = pieces[piece];
        const to = Math.min(text.length, end - before);
        const isColoured = kind && this.left > 0;
        const parent = isColoured ? element("span", kind) : part;
        this.text(parent, text.slice(from, to), block.lines[i].at + from);
        if (isColoured) {
          part.append(parent);
          this.left -= COLOURED;
        }
        if (to === end - before) piece += 1;
        from = to;
      }
      before += text.length;
    });
    const copy = element("button", "", "Copy");
    copy.type = "button";
    copy.dataset.copies = "code";
    copy.setAttribute("aria-label", "Copy this code");
    const pre = element("pre", "", code, copy);
    pre.tabIndex = 0;
    if (block.language) {
      pre.setAttribute("aria-label", `Code, ${block.language}`);
      pre.append(element("span", "language", block.language));
    }
    return pre;
  }

  table(lines) {
    const cells = (line) => {
      const found = [];
      let at = 0;
      for (const s of line.s.split(/(?<!\\)\|/)) {
        const blank = s.length - s.trimStart().length;
        found.push({ s: s.trim(), at: line.at + at + blank });
        at += s.length + 1;
      }
      if (found.length && found[0].s === "") found.shift();
      if (found.length && found.at(-1).s === "") found.pop();
      return found.slice(0, MOST_CELLS);
    };
    const alignments = alignmentsOf(cells(lines[1]));
    const row = (line, kind) => {
      const made = element("tr");
      this.left -= 1;
      for (const [i, cell] of cells(line).entries()) {
        made.append(this.inlined(element(kind, alignments[i]), [cell]));
        this.left -= 1;
      }
      return made;
    };
    const body = element("tbody");
    const table = element("table", "", element("thead", "", row(lines[0], "th")), body);
    const made = element("div", "wide", table);
    for (let i = 2; i < lines.length; i += 1) {
      if (this.left <= 0) {
        made.append(this.plain(lines.slice(i)));
        break;
      }
      body.append(row(lines[i], "td"));
    }
    return made;
  }

  inlined(parent, lines) {
    let s = "";
    const at = [];
    lines.forEach((line, i) => {
      const text = line.s + (i + 1 < lines.length ? "\n" : "");
      for (let k = 0; k < text.length; k += 1) at.push(line.at + k);
      s += text;
    });
    this.closers = new Map();
    if (s.length > MOST_INLINE) this.spread(parent, s, at, 0, s.length);
    else this.inline(parent, s, at, 0, s.length, 0);
    return parent;
  }

  /** Text from `from` to `to` of `s`, whose letters stand at `at` in the source. */
  inline(parent, s, at, from, to, depth) {
    let begun = from;
    let i = from;
    const flush = (end) => this.spread(parent, s, at, begun, end);
    while (i < to) {
      const found = depth < DEEPEST && this.left > 0 ? this.spanAt(s, i, to) : null;
      if (found === null) {
        i += 1;
        continue;
      }
      flush(i);
      if (found.node) {
        this.left -= 1;
        if (found.isRaw) this.spread(found.node, s, at, found.from, found.to);
        else this.inline(found.node, s, at, found.from, found.to, depth + 1);
        parent.append(found.node);
      } else {
        this.spread(parent, s, at, found.from, found.to);
      }
      begun = i = found.end;
    }
    flush(to);
  }

  /** What begins at `i`, or null: {node, from, to, end}. */
  spanAt(s, i, to) {
    const letter = s[i];
    if (letter === "\\" || letter === "$") {
      const end = mathsEnd(s, i, to);
      if (end !== null) return { node: null, from: i, to: end, end };
    }
    if (letter === "\\" && i + 1 < to && /[!-/:-@[-`{-~]/.test(s[i + 1])) {
      return { node: null, from: i + 1, to: i + 2, end: i + 2 };
    }
    if (letter === "`") {
      const mark = /^`+/.exec(s.slice(i, i + 20))[0];
      const close = s.slice(i + mark.length, Math.min(to, i + FARTHEST)).indexOf(mark);
      if (close <= 0) return null;
      const from = i + mark.length;
      return { node: element("code"), isRaw: true, from, to: from + close, end: from + close + mark.length };
    }
    if (letter === "*" || letter === "_" || letter === "~") return this.emphasisAt(s, i, to);
    if (letter === "[") return this.linkAt(s, i, to);
    if (letter === "h" && !/\w/.test(s[i - 1] || " ")) {
      const found = /^https?:\/\/[^\s<>"'`*]{1,1000}/.exec(s.slice(i, Math.min(to, i + 1010)));
      const address = found && found[0].slice(0, endBefore(found[0], found[0].length, ".,;:!?)]"));
      const node = address && link(address);
      if (node) return { node, isRaw: true, from: i, to: i + address.length, end: i + address.length };
    }
    return null;
  }

  emphasisAt(s, i, to) {
    const letter = s[i];
    const mark = s[i + 1] === letter ? letter + letter : letter;
    if (mark === "~" || (letter === "_" && /\w/.test(s[i - 1] || " "))) return null;
    const from = i + mark.length;
    if (from >= to || SPACE.test(s[from]) || s[from] === letter) return null;
    const close = this.closerAfter(s, mark, from);
    if (close < 0 || close - from > FARTHEST || close + mark.length > to) return null;
    const name = letter === "~" ? "del" : mark.length === 2 ? "strong" : "em";
    return { node: element(name), from, to: close, end: close + mark.length };
  }

  /** Where an emphasis that begins at `from` may end, or -1. */
  closerAfter(s, mark, from) {
    if (!this.closers.has(mark)) this.closers.set(mark, closersOf(s, mark));
    const places = this.closers.get(mark);
    const next = firstOf(places.length, (n) => places[n] > from);
    return next < places.length ? places[next] : -1;
  }

  linkAt(s, i, to) {
    const found = /^\[([^\[\]\n]{1,500})\]\(([^\s()]{1,1000})\)/.exec(s.slice(i, Math.min(to, i + 1510)));
    const node = found && link(found[2]);
    if (!node) return null;
    return { node, from: i + 1, to: i + 1 + found[1].length, end: i + found[0].length };
  }

  /** Append letters that may lie apart in the source, such as those of several lines. */
  spread(parent, s, at, from, to) {
    let begun = from;
    for (let i = from + 1; i <= to; i += 1) {
      if (i === to || at[i] !== at[i - 1] + 1) {
        this.text(parent, s.slice(begun, i), at[begun]);
        begun = i;
      }
    }
  }

  /** Append text that stands at `at` in the source, drafted tokens as spans. */
  text(parent, s, at) {
    let done = 0;
    for (let m = firstAfter(this.marks, at); m < this.marks.length && done < s.length; m += 1) {
      const mark = this.marks[m];
      const from = Math.max(done, mark.start - at);
      const to = Math.min(s.length, mark.end - at);
      if (from >= s.length) break;
      if (from > done) parent.append(s.slice(done, from));
      const span = element("span", `drafted d${Math.min(mark.depth, 3)}`, s.slice(from, to));
      span.dataset.label = mark.label;
      span.dataset.token = mark.token;
      parent.append(span);
      done = to;
    }
    if (done < s.length) parent.append(s.slice(done));
  }
}

/** The number of the first mark that ends after `at`. */
function firstAfter(marks, at) {
  return firstOf(marks.length, (n) => marks[n].end > at);
}

/** The first number below `count` for which `holds`, as for all after it; else `count`. */
function firstOf(count, holds) {
  let low = 0;
  let high = count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (holds(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** Where maths that begin at `i` end, which stay the TeX that they are; null where none begin. */
function mathsEnd(s, i, to) {
  const two = s.slice(i, i + 2);
  const open = two in MATHS ? two : s[i];
  if (!(open in MATHS)) return null;
  const from = i + open.length;
  const inside = s.slice(from, Math.min(to, i + FARTHEST));
  const length = inside.indexOf(MATHS[open]);
  if (length <= 0) return null;
  const end = from + length + open.length;
  // "$5 or $6" is money: no blank stands inside next to the signs, no word or number outside.
  const isMoney = SPACE.test(s[from]) || SPACE.test(s[end - 2]) || LETTER.test(s[i - 1] || " ") || LETTER.test(s[end] || " ");
  return open === "$" && isMoney ? null : end;
}

/** All places of `s` where a mark may end an emphasis, wherever that began. */
function closersOf(s, mark) {
  const letter = mark[0];
  const places = [];
  for (let k = s.indexOf(mark, 1); k > 0; k = s.indexOf(mark, k + 1)) {
    const isLonger = mark.length === 1 && (s[k + 1] === letter || s[k - 1] === letter);
    const isInside = letter === "_" && LETTER.test(s[k + mark.length] || " ");
    if (!isLonger && !isInside && !SPACE.test(s[k - 1])) places.push(k);
  }
  return places;
}

/** An empty link, or null for what is no address of the web. */
function link(address) {
  let parsed;
  try {
    parsed = new URL(address);
  } catch {
    return null;
  }
  if (parsed.protocol !== "http:" && parsed.protocol !== "https:") return null;
  const made = element("a");
  made.href = parsed.href;
  made.target = "_blank";
  made.rel = "noopener noreferrer";
  return made;
}

/** A text in a node, which is brought up to date as the text grows; finished blocks stay. */
class MarkdownView {
  constructor(node) {
    this.node = node;
    this.source = "";
    this.known = []; // where each block that is shown begins, its node, and how many it is
  }

  show(source, marks) {
    const parsed = source.slice(0, MOST_PARSED);
    // What was written goes on in the last block, or, where the last line turns out to begin none,
    // in the one before it. All others are as they were.
    const isGrown = parsed.startsWith(this.source);
    const changed = this.known.splice(isGrown ? Math.max(0, this.known.length - 2) : 0);
    for (const { node } of changed) node.remove();
    this.source = parsed;
    const spent = this.known.reduce((sum, { cost }) => sum + cost, 0);
    const renderer = new Renderer(marks, MOST_NODES - spent);
    const begun = isGrown && changed.length ? changed[0].at : 0;
    const lines = linesOf(parsed.slice(begun), begun);
    let end = parsed.length;
    for (const block of blocksOf(lines)) {
      const { at } = lines[block.from];
      if (renderer.left <= 0) {
        end = at;
        break;
      }
      const before = renderer.left;
      const node = renderer.block(block);
      this.add(at, node, before - renderer.left);
    }
    if (source.length > end) this.add(end, renderer.plain(linesOf(source.slice(end), end)), 1);
  }

  add(at, node, cost) {
    this.node.append(node);
    this.known.push({ at, node, cost });
  }
}
