"""Configurations of the benchmark: plain decoding and the ways to draft that the flags name."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_eagle.decoding.setup import AUTO
from mlx_eagle.drafters.tree import parse_tree

from .flags import Settings


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
    settings: Settings, drafters: Iterable[str] = ("",), compares: bool = False
) -> list[Configuration]:
    """List the configurations: chains, chains with copies, trees, mlx-lm's method at fixed k.

    With ``settings.exact``, chains and trees that are computed row by row stand beside the
    others. Each of several ``drafters`` has all configurations, with its name in front;
    ``compares`` asks for mlx-lm's method.
    """
    found = [chain_of(size) for size in settings.sizes]
    for size in settings.copied:
        chain = chain_of(size)
        found.append(replace(chain, label=f"{chain.label} + lookup", kind="copies"))
    for tree in settings.trees:
        shape = tree if tree == AUTO else parse_tree(tree)
        found.append(Configuration(f"tree {tree}", "tree", None, {"tree": shape}))
    for each in [each for each in found if settings.exact and each.kind != "copies"]:
        options = {**each.options, "exact": True}
        found.append(replace(each, label=f"{each.label}, exact", kind="exact", options=options))
    names = list(drafters)
    found = [
        replace(each, drafter=name, label=f"{name}, {each.label}" if names[1:] else each.label)
        for name in names
        for each in found
    ]
    if compares:
        for k in [size for size in settings.sizes if size not in (AUTO, 0)] or [2]:
            options = {"num_draft_tokens": k}
            found.append(Configuration(f"mlx-lm draft k={k}", "mlx-lm-draft", k, options))
    return found


def chain_of(size: int | str) -> Configuration:
    """Chains of a fixed length, or of the lengths that "auto" picks."""
    options = {"num_draft_tokens": size}
    if isinstance(size, str):
        return Configuration(AUTO, AUTO, None, options)
    return Configuration(f"k={size}", "chain", size, options)
