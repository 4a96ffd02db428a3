"""Drafts from multi-token-prediction layers, which some targets are published with.

DeepSeek-AI 2024, arXiv:2412.19437, section 2.2. The layers lie in the target's own checkpoint,
which mlx-lm loads without them, or in a folder of their own. What families call their parts is
in ``mtp_layers.py``.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import CacheList, KVCache

from ..system.json_schema import BOOL, OBJECT, TEXT, Table, check, shown
from ..target.masks_and_ropes import evaluate_ropes
from ..target.stand_in import StandIn
from ..target.tree_attention import each_itself
from .base import Draft, Pick, PickChildren, start_early
from .batch_drafter import HeadBatchDrafter
from .feature_drafter import FeatureDrafter
from .folder import PACKING, SIZE, LoadOptions, Tensors, quantize_now, read_weights
from .mtp_layers import (
    MTPFamily,
    Weights,
    family_named,
    family_of,
    prepared,
    text_args,
    type_of,
    with_final_norms,
)
from .target_checkpoint import holder_of, read_target_config, read_tensors, take_tensors
from .target_parts import TargetSizes, activation_dtype, find_embedding, lm_head_of, sizes_of
from .tree import StaticTree, Tree

FLOAT32 = "e_score_correction_bias"  # what routers add to choose experts: never cast
ROUTER = "mlp.gate"  # which chooses experts: never packed
TRUNK = ("model.layers.", "model.language_model.", "language_model.model.", "backbone.layers.")
FOLDER = (
    {"fc.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight"},
    {"model.eh_proj.weight", "model.enorm.weight", "model.hnorm.weight"},
    {"layers.0.eh_proj.weight", "layers.0.enorm.weight", "layers.0.hnorm.weight"},
    {"mtp_layers.0.input_proj.weight", "mtp_layers.0.token_layernorm.weight"},
)
"""Tensors that only folders of such layers have, of one family or another."""
CONVERTED: Table = {
    "target_type": TEXT,
    "hidden_size": SIZE,
    "vocab_size": SIZE,
    "state_first": BOOL,
    "quantization": PACKING,
}
"""Of a converted folder."""
NEVER_QUANTIZED = (f"{ROUTER}.weight", "mixer.gate.weight")
FORMATS = {mx.float16: "F16", mx.bfloat16: "BF16", mx.float32: "F32"}


class MTPHead(nn.Module):
    """Layers over (embedding of a token, state of the position before it)."""

    def __init__(
        self, layers: list[nn.Module], hidden_size: int, eps: float, arrays: bool = False
    ):
        """``layers`` are mlx-lm's; ``arrays``: whether they take no mask by its name.

        ``chooses`` says whether they attend to slots that an indexer chooses, ``state_first``
        whether the joining matrix takes the state before the embedding.
        """
        super().__init__()
        self.pre_fc_norm_embedding = nn.RMSNorm(hidden_size, eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(hidden_size, eps)
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layers = layers
        self.norm = nn.RMSNorm(hidden_size, eps)
        self._attends = [_has_cache(layer) for layer in layers]
        self._arrays = arrays
        self.state_first = False
        self.chooses = any(isinstance(cache, CacheList) for cache in self.make_cache())

    def make_cache(self) -> list[Any]:
        """A cache for each layer that attends; two in one where it also chooses what it sees."""
        attending = [
            layer for layer, attends in zip(self.layers, self._attends, strict=True) if attends
        ]
        return [_make_cache(layer) for layer in attending]

    def __call__(self, embeddings: mx.array, states: mx.array, caches: list[Any]) -> mx.array:
        """Advance m slots of B requests: embeddings and states (B, m, h) -> states (B, m, h).

        A state is what the output projection takes: the target's, after its final norm, or
        the head's own, which is fed back in its place.
        """
        both = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(states)]
        x = self.fc(mx.concatenate(both[::-1] if self.state_first else both, axis=-1))
        first = caches[0][0] if self.chooses else caches[0]
        mask = create_attention_mask(x, first, return_array=self._arrays)
        left = iter(caches)
        for layer, attends in zip(self.layers, self._attends, strict=True):
            x = layer(x, mask=mask, cache=next(left)) if attends else layer(x)
        states = self.norm(x)
        return states


def _has_cache(layer: nn.Module) -> bool:
    """Whether a layer attends; of blocks with one part each, not all do."""
    return "self_attn" in layer or getattr(layer, "block_type", None) == "*"


def _make_cache(layer: nn.Module) -> Any:
    has_indexer = "indexer" in layer.get("self_attn", {})
    return CacheList(KVCache(), KVCache()) if has_indexer else KVCache()


class MTPDrafter(FeatureDrafter):
    """A ``Drafter`` around MTP layers; embedding and output projection are the target's.

    Slot t joins the token at t + 1 with the target's state at t, after its final norm. Drafted
    slots take the head's own state, and are dropped again.
    """

    head: MTPHead

    def __init__(self, head: MTPHead, target: nn.Module):
        """Raises ValueError where the head is not as wide as the target."""
        embedding, _ = find_embedding(target)
        args = text_args(target)
        width = head.norm.weight.size
        if width != args.hidden_size:
            raise ValueError(
                f"the MTP layer was made for a target of hidden size {width}, but this target's "
                f"is {args.hidden_size}: use the layer from the target's own checkpoint."
            )
        self._embed = embedding
        self._project: Callable[[mx.array], mx.array] = lm_head_of(target, embedding)
        super().__init__(head, (len(target.layers) + 1,), len(head.make_cache()))
        evaluate_ropes(head)

    def make_cache(self) -> list[Any]:
        return [*self.head.make_cache(), KVCache()]

    @property
    def width(self) -> int:
        """The target's hidden size."""
        return self.head.norm.weight.size

    @property
    def dtype(self) -> mx.Dtype:
        return self.head.norm.weight.dtype

    def batch_drafter(self) -> HeadBatchDrafter:
        return HeadBatchDrafter(self)

    def states_of(self, features: mx.array) -> mx.array:
        """They are its states."""
        return features

    def run(self, tokens: mx.array, states: mx.array, caches: list[Any]) -> mx.array:
        return self.head(self._embed(tokens), states, caches)

    def logits(self, states: mx.array) -> mx.array:
        return self._project(states)

    def _absorb(self, tokens: mx.array, features: mx.array, last: mx.array | None) -> mx.array:
        """The state is (1, h)."""
        states = self._forward(tokens, features)
        return states[-1:] if last is None else states[last.reshape(1)]

    def propose(self, size: int, pick: Pick) -> Draft:
        """A chain of ``size`` tokens: one forward for each but the first."""
        states, tokens = self._seed, [self._next(self._first, pick)]
        for _ in range(size - 1):
            start_early(tokens[-1], size)
            states = self._forward(tokens[-1], states)
            tokens.append(self._next(self.logits(states), pick))
        self._drop(self.cache[:-1], size - 1)
        return Draft(mx.concatenate(tokens))

    @property
    def supports_trees(self) -> bool:
        return not self.head.chooses

    def check_tree(self, shape: Tree) -> None:
        if not self.supports_trees:
            raise ValueError(
                "MTP layers that choose what they attend to draft chains only: leave the tree out."
            )

    def propose_tree(self, shape: Tree, pick: PickChildren) -> Draft:
        """A tree: one forward for each level but the first, over all nodes so far.

        Each node's slot stands at its depth, and sees the committed slots and its ancestors.
        """
        stand_in, caches = StandIn(self.head), self.cache[:-1]
        states = self._seed
        taken = [mx.zeros((0,), mx.int32)], [states[:0]]  # tokens and states of all slots so far
        mask, visible = mx.zeros((0, 0), mx.bool_), mx.zeros((1, 0), mx.bool_)

        def step(picked: mx.array, rows: mx.array) -> mx.array:
            nonlocal states, mask, visible
            num, before = picked.shape[0], mask.shape[0]
            visible = mx.concatenate([visible[rows], each_itself(num)], axis=1)
            mask = mx.concatenate([mx.pad(mask, [(0, 0), (0, num)]), visible], axis=0)
            taken[0].append(picked.astype(mx.int32))
            taken[1].append(states[rows])
            self._drop(caches, before)
            self.num_forwards += 1
            with stand_in.tree_attention(caches, mask):
                embeddings = self._embed(mx.concatenate(taken[0]))[None]
                out = stand_in.model(embeddings, mx.concatenate(taken[1])[None], caches)
            states = out[0, before:]
            return self.logits(states)

        grown = shape.grow(self._first, step, lambda logits, count: pick(logits, None, count))
        self._drop(caches, mask.shape[0])
        form = shape.parents if isinstance(shape, StaticTree) else None
        tokens = grown.ids.astype(mx.int32)
        return Draft(tokens, grown.parents, shape.depth, form, grown.draw_index)

    @staticmethod
    def _drop(caches: list[Any], num_slots: int) -> None:
        for cache in caches:
            cache.trim(num_slots)

    def _forward(self, tokens: mx.array, states: mx.array) -> mx.array:
        """One forward over tokens (m,) and states (m, h) -> (m, h)."""
        self.num_forwards += 1
        return self.head(self._embedded(tokens)[None], states[None], self.cache[:-1])[0]

    def _next(self, logits: mx.array, pick: Pick) -> mx.array:
        """The choice from logits (1, V), as a token (1,) int32."""
        return pick(logits, None).astype(mx.int32)


