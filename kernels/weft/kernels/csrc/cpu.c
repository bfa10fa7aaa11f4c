/* Weft's CPU operations. The functions are called by weft/kernels/shared/cpu.py with checked arguments.
 *
 * All headers beside this file are part of the one translation unit. */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdlib.h>

#include "attention.h"
#include "draft.h"
#include "encoder.h"
#include "layer.h"
#include "linear.h"
#include "lora.h"
#include "moe.h"
#include "peers.h"
#include "recurrent.h"
#include "rows.h"
#include "team.h"

/* Multiply-adds (or as long) below which a second thread costs more than it brings. */
#define PARALLEL_WORK 20000

/* 1: bfloat16 products in hardware; 0: emulated. */
int weft_native_bf16(void) {
#if defined(__AVX512BF16__)
  return 1;
#else
  return 0;
#endif
}

/* To be called once, before the others. 1: bfloat16 products run on AMX from then on; -1: they
 * would, but the system refuses it. */
int weft_ask_for_amx(void) {
  fill_hadamard();
  return ask_for_amx() ? -1 : amx_is_allowed;
}

/* Whether int8 weights can be packed as rotated.h has them; asked after `weft_ask_for_amx`. */
int weft_takes_int8_rows(void) { return takes_int8_rows(); }

int weft_max_dim(void) { return MAX_DIM; }
int weft_max_group(void) { return MAX_ROWS; }

int64_t weft_packed_words(const Weight *w) { return panels_of(w) * panel_words(w); }
int64_t weft_packed_columns(const Weight *w) { return panels_of(w) * PANEL; }

/* `scales`: of int8 weights, whose packed scales the description names already; else null. */
void weft_pack(const Weight *w, const void *plain, void *packed, const void *bias,
               float *packed_bias, const float *scales, float *packed_scales) {
#pragma omp parallel for schedule(static)
  for (long p = 0; p < panels_of(w); p++)
    if (scales == NULL)
      pack_panel(w, plain, packed, p);
    else if (w->is_rotated)
      pack_rotated_panel(w, plain, packed, p);
    else
      pack_int8_panel(w, plain, packed, p);
  if (bias != NULL) pack_bias(w, bias, packed_bias);
  if (scales != NULL) pack_scales(w, scales, packed_scales);
}

/* Weights in groups: `numbers` of 8 bits, or of 4 as `pack_fours_panel` takes them; `scales` as
 * `pack_group_scales`; `factors` [out_features] or null. */
void weft_pack_groups(const Weight *w, const void *numbers, void *packed, const void *scales,
                      void *packed_scales, const float *factors, float *packed_factors,
                      const void *bias, float *packed_bias) {
#pragma omp parallel for schedule(static)
  for (long p = 0; p < panels_of(w); p++) {
    if (w->bits == 4)
      pack_fours_panel(w, numbers, packed, p);
    else
      pack_int8_panel(w, numbers, packed, p);
    pack_group_scales(w, scales, packed_scales, p);
  }
  if (factors != NULL) pack_scales(w, factors, packed_factors);
  if (bias != NULL) pack_bias(w, bias, packed_bias);
}

/* out [rows, n] = x rounded row by row as by `round_weights`, scales [rows]. */
void weft_quantise_rows(int is_bf16, const void *x, int64_t rows, int64_t n, int8_t *out,
                        float *scales) {
#pragma omp parallel for schedule(static) if (rows * n > PARALLEL_WORK)
  for (int64_t r = 0; r < rows; r++)
    scales[r] = round_weights(x, is_bf16, r * n, n, out + r * n);
}

/* The smallest and the largest of each group of a row of x [rows, n], [rows, groups]; the largest is
 * NaN where a number is not finite. */
