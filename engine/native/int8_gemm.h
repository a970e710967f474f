// Products of rows that are quantised to int8 with a weight in blocks whose codes are whole numbers.
//
// A row's scale is its largest value / 127, one for each 32 columns, or one for the whole row; its numbers are the
// nearest ones. A *unit* is what has one scale of the row and one of the weight: 32 columns, a group that is smaller,
// or a group where rows have one scale. A unit's sum of numbers times codes less their zeros is a whole number, the
// same in any order, so on every processor. As float32 it is multiplied with the row's scale, then, fused, with the
// weight's, and added to the units before; where groups have an offset, so is the row's own sum of the unit.
//
// Codes are multiplied without a sign, by instructions that add up four neighbouring products, and the zeros' part is
// where their sum begins. So columns are packed by fours, a *quad*: of a panel each *chunk* of 32 columns, of a chunk
// vectors of 64 codes, those of a quad and 16 outputs, the two halves of the panel in turn. A vector of codes of four
// bits is the low halves of 64 bytes, and that of four quads later the high ones; higher bits of six, five, three and
// two bits lie in bytes of 64 as well, pair by pair or bit by bit.
#pragma once

#include "tile_gemm.h"

constexpr long CHUNK = 32, VECTOR = 64, QUAD_BYTES = 2 * VECTOR;

// 64 codes, and their products with a quad of a row.
#if defined(IN_HALVES)
struct Bytes {
    __m256i low, high;
};
inline Bytes load_bytes(const void *p) {
    return {_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)p + 1)};
}
inline void store_bytes(void *p, Bytes x) {
    _mm256_storeu_si256((__m256i *)p, x.low);
    _mm256_storeu_si256((__m256i *)p + 1, x.high);
}
template <int BY> inline Bytes shifted_right(Bytes x) {
    return {_mm256_srli_epi16(x.low, BY), _mm256_srli_epi16(x.high, BY)};
}
template <int BY> inline Bytes shifted_left(Bytes x) {
    return {_mm256_slli_epi16(x.low, BY), _mm256_slli_epi16(x.high, BY)};
}
inline Bytes masked(Bytes x, int mask) {
    const __m256i all = _mm256_set1_epi8((char)mask);
    return {_mm256_and_si256(x.low, all), _mm256_and_si256(x.high, all)};
}
inline Bytes either(Bytes a, Bytes b) { return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)}; }
inline Bytes looked_up(const int8_t *table, Bytes x) {
    const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    return {_mm256_shuffle_epi8(all, x.low), _mm256_shuffle_epi8(all, x.high)};
}

// Pairs of products are added up in 16 bits, in which those of more than seven bits don't fit.
template <bool WIDE> inline i32x8 dot(i32x8 sum, __m256i codes, __m256i x) {
#if defined(__AVXVNNI__)
    return (i32x8)_mm256_dpbusd_avx_epi32((__m256i)sum, codes, x);
#else
    const __m256i one = _mm256_set1_epi16(1), two = _mm256_set1_epi16(2), odd = _mm256_set1_epi8(1);
    if constexpr (!WIDE) return sum + (i32x8)_mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), one);
    const __m256i half = _mm256_and_si256(_mm256_srli_epi16(codes, 1), _mm256_set1_epi8(0x7f));
    const __m256i rest = _mm256_maddubs_epi16(_mm256_and_si256(codes, odd), x);
    return sum + (i32x8)_mm256_madd_epi16(_mm256_maddubs_epi16(half, x), two) + (i32x8)_mm256_madd_epi16(rest, one);
