/* Expansion, merging and bounds, against a reference that moves one row at a time. */
#include "census.h"
#include "check.h"
#include "plan.h"
#include <string.h>

#define SPACE 4096u   /* bytes of the toy regions */

static struct kv_error error;
static uint16_t wanted[SPACE], planned[SPACE];   /* destination byte -> source byte + 1 */

static struct kv_template *make_template(uint32_t num_runs, uint64_t page_bytes, uint64_t row_bytes)
{
    struct kv_template *t = kv_template_new(num_runs, 1);
    CHECK(t);
    t->src_page = t->dst_page = (struct kv_page){page_bytes, 1, 0};
    t->row_bytes = row_bytes;
    t->item_bytes = 1;
    t->entries[0] = (struct kv_entry){.src_room = SPACE, .dst_room = SPACE};
    return t;
}

/* ---- fixed cases ---- */
static void test_neighbours_merge_up_to_both_limits(void)
{
    struct kv_template *t = make_template(1, 64, 16);
    t->runs[0] = (struct kv_run){0, 0, 64, 4};
    CHECK(kv_template_check(t, &error));
    int32_t pages[] = {0, 8, 1, 9, 2, 10, 3, 11, 5, 12};
    struct kv_chunk c = {.pages = pages, .num_pages = 5};
    struct kv_write out[16];
    CHECK(kv_plan_bound(t, &c, 1 << 20) == 5);
    CHECK(kv_plan_expand(t, &c, 1 << 20, out, &error) == 2);
    CHECK(out[0].src == 0 && out[0].dst == 512 && out[0].bytes == 256 && out[0].rows == 16);
    CHECK(out[1].src == 320 && out[1].dst == 768 && out[1].bytes == 64 && out[1].rows == 4);
    CHECK(kv_plan_expand(t, &c, 128, out, &error) == 3);
    kv_template_drop(t);

    t = make_template(1, KV_MAX_ROWS - 1, 1);   /* two pages have more rows than an immediate can say */
    t->entries[0].src_room = t->entries[0].dst_room = 1 << 20;
    t->runs[0] = (struct kv_run){0, 0, KV_MAX_ROWS - 1, KV_MAX_ROWS - 1};
    int32_t neighbours[] = {0, 0, 1, 1};
    CHECK(kv_template_check(t, &error));
    c = (struct kv_chunk){.pages = neighbours, .num_pages = 2};
    CHECK(kv_plan_expand(t, &c, 1 << 20, out, &error) == 2);
    kv_template_drop(t);
}

static void test_long_runs_are_split_and_the_tail_stays_uncounted(void)
{
    struct kv_template *t = make_template(0, 0, 1);
    t->entries[0].src_room = t->entries[0].dst_room = 1 << 20;
    CHECK(kv_template_check(t, &error));
    uint64_t edge[] = {0, 0, 2 * KV_MAX_ROWS + 5, 2 * KV_MAX_ROWS + 1};
    struct kv_chunk c = {.edges = edge, .num_edges = 1};
    struct kv_write out[4];
    CHECK(kv_plan_bound(t, &c, 1 << 20) == 3);
    CHECK(kv_plan_expand(t, &c, 1 << 20, out, &error) == 3);
    CHECK(out[1].src == KV_MAX_ROWS && out[1].rows == KV_MAX_ROWS && out[1].bytes == KV_MAX_ROWS);
    CHECK(out[2].rows == 1 && out[2].bytes == 5);
    kv_template_drop(t);
}

static void test_what_makes_no_sense_is_refused(void)
{
    struct kv_template *t = make_template(1, 64, 16);
    struct kv_run bad[] = {{0, 0, 64, 0}, {0, 0, 0, 0}, {0, 0, 4, 5}, {1ull << 63, 0, 64, 4}, {0, 0, 1ull << 32, 4}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        t->runs[0] = bad[i];
        CHECK(!kv_template_check(t, &error) && error.kind == KV_INVALID);
    }
    t->runs[0] = (struct kv_run){0, 0, 63, 4};   /* its rows are of 16 bytes: it cannot be split */
    CHECK(kv_template_check(t, &error));
    int32_t pages[] = {0, 0};
    struct kv_write out[8];
    CHECK(!kv_plan_expand(t, &(struct kv_chunk){.pages = pages, .num_pages = 1}, 32, out, &error));
    CHECK(strstr(error.text, "must be split"));
    CHECK(!kv_plan_expand(t, &(struct kv_chunk){0}, 32, out, &error));
    pages[0] = -1;
    CHECK(!kv_plan_expand(t, &(struct kv_chunk){.pages = pages, .num_pages = 1}, 128, out, &error));
    kv_template_drop(t);

    t = kv_template_new(0, 2);
    t->src_page = t->dst_page = (struct kv_page){64, 1, 0};
    t->row_bytes = t->item_bytes = 1;
    t->entries[0].signal = 2;
    t->entries[1].signal = 1;
    CHECK(!kv_template_check(t, &error) && strstr(error.text, "by signal"));
    kv_template_drop(t);
}

