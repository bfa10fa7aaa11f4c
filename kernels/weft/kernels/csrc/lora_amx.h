/* The additions of lora.h on AMX, for bfloat16 and tokens that are sorted by adapter (those of
 * experts are not).
 *
 * A rank is kept as the sum of two bfloat16, about 16 bits of it: the nearest bfloat16, and the one
 * nearest to the rest. Tokens' ranks lie in the order of adapters, so that those of one adapter are
 * loaded as a tile. A row of ranks has pairs of nearest values first, then pairs of rests; both are
 * multiplied by the same words of b. */
#ifndef WEFT_LORA_AMX_H
#define WEFT_LORA_AMX_H

#include "amx.h"
#include "lora.h"

/* A unit of work: some tokens of one adapter, and a part that changes them. */
typedef struct {
  const LoraPart *part;
  const int32_t *rows; /* of a */
  long count;
  long block; /* of tokens */
  long first; /* place */
  int tokens;
} Shrinkage;

static Shrinkage shrinkage_of(const Addition *add, int64_t unit) {
  const Lora *lora = add->lora;
  const LoraPart *part = &add->group->parts[unit % add->group->count];
  const long block = unit / add->group->count;
  long s = 0, last = lora->segments;
  while (last - s > 1) { /* the last segment whose blocks begin at this one or before */
    const long middle = (s + last) / 2;
    if (lora->blocks[middle] <= block)
      s = middle;
    else
      last = middle;
  }
  const long first = lora->starts[s] + (block - lora->blocks[s]) * block_tokens();
  return (Shrinkage){part, lora_rows(part, part->table, add->layer, lora->slots[s]),
                     lora_count(part, add->layer, lora->slots[s]), block, first,
                     at_most(lora->starts[s + 1] - first, block_tokens())};
}

/* Share `turn` of `turns` of what shrinking for the next product reads of a. Threads take units of
 * both in the same order, and so find in their caches what they prefetched. */
static void ask_for_a(const Addition *add, int is_bf16, long turn, long turns, Asked *asked) {
  const Addition next = {.lora = add->lora, .group = add->next, .layer = add->next_layer};
  if (next.group == NULL) return;
  const int64_t begin = shrink_units(&next) * turn, end = shrink_units(&next) * (turn + 1);
  for (int64_t unit = begin / turns; unit * turns < end; unit++) {
    const Shrinkage s = shrinkage_of(&next, unit);
    const long bytes = ROW_RANK * s.part->in_features * (is_bf16 ? 2 : 4);
    const int64_t from = begin - unit * turns, to = end - unit * turns;
    const long first = from > 0 ? bytes * from / turns : 0;
    const long last = to < turns ? bytes * to / turns : bytes;
    for (long i = 0; i < s.count; i++)
      ask(asked, s.part->a + s.rows[i] * bytes + first, last - first);
  }
}

#if HAS_AMX

#define TOKEN_WORDS 1024 /* of K, of 16 tokens, that lie packed at a time */

/* The bfloat16 nearest to x, as floats. */
INLINE __m512 nearest_to(__m512 x) {
  const __m512i nearest = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x));
  return (__m512)_mm512_slli_epi32(nearest, 16);
}

/* The bfloat16 nearest to the rest of x. */
INLINE __m512 rest_of(__m512 x, __m512 nearest) {
  const __mmask16 is_finite = _mm512_cmp_ps_mask(nearest - nearest, nearest - nearest, _CMP_ORD_Q);
  return nearest_to(_mm512_maskz_sub_ps(is_finite, x, nearest));
}

/* Of floats that are bfloat16. */
INLINE __m512i pair_of(__m512 first, __m512 second) {
  return _mm512_or_si512(_mm512_srli_epi32((__m512i)first, 16), (__m512i)second);
}

/* The ends of `count` rows of K, fewer bytes than a tile is deep, followed by zeros. */
static void copy_end(char (*end)[64], const char *const *rows, int count, long bytes) {
  memset(end, 0, (size_t)count * 64);
  for (int r = 0; r < count; r++) memcpy(end[r], rows[r], (size_t)bytes);
}

/* 16 tokens of a unit of work, packed for all parts of its group. */
typedef struct {
  ALIGNED uint32_t words[TOKEN_WORDS * 16];
  long block; /* of tokens; -1: none */
  long first; /* word of K */
} Packed;

/* Words first .. first + words - 1 of 16 tokens' rows side by side; zeros up to a tile's depth. */
static void pack_tokens(const char *const *rows, long bytes, long first, long words,
                        uint32_t *packed) {
  ALIGNED char end[16][64];
  for (long w = first; w < first + words; w += AMX_DEPTH, packed += AMX_DEPTH * 16) {
    const char *from[16];
    for (int t = 0; t < 16; t++) from[t] = rows[t] + 4 * w;
    if (bytes - 4 * w < 64) {
      copy_end(end, from, 16, bytes - 4 * w);
      for (int t = 0; t < 16; t++) from[t] = end[t];
    }
    transpose_words(from, AMX_DEPTH, packed, 16);
  }
}

