"""Draft vocabularies: some rows of the output matrix, for every kind of drafter.

The drafts are the likeliest of the whole vocabulary's among the tokens that are left.
"""

from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from block_twin import DFLASH2, published, tiny_dflash, tiny_dflash2, tiny_dspark
from checkpoints import CONFIG, as_midlayer, eagle3_tensors, write_safetensors
from drafter_pairs import LLAMA, PAIRS, QWEN3_NEXT, tiny_mtp
from helpers import PROMPT, VOCAB, byte_tokenizer, plain, speculative, tiny_head, tiny_llama
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import SPMStreamingDetokenizer
from mtp_checkpoints import FAMILIES

import mlx_eagle
from mlx_eagle.commands.flags import check_draft_flags
from mlx_eagle.convert import convert
from mlx_eagle.convert.__main__ import main
from mlx_eagle.convert.check import measure_acceptance
from mlx_eagle.convert.trim import Trim
from mlx_eagle.decoding.accept import Match
from mlx_eagle.draft_models import open_beside
from mlx_eagle.drafters.base import Draft
from mlx_eagle.drafters.kinds import KINDS as KINDS_BY_NAME
from mlx_eagle.drafters.mtp import load_mtp
from mlx_eagle.drafters.output_rows import (
    MOST_OF_A_PROMPT,
    OutputRows,
    newest_others,
    read_draft_vocab,
    wanted_ids,
)
from mlx_eagle.drafters.tree import TreeShape, parse_tree

SOME = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 30, 31, 40, 50, 55])
KINDS = {
    "mtp": (QWEN3_NEXT, tiny_mtp(QWEN3_NEXT)),
    "dflash": (LLAMA, tiny_dflash(LLAMA)),
    "dflash, its own": (
        LLAMA,
        tiny_dflash(LLAMA, lm_head_source="file", draft_vocab_size=VOCAB),
    ),
    "dflash2": (LLAMA, tiny_dflash2(LLAMA)),
    "dspark": (LLAMA, tiny_dspark(LLAMA, markov_rank=8, first_slot=0)),
    **{name: PAIRS[name] for name in PAIRS if name.startswith(("eagle", "p-eagle", "assistant"))},
}
KINDS = {
    name: pair
    for name, pair in KINDS.items()
    if "lookup" not in name and not getattr(pair[1].head, "has_clusters", False)
}


class Seen:
    """A drafter that keeps its drafts and the logits that they were picked from."""

    def __init__(self, inner, begun=()):
        self.inner = inner
        self.begun = begun if isinstance(begun, list) else []
        self.drafts: list[tuple[list[int], list[mx.array]]] = []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def begin(self, cache=None):
        made = Seen(self.inner.begin(cache), self.begun)
        self.begun.append(made)
        return made

    def propose(self, size, pick):
        logits: list[mx.array] = []

        def kept(row, ids):
            logits.append((row, ids))
            return pick(row, ids)

        draft: Draft = self.inner.propose(size, kept)
        self.drafts.append((draft.tokens.tolist(), logits))
        return draft


def drafts_of(model, drafter, prompt: list[int], **options) -> tuple[list[int], list]:
    seen = Seen(drafter)
    text, _ = speculative(model, seen, prompt, 24, **({"num_draft_tokens": 3} | options))
    return text, [draft for each in seen.begun for draft in each.drafts]


