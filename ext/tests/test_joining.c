/* Transfers that join a step which was armed before. */
#include "toy_poller.h"
#include <pthread.h>
#include <sched.h>

#define SLOTS 4u

static void check_lost(uint32_t tag, uint64_t ticket)
{
    toy_check_record(KV_JOIN_LOST, tag, ticket, 0);
    toy_check_record(KV_STOPPED, tag, 0, 0);
}

static void test_what_joins_goes_as_far_as_its_step(void)
{
    toy_open(SLOTS, 16, 16);
    uint64_t ticket = toy_step(TOY_ENTRIES, NULL, NULL);
    struct kv_transfer *early = toy_transfer(0, 1, 1, false), *late = toy_transfer(1, 2, 1, false);
    toy_join(ticket, early, NULL);
    CHECK(early->released == 0 && toy->num_armed == 1);
    toy_run(ticket, 2);
    kv_watch(toy);
    toy_run(ticket, 3);   /* not seen yet: the next look releases it */
    toy_join(ticket, late, NULL);
    CHECK(early->released == 2 && late->released == 2 && late->bumps_seen == 2);
    CHECK(kv_watch(toy) == 1 && early->released == 3 && late->released == 3 && toy->num_armed == 1);
    kv_counter_bump(toy_counter(), toy_counter()->num_slots);
    kv_watch(toy);
    CHECK(early->released == TOY_ENTRIES && late->released == TOY_ENTRIES && toy->num_armed == 0);
    struct kv_transfer *last = toy_transfer(2, 3, 1, false);
    toy_join(ticket, last, NULL);   /* it has shown all, and is not over */
    CHECK(last->released == TOY_ENTRIES && toy->num_armed == 0 && toy->num_active == 3);
    toy_no_record();
    toy_close();
}

static void test_a_join_that_meets_the_first_word_of_its_step_ends_older_ones(void)
{
    toy_open(SLOTS, 16, 16);
    uint64_t fewer = toy_step(1, NULL, NULL), ticket = toy_step(TOY_ENTRIES, NULL, NULL);
    toy_run(ticket, 1);
    struct kv_transfer *x = toy_transfer(0, 1, 1, false);
    toy_join(ticket, x, NULL);
    CHECK(kv_watch(toy) == 1 && x->released == 0);   /* nor does it show before these are dealt with */
    toy_check_record(KV_STEP_FAULT, 0, fewer, KV_FEWER);
    toy_no_record();
    kv_stream_resume(toy, toy->streams[0], fewer);
    CHECK(x->released == 1);
    toy_close();
}

static void join_complete(uint64_t ticket)
{
    struct kv_transfer *x = toy_transfer(0, 1, 1, false);
    toy_join(ticket, x, NULL);
    CHECK(x->released == TOY_ENTRIES && x->bumps_seen == TOY_ENTRIES && kv_list_empty(&x->in_step));
    toy_no_record();
}

static void join_lost(uint64_t ticket)
{
    toy_join(ticket, toy_transfer(0, 1, 1, false), NULL);
    check_lost(1, ticket);
}

/* It is known that a step was complete until another one that had its ring slot was. */
static void test_complete_steps_are_remembered_by_ring_slot(void)
{
    toy_open(SLOTS, 16, 16);
    uint64_t complete = toy_step(TOY_ENTRIES, NULL, NULL);
    toy_run(complete, TOY_ENTRIES);
    uint64_t small = toy_step(3, NULL, NULL);   /* complete with three bumps; the transfers wait for four */
    toy_run(small, 3);
    uint64_t fewer = toy_step(TOY_ENTRIES, NULL, NULL);
    toy_run(fewer, 3);
    uint64_t last = toy_step(TOY_ENTRIES, NULL, NULL);
    toy_run(last, TOY_ENTRIES);
    kv_watch(toy);
    toy_check_record(KV_STEP_ENDED, 0, complete, TOY_ENTRIES);
    toy_check_record(KV_STEP_ENDED, 0, small, 3);
    toy_check_record(KV_STEP_FAULT, 0, fewer, 3ull << 32 | KV_FEWER);
    kv_stream_resume(toy, toy->streams[0], fewer);
    join_complete(complete);
    join_lost(small);
    join_lost(fewer);
    join_complete(last);
    toy->now_ns = 1000;
    kv_watch_deadlines(toy);   /* ends it well */
    toy_check_record(KV_STEP_ENDED, 0, last, TOY_ENTRIES);
    join_complete(last);
    for (uint32_t i = 0; i < SLOTS; i++)   /* these are over at once: nothing was to be shown */
        toy_check_record(KV_STEP_ENDED, 0, toy_step(0, NULL, NULL), 0);
    join_complete(complete);
    uint64_t same_slot = toy_step(TOY_ENTRIES, NULL, NULL);
    CHECK(same_slot == complete + 2 * SLOTS);
    join_complete(complete);
    toy_run(same_slot, TOY_ENTRIES);
    kv_watch_deadlines(toy);
    toy_check_record(KV_STEP_ENDED, 0, same_slot, TOY_ENTRIES);
    join_complete(same_slot);
    join_lost(complete);
    toy_close();
}

