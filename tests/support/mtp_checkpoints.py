"""Tiny targets whose families are published with MTP layers, and such layers as published.

The tensors' names and shapes are those of the makers' files; ``naive`` says what they stand for.
"""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mtp_numpy
import numpy as np
from checkpoints import write_config
from drafter_pairs import randomize, tiny_qwen3_5, tiny_qwen3_next
from helpers import PROMPT, VOCAB, plain, speculative, tiny_qwen3
from mlx.utils import tree_flatten
from mlx_lm.models import (
    deepseek_v3,
    deepseek_v32,
    glm4_moe,
    glm4_moe_lite,
    glm_moe_dsa,
    mimo,
    mimo_v2_flash,
    nemotron_h,
    step3p5,
)

from mlx_eagle.drafters.mtp import load_mtp

H, F, E = 64, 32, 4  # the hidden size, an expert's width, experts
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Published:
    """A target, and the tensors and the reference of its MTP layers."""

    target: nn.Module
    tensors: dict[str, np.ndarray]
    naive: mtp_numpy.NaiveMTP | mtp_numpy.SteppedMTP
    inner: Callable[[Any], Any]
    """The module of the target that gives its states."""

    @property
    def config(self) -> dict[str, Any]:
        text = self.target.language_model if "language_model" in self.target else self.target
        return vars(text.args)

    def states(self, text: list[int]) -> np.ndarray:
        """The target's states (n, h) of a text, run at once."""
        return np.array(self.inner(self.target)(mx.array([text]))[0].astype(mx.float32))

    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Embedding and output matrix, (V, h)."""
        inner = self.inner(self.target)
        embedding = inner["embeddings" if "embeddings" in inner else "embed_tokens"]
        owner = self.target.language_model if "language_model" in self.target else self.target
        output = owner.get("lm_head", embedding)
        return np.array(embedding.weight), np.array(output.weight)

    def logits(self, text: list[int], size: int, drafted: Sequence[int] = ()) -> list[np.ndarray]:
        """Of each draft after ``text``, by the reference; ``drafted`` are the first of them."""
        tables, states = self.tables(), self.states(text)[: len(text) - 1]
        return self.naive.logits(self.tensors, self.config, *tables, states, text, size, drafted)

    def arrays(self) -> dict[str, mx.array]:
        return {name: mx.array(array) for name, array in self.tensors.items()}


def filled(shapes: Shapes, seed: int, less_one: bool = False) -> dict[str, np.ndarray]:
    """Random tensors: matrices that keep the size of what they multiply, norms near 1 (or 0)."""
    dice = np.random.default_rng(seed)
    found = {}
    for name, shape in shapes.items():
        values = dice.normal(size=shape)
        if len(shape) == 1:
            is_norm = name.endswith("norm.weight") or "_norm_" in name
            values = 0.1 * values + (1.0 if is_norm and not less_one else 0.0)
        else:
            values *= shape[-1] ** -0.5 * 1.5
        found[name] = values.astype(np.float32)
    return found


def mlp(prefix: str, width: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (width, H),
        f"{prefix}up_proj.weight": (width, H),
        f"{prefix}down_proj.weight": (H, width),
    }


def joined(prefix: str, names: tuple[str, str, str]) -> Shapes:
    embedding, state, join = names
    return {f"{prefix}{embedding}": (H,), f"{prefix}{state}": (H,), f"{prefix}{join}": (H, 2 * H)}


def norms(prefix: str) -> Shapes:
    return {
        f"{prefix}input_layernorm.weight": (H,),
        f"{prefix}post_attention_layernorm.weight": (H,),
    }


def gqa(
    prefix: str, heads: int, kv: int, d: int, gated: bool = False, bias: bool = False
) -> Shapes:
    rows = {"q": heads * d * (2 if gated else 1), "k": kv * d, "v": kv * d}
    found: Shapes = {f"{prefix}{name}_proj.weight": (n, H) for name, n in rows.items()}
    if bias:
        found |= {f"{prefix}{name}_proj.bias": (n,) for name, n in rows.items()}
    return found | {f"{prefix}o_proj.weight": (H, heads * d)}


def qwen(target: nn.Module, seed: int = 21) -> Published:
    text = target.language_model if "language_model" in target else target
    args, p = text.args, "mtp.layers.0."
    d = args.head_dim
    names = "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "fc.weight"
    shapes = joined("mtp.", names) | {"mtp.norm.weight": (H,)} | norms(p)
    shapes |= gqa(f"{p}self_attn.", args.num_attention_heads, args.num_key_value_heads, d, True)
    shapes |= {f"{p}self_attn.q_norm.weight": (d,), f"{p}self_attn.k_norm.weight": (d,)}
    if args.num_experts:
        shapes |= {f"{p}mlp.gate.weight": (E, H), f"{p}mlp.shared_expert_gate.weight": (1, H)}
        shapes |= mlp(f"{p}mlp.shared_expert.", args.shared_expert_intermediate_size)
        for expert in range(E):
            shapes |= mlp(f"{p}mlp.experts.{expert}.", args.moe_intermediate_size)
    else:
        shapes |= mlp(f"{p}mlp.", args.intermediate_size)
    inner = lambda model: (  # noqa: E731
        model.language_model.model if "language_model" in model else model.model
    )
    return Published(target, filled(shapes, seed, less_one=True), mtp_numpy.QWEN, inner)


def experts(prefix: str) -> Shapes:
    found = {f"{prefix}gate.weight": (E, H), f"{prefix}gate.e_score_correction_bias": (E,)}
    for expert in range(E):
        found |= mlp(f"{prefix}experts.{expert}.", F)
    return found | mlp(f"{prefix}shared_experts.", F)


APPENDED = {
    "vocab_size": VOCAB,
    "hidden_size": H,
    "intermediate_size": 96,
    "moe_intermediate_size": F,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": E,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "qk_nope_head_dim": 8,
}


def appended(target: nn.Module, layer: Any, attention: Shapes, seed: int) -> Published:
    p = f"model.layers.{target.args.num_hidden_layers}."
    shapes = joined(p, ("enorm.weight", "hnorm.weight", "eh_proj.weight")) | norms(p)
    shapes |= {f"{p}self_attn.{name}": shape for name, shape in attention.items()}
    shapes |= {f"{p}shared_head.norm.weight": (H,), f"{p}shared_head.head.weight": (VOCAB, H)}
    shapes |= {f"{p}embed_tokens.weight": (VOCAB, H)} | experts(f"{p}mlp.")
    naive = mtp_numpy.appended(layer, target.args.num_hidden_layers)
    return Published(target, filled(shapes, seed), naive, lambda model: model.model)


GLM_5 = {
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
INDEXER = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 64, "rms_norm_eps": 1e-6}


def latent(module: Any, model_type: str, seed: int, **more: Any) -> Published:
    args = module.ModelArgs.from_dict({"model_type": model_type, **APPENDED, **LATENT, **more})
    attention = {
        "q_a_proj.weight": (24, H),
        "q_a_layernorm.weight": (24,),
        "q_b_proj.weight": (4 * 16, 24),
        "kv_a_proj_with_mqa.weight": (16 + 8, H),
        "kv_a_layernorm.weight": (16,),
        "kv_b_proj.weight": (4 * (8 + 12), 16),
        "o_proj.weight": (H, 4 * 12),
    }
    if "index_topk" in more:  # of no effect on texts that are no longer
        heads = more["index_n_heads"]
        attention |= {"indexer.wq_b.weight": (heads * 16, 24), "indexer.wk.weight": (16, H)}
        attention |= {"indexer.k_norm.weight": (16,), "indexer.k_norm.bias": (16,)}
        attention |= {"indexer.weights_proj.weight": (heads, H)}
    target = randomize(module.Model(args), seed)
    return appended(target, mtp_numpy.latent_layer, attention, seed)


def glm4(seed: int = 23) -> Published:
    more = {"num_key_value_heads": 2, "head_dim": 16, "use_qk_norm": True}
    more |= {"tie_word_embeddings": False, "partial_rotary_factor": 0.5}
    args = glm4_moe.ModelArgs(
        model_type="glm4_moe", **{**APPENDED, "attention_bias": True, **more}
    )
    attention = gqa("", 4, 2, 16, bias=True) | {"q_norm.weight": (16,), "k_norm.weight": (16,)}
    target = randomize(glm4_moe.Model(args), seed)
    return appended(target, mtp_numpy.glm_layer, attention, seed)


def mimo_7b(seed: int = 24) -> Published:
    args = mimo.ModelArgs(
        model_type="mimo",
        hidden_size=H,
        num_hidden_layers=3,
        intermediate_size=96,
        num_attention_heads=4,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
        num_key_value_heads=2,
        num_nextn_predict_layers=1,
    )
    p = "model.mtp_layers.0."
    names = "token_layernorm.weight", "hidden_layernorm.weight", "input_proj.weight"
    shapes = joined(p, names) | {f"{p}final_layernorm.weight": (H,)} | norms(p)
    shapes |= gqa(f"{p}self_attn.", 4, 2, 16, bias=True) | mlp(f"{p}mlp.", 96)
    target = randomize(mimo.Model(args), seed)
    return Published(target, filled(shapes, seed), mtp_numpy.MIMO, lambda model: model.model)


def nemotron(seed: int = 25) -> Published:
    args = nemotron_h.ModelArgs(
        model_type="nemotron_h",
        vocab_size=VOCAB,
        hidden_size=H,
        intermediate_size=96,
        max_position_embeddings=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        attention_bias=False,
        mamba_num_heads=4,
        mamba_head_dim=16,
        mamba_proj_bias=False,
        ssm_state_size=16,
        conv_kernel=4,
        n_groups=2,
        mlp_bias=False,
        layer_norm_epsilon=1e-5,
        use_bias=False,
        use_conv_bias=True,
        hybrid_override_pattern=list("M*E-"),
        moe_intermediate_size=F,
        moe_shared_expert_intermediate_size=F,
        n_group=1,
        topk_group=1,
        n_routed_experts=E,
        n_shared_experts=1,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
    )
    p = "mtp.layers.0."
    shapes = joined(p, ("enorm.weight", "hnorm.weight", "eh_proj.weight"))
    shapes |= {f"{p}norm.weight": (H,)} | gqa(f"{p}mixer.", 4, 2, 16)
    p = "mtp.layers.1."
    own = experts(f"{p}mixer.")
    shapes |= {name: shape for name, shape in own.items() if "gate_proj" not in name}
    shapes |= {f"{p}norm.weight": (H,), f"{p}final_layernorm.weight": (H,)}
    target = randomize(nemotron_h.Model(args), seed)
    return Published(
        target, filled(shapes, seed), mtp_numpy.NEMOTRON, lambda model: model.backbone
    )


def qwen3_by_speculators(seed: int = 29) -> Published:
    """A layer that speculators has trained for a model that came without."""
    target = tiny_qwen3(seed, num_key_value_heads=2, head_dim=16)
    p = "mtp_layers.0."
    names = "token_layernorm.weight", "hidden_layernorm.weight", "input_proj.weight"
    shapes = joined(p, names) | {f"{p}final_layernorm.weight": (H,)} | norms(p)
    shapes |= gqa(f"{p}self_attn.", target.args.num_attention_heads, 2, 16)
    shapes |= {f"{p}self_attn.q_norm.weight": (16,), f"{p}self_attn.k_norm.weight": (16,)}
    shapes |= mlp(f"{p}mlp.", target.args.intermediate_size)
    return Published(target, filled(shapes, seed), mtp_numpy.MIMO, lambda model: model.model)


FAMILIES: dict[str, Callable[[], Published]] = {
    "qwen3-next": lambda: qwen(tiny_qwen3_next()),
    "qwen3-next moe": lambda: qwen(tiny_qwen3_next(num_experts=E)),
    "qwen3.5": lambda: qwen(tiny_qwen3_5()),
    "qwen3.5 moe, tied": lambda: qwen(tiny_qwen3_5(num_experts=E, tie_word_embeddings=True)),
    "deepseek-v3": lambda: latent(deepseek_v3, "deepseek_v3", 22),
    "glm-4.5": glm4,
    "glm-4.7-flash": lambda: latent(glm4_moe_lite, "glm4_moe_lite", 26),
    "deepseek-v3.2": lambda: latent(deepseek_v32, "deepseek_v32", 27, **INDEXER),
    "glm-5": lambda: latent(glm_moe_dsa, "glm_moe_dsa", 28, **INDEXER, **GLM_5),
    "mimo": mimo_7b,
    "nemotron-h": nemotron,
}


def without_norm(model: nn.Module) -> Any:
    """The module that gives a target's states before the final norm."""
    text = model.language_model if "language_model" in model else model
    inner = copy.copy(text.model)
    inner.norm = lambda states: states
    return inner


