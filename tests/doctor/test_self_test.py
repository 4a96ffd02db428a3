"""The self-test: parts that fail are lines of a report without private things, and parts can fail.

All of it on the demo pair takes minutes: that is one exhaustive test.
"""

import json
import platform
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx_lm
import pytest
from grids import thorough
from helpers import byte_tokenizer, tiny_head, tiny_llama
from mlx_lm.models import llama

from mlx_eagle.doctor import __main__ as program
from mlx_eagle.doctor import self_test
from mlx_eagle.doctor.self_test import Line, Part, Section


def raises(error: Exception):
    def run() -> list[Line]:
        raise error

    return run


KERNEL = RuntimeError(
    "Maximum threads per threadgroup is 896\nbut requested 1024 | in /opt/a/b.metal"
)
GOOD = Part("good", lambda: [("one", "1.0", "fine")])
BAD = Part("bad", lambda: [("two", "2.0", "FAILED")])
BROKEN = Part("broken", raises(KERNEL))
WAYS = self_test.WAYS


def section(*parts: Part) -> Section:
    fresh = [Part(part.name, part.run) for part in parts]
    return Section("A section", ("what", "number", ""), fresh, "A remark.")


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """The command on a few parts of ours: the exit code, the report and what was said."""

    def run(*parts: Part, flags: tuple[str, ...] = (), out: str = "report.md"):
        monkeypatch.setattr(program, "sections", lambda: [section(*parts)])
        monkeypatch.setenv(self_test.TF32, "0")
        code = 0
        file = tmp_path / out
        try:
            program.main(["--self-test", "--out", str(file), *flags])
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, file.read_text() if file.is_file() else None, capsys.readouterr()

    return run


def test_all_is_well(run):
    code, report, said = run(GOOD)
    assert code == 0 and "All parts passed." in said.out and "report.md" in said.out
    assert report.startswith("## mlx-eagle ") and "self-test: all parts passed" in report
    table = "| what | number |  |\n|---|---|---|\n| one | 1.0 | fine |"
    assert f"### A section\n\nA remark.\n\n{table}" in report
    assert "[1/1] good: ok" in said.err


def test_what_fails_is_a_line_and_the_rest_goes_on(run):
    code, report, said = run(BROKEN, BAD, GOOD)
    assert code == 1 and "2 parts failed." in said.out
    assert "2 of 3 parts failed" in report and "Failed: broken; bad" in report
    (line,) = [line for line in report.splitlines() if "RuntimeError" in line]
    assert line.startswith("| broken | RuntimeError: Maximum threads") and line.endswith(
        "| FAILED |"
    )
    assert r"1024 \| in .../b.metal" in line, "the table and a user's path are not left open"
    assert "| two | 2.0 | FAILED |" in report and "| one | 1.0 | fine |" in report
    assert [line.split()[0] for line in said.err.splitlines()[-3:]] == ["[1/3]", "[2/3]", "[3/3]"]


def test_a_part_that_ends_the_process_is_named(run, monkeypatch, tmp_path):
    """Not every crash is an exception: what was found until then, and where, is on the disk."""
    with pytest.raises(ZeroDivisionError):
        run(GOOD, Part("the end of it", raises(ZeroDivisionError())), BAD)
    report = (tmp_path / "report.md").read_text()
    assert 'self-test: ended in the part "the end of it"' in report and "| one |" in report


def test_json(run):
    code, _, said = run(BROKEN, GOOD, flags=("--json",))
    found = json.loads(said.out)
    assert code == 1 and found["ok"] is False
    assert [part["ok"] for part in found["parts"]] == [False, True]
    assert found["parts"][0]["error"].startswith("RuntimeError: Maximum")
    assert found["parts"][1]["lines"] == [["one", "1.0", "fine"]]


def test_a_report_that_cannot_be_written_costs_a_sentence_and_no_time(run):
    code, _, said = run(Part("never", raises(AssertionError())), out="no/such/folder/report.md")
    assert code == 2 and said.err.startswith("error: --out ") and said.err.count("\n") == 1


@pytest.mark.parametrize(
    "text, clean",
    [
        ("/home/ann/models/x.json cannot be read", ".../x.json cannot be read"),
        ("see ~/Library/Caches/mlx-eagle", "see .../mlx-eagle"),
        ("cannot open '/opt/lib/libmlx.so': no", "cannot open '.../libmlx.so': no"),
        ("10 tokens/s, 3/4 of it, a/b", "10 tokens/s, 3/4 of it, a/b"),
    ],
)
def test_paths_are_cut_to_their_last_part(text, clean):
    assert self_test.redact(text) == clean


def test_the_report_has_neither_the_host_nor_what_lies_at_home(run, monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "anns-macbook")
    _, report, _ = run(Part("a", raises(ValueError("anns-macbook went away"))))
    assert "anns-macbook" not in report and "(host) went away" in report
    assert str(Path.home()) not in report


# --- the parts themselves ------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim, dtype", [(64, "float32"), (80, "bfloat16")])
def test_attention(head_dim, dtype, monkeypatch):
    monkeypatch.setattr(self_test, "PREFIXES", (40,))
    (line,) = self_test.try_attention(head_dim, dtype)
    assert line[:2] == (str(head_dim), dtype) and line[-1] == "ok"


