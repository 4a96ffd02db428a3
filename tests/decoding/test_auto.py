"""What is drafted next: chosen in a simulator of texts, and in the order of the loop."""

import gc
import itertools
import math
import random
import re
from collections.abc import Iterable

import pytest
from costs import FLAT, LINEAR, Curve, SettledCosts, curve
from grids import thorough
from helpers import PROMPT, plain, speculative, tiny_head, tiny_llama
from simulator import GUESSES, MACHINES, NOISE, BusyMachine, Machine, best, draw_ranks

from mlx_eagle.decoding import generate_step, loop, round_costs
from mlx_eagle.decoding.agreement import from_numbers, to_numbers
from mlx_eagle.decoding.auto import AdaptiveController, FixedController
from mlx_eagle.decoding.pass_costs import TargetWeights
from mlx_eagle.decoding.round_costs import RoundCosts, costs_of
from mlx_eagle.decoding.stats import OFF, ON, PROBE
from mlx_eagle.drafters.acceptance_stats import Acceptance, expected_tokens
from mlx_eagle.drafters.tree import (
    CHAINS,
    COPIES,
    LEAST_MATCHES,
    PLAIN,
    TREES,
    DraftPlan,
    DraftShape,
)
from mlx_eagle.system import device
from mlx_eagle.target_model.kernels import COUNTED, UNCOUNTED, KernelOptions, OptionTrial
from mlx_eagle.target_model.target import Target

ALPHAS = [0.0, 0.25, 0.5, 0.7, 0.85]
STEEP = curve(lambda k: 1.2 + 0.84 * k)
ONE, THREE, SEVEN = DraftShape(1), DraftShape(3), DraftShape(7)


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def first_text(cost, guess, alpha, length, seed, waves=0.0, shapes=CHAINS) -> float:
    """Seconds per token of a text before which nothing was known but a guess."""
    machine = Machine(cost, lambda n: alpha, seed, waves)
    return machine.write(AdaptiveController(RoundCosts(guess), shapes), length)


# --- texts of a machine -----------------------------------------------------------------------

# Of the best speed, as measured over all acceptances and guesses, less one hundredth.
LEAST = {"flat": 0.92, "gentle": 0.9, "knee": 0.9, "linear": 0.94, "BLAS": 0.87, "AVX-512": 0.9}
LEAST["tiles of 8"] = 0.8
LEAST_IN_WAVES = LEAST | {"tiles of 8": 0.77}  # where the one cheap long draft is found later


@pytest.mark.parametrize("waves", thorough([0.0, 0.2], 0.0))
@pytest.mark.parametrize("name", thorough(MACHINES, "BLAS"))
def test_a_first_text_is_near_the_best(name, waves):
    """Somebody who is told everything is the measure; with trees offered, too."""
    cost, shares = MACHINES[name], []
    for guess in GUESSES.values():
        for alpha in ALPHAS:
            times = [first_text(cost, guess, alpha, 200, seed, waves) for seed in range(4)]
            shares.append(best(cost, alpha) / mean(times))
            assert NOISE / mean(times) > 0.93, "against plain decoding"
    assert mean(shares) > (LEAST_IN_WAVES if waves else LEAST)[name]


