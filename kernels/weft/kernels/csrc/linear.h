/* Linear layers over packed weights: [panel of 32 columns][steps along K][32 words]. */
#ifndef WEFT_LINEAR_H
#define WEFT_LINEAR_H

#include "amx.h"
#include "grouped.h"
#include "grouped_vnni.h"
#include "lora_amx.h"
#include "quantised.h"
#include "rotated.h"
#include "team.h"
#include "tile.h"

#define GATE 16 /* columns of gate at the head of a gated panel; as many of up follow */
#define GROUP_BLOCKS 8 /* tiles of a panel in one unit of work */

/* Declared from this text in weft/kernels/shared/cpu.py. */
typedef struct {
  const uint32_t *panels;
  /* [panels * 32] in panel order: scales of int8 panels, or factors of a product of groups; null:
   * words of floats, or groups without factors. */
  const float *scales;
  const float *bias; /* [panels * 32] in panel order, or null */
  int64_t out_features;
  int64_t in_features;
  int32_t is_bf16;
  int32_t gated; /* panels alternate 16 columns of gate and of up, which `gated_values` combines */
  float alpha, limit, offset; /* 1, infinity and 0: silu(gate) * up */
  float gate_limit, cubic; /* infinity and 0 */
  int32_t group; /* numbers along K with a scale of their own, 16 or a multiple of 32; 0: no groups */
  int32_t bits;  /* of numbers in groups: 4 or 8 */
  /* Of groups: [panels][groups][scales, or scales and offsets][32]. */
  const void *group_scales;
  int32_t has_offsets;
  int32_t scale_size; /* of `group_scales`, as `load_scales` takes it */
  int32_t is_e2m1; /* of 4 bits, without offsets */
  int32_t is_rotated; /* int8 as in rotated.h; in_features is a multiple of 64 */
  /* [in_features]: the column of x for each of the weight's, which lie in groups; null: the same. */
  const int32_t *order;
} Weight;

/* Whether a weight is int8 with a scale for each column, not rotated. */
static int is_int8(const Weight *w) {
  return w->scales != NULL && w->group == 0 && !w->is_rotated;
}

/* Rows from which on the next panel is prefetched. With few rows the memory is the limit: there an
 * EPYC's own prefetcher does better alone (below 3 rows with AVX2 alone), while a Xeon's leaves a
 * third of the memory's speed unused (bench/notes/cpu-products.md). */
static int prefetch_from(void) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (__builtin_cpu_is("intel")) return 1;
#endif
  return VL == 8 ? 3 : 8;
}

static long words_of(const Weight *w) {
  return w->is_bf16 ? (w->in_features + 1) / 2 : w->in_features;
}
static int kind_of_fours(const Weight *w) {
  if (w->is_e2m1) return FOURS_E2M1;
  return w->has_offsets ? FOURS : FOURS_LESS_8;
}
static long pairs_of(const Weight *w) { return (w->in_features + 1) / 2; }
/* Words of 32 bits of one panel. */
static long panel_words(const Weight *w) {
  if (w->group > 0 && w->bits == 4) return eights_of(w->in_features) * PANEL;
  if (w->group > 0) return pairs_of(w) * (PANEL / 2);
  return w->scales == NULL ? words_of(w) * PANEL : pairs_of(w) * (PANEL / 2);
}
static long columns_of(const Weight *w) { return w->gated ? w->out_features / 2 : w->out_features; }
static long panels_of(const Weight *w) {
  long per_panel = w->gated ? GATE : PANEL;
  return (columns_of(w) + per_panel - 1) / per_panel;
}

/* Column of the original weight that is column c of panel p; -1 for padding. */
static long source_column(const Weight *w, long p, long c) {
  long columns = columns_of(w);
  if (!w->gated) return p * PANEL + c < columns ? p * PANEL + c : -1;
  long column = p * GATE + c % GATE;
  if (column >= columns) return -1;
  return c < GATE ? column : columns + column;
}

#define PACKED_WORDS 16 /* of every column at a time, so that writes stay in the nearest cache */

/* The columns of panel p, each `stride` bytes after the one before; null: padding. */
static void columns_of_panel(const Weight *w, const void *plain, long stride, long p,
                             const char *columns[PANEL]) {
  for (long c = 0; c < PANEL; c++) {
    const long column = source_column(w, p, c);
    columns[c] = column < 0 ? NULL : (const char *)plain + column * stride;
  }
}

/* out [count][PANEL] = words from .. from + count - 1 of the columns, at most PACKED_WORDS; columns
 * of padding get the words of `padding`. */
