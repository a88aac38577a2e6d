"""`explain` for a GPU that is not there, and the command around it: plans, warnings, and one line for each mistake."""

from __future__ import annotations

import logging
import sys
import warnings

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from typer.testing import CliRunner

import spec_ops
from spec_ops.cli import app
from spec_ops.cli import explain as command
from spec_ops.passes import PassError, explain
from spec_ops.passes.analysis import counts
from spec_ops.passes.plan import parse_arch
from spec_ops.passes.select_backends import SelectBackends
from tests.helpers.pass_harness import capture_for_cuda, run_pass, texts

Q, CACHE = torch.randn(2, 1, 4, 16), torch.randn(4, 4, 2, 16)
TABLE, LENS = torch.zeros(2, 2, dtype=torch.int32), torch.tensor([3, 4], dtype=torch.int32)


def attend(q, cache, table, lens, **options):
    return spec_ops.mha_draft_decode(q, cache, cache, table, lens, **options)


def read_back(q, cache, table, lens):
    rows = q.clone()
    rows[:, 0] = q[:, -1]  # indexing, which enters a device guard on CUDA
    return attend(rows, cache, table, lens, seq_lens_cpu=lens.cpu(), max_seq_len=lens.max().item())


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr("spec_ops.backends.registry._warned", set())
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        yield


def test_copies_to_the_host_are_counted_without_a_gpu():
    half = (Q.bfloat16(), CACHE.bfloat16(), TABLE, LENS)
    plan = explain(read_back, *half, arch="sm90")
    assert (plan.before[counts.HOST_COPIES], plan.after[counts.HOST_COPIES]) == (1, 0)
    assert plan.kernels()[0].startswith("mha_draft_decode: triton")
    assert plan.warnings() == []
    assert explain(read_back, *half).before[counts.HOST_COPIES] == 0  # a plan for the CPU
    assert half[0].device.type == "cpu"


def test_lengths_that_are_on_the_host_stay_there():
    plan = explain(lambda q, lens: attend(q, CACHE, TABLE, LENS, seq_lens_cpu=lens[:2].long()), Q, LENS.clone(), arch=90)
    assert plan.before[counts.HOST_COPIES] == 0


def test_a_module_and_its_closed_over_tensors_move_together():
    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(16, 16))
            self.register_buffer("cache", CACHE)

        def forward(self, q):
            return attend(q @ self.weight, self.cache, TABLE, LENS) + torch.arange(16, device=q.device)

    assert explain(Step(), Q, arch="sm_100a").kernels()


class Users(CustomGraphPass):
    """A pass that the user has in Inductor's slot before the joint graph's own passes: it sees the graph as it was traced."""

    def __init__(self) -> None:
        self.devices: list[str] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.devices.append(next(node.meta["val"].device.type for node in graph.nodes if node.op == "placeholder"))

    def uuid(self) -> str:
        return "users"


@pytest.mark.parametrize("several", [False, True])
def test_passes_of_the_user_stay_in_a_plan_for_a_gpu(several):
    one, other = Users(), Users()
    users = [one, other] if several else one
    with inductor_config.patch(joint_custom_pre_pass=users):
        assert explain(attend, Q.bfloat16(), CACHE.bfloat16(), TABLE, LENS, arch=90).kernels()
    assert one.devices == ["meta"]
    assert other.devices == (["meta"] if users is not one else [])


@pytest.mark.parametrize("planned", [True, False], ids=["elsewhere", "here"])
def test_a_plan_without_a_kernel_warns(planned, monkeypatch):
    """In the report; of a compilation for this machine also as a warning, since then the call says nothing when it runs."""
    monkeypatch.setattr("spec_ops.passes.base.device_arch", lambda device: 90)
    module = capture_for_cuda(lambda *args: attend(*args), Q, CACHE, TABLE, LENS)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = run_pass(SelectBackends(), module, arch=90 if planned else None)
    assert "no kernel can run it on sm_90" in texts(result.warnings)
    assert sum("no kernel can run it on sm_90" in str(warning.message) for warning in seen) == int(not planned)


@pytest.mark.parametrize(
    ("given", "arch"), [(None, None), (100, 100), ("sm100", 100), ("SM_90a", 90), ("75", 75), ("sm103f", 103)]
)
def test_architectures(given, arch):
    assert parse_arch(given) == arch


@pytest.mark.parametrize("given", ["blackwell", "sm999", 94, "", "sm", "-90", "100x", True])
def test_unknown_architectures(given):
    with pytest.raises(ValueError, match=r"`arch` must be one of sm75 \(Turing\), .*sm100 .*\(Blackwell\), got") as caught:
        parse_arch(given)
    assert "\n" not in str(caught.value)


