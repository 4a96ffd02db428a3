"""``mlx_eagle.chat`` beside ``mlx_lm.chat``: the same answers, one cache, and ways to stop."""

import builtins
import os
import signal
import sys

import mlx_lm.chat
import pytest
from grids import thorough
from helpers import byte_tokenizer, caches_equal, plain, tiny_head, tiny_llama
from mlx_lm.cli_ui import ChatUI
from mlx_lm.models.cache import make_prompt_cache

from mlx_eagle import chat
from mlx_eagle.decoding.stats import Stats
from mlx_eagle.drafters.model_drafter import ModelDrafter

MODEL = tiny_llama(vocab_size=258)
DRAFTER = tiny_head(MODEL)
TOKENIZER = byte_tokenizer()
NUM_CACHES = len(make_prompt_cache(MODEL))
QUESTIONS = ["Hello", "And then?", "h", "r", "Hello", "More"]
OURS = ["Hello", "And then?", "/help", "/reset", "Hello", "More"]


@pytest.fixture
def run(monkeypatch, capsys):
    """Type lines into a chat, then EOF: (exit code, answers, output, errors)."""
    monkeypatch.setattr(mlx_lm.chat, "load", lambda *_, **__: (MODEL, TOKENIZER))
    monkeypatch.setattr(chat, "load_pair", lambda args, _: (MODEL, TOKENIZER, DRAFTER))

    def command(main, lines: list, *flags: str) -> tuple[int, list[str], str, str]:
        answers, typed = [], iter(lines)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

        def read(_: str = "") -> str:
            line = next(typed, EOFError())
            if isinstance(line, BaseException):
                raise line
            answers.append("")
            return line

        def hear(_, text: str) -> None:
            answers[-1] += text

        monkeypatch.setattr(builtins, "input", read)
        monkeypatch.setattr(ChatUI, "stream_token", hear)
        monkeypatch.setattr(sys, "argv", ["chat", "-m", "12", *flags])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code
        return code, answers, *capsys.readouterr()

    return command


FLAGS = {
    "none": (),
    "small cache": ("--max-kv-size", "20"),
    "system": ("--system-prompt", "Be brief."),
    "chunks": ("--prefill-step-size", "3", "-m", "30"),
}


LENGTHS = [(), *(("--num-draft-tokens", k) for k in "03"), ("--tree", "3x3:6")]


@pytest.mark.parametrize("ours", thorough(LENGTHS, LENGTHS[2]), ids=str)
@pytest.mark.parametrize("name", thorough(FLAGS, "small cache", "chunks"))
def test_the_answers_of_mlx_lm(run, name, ours):
    theirs = run(mlx_lm.chat.main, [*QUESTIONS, "q"], *FLAGS[name])
    code, answers, out, _err = run(chat.main, [*OURS, "/exit"], *FLAGS[name], *ours)
    assert code == 0 and answers == theirs[1]
    assert all(answers[i] for i in (0, 1, 4, 5)) and answers[0] == answers[4] != answers[5]
    assert "context cleared" in out and out.rstrip().endswith("bye\x1b[0m")
    assert "mlx_eagle.chat" in out and out.count("/stats") == 2 and out.count("/exit") == 2


def test_a_seed_fixes_the_answers_drafted_or_not(run):
    lines = ["Hello", "/reset", "Hello"]
    flags = ("--temp", "0.9", "--top-p", "0.95", "--seed")
    texts = [
        run(chat.main, lines, *flags, seed, "--num-draft-tokens", k)[1]
        for seed, k in (("3", "3"), ("3", "0"), ("4", "3"))
    ]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][0] != texts[0][2], "two answers must not share their noise"


def test_xtc_goes_to_mlx_lms_sampler(run):
    flags = ("--temp", "0.9", "--xtc-probability", "1", "--xtc-threshold", "0.05")
    code, answers, _, _ = run(chat.main, ["Hello"], *flags)
    assert code == 0 and answers[0]


def conversation(drafter) -> chat.Conversation:
    args = chat.build_parser().parse_args(["-m", "12", "--num-draft-tokens", "3"])
    return chat.Conversation(args, MODEL, TOKENIZER, drafter)