static void transpose_columns(const char *const *columns, const uint32_t *padding, long from,
                              long count, uint32_t *out) {
  for (long first = 0; first < PANEL; first += 16) {
    const char *rows[16];
    for (long i = 0; i < 16; i++) {
      const char *column = columns[first + i];
      rows[i] = column == NULL ? (const char *)padding : column + 4 * from;
    }
    transpose_words(rows, count, out + first, PANEL);
  }
}

static const uint32_t zero_words[PACKED_WORDS];

static void pack_panel(const Weight *w, const void *plain, uint32_t *packed, long p) {
  const long words = words_of(w), whole = w->is_bf16 ? w->in_features / 2 : words;
  uint32_t *panel = packed + p * words * PANEL;
  const char *columns[PANEL];
  columns_of_panel(w, plain, w->in_features * (w->is_bf16 ? 2 : 4), p, columns);
  for (long from = 0; from < whole; from += PACKED_WORDS)
    transpose_columns(columns, zero_words, from, at_most(whole - from, PACKED_WORDS),
                      panel + from * PANEL);
  if (whole == words) return;
  for (long c = 0; c < PANEL; c++) { /* The last element has no second half beside it. */
    bf16 last = 0;
    if (columns[c] != NULL) memcpy(&last, columns[c] + 4 * whole, sizeof last);
    panel[whole * PANEL + c] = last;
  }
}

/* Packs panel p of rotated int8 [out_features, in_features]. */
static void pack_rotated_panel(const Weight *w, const void *plain, uint32_t *packed, long p) {
  const long words = w->in_features / 4;
  const char *columns[PANEL];
  columns_of_panel(w, plain, w->in_features, p, columns);
  for (long from = 0; from < words; from += PACKED_WORDS)
    transpose_columns(columns, zero_words, from, PACKED_WORDS,
                      packed + p * panel_words(w) + from * PANEL);
}

/* Packs panel p of int8 [out_features, in_features], in pairs. */
static void pack_int8_panel(const Weight *w, const void *plain, void *packed, long p) {
  const long n = w->in_features, whole = n / 4; /* words of two pairs */
  uint16_t *panel = (uint16_t *)((uint32_t *)packed + p * panel_words(w));
  const char *columns[PANEL];
  columns_of_panel(w, plain, n, p, columns);
  ALIGNED uint32_t words[PACKED_WORDS * PANEL];
  for (long from = 0; from < whole; from += PACKED_WORDS) {
    const long count = at_most(whole - from, PACKED_WORDS);
    transpose_columns(columns, zero_words, from, count, words);
    for (long i = 0; i < count; i++) {
      uint16_t *pairs = panel + 2 * (from + i) * PANEL;
      for (long c = 0; c < PANEL; c++) pairs[c] = (uint16_t)words[i * PANEL + c];
      for (long c = 0; c < PANEL; c++) pairs[PANEL + c] = (uint16_t)(words[i * PANEL + c] >> 16);
    }
  }
  for (long s = 2 * whole; s < pairs_of(w); s++)
    for (long c = 0; c < PANEL; c++) {
      uint16_t pair = 0;
      if (columns[c] != NULL) memcpy(&pair, columns[c] + 2 * s, 2 * s + 1 < n ? 2 : 1);
      panel[s * PANEL + c] = pair;
    }
}

/* The numbers in the lower halves of four bytes, side by side. */
static inline uint32_t lower_fours(uint32_t bytes) {
  bytes &= 0x0f0f0f0f;
  bytes = (bytes | bytes >> 4) & 0x00ff00ff;
  return (bytes | bytes >> 8) & 0xffff;
}

/* Packs panel p of 4-bit numbers, two in a byte with the first in the lower bits: [out_features,
 * in_features / 2 rounded up]. A word has the even ones of eight numbers in its lower half and the
 * odd ones in its upper half. */
static void pack_fours_panel(const Weight *w, const void *plain, uint32_t *packed, long p) {
  static const uint32_t eights[PACKED_WORDS] = {[0 ... PACKED_WORDS - 1] = 0x88888888};
  const long n = w->in_features, whole = n / 8;
  uint32_t *panel = packed + p * panel_words(w);
  const char *columns[PANEL];
  columns_of_panel(w, plain, (n + 1) / 2, p, columns);
  for (long from = 0; from < whole; from += PACKED_WORDS) {
    const long count = at_most(whole - from, PACKED_WORDS);
    uint32_t *words = panel + from * PANEL;
    transpose_columns(columns, eights, from, count, words);
    for (long i = 0; i < count * PANEL; i++)
      words[i] = lower_fours(words[i]) | lower_fours(words[i] >> 4) << 16;
  }
  for (long i = whole; i < eights_of(n); i++)
    for (long c = 0; c < PANEL; c++) {
      uint32_t bytes = 0x88888888;
      if (columns[c] != NULL) {
        for (long at = 8 * i; at < n; at++) {
          const uint32_t four = (uint8_t)columns[c][at / 2] >> (at % 2 * 4) & 15, up = at % 8 * 4;
          bytes = (bytes & ~(15u << up)) | four << up;
        }
      }
      panel[i * PANEL + c] = lower_fours(bytes) | lower_fours(bytes >> 4) << 16;
    }
}

