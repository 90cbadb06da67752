"""Which linears of a quantized checkpoint are floating, by its configuration. Torch-free.

All others must be packed: an unannounced floating tensor means that the configuration does not
belong to the weights. The output projection may always be floating.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..config.fields import Fields

_OUTPUT_NAME = "lm_head"
_CLASS_NAME = re.compile(r"[A-Z]\w*")
_UNUSABLE = (re.error, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """Some modules, by their names."""

    parts: tuple[str, ...] = ()  # found anywhere in a name followed by a dot
    patterns: tuple[re.Pattern[str], ...] = ()  # match a name from its beginning

    def __contains__(self, module: str) -> bool:
        is_named = any(part in f"{module}." for part in self.parts)
        return is_named or any(pattern.match(module) for pattern in self.patterns)


@dataclass(frozen=True, slots=True)
class KeptModules:
    """The modules that may be floating."""

    named: ModuleNames = ModuleNames()
    others_than: ModuleNames | None = None  # also all modules not among these

    def __contains__(self, module: str) -> bool:
        if module.rpartition(".")[2] == _OUTPUT_NAME or module in self.named:
            return True
        return self.others_than is not None and module not in self.others_than


ALL_MODULES = KeptModules(others_than=ModuleNames())


def kept_by_gptq(section: Fields) -> KeptModules:
    """GPTQModel's `dynamic`, in which "-:" marks floating modules, and transformers' two fields."""
    dynamic = section.nested("dynamic")
    left_out = [] if dynamic is None else [key for key in dynamic.values if key.startswith("-:")]
    patterns = _patterns(section, "dynamic", (key.removeprefix("-:") for key in left_out))
    named = ModuleNames(_names(section, "modules_to_not_convert"), patterns)
    packed = _names(section, "modules_in_block_to_quantize")
    return KeptModules(named, ModuleNames(packed) if packed else None)


def kept_by_awq(section: Fields) -> KeptModules:
    return KeptModules(ModuleNames(_names(section, "modules_to_not_convert")))


def kept_by_compressed(section: Fields, group: Fields) -> KeptModules:
    """The top-level `ignore` and the one group's `targets`: whole names, "re:" before a pattern,
    or in targets a module class, of which linears have one."""
    targets = _names(group, "targets")
    has_class = any(_CLASS_NAME.fullmatch(target) for target in targets)
    return KeptModules(
        _whole_names(section, "ignore"),
        None if has_class or not targets else _whole_names(group, "targets"),
    )


def _whole_names(section: Fields, field: str) -> ModuleNames:
    texts = (
        name.removeprefix("re:") if name.startswith("re:") else rf"{re.escape(name)}\Z"
        for name in _names(section, field)
    )
    return ModuleNames(patterns=_patterns(section, field, texts))


def _patterns(section: Fields, field: str, texts: Iterable[str]) -> tuple[re.Pattern[str], ...]:
    try:
        return tuple(re.compile(text) for text in texts)
    except _UNUSABLE:
        raise section.fail(field, "regular expressions") from None


def _names(section: Fields, field: str) -> tuple[str, ...]:
    """A list of names, or of lists of them; empty if absent or null."""
    value = section.get(field)
    if value is None:
        return ()
    if isinstance(value, list):
        names = [name for part in value for name in (part if isinstance(part, list) else [part])]
        if all(isinstance(name, str) for name in names):
            return tuple(names)
    raise section.fail(field, "a list of names")
