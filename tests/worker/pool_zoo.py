"""Libraries that keep threads or processes: a cell uses each, then two ranks use the same object.

    python -m tests.worker.pool_zoo [--start-method fork] [--python PATH] [SPECIMEN ...]

The table says for each library and start method what the launch did:

* right: both ranks return what the kernel returned.
* rejected: the launch raised an error before the function started.
* raised: the function raised an error.
* named: a rank can never continue; the seconds from the function's start until a line named the wait, and that line.
* WRONG, SILENT, FROZEN: another value; no line within the limit; the kernel does not answer, or its next launch fails.

Libraries that are not installed are skipped. ``--python`` runs the kernels in another environment.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.kernels import Cell, Kernel, KernelTimeout

START_METHODS = ("auto", "fork", "forkserver", "spawn")
NAMED = "could end the wait"
LIMIT_S = 12.0
CELL_LIMIT_S = 120.0
BAD = ("WRONG", "SILENT", "FROZEN", "FAILED")


@dataclass(frozen=True)
class Specimen:
    """One library.

    Args:
        modules: modules that it needs, separated by blanks.
        cell: code that prepares the kernel and defines ``use()``, which returns a plain value.
        limit_s: seconds after which a launch without a line counts as silent.
    """

    modules: str
    cell: str
    limit_s: float = LIMIT_S


SPECIMENS = {
    "ThreadPoolExecutor": Specimen(
        "",
        """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(4)
def use(): return list(pool.map(abs, range(-8, 0)))
""",
    ),
    "ProcessPoolExecutor": Specimen(
        "",
        """
from concurrent.futures import ProcessPoolExecutor
pool = ProcessPoolExecutor(2)
def use(): return list(pool.map(abs, range(-8, 0)))
""",
    ),
    "multiprocessing.Pool": Specimen(
        "",
        """
import multiprocessing
pool = multiprocessing.Pool(2)
def use(): return pool.map(abs, range(-8, 0))
""",
    ),
    "multiprocessing.ThreadPool": Specimen(
        "",
        """
from multiprocessing.pool import ThreadPool
pool = ThreadPool(4)
def use(): return pool.map(abs, range(-8, 0))
""",
    ),
    "a thread that answers a queue": Specimen(
        "",
        """
import queue, threading
asked, answers = queue.Queue(), queue.Queue()
def answer():
    while True: answers.put(-asked.get())
threading.Thread(target=answer, daemon=True).start()
def use():
    asked.put(-3)
    return answers.get()
""",
    ),
    "an event loop in a thread": Specimen(
        "",
        """
import asyncio, threading
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
async def double(number): return number * 2
def use(): return asyncio.run_coroutine_threadsafe(double(4), loop).result()
""",
    ),
    "joblib, processes": Specimen(
        "joblib",
        """
import joblib
def use(): return joblib.Parallel(2)(joblib.delayed(abs)(-number) for number in range(8))
""",
    ),
    "joblib, threads": Specimen(
        "joblib",
        """
import joblib
pool = joblib.Parallel(2, backend="threading")
pool.__enter__()
def use(): return pool(joblib.delayed(abs)(-number) for number in range(8))
""",
    ),
    "torch, threads of an operation": Specimen(
        "torch",
        """
import torch
torch.set_num_threads(4)
values = torch.ones(1 << 20)
def use(): return float((values * 2).sum() + (torch.ones(512, 512) @ torch.ones(512, 512)).sum())
""",
    ),
    "torch, tasks of TorchScript": Specimen(
        "torch",
        """
import torch, warnings
warnings.simplefilter("ignore")
torch.set_num_interop_threads(4)
@torch.jit.script
def double(x):
    return x * 2
@torch.jit.script
def both(x):
    waiting = torch.jit.fork(double, x)
    return torch.jit.wait(waiting) + double(x)
def use(): return float(both(torch.ones(4)).sum())
""",
    ),
    "torch, threads of backward": Specimen(
        "torch",
        """
import torch
@torch.no_grad()
def nothing(): pass
def use():
    weights = torch.ones(8, requires_grad=True)
    (torch.utils.checkpoint.checkpoint(torch.exp, weights, use_reentrant=True)).sum().backward()
    return float(weights.grad.sum())
""",
    ),
    "NumPy, threads of BLAS": Specimen(
        "numpy",
        """