/* Scales and offsets of groups, or scales alone: [1 or 2][out_features, groups] of `size` bytes. */
INLINE void pack_scales_of(const long size, const Weight *w, const char *plain, char *packed,
                           long p) {
  const long groups = groups_along(w->in_features, w->group), kinds = w->has_offsets ? 2 : 1;
  const long of_kind = w->out_features * groups * size;
  const char *columns[PANEL];
  columns_of_panel(w, plain, groups * size, p, columns);
  for (long g = 0; g < groups; g++)
    for (long kind = 0; kind < kinds; kind++)
      for (long c = 0; c < PANEL; c++) {
        char *to = packed + (((p * groups + g) * kinds + kind) * PANEL + c) * size;
        if (columns[c] == NULL)
          memset(to, 0, (size_t)size);
        else
          memcpy(to, columns[c] + kind * of_kind + g * size, (size_t)size);
      }
}

static void pack_group_scales(const Weight *w, const void *plain, void *packed, long p) {
  if (w->scale_size == 1)
    pack_scales_of(1, w, plain, packed, p);
  else if (w->scale_size == 2)
    pack_scales_of(2, w, plain, packed, p);
  else
    pack_scales_of(4, w, plain, packed, p);
}

static void pack_scales(const Weight *w, const float *plain, float *packed) {
  for (long p = 0; p < panels_of(w); p++)
    for (long c = 0; c < PANEL; c++) {
      const long column = source_column(w, p, c);
      packed[p * PANEL + c] = column < 0 ? 0 : plain[column];
    }
}

static void pack_bias(const Weight *w, const void *plain, float *packed) {
  for (long p = 0; p < panels_of(w); p++)
    for (long c = 0; c < PANEL; c++) {
      long column = source_column(w, p, c);
      float value = 0;
      if (column >= 0)
        value = w->is_bf16 ? bf16_to_float(((const bf16 *)plain)[column])
                           : ((const float *)plain)[column];
      packed[p * PANEL + c] = value;
    }
}

/* Where results go. */
typedef struct {
  void *out; /* [rows, columns] */
  const void *residual; /* [rows, columns] of the weight's type, or null; may be out */
  int out_bf16;
} Target;

/* How a column of gate and a column of up become one column of the result. */
typedef enum { UNGATED, SILU, ANY_GATE } Gate;

static Gate gate_of(const Weight *w) {
  if (!w->gated) return UNGATED;
  const int is_limited = w->limit != INFINITY || w->gate_limit != INFINITY;
  const int is_plain = w->alpha == 1 && !is_limited && w->offset == 0 && w->cubic == 0;
  return is_plain ? SILU : ANY_GATE;
}

/* gate * sigmoid(alpha * gate + cubic * gate^3) * (up + offset), with both limited first. */
static vf gated_values(const Weight *w, vf gate, vf up) {
  const vf most = vf_splat(w->limit), most_gate = vf_splat(w->gate_limit);
  gate = -vf_max(-most_gate, -gate); /* NaN stays NaN */
  up = vf_max(-most, -vf_max(-most, -up));
  const vf slope = vf_fma(gate * gate, vf_splat(w->cubic), vf_splat(w->alpha));
  return vf_silu(slope * gate) / slope * (up + vf_splat(w->offset));
}

/* Finishes columns begin .. begin + width - 1 of some rows. A caller that passes constants gets code
 * without the branches that they exclude. */
INLINE void finish_rows(const Weight *w, const Target *to, const float *tile, long begin,
                        long width, long first_row, int rows, Gate gate, const float *bias,
                        const void *residual, int is_bf16, int out_bf16) {
  const long columns = columns_of(w);
  for (int r = 0; r < rows; r++) {
    const float *row = tile + r * PANEL;
    for (long c = 0; c < width; c += VL) {
      const int n = at_most(width - c, VL);
      const long offset = (first_row + r) * columns + begin + c;
      vf value = *(const vf *)(row + c);
      if (bias != NULL) value += *(const vf *)(bias + c);
      if (gate != UNGATED) {
        vf up = *(const vf *)(row + GATE + c);
        if (bias != NULL) up += *(const vf *)(bias + GATE + c);
        if (gate == SILU)
          value = vf_silu(value) * up;
        else
          value = gated_values(w, value, up);
      }
      if (residual != NULL) value += load_some(residual, is_bf16, offset, n);
      store_some(to->out, out_bf16, offset, n, value);
    }
  }
}

