"""Memory of a run: its announcement, its peak, and runs that do not fit."""

import gc
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from types import SimpleNamespace

import block_twin
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from assistants import tiny_assistant, tiny_gemma4
from drafter_pairs import tiny_mtp, tiny_qwen3_next
from helpers import SIZES, tiny_llama
from training import chats, write_data, write_target

from mlx_eagle import load_fast_blas
from mlx_eagle.drafters.base import Drafter
from mlx_eagle.drafters.config import Eagle3Config
from mlx_eagle.drafters.head import Eagle3Head
from mlx_eagle.system.device import weight_bytes
from mlx_eagle.train import memory, train
from mlx_eagle.train.__main__ import main, settings_of
from mlx_eagle.train.batches import TokenBatch
from mlx_eagle.train.data import Example, Examples
from mlx_eagle.train.kinds import TRAINED, filled, student_of
from mlx_eagle.train.memory import Sizes, memory_kept_to
from mlx_eagle.train.optimizer import TrainStep
from mlx_eagle.train.recipe import Recipe
from mlx_eagle.train.settings import TrainSettings
from mlx_eagle.train.student import Student, fresh_student

GB = 1e9
LLAMA_8B = Eagle3Config(
    hidden_size=4096,
    target_hidden_size=4096,
    num_layers=1,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    draft_vocab_size=32000,
)
TARGET_8B = 4.52 * GB  # Meta-Llama-3.1-8B-Instruct in 4 bits


@pytest.mark.parametrize("num_texts, most", [(1, 14), (8, 40)])
def test_a_head_of_8b_fits(num_texts, most):
    """None of its arrays is ever computed."""
    ids = mx.arange(32000)
    head = Eagle3Head(LLAMA_8B)
    embed = nn.Embedding(1, 4096)
    student = Student(head, embed, (2, 16, 29), ids, mx.float16)
    assert 400e6 < student.num_parameters < 440e6
    sizes = Sizes(num_texts, 2048, num_texts * 2048)
    settings = TrainSettings("", "", "", ttt_steps=7, grad_checkpoint=True)
    parts = TRAINED["eagle3"].needs(student, TARGET_8B, sizes, settings, is_summed=False)
    assert parts["their moments"] == 8 * student.num_parameters
    assert sum(parts.values()) < most * GB


def fresh(num_layers: int, length: int) -> TrainSettings:
    """Settings for a fresh head, trained on texts of ``length`` tokens."""
    taps = 0, 1, 2
    return TrainSettings("", "", "", num_layers=num_layers, aux_layers=taps, max_seq_length=length)


@pytest.fixture(scope="module")
def student() -> Student:
    model = tiny_llama(0, vocab_size=258)
    return fresh_student(model, SIZES, np.arange(64, dtype=np.int32), fresh(1, 64))


def test_what_does_not_fit_names_flags_that_do(student, monkeypatch):
    """Activations are kept, then computed again; then the run is refused, with flags that fit."""
    texts = tuple(Example((1,) * length, 5) for length in (300, 256, 40))
    given = ["--model", "a", "--data", "b", "--output", "c", "--batch-size", "12"]
    given += ["--ttt-steps", "7"]
    room = 1e12

    def fit(*flags: str):
        settings = settings_of([*given, *flags])
        return memory.fitting(settings, student, 1e6, Examples(texts, (), ()))

    monkeypatch.setattr(memory, "memory", lambda machine: (2 * room, room))
    chosen, kept = fit()
    assert chosen.grad_checkpoint is False and "Activations are kept." in str(kept)
    room = kept.total - 1
    chosen, again = fit()
    assert chosen.grad_checkpoint is True and again.total < kept.total
    with pytest.raises(ValueError, match=r"does not fit: give --grad-checkpoint\.$"):
        fit("--no-grad-checkpoint")
    for room in (again.total - 1, 0.4 * again.total, 0.15 * again.total, 0.05 * again.total):
        with pytest.raises(ValueError, match=r"does not fit: give --\S.*\d\.$") as refused:
            fit()
        flags = str(refused.value).rpartition(": give ")[2].removesuffix(".").split()
        values = dict(zip(flags[::2], map(int, flags[1::2]), strict=True))
        assert values["--batch-size"] * values["--grad-accumulation-steps"] == 12
        length = values.get("--max-seq-length", 300)
        texts = tuple(replace(x, tokens=x.tokens[:length]) for x in texts)
        chosen, found = fit(*flags)
        assert found.total <= room
    assert "--max-seq-length" in flags
    room = 1e6
    with pytest.raises(ValueError, match="nor does a batch of one short sequence"):
        fit()


