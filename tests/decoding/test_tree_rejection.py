"""Trees with rejection sampling: exact distributions, naive twins, and chi-square in the loop."""

import itertools
import math

import mlx.core as mx
import numpy as np
import pytest
from grids import thorough
from markov import DRAFT_IDS, DRAFTER, QUANTILE_24, START, TARGET, VOCAB, pair_chi_square, run

from mlx_eagle.decoding.accept import Coupled, drawn, normalized
from mlx_eagle.decoding.rejection import Reject, try_in_turn
from mlx_eagle.decoding.sampling import Sampling
from mlx_eagle.drafters.base import Draft
from mlx_eagle.drafters.tree import parse_tree
from mlx_eagle.target_model.tree_rows import families

TREES = ["2x2:3", "2/2+1", "3x2:7", "3/0+2"]
TEMP = 0.9


@pytest.mark.exhaustive  # the quick test of trees is the one in the loop
@pytest.mark.parametrize("acceptance", ["reject", "coupled"])
@pytest.mark.parametrize("temp", [0.7, 1.0])
@pytest.mark.parametrize("tree", TREES)
def test_pairs_have_the_targets_distribution(tree, temp, acceptance):
    statistic, acceptance_rate = pair_chi_square(acceptance, temp=temp, tree=tree)
    assert statistic < QUANTILE_24
    assert acceptance_rate > 0.05  # the drafted branch was taken


@pytest.mark.parametrize("tree", thorough(TREES, "2x2:3"))
def test_coupled_text_depends_on_the_seed_alone(tree):
    for seed in range(4):
        alone, _ = run(Sampling(1.0, seed=seed), None, 15, k=0)
        assert run(Sampling(1.0, seed=seed), "coupled", 15, tree=tree)[0] == alone


@pytest.mark.exhaustive
def test_drawn_children_are_kept_more_often_than_the_likeliest():
    """By the same texts: coupled draws with their noise, match takes the most probable."""
    tau = {}
    for rule in ("match", "coupled", "reject"):
        counts = [run(Sampling(1.0, seed=s), rule, 40, tree="2x2:3")[1] for s in range(40)]
        tau[rule] = sum(c.num_emitted for c in counts) / sum(c.num_rounds for c in counts)
    assert tau["coupled"] > tau["match"] + 0.02
    assert tau["reject"] > tau["match"] + 0.02


def naive_trial(p, q, children, coins):
    """One row in plain Python: which child is kept, and what is drawn from; p, q over all."""
    p, q = list(p), list(q)
    for i, (x, coin) in enumerate(zip(children, coins, strict=False)):
        if q[x] == 0:
            continue
        if coin < min(1.0, p[x] / q[x]):
            return i, None
        p = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
        p = [a / sum(p) for a in p]
        q[x] = 0.0
        q = [b / sum(q) if sum(q) else 0.0 for b in q]
    return -1, p


def over_all(q):
    """q of the draft vocabulary as one over the target's."""
    return [q[DRAFT_IDS.index(x)] if x in DRAFT_IDS else 0.0 for x in range(VOCAB)]


def softmax(key: int, *shape: int) -> mx.array:
    return mx.softmax(1.2 * mx.random.normal(shape, key=mx.random.key(key)), axis=-1)


