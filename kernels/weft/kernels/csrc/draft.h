/* The draft head of EAGLE-3 (Li et al. 2025) by one team of threads: its K and V for a step of the
 * target, and chains of its most likely tokens. */
#ifndef WEFT_DRAFT_H
#define WEFT_DRAFT_H

#include "attention.h"
#include "linear.h"

/* Declared from this text in weft/kernels/shared/cpu.py. */
typedef struct {
  const Weight *fc, *qkv, *kv, *o, *gate_up, *down, *lm_head;
  const void *input_norm, *hidden_norm, *post_norm, *norm; /* [hidden] */
  const void *embedding; /* [vocab, hidden] */
  const int64_t *target_ids; /* [rows of lm_head] */
  const float *cos_sin; /* [max_positions, dim] */
  int64_t vocab, hidden, max_positions, heads;
  float eps, scale;
  int32_t norms_first; /* the normed state, not the state itself, is the layer's residual */
} DraftHead;

/* A step of the target. */
typedef struct {
  const void *aux; /* [rows, in_features of fc] */
  void *g; /* [rows, hidden], written */
  void *kept; /* [places, hidden], by slot of a request: g of its last row; read, then written */
  const int64_t *token_ids, *positions, *slots; /* [rows] */
  const int32_t *cu_q_lens; /* [requests + 1] */
  const int64_t *request_slots; /* [requests] */
  const int64_t *ancestors; /* [rows] where rows form trees, as of attention; else NULL */
  int64_t rows, requests, places;
  void *scratch; /* rows * entries_width elements */
} DraftEntries;

/* Entries that the team of the target's layers writes after these layers; declared from
 * this text in weft/kernels/shared/cpu.py. */
typedef struct {
  const DraftHead *head;
  const DraftEntries *entries;
  int64_t layer; /* The head's, in the pool. */
} DraftWrite;

/* Chains of `depth` tokens; a step runs the first counts[step] requests. */
typedef struct {
  void *state; /* [requests, hidden], written */
  int64_t *token_ids; /* [depth + 1, requests]: the first row is read, the others are written */
  const int64_t *positions, *slots; /* [depth, requests] */
  const int32_t *kv_lens; /* [depth, requests] */
  const int64_t *counts; /* [depth], none larger than the one before */
  const int32_t *page_table; /* [requests, max_pages], rows table_stride apart */
  const int32_t *cu_q_lens; /* [requests + 1]: 0, 1, 2 ... */
  int64_t depth, requests, max_pages, table_stride;
  void *scratch; /* requests * chain_width elements */
  float *logits; /* [requests, rows of lm_head] */
} DraftChain;

#define MAX_DEPTH 32

static long entries_width(const DraftHead *head) {
  return 2 * head->hidden + head->kv->out_features;
}

static long chain_width(const DraftHead *head, long dim) {
  return 3 * head->hidden + head->qkv->out_features + 2 * head->heads * dim +
         head->gate_up->out_features / 2;
}

/* Products of a chain's step; entries use the first two places. */
enum { DRAFT_QKV, DRAFT_O, DRAFT_GATE_UP, DRAFT_DOWN, DRAFT_HEAD, DRAFT_PRODUCTS };
enum { ENTRIES_FC, ENTRIES_KV };

/* How these products are divided, for as many threads as a team may have. */
typedef struct {
  int threads;
  Range products[DRAFT_PRODUCTS][MAX_THREADS];
} DraftDivision;

static void plain_product(const Weight *w, const void *x, long rows, Target to, DraftDivision *d,
                          int product, const Member *me) {
  linear_share(w, (Input){.rows = x}, rows, to, (Addition){NULL, NULL, 0}, d->products[product],
               d->threads, me->thread);
}

/* joined [2 * hidden] = norm(embedding of a token), norm(state). */
static void join_row(const DraftHead *head, int is_bf16, char *joined, int64_t token,
                     const void *state) {
  const long n = head->hidden, bytes = n * (is_bf16 ? 2 : 4);
  const char *embedded = (const char *)head->embedding + token * bytes;
  if (is_bf16) {
    norm_row(1, 0, joined, embedded, NULL, head->input_norm, 0, n, head->eps);
    norm_row(1, 0, joined + bytes, state, NULL, head->hidden_norm, 0, n, head->eps);
  } else {
    norm_row(0, 0, joined, embedded, NULL, head->input_norm, 0, n, head->eps);
    norm_row(0, 0, joined + bytes, state, NULL, head->hidden_norm, 0, n, head->eps);
  }
}

/* Request that a row belongs to: the last that begins at or before it. */
static long request_of(const DraftEntries *e, long row) {
  long low = 0, high = e->requests;
  while (high - low > 1) {
    long middle = (low + high) / 2;
    if (e->cu_q_lens[middle] <= row) low = middle;
    else high = middle;
  }
  return low;
}

