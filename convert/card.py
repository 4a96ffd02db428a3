"""Model card of a converted head, and the result of ``--check`` as a table and an entry.

It goes into the hub's front matter and the ``check`` entry of ``config.json``.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from mlx_eagle.drafters.folder import bits_of
from mlx_eagle.system.hub import FOLDER_ID, GGUF_FILE, REPO_ID, locate

from .check import DEPTHS, Report, Row

CARD = "README.md"
TAGS = ["mlx", "speculative-decoding", "draft-model"]
# What the hub reads of a licence; the last two belong to `license: other`.
LICENSE_KEYS = ("license", "license_name", "license_link")


def verdict(report: Report) -> str:
    """One sentence: which setting wins, and what to do about it."""
    winner, ours = report.winner, report.resolved
    if winner is not ours:
        return (
            f"warning: {winner.name} fits better (overlap {winner.overlap:.3f}, not "
            f"{ours.overlap:.3f}): convert the head again with {winner.flag}"
        )
    if not ours.is_better_than(report.baseline):
        return (
            "warning: the head does no better than with features of the wrong positions: "
            "it is damaged, or was trained for another target"
        )
    close = [row.name for row in report.alternatives if not ours.is_better_than(row)]
    doubt = f"; these texts do not tell it from {', '.join(close)}" if close else ""
    return f"winner: {ours.name}{doubt}"


def check_table(report: Report) -> str:
    """All that was measured, a line a setting, and the verdict."""
    rows = [report.resolved, *([report.quantized] if report.quantized else [])]
    rows += [*report.alternatives, report.baseline]
    width = max(len(row.name) for row in rows)
    depths = " ".join(f"depth {depth}" for depth in range(1, DEPTHS + 1))
    lines = [
        f"agreement with the target at {report.num_positions} positions of "
        f"{report.num_prompts} texts",
        f"{'':{width}} {depths}   tau overlap   behind by",
    ]
    for row in rows:
        shares = " ".join(f"{share:7.1%}" for share in row.agreement)
        line = f"{row.name:{width}} {shares}  {row.tau:4.2f}   {row.overlap:.3f}"
        if row is not report.resolved:
            lead, error = report.resolved.lead_over(row)
            line += f"  {lead:+.3f} ±{error:.3f}"
        lines.append(line)
    return "\n".join([*lines, verdict(report)])


def _row_entry(row: Row) -> dict[str, Any]:
    values = {
        "agreement": [round(share, 4) for share in row.agreement],
        "tau": round(row.tau, 3),
        "overlap": round(row.overlap, 4),
    }
    return values if row.flag is None else {"override": row.flag, **values}


def check_entry(report: Report) -> dict[str, Any]:
    """What goes under ``check`` into the converted head's ``config.json``."""
    values = {
        "num_prompts": report.num_prompts,
        "num_positions": report.num_positions,
        **_row_entry(report.resolved),
        "alternatives": {row.name: _row_entry(row) for row in report.alternatives},
        "baseline": {report.baseline.name: _row_entry(report.baseline)},
        "winner": report.winner.name,
    }
    if report.quantized is not None:
        values["quantized"] = _row_entry(report.quantized)
    return values


def source_license(
    source: str, config: Mapping[str, Any], revision: str | None = None
) -> dict[str, str]:
    """The licence that the source's card names, or its config; {} where neither does.

    apache-2.0 -> {"license": "apache-2.0"}
    """
    folder = locate(_repository(source) or source, (CARD,), revision)
    folder = folder.parent if folder.is_file() else folder
    found: dict[str, str] = {}
    if (folder / CARD).is_file():
        text = (folder / CARD).read_text(encoding="utf-8", errors="replace")
        front = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
        for key in LICENSE_KEYS:
            line = front and re.search(rf"^{key}:[ \t]*(\S.*?)[ \t]*$", front[1], re.MULTILINE)
            if line:
                found[key] = line[1].strip("\"'")
    if "license" not in found and isinstance(config.get("license"), str):
        return {"license": config["license"]}
    return found if "license" in found else {}


