"""Memory of a run: its needs, whether they fit the machine, and a limit that holds it to them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import maybe_set_recommended_wired_limit

from ..drafters.head import Eagle3Head
from ..system.device import memory, this_machine, weight_bytes
from .batches import PAD_TO
from .chunks import CHUNK_BYTES
from .data import Examples
from .optimizer import is_for_muon
from .settings import TrainSettings
from .student import Student

LEAST = 2**26  # bytes that a run may take in any case: waiting to take less is slow, measured
LIMIT = 0.9  # of the announced bytes: MLX compares before it makes an array, without its size
CHAINED = 2.0  # arrays of all scores that a step has at once beside what is kept, measured
COMPARED = 3.6  # arrays of a chunk's size that the losses have at once, measured
KEPT = 3  # arrays of states that a step or layer keeps if it is computed again, measured
MIXED = 3  # arrays of the size of a convolution's kernels that each row has at once, measured
FULL = 4  # bytes of a number in float32


def amount(size: float) -> str:
    """Write bytes for people: 4.52e9 -> "4.5 GB"; 3e6 -> "3 MB"."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


@dataclass(frozen=True)
class Needs:
    """Bytes that a run takes at most, by ``parts``, and the bytes that are ``usable``."""

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
    """Largest batch of one rank: its texts, the slots of each, and all slots that count."""

    num_texts: int
    length: int
    num_counted: int


NeedsOf = Callable[[Student, float, Sizes, TrainSettings, bool], dict[str, float]]


def _numbers_of_row(head: nn.Module, is_within: bool, gated: int) -> int:
    """Count what the matrices of a head, or of what ``is_within`` its layers, keep of a row."""
    total = 0
    for name, module in head.named_modules():
        is_matrix = isinstance(module, nn.Linear | nn.QuantizedLinear)
        if is_matrix and ("layers." in name or not (is_within or name == "centroids")):
            out, packed = module.weight.shape
            inner = packed * 32 // getattr(module, "bits", 32)
            total += out + inner + gated * inner * ("down_proj" in name)
    return total


def needs_of(
    student: Student,
    target_bytes: float,
    sizes: Sizes,
    settings: TrainSettings,
    is_summed: bool,
    told: int = 0,
    spread: int = 1,
    gated: int = 0,
    own_rows: bool = True,
    between: int = 12,
    attended: float = 0.0,
) -> dict[str, float]:
    """Estimate the bytes that training takes at its peak, by part.

    ``is_summed`` if the gradients of several batches are added up; ``told`` is the ``width`` of
    the teacher, by default that of a state. A chain has a row for each slot and step, and sees
    the rows of its steps if it has ``own_rows``; of a drafter of blocks there is a row for each
    slot of each block. All matrices of the layers keep inputs and outputs, gates ``gated``
    more arrays, and a layer ``between`` arrays of states besides. Attention in chunks has
    ``attended`` arrays of a chunk's size at once; all else, 0, keeps its scores. ``spread`` is as
    in ``BlockRecipe``. These numbers were measured, while MLX waits for what it has begun instead
    of running ahead (see the log of November 2026).
    """
    item = student.dtype.size
    head = student.head
    slots = sizes.num_texts * sizes.length
    blocks = settings.anchors or 0
    block_size = head.config.block_size if blocks else 0
    steps = 1.0 if blocks else sum(map(settings.share, range(settings.num_steps)))
    rows = sizes.num_texts * blocks * block_size or slots * steps
    width = student.embed(mx.array([0])).shape[-1]
    layer = _numbers_of_row(head, is_within=attended > 0, gated=gated)
    layer += between * head.norm.weight.size * len(head.layers)
    names = ("num_heads", "num_attention_heads", "n_heads")
    found = [getattr(m, name, 0) for _, m in head.named_modules() for name in names]
    num_heads = max((x for x in found if isinstance(x, int)), default=1)
    columns = sizes.length * (1 if attended or not own_rows else settings.num_steps)
    scores = num_heads * FULL * rows / steps * (columns + block_size)
    compared = FULL * (rows if blocks else sizes.num_counted * steps) * len(student.ids)
    chunk = min(CHUNK_BYTES, spread * compared)
    kernels = [m.base_kernel.size for _, m in head.named_modules() if "base_kernel" in m]
    mixed = MIXED * sum(kernels) / (len(head.layers) if settings.grad_checkpoint else 1)
    kept = rows * item * (mixed + (KEPT * width if settings.grad_checkpoint else layer))
    again = rows * item * layer / (len(head.layers) if blocks else steps)
    if attended:
        scores = attended * min(CHUNK_BYTES, scores) + (chunk if spread > 1 else 0)
    else:
        own = scores * item / FULL * len(head.layers)  # kept of the last step, the largest
        every = own * (steps + 1) / 2 if own_rows else own * steps
        again += own + item * student.num_parameters  # a step's own gradients, beside the sums
        kept += 0 if settings.grad_checkpoint else every
        scores *= CHAINED
    peak = max(scores + (again if settings.grad_checkpoint else 0), COMPARED * chunk)
    batch = slots * item * (width * (len(student.taps) + 1) + (told or width))
    return {"target": target_bytes} | _parts(student, settings, is_summed, batch, kept + peak)


