"""Results and observation of a job on nodes are the same as on one machine."""

from __future__ import annotations

from tests.kernels import Kernel


def test_results_weights_logs_and_metrics_of_all_ranks(kept: Kernel) -> None:
    kept.run("""
torch.manual_seed(0)
model = nn.Linear(4, 2)
before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
here = (os.getpid(), torch.initial_seed())

def train(model):
    accelerator = Accelerator()
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        accelerator.backward(wrapped(torch.ones(2, 4) * (1 + rank())).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": 1.0}, step=step)
    print(f"rank {rank()} is done")
    gathered = accelerator.gather_for_metrics([rank()], use_gather_object=True)
    return {"rank": rank(), "weights": [p.detach().tolist() for p in model.parameters()],
            "place": [os.environ[n] for n in ("LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")],
            "seed": torch.initial_seed(), "gathered": gathered, "parent": os.getppid()}
""")
    cell = kept.run("values = launch(train, model, return_all=True); job = nblaunch.last_job()")
    assert kept.run("[value['rank'] for value in values]").value == [0, 1, 2, 3]
    assert kept.run("[value['place'] for value in values]").value == [
        [str(local), str(node), "4", "2"] for node in range(2) for local in range(2)
    ]
    assert kept.run("[value['gathered'] for value in values]").value == [[0, 1, 2, 3]] * 4
    assert kept.run(
        "all([p.tolist() for p in model.parameters()] == value['weights'] for value in values)"
    ).value
    assert kept.run("any((model.state_dict()[n] != before[n]).any() for n in before)").value
    assert kept.run("{value['seed'] for value in values} == {here[1]}").value
    assert kept.run("len({value['parent'] for value in values})").value == 2, "each node forks its ranks"
    assert cell.shown.count("copied trained weights into args[0]") == 1
    for number in range(4):
        assert f"[{number}] rank {number} is done" in cell.stdout
        assert kept.run(f"job.logs({number})").value.strip().endswith(f"rank {number} is done")
    assert kept.run("[row['step'] for row in job.metrics if row['rank'] == 0]").value == [0, 1, 2]
    assert "ranks 0 and 1" in cell.shown
    assert kept.run("'ray' in sys.modules").value is False


def test_ranks_share_their_nodes_torch(kept: Kernel) -> None:
    kept.run("def has_torch():\n    import sys\n    return 'torch.distributed' in sys.modules")
    assert kept.run("launch(has_torch, return_all=True)").value == [True] * 4


def test_shards_of_all_nodes_become_whole_weights(kept: Kernel) -> None:
    kept.run("""
model = nn.Linear(8, 8, bias=False)

def train(model):
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group("gloo")
    fully_shard(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().fill_(float(rank()))
""")
    kept.run("launch(train, model)")
    assert kept.run("model.weight[:, 0].tolist()").value == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_background_job_leaves_the_kernel_free(kept: Kernel) -> None:
    kept.run("""
def train(gate):
    print("begun", flush=True)
    while not os.path.exists(gate):
        time.sleep(0.01)
    return rank()

import tempfile
gate = tempfile.mkdtemp() + "/open"
job = launch(train, gate, background=True, return_all=True)
""")
    assert kept.run("job.is_running").value
    kept.run("while len(job.pids) < 4 or not all('begun' in job.logs(r) for r in range(4)): time.sleep(0.05)")
    assert "in train" in kept.run("job.stacks()").value
    assert kept.run("open(gate, 'w').close(); job.result(200)").value == [0, 1, 2, 3]


def test_a_detached_job_outlives_its_kernel(notebook: Kernel, tmp_path: str) -> None:
    gate = f"{tmp_path}/open"
    notebook.run(f"""
model = nn.Linear(2, 2)

def train(model):
    print("begun", flush=True)
    while not os.path.exists({gate!r}):
        time.sleep(0.01)
    with torch.no_grad():
        model.weight.fill_(3.0)
    return rank()

job = launch(train, model, background=True, detach=True, return_all=True)
job_id = job.id
""")
    job_id = notebook.run("job_id").value
    with Kernel.start(env={"NBLAUNCH_LOG_DIR": f"{tmp_path}/logs"}) as other:
        other.run("import nblaunch, torch")
        notebook.kill()
        other.run(f"job = nblaunch.attach({job_id!r}); open({gate!r}, 'w').close()")
        assert other.run("job.result(200)").value == [0, 1, 2, 3]
        assert "begun" in other.run("job.logs(3)").value
        other.run("model = torch.nn.Linear(2, 2); job.load_weights(model)")
        assert other.run("model.weight.tolist()").value == [[3.0, 3.0], [3.0, 3.0]]


def test_settings_that_the_engine_cannot_honour_are_rejected(notebook: Kernel) -> None:
    for settings, text in (
        ("node_rank=1", "node_rank=1 can't be combined with engine='processes'"),
        ("rdzv_backend='c10d', rdzv_endpoint='a:1'", "rdzv_backend='c10d' can't be combined with engine"),
        ("post_mortem=True", "post_mortem=True can't be combined with engine='processes'"),
        ("hosts=['a']", "hosts=('a',) is for engine='ssh'"),
        ("num_processes=3", "must be a multiple of 2, because num_nodes=2"),
    ):
        error = notebook.run(f"launch(rank, **dict({settings}))", raises="ValueError").raised
        assert text in error.value
