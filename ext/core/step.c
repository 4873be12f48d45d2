#include "step.h"
#include "census.h"
#include "leg.h"
#include "poller.h"
#include <stdlib.h>

/* ---- callers' side ---- */
struct kv_stream *kv_stream_new(struct kv_layer_counter *c, uint32_t index, struct kv_turns *turns)
{
    uint32_t num_slots = turns ? turns->num_slots : c->num_slots;
    struct kv_stream *s = calloc(1, sizeof *s + num_slots * sizeof *s->complete);
    if (!s || !(s->turns = turns ? kv_turns_hold(turns) : kv_turns_new(num_slots))) {
        free(s);
        return NULL;
    }
    s->counter = c;
    s->index = index;
    kv_list_init(&s->steps);
    kv_list_init(&s->held);
    return s;
}

void kv_stream_free(struct kv_stream *s)
{
    kv_turns_drop(s->turns);
    free(s);
}

struct kv_step *kv_step_new(struct kv_stream *stream, uint32_t num_bumps, uint64_t deadline_ns)
{
    struct kv_step *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    kv_list_init(&s->in_stream);
    kv_list_init(&s->transfers);
    s->stream = stream;
    s->num_bumps = num_bumps;
    s->deadline_ns = deadline_ns;
    kv_live(KV_LIVE_STEPS, 1);
    return s;
}

void kv_step_free(struct kv_step *s)
{
    KV_EACH(node, &s->transfers)
        kv_transfer_free(KV_OF(node, struct kv_transfer, in_step));
    free(s);
    kv_live(KV_LIVE_STEPS, -1);
}

/* ---- poller's side ---- */
static void uncount(struct kv_poller *p, struct kv_step *s)
{
    p->num_armed -= s->counted;
    s->counted = false;
}

static void fault(struct kv_poller *p, struct kv_step *s, enum kv_step_fault kind)
{
    kv_report(p, KV_STEP_FAULT, s->stream->index, s->ticket, (uint64_t)kv_word_bumps(s->word) << 32 | kind);
}

static uint64_t *complete_word(const struct kv_step *s)
{
    return &s->stream->complete[s->ticket % s->stream->turns->num_slots];
}

static bool is_short(const struct kv_step *s) { return kv_word_bumps(s->word) < s->num_bumps; }

/* Whether an older step is short, and the outside has yet to stop what that concerns. */
static bool is_held(const struct kv_stream *stream, uint64_t ticket)
{
    const struct kv_node *first = stream->held.next;
    return first != &stream->held && KV_OF(first, struct kv_step, in_stream)->ticket < ticket;
}

static void insert(struct kv_node *steps, struct kv_step *s)   /* by ticket */
{
    struct kv_node *before = steps->prev;
    while (before != steps && KV_OF(before, struct kv_step, in_stream)->ticket > s->ticket)
        before = before->prev;
    kv_list_insert(before, &s->in_stream);
}

static void show(struct kv_poller *p, struct kv_transfer *x, uint32_t bumps)
{
    kv_leg_signalled(p->state, x->tag, bumps);
    kv_transfer_release(p, x, bumps);
}

/* Releases what the word allows, unless that is held. */
static void show_all(struct kv_poller *p, struct kv_step *s)
{
    if (!s->word || is_held(s->stream, s->ticket))
        return;
    KV_EACH(node, &s->transfers)
        show(p, KV_OF(node, struct kv_transfer, in_step), kv_word_bumps(s->word));
}

static void finish_older(struct kv_poller *p, struct kv_step *started);

/* Reads the step's word. True when it had moved: then older steps are over, and whether these were short is found
   before anything of this one is released. */
static bool look(struct kv_poller *p, struct kv_step *s)
{
    uint64_t word = kv_counter_read(s->stream->counter, s->stream->turns->num_slots, s->ticket);
    if (!word || word == s->word)
        return false;
    s->word = word;
    finish_older(p, s);
    show_all(p, s);
    uint32_t bumps = kv_word_bumps(word);
    if (bumps >= s->num_bumps)
        uncount(p, s);
    if (bumps > s->num_bumps && kv_turns_fault(s->stream->turns, s->ticket))
        fault(p, s, KV_MORE);
    return true;
}

static void stop_transfers(struct kv_poller *p, struct kv_step *s)
{
    KV_EACH(node, &s->transfers)
        kv_transfer_stop(p, KV_OF(node, struct kv_transfer, in_step));
}

/* What still waits for bumps is stopped. */
static void remove_step(struct kv_poller *p, struct kv_step *s)
{
    stop_transfers(p, s);
    uncount(p, s);
    kv_list_remove(&s->in_stream);
    kv_step_free(s);
}

static void finish(struct kv_poller *p, struct kv_step *s, enum kv_step_fault when_short)
{
    look(p, s);   /* its last bumps may have come after the later ticket was issued to us */
    uint32_t bumps = kv_word_bumps(s->word);
    bool first_fault = is_short(s) && kv_turns_fault(s->stream->turns, s->ticket);
    bool ended = kv_turns_give_back(s->stream->turns, s->ticket);   /* before any record says so */
    if (s->word && bumps == s->num_bumps)
        *complete_word(s) = s->word;
    if (first_fault)
        fault(p, s, when_short);
    else if (ended)
        kv_report(p, KV_STEP_ENDED, s->stream->index, s->ticket, bumps);
    bool holds = is_short(s) && !s->known;
    bool waits = s->word && !is_short(s) && is_held(s->stream, s->ticket);   /* with what it has shown */
    if (!holds && !waits) {
        remove_step(p, s);
        return;
    }
    if (holds)
        stop_transfers(p, s);
    uncount(p, s);
    kv_list_remove(&s->in_stream);
    insert(&s->stream->held, s);
}

