"""Markdown on the page without a browser: what becomes of it, and that nothing makes it slow."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mlx_eagle.server.handler import PAGE_FILES

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="runs the page's script in Node.js")
FAKE_DOM = Path(__file__).parents[1] / "support" / "fake_dom.js"
LETTERS = 10**5
SECONDS = 2.0  # of the processor for each; the slowest take .05, and used to take minutes

HOSTILE = {
    "blanks in a heading": "# a" + " " * LETTERS + "b",
    "blanks and signs in a heading": "# " + " #" * (LETTERS // 2) + "b",
    "tabs in a heading": "# a" + "\t" * LETTERS + "b",
    "delimiters of a table": "a|b\n" + "-|" * (LETTERS // 2) + "x",
    "blanks after delimiters": "a|b\n|-" + " " * LETTERS + "x",
    "dashes of a table": "a|b\n|" + "-" * LETTERS + "|x",
    "cells": "a|b\n-|-\n" + "|" * LETTERS,
    "stars": "*" * LETTERS,
    "emphasis that opens": "*a " * (LETTERS // 3),
    "emphasis that closes": " a*" * (LETTERS // 3),
    "emphasis of one letter": "*a" * (LETTERS // 2),
    "strong that opens": "**a " * (LETTERS // 4),
    "emphasis in itself": "*a **b _c __d ~~e " * (LETTERS // 18),
    "underscores": "_a" * (LETTERS // 2),
    "tildes": "~~a " * (LETTERS // 4),
    "backticks": "`" * LETTERS,
    "backticks in ever longer runs": "".join(
        "`" * (i % 19 + 1) + "a" for i in range(LETTERS // 11)
    ),
    "fences": "```\n~~~\n" * (LETTERS // 8),
    "a fence of its own length": "`" * (LETTERS // 2) + "\n" + "`" * (LETTERS // 2),
    "brackets": "[" * LETTERS,
    "links that are none": "[a](" * (LETTERS // 4),
    "brackets with words": ("[" + "a" * 499) * (LETTERS // 500),
    "addresses": "https://" + "a" * LETTERS,
    "addresses that end": ("http://a" + ")" * 900 + "b ") * (LETTERS // 910),
    "many addresses": "http://a " * (LETTERS // 9),
    "quotes": ">" * LETTERS,
    "quotes on lines": ">\n" * (LETTERS // 2),
    "lists in lists": "- " * (LETTERS // 2),
    "items": "- a\n" * (LETTERS // 4),
    "items set in ever further": "".join(" " * (i % 40) + "- a\n" for i in range(LETTERS // 24)),
    "rules": "* * *\n" * (LETTERS // 6),
    "a rule that is none": "* " * (LETTERS // 2) + "x",
    "empty lines": "\n" * LETTERS,
    "escapes": "\\*" * (LETTERS // 2),
    "maths that open": "\\(a" * (LETTERS // 3),
    "maths of one letter": "$a" * (LETTERS // 2),
    "money": "$a " * (LETTERS // 3),
    "maths on lines": "\\[\na\n" * (LETTERS // 5),
    "tasks": "- [x] a\n" * (LETTERS // 8),
    "a word": "a" * LETTERS,
    "comments that are not closed": "```js\n" + "/* " * (LETTERS // 3),
    "strings that are not closed": "```py\n" + '"\\' * (LETTERS // 2),
    "long strings": "```py\n" + "'''a" * (LETTERS // 4),
    "numbers": "```c\n" + "1 " * (LETTERS // 2),
    "lines of code": "```c\n" + "if\n" * (LETTERS // 3),
    "long lines of a paragraph": ("*a " * 6000 + "\n") * 5,
}


def run(script: str, given: object) -> object:
    """What a script makes of ``given`` behind those of Markdown, both as JSON."""
    parts = [FAKE_DOM.read_text()]
    parts += [(PAGE_FILES / f"{name}.js").read_text() for name in ("code", "markdown")]
    parts.append(f"const given = JSON.parse(require('fs').readFileSync(0, 'utf8'));\n{script}")
    done = subprocess.run(
        [NODE, "-e", "\n".join(parts)],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


SHOW = """
const shown = (source, step) => {
  const node = element("main");
  const view = new MarkdownView(node);
  for (let end = step; end < source.length; end += step) view.show(source.slice(0, end), []);
  view.show(source, []);
  return node.markup;
};
"""
TIMED = """
const took = {};
for (const [name, source] of Object.entries(given)) {
  const begun = process.cpuUsage();
  const markup = shown(source, source.length);
  took[name] = [process.cpuUsage(begun).user / 1e6, markup.length];
}
console.log(JSON.stringify(took));
"""


def test_hostile_texts_take_no_time():
    took = run(SHOW + TIMED, HOSTILE)
    assert took.keys() == HOSTILE.keys()
    assert {name: seconds for name, (seconds, _) in took.items() if seconds > SECONDS} == {}


def test_what_is_too_long_is_shown_as_it_stands():
    """And nothing of it is left out: a paragraph beyond its limit, a text beyond that of all."""
    long = "*a* " * 10_000
    text = long + "\n\n*b*\n\n" + "c " * 100_000
    markup = run(SHOW + "console.log(JSON.stringify(shown(given, given.length)));", text)
    assert "<EM>a</EM>" not in markup and "<EM>b</EM>" in markup
    shown = re.sub("<.*?>", "", markup)
    assert shown.count("*a* ") == 10_000 and shown.count("c ") == 100_000


MANY = {
    "items": "- a\n" * 3000,
    "items below each other": "- a\n  - b\n" * 1500,
    "quotes": "> a\n\n" * 3000,
    "quotes in a quote": "> > a\n>\n" * 3000,
    "cells": "a|b\n-|-\n" + "c|d\n" * 3000,
    "emphases": ("*a* " * 900 + "\n\n") * 4,
    "words of code": "```c\n" + "if 1\n" * 1900,
    "paragraphs": "a\n\n" * 3000,
}


def test_no_text_becomes_more_nodes_than_a_browser_lays_out_at_once():
    """What is beyond them is there as text, however it came."""
    script = SHOW + "console.log(JSON.stringify(given.map(([s, step]) => shown(s, step))));"
    both = [(text, step) for text in MANY.values() for step in (len(text), 4973)]
    found = run(script, both)
    assert found[::2] == found[1::2]
    for (name, text), markup in zip(MANY.items(), found[::2], strict=True):
        assert 500 < markup.count("</") < 4100, name
        shown = re.sub("<.*?>", "", markup)
        assert re.findall("[abd1]", shown) == re.findall("[abd1]", text), name


SHAPES = {
    "# a ##": "<H1>a</H1>",
    "# a#": "<H1>a#</H1>",
    "## ": "<H2></H2>",
    "# #": "<H1></H1>",
    "a *b* **c** _d_ ~~e~~": "<P>a <EM>b</EM> <STRONG>c</STRONG> <EM>d</EM> <DEL>e</DEL></P>",
    "a * b * c": "<P>a * b * c</P>",
    "snake_case_name": "<P>snake_case_name</P>",
    "**a *b* c**": "<P><STRONG>a <EM>b</EM> c</STRONG></P>",
    "`a*b*`": "<P><CODE>a*b*</CODE></P>",
    "[a](https://b.c) https://d.e).": "<P><A>a</A> <A>https://d.e</A>).</P>",
    "a|b\n-|:-:\n1|2": "<DIV><TABLE><THEAD><TR><TH>a</TH><TH>b</TH></TR></THEAD><TBODY><TR>"
    "<TD>1</TD><TD>2</TD></TR></TBODY></TABLE></DIV>",
    "a|b\n- | x": "<P>a|b</P><UL><LI>| x</LI></UL>",
    "- a\n- b": "<UL><LI>a</LI><LI>b</LI></UL>",
    "> a": "<BLOCKQUOTE><P>a</P></BLOCKQUOTE>",
    "---": "<HR></HR>",
    r"so \(a^2*b*c\) \[ \int_0^1 *x* \] \[a": r"<P>so \(a^2*b*c\) \[ \int_0^1 *x* \] [a</P>",
    "\\[\na\n+ b\n= *c*\n\\]\n- d": "<P>\\[\na\n+ b\n= *c*\n\\]</P><UL><LI>d</LI></UL>",
    "$$\n- a_1*b*\n$$ *c*": "<P>$$\n- a_1*b*\n$$ <EM>c</EM></P>",
    "$a*b*c$, $5 and *6* $7": "<P>$a*b*c$, $5 and <EM>6</EM> $7</P>",
    r"\*a\* \\(b\\)": r"<P>*a* \(b\)</P>",
    "- [ ] a\n- [x] b\n- [y] c": "<UL><LI><INPUT></INPUT>a</LI><LI><INPUT></INPUT>b</LI>"
    "<LI>[y] c</LI></UL>",
}


def test_shapes():
    got = run(
        SHOW + "console.log(JSON.stringify(given.map((s) => shown(s, s.length))));", [*SHAPES]
    )
    assert dict(zip(SHAPES, got, strict=True)) == {
        source: f"<MAIN>{markup}</MAIN>" for source, markup in SHAPES.items()
    }


MARKED = """
const found = [];
const walk = (node) => {
  if (["TD", "INPUT"].includes(node.tagName)) found.push(node.checked ?? node.className ?? "");
  for (const child of node.childNodes ?? []) walk(child);
};
const top = element("main");
new MarkdownView(top).show(given, []);
walk(top);
console.log(JSON.stringify(found));
"""


def test_cells_are_aligned_and_tasks_are_checked():
    text = "|a|b|c|d|\n|---|:-:|--:|:--|\n|1|2|3|4|5|\n\n- [ ] a\n- [X] b"
    assert run(MARKED, text) == ["", "center", "right", "", "", False, True]


CODE = {
    ("py", "if x: # 1 'a'\n  y = 'it\\'s' + b"): r"keyword if|comment # 1 'a'|string 'it\'s'",
    ("python", 'a1 = """x\n# y""" + 2.5e3'): 'string """x\n# y"""|number 2.5e3',
    ("sh", "echo a#b $x # c"): "keyword echo|comment # c",
    ("js", "let a = `b\n${c}` /* d\ne */ // f"): "keyword let|string `b\n${c}`|"
    "comment /* d\ne */|comment // f",
    ("rust", 'fn f<\'a>() -> "b"'): 'keyword fn|string "b"',
    ("sql", "SELECT 1 -- a"): "keyword SELECT|number 1|comment -- a",
    ("html", "it's <!-- a --> 7"): "comment <!-- a -->|number 7",
    ("json", '{"a": [true, -1]}'): 'string "a"|keyword true|number 1',
    ("diff", "@@ 1\n-a\n+b\n c"): "comment @@ 1\n|removed -a\n|added +b\n",
    ("c", '"a\nint b'): 'string "a|keyword int',
    ("", "if 1"): "",
    ("py", "1 " * 6000): "",
    ("text", "if 1"): "",
}
COLOURS = """
console.log(JSON.stringify(given.map((source) => {
  let code = element("main");
  new MarkdownView(code).show(source, []);
  while (code.tagName !== "CODE") code = code.childNodes[0];
  const plain = (part) => typeof part === "string" ? part : part.childNodes.map(plain).join("");
  const colours = code.childNodes.filter((part) => typeof part !== "string");
  const said = colours.map((part) => `${part.className} ${plain(part)}`).join("|");
  return [plain(code), said.replace(/\\n\\|(comment|string) /g, "\\n")]; // of several lines
})));
"""


