/* How ports and links end, on endpoints and a completion queue that only take notes. */
#include "toy_poller.h"

#define PAGE (16u << 10)
#define ROW (PAGE / TOY_ROWS)

static int num_closed;            /* endpoints */
static ssize_t queued;            /* entries of strays in the completion queue */

static int toy_close_endpoint(struct fid *fid)
{
    (void)fid;
    num_closed++;
    kv_live(KV_LIVE_ENDPOINTS, 1);   /* it was never counted */
    return 0;
}
static struct fi_ops toy_fid = {.size = sizeof toy_fid, .close = toy_close_endpoint};

static ssize_t toy_read(struct fid_cq *cq, void *buf, size_t count)
{
    (void)cq;
    struct fi_cq_data_entry *entries = buf;
    ssize_t num = queued < (ssize_t)count ? queued : (ssize_t)count;
    for (ssize_t i = 0; i < num; i++)
        entries[i] = (struct fi_cq_data_entry){.flags = FI_REMOTE_CQ_DATA, .data = 1u << KV_ROW_BITS};
    queued -= num;
    return num ? num : -FI_EAGAIN;
}
static struct fi_ops_cq toy_cq_ops = {.size = sizeof toy_cq_ops, .read = toy_read};
static struct fid_cq toy_cq = {.ops = &toy_cq_ops};

static struct kv_port *ports[TOY_LINKS];

/* Links whose endpoints can be closed; with one shared port, or one each. They close without lingering. */
static void open_closable(bool shared)
{
    toy_open(4, 4, ROW);
    toy->config.shared_endpoint = shared;
    toy_domain.cq = &toy_cq;
    toy_domain.num_ports = TOY_LINKS;
    kv_list_append(&toy->domains, &toy_domain.in_poller);
    toy_now_ns = toy->now_ns = KV_S;
    num_closed = 0;
    queued = 0;
    for (uint32_t i = 0; i < TOY_LINKS; i++) {
        struct kv_link *l = toy_link(i);
        struct kv_port *o = ports[i] = l->sending;
        toy_endpoints[i].fid.ops = &toy_fid;
        kv_list_append(&toy->ports, &o->in_poller);
        l->heard_ns = 1;
        if (shared && i) {
            l->port = l->told = l->sending = ports[0];
            kv_port_free(o);
        } else if (shared) {
            l->told = o;
            kv_port_share(toy, o, 0);
        }
    }
}

/* One round of the poller, as far as it matters here; endpoints linger for less. */
static void go_round(void)
{
    toy_now_ns += 100 * KV_MS;
    kv_complete(toy);
    kv_go_on_closing(toy);
}

static void drop_strays(void)
{
    struct kv_record r;
    while (kv_records_take(&toy->records, &r, 1))
        CHECK(r.kind == KV_STRAY || r.kind == KV_STEP_ENDED);
}

static void expect(uint64_t kind, uint64_t id)
{
    struct kv_record r = toy_record();
    while (r.kind == KV_STRAY || r.kind == KV_STEP_ENDED)
        r = toy_record();
    CHECK(r.kind == kind && r.id == id);
}

/* What is left of the poller, without the links that have ended. */
static void close_rest(void)
{
    for (uint32_t i = 0; i < TOY_LINKS; i++)
        if (toy_link(i))
            kv_link_close(toy, toy_link(i), true);
    KV_EACH(node, &toy->ports)
        kv_port_begin_closing(toy, KV_OF(node, struct kv_port, in_poller));
    while (toy->num_closing)
        go_round();
    for (uint32_t i = 0; i < TOY_LINKS; i++) {
        CHECK(!toy_link(i));
        kv_template_drop(toy_templates[i]);
    }
    CHECK(kv_list_empty(&toy->ports) && kv_list_empty(&toy->domains));
    toy_free();
}