import numpy as np
def use(): return float((np.ones((700, 700)) @ np.ones((700, 700))).sum())
""",
    ),
    "scikit-learn, OpenMP": Specimen(
        "sklearn",
        """
import numpy as np
from sklearn.ensemble import HistGradientBoostingRegressor
x = np.arange(4000.0).reshape(-1, 1)
def use(): return float(HistGradientBoostingRegressor(max_iter=5).fit(x, x[:, 0]).predict(x[:1])[0])
""",
    ),
    "pyarrow": Specimen(
        "pyarrow",
        """
import io, pyarrow as pa, pyarrow.csv, pyarrow.dataset, pyarrow.parquet, tempfile
pa.set_cpu_count(4)
folder = tempfile.mkdtemp()
table = pa.table({f"c{n}": list(range(5000)) for n in range(8)})
pa.parquet.write_table(table, folder + "/a.parquet", row_group_size=500)
text = b"a,b\\n" + b"1,2\\n" * 200_000
def use():
    rows = pa.csv.read_csv(io.BytesIO(text), read_options=pa.csv.ReadOptions(block_size=10_000)).num_rows
    data = pa.dataset.dataset(folder)
    groups = pa.parquet.read_table(folder + "/a.parquet").group_by("c0").aggregate([("c1", "sum")]).num_rows
    return rows, data.to_table().num_rows, data.count_rows(), groups
""",
    ),
    "tokenizers": Specimen(
        "tokenizers",
        """
import tokenizers
words = {word: number for number, word in enumerate(["[UNK]", "a", "b", "c"])}
tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
def use(): return [sum(each.ids) for each in tokenizer.encode_batch(["a b c d " * 50] * 200)][:2]
""",
    ),
    "datasets, processes": Specimen(
        "datasets",
        """
import datasets
datasets.disable_progress_bars()
data = datasets.Dataset.from_dict({"x": list(range(100))})
def double(row): return {"y": row["x"] * 2}
def use(): return sum(data.map(double, num_proc=2, load_from_cache_file=False)["y"])
""",
    ),
    "TensorBoard": Specimen(
        "tensorboard",
        """
import tempfile
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter(tempfile.mkdtemp())
def use():
    for step in range(200): writer.add_scalar("loss", 0.5, step)
    writer.flush()
    return "written"
""",
    ),
    "rich": Specimen(
        "rich",
        """
import rich.progress
bars = rich.progress.Progress()
bars.start()
bar = bars.add_task("work", total=1000)
def use():
    for _ in range(50): bars.advance(bar)
    bars.refresh()
    return "shown"
""",
    ),
    "fsspec": Specimen(
        "fsspec aiohttp",
        """
import fsspec.asyn, http.server, threading, urllib.request
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "5"); self.end_headers(); self.wfile.write(b"hello")
    def log_message(self, *args): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
threading.Thread(target=server.serve_forever, daemon=True).start()
address = f"http://127.0.0.1:{server.server_port}/a"
def use(): return fsspec.filesystem("http").cat(address)
""",
    ),
    "gRPC": Specimen(
        "grpc",
        """
import grpc
from concurrent.futures import ThreadPoolExecutor
def echo(request, context): return request
handler = grpc.method_handlers_generic_handler("zoo", {"echo": grpc.unary_unary_rpc_method_handler(echo)})
server = grpc.server(ThreadPoolExecutor(2))
server.add_generic_rpc_handlers((handler,))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
channel = grpc.insecure_channel(f"127.0.0.1:{port}")
def use(): return channel.unary_unary("/zoo/echo")(b"hello", timeout=5)
""",
    ),
    "Ray": Specimen(
        "ray",
        """
import ray
ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error",
         _system_config={"worker_niceness": 0})  # else its workers wait for all else that the machine does
@ray.remote(num_cpus=0)
def double(number): return number * 2
def use():
    if not ray.is_initialized(): ray.init(log_to_driver=False, logging_level="error")
    return ray.get(double.remote(4), timeout=60)
""",
        limit_s=60,  # each rank connects to the cluster, which starts a process for its task
    ),
    "numba": Specimen(
        "numba",
        """
import numba, numpy as np
@numba.njit(parallel=True)
def total(values):
    result = 0.0
    for i in numba.prange(len(values)): result += values[i]
    return result
def use(): return float(total(np.ones(10_000)))
""",
        limit_s=60,  # each fresh process compiles the function
    ),
    "numba, OpenMP": Specimen(
        "numba",
        """