/* Adds one tile's depth to tile 0 or 1, which take turns: a multiplication waits for the one before
 * it that adds to the same tile. */
INLINE void shrink_depth(long word, const char *a, long stride, const uint32_t *packed) {
  _tile_loadd(6, packed, 64);
  _tile_loadd(4, a, stride);
  if (word / AMX_DEPTH % 2 == 0)
    _tile_dpbf16ps(0, 4, 6);
  else
    _tile_dpbf16ps(1, 4, 6);
}

/* `ranks` ranks of 16 tokens: adds words first .. first + words - 1 of K to tiles 0 and 1. */
static void shrink_words(const char *a, int ranks, long bytes, long first, long words,
                         const uint32_t *packed) {
  const long deep = bytes / 64 * AMX_DEPTH, whole = deep < first + words ? deep : first + words;
  complete_writes();
  for (long w = first; w < whole; w += AMX_DEPTH, packed += AMX_DEPTH * 16)
    shrink_depth(w, a + 4 * w, bytes, packed);
  if (whole == first + words) return;
  ALIGNED char end[2 * ROW_RANK][64];
  const char *from[2 * ROW_RANK];
  for (int r = 0; r < ranks; r++) from[r] = a + r * bytes + 4 * whole;
  copy_end(end, from, ranks, bytes - 4 * whole);
  complete_writes();
  shrink_depth(whole, end[0], 64, packed);
}

/* The ranks of some tokens, from tiles 0 and 1 to these tokens' places. */
static void store_ranks(uint32_t *places, long width, int ranks, int num_tokens) {
  ALIGNED float sums[2][16][16];
  ALIGNED uint32_t words[16][16], pairs[16][16];
  const char *rows[16];
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  complete_writes();
  for (int r = 0; r < ranks; r += 2) {
    const __m512 even = _mm512_add_ps(_mm512_load_ps(sums[0][r]), _mm512_load_ps(sums[1][r]));
    const __m512 odd =
        _mm512_add_ps(_mm512_load_ps(sums[0][r + 1]), _mm512_load_ps(sums[1][r + 1]));
    const __m512 first = nearest_to(even), second = nearest_to(odd);
    const int word = r / ROW_RANK * ROW_RANK + r % ROW_RANK / 2;
    _mm512_store_si512(words[word], pair_of(first, second));
    _mm512_store_si512(words[word + ROW_RANK / 2],
                       pair_of(rest_of(even, first), rest_of(odd, second)));
  }
  for (int r = 0; r < 16; r++) rows[r] = (const char *)words[r % ranks];
  transpose_words(rows, 16, pairs[0], 16);
  for (int t = 0; t < num_tokens; t++) memcpy(places + t * width, pairs[t], (size_t)ranks * 4);
}

/* The ranks, as pairs. Two rows of a that follow each other are multiplied at once. */
static void shrink_block_amx(const Lora *lora, const Shrinkage *s, const char *x, Packed *packed,
                             Amx *amx) {
  const int32_t *tokens = lora->order + s->first;
  const long bytes = s->part->in_features * 2, words = (bytes + 3) / 4;
  uint32_t *places = (uint32_t *)lora->shrunk + s->first * lora->width + s->part->offset;
  const char *from[16];
  for (int t = 0; t < 16; t++) from[t] = x + tokens[t < s->tokens ? t : 0] * bytes;
  for (long i = 0; i < s->count;) {
    const int rows = i + 1 < s->count && s->rows[i + 1] == s->rows[i] + 1 ? 2 : 1;
    const char *a = s->part->a + s->rows[i] * ROW_RANK * bytes;
    set_up_amx(amx, rows * ROW_RANK);
    _tile_zero(0);
    _tile_zero(1);
    for (long first = 0; first < words; first += TOKEN_WORDS) {
      const long some = at_most(words - first, TOKEN_WORDS);
      if (packed->block != s->block || packed->first != first)
        pack_tokens(from, bytes, first, some, packed->words);
      packed->block = s->block;
      packed->first = first;
      shrink_words(a, rows * ROW_RANK, bytes, first, some, packed->words);
    }
    store_ranks(places + i * ROW_RANK, lora->width, rows * ROW_RANK, s->tokens);
    i += rows;
  }
}

