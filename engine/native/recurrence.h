// Recurrences of linear attention by blocks of absolute positions, and the short convolution before them: the
// computation of engine/attention/torch_backend/torch_recurrence.py, whose header has the formulas.
//
// A position reads the matrix before its block, and what the block's positions up to its own have left: its result is
//
//     out_i = exp(G_i) S.T q_i + sum_{j <= i} c_ij R_j,   c_i = sum_{j <= i} exp(G_i - G_j) (q_i . k_j) T_j
//
// (without the delta rule T is one), so values that are written, U = T R, are only made when a block is full. Here no
// position's computation knows which others are computed with it: an element is one chain of multiply-adds, over the
// key's dimensions (16 lanes, added up at the end, where two keys are multiplied) or over the block's positions up to
// its own, from first to last. So a row has the same bits in any chunk, and with drafts behind it.
#pragma once

#include <algorithm>

#include "buffer.h"
#include "chains.h"
#include "threads.h"

constexpr int POSITIONS = 16;  // of a block
constexpr int HEADS_AT_ONCE = 4;  // of one group, which share what queries and keys give

// The step's sequences: sequence b has rows offsets[b] to offsets[b + 1], the first at position starts[b]. muted: whose
// slot is the null slot, which stays as it is; or null.
struct Slots {
    const int32_t *slots, *starts, *offsets;
    const uint8_t *muted;

    bool writes(long b) const { return !(muted && muted[b]); }
};

struct ScanShape {
    long sequences, heads, groups, key_dim, value_dim;
    long matrix_slot, keys_slot, values_slot, decays_slot, solved_slot;  // elements between slots
};

// Rows q, k [T, groups, key_dim], v, out [T, heads, value_dim], decay, beta [T, heads] (beta null: no delta rule), and
// the buffers of slots, as ScanState of engine/attention/attention_backend.py has them.
struct ScanRows {
    const float *q, *k, *v, *decay, *beta;
    float *out, *matrix, *keys, *values, *decays, *solved;
};

inline float product_of(const float *a, const float *b, long n) {
    f32x16 sum = {};
    for (long i = 0; i < n; i += LANES) sum = fma(load_some(a + i, (int)(n - i)), load_some(b + i, (int)(n - i)), sum);
    return sum_of(sum);
}

// out[r][0..N * 16) = sum over k of a[r][k] * b[k][...].
template <int ROWS, int N>
inline void read_columns(const float *a, long a_row, const float *b, long b_row, long depth, float *out, long out_row) {
    f32x16 sum[ROWS][N] = {};
    for (long k = 0; k < depth; k++, b += b_row)
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) {
            const f32x16 column = load(b + i * LANES);
#pragma GCC unroll 2
            for (int r = 0; r < ROWS; r++) sum[r][i] = fma(splat(a[r * a_row + k]), column, sum[r][i]);
        }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < N; i++) store(out + r * out_row + i * LANES, sum[r][i]);
}

// Few rows times a matrix that is read once, in whole rows of it: `columns` is a multiple of 32.
template <int ROWS>
inline void read_matrix(const float *a, long a_row, const float *b, long b_row, long depth, long columns, float *out,
                        long out_row) {
#if defined(__AVX512F__)
    constexpr int MOST = 8;
#else
    constexpr int MOST = ROWS == 1 ? 4 : 2;
#endif
    long at = 0;
    for (; columns - at >= MOST * LANES; at += MOST * LANES)
        read_columns<ROWS, MOST>(a, a_row, b + at, b_row, depth, out + at, out_row);
    if constexpr (MOST > 4)
        for (; columns - at >= 4 * LANES; at += 4 * LANES)
            read_columns<ROWS, 4>(a, a_row, b + at, b_row, depth, out + at, out_row);
    for (; at < columns; at += 2 * LANES)
        read_columns<ROWS, 2>(a, a_row, b + at, b_row, depth, out + at, out_row);
}

