"""Answers of the target to given prompts, as data to train its head on.

Many are given at once through mlx-lm's own batching, and a file of answers that was cut short is
continued.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..system.progress import open_bar
from ..system.ranks import is_first
from .data import Fields, Rows, prompt_of, read_data
from .settings import TrainSettings


class AskedPrompt(NamedTuple):
    """A row whose ``messages`` are to be answered, its place in the data, and its ``tokens``."""

    number: int
    row: Fields
    tokens: list[int]


def read_questions(rows: Rows) -> Rows:
    """Return what rows ask: their ``messages`` up to where the target is to answer, and tools.

    A row has ``prompt`` (a text) or ``messages``; an answer at the end of ``messages`` is left
    out, because the target gives its own. ValueError names a row that has neither.
    """
    found = {}
    for where, row in rows.items():
        messages = row.get("messages", [])
        if "prompt" in row:
            messages = [{"role": "user", "content": row["prompt"]}]
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages:
            raise ValueError(
                f'{where} has neither "prompt" nor "messages" that end with a user\'s: give one '
                "of them on every line."
            )
        more = {name: row[name] for name in ("tools", "chat_template_kwargs") if name in row}
        found[where] = {"messages": messages} | more
    return found


def _keys_in(output: Path) -> set[str]:
    """Return the keys of the answers in the file, and remove a last line that is not whole."""
    if not output.exists():
        output.parent.mkdir(parents=True, exist_ok=True)
        return set()
    lines = output.read_bytes()
    whole = lines[: lines.rfind(b"\n") + 1]
    try:
        keys = {json.loads(line)["key"] for line in whole.splitlines()}
    except (ValueError, KeyError, TypeError) as err:
        raise ValueError(
            f"{output} is not a file of answers that could be gone on with: give another --output."
        ) from err
    os.truncate(output, len(whole))
    return keys


def _answers(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    temp: float,
    questions: Iterable[AskedPrompt],
    settings: TrainSettings,
) -> Iterator[Fields]:
    """Answer questions at one temperature, several at once; yield a row of data for each."""
    generator = BatchGenerator(
        model,
        max_tokens=settings.answer_tokens,
        stop_tokens=[[token] for token in tokenizer.eos_token_ids],
        sampler=make_sampler(temp=temp),
        completion_batch_size=settings.answer_rows,
    )
    waiting = iter(questions)
    running: dict[int, tuple[AskedPrompt, list[int]]] = {}
    with closing(generator):
        while True:
            # Those that wait here have no caches yet.
            for question in islice(waiting, settings.answer_rows - len(running)):
                (uid,) = generator.insert([question.tokens])
                running[uid] = (question, [])
            if not running:
                return
            for response in generator.next_generated():
                question, answer = running[response.uid]
                answer.append(response.token)
                if response.finish_reason is not None:
                    del running[response.uid]
                    is_ended = response.finish_reason == "stop"
                    text = tokenizer.decode(answer[:-1] if is_ended else answer)
                    said = {"role": "assistant", "content": text}
                    yield question.row | {
                        "key": f"{question.number}@{temp}",
                        "temperature": temp,
                        "finish_reason": response.finish_reason,
                        "messages": [*question.row["messages"], said],
                        "prompt_length": len(question.tokens),
                        "tokens": [*question.tokens, *answer],
                    }


def answer_file(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    rows: Rows,
    output: Path,
    settings: TrainSettings,
    report_seconds: float = 30.0,
) -> None:
    """Answer what every row asks at every temperature, and append the answers to ``output``.

    A row of that is a conversation that mlx-lm's own training reads (``messages``), with the very
    tokens that the target read and wrote (``tokens``; the first ``prompt_length`` are the
    prompt's). Every answer is written as soon as it is complete, and those that are there already
    are not given again. If no bar can be drawn, a line is printed every ``report_seconds``.
    """
    asked = [
        AskedPrompt(i, row, prompt_of(where, row["messages"], row, tokenizer))
        for i, (where, row) in enumerate(read_questions(rows).items())
    ]
    Random(settings.seed).shuffle(asked)
    fitting = [x for x in asked if len(x.tokens) <= settings.max_seq_length]
    total = len(asked) * len(settings.answer_temps)
    too_long = total - len(fitting) * len(settings.answer_temps)
    print(f"The target gives {total} answers, into {output}.", flush=True)
    done = _keys_in(output)
    reasons: Counter[str] = Counter()
    num_tokens = 0
    begun = time.perf_counter()
    due = report_seconds
    try:
        bar = open_bar(total, "Answering", "answer")
        with bar, output.open("a", encoding="utf-8") as file:
            bar.update(len(done) + too_long)
            for number, temp in enumerate(settings.answer_temps):
                mx.random.seed(settings.seed + len(done) + number)
                left = [x for x in fitting if f"{x.number}@{temp}" not in done]
                for row in _answers(model, tokenizer, temp, left, settings):
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                    file.flush()
                    reasons[row["finish_reason"]] += 1
                    num_tokens += len(row["tokens"]) - row["prompt_length"]
                    seconds = time.perf_counter() - begun
                    speed = f"{num_tokens / seconds:.0f} tokens/s"
                    bar.set_postfix_str(speed, refresh=False)
                    bar.update()
                    if bar.disable and seconds >= due:
                        due = seconds + report_seconds
                        num = len(done) + too_long + reasons.total()
                        print(f"{num} of {total} answers, {speed}.", flush=True)
    except OSError as err:
        raise ValueError(
            f"{output} cannot be written to ({err.strerror or err}): the answers so far stay; "
            "make room, and the same command goes on behind them."
        ) from err
    print(
        f"{reasons.total()} answers of {num_tokens} tokens in {output}, "
        f"{num_tokens / (time.perf_counter() - begun):.0f} tokens/s; {len(done)} were there "
        f"before, {reasons['length']} ran into the limit, {too_long} prompts were too long."
    )


def regenerate(
    data: tuple[Rows, Rows],
    folder: Path,
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    settings: TrainSettings,
) -> tuple[Rows, Rows]:
    """Let the target answer what data ask; return its answers, which are kept in ``folder``.

    One rank answers, and the others wait for it. A run that was stopped is continued.
    """
    for name, rows in zip(("train", "valid"), data, strict=True):
        if rows and is_first():
            answer_file(model, tokenizer, rows, folder / f"{name}.jsonl", settings)
    mx.eval(mx.distributed.all_sum(mx.array(0), stream=mx.cpu))
    return read_data(str(folder))
