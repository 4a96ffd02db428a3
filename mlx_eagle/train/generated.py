"""How many drafts are accepted when a finished head decodes: the last figures of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..drafters.load import load_drafter
from ..generate import stream_generate
from ..system.progress import open_bar
from .examples import Example
from .stopping import Stop


@dataclass(frozen=True)
class Generated:
    """``lengths`` (D,): the mean acceptance length (tau) of greedy decoding with drafts of
    1 ... D tokens, the first token of each of ``num_answers`` answers not counted.
    """

    lengths: tuple[float, ...]
    num_answers: int
    max_tokens: int


class Tester:
    """Has heads draft for their target on the same prompts, one chain length after the other."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TokenizerWrapper,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        depth: int,
    ):
        self._model = model
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._depth = depth

    def __call__(self, folder: Path, stop: Stop) -> Generated | None:
        """The figures of the head in that folder; None without prompts, or where ``stop`` asks."""
        if not self._prompts:
            return None
        drafter = load_drafter(folder, self._model)
        lengths = []
        with open_bar(self._depth * len(self._prompts), "Generating", "answer") as bar:
            for size in range(1, self._depth + 1):
                num_emitted = num_forwards = 0
                for prompt in self._prompts:
                    responses = stream_generate(
                        self._model,
                        self._tokenizer,
                        list(prompt),
                        max_tokens=self._max_tokens,
                        draft_model=drafter,
                        num_draft_tokens=size,
                    )
                    for response in responses:
                        if stop.is_asked:
                            return None
                    num_emitted += response.stats.num_emitted
                    num_forwards += response.stats.num_target_forwards
                    bar.update()
                lengths.append(num_emitted / max(1, num_forwards))
        return Generated(tuple(lengths), len(self._prompts), self._max_tokens)


def choose_prompts(examples: Sequence[Example], num: int) -> list[tuple[int, ...]]:
    """The first ``num`` different prompts of these examples; plain text has none."""
    prompts = (x.tokens[: x.num_prompt] for x in examples if x.num_prompt)
    return list(dict.fromkeys(prompts))[:num]
