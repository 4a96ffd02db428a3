"""Loading of the target that the user names; its files are checked before mlx-lm reads them.

mlx-lm and the libraries below it say what is wrong with a damaged file in their own words, each
in an exception of its own. Here it is one sentence with the name of the file.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, sharded_load

from .device import set_precision
from .hub import locate
from .ranks import num_ranks
from .safetensors import read_header

INDEX = "model.safetensors.index.json"


def load(
    path_or_hf_repo: str,
    tokenizer_config: dict[str, Any] | None = None,
    *,
    dtype: str | None = None,
    pipeline: bool = False,
    whole: bool = False,
    **options: Any,
) -> tuple[nn.Module, Any]:
    """Load a target and its tokenizer with ``mlx_lm.load``, whose ``options`` are taken.

    The tokenizer is mlx-lm's ``TokenizerWrapper``, whose methods have no types.

    Under ``mlx.launch`` each rank gets a part with ``mlx_lm.utils.sharded_load``: of every layer,
    or with ``pipeline`` some layers; with ``whole`` each has all of it, for texts of its own.

    ``dtype`` ("float32", "float16", "bfloat16") is that of its floats. By default they stay as
    they are stored; on a CPU, where MLX is many times slower with others, they become float32,
    and a line on standard error says what memory that takes.

    Raises ValueError, in one sentence, for a name that leads nowhere, for a damaged file, and for
    a target that cannot be split so.
    """
    folder = find_target(path_or_hf_repo) if whole or num_ranks() == 1 else None
    try:
        if folder is None:
            model, tokenizer = _load_shard(path_or_hf_repo, tokenizer_config, pipeline, **options)
        else:
            model, tokenizer = mlx_lm.load(
                str(folder), tokenizer_config=tokenizer_config, lazy=True, **options
            )
    except (ValueError, OSError) as err:
        reason = (str(err).strip() or type(err).__name__).splitlines()[0]
        raise ValueError(f"the target {path_or_hf_repo} cannot be loaded: {reason}") from err
    model = set_precision(model, dtype)
    mx.eval(model.parameters())
    return model, tokenizer


def _load_shard(
    name: str,
    tokenizer_config: dict[str, Any] | None,
    pipeline: bool,
    adapter_path: str | None = None,
    model_config: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> tuple[nn.Module, TokenizerWrapper]:
    """This rank's part of a target; ValueError where mlx-lm cannot split it so.

    Of a pipeline's part only its own files are downloaded.
    """
    if adapter_path is not None or any((model_config or {}).values()):
        raise ValueError(
            "adapters and quantized activations are for a target on one machine: leave "
            "--adapter-path and --quantize-activations out, or start without mlx.launch."
        )
    folder = locate(name, [p for p in DEFAULT_ALLOW_PATTERNS if "safetensors" not in p] + [INDEX])
    is_here = Path(name).expanduser().exists()
    check_target(folder, has_weights=is_here)
    config = read_json(folder / "config.json")
    if pipeline and not (folder / INDEX).exists():
        raise ValueError(
            f"it has no {INDEX}, which says in which file each layer is: convert it with "
            "mlx_lm.convert, or leave --pipeline out."
        )
    if not pipeline:
        check_heads(text_config(config), num_ranks())
    group = mx.distributed.init()
    try:
        model, tokenizer, *_ = sharded_load(
            str(folder) if is_here else name,
            pipeline_group=group if pipeline else None,
            tensor_group=None if pipeline else group,
            tokenizer_config=tokenizer_config,
            trust_remote_code=trust_remote_code,
        )
    except ValueError as err:
        if "not support" not in str(err):
            raise
        how = "between its layers" if pipeline else "within its layers (tensor parallelism)"
        other = "leave --pipeline out" if pipeline else "try --pipeline"
        raise ValueError(
            f"mlx-lm cannot split a {config['model_type']} {how}: {other}, or start it without "
            "mlx.launch."
        ) from err
    return model, tokenizer


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """A ``config.json`` with the entries of its text model in front."""
    return config | (config.get("text_config") or {})


def check_heads(config: dict[str, Any], num: int) -> None:
    """Raise ValueError unless ``num`` ranks can have equally many of a target's attention heads.

    Latent attention (MLA) has no heads of keys; those that are fewer than the ranks are some
    models' own to repeat.
    """
    heads = config.get("num_attention_heads") or num
    keys = num if config.get("kv_lora_rank") else config.get("num_key_value_heads") or heads
    if heads % num or (keys % num and num % keys):
        fitting = [str(n) for n in range(2, 17) if heads % n == keys % n == 0]
        counts = f" with -n {' or '.join(fitting)}," if fitting else ""
        raise ValueError(
            f"its {heads} attention heads, of which {keys} have keys of their own, cannot be "
            f"shared out among {num} ranks: start it{counts} with --pipeline where mlx-lm has it "
            "for this model, or without mlx.launch."
        )


def find_target(path_or_hf_repo: str) -> Path:
    """The folder of a target, downloaded if need be; ValueError as from ``load``."""
    folder = locate(path_or_hf_repo, DEFAULT_ALLOW_PATTERNS)
    check_target(folder)
    return folder


def check_target(folder: Path, has_weights: bool = True) -> None:
    """Raise ValueError, naming the file, where one of a target's files cannot be read.

    Without ``has_weights`` those are not there yet.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file: give the folder of a model.")
    if "model_type" not in read_json(folder / "config.json"):
        raise ValueError(
            f"{folder / 'config.json'} names no model_type: it is not the configuration of a "
            "model that mlx-lm loads."
        )
    if has_weights:
        check_weights(folder)
    if (folder / "tokenizer_config.json").exists():
        read_json(folder / "tokenizer_config.json")
    tokenizer = folder / "tokenizer.json"
    if tokenizer.exists() and not isinstance(read_json(tokenizer).get("model"), dict):
        raise ValueError(f"{tokenizer} holds no tokenizer: fetch the file again.")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ValueError, naming it, where there is none.

    Its numbers are mlx-lm's to judge: ``model_max_length`` is 1e30 in many a tokenizer's file, and
    limits of states are infinite, which ``system.json_file`` would refuse.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as err:
        raise ValueError(
            f"{path} does not exist: give the folder of a model that mlx-lm loads."
        ) from err
    except (ValueError, RecursionError) as err:
        raise ValueError(f"{path} is not JSON ({err}): fetch the file again.") from err
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object: fetch the file again.")
    return found


