"""JSON schemas to hold texts to: thirty of many kinds, and random ones."""

import random
from typing import Any

Schema = dict[str, Any]
WORD = {"type": "string", "maxLength": 6}
COUNT = {"type": "integer", "minimum": 0, "maximum": 99}


def record(*optional: str, **properties: Schema) -> Schema:
    required = [name for name in properties if name not in optional]
    fixed = {"required": required, "additionalProperties": False}
    return {"type": "object", "properties": properties, **fixed}


def items(schema: Schema, fewest: int = 0, most: int = 3) -> Schema:
    return {"type": "array", "items": schema, "minItems": fewest, "maxItems": most}


CITY = record(name=WORD, zip={"type": "string", "pattern": "^[0-9]{5}$"})
CIRCLE = record(kind={"const": "circle"}, radius=COUNT)
SQUARE = record(kind={"const": "square"}, side=COUNT)
NODE = record("next", value=COUNT, next={"$ref": "#/$defs/node"})
TREE = record(name={"enum": ["leaf", "knot"]}, below=items({"$ref": "#/$defs/tree"}, 0, 2))
SCHEMAS: dict[str, Schema] = {
    "word": record(answer=WORD),
    "number": record(answer={"type": "number", "minimum": 0, "maximum": 10}),
    "integer": record(answer=COUNT),
    "boolean": record(answer={"type": "boolean"}),
    "null": record(answer={"type": "null"}),
    "top is an array": items(COUNT, 1, 3),
    "top is a choice": {"enum": ["yes", "no", "perhaps"]},
    "top is a number": {"type": "integer", "minimum": 10, "maximum": 20},
    "two": record(name=WORD, age=COUNT),
    "optional": record("age", "city", name=WORD, age=COUNT, city=WORD),
    "nested": record(person=record(name=WORD, address=CITY)),
    "nested deep": record(a=record(b=record(c=record(d=record(e=COUNT))))),
    "array of words": record(tags=items(WORD, 1, 3)),
    "array of objects": record(cities=items(CITY, 1, 2)),
    "array of arrays": record(rows=items(items(COUNT, 2, 2), 2, 2)),
    "tuple": {"type": "array", "prefixItems": [WORD, COUNT], "items": False, "minItems": 2},
    "enum": record(color={"enum": ["red", "green", "blue"]}),
    "enum of kinds": record(value={"enum": ["none", 0, 1.5, None, True]}),
    "const": record(version={"const": "2026-11"}, ok={"const": True}),
    "union": record(value={"anyOf": [COUNT, {"type": "boolean"}, {"type": "null"}]}),
    "union of types": record(value={"type": ["integer", "null"], "minimum": 0, "maximum": 9}),
    "union of objects": record(shape={"anyOf": [CIRCLE, SQUARE]}),
    "one of objects": record(shape={"oneOf": [CIRCLE, SQUARE]}),
    "list": {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    "tree": {"$defs": {"tree": TREE}, "$ref": "#/$defs/tree"},
    "unicode": record(größe=COUNT, 名前={"enum": ["東京", "Zürich", "😀"]}),
    "pattern": record(phone={"type": "string", "pattern": r"^\+49 [0-9]{3} [0-9]{4}$"}),
    "date": record(day={"type": "string", "format": "date"}),
    "quotes": record(**{'a "b" \\ c': {"enum": ['say "hi"', "tab\there", "back\\slash"]}}),
    "more properties": {"type": "object", "additionalProperties": COUNT, "maxProperties": 2},
}  # fmt: skip


def random_schema(rng: random.Random, depth: int = 3) -> Schema:
    """Small enough that a text can be complete within a few hundred tokens."""
    leaves = [
        lambda: {"type": "boolean"},
        lambda: {"type": "null"},
        lambda: {"type": "string", "maxLength": rng.randint(0, 5)},
        lambda: {"type": "integer", "minimum": rng.randint(-9, 9), "maximum": rng.randint(9, 999)},
        lambda: {"enum": rng.sample(["a", "bb", "ä", "東", 1, 2.5, None, True, 'q"q'], 3)},
        lambda: {"type": "string", "pattern": rng.choice(["^[ab]{2,4}$", "^x(y|z)*$", "^é?$"])},
    ]
    inner = [
        lambda: items(random_schema(rng, depth - 1), rng.randint(0, 1), rng.randint(1, 3)),
        lambda: {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]},
        lambda: _random_record(rng, depth),
    ]
    return rng.choice(leaves + 3 * inner if depth > 0 else leaves)()


def _random_record(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["id", "name", "größe", "a b", "list", "x"], rng.randint(1, 3))
    optional = [name for name in names if rng.random() < 0.3]
    return record(*optional, **{name: random_schema(rng, depth - 1) for name in names})