def test_code_has_colours():
    """And its text is what it was, also in a quote, whose lines lie apart in the source."""
    sources = [f"```{language}\n{text}\n```" for language, text in CODE]
    sources += [re.sub("(?m)^", "> ", source) for source in sources]
    expected = [[text, colours] for (_, text), colours in CODE.items()]
    assert run(COLOURS, sources) == expected + expected


def test_a_text_that_grows_is_as_one_that_is_whole():
    """Letter by letter: a line that turns out to begin no block goes on in the one before."""
    texts = ["".join(SHAPES), "\n".join(SHAPES), "\n\n".join(SHAPES)]
    texts += ["a\n*b", "a\n* b", "a\n--- b", "```\nc\n```\nd", "- a\n\n  b\n\nc", "a\n1. b\n1c"]
    script = "console.log(JSON.stringify(given.map((s) => [shown(s, 1), shown(s, s.length)])));"
    for grown, whole in run(SHOW + script, texts):
        assert grown == whole


WHOLE = {
    "text": "a b", "reasoning": "", "note": "", "tokens": [[5, 0, 0, 0, 1, 0], [6, 1, 3, 1, 3, 0]],
    "indexes": [0, 1], "events": [{"what": "probe", "reason": "a", "num_tokens": 1}],
    "counts": {
        "drafted_tokens": 3, "accepted_tokens": 1, "target_passes": 1, "emitted_tokens": 2,
        "batched_tokens": 0, "mean_acceptance_length": 2.0, "draft_lengths": [3],
        "acceptance_by_position": [1.0, 0, 0],
    },
    "seconds": 0.5, "firstAfter": 0.1, "finish": "stop", "isBad": False,
}  # fmt: skip
WRONG = (None, 5, -1, 10**9, 0.5, "x", [], {}, [5], [[1, 2, 3]], [[0, 1, 10**9, 0, 1, 0]], True)
READ = """
console.log(JSON.stringify(given.map((kept) => {
  if (!isMessage(kept)) return false;
  const { answer } = restored(kept);
  return Number.isFinite(answer.figures.mean_acceptance_length) && answer.marks.text.length >= 0;
})));
"""


def test_what_is_kept_damaged_is_not_read():
    """Whatever stands in the place of a part of it: it is refused, or can be shown at once."""
    message = {"role": "assistant", "content": "", "answer": WHOLE}
    damaged = [{**message, "answer": {**WHOLE, name: w}} for name in WHOLE for w in WRONG]
    counts = WHOLE["counts"]
    damaged += [
        {**message, "answer": {**WHOLE, "counts": {**counts, name: w}}}
        for name in counts
        for w in WRONG
    ]
    damaged += [{**message, "answer": w} for w in WRONG] + list(WRONG)
    damaged += [{"role": "user", "content": w} for w in WRONG if w != "x"]
    scripts = "".join(
        (PAGE_FILES / f"{name}.js").read_text() for name in ("answer", "strip", "chat")
    )
    got = run(scripts + READ, [message, *damaged])
    assert got[0] is True and None not in got
    assert got.count(True) < len(got) / 4 and got[-10:] == [False] * 10
    assert run(scripts + READ, [{**message, "answer": {**WHOLE, "counts": None}}]) == [True]