void weft_group_ranges(int is_bf16, const void *x, int64_t rows, int64_t n, int64_t group,
                       float *lowest, float *highest) {
  const long groups = groups_along(n, group);
#pragma omp parallel for schedule(static) if (rows * n > PARALLEL_WORK)
  for (int64_t r = 0; r < rows; r++)
    for (long g = 0; g < groups; g++) {
      const long end = at_most(n - g * group, (int)group);
      vf least = vf_splat(INFINITY), most = -least, damage = {0};
      for (long i = 0; i < end; i += VL) {
        const int some = at_most(end - i, VL);
        vf value = load_some(x, is_bf16, r * n + g * group + i, some);
        for (int j = some; j < VL; j++) value[j] = value[0];
        damage += value * 0.0f;
        least = -vf_max(-least, -value);
        most = vf_max(most, value);
      }
      lowest[r * groups + g] = -vf_highest(-least);
      highest[r * groups + g] = vf_highest(most) + vf_sum(damage);
    }
}

/* out [rows, n / 2 rounded up] = (x - offset) / scale of each group to the nearest of 0 to 15, as
 * `pack_fours_panel` takes them; 0 where the scale is. */
void weft_round_groups(int is_bf16, const void *x, int64_t rows, int64_t n, int64_t group,
                       const float *scales, const float *offsets, uint8_t *out) {
  const long groups = groups_along(n, group), bytes = (n + 1) / 2;
#pragma omp parallel for schedule(static) if (rows * n > PARALLEL_WORK)
  for (int64_t r = 0; r < rows; r++) {
    memset(out + r * bytes, 0, (size_t)bytes);
    for (long i = 0; i < n; i += VL) { /* A group is whole vectors. */
      const int some = at_most(n - i, VL);
      const long g = r * groups + i / group;
      const float factor = scales[g] > 0 ? 1.0f / scales[g] : 0.0f;
      const vf ratio = (load_some(x, is_bf16, r * n + i, some) - offsets[g]) * factor + 0.5f;
      const vf high = vf_splat(15.0f), held = vf_select((vi)(ratio > high), high, ratio);
      const vi whole = __builtin_convertvector(vf_max(held, (vf){0}), vi);
      int32_t fours[VL];
      memcpy(fours, &whole, sizeof fours);
      for (int j = 0; j < some; j++)
        out[r * bytes + (i + j) / 2] |= (uint8_t)(fours[j] << ((i + j) % 2 * 4));
    }
  }
}

/* A Status; `lora`, prepared, or null: its first group adds to the product in layer `layer`. */
int weft_linear(const Weight *w, const void *x, int64_t rows, const void *residual, void *out,
                 int out_bf16, const Lora *lora, int64_t layer) {
  Target target = {out, residual, out_bf16};
  Addition add = {lora, lora == NULL ? NULL : &lora->groups[0], layer};
  int parallel = rows * w->in_features * w->out_features > PARALLEL_WORK;
  int threads = parallel ? team_limit() : 1;
  Range ranges[MAX_THREADS], shrink[MAX_THREADS];
  divide_work(ranges, threads, linear_units(w, rows));
  divide_work(shrink, threads, shrink_units(&add));
  Barrier barrier = {0};
  const long prepared = prepared_bytes(w, rows);
  void *scratch = prepared > 0 ? malloc((size_t)prepared) : NULL;
  if (prepared > 0 && scratch == NULL) return OUT_OF_MEMORY;
#pragma omp parallel num_threads(threads) if (parallel)
  {
    Member me = join_team(&barrier);
    if (adds(&add)) shrink_share(&add, w->is_bf16, x, shrink, threads, me.thread);
    PreparedRows ready;
    const Input input = prepare_share(w, x, scratch, rows, &ready, &me);
    if (adds(&add) || prepared > 0) wait_for_all(&me);
    linear_share(w, input, rows, target, add, ranges, threads, me.thread);
  }
  free(scratch);
  return FINE;
}

/* A Status; for additions that are used in layers first .. first + count - 1 without further
 * checks. */
int weft_prepare_lora(const Lora *lora, int64_t first, int64_t count) {
  return prepare_lora(lora, first, count);
}

