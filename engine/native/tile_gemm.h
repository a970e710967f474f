// Products of bfloat16 rows, dense or in blocks, whose bits are the same on every x86 processor.
//
// The order of additions is the one of the tile instruction that recent processors have (TDPBF16PS). The columns of a
// row are taken in steps of 32. In a step the even columns are one chain of fused multiply-adds that begins at zero,
// and the odd ones are another; the two are added up, and their sum is added to that of the steps before. Numbers below
// 2^-126 are zero wherever one is read or comes out. Without that instruction vectors follow the same chains, at the
// speed of products in float32. As everywhere, an element's order doesn't depend on the rows that are computed with it.
//
// Of a weight in blocks the codes less their zeros are multiplied: as bfloat16 they are exact. A step ends where its
// group does; the sum of a group's steps is multiplied with the group's scale and added to the groups before, fused;
// then, where groups have an offset, so is the sum of the row's values in the group, which is such a chain, too.
//
// Panels are those of gemm.h: 32 outputs; in a panel pair after pair of columns, each of 32 outputs side by side.
#pragma once

#include "block_gemm.h"
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

constexpr long ROWS_AT_ONCE = 512;  // whose sums a thread holds

// How the columns of a weight are cut into steps.
struct Steps {
    long k, group, depth, per_group, groups;  // depth: columns of a step, an even number; some may be none of the row's

    Steps(long columns, long of_group) : k(columns), group(of_group) {
        depth = std::min(32L, (group + 1) / 2 * 2);
        per_group = (group + depth - 1) / depth;
        groups = (k + group - 1) / group;
    }
    long count() const { return groups * per_group; }
    // The end of what is taken at once from `step` on: `most` steps, or a few less that are whole groups.
    long end_of_part(long step, long most) const {
        if (per_group <= most) return std::min(step + most / per_group * per_group, count());
        return std::min(step + most, (step / per_group + 1) * per_group);
    }
};

// One step after the other, from any on.
struct StepPlace {
    const Steps &steps;
    long step, group, inner, first, width;  // inner: its number in the group; width: of the row's columns

    StepPlace(const Steps &all, long begin)
        : steps(all), step(begin), group(begin / all.per_group), inner(begin % all.per_group) {
        first = group * steps.group + inner * steps.depth;
        measure();
    }
    void measure() {
        width = std::max(0L, std::min({steps.depth, steps.group - inner * steps.depth, steps.k - first}));
    }
    void next() {
        step++;
        first += steps.depth;
        if (++inner == steps.per_group) {
            inner = 0;
            first = ++group * steps.group;
        }
        measure();
    }
    bool ends_group() const { return inner + 1 == steps.per_group; }
};

// Takes denormal numbers for zero, as tile instructions do, until it ends.
class DenormalsAreZero {
#if defined(__x86_64__)
  public:
    DenormalsAreZero() : before(_mm_getcsr()) { _mm_setcsr(before | 0x8040); }
    ~DenormalsAreZero() { _mm_setcsr(before); }

  private:
    const unsigned before;
#endif
};

// What the groups of a panel have.
struct PanelGroup {
    f32x16 scale[2], zero[2], offset[2];
};

// One product's rows, and where it puts them.
struct TileRows {
    const bf16 *x;
    long x_stride, m;
    const float *row_sums;  // [m, groups], or null
    const float *bias;
    bf16 *out;
    long out_stride;

    TileRows from(long row, long groups) const {
        return {x + row * x_stride, x_stride, m - row, row_sums ? row_sums + row * groups : nullptr, bias,
                out + row * out_stride, out_stride};
    }
};

// The columns of a weight. What is done for each row asks it through these few functions, so that it is compiled once.
class Columns {
  public:
    const long n;
    const Steps steps;
    const bool scaled;
    const long panel_bytes;

    Columns(long outputs, Steps cut, bool in_blocks, long bytes)
        : n(outputs), steps(cut), scaled(in_blocks), panel_bytes(bytes) {}
    long panels() const { return (n + PANEL - 1) / PANEL; }

    // What a panel has for the groups of steps [first, last).
    virtual void groups(long, long, long, PanelGroup *) const {}
    // The columns of these steps in float32, [steps, depth, PANEL].
    virtual void for_lanes(long, long, long, const PanelGroup *, float *) const {}
    // A panel of a product of few rows, whose columns are unpacked in registers.
    virtual void few_rows(long, const float *, const TileRows &) const {}
    // The columns as tiles read them: where they lie, or unpacked into a room.
    virtual const bf16 *for_tiles(long, long, long, const PanelGroup *, bf16 *room) const { return room; }
    // Where those of a step lie, if they can be fetched before they are needed.
    virtual const bf16 *ahead(long, long) const { return nullptr; }
};

template <typename W> void few_lanes_of(const W &w, long panel, const float *x, const TileRows &rows);
template <typename W>
void columns_for_lanes(const W &w, long panel, long first, long last, const PanelGroup *groups, float *to);
template <int CODE> class BlockColumns;
template <int CODE>
const bf16 *columns_for_tiles(const BlockColumns<CODE> &w, long panel, long first, long last, const PanelGroup *groups,
                              bf16 *room);

