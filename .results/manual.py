"""A task of one's own, data/tasks/manual.yaml and its 500 questions: python .results/manual.py, then

    python train.py --resume=True --eval_only=True --tasks=manual

Of four pieces of the manual's held-out tenth, which one goes on after 100 characters? For models trained on pydocs.
"""
import json
import random
from pathlib import Path

from pydoc_data.topics import topics

TASK = """task: manual
dataset_path: json
dataset_kwargs: {data_files: {test: data/tasks/manual.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
target_delimiter: ""
metric_list: [{metric: acc}]
"""


def main():
    text = ("\n\n\n".join(topics[name].rstrip("\n") for name in sorted(topics)) + "\n").encode()
    text = text[len(text) * 9 // 10:].decode(errors="ignore")       # what pydocs holds out
    rng, lines = random.Random(0), []
    for _ in range(500):
        places = [rng.randrange(100, len(text) - 20) for _ in range(4)]
        choices, label = [text[i:i + 20] for i in places], rng.randrange(4)
        context = text[places[label] - 100:places[label]]
        lines.append(json.dumps({"context": context, "choices": choices, "label": label}) + "\n")
    folder = Path("data", "tasks")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manual.jsonl").write_text("".join(lines))
    (folder / "manual.yaml").write_text(TASK)


if __name__ == "__main__":
    main()
