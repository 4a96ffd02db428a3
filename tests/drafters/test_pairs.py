"""``--draft-model auto`` and ``--list``: the known heads, and those converted here."""

import json
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from architectures import build
from checkpoints import CONFIG, as_midlayer, eagle3_tensors, write_safetensors
from helpers import PROMPT, byte_tokenizer, plain, speculative, tiny_llama
from hub import running_hub, use_hub
from public_drafters import ASSISTANTS, BLOCKS
from public_heads import EAGLE_1, HEADS, MISTRAL, NOT_FOUND

import mlx_eagle
from mlx_eagle import draft_models as drafters
from mlx_eagle.commands import flags
from mlx_eagle.commands import generate as program
from mlx_eagle.decoding.pass_costs import expert_layers
from mlx_eagle.drafters import pairs
from mlx_eagle.drafters.eagle3 import Eagle3Drafter
from mlx_eagle.drafters.kinds import KINDS
from mlx_eagle.drafters.lookup import LookupDrafter
from mlx_eagle.drafters.pairs import PAIRS, pairs_for, plain_name, read_table
from mlx_eagle.drafters.target_parts import TargetSizes
from mlx_eagle.system.device import this_machine
from mlx_eagle.system.exit_codes import run_command
from mlx_eagle.system.hub import INSIDE, REPO_ID

NAMES = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b-instruct",
    "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit": "llama-3.1-8b-instruct",
    "lmstudio-community/Qwen3-8B-MLX-4bit": "qwen3-8b",
    "mlx-community/Qwen3-8B-4bit-DWQ-053125": "qwen3-8b",
    "mlx-community/Qwen3-30B-A3B-Instruct-2507-8bit": "qwen3-30b-a3b-instruct-2507",
    "mlx-community/gpt-oss-20b-MXFP4-Q8": "gpt-oss-20b",
    "mlx-community/gemma-4-31b-it-bf16": "gemma-4-31b-it",
    "~/models/Qwen3-32B-fp16-gs32/": "qwen3-32b",
    "Qwen/Qwen3-4B-Base": "qwen3-4b-base",
    "4bit": "4bit",
}


@pytest.mark.parametrize("model", NAMES)
def test_a_model_is_known_whoever_converted_it(model):
    assert plain_name(model) == NAMES[model]


def test_the_table_names_heads_once():
    heads = [pair.head for pair in PAIRS if pair.head not in KINDS]
    assert len(set(heads)) == len(heads)
    assert all(REPO_ID.fullmatch(pair.target) for pair in PAIRS)
    assert all((INSIDE.fullmatch(head) or REPO_ID.fullmatch(head)) for head in heads)
    assert all(KINDS[pair.kind].convert or pair.kind == "eagle3" for pair in PAIRS)
    own = [pair for pair in PAIRS if pair.head in KINDS]
    assert len({pair.target for pair in own}) == len(own)
    assert all(pair.head == pair.kind and KINDS[pair.kind].by_name for pair in own)


def test_every_pair_is_resolved_at_full_size():
    """By a row of sizes that a test goes through; a few have a reason instead."""
    rows = {*HEADS, *EAGLE_1, *MISTRAL, *BLOCKS, *ASSISTANTS}
    assert {pair.head for pair in PAIRS} - rows - KINDS.keys() == NOT_FOUND.keys()
    assert all(NOT_FOUND.values())


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.target} {pair.head}")
def test_the_first_of_a_target_is_chosen(pair):
    first = next(drafters.known_pairs(pair.target), None)
    rows = pairs_for(pair.target)
    assert first is None or (first == rows[0] and first.is_seen)
    assert PAIRS.index(rows[0]) <= PAIRS.index(pair)
    assert pairs_for(f"mlx-community/{pair.target.split('/')[1]}-4bit") == rows


