"""Measure a converted drafter on its target, under every reading of its checkpoint.

A checkpoint may leave taps, rotary base and norms open. Nothing is changed; the report says which
reading fits best.

EAGLE heads are measured teacher-forced on a conversation with the target. *Agreement* is the share
of drafted tokens that equal the text, by depth; *overlap* is the sum over the draft vocabulary of
min(p, q), the chance that sampling keeps a draft (Leviathan et al. 2023, section 3.2). Overlap
sees small faults that change no first choice, so readings are compared by it: by the mean
difference over all positions, and its standard error.

Drafters of other kinds draft as in use, and are compared by the tokens per pass of the target
(tau).
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_eagle.decoding.generate_step import speculative_generate_step
from mlx_eagle.decoding.stats import Stats
from mlx_eagle.drafters.config import Eagle3Config
from mlx_eagle.drafters.head_weights import AttachedHead, attach_head
from mlx_eagle.drafters.kind import Kind, LoadOptions
from mlx_eagle.drafters.output_rows import indices_in, with_draft_vocab
from mlx_eagle.drafters.quantize import bits_of
from mlx_eagle.system.loading import load
from mlx_eagle.system.progress import open_bar
from mlx_eagle.target_model.target import Target

from .published_config import BASE, DEFAULT_THETA

DEPTHS = 3
MOST_DRAFTED = 7  # tokens at once, of drafters that are measured by decoding
CLEAR = 0.005  # difference in overlap, to count as better
CLEAR_RATIO = 1.1  # of tokens per pass, to count as better
ERRORS = 3  # standard errors, to count as better

# One conversation, because a wrong rotary base shows only a few hundred tokens into a text. Word
# problems, because heads draft their solutions best, and a head that drafts nothing right cannot
# get worse by being misread.
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
class TargetText:
    """A prompt with the target's own greedy answer, and the target's features and probabilities.

    ``tokens`` (n,) begin with ``num_prompt`` tokens of the prompt; ``features`` (n, h_t) are by
    tap; ``probs`` (n - num_prompt, V) are those of the tokens ``ids`` (V,), after each token of
    the answer.
    """

    tokens: mx.array
    num_prompt: int
    features: Mapping[int, mx.array]
    probs: mx.array
    ids: np.ndarray

    @property
    def num_slots(self) -> int:
        """The positions whose next DEPTHS tokens are all known: 2 of 5 answered, for 3."""
        return max(len(self.tokens) - self.num_prompt - DEPTHS, 0)

    def fused(self, taps: Sequence[int], lag: int = 0) -> mx.array:
        """The features of each position's ``lag``-th predecessor, side by side, (n, F)."""
        features = mx.concatenate([self.features[tap] for tap in taps], axis=-1)
        return features[mx.maximum(mx.arange(len(features)) - lag, 0)]


def encode(tokenizer: TokenizerWrapper, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The tokens of a conversation, through the target's chat template if it has one."""
    if not tokenizer.has_chat_template:
        return tokenizer.encode("\n\n".join(message["content"] for message in messages))
    return tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)


def read_text(
    model: nn.Module,
    prompt: Sequence[int],
    num_tokens: int,
    stops: set[int],
    taps: set[int],
    ids: mx.array,
) -> TargetText:
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
    parts = dict(zip(order, mx.split(features, len(order), axis=-1), strict=True))
    mx.eval(parts, probs)
    return TargetText(mx.array(tokens), len(prompt), parts, probs, np.array(ids))


def read_conversation(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    questions: Sequence[str],
    num_tokens: int,
    taps: set[int],
    ids: mx.array,
) -> list[TargetText]:
    """One text for each question, after the questions and answers before it.

    A bar counts them if standard error is a terminal.
    """
    stops = set(tokenizer.eos_token_ids)
    messages: list[dict[str, str]] = []
    texts = []
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