@pytest.mark.parametrize("drafter, num_behind", [(DRAFTER, 1), (ModelDrafter(MODEL), 0)])
def test_caches_and_counts_go_on_over_the_turns(drafter, num_behind):
    talk, reference, stats = conversation(drafter), make_prompt_cache(MODEL), []
    for question in ("Hello", "And then?", "More"):
        responses = list(talk.answer(question))
        messages = [{"role": "user", "content": question}]
        prompt = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True)
        expected = plain(MODEL, prompt, 12, prompt_cache=reference)
        assert [response.token for response in responses] == expected
        assert caches_equal(talk.cache[:NUM_CACHES], reference)
        assert talk.cache[NUM_CACHES].offset == reference[0].offset - num_behind
        stats.append(responses[-1].stats)
    total = talk.stats
    for name in ("num_rounds", "num_drafted", "num_accepted", "num_head_forwards", "num_emitted"):
        assert getattr(total, name) == sum(getattr(one, name) for one in stats)
    assert total.num_rounds > 3 and (total.num_accepted > 0) == (drafter is not DRAFTER)
    assert sum(total.accepted_histogram) == total.num_rounds
    assert total.drafted_by_position[0] == total.num_rounds
    assert total.tau == total.num_emitted / total.num_target_forwards
    talk.forget()
    assert talk.stats is total and all(cache.empty() for cache in talk.cache)


def test_stats_are_printed(run):
    talk = conversation(DRAFTER)
    for question in ("Hello", "And then?"):
        list(talk.answer(question))
    lines = ["/stats", "Hello", "And then?", "/stats"]
    _, answers, out, _ = run(chat.main, lines, "--num-draft-tokens", "3")
    assert answers[0] == answers[3] == ""
    for lines in (["Answers: 0", *Stats().lines()], talk.stats_lines()):
        assert "\n".join(f"  {line}" for line in lines) in out
    assert f"Mean acceptance length (tau): {talk.stats.tau:.3f}" in out


def test_without_a_drafter(run, monkeypatch):
    expected = run(mlx_lm.chat.main, [*QUESTIONS[:2], "q"])[1]
    monkeypatch.setattr(chat, "load_pair", lambda args, _: (MODEL, TOKENIZER, None))
    flags = ("--model", "somewhere", "--num-draft-tokens", "0")
    code, answers, out, _ = run(chat.main, [*QUESTIONS[:2], "/stats"], *flags)
    assert code == 0 and answers[:2] == expected[:2] and "Answers: 2" in out


def test_the_end_of_the_input_leaves(run):
    code, _, out, err = run(chat.main, [])
    assert code == 0 and "bye" in out and err == ""


@pytest.mark.parametrize("lines", [[KeyboardInterrupt()], ["Hello", KeyboardInterrupt()]])
def test_ctrl_c_at_the_prompt_leaves(run, lines):
    code, _, _out, err = run(chat.main, lines)
    assert (code, err) == (130, "\ninterrupted\n")


def press_ctrl_c_at(monkeypatch, piece: int) -> list[str]:
    """Ctrl-C while that piece of an answer is printed; the pieces that were printed."""
    pieces: list[str] = []

    def hear(_, text: str) -> None:
        pieces.append(text)
        if len(pieces) == piece:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ChatUI, "stream_token", hear)
    return pieces