/* Bias, activation, residual and rounding of one tile. The most frequent forms have code of their
 * own: all columns of a panel, in bfloat16, without biases. */
static void finish_tile(const Weight *w, const Target *to, const float *tile, long panel,
                        long first_row, int rows) {
  const long full = w->gated ? GATE : PANEL, begin = panel * full, left = columns_of(w) - begin;
  const float *bias = w->bias == NULL ? NULL : w->bias + panel * PANEL;
  const Gate gate = gate_of(w);
  const int is_common = left >= full && bias == NULL && w->is_bf16 && to->out_bf16;
  if (is_common && gate == UNGATED && to->residual == NULL)
    finish_rows(w, to, tile, begin, PANEL, first_row, rows, UNGATED, NULL, NULL, 1, 1);
  else if (is_common && gate == UNGATED)
    finish_rows(w, to, tile, begin, PANEL, first_row, rows, UNGATED, NULL, to->residual, 1, 1);
  else if (is_common && gate == SILU && to->residual == NULL)
    finish_rows(w, to, tile, begin, GATE, first_row, rows, SILU, NULL, NULL, 1, 1);
  else
    finish_rows(w, to, tile, begin, left < full ? left : full, first_row, rows, gate, bias,
                to->residual, w->is_bf16, to->out_bf16);
}

/* Rows are cut into blocks of a tile, and these into groups: a unit of work is a group of rows
 * times a panel. A thread's units go through the panels with one group, whose rows stay in its
 * cache, then with the next. */
static long blocks_of(const Weight *w, long rows) {
  return uses_amx(w->is_bf16) ? (rows + AMX_ROWS - 1) / AMX_ROWS : tiles_of(rows);
}
static long groups_of(const Weight *w, long rows) {
  return (blocks_of(w, rows) + GROUP_BLOCKS - 1) / GROUP_BLOCKS;
}
static long linear_units(const Weight *w, long rows) { return panels_of(w) * groups_of(w, rows); }

/* First row of a block. On AMX all but the last are full, as one takes the same time for few rows
 * and for many; elsewhere they are as equal as they can be. */
static long block_begin(const Weight *w, long rows, long block) {
  if (!uses_amx(w->is_bf16)) return tile_begin(rows, block);
  return block * AMX_ROWS < rows ? block * AMX_ROWS : rows;
}

/* What adapters add to columns of panel p. */
static void add_to_tiles(const Weight *w, const Addition *add, float *tiles, long p, long first_row,
                         long rows, Amx *amx) {
  const long columns = columns_of(w), width = w->gated ? GATE : PANEL, begin = p * width;
  const long n = begin + width < columns ? width : columns - begin;
  expand_tiles(add, w->is_bf16, begin, n, first_row, rows, tiles, amx);
  if (w->gated)
    expand_tiles(add, w->is_bf16, columns + begin, n, first_row, rows, tiles + GATE, amx);
}

/* Prefetches what adapters will add to the panel of a unit of work, and a share of what is read
 * before the next product. On AMX it is prefetched elsewhere. */
static void ask_for_additions(const Weight *w, const Addition *add, long m, long unit,
                              Asked *asked) {
  if (uses_amx(w->is_bf16) || add->lora->order == NULL) return;
  const long columns = columns_of(w), width = w->gated ? GATE : PANEL;
  const long begin = unit % panels_of(w) * width;
  const long n = begin + width < columns ? width : columns - begin;
  ask_for_b(add, w->is_bf16, begin, n, asked);
  if (w->gated) ask_for_b(add, w->is_bf16, columns + begin, n, asked);
  ask_for_a(add, w->is_bf16, unit, linear_units(w, m), asked);
}

/* tile [rows][32] = rows of x times a panel. */
static void product(int is_bf16, int rows, long steps, int odd, const char *x, long stride,
                    const uint32_t *panel, float *tile, Prefetch *ahead, Amx *amx) {
  if (is_bf16)
    tile_product(1, 0, rows, steps, odd, x, stride, panel, tile, PANEL, ahead, amx);
  else
    tile_product(0, 0, rows, steps, 0, x, stride, panel, tile, PANEL, ahead, amx);
}

/* Like `product`, with += for =. */
static void product_added(int is_bf16, int rows, long steps, int odd, const char *x, long stride,
                          const uint32_t *panel, float *tile, Prefetch *ahead, Amx *amx) {
  if (is_bf16)
    tile_product(1, 1, rows, steps, odd, x, stride, panel, tile, PANEL, ahead, amx);
  else
    tile_product(0, 1, rows, steps, 0, x, stride, panel, tile, PANEL, ahead, amx);
}

/* Whether weights lie in groups and become bfloat16. */
static int rounds(const Weight *w) { return w->group > 0 && uses_amx(w->is_bf16); }

