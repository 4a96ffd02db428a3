"""The page at ``/`` in a headless Chromium: on a tiny pair, and on a server that follows scripts.

``make test-all ARGS=--without-browser`` leaves these tests out.
"""

import json
import re
import threading
from urllib.request import urlopen

import mlx_lm
import pytest
from browser import (
    DIE,
    Tab,
    chunk_of,
    find_chromium,
    longest_task,
    running_browser,
    scripted_server,
    time_of_lines,
)
from prometheus_client.parser import text_string_to_metric_families
from serving import ours
from test_page_markdown import HOSTILE as HUGE

from mlx_eagle import stream_generate
from mlx_eagle.draft_models import open_drafter

pytestmark = [pytest.mark.exhaustive, pytest.mark.browser]
PATH = find_chromium()
KEY = "a-key"
CLEAR = "rgba(0, 0, 0, 0)"
HOSTILE = """<script>window.broken = 1</script>
<img src=x onerror="window.broken = 2">

[a link](javascript:window.broken=3) [another](data:text/html,x)
[a good one](https://example.org/a)
https://example.org/plain <a href="javascript:alert(1)">raw</a>

```html
<script>window.broken = 4</script>
```

| a | b |
|---|---|
| <b>bold?</b> | **bold** |

- one
  - two `<i>`

> quoted *text* ![image](https://example.org/picture.png)
"""


def test_a_browser_is_there():
    """Fails once, instead of each test, where there is none."""
    assert PATH is not None, (
        "no Chromium was found on PATH, so the page was not tried: install one (Debian: "
        "apt install chromium), or leave these tests out with ARGS=--without-browser."
    )


@pytest.fixture(scope="module")
def browser():
    if PATH is None:
        pytest.skip("there is no Chromium: test_a_browser_is_there has failed because of that")
    with running_browser(PATH) as found:
        yield found


@pytest.fixture(scope="module")
def server(pair):
    flags = ("--model", pair["target"], "--draft-model", pair["model"], "--max-tokens", "40")
    with ours(*flags) as asked:
        yield asked


@pytest.fixture
def open_tab(browser):
    """Open pages; afterwards nobody was asked but their server, and nothing complained."""
    tabs = []

    def open_(url: str, **options) -> Tab:
        tabs.append(Tab(browser, url, **options))
        return tabs[-1]

    yield open_
    for tab in tabs:
        tab.close()
    for tab in tabs:
        assert [url for url in tab.requests if not url.startswith((tab.url, "data:"))] == []
        assert tab.complaints == []


@pytest.fixture
def tab(open_tab, server) -> Tab:
    return open_tab(server.url.removesuffix("v1"))


@pytest.fixture
def script():
    with scripted_server() as found:
        yield found


def metrics_of(server) -> dict[str, float]:
    document = urlopen(server.url.removesuffix("/v1") + "/metrics", timeout=10).read().decode()
    return {
        sample.name.removeprefix("mlx_eagle_"): sample.value
        for family in text_string_to_metric_families(document)
        for sample in family.samples
        if not sample.labels
    }


def test_three_turns(tab, server):
    """The strip counts what the server counts; each turn has the ones before it."""
    before = metrics_of(server)
    texts = []
    for question in ("Hello there", "And then", "At last"):
        tab.ask(question)
        texts.append(tab.wait())
    assert tab.count(".question") == tab.count(".answer") == 3
    assert re.match(r"[\d.]+ tokens/s", tab.page.locator(".answer .line").last.inner_text())
    found = metrics_of(server)
    for name, metric in {
        "Drafted": "drafted_tokens_total",
        "Accepted": "accepted_tokens_total",
        "Target passes": "draft_target_passes_total",
    }.items():
        assert int(tab.figure(name, 1)) == found[metric] - before[metric] > 0
    answers = [kept["answer"] for kept in tab.stored() if kept["role"] == "assistant"]
    assert int(tab.figure("Tokens", 1)) == sum(len(set(each["indexes"])) for each in answers)
    for answer in answers:  # what the page counted by itself is what the server says
        is_cut = answer["tokens"][-1][1] > 0  # the target never said what follows
        own = [token[2] for token in answer["tokens"][1:] if token[1] == 0]
        assert own == answer["counts"]["draft_lengths"][: len(own)]
        assert len(answer["counts"]["draft_lengths"]) == len(own) + is_cut
    tau = answers[-1]["counts"]["mean_acceptance_length"]
    assert tab.figure("Mean acceptance length (tau)") == f"{tau:.2f}"