@pytest.mark.parametrize(
    "room, fine_tune_type, flags",
    [
        (1190, "full", "--anchors 32"),
        (1154, "full", "--anchors 2"),
        (1152, "full", "--batch-size 2 --grad-accumulation-steps 2"),
        (640, "full", "--fine-tune-type lora"),
        (
            720,
            "lora",
            "--anchors 16 --batch-size 1 --grad-accumulation-steps 4 --max-seq-length 64",
        ),
    ],
)
def test_what_is_proposed_first(room, fine_tune_type, flags, student, monkeypatch):
    """Fewer anchors, then smaller batches, then lora, and then shorter texts."""

    def estimate(student, target_bytes, sizes, settings, is_summed):
        found = {"their moments": 600.0, "gradients": 40.0, "activations": settings.anchors}
        return found | {"batch": float(sizes.num_texts * sizes.length)}

    student = replace(student, head=nn.Linear(2, 2))  # no EAGLE head, which has no lora
    texts = Examples((Example((1,) * 128, 5),), (), ())
    settings = TrainSettings(
        "", "", "", anchors=64, batch_size=4, grad_checkpoint=True, fine_tune_type=fine_tune_type
    )
    monkeypatch.setattr(memory, "memory", lambda machine: (2 * room, room))
    with pytest.raises(ValueError, match=f"give {flags}\\.$"):
        memory.fitting(settings, student, 0.0, texts, estimate)


def test_a_run_that_does_not_fit_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(memory, "memory", lambda machine: (2e5, 1e5))
    target = write_target(tmp_path / "target")
    data = write_data(tmp_path / "data", train=chats(4))
    command = ["--model", str(target), "--data", str(data), "--output", str(tmp_path / "head")]
    with pytest.raises(SystemExit):
        main([*command, "--batch-size", "2"])
    said = capsys.readouterr().err
    assert said.startswith("error: Training takes about ") and said.count("\n") == 1
    assert not (tmp_path / "head").exists()


def test_arrays_of_others_take_nothing_from_a_run(tmp_path, monkeypatch):
    """If they counted as the run's, MLX would wait for one operation after the other."""
    held = mx.zeros((25, 1000, 1000))
    limits = []
    set_limit = mx.set_memory_limit
    mx.eval(held)
    before = mx.get_active_memory()
    assert before >= held.nbytes
    monkeypatch.setattr(mx, "set_memory_limit", lambda n: limits.append(n) or set_limit(n))
    target = write_target(tmp_path / "target")
    data = write_data(tmp_path / "data", train=chats(4))
    quick = {"iters": 1, "batch_size": 2, "draft_vocab_size": 64, "test_prompts": 0}
    train(str(target), str(data), str(tmp_path / "head"), **quick)
    assert before < limits[0] < 2 * before


def forget_others() -> None:
    """Free arrays of earlier tests: freed during this one, they would falsify its peak."""
    gc.collect()
    mx.clear_cache()


@pytest.mark.exhaustive
def test_an_update_has_old_and_new_of_one_tensor_at_a_time():
    forget_others()
    model = tiny_llama(0, vocab_size=258, hidden_size=128)
    sizes = {**SIZES, "hidden_size": 128}
    student = fresh_student(model, sizes, np.arange(64, dtype=np.int32), fresh(4, 64))
    settings = filled(fresh(4, 64), "eagle3")
    step = TrainStep(SimpleNamespace(student=student, settings=settings))
    mx.eval(step.weights, step.moments)
    largest = max(weight.nbytes for weight in step.weights.values())
    everything = sum(weight.nbytes for weight in step.weights.values())
    for _ in range(2):  # the first compiles
        gradients = {name: mx.ones_like(weight) for name, weight in step.weights.items()}
        mx.eval(gradients)
        before = mx.get_active_memory()
        with memory_kept_to(1):
            mx.reset_peak_memory()
            step._learn(gradients, 1e-3, 1)
        assert mx.get_peak_memory() - before <= 4 * largest
    assert everything > 6 * largest


# Kind, hidden size, width of the MLP, vocabulary, texts, their length, and settings. In EAGLE's
# third run weights are most of it.
RUNS = [
    ("eagle3", 256, 896, 2048, 2, 192, {"ttt_steps": 3}),
    ("eagle3", 256, 512, 2048, 4, 128, {"ttt_steps": 4, "grad_checkpoint": True}),
    ("eagle3", 512, 2048, 512, 1, 32, {"grad_checkpoint": True}),
    ("eagle3", 512, 2048, 512, 1, 32, {"grad_checkpoint": True, "optimizer": "muon"}),
    ("eagle3", 128, 256, 1024, 1, 512, {"ttt_steps": 3, "grad_checkpoint": True}),
    ("eagle3", 64, 128, 16384, 4, 64, {"ttt_steps": 2}),
    ("peagle", 256, 896, 2048, 2, 192, {}),
    ("peagle", 128, 256, 1024, 1, 512, {"grad_checkpoint": True}),
    ("mtp", 256, 896, 2048, 2, 192, {}),
    ("mtp", 512, 1024, 512, 2, 256, {"grad_checkpoint": True}),
    ("assistant", 256, 896, 2048, 2, 192, {}),
    ("assistant", 512, 1024, 4096, 2, 128, {"grad_checkpoint": True}),
    ("dflash", 256, 512, 2048, 2, 128, {"anchors": 16}),
    ("dflash", 512, 1024, 4096, 2, 256, {"anchors": 32, "grad_checkpoint": True}),
    ("dspark", 256, 1024, 8192, 2, 256, {"anchors": 16}),
    ("dspark", 512, 1024, 2048, 2, 256, {"anchors": 32, "grad_checkpoint": True}),
    ("dflash2", 256, 512, 2048, 2, 128, {"anchors": 16}),
    ("dflash2", 512, 1024, 4096, 2, 256, {"anchors": 32, "grad_checkpoint": True}),
]


