"""Tables of the documentation that are made from the code, so that they cannot fall behind it.

A page has ``<!-- table: NAME -->`` where one belongs; ``hooks.py`` puts it there.
"""

import ast
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import glm4_moe_lite, qwen3_5

from mlx_eagle.bench.report_file import read_report
from mlx_eagle.decoding.pass_costs import TargetWeights
from mlx_eagle.doctor.checks import build, speedup_words
from mlx_eagle.doctor.checks import draft_bytes as bytes_of_draft
from mlx_eagle.drafters.assistant import Assistant, AssistantConfig
from mlx_eagle.drafters.block_config import BlockConfig
from mlx_eagle.drafters.dflash import DFlashHead
from mlx_eagle.drafters.mtp import outline
from mlx_eagle.drafters.pairs import PAIRS, targets_within
from mlx_eagle.drafters.quantize import Quantization, num_bytes, quantize_now
from mlx_eagle.system.device import machine_of, weight_bytes
from mlx_eagle.target_model.cache_size import cache_bytes

PACKAGE = Path(__file__).parents[1] / "mlx_eagle"
MEASURED = Path(__file__).parents[1] / "measured"
CONFIGS = Path(__file__).parents[1] / "tests" / "support" / "true_configs.py"
HUB = "https://huggingface.co"


def pair_table() -> str:
    """Every known target with its drafters in the order in which ``auto`` takes them."""
    rows = []
    for target, pairs in groupby(PAIRS, key=lambda pair: pair.target):
        for i, pair in enumerate(pairs):
            place = target if pair.head == pair.kind else pair.head
            owner, name, *folder = place.split("/")
            page = "/".join([HUB, owner, name, *(["tree/main", *folder] if folder else [])])
            drafter = f"[{pair.head}]({page})"
            published = "; ".join(map(str, pair.figures))
            row = [target if i == 0 else "", drafter, pair.kind, pair.size, pair.licence]
            rows.append([*row, published])
    header = ["target", "drafter", "kind", "size as published", "licence of the drafter"]
    header.append("published by others")
    return markdown_table(header, rows)


# Of a Mac's memory in GB, what macOS lets a GPU use.
USABLE = {16: 2 / 3, 24: 2 / 3, 32: 2 / 3, 64: 3 / 4, 128: 3 / 4}


def memory_table() -> str:
    """Which known targets fit into a memory and not into the one before it."""
    rows, before = [], set()
    for size, share in USABLE.items():
        fit, _ = targets_within(size * share * 1e9)
        rows.append([f"{size} GB", ", ".join(name for name in fit if name not in before)])
        before |= set(fit)
    return markdown_table(["memory", "targets"], rows)


def qwen(hidden_size: int, intermediate_size: int, heads: int, **more: Any) -> nn.Module:
    """A model with the layers' sizes of one of Qwen3.5; a few layers stand for all."""
    text = {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "num_hidden_layers": 4,
        **more,
    }
    return qwen3_5.Model(qwen3_5.ModelArgs("qwen3_5", text))


