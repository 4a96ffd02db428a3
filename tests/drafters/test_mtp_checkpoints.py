"""Where MTP layers are found: in a target's shards, or in a folder of their own."""

from argparse import Namespace
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import write_config
from helpers import PROMPT, byte_tokenizer, plain, speculative, tiny_llama
from mlx.utils import tree_flatten
from mlx_lm.models import glm4_moe, mimo_v2_flash, qwen3_next, step3p5
from mtp_checkpoints import (
    FAMILIES,
    Published,
    check_layers,
    full_config,
    qwen3_by_speculators,
    write_checkpoint,
)

import mlx_eagle
from mlx_eagle.commands import flags
from mlx_eagle.draft_models import open_beside
from mlx_eagle.drafters.kinds import recognise
from mlx_eagle.drafters.mtp import load_mtp, make_mtp_head
from mlx_eagle.drafters.mtp_layers import with_final_norms

QWEN = FAMILIES["qwen3.5"]()
MOE = FAMILIES["qwen3.5 moe, tied"]()
GLM = FAMILIES["glm-4.5"]()


@pytest.mark.parametrize("part", [QWEN, MOE, GLM], ids=["qwen3.5", "qwen3.5 moe", "glm-4.5"])
def test_a_folder(part, tmp_path):
    folder = write_checkpoint(tmp_path / "target", part)
    (folder / "model-00001-of-00003.safetensors").write_bytes(b"never read")
    check_layers(mlx_eagle.open_drafter("mtp", part.target, target=folder), part)
    copies = mlx_eagle.open_drafter("mtp+lookup", part.target, target=folder)
    tokens, _ = speculative(part.target, copies, PROMPT, 10, num_draft_tokens=2)
    assert tokens == plain(part.target, PROMPT, 10)


def test_a_folder_of_one_file(tmp_path):
    (tmp_path / "target").mkdir()
    mx.save_safetensors(str(tmp_path / "target" / "model.safetensors"), QWEN.arrays())
    write_config(tmp_path / "target", {"model_type": "qwen3_5"})
    check_layers(mlx_eagle.open_drafter("mtp", QWEN.target, target=tmp_path / "target"), QWEN)


def test_where_the_tokenizer_is_from(tmp_path):
    """As in ``mlx_lm.load``: a caller from Python need not say it again."""
    folder = write_checkpoint(tmp_path / "target", QWEN)
    tokenizer = byte_tokenizer()
    tokenizer._tokenizer.name_or_path = str(folder)
    check_layers(mlx_eagle.open_drafter("mtp", QWEN.target, tokenizer), QWEN)


def test_other_targets_are_refused_by_what_they_are(tmp_path):
    with pytest.raises(ValueError, match=r"^the target is a llama model: MTP layers are known"):
        mlx_eagle.open_drafter("mtp", tiny_llama(), target=tmp_path)


# Folders of MTP layers alone, as mlx-vlm and mlx-community publish them.


def final(part: Published) -> dict[str, np.ndarray]:
    """Qwen's tensors as in a folder: no prefix, norms as they are multiplied with."""
    found = {}
    for name, array in part.tensors.items():
        is_norm = array.ndim == 1
        found[name.removeprefix("mtp.")] = array + 1 if is_norm else array
    return found