def test_marks_are_those_of_the_python_api(tab, pair):
    """The same greedy prompt; drafted halves of letters are marked with their letter."""
    model, tokenizer = mlx_lm.load(pair["target"])
    question = "Go on"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True
    )
    responses = list(
        stream_generate(
            model,
            tokenizer,
            prompt,
            40,
            draft_model=open_drafter(pair["model"], model, tokenizer),
            num_draft_tokens=3,
        )
    )
    tab.ask(question)
    tab.wait()
    (answer,) = [kept["answer"] for kept in tab.stored() if kept["role"] == "assistant"]
    assert [token[:3] for token in answer["tokens"]] == [
        [r.token, r.draft_depth, r.draft_length] for r in responses
    ]
    text = "".join(r.text for r in responses)
    assert answer["text"] == text
    drafted = {i for i, r in enumerate(responses) if r.from_draft and r.text}
    marked = tab.page.locator(".answer .drafted").evaluate_all(
        "spans => spans.map(s => Number(s.dataset.token))"
    )
    visible = {i for i in drafted if responses[i].text.strip()}
    assert visible <= set(marked) and all(responses[i].text for i in set(marked))
    assert len(drafted) > 5 and any(r.from_draft and not r.text for r in responses)


def test_a_race(tab):
    tab.ask("A big it all")  # which leaves caches that would serve the plain lane alone
    tab.wait()
    bodies = []
    tab.page.on("request", lambda request: bodies.append(request.post_data_json))
    tab.page.click("#tab-race")
    tab.page.fill("#race-question", "A big it all")
    tab.page.click("#race-start")
    verdict = tab.page.locator("#verdict", has_text=re.compile("Identical|Different|No verdict"))
    verdict.wait_for()
    assert verdict.inner_text().startswith("Identical: all ")
    assert [body["reuse_caches"] for body in bodies] == [False, False]
    assert len({body["cache_salt"] for body in bodies}) == 2  # no lane copies what another said
    clocks = [tab.page.inner_text(f"#{name}-clock") for name in ("plain", "drafted")]
    assert all(re.match(r"\d+\.\d\d s \S+ tokens/s, \d+ tokens", clock) for clock in clocks)
    assert tab.count("#plain-text .drafted") == 0 < tab.count("#drafted-text .drafted")
    texts = [tab.page.inner_text(f"#{name}-text") for name in ("plain", "drafted")]
    assert texts[0] == texts[1] != ""


def test_a_race_of_samples_has_one_seed(tab):
    tab.unfold("settings")
    tab.page.fill("#temperature", "0.9")
    tab.page.click("#tab-race")
    tab.page.fill("#race-question", "Once upon a time")
    tab.page.keyboard.press("Enter")
    tab.page.locator("#verdict", has_text="Identical: all ").wait_for()
    assert "Both drew with the seed" in tab.page.inner_text("#verdict")


def test_regenerate_copy_and_the_switch(tab):
    tab.ask("Hello there")
    first = tab.wait()
    tab.page.click("#again")
    tab.page.locator("#again").wait_for()
    assert tab.wait() == first and tab.count(".answer") == 1
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.page.click("[data-copies=answer]")
    tab.page.get_by_text("Copied").wait_for()
    copied = tab.page.evaluate("() => navigator.clipboard.readText()")
    assert copied == tab.stored()[-1]["answer"]["text"]
    style = "e => getComputedStyle(e).backgroundColor"
    drafted = tab.page.locator(".answer .drafted").first
    assert drafted.evaluate(style) != CLEAR
    tab.unfold("strip")
    tab.page.uncheck("#marks")
    assert drafted.evaluate(style) == CLEAR


