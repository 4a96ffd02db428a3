"""Files of prompts into files of answers, for the command and for ``--regenerate``."""

import time
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..system.progress import open_bar
from .answers import AnswerCounts, AnswerSettings, answer_prompts, read_prompts


def answer_file(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompts: Path,
    output: Path,
    settings: AnswerSettings,
) -> AnswerCounts:
    """Answer the prompts of a file into another, with a bar, and say what was done."""
    conversations = read_prompts(prompts)
    begun = time.perf_counter()
    with open_bar(len(conversations) * len(settings.temperatures), "Answering", "answer") as bar:

        def report(counts: AnswerCounts) -> None:
            speed = counts.tokens / (time.perf_counter() - begun)
            bar.set_postfix_str(f"{speed:.0f} tokens/s", refresh=False)
            bar.update(counts.done - bar.n)

        try:
            counts = answer_prompts(model, tokenizer, conversations, output, settings, report)
        except OSError as err:
            raise ValueError(
                f"{output} cannot be written to ({err.strerror or err}): the answers so far stay; "
                "make room, and the same command goes on behind them."
            ) from err
    seconds = time.perf_counter() - begun
    print(
        f"{counts.answers} answers of {counts.tokens} tokens in {output}, "
        f"{counts.tokens / seconds:.0f} tokens/s; {counts.found} were there before, {counts.cut} "
        f"ran into the limit, {counts.too_long} prompts were too long."
    )
    return counts


def regenerate(
    data: str,
    folder: Path,
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    settings: AnswerSettings,
) -> Path:
    """Have the target answer the prompts of a data folder; the folder with its answers.

    One rank answers, and all others wait for it. A run that was stopped is gone on with.
    """
    source = Path(data).expanduser()
    if not (source / "train.jsonl").is_file():
        raise ValueError(f"{data} has no train.jsonl: --regenerate takes its prompts from there.")
    world = mx.distributed.init()
    if world.rank() == 0:
        for name in ("train.jsonl", "valid.jsonl"):
            if (source / name).is_file():
                answer_file(model, tokenizer, source / name, folder / name, settings)
    mx.eval(mx.distributed.all_sum(mx.array(0), stream=mx.cpu))
    return folder
