#include "state.h"
#include "census.h"
#include "clock.h"
#include <errno.h>
#include <fcntl.h>
#include <rdma/fabric.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define HEADER_BYTES 4096u
#define SLOTS_BYTES (KV_NUM_SLOTS * sizeof(struct kv_slot))
#define ATTEMPTS_BYTES (KV_NUM_ATTEMPTS * sizeof(struct kv_attempt))
#define LEGS_BYTES (KV_NUM_LEGS * sizeof(struct kv_leg))
#define ATTEMPTS_OFFSET (HEADER_BYTES + SLOTS_BYTES)
#define LEGS_OFFSET (ATTEMPTS_OFFSET + ATTEMPTS_BYTES)
#define FILE_BYTES (LEGS_OFFSET + LEGS_BYTES)

_Static_assert(sizeof(struct kv_slot) == 32 && sizeof(struct kv_attempt) == 128 && sizeof(struct kv_leg) == 384,
               "part of the file format");
_Static_assert(sizeof(struct kv_state_header) <= HEADER_BYTES, "the header has a page of its own");

/* ---- opening and closing ---- */
static struct kv_state *wrap(void *map, const char *path, bool created)
{
    struct kv_state *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    if (path && !(s->path = strdup(path))) {
        free(s);
        return NULL;
    }
    s->header = map;
    s->slots = (void *)((char *)map + HEADER_BYTES);
    s->attempts = (void *)((char *)map + ATTEMPTS_OFFSET);
    s->legs = (void *)((char *)map + LEGS_OFFSET);
    s->created = s->writable = created;
    pthread_mutex_init(&s->lock, NULL);
    kv_live(KV_LIVE_STATE_FILES, 1);
    return s;
}

/* When this process started, in clock ticks since boot: field 22 of its stat. 0 where /proc does not say. */
static uint64_t own_start(void)
{
    char text[1024];
    int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    ssize_t num = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    text[num > 0 ? num : 0] = 0;
    char *field = strrchr(text, ')');   /* the 2nd ends with it, and may hold any others */
    for (int i = 2; field && i < 22; i++)
        field = strchr(field + 1, ' ');
    return field ? strtoull(field, NULL, 10) : 0;
}

static void fill_header(struct kv_state_header *h, const char *incarnation)
{
    *h = (struct kv_state_header){   /* the mapping was zero: no reader has seen a magic */
        .version = KV_STATE_VERSION, .pid = (uint32_t)getpid(), .pid_started = own_start(), .started_ns = kv_now_ns(),
        .slots_offset = HEADER_BYTES, .num_slots = KV_NUM_SLOTS, .slot_bytes = sizeof(struct kv_slot),
        .attempts_offset = ATTEMPTS_OFFSET, .num_attempts = KV_NUM_ATTEMPTS,
        .attempt_bytes = sizeof(struct kv_attempt),
        .legs_offset = LEGS_OFFSET, .num_legs = KV_NUM_LEGS, .leg_bytes = sizeof(struct kv_leg),
        .libfabric_version = fi_version(),
    };
    snprintf(h->incarnation, sizeof h->incarnation, "%s", incarnation);
    atomic_store_explicit(&h->magic, KV_STATE_MAGIC, memory_order_release);
}

