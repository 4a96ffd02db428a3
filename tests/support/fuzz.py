"""Hostile files by the thousand, in a process of its own: seeded, until its time is up.

``python fuzz.py FOLDER SEED SECONDS`` prints a JSON object: how many files of each kind
made a head and how many a sentence, and a line for every other outcome. Any other outcome is a
failure: an exception that is no ValueError or that a library raised, a message of several
lines, something left behind, more memory than ``ALLOWANCE`` beyond the file's size.
"""

import contextlib
import io
import json
import pickle
import pickletools
import random
import resource
import shutil
import struct
import sys
import time
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import mlx.core as mx
import numpy as np
from block_twin import LEARNED, tiny_dflash2
from checkpoints import (
    CONFIG,
    SPECULATORS,
    as_midlayer,
    eagle3_tensors,
    state_dict_pickle,
    write_bin,
    write_config,
    write_gguf,
    write_safetensors,
)
from gguf_files import write_blocks
from helpers import PROMPT, speculative, tiny_llama
from mlx.utils import tree_flatten

import mlx_eagle.convert
from mlx_eagle.convert import convert
from mlx_eagle.drafters.kinds import load_drafter

ALLOWANCE = 64 << 20
LONGEST = 900
MOST_SECONDS = 10
OURS = [Path(module.__file__).resolve().parent for module in (mlx_eagle, mlx_eagle.convert)]
TENSORS = as_midlayer(eagle3_tensors())
ODD = [
    None, True, False, 0, -1, 1, 2, 3, 7, 64, 2**31, 2**63, 2**70, -(2**70), 0.0, 1e-300, 1e308,
    -0.5, float("nan"), float("inf"), "", "x", "1", "../x", "/etc/passwd", "\n", "x" * 9000,
    "\ud800", [], [1], ["x"], [[]], [None], [-1, 2**40], list(range(40)), {}, {"a": {}},
    {"type": 3}, {"rope_type": "yarn"}, {"factor": 0}, "yarn", "llama3", "linear", "target",
]  # fmt: skip
KEYS = [
    "rope_scaling", "rope_parameters", "rope_theta", "head_dim", "num_key_value_heads",
    "transformer_layer_config", "speculators_config", "layer_types", "sliding_window",
    "eagle_aux_hidden_state_layer_ids", "target_layer_ids", "draft_vocab_size", "vocab_size",
    "eagle_config", "num_target_layers",
    "target_hidden_size", "hidden_act", "norm_output", "fc_norm", "rms_norm_eps", "architectures",
    "max_position_embeddings", "partial_rotary_factor", "rotary_dim", "quantization_config",
    "num_attention_heads", "hidden_size", "use_sliding_window", "model_type", "weight_map",
]  # fmt: skip
ROPES = [
    {"rope_type": kind, "factor": factor, "original_max_position_embeddings": length, **more}
    for kind in ("yarn", "linear", "llama3", "dynamic", "longrope")
    for factor in (1e-5, 1, 4.0, 1e5)
    for length in (1, 512, 1e8)
    for more in ({}, {"truncate": False}, {"attention_factor": 0.5}, {"mscale": -7.2})
]


