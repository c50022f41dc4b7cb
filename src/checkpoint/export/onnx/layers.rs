//! Translation of a list of layers to operations of ONNX, for inference.
//!
//! hpctrain has images with channels last, ONNX with channels first. A value stays in the order of
//! the operation that computed it until one needs the other order, so that a convolutional network
//! has transposes at its ends only.

use super::graph::{GraphBuilder, GraphValue, dims, float, int, ints};
use super::protocol::{AttributeProto, FLOAT, INT64};
use hpctrain_base::error::{Error, Result};
use hpctrain_data::Scale;
use hpctrain_nn::layers::{Layer, format_shape, output_shape, window_shape};

/// The name of the input of numbers.
pub const FEATURES: &str = "features";

/// The name of the input of ids.
pub const IDS: &str = "ids";

/// The key of the layer list in the configuration, for errors.
const KEY: &str = "model.layers";

/// Adds the inputs and the layers of a network to a graph, and returns the last layer's output.
/// Features are normalized by `scale` first.
///
/// # Errors
/// Returns an error if a layer does not accept its input, or if `scale` does not fit the features.
pub fn translate(
    graph: &mut GraphBuilder,
    layers: &[Layer],
    input: &[usize],
    scale: Option<&Scale>,
) -> Result<GraphValue> {
    let Some((first, rest)) = layers.split_first() else {
        return features(graph, input, scale);
    };
    let shape = output_shape(first, &format!("{KEY}[0]"), input)?;
    let value = match first {
        Layer::Embedding { .. } => embedding(graph, input, shape),
        Layer::EmbeddingTables { ids, width, dense } => {
            let row = match dense.is_empty() {
                true => None,
                false => {
                    let numbers = features(graph, input, scale)?;
                    let key = format!("{KEY}[0].dense");
                    let row = sequence(graph, dense, "layers.0.dense", &key, 0, numbers)?;
                    Some(graph.reshape(&row, &[1, *width]))
                }
            };
            embedding_tables(graph, ids.len(), row, shape)
        }
        _ => {
            let numbers = features(graph, input, scale)?;
            return sequence(graph, layers, "layers", KEY, 0, numbers);
        }
    };
    sequence(graph, rest, "layers", KEY, 1, value)
}

/// Adds the input of numbers, normalized by `scale`.
fn features(
    graph: &mut GraphBuilder,
    shape: &[usize],
    scale: Option<&Scale>,
) -> Result<GraphValue> {
    let doc = match shape.len() {
        3 => "images: height, width, channels",
        _ => "numbers",
    };
    let value = graph.input(FEATURES, FLOAT, shape, doc);
    let Some(Scale { mean, std }) = scale else { return Ok(value) };
    let elements: usize = shape.iter().product();
    if mean.is_empty() || mean.len() != std.len() || !elements.is_multiple_of(mean.len()) {
        let message = format!(
            "the preprocessing has {} means and {} deviations for inputs of {}",
            mean.len(),
            std.len(),
            format_shape(shape)
        );
        return Err(Error::input(message).hint("export another checkpoint"));
    }
    let mut name = value.name.clone();
    if mean.iter().any(|mean| *mean != 0.0) {
        let mean = per_element(graph, mean, shape);
        name = graph.node("Sub", &[&name, &mean], vec![]);
    }
    if std.iter().any(|std| *std != 1.0) {
        let std = per_element(graph, std, shape);
        name = graph.node("Div", &[&name, &std], vec![]);
    }
    Ok(GraphValue { name, ..value })
}

/// Adds one number for all elements of a sample, or one for each index of its last axis, or one for
/// each element.
fn per_element(graph: &mut GraphBuilder, numbers: &[f32], shape: &[usize]) -> String {
    match numbers.len() {
        1 => graph.floats(numbers, &[]),
        count if shape.last() == Some(&count) => graph.floats(numbers, &[count]),
        _ => {
            let elements = shape.iter().product();
            let all: Vec<f32> = numbers.iter().copied().cycle().take(elements).collect();
            graph.floats(&all, shape)
        }
    }
}

