"""How an engine's options become the flags of its process."""

from __future__ import annotations

import pytest

from stemma.errors import InvalidRequest
from stemma.frontend.client.engine_process import _flags


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_model_len": 64, "revision": None}, ["--max-model-len=64"]),
        ({"served_model_name": "-x"}, ["--served-model-name=-x"]),
        ({"enable_lora": True, "disable_leases": False}, ["--enable-lora"]),
        ({"lora_paths": {"sql": "a/sql", "chat": "b"}}, ["--lora-paths", "sql=a/sql", "chat=b"]),
        ({"lora_paths": ["sql=a/sql", "chat=b"]}, ["--lora-paths", "sql=a/sql", "chat=b"]),
        (
            {"lora_paths": [("sql", "a/b=c"), ("chat", "b")]},
            ["--lora-paths", "sql=a/b=c", "chat=b"],
        ),
        ({"lora_paths": {}}, []),
    ],
    ids=str,
)
def test_options_become_flags(options: dict[str, object], expected: list[str]) -> None:
    assert _flags(options) == expected


@pytest.mark.parametrize("paths", [{"a=b": "folder"}, [("a=b", "folder")]], ids=str)
def test_a_name_that_would_be_cut_is_refused(paths: object) -> None:
    with pytest.raises(
        InvalidRequest, match="lora_paths='a=b' is not allowed; allowed: names without '='"
    ):
        _flags({"lora_paths": paths})
