"""Freeze losses and gradients of a Gemma 4 assistant, computed by transformers and PyTorch.

    pip install torch "transformers>=5.19"
    python tools/golden/make_training_assistant.py

No public trainer drafts as the assistant does: the model is transformers' own, the loss is by
definition. Writes ``training-assistant/training.safetensors``, which has what ``lessons.py`` says,
about the assistant and the target of ``assistant-dense/``. Chain after chain, ``NUM_STEPS`` drafts
are made from the keys and values before it, and compared with the target's distributions; the loss
of a step is the mean divergence of the drafts whose place is part of an answer.
"""

import json

import torch
from common import GOLDEN, report
from lessons import LENGTHS, random_texts, trained
from make_assistant import NUM_STEPS, VOCAB, seen_in, steps
from safetensors.torch import load_file, save_file
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig

DECAY = 0.8
CAP = 30.0  # of the target's logits, as in Gemma 4
SOURCE = GOLDEN / "assistant-dense"


def make_target() -> Gemma4ForCausalLM:
    """Load the frozen target in float32."""
    sizes = json.loads((SOURCE / "target.json").read_text())
    target = Gemma4ForCausalLM(Gemma4TextConfig(**sizes, final_logit_softcapping=CAP))
    stored = load_file(SOURCE / "target.safetensors")
    weights = {name: array.float() for name, array in stored.items()}
    left_out, unknown = target.load_state_dict(weights, strict=False)
    assert set(left_out) <= {"lm_head.weight"} and not unknown
    return target.eval()


def losses_of(target, assistant, text: list[int], counts: list[bool]) -> list[list[torch.Tensor]]:
    """Return the divergences of each step, of all chains of a text."""
    states, rows = seen_in(target, text)
    with torch.no_grad():
        said = target(torch.tensor([text]), use_cache=False).logits[0].log_softmax(dim=-1)
    found = [[] for _ in range(NUM_STEPS)]
    for position in range(1, len(text) - 1):
        known = [*text[position:], *[0] * NUM_STEPS]  # behind the text nothing counts
        logits = steps(target, assistant, states, rows, known, position, taught=True)
        for step in range(min(NUM_STEPS, len(text) - 1 - position)):
            before = position + step  # of the place that is drafted
            if counts[before]:
                drafted = logits[step].log_softmax(dim=-1)
                divergence = said[before].exp() * (said[before] - drafted)
                found[step].append(divergence.sum())
    return found


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(900)
    target = make_target()
    assistant = Gemma4AssistantForCausalLM.from_pretrained(SOURCE, dtype=torch.float32).eval()
    tokens, counts = random_texts(VOCAB)
    by_text = [
        losses_of(target, assistant, text[:length].tolist(), own[:length].tolist())
        for text, own, length in zip(tokens, counts, LENGTHS, strict=True)
    ]
    by_step = [[x for part in own for x in part] for own in zip(*by_text, strict=True)]
    loss = sum(DECAY**step * torch.stack(own).mean() for step, own in enumerate(by_step))
    loss.backward()
    arrays = {f"gradient.{name}": weight.grad for name, weight in trained(assistant).items()}
    arrays |= {"tokens": tokens, "counts": counts, "losses": loss.detach()[None]}
    folder = GOLDEN / "training-assistant"
    folder.mkdir(exist_ok=True)
    made_by = {"made_by": f"seed 900, torch {torch.__version__}"}
    save_file(arrays, folder / "training.safetensors", made_by)
    report(folder)


if __name__ == "__main__":
    main()
