/* Everything that a program may do wrongly gets an error and no crash.
 *
 * Arguments: the name of a peer that accepts a transfer and never answers. */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "transfer_engine_c.h"

#define EXPECT(what)                                                         \
    do {                                                                     \
        if (!(what)) {                                                       \
            fprintf(stderr, "line %d: not so: %s\n", __LINE__, #what);       \
            exit(1);                                                         \
        }                                                                    \
    } while (0)

static const char *p2p = "P2PHANDSHAKE";
static transfer_engine_t shared_engine;
static batch_id_t shared_batch;

static void creating(void)
{
    EXPECT(createTransferEngine(NULL, "127.0.0.1", "127.0.0.1", 0, 0) == NULL);
    EXPECT(createTransferEngine(p2p, NULL, "127.0.0.1", 0, 0) == NULL);
    EXPECT(createTransferEngine(p2p, "127.0.0.1", NULL, 0, 0) == NULL);
    EXPECT(createTransferEngine("", "127.0.0.1", "127.0.0.1", 0, 0) == NULL);
    EXPECT(createTransferEngine("p2phandshake", "127.0.0.1", "127.0.0.1", 0, 0) == NULL);
    EXPECT(createTransferEngine("etcd://127.0.0.1:1", "127.0.0.1", "127.0.0.1", 0, 0) == NULL);
    EXPECT(createTransferEngine(p2p, "", "", 0, 0) == NULL);
    EXPECT(createTransferEngine(p2p, "\xff\xfe", "127.0.0.1", 0, 0) == NULL);
    EXPECT(createTransferEngine(p2p, "0.0.0.0", "127.0.0.1", 0, 0) == NULL);
}

/* Every function with a handle that is no engine. */
static void handles(transfer_engine_t engine)
{
    struct transfer_request request = {OPCODE_WRITE, &request, 0, 0, 1};
    struct transfer_status status;
    notify_msg_t message = {"a", "b"};
    buffer_entry_t entry = {&request, 8};
    void *address = &request;
    char text[32];
    int count = 7;

    EXPECT(getLocalIpAndPort(engine, text, sizeof text) == -1);
    EXPECT(discoverTopology(engine) == -1);
    EXPECT(installTransport(engine, "tcp", NULL) == NULL);
    EXPECT(uninstallTransport(engine, "tcp") == -1);
    EXPECT(registerLocalMemory(engine, address, 8, "*", 1) == -1);
    EXPECT(unregisterLocalMemory(engine, address) == -1);
    EXPECT(registerLocalMemoryBatch(engine, &entry, 1, "*") == -1);
    EXPECT(unregisterLocalMemoryBatch(engine, &address, 1) == -1);
    EXPECT(openSegment(engine, "127.0.0.1:1") == -1);
    EXPECT(openSegmentNoCache(engine, "127.0.0.1:1") == -1);
    EXPECT(closeSegment(engine, 1) == -1);
    EXPECT(removeLocalSegment(engine, "127.0.0.1:1") == -1);
    EXPECT(syncSegmentCache(engine) == -1);
    EXPECT(allocateBatchID(engine, 1) == INVALID_BATCH);
    EXPECT(submitTransfer(engine, 1, &request, 1) == 1);
    EXPECT(submitTransferWithNotify(engine, 1, &request, 1, message) == 1);
    EXPECT(getTransferStatus(engine, 1, 0, &status) == 1);
    EXPECT(freeBatchID(engine, 1) == 1);
    EXPECT(genNotifyInEngine(engine, 0, message) == -1);
    EXPECT(getNotifsFromEngine(engine, &count) == NULL && count == 0);
    EXPECT(getNotifsFromEngine(engine, NULL) == NULL);
    /* These need no engine. */
    EXPECT(warmupEfaSegment(engine, NULL) == 0);
    EXPECT(showLinks(engine, text, sizeof text, 1) == 0);
    destroyTransferEngine(engine);
}

static void arguments(transfer_engine_t engine)
{
    static char memory[4096];
    char text[32];
    void *args[2] = {NULL, NULL};
    nic_load_stat_t stats[1];
    size_t stat_count = 1;
    notify_msg_t message = {"a", "b"}, nothing = {NULL, NULL}, bad = {"a", "\xff"};

    EXPECT(getLocalIpAndPort(engine, NULL, 5) == -1);
    EXPECT(getLocalIpAndPort(engine, NULL, 0) == 0);
    memset(text, 'x', sizeof text);
    EXPECT(getLocalIpAndPort(engine, text, 4) == 0 && strcmp(text, "127") == 0 && text[4] == 'x');

    EXPECT(openSegment(engine, "127.0.0.1:1") == -1); /* no transport yet */
    EXPECT(installTransport(engine, NULL, NULL) == NULL);
    EXPECT(installTransport(engine, "", NULL) == NULL);
    EXPECT(installTransport(engine, "TCP", NULL) == NULL);
    EXPECT(installTransport(engine, "rdma", args) == NULL);
    args[0] = "[]";
    EXPECT(installTransport(engine, "tcp", args) == NULL);
    args[0] = "no json";
    EXPECT(installTransport(engine, "tcp", args) == NULL);
    args[0] = "{\"cpu:0\":[[],[]]}";
    transport_t transport = installTransport(engine, "tcp", args);
    EXPECT(transport != NULL && installTransport(engine, "tcp", NULL) == transport);
    EXPECT(uninstallTransport(engine, NULL) == -1 && uninstallTransport(engine, "any") == 0);

    EXPECT(registerLocalMemory(engine, NULL, 8, "*", 1) == -1);
    EXPECT(registerLocalMemory(engine, memory, 0, "*", 1) == -1);
    EXPECT(registerLocalMemory(engine, memory, 8, NULL, 1) == -1);
    EXPECT(registerLocalMemory(engine, memory, SIZE_MAX, "*", 1) == -1);
    EXPECT(registerLocalMemory(engine, (void *)(UINTPTR_MAX - 3), 5, "*", 1) == -1);
    EXPECT(registerLocalMemory(engine, memory, 100, "*", 1) == 0);
    EXPECT(registerLocalMemory(engine, memory, 100, "*", 1) == -7);
    EXPECT(registerLocalMemory(engine, memory + 99, 10, "*", 0) == -7);
    EXPECT(registerLocalMemory(engine, memory + 100, 10, "", 0) == 0);
    EXPECT(unregisterLocalMemory(engine, memory + 1) == -3);
    EXPECT(unregisterLocalMemory(engine, NULL) == -3);
    EXPECT(unregisterLocalMemory(engine, memory + 100) == 0);
    EXPECT(unregisterLocalMemory(engine, memory + 100) == -3);
    buffer_entry_t list[3] = {{memory + 200, 8}, {memory + 300, 8}, {memory + 50, 1}};
    EXPECT(registerLocalMemoryBatch(engine, list, 3, "*") == -7);
    EXPECT(registerLocalMemoryBatch(engine, NULL, 3, "*") == -1);
    EXPECT(registerLocalMemoryBatch(engine, NULL, 0, "*") == 0);
    EXPECT(registerLocalMemoryBatch(engine, list, SIZE_MAX / 2, "*") == -1);
    list[2].addr = memory + 400;
    EXPECT(registerLocalMemoryBatch(engine, list, 3, "*") == 0);
    void *addresses[3] = {memory + 200, memory + 300, memory + 401};
    EXPECT(unregisterLocalMemoryBatch(engine, addresses, 3) == -3);
    EXPECT(unregisterLocalMemoryBatch(engine, NULL, 3) == -1);
    addresses[2] = memory + 200;
    EXPECT(unregisterLocalMemoryBatch(engine, addresses, 3) == -3);
    addresses[2] = memory + 400;
    EXPECT(unregisterLocalMemoryBatch(engine, addresses, 3) == 0);

    EXPECT(openSegment(engine, NULL) == -1);
    EXPECT(openSegment(engine, "") == -1);
    EXPECT(openSegment(engine, "/") == -1);
    EXPECT(openSegment(engine, "\xff") == -1);
    EXPECT(openSegment(engine, "127.0.0.1:1") == -1);
    EXPECT(openSegment(engine, "127.0.0.1:notaport") == -1);
    EXPECT(closeSegment(engine, 12345) == 0);
    EXPECT(removeLocalSegment(engine, NULL) == -1 && removeLocalSegment(engine, "") == -1);
    EXPECT(removeLocalSegment(engine, "unknown:1") == 0);
    char own[64];
    EXPECT(getLocalIpAndPort(engine, own, sizeof own) == 0);
    EXPECT(removeLocalSegment(engine, own) == -1);
    EXPECT(openSegment(engine, own) == 0);

    EXPECT(genNotifyInEngine(engine, 99, message) == -200);
    EXPECT(genNotifyInEngine(engine, (uint64_t)(int64_t)-1, message) == -200);
    EXPECT(genNotifyInEngine(engine, UINT64_C(1) << 40, message) == -200);
    EXPECT(genNotifyInEngine(engine, 0, nothing) == -1);
    EXPECT(genNotifyInEngine(engine, 0, bad) == -1);
    EXPECT(genNotifyInEngine(engine, 0, message) == 0);
    int count = 0;
    notify_msg_t *list_of_one = getNotifsFromEngine(engine, &count);
    EXPECT(count == 1 && strcmp(list_of_one[0].msg, "b") == 0);
    EXPECT(freeNotifsMsgBuf(list_of_one, 2) == -1);
    EXPECT(freeNotifsMsgBuf(&message, 1) == -1);
    list_of_one[0].name = NULL; /* what is given back is not what the caller says */
    EXPECT(freeNotifsMsgBuf(list_of_one, 1) == 0);
    EXPECT(freeNotifsMsgBuf(list_of_one, 1) == -1);
    EXPECT(freeNotifsMsgBuf(NULL, 0) == 0 && freeNotifsMsgBuf(NULL, 3) == -1);

    EXPECT(showLinks(engine, NULL, 5, 0) == -1 && showLinks(engine, text, 0, 0) == -1);
    EXPECT(getNicLoadStats(engine, NULL, &stat_count) == -1);
    EXPECT(getNicLoadStats(engine, stats, NULL) == -1);
    EXPECT(getNicLoadStats(engine, stats, &stat_count) == 0 && stat_count == 0);
}

static int settle(transfer_engine_t engine, batch_id_t batch, size_t index)
{
    struct transfer_status status = {0, 0};
    while (getTransferStatus(engine, batch, index, &status) == 0 && status.status < STATUS_COMPLETED)
        usleep(1000);
    return status.status;
}

static void batches(transfer_engine_t engine)
{
    static char memory[64], other[64];
    struct transfer_request request = {OPCODE_WRITE, memory, 0, (uint64_t)(uintptr_t)other, sizeof memory};
    struct transfer_request requests[2] = {request, request};
    struct transfer_status status = {77, 77};

    EXPECT(registerLocalMemory(engine, other, sizeof other, "*", 1) == 0);
    EXPECT(allocateBatchID(engine, SIZE_MAX) == INVALID_BATCH);
    EXPECT(freeBatchID(engine, 0) == 1 && freeBatchID(engine, INVALID_BATCH) == 1);
    EXPECT(getTransferStatus(engine, INVALID_BATCH, 0, &status) == 1);
    EXPECT(submitTransfer(engine, 0, &request, 1) == 1);

    batch_id_t batch = allocateBatchID(engine, 2);
    EXPECT(submitTransfer(engine, batch, NULL, 0) == 0);
    EXPECT(submitTransfer(engine, batch, NULL, 1) == 1);
    EXPECT(submitTransfer(engine, batch, requests, 3) == 2);
    EXPECT(submitTransfer(engine, batch, requests, SIZE_MAX) == 2);
    requests[1].opcode = 2; /* nothing of the call is added */
    EXPECT(submitTransfer(engine, batch, requests, 2) == 1);
    requests[1].opcode = -1;
    EXPECT(submitTransfer(engine, batch, requests, 2) == 1);
    requests[1] = request;
    requests[1].target_id = 4711;
    EXPECT(submitTransfer(engine, batch, requests, 2) == 1);
    requests[1].target_id = -1;
    EXPECT(submitTransfer(engine, batch, requests, 2) == 1);
    EXPECT(getTransferStatus(engine, batch, 0, &status) == 1 && status.status == 77);

    /* The own memory is a segment as well. */
    memset(memory, 5, sizeof memory);
    requests[1] = request;
    requests[1].target_offset = 1; /* not registered */
    EXPECT(submitTransfer(engine, batch, requests, 2) == 0);
    EXPECT(freeBatchID(engine, batch) == 4);
    EXPECT(submitTransfer(engine, batch, &request, 1) == 2);
    EXPECT(getTransferStatus(engine, batch, 0, NULL) == 1);
    EXPECT(getTransferStatus(engine, batch, 2, &status) == 1);
    EXPECT(settle(engine, batch, 0) == STATUS_COMPLETED);
    EXPECT(settle(engine, batch, 1) == STATUS_FAILED);
    EXPECT(memcmp(memory, other, sizeof memory) == 0);
    EXPECT(freeBatchID(engine, batch) == 0);
    EXPECT(freeBatchID(engine, batch) == 1);
    EXPECT(getTransferStatus(engine, batch, 0, &status) == 1);
    EXPECT(submitTransfer(engine, batch, &request, 1) == 1);

    /* A source that is no memory fails by itself. */
    void *hole = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT(hole != MAP_FAILED);
    batch = allocateBatchID(engine, 6);
    requests[0] = request;
    requests[0].source = hole;
    requests[1] = request;
    requests[1].source = NULL;
    EXPECT(submitTransfer(engine, batch, requests, 2) == 0);
    requests[0].opcode = OPCODE_READ;
    requests[1].source = (void *)(UINTPTR_MAX - 8);
    EXPECT(submitTransfer(engine, batch, requests, 2) == 0);
    requests[0] = request;
    requests[0].length = UINT64_MAX;
    requests[1] = request;
    requests[1].source = NULL;
    requests[1].length = 0;
    EXPECT(submitTransfer(engine, batch, requests, 2) == 0);
    for (size_t i = 0; i < 5; i++)
        EXPECT(settle(engine, batch, i) == STATUS_FAILED);
    EXPECT(settle(engine, batch, 5) == STATUS_COMPLETED);
    EXPECT(freeBatchID(engine, batch) == 0);
    EXPECT(unregisterLocalMemory(engine, other) == 0);
}

static void with_message(transfer_engine_t engine)
{
    static char memory[64], other[64];
    struct transfer_request request = {OPCODE_WRITE, memory, 0, (uint64_t)(uintptr_t)other, sizeof memory};
    notify_msg_t message = {"done", "with it"}, nothing = {NULL, "x"};
    int count;

    EXPECT(registerLocalMemory(engine, other, sizeof other, "*", 1) == 0);
    batch_id_t batch = allocateBatchID(engine, 2);
    EXPECT(submitTransferWithNotify(engine, batch, &request, 0, message) == 1);
    EXPECT(submitTransferWithNotify(engine, batch, &request, 1, nothing) == 1);
    EXPECT(submitTransferWithNotify(engine, batch, &request, 1, message) == 0);
    EXPECT(getNotifsFromEngine(engine, &count) == NULL && count == 0); /* nobody has polled */
    EXPECT(settle(engine, batch, 0) == STATUS_COMPLETED);
    notify_msg_t *list = getNotifsFromEngine(engine, &count);
    EXPECT(count == 1 && strcmp(list[0].name, "done") == 0 && strcmp(list[0].msg, "with it") == 0);
    EXPECT(freeNotifsMsgBuf(list, count) == 0);
    EXPECT(settle(engine, batch, 0) == STATUS_COMPLETED);
    EXPECT(getNotifsFromEngine(engine, &count) == NULL); /* sent once */
    EXPECT(freeBatchID(engine, batch) == 0);

    /* A failed batch sends none, neither now nor with the next one. */
    batch = allocateBatchID(engine, 1);
    request.target_offset = 1;
    EXPECT(submitTransferWithNotify(engine, batch, &request, 1, message) == 0);
    EXPECT(settle(engine, batch, 0) == STATUS_FAILED);
    EXPECT(freeBatchID(engine, batch) == 0);
    batch = allocateBatchID(engine, 1);
    request.target_offset = (uint64_t)(uintptr_t)other;
    EXPECT(submitTransfer(engine, batch, &request, 1) == 0);
    EXPECT(settle(engine, batch, 0) == STATUS_COMPLETED);
    EXPECT(getNotifsFromEngine(engine, &count) == NULL);
    EXPECT(freeBatchID(engine, batch) == 0);
    EXPECT(unregisterLocalMemory(engine, other) == 0);
}

static void *poll_until_gone(void *unused)
{
    struct transfer_status status;
    (void)unused;
    while (getTransferStatus(shared_engine, shared_batch, 0, &status) == 0)
        EXPECT(status.status == STATUS_WAITING || status.status == STATUS_FAILED);
    return NULL;
}

/* Frees, forgets and destroys what is still under way. */
static void before_the_end(transfer_engine_t engine, const char *peer)
{
    size_t length = (size_t)64 << 20;
    char *memory = malloc(length);
    EXPECT(memory != NULL);
    memset(memory, 1, length);
    segment_id_t segment = openSegment(engine, peer);
    EXPECT(segment > 0 && openSegment(engine, peer) == segment);
    struct transfer_request request = {OPCODE_WRITE, memory, segment, 4096, length};
    struct transfer_status status;

    batch_id_t batch = allocateBatchID(engine, 1);
    EXPECT(submitTransfer(engine, batch, &request, 1) == 0);
    usleep(50000);
    EXPECT(getTransferStatus(engine, batch, 0, &status) == 0 && status.status == STATUS_WAITING);
    EXPECT(freeBatchID(engine, batch) == 4);
    EXPECT(removeLocalSegment(engine, peer) == 0);
    EXPECT(submitTransfer(engine, allocateBatchID(engine, 1), &request, 1) == 1);
    EXPECT(getTransferStatus(engine, batch, 0, &status) == 0 && status.status == STATUS_WAITING);
    EXPECT(openSegment(engine, peer) > segment);

    shared_engine = engine;
    shared_batch = batch;
    pthread_t poller;
    EXPECT(pthread_create(&poller, NULL, poll_until_gone, NULL) == 0);
    usleep(20000);
    destroyTransferEngine(engine);
    /* Quiet now: the memory may go at once. */
    free(memory);
    EXPECT(pthread_join(poller, NULL) == 0);
    EXPECT(freeBatchID(engine, batch) == 1);
    handles(engine);
}

/* A call that has something to say on standard error answers as it would if nobody listened. */
static void complaints(transfer_engine_t engine)
{
    char name[64];
    transfer_engine_t peer = createTransferEngine(p2p, "127.0.0.1", "127.0.0.1", 0, 1);
    EXPECT(peer != NULL && getLocalIpAndPort(peer, name, sizeof name) == 0);
    segment_id_t segment = openSegment(engine, name);
    EXPECT(segment > 0);
    destroyTransferEngine(peer);
    notify_msg_t message = {"a", "b"};
    EXPECT(genNotifyInEngine(engine, (uint64_t)segment, message) == -102);
}

int main(int argc, char **argv)
{
    EXPECT(argc == 2);
    creating();
    int local = 0;
    handles(NULL);
    handles((transfer_engine_t)1);
    handles(&local);
    transfer_engine_t engine = createTransferEngine(p2p, "127.0.0.1:5", "127.0.0.1", 0, 0);
    EXPECT(engine != NULL);
    arguments(engine);
    complaints(engine);
    batches(engine);
    with_message(engine);
    before_the_end(engine, argv[1]);
    /* An engine that is alive when the process ends is no harm, nor is one that was told to end it. */
    engine = createTransferEngine(p2p, "127.0.0.1", "127.0.0.1", 0, 1);
    EXPECT(engine != NULL);
    EXPECT(getTransferStatus(engine, 1, 0, &(struct transfer_status){0, 0}) == 1);
    printf("all as expected\n");
    fflush(stdout);
    enableGracefulShutdown(engine);
    raise(SIGTERM);
    return 9;
}
