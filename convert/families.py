"""The checkpoint families, each as one row of data.

A checkpoint is described as text, one line per tensor and per config key, with sizes in units of
the hidden size h if they are whole multiples of it:

    tensor fc.weight [h, 3h]
    config architectures.0 = LlamaForCausalLMEagle3

A row is a few patterns over that text, and rows are tried from the top. Tensors decide; config
keys only distinguish layouts with the same tensors. Names and layouts come from the code of the
trainers and serving engines: SafeAILab/EAGLE, SpecForge, speculators, Model-Optimizer, AngelSlim,
DeepSpec, llama.cpp, vLLM and SGLang.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_eagle.drafters.kind import Tensor
from mlx_eagle.system.fields import LONGEST_NAME, shown

from .checkpoint import MISTRAL_MARK, DraftCheckpoint
from .dequantize import Unpacked, unpacked

# Applied in this order to every name; the results are the canonical names.
NAMES = (
    (r"^model\.", ""),
    (r"^midlayer\.(\d+)\.", r"layers.\1."),
    (r"^midlayer\.", "layers.0."),
    (r"^(?:layers\.0\.)?enorm\.", "layers.0.input_layernorm."),
    (r"^aux_norm_low\.", "fc_norm.0."),
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
    # EAGLE-1 of speculators
    (r"^fusion_layer\.", "fc."),
    (r"^transformer\.", "layers.0."),
    (r"^(?:embed|embedding|post_embedding)_layernorm\.", "embedding_norm."),
    (r"^(?:lm_head|pre_lm_head)_layernorm\.", "norm."),
    # ModelOpt's parallel heads
    (r"^parallel_draft_heads\.lm_head\.", "parallel_outputs.0."),
    (r"^parallel_draft_heads\.(\d+)\.lm_head\.", r"parallel_outputs.\1."),
    (
        r"^parallel_draft_heads\.(?:medusa_heads\.)?(\d+)\.(?:medusa_layers\.)?(\d+)\.linear\.",
        r"parallel_heads.\1.layers.\2.",
    ),
    # Mistral
    (r"^eagle_linear\.", "fc."),
    (r"^tok_embeddings\.", "embed_tokens."),
    (r"^(layers\.\d+)\.attention_norm\.", r"\1.input_layernorm."),
    (r"^(layers\.\d+)\.ffn_norm\.", r"\1.post_attention_layernorm."),
    (r"^(layers\.\d+)\.attention\.w(q|kv)_a(?=[._])", r"\1.self_attn.\2_a_proj"),
    (r"^(layers\.\d+)\.attention\.w(q|kv)_b\.", r"\1.self_attn.\2_b_proj."),
    (r"^(layers\.\d+)\.attention\.(q|kv)_a_norm\.", r"\1.self_attn.\2_a_layernorm."),
    (r"^(layers\.\d+)\.attention\.w([qkvo])\.", r"\1.self_attn.\2_proj."),
    (r"^(layers\.\d+)\.feed_forward\.w1\.", r"\1.mlp.gate_proj."),
    (r"^(layers\.\d+)\.feed_forward\.w2\.", r"\1.mlp.down_proj."),
    (r"^(layers\.\d+)\.feed_forward\.w3\.", r"\1.mlp.up_proj."),
)
# Leftovers of training, and tables that are computed again.
DROPPED = re.compile(r"^verifier_|(^|\.)rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class Family:
    """A layout that is converted: all of ``has`` match and none of ``lacks``.

    ``defaults`` stand for missing config keys; ``fixed`` are fields of ``Eagle3Config`` that the
    layout settles.
    """

    name: str
    title: str
    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    describes_layers: bool = False  # windows, biases, q/k norms in the config are the draft's
    has_optional_norms: bool = False  # the final and the first norm may be missing
    owns_embedding: bool = True  # False: the target's is used, even if the file holds one
    num_stop_rows: int = 0  # most rows of fc that tell when to stop thinking (AngelSlim)
    has_interleaved_heads: bool = False  # q and k rows in llama.cpp's order
    is_gemma: bool = False  # attention of Gemma's global layers, scaled embeddings, capped logits
    # Points that the config leaves open or may say wrongly, so that the user is told.
    rope_base_unknown: bool = False
    residual_order_unknown: bool = False
    norm_output_unknown: bool = False


OTHER_PACKINGS = re.compile(r"\.(scales|qweight|qzeros|absmax|quant_state\S*|nested_\S+)$")

# Layer 0 attends from the embedding and the state: the mark of EAGLE-3.
ENTRANCE = r"^tensor layers\.0\.self_attn\.(?:q_proj|kv_a_proj_with_mqa)\.weight \[\w+, "
WIDE = ENTRANCE + r"2h\]"
NARROW = ENTRANCE + r"h\]"
FUSION = r"^tensor fc\.weight "
EAGLE_1 = {"fc_input": "embedding_and_state", "layer_input": "none", "uses_aux": False}
STOP_ROWS = 3  # rows for confidence, progress and remaining tokens
MISTRAL = {"norm_output": True}  # the output of its final norm is fed back

FAMILIES = (
    Family(
        "gguf",
        "llama.cpp GGUF",
        has=(FUSION, WIDE, r"^config general\.architecture = eagle3$"),
        has_interleaved_heads=True,
    ),
    Family(
        "mistral",
        "Mistral's EAGLE",
        has=(r"^tensor fc\.weight \[h, 2h\]", NARROW, rf"^config {MISTRAL_MARK} = True"),
        defaults=MISTRAL,
        fixed=EAGLE_1,
        has_optional_norms=True,
        owns_embedding=False,
        has_interleaved_heads=True,
    ),
    Family(
        "mistral-hf",
        "Mistral's EAGLE, in the names of Hugging Face",
        has=(
            r"^tensor fc\.weight \[h, 2h\]",
            NARROW,
            r"^config (architectures\.\d+|model_type) = .*[Mm]istral",
        ),
        lacks=(r"^tensor layers\.0\.hidden_norm",),
        defaults=MISTRAL,
        fixed=EAGLE_1,
        has_optional_norms=True,
        owns_embedding=False,
    ),
    Family(
        "eagle-1",
        "EAGLE-1 / EAGLE-2 / HASS",
        has=(r"^tensor fc\.weight \[h, 2h\]", NARROW),
        lacks=(r"^tensor layers\.0\.hidden_norm",),
        fixed=EAGLE_1,
        has_optional_norms=True,
        owns_embedding=False,
    ),
    Family(
        "modelopt-final-state",
        "NVIDIA ModelOpt on the target's final state (use_aux_hidden_state false)",
        has=(WIDE, r"^config (eagle_config\.)?use_aux_hidden_state = False"),
        lacks=(FUSION,),
        defaults={"rms_norm_eps": 1e-5},
        fixed={"fc_input": "none", "uses_aux": False},
    ),
    Family(
        "deepspec-gemma4",
        "DeepSpec for Gemma-4",
        has=(FUSION, WIDE, r"^tensor layers\.0\.pre_feedforward_layernorm\."),
        fixed={"branch_norms": True, "value_norm": True, "softmax_scale": 1.0},
        is_gemma=True,
    ),
    Family("deepspec", "DeepSpec", has=(FUSION, WIDE, r"^config (target_layer_ids|ttt_length)\b")),
    Family(
        "speculators",
        "speculators (RedHatAI)",
        has=(FUSION, WIDE, r"^config (transformer_layer_config\.|speculators_model_type )"),
        describes_layers=True,
        residual_order_unknown=True,
    ),
    Family(
        "angelslim",
        "AngelSlim",
        has=(FUSION, WIDE, r"^config architectures\.\d+ = Eagle3LlamaForCausalLM$"),
        num_stop_rows=STOP_ROWS,
        rope_base_unknown=True,
    ),
    Family(
        "nemo",
        "NeMo Automodel",
        has=(FUSION, WIDE, r"^config architectures\.\d+ = LlamaEagle3DraftModel$"),
    ),
    Family(
        "modelopt",
        "NVIDIA ModelOpt",
        has=(FUSION, WIDE, r"^config eagle_config\.(?!eagle_aux|use_aux_hidden_state )"),
        defaults={"rms_norm_eps": 1e-5},
    ),
    Family(
        "specforge",
        "SpecForge",
        has=(
            FUSION,
            WIDE,
            r"^config (eagle_config\.|architectures\.\d+ = LlamaForCausalLMEagle3)",
        ),
        norm_output_unknown=True,
    ),
    Family(
        "eagle3",
        "EAGLE-3 (SafeAILab layout)",
        has=(FUSION, WIDE),
        num_stop_rows=STOP_ROWS,
        norm_output_unknown=True,
    ),
)


def canonical(name: str) -> str:
    """The canonical name: midlayer.hidden_norm.weight -> layers.0.hidden_norm.weight."""
    for pattern, replacement in NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def _config_lines(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, list):
            value = {str(i): entry for i, entry in enumerate(value)}
        if isinstance(value, dict):
            yield from _config_lines(value, f"{prefix}{key}.")
        elif value is not None:
            # Always one short line, for the patterns take each line as an entry.
            line = f"config {prefix}{key[:LONGEST_NAME]} = {str(value)[:LONGEST_NAME]}"
            yield " ".join(line.splitlines())


def hidden_size(tensors: Mapping[str, Tensor]) -> int:
    """The hidden size h by the first layer's output; 0 if the tensors for it are missing."""
    for name in ("layers.0.self_attn.o_proj.weight", "layers.0.post_attention_layernorm.weight"):
        if name in tensors and tensors[name].shape:
            return tensors[name].rows
    return 0