def other_states(part: Published) -> Published:
    """The same, with states before the norm where they are after it, and after it else."""
    normed = not part.naive.normed
    inner = (lambda model: model.model) if normed else without_norm
    return replace(part, naive=replace(part.naive, normed=normed), inner=inner)


def step(seed: int = 33) -> Published:
    """Layers with and without a window, and a matrix of logits each."""
    full, sliding = "full_attention", "sliding_attention"
    args = step3p5.ModelArgs(
        model_type="step3p5",
        hidden_size=H,
        num_hidden_layers=3,
        vocab_size=VOCAB,
        num_attention_heads=4,
        num_attention_groups=2,
        head_dim=16,
        intermediate_size=96,
        rope_theta=[10000.0, 5000.0, 10000.0, 5000.0, 5000.0, 10000.0],
        sliding_window=6,
        layer_types=[full, sliding, full, sliding, sliding, full],
        partial_rotary_factors=[0.5, 1.0, 0.5, 1.0, 1.0, 0.5],
        attention_other_setting={"num_attention_heads": 8, "num_attention_groups": 2},
        moe_num_experts=E,
        moe_top_k=2,
        moe_intermediate_size=F,
        share_expert_dim=F,
        moe_layers_enum="1,2",
    )
    shapes: Shapes = {}
    for p, heads in (("model.layers.3.", 8), ("model.layers.4.", 8), ("model.layers.5.", 4)):
        shapes |= joined(p, ("enorm.weight", "hnorm.weight", "eh_proj.weight")) | norms(p)
        shapes |= gqa(f"{p}self_attn.", heads, 2, 16) | mlp(f"{p}mlp.", 96)
        shapes |= {f"{p}self_attn.g_proj.weight": (heads, H)}
        shapes |= {f"{p}self_attn.{name}_norm.weight": (16,) for name in "qk"}
        shapes |= {f"{p}transformer.shared_head.norm.weight": (H,)}
        shapes |= {f"{p}transformer.shared_head.output.weight": (VOCAB, H)}
    target = randomize(step3p5.Model(args), seed)
    own = "transformer.shared_head."
    naive = mtp_numpy.SteppedMTP(
        mtp_numpy.step_layer,
        tuple(f"model.layers.{3 + j}." for j in range(3)),
        f"{own}norm.weight",
        f"{own}output.weight",
        less_one=True,
    )
    return Published(target, filled(shapes, seed, less_one=True), naive, without_norm)