def test_positions_are_told(tab):
    """By the mouse, and by the arrow keys."""
    tab.ask("Hello there")
    tab.wait()
    drafted = tab.page.locator(".answer .drafted", has_text=re.compile(r"\S"))
    drafted.first.hover()
    told = tab.page.inner_text("#tip")
    assert re.fullmatch(r"Drafted: position \d of \d.*", told)
    assert tab.page.text_content("#where") == told
    tab.page.mouse.move(0, 0)
    assert tab.page.locator("#tip").is_hidden()
    tab.page.focus(".answer .text")
    tab.page.keyboard.press("ArrowRight")
    label = tab.page.locator(".answer .drafted").first.get_attribute("data-label")
    assert tab.page.inner_text("#tip") == label
    tab.page.keyboard.press("ArrowRight")
    assert tab.count(".drafted.here") == 1


def test_a_conversation_is_there_after_a_reload(tab, server):
    tab.ask("Hello there")
    text = tab.wait()
    spans = tab.count(".drafted")
    figures = tab.page.text_content("#figures")
    tab.page.reload()
    assert tab.wait() == text and tab.count(".drafted") == spans > 1
    assert tab.page.text_content("#figures") == figures
    tab.ask("And then")
    tab.page.locator(".answer").nth(1).wait_for()
    tab.wait()
    tab.page.click("#new")
    tab.page.reload()
    assert tab.count(".message") == 0 and tab.count(".empty") == 1


def test_what_cannot_be_read_is_left_alone(tab):
    halves = ('[{"role": "assistant"}]', '{"a": 1}', '[{"role":"user"}, 3]', "null", "5")
    cut = '[{"role": "assistant", "answer": {"text": "a", "tokens": 5, "counts": {}}}]'
    for kept in ("nonsense", *halves, cut):
        tab.page.evaluate(
            """text => {
              localStorage.setItem("mlx-eagle.current", '"x"');
              const entry = '{"id": "x", "title": "X", "changed": 1}';
              localStorage.setItem("mlx-eagle.conversations", `[${entry}]`);
              localStorage.setItem("mlx-eagle.conversation.x", text);
            }""",
            kept,
        )
        tab.page.reload()
        tab.ask("Hello")
        assert tab.wait()
        tab.page.click("#new")


def test_an_idle_page_asks_for_nothing(tab, server):
    """No request but its own, also after an answer."""
    tab.ask("Hello there")
    tab.wait()
    num_requests, before = len(tab.requests), metrics_of(server)
    tab.page.wait_for_timeout(2000)
    assert len(tab.requests) == num_requests == 2
    after = metrics_of(server)
    assert after["requests_running"] == after["requests_waiting"] == 0
    assert (
        after["time_to_first_token_seconds_count"] == before["time_to_first_token_seconds_count"]
    )


def test_a_key(browser, pair, open_tab):
    flags = ("--model", pair["target"], "--draft-model", pair["model"], "--api-key", KEY)
    with ours(*flags, "--max-tokens", "5") as asked:
        tab = open_tab(asked.url.removesuffix("v1"))
        assert tab.page.inner_text("#model") == ""
        tab.ask("Hello")
        tab.said("The API key is missing or wrong")
        assert [text for text in tab.complaints if "401" not in text] == []
        tab.complaints.clear()  # the browser's own words about the status
        assert tab.page.evaluate("() => document.activeElement.id") == "key"
        tab.page.fill("#key", KEY)
        tab.page.click("#again")
        tab.page.locator(".note.bad").wait_for(state="detached")
        tab.wait()
        assert KEY not in tab.page.evaluate("() => JSON.stringify(localStorage)")
        assert KEY in tab.page.evaluate("() => JSON.stringify(sessionStorage)")