def count_layers(tensors: Mapping[str, Tensor]) -> int:
    """The number of layers; ValueError if one between them is missing."""
    numbers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    if numbers != set(map(str, range(len(numbers)))):
        raise ValueError(
            f"the checkpoint's layers are {shown(sorted(numbers))}, expected numbers from 0 "
            "without a gap; it is incomplete"
        )
    return len(numbers)


def describe(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> str:
    """The checkpoint as text, see above; tensors by canonical names."""
    h = hidden_size(tensors)

    def size(n: int) -> str:
        times = n // h if h and n % h == 0 else 0
        return "h" if times == 1 else f"{times}h" if times else str(n)

    lines = [f"tensor {n} [{', '.join(map(size, t.shape))}]" for n, t in tensors.items()]
    return "\n".join([*lines, *_config_lines(config)])


def _check_dimensions(tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless all are vectors and matrices, and vocabulary maps are vectors."""
    for name, tensor in tensors.items():
        expected = (1,) if name in ("d2t", "t2d", "rope_freqs.weight") else (1, 2)
        dims = len(tensor.shape) if name != "mask_hidden" else min(len(tensor.shape), 1)
        if dims not in expected or 0 in tensor.shape:
            raise ValueError(
                f"{name} is of the shape {shown(tensor.shape)}, expected a "
                f"{'vector' if expected == (1,) else 'vector or a matrix'} that is not empty"
            )


def _explain(source: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError if it is nearly an EAGLE-3 head: for what is missing, or stated wrongly."""
    needed = ("fc.weight", "layers.0.self_attn.q_proj.weight")
    for name in needed:
        if "layers.0.hidden_norm.weight" in tensors and name not in tensors:
            raise ValueError(f"{source} lacks {name}, which an EAGLE-3 head needs")
    tensor = tensors.get(needed[1])
    h = hidden_size(tensors)
    if isinstance(tensor, Unpacked) and h and tensor.shape[1] % h:
        raise ValueError(
            f"{tensor.name} is said to be {' x '.join(map(str, tensor.shape))} (by its "
            f"weight_shape), in a head of width {h}; the checkpoint is damaged"
        )


def find_family(checkpoint: DraftCheckpoint) -> tuple[Family, dict[str, Tensor]]:
    """The checkpoint's family, and its tensors by canonical names, in one piece each.

    Raises ValueError for other checkpoints.
    """
    kept = {n: t for n, t in checkpoint.tensors.items() if not DROPPED.search(canonical(n))}
    whole = unpacked(kept, checkpoint.config)
    tensors = {canonical(name): tensor for name, tensor in whole.items()}
    text = describe(tensors, checkpoint.config)

    def found(pattern: str) -> bool:
        return re.search(pattern, text, re.MULTILINE) is not None

    if any(map(OTHER_PACKINGS.search, whole)):
        raise ValueError(
            f"{checkpoint.source} is a head quantized as GPTQ, AWQ, bitsandbytes or MLX do, which "
            "is not converted; use one of compressed-tensors, ModelOpt or GGUF, or the bfloat16 "
            "head it was made from"
        )
    if len(tensors) < len(whole):
        twice = next(n for n in tensors if sum(canonical(name) == n for name in whole) > 1)
        raise ValueError(f"{checkpoint.source} holds {twice} under two names; remove one")
    for family in FAMILIES:
        if all(map(found, family.has)) and not any(map(found, family.lacks)):
            _check_dimensions(tensors)
            return family, tensors
    _explain(checkpoint.source, tensors)
    some = ", ".join(shown(name).strip('"') for name in list(whole)[:4]) or "none"
    raise ValueError(
        f"{checkpoint.source} is no EAGLE head that is known here: expected fc.weight and a first "
        f"layer that attends from twice the hidden size (EAGLE-3), or an fc of twice it "
        f"(EAGLE-1); found {len(whole)} tensors: {some} ..."
    )