def fuzz_bytes(rng: random.Random, data: bytes, reach: int | None = None) -> bytes:
    """A few bytes of the first ``reach`` changed, put in, taken out, or the rest cut off."""
    edited = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 9))):
        at = rng.randrange(min(len(edited), reach or len(edited)) or 1)
        match rng.randrange(6):
            case 0:
                edited[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                edited[at : at + 4] = rng.choice((b"\xff" * 4, b"\0" * 4, b"\x80\0\0\0"))
            case 2:
                number = rng.choice((0, 1, 2**31, 2**62, 2**64 - 1))
                edited[at : at + 8] = struct.pack("<Q", number)
            case 3:
                edited[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 4:
                del edited[at : at + rng.randrange(1, 9)]
            case 5:
                edited[at : at + 1] = bytes(b ^ 1 << rng.randrange(8) for b in edited[at : at + 1])
    if rng.random() < 0.1:
        del edited[rng.randrange(len(edited) + 1) :]
    return bytes(edited)


def odd_value(rng: random.Random) -> object:
    if rng.random() < 0.1:
        return dict(rng.choice(ROPES))
    value = deepcopy(rng.choice(ODD))
    for _ in range(rng.choice((0, 0, 0, 1, 3, 40))):
        value = [value] if rng.random() < 0.5 else {rng.choice(KEYS): value}
    return value


def fuzz_object(rng: random.Random, values: dict, keys: list[str]) -> dict:
    """Some values of the object, or of one within it, replaced by odd ones."""
    edited = json.loads(json.dumps(values))
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        place = edited
        while rng.random() < 0.5:
            inner = [v for v in place.values() if isinstance(v, dict)]
            if not inner:
                break
            place = rng.choice(inner)
        known = list(place) if rng.random() < 0.6 and place else keys
        key = rng.choice(known)
        if rng.random() < 0.1:
            place.pop(key, None)
        else:
            place[key] = odd_value(rng)
    return edited


def write_json(rng: random.Random, path: Path, values: dict) -> None:
    data = json.dumps(values).encode()
    if rng.random() < 0.15:
        data = fuzz_bytes(rng, data)
    if rng.random() < 0.02:
        data = rng.choice((b"[" * 10**5, b'{"a":' * 10**5, b"1" * 10**5, b"[]", b"", b"null"))
    path.write_bytes(data)


def fuzz_pickle(rng: random.Random, data: bytes) -> bytes:
    """Opcodes of the whole language put in, taken out or repeated, at their boundaries."""
    places = [at for _, _, at in pickletools.genops(data)]
    parts = [data[a:b] for a, b in zip(places, [*places[1:], len(data)], strict=True)]
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        at = rng.randrange(len(parts))
        match rng.randrange(5):
            case 0:
                code = rng.choice(pickletools.opcodes).code.encode("latin-1")
                parts.insert(at, code + rng.randbytes(rng.choice((0, 0, 1, 2, 4, 8))))
            case 1:
                parts.insert(at, rng.choice(parts))
            case 2:
                del parts[at]
            case 3:
                parts[at] = pickle.dumps(rng.choice(ODD[:-3]), 2)[2:-1]
            case 4:
                parts[at] = b"J" + struct.pack("<i", rng.choice((-1, 0, 1, 2**31 - 1, -(2**31))))
        if not parts:
            return b"."
    return b"".join(parts)


def bin_file(rng: random.Random, folder: Path) -> None:
    write_config(folder, CONFIG)
    path = folder / "pytorch_model.bin"
    data = fuzz_pickle(rng, state_dict_pickle(TENSORS))
    if rng.random() < 0.3:
        data = fuzz_bytes(rng, data)
    write_bin(path, TENSORS, data or b".")


def zip_file(rng: random.Random, folder: Path) -> None:
    write_config(folder, CONFIG)
    path = folder / "pytorch_model.bin"
    write_bin(path, TENSORS)
    data = path.read_bytes()
    start = data.rfind(b"PK\x05\x06") - rng.choice((0, 200, 3000))
    path.write_bytes(data[:start] + fuzz_bytes(rng, data[start:]))
    if rng.random() < 0.2:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", state_dict_pickle(TENSORS))


def fuzz_header(rng: random.Random, path: Path) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.5:
        path.write_bytes(fuzz_bytes(rng, data, reach=8 + length))
        return
    header = fuzz_object(rng, json.loads(data[8 : 8 + length]), ["shape", "data_offsets", "dtype"])
    fresh = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(fresh)) + fresh + data[8 + length :])


def safetensors_file(rng: random.Random, folder: Path) -> None:
    write_safetensors(folder, CONFIG, TENSORS)
    fuzz_header(rng, folder / "model.safetensors")


def gguf_file(rng: random.Random, folder: Path) -> None:
    folder.mkdir()
    path = write_gguf(folder / "head.gguf", eagle3_tensors(), CONFIG, rng.choice(("F16", "Q8_0")))
    path.write_bytes(fuzz_bytes(rng, path.read_bytes(), reach=2600))


def block_head_file(rng: random.Random, folder: Path) -> None:
    folder.mkdir()
    head = tiny_dflash2(tiny_llama(num_hidden_layers=6)).head
    tensors = {name: np.array(array) for name, array in tree_flatten(head.parameters())}
    path = write_blocks(folder / "head.gguf", tensors, LEARNED["dflash2"])
    path.write_bytes(fuzz_bytes(rng, path.read_bytes(), reach=6000))


def config_file(rng: random.Random, folder: Path) -> None:
    write_safetensors(folder, CONFIG, TENSORS)
    values = fuzz_object(rng, rng.choice((CONFIG, SPECULATORS)), KEYS)
    write_json(rng, folder / "config.json", values)


def index_file(rng: random.Random, folder: Path) -> None:
    write_safetensors(folder, CONFIG, TENSORS)
    values = {"metadata": {}, "weight_map": dict.fromkeys(TENSORS, "model.safetensors")}
    values = fuzz_object(rng, values, list(TENSORS))
    write_json(rng, folder / "model.safetensors.index.json", values)


