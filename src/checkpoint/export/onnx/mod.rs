//! Export of layer-list models as ONNX graphs.

mod graph;
mod layers;
mod protocol;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::Path;

use prost::Message as _;
use serde::Serialize;

use self::graph::{GraphBuilder, dims};
use self::layers::translate;
use self::protocol::{
    EXTERNAL, FLOAT, GraphProto, IR_VERSION, ModelProto, OperatorSetIdProto,
    StringStringEntryProto, TensorProto, ValueInfoProto,
};
use super::{ExportedTensor, refused, weights, write_config};
use crate::huggingface::staging::ExportStaging;
use crate::huggingface::{checked_network, tensors};
use crate::{Manifest, Reader};
use hpctrain_base::error::{Error, Result};
use hpctrain_config::{LayerList, LossKind, Model};
use hpctrain_data::{Preprocessing, Scale};
use hpctrain_nn::Network;

pub use self::protocol::OPSET;

/// Name of the file with the graph.
pub const GRAPH: &str = "model.onnx";

/// Name of the file with the weights, if they are too large for the graph's file.
pub const WEIGHTS: &str = "model.onnx.data";

/// The most bytes of weights in the graph's file; protobuf messages have less than 2 GiB.
const INLINE_LIMIT: u64 = 1 << 30;

/// The name of the output: what the network computes, logits for classes.
const OUTPUTS: &str = "outputs";

/// The name of the output of probabilities, which models with logits have.
const PROBABILITIES: &str = "probabilities";

/// Options of an export.
#[derive(Debug, Clone, Copy)]
pub struct OnnxOptions {
    /// Whether the graph takes features that are normalized already, instead of normalizing them as
    /// in training.
    pub normalized_inputs: bool,
    /// The most bytes of weights in the graph's file. More are written to [`WEIGHTS`].
    pub inline_limit: u64,
}

impl Default for OnnxOptions {
    fn default() -> Self {
        Self { normalized_inputs: false, inline_limit: INLINE_LIMIT }
    }
}

/// The counts of an export, and its inputs and outputs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportedGraph {
    /// The number of tensors.
    pub tensors: usize,
    /// The number of their elements.
    pub elements: u64,
    /// The names and shapes of the inputs, for display.
    pub inputs: Vec<String>,
    /// The names and shapes of the outputs, for display.
    pub outputs: Vec<String>,
}

/// Writes a layer-list model as the graph `model.onnx` into the directory `out`, which appears
/// completely or not at all. The batch size is not fixed.
///
/// # Errors
/// Returns an error if the checkpoint is damaged, the model is not a list of layers, the features
/// were normalized in several ways, `out` is not empty, or the files cannot be written.
pub fn onnx(reader: &mut Reader, out: &Path, options: OnnxOptions) -> Result<ExportedGraph> {
    let model = reader.manifest().config.model.clone();
    if let Some(own) = &model.own {
        return Err(refused(&Network::Custom(own.clone()), "onnx")
            .hint("--format safetensors writes its tensors"));
    }
    let network = checked_network(reader)?;
    let (Network::Layers(_), LayerList::List(_)) = (&network, &model.layers) else {
        return Err(refused(&network, "onnx")
            .hint("use --format huggingface, which other programs convert to ONNX"));
    };
    let scale = match options.normalized_inputs {
        true => None,
        false => scale(reader.manifest().preprocessing.as_ref())?,
    };
    let graph = network_graph(&model, reader.manifest().config.loss.kind, scale)?;
    let mut all: BTreeMap<String, ExportedTensor> =
        ExportedTensor::all(&network, tensors(&network))
            .into_iter()
            .map(|tensor| (tensor.name.clone(), tensor))
            .collect();
    let used: Vec<ExportedTensor> =
        graph.weights.iter().filter_map(|name| all.remove(name)).collect();
    if used.len() < graph.weights.len() || !all.is_empty() {
        return Err(Error::internal("the graph does not use every tensor of the model once"));
    }

    let staging = ExportStaging::new(out)?;
    let elements = used.iter().map(|tensor| tensor.len() as u64).sum();
    let is_external = elements * size_of::<f32>() as u64 > options.inline_limit;
    let initializers = match is_external {
        true => write_weights(reader, &used, &staging.path().join(WEIGHTS))?,
        false => used.iter().map(|tensor| inline(reader, tensor)).collect::<Result<_>>()?,
    };
    let counts = ExportedGraph {
        tensors: used.len(),
        elements,
        inputs: graph.inputs.iter().map(describe).collect(),
        outputs: graph.outputs.iter().map(describe).collect(),
    };
    let metadata = metadata(reader.manifest(), weights(reader), options.normalized_inputs)?;
    write_graph(&staging.path().join(GRAPH), graph, initializers, metadata)?;
    write_config(reader, staging.path())?;
    staging.publish()?;
    Ok(counts)
}

