/* Products of weights of 4 bits in groups with rows in int8, by AVX512-VNNI.
 *
 * A row is rounded to int8 group by group, each with its own scale. The instruction takes weights
 * without a sign. So a bias is added to weights that have one, and the bias times the sum of the
 * row is subtracted at the end. Sums over a group are exact, and are added with both scales in
 * float32. Rounding rows loses a fraction of what weights of 4 bits lose: there are 255 steps
 * instead of 16 over the same numbers.
 *
 * Where the weights have groups of 16, which are of NVFP4, four of them share a scale of the row, and
 * their sums begin at less the bias times the sum of the row. So a group costs fewer operations, and
 * rows have 15 bits: 128 times a number in int8, plus another. The weights are taken out of their 4
 * bits once for both. Columns of such weights are a multiple of 16. */
#ifndef WEFT_GROUPED_VNNI_H
#define WEFT_GROUPED_VNNI_H

#include "grouped.h"

/* Rows in int8, tile by tile. The two words of an eight hold the numbers that the lower and the
 * upper halves of a panel's bytes are multiplied by. */
typedef struct {
  int32_t *words; /* of a tile [eights along K][rows][2]; of groups of 16 [2], then the lower parts */
  float *scales;  /* of a tile [groups, or blocks of four groups of 16][rows] */
  float *sums;    /* of a tile [groups][rows], of the rounded numbers with their scales; of groups of
                   * 16 int32: less the bias times the sums of the rounded numbers */
  long group, groups;
} GroupedRows;

#define SHORT_GROUP 16

/* Words of an eight of a row. */
static long words_of_eight(long group) { return group == SHORT_GROUP ? 4 : 2; }

/* Bytes of memory for `rows` rows of n numbers. */
static long grouped_rows_bytes(long rows, long n, long group) {
  return rows * (eights_of(n) * 4 * words_of_eight(group) + groups_along(n, group) * 8) + 64;
}

#define SHORT_BLOCK 64 /* numbers of a row that share its scale, where groups have 16 */

static long short_blocks(const GroupedRows *x) {
  return (x->groups * SHORT_GROUP + SHORT_BLOCK - 1) / SHORT_BLOCK;
}

/* Lays such rows out in memory of `grouped_rows_bytes`. */
static GroupedRows grouped_rows_in(void *memory, long rows, long n, long group) {
  GroupedRows x = {.group = group, .groups = groups_along(n, group)};
  x.words = (int32_t *)(((uintptr_t)memory + 63) & ~(uintptr_t)63);
  x.scales = (float *)(x.words + words_of_eight(group) * rows * eights_of(n));
  x.sums = x.scales + rows * x.groups;
  return x;
}

#if HAS_VNNI
/* Rounds n <= LARGEST_GROUP numbers to whole ones of at most `most`, each eight in the order in which
 * a panel has its bytes; returns their sum. `out` has room for whole sixteens. With `low`, `most` is
 * 127 * 128, `out` has what is left of them by 128, `low` the rest, and `sums` the sum of each
 * sixteen. `scale` is NaN if a number is not finite. */
INLINE int32_t round_eights(const bf16 *x, long n, float most, float *scale, char *out, char *low,
                            int32_t *sums) {
  __m512 values[LARGEST_GROUP / 16];
  const long vectors = (n + 15) / 16;
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  const __m512 shift = _mm512_set1_ps(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
  __m512i highest = _mm512_setzero_si512();
  for (long i = 0; i < vectors; i++) {
    values[i] = (__m512)load_some(x, 1, i * 16, at_most(n - i * 16, 16));
    highest = _mm512_max_epi32(highest, _mm512_and_si512((__m512i)values[i], magnitude));
  }
  union { int32_t bits; float value; } largest = {.bits = _mm512_reduce_max_epi32(highest)};
  *scale = largest.value <= FLT_MAX ? largest.value / most : NAN;
  const __m512 factor = _mm512_set1_ps(*scale > FLT_MIN ? 1.0f / *scale : 0.0f);
  const __m128i order = _mm_set_epi8(15, 11, 14, 10, 13, 9, 12, 8, 7, 3, 6, 2, 5, 1, 4, 0);
  __m512i sum = _mm512_setzero_si512();
  for (long i = 0; i < vectors; i++) {
    const __m512i whole = _mm512_sub_epi32((__m512i)_mm512_fmadd_ps(values[i], factor, shift),
                                           (__m512i)shift);
    __m512i upper = whole;
    if (low != NULL) {
      upper = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(64)), 7);
      const __m512i rest = _mm512_sub_epi32(whole, _mm512_slli_epi32(upper, 7));
      const __m128i bytes = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(rest), order);
      _mm_storeu_si128((__m128i *)(low + 16 * i), bytes);
      sums[i] = _mm512_reduce_add_epi32(whole);
    }
    sum = _mm512_add_epi32(sum, whole);
    const __m128i bytes = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(upper), order);
    _mm_storeu_si128((__m128i *)(out + 16 * i), bytes);
  }
  return _mm512_reduce_add_epi32(sum);
}

