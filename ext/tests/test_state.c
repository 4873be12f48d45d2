/* The state file: who crosses, who overflows, what becomes of rows that nobody expects, and what a looker sees of legs. */
#include "census.h"
#include "check.h"
#include "leg.h"
#include <pthread.h>
#include <string.h>
#include <sys/stat.h>

#define THREADS 3
#define ROUNDS 400
#define WRITES 50

static struct kv_state *state;
static struct kv_error error;

static uint32_t slot_of(uint64_t n) { return (uint32_t)(n % KV_NUM_SLOTS); }
static uint32_t imm_of(uint32_t slot_index, uint32_t rows) { return slot_index << KV_ROW_BITS | (rows - 1); }

static void open_attempt(uint64_t attempt, uint64_t expected)
{
    CHECK(kv_state_open_attempt(state, attempt, expected, "label", 5, &error));
}

/* ---- threads: each round is one attempt; all land into it, each through a slot of its own ---- */
struct tally { _Atomic uint32_t reached, overflow; };
static struct tally tallies[ROUNDS];
static pthread_barrier_t barrier;

static void land_round(uint32_t thread, uint64_t round, struct tally *t)
{
    for (uint32_t i = 0; i < WRITES; i++) {
        struct kv_landing landing;
        enum kv_landed landed = kv_state_land(state, imm_of(slot_of(round * THREADS + thread), 1 + i % 5), &landing);
        atomic_fetch_add(&t->reached, landed == KV_LANDED_REACHED);
        atomic_fetch_add(&t->overflow, landed == KV_LANDED_OVERFLOW);
    }
}

static void *land_all(void *arg)
{
    uint32_t thread = (uint32_t)(uintptr_t)arg;
    for (uint64_t round = 0; round < ROUNDS; round++) {
        pthread_barrier_wait(&barrier);
        land_round(thread, round, &tallies[round]);
        if (thread == 0 && round % 3 == 0)   /* a cancel races with the last rows */
            CHECK(kv_state_end_attempt(state, round, &(struct kv_error){0}));
    }
    return NULL;
}

static void test_exactly_one_adder_crosses(void)
{
    pthread_t threads[THREADS];
    uint32_t rows = THREADS * (WRITES / 5) * (1 + 2 + 3 + 4 + 5);
    pthread_barrier_init(&barrier, NULL, THREADS);
    for (uint64_t round = 0; round < ROUNDS; round++) {   /* every other one gets more than it expects */
        open_attempt(round, round % 2 ? rows - 7 : rows);
        for (uint32_t thread = 0; thread < THREADS; thread++)
            CHECK(kv_state_link_slot(state, slot_of(round * THREADS + thread), round, &error));
    }
    for (uintptr_t i = 0; i < THREADS; i++)
        CHECK(!pthread_create(&threads[i], NULL, land_all, (void *)i));
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    for (uint64_t round = 0; round < ROUNDS; round++) {
        CHECK(kv_state_attempt_rows(state, round) == rows);
        CHECK(tallies[round].overflow == round % 2);
        CHECK(round % 2 ? tallies[round].reached <= 1 : tallies[round].reached == 1);
    }
    CHECK(kv_state_expecting(state) == 0);
    pthread_barrier_destroy(&barrier);
}

/* ---- threads: one lands the awaited rows while another begins to wait for them, now and then before the first ---- */
static _Atomic uint32_t rounds_begun;

static void *land_awaited(void *arg)
{
    uint32_t *told = arg;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        while (atomic_load(&rounds_begun) <= round)
            ;
        for (uint32_t i = 0; i < 3; i++) {
            struct kv_landing landing;
            kv_state_land(state, imm_of(slot_of(20000 + round), 2), &landing);
            CHECK(!landing.slot_reached || (landing.slot_rows == 6 && landing.slot_index == slot_of(20000 + round)));
            told[round] += landing.slot_reached;
        }
    }
    return NULL;
}

static void test_a_wait_never_misses_the_last_row(void)
{
    static uint32_t told[ROUNDS];
    uint32_t there[ROUNDS];
    uint64_t random = 3;
    pthread_t thread;
    open_attempt(20000, 1000000000);
    for (uint32_t round = 0; round < ROUNDS; round++)
        CHECK(kv_state_link_slot(state, slot_of(20000 + round), 20000, &error));
    CHECK(!pthread_create(&thread, NULL, land_awaited, told));
    for (uint32_t round = 0; round < ROUNDS; round++) {
        bool early = round % 4 == 0;
        if (early)
            CHECK(kv_state_await_slot(state, slot_of(20000 + round), 6) == 0);
        atomic_store(&rounds_begun, round + 1);
        for (uint64_t i = random_below(&random, 300); i; i--)
            atomic_signal_fence(memory_order_seq_cst);
        there[round] = early ? 0 : (uint32_t)kv_state_await_slot(state, slot_of(20000 + round), 6);
        while (kv_state_slot_rows(state, slot_of(20000 + round)) < 6)
            ;
    }
    pthread_join(thread, NULL);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        CHECK(told[round] == 1 || (told[round] == 0 && there[round] == 6));
        kv_state_unlink_slot(state, slot_of(20000 + round));
    }
    CHECK(kv_state_end_attempt(state, 20000, &error));
}

