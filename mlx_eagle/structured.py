"""Structured output: texts that a JSON schema, a regular expression or a grammar allows.

``JSONSchema``, ``JSONObject``, ``Regex`` and ``Lark`` are made for a tokenizer and given where
logits processors are taken, by our functions or mlx-lm's:
``generate(..., logits_processors=[JSONSchema(schema, tokenizer)])``. What may come next is worked
out by llguidance (https://github.com/guidance-ai/llguidance), for all rows of a pass at once.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from .decoding.processors import RowsAsked, allowed_of

try:
    from llguidance import LLExecutor, LLMatcher, LLParserLimits, regex_to_lark
    from llguidance.hf import from_tokenizer
except ImportError:  # the extra was not installed: making a grammar says so
    LLMatcher = None  # type: ignore[assignment,misc]

INSTALL = "structured output needs llguidance: pip install 'mlx-eagle[structured]'."

MOST_TEXT = 200_000  # characters of a schema or a grammar; OpenAI's limit is 120,000 of names
MOST_REGEX = 20_000  # characters of a regular expression: forced texts cost by their length
MOST_REPEATS = 10_000  # of one part of a regular expression, in all its brackets
SLOW_MASK = 0.01  # seconds for one token: masks take .05 to 1 ms, and everybody waits for them
MOST_SLOW = 0.5  # seconds over that, without a fast mask between, until a text ends
TOO_SLOW = "it takes too long to check for each token: give a shorter or simpler one"
LOW = -9 * 10**18  # of a number in a schema: at -(2**63) llguidance 1.9 ends the process
HIGH = 2**64  # above all of them: llguidance takes no larger whole number
MOST_VALUES = 4_000  # in a schema: 2,000 properties of one object compile for three seconds
MOST_LEVELS = 1_500  # llguidance follows references by recursion, and a stack of 8 MB bears 1,800
MOST_PARTS = 2_000  # rules and brackets of a grammar, for the same reason: 4,000 end the process
LEXER_FUEL = 1_000_000  # expressions for one token: llguidance's 200,000 end some calls in tags
MOST_TEXTS = 64  # that mlx-lm decodes with one processor at a time: it takes 32 together
NOTHING = "nothing satisfies it"
CLOSED = 8  # tokens: thoughts that a template ends so near to the end of a prompt are not wanted

PIECES = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\\\]])*\]|\{[0-9]+(?:,[0-9]*)?\}|.", re.DOTALL)
"""Parts of a regular expression: escapes, classes, numbers of repeats, other characters."""
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as ``json.dumps`` writes it. Models that may write any white space can get lost in it, and
braces, keys and quotes are not forced where a space may come before them."""


def check_installed() -> None:
    """Raise ValueError, saying how to get it, where llguidance is not installed."""
    if LLMatcher is None:
        raise ValueError(INSTALL)


class GrammarError(ValueError):
    """A text that cannot go on as its grammar wants, which is its client's mistake."""


class Phase(Enum):
    """The rule at a place of a text."""

    OPEN = "its thoughts may begin here, or what the grammar allows"
    THOUGHTS = "free text, which may not end here"
    BOUND = "what the grammar allows"
    ENDED = "nothing any more"


