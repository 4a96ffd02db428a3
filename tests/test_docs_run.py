"""Every command of ours in README.md and the documentation is run, on tiny stand-ins.

A page's commands run in the order and in the one folder in which a reader would type them. Hub
ids are found on a hub on this machine: random weights in the layouts in which the real ones are
published. Benchmarks and texts are cut short by flags behind their own, and plots of benchmarks
are not rendered (``test_bench_runs.py`` does that); a server is given a free port.

``make`` targets are not run here but parsed (``tests/test_docs.py``): ``make test`` is this
suite, ``make demo`` and ``make bench`` are what ``test_demo.py`` and ``test_bench_runs.py`` run,
and ``make docs`` runs in the workflow. ``pip install`` is what ``test_package.py`` does.
"""

import importlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import mlx.nn as nn
import pytest
from checkpoints import (
    CONFIG,
    FLAT,
    as_midlayer,
    config_of,
    eagle3_tensors,
    speculators,
    without,
    write_bin,
    write_config,
    write_safetensors,
)
from documents import DOCUMENTS, ROOT, SCRIPTS, commands
from helpers import TEMPLATE, tiny_llama, tiny_qwen3
from hub import Hub, hub_settings, running_hub, use_hub
from matplotlib.figure import Figure
from mlx_lm.utils import save_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_eagle.bench.conditions import DEMO_NAMES
from mlx_eagle.convert import convert
from mlx_eagle.demo import pair as demo
from mlx_eagle.doctor.self_test import Section, sections
from mlx_eagle.drafters.pairs import PAIRS

TARGETS: dict[str, Callable[..., nn.Module]] = {
    "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit": tiny_llama,
    "mlx-community/Llama-3.2-1B-Instruct-4bit": tiny_llama,
    "Qwen/Qwen3-4B": tiny_qwen3,
    "Qwen/Qwen3-8B": tiny_qwen3,
}
SHORT = ["--limit", "1", "--max-tokens", "4", "--repeats", "1"]
REPORT = ("report.md", "results.json", "results.csv")


