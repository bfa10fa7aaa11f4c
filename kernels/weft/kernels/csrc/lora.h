/* Low-rank additions to linear layers: first every token's input is shrunk to the ranks of its
 * adapter, adapter by adapter; then each tile of a product is expanded from them before it is
 * finished, so that nothing is rounded in between.
 *
 * A token's results do not depend on the other tokens. */
#ifndef WEFT_LORA_H
#define WEFT_LORA_H

#include "amx.h"
#include "rows.h"
#include "team.h"

#define ROW_RANK 8
#define B_COLUMNS 16 /* of a block of b */
#define MAX_PARTS 3
#define SHRINK_RANKS 4
#define EXPAND_ROWS 8
#if VL == 16
#define SHRINK_TOKENS 4 /* 16 accumulators of 32 registers */
#else
#define SHRINK_TOKENS 2
#endif

/* Tokens of a segment in one unit of work: on AMX as many as are multiplied at a time. */
static int block_tokens(void) { return amx_is_allowed ? 16 : 8; }

typedef enum { TO_QKV, TO_O, TO_GATE_UP, TO_DOWN, TO_W13 = 0, TO_W2 = 1 } Group;
#define GROUPS 4 /* products of a layer; experts use the first two */

/* All of these are declared in weft/kernels/shared/cpu.py too, from this text. */
typedef struct {
  const char *a;         /* [rows, ROW_RANK, in_features] */
  const char *b;         /* [rows, blocks of 16 columns, steps along ranks, 16 words], see tile.h */
  const int32_t *table;  /* [layers, slots, max_rows]: rows of a */
  const int32_t *b_table; /* the same of b */
  const int32_t *counts; /* [layers, slots] */
  int64_t rows, b_rows, layers, slots, max_rows;
  int64_t in_features, out_features;
  int64_t column; /* of the product, where its results begin */
  int64_t offset; /* where its ranks begin in a row of `shrunk` */
} LoraPart;

typedef struct {
  LoraPart parts[MAX_PARTS];
  int64_t count;
} LoraGroup;

typedef struct {
  LoraGroup groups[GROUPS];
  const int32_t *token_slots; /* [tokens] */
  const int32_t *order;       /* [tokens]; null: `segments` is 0, and tokens are added to in runs */
  const int32_t *starts;      /* [segments + 1] */
  const int32_t *slots;       /* [segments] */
  int64_t *blocks;            /* [segments + 1]: blocks of tokens before each; set here */
  float *shrunk;              /* [tokens + 15, width]; pairs where lora_amx.h adds: see there */
  int64_t tokens, segments, width;
} Lora;

/* What is added to one product; lora = null for nothing. */
typedef struct {
  const Lora *lora;
  const LoraGroup *group;
  int64_t layer;
  const LoraGroup *next; /* of the product after this one, in `next_layer`; or null */
  int64_t next_layer;
} Addition;

static int adds(const Addition *add) {
  return add->lora != NULL && add->group->count > 0 && add->lora->blocks[add->lora->segments] > 0;
}

static int64_t lora_count(const LoraPart *part, long layer, long slot) {
  return part->counts[layer * part->slots + slot];
}
static const int32_t *lora_rows(const LoraPart *part, const int32_t *table, long layer, long slot) {
  return table + (layer * part->slots + slot) * part->max_rows;
}

/* Whether a slot's rows exist in layers first .. first + count - 1. */
static int part_fits(const LoraPart *part, long slot, long first, long count) {
  if (slot >= part->slots || first + count > part->layers) return 0;
  int fits = 1;
  for (long layer = first; layer < first + count; layer++) {
    const int64_t rows = lora_count(part, layer, slot);
    if (rows < 0 || rows > part->max_rows) return 0;
    const int32_t *a = lora_rows(part, part->table, layer, slot);
    const int32_t *b = lora_rows(part, part->b_table, layer, slot);
    for (long i = 0; i < rows; i++)
      fits &= (uint64_t)a[i] < (uint64_t)part->rows && (uint64_t)b[i] < (uint64_t)part->b_rows;
  }
  return fits;
}