// A dense weight, packed: one group, without a scale.
class DenseColumns : public Columns {
  public:
    static constexpr bool in_blocks = false;
    const bf16 *packed;

    DenseColumns(long outputs, long k, const bf16 *from)
        : Columns(outputs, Steps(k, (k + 31) / 32 * 32), false, (k + 31) / 32 * 32 * PANEL * (long)sizeof(bf16)),
          packed(from) {}

    void for_lanes(long panel, long first, long last, const PanelGroup *groups, float *to) const override {
        columns_for_lanes(*this, panel, first, last, groups, to);
    }
    void few_rows(long panel, const float *x, const TileRows &rows) const override {
        few_lanes_of(*this, panel, x, rows);
    }
    const bf16 *for_tiles(long panel, long first, long, const PanelGroup *, bf16 *) const override {
        return at(panel, first);
    }
    const bf16 *ahead(long panel, long step) const override { return at(panel, step); }

    const bf16 *at(long panel, long step) const {
        return packed + (panel * steps.count() + step) * steps.depth * PANEL;
    }
    PanelGroup group(long, long) const { return {}; }
    // Calls put(pair, even, odd) for a step's pairs of columns, each of both halves of the panel.
    template <typename Put>
    void each_pair(long panel, const StepPlace &place, const PanelGroup &, const Put &put) const {
        const bf16 *from = at(panel, place.step);
        fetch_ahead(from, steps.depth * PANEL * sizeof(bf16));
        for (long pair = 0; pair < steps.depth / 2; pair++, from += 2 * PANEL) {
            f32x16 even[2], odd[2];
            for (int half = 0; half < 2; half++) {
                const i32x16 both = load_words(from + half * PANEL);
                even[half] = (f32x16)(both << 16);
                odd[half] = (f32x16)(both & (int32_t)0xffff0000);
            }
            put(pair, even, odd);
        }
    }
};

// A weight in blocks.
template <int CODE> class BlockColumns : public Columns {
  public:
    static constexpr bool in_blocks = true;
    const Blocks &b;

    explicit BlockColumns(const Blocks &blocks)
        : Columns(blocks.n, Steps(blocks.k, blocks.group), true, blocks.k * column_bytes<CODE>()), b(blocks) {}

    bool has_offsets() const { return b.offsets || b.scale_type == SCALE_PAIRED; }
    void groups(long panel, long first, long last, PanelGroup *to) const override {
        for (long at = first / steps.per_group; at * steps.per_group < last; at++) *to++ = group(panel, at);
    }
    void for_lanes(long panel, long first, long last, const PanelGroup *groups, float *to) const override {
        columns_for_lanes(*this, panel, first, last, groups, to);
    }
    void few_rows(long panel, const float *x, const TileRows &rows) const override {
        few_lanes_of(*this, panel, x, rows);
    }
#if defined(__AMX_BF16__)
    const bf16 *for_tiles(long panel, long first, long last, const PanelGroup *groups, bf16 *room) const override {
        return columns_for_tiles(*this, panel, first, last, groups, room);
    }
#endif

    PanelGroup group(long panel, long number) const {
        const GroupValues found = group_values<CODE>(b, panel, number);
        PanelGroup g;
        for (int half = 0; half < 2; half++) {
            g.scale[half] = CODE == E2M1 ? found.scale[half] * found.factor[half] : found.scale[half];
            g.offset[half] = fused<CODE>() && has_offsets() ? found.zero[half] : f32x16{};
            g.zero[half] = fused<CODE>() ? splat((float)b.zero) : found.zero[half];
        }
        return g;
    }
    // Calls put(pair, even, odd) for a step's pairs of columns, each of both halves of the panel, less their zeros;
    // columns that the row doesn't have are zeros.
    template <typename Put>
    void each_pair(long panel, const StepPlace &place, const PanelGroup &group, const Put &put) const {
        constexpr bool whole = CODE != E2M1 && CODE != E4M3 && CODE != IQ4 && CODE != UINT4_OFFSET;
        const f32x16 zero[2] = {group.zero[0], group.zero[1]};
        each_code_pair(panel, place, [&](long pair, const i32x16 *low, const i32x16 *high) {
            f32x16 even[2], odd[2];
            for (int half = 0; half < 2; half++) {
                even[half] = value_of<CODE>(low[half]);
                odd[half] = value_of<CODE>(high[half]);
                if constexpr (whole) even[half] -= zero[half];
                if constexpr (whole) odd[half] -= zero[half];
            }
            put(pair, even, odd);
        }, [&](long pair, const i32x16 *low) {
            f32x16 even[2] = {}, odd[2] = {};
            for (int half = 0; low && half < 2; half++) {
                even[half] = value_of<CODE>(low[half]);
                if constexpr (whole) even[half] -= zero[half];
            }
            put(pair, even, odd);
        });
    }
    // Calls put(pair, even, odd) with the codes of a step's pairs of columns, and rest(pair, even) for pairs of which
    // the row doesn't have the second column, or either (even: null).
    template <typename Put, typename Rest>
    void each_code_pair(long panel, const StepPlace &place, const Put &put, const Rest &rest) const {
        const uint8_t *codes = b.codes + (panel * b.k + place.first) * column_bytes<CODE>();
        const long width = place.width;
        fetch_ahead(codes, width * column_bytes<CODE>());
        i32x16 even[2], odd[2];
        long pair = 0;
        for (; 2 * pair + 1 < width; pair++, codes += 2 * column_bytes<CODE>()) {
            column_codes<CODE>(codes, even[0], even[1]);
            column_codes<CODE>(codes + column_bytes<CODE>(), odd[0], odd[1]);
            put(pair, even, odd);
        }
        if (2 * pair < width) {
            column_codes<CODE>(codes, even[0], even[1]);
            rest(pair++, even);
        }
        for (; pair < steps.depth / 2; pair++) rest(pair, (const i32x16 *)nullptr);
    }
};

