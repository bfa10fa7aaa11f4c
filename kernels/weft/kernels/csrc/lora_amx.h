/* The additions of lora.h on AMX, for bfloat16 and tokens that are sorted by adapter.
 *
 * A rank is kept as the sum of two bfloat16, some 16 bits of it: as a pair along K it is multiplied
 * by the pair of a weight and the same weight. */
#ifndef WEFT_LORA_AMX_H
#define WEFT_LORA_AMX_H

#include "amx.h"
#include "lora.h"

#if HAS_AMX

#define TOKEN_WORDS 1024 /* of K, of 16 tokens, that lie packed at a time */

/* As a pair: what is nearest to x, and what is nearest to the rest. */
INLINE vu split_ranks(vf x) {
  ALIGNED bf16 nearest[VL], rest[VL];
  vf_store_bf16(nearest, x);
  const vf rounded = load_some(nearest, 1, 0, VL);
  vf_store_bf16(rest, x - rounded);
  vu pairs;
  for (int i = 0; i < VL; i++) pairs[i] = nearest[i] | (uint32_t)rest[i] << 16;
  return pairs;
}

/* Words first .. first + words - 1 of 16 tokens' rows side by side; zeros up to a tile's depth. */
static void pack_tokens(const char *const *rows, long bytes, long first, long words,
                        uint32_t *packed) {
  for (long w = first; w < first + words; w += AMX_DEPTH, packed += AMX_DEPTH * 16) {
    const long left = bytes - 4 * w;
    ALIGNED char last[16][64] = {{0}};
    const char *from[16];
    for (int t = 0; t < 16; t++) {
      from[t] = rows[t] + 4 * w;
      if (left < 64) from[t] = memcpy(last[t], from[t], (size_t)left);
    }
    transpose_words(from, AMX_DEPTH, packed, 16);
  }
}

/* Eight ranks of 16 tokens: adds words first .. first + words - 1 of K to tile 0. */
static void shrink_words(const char *a, long bytes, long first, long words,
                         const uint32_t *packed) {
  for (long w = first; w < first + words; w += AMX_DEPTH, packed += AMX_DEPTH * 16) {
    const long left = bytes - 4 * w;
    ALIGNED char last[ROW_RANK][64] = {{0}};
    if (left < 64)
      for (int r = 0; r < ROW_RANK; r++) memcpy(last[r], a + r * bytes + 4 * w, (size_t)left);
    complete_writes();
    _tile_loadd(6, packed, 64);
    if (left < 64)
      _tile_loadd(4, last, 64);
    else
      _tile_loadd(4, a + 4 * w, bytes);
    _tile_dpbf16ps(0, 4, 6);
  }
}

/* The ranks, as pairs, of up to 16 tokens of one adapter in one part. */
static void shrink_block_amx(const Lora *lora, const LoraPart *part, const int32_t *rows,
                             long count, const char *x, const int32_t *tokens, int num_tokens,
                             Amx *amx) {
  const long bytes = part->in_features * 2, words = (bytes + 3) / 4;
  ALIGNED uint32_t packed[TOKEN_WORDS * 16];
  const char *from[16];
  for (int t = 0; t < 16; t++) from[t] = x + tokens[t < num_tokens ? t : 0] * bytes;
  set_up_amx(amx, ROW_RANK);
  for (long i = 0; i < count; i++) {
    const char *a = part->a + rows[i] * ROW_RANK * bytes;
    if (i + 1 < count) prefetch_bytes(part->a + rows[i + 1] * ROW_RANK * bytes, ROW_RANK * bytes);
    _tile_zero(0);
    for (long first = 0; first < words; first += TOKEN_WORDS) {
      const long some = at_most(words - first, TOKEN_WORDS);
      if (i == 0 || words > TOKEN_WORDS) pack_tokens(from, bytes, first, some, packed);
      shrink_words(a, bytes, first, some, packed);
    }
    ALIGNED float ranks[ROW_RANK][16];
    _tile_stored(0, ranks, 64);
    for (int t = 0; t < num_tokens; t++) {
      uint32_t *to = (uint32_t *)lora->shrunk + tokens[t] * lora->width + part->offset;
      ALIGNED float of_token[16] = {0};
      ALIGNED uint32_t pairs[16];
      for (int r = 0; r < ROW_RANK; r++) of_token[r] = ranks[r][t];
      for (int r = 0; r < ROW_RANK; r += VL) *(vu *)(pairs + r) = split_ranks(*(vf *)(of_token + r));
      memcpy(to + i * ROW_RANK, pairs, ROW_RANK * 4);
    }
  }
}

/* b[r][0 .. n - 1] = pairs of a weight and itself, of rank r; zeros elsewhere. */
static void pack_ranks(const LoraPart *part, const int32_t *rows, int num_rows, long column, int n,
                       uint32_t *b) {
  const long out = part->out_features;
  const bf16 *weights = (const bf16 *)part->b;
  for (int r = 0; r < AMX_DEPTH; r++, b += PANEL) {
    if (r >= num_rows * ROW_RANK) {
      memset(b, 0, PANEL * 4);
      continue;
    }
    const bf16 *row = weights + ((long)rows[r / ROW_RANK] * ROW_RANK + r % ROW_RANK) * out + column;
    ALIGNED bf16 last[PANEL] = {0};
    if (n < PANEL) row = memcpy(last, row, (size_t)n * 2);
    for (int c = 0; c < PANEL; c++) b[c] = row[c] * 0x10001u;
  }
}