/* Whether all that is read and written exists; counts the blocks. */
static Status prepare_lora(const Lora *lora, long first, long count) {
  lora->blocks[0] = 0;
  if (lora->starts[0] != 0) return BAD_LORA;
  for (long s = 0; s < lora->segments; s++) {
    const long begin = lora->starts[s], end = lora->starts[s + 1], slot = lora->slots[s];
    if (begin > end || end > lora->tokens) return BAD_LORA;
    for (long i = begin; i < end; i++) {
      const long token = lora->order[i];
      if ((uint64_t)token >= (uint64_t)lora->tokens || lora->token_slots[token] != slot)
        return BAD_LORA;
      if (i > begin && token <= lora->order[i - 1]) return BAD_LORA;
    }
    const int is_used = end > begin && slot != 0;
    if (is_used && slot < 0) return BAD_LORA;
    for (int g = 0; is_used && g < GROUPS; g++)
      for (long p = 0; p < lora->groups[g].count; p++)
        if (!part_fits(&lora->groups[g].parts[p], slot, first, count)) return BAD_LORA;
    lora->blocks[s + 1] =
        lora->blocks[s] + (is_used ? (end - begin + block_tokens() - 1) / block_tokens() : 0);
  }
  return lora->starts[lora->segments] == lora->tokens ? FINE : BAD_LORA;
}

static int64_t shrink_units(const Addition *add) {
  return adds(add) ? add->lora->blocks[add->lora->segments] * add->group->count : 0;
}

INLINE vu load_words(const char *p, size_t bytes) {
  vu words = {0};
  memcpy(&words, p, bytes);
  return words;
}

/* sum[t][r] += x[t] . a[r], one vector of each from byte `at` on. */
INLINE void shrink_step(const int is_bf16, const int tokens, const char *const *x, const char *a,
                        long bytes, long at, size_t some, vf sum[SHRINK_TOKENS][SHRINK_RANKS]) {
  vu given[SHRINK_TOKENS];
#pragma GCC unroll 4
  for (int t = 0; t < tokens; t++) given[t] = load_words(x[t] + at, some);
#pragma GCC unroll 4
  for (int r = 0; r < SHRINK_RANKS; r++) {
    vu words = load_words(a + r * bytes + at, some);
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++) sum[t][r] = multiply_add(is_bf16, sum[t][r], given[t], words);
  }
}

/* to[r] = vf_sum(sum[r]), in the same order: together they take half as many instructions. */
INLINE void sum_ranks(const vf sum[SHRINK_RANKS], float *to) {
#if VL == 16
  __m512 some[2];
  for (int i = 0; i < 2; i++) {
    const __m512 first = (__m512)sum[2 * i], second = (__m512)sum[2 * i + 1];
    some[i] = _mm512_shuffle_f32x4(first, second, 0x44) +
              _mm512_shuffle_f32x4(first, second, 0xee);
  }
  __m512 all = _mm512_shuffle_f32x4(some[0], some[1], 0x88) +
               _mm512_shuffle_f32x4(some[0], some[1], 0xdd); /* a rank in each 128 bits */
  all += _mm512_permute_ps(all, 0x4e);
  all += _mm512_permute_ps(all, 0xb1);
  _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, all)));
#else
  for (int r = 0; r < SHRINK_RANKS; r++) to[r] = vf_sum(sum[r]);
#endif
}

/* to[t][r] = x[t] . a[r], rows of `bytes` bytes. */
INLINE void shrink_tile(const int is_bf16, const int tokens, const char *const *x, const char *a,
                        long bytes, float *const *to) {
  vf sum[SHRINK_TOKENS][SHRINK_RANKS];
#pragma GCC unroll 4
  for (int t = 0; t < tokens; t++)
#pragma GCC unroll 4
    for (int r = 0; r < SHRINK_RANKS; r++) sum[t][r] = (vf){0};
  const long rest = bytes % (4 * VL);
  for (long at = 0; at < bytes - rest; at += 4 * VL)
    shrink_step(is_bf16, tokens, x, a, bytes, at, 4 * VL, sum);
  if (rest > 0) shrink_step(is_bf16, tokens, x, a, bytes, bytes - rest, (size_t)rest, sum);
#pragma GCC unroll 4
  for (int t = 0; t < tokens; t++) sum_ranks(sum[t], to[t]);
}

#define SHRINK_CASE(N)                                 \
  case N:                                              \
    shrink_tile(is_bf16, N, x, a, bytes, to);          \
    break;

INLINE void shrink_tokens(const int is_bf16, int tokens, const char *const *x, const char *a,
                          long bytes, float *const *to) {
  switch (tokens) {
    SHRINK_CASE(1) SHRINK_CASE(2)
#if SHRINK_TOKENS == 4
    SHRINK_CASE(3) SHRINK_CASE(4)
#endif
  }
}
#undef SHRINK_CASE

static void prefetch_bytes(const char *begin, long bytes) {
  for (long at = 0; at < bytes; at += 64) __builtin_prefetch(begin + at, 0, 2);
}

