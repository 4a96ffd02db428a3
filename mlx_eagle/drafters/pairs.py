"""Public drafters by the target they were trained for: ``--draft-model auto``.

A table of names, and one look into it: nothing is fetched or checked here.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

# What conversions append to a model's name: mlx-community/Qwen3-8B-4bit-DWQ -> Qwen3-8B
SUFFIX = re.compile(
    r"\d+bits?|b?f16|fp(?:8|16)|mxfp\d|nvfp4|mlx|dwq|qat|q\d|g[s\d]\d+|\d{6,8}", re.IGNORECASE
)
# The same, and what only a model's card tells from a fine-tune: Qwen3-8B-UD-MLX-4bit, -mixed-4-6
CONVERSION = re.compile(
    rf"(?:{SUFFIX.pattern}|ud|optiq|mixed|hi|mtp|\d(?:\.\d+)?(?:bits?)?|o?q[xp]?\d\w*)",
    re.IGNORECASE,
)
FORBIDDING = re.compile(r"\b(?:nc|nd)\b|non-?commercial|no-?derivatives", re.IGNORECASE)
"""Licences that forbid commercial use or derivatives, which a converted head is."""

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
FULL_CACHES = {"vicuna-13b-v1.3": 6.6e9}  # bytes, where every query head has keys of its own


@dataclass(frozen=True)
class PublishedSpeed:
    """Measurement that somebody published of a drafter: a hint, not ours and not comparable.

    ``value`` is a speedup over the named engine's own plain decoding ("1.95-2.65x"), or another
    figure with its unit; "-" is a precision that is not said.
    """

    value: str
    machine: str
    precision: str
    source: str

    @property
    def on_gpu(self) -> bool:
        return self.machine == "GPU"

    @property
    def speedup(self) -> float:
        """The lower end of a speedup on a Mac; 0 for anything else."""
        found = re.match(r"(\d+(?:\.\d+)?)[-\d.]*x$", self.value)
        return float(found[1]) if found and not self.on_gpu else 0.0

    def __str__(self) -> str:
        where = self.machine if self.precision == "-" else f"{self.machine}, {self.precision}"
        return f"{self.value} ({where}: {self.source})"


@dataclass(frozen=True)
class Pair:
    """Hub ids of a target and of a drafter for it, which may lie in a folder of a repository.

    ``head`` is "mtp" for layers of the target's own. ``licence`` is the drafter's as its page
    states it, "none stated" where the page has none, ``kind`` as in ``kinds.py``, ``megabytes``
    what it takes as published, where that is known, and ``figures`` what is published of it.
    """

    target: str
    head: str
    licence: str
    kind: str
    megabytes: int | None
    figures: tuple[PublishedSpeed, ...] = ()

    @property
    def is_seen(self) -> bool:
        """Whether its layout is known: from its config, or as somebody has run it on a Mac."""
        is_run = any(not figure.on_gpu for figure in self.figures)
        return self.megabytes is not None or self.head == self.kind or is_run

    @property
    def is_free(self) -> bool:
        """Whether "auto" may take it: its licence allows commercial use and derivatives."""
        return FORBIDDING.search(self.licence) is None

    @property
    def rank(self) -> tuple[bool, bool, int, float]:
        """The order of "auto": a speedup on a Mac, the target's own authors, figures on GPUs."""
        best = max((figure.speedup for figure in self.figures), default=0.0)
        is_own = self.head == self.kind or self.head.split("/")[0] == self.target.split("/")[0]
        has_gpu_figure = any(figure.on_gpu for figure in self.figures)
        group = 1 if best > 1 else 2 if is_own else 3 if has_gpu_figure else 4
        return not self.is_free, not self.is_seen, group, -best if group == 1 else 0.0

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
        1.98x       M4 Pro    8 bit  mlx-dspark
    RedHatAI/Qwen3-4B-speculator.dspark                            dspark        -
Qwen/Qwen3-8B
    RedHatAI/Qwen3-8B-speculator.eagle3                            eagle3      799
    Tengyunw/qwen3_8b_eagle3                                       eagle3      799
    AngelSlim/Qwen3-8B_eagle3                                      eagle3      799
    RedHatAI/Qwen3-8B-speculator.peagle                            eagle3     3269  Apache-2.0
    z-lab/Qwen3-8B-DFlash-b16                                      dflash     2097  MIT
    deepseek-ai/dspark_qwen3_8b_block7                             dspark     4742  none stated
        2.19x       M4 Pro    8 bit  mlx-dspark
    RedHatAI/Qwen3-8B-speculator.dflash                            dflash        -
    RedHatAI/Qwen3-8B-speculator.dflash2                           dflash2       -