// Rows as vectors read them: blocks of `beside` rows; in a block column after column, of which a step has `depth`. The
// last block may have less rows, or zeros for those that there aren't.
inline void rows_for_lanes(const Steps &steps, const bf16 *x, long x_stride, long m, long beside, bool zeros,
                           float *to) {
    const long padded = steps.count() * steps.depth, last = m / beside * beside;
    if (zeros && last < m) memset((void *)(to + last * padded), 0, beside * padded * sizeof(float));
    each(m, 2 * beside, [&](long row) {
        const long block = row / beside * beside, together = zeros ? beside : std::min(beside, m - block);
        float *at = to + block * padded + row - block;
        for (StepPlace place(steps, 0); place.step < steps.count(); place.next()) {
            const bf16 *from = x + row * x_stride + place.first;
            for (long j = 0; j < steps.depth; j++, at += together) *at = j < place.width ? value_of(from[j]) : 0.0f;
        }
    });
}

// The sums of each row's values by group, [m, groups].
inline void sums_of_rows(const Steps &steps, const bf16 *x, long x_stride, long m, float *to) {
    each(m, 2, [&](long row) {
        const DenormalsAreZero mode;
        float sum = 0.0f;
        for (StepPlace place(steps, 0); place.step < steps.count(); place.next()) {
            const bf16 *from = x + row * x_stride + place.first;
            float even = 0.0f, odd = 0.0f;
            for (long j = 0; j < place.width; j += 2) {
                even += value_of(from[j]);
                if (j + 1 < place.width) odd += value_of(from[j + 1]);
            }
            sum = (place.inner ? sum : 0.0f) + (even + odd);
            to[row * steps.groups + place.group] = sum;
        }
    });
}

// sums += a group's sums, scaled, of `count` rows and a panel; row_sums: the sum of each row's values, or null.
inline void add_group(const PanelGroup &group, const float *found, long found_stride, float *sums,
                      long stride, long count, const float *row_sums, long row_sums_stride) {
    for (int i = 0; i < 2; i++) {
        const f32x16 scale = group.scale[i], offset = group.offset[i];
        for (long r = 0; r < count; r++) {
            float *to = sums + r * stride + i * LANES;
            f32x16 sum = fma(load(found + r * found_stride + i * LANES), scale, load(to));
            if (row_sums) sum = fma(splat(row_sums[r * row_sums_stride]), offset, sum);
            store(to, sum);
        }
    }
}

// Sums rounded to bfloat16, by instruction where there is one; that takes denormal numbers for zero, of which there are
// none here, and keeps a bit of what is no number, which is set apart.
inline void put_sums_of(f32x16 sums, bf16 *to, int count) {
#if defined(__AVX512BF16__)
    const __mmask16 none = _mm512_cmp_ps_mask((__m512)sums, (__m512)sums, _CMP_UNORD_Q);
    const __m256i rounded = _mm256_mask_mov_epi16((__m256i)_mm512_cvtneps_pbh((__m512)sums), none,
                                                  _mm256_set1_epi16(0x7fc0));
    if (count >= LANES)
        _mm256_storeu_si256((__m256i *)to, rounded);
    else
        memcpy((void *)to, (const void *)&rounded, std::max(count, 0) * sizeof(bf16));
#else
    if (count > 0) store_some(to, sums, count);
#endif
}

inline void put_panel(const float *sums, long n, long panel, const float *bias, bf16 *out) {
    const int width = (int)std::min((long)PANEL, n - panel * PANEL);
    f32x16 left = load(sums), right = load(sums + LANES);
    if (bias) {
        left += load(bias + panel * PANEL);
        right += load(bias + panel * PANEL + LANES);
    }
    put_sums_of(left, out + panel * PANEL, width);
    put_sums_of(right, out + panel * PANEL + LANES, width - LANES);
}

// ---- with vectors

#if defined(__AVX512F__)
constexpr long LANE_ROWS = 8, FEW_LANE_ROWS = 4, FEW_DENSE_ROWS = 12;
#else
constexpr long LANE_ROWS = 2, FEW_LANE_ROWS = 1, FEW_DENSE_ROWS = 1;
#endif
constexpr long LANE_STEPS = 4;  // that are unpacked to float32 at once: 16 KiB

