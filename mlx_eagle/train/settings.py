"""Settings of a training run, each with its flag and default, and the values that are refused."""

import math
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from typing import Any

import mlx.core as mx

from ..system.cli_values import LARGEST, check_values, flag_of, layer_numbers, read_number, setting
from ..system.device import DTYPES

MIXED = ("ce", "kl", "tv", "l1")
LOSSES = (*MIXED, "lk-alpha", "lk-lambda")
CACHE_BITS = 8  # with fewer, other weights are learnt
KEPT = 0.7  # share of the places at a depth of P-EAGLE that are drafted at the next one, too
LEAST_KEPT = 0.2  # of all places, at any depth, as in P-EAGLE's trainers
FREE = (
    "output", "iters", "grad_checkpoint", "steps_per_report", "steps_per_eval", "save_every",
    "val_batches", "test_prompts", "test_tokens", "keep_checkpoints", "cache_features", "resume",
    "answer_rows", "quantize", "q_bits", "q_group_size", "report_to", "project_name",
)  # fmt: skip
"""Settings that may change when a run resumes."""
POSITIVE = (math.ulp(0.0), math.inf, "more than 0")
SHARE = (0, math.nextafter(1, 0), "a share of all steps, below 1")
BITS = (CACHE_BITS, CACHE_BITS, f"{CACHE_BITS}, or leave it out")