#endif
}
template <bool WIDE> inline i32x16 dot(i32x16 sum, Bytes codes, const int8_t *x) {
    int32_t quad;
    memcpy(&quad, x, 4);
    const __m256i all = _mm256_set1_epi32(quad);
    return {dot<WIDE>(sum.low, codes.low, all), dot<WIDE>(sum.high, codes.high, all)};
}
#elif defined(__AVX512BW__)
typedef __m512i Bytes;
inline Bytes load_bytes(const void *p) { return _mm512_loadu_si512(p); }
inline void store_bytes(void *p, Bytes x) { _mm512_storeu_si512(p, x); }
template <int BY> inline Bytes shifted_right(Bytes x) { return _mm512_srli_epi16(x, BY); }
template <int BY> inline Bytes shifted_left(Bytes x) { return _mm512_slli_epi16(x, BY); }
inline Bytes masked(Bytes x, int mask) { return _mm512_and_si512(x, _mm512_set1_epi8((char)mask)); }
inline Bytes either(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }
inline Bytes looked_up(const int8_t *table, Bytes x) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table)), x);
}

template <bool WIDE> inline i32x16 dot(i32x16 sum, Bytes codes, const int8_t *x) {
    int32_t quad;
    memcpy(&quad, x, 4);
    const __m512i all = _mm512_set1_epi32(quad);
#if defined(__AVX512VNNI__)
    return (i32x16)_mm512_dpbusd_epi32((__m512i)sum, codes, all);
#else
    // As on AVX2, in 16 bits.
    const __m512i one = _mm512_set1_epi16(1), two = _mm512_set1_epi16(2);
    if constexpr (!WIDE) return sum + (i32x16)_mm512_madd_epi16(_mm512_maddubs_epi16(codes, all), one);
    const __m512i rest = _mm512_maddubs_epi16(masked(codes, 1), all);
    const __m512i half = _mm512_maddubs_epi16(masked(shifted_right<1>(codes), 0x7f), all);
    return sum + (i32x16)_mm512_madd_epi16(half, two) + (i32x16)_mm512_madd_epi16(rest, one);
#endif
}
#else
struct Bytes {
    uint8_t at[64];
};
inline Bytes load_bytes(const void *p) {
    Bytes out;
    memcpy(out.at, p, 64);
    return out;
}
inline void store_bytes(void *p, Bytes x) { memcpy(p, x.at, 64); }
template <int BY> inline Bytes shifted_right(Bytes x) {
    for (uint8_t &byte : x.at) byte >>= BY;
    return x;
}
template <int BY> inline Bytes shifted_left(Bytes x) {
    for (uint8_t &byte : x.at) byte = (uint8_t)(byte << BY);
    return x;
}
inline Bytes masked(Bytes x, int mask) {
    for (uint8_t &byte : x.at) byte &= mask;
    return x;
}
inline Bytes either(Bytes a, Bytes b) {
    for (int i = 0; i < 64; i++) a.at[i] |= b.at[i];
    return a;
}
inline Bytes looked_up(const int8_t *table, Bytes x) {
    for (uint8_t &byte : x.at) byte = (uint8_t)table[byte & 15];
    return x;
}

template <bool WIDE> inline i32x16 dot(i32x16 sum, Bytes codes, const int8_t *x) {
    for (int i = 0; i < LANES; i++)
        for (int d = 0; d < 4; d++) sum[i] += codes.at[4 * i + d] * x[d];
    return sum;
}
#endif