// A panel's sums of few rows, whose columns are unpacked in registers. x: rows_for_lanes of one block.
template <int ROWS, typename W>
__attribute__((noinline)) void few_lanes(const W &w, long panel, const float *x, const TileRows &rows) {
    const Steps &steps = w.steps;
    f32x16 sum[ROWS][2] = {};
    PanelGroup g;
    f32x16 found[ROWS][2];
    for (StepPlace place(steps, 0); place.step < steps.count(); place.next(), x += steps.depth * ROWS) {
        if (!place.inner) {
            g = w.group(panel, place.group);
            for (int r = 0; r < ROWS; r++) found[r][0] = found[r][1] = f32x16{};
        }
        f32x16 even[ROWS][2] = {}, odd[ROWS][2] = {};
        w.each_pair(panel, place, g, [&](long pair, const f32x16 *first, const f32x16 *second) {
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) {
                    even[r][half] = fma(splat(x[2 * pair * ROWS + r]), first[half], even[r][half]);
                    odd[r][half] = fma(splat(x[(2 * pair + 1) * ROWS + r]), second[half], odd[r][half]);
                }
        });
        for (int r = 0; r < ROWS; r++)
            for (int half = 0; half < 2; half++) {
                found[r][half] += even[r][half] + odd[r][half];
                if (!W::in_blocks) sum[r][half] = found[r][half];
                if (!W::in_blocks || !place.ends_group()) continue;
                sum[r][half] = fma(found[r][half], g.scale[half], sum[r][half]);
                if (rows.row_sums)
                    sum[r][half] = fma(splat(rows.row_sums[r * steps.groups + place.group]), g.offset[half],
                                       sum[r][half]);
            }
    }
    for (int r = 0; r < ROWS && r < rows.m; r++) {
        float whole[PANEL];
        store(whole, sum[r][0]);
        store(whole + LANES, sum[r][1]);
        put_panel(whole, w.n, panel, rows.bias, rows.out + r * rows.out_stride);
    }
}

template <typename W> void few_lanes_of(const W &w, long panel, const float *x, const TileRows &rows) {
    if (rows.m == 1) return few_lanes<1>(w, panel, x, rows);
    for (long row = 0; row < rows.m; row += FEW_LANE_ROWS)
        few_lanes<FEW_LANE_ROWS>(w, panel, x + row * w.steps.count() * w.steps.depth, rows.from(row, w.steps.groups));
}

// Adds `count` steps to the sums of ROWS rows, [ROWS, PANEL]; from zero where they are fresh.
template <int ROWS>
inline void add_lanes(const float *x, const float *w, long depth, long count, bool fresh, float *sums) {
    for (int half = 0; half < PANEL; half += LANES) {
        f32x16 sum[ROWS];
        for (int r = 0; r < ROWS; r++) sum[r] = fresh ? f32x16{} : load(sums + r * PANEL + half);
        const float *factor = x, *column = w + half;
        for (long step = 0; step < count; step++) {
            f32x16 even[ROWS] = {}, odd[ROWS] = {};
            for (long j = 0; j < depth; j += 2, factor += 2 * ROWS, column += 2 * PANEL) {
                const f32x16 first = load(column), second = load(column + PANEL);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) {
                    even[r] = fma(splat(factor[r]), first, even[r]);
                    odd[r] = fma(splat(factor[ROWS + r]), second, odd[r]);
                }
            }
            for (int r = 0; r < ROWS; r++) sum[r] += even[r] + odd[r];
        }
        for (int r = 0; r < ROWS; r++) store(sums + r * PANEL + half, sum[r]);
    }
}

inline void add_lane_rows(long rows, const float *x, const float *w, long depth, long count, bool fresh, float *sums) {
    switch (rows) {
    case 1: return add_lanes<1>(x, w, depth, count, fresh, sums);
    case 2: return add_lanes<2>(x, w, depth, count, fresh, sums);
#if defined(__AVX512F__)
    case 3: return add_lanes<3>(x, w, depth, count, fresh, sums);
    case 4: return add_lanes<4>(x, w, depth, count, fresh, sums);
    case 5: return add_lanes<5>(x, w, depth, count, fresh, sums);
    case 6: return add_lanes<6>(x, w, depth, count, fresh, sums);
    case 7: return add_lanes<7>(x, w, depth, count, fresh, sums);
    default: return add_lanes<8>(x, w, depth, count, fresh, sums);
#endif
    }
}

// The columns of steps [first, last) of a panel in float32, [steps, depth, PANEL].
template <typename W>
void columns_for_lanes(const W &w, long panel, long first, long last, const PanelGroup *groups, float *to) {
    const Steps &steps = w.steps;
    const long first_group = first / steps.per_group;
    for (StepPlace place(steps, first); place.step < last; to += steps.depth * PANEL, place.next())
        w.each_pair(panel, place, groups[place.group - first_group],
                    [&](long pair, const f32x16 *even, const f32x16 *odd) {
                        float *at = to + pair * 2 * PANEL;
                        for (int half = 0; half < 2; half++) {
                            store(at + half * LANES, even[half]);
                            store(at + PANEL + half * LANES, odd[half]);
                        }
                    });
}

