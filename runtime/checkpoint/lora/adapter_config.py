"""PEFT's adapter_config.json: ranks, scales and target modules, as Hugging Face PEFT reads them.

Requests in the config that this runtime does not implement are refused by the field's name. A scale
is alpha / r (Hu et al., "LoRA", 2021, section 4.1), or alpha / sqrt(r) with `use_rslora`
(Kalajdzievski, "rsLoRA", 2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ....errors import ModelLoadError
from ..config.fields import Fields
from .module_patterns import PatternError, match_patterns

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20  # a thousand times the usual size
MAX_PATTERNS = 4096
_ALL_LINEAR = "all-linear"
# Values of these, other than the listed ones and null, change what is computed.
_MUST_BE: Mapping[str, tuple[Any, ...]] = {
    "alora_invocation_tokens": ([],),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "layer_replication": ([],),
    "lora_bias": (False,),
    "modules_to_save": ([],),
    "target_parameters": ([],),
    "trainable_token_indices": ([], {}),
    "use_dora": (False,),
    "use_qalora": (False,),
    # Other values start from a decomposition of the base's weights, and change these.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}


class Strength(NamedTuple):
    """An adapter's rank and scale at one module."""

    rank: int
    scale: float  # factor of B A x


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """An adapter's effect and its modules. Module names are those of the model where the adapter
    was trained (`module_names`), such as "model.layers.0.self_attn.q_proj"."""

    fields: Fields  # all fields of the file
    rank: int
    alpha: float
    is_rank_stabilized: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: str | tuple[str, ...]  # a regular expression, or names and name suffixes
    excluded_modules: str | tuple[str, ...]
    layers: frozenset[int] | None  # None: all of them
    layers_patterns: tuple[str, ...]

    @classmethod
    def from_folder(cls, folder: Path) -> AdapterConfig:
        """Raises ModelLoadError that names the file and the field."""
        return cls.parse(folder / CONFIG_FILE, read_config(folder))

    @classmethod
    def parse(cls, file: Path, text: bytes) -> AdapterConfig:
        """See `from_folder`; `text`: the file's contents."""
        fields = Fields.parse(file, text)
        if fields.get("peft_type") != "LORA":
            raise fields.fail("peft_type", "'LORA'")
        for name, allowed in _MUST_BE.items():
            if fields.get(name) is not None and fields.get(name) not in allowed:
                known = ", ".join(map(repr, allowed))
                raise fields.fail(name, f"{known} or null (nothing else is supported)")
        return cls(
            fields=fields,
            rank=fields.integer("r"),
            alpha=fields.number("lora_alpha", 8.0),
            is_rank_stabilized=fields.flag("use_rslora", False),
            rank_pattern=_pattern(fields, "rank_pattern", int),
            alpha_pattern=_pattern(fields, "alpha_pattern", float),
            target_modules=_names(fields, "target_modules"),
            excluded_modules=_names(fields, "exclude_modules", ()),
            layers=_layers(fields),
            layers_patterns=_layers_patterns(fields),
        )

    @property
    def max_rank(self) -> int:
        """The largest rank of all modules."""
        return max([self.rank, *self.rank_pattern.values()])

    def strengths(self, modules: Sequence[str]) -> dict[str, Strength]:
        """The strengths at those of these modules that the adapter changes.

        Raises ModelLoadError for an invalid regular expression, or one too costly to match.
        """
        ranks = self._by_pattern("rank_pattern", self.rank_pattern, modules)
        alphas = self._by_pattern("alpha_pattern", self.alpha_pattern, modules)
        strengths = {}
        for module in self._targets(modules):
            rank, alpha = ranks.get(module, self.rank), alphas.get(module, self.alpha)
            scale = float(alpha / (rank**0.5 if self.is_rank_stabilized else rank))
            strengths[module] = Strength(rank, scale)
        return strengths

    def _targets(self, modules: Sequence[str]) -> list[str]:
        excluded = self._named("exclude_modules", self.excluded_modules, modules)
        targets = self._named("target_modules", self.target_modules, modules)
        if self.layers is not None and not isinstance(self.target_modules, str):
            exact = targets & {*self.target_modules}
            targets = exact | self._in_layers(self.layers, sorted(targets - exact))
        return [module for module in modules if module in targets - excluded]

    def _named(self, field: str, names: str | tuple[str, ...], modules: Sequence[str]) -> set[str]:
        """The modules that a regular expression, names, or name suffixes select."""
        if not isinstance(names, str):
            ends = tuple(f".{name}" for name in names)
            return {module for module in modules if module in names or module.endswith(ends)}
        if names.lower() == _ALL_LINEAR:
            return set(modules)
        return set(self._matches(field, [names], modules)[0])

    def _in_layers(self, layers: frozenset[int], modules: Sequence[str]) -> set[str]:
        """The modules in these layers: the number after the first pattern found in a name."""
        patterns = self.layers_patterns or (r"[^.]*",)
        around = (r".*\.", r"\.(\d+)\.")
        numbers: dict[str, int] = {}
        for found in self._matches("layers_pattern", patterns, modules, around, group=1):
            numbers = {name: int(number) for name, number in found.items()} | numbers
        return {module for module, number in numbers.items() if number in layers}

    def _by_pattern(
        self, field: str, values: Mapping[str, Any], modules: Sequence[str]
    ) -> dict[str, Any]:
        """For each module the value of the first pattern that its name ends with."""
        found: dict[str, Any] = {}
        matches = self._matches(field, list(values), modules, (r"(.*\.)?(", ")$"))
        for value, matched in zip(values.values(), matches, strict=True):
            found = dict.fromkeys(matched, value) | found
        return found

    def _matches(
        self,
        field: str,
        patterns: Sequence[str],
        modules: Sequence[str],
        around: tuple[str, str] | None = None,
        group: int = 0,
    ) -> list[dict[str, str]]:
        """For each pattern the modules that it matches, with the group's text."""
        try:
            return match_patterns(patterns, modules, around, group)
        except PatternError as error:
            raise self.fields.fail(field, f"regular expressions ({error})") from None