#if HAS_AMX
static GroupScales scales_behind(const Weight *w, long p, long from) {
  const long groups = groups_along(w->in_features, w->group);
  return scales_of_group(w->group_scales, w->scale_size, w->has_offsets,
                         w->bits == 8 ? word_scale(1) : 1.0f,
                         (p * groups + from / w->group) * (w->has_offsets ? 2 : 1) * PANEL);
}

/* tile [32] = a row times panel p, whose weights are rounded. */
INLINE void rounded_row(const int bits, const Weight *w, const bf16 *x, long p, int asks,
                        float *tile) {
  const __m512 table = float_table(kind_of_fours(w));
  const char *panel = (const char *)(w->panels + p * panel_words(w));
  __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  const long taken = w->group < 2 * AMX_DEPTH ? 2 * AMX_DEPTH : w->group;
  for (long from = 0; from < w->in_features; from += taken) {
    const long end = from + taken < w->in_features ? from + taken : w->in_features;
    GroupScales of[2];
    of[0] = of[1] = scales_behind(w, p, from);
    if (from + w->group < end) of[1] = scales_behind(w, p, from + w->group);
    for (long k = from; k < end; k += 2 * AMX_DEPTH, panel += AMX_DEPTH * bytes_of_pair(bits)) {
      const char *next = asks ? panel + panel_words(w) * 4 : NULL;
      ALIGNED float even[AMX_DEPTH], odd[AMX_DEPTH];
      const int pairs = split_pairs(x + k, end - k, even, odd);
      if (pairs == AMX_DEPTH)
        rounded_step(bits, table, even, odd, AMX_DEPTH, of, panel, next, sum);
      else
        rounded_step(bits, table, even, odd, pairs, of, panel, next, sum);
    }
  }
  for (int v = 0; v < 2; v++) _mm512_storeu_ps(tile + v * 16, sum[v]);
}

/* tile [32] = a row of bfloat16 times panel p, equal to the bit to `unpacked_product`. */
static void unpacked_row(const Weight *w, const bf16 *x, long p, int asks, float *tile, Amx *amx) {
  const uint32_t *panel = w->panels + p * panel_words(w);
  flush_subnormals(amx);
  if (w->group == 0)
    amx_int8_row(x, w->in_features, (const int8_t *)panel,
                 asks ? (const int8_t *)(panel + panel_words(w)) : NULL, tile);
  else if (w->bits == 4)
    rounded_row(4, w, x, p, asks, tile);
  else
    rounded_row(8, w, x, p, asks, tile);
}
#endif

/* Words of some pairs of panel p, from number `from` on. */
static void unpack_part(const Weight *w, long p, long from, long pairs, int asks, uint32_t *words,
                        Amx *amx) {
  const char *panel = (const char *)(w->panels + p * panel_words(w));
  const long next = panel_words(w) * 4;
#if HAS_AMX
  if (rounds(w)) {
    flush_subnormals(amx);
    for (long s = 0; s < pairs; s += w->group / 2) {
      const GroupScales of = scales_behind(w, p, from + 2 * s);
      const long some = at_most(pairs - s, w->group / 2);
      const char *at = panel + (from / 2 + s) * bytes_of_pair(w->bits);
      uint32_t *to = words + s * PANEL;
      if (w->bits == 4)
        round_pairs(4, kind_of_fours(w), some, &of, at, asks ? at + next : NULL, to);
      else
        round_pairs(8, 0, some, &of, at, asks ? at + next : NULL, to);
    }
    return;
  }
#else
  (void)amx;
#endif
  const int8_t *at = (const int8_t *)panel + from * PANEL;
  if (w->is_bf16)
    unpack_pairs(1, pairs, at, asks ? at + next : NULL, words);
  else
    unpack_pairs(0, pairs, at, asks ? at + next : NULL, words);
}

/* Numbers of a row that are unpacked at a time: parts are as equal as steps and groups allow. */
static long numbers_at_once(const Weight *w) {
  const long n = w->in_features, most = 2 * UNPACK_PAIRS, unit = 2 * AMX_DEPTH;
  const long parts = (n + most - 1) / most, even = (n + parts * unit - 1) / (parts * unit) * unit;
  if (w->group == 0) return even;
  return even < w->group ? w->group : even - even % w->group;
}

/* tiles [rows first .. end - 1][32] = rows of x times panel p, which becomes words of the rows' type
 * part by part. */
