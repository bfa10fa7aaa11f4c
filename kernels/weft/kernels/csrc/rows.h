/* Operations on single rows: normalisation, activation, rotation with the write to the pages. */
#ifndef WEFT_ROWS_H
#define WEFT_ROWS_H

#include "simd.h"
#include "team.h"

/* A thread's rows of n: first .. last - 1. */
typedef struct {
  long first, last;
} Rows;

static Rows rows_of(const Member *me, long n) {
  return (Rows){n * me->thread / me->threads, n * (me->thread + 1) / me->threads};
}

/* 1 / sqrt(mean square + eps) of x[offset .. offset + n). */
INLINE float inverse_rms(const int is_bf16, const void *x, long offset, long n, float eps) {
  vf total = {0};
  for (long i = 0; i < n; i += VL) {
    vf value = load_some(x, is_bf16, offset + i, at_most(n - i, VL));
    total = vf_fma(value, value, total);
  }
  return 1.0f / sqrtf(vf_sum(total) / (float)n + eps);
}

/* out = norm(x) * weight, which is of x's type unless it `is_fine`: float32; with `residual`,
 * residual += x first and its rounded value counts. */
INLINE void norm_row(const int is_bf16, const int is_fine, void *out, const void *x, void *residual,
                     const void *weight, long row, long n, float eps) {
  const int of_weight = is_bf16 && !is_fine;
  const void *source = x;
  if (residual != NULL) {
    for (long i = 0; i < n; i += VL) {
      int some = at_most(n - i, VL);
      vf sum = load_some(x, is_bf16, row * n + i, some) +
               load_some(residual, is_bf16, row * n + i, some);
      store_some(residual, is_bf16, row * n + i, some, sum);
    }
    source = residual;
  }
  float scale = inverse_rms(is_bf16, source, row * n, n, eps);
  for (long i = 0; i < n; i += VL) {
    int some = at_most(n - i, VL);
    vf value = load_some(source, is_bf16, row * n + i, some) * scale;
    store_some(out, is_bf16, row * n + i, some, value * load_some(weight, of_weight, i, some));
  }
}

static void norm_share(int is_bf16, int is_fine, void *out, const void *x, void *residual,
                       const void *weight, long rows, long n, float eps, const Member *me) {
  Rows mine = rows_of(me, rows);
  for (long row = mine.first; row < mine.last; row++)
    if (is_bf16 && is_fine)
      norm_row(1, 1, out, x, residual, weight, row, n, eps);
    else if (is_bf16)
      norm_row(1, 0, out, x, residual, weight, row, n, eps);
    else
      norm_row(0, 0, out, x, residual, weight, row, n, eps);
}

/* out [rows, n] = silu(x[:, :n]) * x[:, n:] */
static void silu_share(int is_bf16, void *out, const void *x, long rows, long n,
                       const Member *me) {
  Rows mine = rows_of(me, rows);
  for (long row = mine.first; row < mine.last; row++)
    for (long i = 0; i < n; i += VL) {
      int some = at_most(n - i, VL);
      vf gate = load_some(x, is_bf16, row * 2 * n + i, some);
      vf up = load_some(x, is_bf16, row * 2 * n + n + i, some);
      store_some(out, is_bf16, row * n + i, some, vf_silu(gate) * up);
    }
}

#define MAX_DIM 256 /* elements of a head in attention, and where pages are in 8 bits */
#define SCALE_BYTES 4 /* of a vector in 8 bits */
#define FP8_MOST 448.0f
#define INT8_MOST 127.0f

/* As rows are, or page_size vectors of numbers of 8 bits and then their scales
 * (weft/kernels/ops/pages/scaled_kv.py). */
typedef enum { KEPT_AS_ROWS, KEPT_IN_FP8, KEPT_IN_INT8 } Kept;

/* The pages of one layer; declared from this text in weft/kernels/shared/cpu.py. */
typedef struct {
  void *data; /* [pages, kv_heads, layers, 2, page_size, dim], contiguous within a page */
  int64_t pages;
  int64_t page_stride; /* Elements from one page to the next; in 8 bits bytes. */
  int64_t kv_heads;
  int64_t layers;
  int64_t page_size;
  int64_t dim;
  int32_t is_bf16; /* type of rows outside of the pages, and of pages kept as rows */
  int32_t kept; /* a Kept: how vectors are kept */
} Pool;

/* Bytes of a vector, without its scale. */
INLINE long vector_bytes(const Pool *pool) {
  return pool->kept ? pool->dim : pool->dim * (pool->is_bf16 ? 2 : 4);
}

