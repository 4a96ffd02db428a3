"""Frozen examples of training: their texts, the llama that judges them, and what is written.

A trainer's loss and gradients are in ``training-VARIANT/``, among the golden heads of the tests:

    config.json, model.safetensors
                     the drafter as the library's own ``save_pretrained`` leaves it, in bfloat16
    training.safetensors, computed from the same weights in float32:
        tokens   (B, T)  texts, padded with 0
        counts   (B, T)  whether the token after this one is part of an answer
        losses   (1,)    the loss
        gradient.NAME    its gradients

and more that a maker adds. The target is that of ``training-ce/`` with its layers 1, 2 and 4
tapped, if a maker says nothing else. Before, each drafter learns for some steps, so that some
drafts are likely.
"""

from collections.abc import Callable

import torch
from common import GOLDEN, LAYER, report, save_published
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

LENGTHS = (17, 12, 9)
PROMPTS = (5, 3, 7)
ANCHORS = ((5, 9, 13, 14), (3, 7, 10), (7,))
"""Tokens before a block, of each text: its successor is part of the answer, as it is itself."""
LEFT = 0.3  # of the first loss, when learning stops and losses are frozen
RATE = 0.01  # of Adam, with which a drafter learns
TAPS = (1, 2, 4)  # of the target's four layers; 4 enters its final norm
LAYERS = 4
SIZES = {
    **LAYER,
    "vocab_size": 96,
    "intermediate_size": 48,
    "pretraining_tp": 1,
    "pad_token_id": None,
}
DRAFTER = {
    **{key: value for key, value in SIZES.items() if key != "pretraining_tp"},
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "tie_word_embeddings": False,
}
"""Sizes of a small drafter's layers."""
TARGET = GOLDEN / "training-ce" / "target.safetensors"
"""Target of ``make_training.py``, which other examples have too."""


def make_target() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": LAYERS}))


def frozen_target() -> LlamaForCausalLM:
    """Load the target of all examples but those of ``make_training.py``, in float32."""
    target = make_target()
    target.load_state_dict({name: array.float() for name, array in load_file(TARGET).items()})
    return target.eval()


def random_texts(vocab_size: int = SIZES["vocab_size"]) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens (B, T), zeros behind each text, and whether the token after is an answer's."""
    size = (len(LENGTHS), max(LENGTHS))
    tokens = torch.randint(0, vocab_size, size)
    ends = torch.tensor(LENGTHS)[:, None]
    places = torch.arange(size[1])[None]
    counts = (places >= torch.tensor(PROMPTS)[:, None] - 1) & (places < ends - 1)
    return tokens * (places < ends), counts


def target_states(
    target: torch.nn.Module, tokens: torch.Tensor, taps: tuple[int, ...] = TAPS
) -> tuple[torch.Tensor, ...]:
    """Compute the features (B, T, 3 h) at the taps and the logits (B, T, V)."""
    entered = []
    entries = [*target.model.layers, target.model.norm]
    hooks = [
        entries[tap].register_forward_pre_hook(lambda _, args: entered.append(args[0]))
        for tap in taps
    ]
    with torch.no_grad():
        logits = target(tokens).logits
    for hook in hooks:
        hook.remove()
    return torch.cat(entered, dim=-1), logits


def packed(rows: torch.Tensor, behind: int, fill: float = 0) -> torch.Tensor:
    """Lay rows (B, T, ...) of the texts one behind the other, and ``behind`` more: (1, n, ...)."""
    parts = [row[:length] for row, length in zip(rows, LENGTHS, strict=True)]
    tail = torch.full((behind, *rows.shape[2:]), fill, dtype=rows.dtype)
    return torch.cat([*parts, tail])[None]


def anchors_of_texts() -> torch.Tensor:
    """Return the anchors (B, N), filled up with -1."""
    longest = max(len(own) for own in ANCHORS)
    return torch.tensor([[*own, *[-1] * (longest - len(own))] for own in ANCHORS])


def trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def learn(model: torch.nn.Module, loss_of: Callable[[], torch.Tensor]) -> None:
    """Let a model learn a little, and round its weights to bfloat16."""
    weights = trained(model)
    optimizer = torch.optim.Adam(weights.values(), RATE)
    first = loss = loss_of()
    while loss > LEFT * first:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss_of()
    for weight in weights.values():
        weight.data = weight.data.bfloat16().float()


def freeze_lesson(
    name: str,
    seed: int,
    model: torch.nn.Module,
    loss_of: Callable[[], torch.Tensor],
    more: dict[str, torch.Tensor],
) -> None:
    """Let a model learn a little, and write it with its loss and gradients, and ``more``."""
    learn(model, loss_of)
    loss = loss_of()
    loss.backward()
    arrays = {f"gradient.{key}": weight.grad.clone() for key, weight in trained(model).items()}
    arrays |= {"losses": loss.detach()[None], **more}
    assert all(torch.isfinite(value).all() for value in arrays.values()), name
    folder = GOLDEN / f"training-{name}"
    save_published(model, folder)
    made_by = {"made_by": f"{name}, seed {seed}, torch {torch.__version__}"}
    contiguous = {key: value.contiguous() for key, value in arrays.items()}
    save_file(contiguous, folder / "training.safetensors", made_by)
    report(folder)
