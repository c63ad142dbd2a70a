"""``nblaunch estimate-memory`` compared with real training and with published figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nblaunch import cli
from nblaunch.cli import estimate
from nblaunch.cli.estimate import JobSettings, ModelSize, training_need
from tests.cli import measured_training

MODELS = """
import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self, width=8, num_blocks=3):
        super().__init__()
        self.embed = nn.Embedding(100, width)
        blocks = (nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(num_blocks))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, 100, bias=False)
        self.head.weight = self.embed.weight

def frozen():
    model = Tied()
    model.blocks.requires_grad_(False)
    return model

def huge():
    return nn.Linear(10**6, 10**6)          # 4 TB, if it were made

def moody():
    raise OSError("no weights today\\nand not tomorrow")

number = 7
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "models", raising=False)
    return tmp_path


def estimated(capfd: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli.main(["estimate-memory", "--json", *words]) == 0
    return dict(json.loads(capfd.readouterr().out))


@pytest.mark.thorough
def test_estimate_agrees_with_measured_training() -> None:
    """With Adam, momentum and plain SGD, fp32 and bf16, alone, under DDP and under FSDP2, it is at most 10 % off."""
    ended = subprocess.run(
        [sys.executable, str(Path(measured_training.__file__))],
        capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": "."},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    size = estimate.measure(measured_training.Blocks())
    assert (size.parameters, size.block) == (measured_training.NUM_PARAMETERS, measured_training.WIDTH**2)
    measured = json.loads(ended.stdout)
    assert [tuple(one["case"]) for one in measured] == list(measured_training.CASES)
    for one in measured:
        num_processes, precision, strategy, optimizer = one["case"]
        setting = JobSettings(num_processes, precision, estimate.OPTIMIZER_STATES[optimizer], device="cpu")
        need = training_need(strategy, size, setting)
        # Gathered blocks are part of the peak for a moment only. A measurement may come before the last block is freed,
        # or after it.
        lasting = need.device - (need.buffers if strategy == "fsdp2" else 0)
        for rank in one["ranks"]:
            assert rank["step"] > 0.9 * lasting / size.parameters, one
            assert max(rank.values()) < 1.1 * need.device / size.parameters, one


@pytest.mark.parametrize(
    ("strategy", "num_devices", "expected"),
    # Rajbhandari et al. (2020), figure 1: 7.5 billion parameters, Adam, 64 devices; without buffers.
    [("zero1", 64, 31.4), ("zero2", 64, 16.6), ("zero3", 64, 1.9)],
)
def test_estimates_match_the_zero_paper(strategy: str, num_devices: int, expected: float) -> None:
    size = ModelSize(parameters=7_500_000_000, trainable=7_500_000_000)
    need = training_need(strategy, size, JobSettings(num_devices, "bf16", 2))
    assert (need.parameters + need.gradients + need.optimizer) / 1e9 == pytest.approx(expected, abs=0.06)


def test_a_module_is_counted_without_its_weights(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = estimated(capfd, "models:Tied")["model"]
    block = 8 * 8 + 8 + 2 * 8
    assert model == {
        "parameters": 100 * 8 + 3 * block,  # counts tied weights once
        "trainable": 100 * 8 + 3 * block,
        "buffers": 3 * (8 + 8 + 1),
        "block": block,
        "root": 100 * 8,
    }
    assert (
        estimated(capfd, "models:Tied", "--set", "width=16", "--set", "num_blocks=1")["model"]["root"] == 1600
    )
    assert estimated(capfd, "models:frozen")["model"]["trainable"] == 800
    assert estimated(capfd, "models:huge")["model"]["parameters"] == 10**12 + 10**6


def test_a_folder_of_transformers_is_a_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=500, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64,
        architectures=["BertForSequenceClassification"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    bert = BertForSequenceClassification(config)
    model = estimated(capfd, str(tmp_path))["model"]
    assert model["parameters"] == bert.num_parameters()
    # Its units are the modules that it names itself (_no_split_modules): the embeddings and three layers.
    embeddings, layers = (
        sum(p.numel() for p in part.parameters()) for part in (bert.bert.embeddings, bert.bert.encoder)
    )
    assert model["block"] == embeddings
    assert model["root"] == bert.num_parameters() - embeddings - layers


def test_a_search_on_the_hub_is_announced(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    def found(name: str, **_: object) -> object:
        assert f"looking for {name}" in capfd.readouterr().err
        return transformers.BertConfig(
            vocab_size=500, hidden_size=32, num_hidden_layers=1, num_attention_heads=2
        )

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", found)
    assert estimated(capfd, "team/model")["model"]["parameters"] > 500 * 32


OWN_CODE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel

class OwnConfig(PretrainedConfig):
    model_type = "of_its_own"

class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.layer = torch.nn.Linear(30, 10)
        self.post_init()
"""


def test_model_code_runs_only_if_trusted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "own_code.py").write_text(OWN_CODE)
    kinds = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"}
    (folder / "config.json").write_text(
        json.dumps({"model_type": "of_its_own", "architectures": ["BertModel"], "auto_map": kinds})
    )
    words = [str(folder), "--library_name", "transformers", "--trust_remote_code"]
    assert estimated(capfd, *words)["model"]["parameters"] == 310
    assert cli.main(["estimate-memory", str(folder)]) == 2
    assert "--trust_remote_code" in capfd.readouterr().err


def test_timm_creates_its_models(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    Path(folder, "timm.py").write_text(
        "import torch\ndef create_model(model_name, width=1): return torch.nn.Linear(len(model_name), width)\n"
    )
    words = ["resnet", "--library_name", "timm", "--trust_remote_code", "--set", "width=2"]
    assert estimated(capfd, *words)["model"]["parameters"] == 14
    monkeypatch.delitem(sys.modules, "timm")


def test_counts_have_several_formats(capfd: pytest.CaptureFixture[str]) -> None:
    for text in ("7e9", "7B", "7b", "7_000_000_000", "7000M", "7 B", "7.0e9"):
        assert estimated(capfd, "--parameters", text)["model"]["parameters"] == 7_000_000_000
    lora = estimated(capfd, "--parameters", "7B", "--trainable", "4M", "--strategies", "ddp")
    row = lora["rows"][0]
    assert (row["parameters_bytes"], row["gradients_bytes"]) == (28 * 10**9, 16 * 10**6)


def test_cpu_optimizers_need_no_gpu_temporaries(capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--parameters", "1M", "--strategies", "ddp", "--mixed_precision", "no", "--num_devices", "4")
    on_gpus, on_cores = (estimated(capfd, *words, "--device", device)["rows"][0] for device in ("gpu", "cpu"))
    assert (on_gpus["device_bytes"], on_cores["device_bytes"]) == (24 * 10**6, 20 * 10**6)


def test_the_table_has_a_row_for_each_strategy_and_precision(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["estimate-memory", "--parameters", "7B", "--strategies", "ddp", "fsdp2"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("7,000,000,000 parameters (all trained); 8 devices (gpu); adam")
    rows = [line.split()[:2] for line in lines if line.startswith(("ddp", "fsdp2"))]
    assert rows == [["ddp", "no"], ["fsdp2", "no"], ["ddp", "bf16"], ["fsdp2", "bf16"]]


def test_every_column_is_explained(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["estimate-memory", "--parameters", "7B"]) == 0
    lines = capfd.readouterr().out.splitlines()
    (header,) = (line for line in lines if line.startswith("training"))
    columns = header.removeprefix("training  mixed precision").split()
    assert columns == [line.split()[0] for line in lines[-len(columns) :]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give either a model"),
        (["models:Tied", "--parameters", "7B"], "give either"),
        (["--parameters", "seven"], "'seven' is not a number"),
        (["--parameters", "0"], "'0' is not a number"),
        (["--parameters", "1e400"], "'1e400' is not a number"),
        (["--parameters", "_"], "'_' is not a number"),
        (["--parameters", "1__0"], "'1__0' is not a number"),
        (["--parameters", "7B", "--trainable", "__M"], "'__M' is not a number"),
        (["--parameters", "7B", "--trainable", "8B"], "more than the model's"),
        (["--parameters", "7B", "--num_devices", "0"], "--num_devices 0"),
        (["models:Tied", "--set", "width"], "'width' is not of the form"),
        (["models:Tied", "--set", "depth=2"], "depth"),
        (["models:Missing"], "models has no 'Missing'"),
        (["nowhere:Model"], "no module named 'nowhere'"),
        (["models:number"], "of type int"),
        (["models:moody"], "OSError: no weights today. "),
        (["models.py"], "models:build_model"),
        (["program:Model"], "SystemExit: 7"),
    ],
)
def test_wrong_use_is_one_line(
    folder: Path, words: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path(folder, "program.py").write_text("raise SystemExit(7)\n")
    assert cli.main(["estimate-memory", *words]) == 2
    shown = capfd.readouterr()
    assert not shown.out
    assert message in shown.err
    assert shown.err.count("\n") == 1