/* Bytes of K of a page's positions, which those of V follow, for one head and layer. */
INLINE long part_bytes(const Pool *pool) {
  return pool->page_size * (vector_bytes(pool) + (pool->kept ? SCALE_BYTES : 0));
}

/* K (part 0) or V (part 1) of the first position of a page. */
INLINE char *part_at(const Pool *pool, long layer, long page, long head, long part) {
  const long of_page = pool->page_stride * (vector_bytes(pool) / pool->dim);
  return (char *)pool->data + page * of_page +
         ((head * pool->layers + layer) * 2 + part) * part_bytes(pool);
}

/* Where a part has the scale of a vector in 8 bits. */
INLINE float *scale_in(const Pool *pool, char *part, long offset) {
  return (float *)(part + pool->page_size * pool->dim) + offset;
}

/* Numbers in FP8 (e4m3), not beyond its largest, in the low bits of each element. */
INLINE vu vf_to_fp8(vf x) {
  const vu sign = (vu)x >> 24 & 0x80;
  const vf size = (vf)((vu)x & 0x7fffffff);
  const vf most = vf_select((vi)(size > FP8_MOST), vf_splat(FP8_MOST), size);
  const vu rounded = ((vu)most + 0x7ffff + ((vu)most >> 20 & 1)) >> 20;
  /* Below 2^-6 numbers are 2^-9 apart, as those from 2^14 on are in float32. */
  const vu small = (vu)(most + 16384.0f) & 0xff;
  const vi is_small = (vi)(most < 0.015625f);
  return (((vu)is_small & small) | (~(vu)is_small & (rounded - (120 << 3)))) | sign;
}

INLINE vf vf_from_fp8(vu x) {
  const vu size = x & 0x7f, sign = (x & 0x80) << 24;
  const vf small = __builtin_convertvector((vi)size, vf) * 0.001953125f; /* 2^-9 */
  const vf wide = vf_select((vi)(size < 8), small, (vf)((size << 20) + (120 << 23)));
  return (vf)((vu)wide | sign);
}

/* Nearest integers, ties to even, as bytes in the low bits of each element. */
INLINE vu vf_to_int8(vf x) {
  const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
  return (vu)(x + shift) & 0xff;
}

/* A vector of n elements, a multiple of 16, in 8 bits: its largest magnitude becomes the format's. */
INLINE void round_to_8_bits(const int kept, const int is_bf16, const void *x, long from, long n,
                            char *out, float *scale) {
  vf most = {0}, none = {0};
  for (long i = 0; i < n; i += VL) {
    const vf value = load_some(x, is_bf16, from + i, VL);
    most = vf_max(vf_max(value, -value), most);
    none += value - value; /* NaN where there is no finite number */
  }
  *scale = vf_highest(most) / (kept == KEPT_IN_FP8 ? FP8_MOST : INT8_MOST) + vf_sum(none);
  const float inverse = *scale > 1.17549435e-38f ? 1 / *scale : 0;
  for (long i = 0; i < n; i += VL) {
    const vf scaled = load_some(x, is_bf16, from + i, VL) * inverse;
    const vu rounded = kept == KEPT_IN_FP8 ? vf_to_fp8(scaled) : vf_to_int8(scaled);
    *(vbyte *)(out + i) = __builtin_convertvector(rounded, vbyte);
  }
}

/* The n elements of a vector in 8 bits as floats, without their scale: exact in either type. */
INLINE void widen_8_bits(const int kept, const int is_bf16, const char *x, long n, void *out) {
  for (long i = 0; i < n; i += VL) {
    const vu number = __builtin_convertvector(*(const vbyte *)(x + i), vu);
    const vf integer = __builtin_convertvector((vi)(number << 24) >> 24, vf);
    store_some(out, is_bf16, i, VL, kept == KEPT_IN_FP8 ? vf_from_fp8(number) : integer);
  }
}

typedef enum { FINE, OUT_OF_MEMORY, BAD_LENGTHS, BAD_PAGE, BAD_POSITION, BAD_SLOT, BAD_LORA, BAD_EXPERT, BAD_TOKEN } Status;

typedef struct {
  const void *qkv; /* [rows, (heads + 2 * kv_heads) * dim] */
  const int64_t *positions;
  const int64_t *slots;
  const float *cos_sin; /* [max_positions, dim] */
  const void *q_norm, *k_norm; /* [dim] or null */
  void *q_out; /* [rows, heads, dim] */
  int64_t max_positions;
  int64_t rows;
  int64_t heads;
  float eps;
  int64_t adjacent; /* number of last pairs whose elements are adjacent */
  int32_t has_fine_norms; /* their weights are float32 whatever the rows are */
} Rope;

