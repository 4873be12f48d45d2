/* Layer words: what they release, and how steps end. */
#include "toy_poller.h"
#include <pthread.h>
#include <sched.h>

#define SLOTS 4u

static struct kv_layer_counter *counter(void) { return toy->streams[0]->counter; }

static void run(uint64_t ticket, uint32_t num_bumps)
{
    kv_counter_start(counter(), counter()->num_slots, ticket);
    for (uint32_t i = 0; i < num_bumps; i++)
        kv_counter_bump(counter(), counter()->num_slots);
}

static void check_record(uint64_t kind, uint64_t id, uint64_t value, uint64_t extra)
{
    struct kv_record r = toy_record();
    CHECK(r.kind == kind && r.id == id && r.value == value && r.extra == extra);
}

static void test_words_release_what_they_reach(void)
{
    toy_open(SLOTS, 16, 16);
    struct kv_transfer *x = toy_transfer(0, 1, 2, false);
    uint64_t ticket = toy_step(TOY_ENTRIES, x, NULL);
    CHECK(kv_watch(toy) == 0 && x->released == 0);
    kv_counter_start(counter(), counter()->num_slots, ticket);
    CHECK(kv_watch(toy) == 1 && x->released == 0);
    run(ticket, 3);   /* values may be skipped */
    CHECK(kv_watch(toy) == 1 && x->released == 3 && x->bumps_seen == 3);
    CHECK(kv_watch(toy) == 0 && toy->num_armed == 1);
    kv_counter_bump(counter(), counter()->num_slots);
    CHECK(kv_watch(toy) == 1 && x->released == 4 && toy->num_armed == 0);
    toy_close();
}

static void test_other_tickets_release_nothing(void)
{
    toy_open(SLOTS, 16, 16);
    uint64_t stale = toy_step(0, NULL, NULL);
    check_record(KV_STEP_ENDED, 0, stale, 0);
    run(stale, 9);
    for (uint32_t i = 1; i < SLOTS; i++)
        check_record(KV_STEP_ENDED, 0, toy_step(0, NULL, NULL), 0);
    struct kv_transfer *x = toy_transfer(0, 1, 1, false);
    uint64_t ticket = toy_step(TOY_ENTRIES, x, NULL);
    CHECK(ticket % SLOTS == stale % SLOTS);
    CHECK(kv_watch(toy) == 0 && x->released == 0);
    run(0, 9);   /* a forward nobody announced */
    CHECK(kv_watch(toy) == 0 && x->released == 0);
    run(ticket, 1);
    CHECK(kv_watch(toy) == 1 && x->released == 1);
    toy_close();
}

static void test_a_step_is_over_when_a_later_one_starts(void)
{
    toy_open(SLOTS, 16, 16);
    uint64_t right = toy_step(2, NULL, NULL), fewer = toy_step(2, toy_transfer(0, 7, 1, false), NULL);
    uint64_t last = toy_step(2, NULL, NULL);
    run(right, 2);
    CHECK(kv_watch(toy) == 1);
    toy_no_record();
    run(fewer, 1);
    run(last, 0);
    CHECK(kv_watch(toy) == 2);
    check_record(KV_STEP_ENDED, 0, right, 2);
    check_record(KV_STEP_FAULT, 0, fewer, 1ull << 32 | KV_FEWER);
    check_record(KV_STOPPED, 7, 0, 0);
    toy_no_record();
    toy_close();
}

static void test_the_last_bumps_are_read_once_more(void)
{
    toy_open(SLOTS, 16, 16);
    struct kv_transfer *x = toy_transfer(0, 7, 1, false);
    uint64_t first = toy_step(TOY_ENTRIES, x, NULL), second = toy_step(1, NULL, NULL);
    run(first, TOY_ENTRIES);   /* neither word has been seen when the second step starts */
    run(second, 0);
    kv_watch(toy);
    check_record(KV_STEP_ENDED, 0, first, TOY_ENTRIES);
    CHECK(x->released == TOY_ENTRIES && !x->stopped);
    toy_close();
}

static void test_more_is_told_once(void)
{
    toy_open(SLOTS, 16, 16);
    uint64_t ticket = toy_step(1, NULL, NULL);
    run(ticket, 2);
    kv_watch(toy);
    check_record(KV_STEP_FAULT, 0, ticket, 2ull << 32 | KV_MORE);
    kv_counter_bump(counter(), counter()->num_slots);
    kv_watch(toy);
    run(toy_step(1, NULL, NULL), 0);
    kv_watch(toy);
    toy_no_record();
    toy_close();
}

static void test_deadlines(void)
{
    toy_open(SLOTS, 16, 16);
    uint64_t complete = toy_step(1, NULL, NULL), late = toy_step(1, NULL, NULL);
    run(complete, 1);
    toy->now_ns = 999;
    kv_watch_deadlines(toy);
    toy_no_record();
    toy->now_ns = 1000;
    kv_watch_deadlines(toy);   /* and it looks once more: the watch never ran */
    check_record(KV_STEP_ENDED, 0, complete, 1);
    check_record(KV_STEP_FAULT, 0, late, KV_DEADLINE);
    toy_close();
}

