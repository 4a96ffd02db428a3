"""Every public head that is known here resolves from its config, at full size, without weights.

The rows are those of the pages and trainers' published configs; shapes follow from them. What a
row leaves open (width or depth of a target nobody has published) is taken from its sizes.
"""

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from public_heads import EAGLE_1, HEADS, IDS, LATENT, MISTRAL

from mlx_eagle.convert.checkpoint import DraftCheckpoint, TargetFolder, mistral_config
from mlx_eagle.convert.head_config import Resolved, resolve
from mlx_eagle.convert.published_config import CONFIG
from mlx_eagle.convert.stored import Stored
from mlx_eagle.drafters.config import Eagle3Config
from mlx_eagle.drafters.pairs import PAIRS
from mlx_eagle.system.fields import check

NOTHING = np.zeros(0, np.uint8)


def attention(config: dict, width: int) -> dict[str, tuple[int, ...]]:
    c, h = config, config["hidden_size"]
    if "kv_lora_rank" not in c:
        heads = c["num_attention_heads"], c["num_key_value_heads"]
        query, key = (count * c["head_dim"] for count in heads)
        return {
            "q_proj": (query, width),
            "k_proj": (key, width),
            "v_proj": (key, width),
            "o_proj": (h, query),
        }
    count, rank, nope = c["num_attention_heads"], c["kv_lora_rank"], c["qk_nope_head_dim"]
    return {
        "q_a_proj": (c["q_lora_rank"], width),
        "q_a_layernorm": (c["q_lora_rank"],),
        "q_b_proj": (count * (nope + c["qk_rope_head_dim"]), c["q_lora_rank"]),
        "kv_a_proj_with_mqa": (rank + c["qk_rope_head_dim"], width),
        "kv_a_layernorm": (rank,),
        "kv_b_proj": (count * (nope + c["v_head_dim"]), rank),
        "o_proj": (h, count * c["v_head_dim"]),
    }


