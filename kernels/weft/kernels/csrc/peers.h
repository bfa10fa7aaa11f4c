/* Processes that compute shares of one model, the ranks: they wait for one another and add up what
 * each has, in memory that all of them map. */
#ifndef WEFT_PEERS_H
#define WEFT_PEERS_H

#include <string.h>
#include <time.h>

#include "simd.h"
#include "team.h"

/* Counts up, and wakes who waits for a number. Between processes, so its futex is not private. */
typedef struct {
  __attribute__((aligned(64))) uint32_t count;
  uint32_t sleepers;
} Counter;

/* One process's view of the group; as laid out by weft/kernels/peers.py. */
typedef struct {
  int64_t rank, size;
  Counter *arrived; /* one a rank: how many sums it has brought its part of */
  const Counter *stop; /* above zero: the group ends */
  float *slots; /* [2, size, slot_floats] */
  int64_t slot_floats;
  int64_t limit_ns; /* of waiting for one rank */
  uint32_t round; /* sums so far */
  int32_t spins;
} Peers;

enum { PEERS_FINE = 0, PEERS_STOPPED = 1, PEERS_LATE = 2 };

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

static void announce(Counter *counter, uint32_t count) {
  __atomic_store_n(&counter->count, count, __ATOMIC_SEQ_CST);
#if defined(__linux__)
  if (__atomic_load_n(&counter->sleepers, __ATOMIC_SEQ_CST) > 0)
    syscall(SYS_futex, &counter->count, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
#endif
}

/* Waits until the counter has come to `count`: PEERS_FINE, PEERS_STOPPED or PEERS_LATE. `spins`
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

/* Says that this rank's slot of the next round is filled, and waits for those of all ranks. A rank
 * that comes here has read all slots of the round before, so two in turn do. The status of the
 * first rank that is missing is PEERS_LATE + rank. */
static int meet(Peers *p) {
  const uint32_t round = p->round + 1;
  announce(&p->arrived[p->rank], round);
  for (int64_t rank = 0; rank < p->size; rank++) {
    if (rank == p->rank) continue;
    const int status = await_count(&p->arrived[rank], round, p->stop, p->limit_ns, &p->spins);
    if (status != PEERS_FINE) return status == PEERS_LATE ? PEERS_LATE + (int)rank : status;
  }
  p->round = round;
  return PEERS_FINE;
}

/* Elements first to last of a round's sum over all ranks, added to `residual` [n] at an offset:
 * always in the order of the ranks, so that all of them get the same bits. */
static void sum_slots(const Peers *p, uint32_t round, long first, long last, const void *residual,
                      void *out, int is_bf16, long offset) {
  for (long i = first; i < last; i += VL) {
    const int count = last - i < VL ? (int)(last - i) : VL;
    vf sum = load_some(slot_of(p, round, 0), 0, i, count);
    for (int64_t rank = 1; rank < p->size; rank++)
      sum += load_some(slot_of(p, round, rank), 0, i, count);
    store_some(out, is_bf16, offset + i, count,
               sum + load_some(residual, is_bf16, offset + i, count));
  }
}

#endif