@pytest.fixture(scope="module")
def alone():
    """A process of its own: arrays that other tests free meanwhile would falsify a peak."""
    with ProcessPoolExecutor(1, get_context("spawn"), load_fast_blas) as process:
        yield process


def test_every_kind_is_measured_twice():
    assert all([run[0] for run in RUNS].count(kind) >= 2 for kind in TRAINED)


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", RUNS)
def test_a_batch_takes_what_was_said(run, alone):
    found, needed = alone.submit(peak_and_needs, run).result()
    assert 0.85 < found / sum(needed.values()) < 1.15, (found, needed)


def pair_of(kind: str, sizes: dict[str, int]) -> tuple[nn.Module, Drafter]:
    """A target of these sizes, and a drafter of a kind that is given."""
    hidden, width = sizes["hidden_size"], sizes["intermediate_size"]
    heads = {"num_heads": 8, "intermediate_size": width}
    if kind == "mtp":
        model = tiny_qwen3_next(num_hidden_layers=2, full_attention_interval=2, **sizes)
        return model, tiny_mtp(model)
    if kind == "assistant":
        more = {"vocab_size_per_layer_input": sizes["vocab_size"], "sliding_window": 64}
        model = tiny_gemma4(global_head_dim=2 * sizes["head_dim"], **more, **sizes)
        return model, tiny_assistant(model, hidden_size=hidden // 2, **heads)
    model = tiny_llama(0, **sizes)
    heads |= {"num_kv_heads": 4, "head_dim": sizes["head_dim"], "block_size": 16}
    own = {"dspark": {"markov_rank": 64, "confidence": "markov"}, "dflash2": {"selector_rank": 64}}
    make = getattr(block_twin, f"tiny_{kind}")
    return model, make(model, num_layers=3, **heads, **own.get(kind, {}))


def recipe_of(run) -> Recipe:
    kind, hidden, width, vocab, _, _, options = run
    row = TRAINED[kind]
    sizes = {"hidden_size": hidden, "intermediate_size": width, "vocab_size": vocab}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": hidden // 8}
    settings = TrainSettings("", "", "", **{"grad_checkpoint": False, **options})
    if row.make_student is None:
        model, drafter = pair_of(kind, sizes)
        settings = filled(replace(settings, init="given"), kind)
        given = SimpleNamespace(kind=kind, published=None, load=lambda model, dtype: drafter)
        return row.recipe(settings, student_of(settings, given, model), model, given)
    model = tiny_llama(0, **sizes)
    mask = 5 if kind == "peagle" else None
    settings = replace(settings, aux_layers=(0, 1, 2), draft_vocab_size=vocab, mask_token_id=mask)
    settings = filled(settings, kind)
    nothing = Examples([], [], [])
    student = row.make_student(settings, None, model, sizes, nothing)
    return row.recipe(settings, student, model, None)


def peak_and_needs(run) -> tuple[float, dict[str, float]]:
    """Measure the bytes at the peak of two steps; return them and the announcement, by part."""
    forget_others()
    recipe = recipe_of(run)
    student, model, settings = recipe.student, recipe.model, recipe.settings
    _, _, _, vocab, num_texts, length, _ = run
    mx.eval(model.parameters(), student.head.parameters())
    sizes = Sizes(num_texts, length, num_texts * (length - 1))
    needs = TRAINED[settings.kind].needs
    needed = needs(student, weight_bytes(model), sizes, settings, False)
    forget_others()
    before = mx.get_active_memory() - weight_bytes(model) - weight_bytes(student.head)
    step = TrainStep(recipe)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab, (num_texts, length)).astype(np.int32)
    counts = np.ones(tokens.shape, bool)
    counts[:, -1] = False
    batch = TokenBatch(tokens, counts, tuple(range(num_texts)))

    def learn(epoch: int) -> None:  # a batch's arrays are free when it returns, as in a run
        step(mx.array(tokens), *recipe.teach(batch, epoch), 1e-4, 1)

    with memory_kept_to(sum(needed.values()), before):
        mx.reset_peak_memory()
        for epoch in range(2):  # moments are zeros that take nothing before the first is done
            learn(epoch)
    return mx.get_peak_memory() - before, needed
