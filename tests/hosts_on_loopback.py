"""Runs the tasks of a job with the host names of a cloud on loopback.

Start it in separate mount, network and user namespaces (`unshare -rnm`), where
the names can be added to /etc/hosts. Reads one JSON object from stdin:
`hosts`, `command` and `tasks` (name -> environment). When all tasks have ended
or one has failed, prints JSON: name -> exit code and output.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time

from tfdist.launch import network, processes

DEADLINE_SECS = 300


def add_hosts(names):
    """Has this namespace take the names for its loopback."""
    with tempfile.NamedTemporaryFile("w", suffix=".hosts") as file:
        file.write(f"127.0.0.1 localhost {' '.join(names)}\n")
        file.flush()
        subprocess.run(["mount", "--bind", file.name, "/etc/hosts"], check=True)
    # The mount keeps the file, which has no name any more.


def start(command, environment, output):
    parent = os.getpid()
    return subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: processes.die_with_parent(parent),
    )


def wait(started):
    """Exit codes when all have ended, or one has failed; None if killed."""
    codes = dict.fromkeys(started)
    deadline = time.monotonic() + DEADLINE_SECS
    while None in codes.values() and time.monotonic() < deadline:
        for name, process in started.items():
            codes[name] = process.poll()
        if any(codes.values()):
            break
        time.sleep(0.1)
    for process in started.values():
        process.kill()
        process.wait()
    return codes


def main():
    job = json.load(sys.stdin)
    network.set_loopback(up=True)
    add_hosts(job["hosts"])
    with contextlib.ExitStack() as files:
        outputs = {
            name: files.enter_context(tempfile.TemporaryFile("w+"))
            for name in job["tasks"]
        }
        started = {
            name: start(job["command"], environment, outputs[name])
            for name, environment in job["tasks"].items()
        }
        codes = wait(started)
        for output in outputs.values():
            output.seek(0)
        result = {name: [codes[name], outputs[name].read()] for name in codes}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
