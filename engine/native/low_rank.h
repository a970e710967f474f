// What adapters add to a product: out[m] += up(down(x[m])) for rows that have one.
//
// An element of down's product is a chain over sixteen lanes of k and their sum, one of up's a chain over the rank, both
// in float32; neither depends on which rows are beside it. The rows of a step are grouped by adapter: some of a group
// are computed together, which reads its factors less often and changes no bit.
//
// With one row a group the time is that of reading factors, so they are packed in the order of reading. down: four ranks
// side by side, 32 columns of each at a time. up: panels of 64 outputs, in a panel rank after rank. What is behind the
// last rank, column or output is zeros. Of bfloat16 each 32 values are sixteen words, of one value and the sixteenth
// behind it, which are taken apart without moving them between lanes.
#pragma once

#include "threads.h"
#include "vector.h"

// One layer's factors of one adapter; `down` is null where it has none. up has the scale.
template <typename T> struct LowRank {
    const T *down, *up;
    long rank, n;
    long column;  // The first column of out that the layer has.
    long at;      // Where its row of down's product begins in the scratch row.
};

// Rows of one adapter: [first, first + count) of the step's order.
struct AdaptedRows {
    int32_t adapter, first, count;
};

constexpr long RANKS = 4;
constexpr long COLUMNS = 2 * LANES;
constexpr long OUTPUTS = 4 * LANES;
#if defined(__AVX512F__)
constexpr int ADAPTED_ROWS = 4, ADAPTED_VECTORS = 4;  // Computed together: as many sums as registers hold.
#else
constexpr int ADAPTED_ROWS = 2, ADAPTED_VECTORS = 2;
#endif

struct Both {
    f32x16 first, second;
};

// 32 packed values.
inline Both load_both(const float *p) { return {load(p), load(p + LANES)}; }
inline Both load_both(const bf16 *p) {
    const i32x16 words = load_words(p);
    return {(f32x16)(words << 16), (f32x16)(words & (int32_t)0xffff0000)};
}

// `ROWS` rows of x with `N` of four ranks that lie side by side: h[row][rank].
template <int ROWS, int N, typename T>
inline void down_rows(const T *const *x, const T *down, long k, float *const *h) {
    f32x16 sums[ROWS][N] = {};
    const auto add = [&](long i, auto value) {
        if constexpr (ROWS == 1) fetch_ahead(down + i * RANKS, RANKS * COLUMNS * sizeof(T));
        Both values[ROWS];
        for (int m = 0; m < ROWS; m++) values[m] = {value(m, i), value(m, i + LANES)};
        for (int r = 0; r < N; r++) {
            const Both factor = load_both(down + i * RANKS + r * COLUMNS);
            for (int m = 0; m < ROWS; m++) sums[m][r] = fma(values[m].first, factor.first, sums[m][r]);
            for (int m = 0; m < ROWS; m++) sums[m][r] = fma(values[m].second, factor.second, sums[m][r]);
        }
    };
    const long whole = k / COLUMNS * COLUMNS;
    for (long i = 0; i < whole; i += COLUMNS) add(i, [&](int m, long at) { return load(x[m] + at); });
    if (whole < k) add(whole, [&](int m, long at) { return load_some(x[m] + at, (int)std::max(0L, k - at)); });
    for (int m = 0; m < ROWS; m++)
        for (int r = 0; r < N; r++) h[m][r] = sum_of(sums[m][r]);
}