def read_config(folder: Path) -> bytes:
    """The contents of the folder's adapter_config.json. Raises ModelLoadError."""
    file = folder / CONFIG_FILE
    if not folder.exists():
        raise ModelLoadError(f"there is no folder {folder.absolute()}")
    if file.exists() and not file.is_file():  # a read might never end
        raise ModelLoadError(f"{file} is not a file")
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_CONFIG_BYTES + 1)
    except FileNotFoundError:
        raise ModelLoadError(f"{file} is missing: not a PEFT adapter") from None
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from None
    if len(text) > MAX_CONFIG_BYTES:
        raise ModelLoadError(f"{file} has more than {MAX_CONFIG_BYTES} bytes")
    return text


def _names(
    fields: Fields, name: str, default: tuple[str, ...] | None = None
) -> str | tuple[str, ...]:
    value = fields.get(name)
    if value in (None, []) and default is not None:
        return default
    if isinstance(value, str) and value:
        return value
    is_list = isinstance(value, list) and 0 < len(value) <= MAX_PATTERNS
    if is_list and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise fields.fail(name, f"a list of up to {MAX_PATTERNS} names, or a regular expression")


def _pattern(fields: Fields, name: str, kind: type) -> Mapping[str, Any]:
    pattern = fields.nested(name)
    if pattern is None:
        return {}
    if len(pattern.values) > MAX_PATTERNS:
        raise fields.fail(name, f"at most {MAX_PATTERNS} entries")
    if kind is int:
        return {key: pattern.integer(key) for key in pattern.values}
    return {key: pattern.number(key, 1.0) for key in pattern.values}


def _layers(fields: Fields) -> frozenset[int] | None:
    value = fields.get("layers_to_transform")
    if value in (None, []):
        return None
    return frozenset(fields.token_ids("layers_to_transform"))


def _layers_patterns(fields: Fields) -> tuple[str, ...]:
    value = fields.get("layers_pattern")
    patterns = [value] if isinstance(value, str) else value or []
    if not isinstance(patterns, list) or not all(isinstance(item, str) for item in patterns):
        raise fields.fail("layers_pattern", "a name or a list of names")
    if any("(" in pattern for pattern in patterns):  # the layer's number must be the only group
        raise fields.fail("layers_pattern", "regular expressions without groups")
    if len(patterns) > MAX_PATTERNS:
        raise fields.fail("layers_pattern", f"at most {MAX_PATTERNS} of them")
    return tuple(pattern for pattern in patterns if pattern)
