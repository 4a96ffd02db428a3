"""The command ``mlx_eagle.generate``, as a user runs it: output, files, mistakes, Ctrl-C."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import lru_cache

import mlx.core as mx
import mlx_lm
import pytest
from checkpoints import CONFIG, as_midlayer, eagle3_tensors, write_safetensors
from grids import thorough
from helpers import demo_pair, tiny_llama
from mlx_lm.utils import save_model

from mlx_eagle import chat
from mlx_eagle.commands import flags
from mlx_eagle.commands import generate as program
from mlx_eagle.convert import __main__ as convert
from mlx_eagle.demo.pair import HEAD, demo_target_path
from mlx_eagle.drafters import eagle3
from mlx_eagle.drafters.folder import read_config
from mlx_eagle.drafters.kind import LoadOptions
from mlx_eagle.system import blas, device

QUESTION = "What is 3 + 4?"


@pytest.fixture(scope="module")
def pair():
    return demo_pair()


@pytest.fixture
def run(pair, monkeypatch, capsys):
    """Run the command in this process on an already loaded pair: (exit code, out, err)."""

    def load_demo(quantize_bits=None, **_):
        if quantize_bits is not None:
            eagle3.load(HEAD, read_config(HEAD), pair[0], LoadOptions(quantize_bits))
        return pair

    monkeypatch.setattr(flags, "load_demo", load_demo)
    monkeypatch.setattr(flags, "prepare_device", lambda *_: None)

    def command(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mlx_eagle.generate", *args])
        code = 0
        try:
            program.main()
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return command


@lru_cache
def plain_text(question: str, max_tokens: int) -> str:
    model, tokenizer, _ = demo_pair()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True
    )
    return mlx_lm.generate(model, tokenizer, prompt, max_tokens=max_tokens)


def test_text_footer_and_counts(run):
    flags = ("--num-draft-tokens", "3", "--stats-json", "-", "--memory")
    code, out, _ = run("-p", QUESTION, "-m", "12", *flags)
    assert code == 0
    assert plain_text(QUESTION, 12) in out
    for line in (
        "Prompt: ",
        "Generation: ",
        "Peak memory: ",
        "Rounds: ",
        "Acceptance by position",
    ):
        assert line in out
    assert "Drafting adds" in out
    if mx.default_device() == mx.cpu:  # where the demo is unpacked
        assert "The head is not quantized: 32.0 bits a parameter." in out
    counts = json.loads(out.splitlines()[-1])
    assert counts["num_target_forwards"] == counts["num_rounds"] + counts["num_plain_steps"]
    assert counts["num_drafted"] == counts["num_accepted"] + counts["num_rejected"]
    assert counts["tau"] == pytest.approx(counts["num_emitted"] / counts["num_target_forwards"])
    assert 7.4e6 < counts["head_parameters"] < 7.5e6
    assert counts["target_weight_bytes"] > 500e6 and counts["head_cache_bytes"] > 0


MOST_SECONDS_PER_TOKEN = 3  # 0.05 where it is quiet; in half precision, as it is stored, 7


@pytest.mark.exhaustive
@pytest.mark.skipif(mx.default_device() == mx.gpu, reason="only a CPU is slow in half precision")
def test_the_demo_target_by_its_folder_is_as_fast_as_the_demo_pair(capsys, monkeypatch):
    """As the page on training has it, with a head of one's own."""
    flags = ["--model", str(demo_target_path()), "--draft-model", str(HEAD), "-m", "12"]
    monkeypatch.setattr(sys, "argv", ["generate", *flags, "-p", QUESTION, "--stats-json", "-"])
    program.main()
    out, err = capsys.readouterr()
    assert plain_text(QUESTION, 12) in out
    assert err.count("Note: on a CPU the target's weights are loaded as float32") == 1
    assert json.loads(out.splitlines()[-1])["generation_tps"] > 1 / MOST_SECONDS_PER_TOKEN


@pytest.mark.exhaustive
def test_lines_about_memory_come_with_their_flag_only(run):
    code, out, _ = run("-p", QUESTION, "-m", "4", "--num-draft-tokens", "3")
    assert code == 0 and "Rounds: " in out
    lines = [line for line in out.splitlines() if "MB" in line or "emory" in line]
    assert [line.partition(":")[0] for line in lines] == ["Peak memory"]