// to[0..n) = (from, or 0) + sum over j < count of factor[j] * rows[j][0..n), as a chain over j.
template <int N>
inline void add_some(const float *from, const float *factor, const float *const *rows, long count, float *to, int n) {
    f32x16 sum[N];
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) sum[i] = from ? load_some(from + i * LANES, n - i * LANES) : f32x16{};
    for (long j = 0; j < count; j++) {
        const f32x16 by = splat(factor[j]);
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) sum[i] = fma(by, load_some(rows[j] + i * LANES, n - i * LANES), sum[i]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) store_some(to + i * LANES, sum[i], n - i * LANES);
}

inline void add_rows(const float *from, const float *factor, const float *const *rows, long count, float *to, long n) {
    long at = 0;
    const float *shifted[POSITIONS];
    for (; at < n; at += 4 * LANES) {
        for (long j = 0; j < count; j++) shifted[j] = rows[j] + at;
        if (n - at >= 4 * LANES) {
            add_some<4>(from ? from + at : nullptr, factor, shifted, count, to + at, 4 * LANES);
            continue;
        }
        for (long part = at; part < n; part += LANES) {
            for (long j = 0; j < count; j++) shifted[j] = rows[j] + part;
            add_some<1>(from ? from + part : nullptr, factor, shifted, count, to + part, (int)(n - part));
        }
    }
}

// One thread's room: of a block's rows, and of the matrices of the heads of an item.
struct ScanRoom {
    Buffer<float> matrices, reads, found, values, written, until;

    void size(long keys, long wide, long key_dim) {
        matrices.resize(HEADS_AT_ONCE * key_dim * wide);
        reads.resize(2 * POSITIONS * keys);
        found.resize(2 * POSITIONS * wide);
        values.resize(POSITIONS * wide);
        written.resize(POSITIONS * wide);
        until.resize(POSITIONS * keys);
    }
};

// Some heads of one group over one sequence's rows, block after block.
class GroupScan {
  public:
    GroupScan(const ScanShape &shape, const ScanRows &rows, const Slots &step, long b, long group)
        : s(shape), x(rows), room(threads_room()), group(group), start(step.starts[b]), row(step.offsets[b]),
          count(step.offsets[b + 1] - step.offsets[b]), slot(step.slots[b]), writes(step.writes(b)),
          wide((shape.value_dim + PANEL - 1) / PANEL * PANEL), padded((shape.key_dim + LANES - 1) / LANES * LANES) {
        room.size(padded, wide, s.key_dim);
    }

    void run(long first_head, long heads) {
        const float *matrix[HEADS_AT_ONCE];
        const bool direct = wide == s.value_dim;
        for (long h = 0; h < heads; h++) {
            matrix[h] = x.matrix + slot * s.matrix_slot + (first_head + h) * s.key_dim * s.value_dim;
            if (!direct) matrix[h] = copied(matrix[h], own(h));
        }
        for (long base = start / POSITIONS * POSITIONS; base < start + count; base += POSITIONS) {
            begin = std::max(start - base, 0L), end = std::min(start + count - base, (long)POSITIONS);
            at = row + base - start;
            multiply_keys();
            for (long h = 0; h < heads; h++) {
                const long head = first_head + h;
                compute(head, matrix[h]);
                if (end == POSITIONS) matrix[h] = folded(matrix[h], own(h));
                if (writes && base + POSITIONS >= start + count) keep(head);
            }
        }
        for (long h = 0; h < heads; h++)
            if (writes && matrix[h] == own(h) && (start + count) / POSITIONS > start / POSITIONS)
                for (long k = 0; k < s.key_dim; k++)
                    memcpy(x.matrix + slot * s.matrix_slot + ((first_head + h) * s.key_dim + k) * s.value_dim,
                           own(h) + k * wide, s.value_dim * sizeof(float));
    }

    // Writes the group's keys of the last block into the slot. When no item of the step reads them any more.
    void keep_keys() {
        if (!writes) return;
        const long last = (start + count - 1) / POSITIONS * POSITIONS;
        begin = std::max(start - last, 0L), end = start + count - last;
        at = row + last - start;
        put(x.keys + slot * s.keys_slot + group * POSITIONS * s.key_dim, s.key_dim, [&](long i) { return key(i); });
    }

