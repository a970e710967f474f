"""Triton kernels of recurrences: the computation of `torch_recurrence`, block by block of absolute positions.

One program of `scan_kernel` has one head of one sequence and some columns of its matrix, over all blocks that the step
touches:

    position    0        16       32       48
    blocks      |--------|--------|--------|--
    a chunk            [..............]           rows 11 .. 39
    programs           ^^ ^^^^^^^^ ^^^^^^         three turns: the end of a block, a whole one, a beginning

Each turn is the same tile of 16 rows, however many of them are new: the block's earlier rows are loaded from the slot,
rows beyond the sequence are zero. So a decode step, one new row of a tile, gives the very bits of an extend, and no
chunk end shows. The solve of the delta rule's triangular system goes row by row, for the rows that are new.

The matrix stays in the slot, which nobody else touches meanwhile: a block's products read `DIMS` of its rows at a time,
one chain of additions over all of them, and where a block ends they are written over it. In registers as a whole, with
products that no tensor core does, it would be moved to memory and back many times over. Rows of a muted sequence read
zeros and write zeros.

`keep_keys_kernel` and `keep_rows_kernel` write the parts of a slot that all programs of a group or head read, so they
run afterwards.

Float32 throughout, and multiplied as such, never as TF32.
"""

# The compiler reads these functions, Python does not run them: they have no types that mypy could check.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(16)


@triton.jit
def conv_kernel(
    x_ptr, x_stride_t, state_ptr, state_stride_s, weight_ptr, bias_ptr, out_ptr, out_stride_t,
    offsets_ptr, starts_ptr, slots_ptr, muted_ptr, first_channel, channels,
    UNITS: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, HELD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BIAS: tl.constexpr, MUTED: tl.constexpr,
):  # fmt: skip
    """The channels of one state buffer, from `first_channel` of `channels` on; one tile of rows of one sequence. A slot
    has entries for `HELD` positions."""
    sequence = tl.program_id(0)
    tile = tl.program_id(1)
    first = tl.load(offsets_ptr + sequence)
    count = tl.load(offsets_ptr + sequence + 1) - first
    if tile * ROWS < count:
        slot = tl.load(slots_ptr + sequence).to(tl.int64)
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < UNITS * WIDTH
        entry = state_ptr + slot * state_stride_s + column // WIDTH * (HELD * WIDTH) + column % WIDTH
        start = tl.load(starts_ptr + sequence)
        row = tile * ROWS + tl.arange(0, ROWS)
        live = (row < count)[:, None] & inside[None, :]
        source = x_ptr + first.to(tl.int64) * x_stride_t + first_channel + column
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for tap in tl.static_range(TAPS + 1):
            at = row + tap - TAPS
            new = tl.load(source[None, :] + at[:, None] * x_stride_t, mask=live & (at >= 0)[:, None], other=0.0)
            place = (start + at + HELD) % HELD
            old = tl.load(entry[None, :] + place[:, None] * WIDTH, mask=live & (at < 0)[:, None], other=0.0)
            weight = tl.load(weight_ptr + tap * channels + first_channel + column, mask=inside, other=0.0)
            acc = tl.fma((new + old).to(tl.float32), tl.broadcast_to(weight[None, :], acc.shape), acc)
        if BIAS:
            acc += tl.load(bias_ptr + first_channel + column, mask=inside, other=0.0)[None, :]
        target = out_ptr + (first + row).to(tl.int64)[:, None] * out_stride_t + first_channel + column[None, :]
        tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=live)
        if tile == 0:
            tl.debug_barrier()  # the tile has read what is overwritten now
            stale = count < 0
            if MUTED:
                stale = tl.load(muted_ptr + sequence) != 0
            for begin in tl.static_range(0, HELD, ROWS):
                last = count - 1 - begin - tl.arange(0, ROWS)
                kept = ((last >= 0) & (last >= count - HELD))[:, None] & inside[None, :]
                value = tl.load(source[None, :] + last[:, None] * x_stride_t, mask=kept, other=0.0)
                place = (start + last + HELD) % HELD
                tl.store(entry[None, :] + place[:, None] * WIDTH, tl.where(stale, 0.0, value), mask=kept)