def make_mtp_head(target: nn.Module, names: Collection[str] = ()) -> MTPHead:
    """Layers that fit ``target``, with fresh weights; ``names`` are those of published ones.

    Raises ValueError where the target is not of a family whose layers are known.
    """
    family, args = family_of(target), text_args(target)
    eps = getattr(args, "rms_norm_eps", None) or args.layer_norm_epsilon
    layers = family.make_layers(target, names)
    return MTPHead(layers, args.hidden_size, eps, family.masks_as_arrays)


def load_mtp(
    weights: Mapping[str, mx.array],
    target: nn.Module,
    options: LoadOptions | None = None,
    quantization: Mapping[str, Any] | None = None,
) -> MTPDrafter:
    """A drafter from the MTP layers among ``weights``, the target's own checkpoint or a folder's.

    The checkpoint as its makers published it, not as mlx-lm converts it; other tensors are
    ignored, so a shard can be given as ``mx.load`` reads it. ``quantization`` is what the config
    says of those that are packed. Raises ValueError, in one sentence, where the target has no such
    layer or the tensors are not those of its layer.
    """
    family = family_of(target)
    own = prepared(family.renamed(weights, len(target.layers)), family, target)
    return _drafter_of(own, target, options or LoadOptions(), quantization or {})


def _drafter_of(
    own: Weights, target: nn.Module, options: LoadOptions, quantization: Mapping[str, Any]
) -> MTPDrafter:
    """The drafter of parts as the head has them."""
    family = family_of(target)
    if family.zero_centred:
        own = with_final_norms(own, target)
    head = make_mtp_head(target, own)
    _quantize(head, own, quantization)
    _check(head, own, family)
    head.load_weights(list(own.items()))
    dtype = options.dtype or activation_dtype(find_embedding(target)[0])
    _cast(head, dtype)
    quantize_now(head, quantization, options, kept=ROUTER)
    mx.eval(head.parameters())
    return MTPDrafter(head, target)