class Grammar:
    """A logits processor that keeps a text to a grammar; the base of those below.

    With a tokenizer of a reasoning model the text is free until its thoughts have ended. The end
    of the text is allowed where the grammar is complete, and nothing but the end where it has no
    more to say. A text that ``max_tokens`` cuts is a beginning of one that is allowed.

    It may be used for any number of texts, also at the same time, and in any thread.
    """

    noun = "grammar"

    def __init__(self, compiled: Callable[[], str], tokenizer: Any):
        """``compiled`` gives llguidance's form of it. Raises ValueError for one of no use."""
        self._vocabulary = _vocabulary_of(tokenizer)
        limits = LLParserLimits(verbose_errors=False, step_lexer_fuel=LEXER_FUEL)
        self._matcher = LLMatcher(self._vocabulary.tokens, compiled(), log_level=0, limits=limits)
        # Where no text at all is allowed, that is seen with the first mask.
        is_possible = any(self._matcher.compute_bitmask())
        error = self._matcher.get_error() or ("" if is_possible else NOTHING)
        if not error and _is_slow(self._matcher):
            error = TOO_SLOW
        if error:
            raise ValueError(f"no text can be held to this {self.noun}: {_sentence(error)}")
        self._before: list[int] = []
        self._num_said = 0
        self._texts: list[_Text] = []

    def behind(self, prompt: Sequence[int], num_said: int = 0) -> "Grammar":
        """The same for a text whose prompt was read before, and will not be shown to it.

        ``num_said`` of the last tokens of both belong to the text.
        """
        other = object.__new__(type(self))
        vars(other).update(vars(self), _before=list(prompt), _num_said=num_said, _texts=[])
        return other

    def begin_text(self) -> "_Text":
        """Follow one text."""
        return _Text(self._vocabulary, self._matcher.deep_copy(), self._before, self._num_said)

    def __deepcopy__(self, memo: object) -> "Grammar":
        return self.behind(self._before, self._num_said)

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Mask logits (1, V) behind tokens (N,), as a logits processor of mlx-lm."""
        read: Any = tokens.tolist()
        text = self._text_of(read)
        (bits,) = text.masks([RowsAsked(text, [], None)])
        return mx.where(allowed_of(mx.array(bits), logits.shape[-1]), logits, -mx.inf)

    def _text_of(self, tokens: list[int]) -> "_Text":
        """The text of which these are the tokens, known up to the last one or new.

        Several are decoded in turn by mlx-lm's batches, and some of them may be alike.
        """
        found = next((t for t in self._texts if t.tokens == tokens[:-1]), None)
        if found is None:
            # One like it may be a token ahead: then they have the same prompt.
            alike = (t for t in self._texts if t.num_followed and t.tokens[:-1] == tokens[:-1])
            size = next((len(t.tokens) - t.num_followed for t in alike), len(tokens))
            found = self.begin_text()
            found.start(tokens[:size])
            self._texts = [*self._texts[1 - MOST_TEXTS :], found]
        found.follow(tokens[len(found.tokens) :])
        return found


class JSONSchema(Grammar):
    """A text that is JSON and valid under a schema, in one line, as ``json.dumps`` writes it.

    Properties come in the order of the schema. What llguidance cannot hold a text to is refused,
    or ignored where ``strict`` is False.
    """

    noun = "schema"

    def __init__(self, schema: Mapping[str, Any] | str, tokenizer: Any, strict: bool = True):
        """``schema`` may be JSON text. Raises ValueError for one that cannot be held to."""
        read = embedded(read_schema(schema), strict)
        super().__init__(lambda: LLMatcher.grammar_from_json_schema(read), tokenizer)


class JSONObject(JSONSchema):
    """A text that is a JSON object."""

    def __init__(self, tokenizer: Any):
        super().__init__({"type": "object"}, tokenizer)


class Regex(Grammar):
    """A text that a regular expression matches as a whole; Rust's syntax, without look-around."""

    noun = "regular expression"

    def __init__(self, pattern: str, tokenizer: Any):
        """Raises ValueError for an expression that cannot be used."""
        _check_length(pattern, self.noun, MOST_REGEX)
        if (num_repeats := repeats(pattern)) > MOST_REPEATS:
            raise ValueError(
                f"the {self.noun} repeats a part {num_repeats} times: give at most {MOST_REPEATS}."
            )
        super().__init__(lambda: LLMatcher.grammar_from_regex(pattern), tokenizer)


class Rules(Grammar):
    """A text of a grammar like ``Lark``'s that is known to be harmless, since it is our own."""

    def __init__(self, grammar: str, tokenizer: Any):
        """Raises ValueError for a grammar that cannot be used."""
        _check_length(grammar, self.noun)
        super().__init__(lambda: LLMatcher.grammar_from_lark(grammar), tokenizer)


