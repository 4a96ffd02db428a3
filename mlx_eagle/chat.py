"""The command ``mlx_eagle.chat``: mlx-lm's chat in the terminal, with a drafter.

The caches of target and drafter, and the counts, are kept over the turns. Flags, loading and
sampling are those of ``flags.py``; the look is mlx-lm's.
"""

import argparse
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.chat import setup_arg_parser
from mlx_lm.cli_ui import ChatUI, make_console, print_header_panel
from mlx_lm.generate import GenerationResponse as MlxGenerationResponse
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .commands.flags import (
    DRAFTERS,
    GROUPS,
    TEXT_FLAGS,
    add_draft_flags,
    check_arguments,
    grammar_options,
    load_pair,
    text_options,
)
from .decoding.setup import AUTO
from .decoding.stats import Stats
from .drafters.base import Drafter
from .generate import GenerationResponse, stream_generate
from .system.cli_values import group_flags
from .system.loading import apply_template
from .system.marks import Marker
from .system.ranks import is_first, num_ranks, run_on_ranks, share
from .system.stop_signals import StopSignals

DEMO = "SmolLM2-135M-Instruct (demo)"
HELP = {
    "/help": "says this",
    "/reset": "forgets the conversation",
    "/stats": "mean acceptance length (tau) and counts of all answers",
    "/exit": "leaves, as Ctrl-D and Ctrl-C at the prompt do",
    "Ctrl-C": "ends an answer",
}


def commands() -> dict[str, str]:
    """Commands, and what they do here: mlx.launch passes nothing on after a Ctrl-C."""
    return HELP if num_ranks() == 1 else HELP | {"Ctrl-C": "leaves"}


def build_parser() -> argparse.ArgumentParser:
    """mlx-lm's parser, with our flags beside its own."""
    parser = setup_arg_parser()
    parser.prog = "mlx_eagle.chat"
    parser.description = f"Chat with a target model and a drafter: {DRAFTERS}."
    parser.add_argument("--draft-model", type=str)
    parser.add_argument("--num-draft-tokens", default=AUTO)
    add_draft_flags(parser, TEXT_FLAGS)
    # What mlx_lm.generate has a flag for, and mlx_lm.chat has not.
    parser.set_defaults(
        model=None, min_p=0.0, min_tokens_to_keep=1, top_k=0, quantize_activations=False
    )
    group_flags(parser, GROUPS)
    return parser


class Conversation:
    """The state kept over turns: caches, the drafter's behind the target's, and counts."""

    def __init__(
        self,
        args: argparse.Namespace,
        model: nn.Module,
        tokenizer: TokenizerWrapper,
        drafter: Drafter | None,
        grammar: dict[str, Any] | None = None,
    ):
        """``grammar`` holds the options from ``grammar_options``."""
        self.args = args
        self.model = model
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.grammar = grammar or {}
        self.stats = Stats()
        self.num_answers = 0
        # A first Ctrl-C ends the answer, a second one the command.
        self.interrupt = StopSignals((signal.SIGINT,), once=True)
        self.forget()

    def forget(self) -> None:
        """Start a new conversation; the counts go on."""
        self.cache = make_prompt_cache(self.model, self.args.max_kv_size)
        if self.drafter is not None:
            self.cache += self.drafter.make_cache()

    def answer(self, question: str) -> Iterator[MlxGenerationResponse]:
        """Answer piece by piece; the conversation so far is in the caches.

        Ctrl-C ends the answer after the token that is being computed: the caches then hold the
        question and the tokens that were given.
        """
        messages = [{"role": "user", "content": question}]
        if self.args.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self.args.system_prompt})
        responses = stream_generate(
            self.model,
            self.tokenizer,
            apply_template(self.tokenizer, messages, add_generation_prompt=True),
            prompt_cache=self.cache,
            # Every answer draws its own noise, from the global state that --seed fixed.
            **text_options(self.args, self.tokenizer, self.drafter, seed=None),
            **self.grammar,
        )
        # Under mlx.launch, which passes nothing on after a Ctrl-C, it ends the chat.
        with self.interrupt if num_ranks() == 1 else nullcontext():
            for response in responses:
                yield response
                if self.interrupt.is_asked:
                    break
            responses.close()
        self.num_answers += 1
        if isinstance(response, GenerationResponse):
            self.stats += response.stats

    def stats_lines(self) -> list[str]:
        """Mean acceptance length (tau) and the counts of all answers so far."""
        return [f"Answers: {self.num_answers}", *self.stats.lines()]