// A panel's sums of rows [begin, end), which begin with a block.
inline void many_lanes(const Columns &w, long panel, const float *x, const TileRows &rows, long begin, long end) {
    const Steps &steps = w.steps;
    const long padded = steps.count() * steps.depth, count = end - begin;
    static thread_local Buffer<float> kept;
    kept.resize(2 * ROWS_AT_ONCE * PANEL + LANE_STEPS * 32 * PANEL);
    float *sums = kept.data(), *found = sums + ROWS_AT_ONCE * PANEL, *columns = found + ROWS_AT_ONCE * PANEL;
    if (w.scaled) memset(sums, 0, count * PANEL * sizeof(float));
    for (long first = 0; first < steps.count();) {
        const long last = steps.end_of_part(first, LANE_STEPS);
        PanelGroup groups[LANE_STEPS];
        w.groups(panel, first, last, groups);
        w.for_lanes(panel, first, last, groups, columns);
        for (long row = 0; row < count; row += LANE_ROWS) {
            const long together = std::min(LANE_ROWS, count - row);
            for (long step = first, stop; step < last; step = stop) {
                const long group = step / steps.per_group;
                stop = std::min(last, (group + 1) * steps.per_group);
                add_lane_rows(together, x + (begin + row) * padded + step * steps.depth * together,
                              columns + (step - first) * steps.depth * PANEL, steps.depth, stop - step,
                              step % steps.per_group == 0, found + row * PANEL);
                if (!w.scaled || stop % steps.per_group) continue;
                const float *own = rows.row_sums ? rows.row_sums + (begin + row) * steps.groups + group : nullptr;
                add_group(groups[group - first / steps.per_group], found + row * PANEL, PANEL, sums + row * PANEL,
                          PANEL, together, own, steps.groups);
            }
        }
        first = last;
    }
    for (long row = 0; row < count; row++)
        put_panel((w.scaled ? sums : found) + row * PANEL, w.n, panel, rows.bias,
                  rows.out + (begin + row) * rows.out_stride);
}

inline void product_by_lanes(const Columns &w, const TileRows &rows, long chunk) {
    const Steps &steps = w.steps;
    const bool few = rows.m <= (w.scaled ? FEW_LANE_ROWS : FEW_DENSE_ROWS);
    const long together = !few ? LANE_ROWS : rows.m == 1 ? 1 : FEW_LANE_ROWS;
    static thread_local Buffer<float> kept;
    kept.resize(steps.count() * steps.depth * ((rows.m + together - 1) / together * together));
    float *x = kept.data();
    rows_for_lanes(steps, rows.x, rows.x_stride, rows.m, together, few, x);
    each(w.panels(), chunk, [&](long panel) {
        const DenormalsAreZero mode;
        if (few) return w.few_rows(panel, x, rows);
        for (long begin = 0; begin < rows.m; begin += ROWS_AT_ONCE)
            many_lanes(w, panel, x, rows, begin, std::min(begin + ROWS_AT_ONCE, rows.m));
    });
    kept.release(KEPT_BYTES);
}

// ---- with tiles

#if defined(__AMX_BF16__)
constexpr long TILE_STEPS = 16;     // of a dense weight between which sums stay in tiles: 32 KiB a panel
constexpr long UNPACKED_STEPS = 8;  // of a weight in blocks that are unpacked at once: 16 KiB a panel
constexpr long PANELS_AT_ONCE = 8;  // that many rows are multiplied with before the next columns
constexpr long FEW_TILE_ROWS = 16, TOGETHER = 2 * FEW_TILE_ROWS;

// Whether the system lets this process use tiles; it is asked once.
inline bool tiles_allowed() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    static int answer = -1;  // Threads that ask at once are told the same.
    if (answer < 0) answer = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return answer;
}

// Tiles 0 to 3 are sums, 4 and 5 rows, 6 and 7 columns. Released when it ends.
class Tiles {
  public:
    Tiles(long rows, long depth) {
        struct __attribute__((packed)) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } shapes;
        for (int i = 0; i < 8; i++) {
            shapes.bytes[i] = (uint16_t)(i == 4 || i == 5 ? 2 * depth : 64);
            shapes.rows[i] = (uint8_t)(i >= 6 ? depth / 2 : rows);
        }
        _tile_loadconfig(&shapes);
    }
    ~Tiles() { _tile_release(); }
};

// A block of up to sixteen rows: the columns of step s begin at x + s * step, rows are `stride` elements apart.
struct TileBlock {
    const bf16 *x;
    long stride, step;
};

// Where the sums of tiles lie: the first one's, and in bytes how far apart rows are.
struct TileSums {
    float *at;
    long bytes;
};

// Tiles 0 and 1 from there on, and 2 and 3 from `other` on where there is one: zeros where they are fresh.
inline void begin_sums(TileSums sums, const float *other, bool fresh) {
    if (fresh) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        return;
    }
    _tile_loadd(0, sums.at, sums.bytes);
    _tile_loadd(1, sums.at + LANES, sums.bytes);
    if (!other) return;
    _tile_loadd(2, other, sums.bytes);
    _tile_loadd(3, other + LANES, sums.bytes);
}