def _repository(name: str | None) -> str | None:
    """The repository a name stands for, None where it is a path on this machine.

    owner/name, owner/name/head.gguf, owner/name/folder -> owner/name
    """
    if name is None or Path(name).expanduser().exists():
        return None
    file = GGUF_FILE.fullmatch(name) or FOLDER_ID.fullmatch(name)
    if file:
        return file["repo"]
    return name if REPO_ID.fullmatch(name) else None


def _shown(name: str | None) -> str:
    """A link for what lies on the hub; of a folder its last name only, not where it is."""
    if name is None:
        return "not named"
    repository = _repository(name)
    return f"[{name}](https://huggingface.co/{repository})" if repository else Path(name).name


def _agreement(check: Mapping[str, Any] | None) -> list[str]:
    """The section about what ``--check`` measured; none where it did not run."""
    if check is None:
        return []
    if "mean_acceptance_length" in check:
        return [
            "## Measured acceptance",
            "",
            f"{check['mean_acceptance_length']} tokens per pass of the target, in "
            f"{check['num_prompts']} answers of its own.",
            "",
        ]
    rows = [("as converted, not quantized", check)]
    if "quantized" in check:
        rows.append(("as stored here, quantized", check["quantized"]))
    depths = len(check["agreement"])
    heads = " | ".join(f"depth {depth}" for depth in range(1, depths + 1))
    lines = [
        "## Measured agreement",
        "",
        f"Share of drafted tokens that equal the target's own greedy text, at "
        f"{check['num_positions']} positions of {check['num_prompts']} short answers:",
        "",
        f"| | {heads} |",
        "|---" * (depths + 1) + "|",
    ]
    for name, values in rows:
        shares = " | ".join(f"{share:.1%}" for share in values["agreement"])
        lines.append(f"| {name} | {shares} |")
    return [*lines, ""]


def make_card(
    config: Mapping[str, Any],
    repo: str,
    source: str,
    target: str | None,
    family: str,
    license: Mapping[str, str],
) -> str:
    """The text of the card: front matter, provenance, agreement, usage.

    ``config`` is the converted head's, ``repo`` the id it is uploaded under, ``license`` as
    ``source_license`` gives it. Names of folders on this machine are cut to their last part.
    """
    base = _repository(target) or _repository(source)
    front = {"license": "unknown", **license}
    data = ModelCardData(
        base_model=base, library_name="mlx", tags=[*TAGS, config["kind"]], **front
    )
    quantization = config.get("quantization")
    stored = "not quantized"
    if quantization:
        stored = f"{bits_of(quantization)}, groups of {quantization['group_size']}"
    licence = front.get("license_name", front["license"])
    model = target if _repository(target) else "TARGET"
    lines = [
        "---",
        data.to_yaml(),
        "---",
        "",
        f"# {repo.split('/')[-1]}",
        "",
        "A drafter for speculative decoding, converted to MLX by mlx-eagle. It is no model of "
        "its own: it drafts tokens that its target accepts or replaces.",
        "",
        "| | |",
        "|---|---|",
        f"| Target | {_shown(target)} |",
        f"| Source | {_shown(source)} |",
        f"| Family | {family} |",
        f"| Stored as | {stored} |",
        f"| Licence of the source | {licence if license else 'unknown: see the source'} |",
        "",
        *_agreement(config.get("check")),
        "## Use",
        "",
        "```python",
        "import mlx_lm, mlx_eagle",
        "",
        f'model, tokenizer = mlx_lm.load("{model}")',
        f'print(mlx_eagle.generate(model, tokenizer, "Hello", draft_model='
        f'mlx_eagle.load_drafter("{repo}", model)))',
        "```",
        "",
        "```",
        f'mlx_eagle.generate --model {model} --draft-model {repo} --prompt "Hello"',
        "```",
    ]
    return "\n".join(lines) + "\n"
