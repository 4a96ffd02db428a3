"""Folder of a converted drafter: its files, read and written, and a module filled with them.

A converted folder holds a ``config.json`` that names its ``kind`` and a ``model.safetensors``.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, get_args

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..system.atomic_folder import new_file
from ..system.cli_values import GROUP_SIZES, QUANTIZED_BITS
from ..system.fields import BOOL, OBJECT, TEXT, FieldType, Table, check, is_whole, shown, whole
from ..system.json_file import read_object
from ..system.safetensors import read_header, save_arrays
from .kind import LoadOptions, Tensors
from .quantize import quantize_now
from .target_parts import TargetSizes

BITS = FieldType("2, 3, 4, 5, 6 or 8", lambda v: is_whole(v) and v in QUANTIZED_BITS)
GROUP = FieldType("32, 64 or 128", lambda v: is_whole(v) and v in GROUP_SIZES)
LARGEST_WIDTH = 2**24  # of a matrix: no head has a wider one
SIZE = whole(1, LARGEST_WIDTH)
Size = Annotated[int, SIZE]
PACKING: Table = {"bits": BITS, "group_size": GROUP}
FOLDER: Table = {"kind": TEXT, "quantization": PACKING, "source": {"path": TEXT, "files": OBJECT}}
"""Keys of every ``config.json`` of a converted folder, besides its kind's own fields."""
FLOATS = (mx.float16, mx.bfloat16, mx.float32)
Built = TypeVar("Built", bound=nn.Module)


def read_config(folder: Path, kinds: Collection[str] = ("eagle3",)) -> dict[str, Any]:
    """The ``config.json`` of a converted folder; ValueError where it is of none of ``kinds``."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json: it is not a converted head.")
    config = read_object(path)
    if kind_in(config) not in kinds:
        raise ValueError(
            f"{folder} holds a {shown(kind_in(config))} model, not a converted EAGLE-3 head: "
            "convert the checkpoint first with mlx_eagle.convert --hf-path SRC --mlx-path DST."
        )
    return config


@dataclass(frozen=True)
class FolderConfig(ABC):
    """Base of the configs of converted folders, every field resolved.

    A field that is no flag says in its annotation what it may hold: ``Annotated[int, SIZE]``.
    """

    hidden_size: Size
    vocab_size: Size

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str | Path = "config.json") -> Self:
        """Read the known fields of a ``config.json``, which ``where`` names in messages.

        Lists become tuples, and nulls are left out. Raises ValueError for a field that is missing,
        of a wrong kind, or contradicts another: see ``rules``.
        """
        table = {f.name: BOOL if f.type is bool else get_args(f.type)[1] for f in fields(cls)}
        check(values, {**table, **FOLDER}, where)
        found: dict[str, Any] = {}
        for field in fields(cls):
            value = values.get(field.name)
            if value is not None:
                found[field.name] = tuple(value) if isinstance(value, list) else value
            elif field.default is MISSING and field.default_factory is MISSING:
                raise ValueError(f"{where} has no {field.name}: convert the head again.")
        config = cls(**found)
        for names, holds in config.rules():
            if not holds:
                given = ", ".join(f"{n} {shown(getattr(config, n))}" for n in names.split())
                raise ValueError(
                    f"{where} gives {given}, which no head has: convert or fetch it again."
                )
        return config

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def made_for(
        cls, values: Mapping[str, Any], where: str | Path, target: TargetSizes | None
    ) -> str:
        """The sizes of its targets; see ``Kind.made_for``."""
        config = cls.from_dict(values, where)
        if target is not None:
            config.check_fit(target)
        return config.targets

    def rules(self) -> Iterator[tuple[str, bool]]:
        """Yield names of fields that have to go together, and whether they do."""
        yield from ()

    @abstractmethod
    def check_fit(self, target: TargetSizes) -> None:
        """Raise ValueError where drafter and target do not belong together."""

    @property
    def targets(self) -> str:
        """The sizes of its targets for people."""
        return f"for targets of hidden size {self.hidden_size} with {self.vocab_size} tokens"


def kind_in(config: Mapping[str, Any]) -> str:
    """The kind that a ``config.json`` names: of the first ones as their model_type."""
    return str(config.get("kind", config.get("model_type")))


def read_weights(folder: Path) -> dict[str, mx.array]:
    """The arrays of a converted folder; ValueError where they cannot be read."""
    path = folder / "model.safetensors"
    if not path.is_file():
        raise ValueError(f"{folder} has no model.safetensors: convert the head again.")
    try:
        read_header(path)
        loaded: Any = mx.load(str(path))
    except (RuntimeError, ValueError) as err:
        reason = str(err).strip().splitlines()[0]
        raise ValueError(
            f"{path} cannot be read ({reason}): it is damaged or cut short, copy or convert "
            "it again."
        ) from err
    return dict(loaded)


def write_files(
    folder: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, mx.array] | None = None,
    layout: str = "mlx",
) -> None:
    """Write the files of a drafter into ``folder``, each completely or not at all.

    Without ``weights``, those that are there stay as they are; ``layout`` is as in
    ``save_arrays``. Raises OSError where they do not fit.
    """
    if weights is not None:
        with new_file(folder / "model.safetensors") as draft:
            save_arrays(draft, weights, layout)
    with new_file(folder / "config.json") as draft:
        text = json.dumps(config, indent=4, sort_keys=layout == "mlx") + "\n"
        draft.write_text(text, encoding="utf-8")


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter of a module."""
    parameters: Any = tree_flatten(module.parameters())
    return {name: array.shape for name, array in parameters}


