"""Makes classes.json: scikit-learn's results class by class for random outputs of classifiers.

    python -m venv venv && venv/bin/pip install scikit-learn==1.7.2
    venv/bin/python tests/golden/classes.py
"""

import json
import pathlib

import numpy as np
import sklearn
from sklearn.metrics import accuracy_score, confusion_matrix, precision_recall_fscore_support, roc_auc_score


def case(random, name, samples, classes, width):
    """Outputs are multiples of an eighth, so that some are equal: rows of logits, or of one logit for two classes."""
    targets = random.integers(0, classes, samples)
    if name == "rare":
        # Class 1 has no sample, and class 4 is never predicted.
        targets[targets == 1] = 0
    outputs = np.round(8 * random.normal(size=(samples, width))).astype(np.float32) / 8
    if width > 1:
        outputs[np.arange(samples), targets] += 1
        if name == "rare":
            outputs[:, 4] -= 100
        predicted = outputs.argmax(-1)
    else:
        outputs[:, 0] += targets - 0.5
        predicted = (outputs[:, 0] > 0).astype(int)
    labels = range(classes)
    of_class = precision_recall_fscore_support(targets, predicted, labels=labels, zero_division=0)
    mean = precision_recall_fscore_support(targets, predicted, labels=labels, average="macro", zero_division=0)
    found = dict(
        name=name, classes=classes, targets=targets.tolist(), outputs=outputs.tolist(),
        accuracy=accuracy_score(targets, predicted),
        confusion=confusion_matrix(targets, predicted, labels=labels).tolist(),
        precision=of_class[0].tolist(), recall=of_class[1].tolist(), f1=of_class[2].tolist(),
        macro=dict(zip(("precision", "recall", "f1"), map(float, mean[:3]))),
    )
    if classes == 2:
        scores = outputs[:, 0] if width == 1 else outputs[:, 1] - outputs[:, 0]
        found["roc_auc"] = float(roc_auc_score(targets, scores.astype(np.float64)))
    return found


def main():
    random = np.random.default_rng(20)
    cases = [
        case(random, "binary", 97, 2, 2),
        case(random, "logit", 61, 2, 1),
        case(random, "ten", 150, 10, 10),
        case(random, "rare", 40, 5, 5),
    ]
    path = pathlib.Path(__file__).with_name("classes.json")
    text = json.dumps(dict(sklearn=sklearn.__version__, cases=cases), separators=(",", ":"))
    path.write_text(text + "\n")


if __name__ == "__main__":
    main()