static void test_a_link_ends_when_the_queue_has_been_read_to_its_end(void)
{
    open_closable(false);
    uint64_t id = toy_link(1)->id;
    queued = KV_CQ_BATCH + 5;
    kv_link_close(toy, toy_link(1), true);
    CHECK(num_closed == 1 && toy_link(1));
    go_round();   /* a full batch */
    drop_strays();
    CHECK(toy_link(1) && queued == 5);
    go_round();
    expect(KV_LINK_CLOSED, id);
    CHECK(!toy_link(1) && toy_link(0) && toy->stats.landed_writes == KV_CQ_BATCH + 5);
    close_rest();
}

/* On shm our connection request may be in the queue of an endpoint that has taken nothing yet, whoever was heard. */
static void test_an_endpoint_that_has_taken_nothing_gets_time_to(void)
{
    open_closable(false);
    toy_nic.fabric.shares_locks = true;
    toy_answer = -FI_EAGAIN;
    toy_templates[1]->entries[0].dst_region = 1;
    toy_step(0, toy_transfer(1, 1, 1, true), NULL);
    kv_post(toy);
    CHECK(toy_link(1)->targets[1].refused_ns == toy_now_ns && !toy_link(1)->targets[0].refused_ns);
    toy_now_ns += 50 * KV_MS;
    kv_post(toy);
    kv_link_close(toy, toy_link(1), true);
    CHECK(num_closed == 0);
    kv_link_close(toy, toy_link(0), true);
    CHECK(num_closed == 1);   /* it has asked nobody */
    go_round();
    CHECK(num_closed == 2);
    toy_answer = 0;
    toy_step(0, toy_transfer(2, 1, 1, true), NULL);
    toy_link(2)->targets[0].refused_ns = toy_now_ns;
    kv_post(toy);
    CHECK(!toy_link(2)->targets[0].refused_ns);
    struct kv_record r;
    while (kv_records_take(&toy->records, &r, 1))
        ;
    close_rest();
}

static void test_what_was_in_flight_comes_back_before_the_link_ends(void)
{
    open_closable(false);
    uint64_t id = toy_link(0)->id;
    toy_step(0, toy_transfer(0, 1, 4, true), NULL);
    kv_post(toy);
    kv_lease_begin(toy, toy_link(0));
    kv_beat(toy);
    CHECK(toy->num_flying == 5);
    kv_link_close(toy, toy_link(0), true);
    drop_strays();
    go_round();
    struct kv_record r = toy_record();
    CHECK(r.kind == KV_STOPPED && r.value == 4 * TOY_ROWS);
    expect(KV_LINK_CLOSED, id);
    CHECK(toy->num_flying == 0);
    close_rest();
}

static void test_links_of_a_shared_port_wait_for_it(void)
{
    open_closable(true);
    uint64_t closing = toy_link(1)->id, quiet = toy_link(2)->id, other = toy_link(0)->id;
    kv_link_close(toy, toy_link(2), false);
    expect(KV_LINK_CLOSED, quiet);
    kv_link_close(toy, toy_link(1), true);
    go_round();
    toy_no_record();
    toy_step(0, toy_transfer(0, 1, 4, true), NULL);
    kv_post(toy);
    kv_port_begin_closing(toy, ports[0]);
    CHECK(num_closed == 0 && !toy_nic.port);
    expect(KV_LINK_FAILED, other);   /* it has no other port */
    go_round(), go_round();
    CHECK(num_closed == 1 && toy->num_flying == 0);
    expect(KV_STOPPED, 1);
    expect(KV_PORT_CLOSED, 1);
    expect(KV_LINK_CLOSED, closing);
    toy_no_record();
    close_rest();
}

static void test_a_port_is_over_when_it_is_so_on_every_interface(void)
{
    open_closable(true);
    struct kv_nic other = {0};
    /* Nobody reads its queue for now. */
    struct kv_domain busy = {.fabric = &other.fabric, .cq = &toy_cq, .num_ports = 1};
    struct kv_port *o = kv_port_new(&other, NULL);
    CHECK(o);
    o->domain = &busy;
    kv_list_init(&busy.in_poller);
    o->endpoint.ep = &toy_endpoints[TOY_LINKS - 1];
    kv_list_append(&toy->ports, &o->in_poller);
    kv_port_share(toy, o, 0);
    CHECK(o->number == 1 && other.port == o);   /* as on the other interface */
    for (uint32_t i = 0; i < TOY_LINKS; i++)
        kv_link_close(toy, toy_link(i), false), expect(KV_LINK_CLOSED, 1 << KV_LINK_SLOT_BITS | i);
    kv_port_begin_closing(toy, ports[0]);
    kv_port_begin_closing(toy, o);
    go_round(), go_round();
    CHECK(num_closed == 2 && toy->num_closing == 1);
    toy_no_record();
    kv_list_append(&toy->domains, &busy.in_poller);
    go_round();
    expect(KV_PORT_CLOSED, 1);
    toy_no_record();
    close_rest();
}

