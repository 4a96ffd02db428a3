"""Output distributions of the acceptance rules: chi-square against exact ones, naive twins."""

import math

import mlx.core as mx
import pytest
from grids import thorough
from markov import DRAFT_IDS, DRAFTER, QUANTILE_24, TARGET, VOCAB, pair_chi_square, run
from mlx_lm.sample_utils import make_sampler

from mlx_eagle.decoding.accept import Coupled, Match
from mlx_eagle.decoding.rejection import Reject
from mlx_eagle.decoding.rules import make_rule
from mlx_eagle.decoding.sampling import Sampling
from mlx_eagle.drafters.base import Draft

RULES = ["match", "coupled", "reject"]


SHORT = {"num_runs": 300, "temp": 0.7}
LONG = [{"num_runs": 1200, "temp": temp} for temp in (0.7, 1.0)]


@pytest.mark.parametrize("options", thorough([SHORT, *LONG], SHORT))
@pytest.mark.parametrize("acceptance", RULES)
def test_pairs_have_the_targets_distribution(acceptance, options):
    statistic, acceptance_rate = pair_chi_square(acceptance, **options)
    assert statistic < QUANTILE_24
    assert acceptance_rate > 0.05  # the drafted branch was taken


class KeepsEverything(Reject):
    """A broken rule: whatever was drafted stays."""

    def open(self, position, size):
        choice = super().open(position, size)
        verify = choice.verify

        def keep_all(draft, tree_mask, logits):
            verification = verify(draft, tree_mask, logits)
            following = mx.concatenate([draft.tokens, verification.following[-1:]])
            return type(verification)(following, mx.array(len(draft)), logits)

        choice.verify = keep_all
        return choice


@pytest.mark.exhaustive
def test_the_chi_square_catches_a_broken_rule(monkeypatch):
    monkeypatch.setattr(
        "mlx_eagle.decoding.setup.make_rule", lambda acceptance, sampler: KeepsEverything(sampler)
    )
    statistic, _ = pair_chi_square("reject", num_runs=300)
    assert statistic > QUANTILE_24


@pytest.mark.parametrize("k", thorough([1, 2, 3, 5], 1, 5))
def test_coupled_text_depends_on_the_seed_alone(k):
    texts = set()
    for seed in range(12):
        drafted, _stats = run(Sampling(1.0, seed=seed), "coupled", 25, k)
        alone, _ = run(Sampling(1.0, seed=seed), None, 25, k=0)
        assert drafted == alone
        texts.add(tuple(drafted))
    assert len(texts) == 12


@pytest.mark.exhaustive
def test_acceptance_near_the_best_possible():
    """coupled and reject come near sum min(p, q); independent draws (match) stay below."""
    p = TARGET.probabilities()
    q = [[0.0] * VOCAB for _ in range(VOCAB)]
    for a, row in enumerate(DRAFTER.model.probabilities()):
        for i, x in zip(DRAFT_IDS, row, strict=True):
            q[a][i] = x
    rates = {}
    for acceptance in ("coupled", "reject"):
        kept = drafted = 0
        for seed in range(150):
            _tokens, stats = run(Sampling(1.0, seed=seed), acceptance, 16, k=1)
            kept += stats.num_accepted
            drafted += stats.num_drafted
        rates[acceptance] = kept / drafted
    # The stationary mix of roots is that of the chain itself, up to the cut of rounds.
    share = [1 / VOCAB] * VOCAB
    for _ in range(50):
        share = [sum(share[a] * p[a][b] for a in range(VOCAB)) for b in range(VOCAB)]
    best = sum(s * sum(map(min, p[a], q[a])) for a, s in enumerate(share))
    assert rates["reject"] == pytest.approx(best, abs=0.06)
    assert best - 0.12 < rates["coupled"] < best + 0.06


def naive_reject(p, q, drafted, coins, residual_noise, bonus):
    """Leviathan et al. 2023, algorithm 1, in plain Python; q rows over the whole vocabulary."""
    out = []
    for i, x in enumerate(drafted):
        if coins[i] < min(1.0, p[i][x] / q[i][x]):
            out.append(x)
            continue
        rest = [max(0.0, a - b) for a, b in zip(p[i], q[i], strict=True)]
        scores = [
            math.log(r) + g if r > 0 else -math.inf
            for r, g in zip(rest, residual_noise[i], strict=True)
        ]
        return [*out, scores.index(max(scores))]
    return [*out, bonus]