@pytest.mark.parametrize("wrong", ["nan", "the mask"])
def test_attention_that_is_wrong_for_five_rows_is_found(monkeypatch, wrong):
    monkeypatch.setattr(self_test, "PREFIXES", (40,))
    attention = llama.scaled_dot_product_attention

    def broken(queries, keys, values, cache, scale, mask, **options):
        if queries.shape[2] == 5 and wrong == "the mask":
            mask = None
        out = attention(queries, keys, values, cache=cache, scale=scale, mask=mask, **options)
        return out * mx.nan if queries.shape[2] == 5 and wrong == "nan" else out

    monkeypatch.setattr(llama, "scaled_dot_product_attention", broken)
    (line,) = self_test.try_attention(64, "float32")
    assert line[-1] == "FAILED" and line[4].startswith("5 rows")


@pytest.fixture
def pair() -> self_test.DemoPair:
    """A tiny random pair in place of the demo pair."""
    model = tiny_llama(vocab_size=258)
    pair = self_test.DemoPair("float32", model, byte_tokenizer(), tiny_head(model))
    pair.num_tokens = 12
    return pair


@pytest.mark.parametrize("way", WAYS)
def test_parity(pair, way):
    lines = pair.attempt(way)
    assert len(lines) == (2 if way == "batch" else 1)
    assert set(lines) == {("float32", way, "12", "identical", "ok")}


def test_each_type_of_weights_is_loaded_once(pair, monkeypatch):
    loaded = []
    monkeypatch.setattr(self_test, "load_pair", lambda name: loaded.append(name) or pair)
    monkeypatch.setattr(pair, "name", "float16")
    parts = [part for part in self_test.parity_section().parts if ", float16," in part.name]
    lines = [line for part in parts for line in part.run()]
    assert loaded == ["float16"] and len(lines) == len(WAYS) + 1
    assert {line[-1] for line in lines} == {"ok"}


@pytest.mark.parametrize("way", thorough(WAYS, "chain", "sampled"))
def test_a_difference_has_its_margin(pair, monkeypatch, way):
    """mlx-lm's own text is changed, as if ours had gone another way there."""
    stream = mlx_lm.stream_generate
    batch = mlx_lm.batch_generate

    def wrong_stream(*args, **options):
        for i, response in enumerate(stream(*args, **options)):
            response.token += i == 3
            yield response

    def wrong_batch(*args, **options):
        found = batch(*args, **options)
        found.token_ids[1][3] += 1
        return found

    monkeypatch.setattr(mlx_lm, "stream_generate", wrong_stream)
    monkeypatch.setattr(mlx_lm, "batch_generate", wrong_batch)
    line = pair.attempt(way)[-1]
    assert line[-1] == "FAILED" and line[3].startswith("differs from token 3 on, margin ")


@pytest.mark.parametrize("margin, verdict", [(0.0009, "near-tie"), (0.0011, "FAILED")])
def test_near_ties_are_no_failures(pair, margin, verdict):
    result = {"identical": False, "index": 3, "margin": margin}
    assert pair.line("chain", result, 12)[-1] == verdict


def test_a_sampled_token_is_the_best_of_the_noisy_scores(pair):
    """The margin is that of these scores."""
    sampling = self_test.Sampling(temp=1.0, seed=3)
    model = pair.models.target
    tokens = [5, 6]
    logits = model(mx.array(tokens)[None])[0, -1:]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    scores = self_test.noisy_scores(model, tokens, sampling, 0).flatten()
    assert mx.argmax(scores).item() == sampling(logprobs).item()


@pytest.mark.parametrize("pace, num_tokens", [(1.0, 8), (0.01, 96), (9.0, 4)])
def test_answers_are_as_long_as_there_is_time_for(monkeypatch, pace, num_tokens):
    """A prompt takes 1 second, a step 1/4, a pass over a tree 1/2: (8 - 2 * 1) / (1/4 + 1/2)."""
    ticks = (pace * tick for tick in (0.0, 1.0, 1.0, 1.25, 1.25, 1.75))
    clock = SimpleNamespace(perf_counter=lambda: next(ticks))
    monkeypatch.setattr(self_test, "time", clock)
    assert self_test.num_tokens_within(8.0, tiny_llama(), [1, 2, 3]) == num_tokens


def test_costs(monkeypatch):
    model = tiny_llama(vocab_size=2000)
    monkeypatch.setattr(self_test, "load_demo", lambda: (model, None, tiny_head(model)))
    lines = self_test.measure_costs(1)
    assert [line[0] for line in lines[:8]] == [f"pass of {r} rows, c({r})" for r in range(1, 9)]
    assert lines[0][2] == "1.00" and lines[-1][0] == "draft step of the head"


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_all_of_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(self_test.TF32, "0")
    program.main(["--self-test", "--out", str(tmp_path / "report.md")])
    report = (tmp_path / "report.md").read_text()
    assert "all parts passed" in report and "c(8)" in report
    for name in self_test.NEAR_TIES:
        for way in WAYS:
            assert f"| {name} | {way} |" in report
    for size in self_test.HEAD_DIMS:
        assert f"| {size} | float16 |" in report