@triton.jit
def _extent(offsets_ptr, starts_ptr, slots_ptr, sequence):
    """A sequence's first packed row, the positions it begins and ends at, and its slot."""
    first = tl.load(offsets_ptr + sequence)
    start = tl.load(starts_ptr + sequence)
    end = start + tl.load(offsets_ptr + sequence + 1) - first
    return first, start, end, tl.load(slots_ptr + sequence).to(tl.int64)


@triton.jit
def _solved_rows(scores, solved, rows, fresh):
    """(1 + A)^-1 row by row, [BLOCK, BLOCK]: the rows that are fresh, on top of those that are known. A is the part of
    `scores` below the diagonal."""
    a = tl.where(rows[:, None] > rows[None, :], scores, 0.0)
    columns = tl.arange(0, BLOCK)
    for row in tl.range(BLOCK, num_stages=1):
        mine = tl.sum(tl.where(rows[:, None] == row, a, 0.0), 0)
        found = tl.where(columns == row, 1.0, 0.0) - tl.sum(mine[:, None] * solved, 0)
        solved = tl.where(((rows == row) & fresh)[:, None], found[None, :], solved)
    return solved


@triton.jit
def _decayed(fresh_at, fresh, known_at, known, rows, causal):
    """Logarithms of decays summed up to each row and over all of them; exp of what lies between two rows, and before
    each."""
    decay = tl.load(fresh_at, mask=fresh, other=0.0) + tl.load(known_at, mask=known, other=0.0)
    total = tl.cumsum(decay, 0)
    last = tl.sum(tl.where(rows == BLOCK - 1, total, 0.0), 0)
    within = tl.where(causal, tl.exp(total[:, None] - total[None, :]), 0.0)
    return total, last, within, tl.exp(total)[:, None]


@triton.jit
def _load_block(fresh_at, has_row, known_at, known, begin, KEY_DIM: tl.constexpr, DIMS: tl.constexpr):
    """Some columns of a block's rows, [BLOCK, DIMS]: those of the step, and those that the slot has."""
    dims = begin + tl.arange(0, DIMS)
    has_dim = (dims < KEY_DIM)[None, :]
    x = tl.load(fresh_at + dims[None, :], mask=has_row[:, None] & has_dim, other=0.0)
    return x + tl.load(known_at + dims[None, :], mask=known[:, None] & has_dim, other=0.0)


@triton.jit
def _matrix_part(
    matrix_ptr, columns, begin, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DIMS: tl.constexpr
):  # fmt: skip
    """Where some rows of a head's matrix lie, and which of them there are: [DIMS, BLOCK_V]."""
    dims = begin + tl.arange(0, DIMS)
    has = (dims < KEY_DIM)[:, None] & (columns < VALUE_DIM)[None, :]
    return matrix_ptr + dims[:, None] * VALUE_DIM + columns[None, :], has


