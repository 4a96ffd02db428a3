"""Drafts from multi-token-prediction layers, which some targets are published with.

DeepSeek-AI 2024, arXiv:2412.19437, section 2.2. One layer is run again for each token. Of several,
as Step 3.5 and MiMo-V2-Flash have them, layer j predicts the token that is j + 2 behind the
position whose state it starts from (equation 21). The layers lie in the target's own checkpoint,
which mlx-lm loads without them, or in a folder of their own. What families call their parts is in
``mtp_layers.py``.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, trim_prompt_cache

from ..system.fields import BOOL, OBJECT, TEXT, check, shown
from ..target_model.stand_in import StandIn
from .base import BatchDrafter, Draft, Pick, PickChildren, row_at, start_early
from .feature_drafter import FeatureDrafter, last_features
from .folder import (
    FolderConfig,
    building,
    check_tensors,
    quantize_as_stored,
    read_weights,
    shapes_of,
)
from .kind import LoadOptions, Tensor, Tensors
from .mtp_layers import (
    JOIN,
    MTPHead,
    MTPSteps,
    Weights,
    each_step,
    family_named,
    family_of,
    make_mtp_head,
    prepared,
    text_args,
    type_of,
    with_final_norms,
)
from .quantize import Quantization, quantize_now
from .target_parts import (
    TargetSizes,
    activation_dtype,
    find_embedding,
    lm_head_of,
    read_tensors,
    sizes_of,
    take_tensors,
)
from .tree import Tree, check_tree_width

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
NEVER_QUANTIZED = (f"{ROUTER}.weight", "mixer.gate.weight")
FORMATS = {mx.float16: "F16", mx.bfloat16: "BF16", mx.float32: "F32"}


@dataclass(frozen=True, kw_only=True)
class MTPConfig(FolderConfig):
    """The ``config.json`` of converted layers; the flags are as in ``MTPHead``."""

    target_type: Annotated[str, TEXT]
    state_first: bool
    state_normed: Annotated[bool | None, BOOL] = None

    def check_fit(self, target: TargetSizes) -> None:
        target.check_width("MTP layer", self.hidden_size)


class MTPDrafter(FeatureDrafter):
    """A ``Drafter`` around MTP layers; embedding and output projection are the target's.

    Slot t joins the token at t + 1 with the target's state at t, after its final norm unless
    ``take_hidden`` says otherwise. Drafted slots take the head's own state, and are dropped again.
    """

    head: Any
    """An ``MTPHead``."""

    def __init__(self, head: nn.Module, target: nn.Module):
        """Raises ValueError where the head is not as wide as the target."""
        embedding, _ = find_embedding(target)
        sizes_of(target).check_width("MTP layer", head.norm.weight.size)
        self._embed = embedding
        self._project: Callable[[mx.array], mx.array] = lm_head_of(target, embedding)
        self._num_target_layers = len(target.layers)
        taps = (self._num_target_layers + 1,)
        width = int(head.norm.weight.size)
        super().__init__(head, taps, len(head.make_cache()), width)
        self.take_hidden(head.state_normed)

    def take_hidden(self, is_normed: bool) -> None:
        """Draft from states behind the last norm, the target's and the head's, or before it."""
        self.head.state_normed = is_normed
        self.taps = (self._num_target_layers + int(is_normed),)

    def make_cache(self) -> list[Any]:
        return [*self.head.make_cache(), KVCache()]

    def _start(self, cache: list[Any]) -> None:
        super()._start(cache)
        self.__dict__.pop("_stand_in", None)

    @cached_property
    def _stand_in(self) -> StandIn:
        """The head's stand-in of this request."""
        return StandIn(self.head)

    def forward(self, embeddings: mx.array, hidden: mx.array, caches: list[Any]) -> mx.array:
        with self._stand_in.absorbed.absorbing():
            made: mx.array = self._stand_in.model(embeddings, hidden, caches)
        return made

    def logits(self, hidden: mx.array) -> mx.array:
        normed = hidden if self.head.state_normed else self.head.norm(hidden)
        return self.project(self._project, normed)

    def _absorb(self, tokens: mx.array, features: mx.array, last: mx.array | None) -> mx.array:
        """The state is (1, h)."""
        return row_at(self._forward(tokens, features), last)

    def propose(self, size: int, pick: Pick) -> Draft:
        """A chain of ``size`` tokens: see ``chain``."""
        tokens = self.chain(size, pick, self._forward)
        trim_prompt_cache(self.cache[:-1], size - 1)
        return Draft(mx.concatenate(tokens))

    @property
    def supports_trees(self) -> bool:
        return not self.head.chooses

    def check_tree(self, shape: Tree) -> None:
        if not self.supports_trees:
            raise ValueError("these MTP layers draft chains only: leave the tree out.")
        if self.num_drafted is not None:
            check_tree_width(shape, self.num_drafted)

    def propose_tree(self, shape: Tree, pick: PickChildren) -> Draft:
        """A tree: one forward for each level but the first, over all nodes so far.

        Each node's slot stands at its depth, and sees the committed slots and its ancestors.
        """
        caches = self.cache[:-1]
        all_tokens: list[mx.array] = []
        all_hidden: list[mx.array] = []
        mask = mx.zeros((0, 0), mx.bool_)

        def forward(tokens: mx.array, hidden: mx.array, visible: mx.array) -> mx.array:
            nonlocal mask
            before = mask.shape[0]
            mask = mx.pad(mask, [(0, 0), (0, tokens.shape[0])])
            mask = mx.concatenate([mask, visible], axis=0)
            all_tokens.append(tokens)
            all_hidden.append(hidden)
            trim_prompt_cache(caches, before)
            with self._stand_in.tree_attention(caches, mask):
                made = self._forward(mx.concatenate(all_tokens), mx.concatenate(all_hidden))
            return made[before:]

        draft = self.branched(shape, pick, forward)
        trim_prompt_cache(caches, mask.shape[0])
        return draft

    def _forward(self, tokens: mx.array, hidden: mx.array) -> mx.array:
        """One forward over tokens (m,) and hidden states (m, h) -> (m, h)."""
        self.num_forwards += 1
        return self.forward(self._embedded(tokens)[None], hidden[None], self.cache[:-1])[0]


