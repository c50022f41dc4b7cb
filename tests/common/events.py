"""Reads events files with TensorBoard's own EventAccumulator, and prints its points as JSON.

    events.py DIRECTORY
"""

import json
import math
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

found = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
found.Reload()
tags = found.Tags()


def number(value):
    return value if math.isfinite(value) else None


def histogram(value):
    of = value.histogram_value
    return [value.step, of.min, of.max, of.num, of.sum, of.sum_squares, list(of.bucket_limit), list(of.bucket)]


print(json.dumps({
    "scalars": {tag: [[one.step, number(one.value)] for one in found.Scalars(tag)] for tag in tags["scalars"]},
    "histograms": {tag: [histogram(one) for one in found.Histograms(tag)] for tag in tags["histograms"]},
    "texts": {
        tag: [[one.step, one.tensor_proto.string_val[0].decode()] for one in found.Tensors(tag)]
        for tag in tags["tensors"]
        if found.SummaryMetadata(tag).plugin_data.plugin_name == "text"
    },
}))
