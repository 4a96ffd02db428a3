"""The table of kinds: a kind from outside goes through it, and nothing else knows kinds."""

import re
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import pytest
from checkpoints import CONFIG, as_midlayer, eagle3_tensors, write_config, write_safetensors
from documents import ROOT
from drafter_pairs import tiny_gemma3
from helpers import PROMPT, VOCAB, byte_tokenizer, plain, speculative, tiny_llama
from mlx_lm.models.cache import make_prompt_cache

import mlx_eagle
from mlx_eagle import convert as converter
from mlx_eagle.drafters.base import Draft, Drafter, NullDrafter
from mlx_eagle.drafters.kinds import KINDS, is_converted, load_drafter, recognise
from mlx_eagle.target_model.cache_view import CacheView

PAGE = ROOT / "docs" / "pages" / "add-a-drafter.md"
LLAMA, TOKENIZER = tiny_llama(), byte_tokenizer()


def example() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return code


@pytest.fixture
def bigram(monkeypatch):
    """The page's example, run; its row is in the table for one test."""
    monkeypatch.setitem(KINDS, "bigram", None)  # taken out again after the test
    names: dict = {}
    exec(example(), names)
    return names["BigramDrafter"]


def published(folder: Path, text: list[int]) -> Path:
    """A checkpoint of the example's kind that knows what follows each token of ``text``."""
    table = mx.random.normal((VOCAB, VOCAB), key=mx.random.key(3))
    for token, after in pairwise(text):
        table[token, after] = 9.0
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), {"bigram.logits": table})
    write_config(folder, {"model_type": "qwen3"})  # as some drafters say, and it is not true
    return folder


def test_the_example_is_short():
    lines = [line for line in example().splitlines() if line]
    assert len([line for line in lines if not line.startswith(("from", "import"))]) < 30


def test_a_kind_from_outside_goes_through_the_table(bigram, tmp_path, monkeypatch):
    text = PROMPT + plain(LLAMA, PROMPT, 24)
    source = published(tmp_path / "source", text)
    folder = tmp_path / "head"
    written = converter.convert(str(source), str(folder), quantize=False)
    assert written["kind"] == "bigram" and is_converted(folder)
    for opened in (mlx_eagle.open_drafter(str(folder), LLAMA), load_drafter(folder, LLAMA)):
        assert isinstance(opened, bigram)
        tokens, stats = speculative(LLAMA, opened, PROMPT, 20, num_draft_tokens=3)
        assert tokens == text[len(PROMPT) :][:20]
        assert stats.num_accepted > 0
    # As published, it is converted on the way.
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    monkeypatch.setattr("mlx_eagle.draft_models.user_cache", lambda: tmp_path / "cache")
    assert isinstance(mlx_eagle.open_drafter(str(source), LLAMA), bigram)


def test_a_kind_from_outside_drafts_in_a_batch(bigram, tmp_path):
    prompts = [PROMPT, PROMPT[:5], PROMPT[2:9]]
    texts = [plain(LLAMA, prompt, 15) for prompt in prompts]
    source = published(tmp_path / "source", prompts[0] + texts[0])
    converter.convert(str(source), str(tmp_path / "head"), quantize=False)
    drafter = mlx_eagle.open_drafter(str(tmp_path / "head"), LLAMA)
    options = {
        "draft_model": drafter,
        "num_draft_tokens": 3,
        "max_tokens": 15,
        "return_token_ids": True,
    }
    made = mlx_eagle.batch_generate(LLAMA, TOKENIZER, prompts, **options)
    assert made.token_ids == texts


@pytest.mark.parametrize("option", ["draft_vocab", "num_layers"])
def test_options_of_eagle_heads_are_refused_for_other_kinds(bigram, tmp_path, option):
    source = published(tmp_path / "source", PROMPT)
    asked = {
        "draft_vocab": {"draft_vocab": 8},
        "num_layers": {"overrides": converter.Overrides(num_layers=1)},
    }
    flag = option.replace("_", "-")
    who = "EAGLE heads" if option == "num_layers" else "drafters that score a vocabulary"
    with pytest.raises(ValueError, match=f"^--{flag} is for {who}, and this is a bigram"):
        converter.convert(str(source), str(tmp_path / "head"), **asked[option])
    assert not (tmp_path / "head").exists()


def test_a_folder_without_a_kind_is_an_eagle_head(tmp_path):
    source = write_safetensors(tmp_path / "source", CONFIG, as_midlayer(eagle3_tensors()))
    config = converter.convert(str(source), str(tmp_path / "head"))
    assert config["kind"] == "eagle3"
    del config["kind"]
    write_config(tmp_path / "head", config)
    assert is_converted(tmp_path / "head")
    model = tiny_llama(vocab_size=128, num_hidden_layers=6)
    assert load_drafter(tmp_path / "head", model).taps == (2, 3, 3)