def test_mistakes_are_said(tab):
    """Those that the page knows of before it asks, and one that the server finds."""
    tab.unfold("settings")
    for name, wrong in {
        "temperature": "warm", "max_tokens": "0", "num_draft_tokens": "some", "tree": "4x4",
        "seed": "-1",
    }.items():  # fmt: skip
        tab.page.fill(f"#{name}", wrong)
        tab.ask("Hello")
        assert tab.page.locator(f"#{name}").get_attribute("aria-invalid") == "true"
        assert tab.page.evaluate("() => document.activeElement.id") == name
        assert tab.page.inner_text("#options-note").endswith(".")
        tab.page.fill(f"#{name}", "")
    assert tab.count(".message") == 0
    tab.page.fill("#tree", "99x99:99999")
    tab.ask("Hello there")
    tab.page.locator(".problem .note.bad", has_text="is too large").wait_for()
    assert tab.count(".answer") == 0, "an error is no answer"
    assert [text for text in tab.complaints if "400" not in text] == []
    tab.complaints.clear()
    tab.page.fill("#tree", "")
    tab.page.click("#again")
    tab.page.locator(".answer .drafted").first.wait_for(state="attached")


def test_five_conversations(open_tab, script, tmp_path):
    """A list that outlives a reload, a deletion, and a way through a file."""
    tab = open_tab(script.url)
    titles = [f"Question {i}" for i in range(5)]
    script.scripts += [[f"Answer {i}"] for i in range(5)]
    for title in titles:
        tab.page.click("#new")
        tab.ask(title)
        tab.wait()
    shown = tab.page.locator("#conversations .title")
    assert shown.all_inner_texts() == titles[::-1]
    tab.page.reload()
    assert shown.all_inner_texts() == titles[::-1]
    tab.page.get_by_role("button", name="Question 1", exact=True).click()
    assert tab.wait() == "Answer 1"
    assert tab.page.locator("[aria-current]").inner_text() == "Question 1"
    with tab.page.expect_download() as download:
        tab.page.click("#export")
    file = tmp_path / "kept.json"
    download.value.save_as(file)
    tab.page.get_by_role("button", name='Delete "Question 1"').click()
    assert shown.all_inner_texts() == ["Question 4", "Question 3", "Question 2", "Question 0"]
    tab.page.get_by_role("button", name='Delete "Question 0"').click()
    tab.page.reload()
    for count in (4, 5):  # the latest first, also after a reload
        tab.page.click("#undo")
        assert len(shown.all_inner_texts()) == count
    assert tab.wait() == "Answer 1" and not tab.page.is_visible("#undo")
    tab.page.click("#redo")
    assert shown.all_inner_texts() == ["Question 0", "Question 4", "Question 3", "Question 2"]
    tab.page.evaluate("() => localStorage.clear()")
    tab.page.reload()
    assert tab.count("#conversations .title") == 0
    tab.page.set_input_files("#import-file", file)
    tab.page.locator("#history-note", has_text="5 of 5 conversations were imported.").wait_for()
    assert sorted(shown.all_inner_texts()) == titles
    damaged = json.loads(file.read_text())
    damaged["conversations"][0]["messages"][1]["answer"]["tokens"] = 5
    for text, said in {
        "{": "is not JSON", "[]": "holds no conversations", json.dumps(damaged): "4 of 5",
    }.items():  # fmt: skip
        file.write_text(text)
        tab.page.set_input_files("#import-file", file)
        tab.page.locator("#history-note", has_text=said).wait_for()