static void finish_older(struct kv_poller *p, struct kv_step *started)
{
    struct kv_node *steps = &started->stream->steps;
    while (steps->next != &started->in_stream)
        finish(p, KV_OF(steps->next, struct kv_step, in_stream), KV_FEWER);
}

void kv_step_arm(struct kv_poller *p, struct kv_step *s)
{
    KV_EACH(node, &s->transfers) {
        struct kv_transfer *x = KV_OF(node, struct kv_transfer, in_step);
        if (kv_transfer_arrive(p, x) && x->ready)
            kv_transfer_release(p, x, 0);
    }
    insert(&s->stream->steps, s);   /* callers may have pushed out of order */
    s->counted = true;
    p->num_armed++;
    if (!s->num_bumps && kv_list_empty(&s->transfers)) {
        finish(p, s, KV_FEWER);   /* nothing is released and nothing is to be shown: there is no step */
        return;
    }
    struct kv_node *later = s->in_stream.next;
    if (later != &s->stream->steps && KV_OF(later, struct kv_step, in_stream)->word)
        finish(p, s, KV_FEWER);
}

static struct kv_step *find_step(struct kv_stream *stream, uint64_t ticket)   /* NULL: it is not outstanding */
{
    KV_EACH(node, &stream->steps) {
        struct kv_step *s = KV_OF(node, struct kv_step, in_stream);
        if (s->ticket == ticket)
            return s;
    }
    return NULL;
}

/* Says of each tag that its transfers cannot join, then stops them. */
static void lose_all(struct kv_poller *p, const struct kv_step *joining, struct kv_node *lost)
{
    while (!kv_list_empty(lost)) {
        uint32_t tag = KV_OF(lost->next, struct kv_transfer, in_step)->tag;
        kv_report(p, KV_JOIN_LOST, tag, joining->ticket, joining->stream->index);
        KV_EACH(node, lost) {
            struct kv_transfer *x = KV_OF(node, struct kv_transfer, in_step);
            if (x->tag == tag)
                kv_transfer_stop(p, x);
        }
    }
}

void kv_step_join(struct kv_poller *p, struct kv_step *joining)
{
    struct kv_step *armed = find_step(joining->stream, joining->ticket);
    uint64_t word = armed ? armed->word : *complete_word(joining);
    uint32_t bumps = kv_word_bumps(word), num_bumps = armed ? armed->num_bumps : bumps;
    bool sound = armed ? bumps <= num_bumps : kv_word_ticket(word) == joining->ticket;
    bool held = is_held(joining->stream, joining->ticket);
    struct kv_node lost;
    kv_list_init(&lost);
    KV_EACH(node, &joining->transfers) {
        struct kv_transfer *x = KV_OF(node, struct kv_transfer, in_step);
        uint64_t last = x->template->entries[x->template->num_entries - 1].signal;
        if (!sound || last > num_bumps) {
            kv_list_rotate(&lost, node);
        } else if (kv_transfer_arrive(p, x) && armed) {
            kv_list_rotate(&armed->transfers, node);
            if (word && !held)
                show(p, x, bumps);   /* what came since is seen at the next look, which then ends the older steps */
        }
    }
    lose_all(p, joining, &lost);
    joining->word = word, joining->num_bumps = num_bumps;
    if (held && !kv_list_empty(&joining->transfers)) {
        insert(&joining->stream->held, joining);   /* as its step would be, which is over and was complete */
        return;
    }
    show_all(p, joining);
    kv_step_free(joining);
}

void kv_step_abandon(struct kv_poller *p, struct kv_stream *stream, uint64_t ticket)
{
    struct kv_step *s = find_step(stream, ticket);
    if (s) {
        kv_turns_give_back(stream->turns, ticket);
        remove_step(p, s);
    }
}

void kv_stream_resume(struct kv_poller *p, struct kv_stream *stream, uint64_t ticket)
{
    struct kv_step *outstanding = find_step(stream, ticket);
    if (outstanding)
        outstanding->known = true;
    KV_EACH(node, &stream->held) {
        struct kv_step *s = KV_OF(node, struct kv_step, in_stream);
        if (s->ticket == ticket && is_short(s))
            remove_step(p, s);
    }
    KV_EACH(node, &stream->held) {
        struct kv_step *s = KV_OF(node, struct kv_step, in_stream);
        if (is_short(s))
            break;   /* this one holds what comes after it */
        show_all(p, s);
        remove_step(p, s);
    }
    KV_EACH(node, &stream->steps)
        show_all(p, KV_OF(node, struct kv_step, in_stream));
}

unsigned kv_watch(struct kv_poller *p)
{
    unsigned moved = 0;
    for (uint32_t i = 0; i < p->num_streams; i++)
        KV_EACH(node, &p->streams[i]->steps)
            moved += look(p, KV_OF(node, struct kv_step, in_stream));
    return moved;
}

void kv_watch_deadlines(struct kv_poller *p)
{
    for (uint32_t i = 0; i < p->num_streams; i++)
        KV_EACH(node, &p->streams[i]->steps) {
            struct kv_step *s = KV_OF(node, struct kv_step, in_stream);
            if (p->now_ns >= s->deadline_ns)
                finish(p, s, KV_DEADLINE);
        }
}

void kv_watch_close(struct kv_poller *p)
{
    for (uint32_t i = 0; i < p->num_streams; i++) {
        KV_EACH(node, &p->streams[i]->steps)
            remove_step(p, KV_OF(node, struct kv_step, in_stream));
        KV_EACH(node, &p->streams[i]->held)
            remove_step(p, KV_OF(node, struct kv_step, in_stream));
    }
}
