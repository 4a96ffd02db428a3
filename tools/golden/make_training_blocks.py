"""Freeze losses and gradients of tiny drafters of blocks in the PyPI package ``specforge``.

    pip install torch "transformers>=5" && pip install --no-deps specforge==0.2.0
    python tools/golden/make_training_blocks.py [VARIANT ...]

Writes ``training-VARIANT/``; see ``lessons.py``. Blocks stand behind ``anchors`` (B, N), -1: none,
which are random in the library. Its labels are the tokens of the text. ``dflash-text`` weighs
positions by an exponential decay and divides by the sum of weights, as the authors of DFlash have
it in the paper; ``dspark-*`` have the loss of DSpark's authors: a tenth of cross-entropy, nine
tenths of the L1 distance, and the confidence head's own.
"""

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from common import chosen, randomize, stub, without_init
from lessons import (
    DRAFTER,
    TAPS,
    anchors_of_texts,
    freeze_lesson,
    frozen_target,
    random_texts,
    target_states,
)

stub("accelerate", "psutil", "yunchang", "triton")
without_init("specforge", "specforge.algorithms", "specforge.core", "specforge.modeling")

from specforge.algorithms.common.dflash_family_model import (  # noqa: E402
    OnlineDFlashModel,
    OnlineDSparkModel,
)
from specforge.modeling.draft.dflash import DFlashDraftModel  # noqa: E402
from specforge.modeling.draft.dspark import DSparkDraftModel  # noqa: E402
from transformers import Qwen3Config  # noqa: E402

BLOCK = 5
MASK = 95
LAYERS = {
    **DRAFTER,
    "num_target_layers": 4,
    "block_size": BLOCK,
    "layer_types": ["full_attention", "full_attention"],
}
SLIDING = {
    "layer_types": ["full_attention", "sliding_attention"],
    "use_sliding_window": True,
    "sliding_window": 6,
}
INSIDE = {"mask_token_id": MASK, "target_layer_ids": [tap - 1 for tap in TAPS]}
SPARK = {
    "projector_type": "dspark",
    "markov_rank": 8,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
DSPARK = (OnlineDSparkModel, DSparkDraftModel)
# variant: (classes, changes to the config, to its dflash_config, gamma of the decay)
VARIANTS = {
    "dflash-text": ((OnlineDFlashModel, DFlashDraftModel), SLIDING, {}, 3.0),
    "dspark": (DSPARK, {}, {**SPARK, "markov_head_type": "vanilla"}, 4.0),
    "dspark-rnn": (DSPARK, {}, {**SPARK, "markov_head_type": "rnn"}, 4.0),
}


def main() -> None:
    torch.set_num_threads(1)
    target = frozen_target()
    anchors = anchors_of_texts()
    for seed, name in chosen(VARIANTS):
        (make_trainer, make), changes, inside, gamma = VARIANTS[name]
        torch.manual_seed(600 + seed)
        tokens, counts = random_texts()
        config = Qwen3Config(**LAYERS | changes, dflash_config=INSIDE | inside)
        config._attn_implementation = "sdpa"
        head = randomize(make(config))
        trainer = make_trainer(
            head,
            target.lm_head,
            target.model.embed_tokens,
            MASK,
            block_size=BLOCK,
            attention_backend="sdpa",
            loss_decay_gamma=gamma,
        )
        trainer._sample_anchor_positions = lambda *_: (anchors.clamp(min=0), anchors >= 0)
        features, _ = target_states(target, tokens)
        is_answer = torch.cat([torch.zeros(len(tokens), 1), counts[:, :-1].float()], dim=1)
        given = {"input_ids": tokens, "hidden_states": features, "loss_mask": is_answer}
        if "dspark" in name:
            entering, _ = target_states(target, tokens, (4,))
            given["target_last_hidden_states"] = target.model.norm(entering).detach()
        more = {"tokens": tokens, "counts": counts, "anchors": anchors}
        freeze_lesson(name, 600 + seed, head, lambda: trainer(**given)[0], more)  # noqa: B023


if __name__ == "__main__":
    main()
