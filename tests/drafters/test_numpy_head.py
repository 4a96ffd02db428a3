"""The NumPy reference against arithmetic by hand and against what other libraries computed."""

import numpy as np
import pytest
from golden import frozen
from golden.frozen import relative

from mlx_eagle.reference import eagle3_draft, eagle3_extend, eagle_draft_forward

TOLERANCE = 1e-5


@pytest.fixture(params=frozen.CHANGES)
def golden(request) -> frozen.Frozen:
    return frozen.load(request.param)


@pytest.fixture
def head() -> frozen.Frozen:
    return frozen.load("speculators-default")


def extend(head: frozen.Frozen, size: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    return eagle3_extend(
        head.weights, head.config, head.tokens[:size], head.features[:size], head.embed
    )


def draft(head: frozen.Frozen, size: int, num_draft_tokens: int, **arguments):
    tokens, features = head.tokens[:size], head.features[:size]
    return eagle3_draft(
        head.weights, head.config, tokens, features, head.embed, num_draft_tokens, **arguments
    )


def test_extend_pass_equals_other_libraries(golden):
    _, logits = extend(golden)
    assert relative(logits, golden.logits[0]) < TOLERANCE


def test_chained_draft_steps_equal_other_libraries(golden):
    for slot in range(len(golden.tokens)):
        steps = golden.num_comparable(slot)
        if steps > 0:
            _, logits = draft(golden, slot + 1, steps, forced=golden.chain(slot))
            assert relative(logits, golden.logits[:steps, slot]) < TOLERANCE


def test_later_slots_change_nothing_before_them(head):
    states, logits = extend(head)
    for size in (1, 4, 7):
        some_states, some_logits = extend(head, size)
        np.testing.assert_allclose(some_states, states[:size], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(some_logits, logits[:size], rtol=1e-12, atol=1e-12)


def test_the_first_draft_token_is_the_extend_pass_own_choice(head):
    _, logits = extend(head)
    drafted, draft_logits = draft(head, len(head.tokens), 1, d2t=head.d2t)
    np.testing.assert_allclose(draft_logits, logits[-1:], rtol=1e-12, atol=1e-12)
    index = int(logits[-1].argmax())
    assert drafted == [index + int(head.d2t[index])]


def test_greedy_draft_feeds_target_ids_and_its_own_states(head):
    drafted, logits = draft(head, 6, 5, d2t=head.d2t)
    assert drafted == [int(row.argmax() + head.d2t[row.argmax()]) for row in logits]
    _, forced = draft(head, 6, 5, forced=drafted)
    np.testing.assert_allclose(forced, logits, rtol=1e-12, atol=1e-12)
    _, other = draft(head, 6, 2, forced=[(drafted[0] + 1) % 128])
    assert relative(other[1], logits[1]) > 1e-2


def without(head: frozen.Frozen, name: str) -> dict[str, np.ndarray]:
    return {key: value for key, value in head.weights.items() if key != name}


def test_what_does_not_fit_is_named(head):
    c, tokens, features, embed = head.config, head.tokens, head.features, head.embed
    with pytest.raises(ValueError, match=r"lack layers.0.hidden_norm.weight"):
        eagle3_extend(without(head, "layers.0.hidden_norm.weight"), c, tokens, features, embed)
    with pytest.raises(ValueError, match=r"norm.weight has shape \(63,\), but \(64\)"):
        short = {**head.weights, "norm.weight": np.ones(63)}
        eagle3_extend(short, c, tokens, features, embed)
    with pytest.raises(ValueError, match=r"features has shape \(9, 192\), but \(10, 192\)"):
        eagle3_extend(head.weights, c, tokens, features[1:], embed)
    with pytest.raises(ValueError, match="embed has shape"):
        eagle3_extend(head.weights, c, tokens, features, embed[:, 1:])
    with pytest.raises(ValueError, match="go up to 128, but embed has 128 rows"):
        eagle3_extend(head.weights, c, [*tokens[1:], 128], features, embed)
    with pytest.raises(ValueError, match="tokens is empty"):
        eagle3_extend(head.weights, c, [], features[:0], embed)
    with pytest.raises(ValueError, match="num_draft_tokens is 0"):
        draft(head, 3, 0)
    with pytest.raises(ValueError, match="1 tokens are forced, but 3 draft tokens need 2"):
        draft(head, 3, 3, forced=[1])


# Two dimensions, three tokens. The fusion adds state and embedding, the draft head swaps the
# two dimensions and takes 1 from the second, and the rows of lm_head point along x, y and x + y.
BY_HAND = {
    "embed_matrix": [[1.0, 0.0], [0.0, 2.0], [-3.0, 1.0]],
    "fc_fuse_weight": [[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0]],
    "fc_fuse_bias": [0.0, 0.0],
    "draft_head_weight": [[0.0, 1.0], [1.0, 0.0]],
    "draft_head_bias": [0.0, -1.0],
    "lm_head_weight": [[1.0, 0.0], [0.0, 1.0], [0.8, 0.8]],
}


def test_eagle_draft_forward_by_hand():
    # state (2, 1), token 1: fused (2, 3), swapped (3, 2), less 1: (3, 1). logits 3, 1, 3.2: 2.
    # state (3, 1), token 2: fused (0, 2), swapped (2, 0), less 1: (2, 0). logits 2, 0, 1.6: 0.
    # state (2, 0), token 0: fused (3, 0), swapped (0, 3), less 1: (0, 2). logits 0, 2, 1.6: 1.
    # state (0, 2), token 1: fused (0, 4), swapped (4, 0), less 1: (4, 0). logits 4, 0, 3.2: 0.
    assert eagle_draft_forward([2.0, 1.0], 1, **BY_HAND, num_draft_tokens=4) == [2, 0, 1, 0]
    assert eagle_draft_forward([2.0, 1.0], 1, **BY_HAND, num_draft_tokens=0) == []


def test_eagle_draft_forward_takes_the_state_first():
    swapped = {**BY_HAND, "fc_fuse_weight": [[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]}
    # Only the embedding counts: (0, 2), swapped (2, 0), less 1: (2, 0). logits 2, 0, 1.6: 0.
    assert eagle_draft_forward([9.0, 9.0], 1, **swapped, num_draft_tokens=1) == [0]


def test_eagle_draft_forward_takes_the_lowest_of_equal_logits():
    dead = {**BY_HAND, "draft_head_bias": [-100.0, -100.0]}
    assert eagle_draft_forward([2.0, 1.0], 1, **dead, num_draft_tokens=2) == [0, 0]


@pytest.mark.parametrize("seed", range(5))
def test_eagle_draft_forward_equals_an_element_by_element_loop(seed):
    d, vocab_size, num_draft_tokens = 6, 11, 8
    rng = np.random.default_rng(seed)
    state = rng.standard_normal(d)
    embed, lm_head = rng.standard_normal((2, vocab_size, d))
    fuse, fuse_bias = rng.standard_normal((d, 2 * d)), rng.standard_normal(d)
    head, head_bias = rng.standard_normal((d, d)), rng.standard_normal(d)
    found = eagle_draft_forward(
        state, 3, embed, fuse, fuse_bias, head, head_bias, lm_head, num_draft_tokens
    )

    token, wanted, hidden = 3, [], [float(x) for x in state]
    for _ in range(num_draft_tokens):
        joined = hidden + [float(x) for x in embed[token]]
        fused = []
        for i in range(d):
            total = float(fuse_bias[i])
            for j in range(2 * d):
                total += float(fuse[i, j]) * joined[j]
            fused.append(max(total, 0.0))
        hidden = []
        for i in range(d):
            total = float(head_bias[i])
            for j in range(d):
                total += float(head[i, j]) * fused[j]
            hidden.append(max(total, 0.0))
        logits = [
            sum(float(lm_head[v, i]) * hidden[i] for i in range(d)) for v in range(vocab_size)
        ]
        token = logits.index(max(logits))
        wanted.append(token)
    assert found == wanted
    assert all(type(token) is int for token in found)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"hidden_state": [[1.0, 2.0]]},
            r"hidden_state has shape \(1, 2\), but \(any\) is needed",
        ),
        ({"embed_matrix": [[1.0]] * 3}, r"embed_matrix has shape \(3, 1\), but \(any, 2\)"),
        ({"fc_fuse_weight": [[1.0, 0.0]] * 2}, r"fc_fuse_weight .* \(2, 4\) is needed"),
        ({"fc_fuse_bias": [0.0]}, r"fc_fuse_bias .* \(2\) is needed"),
        ({"draft_head_weight": [[0.0, 1.0]]}, r"draft_head_weight .* \(2, 2\) is needed"),
        ({"draft_head_bias": 1.0}, r"draft_head_bias .* \(2\) is needed"),
        ({"lm_head_weight": [[1.0, 0.0]] * 2}, r"lm_head_weight .* \(3, 2\) is needed"),
        ({"last_token": 3}, "last_token is 3, but embed_matrix has 3 rows"),
        ({"last_token": -1}, "last_token is -1"),
        ({"num_draft_tokens": -1}, "num_draft_tokens is -1, but cannot be negative"),
    ],
)
def test_eagle_draft_forward_names_what_does_not_fit(change, message):
    arguments = {"hidden_state": [2.0, 1.0], "last_token": 1, **BY_HAND, "num_draft_tokens": 2}
    with pytest.raises(ValueError, match=message):
        eagle_draft_forward(**{**arguments, **change})