@dataclass(frozen=True)
class TrainSettings:
    """Settings of a run, each with a flag, named as in ``mlx_lm.lora`` if it means the same.

    ``batch_size`` is that of all ranks together; ``iters`` counts batches, of which
    ``grad_accumulation_steps`` make one step of the optimizer.
    """

    model: str = setting("Folder or hub repo of the target.", MISSING)
    data: str = setting("Folder with train.jsonl, or hub data set, as for mlx_lm.lora.", MISSING)
    output: str = setting("Folder for the head, its checkpoints, and how it went.", MISSING)
    init: str | None = setting(
        "Begin with this drafter, converted or as published; mtp: the target's own layers; auto: "
        "the drafter that is known for the target, or for the model that it was made from.",
        aliases=("--from",),
    )
    kind: str | None = setting(
        "Kind of a fresh drafter (default eagle3), or peagle to make one of an EAGLE-3 --init."
    )
    fine_tune_type: str = setting(
        "Train all weights, or small matrices beside them.", "full", choices=("full", "lora")
    )
    lora_rank: int = setting("Rank of the matrices of lora.", 16, least=1)
    lora_scale: float = setting("Factor of what the matrices of lora add.", 1.0, range=POSITIVE)
    train_embeddings: bool = setting("Train an assistant's table, and drop its clusters.", False)
    train_experts: bool = setting("Train the experts of MTP layers, too.", False)
    adapter_path: str | None = setting("Adapters of the target, as mlx_lm.lora writes them.")
    trust_remote_code: bool = setting("Let the target bring code of its own.", False)
    dtype: str | None = setting(
        "Floats of target and head (default: as stored; on a CPU float32).", choices=DTYPES
    )
    mask_prompt: bool = setting("Learn from answers only (the default).", True)
    iters: int = setting("Batches to train for.", 1000, least=0)
    batch_size: int = setting("Sequences per batch, of all machines together.", 8, least=1)
    learning_rate: float | None = setting("Peak learning rate (default: by kind).", range=POSITIVE)
    warmup: float | None = setting(
        "Share of all steps in which the learning rate rises (default: by kind).", range=SHARE
    )
    optimizer: str = setting(
        "Muon learns matrices between states and keeps one moment of them; all else is AdamW's.",
        "adamw",
        choices=("adamw", "muon"),
    )
    weight_decay: float = setting("Weight decay of the optimizer.", 0.0)
    max_grad_norm: float | None = setting(
        "Gradients are clipped to this norm (default: by kind).", range=POSITIVE
    )
    max_seq_length: int = setting("Longer sequences are cut.", 2048, least=8)
    grad_checkpoint: bool | None = setting(
        "Compute activations again, not keep them (default: where the memory asks for it)."
    )
    grad_accumulation_steps: int = setting("Batches per step of the optimizer.", 1, least=1)
    ttt_steps: int | None = setting("Drafts in a row to train on (default: by kind).", least=1)
    depths: int | None = setting("Tokens that a P-EAGLE head drafts at once (default 8).", least=1)
    step_decay: float | None = setting("Step j weighs this to the power of j (default: by kind).")
    loss: str | None = setting(
        "ce, kl, tv, l1, or a mix: ce=.1,tv=.9; or lk-alpha, lk-lambda (default: by kind)."
    )
    labels: str | None = setting("Labels of ce (default: by kind).", choices=("text", "argmax"))
    mtp_attention: str | None = setting(
        "Slots that a step of MTP layers sees (default decoded).", choices=("decoded", "step")
    )
    anchors: int | None = setting("Blocks of a text, new in each epoch (default 128).", least=1)
    block_size: int | None = setting("Slots of a fresh drafter's block (default 16).", least=2)
    mask_token_id: int | None = setting(
        "Token of a fresh drafter's masked slots (default: the last that has no text).", least=0
    )
    position_weights: str | None = setting(
        "Weights by position in a block (default: by kind).", choices=("dpace", "decay")
    )
    gamma: float | None = setting(
        "Positions in which decay falls by e (default: by block).", range=POSITIVE
    )
    loss_divisor: str | None = setting(
        "Divisor of a block's losses (default: by kind).", choices=("weights", "rows", "texts")
    )
    kl_scale: float = setting("lk-lambda: share of cross-entropy where nothing is accepted.", 1.0)
    kl_decay: float = setting("lk-lambda: how fast that share falls with acceptance.", 1.0)
    num_layers: int | None = setting("A fresh drafter's layers (default 1, blocks 5).", least=1)
    draft_vocab_size: int | None = setting(
        "Tokens that a head can draft (default: of --init, or 32000, or all).", least=1
    )
    aux_layers: tuple[int, ...] | None = setting(
        "Layers of the target whose input a fresh head takes: 2,16,29.",
        type=layer_numbers,
        metavar="LAYERS",
    )
    intermediate_size: int | None = setting("Width of a fresh head's MLP (default: the target's).")
    steps_per_report: int = setting("Batches between two lines about the loss.", 10, least=1)
    steps_per_eval: int = setting("Batches between two evaluations.", 200, least=1)
    save_every: int = setting("Batches between two checkpoints.", 100, least=1)
    val_batches: int = setting("Batches to evaluate on; -1 is all that is held out.", 25, least=-1)
    test_prompts: int = setting("Held-out prompts to answer at the end; 0 is none.", 4, least=0)
    test_tokens: int = setting("Tokens of each answer, one per draft length.", 64, least=2)
    keep_checkpoints: int = setting("Checkpoints to keep.", 2, least=1)
    seed: int = setting("Seed of the fresh head and of the order of the data.", 0)
    cache_features: str | None = setting("Folder to keep the target's features and states in.")
    cache_bits: int | None = setting("Bits of a number there (default: as it is).", range=BITS)
    resume: bool = setting("Go on from the last checkpoint in --output.", False)
    regenerate: bool = setting("Learn from the target's own answers to the prompts.", False)
    answer_temps: tuple[float, ...] = setting(
        "Temperatures at each of which every prompt is answered (default 0,0.6,1).",
        (0.0, 0.6, 1.0),
        type=lambda text: tuple(read_number(float, part) for part in text.split(",")),
        metavar="T,T",
    )
    answer_tokens: int = setting("Most tokens of such an answer.", 512, least=1)
    answer_rows: int = setting("Answers that are decoded at once.", 32, least=1)
    report_to: str | None = setting("Services to report to: wandb, swanlab or wandb,swanlab.")
    project_name: str | None = setting("Name of the project at these services.")
    quantize: bool = setting("Quantize the finished head.", False)
    q_bits: int | None = setting("Bits of a weight (default: 4; fusion and output matrix 6).")
    q_group_size: int = setting("Weights that share a scale.", 64)

    def __post_init__(self) -> None:
        check_values(self)
        if self.cache_bits is not None and self.cache_features is None:
            raise ValueError("--cache-bits is about what --cache-features keeps: give both.")
        if not self.answer_temps or min(self.answer_temps) < 0:
            raise ValueError(
                f"temperatures are {list(self.answer_temps)}: give one or more, none below 0."
            )
        _ = self.terms  # which refuses values of its own

    @property
    def num_steps(self) -> int:
        """Drafts in a row that are trained."""
        return self.depths or self.ttt_steps or 1

    @property
    def step_weights(self) -> mx.array:
        """Weights of these, (num_steps,): step j has ``step_decay`` ** j; without that, all 1."""
        decay = 1.0 if self.step_decay is None else self.step_decay
        return mx.array([decay**step for step in range(self.num_steps)])

    @property
    def terms(self) -> dict[str, float]:
        """Weights of the losses that are mixed: ce=.1,tv=.9 -> ce .1, tv .9."""
        if self.loss is None or self.loss in LOSSES:
            return {self.loss or "ce": 1.0}
        parts = [part.partition("=") for part in self.loss.split(",")]
        terms = {}
        with suppress(ValueError):
            terms = {name: float(weight) if by else 1.0 for name, by, weight in parts}
        is_whole = len(terms) == len(parts)
        if not is_whole or any(x not in MIXED or not 0 < w < LARGEST for x, w in terms.items()):
            raise ValueError(
                f"--loss is {self.loss}: give one of {', '.join(LOSSES)}, or of "
                f"{', '.join(MIXED)} a mix such as ce=.1,tv=.9."
            )
        return terms

    def share(self, step: int) -> float:
        """Return the share of all slots that a step has; a P-EAGLE head's have ever fewer."""
        return 1.0 if self.depths is None else max(KEPT**step, LEAST_KEPT)

    def check_same(self, before: dict[str, Any]) -> None:
        """Raise ValueError if a run that had the settings ``before`` cannot resume with these."""
        for each in fields(self):
            now = getattr(self, each.name)
            now = list(now) if isinstance(now, tuple) else now
            then = before.get(each.name, now)
            if each.name not in FREE and now != then:
                raise ValueError(
                    f"{flag_of(each.name)} is {now}, but the run to go on with has {then}: give "
                    "it the same, or begin a new run in another --output."
                )