def test_published_checkpoints_are_told_by_their_tensors():
    layer = ["mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"]
    assert recognise(layer, {}) == "mtp"
    assert recognise([name.removeprefix("mtp.") for name in layer], {}) == "mtp"
    assert recognise(as_midlayer(eagle3_tensors()), CONFIG) == "eagle3"
    assert recognise(["model.layers.0.mlp.up_proj.weight", "lm_head.weight"], {}) == "model"


def classes() -> set[str]:
    """The classes of drafters in ``mlx_eagle/drafters``."""
    files = (ROOT / "mlx_eagle" / "drafters").glob("*.py")
    text = "\n".join(path.read_text() for path in files)
    found = set(re.findall(r"^class (\w*Drafter)\b", text, re.MULTILINE))
    return found - {"Drafter", "BatchDrafter"}


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in (ROOT / folder).rglob("*.py")]


def test_nobody_asks_a_drafter_for_its_class():
    wanted = classes()
    assert {"Eagle3Drafter", "MTPDrafter", "LookupDrafter"} <= wanted
    asked = re.compile(r"(?:isinstance|hasattr|getattr)\([^)]*drafter[^)]*\)|type\([^)]*drafter")
    allowed = {"mlx_eagle/generate.py"}  # isinstance(x, Drafter)
    found = {}
    for path in sources("mlx_eagle", "convert", "bench"):
        name = str(path.relative_to(ROOT))
        if "/drafters/" in name or name in allowed:
            continue
        text = path.read_text()
        hits = [hit for hit in asked.findall(text) if re.search(r"\b(isinstance|hasattr)", hit)]
        hits += re.findall(rf"isinstance\([^)]*\b(?:{'|'.join(wanted)})\b[^)]*\)", text)
        if hits:
            found[name] = hits
    assert found == {}


def test_decoding_and_batch_know_no_kind():
    words = {*KINDS, "eagle", *map(str.lower, classes() - {"NullDrafter"})} - {"model"}
    found = {}
    for path in sources("mlx_eagle/decoding", "mlx_eagle/batch"):
        text = path.read_text()
        imports = "\n".join(re.findall(r"^(?:from|import) .*", text, re.MULTILINE)).lower()
        code = re.sub(r'"""(?:.|\n)*?"""|#.*', "", text).lower()
        hits = {word for word in words if re.search(rf"(?<!mlx-)\b{word}\b", imports + code)}
        if hits:
            found[path.name] = hits
    assert found == {}


TARGETS = {"llama": LLAMA, "gemma 3": tiny_gemma3()}


class Onlooker(Drafter):
    """Drafts nothing of use, and remembers the target's keys and values that it saw."""

    taps, num_forwards = (), 0

    def __init__(self, seen: list):
        self.seen, self.cache, self.tokens = seen, [], []

    def begin(self, cache=None):
        return Onlooker(self.seen)

    def make_cache(self):
        return []

    def extend(self, tokens, features, last=None):
        self.tokens.append((tokens, last))

    def see_target(self, caches):
        self.seen.append([caches.rows(i) for i in range(len(caches))])

    def propose(self, size, pick):
        self.seen[-1] = self.committed(), self.seen[-1]
        text = self.seen[-1][0]
        return Draft(mx.array([text[-1]] * size, mx.int32))

    def committed(self) -> list[int]:
        found: list[int] = []
        for tokens, last in self.tokens:
            found += tokens.tolist()[: None if last is None else last.item() + 1]
        return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("num_requests", [1, 3])
def test_a_drafter_sees_the_targets_rows_in_the_order_of_the_text(name, num_requests):
    """After a prompt, and after drafts of which some or none were kept; rotating caches too."""
    seen: list = []
    target = TARGETS[name]
    prompts = [PROMPT * 3, PROMPT[:4], PROMPT[3:9]][:num_requests]
    if num_requests == 1:
        tokens, _ = speculative(target, Onlooker(seen), prompts[0], 12, num_draft_tokens=2)
        assert tokens == plain(target, prompts[0], 12)
    else:
        options = {"draft_model": Onlooker(seen), "max_tokens": 12, "num_draft_tokens": 2}
        mlx_eagle.batch_generate(target, TOKENIZER, prompts, **options)
    assert len(seen) >= 4
    for text, layers in seen:
        fresh = make_prompt_cache(target)
        for token in text[:-1]:
            target(mx.array([[token]]), cache=fresh)
        own = CacheView(fresh)
        for i, (keys, values) in enumerate(layers):
            wanted = own.rows(i)
            assert keys.shape == wanted[0].shape
            assert mx.allclose(keys, wanted[0], atol=1e-4) and mx.allclose(
                values, wanted[1], atol=1e-4
            )


def test_the_base_can_do_nothing():
    base = NullDrafter()
    assert base.longest_draft == 0 and not base.supports_trees and base.batch_drafter() is None
    with pytest.raises(ValueError, match="proposes chains only"):
        base.check_tree(None)
    with pytest.raises(ValueError, match="reads tokens"):
        base.check_embeddings(mx.zeros((1, 4)))
    with pytest.raises(ValueError, match="lagging draft cache is for EAGLE heads"):
        base.with_draft_cache("lagging")
    assert base.with_draft_window(None) is base.with_draft_cache("exact") is base
