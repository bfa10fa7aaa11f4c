/* Threads that work together: dividing work, and waiting for one another. */
#ifndef WEFT_TEAM_H
#define WEFT_TEAM_H

#include <sched.h>
#include <stdint.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

#define MAX_THREADS 256

/* How often a thread looks at a barrier before it sleeps; a look takes some 15 ns. Waking up takes
 * longer than most waits, so the limit doubles while the other threads arrive in time. It falls
 * when they do not: other work has their cores then, and a thread that spins keeps its own core
 * from that work. The least limit is longer than the time between arrivals of threads on free
 * cores. Below that the limit would never rise again, and one disturbance would let every later
 * barrier of a step sleep. */
#define FIRST_SPINS 400
#define LEAST_SPINS 100
#define MOST_SPINS 3000

typedef struct {
  __attribute__((aligned(64))) int32_t arrived;
  __attribute__((aligned(64))) int32_t round;
  int32_t sleepers;
} Barrier;

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  __asm__ volatile("" ::: "memory");
#endif
}

static void sleep_on(int32_t *word, int32_t value) {
#if defined(__linux__)
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
#else
  (void)word, (void)value;
  sched_yield();
#endif
}

static void wake_sleepers(int32_t *word) {
#if defined(__linux__)
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#else
  (void)word;
#endif
}

/* One thread's place in a team. */
typedef struct {
  Barrier *barrier;
  int thread;
  int threads;
  int spins;
} Member;

static Member join_team(Barrier *barrier) {
#ifdef _OPENMP
  return (Member){barrier, omp_get_thread_num(), omp_get_num_threads(), FIRST_SPINS};
#else
  return (Member){barrier, 0, 1, 0};
#endif
}

/* Threads that a team may have. */
static int team_limit(void) {
#ifdef _OPENMP
  int threads = omp_get_max_threads();
  return threads < MAX_THREADS ? threads : MAX_THREADS;
#else
  return 1;
#endif
}

/* Returns when all threads of the team have come here. */
static void wait_for_all(Member *me) {
  if (me->threads == 1) return;
  Barrier *b = me->barrier;
  int32_t round = __atomic_load_n(&b->round, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&b->arrived, 1, __ATOMIC_ACQ_REL) == me->threads) {
    __atomic_store_n(&b->arrived, 0, __ATOMIC_RELAXED);
    /* Sequentially consistent against the sleeper's pair: it counts itself, then looks again. */
    __atomic_store_n(&b->round, round + 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&b->sleepers, __ATOMIC_SEQ_CST) > 0) wake_sleepers(&b->round);
    return;
  }
  for (int i = 0; i < me->spins; i++) {
    if (__atomic_load_n(&b->round, __ATOMIC_ACQUIRE) != round) {
      me->spins = 2 * me->spins < MOST_SPINS ? 2 * me->spins : MOST_SPINS;
      return;
    }
    relax();
  }
  me->spins = me->spins / 4 > LEAST_SPINS ? me->spins / 4 : LEAST_SPINS;
  __atomic_add_fetch(&b->sleepers, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&b->round, __ATOMIC_SEQ_CST) == round) sleep_on(&b->round, round);
  __atomic_sub_fetch(&b->sleepers, 1, __ATOMIC_SEQ_CST);
}

/* Units of work in one range a thread. A thread that has finished its own takes from the others:
 * on shared cores some threads get less time than others. */
typedef struct {
  __attribute__((aligned(64))) int64_t next;
  int64_t end;
} Range;

static void divide_work(Range *ranges, int threads, int64_t units) {
  for (int t = 0; t < threads; t++)
    ranges[t] = (Range){units * t / threads, units * (t + 1) / threads};
}

/* The next unit for a thread that has come to range *at (0 = its own) of `threads`; -1 when all is
 * done. */
static inline int64_t next_unit(Range *ranges, int threads, int thread, int *at) {
  while (*at < threads) {
    int place = thread + *at < threads ? thread + *at : thread + *at - threads;
    Range *range = &ranges[place];
    if (__atomic_load_n(&range->next, __ATOMIC_RELAXED) < range->end) {
      int64_t unit = __atomic_fetch_add(&range->next, 1, __ATOMIC_RELAXED);
      if (unit < range->end) return unit;
    }
    ++*at;
  }
  return -1;
}

#endif
