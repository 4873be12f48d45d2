/* A step that turns out short holds what later ones show, until the outside knows. */
#include "toy_poller.h"

#define SLOTS 8u

static struct kv_stream *stream(void) { return toy->streams[0]; }
static struct kv_transfer *transfer(uint32_t tag) { return toy_transfer(0, tag, 1, false); }
static struct kv_transfer *other_link(uint32_t tag) { return toy_transfer(1, tag, 1, false); }

static uint64_t short_step(void)   /* it moves nothing by itself: its chunk has filled no page */
{
    return toy_step(2, NULL, NULL);
}
static void check_fault(uint64_t ticket, uint32_t bumps, uint32_t kind)
{
    toy_check_record(KV_STEP_FAULT, 0, ticket, (uint64_t)bumps << 32 | kind);
}
static void check_ended(uint64_t ticket, uint32_t bumps) { toy_check_record(KV_STEP_ENDED, 0, ticket, bumps); }
static void check_held(const struct kv_transfer *x) { CHECK(x->released == 0 && !x->stopped && toy->num_active == 0); }
static void check_released(const struct kv_transfer *x)
{
    CHECK(x->released == TOY_ENTRIES && x->bumps_seen == TOY_ENTRIES && kv_list_empty(&x->in_step));
}

/* The newer step has shown all when it is looked at first: nothing of it may go before the older one is found short. */
static void test_nothing_of_a_later_step_goes_before_the_fault_is_known(void)
{
    toy_open(SLOTS, 16, 16);
    struct kv_transfer *x = transfer(2), *spoiled = transfer(1), *joins = other_link(3), *armed_later = other_link(4);
    uint64_t fewer = short_step(), later = toy_step(TOY_ENTRIES, spoiled, x);
    toy_run(fewer, 1);
    toy_run(later, TOY_ENTRIES);
    kv_watch(toy);
    check_fault(fewer, 1, KV_FEWER);
    toy_join(later, joins, NULL);
    uint64_t last = toy_step(TOY_ENTRIES, armed_later, NULL);
    toy_run(last, 2);
    kv_watch(toy);
    check_ended(later, TOY_ENTRIES);   /* over and complete, with all its transfers */
    struct kv_transfer *joins_late = other_link(5);
    toy_join(later, joins_late, NULL);
    toy_run(last, TOY_ENTRIES);
    kv_watch(toy);
    CHECK(toy->num_armed == 0);   /* nobody spins for it */
    check_held(x), check_held(spoiled), check_held(joins), check_held(armed_later), check_held(joins_late);
    toy_no_record();
    kv_link_stop_tag(toy, toy_link(0), 1);   /* what Python does, and then: */
    toy_check_record(KV_STOPPED, 1, 0, 0);
    kv_stream_resume(toy, stream(), fewer);
    check_released(x), check_released(joins), check_released(armed_later), check_released(joins_late);
    CHECK(kv_list_empty(&stream()->held));
    toy_no_record();
    toy_close();
}

static void test_what_is_shown_after_that_goes_as_ever(void)
{
    toy_open(SLOTS, 16, 16);
    struct kv_transfer *x = transfer(1);
    uint64_t fewer = short_step(), later = toy_step(TOY_ENTRIES, x, NULL);
    toy_run(later, 1);
    kv_watch(toy);
    check_fault(fewer, 0, KV_FEWER);
    kv_counter_bump(toy_counter(), SLOTS);
    kv_watch(toy);
    check_held(x);
    CHECK(toy->num_armed == 1);
    kv_stream_resume(toy, stream(), fewer);
    CHECK(x->released == 2 && x->bumps_seen == 2);
    kv_stream_resume(toy, stream(), fewer);   /* it is gone: no harm */
    kv_counter_bump(toy_counter(), SLOTS);
    kv_watch(toy);
    CHECK(x->released == 3);
    toy_close();
}

static struct kv_step *last_step(void) { return KV_OF(stream()->steps.prev, struct kv_step, in_stream); }

