"""What models say of images, against transformers, whole, in chunks and token by token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from image_models import IMAGE, MODELS, hf_image_scores, make_image_model, noise, with_images
from model_scores import make_runner
from safetensors.torch import load_file, save_file
from step_plans import Feed, PlanDriver

from stemma.errors import ModelLoadError
from stemma.planning.served_model import ServedModel
from stemma.planning.stored_weights import stored_weights
from stemma.runtime.execute.model_runner import ModelRunner
from stemma.runtime.images.image import Image, spans_of
from stemma.runtime.models.model_config import read_model_config
from stemma.runtime.schedule.image_rows import image_parts
from stemma.runtime.schedule.plan import EncodeSlice, StepPlan

TEXT = [
    torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (9, 5, 13)
]
PROMPTS: dict[str, list[tuple[int, int] | Sequence[int]]] = {
    "text": [TEXT[0], TEXT[2]],
    "one image": [TEXT[0], (3, 5), TEXT[2]],
    "several images": [TEXT[1], (1, 1), (5, 2), TEXT[1], (1, 9), (4, 4), TEXT[0]],
    "a second turn": [TEXT[0], (2, 3), TEXT[1], [258, 10, 257, 97, 10], TEXT[2], (7, 3), TEXT[2]],
}


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_model(tmp_path_factory.mktemp("images"), name)


@pytest.fixture(scope="module")
def driver(checkpoint: Path) -> PlanDriver:
    return PlanDriver(
        make_runner(checkpoint, max_model_len=200, num_pages=80, max_running_requests=99)
    )


def image_scores(
    driver: PlanDriver, tokens: Sequence[int], images: Sequence[Image], chunks: Sequence[int]
) -> list[torch.Tensor]:
    """As `model_scores.scores`; images are encoded anew, one block a step."""
    encode(driver.runner, images)
    spans = spans_of(tokens, {i.token_id: i for i in images}.__getitem__)
    found = []
    targets = [*(max(token, IMAGE) if token < 0 else token for token in tokens[1:]), 0]
    for chunk in chunks:
        sequence, said = driver.sequence(), []
        while (start := sequence.length) < len(tokens):
            end = min(start + chunk, len(tokens))
            plan = driver.plan([Feed(sequence, tokens[start:end], targets=targets[start:end])])
            shift, parts = image_parts(spans, start, end)
            row = plan.rows[0]._replace(rope_shift=shift, images=parts)
            said += driver.runner.execute(StepPlan(plan.step_id, (row,))).rows[0].target_logprobs
        driver.release(sequence)
        found.append(torch.tensor(said[:-1], dtype=torch.float64))
    return found


def encode(runner: ModelRunner, images: Sequence[Image]) -> None:
    for image in images:
        source: Image | None = image
        for _ in range(runner.config.vision.num_blocks):
            part = EncodeSlice(image.token_id, 1, source)
            assert not runner.execute(StepPlan(0, (), encodes=(part,))).image_errors
            source = None


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logprobs_equal_transformers_in_any_chunking(
    name: str, checkpoint: Path, driver: PlanDriver, prompt: str
) -> None:
    """Chunks of 7 and of 1 end within images."""
    sizes = [part for part in PROMPTS[prompt] if isinstance(part, tuple)]
    images = [noise(name, *size, token_id=-7 - i) for i, size in enumerate(sizes)]
    left = iter(images)
    tokens = with_images(*(next(left) if isinstance(p, tuple) else p for p in PROMPTS[prompt]))
    expected = hf_image_scores(checkpoint, tokens, images)
    for found in image_scores(driver, tokens, images, (len(tokens), 7, 1)):
        torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-5)


def test_parameters_are_counted_before_a_model_is_loaded(checkpoint: Path) -> None:
    model = ServedModel.of(read_model_config(checkpoint), "float32")
    stored = stored_weights(checkpoint)
    assert stored is not None and 4 * model.shape.num_parameters == stored.num_bytes


def test_the_first_names_of_a_checkpoint_are_read(
    name: str, checkpoint: Path, tmp_path: Path
) -> None:
    """Qwen2.5-VL's files name the decoder as if it were alone, and config.json has it beside the
    tower."""
    if "2.5" not in name:
        pytest.skip("published by later names")
    tensors = load_file(checkpoint / "model.safetensors")
    renamed = {
        key.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
        for key, tensor in tensors.items()
    }
    save_file(renamed, tmp_path / "model.safetensors")
    config = json.loads((checkpoint / "config.json").read_text())
    flat = {**config.pop("text_config"), **config}
    flat["rope_scaling"] = {**flat.pop("rope_parameters"), "type": "mrope"}
    flat["rope_theta"] = flat["rope_scaling"].pop("rope_theta")
    del flat["rope_scaling"]["rope_type"]
    (tmp_path / "config.json").write_text(json.dumps(flat))
    image = noise(name, 2, 3)
    tokens = with_images(TEXT[0], image, TEXT[2])
    one, other = (
        image_scores(PlanDriver(make_runner(folder)), tokens, [image], [len(tokens)])[0]
        for folder in (checkpoint, tmp_path)
    )
    torch.testing.assert_close(one, other, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("part", "fields"),
    [
        ("vision_config", {"hidden_act": "relu"}),
        ("vision_config", {"in_channels": 4}),
        ("vision_config", {"num_heads": 7}),
        ("vision_config", {"out_hidden_size": 12}),
        ("text_config", {"rope_parameters": {"mrope_section": [1, 1, 1]}}),
        ("text_config", {"rope_parameters": {"mrope_section": "all"}}),
    ],
)
def test_what_is_not_implemented_is_refused_by_its_field(
    checkpoint: Path, tmp_path: Path, part: str, fields: dict[str, Any]
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config[part] |= fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="field"):
        read_model_config(tmp_path)


def test_an_image_changes_what_is_said_behind_it(name: str, driver: PlanDriver) -> None:
    one, other = noise(name, 2, 3, token_id=-1), noise(name, 2, 3, token_id=-2)
    same = noise(name, 3, 2, token_id=-1)  # the same patches in another grid
    said = [
        image_scores(driver, with_images(TEXT[0], each, TEXT[2]), [each], [100])[0]
        for each in (one, other, same)
    ]
    behind = len(TEXT[0]) + 2 + 6
    assert (said[0] - said[1])[behind:].abs().max() > 0.01
    assert (said[0] - said[2])[behind:].abs().max() > 0.01
