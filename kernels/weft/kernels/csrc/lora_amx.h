/* The additions of lora.h on AMX, for bfloat16 and tokens that are sorted by adapter (those of
 * experts are not).
 *
 * A rank is kept as the sum of two bfloat16, some 16 bits of it: as a pair along K it is multiplied
 * by the pair of a weight and the same weight. */
#ifndef WEFT_LORA_AMX_H
#define WEFT_LORA_AMX_H

#include "amx.h"
#include "lora.h"

#if HAS_AMX

#define TOKEN_WORDS 1024 /* of K, of 16 tokens, that lie packed at a time */

/* As pairs: what is nearest to x, and what is nearest to the rest. */
INLINE __m512i split_ranks(__m512 x) {
  const __m512i nearest = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x));
  const __m512 rounded = (__m512)_mm512_slli_epi32(nearest, 16);
  const __mmask16 is_finite = _mm512_cmp_ps_mask(rounded - rounded, rounded - rounded, _CMP_ORD_Q);
  const __m512 rest = _mm512_maskz_sub_ps(is_finite, x, rounded);
  const __m512i upper = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(rest));
  return _mm512_or_si512(nearest, _mm512_slli_epi32(upper, 16));
}

/* The ends of `count` rows of K, fewer bytes than a tile is deep, with zeros behind them. */
static void copy_end(char (*end)[64], const char *const *rows, int count, long bytes) {
  memset(end, 0, (size_t)count * 64);
  for (int r = 0; r < count; r++) memcpy(end[r], rows[r], (size_t)bytes);
}

/* Words first .. first + words - 1 of 16 tokens' rows side by side; zeros up to a tile's depth. */
static void pack_tokens(const char *const *rows, long bytes, long first, long words,
                        uint32_t *packed, Prefetch *ahead) {
  ALIGNED char end[16][64];
  for (long w = first; w < first + words; w += AMX_DEPTH, packed += AMX_DEPTH * 16) {
    const char *from[16];
    for (int t = 0; t < 16; t++) from[t] = rows[t] + 4 * w;
    if (bytes - 4 * w < 64) {
      copy_end(end, from, 16, bytes - 4 * w);
      for (int t = 0; t < 16; t++) from[t] = end[t];
    }
    ask_ahead(ahead, ROW_RANK);
    transpose_words(from, AMX_DEPTH, packed, 16);
  }
}

/* Eight ranks of 16 tokens: adds words first .. first + words - 1 of K to tile 0. */
static void shrink_words(const char *a, long bytes, long first, long words,
                         const uint32_t *packed, Prefetch *ahead) {
  const long deep = bytes / 64 * AMX_DEPTH, whole = deep < first + words ? deep : first + words;
  complete_writes();
  for (long w = first; w < whole; w += AMX_DEPTH, packed += AMX_DEPTH * 16) {
    _tile_loadd(6, packed, 64);
    _tile_loadd(4, a + 4 * w, bytes);
    ask_ahead(ahead, ROW_RANK);
    _tile_dpbf16ps(0, 4, 6);
  }
  if (whole == first + words) return;
  ALIGNED char end[ROW_RANK][64];
  const char *from[ROW_RANK];
  for (int r = 0; r < ROW_RANK; r++) from[r] = a + r * bytes + 4 * whole;
  copy_end(end, from, ROW_RANK, bytes - 4 * whole);
  complete_writes();
  _tile_loadd(6, packed, 64);
  _tile_loadd(4, end, 64);
  _tile_dpbf16ps(0, 4, 6);
}