/* Whether all that is read and written exists. */
static Status check_rope(const Rope *rope, const Pool *pool) {
  int bad_position = 0, bad_slot = 0;
  for (long row = 0; row < rope->rows; row++) {
    bad_position |= (uint64_t)rope->positions[row] >= (uint64_t)rope->max_positions;
    bad_slot |= (uint64_t)rope->slots[row] >= (uint64_t)(pool->pages * pool->page_size);
  }
  return bad_position ? BAD_POSITION : bad_slot ? BAD_SLOT : FINE;
}

/* Normalises (norm not null) and rotates one head. */
INLINE void rotate_head(const int is_bf16, const void *x, long from, void *out, long to,
                        const float *cos_sin, const void *norm, int norm_is_bf16, float eps,
                        long dim, long adjacent) {
  const long pairs = dim / 2, half = pairs - adjacent;
  float scale = norm == NULL ? 1.0f : inverse_rms(is_bf16, x, from, dim, eps);
  for (long i = half; i < pairs; i++) {
    float low = load_one(x, is_bf16, from + 2 * i), high = load_one(x, is_bf16, from + 2 * i + 1);
    if (norm != NULL) {
      low *= scale * load_one(norm, norm_is_bf16, 2 * i);
      high *= scale * load_one(norm, norm_is_bf16, 2 * i + 1);
    }
    store_one(out, is_bf16, to + 2 * i, low * cos_sin[i] - high * cos_sin[pairs + i]);
    store_one(out, is_bf16, to + 2 * i + 1, high * cos_sin[i] + low * cos_sin[pairs + i]);
  }
  for (long i = 0; i < half; i += VL) {
    int n = at_most(half - i, VL);
    vf low = load_some(x, is_bf16, from + i, n), high = load_some(x, is_bf16, from + half + i, n);
    vf cosine = load_some(cos_sin, 0, i, n), sine = load_some(cos_sin, 0, pairs + i, n);
    if (norm != NULL) {
      low = low * scale * load_some(norm, norm_is_bf16, i, n);
      high = high * scale * load_some(norm, norm_is_bf16, half + i, n);
    }
    store_some(out, is_bf16, to + i, n, vf_fma(low, cosine, -(high * sine)));
    store_some(out, is_bf16, to + half + i, n, vf_fma(high, cosine, low * sine));
  }
}

INLINE void rope_row(const int is_bf16, const Rope *rope, const Pool *pool, long layer, long row) {
  long dim = pool->dim, size = is_bf16 ? 2 : 4;
  const int of_norms = is_bf16 && !rope->has_fine_norms;
  long heads = rope->heads, kv_heads = pool->kv_heads;
  const float *cos_sin = rope->cos_sin + rope->positions[row] * dim;
  long page = rope->slots[row] / pool->page_size, offset = rope->slots[row] % pool->page_size;
  long from = row * (heads + 2 * kv_heads) * dim;
  for (long h = 0; h < heads; h++)
    rotate_head(is_bf16, rope->qkv, from + h * dim, rope->q_out, (row * heads + h) * dim, cos_sin,
                rope->q_norm, of_norms, rope->eps, dim, rope->adjacent);
  for (long h = 0; h < kv_heads; h++) {
    const long k = from + (heads + h) * dim, v = k + kv_heads * dim;
    char *keys = part_at(pool, layer, page, h, 0), *values = part_at(pool, layer, page, h, 1);
    if (pool->kept) {
      ALIGNED float turned[MAX_DIM];
      rotate_head(is_bf16, rope->qkv, k, turned, 0, cos_sin, rope->k_norm, of_norms, rope->eps, dim,
                  rope->adjacent);
      round_to_8_bits(pool->kept, is_bf16, turned, 0, dim, keys + offset * dim,
                      scale_in(pool, keys, offset));
      round_to_8_bits(pool->kept, is_bf16, rope->qkv, v, dim, values + offset * dim,
                      scale_in(pool, values, offset));
      continue;
    }
    rotate_head(is_bf16, rope->qkv, k, keys, offset * dim, cos_sin, rope->k_norm, of_norms,
                rope->eps, dim, rope->adjacent);
    memcpy(values + offset * dim * size, (const char *)rope->qkv + v * size, (size_t)(dim * size));
  }
}

static void rope_share(const Rope *rope, const Pool *pool, long layer, const Member *me) {
  Rows mine = rows_of(me, rope->rows);
  for (long row = mine.first; row < mine.last; row++)
    if (pool->is_bf16)
      rope_row(1, rope, pool, layer, row);
    else
      rope_row(0, rope, pool, layer, row);
}

#endif
