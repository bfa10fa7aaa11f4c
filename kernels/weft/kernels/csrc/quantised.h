/* Weights in int8, with scales for each column of the product or for groups of it along K; and the
 * products with them.
 *
 * A panel is [pairs along K][32 columns][2] int8: the numbers of tile.h's bfloat16 words, in half the
 * bytes. There are two ways to multiply; an operation always takes the same for all of its rows.
 *
 * Integers: each row of bfloat16 is rounded once to 16 bits, with one scale for a group or, where
 * there are no groups, for 64 neighbours. That is far finer than bfloat16 itself unless they differ
 * by more than a hundred times, and then still 256 times finer than 8 bits. Products of 16 by 8 bits
 * are summed exactly within such a block.
 *
 * Unpacked: a part of a panel becomes words of the rows' type, which holds int8 exactly, for the
 * kernels of tile.h and amx.h. So float32 loses nothing, and AMX keeps its speed. */
#ifndef WEFT_QUANTISED_H
#define WEFT_QUANTISED_H

#include <float.h>

#include "amx.h"
#include "rows.h"
#include "team.h"

#define COLUMN_BLOCK 64 /* numbers of a row with one scale, where weights have one a column */
#define LARGEST_GROUP 256
#define UNPACK_PAIRS 144 /* of a panel at a time, at most: 18 KiB of bfloat16 or 36 of float32 */

/* Whether an instruction adds four products of bytes to a word. */
#if VL == 16 && defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define HAS_VNNI 1
#else
#define HAS_VNNI 0
#endif

typedef int16_t vs __attribute__((vector_size(4 * VL), aligned(2), may_alias));
typedef int8_t vb __attribute__((vector_size(2 * VL), aligned(1), may_alias));

#if HAS_VNNI
/* The rows of the tile that one of all rows belongs to. */
typedef struct {
  long first, count;
} TileRows;

static TileRows tile_with(long rows, long row) {
  long tile = row * tiles_of(rows) / rows;
  while (tile_begin(rows, tile + 1) <= row) tile++;
  const long first = tile_begin(rows, tile);
  return (TileRows){first, tile_begin(rows, tile + 1) - first};
}
#endif

/* Whether rows are multiplied as integers. */
INLINE int uses_integers(const int is_bf16) { return is_bf16 && !uses_amx(is_bf16); }

/* Rounds n weights from `offset` on to int8; returns their scale, which is NaN if one is not finite.
 * Numbers that are nearly as small as floats can be become zeros. */
static float round_weights(const void *x, int is_bf16, long offset, long n, int8_t *out) {
  const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
  vi highest = {0};
  for (long i = 0; i < n; i += VL) {
    const vi bits = (vi)load_some(x, is_bf16, offset + i, at_most(n - i, VL)) & 0x7fffffff;
    const vi is_higher = bits > highest;
    highest = (is_higher & bits) | (~is_higher & highest);
  }
  union { int32_t bits; float value; } largest = {0};
  for (int i = 0; i < VL; i++) largest.bits = highest[i] > largest.bits ? highest[i] : largest.bits;
  const float scale = largest.value <= FLT_MAX ? largest.value / 127.0f : NAN;
  const float factor = scale > FLT_MIN ? 1.0f / scale : 0.0f;
  for (long i = 0; i < n; i += VL) {
    const int some = at_most(n - i, VL);
    const vf value = load_some(x, is_bf16, offset + i, some) * factor + shift;
    const vi whole = (vi)value - (vi)vf_splat(shift);
    for (int j = 0; j < some; j++) out[i + j] = (int8_t)whole[j];
  }
  return scale;
}

/* Rows in 16 bits: words of two neighbours, and scales of blocks. */
typedef struct {
  uint32_t *words; /* [rows, stride], zeros after the last number */
  float *scales;   /* [rows, blocks] */
  float *sums;     /* [rows, blocks], of the rounded numbers with their scales */
  long stride, blocks, block; /* numbers of a block: at most LARGEST_GROUP */
} Integers;

static long blocks_of_row(long n, long block) { return (n + block - 1) / block; }

/* Bytes of memory for `rows` rows of n numbers. */
static long integers_bytes(long rows, long n, long block) {
  return rows * blocks_of_row(n, block) * (block * 2 + 8) + 64;
}

