/* A stack of decoder layers (Llama, Qwen2, Qwen3) by one team of threads: at small batches starting
 * a team for each operation would take about as long as the operations. */
#ifndef WEFT_LAYER_H
#define WEFT_LAYER_H

#include "attention.h"
#include "linear.h"

/* As laid out by weft/kernels/cpu.py. */
typedef struct {
  const Weight *qkv, *o, *gate_up, *down;
  const void *input_norm, *post_norm, *q_norm, *k_norm; /* the last two may be null */
  float eps;
} Layer;

typedef struct {
  Attention attention; /* q and out are set here */
  const int64_t *positions;
  const int64_t *slots;
  const float *cos_sin;
  int64_t max_positions;
  int64_t rows;
  void *scratch; /* rows * scratch_width elements, see layer_scratch_width */
} Batch;

/* Elements a row of scratch: the normed row, qkv, q, attention's result, the activation. */
static long layer_scratch_width(const Layer *layer, const Attention *a, long dim) {
  return layer->qkv->in_features + layer->qkv->out_features + 2 * a->heads * dim +
         layer->gate_up->out_features / 2;
}

/* How the work of one layer is divided; filled anew for each layer by one thread. */
typedef struct {
  int threads;
  Range qkv[MAX_THREADS], o[MAX_THREADS], gate_up[MAX_THREADS], down[MAX_THREADS];
} Division;

static void divide_layer(const Layer *layer, long rows, Division *d) {
  divide_work(d->qkv, d->threads, linear_units(layer->qkv, rows));
  divide_work(d->o, d->threads, linear_units(layer->o, rows));
  divide_work(d->gate_up, d->threads, linear_units(layer->gate_up, rows));
  divide_work(d->down, d->threads, linear_units(layer->down, rows));
}

/* hidden [rows, in_features of qkv] becomes the layer's output. Called by every thread of the team;
 * what they wrote is complete after the next barrier. */
static void layer_share(const Layer *layer, const Batch *batch, const Pool *pool, long index,
                        void *hidden, Plan *plan, Division *d, Member *me) {
  const int is_bf16 = pool->is_bf16;
  const long rows = batch->rows, size = is_bf16 ? 2 : 4, width = layer->qkv->in_features;
  const long q_width = batch->attention.heads * pool->dim;
  char *normed = batch->scratch, *qkv = normed + rows * width * size;
  char *q = qkv + rows * layer->qkv->out_features * size, *mixed = q + rows * q_width * size;
  char *inner = mixed + rows * q_width * size;
  Rope rope = {.qkv = qkv, .positions = batch->positions, .slots = batch->slots,
               .cos_sin = batch->cos_sin, .max_positions = batch->max_positions,
               .q_norm = layer->q_norm, .k_norm = layer->k_norm, .q_out = q, .rows = rows,
               .heads = batch->attention.heads, .eps = layer->eps};
  Attention attention = batch->attention;
  attention.q = q;
  attention.out = mixed;

  norm_share(is_bf16, normed, hidden, NULL, layer->input_norm, rows, width, layer->eps, me);
  wait_for_all(me);
  Target to_qkv = {qkv, NULL, is_bf16};
  linear_share(layer->qkv, normed, rows, to_qkv, d->qkv, d->threads, me->thread);
  wait_for_all(me);
  rope_share(&rope, pool, index, me);
  wait_for_all(me);
  attention_share(&attention, pool, plan, index, me);
  wait_for_all(me);
  Target to_hidden = {hidden, hidden, is_bf16};
  linear_share(layer->o, mixed, rows, to_hidden, d->o, d->threads, me->thread);
  wait_for_all(me);
  norm_share(is_bf16, normed, hidden, NULL, layer->post_norm, rows, width, layer->eps, me);
  wait_for_all(me);
  Target to_inner = {inner, NULL, is_bf16};
  linear_share(layer->gate_up, normed, rows, to_inner, d->gate_up, d->threads, me->thread);
  wait_for_all(me);
  linear_share(layer->down, inner, rows, to_hidden, d->down, d->threads, me->thread);
}

/* Layers first .. first + count - 1 of the pool. */
static void layers_share(const Layer *const *layers, long first, long count, const Batch *batch,
                         const Pool *pool, void *hidden, Plan *plan, Division *divisions,
                         Member *me) {
  for (long i = 0; i < count; i++) {
    /* Two in turn: one thread prepares the next layer's while others are still in this one. */
    Division *now = &divisions[i % 2];
    if (me->thread == 0 && i + 1 < count)
      divide_layer(layers[i + 1], batch->rows, &divisions[(i + 1) % 2]);
    layer_share(layers[i], batch, pool, first + i, hidden, plan, now, me);
    wait_for_all(me);
    if (me->thread == 0) plan->next_task = 0;
  }
}

#endif
