/* Queues, windows and failures, on an endpoint that only takes notes. */
#include "toy_poller.h"

#define PAGE (16u << 10)   /* of rows of 2 KiB: one write costs what it weighs */
#define ROW (PAGE / TOY_ROWS)

static uint32_t tag_of(uint32_t post) { return posts[post].imm >> KV_ROW_BITS; }

static void test_each_region_is_reached_through_its_target(void)
{
    toy_open(4, 256, ROW);
    for (uint32_t e = 0; e < TOY_ENTRIES; e++)
        toy_templates[0]->entries[e].dst_region = e % 2;
    toy_step(0, toy_transfer(0, 1, 1, true), NULL);
    kv_post(toy);
    for (uint32_t e = 0; e < TOY_ENTRIES; e++)
        CHECK(posts[e].to == 10 + e % 2 && posts[e].key == 100 + e % 2);
    toy_complete(0, TOY_ENTRIES);
    toy_close();
}

static void test_a_round_is_short(void)
{
    toy_open(4, 256, ROW);
    toy_step(0, toy_transfer(0, 1, 100, true), NULL);
    CHECK(kv_post(toy) == 32 && num_posts == 32);
    CHECK(kv_post(toy) == 32);
    toy_close();
    toy_open(4, 256, 4 * ROW);   /* 64 KiB a write: 512 KiB a round */
    toy_step(0, toy_transfer(0, 1, 100, true), NULL);
    CHECK(kv_post(toy) == 8);
    toy_close();
}

static void test_windows_and_bytes_in_flight_are_kept(void)
{
    toy_open(4, 5, ROW);
    toy_step(0, toy_transfer(0, 1, 100, true), NULL);
    CHECK(kv_post(toy) == 5 && kv_post(toy) == 0);
    toy_complete(0, 2);
    CHECK(kv_post(toy) == 2);
    toy_close();
    toy_open(4, 64, ROW);
    toy->config.link_bytes = 3 * PAGE;
    toy_step(0, toy_transfer(0, 1, 100, true), NULL);
    CHECK(kv_post(toy) == 3);
    toy->config.link_bytes = 1;   /* at least one */
    toy_complete(0, 3);
    CHECK(kv_post(toy) == 1);
    toy_close();
}

static void test_a_short_transfer_overtakes_a_long_one(void)
{
    toy_open(4, 256, ROW);
    toy_step(0, toy_transfer(0, 1, 100, true), toy_transfer(0, 2, 1, true));
    kv_post(toy);
    uint32_t last = 0;
    for (uint32_t i = 0; i < num_posts; i++)
        last = tag_of(i) == 2 ? i : last;
    CHECK(num_posts == 32 && last == 8 + TOY_ENTRIES - 1);   /* after one quantum of 128 KiB */
    toy_close();
}

static void test_small_writes_pay_for_themselves(void)
{
    toy_open(4, 256, 1);   /* 8 bytes a write, billed as 16 KiB */
    toy_step(0, toy_transfer(0, 1, 100, true), toy_transfer(0, 2, 100, true));
    kv_post(toy);
    for (uint32_t i = 0; i < num_posts; i++)
        CHECK(tag_of(i) == 1 + i / 8 % 2);
    toy_close();
}

static void test_links_take_turns_and_a_blocked_one_holds_up_nobody(void)
{
    toy_open(4, 4, ROW);
    for (uint32_t link = 0; link < TOY_LINKS; link++)
        toy_step(0, toy_transfer(link, 1 + link, 20, true), NULL);
    CHECK(kv_post(toy) == 4 * TOY_LINKS);
    toy_complete(4, 4);   /* of the second link */
    CHECK(kv_post(toy) == 4);
    for (uint32_t i = 12; i < 16; i++)
        CHECK(posts[i].link == 1);
    toy_close();
}

static void test_only_released_entries_go(void)
{
    toy_open(4, 256, ROW);
    uint64_t ticket = toy_step(TOY_ENTRIES, toy_transfer(0, 1, 3, false), NULL);
    CHECK(kv_post(toy) == 0);
    kv_counter_start(toy->streams[0]->counter, toy->streams[0]->turns->num_slots, ticket);
    kv_counter_bump(toy->streams[0]->counter, toy->streams[0]->turns->num_slots);
    kv_watch(toy);
    CHECK(kv_post(toy) == 3 && kv_post(toy) == 0);
    for (int i = 0; i < 3; i++)
        kv_counter_bump(toy->streams[0]->counter, toy->streams[0]->turns->num_slots);
    kv_watch(toy);
    CHECK(kv_post(toy) == 9);
    toy_no_record();
    toy_complete(0, 12);
    struct kv_record r = toy_record();
    CHECK(r.kind == KV_SENT && r.id == 1 && r.value == 12 * TOY_ROWS && r.extra == 12);
    toy_close();
}

