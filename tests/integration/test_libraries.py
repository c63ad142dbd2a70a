"""Libraries built on Accelerate, in two processes: with Accelerate, and with nblaunch in its place.

Each trains a tiny model for a few steps. Both report the same losses, to every shown digit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.kernels import Kernel
from tests.profiles import missing
from tests.thorough import thorough

pytestmark = [pytest.mark.slow]

ROOT = Path(__file__).parents[2]
FASTAI = Path(sys.prefix) / "fastai"  # `make setup` installs it there, from fastai.txt
PATIENCE_S = 240.0  # importing the libraries takes seconds, and much longer while other tests run

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore",
    "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
}  # fmt: skip

# The kernels set these variables themselves, before the imports that read them, so that they can be forked.
SETTINGS = f"""
import os, warnings
os.environ.update({ENVIRONMENT!r})
warnings.simplefilter("ignore")
"""

IN_PLACE = "from tests.tools import resolving; resolving.install()"

IMPORTS = """
import tempfile
import torch
import transformers, datasets, trl, peft, diffusers, sentence_transformers
import accelerate
from nblaunch import notebook_launcher
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import SFTConfig, SFTTrainer, DPOConfig, DPOTrainer
transformers.utils.logging.set_verbosity_error()
datasets.disable_progress_bars()

WORDS = ["<unk>", "<pad>", "<s>", "</s>"] + [f"w{n}" for n in range(40)]

def words():
    known = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    known.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=known, unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>")

def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=48, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=1, bos_token_id=2, eos_token_id=3))

def bert(kind="BertModel", **more):
    torch.manual_seed(0)
    return getattr(transformers, kind)(transformers.BertConfig(
        vocab_size=48, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **more))

def settings(kind=transformers.TrainingArguments, **more):
    common = dict(
        num_train_epochs=1, per_device_train_batch_size=2, learning_rate=1e-2, use_cpu=True, bf16=False, seed=3,
        report_to=[], disable_tqdm=True, logging_steps=1, save_strategy="no")
    return kind(tempfile.mkdtemp(), **{**common, **more})

def fitted(trainer):
    trainer.train()
    maker = type(trainer.accelerator).__module__.partition(".")[0]
    losses = [round(row["loss"], 5) for row in trainer.state.log_history if "loss" in row]
    return maker, trainer.accelerator.num_processes, losses

def sharded(arguments):
    # Has Accelerate shard as on GPUs, where it would replicate on CPUs; nblaunch shards on both.
    if arguments.fsdp and arguments.bf16 and accelerate.PartialState.__module__.startswith("accelerate."):
        assert arguments.device.type == "cpu"  # the state is there from here on
        accelerate.PartialState()._shared_state["distributed_type"] = accelerate.DistributedType.MULTI_XPU
    return arguments

SENTENCES = datasets.Dataset.from_dict({"text": [" ".join(f"w{n * k % 40}" for k in range(1, 7)) for n in range(12)]})
"""

TRAINER = """
def train():
    rows = [{"input_ids": [4 + (n * k) % 40 for k in range(3 + n % 5)], "labels": n % 2} for n in range(22)]
    arguments = sharded(settings(gradient_accumulation_steps=2, STRATEGY))
    trainer = transformers.Trainer(
        bert("BertForSequenceClassification"), arguments, train_dataset=rows,
        eval_dataset=rows[:13], processing_class=words())
    return *fitted(trainer), round(trainer.evaluate()["eval_loss"], 5)