// The numbers that codes of four bits stand for, raised by a zero (`int8_zero`) so that none is below 0; of E2M1 twice
// the number.
constexpr int8_t E2M1_TWICE[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
constexpr int8_t IQ4_RAISED[16] = {1, 24, 45, 63, 79, 93, 106, 118, (int8_t)129, (int8_t)141, (int8_t)153, (int8_t)166,
                                   (int8_t)181, (int8_t)197, (int8_t)217, (int8_t)241};
// Whether what is multiplied has eight bits.
template <int CODE> constexpr bool wide() { return CODE == IQ4 || CODE == UINT8; }
template <int CODE> constexpr long chunk_bytes() { return code_bits<CODE>() * CHUNK * PANEL / 8; }

// The codes of a quad of a chunk, as they are stored; the chunk begins with the half's first vector.
template <int CODE, int QUAD> inline Bytes stored_quad(const uint8_t *chunk) {
    constexpr int low = low_bits<CODE>(), middle = middle_bits<CODE>();
    Bytes codes;
    if constexpr (low == 8) return load_bytes(chunk + QUAD * QUAD_BYTES);
    if constexpr (low == 4) {
        const Bytes both = load_bytes(chunk + QUAD % 4 * QUAD_BYTES);
        codes = masked(QUAD < 4 ? both : shifted_right<4>(both), 15);
    }
    const uint8_t *rest = chunk + low * CHUNK * PANEL / 8;
    if constexpr (middle) {
        const Bytes bits = masked(shifted_right<2 * (QUAD / 2)>(load_bytes(rest + QUAD % 2 * QUAD_BYTES)), 3);
        codes = low ? either(codes, shifted_left<low>(bits)) : bits;
    }
    if constexpr (top_bits<CODE>()) {
        const Bytes bits = masked(shifted_right<QUAD>(load_bytes(rest + middle * CHUNK * PANEL / 8)), 1);
        codes = either(codes, shifted_left<low + middle>(bits));
    }
    return codes;
}

// The same as they are multiplied.
template <int CODE, int QUAD> inline Bytes multiplied_quad(const uint8_t *chunk) {
    const Bytes codes = stored_quad<CODE, QUAD>(chunk);
    if constexpr (CODE == E2M1) return looked_up(E2M1_TWICE, codes);
    if constexpr (CODE == IQ4) return looked_up(IQ4_RAISED, codes);
    return codes;
}

// The quads of a chunk, one code a byte: as they are multiplied, or as they are stored.
template <int CODE, bool STORED, int QUAD = 0> inline void unpack_quads(const uint8_t *chunk, uint8_t *to) {
    if constexpr (QUAD < CHUNK / 4) {
        for (long half = 0; half < 2; half++) {
            const uint8_t *from = chunk + half * VECTOR;
            store_bytes(to + QUAD * QUAD_BYTES + half * VECTOR,
                        STORED ? stored_quad<CODE, QUAD>(from) : multiplied_quad<CODE, QUAD>(from));
        }
        unpack_quads<CODE, STORED, QUAD + 1>(chunk, to);
    }
}

// Rounded up.
inline long divided(long count, long by) { return (count + by - 1) / by; }

// How the columns of a weight and of rows are cut.
struct Units {
    long k, chunks, columns, count, per_group;  // columns: of a unit
    bool by_row;                                // rows have one scale, not one for each chunk

    Units(const Blocks &b, bool row)
        : k(b.k), chunks(divided(b.k, CHUNK)), by_row(row) {
        const long whole = chunks * CHUNK, group = b.group >= k ? whole : b.group;
        columns = row && whole % group == 0 ? group : std::min(group, CHUNK);
        count = chunks * CHUNK / columns;
        per_group = group / columns;
    }
    long quads() const { return columns / 4; }
    // Units that are unpacked at once: of eight chunks, or one unit.
    long at_once() const { return std::max(1L, 8 * CHUNK / columns); }
};

// Rows in whole numbers. Each has `chunks` times 32 numbers, of columns that there aren't zeros; and for each unit what
// the zeros' part begins from, and what offsets are multiplied with.
struct Int8Rows {
    const Units &units;
    int8_t *numbers;
    float *scales;    // [m, chunks], or [m, 1]
    int32_t *totals;  // [m, units]: the sums of a unit's numbers, times -`zero`
    float *sums;      // [m, units]: those sums, scaled

    long scale_row() const { return units.by_row ? 1 : units.chunks; }
    const float *scale_of(long row, long unit) const {
        return scales + row * scale_row() + (units.by_row ? 0 : unit * units.columns / CHUNK);
    }

    // Columns [first, last) with one scale.
    template <typename T> void quantise_part(const T *x, long first, long last, int8_t *to, float &scale) const {
        i32x16 most = {};
        for (long j = first; j < last; j += LANES) {
            const i32x16 size = (i32x16)load_some(x + j, (int)(std::min(last, units.k) - j)) & 0x7fffffff;
            most = chosen_by(size > most, size, most);
        }
        int32_t bits = 0;
        for (int i = 0; i < LANES; i++) bits = std::max(bits, (int32_t)most[i]);
        float largest;
        memcpy(&largest, &bits, 4);
        const bool none = largest < 0x1p-100f;
        scale = none ? 0.0f : largest / 127.0f;
        const float inverse = none ? 0.0f : 127.0f / largest;
        // Adding 1.5 * 2^23 rounds to the nearest integer, which the lower bits are then.
        for (long j = first; j < last; j += LANES) {
            int32_t rounded[LANES];
            const f32x16 value = load_some(x + j, (int)(std::min(last, units.k) - j)) * inverse + 12582912.0f;
            store((float *)rounded, value);
            for (int i = 0; i < LANES; i++) to[j + i] = (int8_t)(rounded[i] - 0x4b400000);
        }
    }
    template <typename T> void quantise(const T *x, long row, int zero) const {
        const long columns = units.chunks * CHUNK, step = units.by_row ? columns : CHUNK;
        int8_t *to = numbers + row * columns;
        for (long first = 0; first < columns; first += step)
            quantise_part(x, first, first + step, to, scales[row * scale_row() + first / step]);
        for (long unit = 0; unit < units.count; unit++) {
            int32_t total = 0;
            for (long j = unit * units.columns; j < (unit + 1) * units.columns; j++) total += to[j];
            totals[row * units.count + unit] = total * -zero;
            sums[row * units.count + unit] = (float)total * *scale_of(row, unit);
        }
    }
};

// What a panel has for a unit.
struct UnitValues {
    f32x16 scale[2], offset[2];
    i32x16 zero[2];  // where zeros differ
};

// As many sums as registers hold: rows, and halves of a panel. Of up to PACKED_ROWS rows codes are unpacked on their
// way to each of these, of more once for all of them.
#if defined(__AVX512F__)
constexpr long INT8_ROWS = 6, INT8_HALVES = 2, PACKED_ROWS = 240;
#else
constexpr long INT8_ROWS = 4, INT8_HALVES = 1, PACKED_ROWS = 16;
#endif

// How far ahead codes are fetched, in bytes, since the processor looks no further than a page; and how many with each
// chunk: none of eight bits, which keep memory busy as it is.
constexpr long AHEAD = 4096;
template <int CODE> constexpr long fetched_ahead() { return CODE == UINT8 ? 0 : chunk_bytes<CODE>(); }

// Some units of a panel, and what they are multiplied and added up with.
struct SomeUnits {
    const Int8Rows &rows;
    long first, count;
    const uint8_t *codes;  // as they are packed, chunk after chunk, or one a byte, quad after quad of both halves
    const UnitValues *values;
    bool zeros, offsets;
};

// What ROWS rows and the halves of a panel add up to, of one unit.
template <int ROWS> using UnitSums = i32x16[ROWS][INT8_HALVES];

template <bool WIDE, int ROWS>
inline void add_quad(UnitSums<ROWS> &sum, const Bytes (&codes)[INT8_HALVES], const int8_t *x, long x_row) {
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int i = 0; i < INT8_HALVES; i++) sum[r][i] = dot<WIDE>(sum[r][i], codes[i], x + r * x_row);
}