static void test_a_refusal_is_tried_again_until_it_is_too_old(void)
{
    toy_open(4, 256, ROW);
    toy_step(0, toy_transfer(0, 1, 3, true), NULL);
    toy_record();   /* of the step */
    toy_answer = -FI_EAGAIN;
    CHECK(kv_post(toy) == 0 && kv_post(toy) == 0 && toy->stats.again == 2);
    toy_now_ns += toy->config.op_timeout_ns;
    toy_check_timeouts();
    toy_no_record();
    toy_now_ns++;
    toy_check_timeouts();
    struct kv_record r = toy_record();
    CHECK(r.kind == KV_LINK_FAILED && r.value == FI_ETIMEDOUT && r.extra == KV_FAILED_TIMEOUT);
    r = toy_record();
    CHECK(r.kind == KV_STOPPED && r.value == 0);
    toy_close();
}

static void test_the_oldest_operation_times_out_though_others_come_back(void)
{
    toy_open(4, 256, ROW);
    toy_step(0, toy_transfer(0, 1, 8, true), NULL);
    kv_post(toy);
    toy_record();
    toy_now_ns += toy->config.op_timeout_ns + 1;
    toy_complete(1, 7);
    toy_check_timeouts();
    CHECK(toy_record().kind == KV_LINK_FAILED);
    toy_no_record();   /* it has operations in flight: it does not end yet */
    toy_close();
}

static void test_a_hard_error_fails_the_link_once(void)
{
    toy_open(4, 2, ROW);
    toy_step(0, toy_transfer(0, 1, 4, true), toy_transfer(0, 2, 4, true));
    toy_step(0, toy_transfer(1, 3, 1, true), NULL);
    toy_record(), toy_record();
    CHECK(kv_post(toy) == 4);
    toy_complete(0, 1);
    toy_answer = -FI_EINVAL;
    kv_post(toy);
    struct kv_record r = toy_record();
    CHECK(r.kind == KV_LINK_FAILED && r.value == FI_EINVAL && r.extra == KV_FAILED_POST);
    CHECK(toy_record().kind == KV_STOPPED);   /* tag 2: nothing of it is in flight */
    toy_no_record();
    toy_answer = 0;
    CHECK(kv_post(toy) == 0);
    kv_link_fail(toy, toy_link(0), FI_EIO, KV_FAILED_COMPLETION);
    toy_no_record();
    toy_step(0, toy_transfer(0, 4, 1, true), NULL);
    r = toy_record();
    CHECK(r.kind == KV_STOPPED && r.id == 4);
    CHECK(toy_record().kind == KV_STEP_ENDED);
    toy_complete(1, 1);
    r = toy_record();
    CHECK(r.kind == KV_STOPPED && r.id == 1 && r.value == 2 * TOY_ROWS);
    toy_close();
}

static void test_a_dropped_write_counts_as_sent(void)
{
    toy_open(4, 256, ROW);
    CHECK(kv_inject(toy, KV_FAULT_DROP, TOY_ENTRIES, &(struct kv_error){0}));
    toy_step(0, toy_transfer(0, 1, 1, true), NULL);
    toy_record();
    kv_post(toy);
    CHECK(num_posts == TOY_ENTRIES - 1);
    toy_complete(0, TOY_ENTRIES - 1);
    struct kv_record r = toy_record();
    CHECK(r.kind == KV_SENT && r.extra == TOY_ENTRIES);
    toy_close();
}

static void test_records_that_find_no_room_keep_their_order(void)
{
    toy_open(4, 256, ROW);
    uint64_t num = 3 * KV_RECORDS + 17, taken = 0;
    struct kv_record batch[100];
    for (uint64_t i = 0; i < num; i++)
        kv_report(toy, KV_SENT, i, 0, 0);
    atomic_store(&toy->front.joined, true);   /* whoever takes now empties the backlog too */
    while (taken < num) {
        unsigned n = kv_take(toy, batch, 100);
        for (unsigned i = 0; i < n; i++)
            CHECK(batch[i].id == taken++);
        if (taken == 4000)   /* there is room again, but not for a latecomer */
            kv_report(toy, KV_SENT, num++, 0, 0);
    }
    CHECK(toy->stats.lost_records == 0);
    toy_close();
}

static void test_a_full_batch_rings_again(void)
{
    toy_open(4, 256, ROW);
    struct kv_record batch[2];
    for (uint64_t i = 0; i < 3; i++)
        kv_report(toy, KV_SENT, i, 0, 0);
    CHECK(kv_take(toy, batch, 2) == 2 && atomic_load(&toy->records.bell.rung));
    CHECK(kv_take(toy, batch, 2) == 1 && !atomic_load(&toy->records.bell.rung));
    toy_close();
}

int main(void)
{
    test_each_region_is_reached_through_its_target();
    test_a_round_is_short();
    test_windows_and_bytes_in_flight_are_kept();
    test_a_short_transfer_overtakes_a_long_one();
    test_small_writes_pay_for_themselves();
    test_links_take_turns_and_a_blocked_one_holds_up_nobody();
    test_only_released_entries_go();
    test_a_refusal_is_tried_again_until_it_is_too_old();
    test_the_oldest_operation_times_out_though_others_come_back();
    test_a_hard_error_fails_the_link_once();
    test_a_dropped_write_counts_as_sent();
    test_records_that_find_no_room_keep_their_order();
    test_a_full_batch_rings_again();
    return 0;
}