  private:
    static ScanRoom &threads_room() {
        static thread_local ScanRoom room;
        return room;
    }

    const ScanShape &s;
    const ScanRows &x;
    ScanRoom &room;
    const long group, start, row, count, slot;
    const bool writes;
    const long wide, padded;
    // The block under way: its rows [begin, end) are the step's, those before are the slot's; its row i is the step's
    // row at + i.
    long begin = 0, end = 0, at = 0;
    float with_query[POSITIONS][POSITIONS], with_key[POSITIONS][POSITIONS];
    float decays[POSITIONS], sums[POSITIONS], solved[POSITIONS][POSITIONS], factors[POSITIONS][POSITIONS];
    const float *values[POSITIONS];

    float *own(long h) { return room.matrices.data() + h * s.key_dim * wide; }
    bool delta() const { return x.beta != nullptr; }
    const float *query(long i) const { return x.q + ((at + i) * s.groups + group) * s.key_dim; }
    const float *key(long i) const {
        if (i < begin) return x.keys + slot * s.keys_slot + (group * POSITIONS + i) * s.key_dim;
        return x.k + ((at + i) * s.groups + group) * s.key_dim;
    }

    const float *copied(const float *matrix, float *to) {
        for (long k = 0; k < s.key_dim; k++)
            for (long v = 0; v < wide; v += LANES)
                store(to + k * wide + v, load_some(matrix + k * s.value_dim + v, (int)(s.value_dim - v)));
        return to;
    }

    // Each row's query and key with the keys of the positions before it, and its query with its own key.
    void multiply_keys() {
        for (long i = begin; i < end; i++)
            for (long j = 0; j <= i; j++) {
                with_query[i][j] = product_of(query(i), key(j), s.key_dim);
                if (delta() && j < i) with_key[i][j] = product_of(key(i), key(j), s.key_dim);
            }
    }

    // The sums of the logarithms of decays, and what the slot has of the block.
    void take(long head) {
        const long entry = head * POSITIONS;
        memcpy(decays, x.decays + slot * s.decays_slot + entry, begin * sizeof(float));
        for (long i = begin; i < end; i++) decays[i] = x.decay[(at + i) * s.heads + head];
        float sum = 0.0f;
        for (long i = 0; i < POSITIONS; i++) sums[i] = i < end ? sum += decays[i] : 0.0f;
        for (long i = 0; i < begin; i++) values[i] = x.values + slot * s.values_slot + (entry + i) * s.value_dim;
        if (delta()) memcpy(solved, x.solved + slot * s.solved_slot + entry * POSITIONS, begin * sizeof(solved[0]));
    }

    // A row of T and the factors of the block's values in its result; returns exp(G_i).
    float solve(long head, long i) {
#define SAME(lane) lane
        const i32x16 lane = EACH_LANE(SAME);
#undef SAME
        const f32x16 since = exp_of(splat(sums[i]) - load(sums));
        const f32x16 attend = chosen_by(lane < (int)i + 1, load_seen(with_query[i], i + 1) * since, f32x16{});
        if (!delta()) {
            store(factors[i], attend);
        } else {
            float weights[POSITIONS];
            const f32x16 strength = splat(x.beta[(at + i) * s.heads + head]);
            store(weights, load_seen(with_key[i], i) * since * strength);
            f32x16 sum = {};
            for (long j = 0; j < i; j++) sum = fma(splat(weights[j]), load(solved[j]), sum);
            store(solved[i], chosen_by(lane < (int)i, -sum, f32x16{}));
            solved[i][i] = 1.0f;
            store(weights, attend);
            sum = f32x16{};
            for (long j = 0; j <= i; j++) sum = fma(splat(weights[j]), load(solved[j]), sum);
            store(factors[i], sum);
        }
        return exp_of(splat(sums[i]))[0];
    }