def test_an_edited_question_is_asked_again(open_tab, script):
    tab = open_tab(script.url)
    script.scripts += [["One"], ["Two"], ["Three"]]
    for question in ("First", "Second"):
        tab.ask(question)
        tab.wait()
    tab.page.locator(".question").first.get_by_role("button", name="Edit").click()
    tab.page.fill(".editor", "First, in other words")
    tab.page.keyboard.press("Enter")
    tab.said("Three")
    assert tab.count(".question") == tab.count(".answer") == 1
    assert script.asked[-1]["messages"] == [{"role": "user", "content": "First, in other words"}]
    tab.wait()
    tab.page.click("#undo")
    assert tab.page.locator(".question .text").all_inner_texts() == ["First", "Second"]
    assert tab.page.locator(".answer .text").all_inner_texts() == ["One", "Two"]
    tab.page.click("#redo")
    assert tab.page.locator(".answer .text").all_inner_texts() == ["Three"]


def test_an_answer_that_was_made_again_comes_back(open_tab, script):
    """Also where the new one was stopped, or an error came in its place."""
    tab = open_tab(script.url)
    error = {"error": {"message": "the server is stopping.", "code": 503}}
    script.scripts += [["One"], ["Two"], ["Three ", threading.Event()], [error]]
    tab.ask("Count")
    for text in ("One", "Two", "Three", "The server is stopping."):
        tab.said(text)
        if text == "Three":
            tab.page.click("#undo")
            assert tab.wait() == "Two"
        if text != "The server is stopping.":
            tab.page.click("#again")
    for text in ("Two", "One"):
        tab.page.click("#undo")
        assert tab.wait() == text
    assert tab.count(".answer") == tab.count(".question") == 1


def test_what_is_typed_and_not_sent_is_there_after_a_reload(open_tab, script):
    tab = open_tab(script.url)
    tab.page.fill("#question", "a\nb\nc")
    tab.page.reload()
    assert tab.page.input_value("#question") == "a\nb\nc"
    assert tab.page.locator("#question").bounding_box()["height"] > 60
    script.scripts.append(["One"])
    tab.page.press("#question", "Enter")
    tab.wait()
    tab.page.reload()
    assert tab.page.input_value("#question") == ""


def test_an_answer_that_was_cut_goes_on(open_tab, script):
    tab = open_tab(script.url)
    script.finish = "length"
    script.scripts += [["One ", "two "], ["three ", "four"]]
    tab.ask("Count")
    assert tab.wait() == "One two"
    script.finish = "stop"
    tab.page.click("#continue")
    tab.said("One two three four")
    assert tab.wait() == "One two three four" and tab.count(".answer") == 1
    assert tab.count("#continue") == 0
    asked = script.asked[-1]
    assert asked["continue_final_message"] is True
    assert asked["messages"][-1] == {"role": "assistant", "content": "One two "}
    tab.page.reload()
    assert tab.wait() == "One two three four"


def test_a_cut_answer_goes_on_as_one_that_was_not(tab, pair):
    """By the real server: greedy, the two parts are the text of one request."""
    tab.unfold("settings")
    tab.page.fill("#max_tokens", "30")
    tab.ask("Go on")
    whole = tab.wait()
    tab.page.fill("#max_tokens", "12")
    tab.page.click("#again")
    tab.page.locator("#continue").wait_for()
    assert whole.startswith(tab.wait()) and tab.wait() != whole
    tab.page.fill("#max_tokens", "18")
    tab.page.click("#continue")
    tab.page.locator("#again").wait_for()
    assert tab.wait() == whole


