"""Training of stemma-tiny: seeded, resumable, with progress, held-out accuracy and checkpoints.

    python train.py --out run --compile             # under two hours on two CPU cores
    python train.py --out run --compile --resume
    python train.py --out more --compile --init ../../runtime/checkpoint/assets/stemma-tiny

Loss is on generated tokens only, and only their logits are computed. Matrices are trained by
Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks"), the rest by
AdamW. The learning rate warms up, stays constant, and falls to zero over the last part of the
steps. The weights that are exported are a moving average.
"""

import argparse
import copy
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from generate import MIX, WARMUP_MIX, samples
from model import Config, Llama, compile_pointwise, load_hugging_face_state
from safetensors.torch import load_file
from samples import Sample
from tokenizer import Encoder, train_tokenizer
from torch import Tensor
from world import use_pieces

HELD_OUT_SKILLS = (
    "react",
    "extract",
    "chat",
    "classify",
    "yes_no",
    "yes_no_stated",
    "tips",
    "tools",
)


@dataclass(frozen=True)
class Batch:
    """Samples of like length, padded on the right.

    ids int64 and weights float32, [rows, tokens]; a weight is 0 where the model does not generate.
    """

    ids: Tensor
    weights: Tensor
    skills: list[str]

    @property
    def is_target(self) -> Tensor:
        return self.weights > 0


class Data:
    """Endless batches; a pool of samples is a function of the seed and the step it starts at."""

    def __init__(self, encoder: Encoder, args: argparse.Namespace) -> None:
        self.encoder = encoder
        self.args = args
        self._pool: list[Batch] = []

    def next(self, step: int) -> Batch:
        if not self._pool:
            mix = WARMUP_MIX if step < self.args.warmup_mix_steps else self.args.mix
            stream = samples(mix, hash((self.args.seed, step)))
            pool = [next(stream) for _ in range(self.args.pool)]
            self._pool = make_batches(self.encoder, pool, self.args.tokens)
            random.Random(step).shuffle(self._pool)
        return self._pool.pop()


