"""JSON files written by others: read in one place, with errors that name the file, what was found
and what was expected.

The limits are such that no honest file comes near them. A reader says what it expects as a
table of ``FieldType`` by key, and can rely on it afterwards.
"""

import json
from pathlib import Path
from typing import Any

from .fields import FILE_NAME, is_finite, is_number, shown

MAX_DEPTH = 32
MAX_MEMORY = 64 << 20
"""Bytes that reading one document may take: its text, the strings in it, and its values."""
BYTES_PER_VALUE = 200


def read_bytes(path: Path) -> bytes:
    """The bytes of a file; ValueError where it cannot be read or is far too large.

    A pipe is refused: opening one waits until another process writes.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ValueError(f"{path} is a pipe or a device, expected a file")
        with path.open("rb") as file:
            data = file.read(MAX_MEMORY + 1)
    except OSError as err:
        raise ValueError(f"{path} cannot be read: {err.strerror}") from err
    if len(data) > MAX_MEMORY:
        raise ValueError(f"{path} is larger than {MAX_MEMORY >> 20} MB, which no such file is")
    return data


def parse_object(data: bytes, where: str | Path, any_number: bool = False) -> dict[str, Any]:
    """The JSON object in ``data``, its numbers finite and below 2**63, its depth bounded.

    With ``any_number`` numbers may also be infinite and larger: who uses one has to check it.
    ``where`` names the file in messages. Raises ValueError for anything else; the memory that
    parsing takes is estimated before, so that a small file cannot become a large object.
    """
    num_values = 1 + sum(map(data.count, (b",", b"[", b"{")))
    # Text and strings; with one rare character in them, four bytes for each of all others.
    num_bytes = len(data) * (2 if data.isascii() else 12) + num_values * BYTES_PER_VALUE
    if num_bytes > MAX_MEMORY:
        raise ValueError(
            f"{where} holds about {num_values} values in {len(data)} bytes, more than any such "
            "file has; download it again"
        )
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply to be read") from None
    except UnicodeError as err:
        raise ValueError(f"{where} is not valid UTF-8 text; download it again") from err
    except json.JSONDecodeError as err:
        raise ValueError(f"{where} is not valid JSON ({err}); download it again") from err
    except ValueError as err:  # Python's own words tell programmers how to let it through
        raise ValueError(
            f"{where} holds a number of thousands of digits, expected numbers below 2**63"
        ) from err
    if not isinstance(value, dict):
        raise ValueError(f"{where} holds {shown(value)}, expected a JSON object")
    _check_values(value, where, any_number, MAX_DEPTH)
    return value


def _check_values(value: Any, where: str | Path, any_number: bool, levels: int) -> None:
    if levels == 0:
        raise ValueError(f"{where} is nested more than {MAX_DEPTH} levels deep")
    for entry in value.values() if isinstance(value, dict) else value:
        if isinstance(entry, dict | list):
            _check_values(entry, where, any_number, levels - 1)
        elif not any_number and is_number(entry) and not is_finite(entry):
            raise ValueError(
                f"{where} holds {shown(entry)}, expected numbers that are finite and below 2**63"
            )


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file (see ``parse_object``); ValueError where there is none."""
    return parse_object(read_bytes(path), path)


def read_published(path: Path) -> dict[str, Any]:
    """The JSON object in a published config, with any numbers: Mamba's time steps are infinite."""
    return parse_object(read_bytes(path), path, any_number=True)


def read_weight_map(path: Path) -> dict[str, str]:
    """The ``weight_map`` of an index file: the file of each tensor, beside the index."""
    files = read_object(path).get("weight_map", {})
    if not isinstance(files, dict):
        raise ValueError(f"{path}: weight_map is {shown(files)}, expected an object")
    for name in files.values():
        if not FILE_NAME.holds(name):
            raise ValueError(f"{path}: weight_map names {shown(name)}, expected {FILE_NAME.words}")
    return files