// The quads [QUAD, LAST) of a chunk as it is packed.
template <int CODE, int ROWS, int QUAD, int LAST>
inline void add_packed_quads(UnitSums<ROWS> &sum, const uint8_t *chunk, const int8_t *x, long x_row) {
    if constexpr (QUAD < LAST) {
        Bytes codes[INT8_HALVES];
#pragma GCC unroll 2
        for (int i = 0; i < INT8_HALVES; i++) codes[i] = multiplied_quad<CODE, QUAD>(chunk + i * VECTOR);
        add_quad<wide<CODE>(), ROWS>(sum, codes, x + 4 * QUAD, x_row);
        add_packed_quads<CODE, ROWS, QUAD + 1, LAST>(sum, chunk, x, x_row);
    }
}

// ROWS rows from `row` on, and halves of the panel from `half` on. PACKED: codes are unpacked on their way, of units
// that are whole chunks.
template <int CODE, bool PACKED, int ROWS>
inline void add_units(const SomeUnits &some, long row, int half, float *sums) {
    const Int8Rows &rows = some.rows;
    const Units &units = rows.units;
    const long x_row = units.chunks * CHUNK, quads = units.quads();
    const int8_t *x = rows.numbers + row * x_row + some.first * units.columns;
    const uint8_t *codes = some.codes + half * VECTOR;
    const UnitValues *values = some.values;
    f32x16 added[ROWS][INT8_HALVES];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int i = 0; i < INT8_HALVES; i++) added[r][i] = load(sums + r * PANEL + (half + i) * LANES);
    for (long unit = some.first; unit < some.first + some.count; unit++, values++) {
        const int32_t *total = rows.totals + row * units.count + unit;
        UnitSums<ROWS> sum;
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int i = 0; i < INT8_HALVES; i++) {
                sum[r][i] = (i32x16)splat_word(total + r * units.count);
                if (some.zeros) sum[r][i] = sum[r][i] * values->zero[half + i];
            }
        if constexpr (PACKED)
            for (long quad = 0; quad < quads; quad += CHUNK / 4, codes += chunk_bytes<CODE>(), x += CHUNK) {
#pragma GCC unroll 16
                for (long at = 0; at < fetched_ahead<CODE>(); at += 64) __builtin_prefetch(codes + AHEAD + at);
                add_packed_quads<CODE, ROWS, 0, CHUNK / 4>(sum, codes, x, x_row);
            }
        else
            for (long quad = 0; quad < quads; quad++, codes += QUAD_BYTES, x += 4) {
                Bytes of_codes[INT8_HALVES];
#pragma GCC unroll 2
                for (int i = 0; i < INT8_HALVES; i++) of_codes[i] = load_bytes(codes + i * VECTOR);
                add_quad<wide<CODE>(), ROWS>(sum, of_codes, x, x_row);
            }
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            const f32x16 scale = splat(*rows.scale_of(row + r, unit));
#pragma GCC unroll 2
            for (int i = 0; i < INT8_HALVES; i++) {
                added[r][i] = fma(floats(sum[r][i]) * scale, values->scale[half + i], added[r][i]);
                if (some.offsets)
                    added[r][i] =
                        fma(splat(rows.sums[(row + r) * units.count + unit]), values->offset[half + i], added[r][i]);
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int i = 0; i < INT8_HALVES; i++) store(sums + r * PANEL + (half + i) * LANES, added[r][i]);
}

