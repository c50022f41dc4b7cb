//! The messages of TensorBoard's events files that this program writes: those of `event.proto`,
//! `summary.proto` and `tensor.proto`, which TensorBoard publishes under
//! `tensorboard/compat/proto`. Fields that are not written are omitted. The types are written for
//! `prost` by hand, so building needs no `protoc`.

use prost::{Message, Oneof};

/// One record of an events file.
#[derive(Clone, PartialEq, Message)]
pub struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    pub wall_time: f64,
    /// The number of finished steps.
    #[prost(int64, tag = "2")]
    pub step: i64,
    #[prost(oneof = "What", tags = "3, 5, 7")]
    pub what: Option<What>,
}

/// The content of an event.
#[derive(Clone, PartialEq, Oneof)]
pub enum What {
    /// The first record of a file: [`VERSION`].
    #[prost(string, tag = "3")]
    FileVersion(String),
    #[prost(message, tag = "5")]
    Summary(Summary),
    #[prost(message, tag = "7")]
    SessionLog(SessionLog),
}

/// The version of the files. Readers handle [`START`] since this version.
pub const VERSION: &str = "brain.Event:2";

/// A message about the program that writes events.
#[derive(Clone, PartialEq, Message)]
pub struct SessionLog {
    /// [`START`].
    #[prost(int32, tag = "1")]
    pub status: i32,
}

/// The program has started at the event's step: readers discard what they have read of this step
/// and later ones.
pub const START: i32 = 1;

#[derive(Clone, PartialEq, Message)]
pub struct Summary {
    #[prost(message, repeated, tag = "1")]
    pub value: Vec<Value>,
}

/// A value with a tag.
#[derive(Clone, PartialEq, Message)]
pub struct Value {
    #[prost(string, tag = "1")]
    pub tag: String,
    #[prost(message, optional, tag = "9")]
    pub metadata: Option<Metadata>,
    #[prost(oneof = "Content", tags = "2, 5, 8")]
    pub content: Option<Content>,
}

#[derive(Clone, PartialEq, Oneof)]
pub enum Content {
    #[prost(float, tag = "2")]
    Simple(f32),
    #[prost(message, tag = "5")]
    Histogram(Histogram),
    #[prost(message, tag = "8")]
    Tensor(Tensor),
}

/// A histogram: `bucket[i]` values lie between `bucket_limit[i - 1]` and `bucket_limit[i]`.
#[derive(Clone, PartialEq, Message)]
pub struct Histogram {
    #[prost(double, tag = "1")]
    pub min: f64,
    #[prost(double, tag = "2")]
    pub max: f64,
    /// The number of values.
    #[prost(double, tag = "3")]
    pub num: f64,
    #[prost(double, tag = "4")]
    pub sum: f64,
    #[prost(double, tag = "5")]
    pub sum_squares: f64,
    #[prost(double, repeated, tag = "6")]
    pub bucket_limit: Vec<f64>,
    #[prost(double, repeated, tag = "7")]
    pub bucket: Vec<f64>,
}

/// Metadata of a value: the plugin of TensorBoard that shows it.
#[derive(Clone, PartialEq, Message)]
pub struct Metadata {
    #[prost(message, optional, tag = "1")]
    pub plugin: Option<Plugin>,
    /// The class of its data: [`TENSORS`].
    #[prost(int32, tag = "4")]
    pub data_class: i32,
}

/// The data class of texts.
pub const TENSORS: i32 = 2;

#[derive(Clone, PartialEq, Message)]
pub struct Plugin {
    #[prost(string, tag = "1")]
    pub name: String,
}

/// A tensor of strings.
#[derive(Clone, PartialEq, Message)]
pub struct Tensor {
    /// [`STRINGS`].
    #[prost(int32, tag = "1")]
    pub dtype: i32,
    #[prost(message, optional, tag = "2")]
    pub shape: Option<Shape>,
    #[prost(bytes = "vec", repeated, tag = "8")]
    pub string_val: Vec<Vec<u8>>,
}

/// `DT_STRING`.
pub const STRINGS: i32 = 7;

#[derive(Clone, PartialEq, Message)]
pub struct Shape {
    #[prost(message, repeated, tag = "2")]
    pub dim: Vec<Dim>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Dim {
    #[prost(int64, tag = "1")]
    pub size: i64,
}