/* Up to two rows of ranks of an adapter in a part, and what they are added to. */
typedef struct {
  const LoraPart *part;
  const int32_t *rows; /* of b */
  int num_rows;
  long ahead;             /* bytes from a piece of b to the same row's in the next panel */
  const uint32_t *shrunk; /* of place 0 */
  long width;             /* of a place's */
  const int32_t *order;
  long first_row; /* of the product, that row 0 of a slice belongs to */
} Expansion;

/* Columns of a piece that lie in one block of b. */
typedef struct {
  long column; /* of the part's: where the block begins */
  __mmask16 wanted; /* of the block's */
  float *c; /* [rows][PANEL]: where these begin */
} Slice;

#define MOST_SLICES 3 /* of a panel: it may begin and end within a block */

static int slices_of(const Piece *piece, Slice *slices) {
  int count = 0;
  for (int done = 0; done < piece->n; count++) {
    const int first = (int)((piece->column + done) % B_COLUMNS);
    const int n = at_most(piece->n - done, B_COLUMNS - first);
    slices[count] = (Slice){piece->column + done - first,
                            (__mmask16)(((1u << n) - 1) << first), piece->c + done};
    done += n;
  }
  return count;
}

/* Adds the sums of 16 columns to those columns that are wanted. */
INLINE void add_to_slice(const Expansion *e, const Slice *slice, long place, __m512 sum) {
  float *to = slice->c + (e->order[place] - e->first_row) * PANEL;
  const __mmask16 all = 0xffff;
  if (slice->wanted == all) {
    _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), sum));
    return;
  }
  const __mmask16 some = (__mmask16)((1u << __builtin_popcount(slice->wanted)) - 1);
  const __m512 added = _mm512_maskz_compress_ps(slice->wanted, sum);
  _mm512_mask_storeu_ps(to, some, _mm512_add_ps(_mm512_maskz_loadu_ps(some, to), added));
}

/* The words of b twice, for the pairs of nearest values and for those of rests; zeros after the
 * last row. */
static void pack_ranks(const Expansion *e, long column, uint32_t *b) {
  for (int i = 0; i < AMX_DEPTH / ROW_RANK; i++, b += ROW_RANK * 16) {
    const int is_there = i < e->num_rows;
    const char *words = is_there ? words_of_b(1, e->part, e->rows[i], column) : NULL;
    for (int w = 0; w < ROW_RANK / 2; w++) {
      if (is_there) __builtin_prefetch(words + e->ahead + w * 64, 0, 2);
      const __m512i word = is_there ? _mm512_loadu_si512(words + w * 64) : _mm512_setzero_si512();
      _mm512_store_si512(b + w * 16, word);
      _mm512_store_si512(b + (w + ROW_RANK / 2) * 16, word);
    }
  }
}

/* Adds to the tokens at `count` places, 16 at a time. */
static void expand_many(const Expansion *e, const Slice *slices, int num_slices, long first,
                        long count, Amx *amx) {
  ALIGNED uint32_t b[MOST_SLICES][AMX_DEPTH * 16];
  ALIGNED uint32_t ranks[AMX_DEPTH * AMX_DEPTH];
  ALIGNED float sums[AMX_DEPTH * 16];
  for (int i = 0; i < num_slices; i++) pack_ranks(e, slices[i].column, b[i]);
  set_up_amx(amx, AMX_DEPTH);
  for (long done = 0; done < count; done += AMX_DEPTH) {
    const int some = at_most(count - done, AMX_DEPTH);
    /* Up to 16 places are loaded; those after the last one do not matter. */
    const uint32_t *from = e->shrunk + (first + done) * e->width;
    complete_writes();
    if (e->num_rows == 2) {
      _tile_loadd(4, from, e->width * 4);
    } else {
      for (int t = 0; t < some; t++)
        _mm512_store_si512(ranks + t * AMX_DEPTH,
                           _mm512_maskz_loadu_epi32(0xff, from + t * e->width));
      complete_writes();
      _tile_loadd(4, ranks, 64);
    }
    for (int i = 0; i < num_slices; i++) {
      _tile_loadd(6, b[i], 64);
      _tile_zero(0);
      _tile_dpbf16ps(0, 4, 6);
      _tile_stored(0, sums, 64);
      complete_writes();
      for (int t = 0; t < some; t++)
        add_to_slice(e, &slices[i], first + done + t, _mm512_load_ps(sums + t * 16));
    }
  }
}

#define FEW_ROWS 4