/// Returns the normalization of features, if there is one.
fn scale(preprocessing: Option<&Preprocessing>) -> Result<Option<&Scale>> {
    match preprocessing.map_or(&[][..], |preprocessing| &preprocessing.scales) {
        [] => Ok(None),
        [one] => Ok(one.as_ref()),
        several => Err(Error::input(format!(
            "the network learned from data sets with {} scales of inputs, and a graph can have one",
            several.len()
        ))
        .hint("--normalized-inputs exports a graph that takes normalized features")),
    }
}

/// Returns the graph of a layer-list model that was trained with this kind of loss.
fn network_graph(model: &Model, loss: LossKind, scale: Option<&Scale>) -> Result<GraphBuilder> {
    let (LayerList::List(layers), Some(input)) = (&model.layers, &model.input) else {
        return Err(Error::internal("the model is not a list of layers"));
    };
    let mut graph = GraphBuilder::default();
    let last = translate(&mut graph, layers, input, scale)?;
    let width = last.shape.iter().product();
    let row = graph.reshape(&last, &[width]);
    graph.named_node(OUTPUTS, "Identity", &[&row.name], vec![]);
    let (doc, activation) = match loss {
        LossKind::CrossEntropy => ("a logit for each class", Some("Softmax")),
        LossKind::BinaryCrossEntropy => ("a logit for each label", Some("Sigmoid")),
        LossKind::Mse | LossKind::Mae | LossKind::Huber => ("predicted numbers", None),
        LossKind::Contrastive => ("an embedding, which is compared at length 1", None),
    };
    graph.output(OUTPUTS, &[width], doc);
    if let Some(op) = activation {
        let attributes = if op == "Softmax" { vec![graph::int("axis", -1)] } else { vec![] };
        graph.named_node(PROBABILITIES, op, &[OUTPUTS], attributes);
        let doc = if op == "Softmax" { "of each class" } else { "of each label being 1" };
        graph.output(PROBABILITIES, &[width], doc);
    }
    Ok(graph)
}

/// Returns a tensor with its values.
fn inline(reader: &mut Reader, tensor: &ExportedTensor) -> Result<TensorProto> {
    let raw_data = bytemuck::cast_slice(&tensor.read(reader)?).to_vec();
    Ok(TensorProto { raw_data, ..initializer(tensor) })
}

/// Returns a tensor without values.
fn initializer(tensor: &ExportedTensor) -> TensorProto {
    TensorProto {
        name: tensor.name.clone(),
        dims: dims(&tensor.shape()),
        data_type: FLOAT,
        ..TensorProto::default()
    }
}