static void unpacked_product(const Weight *w, const char *x, long m, long first_block,
                             long last_block, long p, int asks, float *tiles, Amx *amx) {
#if HAS_AMX
  if (m == 1 && uses_amx(w->is_bf16)) {
    unpacked_row(w, (const bf16 *)x, p, asks, tiles, amx);
    return;
  }
#endif
  const int is_bf16 = w->is_bf16, per_word = is_bf16 ? 2 : 1;
  const long stride = w->in_features * (is_bf16 ? 2 : 4), first_row = block_begin(w, m, first_block);
  ALIGNED uint32_t words[2 * UNPACK_PAIRS * PANEL];
  const long at_once = numbers_at_once(w);
  for (long from = 0; from < w->in_features; from += at_once) {
    const long numbers = at_most(w->in_features - from, (int)at_once);
    unpack_part(w, p, from, (numbers + 1) / 2, asks, words, amx);
    for (long block = first_block; block < last_block; block++) {
      const long row = block_begin(w, m, block);
      const int rows = (int)(block_begin(w, m, block + 1) - row);
      Prefetch none = {{NULL, NULL}, NULL, 0};
      const char *rows_at = x + row * stride + from * (is_bf16 ? 2 : 4);
      float *tile = tiles + (row - first_row) * PANEL;
      const long steps = numbers / per_word;
      const int odd = is_bf16 && numbers % 2;
      if (from == 0)
        product(is_bf16, rows, steps, odd, rows_at, stride, words, tile, &none, amx);
      else
        product_added(is_bf16, rows, steps, odd, rows_at, stride, words, tile, &none, amx);
    }
  }
}

/* Where a product's rows are: the rows as given and, if they are multiplied as integers, the rows
 * as integers. */
typedef struct {
  const char *rows; /* [m, in_features], in the weight's order */
  const Integers *integers; /* or null */
  const Rotated *rotated; /* or null */
  const GroupedRows *grouped; /* or null */
  const float *sums; /* [m, groups] over the groups of weights with offsets, or null: unknown */
} Input;

/* The scales of panel p; none if its weights do not lie in groups. */
static PanelScales scales_of_panel(const Weight *w, long p) {
  if (w->group == 0) return (PanelScales){NULL, 0, 0};
  const long groups = groups_along(w->in_features, w->group), kinds = w->has_offsets ? 2 : 1;
  return (PanelScales){(const char *)w->group_scales + p * groups * kinds * PANEL * w->scale_size,
                       w->scale_size, w->has_offsets};
}

/* tiles [rows first .. end - 1][32] = rows of x times panel p, whose weights lie in groups
 * and are not rounded. */
static void grouped_product(const Weight *w, Input input, long m, long first_block, long last_block,
                            long p, int asks, float *tiles, Amx *amx) {
  const int is_bf16 = w->is_bf16, per_word = is_bf16 ? 2 : 1, size = is_bf16 ? 2 : 4;
  const long n = w->in_features, stride = n * size, first_row = block_begin(w, m, first_block);
  const long groups = groups_along(n, w->group), step = (w->has_offsets ? 2 : 1) * PANEL;
  const uint32_t *panel = w->panels + p * panel_words(w);
  ALIGNED uint32_t words[LARGEST_GROUP * PANEL];
  ALIGNED float part[MOST_TILE_ROWS * PANEL];
  float own_sums[MOST_TILE_ROWS];
  const int kind = kind_of_fours(w);
  for (long g = 0; g < groups; g++) {
    const long from = g * w->group, numbers = at_most(n - from, w->group);
    const uint32_t *at = panel + (w->bits == 4 ? from / 8 * PANEL : from / 2 * (PANEL / 2));
    const uint32_t *next = asks ? at + panel_words(w) : NULL;
    const GroupScales of_group = scales_of_group(w->group_scales, w->scale_size, w->has_offsets, 1.0f,
                                                 (p * groups + g) * step);
    if (w->bits == 4)
      unpack_fours(is_bf16, kind, eights_of(numbers), at, next, words);
    else
      unpack_pairs(is_bf16, (numbers + 1) / 2, (const int8_t *)at, (const int8_t *)next, words);
    for (long block = first_block; block < last_block; block++) {
      const long row = block_begin(w, m, block);
      const int rows = (int)(block_begin(w, m, block + 1) - row);
      const char *x = input.rows + row * stride + from * size;
      Prefetch none = {{NULL, NULL}, NULL, 0};
      product(is_bf16, rows, numbers / per_word, is_bf16 && numbers % 2, x, stride, words, part,
              &none, amx);
      const float *sums = NULL;
      if (w->has_offsets && input.sums != NULL) sums = input.sums + row * groups + g;
      if (w->has_offsets && input.sums == NULL) {
        for (int r = 0; r < rows; r++)
          sum_groups(x + r * stride, is_bf16, 0, numbers, w->group, own_sums + r);
        sums = own_sums;
      }
      const long sums_stride = input.sums != NULL ? groups : 1;
      float *tile = tiles + (row - first_row) * PANEL;
      if (sums == NULL && g > 0)
        add_group(1, 0, rows, part, &of_group, NULL, 0, tile);
      else if (sums == NULL)
        add_group(0, 0, rows, part, &of_group, NULL, 0, tile);
      else if (g > 0)
        add_group(1, 1, rows, part, &of_group, sums, sums_stride, tile);
      else
        add_group(0, 1, rows, part, &of_group, sums, sums_stride, tile);
    }
  }
}