/* A Status; nothing was written to the result where it is not FINE. */
int weft_moe(const Experts *experts) {
  const Weight *w = experts->w13[0];
  const int64_t pairs = experts->rows * experts->top_k;
  Status status = place_pairs(experts);
  if (status == FINE) status = place_slots(experts);
  if (status != FINE) return status;
  int parallel = pairs * w->in_features * w->out_features > PARALLEL_WORK;
  int threads = parallel ? team_limit() : 1;
  Range first[MAX_THREADS], second[MAX_THREADS];
  divide_work(first, threads, experts->units[experts->experts]);
  divide_work(second, threads, experts->units[2 * experts->experts + 1]);
  Barrier barrier = {0};
  const long width = places_width(experts);
  char *prepared = width > 0 ? malloc((size_t)(pairs * width)) : NULL;
  if (width > 0 && prepared == NULL) return OUT_OF_MEMORY;
#pragma omp parallel num_threads(threads) if (parallel)
  {
    Member me = join_team(&barrier);
    moe_share(experts, prepared, width, first, second, threads, &me);
  }
  free(prepared);
  return FINE;
}

/* `is_fine`: the weight is float32 whatever x is. */
void weft_rms_norm(int is_bf16, int is_fine, void *out, const void *x, void *residual,
                   const void *weight, int64_t rows, int64_t n, float eps) {
#pragma omp parallel if (rows * n > PARALLEL_WORK)
  {
    Member me = join_team(NULL);
    norm_share(is_bf16, is_fine, out, x, residual, weight, rows, n, eps, &me);
  }
}

void weft_silu_and_mul(int is_bf16, void *out, const void *x, int64_t rows, int64_t n) {
#pragma omp parallel if (rows * n > PARALLEL_WORK / 2)
  {
    Member me = join_team(NULL);
    silu_share(is_bf16, out, x, rows, n, &me);
  }
}

/* A Status. */
int weft_rope_and_cache(const Pool *pool, int64_t layer, const void *qkv, const int64_t *positions,
                        const int64_t *slots, const float *cos_sin, int64_t max_positions,
                        const void *q_norm, const void *k_norm, int has_fine_norms, float eps, int64_t rows,
                        int64_t heads, int64_t adjacent, void *q_out) {
  Rope rope = {.qkv = qkv, .positions = positions, .slots = slots, .cos_sin = cos_sin,
               .q_norm = q_norm, .k_norm = k_norm, .q_out = q_out,
               .max_positions = max_positions, .rows = rows, .heads = heads, .eps = eps,
               .adjacent = adjacent, .has_fine_norms = has_fine_norms};
  Status status = check_rope(&rope, pool);
  if (status != FINE) return status;
#pragma omp parallel if (rows * heads * pool->dim > PARALLEL_WORK)
  {
    Member me = join_team(NULL);
    rope_share(&rope, pool, layer, &me);
  }
  return FINE;
}

/* A Status. */
int weft_paged_attention(const Pool *pool, int64_t layer, const void *q, void *out,
                         const int32_t *page_table, const int32_t *cu_q_lens,
                         const int32_t *kv_lens, int64_t requests, int64_t max_pages,
                         int64_t table_stride, int64_t heads, int64_t tokens, float scale,
                         int64_t first_seen, int64_t window, int64_t is_chunked,
                         const int64_t *ancestors, int64_t earlier_rows, const float *sinks,
                         float softcap, const int32_t *key_ends) {
  Attention attention = {.q = q, .out = out, .page_table = page_table, .cu_q_lens = cu_q_lens,
                         .kv_lens = kv_lens, .requests = requests, .max_pages = max_pages,
                         .table_stride = table_stride, .heads = heads, .scale = scale,
                         .first_seen = first_seen, .window = window, .is_chunked = is_chunked,
                         .ancestors = ancestors,
                         .earlier_rows = earlier_rows, .sinks = sinks, .softcap = softcap,
                         .key_ends = key_ends};
  Plan plan = {0};
  Status status = check_attention(&attention, pool, tokens);
  if (status == FINE) status = plan_attention(&attention, pool, &plan);
  if (status == FINE) {
    Barrier barrier = {0};
#pragma omp parallel if (plan.tasks > 1)
    {
      Member me = join_team(&barrier);
      attention_share(&attention, pool, &plan, layer, &me);
    }
  }
  free_plan(&plan);
  return status;
}