@dataclass(frozen=True)
class Reading:
    """One reading of the checkpoint: its ``change`` to the converted config.

    ``flag`` asks the converter for it. ``lag`` is as in ``TargetText.fused``.
    """

    name: str
    change: Mapping[str, Any] = field(default_factory=dict)
    flag: str | None = None
    lag: int = 0

    @property
    def way(self) -> str:
        """The way to a head that is read like this."""
        if self.flag is not None:
            return f"convert the head again with {self.flag}"
        change = ", ".join(f"{key} to {json.dumps(v)}" for key, v in self.change.items())
        return f"set {change} in the config.json of the converted folder"


RESOLVED = Reading("as resolved")


@dataclass(frozen=True)
class Row:
    """The results of a reading: ``agreement`` by depth, ``tau``, ``overlaps`` (m,) by position.

    Without overlaps it was measured by decoding, and drafts agree that were accepted.
    """

    reading: Reading
    agreement: tuple[float, ...]
    tau: float
    overlaps: np.ndarray | None = None

    @property
    def name(self) -> str:
        return self.reading.name

    @property
    def score(self) -> float:
        """The figure by which readings are compared: overlap, or tau."""
        return self.tau if self.overlaps is None else float(self.overlaps.mean())

    def lead_over(self, other: "Row") -> tuple[float, float]:
        """The difference by which its overlap is higher, and its standard error."""
        leads = self.overlaps - other.overlaps
        return float(leads.mean()), float(leads.std() / len(leads) ** 0.5)

    def is_better_than(self, other: "Row") -> bool:
        """True if it is clearly better: in overlaps position by position."""
        if self.overlaps is None:
            return self.tau > CLEAR_RATIO * other.tau
        lead, error = self.lead_over(other)
        return lead > max(CLEAR, ERRORS * error)

    def entry(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            "agreement": [round(share, 4) for share in self.agreement],
            "tau": round(self.tau, 3),
        }
        if self.overlaps is not None:
            values["overlap"] = round(self.score, 4)
        flag = self.reading.flag
        return values if flag is None else {"override": flag, **values}


@dataclass(frozen=True)
class Report:
    """Results of the drafter as it was resolved, of its other readings, and of a wrong one.

    ``baseline`` feeds features of the wrong positions. ``variants`` are the resolved reading with
    quantized weights, and with the whole draft vocabulary of a head of which a part is kept. All
    others have the source's weights. A drafter that was measured by decoding has none of these.
    """

    resolved: Row
    alternatives: tuple[Row, ...]
    num_prompts: int
    baseline: Row | None = None
    variants: Mapping[str, Row] = field(default_factory=dict)

    @property
    def winner(self) -> Row:
        """The best alternative if it is clearly better, else the resolved reading."""
        best = max(self.alternatives, key=lambda row: row.score, default=self.resolved)
        return best if best.is_better_than(self.resolved) else self.resolved

    def verdict(self) -> str:
        """One sentence that says which reading wins, and what to do about it."""
        ours = self.resolved
        winner = self.winner
        if winner is not ours:
            measured = "tau" if ours.overlaps is None else "overlap"
            return (
                f"warning: {winner.name} fits better ({measured} {winner.score:.3f}, not "
                f"{ours.score:.3f}): {winner.reading.way}"
            )
        if self.baseline is not None and not ours.is_better_than(self.baseline):
            return (
                "warning: the head does no better than with features of the wrong positions: "
                "it is damaged, or was trained for another target"
            )
        close = [row.name for row in self.alternatives if not ours.is_better_than(row)]
        doubt = f"; these texts do not tell it from {', '.join(close)}" if close else ""
        return f"winner: {ours.name}{doubt}"

    def table(self) -> str:
        """A table of all that was measured, one line per reading, and the verdict."""
        rows = [self.resolved, *self.variants.values(), *self.alternatives]
        where = f"{self.num_prompts} answers of its own"
        columns = " tau "
        if self.baseline is not None:
            rows.append(self.baseline)
            where = f"{self.num_prompts} texts, at {len(self.resolved.overlaps)} positions"
            columns += " overlap  behind by     "
        width = max(len(row.name) for row in rows)
        depths = range(1, max(len(row.agreement) for row in rows) + 1)
        lines = [
            f"tokens per pass of the target (tau) and drafts that agree with it, in {where}",
            f"{'':{width}} {columns}{' '.join(f'depth {depth}' for depth in depths)}",
        ]
        for row in rows:
            figures = f"{row.tau:5.2f}"
            if row.overlaps is not None:
                lead, error = self.resolved.lead_over(row)
                figures += f"   {row.score:.3f}  {lead:+.3f} ±{error:.3f} "
            shares = " ".join(f"{share:7.1%}" for share in row.agreement)
            lines.append(f"{row.name:{width}} {figures}{shares}")
        return "\n".join([*lines, self.verdict()])

    def entry(self) -> dict[str, Any]:
        """The entry ``check`` for the converted ``config.json``."""
        found = {"num_prompts": self.num_prompts, **self.resolved.entry()}
        found |= {name: row.entry() for name, row in self.variants.items()}
        found["alternatives"] = {row.name: row.entry() for row in self.alternatives}
        if self.baseline is not None:
            found["num_positions"] = len(self.resolved.overlaps)
            found["baseline"] = {self.baseline.name: self.baseline.entry()}
        return found | {"winner": self.winner.name}