struct kv_state *kv_state_create(const char *path, const char *incarnation, struct kv_error *e)
{
    int fd = -1;
    if (path) {
        if ((fd = open(path, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600)) < 0) {
            kv_error_call(e, KV_SYSTEM, "open", errno, "cannot create state file %.180s", path);
            return NULL;
        }
        if (ftruncate(fd, FILE_BYTES)) {
            kv_error_call(e, KV_SYSTEM, "ftruncate", errno, "cannot size state file %.180s", path);
            goto undo;
        }
    }
    int flags = path ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *map = mmap(NULL, FILE_BYTES, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (map == MAP_FAILED) {
        kv_error_call(e, KV_SYSTEM, "mmap", errno, "cannot map the state file");
        goto undo;
    }
    struct kv_state *s = wrap(map, path, true);
    if (!s) {
        munmap(map, FILE_BYTES);
        kv_error_memory(e);
        goto undo;
    }
    fill_header(s->header, incarnation);
    if (fd >= 0)
        close(fd);
    return s;
undo:
    if (fd >= 0) {
        close(fd);
        unlink(path);
    }
    return NULL;
}

/* Maps a file that is one of ours, or NULL with the error. */
static void *map_to_look(int fd, const char *path, struct kv_error *e)
{
    struct { uint64_t magic; uint32_t version, pid; } first = {0};
    struct stat status;
    if (pread(fd, &first, sizeof first, 0) != sizeof first || first.magic != KV_STATE_MAGIC || fstat(fd, &status)) {
        kv_error_set(e, KV_INVALID, "%.160s is not a state file, or not ready yet", path);
        return NULL;
    }
    if (first.version != KV_STATE_VERSION || (uint64_t)status.st_size != FILE_BYTES) {
        kv_error_set(e, KV_INVALID, "%.120s is not a state file of version %u, but of version %u: look with the kvmsgr "
                     "that made it", path, KV_STATE_VERSION, first.version);
        return NULL;
    }
    void *map = mmap(NULL, FILE_BYTES, PROT_READ, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED) {
        kv_error_call(e, KV_SYSTEM, "mmap", errno, "cannot map the state file %.180s", path);
        return NULL;
    }
    return map;
}

struct kv_state *kv_state_look(const char *path, struct kv_error *e)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);   /* a fifo must not keep us */
    if (fd < 0) {
        kv_error_call(e, KV_SYSTEM, "open", errno, "cannot open state file %.180s", path);
        return NULL;
    }
    void *map = map_to_look(fd, path, e);
    close(fd);
    if (!map)
        return NULL;
    struct kv_state *s = wrap(map, path, false);
    if (!s) {
        munmap(map, FILE_BYTES);
        kv_error_memory(e);
    }
    return s;
}

bool kv_state_close(struct kv_state *s, struct kv_error *e)
{
    if (s->num_bells)
        return kv_error_set(e, KV_CLOSED, "%u pollers still count into this state file: close them first",
                            s->num_bells);
    bool ours = s->created && s->header->pid == (uint32_t)getpid();   /* not a forked child's to remove */
    munmap(s->header, FILE_BYTES);
    if (s->path && ours)
        unlink(s->path);
    kv_live(KV_LIVE_SLOTS, -s->num_linked);
    kv_live(KV_LIVE_STATE_FILES, -1);
    pthread_mutex_destroy(&s->lock);
    free(s->path);
    free(s);
    return true;
}

bool kv_state_attach(struct kv_state *s, struct kv_bell *bell)
{
    pthread_mutex_lock(&s->lock);
    bool room = s->num_bells < KV_MAX_BELLS;
    if (room)
        s->bells[s->num_bells++] = bell;
    pthread_mutex_unlock(&s->lock);
    return room;
}

void kv_state_detach(struct kv_state *s, struct kv_bell *bell)
{
    pthread_mutex_lock(&s->lock);
    for (uint32_t i = 0; i < s->num_bells; i++)
        if (s->bells[i] == bell)
            s->bells[i] = s->bells[--s->num_bells];
    pthread_mutex_unlock(&s->lock);
}

/* ---- attempts ---- */
/* Whoever moves an attempt out of COUNTING takes it out of `expecting`; the exchange makes that exactly one. */
static bool leave_counting(struct kv_state *s, struct kv_attempt *a, enum kv_attempt_state to)
{
    uint32_t from = KV_ATTEMPT_COUNTING;
    if (!atomic_compare_exchange_strong_explicit(&a->state, &from, to, memory_order_acq_rel, memory_order_relaxed))
        return false;
    atomic_fetch_sub_explicit(&s->header->expecting, 1, memory_order_acq_rel);
    return true;
}

bool kv_state_open_attempt(struct kv_state *s, uint64_t attempt, uint64_t expected, const char *label,
                           size_t label_bytes, struct kv_error *e)
{
    struct kv_attempt *a = kv_attempt_entry(s, attempt);
    pthread_mutex_lock(&s->lock);
    if (atomic_load_explicit(&a->state, memory_order_acquire) == KV_ATTEMPT_COUNTING) {
        pthread_mutex_unlock(&s->lock);
        return kv_error_set(e, KV_INVALID, "attempt %llu cannot be opened: attempt %llu is still counting in its entry",
                            (unsigned long long)attempt, (unsigned long long)a->id);
    }
    /* Release throughout: a reader that sees any field of the new attempt also sees that the entry was free between. */
    atomic_store_explicit(&a->state, KV_ATTEMPT_FREE, memory_order_relaxed);
    char padded[KV_LABEL_BYTES] = {0};
    memcpy(padded, label, label_bytes < KV_LABEL_BYTES ? label_bytes : KV_LABEL_BYTES);
    kv_words_store(a->label, padded, KV_LABEL_WORDS);
    atomic_store_explicit(&a->id, attempt, memory_order_release);
    atomic_store_explicit(&a->started_ns, kv_now_ns(), memory_order_release);
    atomic_store_explicit(&a->rows, 0, memory_order_release);
    atomic_store_explicit(&a->expected, expected, memory_order_release);
    if (expected)
        atomic_fetch_add_explicit(&s->header->expecting, 1, memory_order_acq_rel);
    atomic_store_explicit(&a->state, expected ? KV_ATTEMPT_COUNTING : KV_ATTEMPT_DONE, memory_order_release);
    for (uint32_t i = 0; i < s->num_bells; i++)
        kv_bell_ring(s->bells[i]);   /* a poller that sleeps must poll from now on */
    pthread_mutex_unlock(&s->lock);
    return true;
}

