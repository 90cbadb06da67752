"""What guesses for a model: its config, its weights, then what a runner asks behind each step."""

from __future__ import annotations

from dataclasses import replace

from ...kernels.registry import Kernels
from ..checkpoint.config.model_config import ModelConfig
from ..checkpoint.draft_checkpoint import Draft, DraftCheckpoint, FirstLayers, OwnPredictor
from ..checkpoint.draft_heads import Eagle3, Medusa
from ..memory.device_pool import DeviceKVPool
from ..models.decoder import Decoder
from ..models.drafts import config_of
from ..models.eagle import EagleHead
from ..models.eagle3 import Eagle3Head
from ..models.language_model import LanguageModel, build_model
from ..models.layers.build import ModelBuild
from ..models.medusa import MedusaHeads
from ..models.predictor import Predictor
from .draft_model import DraftModel, Guesser
from .inputs import InputBuilder
from .medusa_drafts import MedusaDrafts


class Drafts:
    """Owns the weights of what guesses. They are there behind `share` and, where there is a
    `checkpoint`, `load`."""

    def __init__(self, draft: Draft, model: ModelConfig) -> None:
        self._draft = draft
        self._model: LanguageModel | MedusaHeads | None = None
        self._state_size = model.hidden_size
        self.checkpoint = draft if isinstance(draft, DraftCheckpoint) else None
        self.config = config_of(draft, model)  # of what has KV of its own; None: nothing has

    def wanted(self, build: ModelBuild) -> ModelBuild:
        """What the model itself is to be built from: a predictor's tensors are not skipped."""
        if not isinstance(self._draft, OwnPredictor):
            return build
        config = build.config
        assert config.predictor is not None, "the config has a predictor"
        unread = tuple(u for u in config.unread_weights if u not in config.predictor.weights)
        return replace(build, config=replace(config, unread_weights=unread))

    def share(self, build: ModelBuild, model: LanguageModel) -> None:
        """Take what the model, built from this, has for drafts."""
        if isinstance(self._draft, DraftCheckpoint):
            return
        assert isinstance(model, Decoder), "its layers are alike"
        if isinstance(self._draft, FirstLayers):
            self._model = model.first(self._draft.num_layers)
            return
        predictor = build.config.predictor
        assert self.config is not None and predictor is not None, "the config has a predictor"
        own = replace(build, config=self.config, adapters=None, expert_loads=None)
        self._model = Predictor(own, predictor, model.vocabulary)

    def load(self, build: ModelBuild, model: LanguageModel) -> None:
        """build: of the draft's checkpoint, with the model's config where it has none."""
        assert self.checkpoint is not None, "it has one"
        head = self.checkpoint.head
        if isinstance(head, Medusa):
            self._model = MedusaHeads(build, head)
            return
        if head is None:
            self._model = build_model(build)
            return
        assert isinstance(model, Decoder), "its layers are alike"
        if isinstance(head, Eagle3):
            self._model = Eagle3Head(build, head, model.vocabulary, self._state_size)
        else:
            self._model = EagleHead(build, model.vocabulary)

    def on(
        self, pool: DeviceKVPool, kernels: Kernels, inputs: InputBuilder, model: ModelConfig
    ) -> Guesser:
        """pool: its last layers are those of `config`."""
        assert self._model is not None, "its weights are loaded"
        if isinstance(self._model, MedusaHeads):
            return MedusaDrafts(self._model, kernels)
        own = self.config
        return DraftModel(
            self._model,
            kernels,
            inputs,
            pool.layers if own is None else pool.layers[-len(own.attention_layers) :],
            model if own is None else own,
            vocab_size=model.vocab_size,
            keys=None if own is None else pool.keys(-len(own.attention_layers)),
            reads_hidden=isinstance(self._model, (Predictor, EagleHead, Eagle3Head)),
        )
