"""Families of multi-token-prediction layers: which tensors they have and what they are built of.

Published files name the same few parts in many ways: two norms, a matrix that joins embedding and
state, layers of the target's own kind, and a norm at the end. A row says how a family calls them.
Layers are mlx-lm's own classes, and what these want of the tensors the target's own ``sanitize``
does, as if they were those of one of its layers.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import CacheList, KVCache

Weights = dict[str, mx.array]
Stored = TypeVar("Stored")
Layer = Callable[..., nn.Module]
Names = tuple[tuple[str, str | None], ...]
"""Patterns of published names, and what stands for what they match; None: not needed."""

EMBEDDING_NORM = "pre_fc_norm_embedding."
STATE_NORM = "pre_fc_norm_hidden."
JOIN = "fc."
COMPARED = (
    "layers.0.input_layernorm.weight",
    "layers.0.post_attention_layernorm.weight",
    "layers.0.self_attn.q_norm.weight",
    "layers.0.self_attn.k_norm.weight",
)
EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "layernorm_epsilon")
FAR = 4.0  # times nearer, to be another kind of norm than the others in its file


@dataclass(frozen=True)
class MTPFamily:
    """Targets whose layers are published in the same way.

    ``raw`` are the names in a target's checkpoint, in which {N} is how many layers the target
    has and {N+1} one more, ``folder`` those in a folder of only these layers, as mlx-vlm
    writes it.
    """

    title: str
    model_types: tuple[str, ...]
    raw: Names
    folder: Names
    make_layers: Callable[[Layer, Any, int, Collection[str]], list[nn.Module]]
    """Layers by the class and the arguments of the target's, their index and published names."""
    trunk: str | None = None
    """Name of the layers in the target's ``sanitize``; None: experts are stacked here."""
    state_first: bool = False
    """Whether the joining matrix takes the state before the embedding."""
    zero_centred: bool = False
    """Whether published norms hold their weight less one."""
    masks_as_arrays: bool = False
    """Whether attention takes no mask by its name."""
    is_stepped: bool = False
    """Whether each layer predicts one token further, from states before the target's last norm."""
    is_chained: bool = True
    """Whether such a layer takes the state of the one before; else all take the target's."""

    def renamed(self, weights: Mapping[str, Stored], num_layers: int) -> dict[str, Stored]:
        """The parts of the layers under their names here; nothing else."""
        own = any(self.is_part(name, num_layers) for name in weights)
        found: dict[str, Stored] = {}
        for name, array in weights.items():
            new = self._new_name(name, self.raw if own else self.folder, num_layers)
            if new is not None:
                found[new] = array
        return found

    def is_part(self, name: str, num_layers: int) -> bool:
        """Whether a tensor of the target's checkpoint is one of theirs."""
        return self._new_name(name, self.raw, num_layers) is not None

    def _new_name(self, name: str, names: Names, num_layers: int) -> str | None:
        for pattern, new in names:
            here = re.sub(r"\{N\+?(\d*)\}", lambda m: str(num_layers + int(m[1] or 0)), pattern)
            match = re.match(here, name)
            if match is not None:
                return None if new is None else match.expand(new) + name[match.end() :]
        return None


def text_args(target: nn.Module) -> Any:
    """The arguments of the target's text model."""
    return (target.language_model if "language_model" in target else target).args


def _attending(layer: Layer, args: Any, first: int, names: Collection[str]) -> list[nn.Module]:
    """A layer with full attention, of a target that has it every few layers.

    Raises ValueError where there are several.
    """
    if any(name.startswith("layers.1.") for name in names):
        raise ValueError(
            "the checkpoint has several MTP layers, and of a "
            f"{args.model_type.removesuffix('_text')} model one is read, which is run again for "
            "each token: use a head made for it, or --draft-model lookup."
        )
    return [layer(args, args.full_attention_interval - 1)]


def _blocks(layer: Layer, args: Any, first: int, names: Collection[str]) -> list[nn.Module]:
    """Blocks of the kinds that their tensors tell."""
    kinds = {"q_proj": "*", "gate": "E", "in_proj": "M", "up_proj": "-"}
    found: dict[int, str] = {}
    for name in sorted(names):
        match = re.match(r"layers\.(\d+)\.mixer\.(\w+)", name)
        if match is not None and match[2] in kinds:
            found.setdefault(int(match[1]), kinds[match[2]])
    return [layer(args, found[index]) for index in sorted(found)]


