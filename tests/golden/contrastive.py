"""Losses and gradients of the supervised contrastive loss, by PyTorch: tests/golden/contrastive.json."""

import json
import pathlib

import torch
import torch.nn.functional as F


def loss_of(outputs, classes, temperature):
    """Khosla et al., 2020, equation 2: the mean over the anchors that have positives is left to the caller."""
    z = F.normalize(outputs, dim=1)
    similar = z @ z.T / temperature
    own = torch.eye(len(z), dtype=torch.bool)
    log_prob = similar - torch.logsumexp(similar.masked_fill(own, float("-inf")), dim=1, keepdim=True)
    positive = (classes[:, None] == classes[None, :]) & ~own
    count = positive.sum(1)
    losses = -(log_prob * positive).sum(1) / count.clamp(min=1)
    return losses


torch.manual_seed(1)
cases = []
for rows, width, classes, temperature in [(6, 3, 2, 0.1), (16, 8, 5, 0.5), (9, 4, 9, 0.07), (24, 5, 12, 1.0)]:
    outputs = torch.randn(rows, width, dtype=torch.float32).double().requires_grad_()
    # Two samples of each class first, so that most have positives; the last case has pairs only.
    labels = torch.cat([torch.arange(classes).repeat(2)[:rows], torch.randint(classes, (max(0, rows - 2 * classes),))])
    losses = loss_of(outputs, labels, temperature)
    losses.mean().backward()
    cases.append(
        {
            "rows": rows,
            "width": width,
            "temperature": temperature,
            "classes": labels.tolist(),
            "outputs": outputs.detach().flatten().tolist(),
            "losses": losses.tolist(),
            "gradient": outputs.grad.flatten().tolist(),
        }
    )
path = pathlib.Path(__file__).with_name("contrastive.json")
path.write_text(json.dumps({"torch": torch.__version__, "cases": cases}) + "\n")
