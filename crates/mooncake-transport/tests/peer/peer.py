"""A real Mooncake engine, told what to do by lines of JSON on standard input.

Every line is a command and is answered by one line of JSON on standard output;
what the engine logs goes to standard error. The process ends with its input.

Memory is compared here and not by the test that asks: both sides know how to
make the same bytes from a seed, so a test sends the seed, and this process
looks at its own memory.
"""

import ctypes
import json
import mmap
import os
import sys
import threading
import time

# The answers get a descriptor of their own: whatever else writes to
# descriptor 1 in this process is a log.
ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

import numpy as np  # noqa: E402

from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode  # noqa: E402

GAMMA = 0x9E3779B97F4A7C15
CHUNK_WORDS = 1 << 18


def stream(seed, start, length):
    """Bytes start .. start+length of the stream of `seed`, chunk by chunk.

    Word i is splitmix64 of seed + (i + 1) * GAMMA, little-endian.
    """
    end = start + length
    word = start // 8
    while word * 8 < end:
        count = min(CHUNK_WORDS, (end + 7) // 8 - word)
        with np.errstate(over="ignore"):
            index = np.arange(word + 1, word + 1 + count, dtype=np.uint64)
            z = index * np.uint64(GAMMA) + np.uint64(seed)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            z = z ^ (z >> np.uint64(31))
        data = z.astype("<u8").view(np.uint8)
        low = max(start - word * 8, 0)
        high = min(end - word * 8, count * 8)
        yield data[low:high]
        word += count


class Memory:
    """One anonymous mapping, filled from a seed."""

    def __init__(self, length):
        self.map = mmap.mmap(-1, max(length, 1))
        self.bytes = np.frombuffer(self.map, dtype=np.uint8)[:length]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.length = length

    def fill(self, seed, offset, length, start):
        self.within(offset, length)
        at = offset
        for chunk in stream(seed, start, length):
            self.bytes[at : at + len(chunk)] = chunk
            at += len(chunk)

    def differs_at(self, seed, offset, length, start):
        """Offset of the first byte that is not the stream's, or None."""
        self.within(offset, length)
        at = offset
        for chunk in stream(seed, start, length):
            unequal = np.flatnonzero(self.bytes[at : at + len(chunk)] != chunk)
            if len(unequal):
                return int(at + unequal[0])
            at += len(chunk)
        return None

    def within(self, offset, length):
        if offset < 0 or length < 0 or offset + length > self.length:
            raise ValueError(f"{offset}+{length} is outside {self.length} bytes")


class Peer:
    def __init__(self):
        self.engine = None
        self.memories = []
        self.background = []

    def start(self, host="127.0.0.1", store=None, name=None):
        self.engine = TransferEngine()
        if store is not None:
            return {"code": self.engine.initialize(name, store, "tcp", ""), "session": name}
        code = self.engine.initialize(host, "P2PHANDSHAKE", "tcp", "")
        return {"code": code, "session": f"{host}:{self.engine.get_rpc_port()}"}

    def allocate(self, length, seed=None):
        memory = Memory(length)
        if seed is not None:
            memory.fill(seed, 0, length, 0)
        self.memories.append(memory)
        return {"memory": len(self.memories) - 1, "address": memory.address}

    def register(self, memory):
        memory = self.memories[memory]
        return {"code": self.engine.register_memory(memory.address, memory.length)}

    def unregister(self, memory):
        return {"code": self.engine.unregister_memory(self.memories[memory].address)}

    def fill(self, memory, seed, offset=0, length=None, start=0):
        memory = self.memories[memory]
        length = memory.length - offset if length is None else length
        memory.fill(seed, offset, length, start)
        return {}

    def check(self, memory, seed, offset=0, length=None, start=0):
        memory = self.memories[memory]
        length = memory.length - offset if length is None else length
        at = memory.differs_at(seed, offset, length, start)
        return {"equal": at is None, "differs_at": at, "checked": length}

    def transfer(self, op, session, items, memory=0, notify=None):
        """One batch: items are [offset here, absolute address there, length]."""
        base = self.memories[memory].address
        opcode = {"write": TransferOpcode.Write, "read": TransferOpcode.Read}[op]
        local = [base + item[0] for item in items]
        remote = [item[1] for item in items]
        lengths = [item[2] for item in items]
        begin = time.perf_counter()
        if notify is not None:
            note = TransferNotify(notify[0], notify[1])
            code = self.engine.batch_transfer_sync(session, local, remote, lengths, opcode, note)
        elif len(items) == 1 and op == "write":
            code = self.engine.transfer_sync_write(session, local[0], remote[0], lengths[0])
        elif len(items) == 1:
            code = self.engine.transfer_sync_read(session, local[0], remote[0], lengths[0])
        elif op == "write":
            code = self.engine.batch_transfer_sync_write(session, local, remote, lengths)
        else:
            code = self.engine.batch_transfer_sync_read(session, local, remote, lengths)
        return {"code": code, "seconds": time.perf_counter() - begin}

    def begin_transfer(self, **arguments):
        """Like transfer, on a thread; join_transfers collects the codes."""
        codes = []
        thread = threading.Thread(
            target=lambda: codes.append(self.transfer(**arguments)["code"]), daemon=True
        )
        thread.start()
        self.background.append((thread, codes))
        return {}

    def join_transfers(self, timeout=60):
        results = []
        for thread, codes in self.background:
            thread.join(timeout)
            results.append(codes[0] if codes else None)
        self.background = []
        return {"codes": results}

    def time_transfers(self, op, session, offset, address, length, count, memory=0):
        """Seconds of each of `count` equal transfers, one after the other."""
        local = self.memories[memory].address + offset
        call = {
            "write": self.engine.transfer_sync_write,
            "read": self.engine.transfer_sync_read,
        }[op]
        seconds = []
        for _ in range(count):
            begin = time.perf_counter()
            code = call(session, local, address, length)
            seconds.append(time.perf_counter() - begin)
            if code != 0:
                return {"code": code, "seconds": seconds}
        return {"code": 0, "seconds": seconds}

    def probe(self, session):
        return {"code": self.engine.send_probe(session)}

    def notifies(self):
        return {"notifies": [[note.name, note.msg] for note in self.engine.get_notifies()]}

    def first_buffer(self, session):
        return {"address": self.engine.get_first_buffer_address(session)}


COMMANDS = {
    name
    for name in vars(Peer)
    if not name.startswith("_")
}


def main():
    peer = Peer()
    for line in sys.stdin:
        try:
            command = json.loads(line)
            name = command.pop("do")
            if name not in COMMANDS:
                raise ValueError(f"unknown command {name}")
            answer = getattr(peer, name)(**command)
        except Exception as error:  # the test prints it
            answer = {"error": f"{type(error).__name__}: {error}"}
        ANSWERS.write(json.dumps(answer) + "\n")
    # The engine's own shutdown is not under test.
    os._exit(0)


if __name__ == "__main__":
    main()