ORDER = """
a/Target
    b/unseen                    eagle3        -  MIT
    b/others                    eagle3      100  MIT
    b/forbidden                 dflash      100  CC-BY-NC-ND-4.0
        4.0x  M5 Max  4 bit  somewhere 1
    b/stated                    dspark      100  MIT
        5.2 tokens a round  GPU  -  its page
    a/own                       assistant   100  MIT
    b/slower                    dflash      100  none stated
        1.1-3.0x  M4 Pro  -  somewhere 2
        0.9x  M1  4 bit  somewhere 3
    b/fast                      dflash        -  MIT
        <1x  M1  4 bit  somewhere 4
        1.5-1.6x  M4 Pro  8 bit  somewhere 5
    b/loses                     dspark      100  MIT
        0.96x  M4 Pro  8 bit  somewhere 6
"""
EXPECTED = ["b/fast", "b/slower", "a/own", "b/stated", "b/others", "b/loses", "b/unseen"]


def test_the_order_of_auto(monkeypatch):
    """Mac figures by their lower end, own authors, GPU figures, others; the unseen at the end."""
    read = read_table(ORDER)
    assert [pair.head for pair in read] == [*EXPECTED, "b/forbidden"]
    assert str(read[1].figures[0]) == "1.1-3.0x (M4 Pro: somewhere 2)"
    monkeypatch.setattr(pairs, "PAIRS", read)
    assert [pair.head for pair in drafters.known_pairs("x/Target-4bit")] == EXPECTED
    monkeypatch.setattr(pairs, "PAIRS", tuple(pair for pair in read if not pair.is_seen))
    monkeypatch.setattr(drafters, "own_kind", lambda target: None)
    assert list(drafters.known_pairs("a/Target")) == []
    monkeypatch.setattr(drafters, "own_kind", lambda target: "mtp")
    assert [pair.head for pair in drafters.known_pairs("a/Target")] == ["mtp", "b/unseen"]


def test_what_is_published_says_who_is_first():
    firsts = {
        "google/gemma-4-31B-it": "google/gemma-4-31B-it-assistant",
        "google/gemma-4-26B-A4B-it": "makora-ai/gemma4-26b-a4b-dspark",
        "google/gemma-4-12B-it": "deepseek-ai/dspark_gemma4_12b_block7",
        "Qwen/Qwen3-8B": "deepseek-ai/dspark_qwen3_8b_block7",
        "Qwen/Qwen3.5-9B": "z-lab/Qwen3.5-9B-DFlash",
        "Qwen/Qwen3.6-27B": "mtp",
    }
    for target, head in firsts.items():
        assert next(drafters.known_pairs(target)).head == head
    assert "VirVen/Qwen3.5-27B-EAGLE3-v2/compressed" in {
        pair.head for pair in pairs_for("mlx-community/Qwen3.5-27B-4bit")[1:]
    }
    assert all(figure.value and figure.source for pair in PAIRS for figure in pair.figures)


class DemoHead(str):
    """Stands for the demo pair's own head."""

    def with_draft_window(self, draft_window: int | None) -> "DemoHead":
        return self

    def with_copies(self) -> str:
        return f"{self}, copying"


@pytest.fixture
def run(monkeypatch, capsys):
    """The command's exit code and output, with stand-ins where it would load or generate."""
    opened = []
    demo = ("demo model", "demo tokenizer", DemoHead("demo head"))
    monkeypatch.setattr(flags, "load", lambda name, *_, **__: (name, "tokenizer"))
    monkeypatch.setattr(flags, "prepare_device", lambda *_: None)
    monkeypatch.setattr(flags, "load_demo", lambda **_: demo)
    monkeypatch.setattr(flags, "find_drafter", lambda *_: None)
    monkeypatch.setattr(flags, "expert_layers", lambda model: [])
    monkeypatch.setattr(drafters, "own_kind", lambda target: None)
    monkeypatch.setattr(drafters, "made_from", lambda source: (None, False))

    def open_one(name, model, options):
        opened.append((name, model))
        return options.limit(DemoHead(name), model)

    monkeypatch.setattr(drafters, "_open", open_one)

    def command(*given: str):
        args = program.build_parser().parse_args(given)
        try:
            run_command(lambda: opened.append(flags.load_pair(args, {})))
            code = 0
        except SystemExit as stop:
            code = stop.code
        return code, opened, capsys.readouterr()

    return command