def _num_steps(names: Collection[str]) -> int:
    """Number of layers that predict a token each; the published one if no names tell."""
    return len({name.split(".")[1] for name in names if name.startswith("steps.")}) or MOST_STEPS


def _next_few(layer: Layer, args: Any, first: int, names: Collection[str]) -> list[nn.Module]:
    """The layers that would come next; ValueError where the config says nothing of them."""
    try:
        return [layer(args, first + j) for j in range(_num_steps(names))]
    except IndexError as err:
        raise ValueError(
            f"the target's config.json describes its {first} layers and not the MTP layers behind "
            "them: take the one that the model was published with."
        ) from err


def _sliding(layer: Layer, args: Any, first: int, names: Collection[str]) -> list[nn.Module]:
    """Dense layers that attend to a window."""
    return [layer(args, is_moe=False, is_sliding_window=True) for _ in range(_num_steps(names))]


def window_of(layer: nn.Module, args: Any) -> int | None:
    """Number of slots that a layer sees; None: all."""
    if not (getattr(layer, "is_sliding", False) or getattr(layer, "is_sliding_window", False)):
        return None
    size: int = getattr(args, "sliding_window", None) or args.sliding_window_size
    return size


def _after(prefix: str, new: str = "") -> Names:
    """The names of DeepSeek's layers behind a prefix, and what stands before the new ones."""
    return (
        (rf"{prefix}enorm\.", new + EMBEDDING_NORM),
        (rf"{prefix}hnorm\.", new + STATE_NORM),
        (rf"{prefix}eh_proj\.", new + JOIN),
    )


def _by_speculators(prefix: str) -> Names:
    """The names of MiMo's layer and of speculators' behind a prefix."""
    own = rf"{prefix}mtp_layers\.0\."
    return (
        (rf"{own}token_layernorm\.", EMBEDDING_NORM),
        (rf"{own}hidden_layernorm\.", STATE_NORM),
        (rf"{own}input_proj\.", JOIN),
        (rf"{own}final_layernorm\.", "norm."),
        (own, "layers.0."),
    )


NEXT = r"model\.layers\.{N}\."
QWEN = r"(fc|pre_fc_norm_embedding|pre_fc_norm_hidden|norm|layers\.\d+)\."
NEMOTRON = (
    (r"(?:mtp\.)?layers\.\d+\.[\w.]*\.[kv]_scale$", None),
    *_after(r"(?:mtp\.)?layers\.0\."),
    (r"(?:mtp\.)?layers\.\d+\.final_layernorm\.", "norm."),
    (r"(?:mtp\.)?(layers\.\d+)\.", r"\1."),
)

MOST_STEPS = 3  # layers that Step 3.5 and MiMo-V2-Flash are published with


def _of_step(index: int) -> Names:
    """The names of Step's layer number ``index``, which has a matrix of logits of its own."""
    layer = rf"model\.layers\.{{N+{index}}}\.(?:transformer\.)?"
    new = f"steps.{index}."
    return (
        *_after(layer, new),
        (rf"{layer}shared_head\.norm\.", f"{new}norm."),
        (rf"{layer}shared_head\.(?:output|head)\.", f"{new}lm_head."),
        (rf"{layer}embed_tokens\.", None),
        (layer, f"{new}layers.0."),
    )


MIMO_V2 = r"model\.mtp\.layers\.(\d)\."

