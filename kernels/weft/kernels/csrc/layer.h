/* A stack of decoder layers (Llama, Qwen2, Qwen3) by one team of threads: at small batches starting
 * a team for each operation would take about as long as the operations. */
#ifndef WEFT_LAYER_H
#define WEFT_LAYER_H

#include "attention.h"
#include "linear.h"
#include "lora.h"
#include "peers.h"

/* Declared from this text in weft/kernels/shared/cpu.py. */
typedef struct {
  const Weight *qkv, *o, *gate_up, *down;
  const void *input_norm, *post_norm, *q_norm, *k_norm; /* the last two may be null */
  float eps;
  int64_t window; /* as in Attention */
  int64_t group; /* of pages; 0: the batch's own table */
  int64_t pool_shift; /* added to its number, it gives its index in the group's pool */
} Layer;

/* A step as a further group of layers sees it; the lengths are the batch's. */
typedef struct {
  Pool pool;
  const int32_t *page_table; /* these three as in Attention */
  int64_t max_pages, table_stride;
  const int64_t *slots; /* as in Batch */
} Pages;

typedef struct {
  Attention attention; /* q and out are set here */
  const int64_t *positions;
  const int64_t *slots;
  const float *cos_sin;
  int64_t max_positions;
  int64_t rows;
  void *scratch; /* rows * scratch_width elements, see layer_scratch_width */
  const Lora *lora; /* or null */
  const Pages *further; /* of the groups from 1 on, or null */
  int64_t num_further;
  Peers *peers; /* ranks that have the other shares of each layer, or null */
  float *partial; /* [rows, hidden]: this rank's part of a sum; null without peers */
  int32_t lost; /* a status of `meet`: the results are void */
} Batch;

#define MAX_TAPS 8

/* Layers whose input is wanted; declared from this text in weft/kernels/shared/cpu.py. */
typedef struct {
  void *out; /* [rows, width] */
  int64_t width;
  int64_t count;
  int64_t layers[MAX_TAPS], columns[MAX_TAPS]; /* where a layer's input begins in a row of out */
} Taps;

/* The same rows, with the pages of a further group. */
static Attention in_pages(Attention attention, const Pages *pages) {
  attention.page_table = pages->page_table;
  attention.max_pages = pages->max_pages;
  attention.table_stride = pages->table_stride;
  return attention;
}

static const Weight *weight_of(const Layer *layer, Group group) {
  return group == TO_QKV       ? layer->qkv
         : group == TO_O       ? layer->o
         : group == TO_GATE_UP ? layer->gate_up
                               : layer->down;
}

/* Elements a row for what any product prepares of its input. */
static long prepared_width(const Layer *layer) {
  long width = 0;
  for (Group group = 0; group < GROUPS; group++) {
    const Weight *w = weight_of(layer, group);
    const long own = (prepared_bytes(w, 1) + 1) / 2;
    width = own > width ? own : width;
  }
  return width;
}

/* Elements a row of scratch: the normed row, qkv, q, attention's result, the activation. */
static long layer_scratch_width(const Layer *layer, const Attention *a, long dim) {
  return layer->qkv->in_features + layer->qkv->out_features + 2 * a->heads * dim +
         layer->gate_up->out_features / 2 + prepared_width(layer);
}

/* How the work of one layer is divided; filled anew for each layer by one thread. */
typedef struct {
  int threads;
  Range products[GROUPS][MAX_THREADS], shrink[GROUPS][MAX_THREADS];
} Division;

static Addition addition_to(const Batch *batch, Group group, long index) {
  const Lora *lora = batch->lora;
  if (lora == NULL) return (Addition){.lora = NULL};
  return (Addition){.lora = lora, .group = &lora->groups[group], .layer = index};
}

static void divide_layer(const Layer *layer, long index, const Batch *batch, Division *d) {
  for (Group group = 0; group < GROUPS; group++) {
    const Addition add = addition_to(batch, group, index);
    divide_work(d->shrink[group], d->threads, shrink_units(&add));
    divide_work(d->products[group], d->threads, linear_units(weight_of(layer, group), batch->rows));
  }
}

/* One product of the layer, x being complete; `scratch` is for what is prepared of x. */
static void product_share(const Layer *layer, Group group, const void *x, Target to,
                          const Batch *batch, long index, void *scratch, Division *d, Member *me) {
  const Weight *w = weight_of(layer, group);
  PreparedRows prepared;
  Addition add = addition_to(batch, group, index);
  if (adds(&add)) {
    add.next_layer = index + (group == TO_DOWN);
    if (add.next_layer < add.group->parts[0].layers)
      add.next = &batch->lora->groups[(group + 1) % GROUPS];
    shrink_share(&add, w->is_bf16, x, d->shrink[group], d->threads, me->thread);
  }
  const Input input = prepare_share(w, x, scratch, batch->rows, &prepared, me);
  if (adds(&add) || prepared_bytes(w, 1) > 0) wait_for_all(me);
  linear_share(w, input, batch->rows, to, add, d->products[group], d->threads, me->thread);
}

/* hidden += a product of this rank's share, summed over all ranks; complete after the next barrier.
 * One thread meets the other ranks, while all add up what they have brought. */
