/* Weights of 4 or 8 bits whose scales, and offsets if they have any, belong to groups along K. A
 * weight is scale * number + offset. Numbers of 4 bits are 0 to 15; without offsets they are -8 to
 * 7, kept as number + 8, or twice the numbers of MXFP4 (e2m1), which are whole.
 *
 * Numbers of 4 bits lie in a panel [eights along K][2 halves of 16 columns][16 columns][2][4
 * numbers], which are two words of 16 bits a column: number j of word p is at 8 i + 2 j + p of K.
 * So a shift and a table turn them into words of bfloat16, exactly. Numbers of 8 bits lie as in
 * quantised.h.
 *
 * On AMX, rows of bfloat16 are multiplied by weights in bfloat16: scale * number + offset, rounded
 * to nearest, ties away from zero. Rows share a part of a panel that is unpacked once; a single row
 * rounds weights in registers. Both sum in the order of amx.h.
 *
 * Elsewhere rows of bfloat16 are rounded group by group: to 16 bits for weights of 8 bits
 * (quantised.h), and to 8 bits for weights of 4 bits where there is AVX512-VNNI (grouped_vnni.h).
 *
 * All other products are computed here: each group separately in the rows' type, by the kernels of
 * tile.h, and added with its scales in float32. Offsets are multiplied by the rows' sums over the
 * group. */
#ifndef WEFT_GROUPED_H
#define WEFT_GROUPED_H

#include "amx.h"
#include "quantised.h"
#include "rows.h"
#include "team.h"

/* What 4 bits stand for. */
enum { FOURS = 0, FOURS_LESS_8 = 8, FOURS_E2M1 = 16 };

static long groups_along(long n, long group) { return (n + group - 1) / group; }
static long eights_of(long n) { return (n + 7) / 8; }

/* The sums over a row's groups, in a fixed order. */
static void sum_groups(const void *x, int is_bf16, long offset, long n, long group, float *sums) {
  for (long begin = 0, g = 0; begin < n; begin += group, g++) {
    const long end = begin + group < n ? begin + group : n;
    vf sum = {0};
    for (long i = begin; i < end; i += VL) sum += load_some(x, is_bf16, offset + i, at_most(end - i, VL));
    sums[g] = vf_sum(sum);
  }
}

/* The sums over the groups of rows first .. last - 1 of x [rows, n]. */
static void sum_rows(const void *x, int is_bf16, long n, long group, float *sums, long first,
                     long last) {
  for (long row = first; row < last; row++)
    sum_groups(x, is_bf16, row * n, n, group, sums + row * groups_along(n, group));
}

#if VL == 16 && defined(__AVX512BW__)
/* What each 4 bits are in bfloat16; an index is taken modulo 32. */
INLINE __m512i bf16_of_fours(int kind) {
  ALIGNED static const uint16_t e2m1[16] = {
      0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40c0, 0x4100, 0x4140, /* 0 1 2 3 4 6 8 12 */
      0x8000, 0xbf80, 0xc000, 0xc040, 0xc080, 0xc0c0, 0xc100, 0xc140};
  ALIGNED static const uint16_t table[24] = {
      0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, /* -8 to -1 */
      0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, /* 0 to 7 */
      0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170}; /* 8 to 15 */
  const uint16_t *from = kind == FOURS_E2M1 ? e2m1 : table + 8 - kind;
  return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)from));
}
#endif

/* VL of the numbers, each in the lowest 4 bits of a word. */
INLINE vf floats_of_fours(int kind, vi fours) {
  if (kind != FOURS_E2M1) return __builtin_convertvector(fours - kind, vf);
  const vi size = fours & 7, sign = -(fours >> 3); /* Of a sign and two bits of exponent, one of mantissa. */
  const vi whole = (((size > 1) & 2) + (size & 1)) << ((size >> 1) + (size > 1));
  return __builtin_convertvector((whole ^ sign) - sign, vf);
}

/* Words of bfloat16 or float32 of some eights of a panel. `next` as in `unpack_pairs`. */
static void unpack_fours(const int is_bf16, int kind, long eights, const uint32_t *panel,
                         const uint32_t *next, uint32_t *words) {
  for (long i = 0; i < eights; i++, panel += PANEL) {
    if (next != NULL) {
      __builtin_prefetch(next + i * PANEL, 0, 2);
      __builtin_prefetch(next + i * PANEL + PANEL / 2, 0, 2);
    }
#if VL == 16 && defined(__AVX512BW__)
    if (is_bf16) {
      const __m512i table = bf16_of_fours(kind);
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        const __m512i fours = _mm512_loadu_si512(panel + v * 16);
        uint32_t *to = words + 4 * i * PANEL + v * 16;
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++)
          _mm512_storeu_si512(to + j * PANEL,
                              _mm512_permutexvar_epi16(_mm512_srli_epi16(fours, 4 * j), table));
      }
      continue;
    }
#endif
    for (int c = 0; c < PANEL; c += VL) {
      const vu fours = *(const vu *)(panel + c);
      for (int j = 0; j < 4; j++) {
        const vf first = floats_of_fours(kind, (vi)(fours >> (4 * j) & 15u));
        const vf second = floats_of_fours(kind, (vi)(fours >> (4 * j + 16) & 15u));
        const long s = 4 * i + j;
        if (is_bf16) {
          *(vu *)(words + s * PANEL + c) = ((vu)first >> 16) | ((vu)second & 0xffff0000u);
        } else {
          *(vf *)(words + 2 * s * PANEL + c) = first;
          *(vf *)(words + (2 * s + 1) * PANEL + c) = second;
        }
      }
    }
  }
}

/* A group's scales, and its offsets if it has any, of a panel's columns. */
typedef struct {
  vf scales[PANEL / VL], offsets[PANEL / VL];
} GroupScales;

