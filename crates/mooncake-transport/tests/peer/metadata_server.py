"""The HTTP metadata server of the Mooncake package, told by a line of JSON on
standard input on which port to listen. It ends with its input.
"""

import json
import os
import socket
import sys
import time

ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

from mooncake.http_metadata_server import KVBootstrapServer  # noqa: E402


def answers(port):
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True
    except OSError:
        return False


def main():
    for line in sys.stdin:
        port = json.loads(line)["port"]
        KVBootstrapServer(port=port, host="127.0.0.1").run()
        deadline = time.monotonic() + 30
        while not answers(port) and time.monotonic() < deadline:
            time.sleep(0.02)
        answer = {} if answers(port) else {"error": "the server does not come up"}
        ANSWERS.write(json.dumps(answer) + "\n")
    os._exit(0)


if __name__ == "__main__":
    main()
