"""Records: frozen dataclasses whose values pydantic checks, when they are made and when they are read from JSON or YAML.

It writes the error messages: source, line, place, value and what to write instead. The meaning of fields belongs to
their class. Reading cannot run code: there is no pickle, and no YAML tag makes an object.

    @record
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Card:
        name: Text
        bandwidth_bytes_per_s: Annotated[Bandwidth, Field(alias="bandwidth")]

    read_json(Card, to_json(card), source="rank 3") == card
    YamlText("{name: eth0, bandwidth: 25 Gbit/s}", source="x.yaml").read(Card)      # files use the aliases
"""

from __future__ import annotations

import difflib
import functools
import ipaddress
import json
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import ArgsKwargs, ErrorDetails

from lightning_holmes.errors import ConfigurationError

T = TypeVar("T")
Place = tuple[str | int, ...]

MAX_TEXT = 64 * 2**20  # characters; an inventory has some thousands, a topology of 1,000 hosts some millions
_MAX_VALUES = 2_000_000  # in a YAML document
_MAX_SHOWN = 80  # characters of a value in a message
_CONFIG = ConfigDict(strict=True, extra="forbid", str_max_length=2**16, allow_inf_nan=False)

_BITS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BYTES = _BITS | {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
# by unit, factor and divisor: 50 / 1e6 is the double nearest to 50 us, 50 * 1e-6 need not be
_BANDWIDTHS = {f"{prefix}{unit}": (factor / 8, 1.0) for prefix, factor in _BITS.items() for unit in ("bit/s", "bps")}
_BANDWIDTHS |= {f"{prefix}B/s": (factor, 1.0) for prefix, factor in _BYTES.items()} | {"": (1.0, 1.0)}
_LATENCIES = {"": (1.0, 1.0), "s": (1.0, 1.0), "ms": (1.0, 1e3), "us": (1.0, 1e6), "µs": (1.0, 1e6), "ns": (1.0, 1e9)}
_BANDWIDTH_HELP = "a positive bandwidth such as '200 Gbit/s' or '1.5 GB/s'; a bare number is bytes per second"
_Units = Mapping[str, tuple[float, float]]
_LEAST_BARE = 1e5  # bytes per second
_FORGOTTEN_LATENCY = 1.0  # seconds
_BY_HAND = "by hand"
_LATENCY_HELP = "a latency of zero or more such as '50 us' or '2 ms'; a bare number is seconds"
_QUANTITY = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(\D.*?)?\s*")
_FIXES = {
    "bool_type": "write true or false",
    "int_type": "write a whole number",
    "string_type": 'write a text (put it in quotes: "...")',
    "tuple_type": "write a list",
}
_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "bool", "null")}
_SCALARS = yaml.constructor.SafeConstructor()


class PlacedError(ConfigurationError):
    """An error in a part of a record: ``place`` is the path to the part, ``first`` the path to the part that it repeats."""

    def __init__(self, message: str, place: Place, first: Place | None = None) -> None:
        super().__init__(message)
        self.place, self.first = place, first


def check_unique(names: Sequence[tuple[Place, Hashable]], what: str) -> None:
    """Raise PlacedError if a name is repeated. names: (place in the record, name)."""
    repeated = [name for name, count in Counter(name for _, name in names).items() if count > 1]
    if repeated:
        first, second, *_ = (place for place, name in names if name == repeated[0])
        listed = ", ".join(" - ".join(sorted(n)) if isinstance(n, frozenset) else str(n) for n in repeated)
        raise PlacedError(f"{what}: each may be given once; repeated: {listed}", second, first)