template <int CODE, bool PACKED> void add_unit_rows(const SomeUnits &some, long row, long count, float *sums) {
#define ROWS_CASE(n)                                                                                                  \
    case n: add_units<CODE, PACKED, n>(some, row, half, sums); break;
    for (int half = 0; half < 2; half += INT8_HALVES) switch (count) {
            ROWS_CASE(1) ROWS_CASE(2) ROWS_CASE(3) ROWS_CASE(4)
#if defined(__AVX512F__)
            ROWS_CASE(5) ROWS_CASE(6)
#endif
        }
#undef ROWS_CASE
}

template <int CODE> constexpr int int8_zero(const Blocks &b) {
    return CODE == E2M1 ? 12 : CODE == IQ4 ? 128 : b.zeros ? -1 : b.zero;
}

// Of units [first, first + count) of a panel; what isn't used stays as it is.
template <int CODE>
void unit_values(const BlockColumns<CODE> &w, const Units &units, long panel, long first, long count, UnitValues *to) {
    const bool zeros = w.b.zeros, offsets = w.has_offsets();
    long group = first / units.per_group, left = units.per_group - first % units.per_group;
    for (long unit = 0; unit < count; unit++, to++) {
        const PanelGroup found = w.group(panel, group);
        for (int half = 0; half < 2; half++) {
            to->scale[half] = CODE == E2M1 ? found.scale[half] * splat(0.5f) : found.scale[half];
            if (offsets) to->offset[half] = found.offset[half];
            if (zeros) to->zero[half] = -widened_at(w.b.zeros + (panel * w.b.groups + group) * PANEL + half * LANES);
        }
        if (--left) continue;
        left = units.per_group;
        group = std::min(group + 1, w.steps.groups - 1);  // A row's last chunk may be longer than its last group.
    }
}