/// Writes the values of all tensors to the file at `path`, one tensor at a time, and returns the
/// tensors with their places in it.
fn write_weights(
    reader: &mut Reader,
    all: &[ExportedTensor],
    path: &Path,
) -> Result<Vec<TensorProto>> {
    let failed = |e| Error::io("write", path, e);
    let mut file = BufWriter::new(File::create(path).map_err(failed)?);
    let mut offset = 0;
    let mut initializers = Vec::with_capacity(all.len());
    for tensor in all {
        let values = tensor.read(reader)?;
        let bytes: &[u8] = bytemuck::cast_slice(&values);
        file.write_all(bytes).map_err(failed)?;
        let entries = [
            ("location", WEIGHTS.to_owned()),
            ("offset", offset.to_string()),
            ("length", bytes.len().to_string()),
        ];
        initializers.push(TensorProto {
            external_data: entries.map(|(key, value)| entry(key, value)).into(),
            data_location: EXTERNAL,
            ..initializer(tensor)
        });
        offset += bytes.len();
    }
    file.flush().and_then(|()| file.get_ref().sync_all()).map_err(failed)?;
    Ok(initializers)
}

fn write_graph(
    path: &Path,
    graph: GraphBuilder,
    weights: Vec<TensorProto>,
    metadata_props: Vec<StringStringEntryProto>,
) -> Result<()> {
    let GraphBuilder { nodes, constants, inputs, outputs, .. } = graph;
    let graph = GraphProto {
        node: nodes,
        name: "hpctrain".into(),
        initializer: weights.into_iter().chain(constants).collect(),
        input: inputs,
        output: outputs,
    };
    let model = ModelProto {
        ir_version: IR_VERSION,
        producer_name: "hpctrain".into(),
        producer_version: env!("CARGO_PKG_VERSION").into(),
        graph: Some(graph),
        opset_import: vec![OperatorSetIdProto { domain: String::new(), version: OPSET }],
        metadata_props,
    };
    let written = File::create(path).and_then(|mut file| {
        file.write_all(&model.encode_to_vec())?;
        file.sync_all()
    });
    written.map_err(|e| Error::io("write", path, e))
}

/// Returns the metadata of the graph: the step, the kind of loss, and names of columns and classes
/// as JSON.
fn metadata(
    manifest: &Manifest,
    weights: &str,
    normalized_inputs: bool,
) -> Result<Vec<StringStringEntryProto>> {
    let mut entries = vec![
        entry("step", manifest.step.to_string()),
        entry("weights", weights.into()),
        entry("loss", json(&manifest.config.loss.kind)?.trim_matches('"').into()),
        entry("normalized_inputs", normalized_inputs.to_string()),
    ];
    let Some(preprocessing) = &manifest.preprocessing else { return Ok(entries) };
    if !preprocessing.classes.is_empty() {
        entries.push(entry("classes", json(&preprocessing.classes)?));
    }
    if let Some(columns) = &preprocessing.columns {
        let categories: Vec<&str> =
            columns.categories.iter().map(|category| &category.name[..]).collect();
        entries.push(entry("features", json(&columns.inputs)?));
        entries.push(entry("categories", json(&categories)?));
        if let Some(text) = &columns.text {
            entries.push(entry("texts", json(&text.names)?));
        }
        entries.push(entry("targets", json(&columns.targets)?));
    }
    entries.push(entry("preprocessing", json(preprocessing)?));
    Ok(entries)
}

/// Returns a value as JSON in one line.
fn json(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|e| Error::internal(format!("metadata as JSON: {e}")))
}

fn entry(key: &str, value: String) -> StringStringEntryProto {
    StringStringEntryProto { key: key.into(), value }
}

/// Returns the name and the shape of an input or output, such as `features [batch, 2]`.
fn describe(value: &ValueInfoProto) -> String {
    use self::protocol::DimensionExtent::{Param, Value};
    let shape = value.r#type.iter().flat_map(|of| &of.tensor_type).flat_map(|of| &of.shape);
    let extents = shape.flat_map(|shape| &shape.dim).map(|dim| match &dim.extent {
        Some(Value(extent)) => extent.to_string(),
        Some(Param(name)) => name.clone(),
        None => "?".into(),
    });
    format!("{} [{}]", value.name, extents.collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests;