/* c[rows][32] += ranks [rows][16] * b. */
static void expand_tile(int rows, const uint32_t *ranks, long stride, const uint32_t *b, float *c,
                        Amx *amx) {
  Prefetch none = {0};
  amx_tile(1, rows, 64, (const char *)ranks, stride * 4, b, c, PANEL, &none, amx);
}

/* Adds to the rows `tokens`, at most AMX_ROWS, 16 ranks or fewer that begin at `rank`. */
static void expand_some(const Addition *add, const Piece *piece, const int32_t *tokens, int rows,
                        long rank, int num_ranks, const uint32_t *b, Amx *amx) {
  const Lora *lora = add->lora;
  const uint32_t *shrunk = (const uint32_t *)lora->shrunk + piece->part->offset + rank;
  float *c = piece->c;
  const long first = tokens[0], at = (first - piece->first_row) * PANEL;
  const int is_run = tokens[rows - 1] - first == rows - 1;
  ALIGNED uint32_t ranks[AMX_ROWS * AMX_DEPTH] = {0};
  ALIGNED float sums[AMX_ROWS * PANEL] = {0};
  if (is_run && num_ranks == AMX_DEPTH && piece->n == PANEL) {
    expand_tile(rows, shrunk + first * lora->width, lora->width, b, c + at, amx);
    return;
  }
  for (int r = 0; r < rows; r++)
    memcpy(ranks + r * AMX_DEPTH, shrunk + tokens[r] * lora->width, (size_t)num_ranks * 4);
  expand_tile(rows, ranks, AMX_DEPTH, b, sums, amx);
  for (int r = 0; r < rows; r++) {
    float *to = c + (tokens[r] - piece->first_row) * PANEL;
    for (int i = 0; i < piece->n; i++) to[i] += sums[r * PANEL + i];
  }
}

/* Adds to `rows` rows. */
static void expand_piece_amx(const Addition *add, const Piece *piece, long rows, Amx *amx) {
  const Lora *lora = add->lora;
  const LoraPart *part = piece->part;
  const long first = piece->first_row, last = first + rows;
  ALIGNED uint32_t b[AMX_DEPTH * PANEL];
  for (long s = 0; s < lora->segments; s++) {
    if (lora->blocks[s + 1] == lora->blocks[s]) continue;
    const long begin = first_place(lora->order, lora->starts[s], lora->starts[s + 1], first);
    const long end = first_place(lora->order, begin, lora->starts[s + 1], last);
    const int32_t *table = lora_rows(part, part->b_table, add->layer, lora->slots[s]);
    const long count = lora_count(part, add->layer, lora->slots[s]);
    for (long i = 0; begin < end && i < count; i += AMX_DEPTH / ROW_RANK) {
      const int some = at_most(count - i, AMX_DEPTH / ROW_RANK);
      pack_ranks(part, table + i, some, piece->column, piece->n, b);
      for (long at = begin; at < end; at += AMX_ROWS)
        expand_some(add, piece, lora->order + at, at_most(end - at, AMX_ROWS), i * ROW_RANK,
                    some * ROW_RANK, b, amx);
    }
  }
}

#else

static void shrink_block_amx(const Lora *lora, const LoraPart *part, const int32_t *rows,
                             long count, const char *x, const int32_t *tokens, int num_tokens,
                             Amx *amx) {
  (void)lora, (void)part, (void)rows, (void)count, (void)x, (void)tokens, (void)num_tokens;
  (void)amx;
}
static void expand_piece_amx(const Addition *add, const Piece *piece, long rows, Amx *amx) {
  (void)add, (void)piece, (void)rows, (void)amx;
}

#endif

/* This thread's share of shrinking x [tokens, in_features]; `ranges` divide `shrink_units`. */
static void shrink_share(const Addition *add, int is_bf16, const void *x, Range *ranges,
                         int threads, int thread) {
  const Lora *lora = add->lora;
  int at = 0;
  long s = 0;
  Amx amx = {0};
  for (int64_t unit; (unit = next_unit(ranges, threads, thread, &at)) >= 0;) {
    const long block = unit / add->group->count;
    const LoraPart *part = &add->group->parts[unit % add->group->count];
    if (block < lora->blocks[s]) s = 0; /* taken from another thread */
    while (block >= lora->blocks[s + 1]) s++;
    const long first = lora->starts[s] + (block - lora->blocks[s]) * block_tokens();
    const int tokens = at_most(lora->starts[s + 1] - first, block_tokens());
    const int32_t *rows = lora_rows(part, part->table, add->layer, lora->slots[s]);
    const long count = lora_count(part, add->layer, lora->slots[s]);
    if (uses_amx(is_bf16))
      shrink_block_amx(lora, part, rows, count, x, lora->order + first, tokens, &amx);
    else
      shrink_block(lora, part, is_bf16, rows, count, x, lora->order + first, tokens);
  }
  release_amx(&amx);
}

/* Adds to tiles of `rows` rows: their n columns from c on are those from `column` of the product. */
static void expand_tiles(const Addition *add, int is_bf16, long column, long n, long first_row,
                         long rows, float *c, Amx *amx) {
  for (long p = 0; p < add->group->count; p++) {
    const LoraPart *part = &add->group->parts[p];
    const long end = part->column + part->out_features;
    const long from = column > part->column ? column : part->column;
    const long to = column + n < end ? column + n : end;
    if (from >= to) continue;
    const Piece piece = {part, from - part->column, (int)(to - from), first_row, c + from - column};
    if (uses_amx(is_bf16) && add->lora->order != NULL)
      expand_piece_amx(add, &piece, rows, amx);
    else if (is_bf16)
      expand_piece(1, add, &piece, rows);
    else
      expand_piece(0, add, &piece, rows);
  }
}

#endif