/* The ranks of some tokens of one adapter in one part. */
static void shrink_block(const Lora *lora, const LoraPart *part, int is_bf16, const int32_t *rows,
                         long count, const char *x, const int32_t *tokens, int num_tokens) {
  const long bytes = part->in_features * (is_bf16 ? 2 : 4);
  /* Half a row ahead, since the memory's own prefetcher finds no stream if several are read at
   * once. */
  const long half = SHRINK_RANKS * bytes;
  if (count > 0) prefetch_bytes(part->a + rows[0] * ROW_RANK * bytes, half);
  for (long i = 0; i < count; i++) {
    const char *row = part->a + rows[i] * ROW_RANK * bytes;
    const char *next = i + 1 < count ? part->a + rows[i + 1] * ROW_RANK * bytes : NULL;
    for (int first = 0; first < num_tokens; first += SHRINK_TOKENS) {
      const int some = at_most(num_tokens - first, SHRINK_TOKENS);
      for (int rank = 0; rank < ROW_RANK; rank += SHRINK_RANKS) {
        if (first == 0 && rank == 0) prefetch_bytes(row + half, half);
        if (first == 0 && rank > 0 && next != NULL) prefetch_bytes(next, half);
        const char *from[SHRINK_TOKENS];
        float *to[SHRINK_TOKENS];
        for (int t = 0; t < some; t++) {
          const long token = tokens[first + t];
          from[t] = x + token * bytes;
          to[t] = lora->shrunk + token * lora->width + part->offset + i * ROW_RANK + rank;
        }
        if (is_bf16)
          shrink_tokens(1, some, from, row + rank * bytes, bytes, to);
        else
          shrink_tokens(0, some, from, row + rank * bytes, bytes, to);
      }
    }
  }
}

/* The words of a row of b from `column` on, up to the end of its block; B_COLUMNS a step. */
INLINE const char *words_of_b(const int is_bf16, const LoraPart *part, long row, long column) {
  const long blocks = (part->out_features + B_COLUMNS - 1) / B_COLUMNS;
  const long steps = (row * blocks + column / B_COLUMNS) * (is_bf16 ? ROW_RANK / 2 : ROW_RANK);
  return part->b + 4 * (steps * B_COLUMNS + column % B_COLUMNS);
}

#define MOST_ASKED 256
#define ASKED_BYTES 2048 /* of a piece: blocks of rows get equal numbers of pieces */

/* Pieces of memory that a product prefetches in addition to its weights, as tile.h does. */
typedef struct {
  int count;
  Span spans[MOST_ASKED]; /* further pieces are not prefetched */
} Asked;

INLINE void ask(Asked *asked, const char *begin, long bytes) {
  for (; bytes > 0 && asked->count < MOST_ASKED; begin += ASKED_BYTES, bytes -= ASKED_BYTES)
    asked->spans[asked->count++] = (Span){begin, begin + at_most(bytes, ASKED_BYTES)};
}

/* What is added to n columns of a product: an adapter's rows of b lie anywhere in memory. */
static void ask_for_b(const Addition *add, int is_bf16, long column, long n, Asked *asked) {
  const Lora *lora = add->lora;
  for (long p = 0; p < add->group->count; p++) {
    const LoraPart *part = &add->group->parts[p];
    const long end = part->column + part->out_features;
    const long from = column > part->column ? column : part->column;
    const long to = column + n < end ? column + n : end;
    for (long s = 0; s < lora->segments && from < to; s++) {
      if (lora->blocks[s + 1] == lora->blocks[s]) continue;
      const int32_t *table = lora_rows(part, part->b_table, add->layer, lora->slots[s]);
      const long count = lora_count(part, add->layer, lora->slots[s]);
      for (long i = 0; i < count; i++)
        ask(asked, words_of_b(is_bf16, part, table[i], from - part->column),
            (to - from) * ROW_RANK * (is_bf16 ? 2 : 4));
    }
  }
}