/* ---- threads: a leg changes while it is looked at; every text and number of it follows from one value ---- */
#define NUM_CHANGES 3000
static _Atomic unsigned num_changes;   /* that were seen */

static struct kv_leg_info leg_info(uint64_t n)
{
    struct kv_leg_info info = {.attempt = n, .rows_expected = n, .pages_held = (uint32_t)n, .role = KV_SERVE};
    snprintf(info.state, sizeof info.state, "%llu", (unsigned long long)n);
    snprintf(info.reason, sizeof info.reason, "%llu", (unsigned long long)n);
    snprintf(info.why, sizeof info.why, "%llu", (unsigned long long)n);
    return info;
}

static void *change_legs(void *arg)
{
    (void)arg;
    struct kv_error ignored;
    struct kv_leg_info first[2] = {leg_info(10), leg_info(11)}, then[2] = {leg_info(50010), leg_info(50011)};
    for (uint32_t n = 0; atomic_load(&num_changes) < NUM_CHANGES; n ^= 1) {
        uint32_t number = n * KV_NUM_LEGS + 5;
        CHECK(kv_state_open_leg(state, number, &first[n], &ignored));
        kv_leg_posted(state, number, 3, 1, 1);
        for (int i = 0; i < 20; i++)
            CHECK(kv_state_update_leg(state, number, i % 2 ? &first[n] : &then[n], &ignored));
        kv_state_close_leg(state, number);
    }
    return NULL;
}

static void test_a_leg_is_seen_whole(void)
{
    pthread_t thread;
    struct kv_leg_view seen;
    uint64_t before = 0;
    CHECK(!pthread_create(&thread, NULL, change_legs, NULL));
    while (num_changes < NUM_CHANGES) {
        uint32_t entry = 0;
        while (kv_state_next_leg(state, &entry, &seen)) {
            if (seen.torn)
                continue;
            uint64_t n = seen.info.attempt, now = strtoull(seen.info.state, NULL, 10);
            CHECK(seen.number == n % 2 * KV_NUM_LEGS + 5 && seen.info.rows_expected == n);
            CHECK(now == n || now == n + 50000);
            CHECK(seen.info.pages_held == now);
            CHECK(strtoull(seen.info.reason, NULL, 10) == now && strtoull(seen.info.why, NULL, 10) == now);
            CHECK(seen.rows_posted % 3 == 0 && seen.rows_posted <= 3 && seen.writes_posted <= 1);   /* beside it */
            num_changes += now != before;
            before = now;
        }
    }
    pthread_join(thread, NULL);
}

/* ---- one thread ---- */
static void test_pollers_count_for_the_open_leg_of_that_number_alone(void)
{
    struct kv_leg_info info = leg_info(1);
    struct kv_leg_view seen;
    uint32_t entry = 0;
    CHECK(!kv_state_next_leg(state, &entry, &seen));
    kv_leg_posted(state, 700, 9, 1, 2);
    kv_leg_posted(state, UINT32_MAX, 9, 1, 2);   /* no leg has it: its key would be that of a free entry */
    CHECK(kv_state_open_leg(state, 700, &info, &error) && kv_state_open_leg(state, 3, &info, &error));
    CHECK(!kv_state_open_leg(state, 700 + KV_NUM_LEGS, &info, &error) && error.kind == KV_INVALID);
    kv_leg_posted(state, 700 + KV_NUM_LEGS, 9, 1, 2);
    kv_leg_signalled(state, 700 + KV_NUM_LEGS, 9);
    kv_leg_posted(state, 700, 4, 6, 8);
    kv_leg_posted(state, 700, 4, 1, 1);   /* context has fewer entries: it does not say how far the layers are */
    kv_leg_signalled(state, 700, 7);
    entry = 0;
    CHECK(kv_state_next_leg(state, &entry, &seen) && seen.number == 3 && !seen.rows_posted);
    CHECK(kv_state_next_leg(state, &entry, &seen) && seen.number == 700 && !seen.torn);
    CHECK(seen.rows_posted == 8 && seen.writes_posted == 2 && seen.signals_seen == 7);
    CHECK(seen.entries_posted == 6 && seen.num_entries == 8);
    CHECK(!kv_state_next_leg(state, &entry, &seen));

    uint64_t since_ns = seen.info.since_ns;
    CHECK(since_ns && since_ns == seen.info.started_ns);
    info.pages_held = 12;
    entry = 700;
    CHECK(kv_state_update_leg(state, 700, &info, &error) && kv_state_next_leg(state, &entry, &seen));
    CHECK(seen.info.since_ns == since_ns && seen.info.pages_held == 12);   /* the same state as before */
    info.state[0] = 'x';
    entry = 700;
    CHECK(kv_state_update_leg(state, 700, &info, &error) && kv_state_next_leg(state, &entry, &seen));
    CHECK(seen.info.since_ns > since_ns && seen.info.started_ns == since_ns && seen.info.state[0] == 'x');

    kv_state_close_leg(state, 700 + KV_NUM_LEGS);
    kv_state_close_leg(state, 700);
    kv_state_close_leg(state, 700);
    kv_state_close_leg(state, 3);
    entry = 0;
    CHECK(!kv_state_next_leg(state, &entry, &seen));
    CHECK(!kv_state_update_leg(state, 700, &info, &error) && error.kind == KV_MISSING);
    CHECK(kv_state_open_leg(state, 700 + KV_NUM_LEGS, &info, &error));
    entry = 0;
    CHECK(kv_state_next_leg(state, &entry, &seen));
    CHECK(seen.number == 700 + KV_NUM_LEGS && !seen.rows_posted && !seen.num_entries);
    kv_state_close_leg(state, 700 + KV_NUM_LEGS);
}