def _parts(
    student: Student, settings: TrainSettings, is_summed: bool, batch: float, activations: float
) -> dict[str, float]:
    """Add what all kinds take. Of the matrices that Muon learns, it keeps one moment."""
    item = student.dtype.size
    num = student.num_parameters
    trained = tree_flatten(student.head.trainable_parameters())
    largest = max(weight.size for _, weight in trained)
    spared = sum(w.size for name, w in trained if is_for_muon(name, w))
    gradients = (FULL if is_summed else item) * num
    # Weights in the type that the head computes in, and a batch's own gradients beside the sum.
    copies = item * num * ((item < FULL) + is_summed)
    return {
        "weights": float(weight_bytes(student.head)),
        "their moments": FULL * (2 * num - (spared if settings.optimizer == "muon" else 0)),
        "gradients": gradients,
        "batch": batch,
        "activations": max(copies + activations, 4 * FULL * largest),
    }


def fitting(
    settings: TrainSettings,
    student: Student,
    target_bytes: float,
    examples: Examples,
    estimate: NeedsOf = needs_of,
) -> tuple[TrainSettings, Needs]:
    """Turn gradient checkpointing on if it is needed; return the settings and their needs.

    ``estimate`` is that of the student's kind. Raises ValueError, with flags that would fit, if
    the memory is too small.
    """
    longest = max(len(x.tokens) for x in examples.train)
    answer = max(x.num_answer for x in examples.train)
    usable = memory(this_machine())[1]
    ranks = mx.distributed.init().size()

    def needs(batch: int, length: int, checkpoint: bool, anchors: int | None) -> Needs:
        num = max(1, batch // ranks)
        sizes = Sizes(num, length, num * min(answer, length))
        own = replace(settings, grad_checkpoint=checkpoint, anchors=anchors)
        is_summed = settings.grad_accumulation_steps * settings.batch_size > batch
        found = estimate(student, target_bytes, sizes, own, is_summed)
        return Needs(found, usable, checkpoint)

    batch = settings.batch_size
    choices = [False, True] if settings.grad_checkpoint is None else [settings.grad_checkpoint]
    for checkpoint in choices:
        found = needs(batch, longest, checkpoint, settings.anchors)
        if found.total <= usable:
            return replace(settings, grad_checkpoint=checkpoint), found
    lengths = [longest >> i for i in range(longest.bit_length()) if longest >> i >= PAD_TO]
    batches = [size for size in range(batch, 0, -1) if batch % size == 0 and size % ranks == 0]
    anchors = settings.anchors or 0
    blocks = [anchors >> i for i in range(anchors.bit_length())] or [settings.anchors]
    is_eagle = isinstance(student.head, Eagle3Head)
    can_be_lora = not is_eagle and settings.fine_tune_type == "full"
    for length in lengths or [longest]:
        for size, num in product(batches, blocks):
            if needs(size, length, True, num).total <= usable:
                flags = flags_for(settings, size, num, length if length < longest else None)
                raise ValueError(f"{found} That does not fit: give {flags}.")
        whole = needs(batch, length, True, settings.anchors)
        # Next to nothing is kept for small matrices.
        spared = whole.parts["their moments"] + whole.parts["gradients"]
        if can_be_lora and whole.total - spared <= usable:
            raise ValueError(f"{found} That does not fit: give --fine-tune-type lora.")
    ways = ["a target of fewer bits"]
    if is_eagle:
        ways.append("a smaller --draft-vocab-size or --intermediate-size")
    elif can_be_lora:
        ways.append("--fine-tune-type lora")
    raise ValueError(
        f"{found} That does not fit, nor does a batch of one short sequence: give "
        f"{', or '.join(ways)}."
    )


def flags_for(settings: TrainSettings, batch: int, anchors: int | None, length: int | None) -> str:
    """Return the flags that make a run smaller; ``length`` is that of cut texts."""
    parts = settings.grad_accumulation_steps * settings.batch_size // batch
    flags = "--grad-checkpoint" if settings.grad_checkpoint is False else ""
    if anchors != settings.anchors:
        flags += f" --anchors {anchors}"
    if batch < settings.batch_size:
        flags += f" --batch-size {batch} --grad-accumulation-steps {parts}"
    if length is not None:
        flags += f" --max-seq-length {length}"
    return flags.strip()


@contextmanager
def memory_kept_to(size: float, of_others: float = 0.0) -> Iterator[None]:
    """Make MLX wait for what it has begun rather than take more than ``size`` bytes.

    ``of_others``, the bytes of other arrays in this process, are added to them. On a Mac the
    memory is wired, as in mlx-lm's trainer.
    """
    maybe_set_recommended_wired_limit()
    before = mx.set_memory_limit(int(of_others + LIMIT * size))
    try:
        yield
    finally:
        mx.set_memory_limit(before)