#define E2M1_BIAS 12
#define MOST_IN_BYTE 127.0f
#define MOST_IN_TWO (127.0f * 128)

/* `round_to_grouped` of groups of 16. */
static void round_to_short(const bf16 *x, const GroupedRows *to, long rows, long n, long begin,
                           long end) {
  ALIGNED char upper[SHORT_BLOCK], lower[SHORT_BLOCK];
  int32_t sums[SHORT_BLOCK / SHORT_GROUP];
  for (long row = begin; row < end; row++) {
    const TileRows tile = tile_with(rows, row);
    const long place = row - tile.first;
    int32_t *out = to->words + 4 * (tile.first * eights_of(n) + place);
    int32_t *starts = (int32_t *)to->sums + tile.first * to->groups + place;
    float *scales = to->scales + tile.first * short_blocks(to) + place;
    for (long b = 0; b < short_blocks(to); b++) {
      const long from = b * SHORT_BLOCK, numbers = at_most(n - from, SHORT_BLOCK);
      round_eights(x + row * n + from, numbers, MOST_IN_TWO, scales + b * tile.count, upper, lower,
                   sums);
      for (long i = 0; i < numbers / SHORT_GROUP; i++)
        starts[(from / SHORT_GROUP + i) * tile.count] = -E2M1_BIAS * sums[i];
      for (long i = 0; i < eights_of(numbers); i++) {
        int32_t *words = out + 4 * (from / 8 + i) * tile.count;
        memcpy(words, upper + 8 * i, 8);
        memcpy(words + 2, lower + 8 * i, 8);
      }
    }
  }
}

/* Rounds rows begin .. end - 1 of x [rows, n] to int8. */
static void round_to_grouped(const bf16 *x, const GroupedRows *to, long rows, long n, long begin,
                             long end) {
  if (to->group == SHORT_GROUP) {
    round_to_short(x, to, rows, n, begin, end);
    return;
  }
  ALIGNED char eights[LARGEST_GROUP];
  for (long row = begin; row < end; row++) {
    const TileRows tile = tile_with(rows, row);
    int32_t *out = to->words + 2 * (tile.first * eights_of(n) + row - tile.first);
    for (long g = 0; g < to->groups; g++) {
      const long from = g * to->group, numbers = at_most(n - from, (int)to->group);
      const long at = tile.first * to->groups + g * tile.count + (row - tile.first);
      const int32_t sum = round_eights(x + row * n + from, numbers, MOST_IN_BYTE, to->scales + at,
                                       eights, NULL, NULL);
      to->sums[at] = to->scales[at] * (float)sum;
      for (long i = 0; i < eights_of(numbers); i++)
        memcpy(out + 2 * (from / 8 + i) * tile.count, eights + 8 * i, 8);
    }
  }
}