static void test_deadlines_hold_and_are_held(void)
{
    toy_open(SLOTS, 16, 16);
    struct kv_transfer *older = transfer(1), *x = other_link(2);
    uint64_t sound = toy_step(TOY_ENTRIES, older, NULL);
    last_step()->deadline_ns = 3000;
    toy_run(sound, 1);
    uint64_t late = short_step();
    kv_watch(toy);
    toy->now_ns = 1000;
    kv_watch_deadlines(toy);
    check_fault(late, 0, KV_DEADLINE);
    toy_run(sound, TOY_ENTRIES);
    kv_watch(toy);
    check_released(older);   /* it came before: nothing of the short one is in it */
    uint64_t later = toy_step(TOY_ENTRIES, x, NULL);
    last_step()->deadline_ns = 2000;
    toy_run(later, TOY_ENTRIES);
    toy->now_ns = 2000;
    kv_watch_deadlines(toy);   /* sees it start as well, which ends the first */
    check_ended(sound, TOY_ENTRIES);
    check_ended(later, TOY_ENTRIES);
    CHECK(x->released == 0 && !x->stopped && toy->num_armed == 0);
    kv_stream_resume(toy, stream(), late);
    check_released(x);
    toy_close();
}

/* A look for a deadline may be the first that sees a step start. */
static void test_a_deadline_finds_older_faults_first(void)
{
    toy_open(SLOTS, 16, 16);
    uint64_t fewer = short_step();
    last_step()->deadline_ns = 5000;
    struct kv_transfer *x = transfer(1);
    uint64_t later = toy_step(TOY_ENTRIES, x, NULL);
    toy_run(later, TOY_ENTRIES);
    toy->now_ns = 1000;
    kv_watch_deadlines(toy);
    check_fault(fewer, 0, KV_FEWER);
    check_ended(later, TOY_ENTRIES);
    check_held(x);
    kv_stream_resume(toy, stream(), fewer);
    check_released(x);
    toy_close();
}

/* Whatever the order in which the outside hears of them. */
static void test_each_fault_holds_what_comes_after_it(void)
{
    for (int second_first = 0; second_first < 2; second_first++) {
        toy_open(SLOTS, 16, 16);
        struct kv_transfer *between = transfer(1), *after = other_link(2);
        uint64_t first = short_step(), sound = toy_step(TOY_ENTRIES, between, NULL), second = short_step();
        uint64_t last = toy_step(TOY_ENTRIES, after, NULL);
        toy_run(sound, TOY_ENTRIES);
        toy_run(second, 1);
        toy_run(last, TOY_ENTRIES);
        kv_watch(toy);
        check_fault(first, 0, KV_FEWER);
        check_ended(sound, TOY_ENTRIES);
        check_fault(second, 1, KV_FEWER);
        kv_stream_resume(toy, stream(), sound);   /* these are not short */
        kv_stream_resume(toy, stream(), last);
        check_held(between), check_held(after);
        if (second_first) {
            kv_stream_resume(toy, stream(), second);
            check_held(between), check_held(after);
            kv_stream_resume(toy, stream(), first);
        } else {
            kv_stream_resume(toy, stream(), first);
            check_released(between);
            CHECK(after->released == 0 && toy->num_active == 1);
            kv_stream_resume(toy, stream(), second);
        }
        check_released(between), check_released(after);
        toy_close();
    }
}

/* Another poller has told of it, and the outside has dealt with it before this one saw. */
static void test_a_fault_that_is_known_before_it_is_seen_holds_nothing(void)
{
    toy_open(SLOTS, 16, 16);
    uint64_t fewer = short_step();
    struct kv_transfer *x = transfer(1);
    uint64_t later = toy_step(TOY_ENTRIES, x, NULL);
    CHECK(kv_turns_fault(stream()->turns, fewer));   /* what the other one did */
    kv_stream_resume(toy, stream(), fewer);
    toy_run(later, TOY_ENTRIES);
    kv_watch(toy);
    toy_no_record();
    check_released(x);
    toy_close();
}