FACTORIES = {
    "takes": "def make(batch_size, steps=3): ...",
    "no_op": "def make(): return (lambda x: x + 1), torch.ones(2)",
    "returns": "def make(): return 3",
    "nothing": "def make(): return ()",
    "raises": "def make():\n    raise KeyError('weights')",
    "imports": "import no_such_module",
    "syntax": "def make(:",
    "breaks": "def make():\n    def f(x):\n        torch._dynamo.graph_break()\n        return x\n    return f, torch.ones(2)",
    "arguments": "def make(): return lambda x: x",
    "builtin": "make = max",
    "returns_builtin": "def make(): return torch.tanh, torch.ones(2)",
    "wrong_table": "import neighbour as n\ndef make(): return n.step, *(x.long() if x.dim() == 2 else x for x in n.ARGS)",
    "wrong_scale": "import neighbour as n\nA = n.ARGS[1].to(torch.float8_e4m3fn)\n"
    "def make(): return n.step, n.ARGS[0], A, *n.ARGS[2:]",
    "wrong_method": "def make(): return lambda x: x.foo(), torch.ones(2)",
    "module": "import neighbour\ndef make(): return neighbour.Step(), neighbour.ARGS[0]",
    "neighbour": "from neighbour import step\nimport neighbour\ndef make(): return step, *neighbour.ARGS",
}
NEIGHBOUR = """
import torch, spec_ops
ARGS = torch.ones(2, 1, 4, 16), torch.ones(4, 4, 2, 16), torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
def step(q, cache, table, lens): return spec_ops.mha_draft_decode(q, cache, cache, table, lens)
class Step(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name, tensor in zip(("cache", "table", "lens"), ARGS[1:]):
            self.register_buffer(name, tensor)
    def forward(self, q): return step(q, self.cache, self.table, self.lens)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)  # that of an earlier test, in another folder
    (tmp_path / "neighbour.py").write_text(NEIGHBOUR)

    def call(name: str, *args: str):
        file = tmp_path / f"factory_{name}.py"
        file.write_text(f"import torch\n{FACTORIES[name]}\n")
        monkeypatch.setenv("COLUMNS", "400")
        result = CliRunner().invoke(app, ["explain", f"{file}:make", *args], catch_exceptions=False)
        return result.exit_code, result.output

    return call


def test_a_factory_that_imports_its_neighbour(run):
    code, output = run("neighbour", "--arch", "sm90")
    assert code == 0, output
    assert "warning: mha_draft_decode runs on `reference`" in output


@pytest.mark.parametrize("name", ["random", "spec_ops"])
def test_a_file_may_be_called_as_a_module_in_use(name, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setitem(sys.modules, name, used := sys.modules[name])
    (tmp_path / f"{name}.py").write_text(f"{NEIGHBOUR}\ndef make(): return step, *ARGS")
    result = CliRunner().invoke(app, ["explain", f"{tmp_path / name}.py:make"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert sys.modules[name] is used


def test_a_module_in_another_dtype(run):
    code, output = run("module", "--arch", "sm90", "--dtype", "bfloat16")
    assert code == 0, output
    assert "Plan for sm_90, bf16" in output
    assert "triton: mha_draft_decode" in output
    assert "warning" not in output
    code, output = run("neighbour", "--dtype", "bfloat16")
    assert (code, "is for modules" in output) == (2, True)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("takes", "make(batch_size, steps=3) must take no arguments: missing a required argument: 'batch_size'"),
        ("no_op", "calls none of the spec_ops operators"),
        ("returns", "must return what to compile, or (it, *arguments), got int"),
        ("nothing", "must return what to compile, or (it, *arguments), got tuple"),
        ("raises", "KeyError: 'weights'"),
        ("imports", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("syntax", "SyntaxError: invalid syntax"),
        ("breaks", "graph_break()"),
        ("builtin", "TypeError: max expected at least 1 argument, got 0"),
        ("returns_builtin", "calls none of the spec_ops operators"),
        ("arguments", "must return what to compile and its arguments: missing a required argument: 'x'"),
    ],
)
def test_mistakes_get_a_line_each(name, said, run):
    code, output = run(name)
    assert code == 2
    (line,) = (line for line in output.splitlines() if said in line)
    assert "FACTORY" in line
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wrong_table", "TypeError: mha_draft_decode: `block_tables` must be of dtype int32, got int64 ("),
        ("wrong_scale", "ValueError: mha_draft_decode: `k_scale` must be given, since `k_cache` is float8_e4m3fn, got None ("),
        ("wrong_method", "AttributeError: 'Tensor' object has no attribute 'foo' ("),
    ],
)
def test_what_an_op_refuses_is_said_in_its_words(name, said, run, tmp_path):
    """Not in the compiler's, and at the line that called the op; what torch logs of it beforehand is not shown."""
    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = logged.append
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    try:
        code, output = run(name, "--arch", "sm90")
    finally:
        logger.removeHandler(handler)
    assert code == 2
    (line,) = (line for line in output.splitlines() if said in line)
    file = f"factory_{name}.py" if name == "wrong_method" else "neighbour.py"
    assert f"({tmp_path / file}:" in line
    assert logged == []
    assert logging.root.manager.disable == 0


def test_a_defect_of_a_pass_is_not_the_users_mistake(run, monkeypatch):
    """It comes out of the compiler with its traceback, and not as a wrong FACTORY."""

    def broken(self, graph, context, result):
        raise PassError("an output has other strides")

    monkeypatch.setattr(SelectBackends, "run", broken)
    with pytest.raises(RuntimeError, match="an output has other strides"):
        run("neighbour")


def test_a_file_without_a_function(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("")
    result = CliRunner().invoke(app, ["explain", "mine.py"])
    assert (result.exit_code, "FACTORY: must name a function of that file: mine.py:FUNCTION" in result.output) == (2, True)


@pytest.mark.parametrize(
    ("args", "named"), [(["--arch", "sm999"], "--arch"), (["--dtype", "int8"], "--dtype"), (["gone.py:make"], "FACTORY")]
)
def test_bad_options_are_named(args, named):
    result = CliRunner().invoke(app, ["explain", *args], catch_exceptions=False)
    assert (result.exit_code, named in result.output) == (2, True)


@pytest.mark.parametrize(("args", "dtype"), [([], torch.bfloat16), (["--dtype", "float32"], torch.float32)])
def test_the_shipped_pair_is_planned_in_bfloat16(args, dtype, monkeypatch):
    seen = []

    def load_pair(device, dtype):
        seen.append(dtype)
        raise KeyError

    monkeypatch.setattr(command, "load_pair", load_pair)
    with pytest.raises(KeyError):
        CliRunner().invoke(app, ["explain", *args], catch_exceptions=False)
    assert seen == [dtype]