static void test_units_lie_in_pages_of_either_side(void)
{
    struct kv_template *t = make_template(1, 0, 16);   /* units of 16 bytes, of one row */
    t->runs[0] = (struct kv_run){0, 0, 16, 1};
    t->src_page = (struct kv_page){100, 4, 16};
    t->dst_page = (struct kv_page){48, 1, 0};
    CHECK(kv_template_check(t, &error));
    int32_t units[] = {2, 0, 3, 1, 4, 2, 9, 7};
    struct kv_chunk c = {.pages = units, .num_pages = 4};
    struct kv_write out[4];
    CHECK(kv_plan_expand(t, &c, 1 << 20, out, &error) == 4);   /* apart on one side at least */
    static const uint64_t src[] = {32, 48, 100, 216}, dst[] = {0, 48, 96, 336};
    for (int i = 0; i < 4; i++)
        CHECK(out[i].src == src[i] && out[i].dst == dst[i] && out[i].rows == 1);
    t->dst_page = (struct kv_page){200, 8, 16};
    CHECK(kv_template_check(t, &error));
    CHECK(kv_plan_expand(t, &c, 1 << 20, out, &error) == 3);   /* 2 and 3 are neighbours on both */
    CHECK(out[0].src == 32 && out[0].dst == 0 && out[0].rows == 2);
    CHECK(out[1].src == 100 && out[1].dst == 32 && out[2].src == 216 && out[2].dst == 112);

    struct kv_page bad[] = {{64, 0, 16}, {64, (1u << 16) + 1, 16}, {64, 4, (1ull << 32) + 1}, {(1ull << 32) + 1, 1, 0}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        t->dst_page = bad[i];
        CHECK(!kv_template_check(t, &error) && strstr(error.text, "destination pages"));
    }
    kv_template_drop(t);
}

/* The largest numbers that are allowed do not wrap around. */
static void test_the_farthest_unit_is_out_of_bounds(void)
{
    struct kv_template *t = make_template(1, 0, 1);
    t->runs[0] = (struct kv_run){1ull << 62, 1ull << 62, 1, 1};
    t->src_page = t->dst_page = (struct kv_page){1ull << 32, 1, 1ull << 32};
    int32_t units[] = {INT32_MAX, INT32_MAX};
    struct kv_write out[1];
    for (uint64_t num = 1; num <= 1 << 16; num *= 2) {
        t->src_page.units = t->dst_page.units = num;
        CHECK(kv_template_check(t, &error));
        CHECK(!kv_plan_expand(t, &(struct kv_chunk){.pages = units, .num_pages = 1}, 64, out, &error));
        CHECK(strstr(error.text, "leaves its source region"));
    }
    kv_template_drop(t);
}

/* ---- random plans ---- */
struct want { uint64_t rows; bool fits; };

static void want_run(struct want *w, uint64_t src, uint64_t dst, const struct kv_run *r)
{
    w->rows += r->rows;
    if (src + r->bytes > SPACE || dst + r->bytes > SPACE) {
        w->fits = false;
        return;
    }
    for (uint64_t i = 0; i < r->bytes; i++)
        wanted[dst + i] = (uint16_t)(src + i + 1);
}