/* For each 4 bits of e2m1 twice their value, plus the bias. */
INLINE __m512i e2m1_table(void) {
  return _mm512_broadcast_i32x4(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
}

/* What is added to numbers of a kind, so that they have no sign. */
INLINE float bias_of(int kind) { return kind == FOURS_E2M1 ? E2M1_BIAS : (float)kind; }

/* sum [rows][vectors] += some eights of the rows times those of a panel's columns. `asks`: whether
 * to prefetch `asked`, two cache lines for each eight. */
INLINE void grouped_steps(const int rows, const int vectors, const int is_e2m1, const int asks,
                          long steps, const int32_t *words, const uint32_t *panel,
                          const char *asked, __m512i sum[TILE_ROWS][2]) {
  const __m512i lower = _mm512_set1_epi8(15), table = e2m1_table();
  for (long s = 0; s < steps; s++, words += 2 * rows, panel += PANEL) {
    if (asks) ask_for_step(asked, s, 4 * PANEL);
    __m512i first[2], second[2];
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++) {
      const __m512i fours = _mm512_loadu_si512(panel + v * 16);
      first[v] = _mm512_and_si512(fours, lower);
      second[v] = _mm512_and_si512(_mm512_srli_epi16(fours, 4), lower);
      if (is_e2m1) {
        first[v] = _mm512_shuffle_epi8(table, first[v]);
        second[v] = _mm512_shuffle_epi8(table, second[v]);
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
      for (int v = 0; v < vectors; v++) {
        const __m512i one = _mm512_set1_epi32(words[2 * r]);
        const __m512i other = _mm512_set1_epi32(words[2 * r + 1]);
        sum[r][v] = _mm512_dpbusd_epi32(sum[r][v], first[v], one);
        sum[r][v] = _mm512_dpbusd_epi32(sum[r][v], second[v], other);
      }
  }
}

/* c [rows][some columns, from the vector `first` on] = rows from `row` on, which are a tile's, times
 * a panel. */
INLINE void grouped_columns(const int rows, const int vectors, const int is_e2m1, int first,
                            const GroupedRows *x, long row, long n, const uint32_t *panel,
                            PanelScales of, float bias, float *c, Prefetch *ahead) {
  const int32_t *words = x->words + 2 * row * eights_of(n);
  const float *row_scales = x->scales + row * x->groups, *row_sums = x->sums + row * x->groups;
  panel += first * 16;
  vf total[TILE_ROWS][2];
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++) total[r][0] = total[r][1] = (vf){0};
  for (long g = 0; g < x->groups; g++) {
    __m512i sum[TILE_ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = _mm512_setzero_si512();
    for (long left = eights_of(at_most(n - g * x->group, (int)x->group)); left > 0;) {
      const char *asked;
      const long some = take_span(ahead, left, 4 * PANEL, &asked);
      if (asked != NULL)
        grouped_steps(rows, vectors, is_e2m1, 1, some, words, panel, asked, sum);
      else
        grouped_steps(rows, vectors, is_e2m1, 0, some, words, panel, NULL, sum);
      left -= some, words += 2 * some * rows, panel += some * PANEL;
    }
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++) {
      const GroupScale group = group_scale(of, g, (first + v) * 16);
      const vf offsets = vf_fma(group.scales, vf_splat(-bias), group.offsets);
#pragma GCC unroll 12
      for (int r = 0; r < rows; r++) {
        const vf whole = (vf)_mm512_cvtepi32_ps(sum[r][v]) * row_scales[g * rows + r];
        total[r][v] = vf_fma(vf_splat(row_sums[g * rows + r]), offsets, total[r][v]);
        total[r][v] = vf_fma(whole, group.scales, total[r][v]);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++) *(vf *)(c + r * PANEL + (first + v) * 16) = total[r][v];
}

/* sum [rows][vectors] = starts [rows] + two eights of rows in 15 bits times those of a panel. */
INLINE void short_steps(const int rows, const int vectors, const int32_t *words,
                        const uint32_t *panel, const int32_t *starts, __m512i sum[TILE_ROWS][2]) {
  const __m512i lower = _mm512_set1_epi8(15), table = e2m1_table();
  __m512i parts[2][4];
#pragma GCC unroll 2
  for (int s = 0; s < 2; s++)
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++) {
      const __m512i fours = _mm512_loadu_si512(panel + s * PANEL + v * 16);
      const __m512i first = _mm512_and_si512(fours, lower);
      const __m512i second = _mm512_and_si512(_mm512_srli_epi16(fours, 4), lower);
      parts[v][2 * s] = _mm512_shuffle_epi8(table, first);
      parts[v][2 * s + 1] = _mm512_shuffle_epi8(table, second);
    }
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++) {
      const int32_t *of_row = words + 4 * r;
      __m512i both = _mm512_setzero_si512();
#pragma GCC unroll 2
      for (int low = 0; low < 2; low++) {
        if (low)
          both = _mm512_add_epi32(_mm512_slli_epi32(both, 7), _mm512_set1_epi32(starts[r]));
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
          const int32_t word = of_row[i / 2 * 4 * rows + 2 * low + i % 2];
          both = _mm512_dpbusd_epi32(both, parts[v][i], _mm512_set1_epi32(word));
        }
      }
      sum[r][v] = both;
    }
}

/* `grouped_columns` of groups of 16 in e2m1, without what is added to all columns. Totals lie in c,
 * as registers hold the sums of one group and of one block. */
