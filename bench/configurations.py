"""Configurations of the benchmark: plain decoding and the ways to draft that the flags name."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_eagle.decoding.setup import AUTO
from mlx_eagle.drafters.tree import parse_tree


@dataclass(frozen=True)
class Configuration:
    """A way to decode.

    ``kind``: "plain", "chain", "auto", "copies", "tree", "exact" or "mlx-lm-draft".

    ``size`` is the draft length if it is fixed; ``options`` go to ``stream_generate``;
    ``drafter`` names one of ``Models.drafters``.
    """

    label: str
    kind: str
    size: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    drafter: str = ""


PLAIN = Configuration("plain", "plain")


def make_configurations(
    sizes: Sequence[int | str],
    trees: Sequence[str] = (),
    compares: bool = False,
    copied: Sequence[int | str] = (),
    drafters: Sequence[str] = ("",),
    exact: bool = False,
) -> list[Configuration]:
    """List the configurations: chains, chains with copies, trees, mlx-lm's method at fixed k.

    ``copied`` are the draft lengths with copies from the text, ``compares`` asks for mlx-lm's
    method, ``exact`` for chains and trees that are computed row by row beside the others. Each of
    several ``drafters`` has all configurations, with its name in front.
    """
    found = [chain_of(size) for size in sizes]
    for size in copied:
        chain = chain_of(size)
        found.append(replace(chain, label=f"{chain.label} + lookup", kind="copies"))
    for tree in trees:
        shape = tree if tree == AUTO else parse_tree(tree)
        found.append(Configuration(f"tree {tree}", "tree", None, {"tree": shape}))
    for each in [each for each in found if exact and each.kind != "copies"]:
        options = {**each.options, "exact": True}
        found.append(replace(each, label=f"{each.label}, exact", kind="exact", options=options))
    many = len(drafters) > 1
    found = [
        replace(each, drafter=name, label=f"{name}, {each.label}" if many else each.label)
        for name in drafters
        for each in found
    ]
    if compares:
        for k in [size for size in sizes if size != AUTO and size > 0] or [2]:
            options = {"num_draft_tokens": k}
            found.append(Configuration(f"mlx-lm draft k={k}", "mlx-lm-draft", k, options))
    return found


def chain_of(size: int | str) -> Configuration:
    """Chains of a fixed length, or of the lengths that "auto" picks."""
    options = {"num_draft_tokens": size}
    if isinstance(size, str):
        return Configuration(AUTO, AUTO, None, options)
    return Configuration(f"k={size}", "chain", size, options)