/// Adds the input of ids and their rows of the table. The output has the shape `shape`.
fn embedding(graph: &mut GraphBuilder, input: &[usize], shape: Vec<usize>) -> GraphValue {
    let ids = graph.input(IDS, INT64, input, "ids of the embedding table");
    let table = graph.weight("layers.0.weight".into());
    let name = graph.node("Gather", &[&table, &ids.name], vec![int("axis", 0)]);
    GraphValue { name, shape, channels_first: false }
}

/// Adds the input of an id for each of `tables` categories and their rows of the tables, behind the
/// row of the features. The output has the shape `shape`.
fn embedding_tables(
    graph: &mut GraphBuilder,
    tables: usize,
    row: Option<GraphValue>,
    shape: Vec<usize>,
) -> GraphValue {
    let ids = graph.input(IDS, INT64, &[tables], "one id for each category, from 0 in each");
    let mut rows: Vec<String> = row.into_iter().map(|row| row.name).collect();
    for number in 0..tables {
        let column = graph.ints(&[number as i64]);
        let id = graph.node("Gather", &[&ids.name, &column], vec![int("axis", 1)]);
        let table = graph.weight(format!("layers.0.tables.{number}.weight"));
        rows.push(graph.node("Gather", &[&table, &id], vec![int("axis", 0)]));
    }
    let rows: Vec<&str> = rows.iter().map(String::as_str).collect();
    let name = graph.node("Concat", &rows, vec![int("axis", 1)]);
    GraphValue { name, shape, channels_first: false }
}

/// Adds consecutive layers, whose tensors begin with `name` and whose key is `key`; the first has
/// the number `first`.
fn sequence(
    graph: &mut GraphBuilder,
    layers: &[Layer],
    name: &str,
    key: &str,
    first: usize,
    mut value: GraphValue,
) -> Result<GraphValue> {
    for (number, layer) in (first..).zip(layers) {
        let name = format!("{name}.{number}");
        let key = format!("{key}[{number}]");
        let shape = output_shape(layer, &key, &value.shape)?;
        value = add_layer(graph, layer, &name, &key, &value, shape)?;
    }
    Ok(value)
}