/* The same for up to FEW_ROWS places and one slice, by vectors, as amx_row does. */
INLINE void expand_few(const Expansion *e, const Slice *slice, const int rows, long first) {
  const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
  __m512 even[FEW_ROWS], odd[FEW_ROWS];
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++) even[r] = odd[r] = _mm512_setzero_ps();
  for (int i = 0; i < e->num_rows; i++) {
    const char *words = words_of_b(1, e->part, e->rows[i], slice->column);
    const uint32_t *pairs = e->shrunk + first * e->width + i * ROW_RANK;
    for (int w = 0; w < ROW_RANK / 2; w++) __builtin_prefetch(words + e->ahead + w * 64, 0, 2);
#pragma GCC unroll 8
    for (int w = 0; w < ROW_RANK; w++) {
      const __m512i word = _mm512_loadu_si512(words + w % (ROW_RANK / 2) * 64);
      const __m512 lower = (__m512)_mm512_slli_epi32(word, 16);
      const __m512 higher = (__m512)_mm512_and_si512(word, upper);
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) {
        const __m512i pair = _mm512_set1_epi32((int)pairs[r * e->width + w]);
        even[r] = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(pair, 16), lower, even[r]);
        odd[r] = _mm512_fmadd_ps((__m512)_mm512_and_si512(pair, upper), higher, odd[r]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++)
    add_to_slice(e, slice, first + r, _mm512_add_ps(even[r], odd[r]));
}

/* Adds to the tokens at `count` places. */
static void expand_places(const Expansion *e, const Slice *slices, int num_slices, long first,
                          long count, Amx *amx) {
  if (count >= 2 * FEW_ROWS) {
    expand_many(e, slices, num_slices, first, count, amx);
    return;
  }
  for (const long end = first + count; first < end; first += FEW_ROWS)
    for (int i = 0; i < num_slices; i++)
      switch (at_most(end - first, FEW_ROWS)) {
        case 1: expand_few(e, &slices[i], 1, first); break;
        case 2: expand_few(e, &slices[i], 2, first); break;
        case 3: expand_few(e, &slices[i], 3, first); break;
        default: expand_few(e, &slices[i], 4, first);
      }
}

/* Adds to `rows` rows. */
static void expand_piece_amx(const Addition *add, const Piece *piece, long rows, Amx *amx) {
  const Lora *lora = add->lora;
  const LoraPart *part = piece->part;
  const long first = piece->first_row, last = first + rows;
  Slice slices[MOST_SLICES];
  const int num_slices = slices_of(piece, slices);
  flush_subnormals(amx);
  for (long s = 0; s < lora->segments; s++) {
    if (lora->blocks[s + 1] == lora->blocks[s]) continue;
    const long begin = first_place(lora->order, lora->starts[s], lora->starts[s + 1], first);
    const long end = first_place(lora->order, begin, lora->starts[s + 1], last);
    const int32_t *table = lora_rows(part, part->b_table, add->layer, lora->slots[s]);
    const long count = lora_count(part, add->layer, lora->slots[s]);
    for (long i = 0; begin < end && i < count; i += AMX_DEPTH / ROW_RANK) {
      const Expansion some = {.part = part, .rows = table + i,
                              .num_rows = at_most(count - i, AMX_DEPTH / ROW_RANK),
                              .ahead = (long)piece->n * ROW_RANK * 2,
                              .shrunk = (const uint32_t *)lora->shrunk + part->offset + i * ROW_RANK,
                              .width = lora->width, .order = lora->order, .first_row = first};
      expand_places(&some, slices, num_slices, begin, end - begin, amx);
    }
  }
}

/* As shrink_share. */
static void shrink_share_amx(const Addition *add, const char *x, Range *ranges, int threads,
                             int thread) {
  Packed packed;
  packed.block = -1;
  Amx amx = {0};
  int at = 0;
  for (int64_t unit; (unit = next_unit(ranges, threads, thread, &at)) >= 0;) {
    const Shrinkage s = shrinkage_of(add, unit);
    shrink_block_amx(add->lora, &s, x, &packed, &amx);
  }
  release_amx(&amx);
}

#else

static void shrink_share_amx(const Addition *add, const char *x, Range *ranges, int threads,
                             int thread) {
  (void)add, (void)x, (void)ranges, (void)threads, (void)thread;
}
static void expand_piece_amx(const Addition *add, const Piece *piece, long rows, Amx *amx) {
  (void)add, (void)piece, (void)rows, (void)amx;
}

#endif

/* This thread's share of shrinking x [tokens, in_features]; `ranges` divide `shrink_units`. */
static void shrink_share(const Addition *add, int is_bf16, const void *x, Range *ranges,
                         int threads, int thread) {
  if (uses_amx(is_bf16)) {
    shrink_share_amx(add, x, ranges, threads, thread);
    return;
  }
  const Lora *lora = add->lora;
  int at = 0;
  for (int64_t unit; (unit = next_unit(ranges, threads, thread, &at)) >= 0;) {
    const Shrinkage s = shrinkage_of(add, unit);
    shrink_block(lora, s.part, is_bf16, s.rows, s.count, x, lora->order + s.first, s.tokens);
  }
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