import numba, numpy as np
numba.config.THREADING_LAYER = "omp"
@numba.njit(parallel=True)
def total(values):
    result = 0.0
    for i in numba.prange(len(values)): result += values[i]
    return result
def use(): return float(total(np.ones(10_000)))
""",
        limit_s=60,  # each fresh process compiles the function
    ),
    "onnxruntime": Specimen(
        "onnx onnxruntime",
        """
import numpy as np, onnx, onnxruntime
from onnx import helper, TensorProto
weights = helper.make_tensor("w", TensorProto.FLOAT, [512, 512], np.ones(512 * 512))
graph = helper.make_graph(
    [helper.make_node("MatMul", ["x", "w"], ["y"])], "g",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, [512, 512])],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, [512, 512])], [weights],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 8
session = onnxruntime.InferenceSession(model.SerializeToString(), options)
x = np.ones((512, 512), np.float32)
def use(): return float(session.run(None, {"x": x})[0].sum())
""",
    ),
    "polars": Specimen(
        "polars",
        """
import polars
frame = polars.DataFrame({"a": list(range(1000)), "b": [n % 7 for n in range(1000)]})
def use(): return frame.lazy().group_by("b").agg(polars.col("a").sum()).sort("b").collect()["a"].to_list()
""",
    ),
    "duckdb": Specimen(
        "duckdb",
        """
import duckdb
connection = duckdb.connect()
connection.execute("set threads = 4")
connection.execute("create table t as select range as a, range % 7 as b from range(500000)")
def use(): return connection.execute("select b, sum(a)::bigint from t group by b order by b").fetchall()
""",
    ),
    "OpenCV": Specimen(
        "cv2",
        """
import cv2, numpy as np
cv2.setNumThreads(4)
image = np.full((2000, 2000, 3), 7, np.uint8)
def use(): return int(cv2.GaussianBlur(cv2.resize(image, (3000, 3000)), (9, 9), 2).sum())
""",
    ),
    "faiss": Specimen(
        "faiss",
        """
import faiss, numpy as np
index = faiss.IndexFlatL2(32)
index.add(np.eye(1000, 32, dtype=np.float32))
def use(): return float(index.search(np.ones((500, 32), np.float32), 3)[0].sum())
""",
    ),
    "LightGBM": Specimen(
        "lightgbm",
        """
import lightgbm, numpy as np
x = np.arange(4000.0).reshape(-1, 1)
booster = lightgbm.train({"verbose": -1, "num_threads": 4}, lightgbm.Dataset(x, x[:, 0]), 5)
def use(): return float(booster.predict(x).sum())
""",
    ),
    "LightGBM, training": Specimen(
        "lightgbm",
        """
import lightgbm, numpy as np
x = np.arange(4000.0).reshape(-1, 1)
def use():
    booster = lightgbm.train({"verbose": -1, "num_threads": 4}, lightgbm.Dataset(x, x[:, 0]), 5)
    return float(booster.predict(x).sum())
""",
    ),
    "XGBoost": Specimen(
        "xgboost",
        """
import numpy as np, xgboost
x = np.arange(4000.0).reshape(-1, 1)
def use():
    booster = xgboost.train({"nthread": 4}, xgboost.DMatrix(x, x[:, 0]), 5)
    return float(booster.predict(xgboost.DMatrix(x)).sum())
""",
    ),
    "APScheduler": Specimen(
        "apscheduler",
        """
import datetime, threading
from apscheduler.schedulers.background import BackgroundScheduler
scheduler = BackgroundScheduler()
scheduler.start()
def use():
    done = threading.Event()
    scheduler.add_job(done.set, "date")
    done.wait()
    return "done"
""",
    ),
    "numexpr": Specimen(
        "numexpr",
        """
import numexpr, numpy as np
numexpr.set_num_threads(4)
a = np.ones(1_000_000)
def use(): return float(numexpr.evaluate("2 * a + 1").sum())
""",
    ),
    "blosc2": Specimen(
        "blosc2",
        """
import blosc2, numpy as np
blosc2.set_nthreads(4)
packed = blosc2.compress2(np.arange(2_000_000))
def use(): return int(np.frombuffer(blosc2.decompress2(packed), np.int64).sum())
""",
    ),
    "TensorFlow": Specimen(
        "tensorflow",
        """
