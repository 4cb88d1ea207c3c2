"""A decoder whose layers run as one program (`kernels.program`) instead of some 270 operator calls."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

import kernels
from engine.layers.attention import ForwardBatch, LayerCache
from engine.models.decoder import Decoder

#: Rows that buffers have at first: the default token budget of a step on a CPU.
_LEAST_ROWS = 256

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Recording:
    """A program of all layers with the buffers that it reads and writes, each of `num_rows` rows."""

    program: kernels.Program
    num_rows: int
    embedded: Tensor  # [num_rows, hidden_size]
    batch: ForwardBatch  # positions, sequences, cache slots; the block tables are the batches' own
    output: Tensor | None  # [num_rows, hidden_size], as `Decoder.through_layers` answers
    residual: Tensor

    @classmethod
    def make(
        cls, model: Decoder, caches: Sequence[LayerCache], batch: ForwardBatch, like: Tensor, num_rows: int
    ) -> _Recording:
        """For steps of up to `num_rows` tokens, of `batch`'s block tables and `like`'s width and dtype.

        Raises NotRecordable.
        """
        assert batch.cache_slots is not None, "a CPU is told the slots"
        embedded = like.new_empty(num_rows, like.shape[1])
        attention = replace(
            batch.attention,
            seq_index=batch.attention.seq_index.new_empty(num_rows),
            positions=batch.attention.positions.new_empty(num_rows),
        )
        rows = replace(batch, cache_slots=batch.cache_slots.new_empty(num_rows), attention=attention, sampled=None)
        program, (output, residual) = kernels.record(lambda: model.through_layers(embedded, rows, caches), num_rows)
        return cls(program, num_rows, embedded, rows, output, residual)

    def run(self, embedded: Tensor, batch: ForwardBatch) -> tuple[Tensor | None, Tensor]:
        """The layers' (output, residual) for a step, valid until the next."""
        count = embedded.shape[0]
        mine, step = self.batch.attention, batch.attention
        assert mine.block_tables.data_ptr() == step.block_tables.data_ptr(), "the block tables have moved"
        assert self.batch.cache_slots is not None
        assert batch.cache_slots is not None
        self.embedded[:count] = embedded
        self.batch.cache_slots[:count] = batch.cache_slots
        mine.seq_index[:count] = step.seq_index
        mine.positions[:count] = step.positions
        self.program.run(count)
        return None if self.output is None else self.output[:count], self.residual[:count]


class LayerProgram:
    """`Decoder.hidden` with the layers recorded. A model that cannot be recorded runs operator by operator."""

    def __init__(self, model: Decoder, caches: Sequence[LayerCache]) -> None:
        self._model = model
        self._caches = caches
        self._recording: _Recording | None = None
        self._recordable = True

    def hidden(self, batch: ForwardBatch) -> Tensor:
        """Final hidden states of the sampled rows: [num_sampled, hidden_size]. Fills the caches."""
        embedded = self._model.embedded(batch)
        recording = self._for_rows(embedded, batch)
        if recording is None:
            layers = self._model.through_layers(embedded, batch, self._caches)
        else:
            layers = recording.run(embedded, batch)
        return self._model.final(*layers, batch.sampled)

    def _for_rows(self, embedded: Tensor, batch: ForwardBatch) -> _Recording | None:
        """A recording with room for the step, made anew when there is none."""
        num_rows = embedded.shape[0]
        if self._recordable and (self._recording is None or self._recording.num_rows < num_rows):
            self._recording = None  # its buffers first
            rows = max(_LEAST_ROWS, 1 << (num_rows - 1).bit_length())
            try:
                self._recording = _Recording.make(self._model, self._caches, batch, embedded, rows)
            except kernels.NotRecordable as reason:
                self._recordable = False
                _log.info("layers run operator by operator: %s", reason)
        return self._recording