def write_folder(folder: Path, tensors: dict, **config) -> str:
    folder.mkdir()
    arrays = {name: mx.array(array) for name, array in tensors.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    write_config(folder, {"model_type": "qwen3_5_mtp", "block_size": 4} | config)
    return str(folder)


@pytest.mark.parametrize("norms", ["final", "less one", "mixed", "small ones"])
def test_a_folder_of_layers(tmp_path, norms):
    """What norms hold is told by the target's own, not by what the file is called."""
    tensors, part = final(QWEN), QWEN
    if norms != "final":
        raw = {name.removeprefix("mtp."): array for name, array in QWEN.tensors.items()}
        mixed = [name for name in raw if norms == "less one" or name.startswith("layers.")]
        mixed = [] if norms == "small ones" else mixed
        tensors |= {name: raw[name] for name in mixed}
        if norms == "mixed":  # the two that go with the layer's
            names = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")
            tensors |= {name: raw[name] for name in names}
    if norms == "small ones":  # in either reading nearer to 0 than to 1
        small = {f"mtp.{name}": QWEN.tensors[f"mtp.{name}"] * 0 - 0.7 for name in PRE}
        part = Published(QWEN.target, {**QWEN.tensors, **small}, QWEN.naive, QWEN.inner)
        tensors = final(part)
    path = write_folder(tmp_path / "layers", tensors)
    assert recognise(tensors, {"model_type": "qwen3_5_mtp"}) == "mtp"
    check_layers(mlx_eagle.open_drafter(path, QWEN.target), part)


@pytest.mark.parametrize("is_final", [True, False])
@pytest.mark.parametrize("last, own", [(1.25, 1.5), (2.58, 2.9), (1.25, 3.0), (-0.1, 1.2)])
def test_a_large_last_norm_is_read_as_the_others(last, own, is_final):
    """Qwen3.5-27B's and 4B's have means of 1.25 and 2.58, less one."""
    target = FAMILIES["qwen3.5"]().target
    text = target.language_model if "language_model" in target else target
    text.model.norm.weight = mx.full(64, own)
    shift = 0 if is_final else 1
    found = {n: mx.array(a - shift if a.ndim == 1 else a) for n, a in final(QWEN).items()}
    found["norm.weight"] = mx.full(64, last + 1 - shift)
    read = with_final_norms(found, target)
    assert mx.allclose(read["norm.weight"], mx.full(64, last + 1)).item()


PRE = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")


def packed(tensors: dict, skip: tuple[str, ...] = ()) -> tuple[dict, dict]:
    """The same with its matrices in 4 bits, and what they are worth."""
    stored, worth = {}, {}
    for name, array in tensors.items():
        array = mx.array(array)
        if array.ndim == 1 or name in skip:
            stored[name] = worth[name] = array
            continue
        path = name.removesuffix(".weight")
        parts = mx.quantize(array, 32, 4)
        stored |= dict(zip((name, f"{path}.scales", f"{path}.biases"), parts, strict=True))
        worth[name] = mx.dequantize(*parts, 32, 4)
    return stored, worth


@pytest.mark.parametrize("part", [QWEN, MOE], ids=["dense", "moe"])
def test_a_packed_folder(part, tmp_path):
    tensors = final(part)
    if part is MOE:
        for name in ("gate", "up", "down"):
            own = [tensors.pop(f"layers.0.mlp.experts.{i}.{name}_proj.weight") for i in range(4)]
            tensors[f"layers.0.mlp.switch_mlp.{name}_proj.weight"] = np.stack(own)
    stored, worth = packed(tensors, skip=("layers.0.mlp.gate.weight",))
    path = write_folder(tmp_path / "layers", stored, quantization={"bits": 4, "group_size": 32})
    drafter = mlx_eagle.open_drafter(path, part.target)
    dense = load_mtp(worth, part.target)
    tokens, features = mx.array(PROMPT[1:]), mx.random.normal((len(PROMPT) - 1, 64))
    for each in (drafter, dense):
        each.extend(tokens, features)
    assert mx.allclose(drafter._first, dense._first, rtol=1e-3, atol=1e-3)
    text, _ = speculative(part.target, drafter, PROMPT, 10, num_draft_tokens=2)
    assert text == plain(part.target, PROMPT, 10)
    with pytest.raises(ValueError, match="is already quantized to 4 bits"):
        mlx_eagle.open_drafter(path, part.target, quantize_bits=4)


def test_packed_without_a_word_on_how(tmp_path):
    stored, _ = packed(final(QWEN))
    path = write_folder(tmp_path / "layers", stored)
    with pytest.raises(ValueError, match=r"^no head can be .* packed, but nothing says how"):
        mlx_eagle.open_drafter(path, QWEN.target)


def test_packing_while_loading(tmp_path):
    folder = write_checkpoint(tmp_path / "target", MOE)
    drafter = mlx_eagle.open_drafter("mtp", MOE.target, target=folder, quantize_bits=8)
    layer = drafter.head.layers[0]
    assert "scales" in drafter.head.fc and "scales" in layer.self_attn.q_proj
    assert "scales" not in layer.mlp.gate  # the router
    text, _ = speculative(MOE.target, drafter, PROMPT, 10, num_draft_tokens=2)
    assert text == plain(MOE.target, PROMPT, 10)


def test_layers_of_another_target_are_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "target", QWEN)
    other = FAMILIES["qwen3-next moe"]()
    with pytest.raises(ValueError, match=r"the head lacks layers.0.mlp"):
        mlx_eagle.open_drafter("mtp", other.target, target=folder)


