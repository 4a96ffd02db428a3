"""Freeze the logits of tiny random EAGLE-3 heads in the PyPI package ``specforge``.

    pip install torch "transformers>=5" && pip install --no-deps specforge==0.2.0
    python tools/golden/make_specforge.py [VARIANT ...]

Writes ``specforge-VARIANT/``, among the golden heads of the tests with the same three files, the
same tensors and the same unrolled steps as ``make_speculators.py``.
"""

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the library compiles its norms; nothing to gain here

import torch
from common import (
    GOLDEN,
    LAYER,
    NUM_SLOTS,
    NUM_STEPS,
    YARN,
    chosen,
    freeze,
    random_inputs,
    random_vocabulary,
    randomize,
    shifted,
    stub,
    without_init,
)

stub("accelerate", "psutil", "yunchang")
without_init("specforge", "specforge.modeling", "specforge.modeling.draft")

from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3  # noqa: E402
from transformers import LlamaConfig  # noqa: E402

CONFIG = {**LAYER, "draft_vocab_size": 48, "pretraining_tp": 1, "pad_token_id": None}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

VARIANTS = {
    "plain": {},
    "fc-norm": {"fc_norm": True},
    "target-hidden-size": {"target_hidden_size": 48},  # wider than the head's 32
    "linear-rope": {"rope_parameters": LINEAR},
    "yarn-rope": {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rope_parameters": {**YARN, "mscale_all_dim": 0.5},
    },
}


@torch.no_grad()
def expect(model: LlamaForCausalLMEagle3) -> dict[str, torch.Tensor]:
    tokens, features = random_inputs(model.vocab_size, model.target_hidden_size)
    mask = torch.full((1, 1, NUM_SLOTS, NUM_SLOTS), float("-inf")).triu(1)
    positions = torch.arange(NUM_SLOTS)[None]
    cached = [[], []]
    state = model.project_hidden_states(features[None])
    logits = []
    for step in range(NUM_STEPS):
        embeddings = model.embed_input_ids(shifted(tokens, step)[None])
        # The library adds the number of cached steps to the positions.
        state = model.backbone(embeddings, state, cached, mask, positions)
        logits.append(model.compute_logits(state)[0])
    return {"tokens": tokens, "features": features, "logits": torch.stack(logits)}


def main() -> None:
    torch.set_num_threads(1)
    for seed, variant in chosen(VARIANTS):
        torch.manual_seed(100 + seed)
        config = LlamaConfig(**{**CONFIG, **VARIANTS[variant]})
        model = LlamaForCausalLMEagle3(config)
        t2d, d2t = random_vocabulary(config.vocab_size, config.draft_vocab_size)
        model.t2d.copy_(t2d)
        model.d2t.copy_(d2t)
        randomize(model)
        folder = GOLDEN / f"specforge-{variant}"
        freeze(model, folder, expect(model), "specforge", variant, 100 + seed)


if __name__ == "__main__":
    main()