/* `amx`: of this thread, to be released when it has done its share. */
static void linear_unit(const Weight *w, Input input, long m, const Target *to,
                        const Addition *add, long unit, Amx *amx) {
  const char *x = input.rows;
  const long stride = w->in_features * (w->is_bf16 ? 2 : 4), size = panel_words(w);
  const int is_adding = adds(add), odd = w->is_bf16 && (w->in_features & 1);
  const int unpacks = rounds(w) || (is_int8(w) && input.integers == NULL);
  const long blocks = blocks_of(w, m), groups = groups_of(w, m);
  const long p = unit % panels_of(w), group = unit / panels_of(w);
  const uint32_t *panel = w->panels + p * size;
  /* Each block of rows prefetches a part of the next panel. */
  const int prefetch = m >= prefetch_from() && p + 1 < panels_of(w);
  const char *next = (const char *)(panel + size);
  const long first_block = blocks * group / groups, last_block = blocks * (group + 1) / groups;
  const long part = prefetch ? size * 4 / (last_block - first_block) : 0;
  const long first_row = block_begin(w, m, first_block), end_row = block_begin(w, m, last_block);
  Asked asked;
  asked.count = 0;
  if (is_adding) ask_for_additions(w, add, m, unit, &asked);
  ALIGNED float tiles[GROUP_BLOCKS * MOST_TILE_ROWS * PANEL];
  if (unpacks)
    unpacked_product(w, x, m, first_block, last_block, p, prefetch, tiles, amx);
  else if (w->group > 0 && input.grouped == NULL && input.integers == NULL)
    grouped_product(w, input, m, first_block, last_block, p, prefetch, tiles, amx);
  for (long block = first_block; block < last_block; block++, next += part) {
    const long first = block_begin(w, m, block);
    const int rows = (int)(block_begin(w, m, block + 1) - first);
    float *tile = tiles + (is_adding || unpacks || w->group > 0 ? (first - first_row) * PANEL : 0);
    const long turn = block - first_block, turns = last_block - first_block;
    const int asked_from = (int)(asked.count * turn / turns);
    Prefetch ahead = {{next, next + part}, asked.spans + asked_from,
                      (int)(asked.count * (turn + 1) / turns) - asked_from};
    if (part == 0 && ahead.num_later > 0) {
      ahead.now = *ahead.later++;
      ahead.num_later--;
    }
    if (w->is_rotated)
      rotated_product(rows, input.rotated, first, w->in_features, (const int8_t *)panel,
                      w->scales + p * PANEL, tile, &ahead, amx);
    else if (input.grouped != NULL)
      vnni_grouped_tile(rows, kind_of_fours(w), input.grouped, first, w->in_features, panel,
                        scales_of_panel(w, p), tile, &ahead);
    else if (input.integers != NULL)
      integer_tile(rows, input.integers, first, pairs_of(w), (const int8_t *)panel,
                   scales_of_panel(w, p), tile, &ahead);
    else if (w->scales == NULL && w->group == 0)
      product(w->is_bf16, rows, words_of(w) - odd, odd, x + first * stride, stride, panel, tile,
              &ahead, amx);
    if (w->scales != NULL && !w->is_rotated)
      scale_tile(w->scales + p * PANEL, unpacks && w->group == 0 ? word_scale(w->is_bf16) : 1.0f,
                 rows, tile);
    if (!is_adding) finish_tile(w, to, tile, p, first, rows);
  }
  if (is_adding) {
    add_to_tiles(w, add, tiles, p, first_row, end_row - first_row, amx);
    finish_tile(w, to, tiles, p, first_row, (int)(end_row - first_row));
  }
}

/* Whether a product multiplies its rows as integers of 16 bits. */
static int needs_integers(const Weight *w) {
  const int has_bytes = is_int8(w) || (w->group > 0 && w->bits == 8);
  return has_bytes && uses_integers(w->is_bf16);
}

/* Whether a product takes its rows in int8, with a scale for each group. */
static int needs_grouped(const Weight *w) {
  return HAS_VNNI && w->group > 0 && w->bits == 4 && w->is_bf16 && !rounds(w);
}

/* Whether a product needs the sums over its rows' groups. */
static int needs_sums(const Weight *w) {
  return w->has_offsets && !rounds(w) && !needs_grouped(w) && !needs_integers(w);
}