bool kv_state_end_attempt(struct kv_state *s, uint64_t attempt, struct kv_error *e)
{
    if (!kv_attempt_known(s, attempt))
        return kv_error_set(e, KV_MISSING, "attempt %llu was never opened", (unsigned long long)attempt);
    leave_counting(s, kv_attempt_entry(s, attempt), KV_ATTEMPT_ENDED);
    return true;
}

bool kv_state_view(const struct kv_state *s, uint32_t entry, struct kv_attempt_view *out)
{
    const struct kv_attempt *a = &s->attempts[entry];
    uint32_t state = atomic_load_explicit(&a->state, memory_order_acquire);
    if (state == KV_ATTEMPT_FREE)
        return false;
    *out = (struct kv_attempt_view){
        .id = atomic_load_explicit(&a->id, memory_order_acquire),
        .rows = atomic_load_explicit(&a->rows, memory_order_acquire),
        .expected = atomic_load_explicit(&a->expected, memory_order_acquire),
        .started_ns = atomic_load_explicit(&a->started_ns, memory_order_acquire),
        .state = state,
    };
    kv_words_load(out->label, a->label, KV_LABEL_WORDS);
    return atomic_load_explicit(&a->state, memory_order_relaxed) != KV_ATTEMPT_FREE &&
           atomic_load_explicit(&a->id, memory_order_relaxed) == out->id;
}

/* ---- who the messenger is ---- */
void kv_state_set_info(struct kv_state *s, const struct kv_state_info *info)
{
    pthread_mutex_lock(&s->lock);
    kv_sequence_step(&s->header->info_sequence);
    kv_words_store(s->header->info, info, sizeof *info / 8);
    kv_sequence_step(&s->header->info_sequence);
    pthread_mutex_unlock(&s->lock);
}

void kv_state_read_info(const struct kv_state *s, struct kv_state_info *out)
{
    const struct kv_state_header *h = s->header;
    for (unsigned i = 0; i < KV_SEQUENCE_TRIES; i++) {
        uint32_t before = kv_sequence_wait(&h->info_sequence);
        kv_words_load(out, h->info, sizeof *out / 8);
        if (before % 2 || kv_sequence_same(&h->info_sequence, before))
            return;   /* odd: its writer was stopped in the middle; both halves are true, each at its time */
    }
}

void kv_state_set_pages(struct kv_state *s, uint32_t group, const char name[24], uint64_t held, uint64_t total)
{
    struct kv_group_pages *g = &s->header->groups[group];
    kv_words_store(g->name, name, 3);
    atomic_store_explicit(&g->held, held, memory_order_release);
    atomic_store_explicit(&g->total, total, memory_order_release);
}

struct kv_pages_view kv_state_pages(const struct kv_state *s, uint32_t group)
{
    const struct kv_group_pages *g = &s->header->groups[group];
    struct kv_pages_view view = {.total = atomic_load_explicit(&g->total, memory_order_acquire)};
    view.held = atomic_load_explicit(&g->held, memory_order_acquire);
    kv_words_load(view.name, g->name, 3);
    return view;
}

/* ---- slots ---- */
static bool in_use(uint64_t link) { return link != KV_NO_ATTEMPT && link != KV_STRAYED; }

static void count_linked(struct kv_state *s, int64_t change)
{
    pthread_mutex_lock(&s->lock);
    s->num_linked += change;
    pthread_mutex_unlock(&s->lock);
    kv_live(KV_LIVE_SLOTS, change);
}

