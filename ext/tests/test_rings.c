/* Commands from many threads, records to one, and the bell that must never lose its last ring. */
#include "check.h"
#include "commands.h"
#include "records.h"
#include <poll.h>
#include <pthread.h>
#include <sched.h>

#define PRODUCERS 4
#define PER_PRODUCER 20000u
#define RECORDS 200000u

static struct kv_commands commands;
static struct kv_records records;

/* ---- commands ---- */
static void *produce_commands(void *arg)
{
    uint32_t producer = (uint32_t)(uintptr_t)arg;
    for (uint64_t i = 0; i < PER_PRODUCER; i++) {
        while (!kv_commands_reserve(&commands))
            sched_yield();
        if (i % 7 == 0) {   /* a caller that changed its mind */
            kv_commands_unreserve(&commands);
            while (!kv_commands_reserve(&commands))
                sched_yield();
        }
        kv_commands_push(&commands, (struct kv_command){.link = producer, .value = i});
    }
    return NULL;
}

static void wait_for_bell(struct kv_bell *bell)
{
    struct pollfd fd = {.fd = bell->fd, .events = POLLIN};
    CHECK(poll(&fd, 1, 20000) == 1);
}

static void test_every_command_arrives_in_its_producers_order(void)
{
    pthread_t threads[PRODUCERS];
    uint64_t next[PRODUCERS] = {0};
    CHECK(kv_commands_init(&commands));
    for (uintptr_t i = 0; i < PRODUCERS; i++)
        CHECK(!pthread_create(&threads[i], NULL, produce_commands, (void *)i));
    for (uint32_t taken = 0; taken < PRODUCERS * PER_PRODUCER;) {
        struct kv_command c;
        kv_bell_disarm(&commands.bell);
        bool any = false;
        for (; kv_commands_take(&commands, &c); taken++, any = true)
            CHECK(c.value == next[c.link]++);
        if (!any)
            wait_for_bell(&commands.bell);
    }
    for (int i = 0; i < PRODUCERS; i++)
        pthread_join(threads[i], NULL);
    CHECK(!kv_commands_waiting(&commands));
    kv_bell_close(&commands.bell);
}

static void test_a_full_ring_refuses_before_anything_is_done(void)
{
    struct kv_command c;
    CHECK(kv_commands_init(&commands));
    for (uint64_t i = 0; i < KV_COMMANDS; i++) {
        CHECK(kv_commands_reserve(&commands));
        kv_commands_push(&commands, (struct kv_command){.value = i});
    }
    CHECK(!kv_commands_reserve(&commands));
    CHECK(kv_commands_take(&commands, &c) && c.value == 0);
    CHECK(kv_commands_reserve(&commands));
    CHECK(!kv_commands_reserve(&commands));
    kv_commands_unreserve(&commands);
    CHECK(kv_commands_reserve(&commands));
    kv_bell_close(&commands.bell);
}

/* ---- records ---- */
static void *produce_records(void *arg)
{
    (void)arg;
    for (uint64_t i = 0; i < RECORDS; i++)
        while (!kv_records_put(&records, &(struct kv_record){.id = i, .value = ~i}))
            sched_yield();
    return NULL;
}

static void test_every_record_arrives_and_every_sleep_ends(void)
{
    pthread_t thread;
    struct kv_record batch[64];
    CHECK(kv_bell_init(&records.bell, false));
    CHECK(!pthread_create(&thread, NULL, produce_records, NULL));
    for (uint64_t taken = 0; taken < RECORDS;) {
        kv_bell_disarm(&records.bell);
        unsigned num = kv_records_take(&records, batch, 64);
        for (unsigned i = 0; i < num; i++, taken++)
            CHECK(batch[i].id == taken && batch[i].value == ~taken);
        if (num == 64)
            kv_bell_ring(&records.bell);
        if (taken < RECORDS)
            wait_for_bell(&records.bell);
    }
    pthread_join(thread, NULL);
    kv_bell_close(&records.bell);
}

int main(void)
{
    test_a_full_ring_refuses_before_anything_is_done();
    test_every_command_arrives_in_its_producers_order();
    test_every_record_arrives_and_every_sleep_ends();
    return 0;
}