static void test_a_leg_of_a_stopped_writer_is_seen_torn(void)
{
    struct kv_leg_info info = leg_info(8);
    struct kv_leg_view seen;
    uint32_t entry = 0;
    CHECK(kv_state_open_leg(state, 9, &info, &error));
    kv_sequence_step(&state->legs[9].sequence);
    CHECK(kv_state_next_leg(state, &entry, &seen) && seen.torn && seen.info.attempt == 8);
    kv_sequence_step(&state->legs[9].sequence);
    entry = 0;
    CHECK(kv_state_next_leg(state, &entry, &seen) && !seen.torn);
    kv_state_close_leg(state, 9);
}

static void test_a_watch_is_for_one_number_of_one_use(void)
{
    struct kv_landing landing;
    uint32_t slot = slot_of(66666);
    open_attempt(4000, 1000);
    CHECK(kv_state_link_slot(state, slot, 4000, &error));
    CHECK(kv_state_await_slot(state, slot, 5) == 0);
    CHECK(kv_state_land(state, imm_of(slot, 6), &landing) == KV_LANDED_COUNTED && !landing.slot_reached);
    CHECK(kv_state_await_slot(state, slot, 10) == 6);
    CHECK(kv_state_link_slot(state, slot, 4000, &error));
    CHECK(kv_state_land(state, imm_of(slot, 10), &landing) == KV_LANDED_COUNTED && !landing.slot_reached);
    CHECK(kv_state_await_slot(state, slot, 1000 - 16 + 10) == 10);
    CHECK(kv_state_land(state, imm_of(slot, 1000 - 16), &landing) == KV_LANDED_REACHED && landing.slot_reached);
    CHECK(landing.attempt == 4000 && landing.rows == 1000 && landing.slot_rows == 994);
    CHECK(kv_state_await_slot(state, slot, 995) == 994);
    kv_state_unlink_slot(state, slot);
    CHECK(kv_state_land(state, imm_of(slot, 1), &landing) == KV_LANDED_STRAY && !landing.slot_reached);
    CHECK(kv_state_link_slot(state, slot, 4000, &error));
    CHECK(kv_state_await_slot(state, slot, 0) == 0);
    kv_state_unlink_slot(state, slot);
}

static void test_heartbeats_are_a_links(void)
{
    struct kv_landing landing;
    uint32_t slot = slot_of(55555);
    int64_t before = kv_census_read(KV_LIVE_SLOTS);
    kv_state_link_beat(state, slot, UINT32_MAX);
    CHECK(kv_census_read(KV_LIVE_SLOTS) == before + 1);
    for (int i = 0; i < 2; i++)
        CHECK(kv_state_land(state, imm_of(slot, 1), &landing) == KV_LANDED_BEAT && landing.attempt == UINT32_MAX);
    CHECK(!landing.slot_reached && kv_state_slot_rows(state, slot) == 2);
    kv_state_unlink_slot(state, slot);
    CHECK(kv_census_read(KV_LIVE_SLOTS) == before);
    CHECK(kv_state_land(state, imm_of(slot, 1), &landing) == KV_LANDED_STRAY);
    kv_state_unlink_slot(state, slot);
}

