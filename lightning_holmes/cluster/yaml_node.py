"""YamlNode: one place in a YAML file, read with errors that name file, line, key, value and what is allowed.

It owns the checks of single values (types, ranges, units, unknown keys). What the keys mean belongs to the
caller. Only the structure is composed, by the safe loader: no tag in a file can create an object.

    root = YamlNode.parse("hosts: 2\\nbandwidth: 200 Gbit/s\\n", source="x.yaml")
    entries = root.mapping(required=("hosts", "bandwidth"))
    entries["hosts"].integer(minimum=1)                 # 2
    entries["bandwidth"].bandwidth_bytes_per_s()        # 25e9
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from lightning_holmes.errors import ConfigurationError

_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY_PREFIXES = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}

_BANDWIDTH_UNITS: dict[str, float] = {
    **{f"{prefix}bit/s": factor / 8 for prefix, factor in _PREFIXES.items()},
    **{f"{prefix}bps": factor / 8 for prefix, factor in _PREFIXES.items()},
    **{f"{prefix}B/s": factor for prefix, factor in (_PREFIXES | _BINARY_PREFIXES).items()},
}
# Divisors, not factors: 50 / 1e6 is the double nearest to 50 us, 50 * 1e-6 need not be.
_LATENCY_UNITS: dict[str, float] = {"s": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6, "ns": 1e9}

_BANDWIDTH_HELP = "a positive bandwidth such as '200 Gbit/s' or '1.5 GB/s'; a bare number is bytes per second"
_LATENCY_HELP = "a latency of zero or more such as '50 us' or '2 ms'; a bare number is seconds"

_QUANTITY = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(\D.*?)?\s*")
_INTEGER = re.compile(r"[-+]?\d{1,18}")
_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True, slots=True)
class YamlNode:
    """A composed YAML node, the name of its file and the path of keys that leads to it."""

    node: yaml.Node
    source: str
    path: str = ""

    @classmethod
    def parse(cls, text: str, *, source: str) -> YamlNode:
        """Compose one YAML document. Raises ConfigurationError for broken syntax and for an empty text."""
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            where = f", line {mark.line + 1}" if mark is not None else ""
            raise ConfigurationError(f"{source}{where}: not valid YAML: {error.problem}") from error
        except (yaml.YAMLError, RecursionError) as error:
            raise ConfigurationError(f"{source}: not valid YAML: {error}") from error
        if node is None:
            raise ConfigurationError(f"{source}: the file is empty")
        return cls(node, source)

    @property
    def line(self) -> int:
        """The line where the node starts, counted from 1."""
        return int(self.node.start_mark.line) + 1

    @property
    def shown(self) -> str:
        """The value as it stands in the file, for messages."""
        if isinstance(self.node, yaml.ScalarNode):
            return repr(self.node.value) if self._is("str") else self.node.value or "nothing"
        return "a mapping" if isinstance(self.node, yaml.MappingNode) else "a list"

    def error(self, message: str) -> ConfigurationError:
        """An error that names this place; the caller raises it."""
        return ConfigurationError(f"{self.source}, line {self.line}: {self.path or 'top level'}: {message}")

    def mapping(self, *, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, YamlNode]:
        """The entries of a mapping. Unknown, repeated and missing keys are errors."""
        known = (*required, *optional)
        if not isinstance(self.node, yaml.MappingNode):
            raise self.error(f"{self.shown} stands where a mapping with the keys {_listed(known)} is expected")
        entries: dict[str, YamlNode] = {}
        for key_node, value_node in self.node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "(not a plain key)"
            here = YamlNode(key_node, self.source, f"{self.path}.{key}" if self.path else key)
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise here.error(f"unknown key {key!r}; {hint}Allowed here: {_listed(known)}")
            if key in entries:
                raise here.error(f"the key {key!r} stands here a second time")
            entries[key] = YamlNode(value_node, self.source, here.path)
        for key in required:
            if key not in entries:
                raise self.error(f"the key {key!r} is missing; needed here: {_listed(required)}")
        return entries

    def items(self, *, minimum: int = 0) -> list[YamlNode]:
        """The entries of a list with at least `minimum` entries."""
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.error(f"{self.shown} stands where a list is expected")
        if len(self.node.value) < minimum:
            raise self.error(f"the list has {len(self.node.value)} entries; at least {minimum} are needed")
        return [YamlNode(node, self.source, f"{self.path}[{index}]") for index, node in enumerate(self.node.value)]

    def text(self) -> str:
        """A non-empty string."""
        if not self._is("str"):
            quote = ' (put it in quotes: "...")' if isinstance(self.node, yaml.ScalarNode) else ""
            raise self.error(f"{self.shown} is not a text{quote}")
        if not self.node.value.strip():
            raise self.error("the text is empty")
        return str(self.node.value)

    def choice(self, allowed: Sequence[str]) -> str:
        """One of a few words."""
        if not self._is("str") or self.node.value not in allowed:
            near = difflib.get_close_matches(str(self.node.value), allowed, n=1) if self._is("str") else []
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise self.error(f"{self.shown} is not allowed; {hint}Allowed: {_listed(allowed)}")
        return str(self.node.value)

    def integer(self, *, minimum: int, maximum: int | None = None) -> int:
        """A whole number in the given range."""
        span = f"from {minimum} to {maximum}" if maximum is not None else f"of {minimum} or more"
        if self._is("int") and _INTEGER.fullmatch(self.node.value):
            number = int(self.node.value)
            if number >= minimum and (maximum is None or number <= maximum):
                return number
        raise self.error(f"{self.shown} is not allowed; write a whole number {span}")

    def boolean(self) -> bool:
        """true or false."""
        if self._is("bool") and self.node.value.lower() in ("true", "false"):
            return bool(self.node.value.lower() == "true")
        raise self.error(f"{self.shown} is not allowed; write true or false")

    def number(self) -> float:
        """A finite number."""
        number, unit = self._quantity("a number")
        if unit or not math.isfinite(number):
            raise self.error(f"{self.shown} is not allowed; write a number")
        return number

    def bandwidth_bytes_per_s(self) -> float:
        """A positive, finite bandwidth with its unit, or a bare number of bytes per second."""
        number, unit = self._quantity(_BANDWIDTH_HELP)
        if re.fullmatch(r"[kKMGT]?b/s(ec)?", unit):
            raise self.error(f"{self.shown}: {unit!r} is easily misread; write bit/s for bits or B/s for bytes")
        value = number * self._factor(unit, _BANDWIDTH_UNITS, _BANDWIDTH_HELP) if unit else number
        if not (math.isfinite(value) and value > 0):
            raise self.error(f"{self.shown} is not allowed; write {_BANDWIDTH_HELP}")
        return value

    def latency_s(self) -> float:
        """A finite latency of zero or more with its unit, or a bare number of seconds."""
        number, unit = self._quantity(_LATENCY_HELP)
        value = number / self._factor(unit, _LATENCY_UNITS, _LATENCY_HELP) if unit else number
        if not (math.isfinite(value) and value >= 0):
            raise self.error(f"{self.shown} is not allowed; write {_LATENCY_HELP}")
        return value

    def _is(self, tag: str) -> bool:
        return isinstance(self.node, yaml.ScalarNode) and self.node.tag == _TAG + tag

    def _quantity(self, help_text: str) -> tuple[float, str]:
        # Plain YAML reads 25e9 as a string and 25.0e+9 as a float: both are parsed from their text.
        if self._is("str") or self._is("int") or self._is("float"):
            match = _QUANTITY.fullmatch(self.node.value)
            if match:
                return float(match.group(1)), match.group(2) or ""
        raise self.error(f"{self.shown} is not allowed; write {help_text}")

    def _factor(self, unit: str, units: dict[str, float], help_text: str) -> float:
        if unit not in units:
            raise self.error(f"{self.shown}: unknown unit {unit!r}; write {help_text}")
        return units[unit]


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words)
