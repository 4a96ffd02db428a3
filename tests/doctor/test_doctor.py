"""The doctor's page: what is looked at, and that everything wrong is a line with what to do."""

import json
import re
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import CONFIG, as_midlayer, eagle3_tensors, write_safetensors
from helpers import byte_tokenizer, tiny_llama
from true_configs import GEMMA3_12B, GEMMA4_31B, GPT_OSS_20B, LLAMA_8B, QWEN3_30B_A3B, QWEN35_27B

from mlx_eagle.convert import convert
from mlx_eagle.decoding.pass_costs import TargetWeights
from mlx_eagle.doctor import __main__ as program
from mlx_eagle.doctor import checks, packages
from mlx_eagle.doctor.checks import expected_speedup
from mlx_eagle.drafters.pairs import PAIRS, bytes_in_4_bits, targets_within
from mlx_eagle.system.device import Machine, machine_of, product_cost

M4 = machine_of({"device_name": "Apple M4 Pro", "architecture": "applegpu_g16s"}, "metal")


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """An empty cache, and a BLAS as it should be."""
    monkeypatch.setattr(checks, "user_cache", lambda: tmp_path / "cache")
    monkeypatch.setattr(checks, "blas_note", lambda: None)
    return tmp_path


def doctor(capsys, *flags: str) -> tuple[int, str]:
    """The exit code, and what was printed."""
    code = 0
    try:
        program.main(list(flags))
    except SystemExit as stop:
        code = int(stop.code or 0)
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return code, said.out + said.err


def test_a_machine_with_nothing_wrong(home, capsys):
    code, page = doctor(capsys)
    assert code == 0 and page.endswith("Nothing is wrong.\n")
    assert str(mx.device_info()["device_name"]) in page
    assert all(len(line) <= 99 for line in page.splitlines() if "/" not in line)
    assert not (home / "cache").exists(), "looking leaves nothing behind"


def test_json_says_the_same(home, capsys):
    code, text = doctor(capsys, "--json")
    found = json.loads(text)
    assert code == 0 and found["ok"] is True
    names = [finding["name"] for finding in found["findings"]]
    wanted = "machine drafting system Python mlx mlx-lm memory cache known-pairs"
    assert set(wanted.replace("-p", " p").split()) - {"known", "pairs"} <= set(names)
    assert {finding["level"] for finding in found["findings"]} <= {"ok", "note"}


def test_without_openblas_it_says_how_to_get_it(home, capsys, monkeypatch):
    monkeypatch.setattr(checks, "blas_note", lambda: "Note: no good, because: `export A=B`")
    code, page = doctor(capsys)
    assert code == 1 and "1 problem: BLAS." in page and "`export A=B`" in page


@pytest.mark.parametrize("blocked", ["a file in its place", "a folder that nobody may write"])
def test_a_cache_that_cannot_be_written(home, capsys, blocked, monkeypatch):
    if blocked == "a file in its place":
        (home / "cache").write_text("")
    else:
        monkeypatch.setattr(checks, "user_cache", lambda: Path("/proc/nowhere/mlx-eagle"))
        if sys.platform != "linux":
            pytest.skip("/proc is Linux's")
    code, page = doctor(capsys)
    page = " ".join(page.split())
    assert code == 1 and "cannot be written" in page and "problem: cache" in page


# --- what to expect of a model ----------------------------------------------------------------


def write_config(folder: Path, config: dict) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def found_by_name(model: str, draft_model: str | None = None) -> dict:
    return {finding.name: finding for finding in checks.expect(model, draft_model)}


def test_a_large_target_on_a_mac(tmp_path, monkeypatch):
    """Llama-3.1-8B has 8.03 billion parameters, and 4.5 GB of them in 4 bits (4.52)."""
    monkeypatch.setattr(checks, "this_machine", lambda: M4)
    monkeypatch.setattr(checks, "memory", lambda machine: (24e9, 17e9))
    target = write_config(tmp_path / "Meta-Llama-3.1-8B-Instruct-4bit", LLAMA_8B)
    found = found_by_name(target, "auto")
    assert "8.03 B parameters in 4.5 bits each: 4.5 GB" in found["model"].text
    costs = "k = 1 to 7 cost about 1.0, 1.2, 1.4, 1.8, 2.1, 2.4, 2.8 plain steps a pass"
    assert found["passes"].text.startswith(f"{costs} (measured on an M4 Pro")
    assert found["attention"].text == "heads of 128: fused for passes of up to 8 rows (k up to 7)"
    assert PAIRS[0].head in found["draft model"].text
    assert {finding.level for finding in found.values()} == {"ok"}
    monkeypatch.setattr(checks, "memory", lambda machine: (4e9, 3e9))
    assert found_by_name(target)["model"].level == "problem"