class UI(ChatUI):
    """mlx-lm's look, with our name, what drafts, and commands that begin with a slash."""

    def __init__(self, args: argparse.Namespace, drafter: Drafter | None):
        super().__init__(args)
        self.shows_drafts = args.show_drafts
        draft = args.draft_model or ("auto" if args.model else "demo head")
        self.header = [
            ("model", str(args.model or DEMO)),
            ("draft", "none" if drafter is None else str(draft)),
            ("draft tokens", str(args.num_draft_tokens)),
            ("max tokens", f"{args.max_tokens:,}"),
        ]

    def __enter__(self) -> "UI":
        print_header_panel(make_console(), "mlx_eagle.chat", self.header)
        self.say_help()
        legend = Marker.of(sys.stdout, self.shows_drafts).legend
        if legend:
            self.say_lines([legend.rstrip()])
        return self

    def say_help(self) -> None:
        for name, what in commands().items():
            shown = f"  [ui.strong]{name:<8}[/ui.strong] [ui.muted]{what}[/ui.muted]"
            make_console().print(shown)

    def say_lines(self, lines: list[str]) -> None:
        """Print lines of our own, indented like mlx-lm's."""
        print("\n".join(f"  {line}" for line in lines))


class PlainUI(UI):
    """The answers, a line or more each, and output of commands: for a pipe or a file."""

    def __enter__(self) -> "PlainUI":
        return self

    def prompt(self) -> str:
        return input()

    def say_help(self) -> None:
        print("\n".join(f"{name}: {what}" for name, what in commands().items()))

    def say_reset(self) -> None:
        """The answers show it."""

    def say_bye(self) -> None:
        """The end of the output shows it."""

    def end_turn(self, response: MlxGenerationResponse) -> None:
        print()

    def say_lines(self, lines: list[str]) -> None:
        print("\n".join(lines))


def converse(ui: UI, conversation: Conversation) -> None:
    """Read questions and answer them until the user exits; an empty line asks nothing."""
    while True:
        with mx.stream(generation_stream):  # that of the passes, which exchange things as well
            question = share(read_question(ui) if is_first() else None)
        match question.strip():
            case "":
                pass
            case "/exit" | "/quit":
                ui.say_bye()
                return
            case "/reset":
                conversation.forget()
                ui.say_reset()
            case "/help":
                ui.say_help()
            case "/stats":
                ui.say_lines(conversation.stats_lines())
            case text if re.fullmatch(r"/\w+", text):
                ui.say_lines([f"There is no command {text}: /help lists them."])
            case _:
                answer(ui, conversation, question)


def read_question(ui: UI) -> str:
    """The user's next line; /exit where there is none."""
    try:
        return ui.prompt()
    except EOFError:
        return "/exit"


def answer(ui: UI, conversation: Conversation, question: str) -> None:
    """Print the answer to a question as it comes; Ctrl-C ends it."""
    mark = Marker.of(sys.stdout, ui.shows_drafts)
    for response in conversation.answer(question):
        ui.stream_token(mark(response.text, response.from_draft))
    ui.end_turn(response)
    if conversation.interrupt.is_asked:
        ui.say_lines(["Stopped. Press Ctrl-C again, or type /exit, to leave."])


def run(args: argparse.Namespace) -> None:
    """Chat as the flags say."""
    check_arguments(args)
    mx.random.seed(args.seed)
    tokenizer_config = {"trust_remote_code": args.trust_remote_code}
    model, tokenizer, drafter = load_pair(args, tokenizer_config)
    if not tokenizer.has_chat_template:
        raise ValueError(
            f"{args.model} has no chat template: use a chat model, or mlx_eagle.generate."
        )
    grammar = grammar_options(args, tokenizer)
    look = UI if sys.stdout.isatty() else PlainUI
    with look(args, drafter) as ui:
        converse(ui, Conversation(args, model, tokenizer, drafter, grammar))


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of ``mlx_eagle.chat``."""
    args = build_parser().parse_args(argv)
    run_on_ranks(lambda: run(args))


if __name__ == "__main__":
    main()