Qwen/Qwen3-14B
    RedHatAI/Qwen3-14B-speculator.eagle3                           eagle3     1219
    AngelSlim/Qwen3-14B_eagle3                                     eagle3     1219
    deepseek-ai/dspark_qwen3_14b_block7                            dspark     6833  none stated
        2.03x       M4 Pro    8 bit  mlx-dspark
Qwen/Qwen3-32B
    RedHatAI/Qwen3-32B-speculator.eagle3                           eagle3     1565
    AngelSlim/Qwen3-32B_eagle3                                     eagle3     1565
    deepseek-ai/dspark_qwen3_32b_block7                            dspark        -
Qwen/Qwen3-30B-A3B
    Tengyunw/qwen3_30b_moe_eagle3                                  eagle3      366
Qwen/Qwen3-30B-A3B-Instruct-2507
    lmsys/SGLang-EAGLE3-Qwen3-30B-A3B-Instruct-2507-SpecForge-Nex  eagle3      366
    RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3         eagle3      366
Qwen/Qwen3-Coder-30B-A3B-Instruct
    JinnP/SGLang-EAGLE3-Qwen3-Coder-30B-A3B-Instruct               eagle3      366  Apache-2.0
    z-lab/Qwen3-Coder-30B-A3B-DFlash                               dflash      948  MIT
Qwen/Qwen3-235B-A22B
    lmsys/Qwen3-235B-A22B-EAGLE3                                   eagle3     1185
Qwen/Qwen3-Coder-Next
    thoughtworks/Qwen3-Coder-Next-Eagle3                           eagle3      290  Apache-2.0
    z-lab/Qwen3-Coder-Next-DFlash                                  dflash      948  MIT
Qwen/Qwen3.5-0.8B
    mtp                                                            mtp           -  the target's
    satgeze/Qwen3.5-0.8B-DSpark                                    dspark        -  Apache-2.0
        0.96x       M4 Pro    8 bit  mlx-dspark
Qwen/Qwen3.5-4B
    mtp                                                            mtp           -  the target's
        1.18x       a Mac     bf16   mlx-vlm 1167
        1.32x       a Mac     4 bit  mlx-vlm 1167
        0.65x       M3 Ultra  4 bit  Rapid-MLX 3115
    z-lab/Qwen3.5-4B-DFlash                                        dflash     1269  MIT
        1.73x       M4 Max    bf16   Aryagm/dflash-mlx 2
Qwen/Qwen3.5-9B
    mtp                                                            mtp           -  the target's
        1.51x       M4 Max    4 bit  source not kept
    BLR2/Qwen3.5-9B-Eagle3-ShareGPT                                eagle3      799
    z-lab/Qwen3.5-9B-DFlash                                        dflash     2584  MIT
        3.3-4.1x    M5 Max    bf16   dflash-mlx
        1.12-1.67x  M4 Max    6 bit to bf16  Aryagm/dflash-mlx 2
Qwen/Qwen3.5-27B
    mtp                                                            mtp           -  the target's
    VirVen/Qwen3.5-27B-EAGLE3-v2/compressed                        eagle3        -
    z-lab/Qwen3.5-27B-DFlash                                       dflash     4257  MIT
        1.95x       a Mac     4 bit  dflash-mlx 30
Qwen/Qwen3.5-35B-A3B
    mtp                                                            mtp           -  the target's
    z-lab/Qwen3.5-35B-A3B-DFlash                                   dflash      772  MIT
Qwen/Qwen3.5-122B-A10B
    mtp                                                            mtp           -  the target's
    z-lab/Qwen3.5-122B-A10B-DFlash                                 dflash     1548  MIT
Qwen/Qwen3.5-397B-A17B
    mtp                                                            mtp           -  the target's
    AQ-MedAI/Qwen3.5-397B-A17B-eagle3                              eagle3        -
Qwen/Qwen3.6-27B
    mtp                                                            mtp           -  the target's
        2.69x       M5 Max    -      source not kept
        1.74x       a Mac     4 bit  mlx-vlm 1167
    Ex0bit/Qwen3.6-27B-PRISM-EAGLE3/compressed                     eagle3     1100  Apache-2.0
    z-lab/Qwen3.6-27B-DFlash                                       dflash     3460  MIT
    satgeze/Qwen3.6-27B-DSpark                                     dspark     8800
        2.29x       M5 Max    -      source not kept
        1.96-2.67x  M4 Pro    8 bit  mlx-dspark