def _check_text(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise ValueError("the text is empty" if not text.strip() else f"{text!r} has a zero character in it")
    return text


def _number(value: Any, units: _Units, help_text: str) -> tuple[Any, bool]:
    """A text with a unit in base units, or a number as it is; and whether there was no unit. Raises ValueError that says what to write."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value, True
    # plain YAML reads 25e9 as a string and 25.0e+9 as a float: both are numbers
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{_shown(value)} is not allowed; write {help_text}")
    number, unit = float(match.group(1)), match.group(2) or ""
    if re.fullmatch(r"[kKMGT]?b/s(ec)?", unit):
        raise ValueError(f"{value!r}: {unit!r} is easily misread; write bit/s for bits or B/s for bytes")
    if unit not in units:
        raise ValueError(f"{value!r}: unknown unit {unit!r}; write {help_text}")
    if number < 0 or (number == 0 and units is _BANDWIDTHS):
        raise ValueError(f"{value!r} is not allowed; write {help_text}")
    factor, divisor = units[unit]
    return number * factor / divisor, unit == ""


def _with_unit(
    units: _Units, help_text: str, unit: str, usual: str, why: str, is_unlikely: Callable[[float], bool]
) -> tuple[BeforeValidator, PlainSerializer]:
    """How a quantity is read and written. In a hand-written text (YAML) a bare number that ``is_unlikely`` is refused: its unit was probably forgotten."""

    def parse(value: Any, info: ValidationInfo) -> Any:
        parsed, is_bare = _number(value, units, help_text)
        if info.context == _BY_HAND and is_bare and is_unlikely(parsed):
            raise ValueError(
                f"{_shown(value)} without a unit is {parsed:g} {why}; write the unit, such as '{parsed:g} {usual}'; what is meant so: "
                f"'{parsed:g} {unit}'"
            )
        return parsed

    def written(value: float) -> float | str:
        return f"{value!r} {unit}" if is_unlikely(value) else value

    return BeforeValidator(parse), PlainSerializer(written, return_type=float | str, when_used="json")


def _check_address(text: str) -> str:
    ipaddress.ip_interface(text)
    return text


Text = Annotated[str, Field(max_length=4096), AfterValidator(_check_text)]
Address = Annotated[str, AfterValidator(_check_address)]
"""An IP address, with or without prefix length."""
_SLOW, _LONG = "bytes per second, and no network has so little", "seconds, and no network is so slow"
_BANDWIDTH = _with_unit(_BANDWIDTHS, _BANDWIDTH_HELP, "B/s", "Gbit/s", _SLOW, lambda b: 0 < b < _LEAST_BARE)
_LATENCY = _with_unit(_LATENCIES, _LATENCY_HELP, "s", "us", _LONG, lambda s: s >= _FORGOTTEN_LATENCY)
Bandwidth = Annotated[float, Field(gt=0), *_BANDWIDTH]
Latency = Annotated[float, Field(ge=0), *_LATENCY]


def record(cls: type[T]) -> type[T]:
    """Class decorator: pydantic checks the values of a dataclass; ConfigurationError names the value, the field and the fix."""

    @functools.wraps(cls.__init__)  # keeps the dataclass's signature
    def __init__(self: T, /, **values: Any) -> None:
        try:
            _adapter(cls).validator.validate_python(
                ArgsKwargs((), values), self_instance=self, by_alias=False, by_name=True
            )
        except ValidationError as error:
            raise _explained(error, cls.__name__, cls) from None

    cls.__pydantic_config__ = _CONFIG  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[method-assign,assignment]
    return cls


_cached_adapter = functools.cache(TypeAdapter[Any])


def _adapter(cls: Any) -> TypeAdapter[Any]:
    return _cached_adapter(cls)


def to_data(value: Any, *, aliases: bool = False) -> Any:
    """Convert a record to plain lists, dicts and scalars; fields with their default value are left out."""
    return _adapter(type(value)).dump_python(value, mode="json", by_alias=aliases, exclude_defaults=True)


def to_json(value: Any) -> str:
    """Convert a record to one line of JSON."""
    return json.dumps(to_data(value), allow_nan=False, separators=(",", ":"))


def read_json(cls: type[T], text: str | bytes, *, source: str) -> T:
    """Read what :func:`to_json` wrote. Raises ConfigurationError, which names ``source`` and the place of an invalid value."""
    if len(text) > MAX_TEXT:
        raise ConfigurationError(f"{source}: {len(text)} characters of JSON; at most {MAX_TEXT} are read")
    try:
        read: T = _adapter(cls).validate_json(text, by_alias=False, by_name=True)
    except ValidationError as error:
        raise _explained(error, source, cls) from None
    return read


def _explained(error: ValidationError, source: str, cls: type) -> ConfigurationError:
    found = _first_error(error)
    if found["type"] == "json_invalid":
        return ConfigurationError(f"{source}: not valid JSON: {found['msg'][:200]}")
    place, message, _ = _explain(found, lambda place: _keys(cls, place, False, {}), _shown(found["input"]))
    return ConfigurationError(f"{source}: {_path(place)}: {message}")


def _first_error(error: ValidationError) -> ErrorDetails:
    """The first error, but an unknown key before all others: a known key is often missing because of it."""
    found = error.errors(include_url=False)
    return next((e for e in found if e["type"] == "unexpected_keyword_argument"), found[0])


def _explain(found: ErrorDetails, keys_at: Callable[[Place], list[str]], shown: str) -> tuple[Place, str, Place | None]:
    """The place of an error, its message, and the place of the part that it repeats."""
    place, kind = found["loc"], found["type"]
    if kind == "unexpected_keyword_argument":
        keys, key = keys_at(place[:-1]), str(place[-1])
        return place, f"unknown key {_shown(key)}; {_near(key, keys)}Allowed here: {', '.join(keys)}", None
    if kind == "missing" and isinstance(place[-1], int):  # of a list of fixed length
        return place[:-1], f"{place[-1] + 1} entries are needed, not {place[-1]}", None
    if kind == "missing":
        return place[:-1], f"the key {place[-1]!r} is missing", None
    if kind == "dataclass_type":
        return (place, f"{shown} is not allowed; write a mapping with the keys {', '.join(keys_at(place))}", None)
    cause = found.get("ctx", {}).get("error")
    if isinstance(cause, PlacedError):
        return (*place, *cause.place), str(cause), None if cause.first is None else (*place, *cause.first)
    if cause is not None and kind == "value_error":
        return place, str(cause), None
    allowed = re.findall(r"'(.*?)'", found["ctx"]["expected"]) if kind == "literal_error" else []
    return (
        place,
        f"{shown} is not allowed; {_near(shown.strip(chr(39)), allowed)}{_FIXES.get(kind, found['msg'])}",
        None,
    )


def _near(word: str, words: list[str]) -> str:
    near = difflib.get_close_matches(word, words, n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def _keys(cls: type, place: Place, aliases: bool, beside: Mapping[str, str]) -> list[str]:
    """The keys of the record at a place inside ``cls``."""
    schema = _adapter(cls).json_schema(by_alias=aliases)
    here = schema
    for step in (*place, None):
        while "$ref" in here or "anyOf" in here:
            here = schema["$defs"][here["$ref"].rpartition("/")[2]] if "$ref" in here else here["anyOf"][0]
        if step is not None:
            here = here["items"] if isinstance(step, int) else here["properties"][step]
    return [key for name in here["properties"] for key in (name, beside.get(name)) if key is not None]


def _path(place: Place) -> str:
    steps = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)
    return steps.removeprefix(".") or "top level"


def _shown(value: Any) -> str:
    if isinstance(value, (Mapping, list, tuple)):
        return "a mapping" if isinstance(value, Mapping) else "a list"
    shown = "nothing" if value is None else repr(value) if isinstance(value, str) else json.dumps(value, default=str)
    return shown if len(shown) <= _MAX_SHOWN else shown[:_MAX_SHOWN] + "..."


class YamlText:
    """A YAML document as plain ``data``. Raises ConfigurationError for invalid syntax, empty texts and repeated keys.

    Args:
        source: the name of the text in messages.
    """

    def __init__(self, text: str, *, source: str) -> None:
        self.source = source
        self._num_values = 0
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
            if root is None:
                raise ConfigurationError(f"{source}: the file is empty")
            self._root: yaml.Node = root
            self.data = self._plain(root, ())
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            where = f", line {mark.line + 1}" if mark is not None else ""
            raise ConfigurationError(f"{source}{where}: not valid YAML: {error.problem}") from error
        except (yaml.YAMLError, RecursionError) as error:
            raise ConfigurationError(f"{source}: not valid YAML: {error}") from error

    def read(
        self,
        cls: type[T],
        origin: Callable[[Place], Place] = lambda place: place,
        beside: Mapping[str, str] | None = None,
    ) -> T:
        """Read the data as a record; the keys are the fields' aliases.

        Args:
            origin: converts a place in the data to its place in the text.
            beside: by field, a further key that the text may have next to it; only listed in messages.
        """
        try:
            read: T = _adapter(cls).validate_json(json.dumps(self.data), by_alias=True, by_name=False, context=_BY_HAND)
        except ValidationError as error:
            found = _first_error(error)
            node = self._find(origin(found["loc"]))[1]
            # a file that holds a single text is probably another kind of file, and may hold a secret
            shown = "a single text" if node is self._root and isinstance(node, yaml.ScalarNode) else _shown_node(node)
            place, message, first = _explain(found, lambda place: _keys(cls, place, True, beside or {}), shown)
            if first is not None:
                message += f"; already on line {_line(self._find(origin(first))[1])}"
            raise self.error(origin(place), message, at_key=found["type"] == "unexpected_keyword_argument") from None
        return read

    def error(self, place: Place, message: str, *, at_key: bool = False) -> ConfigurationError:
        """Make an error that names line and place; the caller raises it."""
        key, value = self._find(place)
        return ConfigurationError(f"{self.source}, line {_line(key if at_key else value)}: {_path(place)}: {message}")

    def _find(self, place: Place) -> tuple[yaml.Node, yaml.Node]:
        """The key and value nodes at a place; if there are none, those of the innermost part that exists."""
        key = value = self._root
        for step in place:
            if isinstance(value, yaml.MappingNode):
                pairs = [pair for pair in value.value if pair[0].value == step]
            else:
                pairs = [(item, item) for i, item in enumerate(value.value) if i == step]
            if not pairs:
                break
            key, value = pairs[-1]
        return key, value

    def _plain(self, node: yaml.Node, place: Place) -> Any:
        self._num_values += 1
        if self._num_values > _MAX_VALUES:  # aliases of aliases can expand a few lines to any number of values
            raise ConfigurationError(f"{self.source}: more than {_MAX_VALUES} values; at most so many are read")
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(item, (*place, i)) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            data: dict[str, Any] = {}
            for key, value in node.value:
                name = key.value if isinstance(key, yaml.ScalarNode) else "(not a plain key)"
                if name in data:
                    raise self.error((*place, name), f"the key {name!r} stands here a second time", at_key=True)
                data[name] = self._plain(value, (*place, name))
            return data
        return _SCALARS.construct_object(node) if node.tag in _PLAIN_TAGS else node.value


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _shown_node(node: yaml.Node) -> str:
    """A value for messages, as written in the file."""
    if not isinstance(node, yaml.ScalarNode):
        return "a mapping" if isinstance(node, yaml.MappingNode) else "a list"
    value = node.value if len(node.value) <= _MAX_SHOWN else node.value[:_MAX_SHOWN] + "..."
    return repr(value) if node.tag.endswith(":str") else value or "nothing"
