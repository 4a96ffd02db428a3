"""``--check``: the batched measure against decoding, the verdict, and the demo pair."""

import json
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from check_answers import NUM_QUESTIONS, recorded
from checkpoints import CONFIG, eagle3_tensors, write_safetensors, write_target
from helpers import PROMPT, plain, tiny_head, tiny_llama
from mlx_lm.utils import dequantize_model

from mlx_eagle.convert import check, pipeline
from mlx_eagle.convert.__main__ import main
from mlx_eagle.convert.check import DEPTHS, RESOLVED, Reading, Row
from mlx_eagle.convert.checkpoint import open_checkpoint
from mlx_eagle.demo.pair import demo_target_path
from mlx_eagle.drafters.config import Eagle3Config
from mlx_eagle.drafters.head_weights import AttachedHead, attach_head
from mlx_eagle.drafters.kind import LoadOptions

DEMO = Path(__file__).parents[1] / "data" / "eagle3-smollm2-135m-instruct"
BASE = 100.0  # far enough from the head's 100000 to matter within a hundred tokens
NORMS = ("layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight")


# The parts, on tiny random models.


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_layers": 2, "norm_output": True},
        {"sliding_window": 4},
        {
            "uses_aux": False,
            "num_aux": 1,
            "fc_input": "embedding_and_state",
            "layer_input": "none",
        },
    ],
    ids=["eagle3", "two layers", "window", "eagle1"],
)
def test_all_slots_at_once_draft_what_decoding_drafts(changes):
    """Against the drafter itself, one position after the other."""
    model = tiny_llama()
    drafter = tiny_head(model, **changes)
    part = AttachedHead(drafter.head, drafter._embed, drafter.taps, drafter.to_target)
    text = check.read_text(model, PROMPT, 12, set(), set(drafter.taps), part.ids)
    assert text.tokens.tolist() == PROMPT + plain(model, PROMPT, 12)
    features, first = text.fused(drafter.taps), len(PROMPT) - 1
    steps = check.unroll(part, text.tokens, features, first, text.num_slots)
    drafted = np.array([np.array(tokens) for _, tokens in steps])
    assert drafted.shape == (DEPTHS, 12 - DEPTHS)

    def pick(logits, to_target):
        return mx.argmax(logits, axis=-1)

    for slot in range(text.num_slots):
        end = first + slot + 1
        one = drafter.begin()
        one.extend(text.tokens[1 : end + 1], features[:end])
        assert one.propose(DEPTHS, pick).tokens.tolist() == drafted[:, slot].tolist()


def test_hits_and_overlaps_are_counted_against_the_right_tokens():
    model = tiny_llama()
    drafter = tiny_head(model)
    part = AttachedHead(drafter.head, drafter._embed, drafter.taps, drafter.to_target)
    text = check.read_text(model, PROMPT, 10, set(), set(drafter.taps), part.ids)
    hits, overlaps = check.compare(part, text)
    first = len(PROMPT) - 1
    steps = check.unroll(part, text.tokens, text.fused(drafter.taps), first, text.num_slots)
    p = np.array(mx.softmax(model(text.tokens[None])[0], axis=-1))
    tokens = text.tokens.tolist()
    for depth, (logits, drafted) in enumerate(steps, 1):
        q = np.array(mx.softmax(logits, axis=-1))
        for slot, token in enumerate(drafted.tolist()):
            place = first + slot + 1 + depth  # of the token that this draft stands for
            assert hits[depth - 1, slot].item() == (token == tokens[place])
            expected = np.minimum(p[place - 1][np.array(part.ids)], q[slot]).sum()
            assert overlaps[depth - 1, slot].item() == pytest.approx(expected, abs=1e-4)


def test_an_answer_ends_with_its_stop_token():
    model = tiny_llama()
    answer = plain(model, PROMPT, 12)
    text = check.read_text(model, PROMPT, 12, {answer[1]}, {0}, mx.arange(4))
    assert text.tokens.tolist() == PROMPT + answer[: answer.index(answer[1]) + 1]
    assert text.num_slots == 0


def config(**changes) -> Eagle3Config:
    sizes = dict.fromkeys(("num_layers", "num_heads", "num_kv_heads"), 1)
    sizes |= dict.fromkeys(("hidden_size", "target_hidden_size", "head_dim"), 64)
    sizes |= dict.fromkeys(("intermediate_size", "vocab_size", "draft_vocab_size"), 64)
    return Eagle3Config(**{**sizes, **changes})


def flags(head: Eagle3Config, *args) -> list[str]:
    return [reading.flag for reading in check.alternatives(head, *args)]