/* The row that a row follows, which is not its request's first: its nearest ancestor. */
static long row_before(const DraftEntries *e, long row, long first) {
  const int64_t word = e->ancestors == NULL ? -1 : e->ancestors[row];
  if (word < 0 || row - first > 63) return row - 1;
  const uint64_t seen = (uint64_t)word & (((uint64_t)1 << (row - first)) - 1);
  return first + (seen == 0 ? 0 : 63 - __builtin_clzll(seen));
}

/* The state before each row: that of the row it follows or, for a request's first row, the kept
 * one. */
static void join_entries(const DraftHead *head, int is_bf16, const DraftEntries *e, char *joined,
                         const Member *me) {
  const long bytes = head->hidden * (is_bf16 ? 2 : 4);
  Rows mine = rows_of(me, e->rows);
  for (long row = mine.first; row < mine.last; row++) {
    const long request = request_of(e, row), first = e->cu_q_lens[request];
    const char *state = first < row
                            ? (const char *)e->g + row_before(e, row, first) * bytes
                            : (const char *)e->kept + e->request_slots[request] * bytes;
    join_row(head, is_bf16, joined + 2 * row * bytes, e->token_ids[row], state);
    if (e->positions[row] == 0) memset(joined + (2 * row + 1) * bytes, 0, bytes);
  }
}

static void keep_last(const DraftHead *head, int is_bf16, const DraftEntries *e, const Member *me) {
  const long bytes = head->hidden * (is_bf16 ? 2 : 4);
  Rows mine = rows_of(me, e->requests);
  for (long r = mine.first; r < mine.last; r++)
    if (e->cu_q_lens[r + 1] > e->cu_q_lens[r])
      memcpy((char *)e->kept + e->request_slots[r] * bytes,
             (const char *)e->g + (e->cu_q_lens[r + 1] - 1) * bytes, bytes);
}

static void divide_entries(const DraftHead *head, const DraftEntries *e, DraftDivision *d) {
  divide_work(d->products[ENTRIES_FC], d->threads, linear_units(head->fc, e->rows));
  divide_work(d->products[ENTRIES_KV], d->threads, linear_units(head->kv, e->rows));
}

static void entries_share(const DraftHead *head, const DraftEntries *e, const Pool *pool,
                          long layer, DraftDivision *d, Member *me) {
  const int is_bf16 = pool->is_bf16;
  char *joined = e->scratch, *kv = joined + 2 * e->rows * head->hidden * (is_bf16 ? 2 : 4);
  Rope rope = {.qkv = kv, .positions = e->positions, .slots = e->slots, .cos_sin = head->cos_sin,
               .max_positions = head->max_positions, .rows = e->rows, .eps = head->eps};
  plain_product(head->fc, e->aux, e->rows, (Target){e->g, NULL, is_bf16}, d, ENTRIES_FC, me);
  wait_for_all(me);
  join_entries(head, is_bf16, e, joined, me);
  wait_for_all(me);
  keep_last(head, is_bf16, e, me);
  plain_product(head->kv, joined, e->rows, (Target){kv, NULL, is_bf16}, d, ENTRIES_KV, me);
  wait_for_all(me);
  rope_share(&rope, pool, layer, me);
}

static Status check_entries(const DraftHead *head, const DraftEntries *e, const Pool *pool) {
  Rope rope = {.positions = e->positions, .slots = e->slots, .rows = e->rows,
               .max_positions = head->max_positions};
  int bad = 0;
  for (long row = 0; row < e->rows; row++)
    bad |= (uint64_t)e->token_ids[row] >= (uint64_t)head->vocab;
  for (long r = 0; r < e->requests; r++)
    bad |= (uint64_t)e->request_slots[r] >= (uint64_t)e->places;
  if (bad) return BAD_TOKEN;
  if (e->cu_q_lens[0] != 0 || e->cu_q_lens[e->requests] != e->rows) return BAD_LENGTHS;
  for (long r = 0; r < e->requests; r++)
    if (e->cu_q_lens[r + 1] < e->cu_q_lens[r]) return BAD_LENGTHS;
  return check_rope(&rope, pool);
}

/* The first of the largest of n numbers. */
static long largest_of(const float *x, long n) {
  vf highest = vf_splat(-INFINITY);
  long i = 0;
  for (; i + VL <= n; i += VL) highest = vf_max(load_some(x, 0, i, VL), highest);
  float most = vf_highest(highest);
  for (; i < n; i++) most = x[i] > most ? x[i] : most;
  for (i = 0; i < n; i++)
    if (x[i] == most) return i;
  return 0;
}

static void divide_chain(const DraftHead *head, const DraftChain *c, long step, DraftDivision *d) {
  const Weight *weights[] = {head->qkv, head->o, head->gate_up, head->down, head->lm_head};
  for (int i = 0; i < DRAFT_PRODUCTS; i++)
    divide_work(d->products[i], d->threads, linear_units(weights[i], c->counts[step]));
}