FAMILIES = (
    MTPFamily(
        "Qwen3-Next and Qwen3.5",
        ("qwen3_next", "qwen3_5", "qwen3_5_moe"),
        raw=((rf"(?:language_model\.)?mtp\.{QWEN}", r"\1."),),
        folder=((QWEN, r"\1."), *_by_speculators("")),
        make_layers=_attending,
        zero_centred=True,
    ),
    MTPFamily(
        "DeepSeek-V3 and GLM-4 and 5",
        ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
        raw=(
            *_after(NEXT),
            (rf"{NEXT}shared_head\.norm\.", "norm."),
            # Copies of the target's own tables.
            (rf"{NEXT}(?:embed_tokens|shared_head\.head)\.", None),
            (NEXT, "layers.0."),
        ),
        folder=(
            *_after(r"model\."),
            (r"model\.shared_head_norm\.", "norm."),
            (r"model\.mtp_block\.", "layers.0."),
        ),
        make_layers=lambda layer, args, first, _: [layer(args, first)],
        trunk="model.layers.",
        masks_as_arrays=True,
    ),
    MTPFamily(
        "MiMo",
        ("mimo",),
        raw=_by_speculators(r"model\."),
        folder=(),
        make_layers=lambda layer, args, *_: [layer(args)],
        trunk="model.layers.",
        state_first=True,
    ),
    MTPFamily(
        "Qwen3, trained with speculators",
        ("qwen3",),
        raw=(),
        folder=_by_speculators(""),
        make_layers=lambda layer, args, *_: [layer(args)],
    ),
    MTPFamily(
        "Nemotron-H",
        ("nemotron_h",),
        raw=tuple((pattern.replace("(?:mtp\\.)?", "mtp\\."), new) for pattern, new in NEMOTRON),
        folder=NEMOTRON,
        make_layers=_blocks,
        trunk="backbone.layers.",
    ),
    MTPFamily(
        "Step 3.5",
        ("step3p5",),
        raw=tuple(name for index in range(MOST_STEPS) for name in _of_step(index)),
        folder=(),
        make_layers=_next_few,
        zero_centred=True,
        is_stepped=True,
    ),
    MTPFamily(
        "MiMo-V2-Flash",
        ("mimo_v2_flash",),
        raw=(
            *_after(MIMO_V2, r"steps.\1."),
            (rf"{MIMO_V2}final_layernorm\.", r"steps.\1.norm."),
            (rf"{MIMO_V2}pre_mlp_layernorm\.", r"steps.\1.layers.0.post_attention_layernorm."),
            (MIMO_V2, r"steps.\1.layers.0."),
        ),
        folder=(),
        make_layers=_sliding,
        trunk="model.layers.",
        is_stepped=True,
        is_chained=False,
    ),
)


def family_named(model_type: Any) -> MTPFamily | None:
    """The family of targets of that ``model_type``; None where none is known."""
    return next((family for family in FAMILIES if model_type in family.model_types), None)


def type_of(target: nn.Module) -> str:
    """The target's ``model_type``."""
    return str(getattr(target, "model_type", None) or target.args.model_type)


def family_of(target: nn.Module) -> MTPFamily:
    """The family of the target's layers; ValueError where none is known."""
    model_type = type_of(target)
    family = family_named(model_type)
    if family is not None:
        return family
    known = ", ".join(f"{family.title} ({', '.join(family.model_types)})" for family in FAMILIES)
    raise ValueError(
        f"the target is a {model_type} model: MTP layers are known for {known}; use a head made "
        "for it, or --draft-model lookup."
    )


class MTPHead(nn.Module):
    """Layers over (embedding of a token, state of the position before it)."""

    def __init__(
        self, layers: list[nn.Module], hidden_size: int, eps: float, arrays: bool = False
    ):
        """``layers`` are mlx-lm's; ``arrays``: whether they take no mask by its name.

        ``chooses`` says whether they attend to slots that an indexer chooses, ``state_first``
        whether the joining matrix takes the state before the embedding, ``state_normed`` whether
        states are those behind a norm, the target's and the head's own.
        """
        super().__init__()
        self.pre_fc_norm_embedding = nn.RMSNorm(hidden_size, eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(hidden_size, eps)
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layers = layers
        self.norm = nn.RMSNorm(hidden_size, eps)
        # Of blocks with one part each, not all attend.
        self._attends = [
            "self_attn" in layer or getattr(layer, "block_type", None) == "*" for layer in layers
        ]
        self._arrays = arrays
        self.state_first = False
        self.state_normed = True
        self.chooses = any(isinstance(cache, CacheList) for cache in self.make_cache())

    def make_cache(self) -> list[Any]:
        """A cache for each layer that attends; two in one where it also chooses what it sees."""
        made: list[Any] = []
        for layer, attends in zip(self.layers, self._attends, strict=True):
            if attends:
                has_indexer = "indexer" in layer.get("self_attn", {})
                made.append(CacheList(KVCache(), KVCache()) if has_indexer else KVCache())
        return made

    def __call__(self, embeddings: mx.array, hidden: mx.array, caches: list[Any]) -> mx.array:
        """Advance m slots of B requests: embeddings and states (B, m, h) -> states (B, m, h).

        A state is the target's, or the head's own, which is fed back in its place.
        """
        x = self.join(embeddings, hidden)
        first = caches[0][0] if self.chooses else caches[0]
        mask = create_attention_mask(x, first, return_array=self._arrays)
        left = iter(caches)
        for layer, attends in zip(self.layers, self._attends, strict=True):
            x = layer(x, mask=mask, cache=next(left)) if attends else layer(x)
        hidden = self.norm(x) if self.state_normed else x
        return hidden

    def join(self, embeddings: mx.array, hidden: mx.array) -> mx.array:
        """Input of the layers: both through a norm each, side by side, then the matrix."""
        both = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)]
        return self.fc(mx.concatenate(both[::-1] if self.state_first else both, axis=-1))


