"""Memory of training at an 8B target: the page's table, from shapes alone."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from block_twin import KINDS
from mlx_lm.models import gemma4_text, qwen3, qwen3_5
from true_configs import QWEN3_8B

from mlx_eagle.drafters.assistant import Assistant, AssistantConfig, AssistantDrafter
from mlx_eagle.drafters.mtp import MTPDrafter, make_mtp_head
from mlx_eagle.drafters.target_parts import find_embedding, lm_head_of
from mlx_eagle.system.device import weight_bytes
from mlx_eagle.train import memory
from mlx_eagle.train.__main__ import settings_of
from mlx_eagle.train.data import Example, Examples
from mlx_eagle.train.kinds import TRAINED, filled, needs_for, student_of
from mlx_eagle.train.memory import amount, fitting
from mlx_eagle.train.settings import TrainSettings
from mlx_eagle.train.student import Student, fresh_block

PAGE = Path(__file__).parents[2] / "docs" / "pages" / "training.md"
ROOM = 40e9  # bytes that can be used
QWEN35_9B = {
    "model_type": "qwen3_5_text",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 12288,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 248320,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
GEMMA4_E4B = {
    "hidden_size": 2560,
    "num_hidden_layers": 42,
    "intermediate_size": 10240,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 18,
    "sliding_window_pattern": 6,
    "use_double_wide_mlp": False,
}
E4B_ASSISTANT = AssistantConfig(
    hidden_size=256,
    target_hidden_size=2560,
    vocab_size=262144,
    intermediate_size=2048,
    num_heads=4,
    head_dim=256,
    global_head_dim=512,
    layer_types=(*["sliding_attention"] * 3, "full_attention"),
    num_centroids=2048,
    centroid_top_k=32,
)
NAMES = {"mtp": "Qwen3.5-9B", "assistant": "Gemma 4 E4B"}


def target_of(kind: str, bits: int) -> nn.Module:
    if kind == "mtp":
        model: Any = qwen3_5.Model(qwen3_5.ModelArgs("qwen3_5", QWEN35_9B))
    elif kind == "assistant":
        model = gemma4_text.Model(gemma4_text.ModelArgs(**GEMMA4_E4B))
    else:
        model = qwen3.Model(qwen3.ModelArgs.from_dict(QWEN3_8B))
    model.set_dtype(mx.bfloat16)
    if bits < 16:
        nn.quantize(model, group_size=64, bits=bits)
    return model


def drafter_of(kind: str, model: nn.Module, settings: TrainSettings) -> Any:
    """A drafter as published for this target, or as a fresh one would be."""
    if kind == "mtp":
        return MTPDrafter(make_mtp_head(model), model)
    if kind == "assistant":
        return AssistantDrafter(Assistant(E4B_ASSISTANT), model)
    _, _, make_drafter = KINDS[kind]
    embedding, _ = find_embedding(model)
    head = fresh_block(settings, model, QWEN3_8B)
    return make_drafter(head, embedding, lm_head_of(model, embedding))


def student_for(kind: str, model: nn.Module, settings: TrainSettings) -> Student:
    row = TRAINED[kind]
    if row.make_student is not None:
        nothing = Examples((), (), ())
        return row.make_student(settings, None, model, QWEN3_8B, nothing)
    drafter = drafter_of(kind, model, settings)
    given = SimpleNamespace(kind=kind, published=None, load=lambda model, dtype: drafter)
    return student_of(settings, given, model)


def needs_with(kind: str, model: nn.Module, flags: list[str]) -> memory.Needs:
    given = ["--model", "a", "--data", "b", "--output", "c", *flags]
    if "mask_token_id" in TRAINED[kind].flags:
        given += ["--mask-token-id", "151935"]
    settings = filled(settings_of(given), kind)
    student = student_for(kind, model, settings)
    length = settings.max_seq_length
    texts = Examples((Example((1,) * length, length),), (), ())
    return fitting(settings, student, weight_bytes(model), texts, needs_for(settings, student))[1]


def cell(kind: str, model: nn.Module, how: str) -> str:
    """Bytes that are announced, and what is proposed where they are too many."""
    if how == "lora" and "fine_tune_type" not in TRAINED[kind].flags:
        return "-"
    flags = ["--fine-tune-type", how] if how == "lora" else []
    way = ""
    try:
        found = needs_with(kind, model, flags)
    except ValueError as err:
        said, _, way = str(err).removesuffix(".").rpartition(" give ")
        if "nor does" in said:
            return "no: " + re.sub(r"(--[\w-]+)", r"`\1`", way)
        found = needs_with(kind, model, [*flags, *way.split()])
    again = "*" if found.is_checkpointed else ""
    return f"{amount(found.total)}{again}" + (f" with `{way}`" if way else "")


@pytest.mark.parametrize("kind", TRAINED)
def test_the_table_of_8b_targets_is_what_is_announced(kind, monkeypatch):
    """None of the arrays is ever computed."""
    monkeypatch.setattr(mx, "eval", lambda *arrays: None)
    monkeypatch.setattr(memory, "memory", lambda machine: (2 * ROOM, ROOM))
    models = [target_of(kind, bits) for bits in (4, 16)]
    cells = [cell(kind, model, how) for model in models for how in ("full", "lora")]
    row = " | ".join([f"| `{kind}`", NAMES.get(kind, "Qwen3-8B"), *cells]) + " |"
    assert row in PAGE.read_text().splitlines()
