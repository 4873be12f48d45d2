"""JSON Schema of every message, from the types themselves.

The JSON form of a message is its msgpack map with bytes as lower-case hex. What no schema can say is left out: rules
between fields, and whether text or bytes travelled.
"""

from __future__ import annotations

from typing import Final, get_args

from msgspec import NODEFAULT, inspect

from .messages import Message

Schema = dict[str, object]

MIN_INT: Final = -(1 << 63)
MAX_INT: Final = (1 << 64) - 1
"""What msgpack itself can hold."""


def integer_bounds(kind: inspect.IntType) -> tuple[int, int]:
    """Smallest and largest value, where nothing else is said those that msgpack can hold."""
    low = kind.ge if kind.ge is not None else MIN_INT if kind.gt is None else kind.gt + 1
    high = kind.le if kind.le is not None else MAX_INT if kind.lt is None else kind.lt - 1
    return low, high


def _given(**bounds: object) -> Schema:
    return {name: bound for name, bound in bounds.items() if bound is not None}


def _fields(kind: inspect.StructType, definitions: Schema) -> Schema:
    properties: Schema = {"t": {"const": kind.tag}} if kind.tag is not None else {}
    for field in kind.fields:
        properties[field.encode_name] = describe(field.type, definitions) | _default(field)
    required = [name for name in ("t",) if kind.tag is not None]
    required += [field.encode_name for field in kind.fields if field.required]
    return {"type": "object", "properties": properties, "required": required}


def _default(field: inspect.Field) -> Schema:
    """The value of a field that is left out."""
    if field.required:
        return {}
    default = field.default if field.default is not NODEFAULT else field.default_factory()
    return {"default": default.hex() if isinstance(default, bytes) else default}


def describe(kind: inspect.Type, definitions: Schema) -> Schema:
    """Return the schema of one type; structs and enumerations are put into `definitions` and referred to.

    Raises:
        TypeError: Such a type is not used in the protocol.
    """
    match kind:
        case inspect.BoolType():
            return {"type": "boolean"}
        case inspect.IntType():
            low, high = integer_bounds(kind)
            return {"type": "integer", "minimum": low, "maximum": high}
        case inspect.FloatType():
            return {"type": "number"} | _given(minimum=kind.ge, maximum=kind.le)
        case inspect.StrType():
            bounds = _given(minLength=kind.min_length, maxLength=kind.max_length, pattern=kind.pattern)
            return {"type": "string"} | bounds
        case inspect.BytesType():
            length = None if kind.max_length is None else 2 * kind.max_length
            hexadecimal: Schema = {"type": "string", "contentEncoding": "base16", "pattern": "^[0-9a-f]*$"}
            return hexadecimal | _given(maxLength=length)
        case inspect.ListType():
            items = describe(kind.item_type, definitions)
            return {"type": "array", "items": items} | _given(minItems=kind.min_length, maxItems=kind.max_length)
        case inspect.TupleType():
            length = len(kind.item_types)
            each = [describe(item, definitions) for item in kind.item_types]
            return {"type": "array", "prefixItems": each, "minItems": length, "maxItems": length}
        case inspect.DictType():
            names, values = describe(kind.key_type, definitions), describe(kind.value_type, definitions)
            bounds = _given(maxProperties=kind.max_length)
            return {"type": "object", "propertyNames": names, "additionalProperties": values} | bounds
        case inspect.UnionType():
            return {"anyOf": [describe(part, definitions) for part in kind.types]}
        case inspect.NoneType():
            return {"type": "null"}
        case inspect.EnumType():
            definitions[kind.cls.__name__] = {"type": "string", "enum": [member.value for member in kind.cls]}
        case inspect.StructType():
            if kind.cls.__name__ not in definitions:
                definitions[kind.cls.__name__] = {}  # keeps its place before those it refers to
                definitions[kind.cls.__name__] = _fields(kind, definitions)
        case _:
            raise TypeError(f"a {type(kind).__name__} has no place in the protocol's schema")
    return {"$ref": f"#/$defs/{kind.cls.__name__}"}


def schema() -> Schema:
    """Return the schema of every message."""
    definitions: Schema = {}
    messages = [describe(kind, definitions) for kind in inspect.multi_type_info(get_args(Message))]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Messages of the kvmsgr protocol; bytes are lower-case hex",
        "oneOf": messages,
        "$defs": definitions,
    }
