"""Public drafters by the target they were trained for: ``--draft-model auto``.

A table of names, and one look into it: nothing is fetched or checked here.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# What conversions append to a model's name: mlx-community/Qwen3-8B-4bit-DWQ -> Qwen3-8B
SUFFIX = re.compile(
    r"\d+bits?|b?f16|fp(?:8|16)|mxfp\d|nvfp4|mlx|dwq|qat|q\d|g[s\d]\d+|\d{6,8}", re.IGNORECASE
)

BILLIONS = re.compile(r"(?<![a-z\d.])(\d+(?:\.\d+)?)b(?![a-z])", re.IGNORECASE)
SPARSE = {
    "llama-4-scout-17b-16e-instruct": 109.0,
    "qwen3-coder-next": 80.0,
    "gemma-4-e2b-it": 5.1,
    "gemma-4-e4b-it": 8.0,
}
"""Where the name counts the parameters that are at work for one token, or none."""
BYTES_PER_WEIGHT = 4.5 / 8  # in 4 bits, each group of 64 with a scale and a bias of 16
HEAD_SHARE = 1.06
"""Target and head in 4 bits, by the target alone: 5% in Llama-3.1-8B, more in small ones."""
CACHE_BYTES = 1e9  # of 8k tokens in Llama-3.1-8B


@dataclass(frozen=True)
class Pair:
    """Hub ids of a target and of a drafter for it, which may lie in a folder of a repository.

    ``licence`` is the drafter's as its page states it, ``kind`` as in ``kinds.py``, and
    ``megabytes`` what it takes as published, where that is known.
    """

    target: str
    head: str
    licence: str = "see its page"
    kind: str = "eagle3"
    megabytes: int | None = None

    @property
    def size(self) -> str:
        """For people: "850 MB", "3.2 GB"; "" where it is not known.

        Of an EAGLE head it follows from the shapes: without, nobody here has seen its config.
        """
        if self.megabytes is None:
            return "not checked" if self.kind == "eagle3" else ""
        return (
            f"{self.megabytes / 1000:.1f} GB" if self.megabytes > 999 else f"{self.megabytes} MB"
        )


# Of several for a target, the first is what ``auto`` takes.
PAIRS = (
    Pair("meta-llama/Llama-3.1-8B-Instruct", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", megabytes=849),
    Pair(
        "meta-llama/Llama-3.1-8B-Instruct",
        "lmsys/SGLang-EAGLE3-Llama-3.1-8B-Instruct-SpecForge",
        megabytes=849,
    ),
    Pair(
        "meta-llama/Llama-3.1-8B-Instruct",
        "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
        megabytes=849,
    ),
    Pair(
        "meta-llama/Llama-3.1-8B-Instruct",
        "thoughtworks/Llama-3.1-8B-Instruct-Eagle3",
        megabytes=849,
    ),
    Pair(
        "meta-llama/Llama-3.1-8B-Instruct",
        "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
        licence="MIT",
        kind="dflash",
    ),
    Pair(
        "meta-llama/Llama-3.3-70B-Instruct",
        "lmsys/SGLang-EAGLE3-Llama-3.3-70B-Instruct-SpecForge",
        licence="MIT",
        megabytes=2806,
    ),
    Pair(
        "meta-llama/Llama-3.3-70B-Instruct", "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B", megabytes=3152
    ),
    Pair(
        "meta-llama/Llama-3.3-70B-Instruct", "nebius/EAGLE3-Llama-3.3-70B-Instruct", megabytes=2806
    ),
    Pair(
        "meta-llama/Llama-3.3-70B-Instruct",
        "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3",
        megabytes=2806,
    ),
    Pair(
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        "lmsys/SGLang-EAGLE3-Llama-4-Scout-17B-16E-Instruct-SpecForge",
        megabytes=1691,
    ),
    Pair(
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
        "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B",
        megabytes=849,
    ),
    Pair(
        "lmsys/vicuna-13b-v1.3",
        "yuhuili/EAGLE3-Vicuna1.3-13B",
        licence="Apache-2.0",
        megabytes=1277,
    ),
    Pair("Qwen/Qwen2.5-7B-Instruct", "thoughtworks/Qwen2.5-7B-Instruct-Eagle3", megabytes=806),
    Pair("Qwen/Qwen2.5-14B-Instruct", "thoughtworks/Qwen2.5-14B-Instruct-Eagle3", megabytes=1109),
    Pair("Qwen/Qwen3-1.7B", "AngelSlim/Qwen3-1.7B_eagle3", megabytes=274),
    Pair("Qwen/Qwen3-4B", "AngelSlim/Qwen3-4B_eagle3", megabytes=436),
    Pair(
        "Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16", licence="MIT", kind="dflash", megabytes=1075
    ),
    Pair("Qwen/Qwen3-4B", "deepseek-ai/dspark_qwen3_4b_block7", licence="MIT", kind="dspark"),
    Pair("Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.eagle3", megabytes=799),
    Pair("Qwen/Qwen3-8B", "Tengyunw/qwen3_8b_eagle3", megabytes=799),
    Pair("Qwen/Qwen3-8B", "AngelSlim/Qwen3-8B_eagle3", megabytes=799),
    Pair("Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.peagle", megabytes=3269),
    Pair(
        "Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16", licence="MIT", kind="dflash", megabytes=2097
    ),
    Pair("Qwen/Qwen3-8B", "deepseek-ai/dspark_qwen3_8b_block7", licence="MIT", kind="dspark"),
    Pair("Qwen/Qwen3-14B", "RedHatAI/Qwen3-14B-speculator.eagle3", megabytes=1219),
    Pair("Qwen/Qwen3-14B", "AngelSlim/Qwen3-14B_eagle3", megabytes=1219),
    Pair("Qwen/Qwen3-14B", "deepseek-ai/dspark_qwen3_14b_block7", licence="MIT", kind="dspark"),
    Pair("Qwen/Qwen3-32B", "RedHatAI/Qwen3-32B-speculator.eagle3", megabytes=1565),
    Pair("Qwen/Qwen3-32B", "AngelSlim/Qwen3-32B_eagle3", megabytes=1565),
    Pair("Qwen/Qwen3-32B", "deepseek-ai/dspark_qwen3_32b_block7", licence="MIT", kind="dspark"),
    Pair("Qwen/Qwen3-30B-A3B", "Tengyunw/qwen3_30b_moe_eagle3", megabytes=366),
    Pair(
        "Qwen/Qwen3-30B-A3B-Instruct-2507",
        "lmsys/SGLang-EAGLE3-Qwen3-30B-A3B-Instruct-2507-SpecForge-Nex",
        megabytes=366,
    ),
    Pair(
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "JinnP/SGLang-EAGLE3-Qwen3-Coder-30B-A3B-Instruct",
        licence="Apache-2.0",
        megabytes=366,
    ),
    Pair(
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "z-lab/Qwen3-Coder-30B-A3B-DFlash",
        licence="MIT",
        kind="dflash",
    ),
    Pair("Qwen/Qwen3-235B-A22B", "lmsys/Qwen3-235B-A22B-EAGLE3", megabytes=1185),
    Pair(
        "Qwen/Qwen3-Coder-Next",
        "thoughtworks/Qwen3-Coder-Next-Eagle3",
        licence="Apache-2.0",
        megabytes=290,
    ),
    Pair("Qwen/Qwen3.5-0.8B", "satgeze/Qwen3.5-0.8B-DSpark", kind="dspark"),
    Pair("Qwen/Qwen3.5-4B", "z-lab/Qwen3.5-4B-DFlash", licence="MIT", kind="dflash"),
    Pair("Qwen/Qwen3.5-9B", "BLR2/Qwen3.5-9B-Eagle3-ShareGPT"),
    Pair(
        "Qwen/Qwen3.5-9B", "z-lab/Qwen3.5-9B-DFlash", licence="MIT", kind="dflash", megabytes=2097
    ),
    Pair("Qwen/Qwen3.5-27B", "VirVen/Qwen3.5-27B-EAGLE3-v2"),
    Pair(
        "Qwen/Qwen3.5-27B",
        "z-lab/Qwen3.5-27B-DFlash",
        licence="MIT",
        kind="dflash",
        megabytes=3460,
    ),
    Pair(
        "Qwen/Qwen3.5-35B-A3B",
        "z-lab/Qwen3.5-35B-A3B-DFlash",
        licence="MIT",
        kind="dflash",
        megabytes=948,
    ),
    Pair("Qwen/Qwen3.5-122B-A10B", "z-lab/Qwen3.5-122B-A10B-DFlash", licence="MIT", kind="dflash"),
    Pair("Qwen/Qwen3.6-27B", "Ex0bit/Qwen3.6-27B-PRISM-EAGLE3/compressed", megabytes=1100),
    Pair(
        "Qwen/Qwen3.6-27B",
        "z-lab/Qwen3.6-27B-DFlash",
        licence="MIT",
        kind="dflash",
        megabytes=3460,
    ),
    Pair("Qwen/Qwen3.6-27B", "satgeze/Qwen3.6-27B-DSpark", kind="dspark"),
    Pair(
        "Qwen/Qwen3.6-35B-A3B",
        "RedHatAI/Qwen3.6-35B-A3B-speculator.dspark",
        licence="Apache-2.0",
        kind="dspark",
    ),
    Pair(
        "Qwen/Qwen3.6-35B-A3B",
        "z-lab/Qwen3.6-35B-A3B-DFlash",
        licence="MIT",
        kind="dflash",
        megabytes=772,
    ),
    Pair("Qwen/Qwen3.6-35B-A3B", "incoai/Qwen3.6-35B-A3B-DFlash2", kind="dflash2", megabytes=1053),
    Pair(
        "Qwen/Qwen3.8-27B",
        "incoai/Qwen3.8-27B-DFlash2",
        licence="Apache-2.0",
        kind="dflash2",
        megabytes=3849,
    ),
    Pair("Qwen/Qwen3.8-27B", "z-lab/Qwen3.8-27B-DFlash2", licence="Apache-2.0", kind="dflash2"),
    Pair(
        "Qwen/Qwen3.8-27B",
        "RedHatAI/Qwen3.8-27B-speculator.dspark",
        licence="Apache-2.0",
        kind="dspark",
    ),
    Pair("Qwen/Qwen3.8-27B", "RadixArk/Qwen3.8-27B-DSpark", kind="dspark"),
    Pair("Qwen/Qwen3.8-27B", "DimInfer/Qwen3.8-27B-Dspark-v1", kind="dspark"),
    Pair("openai/gpt-oss-20b", "zhuyksir/EAGLE3-gpt-oss-20b-bf16", megabytes=615),
    Pair("openai/gpt-oss-20b", "RedHatAI/gpt-oss-20b-speculator.eagle3", megabytes=366),
    Pair("openai/gpt-oss-20b", "amazon/GPT-OSS-20B-P-EAGLE", licence="Apache-2.0", megabytes=1670),
    Pair(
        "openai/gpt-oss-20b",
        "z-lab/gpt-oss-20b-DFlash",
        licence="MIT",
        kind="dflash",
        megabytes=1570,
    ),
    Pair("openai/gpt-oss-120b", "lmsys/EAGLE3-gpt-oss-120b-bf16", megabytes=615),
    Pair("openai/gpt-oss-120b", "RedHatAI/gpt-oss-120b-speculator.eagle3", megabytes=366),
    Pair(
        "openai/gpt-oss-120b", "amazon/gpt-oss-120b-p-eagle", licence="Apache-2.0", megabytes=1670
    ),
    Pair("openai/gpt-oss-120b", "z-lab/gpt-oss-120b-DFlash", licence="MIT", kind="dflash"),
    Pair("google/gemma-4-31B-it", "RedHatAI/gemma-4-31B-it-speculator.eagle3", megabytes=1652),
    Pair("google/gemma-4-31B-it", "RedHatAI/gemma-4-31B-it-speculator.dflash2", kind="dflash2"),
    Pair(
        "google/gemma-4-26B-A4B-it", "RedHatAI/gemma-4-26B-A4B-it-speculator.eagle3", megabytes=486
    ),
    Pair(
        "google/gemma-4-31B-it",
        "google/gemma-4-31B-it-assistant",
        licence="Apache-2.0",
        kind="assistant",
        megabytes=939,
    ),
    Pair(
        "google/gemma-4-26B-A4B-it",
        "google/gemma-4-26B-A4B-it-assistant",
        licence="Apache-2.0",
        kind="assistant",
        megabytes=839,
    ),
    Pair(
        "google/gemma-4-26B-A4B-it",
        "makora-ai/gemma4-26b-a4b-dspark",
        licence="Apache-2.0",
        kind="dspark",
    ),
    Pair(
        "google/gemma-4-12B-it",
        "google/gemma-4-12B-it-assistant",
        licence="Apache-2.0",
        kind="assistant",
        megabytes=846,
    ),
    Pair("google/gemma-4-12B-it", "z-lab/gemma4-12B-it-DFlash", licence="MIT", kind="dflash"),
    Pair(
        "google/gemma-4-12B-it",
        "deepseek-ai/dspark_gemma4_12b_block7",
        kind="dspark",
        megabytes=6861,
    ),
    Pair(
        "google/gemma-4-E4B-it",
        "google/gemma-4-E4B-it-assistant",
        licence="Apache-2.0",
        kind="assistant",
        megabytes=159,
    ),
    Pair("google/gemma-4-E4B-it", "rasyosef/gemma-4-E4B-it-dspark", kind="dspark"),
    Pair(
        "google/gemma-4-E2B-it",
        "google/gemma-4-E2B-it-assistant",
        licence="Apache-2.0",
        kind="assistant",
        megabytes=158,
    ),
    Pair("google/gemma-4-E2B-it", "rasyosef/gemma-4-E2B-it-dspark", kind="dspark"),
    Pair(
        "LiquidAI/LFM2.5-1.2B-Instruct",
        "LiquidAI/LFM2.5-1.2B-Instruct-DSpark",
        licence="lfm1.0",
        kind="dspark",
    ),
    Pair(
        "LiquidAI/LFM2.5-2.6B",
        "LiquidAI/LFM2.5-2.6B-DSpark",
        licence="lfm1.0",
        kind="dspark",
        megabytes=655,
    ),
    Pair(
        "LiquidAI/LFM2.5-8B-A1B",
        "LiquidAI/LFM2.5-8B-A1B-DSpark",
        licence="lfm1.0",
        kind="dspark",
        megabytes=655,
    ),
    Pair(
        "LiquidAI/LFM2.5-24B-A2B",
        "LiquidAI/LFM2.5-24B-A2B-DSpark",
        licence="lfm1.0",
        kind="dspark",
    ),
    Pair("meta-models/Muse-Glimmer-30B", "meta-models/Muse-Glimmer-30B-assistant", kind="dflash"),
    Pair("meta-models/Muse-Glimmer-30B", "DaoCloud/Muse-Glimmer-30B-DSpark", kind="dspark"),
    Pair("openbmb/MiniCPM4-8B", "linglingdan/Eagle3_for_MiniCPM4", megabytes=735),
    Pair("openbmb/MiniCPM5-2B", "openbmb/MiniCPM5-2B-DSpark", kind="dspark", megabytes=648),
    Pair("zai-org/GLM-5.1", "AQ-MedAI/GLM-5.1-eagle3"),
    Pair("MiniMaxAI/MiniMax-M2.5", "IamBerbec/MiniMax-M2.5-Eagle3"),
    Pair("MiniMaxAI/MiniMax-M2.7", "Lorbus/MiniMax-M2.7-EAGLE3", megabytes=500),
    Pair("MiniMaxAI/MiniMax-M3", "Inferact/MiniMax-M3-EAGLE3", megabytes=1720),
    Pair("deepseek-ai/DeepSeek-V4-Flash", "SyzygyResearch/DeepSeek-V4-Flash-EAGLE3.1"),
    Pair("moonshotai/Kimi-K2.5", "AQ-MedAI/Kimi-K25-eagle3", megabytes=2382),
    Pair("moonshotai/Kimi-K2.6", "AQ-MedAI/Kimi-K26-eagle3"),
    Pair("moonshotai/Kimi-K2.7-Code", "AQ-MedAI/Kimi-K2.7-Code-eagle3"),
    Pair("moonshotai/Kimi-K2.7-Code", "lightseekorg/kimi-k2.7-coder-eagle3.1-mla"),
    Pair(
        "mistralai/Mistral-Small-4-119B-2603",
        "mistralai/Mistral-Small-4-119B-2603-eagle",
        megabytes=392,
    ),
    Pair("mistralai/Mistral-Medium-3.5-128B", "mistralai/Mistral-Medium-3.5-128B-EAGLE"),
)


def plain_name(model: str) -> str:
    """What a model is called whoever converted it, and wherever it lies.

    "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit" -> "llama-3.1-8b-instruct"
    """
    parts = Path(model).name.split("-")
    while len(parts) > 1 and SUFFIX.fullmatch(parts[-1]):
        parts.pop()
    return "-".join(parts).lower().removeprefix("meta-")


def pair_for(model: str) -> Pair:
    """The first pair whose target ``model`` is, a hub id or a folder of that name.

    Raises ValueError where the table has none.
    """
    name = plain_name(model)
    for pair in PAIRS:
        if plain_name(pair.target) == name:
            return pair
    raise ValueError(
        f"no public head is known here for {model}: name one with --draft-model, or see the "
        "known pairs with mlx_eagle.generate --list."
    )


def drafters_for(texts: Sequence[str]) -> tuple[str, list[str]]:
    """The target that the first telling one of some names speaks of, and its known drafters.

    "somebody/Qwen3-8B-MTP-4bit" -> ("Qwen/Qwen3-8B", ["RedHatAI/Qwen3-8B-speculator.eagle3", ...])
    """
    for text in texts:
        spoken = Path(text).name.lower()
        fitting = [pair.target for pair in PAIRS if _speaks_of(spoken, plain_name(pair.target))]
        if fitting:
            target = max(fitting, key=len)
            return target, [pair.head for pair in PAIRS if pair.target == target]
    return "", []


def _speaks_of(text: str, name: str) -> bool:
    """Whether a name is in a text whole: qwen3-8b is in qwen3-8b-mtp, not in qwen3-8b.1."""
    return re.search(rf"(?<![a-z\d.]){re.escape(name)}(?![a-z\d.])", text) is not None


def bytes_in_4_bits(target: str) -> float | None:
    """What target, head and a text of 8k tokens take, roughly, by the target's name.

    None where the name does not say how many parameters there are.
    """
    name = plain_name(target)
    found = BILLIONS.search(name)
    billions = SPARSE.get(name) or (float(found[1]) if found else None)
    if billions is None:
        return None
    return billions * 1e9 * BYTES_PER_WEIGHT * HEAD_SHARE + CACHE_BYTES


def targets_within(limit: float) -> tuple[list[str], list[str]]:
    """The targets of the table that fit into so many bytes in 4 bits, and those that do not.

    By name without the owner, smallest first; one whose name tells no size is taken for large.
    """
    sizes = {pair.target: bytes_in_4_bits(pair.target) or math.inf for pair in PAIRS}
    ordered = sorted(sizes, key=lambda target: sizes[target])
    fit = [Path(target).name for target in ordered if sizes[target] <= limit]
    return fit, [Path(target).name for target in ordered if sizes[target] > limit]


def pair_lines() -> list[str]:
    """The table for people, a line each."""
    rows = [(pair.target, pair.head, pair.kind, pair.size, pair.licence) for pair in PAIRS]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return [
        "Known public drafters (target, drafter, kind, size, licence of the drafter); "
        "--draft-model auto takes the first for --model.",
        "Collected from their pages and not measured by us.",
        *(f"  {line}".rstrip() for line in lines),
    ]
