"""What lm-evaluation-harness makes of a few rows in each of the eight layouts: writes expected.jsonl beside this file.

    python -m venv --system-site-packages /tmp/harness
    /tmp/harness/bin/pip install lm_eval==0.4.13 transformers accelerate
    TIKTOKEN_CACHE_DIR=... /tmp/harness/bin/python .harness/make.py         # from the repository's folder, no network

The harness's own tasks, draws of examples, token boundaries, truncation and log-probabilities run over this project's
GPT; only the download is replaced, by the rows below, and the tokenizer, by tiktoken's. test_model.py holds
`prepare.py --dataset=tasks` and `train.py --tasks` to what comes out, and rebuilds the same weights with sine_model.
"""
import importlib.metadata
import json
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from model import GPT, GPTConfig            # noqa: E402
from prepare import TASKS, load_tokenizer   # noqa: E402

BLOCK_SIZE = 56     # less than the longest prompts, more than any choice


def sine_model(vocab_size=50304):
    """A GPT whose weights come from a formula, so that they are the same with every version of torch and everywhere."""
    model = GPT(GPTConfig(vocab_size, BLOCK_SIZE, n_layer=1, n_loop=2, n_head=2, n_embd=16))
    with torch.no_grad():
        for w in model.parameters():
            w.copy_((torch.arange(w.numel(), dtype=torch.float64) * 12.9898).sin().mul(43758.5453).frac().view_as(w))
    return model


def arc(n, keys="ABCD"):
    texts = ["soil", "the sun", "two  magnets ", "naïve guesses – 3.5%"][:len(keys)]
    return {"id": f"q{n}", "question": f"Which of these warms planet {n} most? ", "answerKey": keys[n % len(keys)],
            "choices": {"text": texts, "label": list(keys)}}


def hellaswag(n, title=""):
    return {"ind": n, "activity_label": "Baking [step] bread", "ctx_a": f"{title}A man kneads  dough {n} times.",
            "ctx_b": "then HE" if n % 2 else "", "ctx": "", "source_id": f"{n}",
            "split": "val", "split_type": "indomain",
            "endings": [" puts it in the oven [substeps] and waits.", "sings  to it.", "eats it [title] It is bad.",
                        f"throws {n} loaves."], "label": str(n % 4)}


def openbookqa(n, key=""):
    return {"id": f"o{n}", "question_stem": f"A plant {n} needs" + " " * (n % 2), "answerKey": key or "ABCD"[n % 4],
            "choices": {"text": ["light", "a lamp shade", "salt water", "wind?"], "label": ["A", "B", "C", "D"]}}


def piqa(n, label=None):
    return {"goal": f"To open jar {n},", "sol1": "tap the lid.", "sol2": "ask  the jar\nnicely .",
            "label": n % 2 if label is None else label}


def sciq(n, support="\n Cells are the units of life. " * 3):
    return {"question": f"What are cell parts of kind {n} called?", "distractor1": "organs", "distractor2": "planets",
            "distractor3": "cells", "correct_answer": "organelles", "support": support}


def social_iqa(n):
    return {"context": f"Kai gave Robin {n} apples.", "question": "Why did Kai do this?", "answerA": "to be kind",
            "answerB": "to throw them away", "answerC": " hungry", "label": str(1 + n % 3)}


def winogrande(n, sentence="The trophy {} did not fit into the case since _ was too big."):
    return {"sentence": sentence.format(n), "option1": "the trophy", "option2": "the case", "answer": str(1 + n % 2)}


# (rows of the split that is evaluated, training rows). Where that is the validation split, an evaluated row also stands
# among the training rows, often enough that some draws must pass over it, and some find nothing else in two.
ROWS = {
    "arc_challenge": ([arc(0), arc(1, "1234"), arc(2, "ABC")], [arc(3 + n) for n in range(4)]),
    "arc_easy": ([arc(5), arc(2, "1234"), arc(0)], [arc(n, "1234") for n in range(3)]),
    "hellaswag": ([hellaswag(0), hellaswag(1, "How to bake [title] Mix it."), hellaswag(2)],
                  [hellaswag(0), hellaswag(3), hellaswag(4)]),
    "openbookqa": ([openbookqa(0), openbookqa(1, " D"), openbookqa(2), {**openbookqa(3), "question_stem": ""}],
                   [openbookqa(3), openbookqa(4)]),
    "piqa": ([piqa(0)] * 6 + [piqa(1)], [piqa(0)] * 5 + [piqa(n) for n in range(1, 5)]),
    "sciq": ([sciq(0), sciq(1, ""), sciq(2, "Short.")], [sciq(n, "It is known.") for n in range(3, 7)]),
    "social_iqa": ([social_iqa(0), social_iqa(1), social_iqa(2)], [social_iqa(n) for n in range(2, 5)]),
    "winogrande": ([winogrande(0), winogrande(1, "_ was late, so {} and I left."),
                    winogrande(2, "I saw {} _, and left .")],
                   [winogrande(n) for n in range(2, 5)]),
}


def main():
    import datasets
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    class Adapter(HFLM):
        """The harness's HFLM around this project's model and tokenizer: its constructor, which would load them from
        Hugging Face, is left out, and what it would set is set here."""
        AUTO_MODEL_CLASS, backend, add_bos_token, logits_cache, softmax_dtype, enable_thinking = (
            None, "causal", False, True, None, False)

        def __init__(self, model, tokenizer):
            lm_eval.api.model.TemplateLM.__init__(self)
            self._model, self.tokenizer, self._max_length = model, tokenizer, BLOCK_SIZE
            self._device = torch.device("cpu")
            self.batch_size_per_gpu, self.batch_sizes, self.mixed_precision_dtype = 4, {}, None

        eot_token_id = prefix_token_id = property(lambda self: self.tokenizer.start[0])
        get_model_info = dict

        def tok_encode(self, string, **options):
            return self.tokenizer.encode(string)

        def _model_call(self, inps):
            with torch.no_grad():
                return self._model(inps, targets=inps)[0]

    # What the harness asks for must be what prepare.py fetches; the hub calls a configuration without name "default".
    sources = {(dataset, None if config == "default" else config): task
               for task, (_, dataset, config, _) in TASKS.items()}

    def load_dataset(path, name=None, **options):
        evaluated, training = ROWS[sources[path, name]]
        return datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split, rows in
                                     (("train", training), ("validation", evaluated), ("test", evaluated))})

    datasets.load_dataset = load_dataset
    lm = Adapter(sine_model(), load_tokenizer("gpt2"))
    version = importlib.metadata.version("lm_eval")
    lines = [{"task": task, "harness": version, "evaluated": evaluated, "training": training}
             for task, (evaluated, training) in ROWS.items()]
    for shots in (0, 1):
        results = lm_eval.simple_evaluate(lm, tasks=list(ROWS), num_fewshot=shots, log_samples=True)
        for line in lines:
            samples = sorted(results["samples"][line["task"]], key=lambda sample: sample["doc_id"])
            total = results["results"][line["task"]]
            line[f"{shots}-shot"] = {
                "prompts": [[list(argument) for argument in sample["arguments"]] for sample in samples],
                "scores": [[score for score, _ in sample["filtered_resps"]] for sample in samples],
                "accuracy": total["acc,none"], "stderr": total["acc_stderr,none"]}
    (HERE / "expected.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
