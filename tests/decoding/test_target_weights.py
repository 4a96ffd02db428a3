"""What passes over a target's weights cost: experts apart, by the shapes of real targets."""

import random
from itertools import combinations

import architectures
import pytest
import true_configs as true
from grids import thorough
from mlx.utils import tree_flatten

from mlx_eagle.decoding.pass_costs import Experts, TargetWeights
from mlx_eagle.doctor.checks import build
from mlx_eagle.system.device import machine_of

M4 = machine_of({"device_name": "Apple M4 Pro", "architecture": "applegpu_g16s"}, "metal")


def chances_of_every_choice(total: int, per_row: int, num_rows: int) -> float:
    """How many experts some rows go through, on the mean over all that they may choose."""
    sets = [frozenset(chosen) for chosen in combinations(range(total), per_row)]
    unions = {frozenset(): 1.0}
    for _ in range(num_rows):
        following: dict[frozenset, float] = {}
        for union, chance in unions.items():
            for chosen in sets:
                key = union | chosen
                following[key] = following.get(key, 0.0) + chance / len(sets)
        unions = following
    return sum(len(union) * chance for union, chance in unions.items())


@pytest.mark.parametrize("total, per_row", [(3, 1), (5, 2), (6, 3), (3, 3)])
def test_experts_that_rows_go_through(total, per_row):
    """Few experts: rows share no more of them than by chance."""
    experts = Experts(total, per_row, 0.5)
    for num_rows in range(1, 5):
        expected = chances_of_every_choice(total, per_row, num_rows)
        assert experts.touched(num_rows) == pytest.approx(expected)


@pytest.mark.parametrize("total, per_row", [(128, 8), (32, 4)])
def test_neighbours_share_more_experts_than_by_chance(total, per_row):
    """25.7 % of those of two tokens in a row (mlx-lm 1485, on an M3 Max), against dice."""
    experts = Experts(total, per_row, 0.5)
    assert experts.touched(2) / per_row == pytest.approx(1.743)
    dice = random.Random(0)
    found = [0.0] * 8
    for _ in range(2000):
        row = set(dice.sample(range(total), per_row))
        touched = set(row)
        for i in range(8):
            found[i] += len(touched) / 2000
            num_kept = int(0.257 * per_row + dice.random())
            others = dice.sample(sorted(set(range(total)) - row), per_row - num_kept)
            row = {*dice.sample(sorted(row), num_kept), *others}
            touched |= row
    assert found == pytest.approx([experts.touched(rows) for rows in range(1, 9)], rel=0.02)


# What a row reads, in bits: by the layers as they are published, counted by hand.
GPT_EXPERTS = 24 * 4 * (3 * 2880 * 2880 * 4.25 + (2 * 2880 + 2880) * 16)
GPT_REST = 8.5 * (24 * (2 * 2880 * 64 * 64 + 2 * 2880 * 8 * 64) + 201088 * 2880)
QWEN_EXPERTS = 48 * 8 * 3 * 2048 * 768 * 4.5
QWEN_REST = 4.5 * (48 * (2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128) + 151936 * 2048)
GEMMA_EXPERTS = 30 * 8 * 3 * 2816 * 704 * 4.5
FULL, SLIDING = 2816 * 16 * 512 * 2 + 2816 * 2 * 512, 2816 * 16 * 256 * 2 + 2 * 2816 * 8 * 256
GEMMA_REST = 4.5 * (5 * FULL + 25 * SLIDING + 30 * 3 * 2816 * 2112 + 262144 * 2816)
EXPERTS = {
    "gpt-oss-20b": (true.GPT_OSS_20B, 32, 4, GPT_EXPERTS, GPT_REST, (2.0, 2.3)),
    "Qwen3-30B-A3B": (true.QWEN3_30B_A3B, 128, 8, QWEN_EXPERTS, QWEN_REST, (2.3, 2.6)),
    "Gemma-4-26B-A4B": (true.GEMMA4_26B_A4B, 128, 8, GEMMA_EXPERTS, GEMMA_REST, (1.9, 2.2)),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_of_real_targets(name):
    config, total, per_row, read, rest, (low, high) = EXPERTS[name]
    weights = TargetWeights.of(build(config))
    experts = weights.experts
    assert (experts.total, experts.per_row) == (total, per_row)
    assert weights.packing == ("8 bits" if name == "gpt-oss-20b" else "4 bits")  # the others'
    assert experts.share == pytest.approx(read / (read + rest), rel=0.02)
    assert weights.row_bytes == pytest.approx((read + rest) / 8, rel=0.02)
    assert weights.pass_cost(M4, 1) == pytest.approx(1.0)
    assert low < weights.pass_cost(M4, 4) < high
    costs = [weights.pass_cost(M4, rows) for rows in range(1, 65)]
    assert costs == sorted(costs), "up to all experts, and then by tiles"
    assert experts.touched(4) < experts.touched(64) <= total


@pytest.mark.parametrize("name", ["LLAMA_8B", "GEMMA3_12B", "GEMMA4_31B", "QWEN35_27B"])
def test_targets_without_experts_cost_what_the_table_says(name):
    weights = TargetWeights.of(build(getattr(true, name)))
    assert weights.packing == "4 bits" and weights.experts is None
    assert [weights.pass_cost(M4, rows) for rows in (2, 3, 4, 5)] == [1.01, 1.18, 1.45, 1.75]


# Tables of embeddings that are not the output matrix are not read.
def test_tied_embeddings_are_read():
    config = true.QWEN3_30B_A3B | {"num_hidden_layers": 4}
    apart = TargetWeights.of(build(config)).experts.share
    tied = TargetWeights.of(build(config | {"tie_word_embeddings": True})).experts.share
    assert apart == pytest.approx(tied, rel=1e-6)


def test_weights_that_are_not_packed():
    config = {k: v for k, v in true.GPT_OSS_20B.items() if k != "quantization"}
    weights = TargetWeights.of(build(config))
    assert weights.packing is None and weights.experts.share > 0.6
    assert weights.pass_cost(M4, 4) > 2


WITH_EXPERTS = [name for name in architectures.model_files() if "moe" in name]


@pytest.mark.parametrize("name", thorough(WITH_EXPERTS, "qwen3_moe", "ernie4_5_moe"))
def test_every_architecture_says_how_many_experts_a_row_takes(name):
    """Each calls it otherwise; the tiny models have four, of which a row takes two."""
    model = architectures.build(name)
    experts = TargetWeights.of(model).experts
    assert (experts.total, experts.per_row) == (4, 2) and 0 < experts.share < 1
    sizes = {name: array.nbytes for name, array in tree_flatten(model.parameters())}
    in_experts = sum(
        n for name, n in sizes.items() if ".switch_mlp." in name or ".experts." in name
    )
    whole = sum(sizes.values())
    assert experts.share > in_experts / 2 / whole