def test_the_commands_open_them(tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "target", QWEN)
    monkeypatch.setattr(flags, "load", lambda *_, **__: (QWEN.target, byte_tokenizer()))
    args = Namespace(
        draft_model="mtp", model=str(folder), quantize_draft=None, draft_window=None,
        draft_vocab=None, draft_cache="exact", adapter_path=None, dtype=None, num_draft_tokens=2,
        quantize_activations=False, trust_remote_code=False, pipeline=False, exact=False,
    )  # fmt: skip
    _, _, drafter = flags.load_pair(args, {})
    check_layers(drafter, QWEN)


def test_auto_takes_them_where_no_head_is_known(tmp_path, capsys):
    folder = write_checkpoint(tmp_path / "Some-Qwen", QWEN)
    opened = partial(open_beside, None, model=QWEN.target, target=folder)
    for name, copies, expected in (
        ("auto", False, "mtp"),
        ("auto", True, "mtp+lookup"),
        ("auto+lookup", False, "mtp+lookup"),
    ):
        found, drafter = opened(name, copies=copies)
        assert found == expected and (drafter.copies is not None) == ("+" in found)
        check_layers(drafter, QWEN)
    assert flags.default_drafter(None, str(folder)) == "auto"
    assert capsys.readouterr().err.endswith(
        "Drafting with an MTP layer of the model's own (licence: the target's), and copying what "
        "the text repeats.\n"
    )
    write_config(folder, {"model_type": "llama", "num_hidden_layers": 2})
    assert flags.default_drafter(None, str(folder)) is None
    assert opened("auto")[0] == "lookup"


def test_auto_of_an_installation_takes_them(tmp_path):
    folder = write_checkpoint(tmp_path / "Some-Qwen", QWEN)
    tokenizer = byte_tokenizer()
    tokenizer._tokenizer.name_or_path = str(folder)
    with mlx_eagle.installed(draft_model="auto") as installation:
        check_layers(installation.default_for(QWEN.target, tokenizer), QWEN)


FLASH, NEMOTRON = FAMILIES["glm-4.7-flash"](), FAMILIES["nemotron-h"]()


def glm_folder(name: str) -> str | None:
    """As mlx-vlm calls them; it keeps copies of the target's tables as well."""
    rest = name.removeprefix("model.layers.3.")
    tables = {"embed_tokens.weight": "model.embed_tokens.weight"}
    tables["shared_head.head.weight"] = "lm_head.weight"
    if rest in tables:
        return tables[rest]
    if rest.split(".")[0] in ("enorm", "hnorm", "eh_proj"):
        return f"model.{rest}"
    return (
        f"model.{rest.replace('shared_head.norm', 'shared_head_norm')}"
        if (rest.startswith("shared_head"))
        else f"model.mtp_block.{rest}"
    )


@pytest.mark.parametrize(
    ("part", "rename", "model_type"),
    [
        (FLASH, glm_folder, "glm4_moe_lite_mtp"),
        (NEMOTRON, lambda name: name.removeprefix("mtp."), "nemotron_h_mtp"),
    ],
    ids=["glm", "nemotron"],
)
def test_folders_of_other_families(part, rename, model_type, tmp_path):
    tensors = {rename(name): array for name, array in part.tensors.items()}
    assert recognise(tensors, {"model_type": model_type}) == "mtp"
    path = write_folder(tmp_path / "layers", tensors, model_type=model_type)
    check_layers(mlx_eagle.open_drafter(path, part.target), part)


