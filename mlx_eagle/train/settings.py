"""Settings of a training run: each with its default, and what is refused."""

from dataclasses import asdict, dataclass, fields
from typing import Any

import mlx.core as mx

from ..system.cli_values import LARGEST, Range, check_ranges, flag_of

LOSSES = ("ce", "lk-alpha", "lk-lambda")
TEMPERATURES = (0.0, 0.6, 1.0)
CACHE_BITS = 8  # fewer change what is learnt


@dataclass(frozen=True)
class LossSettings:
    """``num_steps`` of the training-time test, step j weighted by ``decay`` ** j.

    ``kind``: "ce", soft cross-entropy; "lk-alpha", minus the mean log of the acceptance rate;
    "lk-lambda", cross-entropy and one minus the acceptance rate, mixed by ``kl_scale`` *
    exp(-``kl_decay`` * acceptance rate).
    """

    num_steps: int = 7
    decay: float = 0.8
    kind: str = "ce"
    kl_scale: float = 1.0
    kl_decay: float = 1.0
    checkpoint: bool = False

    def __post_init__(self) -> None:
        if self.kind not in LOSSES:
            raise ValueError(f"loss is {self.kind!r}: give one of {', '.join(LOSSES)}.")
        if self.num_steps < 1:
            raise ValueError(f"ttt_steps is {self.num_steps}: give 1 or more.")

    @property
    def weights(self) -> mx.array:
        """The weight of each step, (num_steps,)."""
        return mx.array([self.decay**step for step in range(self.num_steps)])


@dataclass(frozen=True)
class AnswerSettings:
    """How prompts are answered.

    ``temperatures``: every prompt is answered once at each. ``rows``: sequences decoded at
    once. ``max_tokens``: of one answer. ``max_prompt_tokens``: longer prompts are passed over.
    """

    temperatures: tuple[float, ...] = TEMPERATURES
    max_tokens: int = 512
    max_prompt_tokens: int = 1024
    rows: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_prompt_tokens", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give 1 or more.")
        if not self.temperatures or min(self.temperatures) < 0:
            raise ValueError(
                f"temperatures are {list(self.temperatures)}: give one or more, none below 0."
            )


def parse_temperatures(text: str) -> tuple[float, ...]:
    """0,0.6,1 -> (0.0, 0.6, 1.0)"""
    return tuple(float(part) for part in text.split(","))


# What a run that goes on may have otherwise than the one before.
FREE = (
    "output",
    "resume",
    "iters",
    "steps_per_report",
    "steps_per_eval",
    "save_every",
    "val_batches",
    "test_prompts",
    "test_tokens",
    "keep_checkpoints",
    "cache_features",
    "grad_checkpoint",
    "quantize",
    "q_bits",
    "q_group_size",
    "answer_rows",
)


@dataclass(frozen=True)
class TrainSettings:
    """Named as the flags of ``mlx_lm.lora`` wherever they mean the same.

    ``batch_size`` is that of all ranks together; ``iters`` counts batches, of which
    ``grad_accumulation_steps`` make one step of the optimizer. ``val_batches`` -1 evaluates on
    all that is held out; ``test_prompts`` 0 generates nothing at the end. ``grad_checkpoint``
    None is on where the memory asks for it.
    """

    model: str
    data: str
    output: str
    init: str | None = None
    adapter_path: str | None = None
    trust_remote_code: bool = False
    dtype: str | None = None
    mask_prompt: bool = True
    iters: int = 1000
    batch_size: int = 8
    learning_rate: float = 1e-4
    warmup: float = 0.015
    weight_decay: float = 0.0
    max_grad_norm: float = 0.5
    max_seq_length: int = 2048
    grad_checkpoint: bool | None = None
    grad_accumulation_steps: int = 1
    ttt_steps: int = 7
    step_decay: float = 0.8
    loss: str = "ce"
    kl_scale: float = 1.0
    kl_decay: float = 1.0
    num_layers: int = 1
    draft_vocab_size: int | None = None
    aux_layers: tuple[int, ...] | None = None
    intermediate_size: int | None = None
    steps_per_report: int = 10
    steps_per_eval: int = 200
    save_every: int = 100
    val_batches: int = 25
    test_prompts: int = 4
    test_tokens: int = 64
    keep_checkpoints: int = 2
    seed: int = 0
    cache_features: str | None = None
    cache_bits: int | None = None
    resume: bool = False
    regenerate: bool = False
    answer_temps: tuple[float, ...] = TEMPERATURES
    answer_tokens: int = 512
    answer_rows: int = 32
    quantize: bool = False
    q_bits: int | None = None
    q_group_size: int = 64

    def __post_init__(self) -> None:
        least = {
            "iters": 1,
            "batch_size": 1,
            "max_seq_length": 8,
            "grad_accumulation_steps": 1,
            "num_layers": 1,
            "steps_per_report": 1,
            "steps_per_eval": 1,
            "save_every": 1,
            "test_prompts": 0,
            "test_tokens": 2,
            "keep_checkpoints": 1,
        }
        ranges = (Range(name, low, LARGEST, f"{low} or more") for name, low in least.items())
        check_ranges(self, ranges)
        if not self.learning_rate > 0:
            raise ValueError(f"--learning-rate is {self.learning_rate}: give more than 0.")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"--warmup is {self.warmup}: give a share of all steps, below 1.")
        if self.cache_bits not in (None, CACHE_BITS):
            raise ValueError(
                f"--cache-bits is {self.cache_bits}: give {CACHE_BITS}, or leave it out."
            )
        if self.cache_bits is not None and self.cache_features is None:
            raise ValueError("--cache-bits is about what --cache-features keeps: give both.")
        self.losses()  # refuses what it does not know, and so does
        self.answers()

    def losses(self) -> LossSettings:
        return LossSettings(
            num_steps=self.ttt_steps,
            decay=self.step_decay,
            kind=self.loss,
            kl_scale=self.kl_scale,
            kl_decay=self.kl_decay,
            checkpoint=bool(self.grad_checkpoint),
        )

    def answers(self) -> AnswerSettings:
        return AnswerSettings(
            temperatures=self.answer_temps,
            max_tokens=self.answer_tokens,
            max_prompt_tokens=self.max_seq_length,
            rows=self.answer_rows,
            seed=self.seed,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def check_same(self, before: dict[str, Any]) -> None:
        """Raise ValueError where a run with settings ``before`` cannot be gone on with so."""
        for field in fields(self):
            if field.name in FREE or field.name not in before:
                continue
            now, then = getattr(self, field.name), before[field.name]
            now = list(now) if isinstance(now, tuple) else now
            if now != then:
                raise ValueError(
                    f"{flag_of(field.name)} is {now}, but the run to go on with has {then}: give "
                    "it the same, or begin a new run in another --output."
                )
