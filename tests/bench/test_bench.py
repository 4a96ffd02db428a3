"""The benchmark's arithmetic and prompt sets, against naive computations."""

import statistics

import pytest
from helpers import byte_tokenizer

from mlx_eagle.bench import costs, figures, measure, questions, report, runner, summary
from mlx_eagle.bench.configurations import Cell, make_configurations, schedule
from mlx_eagle.bench.figures import markdown_table
from mlx_eagle.bench.flags import Settings
from mlx_eagle.decoding.stats import Stats
from mlx_eagle.drafters.acceptance_stats import expected_tokens
from mlx_eagle.drafters.tree import DraftShape, TreeShape


def test_spread_is_the_naive_one():
    values = [3.0, 1.0, 4.0, 1.5, 9.0, 2.0]
    ordered = sorted(values)
    spread = figures.spread_of([*values, None])
    assert spread["median"] == (ordered[2] + ordered[3]) / 2
    assert (spread["min"], spread["max"], spread["n"]) == (1.0, 9.0, 6)
    # Linear interpolation between the order statistics, as numpy does it by default.
    for key, share in (("q1", 0.25), ("q3", 0.75)):
        at = share * 5
        low = int(at)
        naive = ordered[low] + (at - low) * (ordered[low + 1] - ordered[low])
        assert spread[key] == pytest.approx(naive)
    assert figures.spread_of([None]) is None
    assert figures.spread_of([2.0])["q1"] == 2.0


def make_stats(accepted: list[int], size: int) -> Stats:
    """Counts of rounds that drafted ``size`` and kept these many, as the loop records them."""
    stats = Stats()
    stats.end_prefill()
    for i, kept in enumerate(accepted):
        stats.record(size, size, kept, kept + 1, (i + 1) * size)
    return stats


def test_merged_counts_are_those_of_all_rounds():
    left = [0, 2, 3, 1]
    right = [3, 3, 0]
    merged = make_stats(left, 3) + make_stats(right, 3)
    whole = make_stats(left + right, 3)
    for name in ("tau", "acceptance_rate", "acceptance_by_position", "accepted_histogram"):
        assert getattr(merged, name) == getattr(whole, name)
    assert merged.tau == sum(n + 1 for n in left + right) / 7
    assert merged.num_head_forwards == 21


def fake_run(seconds: float, num_timed: int = 10, stats: Stats | None = None) -> runner.Run:
    return runner.Run([list(range(num_timed + 1))], num_timed, seconds, stats, 0.5, 1000)


def fake_cell(set_name: str, number: int, plain_times: list[float], times: list[float]):
    question = questions.Question(set_name, str(number), "why?")
    stats = make_stats([2, 1], 3)
    configuration = make_configurations(Settings(sizes=(3,)))[0]
    plain_runs = [fake_run(t) for t in plain_times]
    return Cell(
        configuration,
        (question,),
        ([1, 2],),
        plain=plain_runs,
        runs=[fake_run(t, stats=stats) for t in times],
    )


def test_speeds_are_tokens_over_the_sum_of_median_times():
    cells = [
        fake_cell("a", 0, [2.0, 9.0, 2.2], [1.0, 1.1, 5.0]),
        fake_cell("b", 1, [4.0, 4.0, 4.0], [5.0, 5.0, 4.0]),
    ]
    result = summary.group_figures(cells)
    assert result["plain_tps"] == pytest.approx(20 / (2.2 + 4.0))
    assert result["tps"] == pytest.approx(20 / (1.1 + 5.0))
    assert result["speedup"] == pytest.approx(6.2 / 6.1)
    assert result["speedup_by_prompt"]["min"] == pytest.approx(4 / 5)
    assert result["speedup_by_prompt"]["max"] == pytest.approx(2.0 / 1.0)
    assert result["mean_acceptance_length"] == 5 / 2
    assert result["target_forwards_per_token"] == 2 / 5
    assert result["head_forwards_per_round"] == 3
    assert result["evals_per_round"] == 1
    assert result["round_seconds"] == pytest.approx(statistics.median([1.0, 1.1, 5, 5, 5, 4]) / 2)
    assert list(questions.by_set(cells)) == ["a", "b"]


def test_the_ratio_of_a_prompt_is_that_of_runs_side_by_side():
    # The machine halved its speed for the second repeat: medians of each would find 0.96.
    cell = fake_cell("a", 0, [2.0, 4.0, 2.3], [2.0, 4.0, 2.4])
    assert cell.speedup == pytest.approx(1.0)


