"""Freeze losses and gradients of tiny random EAGLE-3 heads in the PyPI package ``specforge``.

    pip install torch "transformers>=5" && pip install --no-deps specforge==0.2.0
    python tools/golden/make_training.py [VARIANT ...]

Writes ``training-VARIANT/``, among the golden heads of the tests, three safetensors files:
``target``, a llama; ``head``; and ``training``: a batch of padded texts, the loss of every step,
and the gradient of every trained weight of their weighted sum. On a CPU the library's Triton
kernel for the loss cannot run; its own reference implementation stands in for it.
"""

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from common import GOLDEN, chosen, random_vocabulary, randomize, report, stub, without_init
from lessons import LENGTHS, PROMPTS, SIZES, make_target, target_states
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

stub("accelerate", "psutil", "yunchang", "triton")
without_init(
    "specforge",
    "specforge.algorithms",
    "specforge.algorithms.eagle3",
    "specforge.core",
    "specforge.modeling",
)

import triton  # noqa: E402  (the stub)

triton.jit = lambda function: function

from specforge.algorithms.eagle3 import model as eagle3  # noqa: E402
from specforge.core.loss import _compute_loss  # noqa: E402
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3  # noqa: E402
from specforge.utils import padding  # noqa: E402

eagle3.LogSoftmaxLoss.apply = staticmethod(_compute_loss)

NUM_STEPS = 5
DECAY = 0.8
VARIANTS = {
    "ce": {"loss": None, "head": {}},
    "lk-alpha": {"loss": "alpha", "head": {}},
    "lk-lambda": {"loss": "lambda", "head": {}, "kl_scale": 0.7, "kl_decay": 2.0},
    "fc-norm": {"loss": None, "head": {"fc_norm": True}},
}


def expect(target: LlamaForCausalLM, head: LlamaForCausalLMEagle3, variant: dict) -> dict:
    """Train the head on one batch; return the batch, its losses and the gradients."""
    size = (len(LENGTHS), max(LENGTHS))
    tokens = torch.randint(0, SIZES["vocab_size"], size)
    ends = torch.tensor(LENGTHS)[:, None]
    places = torch.arange(size[1])[None]
    tokens = tokens * (places < ends)
    counts = (places >= torch.tensor(PROMPTS)[:, None]) & (places < ends - 1)
    features, logits = target_states(target, tokens)
    options = {key: variant[key] for key in ("kl_scale", "kl_decay") if key in variant}
    model = eagle3.OnlineEagle3Model(
        head, NUM_STEPS, attention_backend="sdpa", lk_loss_type=variant["loss"], **options
    )
    losses = model(
        input_ids=padding(tokens, left=False),
        attention_mask=(places < ends).long(),
        target=padding(logits, left=False),
        loss_mask=counts.long()[..., None],
        hidden_states=features,
    )[0]
    sum(DECAY**step * loss for step, loss in enumerate(losses)).backward()
    gradients = {
        f"gradient.{name}": weight.grad
        for name, weight in head.named_parameters()
        if weight.requires_grad
    }
    return {
        "tokens": tokens,
        "counts": counts,
        "features": features,
        "losses": torch.stack(losses).detach(),
        **gradients,
    }


def main() -> None:
    torch.set_num_threads(1)
    for seed, name in chosen(VARIANTS):
        variant = VARIANTS[name]
        torch.manual_seed(200 + seed)
        target = make_target()
        config = LlamaConfig(**SIZES, draft_vocab_size=40, **variant["head"])
        head = LlamaForCausalLMEagle3(config)
        randomize(target)
        randomize(head)
        # Larger logits, so that choices fall inside and outside of the draft vocabulary.
        target.lm_head.weight.data *= 4
        head.embed_tokens.weight.data.copy_(target.model.embed_tokens.weight)
        head.embed_tokens.weight.requires_grad_(False)
        t2d, d2t = random_vocabulary(config.vocab_size, config.draft_vocab_size)
        head.t2d.copy_(t2d)
        head.d2t.copy_(d2t)
        expected = expect(target, head, variant)
        folder = GOLDEN / f"training-{name}"
        folder.mkdir(exist_ok=True)
        for stem, module in (("target", target), ("head", head)):
            tensors = {
                key: value.bfloat16() if value.is_floating_point() else value
                for key, value in module.state_dict().items()
                if "rotary" not in key
            }
            made_by = {"made_by": f"{name}, seed {200 + seed}"}
            save_file(tensors, folder / f"{stem}.safetensors", made_by)
        made_by = f"{name}, seed {200 + seed}, torch {torch.__version__}"
        save_file(
            {key: value.contiguous() for key, value in expected.items()},
            folder / "training.safetensors",
            {"made_by": made_by},
        )
        report(folder)


if __name__ == "__main__":
    main()