def test_blocks_of_8_bits(tmp_path):
    """DeepSeek's matrices as it publishes them: float8 with a scale for each block."""
    part = FAMILIES["deepseek-v3"]()
    stored, worth = part.arrays(), part.arrays()
    for name in ("self_attn.o_proj.weight", "mlp.experts.2.up_proj.weight"):
        name = f"model.layers.3.{name}"
        scale = mx.abs(stored[name]).max() / 448
        stored[name] = mx.to_fp8(stored[name] / scale)
        stored[f"{name}_scale_inv"] = scale.reshape(1, 1)
        worth[name] = mx.from_fp8(stored[name], dtype=mx.bfloat16) * scale
    drafter, same = (load_mtp(weights, part.target) for weights in (stored, worth))
    for each in (drafter, same):
        each.extend(mx.array(PROMPT[1:]), mx.ones((len(PROMPT) - 1, 64)))
    assert mx.allclose(drafter._first, same._first, rtol=0.05, atol=0.05)


FULL_SIZE = {
    # What the makers' configs say, and the shapes of their published layers.
    "Qwen3-Next-80B-A3B": (
        qwen3_next,
        {
            "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48,
            "intermediate_size": 5120, "num_attention_heads": 16, "num_key_value_heads": 2,
            "head_dim": 256, "linear_num_value_heads": 32, "linear_num_key_heads": 16,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10,
            "decoder_sparse_step": 1, "shared_expert_intermediate_size": 512,
            "mlp_only_layers": [], "moe_intermediate_size": 512, "rms_norm_eps": 1e-6,
            "vocab_size": 151936, "rope_theta": 1e7, "partial_rotary_factor": 0.25,
            "max_position_embeddings": 262144,
        },
        {
            "fc.weight": (2048, 4096), "layers.0.self_attn.q_proj.weight": (8192, 2048),
            "layers.0.self_attn.k_proj.weight": (512, 2048),
            "layers.0.mlp.switch_mlp.up_proj.weight": (512, 512, 2048),
            "layers.0.mlp.gate.weight": (512, 2048), "norm.weight": (2048,),
        },
    ),
    "GLM-4.5-Air": (
        glm4_moe,
        {
            "model_type": "glm4_moe", "hidden_size": 4096, "num_hidden_layers": 46,
            "vocab_size": 151552, "intermediate_size": 10944, "max_position_embeddings": 131072,
            "moe_intermediate_size": 1408, "norm_topk_prob": True, "num_attention_heads": 96,
            "n_group": 1, "head_dim": 128, "topk_group": 1, "n_shared_experts": 1,
            "n_routed_experts": 128, "routed_scaling_factor": 1.0, "num_experts_per_tok": 8,
            "first_k_dense_replace": 1, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "rope_theta": 1e6, "rope_scaling": None, "use_qk_norm": False,
            "tie_word_embeddings": False, "attention_bias": True, "partial_rotary_factor": 0.5,
        },
        {
            "fc.weight": (4096, 8192), "layers.0.self_attn.q_proj.weight": (12288, 4096),
            "layers.0.self_attn.k_proj.bias": (1024,),
            "layers.0.mlp.switch_mlp.down_proj.weight": (128, 4096, 1408),
            "layers.0.mlp.gate.e_score_correction_bias": (128,),
        },
    ),
    "Step-3.5-Flash": (
        step3p5,
        {
            "model_type": "step3p5", "hidden_size": 4096, "num_hidden_layers": 45,
            "vocab_size": 128896, "num_attention_heads": 64, "num_attention_groups": 8,
            "head_dim": 128, "intermediate_size": 11264, "rope_theta": [5e6, 1e4, 1e4, 1e4] * 12,
            "layer_types": ["full_attention", *["sliding_attention"] * 3] * 12,
            "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 12, "sliding_window": 512,
            "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 8},
            "moe_layers_enum": ",".join(map(str, range(3, 45))), "moe_num_experts": 288,
        },
        {
            "steps.0.fc.weight": (4096, 8192),
            "steps.2.layers.0.self_attn.q_proj.weight": (12288, 4096),
            "steps.1.layers.0.self_attn.g_proj.weight": (96, 4096),
            "steps.2.layers.0.mlp.up_proj.weight": (11264, 4096), "steps.2.norm.weight": (4096,),
        },
    ),
    "MiMo-V2-Flash": (
        mimo_v2_flash,
        {
            "model_type": "mimo_v2_flash", "hidden_size": 4096, "num_hidden_layers": 48,
            "vocab_size": 152576, "intermediate_size": 16384, "moe_intermediate_size": 2048,
            "num_experts_per_tok": 8, "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0] * 8,
            "moe_layer_freq": [0, *[1] * 47], "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False, "sliding_window_size": 128,
            "num_attention_heads": 64, "num_key_value_heads": 4, "n_shared_experts": None,
            "n_routed_experts": 256, "routed_scaling_factor": None, "topk_method": "noaux_tc",
            "scoring_func": "sigmoid", "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
            "max_position_embeddings": 262144, "layernorm_epsilon": 1e-5, "rope_theta": 5e6,
            "swa_rope_theta": 1e4, "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8,
            "head_dim": 192, "v_head_dim": 128, "swa_head_dim": 192, "swa_v_head_dim": 128,
            "partial_rotary_factor": 0.334, "attention_value_scale": 0.707,
        },
        {
            "steps.0.fc.weight": (4096, 8192),
            "steps.0.layers.0.self_attn.k_proj.weight": (1536, 4096),
            "steps.1.layers.0.self_attn.o_proj.weight": (4096, 8192),
            "steps.2.layers.0.self_attn.attention_sink_bias": (64,),
            "steps.2.layers.0.mlp.down_proj.weight": (4096, 16384),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FULL_SIZE)
def test_layers_at_full_size(name):
    """Shapes only: nothing is computed of what nobody asks for."""
    module, config, shapes = FULL_SIZE[name]
    target = module.Model(module.ModelArgs.from_dict(config))
    own = {path: array.shape for path, array in tree_flatten(make_mtp_head(target).parameters())}
    assert {path: own.get(path) for path in shapes} == shapes


def by_speculators(part: Published) -> dict[str, np.ndarray]:
    """Qwen's tensors under the names of speculators, which leaves norms less one."""
    names = {"fc.": "input_proj.", "norm.": "final_layernorm.", "layers.0.": ""}
    names |= {"pre_fc_norm_hidden.": "hidden_layernorm."}
    names |= {"pre_fc_norm_embedding.": "token_layernorm."}
    found = {}
    for name, array in part.tensors.items():
        bare = name.removeprefix("mtp.")
        start = next(start for start in names if bare.startswith(start))
        found[f"mtp_layers.0.{names[start]}{bare.removeprefix(start)}"] = array
    return found


@pytest.mark.parametrize("part", [QWEN, MOE], ids=["dense", "moe"])
def test_a_folder_of_speculators(part, tmp_path):
    """Also converted, where its config tells the target under a name of its own."""
    tensors = by_speculators(part)
    assert recognise(tensors, {"speculators_model_type": "mtp"}) == "mtp"
    path = write_folder(tmp_path / "layers", tensors)
    own = {"model_type": f"{part.target.model_type}_text", **part.config}
    config = {"speculators_model_type": "mtp", "transformer_layer_config": own}
    write_config(tmp_path / "layers", config)
    check_layers(mlx_eagle.open_drafter(path, part.target), part)
    mlx_eagle.convert.convert(path, str(tmp_path / "head"), quantize=False)
    check_layers(mlx_eagle.open_drafter(str(tmp_path / "head"), part.target), part)


def test_a_layer_that_speculators_trained_for_qwen3(tmp_path):
    part = qwen3_by_speculators()
    path = write_folder(tmp_path / "layers", part.tensors, model_type="qwen3")
    check_layers(mlx_eagle.open_drafter(path, part.target), part)
    write_config(tmp_path / "layers", {"transformer_layer_config": full_config(part)})
    mlx_eagle.convert.convert(path, str(tmp_path / "head"), quantize=False)
    check_layers(mlx_eagle.open_drafter(str(tmp_path / "head"), part.target), part)