class Trainer:
    """The state of a training run: `step` steps are done; `save` and `load` keep all of it.

    `average` is the moving average of `model`, which is what is measured and exported.
    """

    def __init__(self, args: argparse.Namespace, model: Llama, device: str) -> None:
        self.args = args
        self.device = device
        self.model = model.to(device)
        self.average = copy.deepcopy(self.model)
        self.teacher = load_teacher(args.teacher, device) if args.teacher else None
        self.optimizers = make_optimizers(self.model, args)
        self.step = 0
        self.num_tokens = 0
        self.seconds = 0.0

    def train_step(self, batch: Batch) -> float:
        """One update; returns the loss before it."""
        factor = learning_rate(self.step, self.args)
        peaks = (self.args.lr, self.args.lr_embed)
        for optimizer, peak in zip(self.optimizers, peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
        started = time.time()
        loss = compute_loss(self.model, batch, self.device, self.teacher, self.args.dtype)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        update_average(self.average, self.model, min(0.995, (self.step + 1) / (self.step + 10)))
        self.step += 1
        self.num_tokens += batch.ids.numel()
        self.seconds += time.time() - started
        return loss.item()

    def save(self, path: Path) -> None:
        """Write to a file beside it, then rename: a checkpoint is whole or absent."""
        state = {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "num_tokens": self.num_tokens,
            "seconds": self.seconds,
            "config": asdict(self.model.config),
        }
        torch.save(state, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)

    def begin_from(self, folder: Path) -> None:
        """Take the weights of an exported model; the optimizers begin anew."""
        load_hugging_face_state(self.model, load_file(folder / "model.safetensors"))
        self.average = copy.deepcopy(self.model)

    def load(self, path: Path) -> None:
        saved = torch.load(path, map_location=self.device, weights_only=False)
        self.model.load_state_dict(saved["model"])
        self.average.load_state_dict(saved["average"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.step, self.num_tokens = saved["step"], saved["num_tokens"]
        self.seconds = saved["seconds"]


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.init:
        shutil.copy(args.init / "tokenizer.json", args.out)
    encoder = load_encoder(args.out / "tokenizer.json")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trainer = Trainer(args, Llama(Config()), device)
    checkpoint = args.out / "checkpoint.pt"
    if args.resume:
        trainer.load(checkpoint)
    elif args.init:
        trainer.begin_from(args.init)
    if args.compile:
        compile_pointwise()
    run(trainer, Data(encoder, args), held_out_batches(encoder), checkpoint)


def run(trainer: Trainer, data: Data, held_out: list[Batch], checkpoint: Path) -> None:
    """Train to the last step, or to SIGTERM, with a checkpoint then and now and then."""
    args = trainer.args
    asked_to_stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked_to_stop.append(number))
    started, first_step, first_tokens = time.time(), trainer.step, trainer.num_tokens
    losses: list[float] = []
    while trainer.step < args.steps and not asked_to_stop:
        losses.append(trainer.train_step(data.next(trainer.step)))
        if trainer.step % 20 == 0:
            elapsed = time.time() - started
            eta = elapsed / (trainer.step - first_step) * (args.steps - trainer.step) / 60
            print(
                f"step {trainer.step}/{args.steps} loss {sum(losses) / len(losses):.4f} "
                f"tokens {trainer.num_tokens / 1e6:.2f}M "
                f"{(trainer.num_tokens - first_tokens) / elapsed:.0f} tokens/s eta {eta:.0f} min",
                flush=True,
            )
            losses = []
        is_last = trainer.step == args.steps or asked_to_stop
        if trainer.step % args.eval_every == 0 or is_last:
            exact, tokens = held_out_accuracy(trainer.average, held_out, trainer.device)
            shown = " ".join(f"{k} {exact[k]:.3f} ({tokens[k]:.4f})" for k in exact)
            print(f"eval {trainer.step} {shown}", flush=True)
            trainer.save(checkpoint)


def load_encoder(path: Path) -> Encoder:
    """The tokenizer at `path`, trained first if there is none; names are made of its pieces."""
    if not path.exists():
        train_tokenizer().save(str(path))
    encoder = Encoder.load(path)
    use_pieces(encoder.tokenizer.get_vocab())
    return encoder


def make_batches(encoder: Encoder, pool: list[Sample], num_tokens: int) -> list[Batch]:
    """Sort samples by length and cut them into batches of at most `num_tokens` padded tokens."""
    rows = [(*encoder.encode_sample(sample), sample.skill) for sample in pool]
    rows.sort(key=lambda row: len(row[0]))
    batches, start = [], 0
    while start < len(rows):
        end = start
        while end < len(rows) and (end + 1 - start) * len(rows[end][0]) <= num_tokens:
            end += 1
        end = max(end, start + 1)
        batches.append(_pad(rows[start:end]))
        start = end
    return batches


def _pad(rows: list[tuple[list[int], list[float], str]]) -> Batch:
    longest = max(len(row[0]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    weights = torch.zeros(len(rows), longest)
    for index, (tokens, row_weights, _) in enumerate(rows):
        ids[index, : len(tokens)] = torch.tensor(tokens)
        weights[index, : len(tokens)] = torch.tensor(row_weights)
    return Batch(ids, weights, [row[2] for row in rows])


def load_teacher(folder: Path, device: str) -> Llama:
    """A model of export.py's whose distribution is followed where it knows the skill."""
    teacher = Llama(Config())
    load_hugging_face_state(teacher, load_file(folder / "model.safetensors"))
    return teacher.to(device).requires_grad_(False)


def compute_loss(
    model: Llama,
    batch: Batch,
    device: str,
    teacher: Llama | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Weighted mean over the target tokens of the cross-entropy, and of the distance to `teacher`
    where it knows the skill (Hinton et al., "Distilling the knowledge in a neural network", 2015).
    """
    ids, weights = batch.ids.to(device), batch.weights.to(device)[:, 1:]
    is_target = weights > 0
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        hidden = model(ids[:, :-1])
        logits = model.logits(hidden[is_target])
    losses = F.cross_entropy(logits, ids[:, 1:][is_target], reduction="none") * weights[is_target]
    known = [row for row, skill in enumerate(batch.skills) if not skill.startswith("tools")]
    if teacher and known:
        of_rows = is_target.nonzero()[:, 0]
        is_known = torch.isin(of_rows, torch.tensor(known, device=device))
        followed = weights[known][is_target[known]]
        with torch.no_grad(), torch.autocast(device, dtype, enabled=dtype != torch.float32):
            wanted = teacher.logits(teacher(ids[known][:, :-1])[is_target[known]]).float()
        own = logits[is_known].float().log_softmax(-1)
        apart = F.kl_div(own, wanted.log_softmax(-1), reduction="none", log_target=True).sum(-1)
        return (losses.sum() + (apart * followed).sum()) / weights.sum()
    return losses.sum() / weights.sum()


@torch.no_grad()
def held_out_accuracy(
    model: Llama, batches: list[Batch], device: str
) -> tuple[dict[str, float], dict[str, float]]:
    """Per skill, the share of samples and of replies whose every token is the greedy choice.

    With the expected text before it, a stretch that greedy decoding would get exactly right is
    one whose every target is the arg max, so no decoding is needed.
    """
    right: dict[str, list[bool]] = {}
    token_right: dict[str, list[float]] = {}
    for batch in batches:
        ids, is_target = batch.ids.to(device), batch.is_target.to(device)
        with torch.autocast(device, torch.bfloat16):
            hidden = model(ids[:, :-1])
            best = model.logits(hidden[is_target[:, 1:]]).argmax(-1)
        wrong = torch.zeros_like(is_target[:, 1:])
        wrong[is_target[:, 1:]] = best != ids[:, 1:][is_target[:, 1:]]
        for row, skill in enumerate(batch.skills):
            num_wrong = int(wrong[row].sum())
            right.setdefault(skill, []).append(num_wrong == 0)
            share = num_wrong / int(is_target[row].sum())
            token_right.setdefault(skill, []).append(1 - share)
    return (
        {skill: sum(values) / len(values) for skill, values in right.items()},
        {skill: sum(values) / len(values) for skill, values in token_right.items()},
    )


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """The factor of the learning rate: warm-up, constant, linear decay over the last part."""
    rise = min(1.0, (step + 1) / args.warmup_steps)
    fall = (args.steps - step) / max(1, args.decay * args.steps)
    return max(0.0, min(rise, fall, 1.0))


def make_optimizers(model: Llama, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Of the matrices, and of the rest. Muon computes in bfloat16: AdamW is for where that is slow
    (on two cores with AVX2 alone a step of 2,048 tokens took 12 s by Muon, under 1 s by AdamW)."""
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    rest = torch.optim.AdamW(others, lr=args.lr_embed, betas=(0.9, 0.95), weight_decay=0.0)
    if args.dtype == torch.float32:
        return [torch.optim.AdamW(matrices, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0), rest]
    muon = torch.optim.Muon
    return [muon(matrices, lr=args.lr, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"), rest]


def update_average(average: Llama, model: Llama, decay: float) -> None:
    with torch.no_grad():
        for kept, new in zip(average.parameters(), model.parameters(), strict=True):
            kept.lerp_(new, 1 - decay)


def parse_args(description: str | None = __doc__, **defaults: Any) -> argparse.Namespace:
    """`defaults`: other values of flags, and attributes without a flag."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("run"))
    parser.add_argument("--steps", type=int, default=7000)
    parser.add_argument("--tokens", type=int, default=4096, help="padded tokens in a batch")
    parser.add_argument("--pool", type=int, default=1200, help="samples sorted by length at once")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--lr-embed", type=float, default=4e-3)
    parser.add_argument("--warmup-steps", type=int, default=60)
    parser.add_argument("--warmup-mix-steps", type=int, default=900)
    parser.add_argument("--decay", type=float, default=0.65, help="share of steps with decay")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mix", type=json.loads, default=MIX, help="JSON: weight of each skill")
    parser.add_argument("--eval-every", type=int, default=250)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--init", type=Path, help="a folder of export.py's, to begin from")
    parser.add_argument(
        "--teacher", type=Path, help="a folder of export.py's: follow it in what it knows"
    )
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.set_defaults(**{"dtype": torch.bfloat16, **defaults})
    return parser.parse_args()


def held_out_batches(
    encoder: Encoder, skills: Sequence[str] = HELD_OUT_SKILLS, num_samples: int = 120
) -> list[Batch]:
    """The same held-out samples each time, `num_samples` of each skill."""
    pool = []
    for skill in skills:
        stream = samples({skill: 1.0}, 77, held_out=True)
        pool += [next(stream) for _ in range(num_samples)]
    return make_batches(encoder, pool, 8192)


if __name__ == "__main__":
    main()