# Parameters in billions and gigabytes as the models are published, heads and rows of attention.
REAL = {
    "gpt-oss-20b": (GPT_OSS_20B, "20.91", "12.1", [(64, 4)]),
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, "30.53", "17.2", [(128, 4)]),
    "Gemma 3 12B": (GEMMA3_12B, "11.77", "6.6", [(256, 8)]),
    "Gemma 4 31B": (GEMMA4_31B, "30.70", "17.3", [(256, 8), (512, 0)]),
    "Qwen3.5 27B": (QWEN35_27B, "26.90", "15.1", [(256, 5)]),
}


@pytest.mark.parametrize("name", REAL)
def test_real_targets_nested_configurations_too(tmp_path, monkeypatch, name):
    monkeypatch.setattr(checks, "this_machine", lambda: M4)
    monkeypatch.setattr(checks, "memory", lambda machine: (36e9, 27e9))
    config, billions, gigabytes, heads = REAL[name]
    target = write_config(tmp_path / "target", config)
    findings = checks.expect(target, None)
    found = {finding.name: finding.text for finding in findings}
    assert f"{billions} B parameters" in found["model"] and f": {gigabytes} GB" in found["model"]
    assert ("experts" in found["passes"]) == ("experts" in str(config)) == ("experts" in found)
    assert "1.0 to 1.15x" in found.get("experts", "1.0 to 1.15x")
    said = [finding.text for finding in findings if finding.name == "attention"]
    assert [int(text.split()[2].strip(":")) for text in said] == [size for size, _ in heads]
    for text, (_, rows) in zip(said, heads, strict=True):
        assert (f"up to {rows} rows" if rows else "no fused kernel") in text


@pytest.mark.parametrize("name", ["mtp", None])
@pytest.mark.parametrize("bits, said", [(4, "quantized to 4 to 6 bits"), (8, "to 8 bits")])
def test_layers_of_the_targets_own_are_quantized(tmp_path, monkeypatch, name, bits, said):
    """Qwen3.5-27B's are published in 15 tensors of 810 MiB."""
    monkeypatch.setattr(checks, "this_machine", lambda: M4)
    monkeypatch.setattr(checks, "memory", lambda machine: (64e9, 48e9))
    packing = {"quantization": {"group_size": 64, "bits": bits}}
    target = write_config(tmp_path / "its own", QWEN35_27B | packing)
    weights = {"mtp.fc.weight": mx.zeros((1, 2))}  # only the name is read
    mx.save_safetensors(str(tmp_path / "its own" / "model.safetensors"), weights)
    text = found_by_name(target, name)["draft model"].text
    assert said in text
    after, before = map(int, re.findall(r"(\d+) MB", text))
    assert before == round(810 * 2**20 / 1e6)
    assert after <= (0.35 if bits == 4 else 0.6) * before
    monkeypatch.setattr(checks, "this_machine", lambda: Machine("a CPU", "cpu", "unknown"))
    assert "stays as it is" in found_by_name(target, name)["draft model"].text


@pytest.mark.parametrize(
    "decoder, num_tokens, is_proposed",
    [("ByteLevel", 248320, True), ("ByteLevel", 65536, False), ("Sequence", 248320, False)],
)
def test_a_smaller_vocabulary_for_drafts(tmp_path, decoder, num_tokens, is_proposed):
    text = QWEN35_27B["text_config"] | {"vocab_size": num_tokens, "num_hidden_layers": 4}
    target = write_config(tmp_path / "target", QWEN35_27B | {"text_config": text})
    assert "vocabulary" not in found_by_name(target)
    stored = json.loads(byte_tokenizer()._tokenizer.backend_tokenizer.to_str())
    stored["decoder"] = {"type": decoder}
    (tmp_path / "target" / "tokenizer.json").write_text(json.dumps(stored))
    found = found_by_name(target).get("vocabulary")
    assert (found is not None) == is_proposed
    if found is not None:
        assert "--draft-vocab 65536" in found.text and "26% of it" in found.text