def test_every_doubt_has_its_flag():
    head = config(rope={"type": "default", "theta": 1e6}, norm_output=True)
    assert flags(head, 32, {5e5, 1e6}) == [
        "--aux-layers 3,17,30",
        "--aux-layers 1,15,28",
        "--rope-theta 10000",
        "--rope-theta 500000",
        "--norm-before-residual",
        "--no-norm-output",
    ]
    assert flags(config(aux_boundary_ids=(0, 5, 8)), 8)[:1] == ["--norm-before-residual"]
    eagle1 = config(uses_aux=False, layer_input="none", final_norm=False)
    assert flags(eagle1, 32) == []
    assert check.rope_bases({"rope_theta": 1e4, "a": {"rope_theta": 5}, "x": 1}) == {1e4, 5.0}


def row(name: str, level: float, flag: str | None = None) -> Row:
    noise = np.random.default_rng(0).normal(0, 0.01, 100)
    return Row(Reading(name, flag=flag), (level, level / 2, level / 3), 1.5, level + noise)


def report(*others: Row, resolved: float = 0.5, baseline: float = 0.2) -> check.Report:
    sides = row("as resolved", resolved), row("pairing shifted", baseline)
    return check.Report(sides[0], others, 6, sides[1])


def test_the_verdict():
    ours = report(row("taps +1", 0.4, "--aux-layers 3,17,30"), row("b", 0.501, "--b"))
    assert ours.winner is ours.resolved
    assert ours.verdict() == "winner: as resolved; these texts do not tell it from b"
    assert report(row("taps +1", 0.4)).verdict() == "winner: as resolved"
    assert ours.entry()["winner"] == "as resolved"
    theirs = report(row("taps +1", 0.6, "--aux-layers 3,17,30"))
    assert theirs.verdict().startswith("warning: taps +1 fits better")
    assert theirs.verdict().endswith("--aux-layers 3,17,30")
    entry = theirs.entry()
    assert entry["winner"] == "taps +1"
    assert entry["alternatives"]["taps +1"]["override"] == "--aux-layers 3,17,30"
    assert "another target" in report(baseline=0.5).verdict()
    line = theirs.table().splitlines()[2]
    assert line.split()[:3] == ["as", "resolved", "1.50"]
    assert line.split()[-3:] == ["50.0%", "25.0%", "16.7%"]


def test_check_needs_a_target(tmp_path, capsys):
    source, out = (
        write_safetensors(tmp_path / "source", CONFIG, eagle3_tensors()),
        tmp_path / "out",
    )
    with pytest.raises(SystemExit) as exit:
        main(["--hf-path", str(source), "--mlx-path", str(out), "--check"])
    err = capsys.readouterr().err
    assert exit.value.code == 2 and not out.exists()
    assert err.startswith("error: --check") and "--target" in err and err.count("\n") == 1


def test_a_target_that_cannot_be_loaded(tmp_path, capsys):
    source, out = (
        write_safetensors(tmp_path / "source", CONFIG, eagle3_tensors()),
        tmp_path / "out",
    )
    target = write_target(tmp_path / "target", model_type="unheard_of")
    (target / "tokenizer.json").unlink()
    with pytest.raises(SystemExit) as exit:
        main(
            ["--hf-path", str(source), "--mlx-path", str(out), "--check", "--target", str(target)]
        )
    err = capsys.readouterr().err.splitlines()[-1]
    assert exit.value.code == 2 and not out.exists()
    assert err.startswith("error: the target ") and " cannot be loaded: " in err