/* Lays such rows out in memory of `integers_bytes`. */
static Integers integers_in(void *memory, long rows, long n, long block) {
  Integers x = {.blocks = blocks_of_row(n, block), .block = block};
  x.stride = x.blocks * (block / 2);
  x.words = (uint32_t *)(((uintptr_t)memory + 63) & ~(uintptr_t)63);
  x.scales = (float *)(x.words + rows * x.stride);
  x.sums = x.scales + rows * x.blocks;
  return x;
}

/* `block` numbers of bfloat16, of which `left` > 0 exist. What is not finite makes the scale NaN. */
INLINE void round_block(const bf16 *x, long left, const long block, uint32_t *words, float *scale,
                        float *total) {
  const float most = 32767.0f, shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
  vf values[LARGEST_GROUP / VL];
  vi highest = {0};
  for (int i = 0; i < block / VL; i++) {
    const long rest = left - i * VL;
    values[i] = rest > 0 ? load_some(x, 1, i * VL, at_most(rest, VL)) : (vf){0};
    const vi bits = (vi)values[i] & 0x7fffffff; /* of magnitudes: ordered as these are */
    const vi is_higher = bits > highest;
    highest = (is_higher & bits) | (~is_higher & highest);
  }
  union { int32_t bits; float value; } largest = {0};
  for (int i = 0; i < VL; i++) largest.bits = highest[i] > largest.bits ? highest[i] : largest.bits;
  const int is_finite = largest.value <= FLT_MAX, is_small = largest.value < FLT_MIN * most;
  const float factor = is_finite && !is_small ? most / largest.value : 0;
  vf sum = {0};
  for (int i = 0; i < block / VL; i++) {
    const vf rounded = vf_fma(values[i], vf_splat(factor), vf_splat(shift));
    sum += rounded - vf_splat(shift);
    *(vh *)((uint16_t *)words + i * VL) =
        __builtin_convertvector(is_finite ? (vu)rounded : (vu){0}, vh);
  }
  *scale = !is_finite ? NAN : is_small ? 0 : largest.value / most;
  *total = *scale * vf_sum(sum);
}

/* Rounds rows first .. last - 1 of x [rows, n]. */
static void round_to_integers(const bf16 *x, const Integers *to, long n, long first, long last) {
  for (long row = first; row < last; row++)
    for (long block = 0; block < to->blocks; block++) {
      const long from = block * to->block, at = row * to->blocks + block;
      const bf16 *begin = x + row * n + from;
      uint32_t *words = to->words + row * to->stride + from / 2;
      if (to->block == COLUMN_BLOCK)
        round_block(begin, n - from, COLUMN_BLOCK, words, to->scales + at, to->sums + at);
      else
        round_block(begin, n - from, to->block, words, to->scales + at, to->sums + at);
    }
}

/* VL scales of NVFP4: a byte has 5 bits of exponent, with a bias of 18, and 3 of mantissa, which a
 * float has in other places. 0 is no special case, since its numbers are 0. */
INLINE vf load_byte_scales(const uint8_t *scales) {
  vi bytes;
#if VL == 16
  bytes = (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)scales));
#else
  for (int i = 0; i < VL; i++) bytes[i] = scales[i];
#endif
  return (vf)((bytes << 20) + ((127 - 18) << 23));
}

/* VL scales or offsets of `size` bytes each: float32, float16, or 1 for those of NVFP4. */
INLINE vf load_scales(const void *scales, int size, long at) {
  if (size == 4) return *(const vf *)((const float *)scales + at);
  if (size == 1) return load_byte_scales((const uint8_t *)scales + at);
#if VL == 16
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)((const uint16_t *)scales + at)));
#elif VL == 8 && defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((const uint16_t *)scales + at)));
#else
  vf out;
  for (int i = 0; i < VL; i++) { /* float16 in a float's place, times 2^112: the same */
    const uint32_t half = ((const uint16_t *)scales)[at + i];
    union { uint32_t bits; float value; } u = {.bits = (half & 0x7fff) << 13};
    u.value *= 0x1p112f;
    u.bits |= (half & 0x8000) << 16;
    out[i] = u.value;
  }
  return out;
#endif
}

/* Scales, and offsets if there are any, of a panel in groups: [groups][1 or 2][32]. */
typedef struct {
  const void *scales; /* null: no groups */
  int size, has_offsets; /* `size`: bytes of a scale, as `load_scales` takes it */
} PanelScales;

/* The scales and offsets of one group and VL columns; offsets are 0 where there are none. */
typedef struct {
  vf scales, offsets;
} GroupScale;