def test_other_machines_have_other_passes(tmp_path, monkeypatch):
    target = write_config(tmp_path / "target", LLAMA_8B)

    def said(backend: str, architecture: str) -> str:
        machine = machine_of({"architecture": architecture}, backend)
        monkeypatch.setattr(checks, "this_machine", lambda: machine)
        monkeypatch.setattr(checks, "memory", lambda machine: (24e9, 17e9))
        return found_by_name(target)["passes"].text

    assert " 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 7.0 plain" in said("metal", "applegpu_g13s")
    assert " 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0 plain" in said("metal", "applegpu_g14d")
    assert " 1.1, 1.2, 1.4, 1.6, 1.7, 1.9, 2.1 plain" in said("metal", "applegpu_g15d")
    assert " 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 2.0 plain" in said("cuda", "sm_89")
    assert " 1.2, 1.2, 1.2, 1.2, 1.2, 1.2, 1.2 plain" in said("cuda", "sm_90")


@pytest.mark.parametrize(
    "architecture, is_said", [("applegpu_g14s", True), ("applegpu_g15s", False)]
)
def test_float16_is_proposed_where_bfloat16_is_emulated(
    tmp_path, monkeypatch, architecture, is_said
):
    machine = machine_of({"architecture": architecture}, "metal")
    monkeypatch.setattr(checks, "this_machine", lambda: machine)
    monkeypatch.setattr(checks, "memory", lambda machine: (24e9, 17e9))
    for dtype in ("bfloat16", "float16"):
        target = write_config(tmp_path / dtype, LLAMA_8B | {"torch_dtype": dtype})
        found = found_by_name(target)
        assert ("precision" in found) == (is_said and dtype == "bfloat16")
        if "precision" in found:
            said = found["precision"].remedy
            assert "--dtype float16" in said and "plain" in said and "rounds" in said


@pytest.mark.parametrize(
    "architecture, low, high", [("g16s", 1.4, 1.9), ("g14s", 1.0, 1.0), ("g17s", 1.5, 2.1)]
)
def test_the_speedup_to_expect(tmp_path, monkeypatch, architecture, low, high):
    """tau / (c(k + 1) + k d), made again by the definition of tau, at the best k."""
    machine = machine_of({"architecture": f"applegpu_{architecture}"}, "metal")
    monkeypatch.setattr(checks, "this_machine", lambda: machine)
    monkeypatch.setattr(checks, "memory", lambda machine: (24e9, 17e9))
    target = write_config(tmp_path / "target", LLAMA_8B)
    text = found_by_name(target)["speedup"].text
    said = f"{low:.1f} to {high:.1f}x" if high > low else f"{low:.1f}x"
    assert text.startswith(said) and "computed" in text and "not measured" in text
    weights = TargetWeights(1, "4 bits", None)
    for tau, speedup in zip((2, 3), expected_speedup(machine, weights), strict=True):
        roots = np.roots([1, 1, 1, 1 - tau])
        (accepted,) = (root.real for root in roots if abs(root.imag) < 1e-9 and root.real > 0)
        gains = [1.0]
        for k in range(1, 8):
            emitted = (1 - accepted ** (k + 1)) / (1 - accepted)
            gains.append(emitted / (product_cost(machine, k + 1, "4 bits") + 0.06 * k))
        assert speedup == pytest.approx(max(gains), rel=1e-3)


@pytest.mark.parametrize(
    "context, usable, level, draft_model",
    [
        (32768, 10.7e9, "ok", "auto"),
        (32768, 9.0e9, "problem", "auto"),
        (32768, 9.0e9, "ok", "lookup"),
        (131073, 60e9, "note", None),
    ],
)
def test_a_long_text(tmp_path, monkeypatch, context, usable, level, draft_model):
    """8B in 4 bits: 4.52 GB of weights, 4.29 of caches at 32k, and a head's."""
    monkeypatch.setattr(checks, "memory", lambda machine: (16e9, usable))
    config = LLAMA_8B | {"max_position_embeddings": 131072}
    target = write_config(tmp_path / "Meta-Llama-3.1-8B-Instruct-4bit", config)
    findings = checks.expect(target, draft_model, context)
    (found,) = [finding for finding in findings if finding.name == "context"]
    assert found.level == level
    if context == 32768:
        head = 0.0 if draft_model == "lookup" else 0.4
        together = 4.5 + 4.3 + head
        assert f"target 4.5 GB, caches 4.3 GB, draft model about {head:.1f} GB" in found.text
        assert f"together {together:.1f} of {usable / 1e9:.1f} GB" in found.text


