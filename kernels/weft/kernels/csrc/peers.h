/* Processes that compute shares of one model, the ranks: they wait for one another and add up what
 * each has, in memory that all of them map. */
#ifndef WEFT_PEERS_H
#define WEFT_PEERS_H

#include <string.h>
#include <time.h>

#include "simd.h"
#include "team.h"

/* A counter that wakes the threads that wait for a number. Processes share it, so that its futex is
 * not private. */
typedef struct {
  __attribute__((aligned(64))) uint32_t count;
  uint32_t sleepers;
  uint64_t hashes[2]; /* in a rank's `arrived`: hashes of its sums before the last two rounds */
} Counter;

/* One process's view of the group; `PeersStruct` of weft/kernels/shared/cpu.py. */
typedef struct {
  int64_t rank, size;
  Counter *arrived; /* one a rank: number of sums to which it has brought its part */
  const Counter *stop; /* above zero: the group ends */
  float *slots; /* [2, size, slot_floats] */
  int64_t slot_floats;
  int64_t limit_ns; /* of waiting for one rank */
  uint32_t round; /* sums so far */
  int32_t spins;
  uint64_t hash; /* of all sums so far, if they are checked */
  int64_t is_checked; /* whether `meet` compares the hashes of the ranks' sums */
} Peers;

enum { PEERS_FINE = 0, PEERS_STOPPED = 1, PEERS_LATE = 2, PEERS_DIFFER = 1 << 20 };

/* A sleeper looks for `stop` this often. */
#define LOOK_NS 20000000

static int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline int has_come(const Counter *counter, uint32_t count) {
  return (int32_t)(__atomic_load_n(&counter->count, __ATOMIC_SEQ_CST) - count) >= 0;
}

/* Spins until the counter has reached `count`, or for so long. The thread that counts may have been
 * put on this core, which the yield gives it. */
static int comes_within(const Counter *counter, uint32_t count, int64_t ns) {
  const int64_t end = now_ns() + ns;
  do {
    for (int i = 0; i < LEAST_SPINS; i++) {
      if (has_come(counter, count)) return 1;
      relax();
    }
    sched_yield();
  } while (now_ns() < end);
  return 0;
}

static void announce(Counter *counter, uint32_t count) {
  __atomic_store_n(&counter->count, count, __ATOMIC_SEQ_CST);
#if defined(__linux__)
  if (__atomic_load_n(&counter->sleepers, __ATOMIC_SEQ_CST) > 0)
    syscall(SYS_futex, &counter->count, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
#endif
}

/* Waits until the counter has reached `count`: PEERS_FINE, PEERS_STOPPED or PEERS_LATE. `spins`
 * adapts as in `wait_for_all`. */
static int await_count(Counter *counter, uint32_t count, const Counter *stop, int64_t limit_ns,
                       int32_t *spins) {
  for (int32_t i = 0; i < *spins; i++) {
    if (has_come(counter, count)) {
      *spins = 2 * *spins < MOST_SPINS ? 2 * *spins : MOST_SPINS;
      return PEERS_FINE;
    }
    relax();
  }
  *spins = *spins / 4 > LEAST_SPINS ? *spins / 4 : LEAST_SPINS;
  const int64_t end = now_ns() + limit_ns;
  int status = PEERS_FINE;
  __atomic_add_fetch(&counter->sleepers, 1, __ATOMIC_SEQ_CST);
  while (!has_come(counter, count)) {
    if (__atomic_load_n(&stop->count, __ATOMIC_SEQ_CST) != 0) {
      status = PEERS_STOPPED;
      break;
    }
    const int64_t left = end - now_ns();
    if (left <= 0) {
      status = PEERS_LATE;
      break;
    }
    const uint32_t seen = __atomic_load_n(&counter->count, __ATOMIC_SEQ_CST);
    if ((int32_t)(seen - count) >= 0) break;
#if defined(__linux__)
    const struct timespec look = {0, left < LOOK_NS ? left : LOOK_NS};
    syscall(SYS_futex, &counter->count, FUTEX_WAIT, seen, &look, NULL, 0);
#else
    sched_yield();
#endif
  }
  __atomic_sub_fetch(&counter->sleepers, 1, __ATOMIC_SEQ_CST);
  return status;
}

static float *slot_of(const Peers *p, uint32_t round, int64_t rank) {
  return p->slots + ((round & 1) * p->size + rank) * p->slot_floats;
}

/* Announces that this rank's slot of the next round is filled, and waits for the slots of all
 * ranks. A rank that arrives here has read all slots of the round before, so that two alternating
 * slots suffice. PEERS_LATE + rank: the first rank that is missing. PEERS_DIFFER + rank: the first
 * one whose earlier sums had other bits. */
static int meet(Peers *p) {
  const uint32_t round = p->round + 1;
  p->arrived[p->rank].hashes[round & 1] = p->hash;
  announce(&p->arrived[p->rank], round);
  for (int64_t rank = 0; rank < p->size; rank++) {
    if (rank == p->rank) continue;
    const int status = await_count(&p->arrived[rank], round, p->stop, p->limit_ns, &p->spins);
    if (status != PEERS_FINE) return status == PEERS_LATE ? PEERS_LATE + (int)rank : status;
    if (p->is_checked && p->arrived[rank].hashes[round & 1] != p->hash)
      return PEERS_DIFFER + (int)rank;
  }
  p->round = round;
  return PEERS_FINE;
}

/* Hash of elements first to last, which adds up over parts: each by its bits and its place, mixed as
 * in SplitMix64 (Steele et al., Fast Splittable Pseudorandom Number Generators, 2014). */
static uint64_t hash_of(const void *values, int is_bf16, long first, long last) {
  uint64_t sum = 0;
  for (long i = first; i < last; i++) {
    const uint32_t bits = is_bf16 ? ((const uint16_t *)values)[i] : ((const uint32_t *)values)[i];
    uint64_t mixed = ((uint64_t)i << 32 | bits) + 0x9E3779B97F4A7C15u;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
    sum += mixed ^ (mixed >> 31);
  }
  return sum;
}

/* Elements first to last of a round's sum over all ranks, added to `residual` [n] at an offset:
 * always in the order of the ranks, so that all of them get the same bits. */
static void sum_slots(Peers *p, uint32_t round, long first, long last, const void *residual,
                      void *out, int is_bf16, long offset) {
  for (long i = first; i < last; i += VL) {
    const int count = last - i < VL ? (int)(last - i) : VL;
    vf sum = load_some(slot_of(p, round, 0), 0, i, count);
    for (int64_t rank = 1; rank < p->size; rank++)
      sum += load_some(slot_of(p, round, rank), 0, i, count);
    store_some(out, is_bf16, offset + i, count,
               sum + load_some(residual, is_bf16, offset + i, count));
  }
  if (p->is_checked) {
    const uint64_t hash = hash_of(out, is_bf16, offset + first, offset + last);
    __atomic_fetch_add(&p->hash, hash, __ATOMIC_SEQ_CST);
  }
}

#endif