class Lark(Rules):
    """A text of a context-free grammar in llguidance's variant of Lark; it begins at ``start``."""

    def __init__(self, grammar: str, tokenizer: Any):
        """Raises ValueError for a grammar that cannot be used."""
        _check_length(grammar, self.noun)
        _check_parts(grammar)
        super().__init__(grammar, tokenizer)


class _Vocabulary:
    """A tokenizer's vocabulary: its tokens, those that end a text, the marks of thoughts."""

    def __init__(self, tokenizer: Any):
        inner = getattr(tokenizer, "_tokenizer", tokenizer)
        ends = getattr(tokenizer, "eos_token_ids", None) or [inner.eos_token_id]
        first = inner.eos_token_id
        self.ends = sorted(map(int, ends), key=lambda end: (end != first, end))
        try:
            self.tokens = from_tokenizer(inner, eos_token=self.ends)
        except (ValueError, AttributeError) as err:
            raise ValueError(
                f"structured output needs a fast tokenizer, and this one is none ({err})."
            ) from err
        added: Mapping[int, Any] = inner.added_tokens_decoder
        self.special = {str(t): i for i, t in added.items() if self.tokens.is_special_token(i)}
        self.executor = LLExecutor()  # threads, which all its texts share
        self.num_words = -(-self.tokens.vocab_size // 32)
        self.thinks = bool(getattr(tokenizer, "has_thinking", False))
        self.start = list(tokenizer.think_start_tokens) if self.thinks else []
        self.end = list(tokenizer.think_end_tokens) if self.thinks else []
        self.all_but_ends = np.full(self.num_words, 2**32 - 1, np.uint32)
        for end in self.ends:
            self.all_but_ends[end // 32] &= ~np.uint32(1 << end % 32)

    def phase_behind(self, prompt: list[int]) -> Phase:
        """The phase in which a text behind ``prompt`` begins."""
        if not self.thinks:
            return Phase.BOUND
        begun = _last(prompt, self.start)
        ended = _last(prompt, self.end)
        if begun > ended:
            return Phase.THOUGHTS
        return Phase.BOUND if ended >= len(prompt) - CLOSED - len(self.end) >= 0 else Phase.OPEN


_vocabularies: "WeakKeyDictionary[Any, _Vocabulary]" = WeakKeyDictionary()


def _vocabulary_of(tokenizer: Any) -> _Vocabulary:
    """A tokenizer's vocabulary, made once: that takes a second. ValueError without llguidance."""
    check_installed()
    known = _vocabularies.get(tokenizer)
    ends = getattr(tokenizer, "eos_token_ids", None)
    if known is None or (ends and set(ends) != set(known.ends)):
        known = _vocabularies[tokenizer] = _Vocabulary(tokenizer)
    return known


class _Text:
    """One text that a grammar follows, behind a prompt: a ``decoding.sampling.GrammarText``."""

    def __init__(
        self, vocabulary: _Vocabulary, matcher: "LLMatcher", before: list[int], num_said: int
    ):
        self.tokens: list[int] = []  # the prompt's that were shown, and its own
        self.num_followed = 0  # of its own
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._before = before
        self._num_said = num_said
        self._phase = Phase.BOUND
        self._is_suspect = False  # its masks are made, and timed, alone
        self._slow_seconds = 0.0

    def start(self, prompt: list[int]) -> None:
        """Begin behind the whole prompt, or what was not read before of it."""
        whole = self._before + prompt
        num_prompt = len(whole) - self._num_said
        self._phase = self._vocabulary.phase_behind(whole[:num_prompt])
        self.tokens = list(prompt)
        self._follow(whole[num_prompt:], whole[:num_prompt])

    def follow(self, tokens: list[int]) -> None:
        """Go on with tokens that are part of the text now. Raises ValueError for a wrong one."""
        self._follow(tokens, self.tokens)
        self.tokens += tokens
        self.num_followed += len(tokens)

    def _follow(self, tokens: list[int], before: list[int]) -> None:
        recent = before[-len(self._vocabulary.end) :]
        for token in tokens:
            phase = self._after(self._phase, recent, token)
            if self._is_consumed(self._phase, phase):
                self._matcher.consume_token(token)
                self._check()
            self._phase = phase
            recent = [*recent, token]

    def forced(self, most: int) -> list[int]:
        """Up to ``most`` tokens that must come next; they may include the end of the text."""
        if self._phase is not Phase.BOUND or most < 1:
            return []
        begun = time.perf_counter()
        tokens = self._matcher.compute_ff_tokens()[:most]
        self._charge(time.perf_counter() - begun, 1, is_single=True)
        self._check()
        if len(tokens) < most:
            num = self._matcher.try_consume_tokens(tokens)
            if num == len(tokens) and self._matcher.is_stopped():
                tokens = [*tokens, self._vocabulary.ends[0]]
            self._matcher.rollback(num)
        return tokens

    def masks(self, asked: Sequence[RowsAsked]) -> list["np.ndarray"]:
        """Tokens that may follow each row: bits (R, V / 32) for each text that is asked.

        They are texts of this class. Rows behind a token that is not allowed have all bits.
        """
        texts = [text for text in (each.text for each in asked) if isinstance(text, _Text)]
        num_rows = [1 + len(each.drafts) for each in asked]
        width = max(text._vocabulary.num_words for text in texts)
        bits = np.full((sum(num_rows), width), 2**32 - 1, np.uint32)
        chains: list[tuple[_Text, int, list[int]]] = []
        made = []
        first = 0
        for text, each, num in zip(texts, asked, num_rows, strict=True):
            own = bits[first : first + num]
            made.append(own)
            has_chain = each.parents is None and each.drafts and text._phase is Phase.BOUND
            if has_chain and text._vocabulary.num_words == width:
                # Behind a token that the tokenizer does not know no row is ever kept.
                size = text._vocabulary.tokens.vocab_size
                drafts = [token if token < size else 0 for token in each.drafts]
                chains.append((text, first, drafts))
            else:
                text._walk(own, each)
            first += num
        alone = [[chain] for chain in chains if chain[0]._is_suspect]
        others = [chain for chain in chains if not chain[0]._is_suspect]
        for group in filter(None, [others, *alone]):
            begun = time.perf_counter()
            inputs = [(text._matcher, first, drafts) for text, first, drafts in group]
            texts[0]._vocabulary.executor.unsafe_compute_mask_ptr_with_draft_token(
                inputs, bits.ctypes.data, 4 * width, len(bits)
            )
            seconds = (time.perf_counter() - begun) / sum(1 + len(each[2]) for each in group)
            for text, _, drafts in group:
                text._charge(seconds, 1 + len(drafts), is_single=len(group) == 1)
        for text in texts:
            text._check()
        return made

    def _charge(self, seconds: float, num_rows: int, is_single: bool) -> None:
        """Note the time of a row's mask, or of what is forced; GrammarError ends a slow text.

        Of several texts nobody knows whose took long: each is timed alone from then on.
        """
        self._is_suspect = seconds > SLOW_MASK
        if not self._is_suspect:
            self._slow_seconds = 0.0
        elif is_single:
            self._slow_seconds += (seconds - SLOW_MASK) * num_rows
        if self._slow_seconds > MOST_SLOW:
            raise GrammarError(f"the text cannot be held to its grammar: {TOO_SLOW}.")

    def _walk(self, bits: "np.ndarray", asked: RowsAsked) -> None:
        """The masks of a tree, or of rows in thoughts, node by node and back again."""
        drafts = asked.drafts
        parents = asked.parents or range(len(drafts))
        children: dict[int, list[int]] = {}
        for i, parent in enumerate(parents):
            children.setdefault(parent, []).append(i + 1)

        def visit(row: int, phase: Phase, recent: list[int]) -> None:
            self._fill(bits[row], phase)
            for child in children.get(row, ()):
                token = drafts[child - 1]
                after = self._after(phase, recent, token)
                is_consumed = self._is_consumed(phase, after)
                is_known = token < self._vocabulary.tokens.vocab_size
                if is_consumed and not (is_known and self._matcher.try_consume_tokens([token])):
                    continue
                visit(child, after, [*recent, token])
                if is_consumed:
                    self._matcher.rollback(1)

        visit(0, self._phase, self.tokens[-len(self._vocabulary.end) :])

    def _fill(self, row: "np.ndarray", phase: Phase) -> None:
        vocabulary = self._vocabulary
        own = row[: vocabulary.num_words]
        if phase is Phase.THOUGHTS:
            own[:] = vocabulary.all_but_ends
        elif phase is not Phase.ENDED:
            row[:] = 0
            begun = time.perf_counter()
            self._matcher.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
            self._charge(time.perf_counter() - begun, 1, is_single=True)
        if phase is Phase.OPEN:
            start = vocabulary.start[0]
            own[start // 32] |= np.uint32(1 << start % 32)

    def _after(self, phase: Phase, recent: list[int], token: int) -> Phase:
        vocabulary = self._vocabulary
        if phase is Phase.THOUGHTS:
            size = len(vocabulary.end)
            return Phase.BOUND if [*recent, token][-size:] == vocabulary.end else phase
        if phase is Phase.OPEN and token == vocabulary.start[0]:
            return Phase.THOUGHTS
        return Phase.ENDED if token in vocabulary.ends or phase is Phase.ENDED else Phase.BOUND

    @staticmethod
    def _is_consumed(before: Phase, after: Phase) -> bool:
        """Whether the token between the two is the grammar's."""
        return after is Phase.BOUND and before is not Phase.THOUGHTS

    def _check(self) -> None:
        if error := self._matcher.get_error():
            raise GrammarError(f"the text cannot be held to its grammar: {_sentence(error)}")


def embedded(schema: Mapping[str, Any], strict: bool) -> str:
    """A schema as llguidance reads it; with ``strict`` it refuses what it cannot enforce."""
    options = {**ONE_LINE, "lenient": not strict, "coerce_one_of": not strict}
    return json.dumps(dict(schema) | {"x-guidance": options})


def spelled(text: str, tokenizer: Any) -> str:
    """The spelling of ``text`` in a grammar; special tokens in it become token ids."""
    special = _vocabulary_of(tokenizer).special
    marks = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    parts = re.split(f"({marks})", text) if marks else [text]
    return " ".join(
        f"<[{special[part]}]>" if part in special else json.dumps(part, ensure_ascii=False)
        for part in parts
        if part
    )


def as_terminal(pattern: str) -> str:
    """A terminal of the texts in which a schema's ``pattern`` is found: a search, not a match."""
    found = []
    for choice in _choices(pattern):
        begins = choice.startswith("^")
        ends = re.search(r"(?<!\\)(\\\\)*\$$", choice) is not None
        inner = regex_to_lark(f"(?:{choice[begins : len(choice) - ends]})", "dw")
        anything = "/(?s:.*)/"
        found.append(f"{'' if begins else anything} /{inner}/ {'' if ends else anything}")
    return " | ".join(found)


def _choices(pattern: str) -> list[str]:
    """The parts between those "|" that stand outside of all brackets."""
    depth = 0
    choices = [""]
    for piece in PIECES.findall(pattern):
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and depth == 0:
            choices.append("")
        else:
            choices[-1] += piece
    return choices


def _last(tokens: Sequence[int], mark: list[int]) -> int:
    """The last index at which ``mark`` begins in ``tokens``; -1 where it is not there."""
    starts = range(len(tokens) - len(mark), -1, -1)
    return next((i for i in starts if list(tokens[i : i + len(mark)]) == mark), -1)


def _sentence(error: str) -> str:
    """llguidance's error on one line, without the parts for its developers."""
    lines = [line.strip() for line in error.splitlines() if line.strip(" ^|")]
    is_quoted = re.compile(r"\d+ \| |<non-verbose/>$").match  # a line of the grammar
    text = " ".join(line for line in lines if not is_quoted(line))
    return text.replace("NoExtensionBias", NOTHING)[:300].rstrip(".") + "."


def repeats(pattern: str) -> int:
    """Count how often some part of a regular expression is repeated by the numbers in it."""
    most = [1]  # of each bracket that is open
    last = 1  # of the part just before
    for piece in PIECES.findall(pattern):
        if piece == "(":
            most.append(1)
        elif piece == ")" and len(most) > 1:
            last = most.pop()
        elif len(piece) > 2 and piece[0] == "{":
            last *= max(1, *(int(number[:9]) for number in piece[1:-1].split(",") if number))
        else:
            last = 1
        most[-1] = max(most[-1], last)
    return max(most)


def _is_slow(matcher: "LLMatcher") -> bool:
    """Whether masks take long where a text begins; the first may, for it makes tables."""
    for _ in range(2):
        begun = time.thread_time()
        matcher.compute_bitmask()
        if time.thread_time() - begun <= SLOW_MASK:
            return False
    return True


def _check_length(text: str, noun: str, most: int = MOST_TEXT) -> None:
    if not isinstance(text, str) or not text:
        raise ValueError(f"the {noun} is empty or no text: give a {noun}.")
    if len(text) > most:
        raise ValueError(f"the {noun} has {len(text)} characters: give at most {most}.")


def read_schema(schema: Mapping[str, Any] | str) -> dict[str, Any]:
    """The schema as a JSON object. Raises ValueError if it is not one, or too large."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        _check_length(text, "schema")
        read = json.loads(text)
        json.dumps(read, ensure_ascii=False).encode()  # no half of a letter is text
        values = list(_values(read))
    except UnicodeEncodeError as err:
        raise ValueError("the schema holds half of a letter (a lone surrogate).") from err
    except RecursionError as err:
        raise ValueError("the schema is nested too deeply.") from err
    except (TypeError, json.JSONDecodeError) as err:
        raise ValueError(f"the schema is no JSON ({err}).") from err
    if not isinstance(read, dict):
        raise ValueError('the schema is no JSON object: give one, such as {"type": "object"}.')
    if len(values) > MOST_VALUES:
        raise ValueError(f"the schema has {len(values)} values: give at most {MOST_VALUES}.")
    numbers = [each for each in values if isinstance(each, int | float)]
    if not all(LOW <= each < HIGH for each in numbers):  # nor infinity, nor what is no number
        raise ValueError("the schema holds a number beyond 64 bits, or none that JSON has.")
    levels = [each for each in values if isinstance(each, dict | list)]
    if len(levels) > MOST_LEVELS and any("$ref" in each for each in levels):
        raise ValueError(
            f"the schema has {len(levels)} objects and lists: give at most {MOST_LEVELS} in one "
            "with references."
        )
    return read


def _check_parts(grammar: str) -> None:
    """Raise ValueError for a grammar, or a schema in it, that could end the process."""
    num_parts = sum(map(grammar.count, ":(["))
    for found in re.finditer(r"%json\s*", grammar):
        try:
            schema, end = json.JSONDecoder().raw_decode(grammar, found.end())
        except (ValueError, RecursionError):  # llguidance says what is wrong with it
            continue
        if isinstance(schema, dict):
            read_schema(schema)
            num_parts -= sum(map(grammar[found.end() : end].count, ":(["))
    if num_parts > MOST_PARTS:
        raise ValueError(
            f"the grammar has {num_parts} rules and brackets: give at most {MOST_PARTS}."
        )


def _values(value: Any) -> Iterator[Any]:
    """All values in ``value``, at any depth, itself first."""
    yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        yield from _values(each)
