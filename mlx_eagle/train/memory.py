"""Memory of a run: how much it will need, whether that fits, and a limit that keeps it there."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import maybe_set_recommended_wired_limit

from ..system.device import memory, this_machine, weight_bytes
from .batches import PAD_TO, padded_length
from .chunks import CHUNK_BYTES
from .data import Examples
from .settings import LossSettings, TrainSettings
from .student import Student
from .teacher import ROWS_AT_ONCE

LIMIT = 0.9  # of what is to be taken: MLX looks at it before an array, and not at its size
ATTENDED, COMPARED = 5.5, 3.3  # arrays of a chunk's size that attention and losses have at once


def amount(size: float) -> str:
    """4.52e9 -> "4.5 GB"; 3e6 -> "3 MB" """
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


@dataclass(frozen=True)
class Needs:
    """Bytes of memory that a run takes at most, by ``parts``, of ``usable`` ones."""

    parts: dict[str, float]
    usable: float
    is_checkpointed: bool

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {amount(size)}" for name, size in self.parts.items())
        how = "computed again (--grad-checkpoint)" if self.is_checkpointed else "kept"
        return (
            f"Training takes about {amount(self.total)} of the {amount(self.usable)} of memory "
            f"that can be used: {parts}. Activations are {how}."
        )


@dataclass(frozen=True)
class Sizes:
    """What a batch of one rank is at most: texts, slots of each, and slots that count."""

    num_texts: int
    length: int
    num_counted: int


def needs_of(
    student: Student, target_bytes: float, sizes: Sizes, losses: LossSettings, is_summed: bool
) -> dict[str, float]:
    """Bytes that training takes at its most, by part.

    ``is_summed``: gradients of several batches. Counted from what ``losses.py`` keeps and makes
    with MLX waiting for what it has begun rather than running ahead; the factors were measured
    (see the log of November 2026).
    """
    c, item = student.head.config, student.dtype.size
    trained = dict(tree_flatten(student.head.trainable_parameters())).values()
    num = student.num_parameters
    own = weight_bytes(student.head) - 4 * num
    slots, hidden = sizes.num_texts * sizes.length, c.hidden_size
    heads, keys = c.num_heads * c.head_dim, 2 * c.num_kv_heads * c.head_dim
    batch = slots * item * (c.num_aux * c.target_hidden_size + hidden)
    batch += 4 * sizes.num_counted * c.draft_vocab_size
    # Of a layer's step, what its gradient is made of; beside it, of a step, what others are.
    layer = 8 * hidden + 2 * (heads + keys) + 3 * c.intermediate_size
    kept = 3 * hidden + 2 * keys * c.num_layers
    chunk = sizes.num_texts * c.num_heads * sizes.length**2 * 4
    attention = slots * item * 8 * hidden + ATTENDED * min(CHUNK_BYTES, chunk)
    logits = 4 * sizes.num_counted * c.draft_vocab_size * losses.num_steps
    compared = COMPARED * min(CHUNK_BYTES, logits)
    if losses.checkpoint:
        again = slots * item * (layer * c.num_layers + 3 * c.intermediate_size - hidden)
        active = losses.num_steps * slots * item * kept + max(again, attention, compared)
    else:
        active = losses.num_steps * slots * item * layer * c.num_layers
        active += max(attention, compared)
    gradients = (4 if is_summed else item) * num
    # Weights in the type that the head computes in, and a batch's own gradients beside the sum.
    copies = (item * num if item < 4 else 0) + (item * num if is_summed else 0)
    update = 16 * max(w.size for w in trained)
    # The target's logits, and parts of what they say before they are put together.
    taught = 2 * item * min(sizes.num_counted, max(ROWS_AT_ONCE, sizes.length))
    taught *= c.vocab_size
    taught += 4 * sizes.num_counted * c.draft_vocab_size
    return {
        "target": target_bytes,
        "weights": 4 * num + own,
        "their moments": 8 * num,
        "gradients": gradients,
        "batch": batch,
        "activations": max(copies + active, update, taught - gradients),
    }


def fitting(
    settings: TrainSettings, student: Student, target_bytes: float, examples: Examples
) -> tuple[TrainSettings, Needs]:
    """The settings, with gradient checkpointing where it is needed, and what they take.

    Raises ValueError, with the flags that would fit, where the memory cannot hold it.
    """
    longest = max(len(x.tokens) for x in examples.train)
    answer = max(x.num_answer for x in examples.train)
    usable = memory(this_machine())[1]
    ranks = mx.distributed.init().size()

    def needs(batch: int, parts: int, length: int, checkpoint: bool) -> Needs:
        num = max(1, batch // ranks)
        sizes = Sizes(num, padded_length(length), num * min(answer, length))
        losses = replace(settings.losses(), checkpoint=checkpoint)
        found = needs_of(student, target_bytes, sizes, losses, parts > 1)
        return Needs(found, usable, checkpoint)

    batch, parts = settings.batch_size, settings.grad_accumulation_steps
    choices = [False, True] if settings.grad_checkpoint is None else [settings.grad_checkpoint]
    for checkpoint in choices:
        found = needs(batch, parts, longest, checkpoint)
        if found.total <= usable:
            return replace(settings, grad_checkpoint=checkpoint), found
    flags = "--grad-checkpoint" if settings.grad_checkpoint is False else ""
    lengths = [longest >> i for i in range(longest.bit_length()) if longest >> i >= PAD_TO]
    batches = [size for size in range(batch, 0, -1) if batch % size == 0]
    for length, size in product(lengths or [longest], batches):
        if size % ranks or needs(size, parts * batch // size, length, True).total > usable:
            continue
        if size < batch:
            flags += f" --batch-size {size} --grad-accumulation-steps {parts * batch // size}"
        if length < longest:
            flags += f" --max-seq-length {length}"
        raise ValueError(f"{found} That does not fit: give {flags.strip()}.")
    raise ValueError(
        f"{found} That does not fit, nor does a batch of one short sequence: give a target of "
        "fewer bits, or a smaller --draft-vocab-size or --intermediate-size."
    )


@contextmanager
def memory_kept_to(size: float, of_others: float = 0.0) -> Iterator[None]:
    """Within, MLX waits for what it has begun rather than take more than ``size`` bytes.

    What others in this process hold, ``of_others`` bytes, comes on top. On a Mac what it takes
    stays in place, as in mlx-lm's trainer.
    """
    maybe_set_recommended_wired_limit()
    before = mx.set_memory_limit(int(of_others + LIMIT * size))
    try:
        yield
    finally:
        mx.set_memory_limit(before)