@contextmanager
def saved(weights: Mapping[str, mx.array]) -> Iterator[Path]:
    """A folder with weights that are about to be saved, to load them as users will."""
    with tempfile.TemporaryDirectory() as place:
        mx.save_safetensors(f"{place}/model.safetensors", dict(weights))
        yield Path(place)


def rope_bases(config: Mapping[str, Any]) -> set[float]:
    """Every rotary base that a config names, at any depth."""
    nested = [rope_bases(value) for value in config.values() if isinstance(value, Mapping)]
    own = {float(base) for key, base in config.items() if key == "rope_theta" and BASE.holds(base)}
    return own.union(*nested)


def alternatives(
    config: Eagle3Config, num_layers: int, bases: set[float] = frozenset()
) -> list[Reading]:
    """The other readings of a head, one doubt at a time; ``bases`` are tried besides 10000."""
    taps = config.taps(num_layers)
    found = []
    for by in (1, -1) if config.uses_aux else ():
        moved = [tap + by for tap in taps]
        if moved[0] >= 0 and moved[-1] <= num_layers:
            flag = f"--aux-layers {','.join(map(str, moved))}"
            change = {"aux_boundary_ids": moved, "aux_nested_ids": None}
            found.append(Reading(f"taps {by:+d}", change, flag))
    # Scaling written channel by channel was computed for its base and no other.
    if (config.rope.get("scaling") or {}).get("type") != "longrope":
        for base in sorted({DEFAULT_THETA, *bases} - {config.rope["theta"]}):
            text = f"{base:.12g}"
            change = {"rope": {**config.rope, "theta": base}}
            found.append(Reading(f"rope base {text}", change, f"--rope-theta {text}"))
    switches = {}
    if config.layer_input != "none":
        switches["norm_before_residual"] = not config.norm_before_residual
    if config.final_norm:
        switches["norm_output"] = not config.norm_output
    for name, on in switches.items():
        flag = f"--{'' if on else 'no-'}{name.replace('_', '-')}"
        found.append(Reading(f"{name} {'on' if on else 'off'}", {name: on}, flag))
    return found


