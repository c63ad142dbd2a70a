"""``nblaunch config``: asks questions; the answers become the defaults for later launches.

nblaunch config            ask questions and write the file
nblaunch config default    write the default answers, with the precision from --mixed_precision
nblaunch config update     rewrite a file with this version's setting names

Each answer is a line of input, typed or piped: the number or first word of a choice, or a value.

    Which devices should the job use?
      1) CPU (4 cores)
      2) GPUs
    [1]: _

Default answers depend on this machine's devices, which are counted without being initialised.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nblaunch import backends
from nblaunch.backends.base import Backend
from nblaunch.cli import UsageError
from nblaunch.config import files
from nblaunch.config.settings import GPU_VARIABLES, SETTINGS, ConfigError, Layer, convert, resolve
from nblaunch.spec import DEFAULT_PORTS

_ACTIONS = ("default", "update")


def set_up(parser: argparse.ArgumentParser) -> None:
    """Set up the command."""
    parser.description = (
        "Ask a few questions and save the answers as the defaults for `nblaunch launch`. Answers can also come from "
        "a pipe, one per line; an empty line selects the default."
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "action",
        nargs="?",
        choices=_ACTIONS,
        help="default: save the defaults for this machine without asking; update: rewrite an existing file to use "
        "the setting names of this version",
    )
    parser.add_argument(
        "--config_file", "--config-file", metavar="FILE", help="file to use instead of the default one"
    )
    parser.add_argument(
        "--mixed_precision",
        "--mixed-precision",
        metavar="NAME",
        help="with `default` only: no, fp16, bf16 or fp8",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the action and return the exit code."""
    file = arguments.config_file
    path = files.default_path() if file is None else Path(file).expanduser()
    precision = arguments.mixed_precision
    if precision is not None and arguments.action != "default":
        raise UsageError("--mixed_precision is for `nblaunch config default`, which asks no questions")
    try:
        if arguments.action == "update":
            return _update(path)
        return _write_default(path, precision) if arguments.action == "default" else _ask_and_write(path)
    except ConfigError as error:
        raise UsageError(str(error)) from None


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None
) -> Path | bool:
    """Write defaults of ``nblaunch launch`` for this machine, like ``nblaunch config default``.

    Args:
        mixed_precision: ``"no"``, ``"fp16"`` or ``"bf16"``.
        save_location: path of the file; None = the default file of ``nblaunch launch``.

    Returns:
        The path; False if the file already exists, in which case it remains unchanged.

    Raises:
        ValueError: the precision is unknown.
    """
    path = files.default_path() if save_location is None else Path(save_location).expanduser()
    if path.exists():
        print(f"{path}: already exists and will not be overwritten")
        return False
    _write_detected(path, mixed_precision, f"mixed_precision={mixed_precision!r}")
    return path


def _update(path: Path) -> int:
    """Rewrite a file with the same settings; replace names from older versions and from Accelerate."""
    layer = files.read(path)
    for note in layer.notes:
        print(note)
    return _write(path, layer.values)


def _write_default(path: Path, mixed_precision: str | None) -> int:
    if path.exists():
        raise UsageError(
            f"{path}: already exists and will not be overwritten; remove it, or choose another --config_file"
        )
    return _write_detected(path, mixed_precision, f"--mixed_precision {mixed_precision}")


def _write_detected(path: Path, mixed_precision: str | None, given: str) -> int:
    """Write the defaults for this machine.

    Args:
        path: file to write.
        mixed_precision: the precision to use instead of the default; None = the default.
        given: how the user wrote the precision.
    """
    values = dict(detected(Machine.here()))
    if mixed_precision is not None:
        values["mixed_precision"] = convert("mixed_precision", mixed_precision, given)
    return _write(path, values)


def _ask_and_write(path: Path) -> int:
    if path.exists():
        print(f"{path} already exists; the answers will replace its contents")
    return _write(path, ask_all(Asker(), Machine.here()))


def _write(path: Path, values: Mapping[str, Any]) -> int:
    resolve([Layer("the answers", values)])  # raises if no job can be launched with these settings
    files.write(path, values)
    print(f"written to {path}; `nblaunch launch script.py` uses it{_how(path)}")
    return 0


def _how(path: Path) -> str:
    return "" if path == files.default_path() else f" with --config_file {path}"


# --- the questions; which of them are asked depends on earlier answers -----------------------------------------------


Convert = Callable[[str], Any]
"""Converts typed text to a value; raises ValueError with the reason if the text is invalid."""


