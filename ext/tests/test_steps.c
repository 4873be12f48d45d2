/* Layer words: what they release, and how steps end. */
#include "toy_poller.h"
#include <pthread.h>
#include <sched.h>

#define SLOTS 4u

static void test_words_release_what_they_reach(void)
{
    toy_open(SLOTS, 16, 16);
    struct kv_transfer *x = toy_transfer(0, 1, 2, false);
    uint64_t ticket = toy_step(TOY_ENTRIES, x, NULL);
    CHECK(kv_watch(toy) == 0 && x->released == 0);
    kv_counter_start(toy_counter(), toy_counter()->num_slots, ticket);
    CHECK(kv_watch(toy) == 1 && x->released == 0);
    toy_run(ticket, 3);   /* values may be skipped */
    CHECK(kv_watch(toy) == 1 && x->released == 3 && x->bumps_seen == 3);
    CHECK(kv_watch(toy) == 0 && toy->num_armed == 1);
    kv_counter_bump(toy_counter(), toy_counter()->num_slots);
    CHECK(kv_watch(toy) == 1 && x->released == 4 && toy->num_armed == 0);
    toy_close();
}

static void test_other_tickets_release_nothing(void)
{
    toy_open(SLOTS, 16, 16);
    uint64_t stale = toy_step(0, NULL, NULL);
    toy_check_record(KV_STEP_ENDED, 0, stale, 0);
    toy_run(stale, 9);
    for (uint32_t i = 1; i < SLOTS; i++)
        toy_check_record(KV_STEP_ENDED, 0, toy_step(0, NULL, NULL), 0);
    struct kv_transfer *x = toy_transfer(0, 1, 1, false);
    uint64_t ticket = toy_step(TOY_ENTRIES, x, NULL);
    CHECK(ticket % SLOTS == stale % SLOTS);
    CHECK(kv_watch(toy) == 0 && x->released == 0);
    toy_run(0, 9);   /* a forward nobody announced */
    CHECK(kv_watch(toy) == 0 && x->released == 0);
    toy_run(ticket, 1);
    CHECK(kv_watch(toy) == 1 && x->released == 1);
    toy_close();
}

static void test_a_step_is_over_when_a_later_one_starts(void)
{
    toy_open(SLOTS, 16, 16);
    uint64_t right = toy_step(2, NULL, NULL), fewer = toy_step(2, toy_transfer(0, 7, 1, false), NULL);
    uint64_t last = toy_step(2, NULL, NULL);
    toy_run(right, 2);
    CHECK(kv_watch(toy) == 1);
    toy_no_record();
    toy_run(fewer, 1);
    toy_run(last, 0);
    CHECK(kv_watch(toy) == 2);
    toy_check_record(KV_STEP_ENDED, 0, right, 2);
    toy_check_record(KV_STEP_FAULT, 0, fewer, 1ull << 32 | KV_FEWER);
    toy_check_record(KV_STOPPED, 7, 0, 0);
    toy_no_record();
    toy_close();
}

static void test_the_last_bumps_are_read_once_more(void)
{
    toy_open(SLOTS, 16, 16);
    struct kv_transfer *x = toy_transfer(0, 7, 1, false);
    uint64_t first = toy_step(TOY_ENTRIES, x, NULL), second = toy_step(1, NULL, NULL);
    toy_run(first, TOY_ENTRIES);   /* neither word has been seen when the second step starts */
    toy_run(second, 0);
    kv_watch(toy);
    toy_check_record(KV_STEP_ENDED, 0, first, TOY_ENTRIES);
    CHECK(x->released == TOY_ENTRIES && !x->stopped);
    toy_close();
}

static void test_more_is_told_once(void)
{
    toy_open(SLOTS, 16, 16);
    uint64_t ticket = toy_step(1, NULL, NULL);
    toy_run(ticket, 2);
    kv_watch(toy);
    toy_check_record(KV_STEP_FAULT, 0, ticket, 2ull << 32 | KV_MORE);
    kv_counter_bump(toy_counter(), toy_counter()->num_slots);
    kv_watch(toy);
    toy_run(toy_step(1, NULL, NULL), 0);
    kv_watch(toy);
    toy_no_record();
    toy_close();
}