/* to[r] += ranks[r] * b, for `vectors` vectors of n columns: n is VL, or less for a single one. */
INLINE void expand_rows(const int is_bf16, const int rows, const int vectors, int n,
                        const LoraPart *part, const int32_t *table, long count, long column,
                        const float *const *ranks, float *const *to) {
  vf sum[EXPAND_ROWS][2];
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++) sum[r][v] = (vf){0};
  for (long i = 0; i < count; i++) {
    const char *words[2];
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++)
      words[v] = words_of_b(is_bf16, part, table[i], column + v * VL);
    for (int j = 0; j < ROW_RANK; j++) {
      vf b[2];
#pragma GCC unroll 2
      for (int v = 0; v < vectors; v++) {
        const long step = is_bf16 ? j / 2 : j;
        b[v] = (vf)load_words(words[v] + 4 * B_COLUMNS * step, 4 * (size_t)n);
        if (is_bf16) b[v] = j % 2 == 0 ? (vf)((vu)b[v] << 16) : (vf)((vu)b[v] & 0xffff0000u);
      }
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
          sum[r][v] = vf_fma(vf_splat(ranks[r][i * ROW_RANK + j]), b[v], sum[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++)
      store_some(to[r], 0, v * VL, n, load_some(to[r], 0, v * VL, n) + sum[r][v]);
}

/* `expand_rows` for n columns; advances `to`. A part may begin in the middle of a panel: then
 * vectors end where blocks of b do. */
INLINE void expand_columns(const int is_bf16, const int rows, int n, const LoraPart *part,
                           const int32_t *table, long count, long column,
                           const float *const *ranks, float **to) {
  while (n > 0) {
    const int whole = VL - (int)(column % VL);
    const int some = whole == VL && n >= 2 * VL ? 2 * VL : at_most(n, whole);
    if (some == 2 * VL)
      expand_rows(is_bf16, rows, 2, VL, part, table, count, column, ranks, to);
    else if (some == VL)
      expand_rows(is_bf16, rows, 1, VL, part, table, count, column, ranks, to);
    else
      expand_rows(is_bf16, rows, 1, some, part, table, count, column, ranks, to);
    n -= some;
    column += some;
    for (int r = 0; r < rows; r++) to[r] += some;
  }
}

/* A tile's columns that one part adds to. */
typedef struct {
  const LoraPart *part;
  long column; /* of the part's */
  int n;
  long first_row; /* of the product, that c[0] belongs to */
  float *c;       /* [rows][PANEL] */
} Piece;

/* Adds to `count` rows of one slot: `tokens` of the product, or those from `first` on if null. A
 * row of b is loaded once for all rows that are added to together. */
INLINE void expand_tokens(const int is_bf16, const Addition *add, const Piece *piece, long slot,
                          const int32_t *tokens, long first, long count) {
  const LoraPart *part = piece->part;
  const int32_t *table = lora_rows(part, part->b_table, add->layer, slot);
  const long num_rows = lora_count(part, add->layer, slot);
  for (long done = 0; num_rows > 0 && done < count;) {
    const long left = count - done;
    const int rows = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
    const float *ranks[EXPAND_ROWS];
    float *to[EXPAND_ROWS];
    for (int r = 0; r < rows; r++, done++) {
      const long token = tokens == NULL ? first + done : tokens[done];
      ranks[r] = add->lora->shrunk + token * add->lora->width + part->offset;
      to[r] = piece->c + (token - piece->first_row) * PANEL;
    }
    const long column = piece->column;
    if (rows == 8)
      expand_columns(is_bf16, 8, piece->n, part, table, num_rows, column, ranks, to);
    else if (rows == 4)
      expand_columns(is_bf16, 4, piece->n, part, table, num_rows, column, ranks, to);
    else if (rows == 2)
      expand_columns(is_bf16, 2, piece->n, part, table, num_rows, column, ranks, to);
    else
      expand_columns(is_bf16, 1, piece->n, part, table, num_rows, column, ranks, to);
  }
}

/* The first place from `begin` on whose token is not before `row`; tokens ascend. */
static long first_place(const int32_t *order, long begin, long end, long row) {
  while (begin < end) {
    const long middle = (begin + end) / 2;
    if (order[middle] < row)
      begin = middle + 1;
    else
      end = middle;
  }
  return begin;
}

/* Adds to `rows` rows. */
INLINE void expand_piece(const int is_bf16, const Addition *add, const Piece *piece, long rows) {
  const Lora *lora = add->lora;
  const long first = piece->first_row, last = first + rows;
  if (lora->order == NULL) {
    for (long row = first, end; row < last; row = end) {
      const int32_t slot = lora->token_slots[row];
      for (end = row + 1; end < last && lora->token_slots[end] == slot; end++) continue;
      if (slot != 0) expand_tokens(is_bf16, add, piece, slot, NULL, row, end - row);
    }
    return;
  }
  for (long s = 0; s < lora->segments; s++) {
    if (lora->blocks[s + 1] == lora->blocks[s]) continue;
    const long begin = first_place(lora->order, lora->starts[s], lora->starts[s + 1], first);
    const long end = first_place(lora->order, begin, lora->starts[s + 1], last);
    expand_tokens(is_bf16, add, piece, lora->slots[s], lora->order + begin, 0, end - begin);
  }
}

#endif