constexpr long INT8_ROWS_AT_ONCE = 240;  // whose sums a thread holds

// Calls put(row, sums) with the sums of each row and a panel.
template <int CODE, typename Put>
void int8_panel(const BlockColumns<CODE> &w, const Int8Rows &rows, long panel, long m, const Put &put) {
    const Units &units = rows.units;
    const long at_once = units.at_once(), room = at_once * units.columns * PANEL;
    static thread_local Buffer<float> kept;
    kept.resize(INT8_ROWS_AT_ONCE * PANEL + at_once * (long)(sizeof(UnitValues) / sizeof(float)) + room / WORD + LANES);
    float *sums = (float *)(((uintptr_t)kept.data() + 63) & ~(uintptr_t)63);
    UnitValues *values = (UnitValues *)(sums + INT8_ROWS_AT_ONCE * PANEL);
    uint8_t *unpacked = (uint8_t *)(values + at_once);
    for (long begin = 0; begin < m; begin += INT8_ROWS_AT_ONCE) {
        const long count = std::min(INT8_ROWS_AT_ONCE, m - begin);
        memset((void *)sums, 0, count * PANEL * sizeof(float));
        for (long first = 0; first < units.count; first += at_once) {
            const long some = std::min(at_once, units.count - first);
            const long chunk = first * units.columns / CHUNK, last = (first + some) * units.columns / CHUNK;
            const uint8_t *codes = w.b.codes + (panel * units.chunks + chunk) * chunk_bytes<CODE>();
            unit_values<CODE>(w, units, panel, first, some, values);
            SomeUnits all{rows, first, some, codes, values, (bool)w.b.zeros, w.has_offsets()};
            const long together = divided(count, divided(count, INT8_ROWS));
            if (count <= PACKED_ROWS && units.columns % CHUNK == 0) {
                for (long row = 0; row < count; row += together)
                    add_unit_rows<CODE, true>(all, begin + row, std::min(together, count - row), sums + row * PANEL);
                continue;
            }
            if constexpr (CODE != UINT8) {
                uint8_t *to = unpacked;
                for (long c = chunk; c < last; c++, codes += chunk_bytes<CODE>(), to += CHUNK * PANEL)
                    unpack_quads<CODE, false>(codes, to);
                all.codes = unpacked;
            }
            for (long row = 0; row < count; row += together)
                add_unit_rows<wide<CODE>() ? UINT8 : UINT4, false>(all, begin + row, std::min(together, count - row),
                                                                   sums + row * PANEL);
        }
        for (long row = 0; row < count; row++) put(begin + row, sums + row * PANEL);
    }
}

// x [m, k] with rows x_stride apart, out [m, n] with rows out_stride apart. bias: whole panels of float32, or null.
template <typename T>
void int8_product(const Blocks &b, const T *x, long x_stride, const float *bias, T *out, long out_stride, long m,
                  bool by_row) {
    if (!m) return;
    const Units units(b, by_row);
    static thread_local Buffer<float> kept;
    const long scales = m * (by_row ? 1 : units.chunks), of_units = m * units.count;
    kept.resize(scales + 2 * of_units + m * units.chunks * CHUNK / WORD);
    float *room = kept.data();
    const Int8Rows rows{units, (int8_t *)(room + scales + 2 * of_units), room, (int32_t *)(room + scales + of_units),
                        room + scales};
    for_code(b.code, [&](auto kind) {
        constexpr int CODE = decltype(kind)::code;
        if constexpr (CODE != E4M3) {
            const BlockColumns<CODE> w(b);
            each(m, 4, [&](long row) { rows.quantise(x + row * x_stride, row, int8_zero<CODE>(b)); });
            const long panels = w.panels();
            const long chunk = std::max(1L, std::min(panels / 16, 65536 / (b.k * PANEL) + 1));
            each(panels, chunk, [&](long panel) {
                int8_panel(w, rows, panel, m, [&](long row, const float *sums) {
                    put_row(sums, b.n, panel, bias, out + row * out_stride);
                });
            });
        }
    });
    kept.release(KEPT_BYTES);
}