class MTPSteps(nn.Module):
    """Layers of which each predicts one token further than the one before.

    Slot i of layer j joins the token at i + 1 with what the layer before passes on from slot
    i - 1, so that all caches have a slot for each token; the first j of layer j stand for
    nothing, and none but themselves sees them. Of the first layer it is the target's state.
    """

    def __init__(self, steps: list[MTPHead], windows: list[int | None], chained: bool):
        """``windows`` are how many slots each sees, None: all.

        ``chained``: whether a layer passes on what it made; otherwise all are given the target's
        states. ``state_normed``: whether the target's, and what is passed on, are behind a norm.
        """
        super().__init__()
        self.steps = steps
        self.chained = chained
        self.state_normed = False
        self._windows = windows

    @property
    def layers(self) -> list[nn.Module]:
        return [layer for step in self.steps for layer in step.layers]

    @property
    def norm(self) -> Any:
        """The first layer's."""
        return self.steps[0].norm

    chooses = True  # so no trees: which layer a slot is for depends on its depth

    def make_cache(self) -> list[Any]:
        return [KVCache() for _ in self.steps]

    def advance(
        self, index: int, embeddings: mx.array, hidden: mx.array, cache: KVCache
    ) -> tuple[mx.array, mx.array]:
        """Advance m slots of a layer: embeddings and hidden states (m, h).

        Returns what was made and what is passed on, (m, h) each.
        """
        step: MTPHead = self.steps[index]
        start = cache.offset
        num = len(hidden)
        rows = mx.arange(start, start + num)[:, None]
        slots = mx.arange(start + num)[None]
        mask = (slots <= rows) & ((slots >= index) | (slots == rows))
        window = self._windows[index]
        if window is not None:
            mask = mask & (slots > rows - window)
        x = step.join(embeddings, hidden)[None]
        made: mx.array = step.layers[0](x, mask=mask, cache=cache)[0]
        if not self.chained:
            return made, hidden
        return made, step.norm(made) if self.state_normed else made


def make_mtp_head(target: nn.Module, names: Collection[str] = ()) -> MTPHead | MTPSteps:
    """Layers that fit ``target``, with fresh weights; ``names`` are those of published ones.

    Raises ValueError where the target is not of a family whose layers are known.
    """
    family = family_of(target)
    args = text_args(target)
    eps = next(getattr(args, name) for name in EPSILONS if getattr(args, name, None))
    layers = family.make_layers(type(target.layers[-1]), args, len(target.layers), names)
    if not family.is_stepped:
        return MTPHead(layers, args.hidden_size, eps, family.masks_as_arrays)
    steps = [MTPHead([layer], args.hidden_size, eps) for layer in layers]
    for index, step in enumerate(steps):
        if any(name.startswith(f"steps.{index}.lm_head.") for name in names):
            step.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)
    return MTPSteps(steps, [window_of(layer, args) for layer in layers], family.is_chained)