def test_a_text_of_one_token_has_no_speed():
    cell = fake_cell("a", 0, [0.0], [0.0])
    cell.runs[:] = [runner.Run([[7]], 0, 0.0, Stats())]
    cell.plain[:] = [runner.Run([[7]], 0, 0.0)]
    result = summary.group_figures([cell])
    assert result["speedup"] is None and result["tps"] is None and result["round_seconds"] is None


RUNS = {
    "verify": {1: 0.10, 2: 0.11, 3: 0.12, 4: 0.13},
    "accept": {1: 0.005, 2: 0.006, 3: 0.007, 4: 0.008},
    "propose": {1: 0.002, 4: 0.014},
}
BUILDS = {"verify": {1: 0.004, 2: 0.005, 3: 0.005, 4: 0.005}, "propose": {1: 0.001, 4: 0.010}}


def make_costs(builds: dict | None = None) -> costs.Costs:
    """Costs of samples around these medians."""
    builds = {"accept": dict.fromkeys(RUNS["accept"], 0.0), **BUILDS, **(builds or {})}
    return costs.costs_of(
        {
            part: {
                size: [costs.Timing(factor * builds[part][size], factor * seconds)
                       for factor in (0.5, 1.0, 7.0)]
                for size, seconds in sizes.items()
            }
            for part, sizes in RUNS.items()
        }
    )  # fmt: skip


# What builds slowly, and how long the device then waits in a round of 1, 2 and 3 drafts.
HOSTS = {
    "fast": ({}, (0.0, 0.0, 0.0)),
    "slow pass": ({"verify": {1: 0.0, 2: 0.05, 3: 0.05, 4: 0.05}}, (0.043, 0.041, 0.039)),
    "slow draft": ({"propose": {1: 0.02, 4: 0.05}}, (0.017, 0.023, 0.032)),
}


@pytest.mark.parametrize("host", HOSTS)
def test_prediction_is_the_sum_of_a_rounds_parts(host):
    changes, waits = HOSTS[host]
    found = make_costs(changes)
    step = (0.014 - 0.002) / 3
    assert found["d"] == pytest.approx(step / 0.1)
    for k, wait in zip((1, 2, 3), waits, strict=True):
        assert found["host_seconds"][k] == pytest.approx(wait, abs=1e-9)
        accept = RUNS["accept"][k + 1]
        seconds = RUNS["verify"][k + 1] + accept + 0.002 + (k - 1) * step + wait
        point = costs.point(found, 2.5, k)
        assert point["speedup"] == pytest.approx(2.5 * 0.1 / seconds)
        bound = 2.5 / (RUNS["verify"][k + 1] / 0.1 + k * step / 0.1)
        assert point["bound"] == pytest.approx(bound)
    result = costs.predict(found, 2.5, 3, 1.5)
    assert result["error"] == pytest.approx(result["predicted"] / 1.5 - 1)
    assert result["fraction_of_bound"] == pytest.approx(1.5 / result["bound"])
    assert costs.predict(found, 2.5, 3, None)["error"] is None


def test_expected_tokens_sum_the_chances_of_getting_that_far():
    alphas = [0.8, 0.6, 0.5]
    for k in range(1, 6):
        chances = [1.0]
        for i in range(k):
            chances.append(chances[-1] * alphas[min(i, 2)])
        assert expected_tokens(alphas, DraftShape(k)) == pytest.approx(sum(chances))
    # A constant alpha: the geometric series.
    assert expected_tokens([0.7], DraftShape(4)) == pytest.approx((1 - 0.7**5) / (1 - 0.7))
    assert expected_tokens([], DraftShape(3)) == 1.0


def test_the_curve_agrees_with_single_predictions():
    points = costs.curve(make_costs(), [0.8, 0.5])
    assert [point["k"] for point in points] == [1, 2, 3]
    assert points[2]["mean_acceptance_length"] == pytest.approx(1 + 0.8 + 0.4 + 0.2)
    single = costs.point(make_costs(), 2.4, 3)
    assert points[2]["speedup"] == pytest.approx(single["speedup"])


def test_the_parts_of_a_round_add_up_to_it():
    split = costs.time_split(make_costs(), 3, 0.2)
    parts = [split[name] for name in ("verify", "draft", "accept", "host")]
    assert sum(parts) == pytest.approx(split["round"]) == pytest.approx(0.2)