def _cast(head: MTPHead, dtype: mx.Dtype) -> None:
    """Give the head's floats one type, but what routers add; packed integers stay."""

    def cast(path: str, array: mx.array) -> mx.array:
        is_float = mx.issubdtype(array.dtype, mx.floating)
        return array.astype(dtype) if is_float and not path.endswith(FLOAT32) else array

    head.update(tree_map_with_path(cast, head.parameters()))


def _quantize(head: MTPHead, weights: Weights, quantization: Mapping[str, Any]) -> None:
    """Pack the modules that ``weights`` have scales for, as the config says of each."""
    usual = {k: v for k, v in quantization.items() if k in ("group_size", "bits", "mode")}

    def packing(path: str, _: nn.Module) -> bool | dict[str, Any]:
        if f"{path}.scales" not in weights:
            return False
        entry = quantization.get(path, quantization.get(f"mtp.{path}", usual))
        if not isinstance(entry, Mapping) or "bits" not in entry:
            raise ValueError(
                f"the MTP layer's {path} is packed, but its config.json says not how: fetch the "
                "folder again."
            )
        return dict(entry)

    nn.quantize(head, class_predicate=packing)


def _check(head: MTPHead, weights: Weights, family: MTPFamily) -> None:
    """Raise ValueError unless these are the tensors of the head."""
    own: Any = tree_flatten(head.parameters())
    expected = {name: array.shape for name, array in own}
    missing, unknown = expected.keys() - weights.keys(), weights.keys() - expected.keys()
    if missing or unknown:
        what = f"lacks mtp.{min(missing)}" if missing else f"has an unknown mtp.{min(unknown)}"
        raise ValueError(
            f"the checkpoint {what}: give the tensors of one MTP layer, as published with this "
            f"target ({family.title})."
        )
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise ValueError(
                f"the checkpoint's mtp.{name} is {weights[name].shape}, but this target's layer "
                f"has {shape}: use the target's own checkpoint."
            )


def recognise(names: Collection[str], config: Mapping[str, Any]) -> bool:
    """Whether these are the tensors of such layers, without the model that they belong to."""
    if any(name.startswith(TRUNK) for name in names):
        return False
    bare = {name.removeprefix("mtp.") for name in names}
    return any(parts <= bare for parts in FOLDER)


def load(
    folder: Path, config: dict[str, Any], model: nn.Module, options: LoadOptions
) -> MTPDrafter:
    """The drafter of a folder of MTP layers, converted or as published; see ``Kind.load``."""
    quantization = config.get("quantization") or {}
    if config.get("kind") is None:
        weights = read_tensors(sorted(folder.glob("*.safetensors")), lambda name: True)
        return load_mtp(weights, model, options, quantization)
    made_for(config, folder / "config.json", sizes_of(model))
    drafter = _drafter_of(read_weights(folder), model, options, quantization)
    drafter.head.state_first = config.get("state_first") is True
    return drafter