inline void store_sums(TileSums sums, float *other) {
    _tile_stored(0, sums.at, sums.bytes);
    _tile_stored(1, sums.at + LANES, sums.bytes);
    if (!other) return;
    _tile_stored(2, other, sums.bytes);
    _tile_stored(3, other + LANES, sums.bytes);
}

constexpr long PAIR_BYTES = 2 * PANEL * sizeof(bf16);

// `steps` steps of one block of rows and two panels.
inline void few_tiles(TileBlock rows, const bf16 *one, const bf16 *two, long depth, long steps, bool fresh,
                      TileSums sums, long ahead) {
    begin_sums(sums, sums.at + PANEL, fresh);
    for (long step = 0; step < steps; step++, one += depth * PANEL, two += depth * PANEL) {
        _tile_loadd(4, rows.x + step * rows.step, rows.stride * sizeof(bf16));
        _tile_loadd(6, one, PAIR_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, one + PANEL, PAIR_BYTES);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, two, PAIR_BYTES);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, two + PANEL, PAIR_BYTES);
        _tile_dpbf16ps(3, 4, 7);
        for (long i = 0; ahead && i < depth * PANEL; i += 32) {
            _mm_prefetch((const char *)(one + ahead + i), _MM_HINT_T0);
            _mm_prefetch((const char *)(two + ahead + i), _MM_HINT_T0);
        }
    }
    store_sums(sums, sums.at + PANEL);
}

// `steps` steps of two blocks of rows (or one) and one panel. `next`: columns of later steps, of which each step
// fetches so many lines.
template <bool TWO>
inline void many_tiles(TileBlock rows, long block, const bf16 *w, long depth, long steps, bool fresh, TileSums sums,
                       const bf16 *next, long lines) {
    float *below = (float *)((char *)sums.at + FEW_TILE_ROWS * sums.bytes);
    begin_sums(sums, TWO ? below : nullptr, fresh);
    const bf16 *x = rows.x;
    for (long step = 0; step < steps; step++, w += depth * PANEL, x += rows.step) {
        _tile_loadd(6, w, PAIR_BYTES);
        _tile_loadd(4, x, rows.stride * sizeof(bf16));
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + PANEL, PAIR_BYTES);
        _tile_dpbf16ps(1, 4, 7);
        if (TWO) {
            _tile_loadd(5, x + block, rows.stride * sizeof(bf16));
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        for (long line = 0; line < lines; line++, next += PANEL) _mm_prefetch((const char *)next, _MM_HINT_T1);
    }
    store_sums(sums, TWO ? below : nullptr);
}

// Rows as tiles read them: blocks of sixteen; in a block step after step, of which each has sixteen rows. Those behind
// the last row are zeros.
inline void rows_for_tiles(const Steps &steps, const bf16 *x, long x_stride, long m, bf16 *to) {
    const long size = FEW_TILE_ROWS * steps.count() * steps.depth;
    each((m + FEW_TILE_ROWS - 1) / FEW_TILE_ROWS * FEW_TILE_ROWS, FEW_TILE_ROWS, [&](long row) {
        bf16 *at = to + row / FEW_TILE_ROWS * size + row % FEW_TILE_ROWS * steps.depth;
        for (StepPlace place(steps, 0); place.step < steps.count(); place.next(), at += FEW_TILE_ROWS * steps.depth) {
            const long width = row < m ? place.width : 0;
            if (width) memcpy((void *)at, (const void *)(x + row * x_stride + place.first), width * sizeof(bf16));
            if (width < steps.depth) memset((void *)(at + width), 0, (steps.depth - width) * sizeof(bf16));
        }
    });
}

// Codes of six bits at most, less their zeros, as bfloat16: a pair of columns by one look into a table.
template <int CODE> struct CodeTable {
    static constexpr bool fits = code_bits<CODE>() <= 6;
    bf16 values[4 * LANES];

    // Of codes with zeros by group the lower five bits of the difference are looked up.
    explicit CodeTable(const Blocks &b) {
        for (int first = 0; first < 4 * LANES; first += LANES) {
            i32x16 code;
            for (int i = 0; i < LANES; i++) code[i] = code_bits<CODE>() == 6 ? first + i : (first + i) % 32;
            const i32x16 number = b.zeros ? code << 27 >> 27 : code - b.zero;
            store(values + first, CODE == E2M1 || CODE == IQ4 ? value_of<CODE>(code) : floats(number));
        }
    }
};