@pytest.mark.parametrize("ids", [DRAFT_IDS, None], ids=["some tokens", "all tokens"])
def test_trying_in_turn_equals_its_naive_twin(ids):
    size, num_rows = VOCAB if ids is None else len(ids), 400
    p, q = softmax(1, num_rows, VOCAB), softmax(2, num_rows, size)
    q = mx.where(q < 0.1, 0.0, q)  # as after a filter: some children could not be drawn
    q = q / q.sum(axis=1, keepdims=True)
    children = mx.argsort(mx.random.normal((num_rows, size), key=mx.random.key(3)), axis=1)
    children = children[:, :3].astype(mx.int32)
    num_children = mx.arange(num_rows)[:, None] % 4
    children = mx.where(mx.arange(3) < num_children, children, -1)
    coins = mx.random.uniform(shape=(num_rows, 3), key=mx.random.key(4))
    kept, left = try_in_turn(p, q, None if ids is None else mx.array(ids), children, coins)
    found = set()
    for r, row in enumerate(children.tolist()):
        tried = [x if ids is None else ids[x] for x in row if x >= 0]
        dense = q[r].tolist() if ids is None else over_all(q[r].tolist())
        expected, rest = naive_trial(p[r].tolist(), dense, tried, coins[r].tolist())
        assert kept[r].item() == expected
        if rest is not None:
            assert (left[r] / left[r].sum()).tolist() == pytest.approx(rest, abs=1e-5)
        found.add((len(tried), expected))
    assert found == {(n, i) for n in range(4) for i in range(-1, n)}


@pytest.mark.parametrize("num", [1, 2, 3])
def test_the_outcome_has_the_targets_distribution(num):
    """Every order in which children can be drawn, with all coins of a grid: no chance in it."""
    steps = {1: 400, 2: 60, 3: 24}[num]
    grid = (np.arange(steps) + 0.5) / steps
    coins = np.stack(np.meshgrid(*[grid] * num, indexing="ij"), axis=-1).reshape(-1, num)
    for key in range(3):
        p, q = softmax(10 + key, VOCAB), softmax(20 + key, len(DRAFT_IDS))
        total = np.zeros(VOCAB)
        for order in itertools.permutations(range(len(DRAFT_IDS)), num):
            chance, left_over = 1.0, 1.0
            for x in order:
                chance *= q[x].item() / left_over
                left_over -= q[x].item()
            rows = len(coins)
            children = mx.broadcast_to(mx.array(order, mx.int32), (rows, num))
            kept, left = try_in_turn(
                mx.broadcast_to(p, (rows, VOCAB)),
                mx.broadcast_to(q, (rows, len(DRAFT_IDS))),
                mx.array(DRAFT_IDS),
                children,
                mx.array(coins.astype(np.float32)),
            )
            kept, left = np.array(kept), np.array(left)
            outcome = left / left.sum(axis=1, keepdims=True)
            for i, x in enumerate(order):
                outcome[kept == i] = np.eye(VOCAB)[DRAFT_IDS[x]]
            total += chance * outcome.mean(axis=0)
        assert total == pytest.approx(p.tolist(), abs=1.5 / steps)


def naive_walk(p, q, tree, coins, noise):
    """The run that a tree emits: ``tree`` has the children of each path, as they were drawn."""
    path = ()
    while True:
        depth, children = len(path), tree.get(path, [])
        last = path[-1] if path else START
        i, rest = naive_trial(p[last], q[last], children, coins[depth])
        if i < 0:
            scores = [
                math.log(a) + g if a > 0 else -math.inf
                for a, g in zip(rest, noise[depth], strict=True)
            ]
            return [*path, scores.index(max(scores))]
        path = (*path, children[i])


@pytest.mark.parametrize("text", ["2x3:5", "3/2+1+2/1+1", "root2:3"])
def test_a_round_equals_its_naive_twin(text):
    shape, lengths = parse_tree(text), set()
    p = TARGET.probabilities(TEMP)
    q = [over_all(row) for row in DRAFTER.model.probabilities(TEMP)]
    for seed in range(25):
        sampling, drafter = Sampling(TEMP, seed=seed), DRAFTER.begin()
        choice = Reject(sampling).open(7, 3)
        drafter.extend(mx.array([START]), None)
        draft = drafter.propose_tree(shape, choice.pick_children)
        tokens, parents = draft.tokens.tolist(), draft.parents.tolist()
        paths, tree = [()], {}
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*paths[parent], token))
            tree.setdefault(paths[parent], []).append(token)
        logits = TARGET(mx.array([START, *tokens]))
        made = choice.verify(draft, draft.tree_mask(), normalized(logits))
        coins = [
            mx.random.uniform(shape=(shape.width,), key=sampling.key(7 + d, 2)).tolist()
            for d in range(shape.depth + 1)
        ]
        noise = [sampling.noise(7 + d, VOCAB).tolist() for d in range(shape.depth + 1)]
        num_kept = made.num_kept.item()
        assert made.following.tolist()[: num_kept + 1] == naive_walk(p, q, tree, coins, noise)
        lengths.add(num_kept)
    assert {0, 1, 2} <= lengths