"""

PREDICTIONS = """
class Same(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Linear(1, 1)
    def forward(self, input_ids, labels=None):
        return torch.tensor(0.5), input_ids
def batch(rows):
    return {"input_ids": torch.tensor(rows), "labels": torch.tensor(rows)}
def train():
    seen = []
    for length in (101, 40, 7):
        for steps in (None, 2):
            trainer = transformers.Trainer(
                Same(), settings(per_device_eval_batch_size=8, eval_accumulation_steps=steps), data_collator=batch)
            found = trainer.predict(list(range(length)))
            rows = list(range(length))
            seen.append((found.predictions.tolist() == rows, found.label_ids.tolist() == rows))
    return type(trainer.accelerator).__module__.partition(".")[0], trainer.accelerator.num_processes, seen
"""

SFT = """
def train():
    trainer = SFTTrainer(llama(), args=settings(SFTConfig), train_dataset=SENTENCES, processing_class=words(), PEFT)
    return fitted(trainer)
"""

DPO = """
def train():
    pairs = datasets.Dataset.from_dict({
        "prompt": [f"w{n} w{n + 1}" for n in range(8)],
        "chosen": [f"w{n + 2} w{n + 3}" for n in range(8)], "rejected": [f"w{n + 5} w{n + 9}" for n in range(8)]})
    trainer = DPOTrainer(
        llama(), ref_model=llama(), args=settings(DPOConfig), train_dataset=pairs, processing_class=words())
    return fitted(trainer)
"""

SENTENCE_TRANSFORMERS = """
from sentence_transformers import (
    SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments, losses, models as parts)
def train():
    folder = tempfile.mkdtemp()
    words().save_pretrained(folder)
    bert().save_pretrained(folder)
    encoder = parts.Transformer(folder, max_seq_length=16)
    model = SentenceTransformer(modules=[encoder, parts.Pooling(16)], device="cpu")
    pairs = datasets.Dataset.from_dict({
        "anchor": [f"w{n} w{n + 1}" for n in range(12)], "positive": [f"w{n + 2} w{n + 3}" for n in range(12)]})
    trainer = SentenceTransformerTrainer(
        model, settings(SentenceTransformerTrainingArguments), train_dataset=pairs,
        loss=losses.MultipleNegativesRankingLoss(model))
    return fitted(trainer)
"""

DIFFUSERS = """
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from torch.utils.data import DataLoader
def train():
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 8), norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, 2, 20)
    generator = torch.Generator().manual_seed(1)
    images = [torch.randn(1, 8, 8, generator=generator) for _ in range(12)]
    loader = DataLoader(images, batch_size=2)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    averaged = EMAModel(accelerator.unwrap_model(model).parameters())
    noising, losses = DDPMScheduler(num_train_timesteps=10), []
    for clean in loader:
        with accelerator.accumulate(model):
            noise = torch.randn(clean.shape, generator=generator)
            times = torch.randint(0, 10, (len(clean),), generator=generator)
            predicted = model(noising.add_noise(clean, noise, times), times).sample
            loss = torch.nn.functional.mse_loss(predicted, noise)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            averaged.step(model.parameters())
        losses.append(round(accelerator.gather(loss.detach()[None]).mean().item(), 5))
    losses.append(round(sum(value.abs().sum().item() for value in averaged.shadow_params), 3))
    return type(accelerator).__module__.partition(".")[0], accelerator.num_processes, losses
"""

PROGRAMS = {
    "Trainer": TRAINER.replace("STRATEGY", "num_train_epochs=2"),
    "Trainer by length": TRAINER.replace(
        "STRATEGY", "train_sampling_strategy='group_by_length', num_train_epochs=2"
    ),
    "Trainer with FSDP2": TRAINER.replace(
        "STRATEGY", "fsdp=True, fsdp_config={'version': 2, 'transformer_layer_cls_to_wrap': ['BertLayer']}"
    ),
    "Trainer with FSDP2 in bf16": TRAINER.replace(
        "STRATEGY",
        "bf16=True, fsdp=True, fsdp_config={'version': 2, 'transformer_layer_cls_to_wrap': ['BertLayer']}",
    ),
    "Trainer with DeepSpeed": TRAINER.replace(
        "STRATEGY",
        "deepspeed={'zero_optimization': {'stage': 2}, 'gradient_accumulation_steps': 'auto', "
        "'train_batch_size': 'auto', 'train_micro_batch_size_per_gpu': 'auto', 'gradient_clipping': 'auto'}",
    ),
    "SFT": SFT.replace("PEFT", ""),
    "SFT with LoRA": SFT.replace(
        "PEFT", "peft_config=peft.LoraConfig(r=4, target_modules=['q_proj', 'v_proj'], task_type='CAUSAL_LM')"
    ),
    "DPO": DPO,
    "sentence-transformers": SENTENCE_TRANSFORMERS,
    "diffusers": DIFFUSERS,
}

VARIATIONS = ("Trainer by length", "Trainer with FSDP2", "Trainer with FSDP2 in bf16", "SFT", "DPO")
"""Programs that differ from another one in a setting."""

LIGHTNING = """
import logging, tempfile
import torch
import pytorch_lightning as pl
from nblaunch import notebook_launcher
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
class Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.line, self.losses = torch.nn.Linear(4, 1), []
    def training_step(self, batch, index):
        loss = self.line(batch).square().mean()
        self.losses.append(loss.item())
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
def train():
    model = Line()
    rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tempfile.mkdtemp())
    trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=4))
    return trainer.world_size, trainer.global_rank, len(model.losses), model.losses[-1] < model.losses[0]
notebook_launcher(train, num_processes=2, return_all=True)
"""

# Without bars, which fastai shows only on rank 0. It always sends the order of the rows through a GPU.
FASTAI_LEARNER = """
import torch
from fastai.basics import *
from fastai.callback.schedule import fit_one_cycle
from fastai.distributed import *
from nblaunch import notebook_launcher
def train():
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    set_seed(3)
    inputs = torch.randn(22, 4)
    rows = [*zip(inputs, inputs.sum(1, keepdim=True))]
    loaders = DataLoaders.from_dsets(rows[:16], rows[16:], bs=2, device="cpu", num_workers=0, shuffle=True)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    learner = Learner(loaders, model, loss_func=MSELossFlat(), lr=0.05, metrics=mae)
    with learner.no_bar(), learner.no_logging(), learner.distrib_ctx(sync_bn=False, cpu=True):
        accelerator = learner.distributed_trainer.accelerator
        learner.fit_one_cycle(2)
    losses = [round(loss.item(), 5) for loss in learner.recorder.losses]
    validated = [[round(value, 5) for value in epoch] for epoch in learner.recorder.values]
    weights = round(sum(value.abs().sum().item() for value in learner.model.parameters()), 4)
    return type(accelerator).__module__.partition(".")[0], accelerator.num_processes, losses, validated, weights