def converted_folder(rng: random.Random, folder: Path) -> None:
    shutil.copytree(folder.parent / f"converted{rng.randrange(2)}", folder)
    path = folder / "config.json"
    if rng.random() < 0.3:
        fuzz_header(rng, folder / "model.safetensors")
    else:
        values = json.loads(path.read_text())
        write_json(rng, path, fuzz_object(rng, values, list(values)))


KINDS: dict[str, Callable[[random.Random, Path], None]] = {
    "pickle": bin_file,
    "zip": zip_file,
    "safetensors": safetensors_file,
    "gguf": gguf_file,
    "gguf blocks": block_head_file,
    "config": config_file,
    "index": index_file,
    "converted": converted_folder,
}


def reset_peak() -> None:
    """Let ``peak`` start anew, where the system can (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """The most memory that this process has had since ``reset_peak``, or ever, in bytes."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Fuzzer:
    """``outcomes`` counts heads and sentences by kind; ``failures`` are all others."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.model = tiny_llama(vocab_size=128, num_hidden_layers=6)
        self.outcomes: Counter[str] = Counter()
        self.failures: list[str] = []
        source = write_safetensors(folder / "plain", CONFIG, TENSORS)
        for number, quantize in enumerate((True, False)):
            self.use(source, folder / f"converted{number}", quantize)

    def use(self, source: Path, out: Path, quantize: bool = True) -> None:
        """Convert, load and draft with it."""
        with contextlib.redirect_stdout(io.StringIO()):
            if not source.name.startswith("converted"):
                convert(str(source), str(out), quantize=quantize)
            else:
                out = source
            drafter = load_drafter(out, self.model)
        speculative(self.model, drafter, PROMPT, 3, num_draft_tokens=2)

    def write(self, kind: str, seed: int) -> None:
        """One file of a kind, read, and removed again."""
        case = self.folder / ("converted-case" if kind == "converted" else "case")
        rng = random.Random(seed)
        KINDS[kind](rng, case)
        self.read(kind, f"{kind} {seed}", case, rng.random() < 0.5)
        shutil.rmtree(case)

    def read(self, kind: str, label: str, case: Path, quantize: bool = True) -> None:
        """What becomes of the files in a folder, and what it takes."""
        size = sum(path.stat().st_size for path in case.iterdir())
        source = case / "head.gguf" if (case / "head.gguf").exists() else case
        out, started = self.folder / "out", time.process_time()
        reset_peak()
        before = peak()
        try:
            self.use(source, out, quantize)
            self.outcomes[f"{kind}: heads"] += 1
        except ValueError as err:
            self.outcomes[f"{kind}: sentences"] += 1
            self._check_sentence(label, err)
        except Exception:  # whatever it is, it is what we are looking for
            self.failures.append(f"{label}: {traceback.format_exc()[-1500:]}")
        growth, seconds = peak() - before, time.process_time() - started
        if growth > ALLOWANCE + size or seconds > MOST_SECONDS:
            self.failures.append(f"{label}: {growth >> 20} MB for {size} B in {seconds:.0f} s")
        shutil.rmtree(out, ignore_errors=True)

    def _check_sentence(self, label: str, err: ValueError) -> None:
        *_, last = traceback.extract_tb(err.__traceback__)
        if not any(Path(last.filename).resolve().is_relative_to(path) for path in OURS):
            self.failures.append(f"{label}: not our sentence: {err!r} {last}"[:900])
        if "\n" in str(err) or not 10 < len(str(err)) < LONGEST:
            self.failures.append(f"{label}: no sentence: {str(err)[:2000]!r}")
        if any(path.name.endswith(".part") for path in self.folder.iterdir()):
            self.failures.append(f"{label}: left something behind")


def main(folder: str, seed: str, seconds: str = "0") -> None:
    """Fuzz for that long; with the seed ``bombs`` read the folders in FOLDER/bombs."""
    warnings.simplefilter("ignore")
    mx.set_default_device(mx.cpu)
    fuzzer = Fuzzer(Path(folder))
    if seed == "bombs":
        for case in sorted(Path(folder, "bombs").iterdir()):
            fuzzer.read("bombs", case.name, case)
    else:
        number, end = int(seed), time.monotonic() + float(seconds)
        while time.monotonic() < end and len(fuzzer.failures) < 20:
            for kind in KINDS:
                fuzzer.write(kind, number)
            number += 1
    print(json.dumps({"outcomes": fuzzer.outcomes, "failures": fuzzer.failures}))


if __name__ == "__main__":
    main(*sys.argv[1:])