def mimo_v2(seed: int = 34) -> Published:
    args = mimo_v2_flash.ModelArgs(
        model_type="mimo_v2_flash",
        num_experts_per_tok=2,
        hybrid_layer_pattern=[0, 1, 1],
        moe_layer_freq=[0, 1, 1],
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
        sliding_window_size=6,
        vocab_size=VOCAB,
        hidden_size=H,
        intermediate_size=96,
        moe_intermediate_size=F,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        n_shared_experts=None,
        n_routed_experts=E,
        routed_scaling_factor=None,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        n_group=1,
        topk_group=1,
        max_position_embeddings=512,
        layernorm_epsilon=1e-5,
        rope_theta=10000.0,
        swa_rope_theta=5000.0,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        head_dim=16,
        v_head_dim=12,
        swa_head_dim=16,
        swa_v_head_dim=12,
        partial_rotary_factor=0.5,
        attention_value_scale=0.7,
    )
    shapes: Shapes = {}
    for j in range(3):
        p = f"model.mtp.layers.{j}."
        shapes |= joined(p, ("enorm.weight", "hnorm.weight", "eh_proj.weight"))
        shapes |= {f"{p}{name}.weight": (H,) for name in ("input_layernorm", "pre_mlp_layernorm")}
        shapes |= {f"{p}final_layernorm.weight": (H,)} | mlp(f"{p}mlp.", 96)
        rows = {"q": 4 * 16, "k": 2 * 16, "v": 2 * 12}
        shapes |= {f"{p}self_attn.{name}_proj.weight": (n, H) for name, n in rows.items()}
        shapes |= {f"{p}self_attn.o_proj.weight": (H, 4 * 12)}
        shapes |= {f"{p}self_attn.attention_sink_bias": (4,)}
    target = randomize(mimo_v2_flash.Model(args), seed)
    naive = mtp_numpy.SteppedMTP(
        mtp_numpy.mimo_v2_layer,
        tuple(f"model.mtp.layers.{j}." for j in range(3)),
        "final_layernorm.weight",
        chained=False,
    )
    return Published(target, filled(shapes, seed), naive, without_norm)


