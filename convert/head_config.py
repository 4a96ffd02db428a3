"""Build the config of an EAGLE head, group by group, from its tensors and its published config.

Order of trust: the shapes of tensors, then EAGLE's own keys, then general ones, because a config
is often a copy of the target's.
"""

from collections.abc import Mapping
from typing import Any

from mlx_eagle.drafters.config import (
    AttentionFields,
    Eagle3Config,
    FusionFields,
    LayerFields,
    ParallelFields,
)
from mlx_eagle.drafters.folder import rows_of
from mlx_eagle.drafters.head import GATED
from mlx_eagle.drafters.head_weights import stored_shapes
from mlx_eagle.drafters.kind import Tensor
from mlx_eagle.system.fields import shown

from .families import some_of
from .published_head import ATTENTION, PublishedHead
from .rope import resolve_rope
from .vocabulary import Vocabulary

DEFAULT_HEADS = 32


def _heads(head: PublishedHead) -> dict[str, Any]:
    """The sizes of grouped-query attention: heads, key heads, and their width."""
    settings = head.settings
    query_rows = head.rows("q_proj")
    key_rows = head.rows("k_proj")
    norm = head.tensors.get(f"{ATTENTION}q_norm.weight")
    width = norm.rows if norm is not None else settings.get("head_dim")
    num_heads = settings.get("num_attention_heads")
    num_heads = num_heads or (query_rows // width if width else DEFAULT_HEADS)
    width = width or query_rows // num_heads
    if not width:
        raise ValueError(f"q_proj has {query_rows} rows for {num_heads} heads; fix the config")
    num_kv_heads = settings.get("num_key_value_heads", max(key_rows // width, 1))
    if num_heads % num_kv_heads or width % 2:
        raise ValueError(
            f"the head has {num_heads} heads of width {width} and {num_kv_heads} key heads, "
            "expected an even width and a whole number of heads per key head; fix the config"
        )
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": width}
    return {**sizes, "latent": None}


def _latent_heads(head: PublishedHead) -> dict[str, Any]:
    """The sizes of DeepSeek's attention; only the number of heads is from the config."""
    rank = head.rows("kv_a_layernorm")
    rope = head.rows("kv_a_proj_with_mqa") - rank
    is_compressed = f"{ATTENTION}q_a_proj.weight" in head.tensors
    query_rank = head.rows("q_a_layernorm") if is_compressed else None
    num_heads = head.settings.get("num_attention_heads", DEFAULT_HEADS)
    head_dim = head.rows("q_b_proj" if is_compressed else "q_proj") // num_heads
    latent = {
        "q_lora_rank": query_rank,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": head_dim - rope,
        "qk_rope_head_dim": rope,
        "v_head_dim": head.rows("kv_b_proj") // num_heads - (head_dim - rope),
    }
    if min(size for size in latent.values() if size is not None) < 1 or rope % 2:
        raise ValueError(
            f"the head's latent attention would have {num_heads} heads of "
            f"{latent['qk_nope_head_dim']} and {rope} channels and values of "
            f"{latent['v_head_dim']}; fix num_attention_heads in its config"
        )
    for name, size in latent.items():
        stated = head.settings.get(name)
        if stated not in (None, size):
            raise ValueError(f"config.json says {name} {stated}, and the tensors have {size}")
    sizes = {"num_heads": num_heads, "num_kv_heads": num_heads, "head_dim": head_dim}
    return {**sizes, "latent": latent}


def _attention(head: PublishedHead) -> AttentionFields:
    """The fields about attention and its rope."""
    tensors = head.tensors
    is_latent = f"{ATTENTION}kv_a_proj_with_mqa.weight" in tensors
    sizes = _latent_heads(head) if is_latent else _heads(head)
    has_bias = head.asks_for("self_attn.q_proj.bias", "attention_bias")
    own_values = f"{ATTENTION}v_proj.weight" in tensors
    factors = tensors.get("rope_freqs.weight")
    return AttentionFields(
        **sizes,
        qk_norm=head.asks_for("self_attn.q_norm.weight", "qk_norm"),
        attention_bias=has_bias or f"{ATTENTION}kv_a_proj_with_mqa.bias" in tensors,
        attention_out_bias=head.asks_for("self_attn.o_proj.bias", "attention_bias"),
        values="keys" if head.family.is_gemma and not own_values else "projected",
        softmax_scale=head.softmax_scale(sizes["latent"]),
        position_scale=head.position_scale(),
        **head.window_fields(),
        rope=resolve_rope(head.settings, sizes, head.overrides.rope_theta, factors),
    )


def _layers(head: PublishedHead) -> LayerFields:
    """The fields about sizes, norms, biases and scales outside of attention."""
    settings = head.settings
    tensors = head.tensors
    is_gemma = head.family.is_gemma
    optional = head.family.has_optional_norms
    h = head.hidden_size
    if settings.get("hidden_size", h) != h:
        raise ValueError(
            f"config.json says hidden_size {settings['hidden_size']}, and layers.0 puts out {h} "
            "channels"
        )
    activation = settings.get("hidden_act") or settings.get("hidden_activation") or "silu"
    if activation not in GATED:
        raise ValueError(
            f"the head's activation is {shown(activation)}; {', '.join(GATED)} are known"
        )
    widths = [head.input_width(i) for i in range(head.num_layers)]
    every = head.num_layers > 1 and set(widths) == {2 * h}
    final_norm = settings.get("use_last_layernorm", True)
    if optional:
        final_norm = "norm.weight" in tensors
    norm_output = settings.get("norm_output", settings.get("return_hidden_post_norm", False))
    return LayerFields(
        hidden_size=h,
        num_layers=head.num_layers,
        intermediate_size=rows_of(tensors, "layers.0.mlp.gate_proj.weight"),
        max_position_embeddings=settings["max_position_embeddings"],
        rms_norm_eps=settings["rms_norm_eps"],
        hidden_act=activation,
        mlp_bias=head.asks_for("mlp.gate_proj.bias", "mlp_bias"),
        layer_input="every" if every else "first",
        layer_scalar="layers.0.layer_scalar" in tensors,
        embedding_norm=settings.get("use_input_layernorm_in_first_layer", True),
        state_norm=not optional or "layers.0.hidden_norm.weight" in tensors,
        norm_before_residual=settings.get("norm_before_residual", False),
        final_norm=final_norm,
        norm_output=final_norm and norm_output,
        embed_scale=h**0.5 if is_gemma else 1.0,
        logit_softcap=settings.get("final_logit_softcapping") if is_gemma else None,
    )


def _feature_sizes(head: PublishedHead) -> tuple[int, int]:
    """The number of features that fc fuses, and the width of each."""
    h = head.hidden_size
    settings = head.settings
    width = head.tensors["fc.weight"].shape[-1]
    num_taps = len(head.overrides.aux_layers or head.written_taps()[0])
    num_taps = num_taps or settings.get("num_aux_hidden_states")
    # Without a table of its own the head uses the target's, so their widths are the same.
    shares_embedding = "embed_tokens.weight" not in head.tensors
    if settings.get("target_hidden_size"):
        size = settings["target_hidden_size"]
    elif shares_embedding or (num_taps and width % h == 0):
        size = h
    elif head.target is not None:
        size = head.target.hidden_size
    else:
        size = max(width // (num_taps or 3), 1)
    if width % size:
        raise ValueError(
            f"fc takes {width} channels, which are no whole number of features of width {size}; "
            "the head belongs to another target, or its target_hidden_size is wrong"
        )
    return width // size, size


def _fusion(head: PublishedHead) -> FusionFields:
    """The fields about the features of the target that are fused: taps, width and norms."""
    settings = head.settings
    tensors = head.tensors
    target = head.target
    num_aux = 1
    size = head.hidden_size
    uses_aux = head.family.fixed.get("uses_aux", True)
    if uses_aux:
        num_aux, size = _feature_sizes(head)
    if target is not None and target.hidden_size != size:
        raise ValueError(
            f"the head takes features of width {size}, and {target.name} has hidden size "
            f"{target.hidden_size}; give the target it was trained for"
        )
    norm = "none"
    if "input_norm.weight" in tensors or settings.get("norm_before_fc"):
        norm = "concat"
    elif "fc_norm.0.weight" in tensors or settings.get("fc_norm") or settings.get("use_aux_norm"):
        norm = "per_feature"
    return FusionFields(
        num_aux=num_aux,
        target_hidden_size=size,
        **(head.tap_fields(num_aux) if uses_aux else {"aux_ids_source": "final norm"}),
        pre_fc_norm=norm,
        fc_bias="fc.bias" in tensors,
        fusion_norm="embedding_norm.weight" in tensors,
    )


def _parallel(head: PublishedHead, vocab_size: int) -> ParallelFields:
    """The fields about tokens drafted at once: P-EAGLE's mask, and ModelOpt's parallel heads."""
    tensors = head.tensors
    places = [name.split(".") for name in tensors if name.startswith("parallel_heads.")]
    number = len({place[1] for place in places})
    wanted = head.settings.get("parallel_draft_step")
    if wanted not in (None, number + 1):
        raise ValueError(
            f"config.json says parallel_draft_step {wanted}, and the checkpoint has {number} "
            "parallel draft heads; it is incomplete"
        )
    return ParallelFields(
        num_parallel_heads=number,
        parallel_head_layers=max((int(place[3]) for place in places), default=0) + 1,
        parallel_head_bias=any(place[-1] == "bias" for place in places),
        parallel_outputs=max(1, sum(name.startswith("parallel_outputs.") for name in tensors)),
        mask_token_id=head.mask_token(vocab_size),
        speculative_tokens_hint=head.tokens_hint(),
    )


def build_config(head: PublishedHead, vocabulary: Vocabulary) -> Eagle3Config:
    """The config of a published head, every field resolved; doubts are added to its notes.

    Raises ValueError, one sentence, for what is missing or contradicts something else.
    """
    groups = (
        _layers(head),
        _attention(head),
        _fusion(head),
        vocabulary.fields(head.tensors),
        _parallel(head, vocabulary.size),
    )
    values = {"family": head.family.name}
    for group in groups:
        values |= vars(group)
    return Eagle3Config(**(values | head.family.fixed))


def check_tables(config: Eagle3Config, settings: Mapping[str, Any]) -> None:
    """Raise ValueError if a table is missing that the head cannot share with its target."""
    if settings.get("embed_requires_grad") and config.embed_source != "file":
        raise ValueError(
            "the head was trained with an embedding of its own (embed_requires_grad), "
            "which the checkpoint lacks"
        )
    if config.hidden_size == config.target_hidden_size:
        return
    tables = {"an embed_tokens": config.embed_source, "an lm_head": config.lm_head_source}
    for table, source in tables.items():
        if source != "file":
            raise ValueError(
                f"the head is {config.hidden_size} wide and its target "
                f"{config.target_hidden_size}, so it needs {table} of its own, which the "
                "checkpoint lacks"
            )


def check_shapes(tensors: Mapping[str, Tensor], config: Eagle3Config) -> None:
    """Raise ValueError for a tensor that is missing, of another shape, or unexpected."""
    expected = stored_shapes(config)
    for name, shape in expected.items():
        if name not in tensors:
            raise ValueError(f"the checkpoint lacks {name}; it is incomplete")
        if tensors[name].shape != shape:
            raise ValueError(
                f"{name} is {' x '.join(map(str, tensors[name].shape))}, expected "
                f"{' x '.join(map(str, shape))}; tensors and config disagree"
            )
    surplus = sorted(tensors.keys() - expected.keys())
    if surplus:
        raise ValueError(
            f"the checkpoint holds {some_of(surplus)}, which no known EAGLE head has; "
            "converting without would change what it computes"
        )
