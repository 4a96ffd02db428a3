"""Train an EAGLE-3 head on three texts by heart, for tests/drafters/test_every_drafter.py.

    pip install torch speculators==0.9.0
    PYTHONPATH=tests/support:. python tools/golden/learn_eagle.py

The library's own model is trained on the greedy texts of a tiny target, by its unrolled forward:
chains of five drafts from every position at once. ``learned-eagle3/`` holds the files that its
``save_pretrained`` writes, in bfloat16; the embedding is the target's.
"""

import numpy as np
import torch
from block_twin import PROMPTS, features_of
from common import GOLDEN, save_published, vocabulary_of
from helpers import VOCAB, plain, tiny_llama
from make_speculators import Eagle3DraftModel, Eagle3SpeculatorConfig, make_config, run
from transformers import LlamaConfig

TAPS = [1, 3, 6]
LENGTH = 32  # tokens of a text
DEPTH = 5  # drafts in a chain
STEPS = 1200  # of training, at most


def make_model(kept: torch.Tensor) -> Eagle3DraftModel:
    """Make a head that can draft the tokens ``kept``."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    flags = {"eagle_aux_hidden_state_layer_ids": TAPS, "draft_vocab_size": len(kept)}
    config = make_config(Eagle3SpeculatorConfig, "eagle3", DEPTH, (LlamaConfig, sizes, flags))
    model = Eagle3DraftModel(config)
    model.load_vocab_mappings(*vocabulary_of(kept, VOCAB))
    return model


def main() -> None:
    torch.manual_seed(5)
    torch.set_num_threads(1)
    target = tiny_llama(num_hidden_layers=6)
    texts = [prompt + plain(target, prompt, LENGTH + DEPTH + 1) for prompt in PROMPTS]
    kept = torch.tensor(sorted({token for text in texts for token in text}))
    model = make_model(kept)
    table = torch.tensor(np.array(target.model.embed_tokens.weight))
    model.embed_tokens.weight.data = table.bfloat16().float()
    for module in (model.lm_head, model.verifier_lm_head):
        torch.nn.init.normal_(module.weight, std=0.1)
    place = torch.full((VOCAB,), -1).scatter(0, kept, torch.arange(len(kept)))
    rows = [torch.tensor(features_of(target, tuple(TAPS), text)).float()[:-1] for text in texts]
    trained = [w for n, w in model.named_parameters() if "verifier" not in n and "embed" not in n]
    optimizer = torch.optim.Adam(trained, 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for i in range(STEPS):
        lost = torch.tensor(0.0)
        right = 0
        asked = 0
        for prompt, text, features in zip(PROMPTS, texts, rows, strict=True):
            tokens = torch.tensor(text[1:])  # with the features of the one before
            slots = torch.arange(len(prompt) - 1, len(tokens) - DEPTH - 1)
            for depth, logits in enumerate(run(model, tokens, features, ttt_steps=DEPTH)):
                wanted = place[tokens[slots + depth + 1]]
                lost = lost + torch.nn.functional.cross_entropy(logits[slots], wanted)
                right += int((logits[slots].argmax(-1) == wanted).sum())
                asked += len(slots)
        optimizer.zero_grad()
        lost.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        if i % 50 == 49:
            print(i + 1, lost.item(), right / asked, flush=True)
            if right == asked and lost < 0.2:
                break
    save_published(model, GOLDEN / "learned-eagle3")


if __name__ == "__main__":
    main()