@pytest.mark.parametrize(
    ("num_seeds", "least"), [(32, 0.945), pytest.param(96, 0.95, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("name", thorough(MACHINES, "linear"))
def test_a_short_first_text_is_hardly_slower_than_plain(name, num_seeds, least):
    """Whatever is guessed and accepted; hardest where drafts never pay and are thought cheap."""
    cost = MACHINES[name]
    for guess, alpha in itertools.product(GUESSES.values(), ALPHAS):
        times = [first_text(cost, guess, alpha, 100, seed) for seed in range(num_seeds)]
        assert NOISE / mean(times) > least, "against plain decoding"


@pytest.mark.parametrize(("noise", "drift"), [(0.2, 0.0), (0.03, 0.1)])
@pytest.mark.parametrize("name", thorough(["BLAS", "flat", "gentle", "linear"], "flat"))
def test_bad_drafts_cost_little_in_a_busy_machine(name, noise, drift):
    """Where hardly a draft is right, and times say little. Of 1,152 texts, two were below .89."""
    for guess, alpha in itertools.product(GUESSES.values(), (0.0, 0.1)):
        shares = []
        for seed in range(36):
            machine = BusyMachine(MACHINES[name], alpha, seed, noise, drift)
            machine.write(AdaptiveController(RoundCosts(guess), CHAINS + TREES), 400)
            shares.append(machine.num_tokens / machine.work)
        assert mean(shares) > 0.96
        assert sorted(shares)[0] > 0.87 and sorted(shares)[1] > 0.89


def test_no_dear_tree_is_tried_early_in_a_first_text():
    """On an M4, 16 rows cost 4.4 plain steps: more than chains can promise."""
    m4 = device.Machine("", "metal", "M4", device.M4)

    def cost(shape: DraftShape, num_requests: int) -> float:
        return device.product_cost(m4, shape.num_rows * num_requests, True) + 0.06 * shape.size

    for alpha, seed in itertools.product((0.55, 0.7, 0.8), range(4)):
        machine = Machine(cost, lambda n, a=alpha: a, seed)
        machine.write(AdaptiveController(RoundCosts(cost), CHAINS + TREES), 140)
        assert [shape for shape in machine.shapes if shape.num_rows >= 16] == []


@pytest.mark.parametrize("guess", thorough(GUESSES, "five rows"))
@pytest.mark.parametrize("name", thorough(MACHINES, "linear"))
def test_the_second_text_goes_on_where_the_first_has_ended(name, guess):
    cost, gains = MACHINES[name], []
    for alpha in ALPHAS:
        texts = []
        for seed in range(6):
            known, machine = RoundCosts(GUESSES[guess]), Machine(cost, lambda n, a=alpha: a, seed)
            texts.append([machine.write(AdaptiveController(known), 100) for _ in range(2)])
        first, second = (mean(text) for text in zip(*texts, strict=True))
        gains.append(first / second)
        assert NOISE / second > 0.95, "against plain decoding"
    # Where drafts seem dear and are not very, what is tried is spread over both texts.
    assert mean(gains) > (0.99 if name in ("linear", "AVX-512") else 1.01)


@pytest.mark.parametrize("num_seeds", [3, 6])
@pytest.mark.exhaustive
def test_texts_one_after_the_other_are_near_the_best_shape_for_all(num_seeds):
    """Twelve short ones, as a benchmark has them; what is best for each would be faster still."""
    cost, shapes = MACHINES["AVX-512"], CHAINS + TREES
    alphas = [0.34, 0.55, 0.55, 0.38, 0.75, 0.48, 0.56, 0.5, 0.62, 0.68, 0.58, 0.66]

    def seconds(make, seed: int) -> float:
        texts = enumerate(alphas)
        return sum(
            Machine(cost, lambda n, a=a: a, 99 * seed + i).write(make(), 128) for i, a in texts
        )

    def of_auto(seed: int) -> float:
        known = RoundCosts(MACHINES["BLAS"])
        return seconds(lambda: AdaptiveController(known, shapes), seed)

    seeds = range(num_seeds)
    fixed = min(mean(seconds(lambda s=s: FixedController(s), n) for n in seeds) for s in shapes)
    assert fixed / mean(map(of_auto, seeds)) > 0.97


@pytest.mark.parametrize("num_seeds", thorough([6, 16], 6))
@pytest.mark.parametrize("factor", thorough([1.6, 1 / 1.6], 1.6))
@pytest.mark.parametrize("alpha", thorough([0.25, 0.6], 0.6))
def test_costs_wrong_by_a_factor_are_corrected_within_a_text(factor, alpha, num_seeds):
    """What is thought of all drafts is off: the text after is as fast as where it is right."""

    def second(known: RoundCosts, seed: int) -> float:
        machine = Machine(FLAT, lambda n: alpha, seed)
        machine.write(AdaptiveController(known), 200)
        return machine.write(AdaptiveController(known), 200)

    def costs(of: float) -> RoundCosts:
        return RoundCosts(lambda s, n: FLAT(s, n) * (1.0 if s == PLAIN else of))

    wrong = mean(second(costs(factor), seed) for seed in range(num_seeds))
    right = mean(second(costs(1.0), seed) for seed in range(num_seeds))
    assert wrong < 1.04 * right


@pytest.mark.parametrize("num_seeds", thorough([3, 12], 3))
def test_it_follows_a_text_that_changes(num_seeds):
    def alpha(position: int) -> float:
        return 0.8 if (position // 500) % 2 else 0.02

    def speed(make) -> float:
        return mean(
            1 / Machine(FLAT, alpha, seed).write(make(), 2000) for seed in range(num_seeds)
        )

    fixed = max(speed(lambda k=k: FixedController(DraftShape(k))) for k in range(8))
    assert speed(lambda: AdaptiveController(SettledCosts(FLAT))) > 1.015 * fixed


class Growing(Machine):
    """Attention makes long drafts dearer than short ones with the context, and plain steps too."""

    @staticmethod
    def at(num_tokens: float):
        grown = num_tokens / 1000

        def cost(shape: DraftShape, num_requests: int) -> float:
            dearer = 1 + grown * (0.25 + 0.05 * shape.size) if shape != PLAIN else 1 + 0.3 * grown
            return dearer * FLAT(shape, num_requests)

        return cost

    def took(self, shape: DraftShape) -> float:
        self.cost = self.at(self.num_tokens)
        return super().took(shape)


def growing_best(num_tokens: float, alpha: float) -> float:
    return (1 + 0.3 * num_tokens / 1000) * best(
        lambda s, n: Growing.at(num_tokens)(s, n) / (1 + 0.3 * num_tokens / 1000), alpha
    )


@pytest.mark.parametrize("num_seeds", [3, 8])
@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.8])
@pytest.mark.exhaustive
def test_it_follows_costs_that_grow_with_the_context(alpha, num_seeds):
    shares = []
    for seed in range(num_seeds):
        machine = Growing(FLAT, lambda n: alpha, seed)
        seconds = machine.write(AdaptiveController(SettledOnce(FLAT)), 3000)
        shares.append(mean(growing_best(n, alpha) for n in range(0, 3000, 10)) / seconds)
    assert mean(shares) > 0.93


def test_a_shape_whose_first_times_were_wrong_is_drafted_again():
    """The best one, which looked a seventh dearer than it is; forever, if known costs were."""
    shapes, cost, best_one = CHAINS + TREES, MACHINES["BLAS"], TREES[1]
    shares = []
    for seed in range(6):
        known, machine = RoundCosts(cost), Machine(cost, lambda n: 0.5, seed)
        for shape in 2 * (PLAIN, *shapes):
            known.record(1, shape, cost(shape, 1) * (1.15 if shape == best_one else 1.0))
        for _ in range(6):
            machine.write(AdaptiveController(known, shapes), 100)
        shares.append(machine.shapes[-60:].count(best_one) / 60)
    assert mean(shares) > 0.5


class SettledOnce(RoundCosts):
    """RoundCosts that are known at first."""

    def __init__(self, cost: Curve):
        super().__init__(cost)
        for _ in range(8):
            for shape in (PLAIN, *CHAINS):
                self.record(1, shape, cost(shape, 1))


@pytest.mark.parametrize("alpha", thorough([0.55, 0.7, 0.8], 0.7))
def test_a_kernel_of_unknown_price_is_tried_early(alpha):
    """NVIDIA: up to 7 rows each costs a step, and 8 to 16 together 1.7, which nobody knew."""
    nvidia = device.machine_of({"architecture": "sm_89"}, "cuda")
    weights, shapes = TargetWeights(1, "4 bits", None), CHAINS + TREES

    def beside(shape: DraftShape) -> float:
        return 0.04 * shape.size + (0.02 if shape.tree is None else 0.08) * (shape != PLAIN)

    def cost(shape: DraftShape, num_requests: int) -> float:
        rows = shape.num_rows * num_requests
        return (rows if rows < 8 else 1.7 * math.ceil(rows / 16)) + beside(shape)

    def begin(can_draw: bool = True) -> AdaptiveController:
        known = RoundCosts(
            lambda s, n: weights.pass_cost(nvidia, s.num_rows * n) + beside(s),
            doubt=lambda s, n: weights.pass_doubt(nvidia, s.num_rows * n),
        )
        return AdaptiveController(known, shapes, can_draw=lambda: can_draw)

    def seconds(make, seed: int) -> float:
        return Machine(cost, lambda n: alpha, seed).write(make(), 512)

    fixed = min(mean(seconds(lambda s=s: FixedController(s), n) for n in range(3)) for s in shapes)
    assert fixed / mean(seconds(begin, seed) for seed in range(12)) > 0.85
    for seed in range(12):
        machine = Machine(cost, lambda n: alpha, seed)
        machine.write(begin(), 30)
        assert max(shape.num_rows for shape in machine.shapes) >= 8
        # Nor is a tree where the target can verify none.
        machine = Machine(cost, lambda n: alpha, seed)
        machine.write(begin(can_draw=False), 60)
        assert [shape for shape in machine.shapes if shape.tree is not None] == []


# --- shapes -----------------------------------------------------------------------------------


def most_used(cost, alpha, shapes=CHAINS, length=600, seed=3) -> DraftShape:
    machine = Machine(cost, lambda n: alpha, seed)
    machine.write(AdaptiveController(RoundCosts(GUESSES["five rows"]), shapes), length)
    late = machine.shapes[len(machine.shapes) // 2 :]
    return max(set(late), key=late.count)


def test_eight_rows_may_be_cheaper_than_six():
    assert most_used(MACHINES["BLAS"], 0.85) == SEVEN
    assert most_used(MACHINES["tiles of 8"], 0.7) == SEVEN
    assert most_used(MACHINES["knee"], 0.7) == THREE


def test_a_tree_is_taken_where_it_is_faster_and_not_elsewhere():
    shapes = CHAINS + TREES
    assert most_used(MACHINES["BLAS"], 0.5, shapes).tree is not None
    assert most_used(LINEAR, 0.5, shapes) == PLAIN
    trees_cost_more = lambda s, n: FLAT(s, n) * (2.0 if s.tree else 1.0)  # noqa: E731
    assert most_used(trees_cost_more, 0.5, shapes).tree is None


def test_trees_are_left_out_where_they_cannot_be_drawn():
    """That is found out once, and only where one would be drafted."""
    asked: list[int] = []
    for _ in range(2):
        machine = Machine(MACHINES["BLAS"], lambda n: 0.6, 1)
        controller = AdaptiveController(
            RoundCosts(FLAT), CHAINS + TREES, can_draw=lambda: asked.append(1) or False
        )
        machine.write(controller, 300)
        assert all(shape.tree is None for shape in machine.shapes)
    assert len(asked) == 2
    controller = AdaptiveController(RoundCosts(LINEAR), CHAINS + TREES, can_draw=lambda: 1 / 0)
    Machine(LINEAR, lambda n: 0.1, 1).write(controller, 300)


def test_a_shape_that_fails_is_left_out_for_good(capsys):
    costs, error = RoundCosts(FLAT), RuntimeError("[metal] Maximum threads per threadgroup\nmore")
    controller = AdaptiveController(costs)
    assert controller.disable_shape(THREE, error) and controller.disable_shape(THREE, error)
    assert capsys.readouterr().err == (
        "Note: rounds that draft 3 fail on this device and are left out ([metal] Maximum threads "
        "per threadgroup).\n"
    )
    machine = Machine(FLAT, lambda n: 0.9, 1)
    machine.write(AdaptiveController(costs), 300)
    assert THREE not in machine.shapes and SEVEN in machine.shapes
    assert not AdaptiveController(costs).disable_shape(SEVEN, error), "it has worked"
    for shape in CHAINS:
        costs.failed |= {shape}
    (event,) = AdaptiveController(costs).events
    assert event.reason == "no draft can be verified on this device"


# --- off and on -------------------------------------------------------------------------------


def test_hopeless_costs_turn_drafting_off_with_the_reason():
    controller = AdaptiveController(SettledCosts(LINEAR))
    assert controller.drafting_off and controller.never_pays
    assert [controller.next_plan(n).shape for n in range(5000)] == [PLAIN] * 5000
    (event,) = controller.events
    assert event.what == OFF and "would be slower even with 90% accepted" in event.reason


def test_drafting_off_probes_and_drafting_on_are_noted():
    controller = AdaptiveController(SettledCosts(FLAT))
    Machine(FLAT, lambda n: 0.9 if n > 600 else 0.0, 1).write(controller, 1500)
    whats = [event.what for event in controller.events]
    assert whats[0] == OFF and whats[-1] == ON
    assert whats.count(PROBE) == whats.count(OFF)
    positions = [event.num_tokens for event in controller.events]
    assert positions == sorted(positions) and positions[-1] > 600
    reason = controller.events[0].reason
    assert re.search(r"with \d+% of first drafts accepted, the best length", reason)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("cost", [FLAT, STEEP, LINEAR], ids=["flat", "steep", "linear"])
def test_known_costs_lose_little_even_on_short_texts(cost, alpha):
    for seed in range(20):
        machine = Machine(cost, lambda n: alpha, seed)
        machine.took = lambda shape, cost=cost: cost(shape, 1)
        assert machine.write(AdaptiveController(SettledCosts(cost)), 100) < 1.04


# --- batches ----------------------------------------------------------------------------------


def test_requests_of_a_batch_share_what_is_known():
    """Three requests that accept alike teach three times as much as one, in as many rounds."""
    single, shared = (AdaptiveController(SettledCosts(FLAT)) for _ in range(2))
    for kept in (3, 0, 1, 3):
        single.record(THREE, [kept], None)
        shared.record(THREE, [kept] * 3, None)
    assert shared._accepted.places[0] > 0.6 > single._accepted.places[0] > 0.5


def test_a_batch_that_shrinks_goes_on_from_what_more_have_cost():
    """Drafts pay for two and not for four; the round under way when one ends is of the others."""

    def cost(shape: DraftShape, num_requests: int) -> float:
        dear = 1.9 if num_requests > 2 and shape != PLAIN else 1.0
        return dear * FLAT(shape, num_requests)

    controller = AdaptiveController(SettledCosts(cost), CHAINS, 4)
    machine = Machine(cost, lambda n: 0.6, 1, num_requests=4)
    machine.write(controller, 60)
    assert controller.drafting_off and not controller.never_pays
    controller.resize(2)
    assert controller.drafting_off
    controller.record(PLAIN, (), None)
    assert not controller.drafting_off and controller.events[-1].what == ON
    assert "a round costs less now" in controller.events[-1].reason


def test_costs_of_one_size_tell_of_the_next():
    costs = RoundCosts(FLAT)
    for _ in range(4):
        costs.record(4, PLAIN, 8.0)  # twice what is thought, as everything
        costs.record(4, THREE, 2 * FLAT(THREE, 4))
    found = costs.estimates(CHAINS, 3)
    assert found[PLAIN].seconds == pytest.approx(6.0, rel=0.01)
    assert found[THREE].seconds == pytest.approx(2 * FLAT(THREE, 3), rel=0.01)
    assert found[SEVEN].off(-1) < 0.8 * found[SEVEN].seconds, "nobody has seen that"
    assert not found[SEVEN].is_known and found[THREE].is_known


# --- costs and acceptance ---------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.6, 1.6])
def test_a_machine_that_changes_its_pace_changes_no_comparison(factor):
    """What is timed in a slow moment is compared with what was timed in a fast one."""
    costs = RoundCosts(FLAT)
    for number in range(40):
        pace = 1.0 if number < 15 else factor
        shape = PLAIN if number < 5 else THREE
        costs.record(1, shape, pace * FLAT(shape, 1))
    found = costs.estimates(CHAINS, 1)
    assert found[THREE].seconds / found[PLAIN].seconds == pytest.approx(FLAT(THREE, 1), rel=0.05)


@pytest.mark.parametrize("factor", [0.6, 1.6])
def test_a_text_at_another_pace_keeps_what_is_known_of_drafts(factor):
    """Else every shape would be tried again."""
    costs = RoundCosts(FLAT)
    for shape in (PLAIN, THREE, SEVEN) * 5:
        costs.record(1, shape, 2 * FLAT(shape, 1))
    costs.begin()
    for _ in range(20):
        costs.record(1, THREE, 2 * factor * FLAT(THREE, 1))
    found = costs.estimates(CHAINS, 1)
    assert found[THREE].seconds == pytest.approx(2 * factor * FLAT(THREE, 1), rel=0.1)
    assert found[SEVEN].is_known
    compared = found[SEVEN].seconds / found[THREE].seconds
    assert compared == pytest.approx(FLAT(SEVEN, 1) / FLAT(THREE, 1), rel=0.1)


def test_one_time_that_something_came_between_says_little():
    costs = RoundCosts(FLAT)
    for pace in (1.0, 1.0, 30.0, 1.0, 1.0):
        costs.record(1, PLAIN, 1.0)
        costs.record(1, THREE, pace * FLAT(THREE, 1))
    found = costs.estimates(CHAINS, 1)
    assert found[THREE].seconds / found[PLAIN].seconds == pytest.approx(FLAT(THREE, 1), rel=0.1)


def test_a_first_time_far_above_what_others_say_is_taken_again():
    """It would stand for the shape in all texts, which was never tried again for it."""
    costs, two = RoundCosts(FLAT), DraftShape(2)
    for _ in range(4):
        costs.record(1, PLAIN, 1.0)
        costs.record(1, THREE, FLAT(THREE, 1))
    costs.record(1, two, 3 * FLAT(two, 1))
    costs.record(1, THREE, FLAT(THREE, 1))
    assert costs.estimates(CHAINS, 1)[two].off(-2) < 1.2 * FLAT(two, 1)
    assert costs.has_run(two), "so that it is not left out if it fails now"
    for _ in range(3):
        costs.record(1, two, FLAT(two, 1))
    found = costs.estimates(CHAINS, 1)[two]
    assert found.is_known and found.seconds == pytest.approx(FLAT(two, 1), rel=0.2)
    costs.begin()
    costs.record(1, THREE, 3 * FLAT(THREE, 1))
    found = costs.estimates(CHAINS, 1)
    compared = found[THREE].seconds / found[two].seconds
    assert compared == pytest.approx(FLAT(THREE, 1) / FLAT(two, 1), rel=0.2)
    surely = RoundCosts(FLAT)
    for _ in range(4):
        surely.record(1, THREE, FLAT(THREE, 1))
        surely.record(1, two, 3 * FLAT(two, 1))
    found = surely.estimates(CHAINS, 1)
    compared = found[two].seconds / found[THREE].seconds
    assert compared > 2 * FLAT(two, 1) / FLAT(THREE, 1), "four times are no accident"


def test_a_wrong_guess_is_no_sign_of_other_work():
    """Costs are as well known after a few times where they are four times what was thought."""
    errors = []
    for draft in (2.0, 0.5):
        costs = RoundCosts(curve(lambda k, draft=draft: draft))
        for shape in 3 * [PLAIN] + 4 * [ONE] + [PLAIN]:
            costs.record(1, shape, 1.0 if shape == PLAIN else 2.0)
        errors.append(costs.estimates([ONE], 1)[ONE].error)
    assert errors[1] < 1.1 * errors[0]


def test_plans_travel_between_ranks_as_numbers():
    """A list of one length, for it is added to the zeros of the other ranks."""
    copies = tuple(COPIES[i % len(COPIES)] for i in range(len(LEAST_MATCHES)))
    chains = CHAINS[: len(LEAST_MATCHES)]
    plans = [
        DraftPlan(PLAIN),
        DraftPlan(THREE),
        DraftPlan(THREE, copies),
        DraftPlan(PLAIN, chains, copies),
        DraftPlan(TREES[-1], (*TREES, *copies[len(TREES) :])),
    ]
    numbers = [to_numbers(plan) for plan in plans]
    assert len({len(each) for each in numbers}) == 1
    assert [from_numbers(each) for each in numbers] == plans


def test_acceptance_by_place():
    assert expected_tokens([0.8, 0.5], THREE) == pytest.approx(1 + 0.8 + 0.4 + 0.2)
    assert expected_tokens([], THREE) == 1.0
    seen = Acceptance(1 / 3, 3)
    for _ in range(300):
        seen.learn(THREE, [2, 0], ())
        seen.learn(THREE, [2], ())
    assert seen.places == pytest.approx([2 / 3, 1.0, 0.0], abs=0.15)


def test_a_tree_tells_of_the_likeliest_tokens_what_a_chain_does():
    """Second children that are kept count as tokens of which the first was wrong."""
    tree = next(shape for shape in TREES if str(shape) == "3x3:7")
    of_trees, of_chains = Acceptance(1 / 3, 7), Acceptance(1 / 3, 7)
    for ranks, kept in (([0, 0, 0], 3), ([0, 0, -1], 2), ([0, -1], 1), ([0, 0, 1], 2)):
        of_trees.learn(tree, [], ranks)
        of_chains.learn(THREE, [kept], ())
        assert of_trees.places == of_chains.places
    of_trees.learn(tree, [2], [1, 0])
    of_chains.learn(THREE, [0], ())
    assert of_trees.places[0] == of_chains.places[0] and of_trees.places[1] > of_chains.places[1]


# Of the demo head on six prompts, four later, and all: by place of chains of 7, and the tokens
# that trees of 7, 15 and 31 nodes emitted.
EMITTED = [
    ([0.58, 0.48, 0.60, 0.67, 0.25], (2.55, 3.00, 3.44)),
    ([0.49, 0.56, 0.65, 0.69, 0.56], (2.32, 2.84, 3.10)),
    ([0.42, 0.49, 0.54, 0.71, 0.50], (2.09, 2.46, 2.62)),
    ([0.48, 0.40, 0.50, 0.69, 0.45], (2.12, 2.44, 2.60)),
]


@pytest.mark.parametrize(("places", "emitted"), EMITTED)
def test_trees_are_expected_to_emit_what_they_did(places, emitted):
    found = [expected_tokens(places, tree) for tree in TREES[1:]]
    assert found == pytest.approx(emitted, rel=0.13)


@pytest.mark.parametrize("further", [0.1, 0.9])
def test_trees_are_expected_to_emit_what_they_emitted_lately(further):
    """However often a further child is right where the first one is not."""
    dice, tree, texts = random.Random(0), TREES[1], Acceptance(1 / 3, 7)
    emitted = []
    for _ in range(600):
        ranks = draw_ranks(dice, tree.size, 0.6, 0.6 + 0.4 * further)
        texts.learn(tree, [], ranks, memory=0.995)
        emitted.append(1 + sum(rank >= 0 for rank in ranks))
    right, by_place = mean(emitted[-200:]), expected_tokens(texts.places, tree)
    assert abs(by_place / right - 1) > 0.07
    assert abs(texts.expected_tokens(tree) / right - 1) < 0.4 * abs(by_place / right - 1)
    assert Acceptance(texts, 7).expected_tokens(tree) == texts.expected_tokens(tree)
    assert texts.expected_tokens(THREE) == expected_tokens(texts.places, THREE)


def test_a_text_expects_what_the_texts_before_accepted():
    costs = RoundCosts(FLAT)
    assert AdaptiveController(costs)._accepted.places[0] == pytest.approx(1 / 3)
    for i in range(300):
        AdaptiveController(costs).record(THREE, [i % 2 + 1 if i % 10 else 0], None)
    expected = pytest.approx([0.9, 5 / 9, 0.05], abs=0.05)
    assert AdaptiveController(costs)._accepted.places[:3] == expected


# --- memory -----------------------------------------------------------------------------------


def test_what_is_known_is_of_a_pair_and_gone_with_it():
    model = tiny_llama()
    drafter, other = tiny_head(model), tiny_head(model)
    known = costs_of(model, drafter, "greedy")
    assert known is costs_of(model, drafter.begin(), "greedy")
    assert known is costs_of(model, drafter.with_copies(), "greedy"), "copies have their own keys"
    others = [
        costs_of(model, other, "greedy"),
        costs_of(model, drafter, "coupled"),
        costs_of(model, drafter.with_draft_cache("lagging"), "greedy"),
        costs_of(tiny_llama(), drafter, "greedy"),
    ]
    assert len({id(costs) for costs in [known, *others]}) == 5
    del model, drafter, other, known, others
    gc.collect()
    assert round_costs._known._found == {}


def test_texts_of_a_pair_go_on_from_each_other(monkeypatch):
    record, rounds = RoundCosts.record, []
    monkeypatch.setattr(RoundCosts, "record", lambda c, *a: rounds.append(c) or record(c, *a))
    model = tiny_llama()
    drafter = tiny_head(model)
    for num in (1, 2):
        assert speculative(model, drafter, PROMPT, 60, num_draft_tokens="auto")[0] == plain(
            model, PROMPT, 60
        )
        (costs,) = round_costs._known._found.values()
        assert costs.has_run(PLAIN) and rounds.count(costs) > 15 * num


# --- the order of the loop --------------------------------------------------------------------


def test_chosen_before_the_read_and_recorded_after_the_launch(monkeypatch):
    """What the host does between the read and the next launch is no business of ``auto``."""
    order: list[str] = []

    def noting(kind, name: str, what: str) -> None:
        method = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *a, **k: order.append(what) or method(*a, **k))

    noting(AdaptiveController, "next_plan", "choose")
    noting(AdaptiveController, "record", "record")
    noting(Target, "__call__", "launch")
    noting(loop.SingleRunner, "finish", "read")
    model = tiny_llama()
    free = SettledCosts(curve(lambda k: 1.0))
    monkeypatch.setattr(generate_step, "costs_of", lambda *_: free)
    speculative(model, tiny_head(model), PROMPT, 30, num_draft_tokens="auto")
    whole = " ".join(order[order.index("choose") :])
    assert whole.startswith("choose read launch record choose read launch record")
    assert "read choose" not in whole and "read record launch" not in whole


def test_a_text_leans_on_others_as_much_as_texts_are_alike():
    """What ten rounds tell of a text's first place, where texts differ by .104, as measured."""
    dice, others = random.Random(0), Acceptance(0.532, 1)
    total = 0.532 * 0.468 / 0.104**2 - 1  # of a beta distribution with that mean and spread
    errors, ours = dict.fromkeys((4, 8, 16, 32, 64), 0.0), 0.0
    for _ in range(4000):
        chance, text = dice.betavariate(0.532 * total, 0.468 * total), Acceptance(others, 1)
        kept = [dice.random() < chance for _ in range(10)]
        for is_kept in kept:
            text.observe(1, is_kept)
        for weight in errors:
            found = (sum(kept) + weight * 0.532) / (10 + weight)
            errors[weight] += (found - chance) ** 2
        ours += (text.places[0] - chance) ** 2
    assert ours <= 1.001 * min(errors.values())


def test_only_what_is_comparable_is_timed(monkeypatch):
    now = iter([1.0, 3.0, 4.0, 5.0, 6.0, 6.5, 6.6, 7.6, 7.7, 8.7, 9.7])
    monkeypatch.setattr(loop.time, "perf_counter", lambda: next(now))
    clock, draft = loop.RoundClock(), DraftShape(2)
    assert clock.seconds(PLAIN, False) is None  # at 1: nothing came before
    assert clock.seconds(draft, False) is None  # at 3: it waited for a plain step
    assert clock.seconds(draft, False) == 1.0  # at 4
    assert clock.seconds(PLAIN, False) is None  # at 5
    assert clock.seconds(PLAIN, True) == 1.0  # at 6
    with clock.pausing():  # from 6.5 to 6.6
        pass
    assert clock.seconds(PLAIN, True) == pytest.approx(1.6)  # at 7.6
    with clock.pausing():  # from 7.7 to 8.7: the caller kept the device waiting
        pass
    assert clock.seconds(PLAIN, True) is None  # at 9.7


def test_a_choice_that_takes_long_is_no_part_of_a_round(monkeypatch):
    """As the first one of a tree, which tries whether the target can verify any."""
    now, times, choices = [0.0], [], []
    choose, record = AdaptiveController.next_plan, AdaptiveController.record
    finish = loop.SingleRunner.finish

    def read(self, done):
        now[0] += 0.01
        finish(self, done)

    def choose_slowly(self, num_tokens, matches=()):
        choices.append(num_tokens)
        now[0] += 100.0 * (len(choices) == 6)
        return choose(self, num_tokens)

    def note(self, shape, kept, seconds, ranks=(), copies=()):
        times.append(seconds)
        record(self, shape, kept, seconds, ranks, copies)

    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(loop.SingleRunner, "finish", read)
    monkeypatch.setattr(AdaptiveController, "next_plan", choose_slowly)
    monkeypatch.setattr(AdaptiveController, "record", note)
    monkeypatch.setattr(generate_step, "costs_of", lambda *_: SettledCosts(FLAT))
    model = tiny_llama()
    speculative(model, tiny_head(model), PROMPT, 40, num_draft_tokens="auto")
    assert now[0] > 100 and len(choices) > 10
    timed = [seconds for seconds in times if seconds is not None]
    assert len(timed) > 5 and max(timed) == pytest.approx(0.01)


def test_plain_steps_are_timed_again_before_drafts_are_given_up_in_doubt():
    """They were quicker in earlier texts, so drafts look slower than plain decoding."""
    costs = RoundCosts(curve(lambda k: 1.2 + 0.05 * k))
    chain, taken = CHAINS[0], []
    for shape, seconds in 40 * [(PLAIN, 0.8)] + 60 * [(chain, 1.25)]:
        costs.record(1, shape, seconds)
    controller = AdaptiveController(costs, CHAINS[:1])
    for num_tokens in range(40):
        shape = controller.next_plan(num_tokens).shape
        taken.append(shape)
        kept = () if shape == PLAIN else [num_tokens % 2]
        controller.record(shape, kept, 1.25 if kept else 1.0)
    assert PLAIN in taken and taken[-1] == chain
    assert all(event.what != OFF for event in controller.events)


def test_what_is_tried_is_no_reason_to_give_drafts_up():
    """A first text begins with drafts that all fail, large trees that are tried among them."""
    cost = MACHINES["AVX-512"]
    for seed in range(12):
        machine = Machine(cost, lambda n: 0.6 if n > 9 else 0.0, seed)
        controller = AdaptiveController(RoundCosts(cost), (*CHAINS, *TREES))
        assert NOISE / machine.write(controller, 128) > 1.1, "against plain decoding"
        assert not controller.events


def test_tries_that_were_believed_cheap_are_charged_with_what_they_cost():
    """Nothing is accepted, and drafts cost 1.6 times what was thought, on all machines."""
    speeds = []
    for cost in MACHINES.values():

        def guess(shape: DraftShape, num_requests: int, cost=cost) -> float:
            return cost(shape, num_requests) / (1.0 if shape == PLAIN else 1.6)

        times = [first_text(cost, guess, 0.0, 100, seed) for seed in range(8)]
        speeds.append(NOISE / mean(times))
    assert min(speeds) > 0.942, "against plain decoding"


# --- kernel options ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seconds, expected",
    [
        # of (splits attention, uses overlay)
        ({}, KernelOptions()),
        ({(1, 0): 0.9}, KernelOptions(splits_attention=True)),
        ({(0, 1): 0.9}, KernelOptions(uses_overlay=True)),
        ({(1, 0): 0.9, (1, 1): 0.8}, KernelOptions(True, True)),
        ({(1, 0): 0.9, (1, 1): 0.89}, KernelOptions(True, False)),  # hardly faster
    ],
)
def test_the_faster_way_is_taken(seconds, expected):
    used = [KernelOptions()]
    trial = OptionTrial(["splits_attention", "uses_overlay"], used.append)
    num_rounds = 0
    while not trial.has_ended:
        now = used[-1]
        trial.record(THREE, seconds.get((int(now.splits_attention), int(now.uses_overlay)), 1.0))
        trial.record(THREE, None)
        num_rounds += 1
    assert trial.best == used[-1] == expected
    assert num_rounds <= 4 * (COUNTED + UNCOUNTED)
    trial.record(THREE, 1.0)


def test_ways_are_compared_in_rounds_of_one_shape():
    used: list[KernelOptions] = []
    trial = OptionTrial(["splits_attention"], used.append)
    for _ in range(20):
        for shape in (ONE, THREE):
            trial.record(shape, 1.0)
    assert used == [] and not trial.has_ended
