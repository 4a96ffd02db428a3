"""Public drafters by the target they were trained for: ``--draft-model auto``.

A table of names, and one look into it: nothing is fetched or checked here.
"""

import math
import re
from collections.abc import Iterator, Sequence
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
"""Target and head in 4 bits, by only the target: 5% in Llama-3.1-8B, more in small ones."""
CACHE_BYTES = 1e9  # of 8k tokens in Llama-3.1-8B


@dataclass(frozen=True)
class Pair:
    """Hub ids of a target and of a drafter for it, which may lie in a folder of a repository.

    ``licence`` is the drafter's as its page states it, "none stated" where the page has none,
    ``kind`` as in ``kinds.py``, and ``megabytes`` what it takes as published, where that is known.
    """

    target: str
    head: str
    licence: str
    kind: str
    megabytes: int | None

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


TABLE = """
meta-llama/Llama-3.1-8B-Instruct
    yuhuili/EAGLE3-LLaMA3.1-Instruct-8B                            eagle3      849
    lmsys/SGLang-EAGLE3-Llama-3.1-8B-Instruct-SpecForge            eagle3      849
    RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3               eagle3      849
    thoughtworks/Llama-3.1-8B-Instruct-Eagle3                      eagle3      849
    z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat                    dflash     2097  Apache-2.0
meta-llama/Llama-3.3-70B-Instruct
    lmsys/SGLang-EAGLE3-Llama-3.3-70B-Instruct-SpecForge           eagle3     2806  MIT
    yuhuili/EAGLE3-LLaMA3.3-Instruct-70B                           eagle3     3152
    nebius/EAGLE3-Llama-3.3-70B-Instruct                           eagle3     2806
    RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3              eagle3     2806
meta-llama/Llama-4-Scout-17B-16E-Instruct
    lmsys/SGLang-EAGLE3-Llama-4-Scout-17B-16E-Instruct-SpecForge   eagle3     1691
deepseek-ai/DeepSeek-R1-Distill-Llama-8B
    yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B                    eagle3      849
lmsys/vicuna-13b-v1.3
    yuhuili/EAGLE3-Vicuna1.3-13B                                   eagle3     1277  Apache-2.0
Qwen/Qwen2.5-7B-Instruct
    thoughtworks/Qwen2.5-7B-Instruct-Eagle3                        eagle3      806
Qwen/Qwen2.5-14B-Instruct
    thoughtworks/Qwen2.5-14B-Instruct-Eagle3                       eagle3     1109
Qwen/Qwen3-1.7B
    AngelSlim/Qwen3-1.7B_eagle3                                    eagle3      274
Qwen/Qwen3-4B
    AngelSlim/Qwen3-4B_eagle3                                      eagle3      436
    z-lab/Qwen3-4B-DFlash-b16                                      dflash     1075  MIT
    deepseek-ai/dspark_qwen3_4b_block7                             dspark     2786  none stated
Qwen/Qwen3-8B
    RedHatAI/Qwen3-8B-speculator.eagle3                            eagle3      799
    Tengyunw/qwen3_8b_eagle3                                       eagle3      799
    AngelSlim/Qwen3-8B_eagle3                                      eagle3      799
    RedHatAI/Qwen3-8B-speculator.peagle                            eagle3     3269
    z-lab/Qwen3-8B-DFlash-b16                                      dflash     2097  MIT
    deepseek-ai/dspark_qwen3_8b_block7                             dspark     4742  none stated
Qwen/Qwen3-14B
    RedHatAI/Qwen3-14B-speculator.eagle3                           eagle3     1219
    AngelSlim/Qwen3-14B_eagle3                                     eagle3     1219
    deepseek-ai/dspark_qwen3_14b_block7                            dspark     6833  none stated
Qwen/Qwen3-32B
    RedHatAI/Qwen3-32B-speculator.eagle3                           eagle3     1565
    AngelSlim/Qwen3-32B_eagle3                                     eagle3     1565
    deepseek-ai/dspark_qwen3_32b_block7                            dspark        -
Qwen/Qwen3-30B-A3B
    Tengyunw/qwen3_30b_moe_eagle3                                  eagle3      366
Qwen/Qwen3-30B-A3B-Instruct-2507
    lmsys/SGLang-EAGLE3-Qwen3-30B-A3B-Instruct-2507-SpecForge-Nex  eagle3      366
Qwen/Qwen3-Coder-30B-A3B-Instruct
    JinnP/SGLang-EAGLE3-Qwen3-Coder-30B-A3B-Instruct               eagle3      366  Apache-2.0
    z-lab/Qwen3-Coder-30B-A3B-DFlash                               dflash      948  MIT
Qwen/Qwen3-235B-A22B
    lmsys/Qwen3-235B-A22B-EAGLE3                                   eagle3     1185
Qwen/Qwen3-Coder-Next
    thoughtworks/Qwen3-Coder-Next-Eagle3                           eagle3      290  Apache-2.0
    z-lab/Qwen3-Coder-Next-DFlash                                  dflash      948  MIT
Qwen/Qwen3.5-0.8B
    satgeze/Qwen3.5-0.8B-DSpark                                    dspark        -  Apache-2.0
Qwen/Qwen3.5-4B
    z-lab/Qwen3.5-4B-DFlash                                        dflash     1269  MIT
Qwen/Qwen3.5-9B
    BLR2/Qwen3.5-9B-Eagle3-ShareGPT                                eagle3      799
    z-lab/Qwen3.5-9B-DFlash                                        dflash     2584  MIT
Qwen/Qwen3.5-27B
    VirVen/Qwen3.5-27B-EAGLE3-v2                                   eagle3        -
    z-lab/Qwen3.5-27B-DFlash                                       dflash     4257  MIT
Qwen/Qwen3.5-35B-A3B
    z-lab/Qwen3.5-35B-A3B-DFlash                                   dflash      772  MIT
Qwen/Qwen3.5-122B-A10B
    z-lab/Qwen3.5-122B-A10B-DFlash                                 dflash     1548  MIT
Qwen/Qwen3.6-27B
    Ex0bit/Qwen3.6-27B-PRISM-EAGLE3/compressed                     eagle3     1100
    z-lab/Qwen3.6-27B-DFlash                                       dflash     3460  MIT
    satgeze/Qwen3.6-27B-DSpark                                     dspark     8800
Qwen/Qwen3.6-35B-A3B
    RedHatAI/Qwen3.6-35B-A3B-speculator.dspark                     dspark     1900  Apache-2.0
    z-lab/Qwen3.6-35B-A3B-DFlash                                   dflash      772  MIT
    incoai/Qwen3.6-35B-A3B-DFlash2                                 dflash2    1053
Qwen/Qwen3.8-27B
    incoai/Qwen3.8-27B-DFlash2                                     dflash2    3849  Apache-2.0
    z-lab/Qwen3.8-27B-DFlash2                                      dflash2    3849  Apache-2.0
    RedHatAI/Qwen3.8-27B-speculator.dspark                         dspark     3977  Apache-2.0
    RadixArk/Qwen3.8-27B-DSpark                                    dspark     3715  other
    DimInfer/Qwen3.8-27B-Dspark-v1                                 dspark     3715  Apache-2.0
openai/gpt-oss-20b
    zhuyksir/EAGLE3-gpt-oss-20b-bf16                               eagle3      615
    RedHatAI/gpt-oss-20b-speculator.eagle3                         eagle3      366
    amazon/GPT-OSS-20B-P-EAGLE                                     eagle3     1670  Apache-2.0
    z-lab/gpt-oss-20b-DFlash                                       dflash     1570  MIT
openai/gpt-oss-120b
    lmsys/EAGLE3-gpt-oss-120b-bf16                                 eagle3      615
    RedHatAI/gpt-oss-120b-speculator.eagle3                        eagle3      366
    amazon/gpt-oss-120b-p-eagle                                    eagle3     1670  Apache-2.0
    z-lab/gpt-oss-120b-DFlash                                      dflash     1570  MIT
google/gemma-4-31B-it
    RedHatAI/gemma-4-31B-it-speculator.eagle3                      eagle3     1652
    RedHatAI/gemma-4-31B-it-speculator.dflash2                     dflash2       -
    google/gemma-4-31B-it-assistant                                assistant   939  Apache-2.0
    z-lab/gemma-4-31B-it-DFlash                                    dflash     3072
google/gemma-4-26B-A4B-it
    RedHatAI/gemma-4-26B-A4B-it-speculator.eagle3                  eagle3      486
    google/gemma-4-26B-A4B-it-assistant                            assistant   839  Apache-2.0
    makora-ai/gemma4-26b-a4b-dspark                                dspark     2411  Apache-2.0
    z-lab/gemma-4-26B-A4B-it-DFlash                                dflash      859  Apache-2.0
google/gemma-4-12B-it
    google/gemma-4-12B-it-assistant                                assistant   846  Apache-2.0
    z-lab/gemma4-12B-it-DFlash                                     dflash     1455  none stated
    deepseek-ai/dspark_gemma4_12b_block7                           dspark     6861  none stated
google/gemma-4-E4B-it
    google/gemma-4-E4B-it-assistant                                assistant   159  Apache-2.0
    rasyosef/gemma-4-E4B-it-dspark                                 dspark        -
google/gemma-4-E2B-it
    google/gemma-4-E2B-it-assistant                                assistant   158  Apache-2.0
    rasyosef/gemma-4-E2B-it-dspark                                 dspark      500  Apache-2.0
LiquidAI/LFM2.5-1.2B-Instruct
    LiquidAI/LFM2.5-1.2B-Instruct-DSpark                           dspark        -  lfm1.0
LiquidAI/LFM2.5-2.6B
    LiquidAI/LFM2.5-2.6B-DSpark                                    dspark      655  lfm1.0
LiquidAI/LFM2.5-8B-A1B
    LiquidAI/LFM2.5-8B-A1B-DSpark                                  dspark      655  lfm1.0
LiquidAI/LFM2.5-24B-A2B
    LiquidAI/LFM2.5-24B-A2B-DSpark                                 dspark        -  lfm1.0
meta-models/Muse-Glimmer-30B
    meta-models/Muse-Glimmer-30B-assistant                         dflash     5112  Apache-2.0
    DaoCloud/Muse-Glimmer-30B-DSpark                               dspark        -
    z-lab/Muse-Glimmer-30B-DFlash2                                 dflash2    5544  Apache-2.0
openbmb/MiniCPM4-8B
    linglingdan/Eagle3_for_MiniCPM4                                eagle3      735
openbmb/MiniCPM5-2B
    openbmb/MiniCPM5-2B-DSpark                                     dspark      648
zai-org/GLM-5.1
    AQ-MedAI/GLM-5.1-eagle3                                        eagle3        -
MiniMaxAI/MiniMax-M2.5
    thoughtworks/MiniMax-M2.5-Eagle3                               eagle3      486
    IamBerbec/MiniMax-M2.5-Eagle3                                  eagle3        -
MiniMaxAI/MiniMax-M2.7
    Lorbus/MiniMax-M2.7-EAGLE3                                     eagle3      500
MiniMaxAI/MiniMax-M3
    Inferact/MiniMax-M3-EAGLE3                                     eagle3     6527
deepseek-ai/DeepSeek-V4-Flash
    SyzygyResearch/DeepSeek-V4-Flash-EAGLE3.1                      eagle3     1858
moonshotai/Kimi-K2.5
    AQ-MedAI/Kimi-K25-eagle3                                       eagle3     2382
moonshotai/Kimi-K2.6
    AQ-MedAI/Kimi-K26-eagle3                                       eagle3        -
moonshotai/Kimi-K2.7-Code
    AQ-MedAI/Kimi-K2.7-Code-eagle3                                 eagle3     3300
    lightseekorg/kimi-k2.7-coder-eagle3.1-mla                      eagle3        -
mistralai/Mistral-Small-4-119B-2603
    mistralai/Mistral-Small-4-119B-2603-eagle                      eagle3      392
mistralai/Mistral-Medium-3.5-128B
    mistralai/Mistral-Medium-3.5-128B-EAGLE                        eagle3     3070
"""
"""Targets, and below each its drafters: hub id, kind, megabytes, licence where its page has one.

Of several for a target, the first is what ``auto`` takes.
"""


def _pairs(table: str) -> Iterator[Pair]:
    target = ""
    for line in filter(None, table.splitlines()):
        if not line.startswith(" "):
            target = line
            continue
        head, kind, size, *said = line.split(maxsplit=3)
        licence = said[0] if said else "see its page"
        yield Pair(target, head, licence, kind, None if size == "-" else int(size))


PAIRS = tuple(_pairs(TABLE))


def plain_name(model: str) -> str:
    """The name of a model without its owner, folder and conversion.

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
    """Memory that target, head and a text of 8k tokens take, roughly, by the target's name.

    None where the name does not say how many parameters there are.
    """
    name = plain_name(target)
    found = BILLIONS.search(name)
    billions = SPARSE.get(name) or (float(found[1]) if found else None)
    if billions is None:
        return None
    return billions * 1e9 * BYTES_PER_WEIGHT * HEAD_SHARE + CACHE_BYTES


def targets_within(limit: float) -> tuple[list[str], list[str]]:
    """The targets of the table that fit into that many bytes in 4 bits, and the others.

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
