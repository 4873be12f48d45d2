/* A data race on purpose: a consumer that reads records without looking at the tail. ThreadSanitizer must find it. */
#include "records.h"
#include <pthread.h>

static struct kv_records records;

static void *produce(void *arg)
{
    for (uint64_t i = 0; i < KV_RECORDS; i++)
        kv_records_put(arg, &(struct kv_record){.id = i});
    return NULL;
}

int main(void)
{
    pthread_t thread;
    uint64_t sum = 0;
    if (!kv_bell_init(&records.bell, true) || pthread_create(&thread, NULL, produce, &records))
        return 0;
    for (uint64_t i = 0; i < KV_RECORDS; i++)
        sum += records.at[i].id;
    pthread_join(thread, NULL);
    kv_bell_close(&records.bell);
    return sum == 1;
}