STEPPED: dict[str, Callable[[], Published]] = {"step-3.5": step, "mimo-v2-flash": mimo_v2}
"""Families with a layer for each token ahead."""


# With few heads, scores are often equal: 0 where no head has any.
FIVE = {**INDEXER, "index_topk": 5, "index_n_heads": 8}
CHOOSING: dict[str, Callable[[], Published]] = {
    "deepseek-v3.2": lambda: latent(deepseek_v32, "deepseek_v32", 27, **FIVE),
    "glm-5": lambda: latent(glm_moe_dsa, "glm_moe_dsa", 28, **FIVE, **GLM_5),
}
"""Families whose layers choose what they attend to, with fewer slots than a text has."""


def entering() -> tuple[mx.array, mx.array]:
    """Embeddings and states (12, h) of a text that there is not."""
    dice = np.random.default_rng(31)
    return tuple(mx.array(dice.normal(size=(12, H)).astype(np.float32)) for _ in range(2))


def write_checkpoint(folder: Path, part: Published, num_shards: int = 3, beside: int = 0) -> Path:
    """A checkpoint as published: shards and an index; the last holds the MTP layers.

    Of a model's other tensors so many bytes lie ``beside`` them, in the middle.
    """
    folder.mkdir(parents=True)
    trunk = {f"model.layers.{i}.mlp.up_proj.weight": mx.zeros((4, 4)) for i in range(2)}
    places: dict[str, str] = {}
    for i in range(num_shards):
        name = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        last = i == num_shards - 1
        theirs = {"model.norm.weight": mx.zeros((beside // 4,))} if beside else {}
        arrays = (
            part.arrays() | theirs if last else {f"{n}{i}": array for n, array in trunk.items()}
        )
        mx.save_safetensors(str(folder / name), arrays)
        places |= dict.fromkeys(arrays, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    sizes = {"num_hidden_layers": len(part.target.layers)}
    write_config(folder, {"model_type": part.target.model_type, "text_config": sizes})
    return folder


def full_config(part: Published) -> dict[str, Any]:
    """The ``config.json`` that such a target is published with."""
    model_type = part.target.model_type
    if "language_model" in part.target:
        return {"model_type": model_type, "text_config": part.config}
    return part.config | {"model_type": model_type}


def check_layers(drafter: Any, part: Published) -> None:
    """It is what comes of the tensors themselves, and drafts."""
    own = load_mtp(part.arrays(), part.target)
    theirs = dict(tree_flatten(drafter.head.parameters()))
    for name, array in tree_flatten(own.head.parameters()):
        assert mx.array_equal(theirs[name], array), name
    tokens, stats = speculative(part.target, drafter, PROMPT, 10, num_draft_tokens=2)
    assert tokens == plain(part.target, PROMPT, 10)
    assert stats.num_drafted > 0