/* Numbers of a row in 16 bits that have one scale. */
static long block_of(const Weight *w) { return w->group > 0 ? w->group : COLUMN_BLOCK; }

/* Bytes for a product's rows in another number format, or for their sums. */
static long rounded_bytes(const Weight *w, long rows) {
  const long n = w->in_features;
  if (w->is_rotated) return rotated_bytes(rows, n);
  if (needs_integers(w)) return integers_bytes(rows, n, block_of(w));
  if (needs_grouped(w)) return grouped_rows_bytes(rows, n, w->group);
  return needs_sums(w) ? rows * groups_along(n, w->group) * 4 : 0;
}

/* Bytes of memory for a product's prepared rows. Experts and single products prepare their rows;
 * draft heads do not, so they unpack, and their weights have no order. */
static long prepared_bytes(const Weight *w, long rows) {
  const long sorted = w->order == NULL ? 0 : rows * w->in_features * (w->is_bf16 ? 2 : 4);
  return rounded_bytes(w, rows) + sorted;
}

/* The prepared rows of a product. Apart from `sorted`, at most one is used; the weights decide
 * which. */
typedef struct {
  void *sorted; /* [rows, in_features] in the weight's order, or null */
  Integers integers;
  Rotated rotated;
  GroupedRows grouped;
  float *sums;
} PreparedRows;

/* Lays prepared rows out in memory of `prepared_bytes`. */
static PreparedRows prepared_in(const Weight *w, void *memory, long rows) {
  const long n = w->in_features;
  PreparedRows to = {.sums = needs_sums(w) ? memory : NULL};
  if (w->is_rotated)
    to.rotated = rotated_in(memory, rows, n);
  else if (needs_integers(w))
    to.integers = integers_in(memory, rows, n, block_of(w));
  else if (needs_grouped(w))
    to.grouped = grouped_rows_in(memory, rows, n, w->group);
  if (w->order != NULL) to.sorted = (char *)memory + rounded_bytes(w, rows);
  return to;
}

/* Rows first .. last - 1 of x with their columns in the weight's order. */
static void sort_columns(const Weight *w, const void *x, void *sorted, long first, long last) {
  const long n = w->in_features;
  for (long row = first; row < last; row++)
    for (long i = 0; i < n; i++) {
      const long from = row * n + w->order[i], to = row * n + i;
      if (w->is_bf16)
        ((bf16 *)sorted)[to] = ((const bf16 *)x)[from];
      else
        ((float *)sorted)[to] = ((const float *)x)[from];
    }
}

/* Prepares rows first .. last - 1 of x [rows, k]. */
static void prepare_input_rows(const Weight *w, const void *x, const PreparedRows *to, long rows,
                               long first, long last) {
  const long n = w->in_features;
  if (w->order != NULL) {
    sort_columns(w, x, to->sorted, first, last);
    x = to->sorted;
  }
  if (w->is_rotated)
    rotate_rows(x, &to->rotated, rows, n, first, last);
  else if (needs_integers(w))
    round_to_integers(x, &to->integers, n, first, last);
  else if (needs_grouped(w))
    round_to_grouped(x, &to->grouped, rows, n, first, last);
  else if (needs_sums(w))
    sum_rows(x, w->is_bf16, n, w->group, to->sums, first, last);
}

/* What a product reads of x [rows, k]: the rows as they are, and as they were prepared. */
static Input input_of(const Weight *w, const void *x, const PreparedRows *prepared) {
  const void *rows = w->order == NULL ? x : prepared->sorted;
  Input input = {.rows = rows, .sums = prepared->sums};
  if (w->is_rotated)
    input.rotated = &prepared->rotated;
  else if (needs_integers(w))
    input.integers = &prepared->integers;
  else if (needs_grouped(w))
    input.grouped = &prepared->grouped;
  return input;
}

/* This thread's share of preparing x [rows, k] in such memory; used after the next barrier. */
static Input prepare_share(const Weight *w, const void *x, void *memory, long rows,
                           PreparedRows *prepared, const Member *me) {
  const Rows mine = rows_of(me, rows);
  *prepared = prepared_in(w, memory, rows);
  prepare_input_rows(w, x, prepared, rows, mine.first, mine.last);
  return input_of(w, x, prepared);
}

/* This thread's share of x [m, k] * weight; `ranges` divide `linear_units` among `threads`. The
 * ranks of `add` must have been computed. */
static void linear_share(const Weight *w, Input x, long m, Target to, Addition add, Range *ranges,
                         int threads, int thread) {
  int at = 0;
  Amx amx = {0};
  for (int64_t unit; (unit = next_unit(ranges, threads, thread, &at)) >= 0;)
    linear_unit(w, x, m, &to, &add, unit, &amx);
  release_amx(&amx);
}

#endif
