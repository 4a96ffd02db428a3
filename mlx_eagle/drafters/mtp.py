"""Multi-token-prediction layers, which some targets are published with: loaded and converted.

DeepSeek-AI 2024, arXiv:2412.19437, section 2.2. The layers lie in the target's own checkpoint,
which mlx-lm loads without them, or in a folder of their own. What families call their parts is
in ``mtp_layers.py``, how they draft in ``mtp_drafter.py``.
"""

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..system.fields import BOOL, OBJECT, TEXT, Table, check, shown
from .folder import (
    PACKING,
    SIZE,
    building,
    check_tensors,
    quantize_as_stored,
    read_weights,
    shapes_of,
)
from .kind import LoadOptions, Tensor, Tensors
from .mtp_drafter import MTPDrafter, MTPHead, MTPSteps, SteppedMTPDrafter
from .mtp_layers import (
    JOIN,
    Weights,
    each_step,
    family_named,
    family_of,
    prepared,
    text_args,
    type_of,
    window_of,
    with_final_norms,
)
from .quantize import Quantization, quantize_now
from .target_parts import (
    TargetSizes,
    activation_dtype,
    find_embedding,
    read_tensors,
    sizes_of,
    take_tensors,
)

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
    "state_normed": BOOL,
    "quantization": PACKING,
}
"""Keys of the ``config.json`` of a converted folder."""
OPTIONAL = ("state_normed", "quantization")
EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "layernorm_epsilon")
NEVER_QUANTIZED = (f"{ROUTER}.weight", "mixer.gate.weight")
FORMATS = {mx.float16: "F16", mx.bfloat16: "BF16", mx.float32: "F32"}


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
    made_for(config, folder / "config.json", sizes_of(model))
    packing = options.quantization()
    drafter = _drafter_of(read_weights(folder), model, options.dtype, quantization, packing)
    for step in drafter.head.get("steps", [drafter.head]):
        step.state_first = config.get("state_first") is True
    drafter.take_hidden(config.get("state_normed", drafter.head.state_normed) is True)
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
    parts = dict(tree_flatten(head.parameters()))
    turned = JOIN if family.state_first else "?"
    kept = {
        name: tensor
        for name, tensor in published.items()
        if hasattr(tensor, "packing") and name in parts and not name.startswith(turned)
    }
    arrays = {name: tensor.read() for name, tensor in published.items() if name not in kept}
    own = kept | {n: _AtHand(array) for n, array in prepared(arrays, family, target).items()}
    check_tensors(shapes_of(head), own)
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
    check(config, CONVERTED, where)
    if config.get("kind") is None:
        return "for the target it was published with"
    missing = [key for key in CONVERTED if key not in OPTIONAL and config.get(key) is None]
    if missing:
        raise ValueError(f"{where} has no {missing[0]}: convert the layers again.")
    if target is not None:
        target.check_width("MTP layer", config["hidden_size"])
    return f"for targets of hidden size {config['hidden_size']} with {config['vocab_size']} tokens"
