"""Table of the kinds of drafters that are trained: a file and a row each."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.utils import dequantize_model

from ..decoding.setup import AUTO
from ..draft_models import known_drafter
from ..drafters.kinds import KINDS
from ..drafters.mtp import FLOAT32
from ..drafters.pairs import drafters_for
from ..drafters.target_parts import activation_dtype, find_embedding
from ..system.cli_values import flag_of
from ..system.ranks import is_first
from . import assistant, block, dflash2, dspark, eagle3, mtp, peagle
from .data import Examples
from .given import Given, open_given
from .memory import NeedsOf, needs_of
from .recipe import Recipe
from .settings import MIXED, TrainSettings
from .student import FRESH, Student, fresh_block, write_fresh

LORA_RATE = 2e-4  # learning rate of lora, whatever the kind
FRESH_RATE = 6e-4  # learning rate of a fresh drafter of blocks
ENOUGH = 20e6  # tokens of answers that one should see, at least
WHOLE = ("norm", "embed_tokens", "markov_head", "confidence_head", "candidate_selector")
"""Parts of heads that lora leaves as they are."""


@dataclass(frozen=True)
class TrainedKind:
    """A kind that is trained.

    ``recipe`` makes its recipe of settings, student, model and the drafter that it begins with.
    ``defaults`` are of settings that are None, ``flags`` other settings that only some kinds
    have, ``losses`` those it can be given. Parameters with a ``frozen`` part in their names are
    not trained, nor those that are not among the ``names`` of published ones, where a kind knows
    these. ``more`` are settings that have parameters trained, too, with a part of their names.
    EAGLE heads have a ``make_student`` that makes a fresh student or changes the given one.
    """

    recipe: Callable[..., Recipe]
    defaults: dict[str, Any]
    flags: tuple[str, ...]
    losses: tuple[str, ...]
    frozen: tuple[str, ...] = ()
    names: Callable[..., set[str]] | None = None
    more: dict[str, str] = field(default_factory=dict)
    needs: NeedsOf = needs_of
    make_student: Callable[..., Student] | None = None

    @property
    def settings(self) -> set[str]:
        """Settings that this kind has and others may not."""
        return {*self.defaults, *self.flags, *self.more}


LORA = ("fine_tune_type", "lora_rank", "lora_scale")
SIZES = ("num_layers", "intermediate_size")
EAGLE = (*SIZES, "draft_vocab_size", "aux_layers", "cache_features", "cache_bits")
SHAPE = (*SIZES, "block_size")
GO_WITH = {
    "gamma": ("position_weights", "decay"),
    "lora_rank": ("fine_tune_type", "lora"),
    "lora_scale": ("fine_tune_type", "lora"),
}
"""Settings that say something only where another one has this value."""
USUAL = {"learning_rate": 1e-4, "warmup": 0.015, "max_grad_norm": 0.5}  # as EAGLE-3's trainers
MTP = {
    "learning_rate": 5e-5, "warmup": 0.05, "max_grad_norm": 0.5, "ttt_steps": 3,
    "step_decay": 0.6, "loss": "kl", "labels": "text", "mtp_attention": "decoded",
}  # fmt: skip
BLOCKS = {
    "learning_rate": 5e-5, "warmup": 0.04, "max_grad_norm": 1.0, "loss": "ce", "labels": "argmax",
    "anchors": 128, "position_weights": "dpace", "loss_divisor": "rows",
}  # fmt: skip
DSPARK = BLOCKS | {
    "loss": "ce=.1,l1=.9", "labels": "text", "position_weights": "decay", "gamma": 4.0,
    "loss_divisor": "weights",
}  # fmt: skip
DFLASH = TrainedKind(
    block.BlockRecipe,
    BLOCKS,
    ("gamma", "mask_token_id", *SHAPE, *LORA),
    ("ce",),
    frozen=block.FROZEN,
    needs=partial(needs_of, between=8, attended=9.0),
)
TRAINED: dict[str, TrainedKind] = {
    "eagle3": TrainedKind(
        eagle3.Eagle3Recipe,
        USUAL | {"ttt_steps": 7, "step_decay": 0.8, "loss": "ce"},
        (*EAGLE, "kl_scale", "kl_decay"),
        ("ce", "lk-alpha", "lk-lambda"),
        frozen=(eagle3.EMBEDDING,),
        needs=partial(needs_of, between=4, attended=5.5),
        make_student=eagle3.make_student,
    ),
    "peagle": TrainedKind(
        peagle.PEagleRecipe,
        USUAL | {"depths": 8, "loss": "kl"},
        (*EAGLE, "mask_token_id"),
        ("kl", "tv", "l1"),
        needs=partial(needs_of, between=8, attended=5.5),
        make_student=peagle.make_student,
    ),
    "mtp": TrainedKind(
        mtp.MTPRecipe,
        MTP,
        LORA,
        MIXED,
        frozen=mtp.FROZEN,
        names=mtp.published_alike,
        more={"train_experts": mtp.EXPERTS},
    ),
    "assistant": TrainedKind(
        assistant.AssistantRecipe,
        USUAL | {"ttt_steps": 4, "step_decay": 0.8, "loss": "kl", "labels": "argmax"},
        LORA,
        MIXED,
        frozen=assistant.FROZEN,
        more={"train_embeddings": assistant.TABLE},
        needs=partial(needs_of, gated=assistant.GELU, own_rows=False),
    ),
    "dflash": DFLASH,
    "dspark": replace(
        DFLASH,
        recipe=dspark.DSparkRecipe,
        defaults=DSPARK,
        losses=MIXED,
        needs=partial(DFLASH.needs, spread=dspark.DSparkRecipe.spread),
    ),
    "dflash2": replace(DFLASH, recipe=dflash2.DFlash2Recipe),
}
"""Kinds by their names in converted folders, and P-EAGLE heads."""

BY_KIND = frozenset[str]().union(*(row.settings for row in TRAINED.values()))
"""Settings that some kinds have."""
MADE_OF = {"peagle": "eagle3"}
"""Kinds whose drafters can be made of those of another one."""
KEPT = "{} is of fresh drafters, and --init keeps that of the one it names: leave it out."


def title_of(kind: str) -> str:
    """Name a kind for people, with its article."""
    titles = {name: row.title for name, row in KINDS.items()} | {"peagle": "a P-EAGLE head"}
    return titles.get(kind, f"a {kind} drafter")


def begin_with(settings: TrainSettings) -> tuple[TrainSettings, Given | None]:
    """Find what --init names, and give the settings the defaults of its kind.

    Raises ValueError for kinds that are not trained, not made anew, or not that of the drafter,
    and for settings that they do not have.
    """
    name = settings.init
    kind = settings.kind or "eagle3"
    given = None
    if name == AUTO:
        name = known_drafter(settings.model, TRAINED)
        if is_first():
            print(f"Beginning with {name}, the drafter that is known for {settings.model}.")
    if name is not None:
        given = open_given(name, settings.model)
        kind = kind if MADE_OF.get(str(settings.kind)) == given.kind else given.kind
    title = title_of(kind)
    if kind not in TRAINED:
        what = f"--kind is {kind}" if given is None else f"{name} is {title}"
        raise ValueError(f"{what}, and only {', '.join(TRAINED)} are trained here: name another.")
    if given is None and kind not in FRESH and TRAINED[kind].make_student is None:
        raise ValueError(
            f"no fresh {title.split(' ', 1)[1]} is trained here, for it comes with its model: "
            "name the one to begin with by --init."
        )
    if settings.kind not in (None, kind):
        raise ValueError(
            f"--kind is {settings.kind}, and {name} is {title}: leave out one of --kind and "
            "--init."
        )
    return filled(replace(settings, init=name), kind), given


def filled(settings: TrainSettings, kind: str) -> TrainSettings:
    """Give settings the defaults of a kind; ValueError for flags that it does not have."""
    row = TRAINED[kind]
    title = title_of(kind)
    is_lora = settings.fine_tune_type == "lora"
    given = [x.name for x in fields(settings) if getattr(settings, x.name) != x.default]
    for name in given:
        flag = flag_of(name)
        if name in BY_KIND - row.settings:
            raise ValueError(f"{flag} is not for {title}: leave it out.")
        if name in (*SHAPE, "aux_layers") and settings.init is not None:
            raise ValueError(KEPT.format(flag))
        if name in row.more and is_lora:
            raise ValueError(
                f"{flag} trains whole matrices, and --fine-tune-type lora small ones beside them: "
                "leave out one of the two."
            )
    asked = settings.terms if "tv" in row.losses else {settings.loss}
    if settings.loss is not None and not {*asked} <= {*row.losses}:
        raise ValueError(
            f"--loss is {settings.loss}, and {title} is trained with one of "
            f"{', '.join(row.losses)}: give one of these."
        )
    if settings.position_weights == "dpace" != row.defaults.get("position_weights"):
        raise ValueError(
            f"--position-weights is dpace, which goes by cross-entropy, and {title} is not "
            "trained with that alone: give decay."
        )
    defaults = dict(row.defaults)
    if settings.init is None and kind in FRESH:
        defaults["learning_rate"] = FRESH_RATE
    if is_lora:
        defaults["learning_rate"] = LORA_RATE
    if settings.position_weights == "decay":
        defaults["loss_divisor"] = "weights"
    if settings.loss == "kl" and "loss_divisor" in defaults:
        defaults["loss_divisor"] = "rows"
    missing = {k: v for k, v in defaults.items() if getattr(settings, k) is None}
    found = replace(settings, kind=kind, **missing)
    for name, (other, value) in GO_WITH.items():
        if name in given and getattr(found, other) != value:
            raise ValueError(f"{flag_of(name)} is about {flag_of(other)} {value}: give both.")
    return found


def train_only(settings: TrainSettings, head: nn.Module, wanted: set[str]) -> None:
    """Freeze all but the wanted parameters; with lora all but the matrices put beside these.

    Hu et al. 2021, arXiv:2106.09685. The layers are mlx-lm's.
    """
    if settings.fine_tune_type == "lora":
        added = {
            path: LoRALinear.from_base(module, settings.lora_rank, scale=settings.lora_scale)
            for path, module in head.named_modules()
            if isinstance(module, nn.Linear | nn.QuantizedLinear)
            and f"{path}.weight" in wanted
            and path.split(".")[0] not in WHOLE
        }
        head.update_modules(tree_unflatten(list(added.items())))
        wanted = {f"{path}.{part}" for path in added for part in ("lora_a", "lora_b")}
    head.freeze()
    for path, module in head.named_modules():
        keys = [key for key in module if f"{path}.{key}".lstrip(".") in wanted]
        module.unfreeze(recurse=False, keys=keys)


def student_of(settings: TrainSettings, given: Given, model: nn.Module) -> Student:
    """Take the drafter that a run begins with, with the parameters that it trains in float32."""
    row = TRAINED[settings.kind]
    drafter = given.load(model, mx.float32)
    head = drafter.head
    if settings.fine_tune_type == "full":
        dequantize_model(head)
    names = {name for name, _ in tree_flatten(head.parameters())}
    wanted = {name for name in names if not any(part in name for part in row.frozen)}
    if row.names is not None and given.published is not None:
        wanted &= row.names(given.published, head, model)
    for flag, part in row.more.items():
        wanted |= {name for name in names if part in name and getattr(settings, flag)}
    train_only(settings, head, wanted)
    embedding, vocab_size = find_embedding(model)
    dtype = activation_dtype(embedding)
    trained = {name for name, _ in tree_flatten(head.trainable_parameters())}
    frozen = [
        (name, array.astype(dtype))
        for name, array in tree_flatten(head.parameters())
        if name not in trained and array.dtype == mx.float32 and not name.endswith(FLOAT32)
    ]
    head.load_weights(frozen, strict=False)
    mx.eval(head.parameters())
    ids = drafter.to_target
    if ids is None:  # a matrix of its own may be padded otherwise
        own = head.lm_head.weight.shape[0] if "lm_head" in head else vocab_size
        ids = mx.arange(min(own, vocab_size), dtype=mx.int32)
    return Student(head, drafter.embed, drafter.taps, ids, dtype, drafter)


def with_mask(
    settings: TrainSettings, given: Given | None, tokenizer: TokenizerWrapper, vocab_size: int
) -> TrainSettings:
    """Give settings the token of masked slots, if a drafter is made that has such slots.

    It is the last row of the embedding that names no token, if none is given. Raises ValueError
    if there is none, or if the given drafter keeps its own.
    """
    token = settings.mask_token_id
    if "mask_token_id" not in TRAINED[settings.kind].flags:
        return settings
    if given is not None and given.kind == settings.kind:
        if token is not None:
            raise ValueError(KEPT.format("--mask-token-id"))
        return settings
    found = f"{token} cannot be"
    if token is None:
        found = "every row of the embedding is a token"
        free = set(range(vocab_size)) - set(tokenizer.get_vocab().values())
        token = max(free, default=vocab_size)
    if token >= vocab_size or token in {tokenizer.pad_token_id, *tokenizer.eos_token_ids}:
        raise ValueError(
            f"{found}, and masked slots need one that no text has: name a token below "
            f"{vocab_size} by --mask-token-id, neither padding nor an end of text."
        )
    return replace(settings, mask_token_id=token)


def begin(
    settings: TrainSettings,
    given: Given | None,
    model: nn.Module,
    config: dict[str, Any],
    examples: Examples,
) -> tuple[Student, Given | None]:
    """Make the student; return the drafter, too, that it begins with, unless it is made here."""
    row = TRAINED[settings.kind]
    if given is None and settings.kind in FRESH:
        scratch = tempfile.TemporaryDirectory(prefix="mlx-eagle-")
        folder = Path(scratch.name) / "fresh"
        head = fresh_block(settings, model, config)
        write_fresh(folder, settings.kind, head, settings.seed)
        given = replace(open_given(str(folder), settings.model), scratch=scratch)
        num = sum(example.num_answer for example in examples.train)
        if num < ENOUGH and is_first():
            name, published = drafters_for([settings.model])
            known = f", such as {' or '.join(published[:3])} for {name}" if published else ""
            print(
                f"Warning: {num} tokens of answers are few for a fresh drafter of blocks, which "
                f"wants {ENOUGH / 1e6:.0f} million and more: begin with a published one by --init"
                f"{known}."
            )
    student = None if given is None else student_of(settings, given, model)
    if row.make_student is not None:
        student = row.make_student(settings, student, model, config, examples)
    assert student is not None
    return student, given