/* Eight ranks of some tokens, from tile 0 to where the ranks of token 0 begin. */
static void store_ranks(uint32_t *shrunk, long width, const int32_t *tokens, int num_tokens) {
  ALIGNED float ranks[16][16];
  ALIGNED uint32_t pairs[16][16];
  const char *rows[16];
  _tile_stored(0, ranks, 64);
  for (int r = 0; r < 16; r++) rows[r] = (const char *)ranks[r % ROW_RANK];
  for (int r = 0; r < ROW_RANK; r++)
    _mm512_store_si512(ranks[r], split_ranks(_mm512_load_ps(ranks[r])));
  transpose_words(rows, 16, pairs[0], 16);
  for (int t = 0; t < num_tokens; t++) memcpy(shrunk + tokens[t] * width, pairs[t], ROW_RANK * 4);
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
    Prefetch this = {.now = {a, a + ROW_RANK * bytes}}, next = {0};
    if (i + 1 < count) {
      next.now.begin = part->a + rows[i + 1] * ROW_RANK * bytes;
      next.now.end = next.now.begin + ROW_RANK * bytes;
    }
    _tile_zero(0);
    for (long first = 0; first < words; first += TOKEN_WORDS) {
      const long some = at_most(words - first, TOKEN_WORDS);
      if (i == 0 || words > TOKEN_WORDS)
        pack_tokens(from, bytes, first, some, packed, &this);
      shrink_words(a, bytes, first, some, packed, &next);
    }
    store_ranks((uint32_t *)lora->shrunk + part->offset + i * ROW_RANK, lora->width, tokens,
                num_tokens);
  }
}

/* Up to 16 ranks of a part and an adapter, and where they are added. */
typedef struct {
  const Piece *piece;
  const uint32_t *shrunk; /* of token 0 */
  long width; /* of a token's */
  const int32_t *rows; /* of b */
  int num_ranks;
} Expansion;

static float *sums_of(const Piece *piece, long token) {
  return piece->c + (token - piece->first_row) * PANEL;
}

/* b[rank][column] = the pair of a weight and itself; zeros elsewhere. */
static void pack_ranks(const Expansion *e, uint32_t *b) {
  const LoraPart *part = e->piece->part;
  const bf16 *weights = (const bf16 *)part->b + e->piece->column;
  const __mmask32 wanted = (__mmask32)(((uint64_t)1 << e->piece->n) - 1);
  for (int r = 0; r < AMX_DEPTH; r++, b += PANEL) {
    __m512i row = _mm512_setzero_si512();
    if (r < e->num_ranks) {
      const long rank = (long)e->rows[r / ROW_RANK] * ROW_RANK + r % ROW_RANK;
      row = _mm512_maskz_loadu_epi16(wanted, weights + rank * part->out_features);
    }
    const __m512i lower = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(row));
    const __m512i upper = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(row, 1));
    _mm512_store_si512(b, _mm512_or_si512(lower, _mm512_slli_epi32(lower, 16)));
    _mm512_store_si512(b + 16, _mm512_or_si512(upper, _mm512_slli_epi32(upper, 16)));
  }
}

/* Adds to the rows `tokens`, at most AMX_ROWS; b as of pack_ranks. */
static void expand_many(const Expansion *e, const int32_t *tokens, int rows, const uint32_t *b,
                        Amx *amx) {
  const Piece *piece = e->piece;
  const uint32_t *first = e->shrunk + tokens[0] * e->width;
  Prefetch none = {0};
  if (tokens[rows - 1] - tokens[0] == rows - 1 && e->num_ranks == AMX_DEPTH && piece->n == PANEL) {
    amx_tile(1, rows, 64, (const char *)first, e->width * 4, b, sums_of(piece, tokens[0]), PANEL,
             &none, amx);
    return;
  }
  ALIGNED uint32_t ranks[AMX_ROWS * AMX_DEPTH]; /* what lies behind the last row is not used */
  ALIGNED float sums[AMX_ROWS * PANEL];
  const __mmask16 wanted = (__mmask16)((1u << e->num_ranks) - 1);
  for (int r = 0; r < rows; r++)
    _mm512_store_si512(ranks + r * AMX_DEPTH,
                       _mm512_maskz_loadu_epi32(wanted, e->shrunk + tokens[r] * e->width));
  amx_tile(0, rows > AMX_DEPTH ? AMX_ROWS : AMX_DEPTH, 64, (const char *)ranks, 64, b, sums, PANEL,
           &none, amx);
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < piece->n; i += VL) {
      float *to = sums_of(piece, tokens[r]) + i;
      const int n = at_most(piece->n - i, VL);
      store_some(to, 0, 0, n, load_some(to, 0, 0, n) + *(vf *)(sums + r * PANEL + i));
    }
}