def unroll(
    part: AttachedHead, tokens: mx.array, features: mx.array, first: int, num_slots: int
) -> Iterator[tuple[mx.array, mx.array]]:
    """Draft from the slots from ``first`` on, depth by depth and all slots at once.

    Slot t is fed token t + 1 and the features of position t, and drafts tokens t + 2, t + 3,
    ...; later depths are fed what was drafted. As in decoding, the row of slot t sees slots
    0 ... t and its own rows at earlier depths (the training-time test of Li et al. 2025, section
    3.1). Slots 1 and 2 at depths 2 and 3:

        slots 0 1 2 | depth 2 | depth 3        slot 1: 1 1 0 | 1 0 | 1 0
                                               slot 2: 1 1 1 | 0 1 | 0 1

    Yields logits (m, Vd) and drafted tokens (m,) for each of DEPTHS, m = ``num_slots``. A
    sliding window is taken to hold for all layers.
    """
    head = part.head
    end = first + num_slots
    window = head.config.sliding_window or end + DEPTHS
    cache = [KVCache() for _ in head.layers]
    hidden = head(part.embed(tokens[1 : end + 1]), head.fuse(features[:end]), cache)
    hidden = hidden[first:]
    slots = mx.arange(first, end)
    places = mx.arange(end)
    visible = places[None] <= slots[:, None]
    for depth in range(1, DEPTHS + 1):
        logits = head.logits(hidden)
        drafted = part.ids[mx.argmax(logits, axis=-1)]
        yield logits, drafted
        if depth == DEPTHS:
            return
        positions = slots + depth
        places = mx.concatenate([places, positions])
        visible = mx.concatenate([visible, mx.eye(num_slots, dtype=mx.bool_)], axis=1)
        mask = visible & (positions[:, None] < places[None] + window)
        fed = drafted
        if head.config.mask_token_id is not None:  # P-EAGLE: nothing is fed back
            fed = mx.full(num_slots, head.config.mask_token_id)
            hidden = head.masked(num_slots)
        hidden = head(part.embed(fed), hidden, cache, positions, mask)


def compare(part: AttachedHead, text: TargetText, lag: int = 0) -> tuple[mx.array, mx.array]:
    """Hits (DEPTHS, m), where the draft equals the text's token, and overlaps (DEPTHS, m).

    The first slot drafts the answer's second token, for the first one follows from the prompt.
    """
    first = text.num_prompt - 1
    num = text.num_slots
    probs = text.probs[:, mx.array(indices_in(np.array(part.ids), text.ids))]
    hits = []
    overlaps = []
    steps = unroll(part, text.tokens, text.fused(part.taps, lag), first, num)
    for depth, (logits, drafted) in enumerate(steps):
        start = first + 2 + depth
        hits.append(drafted == text.tokens[start : start + num])
        q = mx.softmax(logits.astype(mx.float32), axis=-1)
        overlaps.append(mx.minimum(q, probs[depth : depth + num]).sum(axis=-1))
    return mx.stack(hits), mx.stack(overlaps)


def measure(part: AttachedHead, reading: Reading, texts: Sequence[TargetText]) -> Row:
    """Measure a head, attached as ``reading`` says, on all texts."""
    pairs = [compare(part, text, reading.lag) for text in texts]
    hits, overlaps = (mx.concatenate(list(parts), axis=1) for parts in zip(*pairs, strict=True))
    kept = mx.cumprod(hits.astype(mx.int32), axis=0).sum(axis=0)
    agreement = tuple(hits.astype(mx.float32).mean(axis=1).tolist())
    tau = 1 + kept.astype(mx.float32).mean().item()
    return Row(reading, agreement, tau, np.array(overlaps.mean(axis=0)))