static void test_deadlines(void)
{
    toy_open(SLOTS, 16, 16);
    uint64_t complete = toy_step(1, NULL, NULL), late = toy_step(1, NULL, NULL);
    toy_run(complete, 1);
    toy->now_ns = 999;
    kv_watch_deadlines(toy);
    toy_no_record();
    toy->now_ns = 1000;
    kv_watch_deadlines(toy);   /* and it looks once more: the watch never ran */
    toy_check_record(KV_STEP_ENDED, 0, complete, 1);
    toy_check_record(KV_STEP_FAULT, 0, late, KV_DEADLINE);
    toy_close();
}

static void test_abandoned_steps_give_their_slots_back(void)
{
    toy_open(SLOTS, 16, 16);
    uint64_t tickets[SLOTS];
    for (uint32_t i = 0; i < SLOTS; i++)
        tickets[i] = toy_step(1, i ? NULL : toy_transfer(0, 3, 1, false), NULL);
    CHECK(kv_turns_claim(toy->streams[0]->turns, 1) == 0);
    kv_step_abandon(toy, toy->streams[0], tickets[0]);
    toy_check_record(KV_STOPPED, 3, 0, 0);
    kv_step_abandon(toy, toy->streams[0], tickets[0]);
    toy_no_record();
    uint64_t next = toy_step(1, NULL, NULL);
    CHECK(next == tickets[0] + SLOTS);
    CHECK(kv_turns_claim(toy->streams[0]->turns, 1) == 0);
    toy_run(next, 1);   /* the others left nothing in the ring */
    kv_watch(toy);
    for (uint32_t i = 1; i < SLOTS; i++)
        toy_check_record(KV_STEP_FAULT, 0, tickets[i], KV_FEWER);
    toy_no_record();
    toy_close();
}