def test_auto_opens_the_head_of_the_target(run):
    model = "mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit"
    code, opened, said = run("--model", model, "--draft-model", "auto")
    head = "JinnP/SGLang-EAGLE3-Qwen3-Coder-30B-A3B-Instruct"
    assert code == 0
    assert opened == [(head, model), (model, "tokenizer", f"{head}, copying")]
    copying = "and copying what the text repeats"
    assert said.err == f"Drafting with {head} (licence: Apache-2.0), {copying}.\n"
    assert said.out == ""


def test_a_model_without_a_head_takes_the_known_one(run):
    model = "mlx-community/Qwen3-8B-4bit"
    code, opened, said = run("--model", model)
    head = "deepseek-ai/dspark_qwen3_8b_block7"
    assert code == 0 and opened[0] == (head, model)
    assert said.err.startswith(f"Drafting with {head} (licence: none stated)")


def test_without_a_known_head_it_decodes_plainly_with_one_note(run):
    code, opened, said = run("--model", "some/Model")
    assert code == 0 and opened == [("some/Model", "tokenizer", None)]
    assert said.err.startswith("Note: no public head is known here for some/Model")
    assert said.err.count("\n") == 1


def test_plain_decoding_looks_for_no_head(run):
    code, opened, said = run("--model", "Qwen/Qwen3-8B", "--num-draft-tokens", "0")
    assert code == 0 and opened == [("Qwen/Qwen3-8B", "tokenizer", None)] and said.err == ""


@pytest.mark.parametrize("k", ["3", "0"])
def test_what_to_expect_of_a_mixture_of_experts(run, monkeypatch, k):
    monkeypatch.setattr(flags, "expert_layers", expert_layers)
    for architecture in ("mixtral", "llama"):
        model = build(architecture)
        monkeypatch.setattr(flags, "load", lambda *_, model=model, **__: (model, "tokenizer"))
        said = run("--model", "a/b", "--draft-model", "some/head", "--num-draft-tokens", k)[2].err
        is_said = architecture == "mixtral" and k != "0"
        assert ("expect 1.0 to 1.15x" in said) == is_said and said.count("\n") == is_said


@pytest.mark.parametrize("own", [None, "mtp"])
def test_what_cannot_be_opened_is_passed_over(run, monkeypatch, own):
    """To the next row, to the target's own layers, to copies: a line each, and never an error."""
    taken = []

    def fail(name, *_):
        taken.append(name)
        if name == own:
            return DemoHead(name)
        raise ValueError("the hub could\nnot be reached")

    monkeypatch.setattr(drafters, "_open", fail)
    monkeypatch.setattr(drafters, "own_kind", lambda target: own)
    code, opened, said = run("--model", "Qwen/Qwen3-8B")
    seen = [pair.head for pair in pairs_for("Qwen/Qwen3-8B") if pair.is_seen]
    lines = said.err.splitlines()
    passed = [f"{head} is passed over, for it cannot be used: the hub could" for head in seen]
    assert code == 0 and all(map(str.startswith, lines, passed))
    if own is None:
        unseen = [pair.head for pair in pairs_for("Qwen/Qwen3-8B") if not pair.is_seen]
        assert taken == [*seen, *unseen] and len(lines) == len(taken) + 1
        assert "drafts are copied from the text" in lines[-1]
        assert isinstance(opened[0][2], LookupDrafter)
    else:
        assert taken == [*seen, own] and opened[0][2] == "mtp, copying"
        assert lines[-1].startswith("Drafting with an MTP layer of the model's own")


