"""From what clients got to figures, in plain arithmetic."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ..questions import Question
from ..runner import Configuration
from ..summary import median_ratio
from .clients import Answer, Load


@dataclass
class ServingCell:
    """The loads of one configuration with so many clients, and the plain ones between them."""

    num_clients: int
    configuration: Configuration
    plain: list[Load] = field(default_factory=list)
    runs: list[Load] = field(default_factory=list)


def serving_result(cell: ServingCell, questions: Sequence[Question]) -> dict[str, Any]:
    """One configuration with so many clients, beside mlx-lm's server under the same load."""
    pairs = zip(questions, cell.plain[0].answers, cell.runs[0].answers, strict=True)
    return {
        "clients": cell.num_clients,
        "configuration": cell.configuration.label,
        "num_prompts": len(questions),
        "num_runs": len(cell.runs),
        "plain": load_figures(cell.plain),
        "speculative": load_figures(cell.runs),
        "speedup": median_ratio(cell.plain, cell.runs),
        "mean_acceptance_length": acceptance_length(answers_of(cell.runs)),
        "differing": [q.name for q, plain, ours in pairs if plain.text != ours.text],
    }


def load_figures(loads: Sequence[Load]) -> dict[str, Any]:
    """The speed of the median load, and what the clients of all loads waited for, in seconds."""
    answers = answers_of(loads)
    return {
        "tps": median(load.tps for load in loads),
        "output_tokens": sum(answer.num_tokens for answer in loads[0].answers),
        "seconds_per_token": typical_and_worst(answer.seconds_per_token for answer in answers),
        "longest_pause": typical_and_worst(answer.longest_pause for answer in answers),
        "ttft": typical_and_worst(answer.ttft for answer in answers),
    }


def answers_of(loads: Iterable[Load]) -> list[Answer]:
    return [answer for load in loads for answer in load.answers]


def typical_and_worst(values: Iterable[float | None]) -> dict[str, float] | None:
    """The median and the largest of what is there; None where nothing is."""
    present = [value for value in values if value is not None]
    return {"median": median(present), "worst": max(present)} if present else None


def acceptance_length(answers: Iterable[Answer]) -> float | None:
    """Tokens per target pass over all answers, from each one's own; None where none says it.

    The first token of an answer belongs to the prompt: 9 tokens at 2.0 are 4 passes.
    """
    said = [(answer.num_tokens - 1, answer.tau) for answer in answers if answer.tau]
    passes = sum(num_tokens / tau for num_tokens, tau in said if tau)
    return sum(num_tokens for num_tokens, _ in said) / passes if passes else None


def answer_rows(cell: ServingCell, questions: Sequence[Question]) -> list[dict[str, Any]]:
    """A row per answer, for the CSV."""
    return [
        {
            "clients": cell.num_clients,
            "configuration": cell.configuration.label,
            "role": role,
            "run": number,
            "set": question.set_name,
            "id": question.id,
            "output_tokens": answer.num_tokens,
            "ttft": answer.ttft,
            "seconds": answer.ended,
            "seconds_per_token": answer.seconds_per_token,
            "longest_pause": answer.longest_pause,
            "mean_acceptance_length": answer.tau,
        }
        for role, loads in (("plain", cell.plain), ("speculative", cell.runs))
        for number, load in enumerate(loads)
        for question, answer in zip(questions, load.answers, strict=True)
    ]