template <int CODE>
const bf16 *columns_for_tiles(const BlockColumns<CODE> &w, long panel, long first, long last, const PanelGroup *groups,
                              bf16 *room) {
    const Steps &steps = w.steps;
    const long first_group = first / steps.per_group;
    bf16 *to = room;
    if constexpr (CodeTable<CODE>::fits) {
        const CodeTable<CODE> table(w.b);
        const __m512i low = _mm512_loadu_si512(table.values), high = _mm512_loadu_si512(table.values + 2 * LANES);
        const bool by_group = w.b.zeros;
        for (StepPlace place(steps, first); place.step < last; to += steps.depth * PANEL, place.next()) {
            i32x16 zero[2] = {};
            for (int half = 0; by_group && half < 2; half++)
                zero[half] = __builtin_convertvector(groups[place.group - first_group].zero[half], i32x16);
            const auto put = [&](long pair, const i32x16 *even, const i32x16 *odd) {
                for (int half = 0; half < 2; half++) {
                    const __m512i at = (__m512i)(((even[half] - zero[half]) & 0xffff) | (odd[half] - zero[half]) << 16);
                    const __m512i found = code_bits<CODE>() == 6 ? _mm512_permutex2var_epi16(low, at, high)
                                                                 : _mm512_permutexvar_epi16(at, low);
                    _mm512_storeu_si512(to + (2 * pair + half) * PANEL, found);
                }
            };
            w.each_code_pair(panel, place, put, [&](long pair, const i32x16 *even) {
                if (even) put(pair, even, even);
                for (int half = 0; half < 2; half++) {
                    float *at = (float *)(to + (2 * pair + half) * PANEL);
                    store(at, even ? (f32x16)(load_words(at) & 0xffff) : f32x16{});
                }
            });
        }
        return room;
    }
    for (StepPlace place(steps, first); place.step < last; to += steps.depth * PANEL, place.next())
        w.each_pair(panel, place, groups[place.group - first_group],
                    [&](long pair, const f32x16 *even, const f32x16 *odd) {
                        // Exact as bfloat16: the lower halves are zeros.
                        for (int half = 0; half < 2; half++)
                            store((float *)(to + (2 * pair + half) * PANEL),
                                  (f32x16)((i32x16)((u32x16)even[half] >> 16) | (i32x16)odd[half]));
                    });
    return room;
}

// Sums of rows [begin, end) and panels [one, last_panel): two of them where rows are few. x: rows_for_tiles, or rows as
// they came.
inline void product_of_tiles(const Columns &w, long one, long last_panel, TileBlock x, const TileRows &rows,
                             long begin, long end) {
    const Steps &steps = w.steps;
    const long count = end - begin, block = FEW_TILE_ROWS * steps.count() * steps.depth;
    const bool few = rows.m <= FEW_TILE_ROWS;
    const long panels = few ? 2 : last_panel - one, wide = panels * PANEL;
    const long blocks = (count + FEW_TILE_ROWS - 1) / FEW_TILE_ROWS, room = blocks * FEW_TILE_ROWS * wide;
    const long most = w.scaled ? UNPACKED_STEPS : count <= TOGETHER ? steps.count() : TILE_STEPS;
    // Sums of a group that isn't taken at once stay with their rows; those of others are added at once.
    const bool apart = w.scaled && steps.per_group <= most;
    constexpr long UNPACKED = UNPACKED_STEPS * 32 * PANEL / 2, TAKEN = TOGETHER * PANEL;  // in floats
    static thread_local Buffer<float> kept;
    kept.resize((w.scaled ? 2 : 1) * room + 2 * UNPACKED + TAKEN + LANES);
    float *found = (float *)(((uintptr_t)kept.data() + 63) & ~(uintptr_t)63), *sums = w.scaled ? found + room : found;
    float *unpacked = sums + room, *taken = unpacked + 2 * UNPACKED;
    if (w.scaled) memset(sums, 0, count * wide * sizeof(float));
    const Tiles tiles(few ? count : FEW_TILE_ROWS, steps.depth);
    for (long first = 0; first < steps.count();) {
        const long last = steps.end_of_part(first, most);
        for (long panel = 0; panel < panels; panel += few ? 2 : 1) {
            const long number = one + panel, other = std::min(number + 1, last_panel - 1);
            PanelGroup groups[2][UNPACKED_STEPS];
            w.groups(number, first, last, groups[0]);
            if (few) w.groups(other, first, last, groups[1]);
            const bf16 *left = w.for_tiles(number, first, last, groups[0], (bf16 *)unpacked);
            const bf16 *right = left;
            if (few) right = w.for_tiles(other, first, last, groups[1], (bf16 *)(unpacked + UNPACKED));
            // Each pair of blocks of rows fetches its share of the columns that come next.
            const bf16 *next = panel + 1 < panels ? w.ahead(number + 1, first) : w.ahead(one, last);
            const long lines = next ? steps.depth * PANEL / 32 * TOGETHER / std::max(count, TOGETHER) + 1 : 0;
            for (long row = 0; row < count; row += TOGETHER) {
                const long together = std::min(TOGETHER, count - row);
                for (long step = first, stop; step < last; step = stop) {
                    const long group = step / steps.per_group;
                    stop = std::min(last, (group + 1) * steps.per_group);
                    const bool fresh = step % steps.per_group == 0;
                    const long inner = (step - first) * steps.depth * PANEL, taken_wide = few ? 2 * PANEL : PANEL;
                    const TileBlock from{x.x + (begin + row) / FEW_TILE_ROWS * block + step * x.step, x.stride, x.step};
                    float *of_group = apart ? taken : found + row * wide + panel * PANEL;
                    const TileSums to{of_group, (apart ? taken_wide : wide) * (long)sizeof(float)};
                    if (few)
                        few_tiles(from, left + inner, right + inner, steps.depth, stop - step, fresh, to,
                                  w.scaled ? 0 : 4096);
                    else if (together > FEW_TILE_ROWS)
                        many_tiles<true>(from, block, left + inner, steps.depth, stop - step, fresh, to, next, lines);
                    else
                        many_tiles<false>(from, block, left + inner, steps.depth, stop - step, fresh, to, next, lines);
                    if (next) next += (stop - step) * lines * PANEL;
                    if (!w.scaled || stop % steps.per_group) continue;
                    const float *own = rows.row_sums ? rows.row_sums + (begin + row) * steps.groups + group : nullptr;
                    for (int side = 0; side < (few ? 2 : 1); side++)
                        add_group(groups[side][group - first / steps.per_group], to.at + side * PANEL,
                                  to.bytes / (long)sizeof(float), sums + row * wide + (panel + side) * PANEL, wide,
                                  together, own, steps.groups);
                }
            }
        }
        first = last;
    }
    for (long row = 0; row < count; row++)
        for (long panel = one; panel < std::min(one + panels, last_panel); panel++)
            put_panel(sums + row * wide + (panel - one) * PANEL, w.n, panel, rows.bias,
                      rows.out + (begin + row) * rows.out_stride);
}