static void test_without_a_fence_a_link_waits_for_what_is_in_flight(void)
{
    open_closable(true);
    uint64_t id = toy_link(0)->id;
    toy_step(0, toy_transfer(0, 1, 2, true), NULL);
    kv_post(toy);
    kv_link_close(toy, toy_link(0), false);
    drop_strays();
    toy_complete(0, num_posts - 1);
    go_round();
    toy_no_record();
    toy_complete(num_posts - 1, 1);
    go_round();
    expect(KV_STOPPED, 1);
    expect(KV_LINK_CLOSED, id);
    close_rest();
}

/* A second port, as a rotation leaves it: every link is told to move. */
static struct kv_port *second_port(void)
{
    struct kv_port *o = kv_port_new(&toy_nic, NULL);
    CHECK(o);
    o->domain = &toy_domain;
    toy_domain.num_ports++;
    o->endpoint.ep = &toy_endpoints[TOY_LINKS - 1];
    kv_list_append(&toy->ports, &o->in_poller);
    kv_port_share(toy, o, toy->ports_made + 1);
    for (uint32_t i = 0; i < TOY_LINKS; i++) {
        toy_link(i)->port = o;
        toy_link(i)->moving = true;
        if (!toy_link(i)->flying_writes)
            kv_link_settle(toy, toy_link(i));
    }
    return o;
}

static void test_a_link_moves_when_its_writes_in_flight_are_complete(void)
{
    open_closable(true);
    toy_step(0, toy_transfer(0, 1, 3, true), NULL);
    CHECK(kv_post(toy) == 4);
    second_port();
    CHECK(toy_link(1)->sending != ports[0] && toy_link(0)->sending == ports[0]);
    toy_complete(0, 3);
    CHECK(kv_post(toy) == 0);
    toy_complete(3, 1);
    CHECK(kv_post(toy) == 4 && posts[3].link == 0 && posts[4].link == TOY_LINKS - 1);
    drop_strays();
    toy_complete(4, 4);
    while (kv_post(toy))
        toy_complete(num_posts - 4, 4);
    close_rest();
}

static void test_writes_that_are_stuck_in_the_old_port_end_with_it(void)
{
    open_closable(true);
    toy_step(0, toy_transfer(0, 1, 3, true), NULL);
    kv_post(toy);
    drop_strays();
    second_port();
    kv_link_fail(toy, toy_link(0), FI_ETIMEDOUT, KV_FAILED_LEASE);   /* its peer takes nothing any more */
    expect(KV_LINK_FAILED, toy_link(0)->id);
    kv_port_begin_closing(toy, ports[0]);
    toy_no_record();
    go_round(), go_round();
    expect(KV_STOPPED, 1);
    expect(KV_PORT_CLOSED, 1);
    toy_no_record();   /* the others have moved */
    CHECK(!toy_link(1)->failed && toy->num_flying == 0);
    close_rest();
}

int main(void)
{
    test_a_link_ends_when_the_queue_has_been_read_to_its_end();
    test_an_endpoint_that_has_taken_nothing_gets_time_to();
    test_what_was_in_flight_comes_back_before_the_link_ends();
    test_links_of_a_shared_port_wait_for_it();
    test_a_port_is_over_when_it_is_so_on_every_interface();
    test_without_a_fence_a_link_waits_for_what_is_in_flight();
    test_a_link_moves_when_its_writes_in_flight_are_complete();
    test_writes_that_are_stuck_in_the_old_port_end_with_it();
    return 0;
}