// Rows of the weight, unpacked, as block_rows does: out [count, k].
template <typename T> bool int8_rows(const Blocks &b, const int64_t *rows, long count, T *out) {
    for (long i = 0; i < count; i++)
        if (rows[i] < 0 || rows[i] >= b.n) return false;
    for_code(b.code, [&](auto kind) {
        constexpr int CODE = decltype(kind)::code;
        if constexpr (CODE != E4M3)
            each(count, 1, [&](long i) {
                const long panel = rows[i] / PANEL, half = rows[i] % PANEL / LANES, lane = rows[i] % LANES;
                const uint8_t *codes = b.codes + panel * divided(b.k, CHUNK) * chunk_bytes<CODE>();
                for (long first = 0; first < b.k; first += CHUNK, codes += chunk_bytes<CODE>()) {
                    uint8_t quads[CHUNK * PANEL];
                    unpack_quads<CODE, true>(codes, quads);
                    float values[CHUNK] = {};
                    for (long j = 0; j < std::min(CHUNK, b.k - first); j++) {
                        const GroupValues g = group_values<CODE>(b, panel, (first + j) / b.group);
                        const i32x16 quad = load_words(quads + j / 4 * QUAD_BYTES + half * VECTOR);
                        const i32x16 column = quad >> (int)(j % 4 * 8) & 255;
                        values[j] = unpacked_values<CODE>(column, g.scale[half], g.zero[half], g.factor[half])[lane];
                    }
                    T *to = out + i * b.k + first;
                    for (long j = 0; j < b.k - first && j < CHUNK; j += LANES)
                        store_some(to + j, load(values + j), (int)std::min((long)LANES, b.k - first - j));
                }
            });
    });
    return true;
}

// Codes [n, k] of so many bits, one a byte, in the order of reading; behind the last row and column are zeros.
inline void pack_int8(const uint8_t *codes, uint8_t *packed, long n, long k, int bits) {
    const long panels = divided(n, PANEL), chunks = divided(k, CHUNK), size = bits * CHUNK * PANEL / 8;
    const int low = bits == 8 ? 8 : bits < 4 ? 0 : 4, middle = bits == 6 || bits < 4 ? 2 : 0;
    memset(packed, 0, panels * chunks * size);
    each(panels, 1, [&](long panel) {
        for (long row = panel * PANEL; row < std::min((panel + 1) * PANEL, n); row++)
            for (long j = 0; j < k; j++) {
                const long half = row % PANEL / LANES, quad = j % CHUNK / 4, byte = row % LANES * 4 + j % 4;
                uint8_t *at = packed + (panel * chunks + j / CHUNK) * size + half * VECTOR + byte;
                uint8_t *rest = at + low * CHUNK * PANEL / 8;
                const uint8_t code = codes[row * k + j];
                if (low == 8) at[quad * QUAD_BYTES] = code;
                if (low == 4) at[quad % 4 * QUAD_BYTES] |= (code & 15) << quad / 4 * 4;
                if (middle) rest[quad % 2 * QUAD_BYTES] |= (code >> low & 3) << quad / 2 * 2;
                if (bits > low + middle) rest[middle * CHUNK * PANEL / 8] |= (code >> (low + middle) & 1) << quad;
            }
    });
}