EXPERTS = {
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
QWEN_TOKENS = 248320
GEMMA_TOKENS = 262144


def assistant(target_hidden_size: int, heads: int, **more: Any) -> Callable[[], Assistant]:
    """The assistant of a Gemma 4 of that hidden size."""
    sizes: dict[str, Any] = {
        "hidden_size": 1024,
        "target_hidden_size": target_hidden_size,
        "vocab_size": GEMMA_TOKENS,
        "intermediate_size": 8192,
        "num_heads": heads,
        "head_dim": 256,
        "global_head_dim": 512,
        "layer_types": ("sliding_attention",) * 3 + ("full_attention",),
    }
    return lambda: Assistant(AssistantConfig(**sizes | more))


def dflash() -> DFlashHead:
    """The DFlash head of Qwen3.5-9B."""
    sizes = {"num_layers": 6, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    return DFlashHead(
        BlockConfig(
            hidden_size=4096,
            intermediate_size=12288,
            vocab_size=QWEN_TOKENS,
            draft_vocab_size=QWEN_TOKENS,
            taps=(2, 6, 10, 14, 18, 22, 26, 30),
            mask_token_id=248070,
            block_size=16,
            **sizes,
        )
    )


DRAFTERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "Qwen3.5-4B, MTP": (lambda: qwen(2560, 9216, 16), QWEN_TOKENS),
    "Qwen3.5-9B, MTP": (lambda: qwen(4096, 12288, 16), QWEN_TOKENS),
    "Qwen3.5-27B, MTP": (lambda: qwen(5120, 17408, 24), QWEN_TOKENS),
    "Qwen3.5-35B-A3B, MTP": (lambda: qwen(2048, 512, 16, **EXPERTS), QWEN_TOKENS),
    "GLM-4.7-Flash, MTP": (
        lambda: glm4_moe_lite.Model(glm4_moe_lite.ModelArgs(num_hidden_layers=2)),
        glm4_moe_lite.ModelArgs().vocab_size,
    ),
    "Qwen3.5-9B, DFlash": (dflash, QWEN_TOKENS),
    "Gemma 4 E4B, assistant": (
        assistant(
            2560, 4, hidden_size=256, intermediate_size=2048, num_centroids=2048, centroid_top_k=32
        ),
        0,
    ),
    "Gemma 4 12B, assistant": (assistant(3840, 16), 0),
    "Gemma 4 26B-A4B, assistant": (assistant(2816, 16), 0),
    "Gemma 4 31B, assistant": (assistant(5376, 32), 0),
}
"""Drafters of targets in 4 bits, or a target with MTP layers, and the rows of its output matrix.

An assistant has an output matrix of its own, 0 rows of the target's.
"""


def draft_bytes(name: str, quantization: Quantization | None) -> int:
    """Bytes of a drafter's own weights that one forward of it reads."""
    build, _ = DRAFTERS[name]
    module = build()
    if name.endswith("MTP"):
        head: nn.Module = outline(module, quantization)
    else:
        head = module
        head.set_dtype(mx.bfloat16)
        quantize_now(head, None, quantization)
    unread = 0
    if head.get("centroids") is not None:  # rows of a few clusters are read
        config = head.config
        unread = (
            weight_bytes(head.embed_tokens)
            * (config.num_centroids - config.centroid_top_k)
            // config.num_centroids
        )
    return TargetWeights.of(head).row_bytes - unread


def output_bytes(name: str, num_tokens: int | None = None) -> float:
    """Bytes of so many rows of the target's output matrix in 4 bits, None: of all."""
    build, num_rows = DRAFTERS[name]
    if not num_rows:
        return 0.0
    module = build()
    width = next(m for m in module.modules() if isinstance(m, nn.RMSNorm)).weight.size
    packing = {"": {"group_size": 64, "bits": 4}}
    return num_bytes({"": (num_tokens or num_rows, width)}, packing)


def draft_table() -> str:
    """Bytes that a forward of a drafter reads: as published, quantized, and of its output."""
    rows = []
    for name in DRAFTERS:
        before = draft_bytes(name, None)
        after = draft_bytes(name, Quantization())
        output = [output_bytes(name, num) for num in (None, 65536)]
        cells = [f"{size / 1e6:.0f} MB" if size else "its own" for size in output]
        sizes = [f"{size / 1e6:.0f} MB" for size in (before, after)]
        rows.append([name, *sizes, f"{after / before:.2f}", *cells])
    header = ["drafter", "in 16 bits", "in 4 and 6", "share", "all outputs", "65,536 of them"]
    return markdown_table(header, rows)


LONG = {
    "Llama-3.1-8B": "LLAMA_8B",
    "Qwen3-8B": "QWEN3_8B",
    "gemma-3-12b": "GEMMA3_12B",
    "vicuna-13b-v1.3": "VICUNA_13B",
    "gpt-oss-20b": "GPT_OSS_20B",
    "Qwen3.5-27B": "QWEN35_27B",
    "Qwen3-30B-A3B": "QWEN3_30B_A3B",
    "gemma-4-31B": "GEMMA4_31B",
}
"""Targets of the table of long texts, with the name of their configuration."""
CONTEXTS = (8192, 32768, 131072)


def true_configs() -> ModuleType:
    """Configurations of published targets, which the tests use, too."""
    spec = importlib.util.spec_from_file_location("true_configs", CONFIGS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def context_table() -> str:
    """Caches of long texts, and all that a pair takes with them, in GB."""
    configs = vars(true_configs())
    rows = []
    for name, config in LONG.items():
        model = build(configs[config])
        caches = [cache_bytes(model, context) for context in CONTEXTS]
        weights = weight_bytes(model)
        all_of = [
            weights + cache + bytes_of_draft(model, None, context)
            for cache, context in zip(caches, CONTEXTS, strict=True)
        ]
        sizes = [weights, *caches, *all_of]
        rows.append([name, *(f"{size / 1e9:.1f}" for size in sizes)])
    lengths = [f"{context // 1024}k" for context in CONTEXTS]
    header = ["target, 4 bits", "weights", *(f"caches, {length}" for length in lengths)]
    return markdown_table([*header, *(f"pair, {length}" for length in lengths)], rows)


CHIPS = {
    "M1 and M2, also Pro, Max, Ultra": ("metal", "applegpu_g14s"),
    "M3, also Pro and Max": ("metal", "applegpu_g15s"),
    "M4, also Pro and Max": ("metal", "applegpu_g16s"),
    "M5, also Pro and Max": ("metal", "applegpu_g17s"),
    "Ultra from M3 on": ("metal", "applegpu_g15d"),
    "NVIDIA Ampere, Ada, Blackwell": ("cuda", "sm_89"),
    "NVIDIA Hopper": ("cuda", "sm_90"),
}
"""Rows of the table of speedups: one chip of each kind, in MLX's names."""
PRECISIONS = {"4 bits": "4 bits", "8 bits": "8 bits", "mxfp4": "mxfp4", "16 bits": None}


def speedup_table() -> str:
    """The computed speedup of a head by chip and precision of a dense target."""
    rows = []
    for chip, (backend, architecture) in CHIPS.items():
        machine = machine_of({"architecture": architecture}, backend)
        kinds = [TargetWeights(1, packing, None) for packing in PRECISIONS.values()]
        sources = [machine.products.source, machine.products.dense_source or "a guess"]
        rows.append([chip, *(speedup_words(machine, kind) for kind in kinds), *sources])
    return markdown_table(["chip", *PRECISIONS, "source, packed", "source, 16 bits"], rows)


SHOWN_ROWS = ("2", "4", "8")  # of a pass, whose costs the table shows


def measured_table() -> str:
    """A row for every run of every report in measured/; a damaged one raises ValueError."""
    rows = []
    for path in sorted(MEASURED.glob("*.json")):
        report = read_report(path)
        chip = report["machine"]
        place = f"{chip['chip']} ({chip['backend']}), {chip['memory_gb']:.0f} GB, {chip['os']}"
        drafters = {drafter["name"]: drafter for drafter in report["drafters"]}
        for run in report["runs"]:
            drafter = drafters[run["drafter"]]
            kept = run["temperature"], run["context"]
            drafts = f"{run['drafts']}, temperature {kept[0]:g}" if kept[0] else run["drafts"]
            drafts += f", {kept[1]} tokens of context" if kept[1] else ""
            target = f"{report['target']['name']}, {report['target']['precision']}"
            rows.append([
                f"{place}; mlx {report['versions']['mlx']}, {report['date']}",
                f"{target}; {run['drafter']}, {drafter['precision']}",
                f"{drafts}, exact" if run["exact"] else drafts,
                f"{run['plain_tps']:.1f}",
                f"{run['tps']:.1f}",
                f"{run['tps'] / run['plain_tps']:.2f}x",
                f"{run['tau']:.2f}",
                ", ".join(f"{drafter['c'][n]:.2f}" for n in SHOWN_ROWS if n in drafter["c"]),
                f"{run['identical']} of {run['texts']}",
                f"{run['prompts']}. {report['notes']}",
            ])  # fmt: skip
    header = ["machine", "target; drafter", "drafts", "plain tok/s", "drafted tok/s", "ratio"]
    header += ["tau", "c(2), c(4), c(8)", "identical", "prompts; notes"]
    return markdown_table(header, rows)


def file_tables() -> str:
    """The files of every folder of the package, with the first line of their docstrings."""
    parts = []
    for package in sorted(path.parent for path in PACKAGE.glob("*/__init__.py")):
        files = [path for path in sorted(package.glob("*.py")) if not path.name.startswith("__")]
        if files:
            parts.append(f"### {package.name}/\n\n{first_line(package / '__init__.py')}")
            rows = [[f"`{path.name}`", first_line(path)] for path in files]
            parts.append(markdown_table(["file", "what is there"], rows))
    return "\n\n".join(parts)


def first_line(path: Path) -> str:
    """The first paragraph of a module's docstring as one line, in Markdown."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(docstring.partition("\n\n")[0].split()).replace("``", "`")


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


TABLES: dict[str, Callable[[], str]] = {
    "pairs": pair_table,
    "memory": memory_table,
    "drafts": draft_table,
    "context": context_table,
    "speedup": speedup_table,
    "measured": measured_table,
    "files": file_tables,
}
