/* An engine behind the C interface that does what lines on standard input
 * say, and answers each with one line. Memory is filled and compared here,
 * with bytes made from a seed, as the other peers of the tests make them. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "transfer_engine_c.h"

#define MEMORY_BYTES ((size_t)8 << 20)
#define PIECES_MAX 64

/* What other compilers were told about the layouts. */
_Static_assert(sizeof(struct transfer_request) == 40, "size");
_Static_assert(offsetof(struct transfer_request, source) == 8, "offset");
_Static_assert(offsetof(struct transfer_request, target_id) == 16, "offset");
_Static_assert(offsetof(struct transfer_request, target_offset) == 24, "offset");
_Static_assert(offsetof(struct transfer_request, length) == 32, "offset");
_Static_assert(sizeof(struct transfer_status) == 16, "size");
_Static_assert(offsetof(struct transfer_status, transferred_bytes) == 8, "offset");
_Static_assert(sizeof(struct notify_msg) == 16, "size");
_Static_assert(sizeof(struct buffer_entry) == 16, "size");
_Static_assert(sizeof(struct nic_load_stat) == 80, "size");
_Static_assert(offsetof(struct nic_load_stat, inflight_bytes) == 64, "offset");
_Static_assert(offsetof(struct nic_load_stat, ewma_bandwidth_bps) == 72, "offset");

static uint8_t stream(uint64_t seed, uint64_t at)
{
    uint64_t z = seed + (at / 8 + 1) * UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    z = z ^ (z >> 31);
    return (uint8_t)(z >> (at % 8 * 8));
}

static void fill(uint8_t *memory, uint64_t length, uint64_t seed)
{
    for (uint64_t i = 0; i < length; i++)
        memory[i] = stream(seed, i);
}

static const char *compare(const uint8_t *memory, uint64_t length, uint64_t seed)
{
    for (uint64_t i = 0; i < length; i++)
        if (memory[i] != stream(seed, i))
            return "differs";
    return "equal";
}

/* One batch of `pieces` requests, to its end; 0 is success. */
static int transfer(transfer_engine_t engine, int opcode, segment_id_t target, uint8_t *memory, uint64_t address,
                    uint64_t length, uint64_t pieces)
{
    struct transfer_request requests[PIECES_MAX];
    uint64_t at = 0;
    int failed = 0;

    batch_id_t batch = allocateBatchID(engine, pieces);
    if (batch == INVALID_BATCH)
        return -1;
    for (uint64_t i = 0; i < pieces; i++) {
        uint64_t end = i + 1 == pieces ? length : length / pieces * (i + 1);
        requests[i].opcode = opcode;
        requests[i].source = memory + at;
        requests[i].target_id = target;
        requests[i].target_offset = address + at;
        requests[i].length = end - at;
        at = end;
    }
    int code = submitTransfer(engine, batch, requests, pieces);
    if (code != 0)
        return code;
    /* The requests were copied. */
    memset(requests, 0xff, sizeof requests);
    for (uint64_t i = 0; i < pieces; i++) {
        struct transfer_status status;
        do {
            if (getTransferStatus(engine, batch, i, &status) != 0)
                return -2;
            struct timespec pause = {0, 50000};
            if (status.status < STATUS_COMPLETED)
                nanosleep(&pause, NULL);
        } while (status.status < STATUS_COMPLETED);
        failed |= status.status != STATUS_COMPLETED;
    }
    if (freeBatchID(engine, batch) != 0)
        return -3;
    return failed;
}

int main(void)
{
    char session[64], line[512], text[128], other[128];
    uint64_t address, length, pieces, seed;
    int count;

    transfer_engine_t engine = createTransferEngine("P2PHANDSHAKE", "127.0.0.1", "127.0.0.1", 0, 0);
    if (engine == NULL || installTransport(engine, "tcp", NULL) == NULL)
        return 2;
    uint8_t *memory = malloc(MEMORY_BYTES);
    if (memory == NULL || registerLocalMemory(engine, memory, MEMORY_BYTES, "cpu:0", 1) != 0)
        return 2;
    if (getLocalIpAndPort(engine, session, sizeof session) != 0)
        return 2;
    printf("%s %" PRIu64 "\n", session, (uint64_t)(uintptr_t)memory);
    fflush(stdout);

    while (fgets(line, sizeof line, stdin) != NULL && strcmp(line, "quit\n") != 0) {
        segment_id_t segment;
        if (sscanf(line, "fill %" SCNu64 " %" SCNu64, &length, &seed) == 2 && length <= MEMORY_BYTES) {
            fill(memory, length, seed);
            printf("filled\n");
        } else if (sscanf(line, "check %" SCNu64 " %" SCNu64, &length, &seed) == 2 && length <= MEMORY_BYTES) {
            printf("%s\n", compare(memory, length, seed));
        } else if (sscanf(line, "write %127s %" SCNu64 " %" SCNu64 " %" SCNu64, text, &address, &length, &pieces) == 4 &&
                   length <= MEMORY_BYTES && pieces >= 1 && pieces <= PIECES_MAX) {
            segment = openSegment(engine, text);
            printf("%d\n", segment < 0 ? -10 : transfer(engine, OPCODE_WRITE, segment, memory, address, length, pieces));
        } else if (sscanf(line, "read %127s %" SCNu64 " %" SCNu64 " %" SCNu64, text, &address, &length, &pieces) == 4 &&
                   length <= MEMORY_BYTES && pieces >= 1 && pieces <= PIECES_MAX) {
            segment = openSegment(engine, text);
            printf("%d\n", segment < 0 ? -10 : transfer(engine, OPCODE_READ, segment, memory, address, length, pieces));
        } else if (sscanf(line, "notify %127s %127s", text, other) == 2) {
            notify_msg_t message = {"from C", other};
            segment = openSegment(engine, text);
            printf("%d\n", genNotifyInEngine(engine, (uint64_t)(int64_t)segment, message));
        } else if (strcmp(line, "notices\n") == 0) {
            notify_msg_t *notices = getNotifsFromEngine(engine, &count);
            for (int i = 0; i < count; i++)
                printf("%s=%s;", notices[i].name, notices[i].msg);
            printf("%d\n", freeNotifsMsgBuf(notices, count));
        } else {
            printf("what?\n");
        }
        fflush(stdout);
    }
    if (unregisterLocalMemory(engine, memory) != 0)
        return 3;
    free(memory);
    destroyTransferEngine(engine);
    return 0;
}