INLINE GroupScale group_scale(PanelScales of, long group, long column) {
  const long at = group * (of.has_offsets ? 2 : 1) * PANEL + column;
  GroupScale out = {load_scales(of.scales, of.size, at), {0}};
  if (of.has_offsets) out.offsets = load_scales(of.scales, of.size, at + PANEL);
  return out;
}

/* Pairs of int8 of VL columns. */
INLINE vs load_pairs(const int8_t *p) {
#if VL == 16 && defined(__AVX512BW__)
  return (vs)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p));
#elif VL == 8 && defined(__AVX2__)
  return (vs)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
#else
  return __builtin_convertvector(*(const vb *)p, vs);
#endif
}

/* sum += a * b, one pair a lane. */
INLINE vi add_pairs(vi sum, vu a, vs b) {
#if VL == 16 && defined(__AVX512VNNI__)
  return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif VL == 16 && defined(__AVX512BW__)
  return sum + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif VL == 8 && defined(__AVX2__)
  return sum + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  const vi first = (vi)(a << 16) >> 16, second = (vi)a >> 16;
  return sum + first * ((vi)((vu)b << 16) >> 16) + second * ((vi)b >> 16);
#endif
}

/* c[rows][some columns, from `first` on] = a row block times a panel. Scales of groups
 * (`of.scales`) are applied, scales of columns are not. */
INLINE void integer_columns(const int rows, const int vectors, const int is_grouped, int first,
                            const Integers *x, long row, long pairs, const int8_t *panel,
                            PanelScales of, float *c, Prefetch *ahead) {
  const uint32_t *words = x->words + row * x->stride;
  const long block_pairs = is_grouped ? x->block / 2 : COLUMN_BLOCK / 2;
  panel += 2 * first, c += first;
  for (long block = 0; block * block_pairs < pairs; block++) {
    const long begin = block * block_pairs, end = begin + at_most(pairs - begin, (int)block_pairs);
    vi sum[TILE_ROWS][PANEL / VL];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
      for (int v = 0; v < vectors; v++) sum[r][v] = (vi){0};
    for (long s = begin; s < end; s++) {
      if (s % 8 == 0) ask_ahead(ahead, 8);
      vs column[PANEL / VL];
#pragma GCC unroll 8
      for (int v = 0; v < vectors; v++) column[v] = load_pairs(panel + 2 * (s * PANEL + v * VL));
#pragma GCC unroll 12
      for (int r = 0; r < rows; r++) {
        const vu word = (vu){0} + words[r * x->stride + s];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) sum[r][v] = add_pairs(sum[r][v], word, column[v]);
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) {
      GroupScale group = {{0}, {0}};
      if (is_grouped) group = group_scale(of, block, first + v * VL);
#pragma GCC unroll 12
      for (int r = 0; r < rows; r++) {
        const long at = (row + r) * x->blocks + block;
        vf *to = (vf *)(c + r * PANEL + v * VL);
        vf before = block == 0 ? (vf){0} : *to;
        vf scale = vf_splat(x->scales[at]);
        if (is_grouped) {
          scale *= group.scales;
          if (of.has_offsets) before = vf_fma(vf_splat(x->sums[at]), group.offsets, before);
        }
        *to = vf_fma(__builtin_convertvector(sum[r][v], vf), scale, before);
      }
    }
  }
}

#define INTEGER_CASE(N)                                                                        \
  case N: {                                                                                    \
    const int vectors = N <= 2 ? FEW_ROW_VECTORS : TILE_VECTORS;                               \
    for (int v = 0; v < PANEL; v += vectors * VL)                                              \
      integer_columns(N, vectors, is_grouped, v, x, row, pairs, panel, of, c, ahead);          \
    break;                                                                                     \
  }

INLINE void integer_tile_of(const int is_grouped, int rows, const Integers *x, long row, long pairs,
                            const int8_t *panel, PanelScales of, float *c, Prefetch *ahead) {
  switch (rows) {
    INTEGER_CASE(1) INTEGER_CASE(2) INTEGER_CASE(3) INTEGER_CASE(4)
#if TILE_ROWS >= 6
    INTEGER_CASE(5) INTEGER_CASE(6)
#endif
#if TILE_ROWS == 12
    INTEGER_CASE(7) INTEGER_CASE(8) INTEGER_CASE(9) INTEGER_CASE(10) INTEGER_CASE(11)
    INTEGER_CASE(12)
#endif
  }
}
#undef INTEGER_CASE

