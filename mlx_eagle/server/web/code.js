// Colours of code: comments, strings, numbers and common keywords, and the lines of a diff. One pass
// from left to right; what is never closed goes on to the end, so the time is in proportion to the text.

const MOST_COLOURED = 10_000; // letters of one block; a longer one is shown in one colour

const KEYWORDS = new Set((
  "abstract and as assert async await bool boolean break byte case catch char class const continue " +
  "crate def default defer del delete do double elif else end enum except export extends extern " +
  "false final finally float fn for foreach from func function global go goto if impl implements " +
  "import in instanceof int interface internal is lambda let long match mod module mut " +
  "namespace new nil none nonlocal not null or override package pass private protected pub " +
  "public raise readonly return self short static struct super switch template then this " +
  "throw trait true try type typedef typeof undefined union unless unsafe until use using val var " +
  "virtual void when where while with yield " +
  "None True False echo fi done esac"
).split(" "));
const SQL_WORDS = new Set((
  "select insert update create table values into from where join left on group order by having limit " +
  "union distinct and or not null set as delete primary key default case when then else end"
).split(" "));

// What begins a comment, with what ends it.
const HASH = [["#", "\n"]];
const SLASHES = [["//", "\n"], ["/*", "*/"]];
const COMMENTS = new Map();
for (const [names, comments] of [
  ["python py sh bash shell zsh console ruby rb r perl yaml yml toml ini make makefile dockerfile", HASH],
  ["js javascript jsx ts typescript tsx java c h cpp c++ cs c# csharp go rust rs swift kotlin kt scala dart", SLASHES],
  ["php", [...HASH, ...SLASHES]],
  ["css scss", [["/*", "*/"]]],
  ["sql lua haskell hs", [["--", "\n"], ["/*", "*/"]]],
  ["html xml svg", [["<!--", "-->"]]],
  ["json", []],
]) for (const name of names.split(" ")) COMMENTS.set(name, comments);

const LONG_STRINGS = ['"""', "'''", "`"]; // over several lines
const WORD = /[\p{L}_$][\p{L}\p{N}_$]*/uy;
const NUMBER = /\d[\w.]*/y;

/** [{end, kind}] of pieces that make up `text`; `kind` is a class, or "" for what has no colour. */
function coloured(text, language) {
  const name = language.toLowerCase();
  const comments = COMMENTS.get(name);
  if (text.length > MOST_COLOURED) return [{ end: text.length, kind: "" }];
  if (name === "diff" || name === "patch") return colouredDiff(text);
  if (!comments) return [{ end: text.length, kind: "" }];
  const pieces = [];
  let i = 0;
  while (i < text.length) {
    const [end, kind] = pieceAt(text, i, comments, name);
    const last = pieces.at(-1);
    if (last && last.kind === kind && kind === "") last.end = end;
    else pieces.push({ end, kind });
    i = end;
  }
  return pieces;
}

/** Where what begins at `i` ends, and its kind. */
function pieceAt(text, i, comments, language) {
  for (const [begin, end] of comments) {
    const isBegun = text.startsWith(begin, i) && (begin !== "#" || i === 0 || /\s/.test(text[i - 1]));
    if (isBegun) return [endOf(text, i + begin.length, end), "comment"];
  }
  for (const mark of LONG_STRINGS) {
    if (text.startsWith(mark, i)) return [endOf(text, i + mark.length, mark), "string"];
  }
  if (text[i] === '"' || (text[i] === "'" && !/^(rs|rust|html|xml|svg)$/.test(language))) {
    return [stringEnd(text, i), "string"];
  }
  NUMBER.lastIndex = WORD.lastIndex = i;
  const number = NUMBER.exec(text);
  if (number) return [i + number[0].length, "number"];
  const word = WORD.exec(text);
  if (!word) return [i + 1, ""];
  const isKeyword = language === "sql" ? SQL_WORDS.has(word[0].toLowerCase()) : KEYWORDS.has(word[0]);
  return [i + word[0].length, isKeyword ? "keyword" : ""];
}

/** Behind the next `mark`; a line's end is not taken along. */
function endOf(text, from, mark) {
  const found = text.indexOf(mark, from);
  if (found < 0) return text.length;
  return mark === "\n" ? found : found + mark.length;
}

/** Behind a string on one line, which began at `i`. */
function stringEnd(text, i) {
  let k = i + 1;
  while (k < text.length && text[k] !== text[i] && text[k] !== "\n") k += text[k] === "\\" ? 2 : 1;
  return Math.min(text.length, text[k] === text[i] ? k + 1 : k);
}

function colouredDiff(text) {
  const kinds = { "+": "added", "-": "removed", "@": "comment" };
  let end = 0;
  return text.split(/(?<=\n)/).map((line) => {
    end += line.length;
    return { end, kind: kinds[line[0]] || "" };
  });
}