inline void product_by_tiles(const Columns &w, const TileRows &rows, long chunk) {
    const Steps &steps = w.steps;
    const long panels = w.panels();
    // Rows that lie as a tile takes them: whole steps, one after the other.
    const bool direct = rows.m <= 4 && steps.group % steps.depth == 0 && steps.k % steps.group == 0;
    static thread_local Buffer<bf16> kept;
    TileBlock x{rows.x, rows.x_stride, steps.depth};
    if (!direct) {
        kept.resize((rows.m + FEW_TILE_ROWS - 1) / FEW_TILE_ROWS * FEW_TILE_ROWS * steps.count() * steps.depth);
        rows_for_tiles(steps, rows.x, rows.x_stride, rows.m, kept.data());
        x = {kept.data(), steps.depth, FEW_TILE_ROWS * steps.depth};
    }
    const long at_once = rows.m <= FEW_TILE_ROWS ? 2 : rows.m <= 2 * TOGETHER ? 2 : PANELS_AT_ONCE;
    each((panels + at_once - 1) / at_once, std::max(1L, chunk / at_once), [&](long item) {
        const DenormalsAreZero mode;
        const long first = item * at_once, last = std::min(first + at_once, panels);
        for (long begin = 0; begin < rows.m; begin += ROWS_AT_ONCE)
            product_of_tiles(w, first, last, x, rows, begin, std::min(begin + ROWS_AT_ONCE, rows.m));
    });
    kept.release(KEPT_BYTES);
}
#endif

inline void tile_product(const Columns &w, const TileRows &rows) {
    if (!rows.m) return;
    const long chunk = std::max(1L, std::min(w.panels() / 16, 65536 / w.panel_bytes + 1));
#if defined(__AMX_BF16__)
    // A few rows of a weight in blocks are multiplied faster than tiles are filled.
    if (tiles_allowed() && (!w.scaled || rows.m > FEW_LANE_ROWS)) return product_by_tiles(w, rows, chunk);
#endif
    product_by_lanes(w, rows, chunk);
}

// ---- the two kinds of weights

inline long tile_elements(long n, long k) {
    return (n + PANEL - 1) / PANEL * PANEL * ((k + 31) / 32 * 32);
}

// Packs a dense weight [n, k].
inline void tile_pack(const bf16 *weight, bf16 *packed, long n, long k) {
    const long padded = (k + 31) / 32 * 32;
    each((n + PANEL - 1) / PANEL, 1, [&](long panel) {
        bf16 *at = packed + panel * PANEL * padded;
        for (long j = 0; j < padded; j += 2)
            for (long i = 0; i < PANEL; i++)
                for (long d = 0; d < 2; d++, at++) {
                    const long row = panel * PANEL + i;
                    *at = row < n && j + d < k ? weight[row * k + j + d] : bf16{};
                }
    });
}

// x [m, k] with rows x_stride apart, out [m, n] with rows out_stride apart. bias: whole panels of float32, or null.
inline void dense_tile_product(const bf16 *x, long x_stride, const bf16 *packed, const float *bias, bf16 *out,
                               long out_stride, long m, long n, long k) {
    tile_product(DenseColumns(n, k, packed), {x, x_stride, m, nullptr, bias, out, out_stride});
}

inline void block_tile_product(const Blocks &b, const bf16 *x, long x_stride, const float *bias, bf16 *out,
                               long out_stride, long m) {
    for_code(b.code, [&](auto kind) {
        const BlockColumns<decltype(kind)::code> w(b);
        TileRows rows{x, x_stride, m, nullptr, bias, out, out_stride};
        static thread_local Buffer<float> sums;
        if (w.has_offsets()) {
            sums.resize((m + FEW_LANE_ROWS) * w.steps.groups);  // Some rows may be read that there aren't.
            sums_of_rows(w.steps, x, x_stride, m, sums.data());
            rows.row_sums = sums.data();
        }
        tile_product(w, rows);
        sums.release(KEPT_BYTES);
    });
}
