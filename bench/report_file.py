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
from mlx_eagle.system.fields import is_number, is_whole, shown
from mlx_eagle.system.json_file import read_object

from .summary import prompts_of, way_of

SCHEMA = Path(__file__).with_name("report_file.schema.json")
BENCH = "mlx_eagle.bench"
SELF_TEST = "mlx_eagle.doctor --self-test"
GB = 1e9
TYPES = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "integer": is_whole,
    "number": is_number,
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
}
BOUNDS = {
    "minimum": (lambda v, low: v >= low, "at least"),
    "maximum": (lambda v, high: v <= high, "at most"),
    "exclusiveMinimum": (lambda v, low: v > low, "more than"),
    "minLength": (lambda v, low: len(v) >= low, "a length of at least"),
    "maxLength": (lambda v, high: len(v) <= high, "a length of at most"),
    "minItems": (lambda v, low: len(v) >= low, "a length of at least"),
    "pattern": (lambda v, pattern: re.search(pattern, v) is not None, "text of the form"),
}
"""Keywords of a schema that bound a value: a test, and words in front of the bound."""


def report_of(document: Mapping[str, Any], notes: str = "", by: str = BENCH) -> dict[str, Any]:
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
    check_report(report, "the report")
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
            "drafts": way_of(way["label"], way["drafter"]),
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
    report = read_object(path)
    check_report(report, path)
    return report


def check_report(report: Mapping[str, Any], where: str | Path) -> None:
    """Raise ValueError for the first value that the schema does not allow."""
    schema = json.loads(SCHEMA.read_text())
    check_value(report, schema, where, "it")
    # What figures of one file say about others of it, no schema can.
    bounds = schema["properties"]["runs"]["items"]["properties"]
    bounds["drafter"]["enum"] = [drafter["name"] for drafter in report["drafters"]]
    for i, run in enumerate(report["runs"]):
        bounds["identical"]["maximum"] = run["texts"]
        check_value(run, schema["properties"]["runs"]["items"], where, f"runs[{i}]")


def check_value(value: Any, schema: Mapping[str, Any], where: str | Path, name: str) -> None:
    """Hold a value against a schema, as far as ours goes: see ``TYPES`` and ``BOUNDS``."""

    def refuse(expected: str) -> None:
        raise ValueError(f"{where}: {name} is {shown(value)}, expected {expected}")

    if "enum" in schema and value not in schema["enum"]:
        refuse(f"one of {', '.join(map(shown, schema['enum']))}")
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(TYPES[kind](value) for kind in kinds):
        refuse(" or ".join(kinds))
    for keyword, (holds, words) in BOUNDS.items():
        if keyword in schema and value is not None and not holds(value, schema[keyword]):
            refuse(f"{words} {schema[keyword]}")
    if isinstance(value, dict):
        inside = "" if name == "it" else f"{name}."
        known = schema.get("properties", {})
        others = schema.get("additionalProperties", {})
        missing = [key for key in schema.get("required", ()) if key not in value]
        if missing:
            raise ValueError(f"{where}: {inside}{missing[0]} is missing")
        for key, entry in value.items():
            if key not in known and others is False:
                raise ValueError(f"{where}: {inside}{key} is not a field of such a report")
            check_value(entry, known.get(key, others), where, f"{inside}{key}")
    if isinstance(value, list):
        for i, entry in enumerate(value):
            check_value(entry, schema.get("items", {}), where, f"{name}[{i}]")
