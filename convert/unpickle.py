"""A pickle machine that reads what torch writes for a dictionary of tensors, and nothing else.

A pickle is a program, and Python's machine runs the whole language. This one knows the
thirty-odd opcodes and the few names that ``torch.save`` emits (protocol 2, or another one that
its caller asked for). It calls nothing: a name is a pair of strings, a storage and a view are
tuples, and no opcode changes any of them.
"""

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mlx_eagle.system.fields import is_whole, shown

from .stored import CutOff, Refused

STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
MAX_BYTES = 1 << 19
"""The longest pickle: 200 bytes per tensor. It bounds memory, at up to 72 bytes per byte."""

LONGEST_LINE = 100


class Name(NamedTuple):
    """A global that the pickle names; it is only a name and is never looked up."""

    module: str
    name: str


class Storage(NamedTuple):
    key: str
    format: str
    elements: int


class View(NamedTuple):
    """A tensor as the pickle describes it: a part of a storage, counted in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Whole(tuple):
    """A tuple of whole numbers, as shapes and strides are."""


DICTIONARY = Name("collections", "OrderedDict")
TENSOR = Name("torch._utils", "_rebuild_tensor_v2")
PARAMETER = Name("torch._utils", "_rebuild_parameter")
NAMES = {DICTIONARY, TENSOR, PARAMETER, *(Name("torch", name) for name in STORAGES)}


class Unpickler:
    """A reader of one pickle, at most ``MAX_BYTES`` long: ``data`` (n,) uint8."""

    def __init__(self, data: np.ndarray):
        if len(data) > MAX_BYTES:
            raise Refused(f"its pickle has {len(data)} bytes, more than any draft head's")
        self._data = data.tobytes()
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._storages: dict[str, Storage] = {}

    def load(self) -> Any:
        """The value of the pickle: plain values, lists, dictionaries and views.

        Raises Refused for anything that torch does not write, CutOff at the data's end.
        """
        while True:
            code = self._take(1)
            if code == b".":
                return self._pop()
            if code not in STEPS:
                raise Refused(
                    f"it holds the pickle opcode 0x{code.hex()}, which torch does not write; if "
                    "you trust the file, save it as safetensors"
                )
            STEPS[code](self)

    def _take(self, size: int) -> bytes:
        if self._at + size > len(self._data):
            raise CutOff("it is cut off in the description of its tensors")
        self._at += size
        return self._data[self._at - size : self._at]

    def _number(self, layout: str) -> Any:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at, self._at + LONGEST_LINE)
        line = self._take(LONGEST_LINE if end < 0 else end - self._at + 1)
        if end < 0:
            raise Refused("it names something too long to be torch's")
        return line[:-1].decode("ascii", "replace")

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise Refused("it takes a value that is not there")
        return self._stack.pop()

    def _two(self) -> tuple[Any, Any]:
        """The two topmost values, the upper one last."""
        last = self._pop()
        return self._pop(), last

    def _pop_to_mark(self) -> list[Any]:
        if not self._marks:
            raise Refused("it takes values that are not there")
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def _top(self, expected: type) -> Any:
        """The topmost value, which must be a list or a dictionary to add to."""
        value = self._pop()
        if type(value) is not expected:
            raise Refused(f"it adds to what is no {expected.__name__}")
        self._push(value)
        return value

    # The opcodes

    def _protocol(self) -> None:
        version = self._number("B")
        if not 2 <= version <= 5:
            raise Refused(f"it is a pickle of protocol {version}; torch writes protocol 2")

    def _mark(self) -> None:
        self._marks.append(len(self._stack))

    def _text(self, layout: str = "<I") -> None:
        data = self._take(self._number(layout))
        try:
            self._push(data.decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError as err:
            raise Refused(f"it holds a string that is none ({err.reason})") from err

    def _long(self) -> None:
        self._push(int.from_bytes(self._take(self._number("B")), "little", signed=True))

    def _tuple(self, values: list[Any]) -> None:
        if all(map(is_whole, values)):
            self._push(Whole(values))
        elif any(type(value) in (tuple, list) for value in values):
            raise Refused("its values are nested more deeply than torch nests them")
        else:
            self._push(tuple(values))

    def _tuple_of(self, count: int) -> None:
        self._tuple([self._pop() for _ in range(count)][::-1])

    def _remember(self, index: int) -> None:
        value = self._pop()
        self._push(value)
        self._memo[index] = value

    def _recall(self, index: int) -> None:
        if index not in self._memo:
            raise Refused("it refers to a value that is not there")
        self._push(self._memo[index])

    def _append(self, values: list[Any]) -> None:
        self._top(list).extend(values)

    def _set(self, pairs: list[Any]) -> None:
        if len(pairs) % 2 or not all(isinstance(key, str) for key in pairs[::2]):
            raise Refused("it holds a dictionary whose keys are no names")
        self._top(dict).update(zip(pairs[::2], pairs[1::2], strict=True))

    def _set_one(self) -> None:
        self._set(list(self._two()))

    def _name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise Refused("it asks for something by what is no name")
        name = Name(module, name)
        if name not in NAMES:
            asked = shown(f"{name.module}.{name.name}")
            raise Refused(
                f"it asks for {asked}, and only tensors are read from a pickle; if you trust "
                "the file, save it as safetensors"
            )
        self._push(name)

    def _storage(self) -> None:
        # ("storage", type, key, device, elements[, view]); the device does not matter here.
        match self._pop():
            case ("storage", Name("torch", str(kind)), str(key), _, int(elements), *rest) if (
                rest in ([], [None]) and elements >= 0
            ):
                storage = Storage(key, STORAGES[kind], elements)
                if self._storages.setdefault(key, storage) != storage:
                    raise Refused("it describes one storage in two ways")
                self._push(storage)
            case _:
                raise Refused("it refers to what is no plain tensor storage")

    def _call(self) -> None:
        match self._two():
            case Name() as name, () if name == DICTIONARY:
                self._push({})
            case Name() as name, (Storage() as storage, int(offset), shape, strides, *_) if (
                name == TENSOR
                and type(shape) is type(strides) is Whole
                and len(shape) == len(strides)
            ):
                self._push(View(storage, offset, tuple(shape), tuple(strides)))
            case Name() as name, (View() as view, *_) if name == PARAMETER:
                self._push(view)
            case _:
                raise Refused("a tensor in it is not described as torch describes one")

    def _build(self) -> None:
        """Set the one attribute that torch sets: the versions that a state dict carries."""
        state = self._pop()
        self._top(dict)
        if type(state) is not dict or not state.keys() <= {"_metadata"}:
            raise Refused("it sets attributes that torch does not set")


STEPS: dict[bytes, Callable[[Unpickler], None]] = {
    b"\x80": Unpickler._protocol,
    b"(": Unpickler._mark,
    b"N": lambda m: m._push(None),
    b"\x88": lambda m: m._push(True),
    b"\x89": lambda m: m._push(False),
    b"J": lambda m: m._push(m._number("<i")),
    b"K": lambda m: m._push(m._number("B")),
    b"M": lambda m: m._push(m._number("<H")),
    b"\x8a": Unpickler._long,
    b"G": lambda m: m._push(m._number(">d")),
    b"X": Unpickler._text,
    b")": lambda m: m._tuple([]),
    b"\x85": lambda m: m._tuple_of(1),
    b"\x86": lambda m: m._tuple_of(2),
    b"\x87": lambda m: m._tuple_of(3),
    b"t": lambda m: m._tuple(m._pop_to_mark()),
    b"]": lambda m: m._push([]),
    b"a": lambda m: m._append([m._pop()]),
    b"e": lambda m: m._append(m._pop_to_mark()),
    b"}": lambda m: m._push({}),
    b"s": Unpickler._set_one,
    b"u": lambda m: m._set(m._pop_to_mark()),
    b"q": lambda m: m._remember(m._number("B")),
    b"r": lambda m: m._remember(m._number("<I")),
    b"h": lambda m: m._recall(m._number("B")),
    b"j": lambda m: m._recall(m._number("<I")),
    b"c": lambda m: m._name(m._line(), m._line()),
    b"Q": Unpickler._storage,
    b"R": Unpickler._call,
    b"b": Unpickler._build,
    # Protocols 4 and 5
    b"\x95": lambda m: m._number("<Q"),  # the length of a frame, which is not used
    b"\x8c": lambda m: m._text("B"),
    b"\x94": lambda m: m._remember(len(m._memo)),
    b"\x93": lambda m: m._name(*m._two()),
}
