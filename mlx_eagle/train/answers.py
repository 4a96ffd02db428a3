"""Answers of the target to given prompts, as data to train its head on.

Prompts come from files, many are answered at once through mlx-lm's own batching, and a file of
answers that was cut short is continued.
"""

import argparse
import json
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..system.cli_values import add_flags, add_version_flag, use_plain_words
from ..system.device import prepare_device
from ..system.exit_codes import run_command
from ..system.progress import open_bar
from ..system.ranks import is_first
from .data import read_rows, reading
from .settings import AnswerSettings
from .teacher import load_target

Messages = list[dict[str, Any]]


class AskedPrompt(NamedTuple):
    """A prompt to answer: ``key`` names the answer in the file; ``tokens`` are the prompt's."""

    key: str
    messages: Messages
    tokens: list[int]


def read_prompts(path: Path) -> dict[str, Messages]:
    """Read the conversations of a JSONL file, each up to where the target is to answer.

    They go by their places in the file. A row has ``prompt`` (a text) or ``messages``; an answer
    at the end of ``messages`` is left out, because the target gives its own. ValueError names a
    line that has neither.
    """
    found = {}
    for where, row in read_rows(path).items():
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
        found[where] = messages
    return found


def _encoded(tokenizer: TokenizerWrapper, where: str, messages: Messages) -> list[int]:
    """Encode a row's conversation as the prompt for its next answer."""
    with reading(where):
        return list(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        )


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


def _blocks(
    prompts: Sequence[tuple[Messages, list[int]]], settings: AnswerSettings, done: set[str]
) -> Iterator[tuple[float, list[AskedPrompt]]]:
    """Yield the answers still to give, in an order in which every part is a fair sample.

    Prompts are shuffled, and each is answered once before any is answered twice. A block is at one
    temperature: rows that share a sampler are sampled at once.
    """
    order = list(range(len(prompts)))
    Random(settings.seed).shuffle(order)
    size = 8 * settings.rows
    for turn in range(len(settings.temps)):
        for number, start in enumerate(range(0, len(order), size)):
            temp = settings.temps[(number + turn) % len(settings.temps)]
            asked = [AskedPrompt(f"{i}@{temp}", *prompts[i]) for i in order[start : start + size]]
            fits = [x for x in asked if len(x.tokens) <= settings.max_prompt_tokens]
            yield temp, [x for x in fits if x.key not in done]