@pytest.mark.parametrize("copies", ["", "+lookup"])
def test_a_wrong_name_is_told_before_the_target_is_loaded(run, monkeypatch, tmp_path, copies):
    monkeypatch.setattr(flags, "find_drafter", drafters.find_drafter)
    monkeypatch.setattr(flags, "load", lambda *_, **__: pytest.fail("the target was loaded"))
    gone = tmp_path / "gone"
    code, _, said = run("--model", "some/Model", "--draft-model", f"{gone}{copies}")
    assert code == 2 and said.err.startswith(f"error: {gone} does not exist")
    weights = {"model.layers.0.weight": mx.zeros((2, 2))}
    other = write_safetensors(tmp_path / "head", {"model_type": "xpress"}, weights)
    code, _, said = run("--model", "some/Model", "--draft-model", f"{other}{copies}")
    assert code == 2 and said.err.startswith(f"error: {other} is an XPress drafter")


def test_auto_without_a_target_is_the_demo_head(run):
    copying = ("demo model", "demo tokenizer", "demo head, copying")
    assert run("--draft-model", "auto")[:2] == (0, [copying])


@pytest.mark.parametrize("name", ["auto", "auto+lookup"])
def test_auto_without_a_known_head_copies_with_one_note(run, name):
    code, opened, said = run("--model", "some/Model", "--draft-model", name)
    assert (code, opened[0][:2]) == (0, ("some/Model", "tokenizer"))
    assert isinstance(opened[0][2], LookupDrafter)
    assert said.err.startswith("Note: no public head is known here for some/Model, so drafts are")
    assert said.err.count("\n") == 1


def test_adapters_need_a_target(run):
    code, _, said = run("--adapter-path", "adapters")
    assert code == 2 and "--adapter-path needs --model" in said.err