def rows_of(tensors: Tensors, name: str) -> int:
    """Number of rows of a published tensor; ValueError if there is none of that name."""
    if name not in tensors or not tensors[name].shape:
        raise ValueError(f"the checkpoint lacks {name}; it is incomplete")
    return tensors[name].shape[0]


def check_tensors(
    shapes: Mapping[str, tuple[int, ...]], tensors: Tensors | Mapping[str, mx.array]
) -> None:
    """Raise ValueError unless tensors are of these names and shapes; the map d2t may be there."""
    faults = [f"lacks {name}" for name in sorted(shapes) if name not in tensors]
    for name, shape in sorted(shapes.items()):
        if name in tensors and tuple(tensors[name].shape) != shape:
            found, wanted = (" x ".join(map(str, x)) for x in (tensors[name].shape, shape))
            faults.append(f"has {name} of {found}, expected {wanted}")
    faults += [f"has an unknown {name[:60]}" for name in sorted(tensors.keys() - {*shapes, "d2t"})]
    if faults:
        raise ValueError(
            f"the head {faults[0]}: it is incomplete, or its config or target is another's; "
            "convert or fetch it again."
        )


@contextmanager
def building() -> Iterator[None]:
    """Turn errors that MLX raises for a bad config into a ValueError."""
    try:
        yield
    except (ArithmeticError, KeyError, TypeError, ValueError) as err:
        raise ValueError(
            f"no head can be built as its config.json says ({err}): convert or fetch it again."
        ) from err


def read_module(
    make: Callable[[], Built],
    weights: dict[str, mx.array],
    stored: Mapping[str, Any] | None,
    options: LoadOptions,
    dtype: mx.Dtype,
    never_quantized: tuple[str, ...] = (),
    stored_name: Callable[[str], str] = str,
) -> Built:
    """The module that ``make`` builds, filled, and packed as ``stored`` or the options say.

    It computes in ``dtype`` unless these name another. Raises ValueError where something is wrong.
    """
    with building():
        module = make()
        quantize_as_stored(module, weights, stored or {}, stored_name)
    fill(module, weights)
    quantize_now(module, stored, options.quantization(), never_quantized)
    module.set_dtype(options.dtype or dtype)
    return module


def fill(module: nn.Module, weights: dict[str, mx.array]) -> None:
    """Give ``module``, quantized as they are, its weights; ValueError names what is wrong."""
    check_tensors(shapes_of(module), weights)
    for name in weights:
        is_packed = name.endswith(".weight") and name.replace(".weight", ".scales") in weights
        if weights[name].dtype != mx.uint32 if is_packed else weights[name].dtype not in FLOATS:
            raise ValueError(
                f"the head's {name} is stored as {weights[name].dtype}: convert the head again."
            )
    module.load_weights(list(weights.items()))


def quantize_as_stored(
    module: nn.Module,
    weights: Mapping[str, mx.array],
    quantization: Mapping[str, Any],
    stored_name: Callable[[str], str] = str,
) -> None:
    """Quantize each layer of ``module`` that ``weights`` have scales for, as its entry says.

    ``stored_name`` tells under which path ``quantization`` speaks of a layer. Raises ValueError
    where it does not.
    """
    usual = {k: v for k, v in quantization.items() if k in (*PACKING, "mode")}

    def params(path: str, _: nn.Module) -> bool | dict[str, Any]:
        if f"{path}.scales" not in weights:
            return False
        entry = quantization.get(stored_name(path), usual)
        check({path: entry}, {path: PACKING}, "quantization")
        if "bits" not in entry:
            raise ValueError(f"{path} is packed, but nothing says how")
        return dict(entry)

    nn.quantize(module, class_predicate=params)
