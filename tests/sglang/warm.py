"""A process that has imported SGLang, and whose forks are engines: imports are four fifths of a small engine's start.

python -m tests.sglang.warm

Reads a line of JSON a command: the `arguments` of `serve.py`, whether SGLang's runners of CUDA `graphs` run, and the files for
`stdout` and `stderr`. Writes a line with the exit status once that engine has ended. Plug-ins are loaded by each engine, since
what is imported here registers nothing; but not again by its scheduler, which is a fork of it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import traceback
from typing import Any

from tests.sglang import serve


def main() -> None:
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import sglang.srt.entrypoints.engine
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler  # noqa: F401

    for line in sys.stdin:
        command = json.loads(line)
        if (pid := os.fork()) == 0:
            run(command)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), file=channel, flush=True)


def run(command: dict[str, Any]) -> None:
    """Does not return."""
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(command[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        os.environ["SGLANG_CPU_GRAPHS"] = "1" if command["graphs"] else ""
        multiprocessing.set_start_method("fork", force=True)
        multiprocessing.set_start_method = lambda *args, **named: None  # SGLang asks for "spawn"
        sys.argv = [sys.argv[0], *command["arguments"]]
        serve.main()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