static Attention chain_attention(const DraftHead *head, const DraftChain *c, long step) {
  return (Attention){.page_table = c->page_table, .cu_q_lens = c->cu_q_lens,
                     .kv_lens = c->kv_lens + step * c->requests, .requests = c->counts[step],
                     .max_pages = c->max_pages, .table_stride = c->table_stride,
                     .heads = head->heads, .scale = head->scale, .first_seen = 1};
}

/* Computes one more token for the first counts[step] requests. */
static void chain_step(const DraftHead *head, const DraftChain *c, long step, const Pool *pool,
                       long layer, Plan *plan, DraftDivision *d, Member *me) {
  const int is_bf16 = pool->is_bf16;
  const long rows = c->counts[step], n = head->hidden, size = is_bf16 ? 2 : 4;
  const long at = step * c->requests;
  const long q_width = head->heads * pool->dim;
  char *joined = c->scratch, *normed = joined + 2 * rows * n * size;
  char *qkv = normed + rows * n * size, *q = qkv + rows * head->qkv->out_features * size;
  char *mixed = q + rows * q_width * size, *inner = mixed + rows * q_width * size;
  char *state = c->state;
  Rope rope = {.qkv = qkv, .positions = c->positions + at, .slots = c->slots + at,
               .cos_sin = head->cos_sin, .max_positions = head->max_positions, .q_out = q,
               .rows = rows, .heads = head->heads, .eps = head->eps};
  Attention attention = chain_attention(head, c, step);
  attention.q = q;
  attention.out = mixed;
  const Target to_state = {state, state, is_bf16};

  Rows mine = rows_of(me, rows);
  for (long r = mine.first; r < mine.last; r++) {
    char *row = joined + 2 * r * n * size;
    join_row(head, is_bf16, row, c->token_ids[at + r], state + r * n * size);
    if (head->norms_first) memcpy(state + r * n * size, row + n * size, (size_t)(n * size));
  }
  wait_for_all(me);
  plain_product(head->qkv, joined, rows, (Target){qkv, NULL, is_bf16}, d, DRAFT_QKV, me);
  wait_for_all(me);
  rope_share(&rope, pool, layer, me);
  wait_for_all(me);
  attention_share(&attention, pool, plan, layer, me);
  wait_for_all(me);
  plain_product(head->o, mixed, rows, to_state, d, DRAFT_O, me);
  wait_for_all(me);
  norm_share(is_bf16, 0, normed, state, NULL, head->post_norm, rows, n, head->eps, me);
  wait_for_all(me);
  plain_product(head->gate_up, normed, rows, (Target){inner, NULL, is_bf16}, d, DRAFT_GATE_UP, me);
  wait_for_all(me);
  plain_product(head->down, inner, rows, to_state, d, DRAFT_DOWN, me);
  wait_for_all(me);
  norm_share(is_bf16, 0, normed, state, NULL, head->norm, rows, n, head->eps, me);
  wait_for_all(me);
  plain_product(head->lm_head, normed, rows, (Target){c->logits, NULL, 0}, d, DRAFT_HEAD, me);
  wait_for_all(me);
  const long width = head->lm_head->out_features;
  for (long r = mine.first; r < mine.last; r++)
    c->token_ids[at + c->requests + r] = head->target_ids[largest_of(c->logits + r * width, width)];
  wait_for_all(me);
}

static void chain_share(const DraftHead *head, const DraftChain *c, const Pool *pool, long layer,
                        Plan *plans, DraftDivision *divisions, Member *me) {
  for (long step = 0; step < c->depth; step++) {
    /* Two divisions alternate, as for decoder layers. */
    if (me->thread == 0 && step + 1 < c->depth)
      divide_chain(head, c, step + 1, &divisions[(step + 1) % 2]);
    chain_step(head, c, step, pool, layer, &plans[step], &divisions[step % 2], me);
  }
}

static Status check_chain(const DraftHead *head, const DraftChain *c, const Pool *pool) {
  for (long step = 0; step < c->depth; step++) {
    const long at = step * c->requests, rows = c->counts[step];
    if (rows < 0 || rows > (step == 0 ? c->requests : c->counts[step - 1])) return BAD_LENGTHS;
    Rope rope = {.positions = c->positions + at, .slots = c->slots + at, .rows = rows,
                 .max_positions = head->max_positions};
    Status status = check_rope(&rope, pool);
    if (status != FINE) return status;
    Attention attention = chain_attention(head, c, step);
    status = check_attention(&attention, pool, rows);
    if (status != FINE) return status;
  }
  int bad = 0;
  for (long r = 0; r < c->requests; r++)
    bad |= (uint64_t)c->token_ids[r] >= (uint64_t)head->vocab;
  return bad ? BAD_TOKEN : FINE;
}

#endif