/* c[rows <= TILE_ROWS][32] = rows from `row` on times a panel, as `integer_columns`. */
static void integer_tile(int rows, const Integers *x, long row, long pairs, const int8_t *panel,
                         PanelScales of, float *c, Prefetch *ahead) {
  if (of.scales == NULL)
    integer_tile_of(0, rows, x, row, pairs, panel, of, c, ahead);
  else
    integer_tile_of(1, rows, x, row, pairs, panel, of, c, ahead);
}

#if HAS_AMX
/* The numbers of 16 columns' pairs, times 65,536: then neither needs a second shift. */
INLINE void widen_pairs(const int8_t *pairs, __m512 *first, __m512 *second) {
  const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
  const __m512i both = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)pairs));
  *first = _mm512_cvtepi32_ps(_mm512_slli_epi32(both, 16));
  *second = _mm512_cvtepi32_ps(_mm512_and_si512(both, upper));
}

/* part[32] = a row of n numbers times an int8 panel, over `word_scale`, with the bits of the tile
 * product of its words. `next`: the panel to prefetch meanwhile, or null. */
static void amx_int8_row(const bf16 *a, long n, const int8_t *panel, const int8_t *next,
                         float *part) {
  __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  for (long at = 0; at < n; at += 2 * AMX_DEPTH) {
    ALIGNED float even[AMX_DEPTH], odd[AMX_DEPTH];
    const int words = split_pairs(a + at, n - at, even, odd);
    __m512 lower[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()}, higher[2] = {lower[0], lower[0]};
    for (int i = 0; i < words; i++, panel += 2 * PANEL) {
      if (next != NULL) {
        __builtin_prefetch(next, 0, 2);
        next += 2 * PANEL;
      }
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        __m512 first, second;
        widen_pairs(panel + v * PANEL, &first, &second);
        lower[v] = _mm512_fmadd_ps(first, _mm512_set1_ps(even[i]), lower[v]);
        higher[v] = _mm512_fmadd_ps(second, _mm512_set1_ps(odd[i]), higher[v]);
      }
    }
    for (int v = 0; v < 2; v++) sum[v] = _mm512_add_ps(sum[v], _mm512_add_ps(lower[v], higher[v]));
  }
  for (int v = 0; v < 2; v++) _mm512_storeu_ps(part + v * 16, sum[v]);
}
#endif

/* Factor on products with unpacked words. */
INLINE float word_scale(int is_bf16) { return uses_amx(is_bf16) ? 0x1p-16f : 1.0f; }

/* Words of bfloat16 or float32 of some pairs of a panel, over `word_scale`. `next`: the panel to
 * prefetch meanwhile, or null. */
static void unpack_pairs(const int is_bf16, long pairs, const int8_t *panel, const int8_t *next,
                         uint32_t *words) {
#if HAS_AMX
  if (uses_amx(is_bf16)) {
    for (long s = 0; s < 2 * pairs; s++) {
      __m512 first, second;
      if (s % 2 == 0 && next != NULL) __builtin_prefetch(next + s * 32, 0, 2);
      widen_pairs(panel + s * 32, &first, &second);
      const __m512i lower = _mm512_srli_epi32((__m512i)first, 16);
      _mm512_storeu_si512(words + s * 16, _mm512_or_si512(lower, (__m512i)second));
    }
    return;
  }
#endif
  for (long s = 0; s < pairs; s++)
    for (int c = 0; c < PANEL; c += VL) {
      const vu both = __builtin_convertvector(*(const vh *)(panel + 2 * (s * PANEL + c)), vu);
      const vf first = __builtin_convertvector((vi)(both << 24) >> 24, vf);
      const vf second = __builtin_convertvector((vi)(both << 16) >> 24, vf);
      if (is_bf16) {
        *(vu *)(words + s * PANEL + c) = ((vu)first >> 16) | ((vu)second & 0xffff0000u);
      } else {
        *(vf *)(words + 2 * s * PANEL + c) = first;
        *(vf *)(words + (2 * s + 1) * PANEL + c) = second;
      }
    }
}

/* tile[rows][32] *= factor * the scales of a panel's columns. */
static void scale_tile(const float *scales, float factor, int rows, float *tile) {
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < PANEL; c += VL) {
      vf *at = (vf *)(tile + r * PANEL + c);
      *at = *at * factor * *(const vf *)(scales + c);
    }
}

#endif