notebook_launcher(train, num_processes=2, backend="cpu", return_all=True)
"""


class Sides(NamedTuple):
    """Start a kernel whose libraries use Accelerate, and one whose libraries use nblaunch."""

    accelerate: Kernel
    nblaunch: Kernel


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    logs = {"NBLAUNCH_LOG_DIR": str(tmp_path_factory.mktemp("logs"))}
    with Kernel.start(env=logs, cwd=ROOT) as theirs, Kernel.start(env=logs, cwd=ROOT) as ours:
        importing = [theirs.submit(SETTINGS + IMPORTS), ours.submit(f"{SETTINGS}{IN_PLACE}\n{IMPORTS}")]
        for cell in importing:
            assert cell.wait(PATIENCE_S).status == "ok", cell.describe()
        yield Sides(theirs, ours)


@pytest.mark.parametrize("name", [thorough(name) if name in VARIATIONS else name for name in PROGRAMS])
def test_losses_match_accelerate(sides: Sides, name: str) -> None:
    launch = f"{PROGRAMS[name]}\nnotebook_launcher(train, num_processes=2, backend='cpu', return_all=True)"
    results: list[list[Any]] = []
    for maker, kernel in sides._asdict().items():
        ranks = kernel.run(launch, timeout_s=PATIENCE_S).value
        assert [rank[:2] for rank in ranks] == [(maker, 2)] * 2
        results.append([rank[2:] for rank in ranks])
    assert len(results[0][0][0]) >= 2
    assert results[0] == results[1]


def test_every_row_is_predicted_once_and_in_order(sides: Sides) -> None:
    launch = f"{PREDICTIONS}\nnotebook_launcher(train, num_processes=2, backend='cpu', return_all=True)"
    ranks = sides.nblaunch.run(launch, timeout_s=PATIENCE_S).value
    assert ranks == [("nblaunch", 2, [(True, True)] * 6)] * 2


ROWS_IN_A_SCRIPT = f"""
{IN_PLACE}
import tempfile
import torch, transformers
def settings(**more):
    return transformers.TrainingArguments(
        tempfile.mkdtemp(), use_cpu=True, report_to=[], disable_tqdm=True, **more)
{PREDICTIONS}
assert train() == ("nblaunch", 2, [(True, True)] * 6)
"""


@pytest.mark.thorough
def test_launched_scripts_predict_every_row_once(tmp_path: Path) -> None:
    script = tmp_path / "predict.py"
    script.write_text(ROWS_IN_A_SCRIPT)
    command = [sys.executable, "-m", "nblaunch", "launch", "--cpu", "--num_processes", "2", str(script)]
    environment = {**os.environ, **ENVIRONMENT, "NBLAUNCH_LOG_DIR": str(tmp_path / "logs")}
    done = subprocess.run(
        command,
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_lightning_trainers_work(sides: Sides) -> None:
    assert sides.accelerate.run(LIGHTNING, timeout_s=PATIENCE_S).value == [(2, 0, 4, True), (2, 1, 4, True)]


@pytest.mark.thorough
def test_fastai_learners_work(tmp_path: Path) -> None:
    if not FASTAI.exists():
        missing(f"{FASTAI} is missing: `make setup` makes it")
    found = f"import sys\nsys.path.append({str(FASTAI)!r})\n"
    logs = {"NBLAUNCH_LOG_DIR": str(tmp_path)}
    results: list[list[Any]] = []
    with Kernel.start(env=logs, cwd=ROOT) as theirs, Kernel.start(env=logs, cwd=ROOT) as ours:
        cells = [
            theirs.submit(f"{found}{FASTAI_LEARNER}"),
            ours.submit(f"{found}{IN_PLACE}\n{FASTAI_LEARNER}"),
        ]
        for maker, cell in zip(Sides._fields, cells, strict=True):
            ranks = cell.wait(2 * PATIENCE_S).value
            assert [rank[:2] for rank in ranks] == [(maker, 2)] * 2
            results.append([rank[2:] for rank in ranks])
    losses, validated, _ = results[0][0]
    assert len(losses) == 8  # two epochs of 16 rows, with 2 rows per step and process
    assert [len(epoch) for epoch in validated] == [3, 3]
    assert results[0] == results[1]