/// Adds a layer, whose output has this shape.
fn add_layer(
    graph: &mut GraphBuilder,
    layer: &Layer,
    name: &str,
    key: &str,
    x: &GraphValue,
    shape: Vec<usize>,
) -> Result<GraphValue> {
    Ok(match layer {
        Layer::Dense { bias, .. } => dense(graph, name, *bias, x, shape),
        Layer::Conv2d { groups, bias, .. } => {
            let x = graph.channels_first(x);
            let mut inputs = vec![x.name.clone(), graph.weight(format!("{name}.weight"))];
            if *bias {
                inputs.push(graph.weight(format!("{name}.bias")));
            }
            let mut attributes = window_attributes(layer, key, &x.shape)?;
            attributes.push(int("group", *groups as i64));
            let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
            let name = graph.node("Conv", &inputs, attributes);
            GraphValue { name, shape, channels_first: true }
        }
        Layer::MaxPool2d { .. } | Layer::AvgPool2d { .. } => {
            let x = graph.channels_first(x);
            let is_max = matches!(layer, Layer::MaxPool2d { .. });
            let op = if is_max { "MaxPool" } else { "AveragePool" };
            let attributes = window_attributes(layer, key, &x.shape)?;
            let name = graph.node(op, &[&x.name], attributes);
            GraphValue { name, shape, channels_first: true }
        }
        Layer::GlobalAvgPool => {
            let x = graph.channels_first(x);
            let means = graph.node("GlobalAveragePool", &[&x.name], vec![]);
            let name = graph.reshape_to(&means, &shape);
            GraphValue { name, shape, channels_first: false }
        }
        Layer::LayerNorm { epsilon } => {
            let x = graph.channels_last(x);
            let [weight, bias] = affine(graph, name);
            let attributes = vec![int("axis", -1), float("epsilon", *epsilon)];
            let name = graph.node("LayerNormalization", &[&x.name, &weight, &bias], attributes);
            GraphValue { name, shape, channels_first: false }
        }
        Layer::BatchNorm { epsilon, .. } => {
            let x = graph.channels_first(x);
            let [weight, bias] = affine(graph, name);
            let mean = graph.weight(format!("{name}.running_mean"));
            let var = graph.weight(format!("{name}.running_var"));
            let inputs = [&x.name[..], &weight, &bias, &mean, &var];
            let name = graph.node("BatchNormalization", &inputs, vec![float("epsilon", *epsilon)]);
            GraphValue { name, ..x }
        }
        Layer::GroupNorm { groups, epsilon } => group_norm(graph, name, *groups, *epsilon, x),
        // Dropout acts in training only.
        Layer::Dropout { .. } => x.clone(),
        Layer::Flatten | Layer::Reshape { .. } => graph.reshape(x, &shape),
        Layer::Embedding { .. } | Layer::EmbeddingTables { .. } => {
            return Err(Error::internal(format!("{key} is not the first layer")));
        }
        Layer::DotInteraction => dot_interaction(graph, x, shape),
        Layer::Relu => elementwise(graph, "Relu", x, vec![]),
        Layer::LeakyRelu { slope } => {
            elementwise(graph, "LeakyRelu", x, vec![float("alpha", *slope)])
        }
        Layer::Gelu => gelu(graph, x),
        Layer::Silu => {
            let gate = graph.node("Sigmoid", &[&x.name], vec![]);
            let name = graph.node("Mul", &[&x.name, &gate], vec![]);
            GraphValue { name, ..x.clone() }
        }
        Layer::Tanh => elementwise(graph, "Tanh", x, vec![]),
        Layer::Sigmoid => elementwise(graph, "Sigmoid", x, vec![]),
        Layer::Softmax => {
            let x = graph.channels_last(x);
            elementwise(graph, "Softmax", &x, vec![int("axis", -1)])
        }
        Layer::Residual { layers, shortcut } => {
            let body = [&format!("{name}.layers")[..], &format!("{key}.layers")];
            let body = sequence(graph, layers, body[0], body[1], 0, x.clone())?;
            let around = [&format!("{name}.shortcut")[..], &format!("{key}.shortcut")];
            let around = sequence(graph, shortcut, around[0], around[1], 0, x.clone())?;
            let (body, around) = match body.channels_first {
                true => (body, graph.channels_first(&around)),
                false => (body, graph.channels_last(&around)),
            };
            let name = graph.node("Add", &[&around.name, &body.name], vec![]);
            GraphValue { name, ..body }
        }
    })
}

/// Adds an operation with the input and the shape of `x`.
fn elementwise(
    graph: &mut GraphBuilder,
    op: &str,
    x: &GraphValue,
    attributes: Vec<AttributeProto>,
) -> GraphValue {
    let name = graph.node(op, &[&x.name], attributes);
    GraphValue { name, ..x.clone() }
}

/// Returns the names of a layer's weight and bias.
fn affine(graph: &mut GraphBuilder, name: &str) -> [String; 2] {
    ["weight", "bias"].map(|end| graph.weight(format!("{name}.{end}")))
}

/// Returns the attributes of a convolution or pooling layer on images of this shape.
fn window_attributes(layer: &Layer, key: &str, shape: &[usize]) -> Result<Vec<AttributeProto>> {
    let window = window_shape(layer, key, shape)?;
    let [rows, columns] = window.padding;
    Ok(vec![
        ints("kernel_shape", &dims(&window.size)),
        ints("strides", &dims(&window.stride)),
        ints("pads", &dims(&[rows, columns, rows, columns])),
    ])
}

/// Adds a linear layer on the last axis.
fn dense(
    graph: &mut GraphBuilder,
    name: &str,
    bias: bool,
    x: &GraphValue,
    shape: Vec<usize>,
) -> GraphValue {
    let x = graph.channels_last(x);
    let weight = graph.weight(format!("{name}.weight"));
    let bias = bias.then(|| graph.weight(format!("{name}.bias")));
    let name = match x.shape.len() {
        1 => {
            let mut inputs = vec![&x.name[..], &weight];
            inputs.extend(bias.as_deref());
            graph.node("Gemm", &inputs, vec![int("transB", 1)])
        }
        _ => {
            let transposed = graph.node("Transpose", &[&weight], vec![ints("perm", &[1, 0])]);
            let sums = graph.node("MatMul", &[&x.name, &transposed], vec![]);
            match bias {
                Some(bias) => graph.node("Add", &[&sums, &bias], vec![]),
                None => sums,
            }
        }
    };
    GraphValue { name, shape, channels_first: false }
}