class Asker:
    """Asks questions on standard output and reads answers, one per line, from standard input.

    An empty line selects the default answer.
    The asker repeats a question after an invalid answer, and raises an error if the input ends before a valid answer.
    """

    def choose(self, question: str, labels: Sequence[str], default: int) -> int:
        """Ask for one of several choices; return its index.

        Choices are numbered from 1, unless their first words are numbers themselves.
        """
        names = [label.partition(" ")[0].rstrip(":").lower() for label in labels]
        if all(name.isdecimal() for name in names):
            numbers, listed = names, labels
        else:
            numbers = [str(number) for number in range(1, len(labels) + 1)]
            listed = [f"{number}) {label}" for number, label in zip(numbers, labels, strict=True)]

        def convert(text: str) -> int:
            for answers in (numbers, names):
                if text.lower() in answers:
                    return answers.index(text.lower())
            numbered = "" if numbers is names else f"a number from 1 to {len(labels)}, or "
            raise ValueError(f"must be {numbered}one of {', '.join(names)}")

        lines = "".join(f"  {line}\n" for line in listed)
        return int(self.enter(f"{question}\n{lines}", numbers[default], convert))

    def enter(self, question: str, default: str, convert: Convert) -> Any:
        """Ask for a typed value. An empty answer selects ``default``, or is invalid if there is no default."""
        problem = ""
        while True:
            end = f" [{default}]:" if default else "" if question.endswith("?") else ":"
            print(f"{question}{end} ", end="", flush=True)
            line = sys.stdin.readline()
            if not sys.stdin.isatty():
                print(line.strip())  # as a terminal would show it
            if not line:
                first = question.partition("\n")[0]
                raise UsageError(
                    f"the input ended before an answer to this question, so nothing was saved: {first}{problem}"
                )
            try:
                return convert(_filled(line.strip(), default))
            except ValueError as error:
                problem = f" ({line.strip()!r} {error})"
                print(f"  {line.strip()!r} {error}")


def _filled(text: str, default: str) -> str:
    if not text and not default:
        raise ValueError("must not be empty")
    return text or default


@dataclass(frozen=True)
class Machine:
    """The devices of a machine.

    Args:
        num_devices: name of a usable backend -> number of its devices.
        best: name of the backend that a launch chooses by default.
    """

    num_devices: Mapping[str, int]
    best: str

    @classmethod
    def here(cls) -> Machine:
        """Return the devices of this machine."""
        families = backends.discover()
        usable = {
            name: backend.device_count() for name, backend in families.items() if backend.affinity() > 0
        }
        return cls(usable, backends.choose("auto").name)

    def count(self, backend: str) -> int:
        """Return the number of a backend's devices; 1 if it has none, because the file may be for another machine."""
        return max(1, self.num_devices.get(backend, 1))


Answers = dict[str, Any]
Choices = Sequence[tuple[Any, str]]


@dataclass(frozen=True)
class Question:
    """One question.

    Args:
        setting: setting that the answer sets.
        text: the question.
        is_asked: returns whether to ask it, given the answers so far.
        default: the default answer, or a function of the answers so far and the machine.
        choices: (value, label) pairs, or a function that returns them; None = the setting converts the typed answer.
    """

    setting: str
    text: str
    is_asked: Callable[[Answers], bool]
    default: Any
    choices: Choices | Callable[[Answers, Machine], Choices] | None = None


def ask_all(asker: Asker, machine: Machine) -> Answers:
    """Ask all questions that apply and return the settings.

    Args:
        asker: asks the questions.
        machine: devices for the default answers.
    """
    answers: Answers = {}
    for question in QUESTIONS:
        if question.is_asked(answers):
            answers[question.setting] = _ask(question, asker, machine, answers)
    return {name: value for name, value in answers.items() if name in SETTINGS and value is not None}


def detected(machine: Machine) -> Answers:
    """Return the settings that result if the user accepts all defaults."""
    backend = machine.best
    return {
        "backend": backend,
        "num_processes": machine.count(backend),
        "mixed_precision": "no",
    }


def _ask(question: Question, asker: Asker, machine: Machine, answers: Answers) -> Any:
    default = question.default(answers, machine) if callable(question.default) else question.default
    choices = question.choices(answers, machine) if callable(question.choices) else question.choices
    if choices is not None:
        values = [value for value, _ in choices]
        if len(values) == 1:
            return values[0]
        index = values.index(default) if default in values else 0
        return values[asker.choose(question.text, [label for _, label in choices], index)]

    def read(text: str) -> Any:
        return _in_range(question.setting, SETTINGS[question.setting].converter.convert(text), answers)

    return asker.enter(question.text, "" if default is None else str(default), read)