static void test_bumps_never_reach_the_ticket(void)
{
    toy_open(SLOTS, 16, 16);
    kv_counter_start(toy_counter(), toy_counter()->num_slots, 5);
    atomic_store(&toy_counter()->current, 5ull << KV_BUMP_BITS | KV_MAX_BUMPS);
    kv_counter_bump(toy_counter(), toy_counter()->num_slots);
    CHECK(kv_word_ticket(kv_counter_current(toy_counter())) == 5);
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
        toy_run(0, 2);
        toy_run(ticket, 3);
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
        if (s && (s->ticket = kv_turns_claim(toy->streams[0]->turns, 1))) {
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
    struct kv_turns *t = toy->streams[0]->turns;
    CHECK(kv_turns_claim(t, 1) == 1);
    kv_turns_unclaim(t, 1);
    CHECK(kv_turns_claim(t, 1) == 1 && kv_turns_claim(t, 1) == 2);
    kv_turns_unclaim(t, 1);   /* another thread has gone on: its slot takes the next ticket */
    CHECK(kv_turns_claim(t, 1) == 3 && kv_turns_claim(t, 1) == 4 && kv_turns_claim(t, 1) == 5 && !kv_turns_claim(t, 1));
    toy_close();
}

/* ---- a counter that two pollers watch: here two streams of one, looked at in any order ---- */
static struct kv_stream *second;

static void open_shared(void)
{
    toy_open(SLOTS, 16, 16);
    second = kv_stream_new(toy_counter(), 1, toy->streams[0]->turns);   /* the poller's own list does not have it */
    CHECK(second);
}

static void close_shared(void)
{
    toy->streams[toy->num_streams++] = second;
    kv_watch_close(toy);
    toy->num_streams--;
    kv_stream_free(second);
    toy_close();
}

/* What the poller of `s` does. */
static void have(void (*look)(struct kv_poller *), struct kv_stream *s)
{
    struct kv_stream *first = toy->streams[0];
    toy->streams[0] = s;
    look(toy);
    toy->streams[0] = first;
}
static void look_at_words(struct kv_poller *p) { kv_watch(p); }
static void watch(struct kv_stream *s) { have(look_at_words, s); }
static void watch_deadlines(struct kv_stream *s) { have(kv_watch_deadlines, s); }

static uint64_t step_of_two(uint32_t num_bumps, struct kv_transfer *one, struct kv_transfer *other)
{
    struct kv_stream *streams[] = {toy->streams[0], second};
    struct kv_transfer *transfers[] = {one, other};
    uint64_t ticket = kv_turns_claim(second->turns, 2);
    CHECK(ticket);
    for (int i = 0; i < 2; i++) {
        struct kv_step *s = kv_step_new(streams[i], num_bumps, 1000);
        CHECK(s);
        s->ticket = ticket;
        if (transfers[i])
            kv_list_append(&s->transfers, &transfers[i]->in_step);
        kv_step_arm(toy, s);
    }
    return ticket;
}

static void test_a_shared_step_ends_with_the_last_poller(void)
{
    open_shared();
    struct kv_transfer *one = toy_transfer(0, 1, 1, false), *other = toy_transfer(1, 2, 1, false);
    uint64_t first = step_of_two(TOY_ENTRIES, one, other), next = 0;
    for (uint32_t i = 1; i < SLOTS; i++)
        next = step_of_two(0, NULL, NULL);   /* over at once, and said once each */
    for (uint32_t i = 1; i < SLOTS; i++)
        toy_check_record(KV_STEP_ENDED, 1, first + i, 0);
    toy_no_record();
    CHECK(next == first + SLOTS - 1 && !kv_turns_claim(second->turns, 2));
    toy_run(first, TOY_ENTRIES);
    watch(second);
    CHECK(other->released == TOY_ENTRIES && one->released == 0);   /* each poller releases its own */
    watch(toy->streams[0]);
    CHECK(one->released == TOY_ENTRIES && toy->num_armed == 0);
    toy->now_ns = 1000;
    watch_deadlines(toy->streams[0]);
    toy_no_record();
    CHECK(!kv_turns_claim(second->turns, 2));   /* the other poller still reads the ring slot */
    watch_deadlines(second);
    toy_check_record(KV_STEP_ENDED, 1, first, TOY_ENTRIES);
    CHECK(kv_turns_claim(second->turns, 2) == first + SLOTS);
    close_shared();
}

static void test_a_fault_of_a_shared_step_is_said_once(void)
{
    open_shared();
    uint64_t more = step_of_two(1, NULL, NULL), fewer = step_of_two(2, NULL, NULL), last = step_of_two(1, NULL, NULL);
    toy_run(more, 2);
    watch(second);
    toy_check_record(KV_STEP_FAULT, 1, more, 2ull << 32 | KV_MORE);
    watch(toy->streams[0]);
    toy_no_record();
    toy_run(fewer, 1);
    toy_run(last, 1);
    watch(toy->streams[0]);
    toy_check_record(KV_STEP_FAULT, 0, fewer, 1ull << 32 | KV_FEWER);
    uint64_t other = step_of_two(1, NULL, NULL);
    CHECK(other == last + 1 && !kv_turns_claim(second->turns, 2));
    watch(second);
    toy_no_record();
    CHECK(step_of_two(0, NULL, NULL) == more + SLOTS);   /* what takes its slot next has none */
    toy_check_record(KV_STEP_ENDED, 1, more + SLOTS, 0);
    CHECK(kv_turns_claim(second->turns, 2) == fewer + SLOTS);
    close_shared();
}

static void test_a_shared_step_is_abandoned_by_each(void)
{
    open_shared();
    uint64_t ticket = step_of_two(1, NULL, NULL);
    for (uint32_t i = 1; i < SLOTS; i++)
        step_of_two(1, NULL, NULL);
    kv_step_abandon(toy, second, ticket);
    kv_step_abandon(toy, second, ticket);
    CHECK(!kv_turns_claim(second->turns, 2));
    kv_step_abandon(toy, toy->streams[0], ticket);
    CHECK(kv_turns_claim(second->turns, 2) == ticket + SLOTS);
    toy_no_record();
    close_shared();
}

/* ---- tickets are unique, whoever claims them ---- */
static uint8_t claimed[8 * SLOTS * 1000];

static void *claim(void *arg)
{
    struct kv_turns *t = arg;
    for (uint32_t i = 0; i < 1000; i++) {
        uint64_t ticket;
        while (!(ticket = kv_turns_claim(t, 2)))
            sched_yield();
        if (i % 3 == 0) {
            kv_turns_unclaim(t, ticket);
            continue;
        }
        CHECK(!claimed[ticket]++);
        CHECK(!kv_turns_give_back(t, ticket) && kv_turns_give_back(t, ticket));
    }
    return NULL;
}

static void test_threads_claim_different_tickets(void)
{
    toy_open(SLOTS, 16, 16);
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        CHECK(!pthread_create(&threads[i], NULL, claim, toy->streams[0]->turns));
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    CHECK(atomic_load(&toy->streams[0]->turns->next_ticket) <= 3001);
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
    test_a_shared_step_ends_with_the_last_poller();
    test_a_fault_of_a_shared_step_is_said_once();
    test_a_shared_step_is_abandoned_by_each();
    test_a_ticket_that_is_not_used_comes_next_again();
    test_threads_claim_different_tickets();
    return 0;
}