/// Adds a group normalisation: groups are normalized as if they were channels, then each channel
/// gets its weight and bias. ONNX has an operation for it since opset 21 only.
fn group_norm(
    graph: &mut GraphBuilder,
    name: &str,
    groups: usize,
    epsilon: f32,
    x: &GraphValue,
) -> GraphValue {
    let x = graph.channels_first(x);
    let (channels, places) =
        x.shape.split_last().map_or((1, &[][..]), |(last, rest)| (*last, rest));
    let ones = graph.floats(&vec![1.0; groups], &[groups]);
    let zeros = graph.floats(&vec![0.0; groups], &[groups]);
    let grouped = [groups, channels / groups * places.iter().product::<usize>()];
    let grouped = graph.reshape_to(&x.name, &grouped);
    let normalized = graph.node(
        "InstanceNormalization",
        &[&grouped, &ones, &zeros],
        vec![float("epsilon", epsilon)],
    );
    let normalized = graph.reshape_to(&normalized, &[&[channels], places].concat());
    let [weight, bias] = affine(graph, name).map(|weight| {
        // One number for each channel, for all places.
        let shape: Vec<i64> =
            dims(&[channels]).into_iter().chain(places.iter().map(|_| 1)).collect();
        let shape = graph.ints(&shape);
        graph.node("Reshape", &[&weight, &shape], vec![])
    });
    let scaled = graph.node("Mul", &[&normalized, &weight], vec![]);
    let name = graph.node("Add", &[&scaled, &bias], vec![]);
    GraphValue { name, ..x }
}

/// Adds the first row of a sample and the dot products of all pairs of its rows.
fn dot_interaction(graph: &mut GraphBuilder, x: &GraphValue, shape: Vec<usize>) -> GraphValue {
    let x = graph.channels_last(x);
    let rows = x.shape[0] as i64;
    let columns = graph.node("Transpose", &[&x.name], vec![ints("perm", &[0, 2, 1])]);
    let all = graph.node("MatMul", &[&x.name, &columns], vec![]);
    let all = graph.reshape_to(&all, &[x.shape[0] * x.shape[0]]);
    // Each row with those before it.
    let pairs: Vec<i64> =
        (0..rows).flat_map(|row| (0..row).map(move |other| row * rows + other)).collect();
    let pairs = graph.ints(&pairs);
    let pairs = graph.node("Gather", &[&all, &pairs], vec![int("axis", 1)]);
    let first = graph.ints(&[0]);
    let first = graph.node("Gather", &[&x.name, &first], vec![int("axis", 1)]);
    let first = graph.reshape_to(&first, &[x.shape[1]]);
    let name = graph.node("Concat", &[&first, &pairs], vec![int("axis", 1)]);
    GraphValue { name, shape, channels_first: false }
}

/// Adds the tanh approximation of GELU: x times the logistic function of 2√(2/π)(x + 0.044715x³).
fn gelu(graph: &mut GraphBuilder, x: &GraphValue) -> GraphValue {
    let cubic = graph.floats(&[0.044715], &[]);
    let one = graph.floats(&[1.0], &[]);
    let scale = graph.floats(&[2.0 * (2.0 / std::f32::consts::PI).sqrt()], &[]);
    let square = graph.node("Mul", &[&x.name, &x.name], vec![]);
    let square = graph.node("Mul", &[&square, &cubic], vec![]);
    let factor = graph.node("Add", &[&square, &one], vec![]);
    let factor = graph.node("Mul", &[&factor, &scale], vec![]);
    let u = graph.node("Mul", &[&x.name, &factor], vec![]);
    let gate = graph.node("Sigmoid", &[&u], vec![]);
    let name = graph.node("Mul", &[&x.name, &gate], vec![]);
    GraphValue { name, ..x.clone() }
}
