"""A pipe of the old kind, told what to do by lines of JSON on standard input.

The real engine, ZeroMQ and safetensors, put together as docs/protocol/mooncake-pipe.md says the
old pipe did: one worker thread for both directions, one that waits for answers, no timeouts. Every
line is a command and is answered by one line of JSON on standard output; what the engine logs goes
to standard error. The process ends with its input.
"""

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

# The answers get a descriptor of their own: whatever else writes to
# descriptor 1 in this process is a log.
ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

import numpy as np  # noqa: E402
import safetensors.numpy  # noqa: E402
import zmq  # noqa: E402

from mooncake.engine import TransferEngine  # noqa: E402

NONE_VALUE = -150886311
DTYPES = {
    "U8": np.uint8,
    "F16": np.float16,
    "F32": np.float32,
    "I64": np.int64,
    "F64": np.float64,
    "I32": np.int32,
}
NAMES = {np.dtype(kind): name for name, kind in DTYPES.items()}


def stream(seed, length):
    """`length` bytes that differ from seed to seed: a 64-bit xorshift, little-endian."""
    mask = (1 << 64) - 1
    state = (seed * 0x9E3779B97F4A7C15) & mask | 1
    words = bytearray()
    while len(words) < length:
        state ^= (state << 13) & mask
        state ^= state >> 7
        state ^= (state << 17) & mask
        words += state.to_bytes(8, "little")
    return bytes(words[:length])


def split(url):
    host, port = url.rsplit(":", 1)
    return host, int(port)


class Pipe:
    def start(self, kv_rank, local_rank=0):
        with open(os.environ["MOONCAKE_CONFIG_PATH"]) as file:
            config = json.load(file)
        sides = [split(config["prefill_url"]), split(config["decode_url"])]
        if sides[0] == sides[1]:
            sides[1] = (sides[1][0], sides[1][1] + 100)
        own, peer = sides if kv_rank == 0 else sides[::-1]

        self.engine = TransferEngine()
        code = self.engine.initialize(
            f"{own[0]}:{own[1] + local_rank}",
            config["metadata_server"],
            config.get("protocol", "tcp"),
            config.get("device_name", ""),
        )
        self.peer_session = f"{peer[0]}:{peer[1] + local_rank}"

        self.context = zmq.Context()
        notices, answers = 8 + 2 * local_rank + 1, 8 + 2 * local_rank + 2

        def bound(port):
            socket = self.context.socket(zmq.PUSH)
            socket.bind(f"tcp://{own[0]}:{own[1] + port}")
            return socket

        def connected(port):
            socket = self.context.socket(zmq.PULL)
            socket.connect(f"tcp://{peer[0]}:{peer[1] + port}")
            return socket

        self.sent_notices = bound(notices)
        self.received_notices = connected(notices)
        self.sent_answers = bound(answers)
        self.received_answers = connected(answers)
        self.worker = ThreadPoolExecutor(max_workers=1)
        self.cleaner = ThreadPoolExecutor(max_workers=1)
        self.freed = []
        self.sent = []
        return {"code": code, "session": f"{own[0]}:{self.engine.get_rpc_port()}"}

    def dial(self, session):
        """The name of the peer's engine, where it is not the configured one."""
        self.peer_session = session
        return {}

    # What the worker does.

    def _send_array(self, array):
        image = safetensors.numpy.save({"tensor": array})
        address = self.engine.allocate_managed_buffer(len(image))
        if address <= 0:
            raise RuntimeError(f"no buffer of {len(image)} bytes")
        self.engine.write_bytes_to_buffer(address, image, len(image))
        self.sent_notices.send_multipart(
            [address.to_bytes(8, "big"), len(image).to_bytes(8, "big")]
        )
        self.freed.append(self.cleaner.submit(self._await_answer, address, len(image)))

    def _await_answer(self, address, length):
        answer = self.received_answers.recv()
        self.engine.free_managed_buffer(address, length)
        return answer.decode("latin-1")

    def _receive_array(self):
        frames = self.received_notices.recv_multipart()
        address, length = (int.from_bytes(frame, "big") for frame in frames[:2])
        buffer = self.engine.allocate_managed_buffer(length)
        if buffer <= 0:
            raise RuntimeError(f"no buffer of {length} bytes")
        code = self.engine.transfer_sync_read(self.peer_session, buffer, address, length)
        if code < 0:
            raise RuntimeError(f"the read failed with {code}")
        image = self.engine.read_bytes_from_buffer(buffer, length)
        self.sent_answers.send(b"ACK")
        self.engine.free_managed_buffer(buffer, length)
        return safetensors.numpy.load(image)["tensor"]

    # Commands.

    def send(self, dtype, shape, seed):
        kind = np.dtype(DTYPES[dtype])
        length = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        array = np.frombuffer(stream(seed, length), dtype=kind).reshape(shape)
        self.sent.append(self.worker.submit(self._send_array, array))
        return {}

    def send_zeros(self, length):
        """A tensor that takes no time to make."""
        array = np.zeros(length, dtype=np.uint8)
        self.sent.append(self.worker.submit(self._send_array, array))
        return {}

    def send_none(self):
        array = np.array([NONE_VALUE], dtype=np.int64)
        self.sent.append(self.worker.submit(self._send_array, array))
        return {}

    def recv(self, seed=None):
        """Receives one tensor and compares it with what the seed makes of its length."""
        array = self.worker.submit(self._receive_array).result()
        if array.size == 1 and array.item() == NONE_VALUE:
            return {"none": True}
        data = array.tobytes()
        return {
            "none": False,
            "dtype": NAMES[array.dtype],
            "shape": list(array.shape),
            "equal": seed is not None and data == stream(seed, len(data)),
        }

    def flush(self):
        """Waits for everything that was sent; the answers."""
        for future in self.sent:
            future.result()
        answers = [future.result() for future in self.freed]
        self.sent, self.freed = [], []
        return {"answers": answers}

    # Measuring.

    def serve(self, count, echo):
        """Receives `count` tensors, and sends each back if told to."""
        for _ in range(count):
            array = self.worker.submit(self._receive_array).result()
            if echo:
                self.worker.submit(self._send_array, array)
        return {}

    def time_round_trips(self, length, count):
        array = np.ones(length, dtype=np.uint8)
        seconds = []
        for _ in range(count):
            begin = time.perf_counter()
            self.worker.submit(self._send_array, array)
            self.worker.submit(self._receive_array).result()
            seconds.append(time.perf_counter() - begin)
        return {"seconds": seconds}

    def time_stream(self, length, count):
        array = np.ones(length, dtype=np.uint8)
        begin = time.perf_counter()
        for _ in range(count):
            self.sent.append(self.worker.submit(self._send_array, array))
        self.flush()
        return {"seconds": time.perf_counter() - begin}


COMMANDS = {name for name in vars(Pipe) if not name.startswith("_")}


def main():
    pipe = Pipe()
    for line in sys.stdin:
        try:
            command = json.loads(line)
            name = command.pop("do")
            if name not in COMMANDS:
                raise ValueError(f"unknown command {name}")
            answer = getattr(pipe, name)(**command)
        except Exception as error:  # the test prints it
            answer = {"error": f"{type(error).__name__}: {error}"}
        ANSWERS.write(json.dumps(answer) + "\n")
    # The engine's own shutdown is not under test.
    os._exit(0)


if __name__ == "__main__":
    main()