TARGET = "Qwen/Qwen3-8B"
CARD = "---\n{}base_model: {}\n---\n"
CONVERSIONS = {
    "x/gemma-4-26b-a4b-it-UD-MLX-4bit": "google/gemma-4-26B-A4B-it",
    "x/Qwen3-8B-OptiQ": TARGET,
    "x/Qwen3-8B-oQ4": TARGET,
    "x/Qwen3-8B-mixed-4-6": TARGET,
    "x/Qwen3-8B-qx86-hi-mlx": TARGET,
    "x/Qwen3-8B-6.5bit": TARGET,
    "x/Qwen3-8B-4bit-MTP": TARGET,
}
TUNED = {
    "x/Qwen3-8B-Claude-mlx-oQ4": ("library_name: mlx\n", TARGET),
    "x/Qwen3-8B-oQ6": ("base_model_relation: finetune\nlibrary_name: mlx\n", TARGET),
    "x/Qwen3-8B-oQ8": ("", TARGET),
    "x/Tuned-oQ4": ("library_name: mlx\n", "x/Tuned"),
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with running_hub(tmp_path / "hub") as server:
        use_hub(monkeypatch, server.address, tmp_path)
        yield server


def publish(folder: Path, card: str, config: dict) -> None:
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(card)
    (folder / "config.json").write_text(json.dumps(config))


def test_a_card_tells_what_a_name_does_not(hub):
    for name, base in CONVERSIONS.items():
        publish(hub.root / name, CARD.format("library_name: mlx\n", base), {})
        assert list(drafters.known_pairs(name)) == list(drafters.known_pairs(base)) != []
    for name, (lines, base) in TUNED.items():
        publish(hub.root / name, CARD.format(lines, base), {})
        assert list(drafters.known_pairs(name)) == []
    publish(hub.root / "x/Tuned", CARD.format("", TARGET), {})
    assert list(drafters.known_pairs("x/Tuned-oQ4")) == []
    assert list(drafters.known_pairs("x/gone-4bit")) == []


def test_a_snapshot_is_the_repository_that_it_is_from(hub, tmp_path):
    """As mlx-lm downloads it, without its card."""
    name = "x/Qwen3-8B-oQ4"
    publish(hub.root / name, CARD.format("library_name: mlx\n", TARGET), {})
    folder = drafters.locate(name, ("config.json",))
    assert not (folder / "README.md").exists()
    assert list(drafters.known_pairs(str(folder))) == list(drafters.known_pairs(TARGET))


ROWS = """
a/Tiny
    b/odd       eagle3   1  MIT
        2.0x  M4 Pro  4 bit  somewhere
    b/head      eagle3   1  MIT
"""


def test_auto_in_python_is_what_it_is_in_the_commands(hub, monkeypatch, capsys):
    """Passes over a drafter that is not there, and says what it has taken."""
    monkeypatch.setattr(pairs, "PAIRS", read_table(ROWS))
    write_safetensors(hub.root / "b" / "head", CONFIG, as_midlayer(eagle3_tensors()))
    model = tiny_llama(vocab_size=128, num_hidden_layers=6)
    drafter = mlx_eagle.open_drafter("auto", model, target="a/Tiny")
    assert isinstance(drafter, Eagle3Drafter) and drafter.copies is not None
    first, *_, last = capsys.readouterr().err.strip().splitlines()
    assert first.startswith("b/odd is passed over, for it cannot be used: b/odd is neither")
    assert last == "Drafting with b/head (licence: MIT), and copying what the text repeats."
    assert speculative(model, drafter, PROMPT, 12, num_draft_tokens=3)[0] == plain(
        model, PROMPT, 12
    )
    drafters.find_drafter("auto", "a/Tiny")  # no error before the target is loaded, either
    with pytest.raises(ValueError, match="'auto' needs the target's name"):
        mlx_eagle.open_drafter("auto", model)


@pytest.mark.parametrize("name", ["auto", "some/head", Path("some/head")])
def test_a_name_in_the_place_of_a_drafter_is_refused(name):
    model, tokenizer = tiny_llama(vocab_size=128), byte_tokenizer()
    doors = (
        lambda: mlx_eagle.generate(model, tokenizer, "a", draft_model=name),
        lambda: next(mlx_eagle.stream_generate(model, tokenizer, "a", draft_model=name)),
        lambda: mlx_eagle.batch_generate(model, tokenizer, [[1]], draft_model=name),
        lambda: next(mlx_eagle.speculative_generate_step(mx.array([1]), model, name)),
    )
    for door in doors:
        with pytest.raises(ValueError, match=r"draft_model is the name .+: give what"):
            door()
    with pytest.raises(ValueError, match="draft_model is a Model: give a drafter"):
        next(mlx_eagle.speculative_generate_step(mx.array([1]), model, model))


def test_list(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(drafters, "user_cache", lambda: tmp_path)
    monkeypatch.setattr(sys, "argv", ["mlx_eagle.generate", "--list"])
    monkeypatch.setenv("COLUMNS", "1000")
    program.main()
    before = capsys.readouterr().out
    assert "none yet" in before and this_machine().advice in before
    rows = [line.split() for line in before.splitlines() if line.startswith("  ")]
    for pair in PAIRS:
        (said,) = [row[2:] for row in rows if row[:2] == [pair.target, pair.head]]
        figures = "; ".join(map(str, pair.figures))
        expected = [pair.kind, *pair.size.split(), *pair.licence.split(), *figures.split()]
        assert said == expected
    head = write_safetensors(tmp_path / "head", CONFIG, as_midlayer(eagle3_tensors()))
    sizes = TargetSizes(CONFIG["hidden_size"], 32, CONFIG["vocab_size"])
    folder = drafters.converted(head, str(head), None, sizes)
    capsys.readouterr()
    program.main()
    after = capsys.readouterr().out
    (line,) = [line for line in after.splitlines() if str(folder) in line]
    assert f"hidden size {CONFIG['hidden_size']} with {CONFIG['vocab_size']} tokens" in line
    assert "none yet" not in after


def test_the_list_breaks_between_words_in_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mlx_eagle.generate", "--list"])
    monkeypatch.setenv("COLUMNS", "1000")
    program.main()
    whole = capsys.readouterr().out
    for columns in (80, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        program.main()
        out = capsys.readouterr().out
        assert out.split() == whole.split() and max(map(len, out.splitlines())) <= columns