def test_what_a_first_visit_shows(open_tab, script):
    """Samples to begin with, no figures, a field that grows, a preset, a line under the answer."""
    tab = open_tab(script.url)
    assert tab.count(".samples button") == 3
    assert not tab.page.is_visible("#figures") and not tab.page.is_visible("#temperature")
    script.scripts.append(["96", " it", " is\n```python\nx = 1\n```\n"])
    tab.page.locator(".samples button").first.click()
    tab.wait()
    line = tab.page.inner_text(".line")  # without a speed: all tokens came at once
    assert line.startswith("3 tokens · ") and line.endswith(" s")
    assert tab.figure("Tokens per second") == "\u2013"
    assert tab.page.inner_text("pre .language") == "python"
    low = tab.page.locator("#question").bounding_box()["height"]
    tab.page.fill("#question", "a\nb\nc\nd")
    assert tab.page.locator("#question").bounding_box()["height"] > low + 40
    tab.unfold("settings")
    tab.page.select_option("#preset", "Programmer")
    assert "careful programmer" in tab.page.input_value("#system")
    tab.page.fill("#system", "Only rhymes")
    tab.page.click("#save-preset")
    tab.page.reload()
    assert "Only rhymes" in tab.page.locator("#preset option").all_text_contents()


def test_hostile_answers_stay_text(open_tab, script):
    """Whole, and letter by letter as they would come."""
    tab = open_tab(script.url)
    for pieces in ([HOSTILE], list(HOSTILE)):
        script.scripts.append(pieces)
        tab.ask("Break it")
        shown = tab.wait()
        for text in ("<script>window.broken = 1</script>", "onerror=", "<b>bold?</b>", "<i>"):
            assert text in shown
        assert tab.page.evaluate("() => window.broken") is None
        assert tab.count(".answer script, .answer img, .answer b, .answer i") == 0
        addresses = (
            tab.page.locator(".answer")
            .last.locator("a")
            .evaluate_all("links => links.map(a => [a.href, a.rel])")
        )
        rel = "noopener noreferrer"
        assert addresses == [
            ["https://example.org/a", rel],
            ["https://example.org/plain", rel],
            ["https://example.org/picture.png", rel],
        ]
        assert tab.count(".answer:last-child strong") == tab.count(".answer:last-child em") == 1
        assert tab.count(".answer:last-child li li code") == 1
    halves = tab.page.locator(".answer").evaluate_all(
        "nodes => nodes.map(n => n.querySelector('.text').innerText)"
    )
    assert halves[0] == halves[1]


# Lines laid out in one go. A 2-core Xeon does 4000 in 100 ms, as long as the page's longest task.
LONGEST = 8000
TRIES = 6  # the garbage collector and other processes may come between
SLOW = (
    "a word", "addresses", "brackets", "cells", "emphasis that opens", "empty lines", "items",
    "lines of code", "numbers", "quotes on lines",
)  # fmt: skip


@pytest.mark.parametrize("name", SLOW)
def test_huge_answers_do_not_freeze_the_page(browser, open_tab, script, name):
    """10^5 characters, at once and in parts, also where they are one line.

    No task takes longer than a list of plain lines does on the same machine, right after it.
    """
    text = HUGE[name]
    assert len(text) > 90_000

    def longest_of(size: int) -> float:
        tab = open_tab(script.url)
        script.scripts.append([text[i : i + size] for i in range(0, len(text), size)])

        def answer() -> None:
            tab.ask("Go on")
            tab.page.locator("#again").wait_for()
            tab.page.wait_for_timeout(50)

        took = longest_task(browser, tab.page, answer)
        return took / time_of_lines(browser, tab.page, LONGEST)

    for size in (len(text), 12_500):
        assert any(longest_of(size) < 1 for _ in range(TRIES)), size


