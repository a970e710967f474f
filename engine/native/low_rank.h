// What adapters add to a product: out[m] += up(down(x[m])) for rows that have one.
//
// An element of down's product is a chain over sixteen lanes of k and their sum, one of up's a chain over the rank, both
// in float32; neither depends on which rows are beside it. Rows are computed two at a time where neighbours have the
// same adapter, which reads its factors half as often and changes no bit.
#pragma once

#include "threads.h"
#include "vector.h"

// One layer's factors of one adapter; `down` is null where it has none. down [rank, k]; up [rank, n], with the scale.
template <typename T> struct LowRank {
    const T *down, *up;
    long rank, n;
    long column;  // The first column of out that the layer has.
    long at;      // Where its row of down's product begins in the scratch row.
};

constexpr long RANKS = 4;  // Elements of down's product that are computed at once.

// `ROWS` rows of x with `RANKS` rows of down (fewer: `count`): h[row][r].
template <int ROWS, typename T>
inline void down_rows(const T *const *x, const T *down, long k, long count, float *const *h) {
    f32x16 sums[ROWS][RANKS] = {};
    const T *rows[RANKS];
    for (long r = 0; r < RANKS; r++) rows[r] = down + std::min(r, count - 1) * k;
    const long whole = k / LANES * LANES;
    for (long i = 0; i < whole; i += LANES) {
        f32x16 value[ROWS];
        for (int m = 0; m < ROWS; m++) value[m] = load(x[m] + i);
        for (long r = 0; r < RANKS; r++) {
            const f32x16 factor = load(rows[r] + i);
            for (int m = 0; m < ROWS; m++) sums[m][r] = fma(value[m], factor, sums[m][r]);
        }
    }
    if (whole < k)
        for (long r = 0; r < RANKS; r++) {
            const f32x16 factor = load_some(rows[r] + whole, (int)(k - whole));
            for (int m = 0; m < ROWS; m++)
                sums[m][r] = fma(load_some(x[m] + whole, (int)(k - whole)), factor, sums[m][r]);
        }
    for (int m = 0; m < ROWS; m++)
        for (long r = 0; r < count; r++) h[m][r] = sum_of(sums[m][r]);
}

// `count` columns of one row, 64 at most: out += h * up.
template <typename T> inline void up_columns(const float *h, const T *up, long rank, long n, T *out, long count) {
    f32x16 sums[4] = {};
    if (count == 4 * LANES) {
        for (long r = 0; r < rank; r++) {
            const f32x16 factor = splat(h[r]);
            for (int c = 0; c < 4; c++) sums[c] = fma(factor, load(up + r * n + c * LANES), sums[c]);
        }
        for (int c = 0; c < 4; c++) store(out + c * LANES, load(out + c * LANES) + sums[c]);
        return;
    }
    for (long at = 0; at < count; at += LANES) {
        const int some = (int)std::min((long)LANES, count - at);
        f32x16 sum = {};
        for (long r = 0; r < rank; r++) sum = fma(splat(h[r]), load_some(up + r * n + at, some), sum);
        store_some(out + at, load_some(out + at, some) + sum, some);
    }
}

// x [m, k], out [m, ...], rows x_stride and out_stride apart; numbers [m]: which adapter a row has, negative for none;
// table [adapters, layers]; scratch [m, width].
template <typename T>
void add_low_rank(const LowRank<T> *table, long layers, const int32_t *numbers, const T *x, long x_stride, long k,
                  T *out, long out_stride, long m, float *scratch, long width) {
    const long groups = (width + RANKS - 1) / RANKS, pairs = (m + 1) / 2;
    each(pairs * groups, std::max(1L, 16384 / (2 * RANKS * k)), [&](long item) {
        const long first = item / groups * 2, begin = item % groups * RANKS;
        const bool two = first + 1 < m && numbers[first] >= 0 && numbers[first] == numbers[first + 1];
        for (long row = first; row < std::min(first + 2, m); row += two ? 2 : 1) {
            if (numbers[row] < 0) continue;
            for (long layer = 0; layer < layers; layer++) {
                const LowRank<T> &one = table[numbers[row] * layers + layer];
                if (!one.down || begin < one.at || begin >= one.at + one.rank) continue;
                const long r = begin - one.at, count = std::min(RANKS, one.rank - r);
                const T *rows[2] = {x + row * x_stride, x + (row + 1) * x_stride};
                float *h[2] = {scratch + row * width + begin, scratch + (row + 1) * width + begin};
                if (two)
                    down_rows<2>(rows, one.down + r * k, k, count, h);
                else
                    down_rows<1>(rows, one.down + r * k, k, count, h);
            }
        }
    });
    each(m * layers, 1, [&](long item) {
        const long row = item / layers, layer = item % layers;
        if (numbers[row] < 0) return;
        const LowRank<T> &one = table[numbers[row] * layers + layer];
        if (!one.down) return;
        T *to = out + row * out_stride + one.column;
        for (long i = 0; i < one.n; i += 4 * LANES)
            up_columns(scratch + row * width + one.at, one.up + i, one.rank, one.n, to + i,
                       std::min(4 * (long)LANES, one.n - i));
    });
}
