"""The NumPy head against arithmetic by hand and against what other libraries computed."""

import numpy as np
import pytest
from golden import frozen
from golden.frozen import relative
from numpy_head import eagle3_draft, eagle3_extend

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