def convert(tensors: Tensors, config: Mapping[str, Any]) -> tuple[dict[str, Any], Tensors]:
    """See ``Kind.convert``: layers of a target's own checkpoint, or a folder of them.

    Norms are left as they are stored, for only a target at hand tells what they hold.
    """
    target = _target_of(config)
    family, num_layers = family_of(target), len(target.layers)
    arrays = {name: tensor.read() for name, tensor in tensors.items()}
    own = prepared(family.renamed(arrays, num_layers), family, target)
    _check(make_mtp_head(target, own), own, family)
    made = {
        "target_type": type_of(target),
        "hidden_size": text_args(target).hidden_size,
        "vocab_size": text_args(target).vocab_size,
        "state_first": False,
    }
    return made, {name: _AtHand(array) for name, array in own.items()}


@dataclass(frozen=True)
class _AtHand:
    """A tensor that is an array already."""

    array: mx.array

    @property
    def format(self) -> str:
        return FORMATS.get(self.array.dtype, "F32")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def size(self) -> int:
        return self.array.size

    def read(self) -> mx.array:
        """The array."""
        return self.array


def readings(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The other order of what the matrix joins; see ``Kind.readings``."""
    return {"state before embedding": {"state_first": not config["state_first"]}}


def parts_of(config: Mapping[str, Any]) -> Callable[[str], bool] | None:
    """Which tensors are such layers in the checkpoint of a target; see ``Kind.parts_of``."""
    text = config.get("text_config") or config
    family = family_named(config.get("model_type"))
    num_layers = text.get("num_hidden_layers") if isinstance(text, Mapping) else None
    if family is None or not family.raw or not isinstance(num_layers, int):
        return None
    return lambda name: family.is_part(name, num_layers)


def _target_of(config: Mapping[str, Any]) -> nn.Module:
    """A target without weights, by its config, or by that of a folder of its layers.

    Raises ValueError where that does not say it.
    """
    check(config, {"text_config": OBJECT, "transformer_layer_config": OBJECT}, "config.json")
    text = config.get("text_config") or config.get("transformer_layer_config") or {}
    spoken = [text.get("model_type"), config.get("model_type")]
    names = [str(name).removesuffix("_mtp").removesuffix("_text") for name in spoken]
    model_type = next((name for name in names if family_named(name) is not None), None)
    if model_type is None:
        raise ValueError(
            f"config.json has model_type {shown(spoken[1])}, which says not what model these MTP "
            "layers are for: add the model's own config as text_config"
        )
    settings = {**text, **config, "model_type": model_type} | (
        {"text_config": text} if text else {}
    )
    module: Any = import_module(f"mlx_lm.models.{model_type}")
    try:
        target: nn.Module = module.Model(module.ModelArgs.from_dict(settings))
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as err:
        raise ValueError(
            f"config.json does not describe a {model_type} model ({err}): take the one that the "
            "model was published with"
        ) from err
    return target


def by_name(model: nn.Module, options: LoadOptions) -> MTPDrafter:
    """The layers in the target's own checkpoint, or in the one that it was made from."""
    family, num_layers = family_of(model), len(model.layers)
    if options.target is None:
        raise ValueError(
            "the MTP layers are in the target's own checkpoint, and nobody says where that is: "
            "give its folder or repository as `target`."
        )
    weights, _ = take_tensors(options.target, lambda name: family.is_part(name, num_layers))
    return load_mtp(weights, model, options)


def comes_with(target: str) -> bool:
    """Whether such layers are in a checkpoint, or in that which it was converted from."""
    try:
        is_part = parts_of(read_target_config(target))
        return is_part is not None and holder_of(target, is_part) is not None
    except (OSError, ValueError):
        return False  # whoever opens the target is told why


def made_for(config: dict[str, Any], where: Path, target: TargetSizes | None) -> str:
    """The sizes of its targets, where it is converted; see ``Kind.made_for``."""
    check(config, CONVERTED, where)
    if config.get("kind") is None:
        return "for the target it was published with"
    missing = [key for key in CONVERTED if key != "quantization" and config.get(key) is None]
    if missing:
        raise ValueError(f"{where} has no {missing[0]}: convert the layers again.")
    if target is not None and target.hidden_size != config["hidden_size"]:
        raise ValueError(
            f"the MTP layers were made for a target of hidden size {config['hidden_size']}, but "
            f"this target's is {target.hidden_size}: use those made for this model."
        )
    return f"for targets of hidden size {config['hidden_size']} with {config['vocab_size']} tokens"
