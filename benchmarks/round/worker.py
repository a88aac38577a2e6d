"""The process of one case of `python -m benchmarks round`: reads the case from stdin, answers in lines of JSON on stdout.

`{"compile_s": ...}` once the round is compiled and recorded; then, told "measure", a `{"row": ...}` per context and
`{"done": true}`. `{"error": reason, "failed": ...}` instead if something is wrong; `failed` is false for a refusal that the
backends announce.

The argument: in how many seconds the first answer must come. Past them it writes to stderr where it is, and exits.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
from typing import Any, TextIO

from benchmarks.round.measure import CompiledRound, RoundCase
from spec_ops.backends import BackendError


def main(questions: TextIO, answers: TextIO) -> None:
    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    case = RoundCase.from_json(questions.readline())
    try:
        made: Any
        if case.round == "assisted":
            from benchmarks.round.assisted import AssistedRound

            made = AssistedRound(case)
        else:
            made = CompiledRound(case)
        faulthandler.cancel_dump_traceback_later()
        answer(compile_s=made.compile_s)
        if questions.readline().strip() != "measure":
            return
        for row in made.rows():
            answer(row=row)
        answer(done=True)
    except Exception as error:
        traceback.print_exc()
        answer(error=_reason(error), failed=not _announced(error))


def _reason(error: Exception) -> str:
    """What went wrong; where, if the error does not say anything (an `assert` without a text)."""
    if str(error):
        return f"{type(error).__name__}: {error}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {frame.filename}:{frame.lineno}: {frame.line}"


def _announced(error: BaseException | None) -> bool:
    """Whether a backend refused, or a package is not there; compilers wrap what they catch."""
    while error is not None:
        if isinstance(error, (BackendError, ImportError)) or BackendError.__name__ in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def program() -> None:
    faulthandler.dump_traceback_later(float(sys.argv[1]), exit=True)
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between the answers
    main(sys.stdin, channel)


if __name__ == "__main__":
    program()
