"""``--draft-model auto`` and ``--list``: the known heads, and those converted here."""

import sys

import mlx.core as mx
import pytest
from checkpoints import CONFIG, as_midlayer, eagle3_tensors, write_safetensors
from public_drafters import ASSISTANTS, BLOCKS
from public_heads import EAGLE_1, HEADS, MISTRAL, NOT_FOUND

from mlx_eagle import draft_models as drafters
from mlx_eagle.commands import flags
from mlx_eagle.commands import generate as program
from mlx_eagle.drafters.kinds import KINDS
from mlx_eagle.drafters.pairs import PAIRS, pair_for, plain_name
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
    heads = [pair.head for pair in PAIRS]
    assert len(set(heads)) == len(heads)
    assert all(REPO_ID.fullmatch(pair.target) for pair in PAIRS)
    assert all((INSIDE.fullmatch(p.head) or REPO_ID.fullmatch(p.head)) for p in PAIRS)
    assert all(KINDS[pair.kind].convert or pair.kind == "eagle3" for pair in PAIRS)


def test_every_pair_is_resolved_at_full_size():
    """By a row of sizes that a test goes through; a few have a reason instead."""
    rows = {*HEADS, *EAGLE_1, *MISTRAL, *BLOCKS, *ASSISTANTS}
    assert {pair.head for pair in PAIRS} - rows == NOT_FOUND.keys()
    assert all(NOT_FOUND.values())


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.head)
def test_the_first_of_a_target_is_chosen(pair):
    chosen = pair_for(pair.target)
    assert chosen.target == pair.target
    assert PAIRS.index(chosen) <= PAIRS.index(pair)
    converted = f"mlx-community/{pair.target.split('/')[1]}-4bit"
    assert pair_for(converted) == chosen


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B-Base", "some/Model-4bit", "/tmp/model"])
def test_an_unknown_target_is_told_what_to_do(model):
    with pytest.raises(ValueError, match=f"no public head is known here for {model}"):
        pair_for(model)


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
    monkeypatch.setattr(flags, "prepare_device", lambda: None)
    monkeypatch.setattr(flags, "load_demo", lambda **_: demo)
    monkeypatch.setattr(flags, "find_drafter", lambda name: None)
    open_one = lambda *names, **_: opened.append(names) or "head"  # noqa: E731
    monkeypatch.setattr(drafters, "open_drafter", open_one)

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
    assert opened == [(f"{head}+lookup", model, "tokenizer"), (model, "tokenizer", "head")]
    copying = "and copying what the text repeats"
    assert said.err == f"Drafting with {head} (licence: Apache-2.0), {copying}.\n"
    assert said.out == ""


def test_a_model_without_a_head_takes_the_known_one(run):
    model = "mlx-community/Qwen3-8B-4bit"
    code, opened, said = run("--model", model)
    assert code == 0 and opened[0] == (f"{pair_for(model).head}+lookup", model, "tokenizer")
    assert said.err.startswith(f"Drafting with {pair_for(model).head} (")


def test_without_a_known_head_it_decodes_plainly_with_one_note(run):
    code, opened, said = run("--model", "some/Model")
    assert code == 0 and opened == [("some/Model", "tokenizer", None)]
    assert said.err.startswith("Note: no public head is known here for some/Model")
    assert said.err.count("\n") == 1


def test_plain_decoding_looks_for_no_head(run):
    code, opened, said = run("--model", "Qwen/Qwen3-8B", "--num-draft-tokens", "0")
    assert code == 0 and opened == [("Qwen/Qwen3-8B", "tokenizer", None)] and said.err == ""


def test_nothing_is_said_to_draft_that_could_not_be_opened(run, monkeypatch):
    def fail(*_, **__):
        raise ValueError("the hub could not be reached")

    monkeypatch.setattr(drafters, "open_drafter", fail)
    code, _, said = run("--model", "Qwen/Qwen3-8B")
    assert (code, said.err) == (2, "error: the hub could not be reached\n")


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
def test_auto_without_a_known_head_copies_with_one_note(run, monkeypatch, name):
    monkeypatch.setattr(drafters, "open_drafter", lambda *given, **_: given)
    code, opened, said = run("--model", "some/Model", "--draft-model", name)
    assert (code, opened[0][:2]) == (0, ("some/Model", "tokenizer"))
    assert opened[0][2][0] == "lookup"
    assert said.err.startswith("Note: no public head is known here for some/Model, so drafts are")
    assert said.err.count("\n") == 1


def test_adapters_need_a_target(run):
    code, _, said = run("--adapter-path", "adapters")
    assert code == 2 and "--adapter-path needs --model" in said.err


def test_the_list_breaks_between_words_in_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mlx_eagle.generate", "--list"])
    program.main()
    whole = capsys.readouterr().out
    assert max(map(len, whole.splitlines())) > 120
    for columns in (80, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        program.main()
        out = capsys.readouterr().out
        assert out.split() == whole.split() and max(map(len, out.splitlines())) <= columns


def test_list(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(drafters, "user_cache", lambda: tmp_path)
    monkeypatch.setattr(sys, "argv", ["mlx_eagle.generate", "--list"])
    program.main()
    before = capsys.readouterr().out
    assert "none yet" in before and this_machine().advice in before
    rows = [line.split() for line in before.splitlines() if line.startswith("  ")]
    for pair in PAIRS:
        (said,) = [row[2:] for row in rows if row[:2] == [pair.target, pair.head]]
        assert said == [pair.kind, *pair.size.split(), *pair.licence.split()]
    head = write_safetensors(tmp_path / "head", CONFIG, as_midlayer(eagle3_tensors()))
    sizes = TargetSizes(CONFIG["hidden_size"], 32, CONFIG["vocab_size"])
    folder = drafters.converted(head, str(head), None, sizes)
    capsys.readouterr()
    program.main()
    after = capsys.readouterr().out
    (line,) = [line for line in after.splitlines() if str(folder) in line]
    assert f"hidden size {CONFIG['hidden_size']} with {CONFIG['vocab_size']} tokens" in line
    assert "none yet" not in after