def _in_range(setting: str, value: Any, answers: Answers) -> Any:
    """Return ``value`` if it is valid given the earlier answers; raise ValueError otherwise."""
    num_machines = _num_machines(answers)
    if setting == "num_machines" and _num_machines({setting: value}) < 2:
        raise ValueError("must be at least 2")
    if setting == "machine_rank" and value >= num_machines:
        raise ValueError(f"must be less than {num_machines}, because ranks are numbered from 0")
    if setting == "num_processes" and value % num_machines:
        raise ValueError(f"must be a multiple of {num_machines}, the number of machines")
    return value


def _num_machines(answers: Mapping[str, Any]) -> int:
    """Return the maximum number of machines."""
    return int(str(answers.get("num_machines", 1)).rpartition(":")[2])


def _has_several(answers: Answers) -> bool:
    return answers["where"] == "several"


def _is_parallel(answers: Answers) -> bool:
    return answers["num_processes"] > 1


def _is_fsdp(answers: Answers) -> bool:
    return answers.get("strategy") == "fsdp"


def _wraps_by(policy: str) -> Callable[[Answers], bool]:
    return lambda answers: answers.get("fsdp_auto_wrap_policy") == policy


def _has_own_deepspeed(answers: Answers) -> bool:
    return answers.get("strategy") == "deepspeed" and answers["has_file"] is False


def _family(answers: Answers) -> Backend:
    return backends.discover()[answers["backend"]]


def _has_own_memory(answers: Answers) -> bool:
    return _family(answers).device_type != "cpu"


def _from_stage(stage: int) -> Callable[[Answers], bool]:
    """Return a function that tests whether the ZeRO stage is at least ``stage`` and devices have their own memory."""
    return lambda answers: (
        _has_own_deepspeed(answers) and _has_own_memory(answers) and answers["zero_stage"] >= stage
    )


def _devices(answers: Answers, machine: Machine) -> Choices:
    titles = {
        name: f"{family.title} ({machine.num_devices[name]} on this machine)"
        if name in machine.num_devices
        else f"{family.title} (none on this machine)"
        for name, family in backends.discover().items()
    }
    return list(titles.items())


def _precisions(answers: Answers, machine: Machine) -> Choices:
    titles = {
        "bf16": "bf16 (bfloat16)",
        "fp16": "fp16 (half precision with scaled losses)",
        "fp8": "fp8 (matrix products in 8 bits)",
    }
    supported = [item for item in titles.items() if _family(answers).precision_problem(item[0]) is None]
    return [("no", "no (full precision)"), *supported]


def _strategies(answers: Answers, machine: Machine) -> Choices:
    choices = [("ddp", "ddp (each process has a copy of the model)")]
    family = _family(answers)
    if family.spmd_env() is not None:
        choices.append(("spmd", "spmd (one process; the compiler splits batches across the chips)"))
    if not family.reduces_gradients_at_step:
        choices.append(("fsdp", "fsdp (FSDP2: parameters sharded across processes)"))
        choices.append(("deepspeed", "deepspeed (ZeRO, offloading)"))
    return choices


def _compilers(answers: Answers, machine: Machine) -> Choices:
    titles = {"inductor": "inductor (torch's own compiler)"}
    return [("no", "no"), *((name, titles.get(name, name)) for name in _family(answers).compilers)]


def _total(answers: Answers, machine: Machine) -> int:
    return machine.count(answers["backend"]) * _num_machines(answers)


def _rendezvous_backends(answers: Answers, machine: Machine) -> Choices:
    """Return the rendezvous backends to choose from; a range of machines needs c10d."""
    fixed = [("static", "static (a fixed set of machines that meet at machine 0)")]
    return [*(fixed if ":" not in str(answers["num_machines"]) else []),
            ("c10d", "c10d (machines can join later or return)")]  # fmt: skip


_YES_NO = ((False, "no"), (True, "yes"))