static void test_what_cannot_join_is_lost_once_a_tag(void)
{
    toy_open(SLOTS, 16, 16);
    toy_join(1, toy_transfer(0, 5, 1, false), toy_transfer(1, 5, 1, false));
    check_lost(5, 1);
    toy_check_record(KV_STOPPED, 5, 0, 0);
    toy_join(SLOTS, toy_transfer(0, 5, 1, false), toy_transfer(1, 6, 1, false));
    check_lost(5, SLOTS);
    check_lost(6, SLOTS);
    uint64_t abandoned = toy_step(1, NULL, NULL), more = toy_step(TOY_ENTRIES, NULL, NULL);
    kv_step_abandon(toy, toy->streams[0], abandoned);
    toy_join(abandoned, toy_transfer(0, 5, 1, false), NULL);
    check_lost(5, abandoned);
    toy_run(more, TOY_ENTRIES + 1);
    kv_watch(toy);
    toy_check_record(KV_STEP_FAULT, 0, more, (uint64_t)(TOY_ENTRIES + 1) << 32 | KV_MORE);
    toy_join(more, toy_transfer(0, 5, 1, false), NULL);
    check_lost(5, more);
    uint64_t never_ran = toy_step(0, NULL, NULL);
    toy_check_record(KV_STEP_ENDED, 0, never_ran, 0);
    toy_join(never_ran, toy_transfer(0, 5, 1, false), NULL);
    check_lost(5, never_ran);
    toy_no_record();
    toy_close();
}

static void test_what_joins_on_a_link_that_is_gone_is_stopped(void)
{
    toy_open(SLOTS, 16, 16);
    uint64_t ticket = toy_step(TOY_ENTRIES, NULL, NULL);
    toy_link(0)->failed = true;
    toy_join(ticket, toy_transfer(0, 5, 1, false), NULL);
    toy_check_record(KV_STOPPED, 5, 0, 0);
    toy_no_record();
    toy_link(0)->failed = false;
    toy_close();
}

/* ---- while an engine thread runs, many times round the ring ---- */
#define STEPS 3000u
static _Atomic uint64_t announced;

static void *engine(void *arg)
{
    (void)arg;
    for (uint64_t ticket = 1; ticket <= STEPS; ticket++) {
        while (atomic_load_explicit(&announced, memory_order_acquire) < ticket)
            sched_yield();
        toy_run(ticket, TOY_ENTRIES);
    }
    return NULL;
}

/* Whenever a transfer joins, it goes with its step or, if that is over, at once. */
static void test_transfers_join_while_an_engine_runs(void)
{
    enum { JOINED = 96 };
    toy_open(SLOTS, 16, 16);
    atomic_store(&announced, 0);
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, engine, NULL));
    struct kv_transfer *joined[JOINED];
    uint64_t made = 0, ended = 0, random = 1, num_late = 0;
    uint32_t num_joined = 0;
    while (ended < STEPS - 1) {
        struct kv_step *s = made < STEPS ? kv_step_new(toy->streams[0], TOY_ENTRIES, UINT64_MAX) : NULL;
        if (s && (s->ticket = kv_turns_claim(toy->streams[0]->turns, 1))) {
            made = s->ticket;
            kv_step_arm(toy, s);
            atomic_store_explicit(&announced, made, memory_order_release);
        } else if (s) {
            kv_step_free(s);
            sched_yield();
        }
        if (made && num_joined < JOINED && made > num_joined * STEPS / JOINED) {   /* all along the run */
            uint64_t first = made > SLOTS ? made - SLOTS : 1;   /* that one is over: its ring slot is in use again */
            uint64_t ticket = first + random_below(&random, made - first + 1);
            struct kv_transfer *x = toy_transfer(num_joined % TOY_LINKS, 1, 1, false);
            joined[num_joined++] = x;
            toy_join(ticket, x, NULL);
            if (ticket <= ended) {
                CHECK(x->released == TOY_ENTRIES);
                num_late++;
            }
        }
        kv_watch(toy);
        struct kv_record r;
        while (kv_records_take(&toy->records, &r, 1)) {
            CHECK(r.kind == KV_STEP_ENDED && r.value == ++ended && r.extra == TOY_ENTRIES);
        }
    }
    pthread_join(thread, NULL);
    CHECK(num_joined == JOINED && num_late && num_late < JOINED);
    kv_watch(toy);
    for (uint32_t i = 0; i < JOINED; i++)
        CHECK(joined[i]->released == TOY_ENTRIES && !joined[i]->stopped);
    toy_close();
}

int main(void)
{
    test_what_joins_goes_as_far_as_its_step();
    test_a_join_that_meets_the_first_word_of_its_step_ends_older_ones();
    test_complete_steps_are_remembered_by_ring_slot();
    test_what_cannot_join_is_lost_once_a_tag();
    test_what_joins_on_a_link_that_is_gone_is_stopped();
    test_transfers_join_while_an_engine_runs();
    return 0;
}