def check_head(
    config: Mapping[str, Any],
    weights: Mapping[str, mx.array],
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    *,
    variants: Mapping[str, tuple[Mapping[str, Any], Mapping[str, mx.array]]] | None = None,
    bases: set[float] = frozenset(),
    questions: Sequence[str] = QUESTIONS,
    num_tokens: int = 128,
) -> Report:
    """Teacher-force a head on the target's own greedy answers, under every reading of it.

    ``config`` and ``weights`` are those that the converter saves without quantization; of
    ``variants`` by name, "quantized" has those with it, and "full" those of the whole draft
    vocabulary; ``bases`` are rotary bases to try besides 10000. The
    ``questions`` are asked in one conversation, with answers of at most ``num_tokens``.
    Raises ValueError if head and target do not fit each other, or no answer is long enough.
    """

    def attach(change: Mapping[str, Any], folder: Path, own: Mapping[str, Any]) -> AttachedHead:
        return attach_head(folder, {**own, **change}, model, LoadOptions())

    attached = {}
    for name, (own, arrays) in (variants or {}).items():
        title = "full vocabulary" if name == "full" else f"in {bits_of(own['quantization'])}"
        with saved(arrays) as folder:
            attached[name] = Reading(title), attach({}, folder, own)
    with saved(weights) as folder:
        part = attach({}, folder, config)
        own = part.head.config
        num_layers = len(model.layers)
        others = alternatives(own, num_layers, bases)
        taps = {
            tap for x in (RESOLVED, *others) for tap in replace(own, **x.change).taps(num_layers)
        }
        ids = attached["full"][1].ids if "full" in attached else part.ids
        texts = read_conversation(model, tokenizer, questions, num_tokens, taps, ids)
        texts = [text for text in texts if text.num_slots > 0]
        if not texts:
            raise ValueError(
                f"the target answers no prompt of --check with more than {DEPTHS} tokens, so "
                "there is nothing to compare with; convert without --check"
            )
        readings = [RESOLVED, Reading("pairing shifted", lag=1), *others]
        rows = [
            measure(attach(x.change, folder, config) if x.change else part, x, texts)
            for x in readings
        ]
    measured = {name: measure(part, x, texts) for name, (x, part) in attached.items()}
    return Report(rows[0], tuple(rows[2:]), len(texts), rows[1], measured)


def measure_acceptance(
    kind: Kind,
    config: Mapping[str, Any],
    weights: Mapping[str, mx.array],
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    questions: Sequence[str] = QUESTIONS,
    num_tokens: int = 96,
) -> Report:
    """Let the target answer with the drafter as it will be saved, under every reading of it.

    Raises ValueError if drafter and target do not fit each other.
    """
    prompts = [encode(tokenizer, [{"role": "user", "content": text}]) for text in questions]
    stops = set(tokenizer.eos_token_ids)

    def measured(reading: Reading, folder: Path) -> Row:
        changed = {**config, **reading.change}
        drafter = kind.load(folder, changed, model, LoadOptions())
        drafter = with_draft_vocab(drafter, changed.get("draft_vocab"), model, tokenizer)
        sizes = {"num_draft_tokens": min(drafter.longest_draft or MOST_DRAFTED, MOST_DRAFTED)}
        sizes |= {"max_tokens": num_tokens}
        stats = Stats()
        for prompt in prompts:
            tokens = mx.array(list(prompt))
            steps = speculative_generate_step(tokens, model, drafter, **sizes, stats=stats)
            for token, _, _ in steps:
                if token in stops:
                    break
        return Row(reading, tuple(stats.acceptance_by_position), stats.mean_acceptance_length)

    readings = kind.readings(config)
    if config.get("draft_vocab") is not None:
        readings = {"full vocabulary": {"draft_vocab": None}} | readings
    with saved(weights) as folder:
        resolved = measured(RESOLVED, folder)
        others = []
        for name, change in readings.items():
            with suppress(ValueError):  # a tap that this target lacks
                others.append(measured(Reading(name, change), folder))
    return Report(resolved, tuple(others), len(prompts))


def load_model(name: str, dtype: str | None = None) -> tuple[nn.Module, TokenizerWrapper]:
    """The target, its floats of type ``dtype``, and its tokenizer; see ``load``."""
    print(f"checking the head against {name} ...", file=sys.stderr)
    return load(name, dtype=dtype)
