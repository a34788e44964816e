"""The model of the embedded engine: it writes each token's digest and checks every digest that attention reads.

Owns the ranks' KV memory and the ranks' own copy of tokens and block tables (`rows`), like a model runner. Uses
only the scheduler's output; vectorised over requests, ranks and layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvpact.identity.groups import GroupKind
from kvpact_testkit.engine import oracle
from kvpact_testkit.engine.config import EngineConfig
from kvpact_testkit.engine.kv_layout import KVLayout
from kvpact_testkit.engine.oracle import Digests, WrongRead
from kvpact_testkit.engine.output import ModelOutput, SchedulerOutput
from kvpact_testkit.engine.request import Request
from kvpact_testkit.engine.token_rows import VOCABULARY_BITS, TokenRows

NO_TOKEN = -1
HISTORY = 64
"""Number of past requests whose sequences are kept to describe wrong reads."""

Slots = npt.NDArray[np.int64]


class ModelRunner:
    """All ranks in lockstep. `memory` is `[ranks * layers, num_blocks * page_words]` words, 0 where nothing was
    written."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        planes = config.num_ranks * config.num_layers
        self.layout = KVLayout(config)
        self.memory = np.zeros((planes, config.num_blocks * config.page_words), np.uint64)
        self.masks = oracle.masks(config.num_ranks, config.num_layers, len(config.groups))
        self.weights = 0
        """The number of the current weights; other weights give other digests and other tokens."""
        self.carries_over = False
        """Whether the engine's own blocks may be of earlier weights; they then count as right."""
        self.wrong_reads: list[WrongRead] = []
        self._sizes = [group.block_size for group in config.groups]
        self._plane_masks = [mask[:, None] for mask in self.masks]
        self._past: deque[tuple[str, Digests]] = deque(maxlen=HISTORY)
        # One row per running request: tokens, their digests, and per group the first word of each of its blocks.
        rows, blocks = config.max_running, [-(-config.max_model_len // size) for size in self._sizes]
        length = max(count * size for count, size in zip(blocks, self._sizes, strict=True))
        self._free_rows = list(range(rows))
        self._requests: list[Request | None] = [None] * rows
        self.rows = TokenRows(rows, length)
        self._tables = [np.zeros((rows, count + config.draft_tokens), np.int64) for count in blocks]
        self._states_in = np.full((len(blocks), rows), -1, np.int64)
        """Per group of states, the column of each row's table with the state of all computed tokens; -1: not known."""

    def pages(self, rank: int) -> dict[str, npt.NDArray[np.uint8]]:
        """One rank's KV memory as a connector's worker gets it: layer name -> `[num_blocks, page_bytes]` bytes."""
        config = self.config
        return {
            f"layer.{layer}": self.memory[rank * config.num_layers + layer]
            .view(np.uint8)
            .reshape(config.num_blocks, -1)
            for layer in range(config.num_layers)
        }

    # The state update

    def update_states(self, output: SchedulerOutput) -> None:
        """Release the rows of requests that left; add requests that start, and new blocks."""
        for row in output.released_rows:
            self._release(row)
        for request in output.started:
            self._start(request)
        for request, start in output.grown:
            if request.row >= 0 and request.block_ids:
                self._copy_tables(request, start)

    def zero(self, block_ids: list[int]) -> None:
        """Clear new blocks, as engines do; what a worker loaded into them before is lost (H93)."""
        if block_ids:
            self.memory.reshape(len(self.memory), self.config.num_blocks, -1)[:, block_ids] = 0

    def _start(self, request: Request) -> None:
        row = self._free_rows.pop()
        request.row = row
        self._requests[row] = request
        count = len(request.token_ids)
        self.rows.tokens[row, :count] = request.token_ids
        self.rows.extras[row] = oracle.position_extras(
            request.identity, self.rows.extras.shape[1], self.config.block_size
        )
        self.rows.roots[row] = oracle.root_of(request.identity, request.request_id, self.weights)
        self.rows.known[row] = self.rows.digested[row] = count
        self.rows.digest_from(row, 0)
        self._copy_tables(request, 0)
        self._states_in[:, row] = -1
        if self.carries_over:
            self._adopt_own(row, request)

    # Other weights under running requests

    def change_weights(self, weights: int) -> None:
        """Use other weights from now on. Running requests keep their blocks, as in vLLM; what they compute on top of
        them differs from what the old or the new weights would have computed alone."""
        self.weights = weights
        self.carries_over = self.config.keeps_everything  # else caches are cleared: see `Engine.update_weights`
        for row, request in enumerate(self._requests):
            if request is not None and request.row == row:
                self._go_on_from(row, min(request.num_scheduled_tokens, int(self.rows.known[row]) - 1))

    def _adopt_own(self, row: int, request: Request) -> None:
        """Accept the content of the engine's own blocks, by their first plane; loaded blocks must be of these
        weights."""
        size, own = self.config.block_size, min(request.num_own_tokens, request.num_computed_tokens)
        positions = np.arange(own, dtype=np.int64)
        truth = self.rows.truth[row, :own].copy()
        there = self._tables[0][row, positions // size] > 0
        slots = self._slots(0, np.full(own, row), positions)
        truth[there] = (self.memory[0, slots] - self.masks[0, 0])[there]
        if (truth != self.rows.truth[row, :own]).any():
            self.rows.truth[row, :own] = truth
            self._go_on_from(row, request.num_computed_tokens + request.num_inflight_external_tokens)

    def _go_on_from(self, row: int, start: int) -> None:
        """The current weights compute the row's tokens from `start` on, on top of what other weights computed."""
        self.rows.roots[row] = oracle.word("carried over", int(self.rows.truth[row, start - 1]), self.weights)
        self.rows.digest_from(row, start)

    def _copy_tables(self, request: Request, first: int) -> None:
        for group, blocks in enumerate(request.block_ids):
            start = first // self._sizes[group]
            ids = np.array(blocks[start:], np.int64)
            self._tables[group][request.row, start : len(blocks)] = self.layout.first_word(group, ids)

    def _release(self, row: int) -> None:
        request = self._requests[row]
        if request is not None:
            self._past.append((request.request_id, self.rows.truth[row, : self.rows.digested[row]].copy()))
        self._requests[row] = None
        self._free_rows.append(row)

    # The forward pass

    def execute(self, output: SchedulerOutput) -> ModelOutput:
        """Compute the step's tokens, and verify its drafts."""
        if not output.requests:
            return ModelOutput()
        rows = np.array([request.row for request in output.requests], np.int64)
        starts = np.array(output.starts, np.int64)
        if max(output.counts) == 1 and not self.config.draft_tokens:
            ends = starts + 1
            self.rows.digest(rows, starts)
            self._read_states(rows, starts)
            self._write(rows, starts)
            self._write_states(rows, ends, ends)
            self._read(output, rows, starts, ends)
            self.settle_states(rows, ends, ends, ends)
            sampled = self._sample(rows, ends)
            self._write_next(rows, ends)
            return ModelOutput(sampled, ends.tolist())
        counts = np.array(output.counts, np.int64)
        # A step that is planned before the last one's results counts all of its drafts as accepted.
        starts = np.minimum(starts, self.rows.known[rows] - 1)
        ends = starts + counts
        known = np.minimum(ends, self.rows.known[rows])
        self.rows.digest(rows, known - 1)
        sums = self.rows.guess(rows, known, ends)
        self._read_states(rows, starts)
        every = np.repeat(rows, counts)
        first = np.repeat(starts - np.cumsum(counts) + counts, counts)
        self._write(every, first + np.arange(len(every), dtype=np.int64))
        self._write_states(rows, known, ends)
        self._read(output, rows, starts, ends)
        right = self.rows.verify(rows, known, ends, sums, [wrong.row for wrong in self.wrong_reads])
        verified = self.rows.drafts_of(rows, known, right, ends)
        self.settle_states(rows, known, right, ends)
        sampled = self._sample(rows, right)
        for place in range(int((right - known).max()) + 1):
            behind = right - known >= place
            self._write_next(rows[behind], known[behind] + place)
        return ModelOutput(sampled, right.tolist(), verified)

    def _slots(self, group: int, rows: Slots, positions: Slots) -> Slots:
        """Where tokens are in memory; where `positions` are states' last tokens, those."""
        blocks, offsets = np.divmod(positions, self._sizes[group])
        slots: Slots = self._tables[group][rows, blocks]
        return slots if self.layout.is_state[group] else slots + offsets

    def _following(self, group: int, rows: Slots, positions: Slots) -> Digests:
        """What the next tokens add to what is written for `positions`; 0 where the next token is not known."""
        following = np.minimum(positions + 1, self.rows.tokens.shape[1] - 1)
        added = self.layout.next_tokens(group, positions, self.rows.tokens[rows, following])
        return np.where(positions + 1 < self.rows.known[rows], added, np.uint64(0))

    def _words(self, group: int, rows: Slots, positions: Slots) -> Digests:
        """What belongs to the tokens at `positions`, without mask."""
        words: Digests = self.rows.truth[rows, positions]
        return words + self._following(group, rows, positions) if self.layout.depends_on_next[group] else words

    def _write(self, rows: Slots, positions: Slots) -> None:
        for group, mask in enumerate(self._plane_masks):
            if not self.layout.is_state[group]:
                self.memory[:, self._slots(group, rows, positions)] = self._words(group, rows, positions) + mask

    def _write_next(self, rows: Slots, ends: Slots) -> None:
        """Layers of a draft model write for the last token when the next one is sampled."""
        for group in np.flatnonzero(self.layout.depends_on_next).tolist():
            words = self._words(group, rows, ends - 1) + self._plane_masks[group]
            self.memory[:, self._slots(group, rows, ends - 1)] = words

    def _write_states(self, rows: Slots, known: Slots, ends: Slots) -> None:
        """Write the state of the `known` tokens into the last block up to `ends`, and that behind each draft into one
        more behind it."""
        for group in np.flatnonzero(self.layout.is_state).tolist():
            for place in range(int((ends - known).max()) + 1):
                there = ends - known >= place
                these, last = rows[there], (known + place - 1)[there]
                slots = self._tables[group][these, (ends[there] - 1) // self._sizes[group] + place]
                self.memory[:, slots] = self.rows.truth[these, last] + self._plane_masks[group]

    def settle_states(self, rows: Slots, known: Slots, right: Slots, ends: Slots) -> None:
        """After sampling: the state at a boundary among the accepted drafts, which end at `right`, goes into its block
        (`postprocess_mamba_fused_kernel`)."""
        for group in np.flatnonzero(self.layout.is_state).tolist():
            size, table = self._sizes[group], self._tables[group]
            running = (ends - 1) // size
            boundary = right // size * size
            passed, target = boundary >= known, boundary // size - 1
            moved = passed & ((target != running) | (boundary > known))
            from_place, to_place = (running + boundary - known)[moved], target[moved]
            self.memory[:, table[rows[moved], to_place]] = self.memory[:, table[rows[moved], from_place]]
            self._states_in[group, rows] = np.where(passed & (target == running), running, running + right - known)

    def _read_states(self, rows: Slots, starts: Slots) -> None:
        """Check the states from which the step computes, before it overwrites them."""
        rows, starts = rows[starts > 0], starts[starts > 0]
        for group in np.flatnonzero(self.layout.is_state).tolist() if len(rows) else ():
            columns = self._states_in[group, rows]
            columns = np.where(columns < 0, (starts - 1) // self._sizes[group], columns)
            slots = self._tables[group][rows, columns][:, None]
            truth = self.rows.truth[rows, starts - 1][:, None]
            for plane in range(len(self.memory)):
                wrong = self.memory[plane][slots] != truth + self.masks[group, plane]
                if wrong.any():
                    self._note(group, plane, rows, slots, wrong, starts - 1)

    def _read(self, output: SchedulerOutput, rows: Slots, starts: Slots, ends: Slots) -> None:
        if self.config.oracle == "full":
            self.check_rows(rows, starts, ends)
            return
        newcomers = [request.row for request in output.started]
        newcomers += [request.row for request in output.requests if request.request_id in output.external_hits]
        chunk = ends - starts > 1
        whole = np.isin(rows, newcomers) | chunk if newcomers or chunk.any() else chunk
        if whole.any():
            self.check_rows(rows[whole], starts[whole], ends[whole])
            rows, starts = rows[~whole], starts[~whole]
        before = np.maximum(starts - 1, 0)
        for group, mask in enumerate(self._plane_masks):
            wrong = self.memory[:, self._slots(group, rows, before)] != self._words(group, rows, before) + mask
            if wrong.any() and not self.layout.is_state[group]:
                self.check_rows(rows, starts, starts + 1)
                return

    def check_rows(self, rows: Slots, starts: Slots, ends: Slots) -> None:
        """Check all tokens that the queries `starts[i] <= q < ends[i]` of each row read; wrong reads are appended to
        `wrong_reads`."""
        for number, group in enumerate(self.config.groups if len(rows) else ()):
            if self.layout.is_state[number]:
                continue
            positions = np.arange(-(-int(ends.max()) // group.block_size) * group.block_size, dtype=np.int64)
            expected = self.rows.truth[rows, : len(positions)]
            read = positions < ends[:, None]
            if group.kind is not GroupKind.FULL:
                first = np.array([group.first_read(start) for start in starts.tolist()], np.int64)
                read &= positions >= first[:, None]
            if self.layout.depends_on_next[number]:
                every, places = rows[:, None], np.broadcast_to(positions, read.shape)
                expected = expected + self._following(number, every, places)
            slots = self._slots(number, rows[:, None], positions[None, :])
            for plane in range(len(self.memory)):
                wrong = (self.memory[plane][slots] != expected + self.masks[number, plane]) & read
                if wrong.any():
                    self._note(number, plane, rows, slots, wrong)

    def _note(
        self, group: int, plane: int, rows: Slots, slots: Slots, wrong: npt.NDArray[np.bool_], at: Slots | None = None
    ) -> None:
        """Note the first wrong word of each row; `at` has its token where there is one word a row."""
        rank, layer = divmod(plane, self.config.num_layers)
        for index in np.flatnonzero(wrong.any(axis=1)).tolist():
            place = int(np.argmax(wrong[index]))
            slot, position = int(slots[index, place]), place if at is None else int(at[index])
            row = int(rows[index])
            request = self._requests[row]
            if request is not None:
                block, stored = slot // self.config.page_words, int(self.memory[plane, slot])
                self.wrong_reads.append(
                    WrongRead(request.request_id, row, request.epoch, position, block, group, rank, layer, stored)
                )

    def _sample(self, rows: Slots, ends: Slots) -> list[int]:
        at_end = ends == self.rows.known[rows]
        if not at_end.all():
            tokens = np.full(len(rows), NO_TOKEN, np.int64)
            if at_end.any():
                tokens[at_end] = self._sample(rows[at_end], ends[at_end])
            return tokens.tolist()
        tokens = self.rows.next_tokens(rows, ends - 1)
        for wrong in self.wrong_reads:
            tokens = np.where(rows == wrong.row, (tokens + 1 + wrong.stored % 1021) % (1 << VOCABULARY_BITS), tokens)
        room = ends < self.rows.tokens.shape[1]
        self.rows.tokens[rows[room], ends[room]] = tokens[room]
        self.rows.known[rows] = ends + 1
        return tokens.tolist()

    # Describing wrong reads

    def known_sequences(self) -> Iterator[tuple[str, Digests]]:
        """Request id and digests of present and past requests, to describe a wrong read."""
        for row, request in enumerate(self._requests):
            if request is not None:
                yield request.request_id, self.rows.truth[row, : self.rows.digested[row]]
        yield from self._past

    def truth_of(self, request: Request) -> Digests:
        """The digests of all tokens of a request, computed from its tokens and identity alone."""
        tokens = np.array(request.token_ids, np.int64)
        extras = oracle.position_extras(request.identity, len(tokens), self.config.block_size)
        root = oracle.root_of(request.identity, request.request_id, self.weights)
        return oracle.digests_of(tokens, extras, root)[0]

    def explain(self, wrong: WrongRead) -> str:
        """A description of one wrong read."""
        found = oracle.describe(wrong.stored, self.masks, self.config.num_layers, self.known_sequences())
        return (
            f"request {wrong.request_id} reads token {wrong.position} in block {wrong.block_id} "
            f"(group {wrong.group_id}, rank {wrong.rank}, layer {wrong.layer}) and finds {found}"
        )