def tensors(row: dict) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a head, under the names of its files."""
    c, num_aux, lacks = row["config"], row.get("aux", 3), row.get("lacks", ())
    h, draft = c["hidden_size"], c["draft_vocab_size"] or c["vocab_size"]
    features = num_aux * row.get("wide", h)
    found = {"fc": (h, features), "norm": (h,), "lm_head": (draft, h)}
    for i in range(row.get("layers", 1)):
        layer = {
            **{f"self_attn.{n}": s for n, s in attention(c, 2 * h if i == 0 else h).items()},
            "mlp.gate_proj": (c["intermediate_size"], h),
            "mlp.up_proj": (c["intermediate_size"], h),
            "mlp.down_proj": (h, c["intermediate_size"]),
            "input_layernorm": (h,),
            "post_attention_layernorm": (h,),
            **({"hidden_norm": (h,)} if i == 0 else {}),
            **row.get("extra", {}),
        }
        if row.get("nested") == "qwen3":
            layer |= {"self_attn.q_norm": (c["head_dim"],), "self_attn.k_norm": (c["head_dim"],)}
        found |= {f"layers.{i}.{n}": s for n, s in layer.items() if n not in lacks}
    if c.get("fc_norm"):
        found |= {f"fc_norm.{j}": (h,) for j in range(num_aux)}
    if c.get("norm_before_fc") or (c.get("eagle_config") or {}).get("norm_before_fc"):
        found["input_norm"] = (features,)
    if "wide" in row or row.get("owns") or "mask_token_id" in c:
        found["embed_tokens"] = (c["vocab_size"], h)
    scalars = {"layers.0.layer_scalar"} & found.keys()
    shapes = {n if n in scalars else f"{n}.weight": s for n, s in found.items() if n not in lacks}
    if any(key in c for key in ("mask_token_id", "ptd_token_id", "pard_token")):
        shapes["mask_hidden"] = (1, 1, features)
    if draft < c["vocab_size"]:
        shapes["d2t"] = (draft,)
    return shapes


def as_nested(config: dict, kind: str) -> dict:
    """The same as speculators writes it."""
    top = [
        "draft_vocab_size",
        "norm_before_residual",
        "norm_before_fc",
        "mask_token_id",
        "speculators_model_type",
    ]
    outer = {key: config[key] for key in (*top, IDS) if key in config}
    inner = {key: value for key, value in config.items() if key not in outer}
    return {
        "speculators_model_type": "eagle3",
        **outer,
        "transformer_layer_config": inner | {"model_type": kind},
    }


def resolved(row: dict) -> Resolved:
    config, stored = row["config"], {}
    vocab = config["vocab_size"]
    for name, shape in tensors(row).items():
        data = NOTHING
        if name == "d2t":  # the last ids of the vocabulary
            data = np.full(shape, vocab - shape[0]).view(np.uint8)
        stored[name] = Stored("I64" if name == "d2t" else "BF16", shape, data)
    config = {key: value for key, value in config.items() if key not in row.get("unsaid", ())}
    if "nested" in row:
        config = as_nested(config, row["nested"])
    check(config, CONFIG, "config.json")
    width = row.get("wide", row["config"]["hidden_size"])
    sizes = {"num_hidden_layers": row["depth"], "hidden_size": width, "vocab_size": vocab}
    return resolve(
        DraftCheckpoint("head", config, stored, ()), TargetFolder.of("t", Path("."), sizes)
    )


@pytest.mark.parametrize("name", HEADS)
def test_it_resolves(name):
    row = HEADS[name]
    head, depth = resolved(row), row["depth"]
    found = head.config
    assert found.aux_boundary_ids == row.get("taps", (2, depth // 2, depth - 3))
    assert found.hidden_size == row["config"]["hidden_size"]
    assert found.num_layers == row.get("layers", 1)
    if "kv_lora_rank" in row["config"]:
        assert found.latent == LATENT
        assert found.softmax_scale == pytest.approx(192**-0.5 * (0.1 * np.log(64) + 1) ** 2)
        assert any("--rope-theta 10000" in note for note in head.notes)
    if (row["config"].get("rope_scaling") or {}).get("mrope_section"):
        assert found.rope["type"] == "default" and found.rope["scaling"] is None
    for key, value in row.get("fields", {}).items():
        assert getattr(found, key) == value, key
    Eagle3Config.from_dict(found.to_dict())


def test_key_heads_of_gemma_without_a_number_for_global_layers():
    """As in transformers, num_key_value_heads then holds for these as well."""
    row = HEADS["deepseek-ai/eagle3_gemma4_12b_ttt7"]
    both = row["config"] | {"num_global_key_value_heads": None}
    assert resolved(row | {"config": both}).config == resolved(row).config


@pytest.mark.parametrize("name", EAGLE_1)
def test_heads_of_eagle_1_resolve(name):
    depth, h, mlp, num_heads, num_key_heads, vocab, more = EAGLE_1[name]
    sizes = {
        "hidden_size": h,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_key_heads,
    }
    heads = sizes | {"head_dim": 128}
    found = {
        "fc": (h, 2 * h),
        "embed_tokens": (vocab, h),
        **{f"layers.0.self_attn.{n}": s for n, s in attention(heads, h).items()},
        "layers.0.mlp.gate_proj": (mlp, h),
        "layers.0.mlp.up_proj": (mlp, h),
        "layers.0.mlp.down_proj": (h, mlp),
        "layers.0.post_attention_layernorm": (h,),
    }
    biased = ["fc"] * more.get("bias", True)
    biased += [f"layers.0.self_attn.{n}_proj" for n in "qkv" * more.get("qkv_bias", False)]
    shapes = {f"{n}.weight": shape for n, shape in found.items()}
    shapes |= {f"{n}.bias": found[n][:1] for n in biased}
    config = sizes | {"intermediate_size": mlp, "vocab_size": vocab, "rms_norm_eps": 1e-5} | more
    check(config, CONFIG, "config.json")
    values = {"num_hidden_layers": depth, "hidden_size": h, "vocab_size": vocab}
    stored = {n: Stored("F16", shape, NOTHING) for n, shape in shapes.items()}
    head = DraftCheckpoint("head", config, stored, ())
    fields = resolve(head, TargetFolder.of("t", Path("."), values)).config
    assert not fields.uses_aux and fields.fc_input == "embedding_and_state"
    assert fields.fc_bias == more.get("bias", True)
    assert fields.attention_bias == more.get("qkv_bias", False)
    assert fields.lm_head_source == "target" and not fields.final_norm
    Eagle3Config.from_dict(fields.to_dict())


def megabytes(shapes: Iterable[tuple[int, ...]], bytes_each: int = 2) -> float:
    return bytes_each * sum(map(math.prod, shapes)) / 1e6


@pytest.mark.parametrize("pair", [p for p in PAIRS if p.head in HEADS], ids=lambda p: p.head)
def test_sizes_in_the_table_of_pairs(pair):
    """What is said there is what the shapes of the published head come to in 16 bits.

    Where its page says a size, both agree, and where nobody has seen one, nothing is said.
    """
    row = HEADS[pair.head]
    own = megabytes(shape for name, shape in tensors(row).items() if name != "d2t")
    if "published" in row:
        assert own == pytest.approx(row["published"], rel=0.04)
    if "assumed" in row and "published" not in row:
        assert pair.megabytes is None
    else:
        assert pair.megabytes == pytest.approx(own, rel=0.04)


MISTRAL_NAMES = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_a_proj": "attention.wq_a",
    "self_attn.q_a_layernorm": "attention.q_a_norm",
    "self_attn.q_b_proj": "attention.wq_b",
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a_with_mqa",
    "self_attn.kv_a_layernorm": "attention.kv_a_norm",
    "self_attn.kv_b_proj": "attention.wkv_b",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}


def in_fp8(shapes: dict[str, tuple[int, ...]]) -> dict[str, Stored]:
    """Matrices in 8 bits with one scale each, as Mistral stores them."""
    stored = {}
    for name, shape in shapes.items():
        is_matrix = len(shape) == 2
        stored[f"{name}.weight"] = Stored("F8_E4M3" if is_matrix else "BF16", shape, NOTHING)
        for scale in ("qscale_weight", "qscale_act") if is_matrix else ():
            stored[f"{name}.{scale}"] = Stored("F32", (), NOTHING)
    return stored


@pytest.mark.parametrize("name", MISTRAL)
def test_heads_of_mistral_resolve(name):
    depth, params = MISTRAL[name]
    h, mlp = params["dim"], params["hidden_dim"]
    sizes = {
        "hidden_size": h,
        "num_attention_heads": params["n_heads"],
        "num_key_value_heads": params["n_kv_heads"],
        "head_dim": params["head_dim"],
        **{key: params[key] for key in LATENT if key in params},
    }
    shapes: dict[str, tuple[int, ...]] = {"eagle_linear": (h, 2 * h), "norm": (h,)}
    for i in range(params["n_layers"]):
        layer = {
            **{f"self_attn.{name}": shape for name, shape in attention(sizes, h).items()},
            "mlp.gate_proj": (mlp, h),
            "mlp.up_proj": (mlp, h),
            "mlp.down_proj": (h, mlp),
            "input_layernorm": (h,),
            "post_attention_layernorm": (h,),
        }
        shapes |= {f"layers.{i}.{MISTRAL_NAMES[name]}": shape for name, shape in layer.items()}
    config = mistral_config(params)
    check(config, CONFIG, "params.json")
    values = {"num_hidden_layers": depth, "hidden_size": h, "vocab_size": 131072}
    target = TargetFolder.of("t", Path("."), values)
    found = resolve(DraftCheckpoint("head", config, in_fp8(shapes), ()), target).config
    assert found.num_layers == params["n_layers"] and not found.uses_aux
    assert found.fc_input == "embedding_and_state" and found.norm_output
    assert found.state_norm and found.final_norm and found.lm_head_source == "target"
    if "kv_lora_rank" in params:
        assert found.latent == {key: params[key] for key in LATENT}
        assert found.softmax_scale is None
    if "llama_4_scaling" in params:
        assert found.position_scale == {"beta": 0.1, "original_max_position_embeddings": 8192}
        assert found.rope["scaling"]["mscale"] == found.rope["scaling"]["mscale_all_dim"]
    Eagle3Config.from_dict(found.to_dict())
    for pair in PAIRS:
        if pair.head == name:  # in 8 bits
            assert pair.megabytes == round(megabytes(shapes.values(), 1))


def test_a_head_in_nvfp4_resolves():
    """AEON-7/gemma-4-31B-it-speculator.eagle3-NVFP4: all but embedding and lm_head packed."""
    row = HEADS["RedHatAI/gemma-4-31B-it-speculator.eagle3"]
    stored: dict[str, Stored] = {}
    for name, shape in tensors(row).items():
        module = name.removesuffix(".weight")
        if len(shape) == 2 and module != "lm_head":
            rows, columns = shape
            stored |= {
                f"{module}.weight_packed": Stored("U8", (rows, columns // 2), NOTHING),
                f"{module}.weight_scale": Stored("F8_E4M3", (rows, columns // 16), NOTHING),
                f"{module}.weight_global_scale": Stored("F32", (1,), NOTHING),
                f"{module}.input_global_scale": Stored("F32", (1,), NOTHING),
            }
        elif name == "d2t":
            stored[name] = Stored("I64", shape, np.full(shape, 262144 - shape[0]).view(np.uint8))
        else:
            stored[name] = Stored("BF16", shape, NOTHING)
    config = as_nested(row["config"], "llama")
    config["quantization_config"] = {"format": "nvfp4-pack-quantized"}
    values = {"num_hidden_layers": 60, "hidden_size": 5376, "vocab_size": 262144}
    target = TargetFolder.of("t", Path("."), values)
    found = resolve(DraftCheckpoint("head", config, stored, ()), target).config
    assert found == resolved(row).config