static void added_share(const Layer *layer, Group group, const void *x, void *hidden, Batch *batch,
                        int is_bf16, long index, void *scratch, Division *d, Member *me) {
  Peers *peers = batch->peers;
  if (peers == NULL) {
    Target to_hidden = {hidden, hidden, is_bf16};
    product_share(layer, group, x, to_hidden, batch, index, scratch, d, me);
    return;
  }
  Target to_partial = {batch->partial, NULL, 0};
  product_share(layer, group, x, to_partial, batch, index, scratch, d, me);
  const long count = batch->rows * layer->qkv->in_features;
  for (long done = 0; done < count; done += peers->slot_floats) {
    const long part = count - done < peers->slot_floats ? count - done : peers->slot_floats;
    wait_for_all(me);
    if (me->thread == 0 && batch->lost == PEERS_FINE) {
      memcpy(slot_of(peers, peers->round + 1, peers->rank), batch->partial + done,
             part * sizeof(float));
      batch->lost = meet(peers);
    }
    wait_for_all(me);
    if (batch->lost != PEERS_FINE) return;
    const long blocks = (part + VL - 1) / VL;
    const long first = blocks * me->thread / me->threads * VL;
    const long end = blocks * (me->thread + 1) / me->threads * VL;
    sum_slots(peers, peers->round, first, end < part ? end : part, hidden, hidden, is_bf16, done);
  }
}

/* hidden [rows, in_features of qkv] becomes the layer's output. Called by every thread of the team;
 * what they wrote is complete after the next barrier. */
static void layer_share(const Layer *layer, Batch *batch, const Pool *pool, long index,
                        void *hidden, Plan *plan, Division *d, Member *me) {
  const int is_bf16 = pool->is_bf16;
  const long rows = batch->rows, size = is_bf16 ? 2 : 4, width = layer->qkv->in_features;
  const long q_width = batch->attention.heads * pool->dim;
  char *normed = batch->scratch, *qkv = normed + rows * width * size;
  char *q = qkv + rows * layer->qkv->out_features * size, *mixed = q + rows * q_width * size;
  char *inner = mixed + rows * q_width * size;
  char *scratch = inner + rows * layer->down->in_features * size;
  Rope rope = {.qkv = qkv, .positions = batch->positions, .slots = batch->slots,
               .cos_sin = batch->cos_sin, .max_positions = batch->max_positions,
               .q_norm = layer->q_norm, .k_norm = layer->k_norm, .q_out = q, .rows = rows,
               .heads = batch->attention.heads, .eps = layer->eps};
  Attention attention = batch->attention;
  attention.q = q;
  attention.out = mixed;
  attention.window = layer->window;
  if (layer->group > 0) {
    const Pages *pages = &batch->further[layer->group - 1];
    pool = &pages->pool;
    rope.slots = pages->slots;
    attention = in_pages(attention, pages);
  }

  norm_share(is_bf16, 0, normed, hidden, NULL, layer->input_norm, rows, width, layer->eps, me);
  wait_for_all(me);
  Target to_qkv = {qkv, NULL, is_bf16};
  product_share(layer, TO_QKV, normed, to_qkv, batch, index, scratch, d, me);
  wait_for_all(me);
  rope_share(&rope, pool, index + layer->pool_shift, me);
  wait_for_all(me);
  attention_share(&attention, pool, plan, index + layer->pool_shift, me);
  wait_for_all(me);
  added_share(layer, TO_O, mixed, hidden, batch, is_bf16, index, scratch, d, me);
  wait_for_all(me);
  norm_share(is_bf16, 0, normed, hidden, NULL, layer->post_norm, rows, width, layer->eps, me);
  wait_for_all(me);
  Target to_inner = {inner, NULL, is_bf16};
  product_share(layer, TO_GATE_UP, normed, to_inner, batch, index, scratch, d, me);
  wait_for_all(me);
  added_share(layer, TO_DOWN, inner, hidden, batch, is_bf16, index, scratch, d, me);
}

/* Copies a layer's input to where it is wanted. */
static void tap_share(const Taps *taps, long layer, const Batch *batch, const Pool *pool,
                      const void *hidden, long width, const Member *me) {
  const size_t size = pool->is_bf16 ? 2 : 4;
  Rows mine = rows_of(me, batch->rows);
  for (long i = 0; i < taps->count; i++) {
    if (taps->layers[i] != layer) continue;
    for (long row = mine.first; row < mine.last; row++)
      memcpy((char *)taps->out + (row * taps->width + taps->columns[i]) * size,
             (const char *)hidden + row * width * size, width * size);
  }
}

/* Layers first .. first + count - 1; `taps` or null. */
static void layers_share(const Layer *const *layers, long first, long count, Batch *batch,
                         const Pool *pool, void *hidden, const Taps *taps, Plan *plan,
                         Division *divisions, Member *me) {
  for (long i = 0; i < count; i++) {
    /* Two divisions alternate: one thread prepares the next layer's while others still use this
     * one. */
    Division *now = &divisions[i % 2];
    if (me->thread == 0 && i + 1 < count)
      divide_layer(layers[i + 1], first + i + 1, batch, &divisions[(i + 1) % 2]);
    if (taps != NULL)
      tap_share(taps, first + i, batch, pool, hidden, layers[i]->qkv->in_features, me);
    layer_share(layers[i], batch, pool, first + i, hidden, plan, now, me);
    wait_for_all(me);
    if (me->thread == 0) plan->next_task = 0;
  }
}

#endif