Qwen/Qwen3.6-35B-A3B
    mtp                                                            mtp           -  the target's
    RedHatAI/Qwen3.6-35B-A3B-speculator.dspark                     dspark     1900  Apache-2.0
        1.27-1.67x  M4 Pro    4 bit  mlx-dspark
    z-lab/Qwen3.6-35B-A3B-DFlash                                   dflash      772  MIT
        2.61-3.24x  M3 Ultra  8 bit  Rapid-MLX 472
    incoai/Qwen3.6-35B-A3B-DFlash2                                 dflash2    1053
Qwen/Qwen3.8-27B
    mtp                                                            mtp           -  the target's
        1.19-1.5x   M5 Max    4 bit  mlxcel 1203, 1185
    incoai/Qwen3.8-27B-DFlash2                                     dflash2    3849  Apache-2.0
        2.79-4.06x  M4 Pro    8 bit  mlx-dspark
        1.68-2.63x  M4 Pro    4 bit  mlx-dspark
    z-lab/Qwen3.8-27B-DFlash2                                      dflash2    3849  Apache-2.0
    RedHatAI/Qwen3.8-27B-speculator.dspark                         dspark     3977  Apache-2.0
        5.23-5.55 tokens a round  GPU       -      source not kept
    RadixArk/Qwen3.8-27B-DSpark                                    dspark     3715  other
        2.72-2.92x  M4 Pro    8 bit  mlx-dspark
    DimInfer/Qwen3.8-27B-Dspark-v1                                 dspark     3715  Apache-2.0
        1.99-2.01x  M4 Pro    4 bit  mlx-dspark
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
        1.50x       a Mac     8 bit  mlx-vlm 1180
        1.30x       M4 Pro    -      source not kept
    RedHatAI/gemma-4-31B-it-speculator.dflash2                     dflash2       -  Apache-2.0
    google/gemma-4-31B-it-assistant                                assistant   939  Apache-2.0
        1.95-2.65x  M3 Ultra  4 bit  mlxcel 1217, 1254
        1.2-1.4x    M5 Max    -      source not kept
        <1x         M1 Ultra  -      source not kept
        0.65-1.00x  a Mac     4 bit  mlx-vlm 1121
    z-lab/gemma-4-31B-it-DFlash                                    dflash     3072
    RedHatAI/gemma-4-31B-it-speculator.dspark                      dspark        -
    RedHatAI/gemma-4-31B-it-speculator.dflash                      dflash        -
google/gemma-4-26B-A4B-it
    RedHatAI/gemma-4-26B-A4B-it-speculator.eagle3                  eagle3      486
        1.14x       a Mac     4 bit  mlx-vlm 1180
    google/gemma-4-26B-A4B-it-assistant                            assistant   839  Apache-2.0
        1.21x       M2 Max    4 bit  source not kept
    makora-ai/gemma4-26b-a4b-dspark                                dspark     2411  Apache-2.0
        1.27x       M4 Pro    8 bit  mlx-dspark
    z-lab/gemma-4-26B-A4B-it-DFlash                                dflash      859  Apache-2.0
google/gemma-4-12B-it
    google/gemma-4-12B-it-assistant                                assistant   846  Apache-2.0
        1.1-1.4x    M1 Ultra  -      source not kept
    z-lab/gemma4-12B-it-DFlash                                     dflash     1455  none stated
    deepseek-ai/dspark_gemma4_12b_block7                           dspark     6861  none stated
        3.25x       M4 Pro    8 bit  mlx-dspark
google/gemma-4-E4B-it
    google/gemma-4-E4B-it-assistant                                assistant   159  Apache-2.0
    rasyosef/gemma-4-E4B-it-dspark                                 dspark        -
google/gemma-4-E2B-it
    google/gemma-4-E2B-it-assistant                                assistant   158  Apache-2.0
    rasyosef/gemma-4-E2B-it-dspark                                 dspark      500  Apache-2.0
LiquidAI/LFM2.5-1.2B-Instruct
    LiquidAI/LFM2.5-1.2B-Instruct-DSpark                           dspark        -  lfm1.0
        2.44-3.78x  M4 Pro    bf16   mlx-dspark
LiquidAI/LFM2.5-2.6B
    LiquidAI/LFM2.5-2.6B-DSpark                                    dspark      655  lfm1.0
        2.11-3.37x  M4 Pro    bf16   mlx-dspark
LiquidAI/LFM2.5-8B-A1B
    LiquidAI/LFM2.5-8B-A1B-DSpark                                  dspark      655  lfm1.0
        1.3x        M4 Pro    bf16   mlx-dspark
        <1x         M4 Pro    8 bit  mlx-dspark
LiquidAI/LFM2.5-24B-A2B
    LiquidAI/LFM2.5-24B-A2B-DSpark                                 dspark        -  lfm1.0