def check_weights(folder: Path) -> None:
    """Raise ValueError for a file of weights that is missing, damaged or cut short."""
    if (folder / INDEX).exists():
        named = read_json(folder / INDEX).get("weight_map")
        if not isinstance(named, dict):
            raise ValueError(f"{folder / INDEX} has no weight_map: fetch the file again.")
        named_files = sorted(set(map(str, named.values())))
        missing = [name for name in named_files if not (folder / name).is_file()]
        if missing:
            raise ValueError(
                f"{folder / missing[0]} is missing, though {INDEX} names it: fetch the model "
                "again."
            )
    for path in sorted(folder.glob("model*.safetensors")):
        read_header(path)


def apply_template(
    tokenizer: TokenizerWrapper, messages: list[dict[str, str]], **options: Any
) -> Any:
    """``tokenizer.apply_chat_template``; ValueError, naming the model, where that fails."""
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except TemplateError as err:
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path} fails ({err}): repair "
            "chat_template.jinja or tokenizer_config.json there, or decode without it "
            "(mlx_eagle.generate --ignore-chat-template)."
        ) from err


def context_size(model: nn.Module) -> int | None:
    """The most tokens of prompt and answer together; None where the model does not say."""
    size = vars(vars(model).get("args", object)).get("max_position_embeddings")
    return size if isinstance(size, int) and size > 0 else None
