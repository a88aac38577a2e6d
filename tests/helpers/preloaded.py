"""Imported once by the process that `tests/helpers/forked.py` forks from: what takes seconds to import."""

import contextlib
import gc

import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed

import spec_ops.decoding
import spec_ops.models
import spec_ops.parallel  # noqa: F401

torch.set_num_threads(1)
with contextlib.suppress(ImportError):
    import transformers  # noqa: F401

# As in `tests/conftest.py`: what was imported is looked through by no process, and little garbage is looked for.
gc.freeze()
gc.set_threshold(50_000, 20, 50)