def test_a_policy_that_holds(open_tab, script):
    """What a script in the page cannot do, whoever had put it there."""
    tab = open_tab(script.url)
    tries = {
        "inline script": "() => { const s = document.createElement('script');"
        " s.textContent = 'window.broken = 1'; document.body.append(s); }",
        "html": "() => { document.body.insertAdjacentHTML('beforeend', '<b>x</b>'); }",
        "handler": "() => { document.body.setAttribute('onclick', 'window.broken = 2');"
        " document.body.click(); }",
        "elsewhere": "() => fetch('https://example.org/').catch(() => null)",
        "frame": "() => { const f = document.createElement('iframe');"
        " f.src = 'https://example.org/'; document.body.append(f); }",
        "style": "() => { document.body.setAttribute('style', 'color: red'); }",
    }
    for name, code in tries.items():
        tab.complaints.clear()
        try:
            tab.page.evaluate(code)
        except Exception as error:
            assert "TrustedHTML" in str(error) or "TrustedScript" in str(error), name
            continue
        tab.page.wait_for_timeout(100)
        assert any("Content Security Policy" in text for text in tab.complaints), name
    assert tab.page.evaluate("() => window.broken") is None
    assert tab.page.evaluate("() => getComputedStyle(document.body).color") != "rgb(255, 0, 0)"
    tab.complaints.clear()
    tab.requests[:] = [url for url in tab.requests if "example.org" not in url]  # refused ones


FOREIGN = """async (base) => {
  const body = JSON.stringify({ prompt: "Once", max_tokens: 2 });
  const asked = { method: "POST", body };
  const json = { "Content-Type": "application/json" };
  const tries = [
    ["/completions", asked], ["/completions", { ...asked, mode: "no-cors" }],
    ["/completions", { ...asked, headers: json }], ["/models", {}],
  ];
  const send = ([path, how]) => fetch(base + path, how).then((got) => got.type, () => "refused");
  return Promise.all(tries.map(send));
}"""


def test_a_foreign_page_gets_nothing(browser, server, script):
    """Whatever it may send: the browser shows it nothing, and the server generates nothing."""

    def answered() -> list[str]:
        lines = server.server.metrics_text().splitlines()
        return [line for line in lines if "answered" in line]

    before = answered()
    page = browser.new_page(bypass_csp=True)  # as one that has no policy
    page.goto(script.url)
    got = page.evaluate(FOREIGN, server.url)
    page.close()
    assert got == ["refused", "opaque", "refused", "refused"]
    assert answered() == before != []


def test_stop_in_the_midst(open_tab, script):
    """What was said stays, the server is left alone, and the conversation goes on."""
    tab = open_tab(script.url)
    never = threading.Event()
    script.scripts += [["One ", "two ", never, *["three "] * 1000], ["Go ", "on"]]
    tab.ask("Count")
    tab.said("One two")
    tab.page.click("#stop-answer")
    assert tab.wait() == "One two"
    assert tab.page.inner_text(".note") == "Stopped."
    never.set()
    assert script.has_left.wait(30)
    tab.ask("And on")
    tab.said("Go on")
    assert [message["content"] for message in script.asked[-1]["messages"]] == [
        "Count", "One two ", "And on"
    ]  # fmt: skip


def test_escape_stops(open_tab, script):
    tab = open_tab(script.url)
    script.scripts.append(["One ", threading.Event()])
    tab.ask("Count")
    tab.said("One")
    tab.page.keyboard.press("Escape")
    tab.said("Stopped.")


def test_a_server_that_dies_in_the_midst(open_tab, script):
    """A sentence, the text so far, and another try that works."""
    tab = open_tab(script.url)
    error = {"error": {"message": "the server is stopping.", "code": 503}}
    script.scripts += [["One ", "two ", DIE], ["One ", error], ["All ", "of it"]]
    tab.ask("Count")
    assert tab.wait() == "One two"
    assert tab.page.inner_text(".note").startswith("The connection broke off before the answer")
    tab.page.click("#again")
    tab.said("The server is stopping.")
    tab.page.click("#again")
    tab.said("All of it")
    assert tab.count(".answer") == 1 and tab.page.locator(".note.bad").count() == 0


def test_a_server_that_is_gone(browser):
    with scripted_server() as script:
        tab = Tab(browser, script.url)
    try:
        tab.ask("Hello")
        tab.said("The server could not be reached")
    finally:
        tab.close()


