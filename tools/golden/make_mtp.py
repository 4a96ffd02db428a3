"""Freeze mlx-vlm's states of tiny MTP layers, for tests/drafters/test_mtp_families.py.

In an environment with mlx-vlm 0.7.10 beside what the tests need, from the top of the repository:

    PYTHONPATH=tests/support:. python tools/golden/make_mtp.py

mlx-vlm has classes of its own for these layers, written by others from the makers' code. The
tensors and their inputs come from NumPy's seeded generator, so that only the states have to be
kept.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.speculative.drafters.nemotron_h_mtp.config import NemotronHMTPConfig
from mlx_vlm.speculative.drafters.nemotron_h_mtp.nemotron_h_mtp import NemotronHMTPDraftModel
from mlx_vlm.speculative.drafters.qwen3_5_mtp.config import Qwen3_5MTPConfig
from mlx_vlm.speculative.drafters.qwen3_5_mtp.qwen3_5_mtp import Qwen3_5MTPDraftModel
from mtp_checkpoints import FAMILIES, entering

GOLDEN = Path(__file__).parents[2] / "tests" / "support" / "golden" / "mtp.safetensors"


def make_qwen(name: str) -> Qwen3_5MTPDraftModel:
    part = FAMILIES[name]()
    text = {k: v for k, v in part.config.items() if v is not None}
    rope = {"type": "default", "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}
    text["rope_parameters"] = rope | {"rope_theta": text["rope_theta"]}
    values = {"model_type": "qwen3_5_mtp", "text_config": text}
    model = Qwen3_5MTPDraftModel(Qwen3_5MTPConfig.from_dict(values))
    model.load_weights(list(model.sanitize(part.arrays()).items()))
    return model


def qwen(name: str) -> mx.array:
    model = make_qwen(name)
    embeddings, states = entering()
    places = mx.arange(embeddings.shape[0])[None]
    return model._forward_hidden(embeddings[None], states[None], model.make_cache(), places)[0]


def nemotron() -> mx.array:
    part = FAMILIES["nemotron-h"]()
    text: dict[str, Any] = {k: v for k, v in part.config.items() if v is not None}
    text |= {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": list("*E")}
    config = NemotronHMTPConfig(text_config=text)
    model = NemotronHMTPDraftModel(config)
    weights = {name.removeprefix("mtp."): array for name, array in part.arrays().items()}
    model.load_weights(list(model.sanitize(weights).items()))
    embeddings, states = entering()
    return model._forward_hidden(embeddings[None], states[None], None, model.make_cache())[0][0]


if __name__ == "__main__":
    found = {name: qwen(name) for name in ("qwen3.5", "qwen3.5 moe, tied")}
    found["nemotron-h"] = nemotron()
    mx.save_safetensors(str(GOLDEN), found)
    print({name: float(np.abs(np.array(array)).max()) for name, array in found.items()})
