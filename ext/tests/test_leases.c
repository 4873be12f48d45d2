/* Heartbeats and leases, on a clock that the test moves. */
#include "toy_poller.h"

#define PAGE (16u << 10)
#define ROW (PAGE / TOY_ROWS)
#define LEASE 1000
#define HEARTBEAT 100

/* Links begin at 1; the first ends its lease at 1 + LEASE. */
static void open_connected(void)
{
    toy_open(4, 4, ROW);
    for (uint32_t i = 0; i < TOY_LINKS; i++)
        kv_lease_begin(toy, toy_link(i));
}

static void expect_lost(uint32_t link)
{
    struct kv_record r = toy_record();
    CHECK(r.kind == KV_LINK_FAILED && r.id == toy_link(link)->id && r.value == FI_ETIMEDOUT &&
          r.extra == KV_FAILED_LEASE);
}

static void test_a_heartbeat_goes_at_once_and_then_again(void)
{
    open_connected();
    kv_beat(toy);
    CHECK(num_posts == TOY_LINKS && posts[0].rows == 1 && toy->num_flying == TOY_LINKS);
    kv_beat(toy);
    CHECK(num_posts == TOY_LINKS);
    toy_complete(0, TOY_LINKS - 1);   /* the last link's stays in flight */
    toy_now_ns = 1 + HEARTBEAT;
    kv_beat(toy);
    CHECK(num_posts == 2 * TOY_LINKS - 1 && posts[3].link == 0 && posts[4].link == 1);
    CHECK(toy->stats.beats_sent == 2 * TOY_LINKS - 1 && toy->stats.posted_writes == 0);
    toy_close();
}

static void test_a_heartbeat_passes_the_queue_and_the_window(void)
{
    open_connected();
    toy_step(0, toy_transfer(0, 1, 20, true), NULL);
    CHECK(kv_post(toy) == 4 && kv_post(toy) == 0);
    kv_beat(toy);
    CHECK(num_posts == 4 + TOY_LINKS && posts[4].link == 0 && posts[4].rows == 1);
    toy_complete(4, 1);
    CHECK(kv_post(toy) == 0);   /* it gave back nothing of the window */
    toy_complete(0, 1);
    CHECK(kv_post(toy) == 1);
    toy_close();
}

static void test_a_refused_heartbeat_is_tried_again(void)
{
    open_connected();
    toy_answer = -FI_EAGAIN;
    kv_beat(toy);
    toy_answer = 0;
    kv_beat(toy);
    CHECK(num_posts == TOY_LINKS);
    toy_answer = -FI_EINVAL;
    toy_complete(0, 1);
    toy_now_ns = 1 + HEARTBEAT;
    kv_beat(toy);
    struct kv_record r = toy_record();
    CHECK(r.kind == KV_LINK_FAILED && r.id == toy_link(0)->id && r.extra == KV_FAILED_POST);
    toy_no_record();
    toy_close();
}

static void test_each_endpoint_of_a_peer_gets_its_own(void)
{
    toy_num_beats = 2;
    open_connected();
    toy_num_beats = 1;
    kv_beat(toy);
    CHECK(num_posts == 2 * TOY_LINKS && posts[0].to == 10 && posts[0].key == 200 && posts[1].to == 11 &&
          posts[1].key == 201 && toy_link(0)->flying_writes == 0);
    toy_complete(1, 1);   /* the first endpoint does not answer */
    toy_now_ns = 1 + HEARTBEAT;
    kv_beat(toy);
    CHECK(num_posts == 2 * TOY_LINKS + 1 && posts[num_posts - 1].link == 0 && posts[num_posts - 1].to == 11);
    toy_close();
}

static void test_heartbeats_go_to_the_new_cell_at_once(void)
{
    open_connected();
    kv_beat(toy);
    toy_complete(0, TOY_LINKS);
    struct kv_remote_cell cell = {.base = 8, .key = 300, .imm = 5u << KV_ROW_BITS};
    kv_beat_to(toy, toy_link(1), &cell);
    kv_beat(toy);
    CHECK(num_posts == TOY_LINKS + 1 && posts[TOY_LINKS].link == 1 && posts[TOY_LINKS].dst == 8 &&
          posts[TOY_LINKS].key == 300 && posts[TOY_LINKS].imm == 5u << KV_ROW_BITS);
    toy_close();
}

static void test_a_lease_ends_when_nothing_is_heard(void)
{
    open_connected();
    CHECK(toy_domain.lease_until_ns == 1 + LEASE);
    toy_now_ns = 500;
    kv_look(toy);
    kv_link_heard(toy, toy_link(1)->id);
    kv_link_heard(toy, toy_link(1)->id + 5 * KV_MAX_LINKS);   /* a link of long ago: nobody's */
    toy_now_ns = 1 + LEASE;
    kv_look(toy);
    kv_leases_judge(toy, &toy_domain);
    toy_no_record();
    toy_now_ns = 2 + LEASE;
    kv_look(toy);
    kv_leases_judge(toy, &toy_domain);
    expect_lost(0), expect_lost(2);
    toy_no_record();
    CHECK(toy_domain.lease_until_ns == 500 + LEASE);
    toy_close();
}

static void test_at_most_the_write_that_was_about_to_go_goes(void)
{
    open_connected();
    toy_step(0, toy_transfer(0, 1, 4, true), NULL);
    toy_record();
    toy_step_ns = 300;   /* a look a write: at 301, 601, 901, 1201 */
    kv_post(toy);
    CHECK(num_posts == 3);
    expect_lost(0);
    toy_step_ns = 0;
    toy_close();
}

static void test_what_was_queued_while_the_process_stood_still_is_not_believed(void)
{
    open_connected();
    kv_beat(toy);
    toy_now_ns = 10 * LEASE;   /* SIGSTOP, and SIGCONT */
    kv_link_heard(toy, toy_link(0)->id);   /* read before anybody looked at the clock: the time is that of long ago */
    kv_beat(toy);
    CHECK(num_posts == TOY_LINKS);   /* nothing more */
    for (uint32_t i = 0; i < TOY_LINKS; i++)
        expect_lost(i);
    kv_link_heard(toy, toy_link(0)->id);
    CHECK(toy_link(0)->lease_until_ns < 10 * LEASE);
    toy_close();
}

static void test_nobody_is_judged_while_held(void)
{
    open_connected();
    toy->held = true;
    toy_now_ns = 10 * LEASE;
    kv_beat(toy);
    toy_step(0, toy_transfer(0, 1, 1, true), NULL);
    toy_record();
    CHECK(num_posts == TOY_LINKS && kv_post(toy) == TOY_ENTRIES);
    toy->held = false;
    kv_leases_renew(toy);
    toy_now_ns = 11 * LEASE;
    kv_look(toy);
    kv_leases_judge(toy, &toy_domain);
    toy_no_record();
    toy_now_ns++;
    kv_look(toy);
    kv_leases_judge(toy, &toy_domain);
    expect_lost(0);
    toy_close();
}

int main(void)
{
    test_a_heartbeat_goes_at_once_and_then_again();
    test_a_heartbeat_passes_the_queue_and_the_window();
    test_a_refused_heartbeat_is_tried_again();
    test_each_endpoint_of_a_peer_gets_its_own();
    test_heartbeats_go_to_the_new_cell_at_once();
    test_a_lease_ends_when_nothing_is_heard();
    test_at_most_the_write_that_was_about_to_go_goes();
    test_what_was_queued_while_the_process_stood_still_is_not_believed();
    test_nobody_is_judged_while_held();
    return 0;
}
