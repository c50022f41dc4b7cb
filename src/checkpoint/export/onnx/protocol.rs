//! The messages of ONNX files that this program writes: those of `onnx.proto3`, which ONNX
//! publishes. Fields that are not written are omitted. The types are written for `prost` by hand,
//! so building needs no `protoc`.

use prost::{Message, Oneof};

/// The version of the file format: that of ONNX 1.12, the first with opset 17.
pub const IR_VERSION: i64 = 8;

/// The version of the operators; 17 is the first with `LayerNormalization`.
pub const OPSET: i64 = 17;

/// A file.
#[derive(Clone, PartialEq, Message)]
pub struct ModelProto {
    /// [`IR_VERSION`].
    #[prost(int64, tag = "1")]
    pub ir_version: i64,
    #[prost(string, tag = "2")]
    pub producer_name: String,
    #[prost(string, tag = "3")]
    pub producer_version: String,
    #[prost(message, optional, tag = "7")]
    pub graph: Option<GraphProto>,
    #[prost(message, repeated, tag = "8")]
    pub opset_import: Vec<OperatorSetIdProto>,
    #[prost(message, repeated, tag = "14")]
    pub metadata_props: Vec<StringStringEntryProto>,
}

/// The version of the operators of a domain; the empty domain is that of ONNX.
#[derive(Clone, PartialEq, Message)]
pub struct OperatorSetIdProto {
    #[prost(string, tag = "1")]
    pub domain: String,
    /// [`OPSET`].
    #[prost(int64, tag = "2")]
    pub version: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct StringStringEntryProto {
    #[prost(string, tag = "1")]
    pub key: String,
    #[prost(string, tag = "2")]
    pub value: String,
}

/// The operations, in an order in which each follows those that it depends on.
#[derive(Clone, PartialEq, Message)]
pub struct GraphProto {
    #[prost(message, repeated, tag = "1")]
    pub node: Vec<NodeProto>,
    #[prost(string, tag = "2")]
    pub name: String,
    #[prost(message, repeated, tag = "5")]
    pub initializer: Vec<TensorProto>,
    #[prost(message, repeated, tag = "11")]
    pub input: Vec<ValueInfoProto>,
    #[prost(message, repeated, tag = "12")]
    pub output: Vec<ValueInfoProto>,
}

#[derive(Clone, PartialEq, Message)]
pub struct NodeProto {
    #[prost(string, repeated, tag = "1")]
    pub input: Vec<String>,
    #[prost(string, repeated, tag = "2")]
    pub output: Vec<String>,
    #[prost(string, tag = "3")]
    pub name: String,
    #[prost(string, tag = "4")]
    pub op_type: String,
    #[prost(message, repeated, tag = "5")]
    pub attribute: Vec<AttributeProto>,
}

/// A constant argument of an operation. One field besides name and type is set.
#[derive(Clone, PartialEq, Message)]
pub struct AttributeProto {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(float, optional, tag = "2")]
    pub f: Option<f32>,
    #[prost(int64, optional, tag = "3")]
    pub i: Option<i64>,
    #[prost(int64, repeated, tag = "8")]
    pub ints: Vec<i64>,
    /// [`ATTRIBUTE_FLOAT`], [`ATTRIBUTE_INT`] or [`ATTRIBUTE_INTS`].
    #[prost(int32, tag = "20")]
    pub r#type: i32,
}

/// `AttributeProto.FLOAT`.
pub const ATTRIBUTE_FLOAT: i32 = 1;

/// `AttributeProto.INT`.
pub const ATTRIBUTE_INT: i32 = 2;

/// `AttributeProto.INTS`.
pub const ATTRIBUTE_INTS: i32 = 7;

/// A constant tensor, whose elements are here or in another file.
#[derive(Clone, PartialEq, Message)]
pub struct TensorProto {
    #[prost(int64, repeated, tag = "1")]
    pub dims: Vec<i64>,
    /// [`FLOAT`] or [`INT64`].
    #[prost(int32, tag = "2")]
    pub data_type: i32,
    #[prost(string, tag = "8")]
    pub name: String,
    /// The elements, little-endian and row-major.
    #[prost(bytes = "vec", tag = "9")]
    pub raw_data: Vec<u8>,
    /// `location`, `offset` and `length` of the elements in another file.
    #[prost(message, repeated, tag = "13")]
    pub external_data: Vec<StringStringEntryProto>,
    /// [`EXTERNAL`], or 0 if the elements are in `raw_data`.
    #[prost(int32, tag = "14")]
    pub data_location: i32,
}

/// `TensorProto.FLOAT`.
pub const FLOAT: i32 = 1;

/// `TensorProto.INT64`.
pub const INT64: i32 = 7;

/// `TensorProto.EXTERNAL`.
pub const EXTERNAL: i32 = 1;

/// The name and the type of an input or output.
#[derive(Clone, PartialEq, Message)]
pub struct ValueInfoProto {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(message, optional, tag = "2")]
    pub r#type: Option<TypeProto>,
    #[prost(string, tag = "3")]
    pub doc_string: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct TypeProto {
    #[prost(message, optional, tag = "1")]
    pub tensor_type: Option<TensorTypeProto>,
}

#[derive(Clone, PartialEq, Message)]
pub struct TensorTypeProto {
    /// [`FLOAT`] or [`INT64`].
    #[prost(int32, tag = "1")]
    pub elem_type: i32,
    #[prost(message, optional, tag = "2")]
    pub shape: Option<TensorShapeProto>,
}

#[derive(Clone, PartialEq, Message)]
pub struct TensorShapeProto {
    #[prost(message, repeated, tag = "1")]
    pub dim: Vec<DimensionProto>,
}

#[derive(Clone, PartialEq, Message)]
pub struct DimensionProto {
    #[prost(oneof = "DimensionExtent", tags = "1, 2")]
    pub extent: Option<DimensionExtent>,
}

/// The extent of an axis: a number, or the name of one that is known only at run time.
#[derive(Clone, PartialEq, Oneof)]
pub enum DimensionExtent {
    #[prost(int64, tag = "1")]
    Value(i64),
    #[prost(string, tag = "2")]
    Param(String),
}