@triton.jit
def scan_kernel(
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, out_ptr, solved_out_ptr,
    matrix_ptr, keys_ptr, values_ptr, decays_ptr, solved_ptr,
    offsets_ptr, starts_ptr, slots_ptr, muted_ptr,
    matrix_stride_s, keys_stride_s, values_stride_s, decays_stride_s, solved_stride_s,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    DIMS: tl.constexpr, BLOCK_V: tl.constexpr, DELTA: tl.constexpr, MUTED: tl.constexpr,
):  # fmt: skip
    """See the module's prose. Slots are contiguous, a stride apart; rows are contiguous."""
    sequence, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = head // (HEADS // GROUPS)
    first, start, end, slot = _extent(offsets_ptr, starts_ptr, slots_ptr, sequence)
    alive = sequence >= 0
    if MUTED:
        alive = tl.load(muted_ptr + sequence) == 0

    rows = tl.arange(0, BLOCK)
    columns = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    has_column = columns < VALUE_DIM
    causal = rows[:, None] >= rows[None, :]

    matrix_ptr += slot * matrix_stride_s + head * (KEY_DIM * VALUE_DIM)
    values_at = values_ptr + slot * values_stride_s + (head * BLOCK + rows[:, None]) * VALUE_DIM + columns[None, :]
    keys_at = keys_ptr + slot * keys_stride_s + (group * BLOCK + rows[:, None]) * KEY_DIM
    decays_at = decays_ptr + slot * decays_stride_s + head * BLOCK + rows
    solved_at = solved_ptr + slot * solved_stride_s + (head * BLOCK + rows[:, None]) * BLOCK + rows[None, :]

    residual = tl.zeros([BLOCK, BLOCK_V], tl.float32)
    solved = tl.zeros([BLOCK, BLOCK], tl.float32)
    for base in tl.range(start // BLOCK * BLOCK, end, BLOCK, num_stages=1):
        fresh = (base + rows >= start) & (base + rows < end)
        known = base + rows < start
        index = (first + base + rows - start).to(tl.int64)
        grouped = (index[:, None] * GROUPS + group) * KEY_DIM
        by_keys = tl.zeros([BLOCK, BLOCK], tl.float32)
        attend = tl.zeros([BLOCK, BLOCK], tl.float32)
        held = tl.zeros([BLOCK, BLOCK_V], tl.float32)
        out = tl.zeros([BLOCK, BLOCK_V], tl.float32)
        for begin in tl.range(0, KEY_DIM, DIMS, num_stages=1):
            q = _load_block(q_ptr + grouped, fresh, q_ptr + grouped, rows < 0, begin, KEY_DIM, DIMS)
            k = _load_block(k_ptr + grouped, fresh, keys_at, known, begin, KEY_DIM, DIMS)
            matrix_at, has = _matrix_part(matrix_ptr, columns, begin, KEY_DIM, VALUE_DIM, DIMS)
            matrix = tl.load(matrix_at, mask=has & alive, other=0.0)
            k_columns = tl.trans(k)
            attend = tl.dot(q, k_columns, attend, input_precision="ieee")
            out = tl.dot(q, matrix, out, input_precision="ieee")
            if DELTA:
                by_keys = tl.dot(k, k_columns, by_keys, input_precision="ieee")
                held = tl.dot(k, matrix, held, input_precision="ieee")
        value_at = (index[:, None] * HEADS + head) * VALUE_DIM + columns[None, :]
        v = tl.load(v_ptr + value_at, mask=fresh[:, None] & has_column[None, :], other=0.0)
        before = tl.load(values_at, mask=known[:, None] & has_column[None, :], other=0.0)
        total, last, within, since = _decayed(decay_ptr + index * HEADS + head, fresh, decays_at, known, rows, causal)
        if DELTA:
            beta = tl.load(beta_ptr + index * HEADS + head, mask=fresh, other=0.0)[:, None]
            solved = tl.load(solved_at, mask=known[:, None] & causal, other=0.0)
            solved = _solved_rows(by_keys * (within * beta), solved, rows, fresh)
            residual = tl.where(known[:, None], before, (v - held * since) * beta)
            u = tl.dot(solved, residual, input_precision="ieee")
        else:
            residual = v + before
            u = residual
        out = out * since + tl.dot(attend * within, u, input_precision="ieee")
        tl.store(out_ptr + value_at, out, mask=fresh[:, None] & has_column[None, :])
        if base + BLOCK <= end:
            tl.debug_barrier()  # the matrix has been read: the next block's is written over it
            until = tl.exp(last - total)[:, None]
            for begin in tl.range(0, KEY_DIM, DIMS, num_stages=1):
                k = _load_block(k_ptr + grouped, fresh, keys_at, known, begin, KEY_DIM, DIMS)
                matrix_at, has = _matrix_part(matrix_ptr, columns, begin, KEY_DIM, VALUE_DIM, DIMS)
                matrix = tl.load(matrix_at, mask=has & alive, other=0.0)
                matrix = matrix * tl.exp(last) + tl.dot(tl.trans(k * until), u, input_precision="ieee")
                tl.store(matrix_at, tl.where(alive, matrix, 0.0), mask=has)
            tl.debug_barrier()

    kept = (rows < end % BLOCK)[:, None]
    if DELTA and tile == 0:
        out_at = solved_out_ptr + ((sequence * HEADS + head) * BLOCK + rows[:, None]) * BLOCK + rows[None, :]
        tl.store(out_at, tl.where(kept, solved, 0.0))
    tl.store(values_at, tl.where(kept & alive, residual, 0.0), mask=(rows < BLOCK)[:, None] & has_column[None, :])


@triton.jit
def keep_keys_kernel(
    k_ptr, keys_ptr, keys_stride_s, offsets_ptr, starts_ptr, slots_ptr, muted_ptr,
    GROUPS: tl.constexpr, KEY_DIM: tl.constexpr, BLOCK_K: tl.constexpr, MUTED: tl.constexpr,
):  # fmt: skip
    """The keys of a sequence's last block: fresh ones are written, known ones stay, and there is nothing else."""
    sequence = tl.program_id(0)
    group = tl.program_id(1)
    first, start, end, slot = _extent(offsets_ptr, starts_ptr, slots_ptr, sequence)
    rows = tl.arange(0, BLOCK)
    dims = tl.arange(0, BLOCK_K)
    position = end // BLOCK * BLOCK + rows
    fresh = (position >= start) & (position < end)
    known = (position < start) & (position < end)
    inside = (dims < KEY_DIM)[None, :]
    index = (first + position - start).to(tl.int64)
    k = tl.load(
        k_ptr + (index[:, None] * GROUPS + group) * KEY_DIM + dims[None, :], mask=fresh[:, None] & inside, other=0.0
    )
    if MUTED:
        muted = tl.load(muted_ptr + sequence) != 0
        k = tl.where(muted, 0.0, k)
        known = known & (muted == 0)
    keys_at = keys_ptr + slot * keys_stride_s + (group * BLOCK + rows[:, None]) * KEY_DIM + dims[None, :]
    tl.store(keys_at, k, mask=(known == 0)[:, None] & inside)


@triton.jit
def keep_rows_kernel(
    decay_ptr, solved_out_ptr, decays_ptr, decays_stride_s, solved_ptr, solved_stride_s,
    offsets_ptr, starts_ptr, slots_ptr, muted_ptr,
    HEADS: tl.constexpr, DELTA: tl.constexpr, MUTED: tl.constexpr,
):  # fmt: skip
    """The same for decays by head, and the solved rows that `scan_kernel` left."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    first, start, end, slot = _extent(offsets_ptr, starts_ptr, slots_ptr, sequence)
    rows = tl.arange(0, BLOCK)
    position = end // BLOCK * BLOCK + rows
    fresh = (position >= start) & (position < end)
    known = (position < start) & (position < end)
    index = (first + position - start).to(tl.int64)
    decay = tl.load(decay_ptr + index * HEADS + head, mask=fresh, other=0.0)
    muted = position < 0
    if MUTED:
        muted = muted | (tl.load(muted_ptr + sequence) != 0)
    decay = tl.where(muted, 0.0, decay)
    tl.store(decays_ptr + slot * decays_stride_s + head * BLOCK + rows, decay, mask=(known == 0) | muted)
    if DELTA:
        solved = tl.load(solved_out_ptr + ((sequence * HEADS + head) * BLOCK + rows[:, None]) * BLOCK + rows[None, :])
        solved = tl.where(muted[:, None], 0.0, solved)
        tl.store(solved_ptr + slot * solved_stride_s + (head * BLOCK + rows[:, None]) * BLOCK + rows[None, :], solved)