import tensorflow as tf
def use(): return float(tf.reduce_sum(tf.matmul(tf.ones((512, 512)), tf.ones((512, 512)))))
""",
    ),
    "JAX": Specimen(
        "jax",
        """
import jax
def use(): return float((jax.numpy.ones((512, 512)) @ jax.numpy.ones((512, 512))).sum())
""",
    ),
}

PREPARE = """
import nblaunch
def enter():
    print("entered", flush=True)
    return use()
def launch(start_method):
    return nblaunch.notebook_launcher(
        enter, num_processes=2, start_method=start_method, dashboard="text", return_all=True, backend="cpu"
    )
expected = use()
"""
"""With ``backend="cpu"``, so that a machine with a GPU forks as well."""
NEXT = "nblaunch.notebook_launcher(len, ('ab',), num_processes=2, dashboard='none', return_all=True)"


def outcome(kernel: Kernel, start_method: str, limit_s: float) -> str:
    """Launch ``use`` once; return the outcome in one line."""
    cell = kernel.submit(f"value = launch({start_method!r})")
    cell.wait_for(lambda cell: cell.is_done or "entered" in text_of(cell), CELL_LIMIT_S)
    began_s = time.monotonic()

    def is_over(cell: Cell) -> bool:
        return cell.is_done or NAMED in text_of(cell) or time.monotonic() > began_s + limit_s

    cell.wait_for(is_over, CELL_LIMIT_S)
    took_s = time.monotonic() - began_s
    if not cell.is_done:
        kernel.interrupt()
        cell.wait()
    lines = [line.strip() for line in text_of(cell).splitlines() if NAMED in line]
    if lines:
        return f"named, {took_s:.1f} s: {lines[0]}"
    if took_s > limit_s:
        return f"SILENT for {took_s:.0f} s"
    if cell.error is not None:
        kind = "rejected" if cell.error.name in ("LaunchError", "PayloadError") else "raised"
        return f"{kind}: {cell.error.name}: {cell.error.value.strip().splitlines()[0]}"
    if not kernel.run("value == [expected] * 2").value:
        return f"WRONG: {kernel.run('value').result}"
    return "right"


def text_of(cell: Cell) -> str:
    return cell.shown + cell.stderr


def is_installed(modules: str, python: str) -> bool:
    """Return whether an environment has the modules; importing them here would take longer than a launch."""
    find = "import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, sys.argv[1:])))"
    return subprocess.run([python, "-c", find, *modules.split()]).returncode == 0


def try_all(
    name: str, start_methods: Sequence[str], python: str = sys.executable
) -> Iterator[tuple[str, str]]:
    """Launch a specimen in one kernel under each start method; yield start method and outcome."""
    with tempfile.TemporaryDirectory() as folder:
        kernel = Kernel.start(cwd=folder, python=python, is_new=python != sys.executable)
        try:
            kernel.run(SPECIMENS[name].cell + PREPARE, timeout_s=CELL_LIMIT_S)
            for start_method in start_methods:
                text = outcome(kernel, start_method, SPECIMENS[name].limit_s)
                yield start_method, text + afterwards(kernel)
        except KernelTimeout:
            yield "", "FROZEN"
        except AssertionError as error:
            yield "", f"FAILED: {error}"
        finally:
            kernel.kill()
            kernel.close(check=False)


def afterwards(kernel: Kernel) -> str:
    """Return what no longer works in the kernel after a launch; empty if all does."""
    text = ""
    if not kernel.run("use() == expected", timeout_s=CELL_LIMIT_S).value:
        text += "; WRONG in the kernel afterwards"
    if kernel.run(NEXT, timeout_s=CELL_LIMIT_S).value != [2, 2]:
        text += "; the next launch is WRONG"
    return text


def main() -> None:
    """Print the table; end with status 1 if an outcome is bad."""
    parser = argparse.ArgumentParser()
    parser.add_argument("specimens", nargs="*", default=list(SPECIMENS), metavar="SPECIMEN")
    parser.add_argument("--start-method", action="append", choices=START_METHODS)
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args()
    num_bad = 0
    for name in options.specimens:
        modules = SPECIMENS[name].modules
        if modules and not is_installed(modules, options.python):
            continue
        for start_method, text in try_all(name, options.start_method or START_METHODS, options.python):
            num_bad += any(word in text for word in BAD)
            print(f"{name} | {start_method} | {text}", flush=True)
    sys.exit(num_bad > 0)


if __name__ == "__main__":
    main()
