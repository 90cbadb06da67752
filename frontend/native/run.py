"""One call of `generate`: a program for each prompt, and the answers as they come.

Programs travel and share KV like any others. A reader that goes away, at whatever point, cancels
what still runs.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, TypeAlias

from ..client.channel import Channel
from ..client.program import Pending, Program
from ..client.waiting import Waiters
from ..protocol import ir
from ..protocol.call_ops import plain_prompt_ops, sample_ops
from ..protocol.native_answer import answer_of
from ..trace import observer
from .asked import AskedPrompt, AskedPrompts

Answer: TypeAlias = dict[str, Any]
Answers: TypeAlias = Answer | list[Answer]


class NativeRun:
    """Lifetime: from the first op until all is told, or `cancel`."""

    def __init__(self, channel: Channel, asked: AskedPrompts, *, stream: bool) -> None:
        """Sends everything. Raises EngineError and InvalidProgram."""
        self._is_batch = asked.is_batch
        self._waiters = Waiters()
        self._programs: list[Program] = []
        self._samples: list[_Sample] = []
        seed = secrets.randbits(62)
        try:
            for number, each in enumerate(asked.prompts):
                self._start(channel, each, seed, number, stream)
        except BaseException:
            self.cancel()
            raise

    def _start(
        self, channel: Channel, asked: AskedPrompt, seed: int, number: int, stream: bool
    ) -> None:
        program = Program(
            channel,
            seed=seed,
            instance=number,
            stream=stream,
            name="generate",
            lora_path=asked.lora_path,
        )
        program.waiters = self._waiters  # one for all: whoever reads waits for any of them
        self._programs.append(program)
        observer.program_started(program)
        ops = plain_prompt_ops(asked.prompt)
        for op in (*ops, *sample_ops(len(ops), asked.params, asked.num_samples)):
            if isinstance(op, ir.Text):
                program.send_silent(op)
                continue
            pending = program.send(op)
            if isinstance(op, ir.Gen):
                self._samples.append(_Sample(len(self._samples), program, pending, asked))
        program.end()

    def whole(self) -> Answers:
        """All answers, once they are there. Raises ProgramError and EngineError."""
        with _CancelledUnlessDone(self):
            for sample in self._samples:
                sample.program.wait(sample.pending)
        return self._answers()

    async def whole_async(self) -> Answers:
        """The same for a coroutine."""
        with _CancelledUnlessDone(self):
            for sample in self._samples:
                await sample.program.wait_async(sample.pending)
        return self._answers()

    def _answers(self) -> Answers:
        answers = [sample.answer() for sample in self._samples]
        return answers if self._is_batch else answers[0]

    def cancel(self) -> None:
        """Nothing more is wanted. Safe in a finalizer."""
        for program in self._programs:
            program.cancel_soon()

    # --- streams ----------------------------------------------------------------------------------

    def stream(self) -> Iterator[Answer]:
        """Each answer so far, whenever one has grown, and in the end as a whole."""
        with _CancelledUnlessDone(self):
            while not self._is_told():
                self._waiters.wait(self._has_news)
                yield from self._news()

    async def stream_async(self) -> AsyncIterator[Answer]:
        """The same for a coroutine."""
        with _CancelledUnlessDone(self):
            while not self._is_told():
                await self._waiters.wait_async(self._has_news)
                for answer in self._news():
                    yield answer

    def _is_told(self) -> bool:
        return all(sample.is_told for sample in self._samples)

    def _has_news(self) -> bool:
        return any(sample.has_news for sample in self._samples)

    def _news(self) -> Iterator[Answer]:
        for sample in self._samples:
            if sample.has_news:
                answer = sample.next_answer()
                yield {"index": sample.index, **answer} if self._is_batch else answer


class _Sample:
    """One output."""

    def __init__(self, index: int, program: Program, pending: Pending, asked: AskedPrompt) -> None:
        self.index = index
        self.program = program
        self.pending = pending
        self.is_told = False  # as a whole
        self._asked = asked
        self._num_chunks = 0  # told
        self._text = ""

    @property
    def has_news(self) -> bool:
        if self.is_told:
            return False
        num_chunks = len(self.pending.chunks)
        return num_chunks > self._num_chunks or self.program.is_settled(self.pending)

    def next_answer(self) -> Answer:
        """Raises what it failed of."""
        if self.program.is_settled(self.pending):
            self.is_told = True
            self.program.wait(self.pending)
            return self.answer()
        asked, streamed = self._asked, self.pending.streamed
        assert streamed is not None
        fresh: Sequence[str] = streamed.chunks[self._num_chunks :]
        self._num_chunks += len(fresh)
        self._text += "".join(fresh)
        meta = {"finish_reason": None, **streamed.meta_at(self._num_chunks), "id": asked.id}
        num_tokens = streamed.num_tokens_at(self._num_chunks)
        if asked.form.is_wanted:
            meta |= asked.form.output(streamed.logprobs[:num_tokens])
        return {"text": self._text, "output_ids": streamed.ids[:num_tokens], "meta_info": meta}

    def answer(self) -> Answer:
        """It is done."""
        pending, asked = self.pending, self._asked
        return answer_of(asked.id, pending.text, pending.meta, asked.form)


class _CancelledUnlessDone:
    """A reader that leaves early, or fails, ends the run."""

    def __init__(self, run: NativeRun) -> None:
        self._run = run

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._run.cancel()


def streamed(start: Callable[[], NativeRun]) -> Iterator[Answer]:
    """The answers of a run that begins with the first one asked for: one that is never read never
    runs."""
    yield from start().stream()