def write_tokenizer(folder: Path) -> int:
    """A token a word, so that prompts are short, and a chat template; its number of tokens."""
    words = Counter(re.findall(r"\w+", (ROOT / "README.md").read_text())).most_common(200)
    vocab = {word: i for i, (word, _) in enumerate([*words, ("<unk>", 0), ("<end>", 0)])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return len(vocab)


def write_target(folder: Path, build: Callable[..., nn.Module]) -> int:
    """A target as mlx-lm loads it, whose texts do not end by themselves; its number of tokens."""
    folder.mkdir(parents=True)
    num_tokens = write_tokenizer(folder)
    model = build(vocab_size=num_tokens, num_hidden_layers=7)
    # The end has a logit of 0: some other of 200 random ones is above it.
    output = model.model.embed_tokens if model.args.tie_word_embeddings else model.lm_head
    output.weight[-1] = 0.0
    save_model(folder, model)
    values = {k: v for k, v in vars(model.args).items() if v is not None}
    write_config(folder, values | {"eos_token_id": num_tokens - 1})
    return num_tokens


def write_heads(root: Path, num_tokens: int) -> None:
    """The heads that the pages name, each in the layout of who published it."""
    sizes = {"vocab": num_tokens, "draft": num_tokens // 2}
    vocab = {"vocab_size": num_tokens, "draft_vocab_size": sizes["draft"]}
    tensors = eagle3_tensors(**sizes)
    original = root / "yuhuili" / "EAGLE3-LLaMA3.1-Instruct-8B"
    write_config(original, FLAT | vocab)
    write_bin(original / "pytorch_model.bin", as_midlayer(tensors))
    layer = {"vocab_size": num_tokens}
    write_safetensors(
        root / "RedHatAI" / "Llama-3.1-8B-Instruct-speculator.eagle3",
        speculators(layer, draft_vocab_size=sizes["draft"]),
        without(tensors, "lm_head.weight"),
    )
    architecture = {"architectures": ["Eagle3LlamaForCausalLM"]}
    for name in ("Qwen3-4B_eagle3", "Qwen3-8B_eagle3"):
        folder = root / "AngelSlim" / name
        write_safetensors(folder, CONFIG | vocab | architecture, as_midlayer(tensors))


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Iterator[Hub]:
    """The stand-in with all that the pages name, and this process's only hub."""
    home = tmp_path_factory.mktemp("home")
    with running_hub(home / "hub") as server, pytest.MonkeyPatch.context() as patch:
        for name, build in TARGETS.items():
            num_tokens = write_target(server.root / name, build)
        write_heads(server.root, num_tokens)
        write_target(home / "demo", tiny_llama)
        convert(str(server.root / "yuhuili" / "EAGLE3-LLaMA3.1-Instruct-8B"), str(home / "head"))
        use_hub(patch, server.address, home)
        patch.setattr(Figure, "savefig", lambda _, path, **options: Path(path).touch())
        patch.setattr(demo, "demo_target_path", lambda: home / "demo")
        patch.setattr(demo, "HEAD", home / "head")
        yield server


class Reader:
    """Who types a page's commands, one after the other, in the current folder."""

    def __init__(self, hub: Hub, monkeypatch, capsys):
        self.hub, self.patch, self.capsys = hub, monkeypatch, capsys

    def type(self, words: list[str]) -> None:
        """Run one command, and see that it did what it is for."""
        kind = words[0].removeprefix("mlx_eagle.")
        if "--version" in words:
            assert re.search(r"\d+\.\d+\.\d+", self.run(words))
        elif "--list" in words:
            assert PAIRS[0].head in self.run(words)
        else:
            getattr(self, "programs" if kind == "with" else kind)(words)

    def run(self, words: list[str], typed: str = "") -> str:
        """Run it in this process; what it printed."""
        module, function = SCRIPTS[words[0]].split(":")
        self.patch.setattr(sys, "argv", words)
        self.patch.setattr(sys, "stdin", io.StringIO(typed))
        self.capsys.readouterr()
        code = 0
        try:
            getattr(importlib.import_module(module), function)()
        except SystemExit as stop:
            code = stop.code
        out, err = self.capsys.readouterr()
        assert not code, f"{shlex.join(words)}: {err}"
        return out

    def generate(self, words: list[str]) -> None:
        words = with_short_text(self.with_demo_target(words))
        # The text itself may be white space: the weights are random.
        _, _, counts = self.run(words).split("==========\n")
        assert re.search(r"^Generation: [1-9]", counts, re.MULTILINE), counts
        wanted = r"^Rounds: .*[1-9]|^Nothing was drafted|^auto did not draft: "
        assert re.search(wanted, counts, re.MULTILINE), counts

    def chat(self, words: list[str]) -> None:
        out = self.run(with_short_text(words), "Hello\n/stats\n/exit\n")
        assert "Answers: 1" in out and re.search(r"^Rounds: [1-9]", out, re.MULTILINE), out

    def programs(self, words: list[str]) -> None:
        """mlx-lm's generate, which says how much it wrote."""
        _, _, counts = self.run(with_short_text(words)).split("==========\n")
        assert re.search(r"^Generation: [1-9]", counts, re.MULTILINE), counts

    def with_demo_target(self, words: list[str]) -> list[str]:
        """The stand-in's folder for where the demo target lies in the user's cache."""
        folder = str(self.hub.root.parent / "demo")
        return [folder if "SmolLM2" in word else word for word in words]

    def train(self, words: list[str]) -> None:
        """On a few rows, for two batches; the demo target is the stand-in's."""
        words = self.with_demo_target(words)
        data = Path(value_of(words, "--data"))
        data.mkdir(exist_ok=True)
        roles = ("user", "assistant")
        messages = [{"role": role, "content": "the head of a text"} for role in roles]
        (data / "train.jsonl").write_text(4 * (json.dumps({"messages": messages}) + "\n"))
        short = ["--iters", "2", "--batch-size", "2", "--answer-tokens", "6", "--ttt-steps", "2"]
        out = self.run([*words, *short])
        folder = Path(value_of(words, "--output"))
        assert "Iter 2" in out and config_of(folder)["training"]["iterations"] == 2
        assert (folder / "training.csv").is_file() and (folder / "README.md").is_file()

    def convert(self, words: list[str]) -> None:
        if "--to-pytorch" in words:
            self.run(words)
            assert config_of(Path(words[-1]))["architectures"] == ["LlamaForCausalLMEagle3"]
            return
        out = self.run(words)
        folder = Path(value_of(words, "--mlx-path"))
        config = config_of(folder)
        assert (folder / "model.safetensors").is_file() and "family" in out
        assert (folder / "tokenizer.json").is_file() == ("--target" in words)
        assert ("check" in config) == ("overlap" in out) == ("--check" in words)
        bits = None if "--no-quantize" in words else int(value_of(words, "--q-bits") or 4)
        assert config.get("quantization", {}).get("bits") == bits

    def bench(self, words: list[str]) -> None:
        if "--check-report" in words:  # of the command before
            assert "as it should be" in self.run(words)
            return
        short = SHORT + (["--context", "16,32"] if "--context" in words else [])
        short += ["--batch", "1,2", "--limit", "2"] if "--batch" in words else []
        if "--serve" in words:  # by processes, which find the hub in their environment
            short += ["--serve", "1,2", "--limit", "2"]
            for name, value in hub_settings(self.hub.address, self.hub.root.parent).items():
                self.patch.setenv(name, value)
        self.run(words + short)
        folder = Path(value_of(words, "--out") or "bench-results")
        assert all((folder / name).stat().st_size for name in REPORT)
        found = json.loads((folder / "results.json").read_text())
        assert found["conditions"]["model"] == (value_of(words, "--model") or DEMO_NAMES["model"])
        assert all(scenario["configurations"] for scenario in found["scenarios"])

    def doctor(self, words: list[str]) -> None:
        """With a part or two of the self-test, and no word on the BLAS of the tests' machine."""
        self.patch.setattr("mlx_eagle.doctor.checks.blas_note", lambda: None)
        whole = sections(Path())[0]
        short = [Section(whole.title, whole.header, whole.parts[:2])]
        self.patch.setattr("mlx_eagle.doctor.__main__.sections", lambda file: short)
        out = self.run(words)
        if "--self-test" in words:
            report = Path(value_of(words, "--out") or "mlx-eagle-self-test.md")
            assert "| 128 | float16 |" in report.read_text() and report.name in out
        else:
            assert "machine" in out and ("passes" in out) == ("--model" in words)

    def server(self, words: list[str]) -> None:
        """In a process of its own, which serves until it is interrupted."""
        line = [sys.executable, "-m", *words, "--port", "0"]
        settings = {**os.environ, **hub_settings(self.hub.address, self.hub.root.parent)}
        with subprocess.Popen(line, env=settings, stdout=subprocess.PIPE, text=True) as process:
            try:
                said = (word for line in process.stdout for word in line.split())
                address = next(word for word in said if re.fullmatch(r"http://\S+/v1", word))
                usage = ask(f"{address}/chat/completions")["usage"]
                assert 1 <= usage["completion_tokens"] <= 4
                process.send_signal(signal.SIGINT)
                assert process.wait(timeout=20) == 0
            finally:
                process.kill()


def value_of(words: list[str], flag: str) -> str | None:
    return words[words.index(flag) + 1] if flag in words else None


def with_short_text(words: list[str]) -> list[str]:
    """As typed, but for a text as long as it takes to draft a few times."""
    return words if "--max-tokens" in words else [*words, "--max-tokens", "16"]


def ask(url: str) -> dict:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=60) as reply:
        return json.load(reply)


def ours(path: Path) -> list[list[str]]:
    return [words for words in commands(path) if words[0] in SCRIPTS]


def made_elsewhere(path: Path) -> list[list[str]]:
    """The conversions on other pages that make the heads which this page takes for granted."""
    made = {value_of(words, flag) for words in ours(path) for flag in ("--mlx-path", "--output")}
    given = [value_of(words, "--draft-model") or "auto" for words in ours(path)]
    named = {name for names in given for name in names.split(",")} - {"auto", "lookup"}
    named = {name for name in named if "/" not in name}  # of the hub
    conversions = {value_of(w, "--mlx-path"): w for page in DOCUMENTS for w in ours(page)}
    return [conversions[name] for name in sorted(named - made)]


WITH_COMMANDS = [path for path in DOCUMENTS if ours(path)]


@pytest.mark.parametrize("path", WITH_COMMANDS, ids=lambda path: path.name)
@pytest.mark.exhaustive
def test_commands_run(path, hub, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    reader = Reader(hub, monkeypatch, capsys)
    for words in made_elsewhere(path) + ours(path):
        reader.type(words)


def test_every_command_is_among_them():
    assert {words[0] for path in WITH_COMMANDS for words in ours(path)} == set(SCRIPTS)
    (bench,) = [path for path in WITH_COMMANDS if path.name == "benchmark.md"]
    assert [words[0] for words in made_elsewhere(bench)] == ["mlx_eagle.convert"]


def test_a_command_that_goes_wrong_is_noticed(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="neither a folder here nor a repository"):
        Reader(hub, monkeypatch, capsys).type(
            ["mlx_eagle.convert", "--hf-path", "no/such", "--mlx-path", "out"]
        )
