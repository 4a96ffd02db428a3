"""The self-test: parts that fail are lines of a report without private things, and parts can fail.

All of it on the demo pair takes minutes: that is one exhaustive test.
"""

import json
import platform
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from grids import thorough
from helpers import byte_tokenizer, tiny_head, tiny_llama
from mlx_lm.models import llama

from mlx_eagle.doctor import __main__ as program
from mlx_eagle.doctor import pair, self_test, tiny
from mlx_eagle.doctor.parts import Line, Part, Section
from mlx_eagle.target import rollback


def raises(error: Exception):
    def run() -> list[Line]:
        raise error

    return run


KERNEL = RuntimeError(
    "Maximum threads per threadgroup is 896\nbut requested 1024 | in /opt/a/b.metal"
)
GOOD = Part("good", lambda: [Line(("one", "1.0", "fine"))])
BAD = Part("bad", lambda: [Line(("two", "2.0", "FAILED"), ok=False)])
BROKEN = Part("broken", raises(KERNEL))


def section(*parts: Part) -> Section:
    return Section("A section", ("what", "number", ""), parts, "A remark.")


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """The command on a few parts of ours: the exit code, the report and what was said."""

    def run(*parts: Part, flags: tuple[str, ...] = (), out: str = "report.md"):
        monkeypatch.setattr(program, "sections", lambda: [section(*parts)])
        monkeypatch.setenv(self_test.TF32, "0")
        code, file = 0, tmp_path / out
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
    table = "| what | number |  |\n| --- | --- | --- |\n| one | 1.0 | fine |"
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
    assert "1024 / in .../b.metal" in line, "neither the table nor the path of a user is left open"
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
    assert str(Path.home()) not in report and "calibration" not in report


# --- the parts themselves ------------------------------------------------------------------------


CASES = {case.name: case for case in tiny.CACHE_CASES}


@pytest.mark.parametrize("name", thorough(CASES, "rotating", "quantized", "gated delta"))
def test_caches(name):
    (line,) = tiny.try_cache(CASES[name])
    assert line.ok and "identical" in line.cells


def test_every_kind_of_cache_is_tried():
    quantized = any("kv_bits" in case.options for case in tiny.CACHE_CASES)
    names = {"QuantizedKVCache"} if quantized else set()
    for case in tiny.CACHE_CASES:
        for cache in case.make_cache(tiny.build(case.config)):
            names |= set(tiny.kind(cache).split())
    assert {kind.__name__ for kind in rollback.RULES} <= names


def test_a_cache_that_is_not_cut_back_is_found(monkeypatch):
    monkeypatch.setattr(rollback.TrimRollback, "rollback", lambda self, *args: None)
    (line,) = tiny.try_cache(tiny.CACHE_CASES[0])
    assert not line.ok and line.cells[-1] == "FAILED" and "differs from token" in line.cells[-2]


@pytest.mark.parametrize("head_dim, dtype", [(64, "float32"), (80, "bfloat16")])
def test_attention(head_dim, dtype, monkeypatch):
    monkeypatch.setattr(tiny, "PREFIXES", (40,))
    (line,) = tiny.try_attention(head_dim, dtype)
    assert line.ok and line.cells[:2] == (str(head_dim), dtype)


@pytest.mark.parametrize("wrong", ["nan", "the mask"])
def test_attention_that_is_wrong_for_five_rows_is_found(monkeypatch, wrong):
    monkeypatch.setattr(tiny, "PREFIXES", (40,))
    attention = llama.scaled_dot_product_attention

    def broken(queries, keys, values, cache, scale, mask, **options):
        if queries.shape[2] == 5 and wrong == "the mask":
            mask = None
        out = attention(queries, keys, values, cache=cache, scale=scale, mask=mask, **options)
        return out * mx.nan if queries.shape[2] == 5 and wrong == "nan" else out

    monkeypatch.setattr(llama, "scaled_dot_product_attention", broken)
    (line,) = tiny.try_attention(64, "float32")
    assert not line.ok and line.cells[4].startswith("5 rows")


@pytest.fixture
def pairs(monkeypatch) -> pair.Pairs:
    """A tiny random pair in place of the demo pair."""
    model = tiny_llama(vocab_size=258)
    args = model, byte_tokenizer(), tiny_head(model), pair.PRECISIONS["float32"], 12
    monkeypatch.setattr(pair.DemoPair, "load", lambda name: pair.DemoPair(*args))
    return pair.Pairs()


