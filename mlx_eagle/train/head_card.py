"""Model card of a trained head: its recipe, its data and its acceptance."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..convert.publish import WHAT_IT_IS, by_depth, card

USAGE = "mlx_eagle.generate --model TARGET --draft-model THIS_FOLDER --prompt Hello"


def make_card(name: str, facts: Mapping[str, Any]) -> str:
    """Write the card of a head; ``facts`` are those under ``training`` in its ``config.json``."""
    shown = {
        "Target": facts["target"],
        "Began as": facts["init"] or "a fresh head",
        "Sequences": facts["num_sequences"],
        "Batches": f"{facts['iterations']} of {facts['batch_size']}",
        "Tokens seen": facts["trained_tokens"],
        "Draft vocabulary": f"{facts['draft_vocab_size']} tokens, {facts['coverage']:.2%} of the "
        "answers",
        "Recipe": f"loss {facts['loss']}, learning rate {facts['learning_rate']:g}",
    }
    if facts["ttt_steps"]:
        shown["Recipe"] += f", training-time test of {facts['ttt_steps']} steps"
    sections = []
    evaluation = facts["evaluation"]
    if evaluation:
        rows = {
            "match at that depth": evaluation["match"],
            "mean acceptance length": evaluation["lengths"],
        }
        title = f"On {evaluation['num_sequences']} sequences that were held out:"
        sections += [title, _by_depth(rows)]
    generated = facts["generated"]
    if generated:
        rows = {"mean acceptance length": generated["lengths"]}
        if before := facts.get("generated_before"):
            rows = {"mean acceptance length before": before["lengths"]} | rows
        title = (
            f"Decoding {generated['num_answers']} held-out prompts greedily, up to "
            f"{generated['max_tokens']} tokens each:"
        )
        sections += [title, _by_depth(rows)]
    title = f"A draft head {WHAT_IT_IS.format(made='trained')}"
    return card(name, title, shown, [*sections, f"```\n{USAGE}\n```"])


def _by_depth(rows: Mapping[str, Sequence[float]]) -> str:
    """Write a table with figures for each depth k from 1."""
    shown = {name: [f"{figure:.3f}" for figure in figures] for name, figures in rows.items()}
    depths = range(1, len(next(iter(rows.values()))) + 1)
    return by_depth("k", list(map(str, depths)), shown)
