// A pool of helper threads that a caller never waits for unless they hold work of its own.
//
// OpenMP ends every loop with a barrier of all threads: where a helper has lost its core to another process (and on a
// laptop, or beside a gateway, it often has) each of the hundreds of loops of a step waits for the operating system's
// scheduler. Here items are claimed one by one: a helper that does not run claims nothing and costs nothing.
//
//     caller: close -> describe loop -> open ---> claim, run, claim, run ... nothing left -> wait for items in progress
//     helper: spin a little, then sleep until the next loop ---> claim, run ... nothing left -> spin
//
// `claim` is the loop's number (32 bits) and the next item. Claiming is a compare-and-swap of both, so a helper that was
// late and looks at an old loop fails. Only one thread calls at a time; another one that does runs its loop alone.

#define _GNU_SOURCE
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_THREADS 256
#define SPIN_NS 100000  // longer than the gaps inside a step; a helper that has spun for so long sleeps
#define CLOSED 0xffffffffu

static struct {
    uint64_t claim __attribute__((aligned(64)));  // loop << 32 | next item
    Item item __attribute__((aligned(64)));
    const void *args;
    uint32_t count;
    uint32_t done __attribute__((aligned(64)));
    uint32_t loop __attribute__((aligned(64)));  // sleeping helpers wait for it to change
    uint32_t sleepers;
    uint32_t threads;  // surplus helpers wait for it to change
    uint32_t started, busy;
} pool = {.claim = CLOSED, .threads = 1, .started = 1};

#define LOAD(x) __atomic_load_n(&(x), __ATOMIC_SEQ_CST)
#define STORE(x, value) __atomic_store_n(&(x), value, __ATOMIC_SEQ_CST)

static void futex_wait(uint32_t *word, uint32_t value) { syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, 0, 0, 0); }
static void futex_wake(uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, MAX_THREADS, 0, 0, 0); }

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static void pause_briefly(void) {
    for (int i = 0; i < 32; i++) {
#if defined __x86_64__
        __builtin_ia32_pause();
#elif defined __aarch64__
        __asm__ volatile("yield");
#endif
    }
}

static void work(uint32_t loop) {
    for (;;) {
        uint64_t claim = LOAD(pool.claim);
        uint32_t next = (uint32_t)claim;
        if (claim >> 32 != loop || next == CLOSED || next >= LOAD(pool.count)) return;
        Item item = LOAD(pool.item);
        const void *args = LOAD(pool.args);
        if (!__atomic_compare_exchange_n(&pool.claim, &claim, claim + 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) continue;
        item(args, next);
        __atomic_fetch_add(&pool.done, 1, __ATOMIC_SEQ_CST);
    }
}

static void *helper(void *index) {
    uint32_t seen = 0;
    for (;;) {
        uint32_t threads = LOAD(pool.threads);
        if ((uint32_t)(uintptr_t)index >= threads) {
            futex_wait(&pool.threads, threads);
            continue;
        }
        int64_t until = now_ns() + SPIN_NS;
        while (LOAD(pool.loop) == seen && now_ns() < until) {
            pause_briefly();
            sched_yield();
        }
        if (LOAD(pool.loop) == seen) {
            __atomic_fetch_add(&pool.sleepers, 1, __ATOMIC_SEQ_CST);
            futex_wait(&pool.loop, seen);
            __atomic_fetch_sub(&pool.sleepers, 1, __ATOMIC_SEQ_CST);
        }
        seen = LOAD(pool.loop);
        work(seen);
    }
    return 0;
}

void parallel(Item item, const void *args, long count) {
    if (count < 2 || LOAD(pool.threads) < 2 || __atomic_exchange_n(&pool.busy, 1, __ATOMIC_SEQ_CST)) {
        for (long i = 0; i < count; i++) item(args, i);
        return;
    }
    uint32_t loop = pool.loop + 1;
    STORE(pool.claim, (uint64_t)loop << 32 | CLOSED);  // before the description changes: late helpers fail from here on
    STORE(pool.item, item);
    STORE(pool.args, args);
    STORE(pool.count, (uint32_t)count);
    STORE(pool.done, 0);
    STORE(pool.claim, (uint64_t)loop << 32);
    STORE(pool.loop, loop);
    if (LOAD(pool.sleepers)) futex_wake(&pool.loop);
    work(loop);
    while (LOAD(pool.done) < (uint32_t)count) {
        for (int i = 0; i < 64 && LOAD(pool.done) < (uint32_t)count; i++) pause_briefly();
        if (LOAD(pool.done) < (uint32_t)count) sched_yield();  // the helper may be waiting for this core
    }
    STORE(pool.busy, 0);
}

void set_threads(int count) {
    uint32_t wanted = count < 1 ? 1 : count > MAX_THREADS ? MAX_THREADS : count;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // helpers inherit it: signals are for the interpreter's threads
    while (pool.started < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, 0, helper, (void *)(uintptr_t)pool.started)) break;
        pthread_detach(thread);
        pool.started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
    if (wanted > pool.started) wanted = pool.started;
    if (LOAD(pool.threads) == wanted) return;
    STORE(pool.threads, wanted);
    futex_wake(&pool.threads);
}

int get_threads(void) { return LOAD(pool.threads); }