    static f32x16 load_seen(const float *p, long count) { return load_some(p, (int)count); }

    // The results of the rows of a head; `values` is R afterwards.
    void compute(long head, const float *matrix) {
        take(head);
        const long rows = end - begin;
        float *reads = room.reads.data(), *found = room.found.data();
        for (long i = begin; i < end; i++) {
            const f32x16 since = splat(solve(head, i));
            const f32x16 strength = splat(delta() ? x.beta[(at + i) * s.heads + head] : 0.0f);
            for (long k = 0; k < s.key_dim; k += LANES) {
                const int some = (int)(s.key_dim - k);
                store(reads + (i - begin) * padded + k, load_some(query(i) + k, some) * since);
                if (delta()) store(reads + (rows + i - begin) * padded + k, load_some(key(i) + k, some) * since * strength);
            }
        }
        read(delta() ? 2 * rows : rows, matrix);
        for (long i = begin; i < end; i++) {
            const float *v = x.v + ((at + i) * s.heads + head) * s.value_dim, *before = found + (rows + i - begin) * wide;
            if (delta()) {
                const float strength = x.beta[(at + i) * s.heads + head];
                float *to = room.values.data() + i * wide;
                for (long c = 0; c < s.value_dim; c += LANES)
                    store(to + c, load_some(v + c, (int)(s.value_dim - c)) * strength - load(before + c));
                v = to;
            }
            values[i] = v;
            add_rows(found + (i - begin) * wide, factors[i], values, i + 1,
                     x.out + ((at + i) * s.heads + head) * s.value_dim, s.value_dim);
        }
    }

    // found[r] = reads[r] times the matrix.
    void read(long rows, const float *matrix) {
        float *reads = room.reads.data(), *found = room.found.data();
        if (rows == 1)
            read_matrix<1>(reads, padded, matrix, wide, s.key_dim, wide, found, wide);
        else if (rows == 2)
            read_matrix<2>(reads, padded, matrix, wide, s.key_dim, wide, found, wide);
        else
            for (long c = 0; c < wide; c += PANEL)
                chains<Words<float>>(rows, {reads, padded * WORD, WORD, matrix + c, wide * WORD, s.key_dim}, true,
                                     found + c, wide);
    }

    // The matrix behind a full block: exp(G_15) S + sum over j of outer(exp(G_15 - G_j) k_j, U_j).
    const float *folded(const float *matrix, float *to) {
        float *written = room.written.data(), *until = room.until.data();
        const f32x16 left = exp_of(splat(sums[POSITIONS - 1]) - load(sums));
        const float kept = exp_of(splat(sums[POSITIONS - 1]))[0];
        for (long j = 0; j < POSITIONS; j++) {
            for (long k = 0; k < s.key_dim; k += LANES)
                store(until + j * padded + k, load_some(key(j) + k, (int)(s.key_dim - k)) * left[j]);
            float *to_row = written + j * wide;
            for (long c = s.value_dim / LANES * LANES; c < wide; c += LANES) store(to_row + c, f32x16{});
            if (delta())
                add_rows(nullptr, solved[j], values, j + 1, to_row, s.value_dim);
            else
                memcpy(to_row, values[j], s.value_dim * sizeof(float));
        }
        for (long k = 0; k < s.key_dim; k++)
            for (long c = 0; c < wide; c += LANES) store(to + k * wide + c, load(matrix + k * wide + c) * kept);
        for (long c = 0; c < wide; c += PANEL)
            chains<Words<float>>(s.key_dim, {until, WORD, padded * WORD, written + c, wide * WORD, POSITIONS}, false,
                                 to + c, wide);
        return to;
    }

    // Writes a slot's rows of one buffer: those of the step. Behind them are zeros, unless the step is one row: then
    // they are, or nobody reads them. A full block leaves zeros alone.
    template <typename Row> void put(float *to, long n, const Row &row_of) {
        if (end == POSITIONS) {
            memset(to, 0, POSITIONS * n * sizeof(float));
            return;
        }
        for (long i = begin; i < end; i++) memcpy(to + i * n, row_of(i), n * sizeof(float));
        if (count > 1) memset(to + end * n, 0, (POSITIONS - end) * n * sizeof(float));
    }

