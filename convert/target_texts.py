"""What ``--check`` reads a head on: a conversation with the target, and what it thought.

All of it comes from the target and its tokenizer; no head has a part in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_eagle.system.progress import open_bar
from mlx_eagle.target.taps import Target

# One conversation, because a wrong rotary base shows only some hundred tokens into a text. Word
# problems, because their solutions are what heads draft best, and a head that drafts nothing
# right cannot get worse by being misread.
HOW = " Solve it step by step, and explain every step."
QUESTIONS = tuple(
    problem + HOW
    for problem in (
        "Tom has 3 boxes with 14 pencils each and gives away 9 pencils. How many are left?",
        "A train with 8 cars has 45 seats in each. 287 people sit in it. How many seats are free?",
        "A recipe for 4 people takes 300 grams of rice. How much rice do 14 people need?",
        "Nora reads 12 pages a day on weekdays and 30 pages a day at the weekend. Her book has "
        "360 pages. How many weeks does she need?",
        "A shop sells 24 lamps at 35 dollars each and 6 more at half the price. How much money "
        "does it take in?",
        "A tank holds 480 liters and loses 16 liters an hour. How much is left after 9 hours?",
        "A farmer picks 150 apples on Monday and twice as many on Tuesday. He packs them into "
        "bags of 9. How many bags does he fill?",
        "Lena saves 7 dollars a week for 6 weeks and then spends a third of it. What is left?",
    )
)


@dataclass(frozen=True)
class Conversation:
    """A prompt with the target's own greedy answer, and what the target thought of it.

    ``tokens`` (n,), the first ``num_prompt`` of them the prompt; ``features`` (n, h_t) by
    tap; ``probs`` (n - num_prompt, Vd): what may follow the answer's tokens, of those that
    can be drafted.
    """

    tokens: mx.array
    num_prompt: int
    features: Mapping[int, mx.array]
    probs: mx.array

    def num_slots(self, num_depths: int) -> int:
        """Positions whose next ``num_depths`` tokens are all known: 2 of 5 answered, for 3."""
        return max(len(self.tokens) - self.num_prompt - num_depths, 0)

    def fused(self, taps: Sequence[int], lag: int = 0) -> mx.array:
        """The features of each position's ``lag``-th predecessor side by side, (n, F)."""
        features = mx.concatenate([self.features[tap] for tap in taps], axis=-1)
        return features[mx.maximum(mx.arange(len(features)) - lag, 0)]


def encode(tokenizer: TokenizerWrapper, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """A conversation as the target expects it: through its chat template, where it has one."""
    if not tokenizer.has_chat_template:
        return tokenizer.encode("\n\n".join(message["content"] for message in messages))
    text = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=True
    )
    return tokenizer.encode(text, add_special_tokens=False)


def read_text(
    model: nn.Module,
    prompt: Sequence[int],
    num_tokens: int,
    stops: set[int],
    taps: set[int],
    ids: mx.array,
) -> Conversation:
    """Let the target answer greedily, then read prompt and answer once more, with taps.

    ``ids`` (Vd,) are the tokens that can be drafted.
    """
    tokens = list(prompt)
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=num_tokens):
        tokens.append(token)
        if token in stops:
            break
    order = tuple(sorted(taps))
    logits, features = Target(model, order)(mx.array(tokens), make_prompt_cache(model))
    probs = mx.softmax(logits[len(prompt) :].astype(mx.float32), axis=-1)[:, ids]
    parts = dict(zip(order, mx.split(features, len(order), axis=-1)))
    mx.eval(parts, probs)
    return Conversation(mx.array(tokens), len(prompt), parts, probs)


def read_conversation(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    questions: Sequence[str],
    num_tokens: int,
    taps: set[int],
    ids: mx.array,
) -> list[Conversation]:
    """One text a question, behind the questions and answers before it.

    A bar counts them where standard error is a terminal.
    """
    stops, messages, texts = set(tokenizer.eos_token_ids), [], []
    with open_bar(len(questions), "Asking the target", "question") as bar:
        for question in questions:
            messages.append({"role": "user", "content": question})
            prompt = encode(tokenizer, messages)
            text = read_text(model, prompt, num_tokens, stops, taps, ids)
            answer = [t for t in text.tokens[text.num_prompt :].tolist() if t not in stops]
            messages.append({"role": "assistant", "content": tokenizer.decode(answer)})
            texts.append(text)
            bar.update()
    return texts
