"""Prompt sets: reading them, choosing questions, and turning these into tokens."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_eagle.system.loading import apply_template

FOLDER = Path(__file__).parent / "prompts"
SETS = ("mt_bench", "humaneval", "gsm8k")

# Goes before the question if --context asks for a longer prompt.
FILLER = (
    "Notes from the town archive. The bridge over the river was built of local stone and opened "
    "in the spring. Twice a week the market sold bread, apples, wool and tools, and the miller "
    "kept a record of the weather beside his accounts. Letters took four days to the coast. "
)


@dataclass(frozen=True)
class Question:
    """One user message, and the set it is from."""

    set_name: str
    id: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.set_name}/{self.id}"


def load_questions(names: Sequence[str], limit: int) -> list[Question]:
    """Read several sets, at most ``limit`` questions of each (0: all), evenly spread over it.

    A name is one of ``SETS`` or a JSONL file of the same form. Raises ValueError for an unknown
    name, an unreadable file, or a line without a question.
    """
    return [question for name in names for question in spread(load_set(name), limit)]


def load_set(name: str) -> list[Question]:
    """Read every question of one set."""
    path = FOLDER / f"{name}.jsonl" if name in SETS else Path(name).expanduser()
    if not path.is_file():
        raise ValueError(
            f"--prompts {name} is neither one of {', '.join(SETS)} nor a file here: give one of "
            "these names, or a JSONL file."
        )
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as err:
        raise ValueError(f"--prompts {name} cannot be read ({err}): give a text file.") from err
    rows = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ValueError(f"--prompts {name} holds no questions: give one JSON object per line.")
    questions = []
    for number, line in rows:
        try:
            row = json.loads(line)
        except ValueError as err:
            raise ValueError(f"--prompts {name}, line {number} is not JSON ({err}).") from err
        turns = row.get("turns", [row.get("prompt")]) if isinstance(row, dict) else None
        text = turns[0] if isinstance(turns, list) and turns else None
        if not isinstance(text, str) or not text:
            raise ValueError(
                f'--prompts {name}, line {number} has no question: give {{"turns": ["..."]}} or '
                '{"prompt": "..."}.'
            )
        questions.append(Question(path.stem, str(row.get("question_id", number)), text))
    return questions


def spread(items: list[Any], limit: int) -> list[Any]:
    """Choose ``limit`` items at even distances; all of them for 0 or a larger limit.

    Sets are sorted by category: [a, b, c, d, e, f], 3 -> [a, c, e]
    """
    if limit == 0 or limit >= len(items):
        return items
    return [items[i * len(items) // limit] for i in range(limit)]


def by_set(asked: Iterable[Any]) -> dict[str, list[Any]]:
    """Group questions, or cells of one configuration, by set, in order of first appearance."""
    groups: dict[str, list[Any]] = {}
    for each in asked:
        groups.setdefault(each.set_name, []).append(each)
    return groups


def prompt_tokens(
    question: Question, tokenizer: TokenizerWrapper, context: int | None = None
) -> list[int]:
    """Encode a question with the chat template, padded to ``context`` tokens if it is shorter.

    The padding is prose before the question, inside the user's message.
    """
    has_template = tokenizer.has_chat_template

    def render(text: str) -> str:
        messages = [{"role": "user", "content": text}]
        options = {"tokenize": False, "add_generation_prompt": True}
        return apply_template(tokenizer, messages, **options) if has_template else text

    tokens = tokenizer.encode(render(question.text), add_special_tokens=not has_template)
    if context is None or len(tokens) >= context:
        return tokens
    before, _, after = render("<query>").partition("<query>")
    head = tokenizer.encode(before, add_special_tokens=not before)
    tail = tokenizer.encode("\n\n" + question.text + after, add_special_tokens=False)
    filler = tokenizer.encode(FILLER, add_special_tokens=False)
    num_missing = max(0, context - len(head) - len(tail))
    return [*head, *islice(cycle(filler), num_missing), *tail]


def typical_context(prompts: Sequence[list[int]], max_tokens: int) -> list[int]:
    """Repeat the median prompt up to the length that its text has half-way through the answer."""
    prompt = sorted(prompts, key=len)[len(prompts) // 2]
    length = max(2, len(prompt) + max_tokens // 2)
    return list(islice(cycle(prompt), length))