WAYS = [
    "",
    "--num-draft-tokens 0",
    "--num-draft-tokens 5",
    "--tree 3x3:9",
    "--draft-model lookup",
    "--draft-model auto+lookup",
    "--kv-bits 8 --kv-group-size 32 --quantized-kv-start 40",
]


@pytest.mark.parametrize("flags", thorough(WAYS, "--num-draft-tokens 5"))
def test_the_same_text_whatever_is_drafted(run, flags):
    code, out, _ = run("-p", QUESTION, "-m", "12", "--verbose", "F", *flags.split())
    expected = plain_text(QUESTION, 12)
    if "--kv-bits" not in flags:
        assert out == expected + "\n"
    assert code == 0 and out.strip()


def test_stats_go_to_a_file(run, tmp_path):
    path = tmp_path / "stats.json"
    flags = ("--num-draft-tokens", "3", "--stats-json", str(path))
    code, _out, _ = run("-p", QUESTION, "-m", "4", *flags)
    assert code == 0 and json.loads(path.read_text())["num_rounds"] >= 1


@pytest.mark.exhaustive
def test_prompt_from_standard_input(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(QUESTION))
    _, out, _ = run("-p", "-", "-m", "12", "--verbose", "F", "--num-draft-tokens", "0")
    assert out == plain_text(QUESTION, 12) + "\n"


@pytest.mark.exhaustive
def test_same_seed_same_text(run):
    flags = ("-p", QUESTION, "-m", "16", "--verbose", "F", "--temp", "0.8", "--seed", "3")
    outs = {run(*flags, "--num-draft-tokens", k)[1] for k in ("0", "1", "4")}
    assert len(outs) == 1


@pytest.fixture
def target(tmp_path):
    """A tiny random llama with the demo pair's tokenizer, in a folder."""
    target = tmp_path / "target"
    model = tiny_llama(vocab_size=49152, num_hidden_layers=6)
    config = {k: v for k, v in vars(model.args).items() if v is not None}
    save_model(target, model)
    (target / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo_target_path() / name, target)
    return target


@pytest.fixture
def head(tmp_path, monkeypatch):
    """An unconverted checkpoint for it."""
    monkeypatch.setattr("mlx_eagle.draft_models.user_cache", lambda: tmp_path / "cache")
    tensors = as_midlayer(eagle3_tensors(vocab=49152))
    return write_safetensors(tmp_path / "head", {**CONFIG, "vocab_size": 49152}, tensors)


@pytest.mark.exhaustive
def test_folders_as_a_user_names_them(run, target, head):
    """A target folder with an unconverted checkpoint, converted on the fly, or a small model."""
    flags = ("-p", QUESTION, "-m", "12", "--verbose", "F", "--model", str(target))
    _, plain, _ = run(*flags, "--num-draft-tokens", "0")
    code, out, err = run(*flags, "--draft-model", str(head))
    assert code == 0, err
    assert "is not converted yet" in out and out.endswith(plain)
    assert run(*flags, "--draft-model", str(head))[1] == plain  # now it is in the cache
    assert run(*flags, "--draft-model", str(target))[1] == plain


@pytest.mark.exhaustive
def test_a_prompt_cache_made_by_mlx_lm(run, target, head, tmp_path):
    file = str(tmp_path / "cache.safetensors")
    made = [sys.executable, "-m", "mlx_lm", "cache_prompt", "--model", str(target)]
    done = subprocess.run(
        [*made, "--prompt", "Some long text.", "--prompt-cache-file", file], capture_output=True
    )
    assert done.returncode == 0, done.stderr
    flags = ["--prompt-cache-file", file, "-p", "And then?", "-m", "10", "--verbose", "F"]
    theirs = subprocess.run(
        [sys.executable, "-m", "mlx_lm", "generate", *flags],
        capture_output=True,
        text=True,
    )
    flags = ("-p", "And then?", "-m", "10", "--verbose", "F", "--prompt-cache-file", file)
    code, out, err = run(*flags, "--draft-model", str(head))
    assert code == 0, err
    assert theirs.stdout.strip() and out.endswith(theirs.stdout)
    code, _, err = run(*flags, "--draft-model", str(head), "--model", "another")
    assert code == 2 and "made with" in err