def test_reject_equals_its_naive_twin():
    ids, k = mx.array(DRAFT_IDS), 3
    lengths = set()
    for seed in range(60):
        sampling = Sampling(0.9, seed=seed)
        choice = Reject(sampling).open(7, k)
        draft_logits = mx.random.normal((k, len(DRAFT_IDS)), key=mx.random.key(seed))
        target_logits = mx.random.normal((k + 1, VOCAB), key=mx.random.key(1000 + seed))
        picked = [choice.pick(draft_logits[i : i + 1], ids) for i in range(k)]
        tokens = mx.concatenate([ids[index] for index in picked]).astype(mx.int32)
        verification = choice.verify(Draft(tokens), None, target_logits)
        p = mx.softmax(target_logits / 0.9, axis=-1).tolist()
        q = [[0.0] * VOCAB for _ in range(k)]
        for i, row in enumerate(mx.softmax(draft_logits / 0.9, axis=-1).tolist()):
            for token, x in zip(DRAFT_IDS, row, strict=True):
                q[i][token] = x
        keys = [sampling.key(7 + i, 2) for i in range(k)]
        coins = [mx.random.uniform(shape=(1,), key=key).item() for key in keys]
        noise = [sampling.noise(7 + i, VOCAB, 0).tolist() for i in range(k)]
        bonus = mx.argmax(mx.log(mx.array(p[k])) + sampling.noise(7 + k, VOCAB, 0)).item()
        expected = naive_reject(p, q, tokens.tolist(), coins, noise, bonus)
        num_kept = verification.num_kept.item()
        assert verification.following.tolist()[: num_kept + 1] == expected
        lengths.add(num_kept)
    assert lengths == {0, 1, 2, 3}


def test_match_and_coupled_equal_their_naive_twins():
    for seed in range(30):
        logits = mx.random.normal((4, VOCAB), key=mx.random.key(seed))
        drafted = mx.random.randint(0, VOCAB, (3,), key=mx.random.key(99 + seed)).astype(mx.int32)
        sampling = Sampling(0.8, seed=seed)
        rows = {
            "match": logits.tolist(),
            "coupled": [
                [
                    x / 0.8 + g
                    for x, g in zip(row, sampling.noise(4 + r, VOCAB).tolist(), strict=True)
                ]
                for r, row in enumerate(logits.tolist())
            ],
        }
        for name, rule in (("match", Match()), ("coupled", Coupled(sampling))):
            choice = rule.open(4, 3)
            verification = choice.verify(Draft(drafted), None, logits)
            wanted = [row.index(max(row)) for row in rows[name]]
            kept = 0
            while kept < 3 and drafted.tolist()[kept] == wanted[kept]:
                kept += 1
            assert verification.following.tolist() == wanted
            assert verification.num_kept.item() == kept


def test_sampling_filters_as_mlx_lm_does():
    """Same support as mlx-lm's sampler for each filter: every token it can draw, no other."""
    logits = mx.random.normal((1, 12), key=mx.random.key(3)) * 2
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    for options in ({"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 3}, {"top_p": 0.9, "top_k": 4}):
        log_p = Sampling(1.0, seed=0, **options).log_probabilities(logprobs)[0]
        ours = {i for i, x in enumerate(log_p.tolist()) if x > -math.inf}
        theirs = make_sampler(1.0, **options)
        mx.random.seed(0)
        drawn = {theirs(logprobs).item() for _ in range(400)}
        assert drawn == ours
        assert mx.exp(log_p).sum().item() == pytest.approx(1.0, abs=1e-5)


def test_rules_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"needs mlx_eagle.Sampling"):
        make_rule("coupled", make_sampler(1.0))
    with pytest.raises(ValueError, match="greedy decoding"):
        make_rule("reject", None)
    with pytest.raises(ValueError, match="give one of match, coupled, reject"):
        make_rule("typical", None)
    with pytest.raises(ValueError, match="temperature is 0"):
        Sampling(0)