def test_what_is_drawn_does_not_decide_which_nodes_there_are():
    """Else a sibling would be tried because of what it is, and more often than by its q."""
    logits = mx.random.normal((1, 6), key=mx.random.key(1))
    rows, picked, likely = mx.concatenate([logits, logits]), set(), set()
    for seed in range(12):
        index, weight = Reject(Sampling(seed=seed)).open(0, 1).pick_children(rows, None, 3)
        picked |= {tuple(row) for row in index.tolist()}
        assert all(len(set(row)) == 3 for row in index.tolist())
        likely |= {tuple(row) for row in weight.tolist()}
        if index[0].tolist() != index[1].tolist():
            likely.add("each its own")
    best = sorted(normalized(logits)[0].tolist(), reverse=True)[:3]
    assert len(picked) > 6 and "each its own" in likely
    assert [row for row in likely if row != "each its own"] == [pytest.approx(tuple(best))]


def test_drawing_is_without_replacement():
    """The first two children have the probabilities of two draws; the filtered come last."""
    q = mx.array([[0.5, 0.3, 0.2]])
    counts, num = {}, 4000
    noise = mx.random.gumbel((num, 3), key=mx.random.key(5))
    log_q = mx.broadcast_to(mx.log(q), (num, 3))
    for pair in drawn(log_q, log_q, noise, 2)[0].tolist():
        counts[tuple(pair)] = counts.get(tuple(pair), 0) + 1
    q = q[0].tolist()
    expected = {
        (a, b): num * q[a] * q[b] / (1 - q[a]) for a in range(3) for b in range(3) if a != b
    }
    assert counts.keys() == expected.keys()
    assert sum((counts[k] - e) ** 2 / e for k, e in expected.items()) < 20.5  # 5 degrees, 0.999
    filtered = mx.array([[-math.inf, 0.0, -math.inf]])
    index, likely = drawn(filtered, mx.log(mx.array([q])), noise[:1], 3)
    assert index.tolist() == [[1, 0, 2]]
    assert likely[0, 0].item() == 0 and likely[0, 1].item() < -1000


def test_families_against_plain_python():
    parents = [0, 0, 1, 2, 1, 0, 4, 1]
    ranks, children = families(mx.array(parents), 3)
    assert ranks.tolist() == [parents[:i].count(parent) for i, parent in enumerate(parents)]
    for row, found in enumerate(children.tolist()):
        expected = [i + 1 for i, parent in enumerate(parents) if parent == row]
        assert found == expected + [0] * (3 - len(expected))


@pytest.mark.parametrize("rule", [Reject, Coupled])
def test_a_tree_that_no_rule_was_asked_for_is_verified_too(rule):
    """As of scripted drafters: kept where it is what the target draws."""
    sampling = Sampling(TEMP, seed=3)
    logits = mx.random.normal((4, VOCAB), key=mx.random.key(8))
    wanted = [
        mx.argmax(row / TEMP + sampling.noise(7 + depth, VOCAB)).item()
        for row, depth in zip(logits, (0, 1, 1, 2), strict=True)
    ]
    tokens = [wanted[0], (wanted[0] + 1) % VOCAB, wanted[1]]
    draft = Draft(mx.array(tokens, mx.int32), mx.array([0, 0, 1], mx.int32), 2)
    made = rule(sampling).open(7, 3).verify(draft, draft.tree_mask(), normalized(logits))
    assert made.num_kept.item() == 2
    assert made.following.tolist()[:3] == [wanted[0], wanted[1], wanted[3]]