#define FEW_ROWS 4

/* The same for up to FEW_ROWS rows and 16 columns, by vectors, as amx_row does. */
INLINE void expand_few(const Expansion *e, const int32_t *tokens, const int rows, int column) {
  const LoraPart *part = e->piece->part;
  const int n = at_most(e->piece->n - column, 16);
  const __mmask16 wanted = (__mmask16)((1u << n) - 1);
  const bf16 *weights = (const bf16 *)part->b + e->piece->column + column;
  const uint32_t *pairs[FEW_ROWS];
  __m512 first[FEW_ROWS], second[FEW_ROWS];
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++) {
    pairs[r] = e->shrunk + tokens[r] * e->width;
    first[r] = second[r] = _mm512_setzero_ps();
  }
  for (int rank = 0; rank < e->num_ranks; rank++) {
    const long row = (long)e->rows[rank / ROW_RANK] * ROW_RANK + rank % ROW_RANK;
    const __m256i words = _mm256_maskz_loadu_epi16(wanted, weights + row * part->out_features);
    const __m512 b = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
      const __m512i pair = _mm512_set1_epi32((int)pairs[r][rank]);
      first[r] = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(pair, 16), b, first[r]);
      const __m512i upper = _mm512_and_si512(pair, _mm512_set1_epi32((int)0xffff0000u));
      second[r] = _mm512_fmadd_ps((__m512)upper, b, second[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++) {
    float *to = sums_of(e->piece, tokens[r]) + column;
    const __m512 sum = _mm512_add_ps(first[r], second[r]);
    _mm512_mask_storeu_ps(to, wanted, _mm512_add_ps(_mm512_maskz_loadu_ps(wanted, to), sum));
  }
}

/* Adds to a segment's rows `tokens` of a unit of work. */
static void expand_segment(const Expansion *e, const int32_t *tokens, long count, Amx *amx) {
  if (count >= 2 * FEW_ROWS) {
    ALIGNED uint32_t b[AMX_DEPTH * PANEL];
    pack_ranks(e, b);
    for (long at = 0; at < count; at += AMX_ROWS)
      expand_many(e, tokens + at, at_most(count - at, AMX_ROWS), b, amx);
    return;
  }
  for (long at = 0; at < count; at += FEW_ROWS)
    for (int column = 0; column < e->piece->n; column += 16)
      switch (at_most(count - at, FEW_ROWS)) {
        case 1: expand_few(e, tokens + at, 1, column); break;
        case 2: expand_few(e, tokens + at, 2, column); break;
        case 3: expand_few(e, tokens + at, 3, column); break;
        default: expand_few(e, tokens + at, 4, column);
      }
}

/* Adds to `rows` rows. */
static void expand_piece_amx(const Addition *add, const Piece *piece, long rows, Amx *amx) {
  const Lora *lora = add->lora;
  const LoraPart *part = piece->part;
  const long first = piece->first_row, last = first + rows;
  flush_subnormals(amx);
  for (long s = 0; s < lora->segments; s++) {
    if (lora->blocks[s + 1] == lora->blocks[s]) continue;
    const long begin = first_place(lora->order, lora->starts[s], lora->starts[s + 1], first);
    const long end = first_place(lora->order, begin, lora->starts[s + 1], last);
    const int32_t *table = lora_rows(part, part->b_table, add->layer, lora->slots[s]);
    const long count = lora_count(part, add->layer, lora->slots[s]);
    for (long i = 0; begin < end && i < count; i += AMX_DEPTH / ROW_RANK) {
      const Expansion some = {.piece = piece, .width = lora->width, .rows = table + i,
                              .shrunk = (const uint32_t *)lora->shrunk + part->offset + i * ROW_RANK,
                              .num_ranks = at_most(count - i, AMX_DEPTH / ROW_RANK) * ROW_RANK};
      expand_segment(&some, lora->order + begin, end - begin, amx);
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