def _answers(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    temp: float,
    block: list[AskedPrompt],
    settings: AnswerSettings,
) -> Iterator[tuple[AskedPrompt, list[int], str]]:
    """Answer prompts at one temperature, ``rows`` at once.

    Yields each when it is done, with the tokens of its answer and the reason why they ended.
    """
    generator = BatchGenerator(
        model,
        max_tokens=settings.max_tokens,
        stop_tokens=[[token] for token in tokenizer.eos_token_ids],
        sampler=make_sampler(temp=temp),
        completion_batch_size=settings.rows,
        prefill_batch_size=max(1, settings.rows // 2),
    )
    # Prompts of similar length run together, so that less of a batch is padding.
    waiting = deque(sorted(block, key=lambda question: len(question.tokens)))
    running: dict[int, tuple[AskedPrompt, list[int]]] = {}
    with closing(generator):
        while waiting or running:
            # New rows copy the cache of the whole batch, so half of them join at a time.
            if len(running) <= settings.rows // 2:
                while waiting and len(running) < settings.rows:
                    question = waiting.popleft()
                    (uid,) = generator.insert([question.tokens])
                    running[uid] = (question, [])
            for response in generator.next_generated():
                question, answer = running[response.uid]
                answer.append(response.token)
                if response.finish_reason is not None:
                    del running[response.uid]
                    yield question, answer, response.finish_reason


def answer_file(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompts: Path,
    output: Path,
    settings: AnswerSettings,
    report_seconds: float = 30.0,
) -> None:
    """Answer every prompt of a file at every temperature, and append the answers to ``output``.

    A row of that is a conversation that mlx-lm's own training reads (``messages``), with the very
    tokens that the target read and wrote (``tokens``; the first ``prompt_length`` are the
    prompt's). Every answer is written as soon as it is complete, and those that are there already
    are not given again. If no bar can be drawn, a line is printed every ``report_seconds``.
    """
    found = read_prompts(prompts).items()
    asked = [(messages, _encoded(tokenizer, where, messages)) for where, messages in found]
    num_temps = len(settings.temps)
    total = len(asked) * num_temps
    print(f"The target gives {total} answers to the prompts of {prompts}.", flush=True)
    done = _keys_in(output)
    too_long = num_temps * sum(len(tokens) > settings.max_prompt_tokens for _, tokens in asked)
    reasons: list[str] = []
    num_tokens = 0
    begun = time.perf_counter()
    said = begun
    bar = open_bar(total, "Answering", "answer")
    bar.update(len(done) + too_long)
    try:
        with bar, output.open("a", encoding="utf-8") as file:
            for number, (temp, block) in enumerate(_blocks(asked, settings, done)):
                mx.random.seed(settings.seed + len(done) + number)
                for question, answer, reason in _answers(model, tokenizer, temp, block, settings):
                    file.write(_line(tokenizer, question, temp, answer, reason))
                    file.flush()
                    reasons.append(reason)
                    num_tokens += len(answer)
                    now = time.perf_counter()
                    speed = num_tokens / (now - begun)
                    bar.set_postfix_str(f"{speed:.0f} tokens/s", refresh=False)
                    bar.update()
                    if bar.disable and now - said >= report_seconds:
                        said = now
                        num = len(done) + too_long + len(reasons)
                        print(f"{num} of {total} answers, {speed:.0f} tokens/s.", flush=True)
    except OSError as err:
        raise ValueError(
            f"{output} cannot be written to ({err.strerror or err}): the answers so far stay; "
            "make room, and the same command goes on behind them."
        ) from err
    print(
        f"{len(reasons)} answers of {num_tokens} tokens in {output}, "
        f"{num_tokens / (time.perf_counter() - begun):.0f} tokens/s; {len(done)} were there "
        f"before, {reasons.count('length')} ran into the limit, {too_long} prompts were too long."
    )


def _line(
    tokenizer: TokenizerWrapper, question: AskedPrompt, temp: float, answer: list[int], reason: str
) -> str:
    text = tokenizer.decode(answer[:-1] if reason == "stop" else answer)
    row = {
        "key": question.key,
        "temperature": temp,
        "finish_reason": reason,
        "messages": [*question.messages, {"role": "assistant", "content": text}],
        "prompt_length": len(question.tokens),
        "tokens": [*question.tokens, *answer],
    }
    return json.dumps(row, ensure_ascii=False) + "\n"


def regenerate(
    data: str,
    folder: Path,
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    settings: AnswerSettings,
) -> Path:
    """Let the target answer the prompts of a data folder; return the ``folder`` of its answers.

    One rank answers, and the others wait for it. A run that was stopped is continued.
    """
    source = Path(data).expanduser()
    if not (source / "train.jsonl").is_file():
        raise ValueError(f"{data} has no train.jsonl: --regenerate takes its prompts from there.")
    for name in ("train.jsonl", "valid.jsonl") if is_first() else ():
        if (source / name).is_file():
            answer_file(model, tokenizer, source / name, folder / name, settings)
    mx.eval(mx.distributed.all_sum(mx.array(0), stream=mx.cpu))
    return folder


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of ``mlx_eagle.train.answers``."""
    parser = argparse.ArgumentParser(
        prog="mlx_eagle.train.answers",
        description="Let a model answer prompts, many at once, as data to train its head on.",
    )
    add_version_flag(parser)
    add = parser.add_argument
    add("--model", required=True, help="Folder or hub repo of the target.")
    add("--prompts", required=True, help='JSONL with "prompt" or "messages" on each line.')
    add("--output", required=True, help="JSONL to write or to go on with: DATA/train.jsonl.")
    add("--adapter-path", help="Adapters of the target, as mlx_lm.lora writes them.")
    add("--trust-remote-code", action="store_true", help="Let the target bring code of its own.")
    add_flags(parser, AnswerSettings)
    use_plain_words(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Answer; exit with 2 and one sentence on errors a user can cause."""
    args = make_parser().parse_args(argv)

    def answer() -> None:
        given = {each.name: getattr(args, each.name) for each in fields(AnswerSettings)}
        settings = AnswerSettings(**{k: v for k, v in given.items() if v is not None})
        prompts = Path(args.prompts).expanduser()
        read_prompts(prompts)  # before the model, which takes a while
        prepare_device()
        model, tokenizer, _ = load_target(args.model, args.adapter_path, args.trust_remote_code)
        answer_file(model, tokenizer, prompts, Path(args.output).expanduser(), settings)

    run_command(answer)


if __name__ == "__main__":
    main()
