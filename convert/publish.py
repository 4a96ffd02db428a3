"""Publish a head: its model card, and the layout that PyTorch engines read.

Names and keys of the flat layout are those that vLLM, SGLang and SpecForge read for an EAGLE-3
head; a head that it cannot describe is refused.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub import ModelCardData

from mlx_eagle.drafters.config import Eagle3Config
from mlx_eagle.drafters.folder import read_config, read_weights
from mlx_eagle.drafters.head_weights import draft_ids
from mlx_eagle.drafters.quantize import bits_of
from mlx_eagle.drafters.target_parts import FRONT
from mlx_eagle.system.atomic_folder import new_folder
from mlx_eagle.system.hub import INSIDE, REPO_ID, locate
from mlx_eagle.system.safetensors import save_arrays

from .published_config import TAPS
from .vocabulary import vocabulary_maps

CARD = "README.md"
TAGS = ["mlx", "speculative-decoding", "draft-model"]
# The keys that the hub reads about a licence; name and link belong to `license: other`.
LICENSE = re.compile(r"^(license(?:_name|_link)?):[ \t]*(\S.*?)[ \t]*$", re.MULTILINE)
USAGE = "mlx_eagle.generate --model TARGET --draft-model THIS_FOLDER --prompt Hello"
WHAT_IT_IS = (
    "for speculative decoding, {made} by mlx-eagle. It is no model of its own: it drafts tokens "
    "that its target accepts or replaces."
)


def source_license(
    source: str, config: Mapping[str, Any], revision: str | None = None
) -> dict[str, str]:
    """The licence that the source's card or its config names; {} if neither does.

    apache-2.0 -> {"license": "apache-2.0"}
    """
    folder = locate(_repository(source) or source, (CARD,), revision)
    folder = folder.parent if folder.is_file() else folder
    found: dict[str, str] = {}
    if (folder / CARD).is_file():
        front = FRONT.match((folder / CARD).read_text(encoding="utf-8", errors="replace"))
        lines = LICENSE.findall(front[1]) if front else ()
        found = {key: text.strip("\"'") for key, text in lines}
    if "license" not in found and isinstance(config.get("license"), str):
        return {"license": config["license"]}
    return found if "license" in found else {}


def _repository(name: str | None) -> str | None:
    """The repository of a name, None if it is a path on this machine.

    owner/name, owner/name/head.gguf, owner/name/folder -> owner/name
    """
    if name is None or Path(name).expanduser().exists():
        return None
    file = INSIDE.fullmatch(name)
    if file is not None:
        return file["repo"]
    return name if REPO_ID.fullmatch(name) else None


def _shown(name: str | None) -> str:
    """A link to a repository of the hub; for a folder only its last name, not its place."""
    if name is None:
        return "not named"
    repository = _repository(name)
    return f"[{name}](https://huggingface.co/{repository})" if repository else Path(name).name


def card(
    name: str, title: str, facts: Mapping[str, Any], sections: Sequence[str], **front: Any
) -> str:
    """The text of a card: ``front`` matter, a sentence (``title``), a table of facts, sections."""
    data = ModelCardData(**{"library_name": "mlx", "tags": TAGS, **front})
    table = "\n".join(f"| {fact} | {value} |" for fact, value in facts.items())
    head = f"---\n{data.to_yaml()}\n---"
    return "\n\n".join([head, f"# {name}", title, f"| | |\n|---|---|\n{table}", *sections]) + "\n"


def by_depth(rows: Mapping[str, Sequence[float]]) -> str:
    """A table of named figures for each depth k from 1."""
    depths = range(1, len(next(iter(rows.values()))) + 1)
    lines = [[name, *(f"{x:.3f}" for x in figures)] for name, figures in rows.items()]
    shown = [f"| {' | '.join(line)} |" for line in [["k", *map(str, depths)], *lines]]
    return "\n".join([shown[0], "|---" * (len(depths) + 1) + "|", *shown[1:]])


def stored_as(config: Mapping[str, Any], otherwise: str = "not quantized") -> str:
    """The packing of a converted folder for people: "4 to 6 bits, groups of 64"."""
    packing = config.get("quantization")
    return f"{bits_of(packing)}, groups of {packing['group_size']}" if packing else otherwise


def make_card(
    config: Mapping[str, Any],
    repo: str,
    source: str,
    target: str | None,
    family: str,
    license: Mapping[str, str],
    measured: str | None = None,
) -> str:
    """The card of a converted head: front matter, provenance, what was measured, usage.

    ``config`` is the converted head's, ``repo`` the id of the upload, ``license`` the result of
    ``source_license``, ``measured`` the table of ``--check``. Names of folders on this machine
    are cut to their last part.
    """
    front = {"license": "unknown", **license}
    licence = front.get("license_name", front["license"])
    facts = {
        "Target": _shown(target),
        "Source": _shown(source),
        "Family": family,
        "Stored as": stored_as(config),
        "Licence of the source": licence if license else "unknown: see the source",
    }
    figures = [] if measured is None else ["## Measured with its target", f"```\n{measured}\n```"]
    model = target if _repository(target) else "TARGET"
    use = (
        "```python\nimport mlx_lm, mlx_eagle\n\n"
        f'model, tokenizer = mlx_lm.load("{model}")\n'
        'print(mlx_eagle.generate(model, tokenizer, "Hello", draft_model='
        f'mlx_eagle.load_drafter("{repo}", model)))\n```'
    )
    command = f'mlx_eagle.generate --model {model} --draft-model {repo} --prompt "Hello"'
    return card(
        repo.split("/")[-1],
        f"A drafter {WHAT_IT_IS.format(made='converted to MLX')}",
        facts,
        [*figures, "## Use", use, f"```\n{command}\n```"],
        base_model=_repository(target) or _repository(source),
        tags=[*TAGS, config["kind"]],
        **front,
    )


def training_card(name: str, facts: Mapping[str, Any]) -> str:
    """The card of a trained head; ``facts`` are those under ``training`` in its config."""
    covered = f"{facts['draft_vocab_size']} tokens, {facts['coverage']:.2%} of the answers"
    recipe = f"loss {facts['loss']}, learning rate {facts['learning_rate']:g}"
    if facts["ttt_steps"]:
        recipe += f", training-time test of {facts['ttt_steps']} steps"
    shown = {
        "Target": facts["target"],
        "Began as": facts["init"] or "a fresh head",
        "Sequences": facts["num_sequences"],
        "Batches": f"{facts['iterations']} of {facts['batch_size']}",
        "Tokens seen": facts["trained_tokens"],
        "Draft vocabulary": covered,
        "Recipe": recipe,
    }
    sections = []
    length = "mean acceptance length"
    if found := facts["evaluation"]:
        rows = {"match at that depth": found["match"], length: found["lengths"]}
        title = f"On {found['num_sequences']} sequences that were held out:"
        sections += [title, by_depth(rows)]
    if found := facts["generated"]:
        before = facts["generated_before"]
        rows = {} if before is None else {f"{length} before": before["lengths"]}
        title = (
            f"Decoding {found['num_answers']} held-out prompts greedily, up to "
            f"{found['max_tokens']} tokens each:"
        )
        sections += [title, by_depth(rows | {length: found["lengths"]})]
    title = f"A draft head {WHAT_IT_IS.format(made='trained')}"
    return card(name, title, shown, [*sections, f"```\n{USAGE}\n```"])


SAME = (
    "hidden_size", "target_hidden_size", "intermediate_size", "head_dim", "hidden_act",
    "rms_norm_eps", "max_position_embeddings", "vocab_size", "draft_vocab_size",
    "norm_before_residual",
)  # fmt: skip
"""Fields of ``Eagle3Config`` that the flat layout has under the same names."""
SAID = {
    *SAME, "aux_boundary_ids", "aux_ids_source", "aux_nested_ids", "pre_fc_norm", "rope",
    "embed_source", "lm_head_source", "has_d2t", "model_type", "family", "speculative_tokens_hint",
}  # fmt: skip
"""Fields that it has a key or a name for, if they need one."""


def to_pytorch(head: str, folder: str) -> dict[str, Any]:
    """Write the converted head in the folder ``head`` as a PyTorch one, and return its config.

    ``folder`` must not exist; it gets ``config.json`` and ``model.safetensors`` with the names
    of SafeAILab's and SpecForge's checkpoints. Converting it again gives the same weights.
    Raises ValueError, one sentence, for a quantized head, and for one that the layout cannot
    describe.
    """
    source = Path(head).expanduser()
    destination = Path(folder).expanduser()
    if destination.exists():
        raise ValueError(f"{folder} is there already; remove it or choose another")
    values = read_config(source)
    if "quantization" in values:
        raise ValueError(
            f"{head} is quantized, and PyTorch engines read floats; convert its source again "
            "with --no-quantize, or train without --quantize"
        )
    config = Eagle3Config.from_dict(values, source / "config.json")
    _check(config, head)
    weights = read_weights(source)
    offsets = weights.pop("d2t", None)
    ids = draft_ids(offsets, config.draft_vocab_size, config.has_d2t, config.vocab_size)
    maps = vocabulary_maps(mx.arange(config.vocab_size) if ids is None else ids, config.vocab_size)
    named = {name.replace("layers.0.", "midlayer."): array for name, array in weights.items()}
    flat = _config(config, str(weights["fc.weight"].dtype).split(".")[-1])
    with new_folder(destination) as draft:
        save_arrays(draft / "model.safetensors", named | maps, layout="pt")
        text = json.dumps(flat, indent=2) + "\n"
        (draft / "config.json").write_text(text, encoding="utf-8")
    return flat


def _check(config: Eagle3Config, head: str) -> None:
    """Raise ValueError for what the flat layout cannot say; it stands for the defaults."""
    for name, value in config.unsaid(SAID, num_layers=1).items():
        raise ValueError(
            f"{head} has {name} {getattr(config, name)}, which the flat PyTorch layout cannot say "
            f"(it means {value}); it stays an MLX head"
        )
    if config.pre_fc_norm == "concat":
        raise ValueError(f"{head} norms its features as one, which the flat layout cannot say")
    if config.lm_head_source != "file":
        raise ValueError(
            f"{head} takes its output matrix from the target; convert its source again without "
            "--target"
        )


def _config(c: Eagle3Config, dtype: str) -> dict[str, Any]:
    flat: dict[str, Any] = {name: getattr(c, name) for name in SAME}
    flat |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "rope_theta": c.rope["theta"],
        "fc_norm": c.pre_fc_norm == "per_feature",
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }
    scaling = c.rope.get("scaling")
    if scaling:
        flat["rope_scaling"] = {"rope_type": scaling["type"], **scaling}
    dims = c.rope.get("dims")
    if dims and dims != c.head_dim:
        flat["partial_rotary_factor"] = dims / c.head_dim
    if c.aux_nested_ids is not None:
        flat["eagle_config"] = {TAPS: list(c.aux_nested_ids)}  # as they were found
    elif c.aux_boundary_ids is not None:
        flat[TAPS] = list(c.aux_boundary_ids)  # as vLLM numbers them: what enters these layers
    return flat