/* A Status; the bounds are checked, and nothing was written where it is not FINE. */
int weft_both_ways(const BothWays *b) {
  int64_t *begins = malloc((size_t)(b->sequences + 1) * sizeof *begins);
  if (begins == NULL) return OUT_OF_MEMORY;
  count_tasks(b, begins);
  const int threads = begins[b->sequences] > 1 ? team_limit() : 1;
  Range ranges[MAX_THREADS];
  divide_work(ranges, threads, begins[b->sequences]);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Member me = join_team(NULL);
    both_ways_share(b, begins, ranges, threads, &me);
  }
  free(begins);
  return FINE;
}

int64_t weft_layer_scratch_width(const Layer *layer, const Attention *attention, int64_t dim) {
  return layer_scratch_width(layer, attention, dim);
}

/* A Status; for a batch that is used with `weft_decoder_layers` without further checks. */
int weft_check_batch(const Batch *batch, const Pool *pool) {
  Rope rope = {.positions = batch->positions, .slots = batch->slots, .rows = batch->rows,
               .max_positions = batch->max_positions};
  Status status = check_rope(&rope, pool);
  if (status == FINE) status = check_attention(&batch->attention, pool, batch->rows);
  for (long i = 0; i < batch->num_further && status == FINE; i++) {
    const Pages *pages = &batch->further[i];
    const Attention attention = in_pages(batch->attention, pages);
    rope.slots = pages->slots;
    status = check_rope(&rope, &pages->pool);
    if (status == FINE) status = check_attention(&attention, &pages->pool, batch->rows);
  }
  return status;
}

/* A Status; `taps` and `after` may be null. `after` continues from the taps: these layers must be
 * all that it needs. With other ranks, `lost` of the batch tells whether all of them arrived. */
int weft_decoder_layers(const Layer *const *layers, int64_t first, int64_t count,
                        Batch *batch, const Pool *pool, void *hidden, const Taps *taps,
                        const DraftWrite *after) {
  Plan plan = {0};
  Status status = after == NULL ? FINE : check_entries(after->head, after->entries, pool);
  if (status == FINE) status = plan_attention(&batch->attention, pool, &plan);
  if (status == FINE && count > 0 && batch->rows > 0) {
    Barrier barrier = {0};
    Division divisions[2];
    DraftDivision division;
    divisions[0].threads = divisions[1].threads = division.threads = team_limit();
    divide_layer(layers[0], first, batch, &divisions[0]);
    if (after != NULL) divide_entries(after->head, after->entries, &division);
#pragma omp parallel num_threads(divisions[0].threads)
    {
      Member me = join_team(&barrier);
      layers_share(layers, first, count, batch, pool, hidden, taps, &plan, divisions, &me);
      if (after != NULL)
        entries_share(after->head, after->entries, pool, after->layer, &division, &me);
    }
  }
  free_plan(&plan);
  return status;
}

int64_t weft_draft_entries_width(const DraftHead *head) { return entries_width(head); }
int64_t weft_draft_chain_width(const DraftHead *head, int64_t dim) { return chain_width(head, dim); }

/* A Status; nothing was written where it is not FINE. */
int weft_draft_entries(const DraftWrite *write, const Pool *pool) {
  const DraftHead *head = write->head;
  const DraftEntries *entries = write->entries;
  Status status = check_entries(head, entries, pool);
  if (status != FINE || entries->rows == 0) return status;
  DraftDivision division = {.threads = team_limit()};
  divide_entries(head, entries, &division);
  Barrier barrier = {0};
#pragma omp parallel num_threads(division.threads)
  {
    Member me = join_team(&barrier);
    entries_share(head, entries, pool, write->layer, &division, &me);
  }
  return FINE;
}