WAYS = {
    "chain": lambda pairs: pair.try_greedy(pairs, "float32", num_draft_tokens=3),
    "tree": lambda pairs: pair.try_greedy(pairs, "float32", tree=pair.TREE),
    "sampled": lambda pairs: pair.try_sampled(pairs, "float32", num_draft_tokens=3),
    "sampled tree": lambda pairs: pair.try_sampled(pairs, "float32", tree=pair.TREE),
    "batch": lambda pairs: pair.try_batch(pairs, "float32"),
}


@pytest.mark.parametrize("way", WAYS)
def test_parity(pairs, way):
    lines = WAYS[way](pairs)
    assert len(lines) == (2 if way == "batch" else 1)
    assert {line.cells for line in lines} == {("12", "identical", "ok")}


@pytest.mark.parametrize("way", thorough(WAYS, "chain", "sampled"))
def test_a_difference_has_its_margin(pairs, monkeypatch, way):
    """mlx-lm's own text is changed, as if ours had gone another way there."""
    stream, batch = pair.mlx_lm.stream_generate, pair.mlx_lm.batch_generate

    def wrong_stream(*args, **options):
        for i, response in enumerate(stream(*args, **options)):
            response.token += i == 3
            yield response

    def wrong_batch(*args, **options):
        found = batch(*args, **options)
        found.token_ids[1][3] += 1
        return found

    monkeypatch.setattr(pair.mlx_lm, "stream_generate", wrong_stream)
    monkeypatch.setattr(pair.mlx_lm, "batch_generate", wrong_batch)
    line = WAYS[way](pairs)[-1]
    assert not line.ok and line.cells[2] == "FAILED"
    assert line.cells[1].startswith("differs from token 3 on, margin ")


@pytest.mark.parametrize("margin, verdict", [(0.0009, "near-tie"), (0.0011, "FAILED")])
def test_near_ties_are_no_failures(pairs, margin, verdict):
    result = {"identical": False, "index": 3, "margin": margin}
    line = pair.judged(result, pairs.get("float32"), 12)
    assert line.cells[2] == verdict and line.ok == (verdict == "near-tie")


def test_a_sampled_token_is_the_best_of_the_noisy_scores(pairs):
    """Those that the margin is taken of."""
    sampling, model, tokens = pair.Sampling(temp=1.0, seed=3), pairs.get("float32").model, [5, 6]
    logits = model(mx.array(tokens)[None])[0, -1:]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    scores = pair.noisy_scores(model, tokens, sampling, 0).flatten()
    assert mx.argmax(scores).item() == sampling(logprobs).item()


@pytest.mark.parametrize("pace, num_tokens", [(1.0, 8), (0.01, 96), (9.0, 4)])
def test_answers_are_as_long_as_there_is_time_for(monkeypatch, pace, num_tokens):
    """A prompt takes 1 second, a step 1/4, a pass over a tree 1/2: (8 - 2 * 1) / (1/4 + 1/2)."""
    ticks = (pace * tick for tick in (0.0, 1.0, 1.0, 1.25, 1.25, 1.75))
    clock = SimpleNamespace(perf_counter=lambda: next(ticks))
    monkeypatch.setattr(pair, "time", clock)
    assert pair.num_tokens_within(8.0, tiny_llama(), [1, 2, 3]) == num_tokens


def test_costs(monkeypatch):
    model = tiny_llama(vocab_size=2000)
    monkeypatch.setattr(pair, "load_demo", lambda: (model, None, tiny_head(model)))
    lines = pair.measure_costs(1)
    assert [line.cells[0] for line in lines[:8]] == [
        f"pass of {r} rows, c({r})" for r in range(1, 9)
    ]
    assert lines[0].cells[2] == "1.00" and lines[-1].cells[0] == "draft step of the head"


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_all_of_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(self_test.TF32, "0")
    program.main(["--self-test", "--out", str(tmp_path / "report.md")])
    report = (tmp_path / "report.md").read_text()
    assert "all parts passed" in report and "c(8)" in report
    for name in pair.PRECISIONS:
        for way in ("chain", "tree", "sampled", "sampled tree", "batch"):
            assert f"| {name} | {way} |" in report
    for size in tiny.HEAD_DIMS:
        assert f"| {size} | float16 |" in report
