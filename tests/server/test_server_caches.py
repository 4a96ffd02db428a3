"""Caches of earlier requests: what a drafter must find where one sequence goes on."""

import mlx.core as mx
import pytest
from helpers import PROMPT, plain, speculative, tiny_head, tiny_llama
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from mlx_lm.server import CompletionRequest
from mlx_lm.tokenizer_utils import load as load_tokenizer
from serving import END, ENDLESS, START, ours, theirs, write_model, write_tokenizer

from mlx_eagle.decoding.decoder import Decoder
from mlx_eagle.server.caches import Caches, PairCache, prepare
from mlx_eagle.server.prompt import message_ends


def test_the_drafter_misses_nothing_at_a_seam():
    """After reuse of a trimmed text, the head's slots are those of a head that saw it whole."""
    model = tiny_llama()
    drafter = tiny_head(model)
    num_target, store = len(make_prompt_cache(model)), PairCache()

    def slots(caches: list) -> list[mx.array]:
        return [a[..., : len(text) - 1, :] for a in caches[num_target].keys_and_values()]

    caches = prepare(None, model, drafter, [])
    tokens, _ = speculative(model, drafter, PROMPT, 10, prompt_cache=caches)
    store.insert_cache(PROMPT + tokens, caches)
    text = PROMPT + tokens[:6] + [50, 51, 52]
    whole = prepare(None, model, drafter, [])
    speculative(model, drafter, text, 1, prompt_cache=whole)
    for is_prepared in (False, True):
        fetched, rest = store.fetch(text)
        assert len(rest) == 3
        if is_prepared:
            fetched = prepare(fetched, model, drafter, text[: -len(rest)])
        speculative(model, drafter, rest, 1, prompt_cache=fetched)
        same = [
            mx.allclose(a, b, atol=1e-4).item()
            for a, b in zip(slots(fetched), slots(whole), strict=True)
        ]
        assert all(same) == is_prepared


def test_caches_without_a_drafters_part_get_one():
    model = tiny_llama()
    drafter = tiny_head(model)
    caches = make_prompt_cache(model)
    tokens = plain(model, PROMPT, 5, prompt_cache=caches)
    store = PairCache()
    store.insert_cache(PROMPT + tokens, caches)  # as of a plain answer
    fetched, _rest = store.fetch(PROMPT + tokens + [1, 2])
    pair_caches = prepare(fetched, model, drafter, PROMPT + tokens)
    assert len(pair_caches.draft) == len(drafter.make_cache())
    store.insert_cache(PROMPT + tokens + [1], Caches(pair_caches, len(caches)))
    assert len(store.fetch(PROMPT + tokens + [1, 2])[0].target) == len(caches)
    assert not prepare(pair_caches, model, None, PROMPT + tokens).draft


WHO = {"role": "system", "content": "You are one who answers in few words, and well."}
OTHER = {"role": "system", "content": "Give this chat a title."}
PENALTY = {"repetition_penalty": 3.0, "repetition_context_size": 200}
KINDS = {"full": pytest.mark.exhaustive, "rotating": pytest.mark.exhaustive, "recurrent": ()}


@pytest.fixture(scope="module")
def targets(pair, recurrent, tmp_path_factory) -> dict[str, str]:
    """A target of each kind of cache: the windows are full after 16 tokens."""
    folder = tmp_path_factory.mktemp("rotating")
    layers = ["sliding_attention", "full_attention"] * 2
    num_tokens = write_tokenizer(folder)
    write_model(folder, num_tokens, num_hidden_layers=4, layer_types=layers, sliding_window=16)
    return {"full": pair["target"], "rotating": str(folder), "recurrent": recurrent}


@pytest.fixture
def read(monkeypatch) -> list[int]:
    """How many tokens of each chunk of a prompt were computed, by the time they were."""
    sizes, chunk = [], Decoder._prefill_chunk

    def watch(self, tokens, embeddings):
        sizes.append(tokens.shape[0])
        chunk(self, tokens, embeddings)

    monkeypatch.setattr(Decoder, "_prefill_chunk", watch)
    return sizes


class Chat:
    """A conversation: each turn goes on behind the one before."""

    def __init__(self, *messages: dict, **options):
        self.messages, self.options = list(messages), options
        self.texts = []

    def ask(self, asked, question: str):
        """The next turn's usage."""
        self.messages.append({"role": "user", "content": question})
        answer = asked.complete(
            messages=self.messages, max_tokens=9, logit_bias=ENDLESS, **self.options
        )
        self.texts.append(answer.choices[0].message.content)
        self.messages.append({"role": "assistant", "content": self.texts[-1]})
        return answer.usage