static void start_slot(struct kv_state *s, uint32_t slot_index, uint64_t link)
{
    struct kv_slot *slot = &s->slots[slot_index];
    atomic_store_explicit(&slot->awaited, 0, memory_order_relaxed);
    atomic_store_explicit(&slot->rows, 0, memory_order_relaxed);
    count_linked(s, !in_use(atomic_exchange_explicit(&slot->link, link, memory_order_acq_rel)));
}

bool kv_state_link_slot(struct kv_state *s, uint32_t slot_index, uint64_t attempt, struct kv_error *e)
{
    if (!kv_attempt_known(s, attempt))
        return kv_error_set(e, KV_MISSING, "attempt %llu was never opened", (unsigned long long)attempt);
    start_slot(s, slot_index, attempt + 1);
    return true;
}

void kv_state_link_beat(struct kv_state *s, uint32_t slot_index, uint32_t link)
{
    start_slot(s, slot_index, KV_BEATS | link);
}

void kv_state_unlink_slot(struct kv_state *s, uint32_t slot_index)
{
    struct kv_slot *slot = &s->slots[slot_index];
    atomic_store_explicit(&slot->awaited, 0, memory_order_relaxed);
    count_linked(s, -(int64_t)in_use(atomic_exchange_explicit(&slot->link, KV_NO_ATTEMPT, memory_order_acq_rel)));
}

uint64_t kv_state_await_slot(struct kv_state *s, uint32_t slot_index, uint64_t rows)
{
    /* In one total order with the adder, which adds and then looks for a watch: one of the two sees the other. */
    struct kv_slot *slot = &s->slots[slot_index];
    atomic_store_explicit(&slot->awaited, rows, memory_order_seq_cst);
    return atomic_load_explicit(&slot->rows, memory_order_seq_cst);
}

/* ---- landing: the hot path of a decoder ---- */
static enum kv_landed land_stray(struct kv_slot *slot, uint64_t link)
{
    if (link == KV_STRAYED ||
        !atomic_compare_exchange_strong_explicit(&slot->link, &link, KV_STRAYED, memory_order_relaxed,
                                                 memory_order_relaxed))
        return KV_LANDED_STRAY_SEEN;
    return KV_LANDED_STRAY;
}

enum kv_landed kv_state_land(struct kv_state *s, uint32_t imm, struct kv_landing *out)
{
    struct kv_slot *slot = &s->slots[imm >> KV_ROW_BITS];
    uint64_t rows = (imm & (KV_MAX_ROWS - 1)) + 1;
    uint64_t link = atomic_load_explicit(&slot->link, memory_order_acquire);
    uint64_t slot_rows = atomic_fetch_add_explicit(&slot->rows, rows, memory_order_seq_cst) + rows;
    *out = (struct kv_landing){.slot_index = imm >> KV_ROW_BITS, .slot_rows = slot_rows};
    if (!in_use(link))
        return land_stray(slot, link);
    if (link & KV_BEATS) {
        out->attempt = link & ~KV_BEATS;
        return KV_LANDED_BEAT;
    }
    out->slot_reached = slot_rows == atomic_load_explicit(&slot->awaited, memory_order_seq_cst);

    struct kv_attempt *a = kv_attempt_entry(s, link - 1);
    if (atomic_load_explicit(&a->id, memory_order_relaxed) != link - 1)
        return KV_LANDED_COUNTED;   /* the attempt has been forgotten; its slot still counts, for Drained */

    /* Release: what this poller did before its add; acquire: the one that crosses has seen every other poller's. */
    uint64_t before = atomic_fetch_add_explicit(&a->rows, rows, memory_order_acq_rel), after = before + rows;
    uint64_t expected = atomic_load_explicit(&a->expected, memory_order_acquire);
    out->attempt = link - 1, out->rows = after;
    if (after < expected || before > expected)
        return KV_LANDED_COUNTED;
    if (after == expected) {
        leave_counting(s, a, KV_ATTEMPT_DONE);   /* an ended attempt stays ended, yet its pages are proven landed */
        return KV_LANDED_REACHED;
    }
    if (!leave_counting(s, a, KV_ATTEMPT_OVERFLOW)) {
        uint32_t done = KV_ATTEMPT_DONE;
        atomic_compare_exchange_strong_explicit(&a->state, &done, KV_ATTEMPT_OVERFLOW, memory_order_acq_rel,
                                                memory_order_relaxed);
    }
    return KV_LANDED_OVERFLOW;
}