static void test_abandoned_steps_give_their_slots_back(void)
{
    toy_open(SLOTS, 16, 16);
    uint64_t tickets[SLOTS];
    for (uint32_t i = 0; i < SLOTS; i++)
        tickets[i] = toy_step(1, i ? NULL : toy_transfer(0, 3, 1, false), NULL);
    CHECK(kv_stream_claim(toy->streams[0]) == 0);
    kv_step_abandon(toy, toy->streams[0], tickets[0]);
    check_record(KV_STOPPED, 3, 0, 0);
    kv_step_abandon(toy, toy->streams[0], tickets[0]);
    toy_no_record();
    uint64_t next = toy_step(1, NULL, NULL);
    CHECK(next == tickets[0] + SLOTS);
    CHECK(kv_stream_claim(toy->streams[0]) == 0);
    run(next, 1);   /* the others left nothing in the ring */
    kv_watch(toy);
    for (uint32_t i = 1; i < SLOTS; i++)
        check_record(KV_STEP_FAULT, 0, tickets[i], KV_FEWER);
    toy_no_record();
    toy_close();
}

static void test_bumps_never_reach_the_ticket(void)
{
    toy_open(SLOTS, 16, 16);
    kv_counter_start(counter(), counter()->num_slots, 5);
    atomic_store(&counter()->current, 5ull << KV_BUMP_BITS | KV_MAX_BUMPS);
    kv_counter_bump(counter(), counter()->num_slots);
    CHECK(kv_word_ticket(kv_counter_current(counter())) == 5);
    toy_close();
}

/* ---- an engine thread against the watch, many times round the ring ---- */
#define STEPS 3000u
static _Atomic uint64_t announced;

static void *engine(void *arg)
{
    (void)arg;
    for (uint64_t ticket = 1; ticket <= STEPS; ticket++) {
        while (atomic_load_explicit(&announced, memory_order_acquire) < ticket)
            sched_yield();
        run(0, 2);
        run(ticket, 3);
    }
    return NULL;
}

static void test_an_engine_runs_against_the_watch(void)
{
    toy_open(SLOTS, 16, 16);
    atomic_store(&announced, 0);
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, engine, NULL));
    uint64_t ended = 0, made = 0;
    while (ended < STEPS - 1) {
        struct kv_step *s = made < STEPS ? kv_step_new(toy->streams[0], 3, UINT64_MAX) : NULL;
        if (s && (s->ticket = kv_stream_claim(toy->streams[0]))) {
            made = s->ticket;
            kv_step_arm(toy, s);
            atomic_store_explicit(&announced, made, memory_order_release);
        } else if (s) {
            kv_step_free(s);
            sched_yield();
        }
        kv_watch(toy);
        struct kv_record r;
        while (kv_records_take(&toy->records, &r, 1)) {
            CHECK(r.kind == KV_STEP_ENDED && r.value == ++ended && r.extra == 3);
        }
    }
    pthread_join(thread, NULL);
    toy_close();
}

static void test_a_ticket_that_is_not_used_comes_next_again(void)
{
    toy_open(SLOTS, 16, 16);
    struct kv_stream *s = toy->streams[0];
    CHECK(kv_stream_claim(s) == 1);
    kv_stream_unclaim(s, 1);
    CHECK(kv_stream_claim(s) == 1 && kv_stream_claim(s) == 2);
    kv_stream_unclaim(s, 1);   /* another thread has gone on: its slot takes the next ticket */
    CHECK(kv_stream_claim(s) == 3 && kv_stream_claim(s) == 4 && kv_stream_claim(s) == 5 && !kv_stream_claim(s));
    toy_close();
}

/* ---- tickets are unique, whoever claims them ---- */
static uint8_t claimed[8 * SLOTS * 1000];

static void *claim(void *arg)
{
    struct kv_stream *s = arg;
    for (uint32_t i = 0; i < 1000; i++) {
        uint64_t ticket;
        while (!(ticket = kv_stream_claim(s)))
            sched_yield();
        if (i % 3 == 0) {
            kv_stream_unclaim(s, ticket);
            continue;
        }
        CHECK(!claimed[ticket]++);
        atomic_store_explicit(&s->turns[ticket % SLOTS], ticket + SLOTS, memory_order_release);
    }
    return NULL;
}

static void test_threads_claim_different_tickets(void)
{
    toy_open(SLOTS, 16, 16);
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        CHECK(!pthread_create(&threads[i], NULL, claim, toy->streams[0]));
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    CHECK(atomic_load(&toy->streams[0]->next_ticket) <= 3001);
    toy_close();
}

int main(void)
{
    test_words_release_what_they_reach();
    test_other_tickets_release_nothing();
    test_a_step_is_over_when_a_later_one_starts();
    test_the_last_bumps_are_read_once_more();
    test_more_is_told_once();
    test_deadlines();
    test_abandoned_steps_give_their_slots_back();
    test_bumps_never_reach_the_ticket();
    test_an_engine_runs_against_the_watch();
    test_a_ticket_that_is_not_used_comes_next_again();
    test_threads_claim_different_tickets();
    return 0;
}
