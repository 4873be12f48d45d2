/* The state file: who crosses, who overflows, and what becomes of rows that nobody expects. */
#include "census.h"
#include "check.h"
#include "state.h"
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

/* ---- one thread ---- */
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
    struct kv_state *ours = kv_state_create(file, 42, &error);
    CHECK(ours && !kv_state_create(file, 42, &error) && error.kind == KV_SYSTEM);
    CHECK(kv_state_open_attempt(ours, 9, 64, "a label", 7, &error));
    struct stat status;
    CHECK(!stat(file, &status) && (status.st_mode & 0777) == 0600);

    struct kv_state *seen = kv_state_look(file, &error);
    struct kv_attempt_view view;
    CHECK(seen && seen->header->incarnation == 42);
    CHECK(kv_state_view(seen, 9, &view) && view.expected == 64 && !strcmp(view.label, "a label"));
    CHECK(kv_state_close(seen, &error));
    CHECK(!stat(file, &status));
    CHECK(kv_state_close(ours, &error));
    CHECK(stat(file, &status));
    remove(path);
}

int main(void)
{
    state = kv_state_create(NULL, 1, &error);
    CHECK(state);
    test_exactly_one_adder_crosses();
    test_strays_are_told_once_until_linked_again();
    test_a_forgotten_attempt_leaves_its_slot_counting();
    test_an_end_after_done_changes_nothing();
    CHECK(kv_state_close(state, &error));
    test_a_file_can_be_looked_into();
    for (int i = 0; i < KV_NUM_OBJECTS; i++)
        CHECK(kv_census_read(i) == 0);
    return 0;
}