@pytest.mark.exhaustive
def test_a_text_under_a_schema(run, tmp_path):
    schema = {"type": "object", "properties": {"sum": {"type": "integer", "maximum": 99}}}
    schema |= {"required": ["sum"], "additionalProperties": False}
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    flags, chains = ("-p", QUESTION, "--verbose", "F"), ("--num-draft-tokens", "3")
    flags += ("--json-schema", str(file))
    code, out, err = run(*flags, *chains, "--stats-json", "-")
    text, counts = out.splitlines()
    assert code == 0 and list(json.loads(text)) == ["sum"] and "cut" not in err
    assert json.loads(counts)["num_accepted"] > 0
    assert run(*flags, "--num-draft-tokens", "0")[1].splitlines() == [text]
    code, out, err = run("-p", QUESTION, "--regex", "[a-z]{40}", "-m", "3", *chains)
    assert code == 0 and "Note: --max-tokens cut the text before it was complete." in err


HUGE = str(2**70)
MISTAKES = {
    "negative seed": (("--seed", "-1"), "--seed is -1: give a whole number from 0 to 2**64 - 1"),
    "huge seed": (("--seed", HUGE), f"--seed is {HUGE}: give a whole number"),
    "share": (("--top-p", "2"), "--top-p is 2.0: give a number from 0 to 1"),
    "no number": (("--min-p", "nan"), "--min-p is nan: give a number from 0 to 1"),
    "negative limit": (("--top-k", "-5"), "--top-k is -5: give 0 (no limit) or more"),
    "negative window": (("--max-kv-size", "-1"), "--max-kv-size is -1: give 5 or more"),
    "bits": (("--kv-bits", "7"), "--kv-bits: there is no 7: give 2, 3, 4, 5, 6 or 8"),
    "groups": (("--kv-group-size", "48"), "--kv-group-size: there is no 48: give 32, 64 or 128"),
    "start": (("--quantized-kv-start", "-1"), "--quantized-kv-start is -1: give 0 or more"),
    "threshold": (("--xtc-threshold", "0.7"), "give a number from 0 to 0.5"),
    "a list": (("--chat-template-config", "[1]"), "--chat-template-config: [1] is no JSON object"),
    "no JSON": (("--chat-template-config", "{"), "--chat-template-config: { is no JSON object"),
    "no folder": (
        ("--stats-json", "no/such/place"),
        "--stats-json no/such/place cannot be written",
    ),
    "a folder": (("--stats-json", "."), "--stats-json . cannot be written (Is a directory)"),
    "an image": (("--image", "a.png"), "in Python, generate takes an image's embeddings"),
    "negative draft": (("--num-draft-tokens", "-1"), "give 0 (plain decoding) or more"),
    "no tokens": (("--max-tokens", "0"), "give a positive number, or -1"),
    "no prefill": (("--prefill-step-size", "0"), "give 1 or more"),
    "negative temperature": (("--temp", "-1"), "give 0 (greedy) or more"),
    "tree": (("--tree", "4x4"), "give WIDTHxDEPTH:NODES"),
    "rule without temperature": (("--acceptance", "reject"), "needs a temperature above 0"),
    "rule with XTC": (
        ("--acceptance", "coupled", "--temp", "1", "--xtc-probability", "0.5"),
        "cannot replay XTC",
    ),
    "no such head": (("--draft-model", "no/such/head/here"), "does not exist"),
    "no such target": (("--model", "somewhere"), "somewhere does not exist"),
    "quantized twice": (("--quantize-draft", "8"), "already quantized to 4 to 6 bits"),
    "no such cache": (("--prompt-cache-file", "nowhere.safetensors"), "does not exist"),
    "no such schema": (
        ("--json-schema", "no.json"),
        "--json-schema: no.json cannot be read (No such",
    ),
    "no JSON as schema": (("--json-schema", __file__), "the schema is no JSON ("),
    "no expression": (("--regex", "("), "no text can be held to this regular expression: "),
    "two grammars": (("--regex", "a", "--json-schema", __file__), "exclude each other"),
    "a file as head": (("--draft-model", __file__), "give the folder it is in"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_costs_one_sentence(run, name):
    flags, sentence = MISTAKES[name]
    code, out, err = run("-p", QUESTION, "-m", "4", *flags)
    assert code == 2
    assert err.startswith("error: ") and err.count("\n") == 1
    assert sentence in err
    assert "Traceback" not in out + err


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "schema, sentence",
    [
        ({"type": "colour"}, "Invalid type: colour."),
        ({"enum": [*range(9000)]}, "the schema has 9002 values: give at most 4000."),
    ],
)
def test_a_schema_of_no_use_costs_one_sentence(run, tmp_path, schema, sentence):
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    code, out, err = run("-p", QUESTION, "-m", "4", "--json-schema", str(file))
    assert code == 2 and not out and err.startswith("error: ") and err.count("\n") == 1
    assert sentence in err


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--num-draft-tokens", "2.0"), "'2.0' is neither a whole number nor auto"),
        (("--seed", "x"), "'x' is not a whole number"),
        (("--top-p", "x"), "'x' is not a number"),
    ],
)
def test_what_is_no_number_is_said_in_plain_words(run, flags, words):
    code, _, err = run(*flags)
    assert code == 2 and words in err
    assert not re.search(r"\b(int|float|str|draft_length|read_number)\b", err)


