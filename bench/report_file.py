"""Report file: the figures of one machine in a small JSON file, for ``measured/`` and its table.

Its form is ``report_file.schema.json``. It names no path, no user and no prompt.
"""

import json
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlx_eagle.system.device import memory, this_machine
from mlx_eagle.system.json_file import read_object

from .summary import prompts_of

SCHEMA = Path(__file__).with_name("report_file.schema.json")
SELF_TEST = "mlx_eagle.doctor --self-test"
GB = 1e9
LONGEST = 150  # characters of a complaint, at whose end is what was expected


def report_of(
    document: Mapping[str, Any], notes: str = "", by: str = "mlx_eagle.bench"
) -> dict[str, Any]:
    """The report file of a benchmark's document of results.

    Raises ValueError, in one sentence, where nothing was timed.
    """
    conditions = document["conditions"]
    machine = this_machine()
    scenarios = document["scenarios"]
    precisions = {each["name"]: each["precision"] for each in conditions["drafters"]}
    report = {
        "format": 1,
        "date": conditions["date"].split()[0],
        "by": by,
        "notes": notes,
        "machine": {
            **{key: conditions[key] for key in ("chip", "cores", "load_average", "blas")},
            "os": system(),
            "backend": machine.backend,
            "memory_gb": round(memory(machine)[0] / GB, 1),
        },
        "versions": {key: conditions[key] for key in ("mlx-eagle", "mlx", "mlx-lm", "python")},
        "target": {
            "name": public_name(conditions["model"]),
            "precision": conditions["model_precision"],
            "gigabytes": float(f"{conditions['model_bytes'] / GB:.4g}"),
        },
        "drafters": [
            {
                "name": public_name(drafter["name"]),
                "precision": precisions[drafter["name"]],
                "d": round(drafter["costs"]["d"], 4),
                "c": {str(k): round(v, 3) for k, v in drafter["costs"]["verify_cost"].items()},
            }
            for drafter in scenarios[0]["drafters"]
        ],
        "runs": [run for scenario in scenarios for run in runs_of(scenario)],
    }
    if not report["runs"]:
        raise ValueError("nothing was timed that a report could hold: give more --max-tokens.")
    return report


def runs_of(scenario: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """An entry for each way to draft of a scenario that was timed, and drafted."""
    for way in scenario["configurations"]:
        own = prompts_of(scenario, way)
        overall = way["overall"]
        if not way["drafter"] or not overall["tps"] or not overall["plain_tps"]:
            continue
        yield {
            "drafter": public_name(way["drafter"]),
            "drafts": way["label"].removeprefix(f"{way['drafter']}, "),
            "temperature": scenario["temp"],
            "context": scenario["context"],
            "prompts": ", ".join(map(public_name, way["sets"])),
            "tokens": overall["output_tokens"],
            "plain_tps": round(overall["plain_tps"], 3),
            "tps": round(overall["tps"], 3),
            "tau": round(overall["mean_acceptance_length"], 3),
            "identical": sum(row["parity"]["identical"] for row in own),
            "texts": len(own),
            "exact": way["exact"],
        }


def system() -> str:
    """The system and the first two numbers of its version: "macOS 15.5", "Linux 6.12"."""
    mac = platform.mac_ver()[0]
    number = re.match(r"\d+(\.\d+)?", mac or platform.release())
    name = "macOS" if mac else platform.system()
    return f"{name} {number[0]}" if number else name


def public_name(name: str) -> str:
    """A model's name without the folders that it lies in, which are nobody's business.

    "/home/ann/models/x" -> "x"; "mlx-community/x" stays, unless there is such a folder here
    """
    path = Path(name).expanduser()
    return path.name if path.is_absolute() or name[:1] in ".~" or path.exists() else name


def write_report(report: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(report, indent=1) + "\n")


def read_report(path: Path) -> dict[str, Any]:
    """The report in a file; ValueError, in one sentence, where it is not one."""
    try:
        from jsonschema import Draft202012Validator
    except ImportError as err:
        needs = "needs jsonschema: pip install 'mlx-eagle[bench]'"
        raise ValueError(f"{path} cannot be checked, which {needs}.") from err
    report = read_object(path)
    for error in Draft202012Validator(json.loads(SCHEMA.read_text())).iter_errors(report):
        words = " ".join(error.message.split())[-LONGEST:]
        raise ValueError(
            f"{path} is no report as mlx_eagle.bench --report writes it: {words} (at "
            f"{error.json_path}). Let it write one, and change nothing in it."
        )
    names = [drafter["name"] for drafter in report["drafters"]]
    for i, run in enumerate(report["runs"]):  # no schema can say it
        if run["identical"] > run["texts"]:
            raise ValueError(f"{path}: of runs[{i}] more texts are identical than there are.")
        if run["drafter"] not in names:
            raise ValueError(f"{path}: the drafter of runs[{i}] is none of {', '.join(names)}.")
    return report