meta-models/Muse-Glimmer-30B
    meta-models/Muse-Glimmer-30B-assistant                         dflash     5112  Apache-2.0
    DaoCloud/Muse-Glimmer-30B-DSpark                               dspark        -
        2.22-3.27x  M4 Pro    8 bit  mlx-dspark
    z-lab/Muse-Glimmer-30B-DFlash2                                 dflash2    5544  Apache-2.0
Nanbeige/Nanbeige4.2-3B
    Nanbeige/Nanbeige4.2-3B-DSpark                                 dspark        -
        2.02-4.25x  M4 Pro    bf16   mlx-dspark
nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16
    mlx-community/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-DSpark-bf16 dspark        -
        1.07-1.34x  M4 Pro    4 bit  mlx-dspark
deepreinforce-ai/Ornith-1.0-9B
    stanleyphoong/Ornith-1.0-9B-DSpark                             dspark        -
        2.21-2.53x  M4 Pro    8 bit  mlx-dspark
JetBrains/Mellum2-12B-A2.5B-Thinking
    RedHatAI/Mellum2-12B-A2.5B-Thinking-speculator.dflash          dflash        -  Apache-2.0
openbmb/MiniCPM4-8B
    linglingdan/Eagle3_for_MiniCPM4                                eagle3      735
openbmb/MiniCPM5-2B
    openbmb/MiniCPM5-2B-DSpark                                     dspark      648
        4.85 tokens a round  GPU       -      source not kept
zai-org/GLM-5.1
    mtp                                                            mtp           -  the target's
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
    RedHatAI/Mistral-Small-4-119B-2603-speculator.dspark           dspark        -
    RedHatAI/Mistral-Small-4-119B-2603.dflash                      dflash        -
mistralai/Mistral-Medium-3.5-128B
    mistralai/Mistral-Medium-3.5-128B-EAGLE                        eagle3     3070
"""
"""Targets, and below each its drafters: hub id, kind, megabytes, licence where its page has one.

"mtp" stands for layers of the target's own. Below a drafter is what is published of it: a figure,
the machine (GPU where it is no Mac), the precision and the source, two blanks between them.
``Pair.rank`` says in which order "auto" takes them.
"""


def read_table(table: str) -> tuple[Pair, ...]:
    """The pairs of such a table, those of a target in the order in which "auto" takes them."""
    found: list[Pair] = []
    target = ""
    for line in filter(None, table.splitlines()):
        if not line.startswith(" "):
            target = line
        elif not line.startswith(" " * 8):
            head, kind, size, *said = line.split(maxsplit=3)
            licence = said[0] if said else "see its page"
            found.append(Pair(target, head, licence, kind, None if size == "-" else int(size)))
        else:
            figure = PublishedSpeed(*re.split("  +", line.strip()))
            found[-1] = replace(found[-1], figures=(*found[-1].figures, figure))
    targets = list(dict.fromkeys(pair.target for pair in found))
    return tuple(sorted(found, key=lambda pair: (targets.index(pair.target), pair.rank)))


PAIRS = read_table(TABLE)


def plain_name(model: str) -> str:
    """The name of a model without its owner, folder and conversion.

    "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit" -> "llama-3.1-8b-instruct"
    """
    words = Path(model).name.split("-")
    while len(words) > 1 and SUFFIX.fullmatch(words[-1]):
        words.pop()
    return "-".join(words).lower().removeprefix("meta-")


def is_named_after(model: str, base: str) -> bool:
    """Whether a name is another's with words of a conversion behind it, and no others.

    "Qwen3-8B-UD-MLX-4bit" is named after "Qwen/Qwen3-8B", "Qwen3-8B-abliterated-4bit" is not.
    """
    name = Path(model).name.lower().removeprefix("meta-")
    rest = name.removeprefix(plain_name(base))
    return rest != name and all(map(CONVERSION.fullmatch, filter(None, rest.split("-"))))


def pairs_for(model: str) -> list[Pair]:
    """The pairs whose target ``model`` is, a hub id or a folder of that name, "auto"'s first.

    Without those that their licence keeps from it.
    """
    name = plain_name(model)
    return [pair for pair in PAIRS if pair.is_free and plain_name(pair.target) == name]


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
    cache = FULL_CACHES.get(name, CACHE_BYTES)
    return billions * 1e9 * BYTES_PER_WEIGHT * HEAD_SHARE + cache


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
    said = ["; ".join(map(str, pair.figures)) for pair in PAIRS]
    return [
        "Known public drafters (target, drafter, kind, size, licence of the drafter, what others "
        "publish of it); --draft-model auto takes the first for --model.",
        "Collected from their pages and not measured by us.",
        *(f"  {line}  {text}".rstrip() for line, text in zip(lines, said, strict=True)),
    ]