def test_nothing_is_left_where_the_counts_should_go(run, tmp_path):
    """The place is tried before anything is loaded, and left as it was."""
    path = tmp_path / "stats.json"
    assert run("--stats-json", str(path), "--draft-model", "no/such/head/here")[0] == 2
    assert list(tmp_path.iterdir()) == []
    path.write_text("mine")
    assert run("--stats-json", str(path), "--draft-model", "no/such/head/here")[0] == 2
    assert path.read_text() == "mine"


HELP = {
    "--num-draft-tokens": "Draft tokens per step. 0 turns drafting off; auto (default) picks the "
    "length per step and turns drafting off where it does not help.",
    "--tree": "Draft a tree instead of a chain. WIDTHxDEPTH:NODES (for example 3x3:7) is an "
    "EAGLE-2 tree.",
    "--acceptance": "match: works with any sampler. coupled (default with --temp): the same seed "
    "gives the same text with or without drafting. reject: rejection sampling, in a tree child by "
    "child.",
    "--draft-cache": "Advanced: cheaper draft-cache update, lower acceptance.",
    "--list": "List converted heads and known pairs, and exit.",
}


def test_help_says_what_was_agreed():
    found = {flag: a.help for a in program.build_parser()._actions for flag in a.option_strings}
    assert {flag: found[flag] for flag in HELP} == HELP


PRINTING = """
from mlx_eagle.system.exit_codes import run_command
run_command(lambda: print({printed}))
"""


PRINTED = ["'word ' * 10**6", "'word', flush=True", "'word'"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("printed", PRINTED)
def test_a_reader_that_goes_away_is_no_error(printed):
    """As in ``mlx_eagle.generate ... | head -c 5``: not a word, whenever it is noticed."""
    read, write = os.pipe()
    code = PRINTING.format(printed=printed)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True
    ) as process:
        os.close(write)
        os.close(read)
        _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (141, "")


MAINS = [program.main, chat.main, convert.main]


@pytest.mark.parametrize("main", thorough(MAINS, chat.main), ids=lambda m: m.__module__)
def test_every_command_says_once_how_to_get_openblas(main, monkeypatch, capsys):
    """That of bench and demo is in ``test_bench_runs.py``, the server's in its own tests."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    monkeypatch.setattr(device, "openblas", lambda: None)
    monkeypatch.setattr(blas, "SOURCE", "no-such-package")
    monkeypatch.setattr(flags, "load_demo", lambda **_: demo_pair())
    arguments = ["--hf-path", "no/such/head", "--check", "--target", "no/such"]
    if main is not convert.main:
        arguments = ["--draft-model", "no/such/head/here"]
    monkeypatch.setattr(sys, "argv", ["x", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    note, error = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and error.startswith("error: ")
    assert note.startswith("Note: ") and "pip install 'mlx-eagle[cpu]'" in note


@pytest.mark.exhaustive
def test_ctrl_c_leaves_cleanly():
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_eagle.generate", "-p", "Write a long story.", "-m", "-1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A suite that runs in the background has SIGINT ignored, and would pass that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout.readline().startswith("=====")
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.strip().endswith("interrupted") and "Traceback" not in err