/* A Status; nothing was written where it is not FINE. */
int weft_draft_chain(const DraftHead *head, const DraftChain *chain, const Pool *pool,
                     int64_t layer) {
  Status status = chain->depth <= MAX_DEPTH ? check_chain(head, chain, pool) : BAD_LENGTHS;
  if (status != FINE || chain->depth == 0) return status;
  Plan plans[MAX_DEPTH] = {0};
  for (long step = 0; step < chain->depth && status == FINE; step++) {
    Attention attention = chain_attention(head, chain, step);
    status = plan_attention(&attention, pool, &plans[step]);
  }
  if (status == FINE) {
    DraftDivision divisions[2];
    divisions[0].threads = divisions[1].threads = team_limit();
    divide_chain(head, chain, 0, &divisions[0]);
    Barrier barrier = {0};
#pragma omp parallel num_threads(divisions[0].threads)
    {
      Member me = join_team(&barrier);
      chain_share(head, chain, pool, layer, plans, divisions, &me);
    }
  }
  for (long step = 0; step < chain->depth; step++) free_plan(&plans[step]);
  return status;
}

void weft_recurrence(const Recurrence *r) {
  const int64_t rows = r->cu_lens[r->sequences];
  const int parallel = rows * r->heads * r->keys * r->values > PARALLEL_WORK;
  const int threads = parallel ? team_limit() : 1;
  Range ranges[MAX_THREADS];
  divide_work(ranges, threads, r->sequences * r->heads);
#pragma omp parallel num_threads(threads) if (parallel)
  {
    Member me = join_team(NULL);
    recurrence_share(r, ranges, threads, &me);
  }
}

void weft_convolution(const Convolution *c) {
  const int parallel = c->cu_lens[c->sequences] * c->channels * c->taps > PARALLEL_WORK;
  const int threads = parallel ? team_limit() : 1;
  Range ranges[MAX_THREADS];
  divide_work(ranges, threads, c->sequences * ((c->channels + VL - 1) / VL));
#pragma omp parallel num_threads(threads) if (parallel)
  {
    Member me = join_team(NULL);
    convolution_share(c, ranges, threads, &me);
  }
}

void weft_selective_scan(const Selection *s) {
  const int parallel = s->cu_lens[s->sequences] * s->channels * s->keys > PARALLEL_WORK / 8;
  const int threads = parallel ? team_limit() : 1;
  Range ranges[MAX_THREADS];
  divide_work(ranges, threads, s->sequences * ((s->channels + VL - 1) / VL));
#pragma omp parallel num_threads(threads) if (parallel)
  {
    Member me = join_team(NULL);
    selection_share(s, ranges, threads, &me);
  }
}

int weft_max_keys(void) { return MAX_KEYS; }
int weft_max_taps_of_conv(void) { return MAX_TAPS_OF_CONV; }

/* `announce` and `await_count`. Before it sleeps, a caller spins for `awake_ns`. */
void weft_announce(Counter *counter, uint32_t count) { announce(counter, count); }
int weft_await(Counter *counter, uint32_t count, const Counter *stop, int64_t limit_ns,
               int64_t awake_ns) {
  if (awake_ns > 0 && comes_within(counter, count, awake_ns)) return PEERS_FINE;
  int32_t spins = FIRST_SPINS;
  return await_count(counter, count, stop, limit_ns, &spins);
}

/* out [n] = residual [n] + the sum of `partial` [n] over all ranks, the same bits on each; returns
 * a status of `meet`, with which all ranks but the missing ones end. */
int weft_add_sum(Peers *peers, const float *partial, int64_t n, const void *residual, void *out,
                 int is_bf16) {
  for (int64_t done = 0; done < n; done += peers->slot_floats) {
    const int64_t count = n - done < peers->slot_floats ? n - done : peers->slot_floats;
    memcpy(slot_of(peers, peers->round + 1, peers->rank), partial + done, count * sizeof *partial);
    const int status = meet(peers);
    if (status != PEERS_FINE) return status;
    const int64_t blocks = (count + 4095) / 4096;
#pragma omp parallel for schedule(static) if (count * peers->size > PARALLEL_WORK)
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t last = 4096 * (block + 1) < count ? 4096 * (block + 1) : count;
      sum_slots(peers, peers->round, 4096 * block, last, residual, out, is_bf16, done);
    }
  }
  return PEERS_FINE;
}