/* Another poller has told of it, and the outside does not know yet. */
static void test_a_fault_that_another_poller_tells_holds_here_as_well(void)
{
    toy_open(SLOTS, 16, 16);
    uint64_t fewer = short_step();
    struct kv_transfer *x = transfer(1);
    uint64_t later = toy_step(TOY_ENTRIES, x, NULL);
    CHECK(kv_turns_fault(stream()->turns, fewer));
    toy_run(later, TOY_ENTRIES);
    kv_watch(toy);
    toy_no_record();
    check_held(x);
    kv_stream_resume(toy, stream(), fewer);
    check_released(x);
    toy_close();
}

static void test_what_is_held_may_end(void)
{
    toy_open(SLOTS, 16, 16);
    struct kv_transfer *x = transfer(1), *outstanding = other_link(2), *closed = toy_transfer(2, 3, 1, false);
    uint64_t fewer = short_step(), later = toy_step(TOY_ENTRIES, x, closed);
    toy_run(later, TOY_ENTRIES);
    uint64_t last = toy_step(TOY_ENTRIES, outstanding, NULL), abandoned = toy_step(1, other_link(4), NULL);
    toy_run(last, 1);
    kv_watch(toy);
    check_fault(fewer, 0, KV_FEWER);
    check_ended(later, TOY_ENTRIES);
    kv_step_abandon(toy, stream(), abandoned);
    toy_check_record(KV_STOPPED, 4, 0, 0);
    kv_link_fail(toy, toy_link(0), 5, KV_FAILED_POST);
    CHECK(toy_record().kind == KV_LINK_FAILED);
    toy_check_record(KV_STOPPED, 1, 0, 0);
    toy_link(0)->failed = false;
    CHECK(outstanding->released == 0 && closed->released == 0);
    kv_watch_close(toy);   /* and the rest when the poller closes */
    toy_check_record(KV_STOPPED, 2, 0, 0);
    toy_check_record(KV_STOPPED, 3, 0, 0);
    toy_no_record();
    toy_close();
}

static void test_steps_that_show_nothing_and_pages_that_are_ready_are_not_held(void)
{
    toy_open(SLOTS, 16, 16);
    uint64_t fewer = short_step(), later = toy_step(1, NULL, NULL);
    toy_run(later, 0);
    kv_watch(toy);
    check_fault(fewer, 0, KV_FEWER);
    struct kv_transfer *ready = toy_transfer(0, 1, 1, true);
    check_ended(toy_step(0, ready, NULL), 0);
    CHECK(ready->released == TOY_ENTRIES);
    for (uint32_t i = 0; i < 3 * SLOTS; i++)   /* nor are their ring slots */
        check_ended(toy_step(0, NULL, NULL), 0);
    toy_close();
}

static void test_other_streams_go_on(void)
{
    toy_open(SLOTS, 16, 16);
    struct kv_stream *first = stream(), *second = kv_stream_new(kv_layer_counter_new(SLOTS), 1, NULL);
    CHECK(second && second->counter);
    uint64_t fewer = short_step(), later = toy_step(1, NULL, NULL);
    toy_run(later, 1);
    kv_watch(toy);
    check_fault(fewer, 0, KV_FEWER);
    toy->streams[0] = second, toy->streams[1] = first, toy->num_streams = 2;
    struct kv_transfer *x = transfer(1);
    toy_run(toy_step(TOY_ENTRIES, x, NULL), TOY_ENTRIES);
    kv_watch(toy);
    check_released(x);
    kv_watch_close(toy);
    toy->streams[0] = first, toy->num_streams = 1;
    kv_layer_counter_free(second->counter);
    kv_stream_free(second);
    toy_close();
}

int main(void)
{
    test_nothing_of_a_later_step_goes_before_the_fault_is_known();
    test_what_is_shown_after_that_goes_as_ever();
    test_deadlines_hold_and_are_held();
    test_a_deadline_finds_older_faults_first();
    test_each_fault_holds_what_comes_after_it();
    test_a_fault_that_is_known_before_it_is_seen_holds_nothing();
    test_a_fault_that_another_poller_tells_holds_here_as_well();
    test_what_is_held_may_end();
    test_steps_that_show_nothing_and_pages_that_are_ready_are_not_held();
    test_other_streams_go_on();
    return 0;
}