def test_a_draft_model_on_disk_counts_as_it_is(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    model = checks.build(LLAMA_8B)
    one_layer = 8 * 128 * 4
    assert checks.draft_bytes(model, str(tmp_path), 500) == 1000 + 500 * one_layer


@pytest.mark.parametrize("flag", ["--context", "--ranks"])
def test_a_number_that_means_nothing(capsys, flag):
    code, said = doctor(capsys, "--model", "x", flag, "0")
    assert code == 2 and said.startswith(f"error: {flag} is 0: give ") and said.count("\n") == 1


def test_float32_beside_packed_weights_is_told_of_on_cuda(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "memory", lambda machine: (24e9, 17e9))
    target = write_config(tmp_path / "target", LLAMA_8B | {"torch_dtype": "float32"})
    for backend, architecture, is_said in (("cuda", "sm_90", True), ("metal", "g16s", False)):
        machine = machine_of({"architecture": architecture}, backend)
        monkeypatch.setattr(checks, "this_machine", lambda machine=machine: machine)
        found = found_by_name(target)
        assert ("precision" in found) == is_said
    assert is_said or "tensor cores" not in str(found)


def test_weights_that_are_not_packed_have_a_source(tmp_path, monkeypatch):
    config = {k: v for k, v in LLAMA_8B.items() if k != "quantization"}
    target = write_config(tmp_path / "target", config)
    monkeypatch.setattr(checks, "memory", lambda machine: (24e9, 17e9))
    for architecture, text in (("applegpu_g13s", "2.2, 2.2"), ("applegpu_g16s", "auto measures")):
        machine = machine_of({"architecture": architecture}, "metal")
        monkeypatch.setattr(checks, "this_machine", lambda machine=machine: machine)
        assert text in found_by_name(target)["passes"].text


@pytest.mark.parametrize(
    "config, sentence",
    [
        (None, "does not exist"),
        ({"hidden_size": 4}, "names no model_type"),
        ({"model_type": "nonesuch"}, "cannot build a model of type nonesuch"),
        ({"model_type": "llama"}, "cannot build a model of type llama"),
    ],
)
def test_a_target_that_cannot_be_had(tmp_path, home, capsys, config, sentence):
    target = str(tmp_path / "nothing")
    if config is not None:
        target = write_config(tmp_path / "target", config)
    code, page = doctor(capsys, "--model", target)
    assert code == 1 and sentence in " ".join(page.split()) and "1 problem: model." in page


def test_a_target_whose_caches_cannot_be_rolled_back(tmp_path, monkeypatch):
    class Strange:
        pass

    monkeypatch.setattr(checks, "make_prompt_cache", lambda model: [Strange()])
    target = write_config(tmp_path / "target", vars(tiny_llama().args))
    found = found_by_name(target)["caches"]
    assert found.level == "problem" and "Strange" in found.text


def test_a_converted_head_is_held_against_the_target(tmp_path):
    source = write_safetensors(tmp_path / "source", CONFIG, as_midlayer(eagle3_tensors()))
    convert(str(source), str(tmp_path / "head"))
    sizes = {"hidden_size": CONFIG["hidden_size"], "vocab_size": CONFIG["vocab_size"]}
    config = vars(tiny_llama(num_hidden_layers=32).args)
    fits = write_config(tmp_path / "fits", {**config, **sizes})
    assert "fits the target" in found_by_name(fits, str(tmp_path / "head"))["draft model"].text
    other = write_config(tmp_path / "other", {**config, "hidden_size": 128})
    found = found_by_name(other, str(tmp_path / "head"))["draft model"]
    assert found.level == "problem" and "hidden size" in found.text
    assert "has no weights" in found_by_name(other, "lookup")["draft model"].text
    found = found_by_name(fits, f"{tmp_path / 'head'}+lookup")["draft model"]
    assert "fits the target; copies from the text as well" in found.text
    assert found_by_name(fits, "head+foo")["draft model"].level == "problem"
    assert found_by_name(other)["draft model"].level == "note"
    found = found_by_name(other, "auto")["draft model"]
    assert found.level == "note" and "auto copies from the text" in found.text


@pytest.mark.parametrize("name, code", [("nope", 1), ("/no/where", 1), ("owner/nope", 0)])
def test_a_draft_model_that_does_not_exist_is_a_problem(tmp_path, home, capsys, name, code):
    """One that may be a repository is said not to have been looked at."""
    target = write_config(tmp_path / "target", LLAMA_8B)
    found, page = doctor(capsys, "--model", target, "--draft-model", name)
    assert found == code and ("1 problem: draft model." in page) == bool(code)
    said = "does not exist" if code else "not on this machine"
    assert f"{name} {said}" in page or f"{name} is {said}" in page


@pytest.mark.parametrize("columns", [60, 80, 150])
def test_a_page_fits_the_terminal_and_shows_few_pairs(home, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(checks, "memory", lambda machine: (64e9, 50e9))
    _, page = doctor(capsys)
    lines = page.splitlines()
    assert max(len(line) for line in lines if "/" not in line) in range(columns - 20, columns + 1)
    monkeypatch.setenv("COLUMNS", "100000")
    _, page = doctor(capsys)
    (line,) = [line for line in page.splitlines() if "known pairs" in line]
    shown = [pair for pair in {p.target.split("/")[1] for p in PAIRS} if f" {pair}" in line]
    fit, others = targets_within(50e9)
    assert line.count(", ") == 5 and set(fit[-5:]) <= set(shown) and "--list shows all" in line
    assert f"{len(fit)} of {len(fit) + len(others)} targets" in line


@pytest.mark.parametrize("load, is_busy", [(1.9, False), (2.0, False), (2.1, True)])
def test_a_load_above_the_cores_is_a_note(monkeypatch, load, is_busy):
    monkeypatch.setattr(checks.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(checks.os, "getloadavg", lambda: (load, 0.0, 0.0))
    found = [finding for finding in checks.check_all() if finding.name == "load"]
    assert [finding.level for finding in found] == ["note"] * is_busy
    assert all("2.1 on 2 cores" in finding.text for finding in found)


@pytest.mark.parametrize("given", ["--draft-model lookup", "--context 9", "--ranks 2"])
def test_a_draft_model_a_context_and_machines_need_a_model(capsys, given):
    code, said = doctor(capsys, *given.split())
    flag = given.split()[0]
    assert code == 2
    assert said == f"error: {flag} needs --model: name the target that it is about.\n"


def test_sizes_by_name():
    targets = {pair.target for pair in PAIRS}
    assert sum(bytes_in_4_bits(target) is None for target in targets) < 10  # none in the name
    assert bytes_in_4_bits("a/name-without-a-size") is None
    llama, scout = (f"meta-llama/Llama-{n}-Instruct" for n in ("3.1-8B", "4-Scout-17B-16E"))
    assert 5e9 < bytes_in_4_bits(llama) < 6e9 and 60e9 < bytes_in_4_bits(scout) < 70e9
    fit, others = targets_within(6e9)
    assert "Llama-3.1-8B-Instruct" in fit and "Qwen3-14B" in others
    assert len(fit) + len(others) == len(targets)


def test_tf32_and_cudnn_are_named_where_they_matter(monkeypatch):
    for name in ("MLX_ENABLE_TF32", "MLX_CUDA_USE_CUDNN_SDPA"):
        monkeypatch.delenv(name, raising=False)
    m5 = machine_of({"device_name": "Apple M5", "architecture": "applegpu_g17g"}, "metal")
    ultra = machine_of({"device_name": "Apple M5 Ultra", "architecture": "applegpu_g17d"}, "metal")
    hopper = machine_of({"architecture": "sm_90"}, "cuda")
    cases = ((M4, []), (m5, ["float32"]), (ultra, ["float32"]), (hopper, ["cuDNN", "float32"]))
    for machine, names in cases:
        monkeypatch.setattr(checks, "this_machine", lambda machine=machine: machine)
        assert [finding.name for finding in checks.check_settings()] == names
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    monkeypatch.setenv("MLX_CUDA_USE_CUDNN_SDPA", "0")
    assert list(checks.check_settings()) == []


def test_memory_and_wired_limit_of_a_mac(monkeypatch):
    info = {"memory_size": 24 * 10**9, "max_recommended_working_set_size": 17 * 10**9}
    monkeypatch.setattr(checks, "this_machine", lambda: M4)
    monkeypatch.setattr(checks.mx, "device_info", lambda: info)
    monkeypatch.setattr(checks, "read_sysctl", lambda name: 20000)
    total, wired = checks.check_memory()
    assert total.text == "24.0 GB, 17.0 GB for weights and caches"
    assert "set to 20000 MB" in wired.text
    assert packages.read_sysctl("hw.ncpu") is None or sys.platform == "darwin"