static void test_strays_are_told_once_until_linked_again(void)
{
    struct kv_landing landing;
    uint32_t slot = slot_of(77777);
    CHECK(kv_state_land(state, imm_of(slot, 3), &landing) == KV_LANDED_STRAY);
    CHECK(kv_state_land(state, imm_of(slot, 3), &landing) == KV_LANDED_STRAY_SEEN);
    open_attempt(5000, 100);
    CHECK(kv_state_link_slot(state, slot, 5000, &error));
    CHECK(kv_state_slot_rows(state, slot) == 0);
    CHECK(kv_state_land(state, imm_of(slot, KV_MAX_ROWS), &landing) == KV_LANDED_OVERFLOW);
    CHECK(landing.attempt == 5000 && landing.rows == KV_MAX_ROWS);
    kv_state_unlink_slot(state, slot);
    CHECK(kv_state_land(state, imm_of(slot, 1), &landing) == KV_LANDED_STRAY);
    CHECK(kv_state_attempt_rows(state, 5000) == KV_MAX_ROWS);
}

static void test_a_forgotten_attempt_leaves_its_slot_counting(void)
{
    struct kv_landing landing;
    uint32_t slot = slot_of(88888);
    open_attempt(6000, 10);
    CHECK(kv_state_link_slot(state, slot, 6000, &error));
    CHECK(!kv_state_open_attempt(state, 6000 + KV_NUM_ATTEMPTS, 10, "", 0, &error) && error.kind == KV_INVALID);
    CHECK(kv_state_end_attempt(state, 6000, &error));
    open_attempt(6000 + KV_NUM_ATTEMPTS, 10);
    CHECK(kv_state_land(state, imm_of(slot, 10), &landing) == KV_LANDED_COUNTED);
    CHECK(kv_state_slot_rows(state, slot) == 10);
    CHECK(kv_state_attempt_rows(state, 6000 + KV_NUM_ATTEMPTS) == 0);
    CHECK(!kv_state_link_slot(state, slot, 6000, &error) && error.kind == KV_MISSING);
    CHECK(kv_state_end_attempt(state, 6000 + KV_NUM_ATTEMPTS, &error));
}

static void test_an_end_after_done_changes_nothing(void)
{
    struct kv_landing landing;
    struct kv_attempt_view view;
    int64_t before = kv_state_expecting(state);
    open_attempt(7000, 4);
    CHECK(kv_state_expecting(state) == before + 1);
    CHECK(kv_state_link_slot(state, slot_of(99999), 7000, &error));
    CHECK(kv_state_land(state, imm_of(slot_of(99999), 4), &landing) == KV_LANDED_REACHED);
    CHECK(kv_state_end_attempt(state, 7000, &error) && kv_state_end_attempt(state, 7000, &error));
    CHECK(kv_state_expecting(state) == before);
    CHECK(kv_state_view(state, 7000 % KV_NUM_ATTEMPTS, &view) && view.state == KV_ATTEMPT_DONE);
    CHECK(!strcmp(view.label, "label") && view.rows == 4 && view.id == 7000);
}

static void test_a_file_can_be_looked_into(void)
{
    char path[] = "/tmp/kvmsgr-state-XXXXXX";
    CHECK(mkdtemp(path));
    char file[64];
    snprintf(file, sizeof file, "%s/state", path);
    struct kv_state *ours = kv_state_create(file, "42", &error);
    CHECK(ours && !kv_state_create(file, "42", &error) && error.kind == KV_SYSTEM);
    CHECK(kv_state_open_attempt(ours, 9, 64, "a label", 7, &error));
    struct stat status;
    CHECK(!stat(file, &status) && (status.st_mode & 0777) == 0600);

    struct kv_state *seen = kv_state_look(file, &error);
    struct kv_attempt_view view;
    CHECK(seen && !strcmp(seen->header->incarnation, "42") && seen->header->pid_started);
    CHECK(kv_state_view(seen, 9, &view) && view.expected == 64 && !strcmp(view.label, "a label"));
    CHECK(kv_state_close(seen, &error));
    CHECK(!stat(file, &status));
    CHECK(kv_state_close(ours, &error));
    CHECK(stat(file, &status));
    remove(path);
}

int main(void)
{
    state = kv_state_create(NULL, "1", &error);
    CHECK(state);
    test_exactly_one_adder_crosses();
    test_a_wait_never_misses_the_last_row();
    test_pollers_count_for_the_open_leg_of_that_number_alone();
    test_a_leg_of_a_stopped_writer_is_seen_torn();
    test_a_leg_is_seen_whole();
    test_a_watch_is_for_one_number_of_one_use();
    test_heartbeats_are_a_links();
    test_strays_are_told_once_until_linked_again();
    test_a_forgotten_attempt_leaves_its_slot_counting();
    test_an_end_after_done_changes_nothing();
    CHECK(kv_state_close(state, &error));
    test_a_file_can_be_looked_into();
    for (int i = 0; i < KV_NUM_OBJECTS; i++)
        CHECK(kv_census_read(i) == 0);
    return 0;
}