INLINE GroupScales scales_of_group(const void *scales, int size, int has_offsets, float factor,
                                   long at) {
  GroupScales out;
#pragma GCC unroll 8
  for (int v = 0; v < PANEL / VL; v++) {
    out.scales[v] = load_scales(scales, size, at + v * VL) * factor;
    out.offsets[v] = (vf){0};
    if (has_offsets) out.offsets[v] = load_scales(scales, size, at + PANEL + v * VL);
  }
  return out;
}

/* tile[rows][32] (+)= scale * part + offset * sum of the row's group; `sums`: null without offsets. */
INLINE void add_group(const int adds, const int has_offsets, int rows, const float *part,
                      const GroupScales *of, const float *sums, long sums_stride, float *tile) {
  for (int r = 0; r < rows; r++, part += PANEL, tile += PANEL) {
    const vf total = has_offsets ? vf_splat(sums[r * sums_stride]) : (vf){0};
#pragma GCC unroll 8
    for (int v = 0; v < PANEL / VL; v++) {
      vf *to = (vf *)(tile + v * VL);
      vf sum = vf_fma(*(const vf *)(part + v * VL), of->scales[v], adds ? *to : (vf){0});
      if (has_offsets) sum = vf_fma(total, of->offsets[v], sum);
      *to = sum;
    }
  }
}

#if HAS_AMX
/* What each 4 bits are in float32; an index is taken modulo 16. */
INLINE __m512 float_table(int kind) {
  vi fours;
  for (int i = 0; i < VL; i++) fours[i] = i;
  return (__m512)floats_of_fours(kind, fours);
}

/* Weights in float32, rounded so that their upper halves are bfloat16. */
INLINE __m512i near_weights(__m512 numbers, vf scales, vf offsets) {
  const __m512i weights = (__m512i)_mm512_fmadd_ps(numbers, (__m512)scales, (__m512)offsets);
  return _mm512_add_epi32(weights, _mm512_set1_epi32(0x8000));
}

/* `near_weights` of two neighbours along K in 16 columns. `at`: their bytes; the 4 bits of the
 * first begin at bit `shift`, those of the second 16 bits above. Scales of 8 bits are times
 * `word_scale`. */
INLINE void near_pairs(const int bits, __m512 table, const char *at, int shift, vf scales,
                       vf offsets, __m512i *first, __m512i *second) {
  __m512 one, other;
  if (bits == 4) {
    const __m512i fours = _mm512_loadu_si512(at);
    one = _mm512_permutexvar_ps(_mm512_srli_epi32(fours, shift), table);
    other = _mm512_permutexvar_ps(_mm512_srli_epi32(fours, shift + 16), table);
  } else {
    widen_pairs((const int8_t *)at, &one, &other);
  }
  *first = near_weights(one, scales, offsets);
  *second = near_weights(other, scales, offsets);
}

/* Bytes of a pair of all columns, and pairs that are read at once. */
INLINE long bytes_of_pair(const int bits) { return PANEL * bits / 4; }
INLINE int pairs_at_once(const int bits) { return bits == 4 ? 4 : 1; }

/* Words of bfloat16 of some pairs of a panel in one group. `next` as in `unpack_pairs`. */
INLINE void round_pairs(const int bits, int kind, long pairs, const GroupScales *of,
                        const char *panel, const char *next, uint32_t *words) {
  const __m512 table = float_table(kind);
  const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
  const int count = pairs_at_once(bits);
  const long half = bytes_of_pair(bits) * count / 2;
  for (long s = 0; s < pairs; s += count, panel += 2 * half) {
    for (long i = 0; i < 2 * half && next != NULL; i += 64, next += 64)
      __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++)
#pragma GCC unroll 4
      for (int j = 0; j < count; j++) {
        __m512i first, second;
        near_pairs(bits, table, panel + v * half, 4 * j, of->scales[v], of->offsets[v], &first,
                   &second);
        first = _mm512_srli_epi32(first, 16);
        _mm512_storeu_si512(words + (s + j) * PANEL + v * 16,
                            _mm512_ternarylogic_epi32(second, upper, first, 0xea)); /* (a & b) | c */
      }
  }
}

/* sum[2] += numbers of a row, separated by `split_pairs`, times some pairs of a panel, with the bits
 * of the tile product of their words. `of`: the scales of the first eight pairs and of the others.
 * `next` as in `unpack_pairs`. */
INLINE void rounded_step(const int bits, __m512 table, const float *even, const float *odd,
                         int pairs, const GroupScales *of, const char *panel, const char *next,
                         __m512 *sum) {
  const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
  __m512 lower[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()}, higher[2] = {lower[0], lower[0]};
  const int count = pairs_at_once(bits);
  const long half = bytes_of_pair(bits) * count / 2;
#pragma GCC unroll 16
  for (int s = 0; s < pairs; s += count, panel += 2 * half) {
    for (long i = 0; i < 2 * half && next != NULL; i += 64, next += 64)
      __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 4
    for (int j = 0; j < count; j++)
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        __m512i first, second;
        const GroupScales *own = of + (s >= 8);
        near_pairs(bits, table, panel + v * half, 4 * j, own->scales[v], own->offsets[v], &first,
                   &second);
        first = _mm512_and_si512(first, upper), second = _mm512_and_si512(second, upper);
        lower[v] = _mm512_fmadd_ps((__m512)first, _mm512_set1_ps(even[s + j]), lower[v]);
        higher[v] = _mm512_fmadd_ps((__m512)second, _mm512_set1_ps(odd[s + j]), higher[v]);
      }
  }
  for (int v = 0; v < 2; v++) sum[v] = _mm512_add_ps(sum[v], _mm512_add_ps(lower[v], higher[v]));
}
#endif

#endif