def test_the_order_of_runs():
    b, c = map(Cell, make_configurations(Settings(sizes=(1, 2))))

    def labels(order: str) -> list[str]:
        return [configuration.label for configuration, _ in schedule([b, c], order)]

    assert labels("abba") == ["plain", "k=1", "k=1", "plain", "plain", "k=2", "k=2", "plain"]
    assert labels("mirror") == ["plain", "k=1", "k=2", "k=2", "k=1", "plain"]
    assert labels("weave") == ["plain", "k=1", "k=2"]
    lists = schedule([b, c], "mirror")[0][1]
    assert lists[0] is b.plain and lists[1] is c.plain and len(lists) == 2


def test_arms_pass_the_loops_words_through():
    configurations = make_configurations(
        Settings(sizes=(2, "auto"), trees=("2x4:12",)), compares=True
    )
    assert [configuration.kind for configuration in configurations] == [
        "chain",
        "auto",
        "tree",
        "mlx-lm-draft",
    ]
    assert configurations[1].options == {"num_draft_tokens": "auto"}
    assert configurations[2].options == {"tree": TreeShape(2, 4, 12)}
    rows = list(range(1, 9))
    assert measure.timed_rows(configurations) == (rows, [*rows, 13])


def test_copies_are_the_drafters_own_with_copies():
    alone, copied, auto = make_configurations(Settings(sizes=(2,), copied=(2, "auto")))
    assert (copied.label, copied.kind, copied.options) == ("k=2 + lookup", "copies", alone.options)
    assert auto.label == "auto + lookup" and auto.options == {"num_draft_tokens": "auto"}


def test_exact_ones_stand_beside_the_default():
    settings = Settings(sizes=(2, "auto"), trees=("2x4:12",), copied=(2,), exact=True)
    found = make_configurations(settings)
    default = [each for each in found if each.kind not in ("copies", "exact")]
    exact = [each for each in found if each.kind == "exact"]
    assert [each.label for each in exact] == [f"{each.label}, exact" for each in default]
    assert [each.options for each in exact] == [{**d.options, "exact": True} for d in default]


def test_counts_from_the_flags_of_mlx_lm():
    assert runner.first_batch([True, True, False, True]) == 3
    assert runner.first_batch([False, True]) == 1
    assert runner.first_batch([True, True]) == 2
    # Rounds that keep 2, 0, 1 of 2 drafts, and one that max_tokens cut after its first.
    flags = [True, True, False, False, True, False, True]
    stats = runner.stats_of_flags(flags, 2)
    assert stats.accepted_histogram == [1, 2, 1]
    assert (stats.num_rounds, stats.num_emitted, stats.num_drafted) == (4, 7, 8)
    # All of a short text came with its first token.
    assert runner.stats_of_flags([], 2).to_dict()["cumulative_acceptance_by_position"] == []


# --- prompt sets --------------------------------------------------------------------------


@pytest.mark.parametrize("name", questions.SETS)
def test_prompt_sets_ship_whole_and_with_their_licence(name):
    loaded = questions.load_set(name)
    assert len(loaded) == 80
    assert len({question.id for question in loaded}) == 80
    readme = (questions.FOLDER / "README.md").read_text()
    row = next(line for line in readme.splitlines() if f"`{name}.jsonl`" in line)
    assert "github.com" in row and ("MIT" in row or "Apache-2.0" in row)


def test_a_limited_set_is_spread_over_the_whole():
    assert questions.spread(list("abcdef"), 3) == ["a", "c", "e"]
    assert questions.spread([1, 2], 5) == [1, 2] == questions.spread([1, 2], 0)
    assert len(questions.load_questions(questions.SETS, 4)) == 12


def test_a_file_of_prompts(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "one?"}\n\n{"question_id": "b", "turns": ["two?", "three?"]}\n')
    found = questions.load_set(str(path))
    rows = [(q.set_name, q.id, q.text) for q in found]
    assert rows == [("mine", "1", "one?"), ("mine", "b", "two?")]


def test_prompts_go_through_the_template_and_are_padded_exactly():
    tokenizer = byte_tokenizer()
    question = questions.Question("s", "0", "What is it?")
    short = questions.prompt_tokens(question, tokenizer)
    assert tokenizer.decode(short) == "<user>What is it?<reply>"
    padded = questions.prompt_tokens(question, tokenizer, 700)
    assert len(padded) == 700
    text = tokenizer.decode(padded)
    assert text.startswith("<user>Notes") and text.endswith("\n\nWhat is it?<reply>")
    assert questions.prompt_tokens(question, tokenizer, 5) == short


# --- parts that run a model ---------------------------------------------------------------


def test_markdown_escapes_bars():
    table = markdown_table(["a|b"], [["1"], ["x|y"]])
    assert table.splitlines() == ["| a\\|b |", "|---|", "| 1 |", "| x\\|y |"]
    assert report.cell("x|y\nz") == "x\\|y z"