class SteppedMTPDrafter(MTPDrafter):
    """A ``Drafter`` around layers of which each drafts one token.

    What starts a draft is what the first layer made in the last slot, and below that what each
    layer but the last passes on from there: (n, h) for n layers. Between requests the cache of
    the last position's features holds what was passed on there as well, side by side.
    """

    head: MTPSteps

    def _start(self, cache: list[Any]) -> None:
        super()._start(cache)
        # Of the latest two calls of extend: slots before it, and what was passed on from the last
        # of these and from its own ones, (n - 1, m, h). A round in flight may be dropped whole.
        self._passed: list[tuple[int, mx.array]] = []

    def save_last_features(self, features: mx.array) -> None:
        """Save features (1, h), and what the layers pass on from the last slot that is left."""
        passed = mx.zeros((len(self.head.steps) - 1, features.shape[1]), features.dtype)
        for start, rows in self._passed:
            slot = self.cache[0].offset - start
            if 0 <= slot < rows.shape[1]:
                passed = rows[:, slot]
        super().save_last_features(mx.concatenate([features, passed]).reshape(1, -1))

    def _passed_before(self, width: int) -> mx.array:
        """States (n - 1, h) that each layer but the last passed on from the last slot."""
        if self._seed.size:
            return self._seed[1:]
        saved = last_features(self.cache[-1])
        if saved is None or saved.shape[1] != len(self.head.steps) * width:
            return mx.zeros((len(self.head.steps) - 1, width))
        return saved.reshape(-1, width)[1:]

    @property
    def longest_draft(self) -> int:
        return len(self.head.steps)

    def batch_drafter(self) -> BatchDrafter | None:
        return None

    def logits(self, hidden: mx.array) -> mx.array:
        return self._logits_of(0, hidden[:1])

    def _logits_of(self, index: int, made: mx.array) -> mx.array:
        step = self.head.steps[index]
        output = step.lm_head if "lm_head" in step else self._project
        return self.project(output, step.norm(made))

    def _advance(
        self, index: int, tokens: mx.array, hidden: mx.array
    ) -> tuple[mx.array, mx.array]:
        self.num_forwards += 1
        return self.head.advance(index, self._embedded(tokens), hidden, self.cache[index])

    def _absorb(self, tokens: mx.array, features: mx.array, last: mx.array | None) -> mx.array:
        num = len(self.head.steps)
        before = self._passed_before(features.shape[1])
        num_before = self.cache[0].offset
        hidden = features
        seed = []
        passed_on = []
        for index in range(num):
            made, passed = self._advance(index, tokens, hidden)
            if index == 0:
                seed.append(row_at(made, last))
            if index < num - 1:
                seed.append(row_at(passed, last))
                rows = mx.concatenate([before[index : index + 1].astype(passed.dtype), passed])
                passed_on.append(rows)
                hidden = rows[:-1]
        made_last = mx.concatenate(seed)
        if last is None:  # all of it stays
            latest = num_before + len(tokens), made_last[1:, None]
        else:
            latest = num_before, mx.stack(passed_on)
        self._passed = [*self._passed[-1:], latest]
        return made_last

    def propose(self, size: int, pick: Pick) -> Draft:
        """A chain of ``size`` tokens, or as many as there are layers.

        Layer j advances j slots, whose tokens were drafted by those before.
        """
        size = min(size, self.longest_draft)
        tokens = [self.choose(self._first, pick)]
        passed = self._seed[:0]
        for index in range(1, size):
            start_early(tokens[-1], size)
            hidden = mx.concatenate([self._seed[index : index + 1], passed])
            made, passed = self._advance(index, mx.concatenate(tokens), hidden)
            tokens.append(self.choose(self._logits_of(index, made[-1:]), pick))
            self.cache[index].trim(index)
        return Draft(mx.concatenate(tokens))