def each_step(weights: Weights, change: Callable[[Weights], Weights]) -> Weights:
    """``change`` made to the parts of each layer that predicts a token, or to all at once."""
    by_step: dict[str, Weights] = {}
    for name, array in weights.items():
        step = re.match(r"steps\.\d+\.", name)
        start = step[0] if step is not None else ""
        by_step.setdefault(start, {})[name.removeprefix(start)] = array
    return {
        start + name: array
        for start, tensors in by_step.items()
        for name, array in change(tensors).items()
    }


def prepared(weights: Weights, family: MTPFamily, target: nn.Module) -> Weights:
    """Weights as mlx-lm's layers hold them: experts stacked, projections split."""
    return each_step(weights, lambda part: _prepared(part, family, target))


def _prepared(weights: Weights, family: MTPFamily, target: nn.Module) -> Weights:
    if family.trunk is None:
        weights = stack_experts(weights)
    else:
        own = "layers."
        theirs = family.trunk
        inner = {n.replace(own, theirs, 1): w for n, w in weights.items() if n.startswith(own)}
        outer = {n: w for n, w in weights.items() if not n.startswith(own)}
        inner = target.sanitize(inner)
        weights = outer | {n.replace(theirs, own, 1): w for n, w in inner.items()}
    if family.state_first:
        for name in [name for name in weights if name.startswith(JOIN)]:
            first, second = mx.split(weights[name], 2, axis=-1)
            weights[name] = mx.concatenate([second, first], axis=-1)
    return weights


def stack_experts(weights: Weights) -> Weights:
    """Experts as mlx-lm holds them, (E, out, in), from one tensor each or fused ones."""
    weights = dict(weights)
    mlp = "layers.0.mlp"
    stacked = {}
    if f"{mlp}.experts.gate_up_proj" in weights:
        gate_up = weights.pop(f"{mlp}.experts.gate_up_proj")
        stacked["gate_proj"], stacked["up_proj"] = mx.split(gate_up, 2, axis=-2)
    if f"{mlp}.experts.down_proj" in weights:
        stacked["down_proj"] = weights.pop(f"{mlp}.experts.down_proj")
    for name in ("gate_proj", "up_proj", "down_proj"):
        experts: list[mx.array] = []
        while f"{mlp}.experts.{len(experts)}.{name}.weight" in weights:
            experts.append(weights.pop(f"{mlp}.experts.{len(experts)}.{name}.weight"))
        if experts:
            stacked[name] = mx.stack(experts)
    return weights | {f"{mlp}.switch_mlp.{name}.weight": w for name, w in stacked.items()}


def with_final_norms(weights: Weights, target: nn.Module) -> Weights:
    """Norms as they are multiplied with: some files hold them less one, and some hold both kinds.

    Those of the layer, compared with the target's own of the same names, decide together which
    reading is nearer. The two norms before the matrix follow them, for in either reading they may
    be small, and so does the last one, unless the other reading is ``FAR`` nearer: less one, those
    of Qwen3.5's 27B and 4B have means of 1.25 and 2.58. One is added in float32.
    """
    layers = [layer for layer in target.layers if "self_attn" in layer]
    text = target.language_model if "language_model" in target else target
    compared = [name for name in COMPARED if name in weights]
    gain = 0.0
    for name in compared:
        path = name.removeprefix("layers.0.").split(".")
        own = [_mean(reduce(getitem, path, layer)) for layer in layers]
        as_it_is, with_one = _distances(weights[name], sum(own) / len(own))
        gain += as_it_is - with_one
    raw = {*compared, f"{EMBEDDING_NORM}weight", f"{STATE_NORM}weight"} if gain > 0 else set()
    if "norm.weight" in weights:
        as_it_is, with_one = _distances(weights["norm.weight"], _mean(text.model.norm.weight))
        limit = FAR if gain > 0 else 1 / FAR if gain < 0 else 1.0
        if with_one < limit * as_it_is:
            raw.add("norm.weight")
    return {n: w.astype(mx.float32) + 1.0 if n in raw else w for n, w in weights.items()}


def _distances(weight: mx.array, own: float) -> tuple[float, float]:
    """The distances of a norm's mean, and of one more, from the mean of the target's own."""
    mean = _mean(weight)
    return abs(mean - own), abs(mean + 1 - own)


def _mean(weight: mx.array) -> float:
    found: Any = weight.astype(mx.float32).mean().item()
    return float(found)
