/* Injected faults: which writes meet them, and that reordered ones are posted once and late. */
#include "toy_poller.h"

#define PAGE (16u << 10)
#define ROW (PAGE / TOY_ROWS)
#define PAGES 50

static void disturb(uint64_t seed, enum kv_fault fault, double chance)
{
    struct kv_disturbance d = {.seed = seed};
    d.chance[fault] = chance;
    kv_fault_disturb(&toy->faults, &d);
}

/* Posts PAGES pages, completing everything at once. Returns a fingerprint of the order in which they went. */
static uint64_t run(uint64_t seed, enum kv_fault fault, double chance)
{
    uint64_t order = 0;
    toy_open(4, 256, ROW);
    disturb(seed, fault, chance);
    toy_step(0, toy_transfer(0, 1, PAGES, true), NULL);
    toy_record();   /* of the step */
    for (uint32_t done = 0; toy->num_active; done = num_posts) {
        kv_post(toy);
        toy_complete(done, num_posts - done);
    }
    for (uint32_t i = 0; i < num_posts; i++)
        order = order * 31 + posts[i].dst;
    struct kv_record r = toy_record();
    CHECK(r.kind == KV_SENT && r.value == PAGES * TOY_ENTRIES * TOY_ROWS && r.extra == PAGES * TOY_ENTRIES);
    return order;
}

static void test_a_seed_replays(void)
{
    static const enum kv_fault faults[] = {KV_FAULT_DROP, KV_FAULT_REORDER};
    for (int i = 0; i < 2; i++) {
        uint64_t first = run(7, faults[i], 0.3);
        toy_close();
        CHECK(run(7, faults[i], 0.3) == first);
        toy_close();
        CHECK(run(8, faults[i], 0.3) != first);
        toy_close();
        CHECK(run(7, faults[i], 0.0) != first);
        toy_close();
    }
}

static void test_reordered_writes_go_once_and_a_little_late(void)
{
    bool seen[PAGES * TOY_ENTRIES] = {false};
    uint32_t num_late = 0;
    run(3, KV_FAULT_REORDER, 0.25);
    CHECK(num_posts == PAGES * TOY_ENTRIES && kv_list_empty(&toy_link(0)->asides));
    for (uint32_t i = 0, entry = 0; i < num_posts; i++) {   /* all entries have the same bases here */
        uint32_t page = (uint32_t)(posts[i].dst / (2 * PAGE)), at = page;
        for (entry = 0; seen[entry * PAGES + page]; entry++)
            ;
        CHECK(entry < TOY_ENTRIES);
        at += entry * PAGES;
        seen[at] = true;
        num_late += i > at;
        CHECK(i <= at + KV_MOST_DELAY + 4 && at <= i + KV_MOST_DELAY + 4);   /* others may be due before it */
    }
    CHECK(num_late > PAGES * TOY_ENTRIES / 8);
    toy_close();
}

static void test_chances_are_kept(void)
{
    run(1, KV_FAULT_DROP, 0.2);
    CHECK(num_posts > 140 && num_posts < 180);   /* of 200 */
    toy_close();
    run(1, KV_FAULT_DROP, 1.0);
    CHECK(num_posts == 0);
    toy_close();
}

static void test_a_refused_write_fails_the_link(void)
{
    toy_open(4, 256, ROW);
    disturb(1, KV_FAULT_FAIL, 1.0);
    toy_step(0, toy_transfer(0, 1, 3, true), NULL);
    toy_record();
    kv_post(toy);
    struct kv_record r = toy_record();
    CHECK(r.kind == KV_LINK_FAILED && r.value == FI_EIO && r.extra == KV_FAILED_POST && num_posts == 0);
    CHECK(toy_record().kind == KV_STOPPED);
    toy_close();
}

static void test_what_is_set_aside_waits_for_nobody_else_and_is_dropped_with_its_transfer(void)
{
    toy_open(4, 256, ROW);
    disturb(1, KV_FAULT_REORDER, 1.0);
    uint64_t ticket = toy_step(TOY_ENTRIES, toy_transfer(0, 1, 2, false), toy_transfer(0, 2, 1, false));
    kv_counter_start(toy->streams[0]->counter, toy->streams[0]->turns->num_slots, ticket);
    kv_counter_bump(toy->streams[0]->counter, toy->streams[0]->turns->num_slots);
    kv_watch(toy);
    kv_post(toy);
    CHECK(num_posts == 3 && toy->num_active == 0);   /* nothing else is left to wait for */
    for (int i = 1; i < TOY_ENTRIES; i++)
        kv_counter_bump(toy->streams[0]->counter, toy->streams[0]->turns->num_slots);
    kv_watch(toy);
    toy_link(0)->credit = toy->config.max_write_bytes;   /* one is set aside, then its turn is over */
    toy_answer = -FI_EAGAIN;
    kv_post(toy);
    CHECK(num_posts == 3 && !kv_list_empty(&toy_link(0)->asides));
    kv_link_stop_tag(toy, toy_link(0), 1);
    kv_link_stop_tag(toy, toy_link(0), 2);
    CHECK(kv_list_empty(&toy_link(0)->asides) && toy->num_active == 0);
    toy_complete(0, 3);
    struct kv_record r = toy_record();
    CHECK(r.kind == KV_STOPPED && r.id == 1 && r.value == 2 * TOY_ROWS);
    toy_close();
}

static void test_a_refusal_by_the_provider_does_not_use_up_a_fault(void)
{
    toy_open(4, 256, ROW);
    CHECK(kv_inject(toy, KV_FAULT_DROP, 2, &(struct kv_error){0}));
    toy_step(0, toy_transfer(0, 1, 1, true), NULL);
    toy_answer = -FI_EAGAIN;
    kv_post(toy), kv_post(toy);
    toy_answer = 0;
    kv_post(toy);
    CHECK(num_posts == TOY_ENTRIES - 1 && toy->stats.posted_writes == TOY_ENTRIES);
    toy_close();
}

int main(void)
{
    test_a_seed_replays();
    test_reordered_writes_go_once_and_a_little_late();
    test_chances_are_kept();
    test_a_refused_write_fails_the_link();
    test_what_is_set_aside_waits_for_nobody_else_and_is_dropped_with_its_transfer();
    test_a_refusal_by_the_provider_does_not_use_up_a_fault();
    return 0;
}