@pytest.mark.exhaustive
def test_the_report_goes_into_the_config(tmp_path, capsys, monkeypatch):
    source, out = (
        write_safetensors(tmp_path / "source", CONFIG, eagle3_tensors()),
        tmp_path / "out",
    )
    model = tiny_llama(vocab_size=128, num_hidden_layers=32)

    class Tokenizer:
        has_chat_template, eos_token_ids = False, ()

        def encode(self, text: str) -> list[int]:
            return [ord(c) % 128 for c in text[-9:]]

        def decode(self, tokens: list[int]) -> str:
            return "".join(map(chr, tokens))

    loaded = []

    def load_model(name: str, dtype: str | None):
        loaded.append(dtype)
        return model, Tokenizer()

    monkeypatch.setattr(pipeline, "load_model", load_model)
    short = partial(check.check_head, questions=check.QUESTIONS[:2], num_tokens=20)
    monkeypatch.setattr(pipeline, "check_head", short)
    target = write_target(tmp_path / "target")
    command = [
        "--hf-path",
        str(source),
        "--mlx-path",
        str(out),
        "--check",
        "--target",
        str(target),
    ]
    main([*command, "--dtype", "float32"])
    assert loaded == ["float32"]
    found = json.loads((out / "config.json").read_text())["check"]
    assert len(found["agreement"]) == len(found["quantized"]["agreement"]) == DEPTHS
    assert found["num_prompts"] == 2 and found["num_positions"] == 2 * (20 - DEPTHS)
    assert "taps +1" in found["alternatives"] and "pairing shifted" in found["baseline"]
    table = capsys.readouterr().out
    assert "as resolved" in table and "in 4 to 6 bits" in table
    command[command.index(str(out))] = str(tmp_path / "part")
    main([*command, "--dtype", "float32", "--draft-vocab", "8"])
    part = json.loads((tmp_path / "part" / "config.json").read_text())["check"]
    assert part["full"] == {key: found[key] for key in ("agreement", "tau", "overlap")}
    assert part["overlap"] != found["overlap"]
    assert "full vocabulary" in capsys.readouterr().out


# The demo pair: the right setting against deliberately wrong ones.


def spread(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The same head with norms that differ: a scale moved from the norms into q, k and v.

    The demo head was trained so little that both norms are still 1 within a few hundredths,
    and swapping them changes next to nothing; those of the usual heads differ severalfold.
    """
    scale = 2.0 ** mx.array(np.random.default_rng(0).integers(-2, 3, (2, 576)).astype(np.float32))
    changed = {norm: weights[norm] * part for norm, part in zip(NORMS, scale, strict=True)}
    for part in "qkv":
        name = f"layers.0.self_attn.{part}_proj.weight"
        changed[name] = weights[name] / scale.reshape(-1)
    return weights | changed


@pytest.fixture(scope="module")
def demo():
    """(report, built head, target, texts), on the first half of the conversation of --check."""
    model, tokenizer = mlx_lm.load(str(demo_target_path()))
    model = dequantize_model(model)
    model.set_dtype(mx.float32)
    unread = pipeline.prepare("eagle3", open_checkpoint(str(DEMO)), None)
    built = pipeline.build(unread, "float32")
    answers, read, read_conversation = iter(recorded()), [], check.read_conversation

    def replay(prompt, model, max_tokens):
        return ((token, None) for token in next(answers)[:max_tokens])

    def keep(*args):
        read.extend(read_conversation(*args))
        return read

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "generate_step", replay)
        patch.setattr(check, "read_conversation", keep)
        options = {"bases": {BASE}, "questions": check.QUESTIONS[:NUM_QUESTIONS]}
        found = check.check_head(built.config, built.weights, model, tokenizer, **options)
    print("\n" + found.table())
    return found, built, model, read


@pytest.mark.exhaustive
def test_the_recorded_answers_are_the_targets(demo):
    _, _, model, read = demo
    text = read[0]
    best = mx.argmax(model(text.tokens[None])[0], axis=-1).tolist()
    assert text.tokens.tolist()[text.num_prompt :] == best[text.num_prompt - 1 : -1]


@pytest.mark.exhaustive
def test_the_right_setting_is_above_the_wrong_ones(demo):
    found, _, _, _ = demo
    right, wrong = found.resolved, {r.name: r for r in (*found.alternatives, found.baseline)}
    assert found.winner is right and found.entry()["num_positions"] > 450
    for name in ("rope base 100", "norm_before_residual on", "norm_output on", "pairing shifted"):
        assert right.is_better_than(wrong[name])
        assert sum(right.agreement) > sum(wrong[name].agreement) + 0.15
    # What enters neighbouring layers is nearly the same.
    for name in ("taps +1", "taps -1"):
        assert right.is_better_than(wrong[name]), name
    # Told apart by the whole conversation: half of it is too short for these bases to part.
    assert right.score > wrong["rope base 10000"].score


@pytest.mark.exhaustive
def test_swapped_norms(demo):
    found, built, model, read = demo

    def measured(weights: dict[str, mx.array]) -> Row:
        with check.saved(weights) as folder:
            part = attach_head(folder, built.config, model, LoadOptions())
            return check.measure(part, RESOLVED, read)

    weights = spread(built.weights)
    right = measured(weights)
    assert right.score == pytest.approx(found.resolved.score, abs=1e-3)
    first, second = NORMS
    wrong = measured(weights | {first: weights[second], second: weights[first]})
    assert right.is_better_than(wrong) and right.agreement[0] > wrong.agreement[0] + 0.1
