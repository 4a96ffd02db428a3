"""Answers of the target: they are mlx-lm's, and their file is continued."""

import json
from pathlib import Path

import mlx_lm
import pytest
from helpers import plain
from training import chats, small_files, write_target

from mlx_eagle.train.__main__ import main
from mlx_eagle.train.answers import answer_file, read_questions, regenerate
from mlx_eagle.train.data import Rows, read_data, read_examples, read_rows
from mlx_eagle.train.settings import TrainSettings

PROMPTS = [row["messages"][:-1] for row in chats(7)]
SETTINGS = TrainSettings("", "", "", answer_temps=(0.0, 1.0), answer_tokens=9, answer_rows=3)
ONLY_ANSWERS = ["--regenerate", "--answer-temps", "0", "--answer-tokens", "5", "--iters", "0"]
ONLY_ANSWERS += ["--test-prompts", "0", "--batch-size", "1", "--draft-vocab-size", "64"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("answers") / "target")


@pytest.fixture
def prompts(tmp_path) -> Rows:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"messages": m}) + "\n" for m in PROMPTS))
    return read_rows(path)


def rows_in(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_greedy_answers_are_mlx_lms_own(folder, prompts, tmp_path):
    model, tokenizer = mlx_lm.load(str(folder))
    output = tmp_path / "answers.jsonl"
    answer_file(model, tokenizer, prompts, output, SETTINGS)
    rows = rows_in(output)
    assert len(rows) == 14
    greedy = {row["key"]: row for row in rows if row["temperature"] == 0}
    for i, prompt in enumerate(PROMPTS):
        row = greedy[f"{i}@0.0"]
        size = row["prompt_length"]
        assert row["tokens"][size:] == plain(model, row["tokens"][:size], 9)
        assert row["messages"][:-1] == prompt
        assert row["messages"][-1]["content"] == tokenizer.decode(row["tokens"][size:])


def test_without_a_terminal_lines_say_how_far_it_is(folder, prompts, tmp_path, capsys):
    model, tokenizer = mlx_lm.load(str(folder))
    answer_file(model, tokenizer, prompts, tmp_path / "answers.jsonl", SETTINGS, 0.0)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"The target gives 14 answers, into {tmp_path / 'answers.jsonl'}."
    done = [int(line.partition(" ")[0]) for line in said if " of 14 answers, " in line]
    assert len(done) > 3 and done == sorted(done) and done[-1] == 14
    assert said[-1].startswith("14 answers of 126 tokens")


def test_a_file_cut_short_is_gone_on_with(folder, prompts, tmp_path, capsys):
    model, tokenizer = mlx_lm.load(str(folder))
    output = tmp_path / "answers.jsonl"
    answer_file(model, tokenizer, prompts, output, SETTINGS)
    lines = output.read_text().splitlines(keepends=True)
    output.write_text("".join(lines[:5]) + lines[5][:40])
    capsys.readouterr()
    answer_file(model, tokenizer, prompts, output, SETTINGS)
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("9 answers of") and "; 5 were there before" in said
    rows = rows_in(output)
    assert len({row["key"] for row in rows}) == len(rows) == 14
    assert output.read_text().startswith("".join(lines[:5]))


def command_for(target: Path, data: Path, output: Path) -> list[str]:
    """A run that only makes answers."""
    command = ["--model", str(target), "--data", str(data), "--output", str(output)]
    return [*command, *ONLY_ANSWERS]


def test_a_run_can_only_make_answers(folder, tmp_path, capsys):
    prompts = tmp_path / "train.jsonl"
    output = tmp_path / "output"
    prompts.write_text('{"prompt": "one"}\n' + json.dumps(chats(1)[0]) + "\n")
    command = command_for(folder, tmp_path, output)
    main(command)
    assert "2 answers of 10 tokens" in capsys.readouterr().out
    assert len(rows_in(output / "answers" / "train.jsonl")) == 2
    asked = list(read_questions(read_rows(prompts)).values())
    assert asked[1] == {"messages": chats(1)[0]["messages"][:-1]}
    prompts.write_text('{"text": "one"}\n')
    with pytest.raises(SystemExit) as stop:
        main(command_for(folder, tmp_path, tmp_path / "other"))
    assert stop.value.code == 2
    assert 'line 1 has neither "prompt" nor "messages"' in capsys.readouterr().err


def test_tools_and_arguments_of_the_template_are_asked_with(tmp_path):
    """And the answers are data that the target's own tokenizer confirms."""
    model, tokenizer = mlx_lm.load(str(write_target(tmp_path / "target")))
    template = tokenizer._tokenizer.chat_template
    tokenizer._tokenizer.chat_template = "{{ tools | length }}{{ mood }}" + template
    tools = [{"type": "function", "function": {"name": "clock"}}]
    row = chats(1)[0] | {"tools": tools, "chat_template_kwargs": {"mood": "calm"}}
    settings = TrainSettings("", "", "", answer_temps=(0.0,), answer_tokens=5)
    folder = tmp_path / "answers"
    data = regenerate(({"here": row}, {}), folder, model, tokenizer, settings)
    (said,) = data[0].values()
    assert tokenizer.decode(said["tokens"][: said["prompt_length"]]).startswith("1calm")
    assert said["tools"] == tools and not data[1]
    assert len(read_examples(read_data(str(folder)), tokenizer, 258, 999).train) == 1


def test_a_question_that_no_prompt_can_be_made_of(folder, tmp_path, capsys):
    """The line is named before any prompt is answered."""
    output = tmp_path / "output"
    rows = [{"prompt": "one"}, {"messages": [{"role": "user", "content": "\ud800"}]}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SystemExit) as stop:
        main(command_for(folder, tmp_path, output))
    found = capsys.readouterr().err
    assert stop.value.code == 2 and found.count("\n") == 1
    assert "line 2 cannot be made into tokens" in found and not output.exists()


def test_a_full_disk_keeps_the_answers_so_far(folder, tmp_path, capsys):
    output = tmp_path / "output" / "answers" / "train.jsonl"
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats(6)))
    command = command_for(folder, tmp_path, tmp_path / "output")
    with small_files(700), pytest.raises(SystemExit) as stop:
        main(command)
    lines = capsys.readouterr().err.splitlines()
    (said,) = [line for line in lines if not line.startswith("Note: ")]  # about a slow BLAS
    assert stop.value.code == 2
    assert f"{output} cannot be written to (File too large): the answers so far stay" in said
    main(command)
    assert "were there before" in capsys.readouterr().out
    assert len(rows_in(output)) == 6