class Talk:
    """Two conversations with one system prompt, and side requests between their turns."""

    def __init__(self, check, num_common: int = 0):
        """``num_common``: tokens in which all system prompts begin, and that are found again."""
        self.num_common = num_common
        self.main, self.second, self.side = Chat(WHO, **PENALTY), Chat(WHO), Chat(OTHER)
        self.check = check
        self.totals = {}

    def turn(self, asked, name: str, question: str, num_cached: int | None = None) -> None:
        """``num_cached``: None where all of the turn before is."""
        usage = getattr(self, name).ask(asked, question)
        self.check(usage, self.totals.get(name, 0) if num_cached is None else num_cached)
        self.totals[name] = usage.total_tokens

    def begin(self, asked) -> None:
        # START system \n ... END \n START user \n
        num_system = 1 + 6 + 1 + len(WHO["content"]) + 1 + 1 + 1 + 4 + 1
        self.turn(asked, "main", "How are you, and who?")
        self.turn(asked, "second", "What is this for?", num_system)
        for i in range(12):
            Chat({"role": "system", "content": f"{i}. title"}).ask(asked, "Of it.")
        self.check(None, 0)
        self.turn(asked, "side", "Of this.", self.num_common)
        self.turn(asked, "main", "And then?")

    def go_on(self, asked) -> list[str]:
        """All that was said."""
        self.turn(asked, "second", "Then?")
        self.turn(asked, "main", "And now?")
        self.turn(asked, "side", "Once more.")
        return [text for chat in (self.main, self.second, self.side) for text in chat.texts]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [pytest.param(k, marks=marks) for k, marks in KINDS.items()])
def test_only_what_is_new_is_computed(targets, pair, read, tmp_path, kind):
    """In second turns, beside side requests, behind a system prompt, and after a restart."""

    def check(usage, expected: int) -> None:
        if usage is not None:
            num_cached = usage.prompt_tokens_details.cached_tokens
            assert num_cached == expected
            assert sum(read) == usage.prompt_tokens - num_cached - 1  # the last begins the text
        read.clear()

    flags = ("--model", targets[kind], "--draft-model", pair["head"])
    flags += ("--prompt-cache-dir", tmp_path / "kept")
    talk = Talk(check, num_common=8 if kind == "full" else 0)  # START system \n
    with ours(*flags) as asked:
        talk.begin(asked)
    with ours(*flags) as asked:
        got = talk.go_on(asked)
        counts = asked.generator.metrics.text(0, 0, 0).splitlines()
    hits, misses = "mlx_eagle_prompt_cache_hits_total", "mlx_eagle_prompt_cache_misses_total 0"
    assert {f'{hits}{{place="memory"}} 0', f'{hits}{{place="disk"}} 3', misses} <= set(counts)
    reference = Talk(lambda usage, expected: None)
    with theirs(targets[kind]) as asked:
        reference.begin(asked)
        assert reference.go_on(asked) == got


FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def test_snapshots_lie_where_the_next_prompt_still_agrees(tmp_path):
    """Thoughts are left out of the next turn, so it parts from this one before they begin."""
    write_tokenizer(tmp_path, thinks=True)
    tokenizer = load_tokenizer(tmp_path, {"chat_template": FORGETFUL})

    def asked(*messages: dict) -> tuple[list[int], dict[str, str]]:
        request = CompletionRequest("chat", "", list(messages), None, None)
        prompt = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
        ends = message_ends(request, prompt, tokenizer, {})
        return prompt, {whose: tokenizer.decode(prompt[:end]) for end, whose in ends.items()}

    question, answer = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}
    prompt, ends = asked(WHO, question)
    _, later = asked(WHO, question, answer, question)
    begun = tokenizer.decode(prompt).removesuffix("<think>\n")
    assert ends == {
        "system": f"{START}system\n{WHO['content']}{END}\n{START}user\n",
        "user": begun,
    }
    assert later["system"] == ends["system"] and later["user"].startswith(begun)
    assert asked(question)[1].keys() == {"user"}


def test_what_cannot_be_trimmed_is_kept_at_ends_of_messages():
    caches, text = PairCache(), list(range(100))

    def end(num_tokens: int, whose: str) -> None:
        state = ArraysCache(1)
        state[0] = mx.full((1, 4), num_tokens)
        caches.insert_cache(text[:num_tokens], [state], cache_type=whose)

    def num_found(num_same: int) -> int:
        got, rest = caches.fetch([*text[:num_same], 200, 201])
        num_cached = num_same + 2 - len(rest)
        assert num_cached == (0 if got is None else got[0][0][0, 0].item())
        return num_cached

    turns = [(10, "system"), (20, "user"), (30, "assistant"), (40, "user"), (50, "assistant")]
    for turn in [*turns, (60, "user"), (70, "assistant")]:
        end(*turn)
    assert num_found(70) == 70  # the next turn
    assert num_found(69) == 60  # the answer once more
    assert num_found(55) == 40  # the last question edited
    assert num_found(35) == num_found(15) == 10  # another conversation
    assert num_found(5) == 0
    assert caches.counts.snapshots["memory"] == 4
