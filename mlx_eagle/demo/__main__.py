"""Command ``python -m mlx_eagle.demo``: plain and speculative decoding of one prompt, compared."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from math import inf

from mlx_lm.generate import GenerationResponse

from ..bench.configurations import PLAIN, chain_of
from ..bench.parity import first_difference
from ..bench.runner import Models, responses
from ..system.cli_values import Range, use_plain_words
from ..system.device import load_note, prepare_device
from ..system.exit_codes import run_command
from ..system.marks import Marker
from .pair import load_demo

# A prompt of the kind that the small head was trained on most; code and open chat gain less.
PROMPT = (
    "A baker makes 12 trays of cookies with 8 cookies on each tray. "
    "How many cookies does she make?"
)
WARM_UP_TOKENS = 8  # decoded before the clock starts, so that all kernels are compiled


Completion = tuple[list[int], GenerationResponse]
"""One generation: its token ids, including the stop token, and its last response."""


def complete(responses: Iterator[GenerationResponse], echo: Marker | None = None) -> Completion:
    """Consume ``responses``; ``echo`` marks the text, which is printed as it comes."""
    tokens = []
    for response in responses:
        tokens.append(response.token)
        if echo is not None:
            print(echo(response.text, response.from_draft), end="", flush=True)
    return tokens, response


def report(plain: Completion, speculative: Completion) -> list[str]:
    """Compare speed, mean acceptance length (tau), acceptance and texts, a line for each."""
    plain_tokens, plain_last = plain
    tokens, last = speculative
    stats = last.stats
    plain_tps = plain_last.generation_tps
    tps = last.generation_tps
    index = first_difference(plain_tokens, tokens)
    identical = f"yes, all {len(tokens)} tokens"
    if index is not None:
        identical = f"no, they differ from token {index} on (counted from 0)"
    return [
        f"Plain:       {plain_tps:.1f} tokens/s (mlx_lm.stream_generate)",
        f"Speculative: {tps:.1f} tokens/s, {tps / plain_tps:.2f}x",
        f"Mean acceptance length (tau): {stats.mean_acceptance_length:.2f} tokens per target "
        f"forward, over {stats.num_target_forwards} forwards",
        f"Acceptance:  {stats.acceptance_rate:.2f} of what was drafted; "
        f"by position: {stats.acceptance_words}",
        f"Token-identical: {identical}",
    ]


def run(prompt: str, max_tokens: int, num_draft_tokens: int) -> None:
    """Generate once with the head and once without, and print how they compare."""
    Range("max_tokens", 2, inf, "2 or more, there is nothing to time").check(max_tokens)
    Range("num_draft_tokens", 1, inf, "1 or more").check(num_draft_tokens)
    print("Loading SmolLM2-135M-Instruct and its EAGLE-3 head.", file=sys.stderr)
    note = load_note()  # before we are at work ourselves
    prepare_device()
    model, tokenizer, drafter = load_demo()
    messages = [{"role": "user", "content": prompt}]
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    models = Models(model, tokenizer, {"": drafter})
    chain = chain_of(num_draft_tokens)
    for way in (PLAIN, chain):
        complete(responses(models, way, tokens, WARM_UP_TOKENS))
    mark = Marker.of(sys.stdout)
    print(f"Prompt: {prompt}\n{mark.legend}")
    drafted = complete(responses(models, chain, tokens, max_tokens), echo=mark)
    print("\n")
    lines = report(complete(responses(models, PLAIN, tokens, max_tokens)), drafted)
    print("\n".join([*lines, note] if note else lines))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; exit with 2 and one sentence on errors a user can cause."""
    parser = argparse.ArgumentParser(
        prog="mlx_eagle.demo", description="Plain against speculative decoding, on the demo pair."
    )
    add = parser.add_argument
    add("--prompt", "-p", default=PROMPT, help="what to ask (default: %(default)s)")
    words = "maximum tokens of the answer (%(default)s)"
    add("--max-tokens", "-m", type=int, default=200, help=words)
    words = "draft tokens per step (%(default)s)"
    add("--num-draft-tokens", type=int, default=3, help=words)
    use_plain_words(parser)
    args = parser.parse_args(argv)
    run_command(lambda: run(args.prompt or PROMPT, args.max_tokens, args.num_draft_tokens))


if __name__ == "__main__":
    main()
