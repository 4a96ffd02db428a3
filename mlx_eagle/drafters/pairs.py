"""Public draft heads by the target they were trained for: ``--draft-model auto``.

A table of names, and one look into it: nothing is fetched or checked here.
"""

import re
from dataclasses import dataclass
from pathlib import Path

# What conversions append to a model's name: mlx-community/Qwen3-8B-4bit-DWQ -> Qwen3-8B
SUFFIX = re.compile(
    r"\d+bits?|b?f16|fp(?:8|16)|mxfp\d|nvfp4|mlx|dwq|qat|q\d|g[s\d]\d+|\d{6,8}", re.IGNORECASE
)

BILLIONS = re.compile(r"(?<![a-z\d.])(\d+(?:\.\d+)?)b(?![a-z])", re.IGNORECASE)
SPARSE = {"llama-4-scout-17b-16e-instruct": 109.0}
"""Where the name counts the parameters that are at work for one token, not all."""
BYTES_PER_WEIGHT = 4.5 / 8  # in 4 bits, each group of 64 with a scale and a bias of 16
HEAD_SHARE = 1.06
"""Target and head in 4 bits, by the target alone: 5% in Llama-3.1-8B, more in small ones."""
CACHE_BYTES = 1e9  # of 8k tokens in Llama-3.1-8B


@dataclass(frozen=True)
class Pair:
    """Hub ids of a target and of a head for it; the head's licence as its page states it."""

    target: str
    head: str
    licence: str = "see its page"


# Of several heads for a target, the first is what ``auto`` takes.
PAIRS = (
    Pair("meta-llama/Llama-3.1-8B-Instruct", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
    Pair(
        "meta-llama/Llama-3.1-8B-Instruct",
        "lmsys/SGLang-EAGLE3-Llama-3.1-8B-Instruct-SpecForge",
    ),
    Pair("meta-llama/Llama-3.1-8B-Instruct", "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3"),
    Pair("meta-llama/Llama-3.1-8B-Instruct", "thoughtworks/Llama-3.1-8B-Instruct-Eagle3"),
    Pair(
        "meta-llama/Llama-3.3-70B-Instruct",
        "lmsys/SGLang-EAGLE3-Llama-3.3-70B-Instruct-SpecForge",
        "MIT",
    ),
    Pair("meta-llama/Llama-3.3-70B-Instruct", "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B"),
    Pair("meta-llama/Llama-3.3-70B-Instruct", "nebius/EAGLE3-Llama-3.3-70B-Instruct"),
    Pair("meta-llama/Llama-3.3-70B-Instruct", "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3"),
    Pair(
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        "lmsys/SGLang-EAGLE3-Llama-4-Scout-17B-16E-Instruct-SpecForge",
    ),
    Pair(
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
        "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B",
    ),
    Pair("lmsys/vicuna-13b-v1.3", "yuhuili/EAGLE3-Vicuna1.3-13B", "Apache-2.0"),
    Pair("Qwen/Qwen2.5-7B-Instruct", "thoughtworks/Qwen2.5-7B-Instruct-Eagle3"),
    Pair("Qwen/Qwen2.5-14B-Instruct", "thoughtworks/Qwen2.5-14B-Instruct-Eagle3"),
    Pair("Qwen/Qwen3-1.7B", "AngelSlim/Qwen3-1.7B_eagle3"),
    Pair("Qwen/Qwen3-4B", "AngelSlim/Qwen3-4B_eagle3"),
    Pair("Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.eagle3"),
    Pair("Qwen/Qwen3-8B", "Tengyunw/qwen3_8b_eagle3"),
    Pair("Qwen/Qwen3-8B", "AngelSlim/Qwen3-8B_eagle3"),
    Pair("Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.peagle"),
    Pair("Qwen/Qwen3-14B", "RedHatAI/Qwen3-14B-speculator.eagle3"),
    Pair("Qwen/Qwen3-14B", "AngelSlim/Qwen3-14B_eagle3"),
    Pair("Qwen/Qwen3-32B", "RedHatAI/Qwen3-32B-speculator.eagle3"),
    Pair("Qwen/Qwen3-32B", "AngelSlim/Qwen3-32B_eagle3"),
    Pair("Qwen/Qwen3-30B-A3B", "Tengyunw/qwen3_30b_moe_eagle3"),
    Pair(
        "Qwen/Qwen3-30B-A3B-Instruct-2507",
        "lmsys/SGLang-EAGLE3-Qwen3-30B-A3B-Instruct-2507-SpecForge-Nex",
    ),
    Pair(
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "JinnP/SGLang-EAGLE3-Qwen3-Coder-30B-A3B-Instruct",
        "Apache-2.0",
    ),
    Pair("Qwen/Qwen3-235B-A22B", "lmsys/Qwen3-235B-A22B-EAGLE3"),
    Pair("openai/gpt-oss-20b", "zhuyksir/EAGLE3-gpt-oss-20b-bf16"),
    Pair("openai/gpt-oss-20b", "RedHatAI/gpt-oss-20b-speculator.eagle3"),
    Pair("openai/gpt-oss-20b", "amazon/GPT-OSS-20B-P-EAGLE", "Apache-2.0"),
    Pair("openai/gpt-oss-120b", "lmsys/EAGLE3-gpt-oss-120b-bf16"),
    Pair("openai/gpt-oss-120b", "RedHatAI/gpt-oss-120b-speculator.eagle3"),
    Pair("openai/gpt-oss-120b", "amazon/gpt-oss-120b-p-eagle", "Apache-2.0"),
    Pair("google/gemma-4-31B-it", "RedHatAI/gemma-4-31B-it-speculator.eagle3"),
    Pair("google/gemma-4-26B-A4B-it", "RedHatAI/gemma-4-26B-A4B-it-speculator.eagle3"),
    Pair("openbmb/MiniCPM4-8B", "linglingdan/Eagle3_for_MiniCPM4"),
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

    By name without the owner, smallest first.
    """
    sizes = {pair.target: bytes_in_4_bits(pair.target) or 0.0 for pair in PAIRS}
    ordered = sorted(sizes, key=lambda target: sizes[target])
    fit = [Path(target).name for target in ordered if sizes[target] <= limit]
    return fit, [Path(target).name for target in ordered if sizes[target] > limit]


def pair_lines() -> list[str]:
    """The table for people, a line each."""
    width = max(len(pair.target) for pair in PAIRS)
    head_width = max(len(pair.head) for pair in PAIRS)
    return [
        "Known public heads (target, head, licence of the head); --draft-model auto takes the "
        "first for --model.",
        "Collected from their pages and not measured by us.",
        *(f"  {pair.target:{width}}  {pair.head:{head_width}}  {pair.licence}" for pair in PAIRS),
    ]