static void check_writes(const struct kv_write *out, size_t num, uint32_t max_bytes, uint64_t row_bytes, uint64_t rows)
{
    memset(planned, 0, sizeof planned);
    uint64_t sum = 0;
    for (size_t i = 0; i < num; i++) {
        const struct kv_write *w = &out[i];
        CHECK(w->rows >= 1 && w->rows <= KV_MAX_ROWS && w->bytes == w->rows * row_bytes);
        CHECK(w->bytes <= max_bytes || w->rows == 1);
        if (i && w->src == w[-1].src + w[-1].bytes && w->dst == w[-1].dst + w[-1].bytes)
            CHECK(w->bytes + w[-1].bytes > max_bytes);
        for (uint32_t b = 0; b < w->bytes; b++)
            planned[w->dst + b] = (uint16_t)(w->src + b + 1);
        sum += w->rows;
    }
    CHECK(sum == rows);
    CHECK(!memcmp(wanted, planned, sizeof wanted));
}

/* Destination pages are a permutation, as an engine's are: every byte is written once. */
static void shuffle(uint64_t *seed, int32_t *pages, int num)
{
    for (int i = 0; i < num; i++)
        pages[2 * i + 1] = i;
    for (int i = num - 1; i > 0; i--) {
        if (random_below(seed, 3))
            continue;   /* leave runs of neighbours */
        int k = (int)random_below(seed, (uint64_t)i + 1);
        int32_t other = pages[2 * k + 1];
        pages[2 * k + 1] = pages[2 * i + 1];
        pages[2 * i + 1] = other;
    }
}

static void test_random_plans_equal_the_reference(void)
{
    uint64_t seed = 88172645463325252ull;
    struct kv_write out[1024];
    unsigned refused = 0;
    for (int round = 0; round < 5000; round++) {
        uint64_t row_bytes = 1 + random_below(&seed, 8), rows_a_run = 1 + random_below(&seed, 6);
        uint32_t num_runs = 1 + (uint32_t)random_below(&seed, 3);
        uint64_t run_bytes = row_bytes * rows_a_run, page_bytes = run_bytes * num_runs;
        struct kv_template *t = make_template(num_runs, page_bytes, row_bytes);
        for (uint32_t r = 0; r < num_runs; r++)   /* the destination may have the runs in another order */
            t->runs[r] = (struct kv_run){r * run_bytes, (r + (uint64_t)(round & 1)) % num_runs * run_bytes, run_bytes,
                                         rows_a_run};
        CHECK(kv_template_check(t, &error));

        int32_t pages[64];
        int most = (int)(SPACE / page_bytes), num = 1 + (int)random_below(&seed, most < 24 ? (uint64_t)most : 24);
        int32_t first = (int32_t)random_below(&seed, (uint64_t)(most - num) + 1);
        if (round % 8 == 0)
            first = most - num + 1;   /* a page too far */
        uint64_t units = 1ull << random_below(&seed, 4);   /* of one page: the same places, said otherwise */
        t->src_page = (struct kv_page){units * page_bytes, units, page_bytes};
        CHECK(kv_template_check(t, &error));
        shuffle(&seed, pages, num);
        for (int i = 0; i < num; i++)
            pages[2 * i] = first + i;
        struct kv_chunk c = {.pages = pages, .num_pages = (size_t)num};
        uint32_t max_bytes = 1 + (uint32_t)random_below(&seed, 300);

        struct want w = {.fits = true};
        memset(wanted, 0, sizeof wanted);
        for (int i = 0; i < num; i++)
            for (uint32_t r = 0; r < num_runs; r++)
                want_run(&w, (uint64_t)pages[2 * i] * page_bytes + t->runs[r].src_offset,
                         (uint64_t)pages[2 * i + 1] * page_bytes + t->runs[r].dst_offset, &t->runs[r]);
        CHECK(kv_plan_bound(t, &c, max_bytes) <= sizeof out / sizeof *out);
        size_t made = kv_plan_expand(t, &c, max_bytes, out, &error);
        CHECK((made > 0) == w.fits && made <= kv_plan_bound(t, &c, max_bytes));
        if (made)
            check_writes(out, made, max_bytes, row_bytes, w.rows);
        else
            refused++;
        kv_template_drop(t);
    }
    CHECK(refused == 5000 / 8);
}

int main(void)
{
    test_neighbours_merge_up_to_both_limits();
    test_long_runs_are_split_and_the_tail_stays_uncounted();
    test_what_makes_no_sense_is_refused();
    test_units_lie_in_pages_of_either_side();
    test_the_farthest_unit_is_out_of_bounds();
    test_random_plans_equal_the_reference();
    CHECK(kv_census_read(KV_LIVE_TEMPLATES) == 0);
    return 0;
}