    void keep(long head) {
        const long entry = head * POSITIONS;
        put(x.values + slot * s.values_slot + entry * s.value_dim, s.value_dim, [&](long i) { return values[i]; });
        put(x.decays + slot * s.decays_slot + entry, 1, [&](long i) { return decays + i; });
        if (delta())
            put(x.solved + slot * s.solved_slot + entry * POSITIONS, POSITIONS, [&](long i) { return solved[i]; });
    }
};

inline void scan(const ScanShape &s, const ScanRows &x, const Slots &step) {
    const long shared = s.heads / s.groups, parts = (shared + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE;
    each(s.sequences * s.groups * parts, 1, [&](long item) {
        const long group = item / parts % s.groups, first = item % parts * HEADS_AT_ONCE;
        GroupScan(s, x, step, item / (s.groups * parts), group)
            .run(group * shared + first, std::min(shared - first, (long)HEADS_AT_ONCE));
    });
    each(s.sequences * s.groups, 64,
         [&](long item) { GroupScan(s, x, step, item / s.groups, item % s.groups).keep_keys(); });
}

// A state buffer of a convolution: [slots, units, held, width], whose channels begin at `first`.
template <typename T> struct ConvState {
    T *entries;
    long slot, units, width, first;
};

struct ConvShape {
    long sequences, states, channels, taps, held;
    long activated;  // whether silu follows
};

// One unit's channels of one sequence.
template <typename T>
inline void conv_unit(const ConvShape &s, const ConvState<T> &state, long unit, const T *x, long x_stride,
                      const float *weight, const float *bias, T *out, const Slots &step, long b) {
    const long start = step.starts[b], row = step.offsets[b], count = step.offsets[b + 1] - row;
    T *mine = state.entries + step.slots[b] * state.slot + unit * s.held * state.width;
    const long channel = state.first + unit * state.width;
    for (long t = 0; t < count; t++) {
        T *to = out + (row + t) * s.channels + channel;
        for (long c = 0; c < state.width; c += LANES) {
            const int some = (int)(state.width - c);
            f32x16 sum = {};
            for (long tap = 0; tap <= s.taps; tap++) {
                const long from = t + tap - s.taps;
                const T *input = from >= 0 ? x + (row + from) * x_stride + channel
                                           : mine + ((start + from) % s.held + s.held) % s.held * state.width;
                const f32x16 part = load_some(input + c, some) * load_some(weight + tap * s.channels + channel + c, some);
                sum = tap ? sum + part : part;
            }
            if (bias) sum += load_some(bias + channel + c, some);
            if (s.activated) {
                sum = rounded(sum, to);
                sum = sum / (exp_of(-sum) + 1.0f);
            }
            store_some(to + c, sum, some);
        }
    }
    if (step.writes(b))
        for (long t = std::max(0L, count - s.held); t < count; t++)
            memcpy((void *)(mine + (start + t) % s.held * state.width), (const void *)(x + (row + t) * x_stride + channel),
                   state.width * sizeof(T));
}

// x [T, channels] with rows x_stride apart; weight [taps + 1, channels]; out [T, channels].
template <typename T>
void conv(const ConvShape &s, const ConvState<T> *states, const T *x, long x_stride, const float *weight,
          const float *bias, T *out, const Slots &step) {
    long units = 0;
    for (long i = 0; i < s.states; i++) units += states[i].units;
    const long rows = step.offsets[s.sequences];
    const long work = std::max(1L, rows / s.sequences * s.channels / units);
    each(s.sequences * units, std::max(1L, 4096 / work), [&](long item) {
        long unit = item % units;
        const ConvState<T> *state = states;
        for (; unit >= state->units; state++) unit -= state->units;
        conv_unit(s, *state, unit, x, x_stride, weight, bias, out, step, item / units);
    });
}