@pytest.mark.parametrize("name", KINDS)
def test_drafts_are_the_likeliest_of_those_that_are_left(name):
    model, whole = KINDS[name]
    drafter = whole.with_draft_vocab(SOME)
    allowed = {*SOME.tolist(), *PROMPT}
    if whole.to_target is not None:
        allowed &= set(whole.to_target.tolist())
    text, drafts = drafts_of(model, drafter, PROMPT)
    _, all_drafts = drafts_of(model, whole, PROMPT)
    assert text == plain(model, PROMPT, 24)
    assert {token for tokens, _ in drafts for token in tokens} <= allowed
    # The first draft of the whole vocabulary starts from the same state.
    row, ids = all_drafts[0][1][0]
    ids = np.arange(row.shape[1]) if ids is None else np.array(ids)
    row = np.where(np.isin(ids, list(allowed)), np.array(row[0], np.float64), -np.inf)
    if name != "dflash2":  # which scores the likeliest once more
        assert drafts[0][0][0] == ids[row.argmax()]
    own, own_ids = drafts[0][1][0]
    assert set(own_ids.tolist()) == allowed and own.shape[1] == len(allowed)
    if name != "dflash2":
        by_id = dict(zip(ids.tolist(), row.tolist(), strict=True))
        wanted = [by_id[token] for token in own_ids.tolist()]
        assert np.allclose(np.array(own[0]), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_the_whole_vocabulary_drafts_as_without(name):
    model, whole = KINDS[name]
    drafter = whole.with_draft_vocab(np.arange(VOCAB))
    assert [tokens for tokens, _ in drafts_of(model, drafter, PROMPT)[1]] == [
        tokens for tokens, _ in drafts_of(model, whole, PROMPT)[1]
    ]


def with_trees(name: str):
    """An EAGLE head, or an MTP layer, of a target whose rows can be gathered."""
    if name != "mtp":
        return KINDS[name]
    part = FAMILIES["mimo"]()
    weights = {name: mx.array(array) for name, array in part.tensors.items()}
    return part.target, load_mtp(weights, part.target)


@pytest.mark.parametrize("name", ["mtp", "eagle-3"])
def test_a_tree_of_one_branch_is_the_chain(name):
    """What is drafted is fed back as a token, not as its place among the rows."""
    _, whole = with_trees(name)
    drafter = whole.with_draft_vocab(np.arange(40, 60)).begin()
    features = mx.random.normal((len(PROMPT), drafter.width), key=mx.random.key(1))
    drafter.extend(mx.array(PROMPT), features)
    chain = drafter.propose(5, Match().pick).tokens
    tree = drafter.propose_tree(parse_tree("root1:5"), Match().pick_children).tokens
    assert tree.tolist() == chain.tolist()


@pytest.mark.parametrize("shape", ["3x3:7", "2/1+1"])
@pytest.mark.parametrize("name", ["mtp", "eagle-3"])
def test_trees(name, shape):
    model, whole = with_trees(name)
    drafter = whole.with_draft_vocab(SOME)
    text, stats = speculative(model, drafter, PROMPT, 24, tree=parse_tree(shape))
    assert text == plain(model, PROMPT, 24) and stats.num_drafted > 0
    few = whole.with_draft_vocab(np.array([2, 4]))
    with pytest.raises(ValueError, match=r"drafts only 2 different tokens"):
        few.check_tree(TreeShape.parse("3x3:7"))


@pytest.mark.parametrize("name", KINDS)
def test_batches(name):
    """Prompts of different tokens in one batch, and each in what it adds."""
    model, whole = KINDS[name]
    drafter = whole.with_draft_vocab(SOME)
    prompts = [PROMPT, [60, 61, 62, 33], [17, 18, 60]]
    made = mlx_eagle.batch_generate(
        model, byte_tokenizer(), prompts, draft_model=drafter, num_draft_tokens=3,
        max_tokens=[14, 20, 9], return_token_ids=True,
    )  # fmt: skip
    for prompt, tokens, num in zip(prompts, made.token_ids, (14, 20, 9), strict=True):
        assert tokens == plain(model, prompt, num)
    assert all(stats.num_drafted > 0 for stats in made.stats)


def test_a_batch_drafts_what_each_of_its_texts_adds():
    _, whole = KINDS["mtp"]
    drafter = whole.with_draft_vocab(SOME)
    batch = drafter.batch_drafter()
    texts = [np.array([60, 61]), np.array([61, 62]), np.array([3])]
    begun = [drafter.begin() for _ in texts]
    for each, text in zip(begun, texts, strict=True):
        each.see_text(lambda text=text: text)
        each.extend(mx.array(text[-1:]), mx.zeros((1, each.width)))
    for each in begun:
        batch.join(each)
    assert batch._own.seen == (60, 61, 62)
    logits = batch.pending()[1]
    assert logits.shape == (3, len(SOME) + 3)
    for b, each in enumerate(begun):
        own = dict(zip(each.to_target.tolist(), each._first[0].tolist(), strict=True))
        both = dict(zip(batch._own.to_target.tolist(), logits[b].tolist(), strict=True))
        assert all(abs(both[token] - own[token]) < 1e-4 for token in own)
    batch.keep([1])
    assert batch.extract(0).seen == (61, 62)
    batch.join(begun[2])
    assert batch._own.seen == (61, 62)


def modules() -> dict[str, tuple]:
    mx.random.seed(3)
    linear = nn.Linear(64, 40)
    table = nn.Embedding(40, 64)
    packed = nn.QuantizedLinear.from_linear(nn.Linear(64, 40, bias=False), 32, 4)
    packed_table = nn.QuantizedEmbedding.from_embedding(table, 32, 4)
    return {
        "linear": linear,
        "packed": packed,
        "table": table.as_linear,
        "packed table": packed_table.as_linear,
    }


@pytest.mark.parametrize("index", [[0, 1, 2, 7, 9], [0, 1, 2], [5, 2, 30]], ids=str)
@pytest.mark.parametrize("kind", ["linear", "packed", "table", "packed table"])
def test_rows_of_every_output(kind, index):
    output = modules()[kind]
    x = mx.random.normal((3, 64))
    rows = OutputRows(np.array(index))
    assert mx.allclose(rows.project(output, x), output(x)[:, mx.array(index)], atol=1e-5)


def test_the_first_rows_are_no_copy():
    """Of a packed table of 4.6 MB; only the one behind the gap takes memory."""
    table = nn.QuantizedEmbedding.from_embedding(nn.Embedding(8000, 1024), 64, 4)
    mx.eval(table.parameters())
    before = mx.get_active_memory()
    rows = OutputRows(np.array([*range(7000), 7999]))
    mx.eval(rows.project(table.as_linear, mx.zeros((1, 1024))))
    assert mx.get_active_memory() - before < 5e5


def test_the_newest_tokens_of_a_text():
    known = np.array([0, 1, 2])
    assert newest_others(np.array([7, 1, 9, 7, 5, 2]), known, 2).tolist() == [5, 7]
    assert newest_others(np.array([7, 1, 9, 7, 5, 2]), known, 9).tolist() == [5, 7, 9]


def test_what_the_prompt_holds_is_gathered_once_and_is_bounded(monkeypatch):
    model = tiny_llama(vocab_size=4096)
    whole = tiny_dflash(model, vocab_size=4096, draft_vocab_size=4096)
    drafter = whole.with_draft_vocab(np.arange(16))
    made = []
    init = OutputRows.__init__
    monkeypatch.setattr(
        OutputRows, "__init__", lambda self, index: (made.append(len(index)), init(self, index))[1]
    )
    prompt = list(range(100, 100 + MOST_OF_A_PROMPT + 50))
    text, _ = speculative(model, drafter, prompt, 12, num_draft_tokens=3, prefill_step_size=100)
    assert text == plain(model, prompt, 12) and made == [16 + MOST_OF_A_PROMPT]
    speculative(model, drafter, [3, 5, 2000], 12, num_draft_tokens=3)
    assert made[1:] == [17]  # nothing of the other text


def test_with_copies_it_is_all_that_is_known():
    model, whole = KINDS["mtp"]
    drafter = whole.with_draft_vocab(SOME).with_copies()
    seen = Seen(drafter)
    known = [60, 61]
    caches = [*model.make_cache(), *drafter.make_cache()]
    list(
        mlx_eagle.speculative_generate_step(
            mx.array(known), model, drafter, max_tokens=1, prompt_cache=caches
        )
    )
    speculative(model, seen, [5, 62], 4, num_draft_tokens=2, prompt_cache=caches)
    assert {60, 61, 62} <= set(seen.begun[0].inner.to_target.tolist())


def test_how_it_is_said(tmp_path):
    file = tmp_path / "ids"
    file.write_text("[5, 3,\n3 8]")
    assert read_draft_vocab(str(file)).tolist() == [3, 5, 8]
    assert read_draft_vocab([8, 3]).tolist() == [3, 8]
    assert read_draft_vocab("full") is read_draft_vocab(None) is None
    assert read_draft_vocab("12") == read_draft_vocab(12) == 12
    tokenizer = byte_tokenizer()
    (end,) = tokenizer.eos_token_ids
    assert wanted_ids(3, tokenizer, 300).tolist() == [0, 1, 2, end]
    assert wanted_ids(3, None, 300).tolist() == [0, 1, 2]
    assert wanted_ids(300, tokenizer, 300) is None


@pytest.mark.parametrize(
    "text, said",
    [("5 x", "holds 'x'"), ("", "is empty"), (None, "cannot be read"), ("5 -1", "holds '-1'")],
)
def test_files_that_are_none(tmp_path, text, said):
    file = tmp_path / "ids"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_draft_vocab(file)


def test_what_is_refused():
    spm = SimpleNamespace(detokenizer=object.__new__(SPMStreamingDetokenizer), eos_token_ids={1})
    with pytest.raises(ValueError, match=r"SentencePiece tokenizer .* give a file of ids"):
        wanted_ids(100, spm, 300)
    assert wanted_ids(np.array([2, 5]), spm, 300).tolist() == [1, 2, 5]
    with pytest.raises(ValueError, match="names token 300, but the target has 300"):
        wanted_ids(np.array([2, 300]), None, 300)
    with pytest.raises(ValueError, match="is 0: give 1 or more"):
        check_draft_flags(
            SimpleNamespace(num_draft_tokens=3, tree=None, draft_vocab="0", draft_window=None)
        )
    for name in ("lookup", PAIRS["draft model"][1] if "draft model" in PAIRS else "lookup"):
        with pytest.raises(ValueError, match="a draft vocabulary is for heads"):
            if isinstance(name, str):
                mlx_eagle.open_drafter(name, LLAMA, draft_vocab=5)
            else:
                name.with_draft_vocab(SOME)
    head = tiny_head(LLAMA)
    with pytest.raises(ValueError, match=r"none of the ids of --draft-vocab"):
        head.with_draft_vocab(np.array([1, 3]))  # every second token is its own


def test_opened_with_one(monkeypatch):
    head = tiny_head(LLAMA)
    assert open_beside(head, None, LLAMA, draft_vocab=8)[1].num_drafted == 4
    assert open_beside(head, None, LLAMA, draft_vocab="full")[1] is not None
    assert open_beside(head, None, LLAMA)[1].num_drafted == VOCAB // 2
    lagging = head.with_draft_vocab(np.arange(8)).with_draft_cache("lagging")
    assert lagging.num_drafted == 4 and lagging.lagging


def test_converted_with_one(tmp_path, capsys):
    """It is the folder's default; ``full`` and others take its place. Cut heads keep their way."""
    model = tiny_llama(num_hidden_layers=6)
    source = published(tmp_path / "source", tiny_dflash2(model), DFLASH2)
    config = convert(str(source), str(tmp_path / "head"), quantize=False, draft_vocab=20)
    assert config["draft_vocab"] == 20
    opened = mlx_eagle.open_drafter(str(tmp_path / "head"), model)
    assert opened.num_drafted == 20
    again = mlx_eagle.open_drafter(str(tmp_path / "head"), model, draft_vocab="full")
    assert again.num_drafted is None
    other = mlx_eagle.open_drafter(str(tmp_path / "head"), model, draft_vocab=[3, 9])
    assert other.to_target.tolist() == [3, 9]
    for wanted in (Trim(VOCAB + 1), Trim(1, ids=(VOCAB,))):
        with pytest.raises(ValueError, match="--draft-vocab reaches token"):
            convert(str(source), str(tmp_path / "no"), quantize=False, draft_vocab=wanted)
    file = tmp_path / "ids"
    file.write_text("3 4 7")
    main(["--hf-path", str(source), "--mlx-path", f"{tmp_path}/few", "--draft-vocab", str(file)])
    assert mlx_eagle.load_drafter(tmp_path / "few", model).to_target.tolist() == [3, 4, 7]
    assert not (tmp_path / "no").exists()


def test_the_check_lists_the_full_vocabulary():
    model, whole = KINDS["dflash"]
    made = {**whole.head.config.to_dict(), "kind": "dflash"}
    weights = dict(tree_flatten(whole.head.parameters()))
    found = measure_acceptance(
        KINDS_BY_NAME["dflash"], made | {"draft_vocab": 5}, weights, model, byte_tokenizer(),
        questions=["ab"], num_tokens=8,
    )  # fmt: skip
    names = [reading.name for reading in found.alternatives]
    assert "full vocabulary" in names and "full vocabulary" in found.table()


def test_an_eagle_head_cut_to_a_list(tmp_path):
    source = write_safetensors(tmp_path / "source", CONFIG, as_midlayer(eagle3_tensors()))
    whole = convert(str(source), str(tmp_path / "whole"), quantize=False)
    ids = mlx_eagle.load_drafter(
        tmp_path / "whole", tiny_llama(vocab_size=128, num_hidden_layers=6)
    ).to_target.tolist()
    wanted = Trim.of(np.array([ids[2], ids[5], 1 + max(ids)]))
    config = convert(str(source), str(tmp_path / "cut"), quantize=False, draft_vocab=wanted)
    assert whole["draft_vocab_size"] == len(ids) and config["draft_vocab_size"] == 2
    cut = mlx_eagle.load_drafter(tmp_path / "cut", tiny_llama(vocab_size=128, num_hidden_layers=6))
    assert cut.to_target.tolist() == [ids[2], ids[5]]
