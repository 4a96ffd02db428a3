"""A target that answers by heart: a llama whose weights are a table of what follows what.

A random model never thinks aloud or calls a tool. This one reads a trigger in the prompt and
says the script that belongs to it, in an ordinary model folder that any server opens.
"""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models import llama
from mlx_lm.utils import save_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END = "<|im_end|>"
MARKERS = ("<|im_start|>", END, "<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{% set tool_call = call.function %}"
    '<tool_call>{"name": "{{ tool_call.name }}", '
    '"arguments": {{ tool_call.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if thinks_at_once %}<think>{% endif %}"
)
HEAD_DIM = 32
MEMORY = 0.3  # what having seen a token weighs, over the length of the text
Scripts = dict[str, list[str]]


def as_bytes(text: str) -> str:
    """How a vocabulary of bytes spells it: "a b" -> "aĠb"."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return splitter.pre_tokenize_str(text)[0][0]


def write_tokenizer(folder: Path, scripts: Scripts, template: str = TEMPLATE) -> dict[str, int]:
    """A token a byte, and one for each marker and piece of a script: their numbers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [piece for script in scripts.values() for piece in script if piece not in MARKERS]
    assert len(set(pieces)) == len(pieces), "a piece stands in one place of one script"
    spellings = [*alphabet, *map(as_bytes, pieces)]
    assert len(set(spellings)) == len(spellings), "a piece has two characters or more"
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(spellings)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(MARKERS))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    ids = {text: tokenizer.token_to_id(as_bytes(text)) for text in pieces}
    ids |= {text: tokenizer.token_to_id(text) for text in MARKERS}
    return ids | {text: tokenizer.token_to_id(as_bytes(text)) for text in [*scripts, "\n"]}


def output_table(ids: dict[str, int], scripts: Scripts, size: int, mistakes: int) -> np.ndarray:
    """The output matrix (size, 2 size): scores by the token before, and by the tokens seen.

    Markers stand in several scripts. What follows one is decided by the tokens seen: the last
    trigger or piece before it counts, and later ones more than earlier ones.
    """
    table = np.zeros((size, 2 * size), np.float32)
    for rank, (trigger, script) in enumerate(scripts.items(), 1):
        before, seen = "\n", trigger
        for place, piece in enumerate([*script, END]):
            follows = piece
            if mistakes and (rank + place) % mistakes == 0:
                follows = "!"
            table[ids[follows], ids[before]] = 1
            weight = rank if place == 0 else place + 1
            table[ids[follows], size + ids[seen]] = MEMORY * weight
            before, seen = piece, seen if piece in MARKERS else piece
    return table


def write_automaton(
    folder: Path, scripts: Scripts, mistakes: int = 0, template: str = TEMPLATE
) -> str:
    """Write a model that says ``scripts[trigger]`` after a prompt with that character.

    Of several triggers the last in the order of ``scripts`` counts; "!" must be one. With
    ``mistakes`` every so many-th token is a wrong one.
    """
    folder.mkdir()
    ids = write_tokenizer(folder, scripts, template)
    num_heads = -(-(max(ids.values()) + 1) // HEAD_DIM)
    size = num_heads * HEAD_DIM
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=2 * size,
        num_hidden_layers=1,
        intermediate_size=32,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-6,
        vocab_size=size,
        tie_word_embeddings=False,
    )
    model = llama.Model(args)
    # Queries of zeros see all tokens alike: the second half of the state is their mean.
    model.update(tree_map(lambda w: w if w.ndim == 1 else mx.zeros_like(w), model.parameters()))
    one = np.eye(size, dtype=np.float32)
    none = np.zeros_like(one)
    attention = model.layers[0].self_attn
    model.model.embed_tokens.weight = mx.array(np.hstack([one, none]))
    attention.v_proj.weight = mx.array(np.hstack([one, none])) / (2 * size) ** 0.5
    attention.o_proj.weight = mx.array(np.vstack([none, one]))
    model.lm_head.weight = mx.array(output_table(ids, scripts, size, mistakes))
    save_model(folder, model)
    config = {k: v for k, v in vars(args).items() if v is not None} | {"eos_token_id": ids[END]}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