// `N` vectors of a panel's outputs for `ROWS` rows, of which `count` outputs are the layer's: out += h * up.
template <int ROWS, int N, typename T>
inline void up_rows(const float *const *h, const T *up, long rank, T *const *out, long count) {
    f32x16 sums[ROWS][N] = {};
    for (long r = 0; r < rank; r++, up += OUTPUTS) {
        if constexpr (ROWS == 1) fetch_ahead(up, N * LANES * sizeof(T));
        f32x16 factor[ROWS];
        for (int m = 0; m < ROWS; m++) factor[m] = splat(h[m][r]);
        for (int i = 0; i < N; i += 2) {
            const Both values = load_both(up + i * LANES);
            for (int m = 0; m < ROWS; m++) sums[m][i] = fma(factor[m], values.first, sums[m][i]);
            for (int m = 0; m < ROWS; m++) sums[m][i + 1] = fma(factor[m], values.second, sums[m][i + 1]);
        }
    }
    for (int m = 0; m < ROWS; m++)
        for (int i = 0; i < N; i++) {
            T *to = out[m] + i * LANES;
            const int some = (int)std::min((long)LANES, count - i * LANES);
            if (some > 0) store_some(to, load_some(to, some) + sums[m][i], some);
        }
}

template <int ROWS> struct Few {
    static constexpr int count = ROWS;
};

// Calls body(at, Few<rows>) for a group's rows, some at a time.
template <typename Body> inline void in_rows(const AdaptedRows &group, const Body &body) {
    long at = group.first;
    const long end = at + group.count;
    for (; at + ADAPTED_ROWS <= end; at += ADAPTED_ROWS) body(at, Few<ADAPTED_ROWS>());
    for (; at < end; at++) body(at, Few<1>());
}

// order: the rows of x and out by group; groups [count]; panels: of all layers, behind one another; table [adapters,
// layers]; scratch [rows of order, width]. Rows of x and out lie x_stride and out_stride apart.
template <typename T>
void add_low_rank(const LowRank<T> *table, long layers, long panels, const int32_t *order, const AdaptedRows *groups,
                  long count, const T *x, long x_stride, long k, T *out, long out_stride, float *scratch, long width) {
    const long fours = width / RANKS;
    each(count * fours, std::max(1L, 16384 / (RANKS * k)), [&](long item) {
        const AdaptedRows &group = groups[item / fours];
        const long begin = item % fours * RANKS;
        const LowRank<T> *one = table + group.adapter * layers, *end = one + layers;
        while (one < end && (!one->down || begin < one->at || begin >= one->at + one->rank)) one++;
        if (one == end) return;
        const T *down = one->down + (begin - one->at) * ((k + COLUMNS - 1) / COLUMNS * COLUMNS);
        const auto rows = [&](long at, auto few) {
            constexpr int ROWS = decltype(few)::count, N = ROWS == 1 ? RANKS : ADAPTED_VECTORS;
            const T *from[ROWS];
            for (int r = 0; r < RANKS; r += N) {
                float *to[ROWS];
                for (int m = 0; m < ROWS; m++) {
                    from[m] = x + order[at + m] * x_stride;
                    to[m] = scratch + (at + m) * width + begin + r;
                }
                down_rows<ROWS, N>(from, down + r * COLUMNS, k, to);
            }
        };
        in_rows(group, rows);
    });
    each(count * panels, std::max(1L, std::min(panels / 4, 16384 / (OUTPUTS * width) + 1)), [&](long item) {
        const AdaptedRows &group = groups[item / panels];
        long panel = item % panels;
        const LowRank<T> *one = table + group.adapter * layers;
        for (long of; panel >= (of = (one->n + OUTPUTS - 1) / OUTPUTS); one++) panel -= of;
        if (!one->down) return;
        const T *up = one->up + panel * one->rank * OUTPUTS;
        const auto rows = [&](long at, auto few) {
            constexpr int ROWS = decltype(few)::count, N = ROWS == 1 ? OUTPUTS / LANES : ADAPTED_VECTORS;
            const float *from[ROWS];
            for (int i = 0; i < OUTPUTS / LANES; i += N) {
                T *to[ROWS];
                for (int m = 0; m < ROWS; m++) {
                    from[m] = scratch + (at + m) * width + one->at;
                    to[m] = out + order[at + m] * out_stride + one->column + panel * OUTPUTS + i * LANES;
                }
                up_rows<ROWS, N>(from, up + i * LANES, one->rank, to, one->n - panel * OUTPUTS - i * LANES);
            }
        };
        in_rows(group, rows);
    });
}