INLINE void short_columns(const int rows, const int vectors, int first, const GroupedRows *x,
                          long row, long n, const uint32_t *panel, const uint8_t *scales, float *c,
                          Prefetch *ahead) {
  const int32_t *words = x->words + 4 * row * eights_of(n);
  const float *row_scales = x->scales + row * short_blocks(x);
  const int32_t *starts = (const int32_t *)x->sums + row * x->groups;
  panel += first * 16, scales += first * 16, c += first * 16;
  for (long b = 0; b < short_blocks(x); b++, row_scales += rows) {
    const long numbers = at_most(n - b * SHORT_BLOCK, SHORT_BLOCK);
    for (long left = eights_of(numbers); left > 0;) {
      const char *asked;
      const long some = take_span(ahead, left, 4 * PANEL, &asked);
      for (long i = 0; asked != NULL && i < 2 * some; i++)
        __builtin_prefetch(asked + 64 * i, 0, 2);
      left -= some;
    }
    vf part[TILE_ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) part[r][0] = part[r][1] = (vf){0};
    for (long from = 0; from < numbers; from += SHORT_GROUP) {
      __m512i sum[TILE_ROWS][2];
      const long eights = SHORT_GROUP / 8;
      short_steps(rows, vectors, words, panel, starts, sum);
#pragma GCC unroll 2
      for (int v = 0; v < vectors; v++) {
        const vf of_group = load_byte_scales(scales + v * 16);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
          part[r][v] = vf_fma((vf)_mm512_cvtepi32_ps(sum[r][v]), of_group, part[r][v]);
      }
      words += 4 * eights * rows, panel += eights * PANEL, starts += rows, scales += PANEL;
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
      for (int v = 0; v < vectors; v++) {
        vf *to = (vf *)(c + r * PANEL + v * 16);
        *to = vf_fma(part[r][v], vf_splat(row_scales[r]), b == 0 ? (vf){0} : *to);
      }
  }
}

/* A few rows go through all columns at once, in the order in which they lie. More rows leave no
 * registers for that. */
#define GROUPED_CASE(N)                                                                            \
  case N: {                                                                                        \
    const int vectors = N <= 4 ? 2 : 1;                                                            \
    for (int v = 0; v < 2; v += vectors) {                                                         \
      if (is_short)                                                                                \
        short_columns(N, vectors, v, x, row, n, panel, of.scales, tile, ahead);                    \
      else                                                                                         \
        grouped_columns(N, vectors, is_e2m1, v, x, row, n, panel, of, bias, tile, ahead);          \
    }                                                                                              \
    break;                                                                                         \
  }

INLINE void grouped_tile_of(const int is_short, const int is_e2m1, int rows, const GroupedRows *x,
                            long row, long n, const uint32_t *panel, PanelScales of, float bias,
                            float *tile, Prefetch *ahead) {
  switch (rows) {
    GROUPED_CASE(1) GROUPED_CASE(2) GROUPED_CASE(3) GROUPED_CASE(4) GROUPED_CASE(5)
    GROUPED_CASE(6) GROUPED_CASE(7) GROUPED_CASE(8) GROUPED_CASE(9) GROUPED_CASE(10)
    GROUPED_CASE(11) GROUPED_CASE(12)
  }
}
#undef GROUPED_CASE

/* tile [rows <= TILE_ROWS][32] = rows from `row` on, which are a tile's, times a panel. */
static void vnni_grouped_tile(int rows, int kind, const GroupedRows *x, long row, long n,
                              const uint32_t *panel, PanelScales of, float *tile,
                              Prefetch *ahead) {
  if (x->group == SHORT_GROUP)
    grouped_tile_of(1, 1, rows, x, row, n, panel, of, 0, tile, ahead);
  else if (kind == FOURS_E2M1)
    grouped_tile_of(0, 1, rows, x, row, n, panel, of, bias_of(kind), tile, ahead);
  else
    grouped_tile_of(0, 0, rows, x, row, n, panel, of, bias_of(kind), tile, ahead);
}
#else
static void round_to_grouped(const bf16 *x, const GroupedRows *to, long rows, long n, long begin,
                             long end) {
  (void)x, (void)to, (void)rows, (void)n, (void)begin, (void)end;
}
static void vnni_grouped_tile(int rows, int kind, const GroupedRows *x, long row, long n,
                              const uint32_t *panel, PanelScales of, float *tile,
                              Prefetch *ahead) {
  (void)rows, (void)kind, (void)x, (void)row, (void)n, (void)panel, (void)of, (void)tile, (void)ahead;
}
#endif

#endif