QUESTIONS = (
    Question("where", "Where will the script run?", lambda a: True, "one",
             (("one", "here (this machine)"), ("several", "several machines together"))),
    Question("num_machines", "How many machines? (or a range, such as 1:4)", _has_several, 2),
    Question("machine_rank", "What is the rank of this machine? (0 for the first)", _has_several, 0),
    Question("rdzv_backend", "How do the machines find each other?", _has_several, "static",
             _rendezvous_backends),
    Question("main_process_ip", "Which address do the other machines use to reach machine 0?",
             lambda a: _has_several(a) and a["rdzv_backend"] == "static", None),
    Question("main_process_port", "Which port on machine 0 does the rendezvous use?",
             lambda a: _has_several(a) and a["rdzv_backend"] == "static", DEFAULT_PORTS["static"]),
    Question("rdzv_endpoint", "What is the address of the rendezvous? (host:port)",
             lambda a: _has_several(a) and a["rdzv_backend"] == "c10d", None),
    Question("max_restarts", "How many times may the job restart after a failure?", _has_several, 0),
    Question("backend", "Which devices should the job use?", lambda a: True, lambda a, m: m.best, _devices),
    Question("gpu_ids", "Which GPUs on this machine? (for example, 0,2)",
             lambda a: a["backend"] in GPU_VARIABLES, "all"),
    Question("num_processes", "How many processes in total?", lambda a: True, _total),
    Question("mixed_precision", "Use mixed precision?", lambda a: True, "no", _precisions),
    Question("downcast_bf16", "Store float as bfloat16 on the TPU, and double as float32?",
             lambda a: a["backend"] == "xla" and a["mixed_precision"] == "bf16", False, _YES_NO),
    Question("strategy", "Which strategy should train the model?", _is_parallel, "ddp", _strategies),
    Question("fsdp_reshard_after_forward", "Free gathered weights after the forward pass? (less memory, more traffic)",
             _is_fsdp, True, ((True, "yes"), (False, "no"))),
    Question("fsdp_auto_wrap_policy", "How should the model be divided into units to shard?", _is_fsdp,
             "TRANSFORMER_BASED_WRAP",
             (("TRANSFORMER_BASED_WRAP", "transformer blocks"), ("SIZE_BASED_WRAP", "size: parts with many parameters"),
              ("NO_WRAP", "none: the whole model as one unit"))),
    Question("has_classes", "Which classes are transformer blocks?", _wraps_by("TRANSFORMER_BASED_WRAP"), False,
             ((False, "automatic (as defined by a transformers model)"), (True, "named (you enter the names)"))),
    Question("fsdp_transformer_layer_cls_to_wrap", "What are the names of the classes? (separated by commas)",
             lambda a: a.get("has_classes") is True, None),
    Question("fsdp_min_num_params", "How many parameters does a unit need?", _wraps_by("SIZE_BASED_WRAP"), 100_000_000),
    Question("fsdp_offload_params", "Keep parameters and gradients on the CPU? (slow, for models that do not fit)",
             lambda a: _is_fsdp(a) and _has_own_memory(a), False, _YES_NO),
    Question("fsdp_activation_checkpointing", "Recompute activations in the backward pass?", _is_fsdp,
             False, _YES_NO),
    Question("fsdp_state_dict_type", "How should checkpoints store weights?", _is_fsdp, "SHARDED_STATE_DICT",
             (("SHARDED_STATE_DICT", "sharded (one shard per process; fast)"),
              ("FULL_STATE_DICT", "full (one file)"))),
    Question("has_file", "How do you want to set up DeepSpeed?", lambda a: a.get("strategy") == "deepspeed", False,
             ((False, "here (answer a few questions)"), (True, "file (a DeepSpeed JSON file)"))),
    Question("deepspeed_config_file", "What is the path of the file?", lambda a: a.get("has_file") is True, None),
    Question("zero_stage", "What should be sharded (ZeRO stage)?", _has_own_deepspeed, 2,
             ((0, "0 (nothing)"), (1, "1 (optimizer states)"), (2, "2 (gradients too)"),
              (3, "3 (parameters too)"))),
    Question("offload_optimizer_device", "Where should optimizer states be stored?", _from_stage(1), "none",
             (("none", "none (on the device)"), ("cpu", "cpu memory"), ("nvme", "nvme disk"))),
    Question("offload_optimizer_nvme_path", "Which folder on that disk?",
             lambda a: a.get("offload_optimizer_device") == "nvme", "/nvme"),
    Question("offload_param_device", "Where should parameters be stored?", _from_stage(3), "none",
             (("none", "none (on the device)"), ("cpu", "cpu memory"), ("nvme", "nvme disk"))),
    Question("offload_param_nvme_path", "Which folder on that disk?", lambda a: a.get("offload_param_device") == "nvme",
             "/nvme"),
    Question("gradient_clipping", "What is the maximum gradient norm? (0: no clipping)", _has_own_deepspeed, 1.0),
    Question("gradient_accumulation_steps", "How many micro-batches per optimizer step?", lambda a: True, 1),
    Question("dynamo_backend", "Compile models with torch.compile?", lambda a: True, "no", _compilers),
    Question("dynamo_mode", "What should compilation optimise for?",
             lambda a: a["dynamo_backend"] == "inductor", "default",
             (("default", "default"), ("reduce-overhead", "reduce-overhead (small batches)"),
              ("max-autotune", "max-autotune (slow to compile, fast to run)"))),
)  # fmt: skip
"""Questions in order. ``where``, ``has_classes`` and ``has_file`` only decide which other questions are asked."""
