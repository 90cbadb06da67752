"""Which engine the demo starts."""

from __future__ import annotations

import argparse

import pytest

from stemma.cli import demo
from stemma.runtime.config import engine_config


@pytest.mark.parametrize("size", [None, "--tp-size", "--pp-size", "--cp-size"])
def test_a_draft_comes_with_the_embedded_model_on_one_process_alone(size: str | None) -> None:
    parser = argparse.ArgumentParser()
    demo.add_parser(parser.add_subparsers())
    args = parser.parse_args(["demo", *([] if size is None else [size, "2"])])
    demo._take_draft(args)
    assert engine_config(args).has_draft_model == (size is None)