def outline(target: nn.Module, quantization: Quantization | None) -> MTPHead | MTPSteps:
    """Layers as they are loaded for ``target``, in bfloat16 or quantized; no weights are read."""
    head = make_mtp_head(target)
    head.set_dtype(mx.bfloat16)
    quantize_now(head, None, quantization, kept=ROUTER)
    return head


def load_mtp(
    weights: Mapping[str, mx.array],
    target: nn.Module,
    options: LoadOptions | None = None,
    quantization: Mapping[str, Any] | None = None,
) -> MTPDrafter:
    """A drafter from the MTP layers among ``weights``, the target's own checkpoint or a folder's.

    The checkpoint as its makers published it, not as mlx-lm converts it; other tensors are
    ignored, so a shard can be given as ``mx.load`` reads it. ``quantization`` is what the config
    says of those that are packed, which stay so. Raises ValueError, in one sentence, where the
    target has no such layer or the tensors are not those of its layer.
    """
    family = family_of(target)
    options = options or LoadOptions()
    own = prepared(family.renamed(weights, len(target.layers)), family, target)
    packing = options.quantization(None if quantization else target)
    return _drafter_of(own, target, options.dtype, quantization or {}, packing)


def _drafter_of(
    own: Weights,
    target: nn.Module,
    dtype: mx.Dtype | None,
    quantization: Mapping[str, Any],
    packing: Quantization | None,
) -> MTPDrafter:
    """The drafter of parts as the head has them, to be packed where they are not."""
    family = family_of(target)
    if family.zero_centred:
        own = each_step(own, lambda part: with_final_norms(part, target))
    head = make_mtp_head(target, own)
    with building():
        quantize_as_stored(
            head, own, quantization, lambda path: path if path in quantization else f"mtp.{path}"
        )
    check_tensors(shapes_of(head), own)
    head.load_weights(list(own.items()))
    head.set_dtype(dtype or activation_dtype(find_embedding(target)[0]))
    head.load_weights([(n, w) for n, w in own.items() if n.endswith(FLOAT32)], strict=False)
    quantize_now(head, quantization, packing, kept=ROUTER)
    if isinstance(head, MTPSteps):
        return SteppedMTPDrafter(head, target)
    return MTPDrafter(head, target)


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
    made = MTPConfig.from_dict(config, folder / "config.json")
    made.check_fit(sizes_of(model))
    packing = options.quantization()
    drafter = _drafter_of(read_weights(folder), model, options.dtype, quantization, packing)
    for step in drafter.head.get("steps", [drafter.head]):
        step.state_first = made.state_first
    if made.state_normed is not None:
        drafter.take_hidden(made.state_normed)
    return drafter


def convert(tensors: Tensors, config: Mapping[str, Any]) -> tuple[dict[str, Any], Tensors]:
    """See ``Kind.convert``: layers of a target's own checkpoint, or a folder of them.

    Norms are left as they are stored, for only a target at hand tells what they hold. What MLX has
    packed stays packed where it is a matrix of the head as it is.
    """
    target = _target_of(config)
    family = family_of(target)
    published = family.renamed(tensors, len(target.layers))
    head = make_mtp_head(target, published)
    parts = shapes_of(head)
    turned = JOIN if family.state_first else "?"
    kept = {
        name: tensor
        for name, tensor in published.items()
        if hasattr(tensor, "packing") and name in parts and not name.startswith(turned)
    }
    arrays = {name: tensor.read() for name, tensor in published.items() if name not in kept}
    own = kept | {n: _AtHand(array) for n, array in prepared(arrays, family, target).items()}
    check_tensors(parts, own)
    made = {
        "target_type": type_of(target),
        "hidden_size": text_args(target).hidden_size,
        "vocab_size": text_args(target).vocab_size,
        "state_first": False,
        "state_normed": not family.is_stepped,
    }
    return made, own


class _AtHand(Tensor):
    """A tensor that is an array already."""

    def __init__(self, array: mx.array):
        self.array = array
        self.shape = array.shape
        self.format = FORMATS.get(array.dtype, "F32")

    def read(self) -> mx.array:
        return self.array


def readings(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The other order of what the matrix joins, and the other states; see ``Kind.readings``."""
    is_normed = config["state_normed"]
    return {
        "state before embedding": {"state_first": not config["state_first"]},
        f"state {'before' if is_normed else 'after'} norm": {"state_normed": not is_normed},
    }


def parts_of(config: Mapping[str, Any]) -> Callable[[str], bool] | None:
    """Picks the tensors of such layers in a target's checkpoint; see ``Kind.parts_of``."""
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
    family = family_of(model)
    num_layers = len(model.layers)
    if options.target is None:
        raise ValueError(
            "the MTP layers are in the target's own checkpoint, and nobody says where that is: "
            "give its folder or repository as `target`."
        )
    weights = take_tensors(options.target, lambda name: family.is_part(name, num_layers))
    return load_mtp(weights, model, options)


def made_for(config: dict[str, Any], where: Path, target: TargetSizes | None) -> str:
    """The sizes of its targets, where it is converted; see ``Kind.made_for``."""
    if config.get("kind") is None:
        return "for the target it was published with"
    return MTPConfig.made_for(config, where, target)
