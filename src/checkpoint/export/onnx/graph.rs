//! Construction of a graph: operations, constants, and the weights that it uses.

use super::protocol::{
    ATTRIBUTE_FLOAT, ATTRIBUTE_INT, ATTRIBUTE_INTS, AttributeProto, DimensionExtent,
    DimensionProto, FLOAT, INT64, NodeProto, TensorProto, TensorShapeProto, TensorTypeProto,
    TypeProto, ValueInfoProto,
};

/// The name of the first axis of inputs and outputs, whose extent is known only at run time.
pub const BATCH: &str = "batch";

/// A value in the graph, with the batch as its first axis.
#[derive(Debug, Clone)]
pub struct GraphValue {
    pub name: String,
    /// The shape of a sample, channels last.
    pub shape: Vec<usize>,
    /// Whether the value has its channels, the last axis of `shape`, right after the batch, as ONNX
    /// has images.
    pub channels_first: bool,
}

/// A graph under construction.
#[derive(Debug, Default)]
pub struct GraphBuilder {
    pub nodes: Vec<NodeProto>,
    /// Constants that are not weights.
    pub constants: Vec<TensorProto>,
    /// The names of the weights in the order of their first use.
    pub weights: Vec<String>,
    pub inputs: Vec<ValueInfoProto>,
    pub outputs: Vec<ValueInfoProto>,
}

impl GraphBuilder {
    /// Adds an input, whose samples have this shape.
    pub fn input(&mut self, name: &str, elem_type: i32, shape: &[usize], doc: &str) -> GraphValue {
        self.inputs.push(value_info(name, elem_type, shape, doc));
        GraphValue { name: name.into(), shape: shape.to_vec(), channels_first: false }
    }

    /// Adds an output of numbers, whose samples have this shape.
    pub fn output(&mut self, name: &str, shape: &[usize], doc: &str) {
        self.outputs.push(value_info(name, FLOAT, shape, doc));
    }

    /// Returns the name of a weight in the graph, which is its name in the checkpoint.
    pub fn weight(&mut self, name: String) -> String {
        if !self.weights.contains(&name) {
            self.weights.push(name.clone());
        }
        name
    }

    /// Adds an operation with one output and returns the output's name.
    pub fn node(&mut self, op: &str, inputs: &[&str], attributes: Vec<AttributeProto>) -> String {
        let name = format!("{op}_{}", self.nodes.len());
        self.named_node(&name, op, inputs, attributes);
        name
    }

    /// Adds an operation whose output is called `name`.
    pub fn named_node(
        &mut self,
        name: &str,
        op: &str,
        inputs: &[&str],
        attribute: Vec<AttributeProto>,
    ) {
        self.nodes.push(NodeProto {
            input: inputs.iter().map(|input| (*input).to_owned()).collect(),
            output: vec![name.to_owned()],
            name: name.to_owned(),
            op_type: op.to_owned(),
            attribute,
        });
    }

    /// Adds a constant of integers and returns its name.
    pub fn ints(&mut self, values: &[i64]) -> String {
        let raw = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.constant(INT64, &[values.len()], raw)
    }

    /// Adds a constant of numbers with this shape, which is empty for a scalar, and returns its
    /// name.
    pub fn floats(&mut self, values: &[f32], shape: &[usize]) -> String {
        let raw = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.constant(FLOAT, shape, raw)
    }

    fn constant(&mut self, data_type: i32, shape: &[usize], raw_data: Vec<u8>) -> String {
        let dims = dims(shape);
        let same = self.constants.iter().find(|other| {
            (other.data_type, &other.dims, &other.raw_data) == (data_type, &dims, &raw_data)
        });
        if let Some(same) = same {
            return same.name.clone();
        }
        let name = format!("constant_{}", self.constants.len());
        self.constants.push(TensorProto {
            dims,
            data_type,
            name: name.clone(),
            raw_data,
            ..TensorProto::default()
        });
        name
    }

    /// Adds a reshape of each sample, without moving elements.
    pub fn reshape(&mut self, value: &GraphValue, shape: &[usize]) -> GraphValue {
        let value = self.channels_last(value);
        if value.shape == shape {
            return value;
        }
        let name = self.reshape_to(&value.name, shape);
        GraphValue { name, shape: shape.to_vec(), channels_first: false }
    }

    /// Adds a reshape of the axes after the batch and returns the result's name.
    pub fn reshape_to(&mut self, value: &str, shape: &[usize]) -> String {
        // An extent of 0 stands for that of the input, which is the batch.
        let extents: Vec<i64> = std::iter::once(0).chain(dims(shape)).collect();
        let extents = self.ints(&extents);
        self.node("Reshape", &[value, &extents], vec![])
    }

    /// Returns the value with its channels first; values with one axis stay as they are.
    pub fn channels_first(&mut self, value: &GraphValue) -> GraphValue {
        let axes = value.shape.len() as i64;
        if value.channels_first || axes < 2 {
            return value.clone();
        }
        let order: Vec<i64> = [0, axes].into_iter().chain(1..axes).collect();
        let name = self.node("Transpose", &[&value.name], vec![ints("perm", &order)]);
        GraphValue { name, channels_first: true, ..value.clone() }
    }

    /// Returns the value with its channels last.
    pub fn channels_last(&mut self, value: &GraphValue) -> GraphValue {
        if !value.channels_first {
            return value.clone();
        }
        let axes = value.shape.len() as i64;
        let order: Vec<i64> = [0].into_iter().chain(2..=axes).chain([1]).collect();
        let name = self.node("Transpose", &[&value.name], vec![ints("perm", &order)]);
        GraphValue { name, channels_first: false, ..value.clone() }
    }
}

/// Returns extents as ONNX has them.
pub fn dims(shape: &[usize]) -> Vec<i64> {
    shape.iter().map(|extent| *extent as i64).collect()
}

/// Returns an integer attribute.
pub fn int(name: &str, value: i64) -> AttributeProto {
    AttributeProto {
        name: name.into(),
        i: Some(value),
        r#type: ATTRIBUTE_INT,
        ..AttributeProto::default()
    }
}

/// Returns an attribute of several integers.
pub fn ints(name: &str, values: &[i64]) -> AttributeProto {
    AttributeProto {
        name: name.into(),
        ints: values.to_vec(),
        r#type: ATTRIBUTE_INTS,
        ..AttributeProto::default()
    }
}

/// Returns an attribute that is a number.
pub fn float(name: &str, value: f32) -> AttributeProto {
    AttributeProto {
        name: name.into(),
        f: Some(value),
        r#type: ATTRIBUTE_FLOAT,
        ..AttributeProto::default()
    }
}

/// Returns the description of an input or output.
fn value_info(name: &str, elem_type: i32, shape: &[usize], doc: &str) -> ValueInfoProto {
    let batch = DimensionExtent::Param(BATCH.into());
    let extents = std::iter::once(batch).chain(dims(shape).into_iter().map(DimensionExtent::Value));
    let dim = extents.map(|extent| DimensionProto { extent: Some(extent) }).collect();
    let tensor_type = TensorTypeProto { elem_type, shape: Some(TensorShapeProto { dim }) };
    ValueInfoProto {
        name: name.into(),
        r#type: Some(TypeProto { tensor_type: Some(tensor_type) }),
        doc_string: doc.into(),
    }
}