def test_what_is_asked_for(open_tab, script):
    tab = open_tab(script.url)
    tab.unfold("settings")
    values = {"system": "Be brief", "temperature": "0.5", "max_tokens": "9", "seed": "3"}
    values["stop"] = "END, Stop here"
    for name, value in (values | {"num_draft_tokens": "auto", "tree": "2x2:4"}).items():
        tab.page.fill(f"#{name}", value)
    script.scripts += [["Yes"], ["Yes"]]
    tab.ask("Hello")
    tab.wait()
    expected = {
        "messages": [
            {"role": "system", "content": "Be brief"},
            {"role": "user", "content": "Hello"},
        ],
        "temperature": 0.5,
        "max_tokens": 9,
        "stop": ["END", "Stop here"],
        "seed": 3,
        "num_draft_tokens": "auto",
        "tree": "2x2:4",
        "stream": True,
        "stream_options": {"include_usage": True, "include_draft": True},
    }
    assert script.asked == [expected]
    tab.page.reload()  # the settings are kept
    tab.page.click("#again")
    tab.wait()
    assert script.asked[1] == expected


def test_reasoning_and_events(open_tab, script):
    tab = open_tab(script.url)
    thought = chunk_of("Let me think", 1)
    thought["choices"][0]["delta"] = {"reasoning": "Let me think"}
    thought["draft"]["tokens"][0]["reasoning"] = True
    event = {"num_tokens": 2, "what": "drafting off", "reason": "it does not pay"}
    thought["draft"]["drafting_events"].append(event)
    script.scripts.append([thought, "The answer"])
    tab.ask("Think")
    assert tab.wait() == "The answer"
    tab.page.click(".reasoning summary")
    assert tab.page.inner_text(".reasoning .drafted") == "Let me think"
    tab.unfold("strip")
    assert tab.page.inner_text("#events") == "Token 2: drafting off. It does not pay."


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 768, 360])
def test_nothing_sticks_out(open_tab, server, width, scheme):
    size = {"width": width, "height": 740}
    tab = open_tab(server.url.removesuffix("v1"), viewport=size, color_scheme=scheme)
    tab.ask("Hello there " * 20)
    tab.wait()
    tab.unfold("history", "settings", "strip")
    for view in ("chat", "race"):
        tab.page.click(f"#tab-{view}")
        beyond = """width => [...document.querySelectorAll("button, input, select, textarea")]
            .filter(e => e.checkVisibility() && e.getBoundingClientRect().right > width)
            .map(e => e.outerHTML)"""
        assert tab.page.evaluate(beyond, width) == []
        assert tab.page.evaluate("() => document.documentElement.scrollWidth") == width
        assert tab.page.evaluate("() => document.documentElement.scrollHeight") == 740
    background = tab.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")


def test_everything_has_a_name_and_a_key(open_tab, script):
    """What can be used can be reached by Tab, and is called something."""
    tab = open_tab(script.url)
    script.scripts.append(["Some ", "`code`\n```py\nx = 1\n```\n"])
    tab.ask("Hello")
    tab.wait()
    nameless = tab.page.evaluate(
        """() => [...document.querySelectorAll(
          "button, input, textarea, select, [role=img], section")]
        .filter(e => !(e.getAttribute("aria-label") || e.getAttribute("aria-labelledby")
          || e.labels?.length || e.textContent.trim())).map(e => e.outerHTML)"""
    )
    assert nameless == []
    tab.unfold("settings", "strip")
    reached = set()
    for _ in range(60):
        tab.page.keyboard.press("Tab")
        reached.add(tab.page.evaluate("() => document.activeElement.id"))
    wanted = "tab-chat question send new marks system temperature max_tokens tree seed again log"
    assert set(wanted.split()) <= reached
    tab.page.focus("#tab-chat")
    tab.page.keyboard.press("ArrowRight")
    assert tab.page.locator("#race").is_visible() and tab.page.locator("#chat").is_hidden()