@pytest.fixture
def ctrl_c():
    """A suite that runs in the background has SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("k", ["0", "3"])
def test_ctrl_c_ends_the_answer_and_the_chat_goes_on(run, monkeypatch, ctrl_c, k):
    """What was given before it is in the caches, as if the answer had ended there."""
    shorter = chat.Conversation(
        chat.build_parser().parse_args(["-m", "5", "--num-draft-tokens", "0"]),
        MODEL, TOKENIZER, None,
    )  # fmt: skip
    assert len(list(shorter.answer("Hello"))) == 5
    shorter.args.max_tokens = 12
    expected = "".join(response.text for response in shorter.answer("And then?"))

    typed = iter(["Hello", "And then?", "/exit"])
    monkeypatch.setattr(builtins, "input", lambda _="": next(typed))
    monkeypatch.setattr(sys, "argv", ["chat", "-m", "12", "--num-draft-tokens", k])
    pieces = press_ctrl_c_at(monkeypatch, 5)
    chat.main()
    assert "".join(pieces[5:]) == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_says_how_to_exit(run, monkeypatch, ctrl_c, capsys):
    typed = iter(["Hello", "/stats"])
    monkeypatch.setattr(sys, "argv", ["chat", "-m", "12"])
    monkeypatch.setattr(builtins, "input", lambda _="": next(typed, "/quit"))
    press_ctrl_c_at(monkeypatch, 2)
    chat.main()
    out = capsys.readouterr().out
    assert "Stopped. Press Ctrl-C again, or type /exit, to leave." in out and "Answers: 1" in out


def test_a_second_ctrl_c_in_an_answer_exits(run, monkeypatch, ctrl_c):
    def hear(*_) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(builtins, "input", lambda _="": "Hello")
    monkeypatch.setattr(ChatUI, "stream_token", hear)
    monkeypatch.setattr(sys, "argv", ["chat", "-m", "12"])
    with pytest.raises(SystemExit) as stop:
        chat.main()
    assert stop.value.code == 130
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


MISTAKES = {
    "negative draft": (("--num-draft-tokens", "-1"), "give 0 (plain decoding) or more"),
    "several machines": (("--pipeline",), "start the command with mlx.launch"),
    "tree": (("--tree", "4x4"), "give WIDTHxDEPTH:NODES"),
    "seed": (("--seed", "-1"), "--seed is -1: give a whole number from 0"),
    "share": (("--top-p", "1.5"), "--top-p is 1.5: give a number from 0 to 1"),
    "window": (("--max-kv-size", "-1"), "--max-kv-size is -1: give 5 or more"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_costs_one_sentence(run, name):
    flags, sentence = MISTAKES[name]
    code, _, out, err = run(chat.main, ["Hello"], *flags)
    assert code == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and sentence in err


def test_a_model_without_a_chat_template(run, monkeypatch):
    bare = byte_tokenizer()
    bare.has_chat_template = False
    monkeypatch.setattr(chat, "load_pair", lambda args, _: (MODEL, bare, DRAFTER))
    code, _, _, err = run(chat.main, ["Hello"], "--model", "base", "--draft-model", "head")
    assert code == 2 and "base has no chat template" in err


def test_nothing_is_asked_by_an_empty_line_and_letters_can_be_said(run):
    code, answers, out, _ = run(chat.main, ["", "   ", "q", "r", "h", "/nothing", "/exit"])
    assert code == 0
    assert [bool(text) for text in answers] == [False, False, *[True] * 3, False, False]
    assert "There is no command /nothing" in out


def test_into_a_pipe_go_the_answers_alone(monkeypatch, capsys):
    """No colours, no cursor movements, no boxes; what was asked for is said plainly."""
    talk = conversation(DRAFTER)
    texts = ["".join(r.text for r in talk.answer(text)) + "\n" for text in ("Hello", "More")]
    monkeypatch.setattr(chat, "load_pair", lambda args, _: (MODEL, TOKENIZER, DRAFTER))
    typed, asked = iter(["Hello", "", "/reset", "/reset", "Hello", "More", "/help", "/exit"]), []
    monkeypatch.setattr(builtins, "input", lambda *given: asked.append(given) or next(typed))
    chat.main(["-m", "12", "--num-draft-tokens", "3", "--show-drafts"])
    out, err = capsys.readouterr()
    assert out.startswith(texts[0] + "".join(texts)) and err == ""
    assert out.removeprefix(texts[0] + "".join(texts)).startswith("/help: ")
    assert "\x1b" not in out and set(asked) == {()}


def test_a_turn_copies_from_the_turns_before(monkeypatch):
    """Copies begin with all that the caches hold, question and answer, and then the question."""
    begun = []
    drafter = DRAFTER.with_copies()
    begin = drafter.copies.begin

    def noting(known, prompt, *scope):
        begun.append((list(known), list(prompt)))
        return begin(known, prompt, *scope)

    monkeypatch.setattr(drafter.copies, "begin", noting)
    talk, told = conversation(drafter), []
    for question in ("Hello", "And then?", "More"):
        answer = [response.token for response in talk.answer(question)]
        told += [*begun[-1][1], *answer]
        assert told[: len(begun[-1][0])] == begun[-1][0]
    assert [len(known) for known, _ in begun] == sorted({len(known) for known, _ in begun})
    assert len(begun[-1][0]) == len(told) - len(begun[-1][1]) - len(answer)
    talk.forget()
    list(talk.answer("Hello"))
    assert begun[-1][0] == []
