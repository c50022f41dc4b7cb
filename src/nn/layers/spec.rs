//! The configuration of layers: `[[model.layers]]`.

use serde::{Deserialize, Serialize};

use hpctrain_device::Activation;

/// One number for rows and columns, or one for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "a number, or [rows, columns]")]
pub enum Pair {
    /// The same number for both.
    Both(usize),
    /// A number for rows and one for columns.
    Each([usize; 2]),
}

impl Pair {
    /// Returns rows and columns.
    pub fn get(self) -> [usize; 2] {
        match self {
            Pair::Both(n) => [n, n],
            Pair::Each(pair) => pair,
        }
    }
}

/// The padding of an image, in rows and columns at each edge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "\"same\", \"valid\", a number, or [rows, columns]")]
pub enum Padding {
    /// A number of rows and columns.
    Of(Pair),
    /// A named padding.
    Named(NamedPadding),
}

/// Named paddings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NamedPadding {
    /// Half the kernel: with stride 1 and an odd kernel, images keep their size.
    Same,
    /// No padding.
    Valid,
}

impl Default for Padding {
    fn default() -> Self {
        Padding::Named(NamedPadding::Valid)
    }
}

impl Padding {
    /// Returns rows and columns at each edge, for a kernel of this size.
    pub fn get(self, size: [usize; 2]) -> [usize; 2] {
        match self {
            Padding::Of(pair) => pair.get(),
            Padding::Named(NamedPadding::Same) => size.map(|n| n / 2),
            Padding::Named(NamedPadding::Valid) => [0, 0],
        }
    }
}

fn one() -> Pair {
    Pair::Both(1)
}

fn single() -> usize {
    1
}

fn yes() -> bool {
    true
}

fn epsilon() -> f32 {
    1e-5
}

fn leaky_slope() -> f32 {
    0.01
}

fn finite<'de, D: serde::Deserializer<'de>>(from: D) -> Result<f32, D::Error> {
    let number = f32::deserialize(from)?;
    if number.is_finite() {
        Ok(number)
    } else {
        Err(serde::de::Error::custom(format!("{number} is not a finite number")))
    }
}

fn not_negative<'de, D: serde::Deserializer<'de>>(from: D) -> Result<f32, D::Error> {
    let number = finite(from)?;
    if number >= 0.0 {
        Ok(number)
    } else {
        Err(serde::de::Error::custom(format!("0 or more, not {number}")))
    }
}

fn momentum() -> f32 {
    0.1
}

/// A layer. Images are height × width × channels (channels last).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Layer {
    /// A linear layer on the last axis.
    Dense {
        /// The number of outputs.
        units: usize,
        /// Whether to add a bias.
        #[serde(default = "yes")]
        bias: bool,
    },
    /// A convolution of images.
    Conv2d {
        /// The number of output channels.
        filters: usize,
        /// The rows and columns of the window.
        kernel: Pair,
        /// The stride, in rows and columns.
        #[serde(default = "one")]
        stride: Pair,
        /// `same`, `valid`, or rows and columns.
        #[serde(default)]
        padding: Padding,
        /// The number of groups: filters of a group read only the channels of the same group.
        #[serde(default = "single")]
        groups: usize,
        /// Whether to add a bias.
        #[serde(default = "yes")]
        bias: bool,
    },
    /// Max pooling.
    MaxPool2d {
        /// The rows and columns of the window.
        kernel: Pair,
        /// The stride, in rows and columns. Default: the kernel.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stride: Option<Pair>,
        /// `same`, `valid`, or rows and columns.
        #[serde(default)]
        padding: Padding,
    },
    /// Average pooling; padding does not count.
    AvgPool2d {
        /// The rows and columns of the window.
        kernel: Pair,
        /// The stride, in rows and columns. Default: the kernel.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stride: Option<Pair>,
        /// `same`, `valid`, or rows and columns.
        #[serde(default)]
        padding: Padding,
    },
    /// Global average pooling: the mean of each channel.
    GlobalAvgPool,
    /// Layer normalisation of the last axis.
    LayerNorm {
        /// The constant added to the variance.
        #[serde(default = "epsilon", deserialize_with = "not_negative")]
        epsilon: f32,
    },
    /// Batch normalisation of channels, the last axis (Ioffe and Szegedy, 2015).
    BatchNorm {
        /// The constant added to the variance.
        #[serde(default = "epsilon", deserialize_with = "not_negative")]
        epsilon: f32,
        /// The weight of a batch in the running statistics.
        #[serde(default = "momentum")]
        momentum: f32,
        /// Whether the batch is that of all ranks rather than one micro-batch.
        #[serde(default = "yes")]
        synchronised: bool,
    },
    /// Group normalisation of channels within each sample (Wu and He, 2018).
    GroupNorm {
        /// The number of groups of neighbouring channels.
        groups: usize,
        /// The constant added to the variance.
        #[serde(default = "epsilon", deserialize_with = "not_negative")]
        epsilon: f32,
    },
    /// Dropout, while training.
    Dropout {
        /// The probability of dropping an element.
        rate: f32,
    },
    /// Reshapes to one axis.
    Flatten,
    /// Reshapes without moving elements.
    Reshape {
        /// The extent of every axis.
        shape: Vec<usize>,
    },
    /// An embedding of ids; only as the first layer.
    Embedding {
        /// The number of ids, which is the number of rows of the table.
        ids: usize,
        /// The number of elements of a row.
        width: usize,
    },
    /// An embedding table for each category, and a row computed from the dense features before the
    /// embedding rows; only as the first layer.
    EmbeddingTables {
        /// The number of ids of each category, which is the number of rows of its table.
        ids: Vec<usize>,
        /// The number of elements of a row.
        width: usize,
        /// The layers on the dense features, whose output has `width` elements. If empty, samples
        /// have no dense features.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        dense: Vec<Layer>,
    },
    /// The first row, followed by the dot products of all pairs of rows (Naumov et al., "Deep
    /// learning recommendation model", 2019).
    DotInteraction,
    /// max(x, 0).
    Relu,
    /// x where it is positive, else x times a slope.
    LeakyRelu {
        /// The slope, a finite number.
        #[serde(default = "leaky_slope", deserialize_with = "finite")]
        slope: f32,
    },
    /// GELU in its tanh form.
    Gelu,
    /// x·σ(x).
    Silu,
    /// The hyperbolic tangent.
    Tanh,
    /// The logistic function.
    Sigmoid,
    /// Softmax of the last axis.
    Softmax,
    /// `shortcut(x) + body(x)`, or `x + body(x)` without a shortcut.
    Residual {
        /// The branch.
        layers: Vec<Layer>,
        /// The layers of the shortcut, or empty for `x` itself.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        shortcut: Vec<Layer>,
    },
}

impl Layer {
    /// Returns its `kind` in configurations.
    pub fn kind(&self) -> &'static str {
        match self {
            Layer::Dense { .. } => "dense",
            Layer::Conv2d { .. } => "conv2d",
            Layer::MaxPool2d { .. } => "max_pool2d",
            Layer::AvgPool2d { .. } => "avg_pool2d",
            Layer::GlobalAvgPool => "global_avg_pool",
            Layer::LayerNorm { .. } => "layer_norm",
            Layer::BatchNorm { .. } => "batch_norm",
            Layer::GroupNorm { .. } => "group_norm",
            Layer::Dropout { .. } => "dropout",
            Layer::Flatten => "flatten",
            Layer::Reshape { .. } => "reshape",
            Layer::Embedding { .. } => "embedding",
            Layer::EmbeddingTables { .. } => "embedding_tables",
            Layer::DotInteraction => "dot_interaction",
            Layer::Relu => "relu",
            Layer::LeakyRelu { .. } => "leaky_relu",
            Layer::Gelu => "gelu",
            Layer::Silu => "silu",
            Layer::Tanh => "tanh",
            Layer::Sigmoid => "sigmoid",
            Layer::Softmax => "softmax",
            Layer::Residual { .. } => "residual",
        }
    }

    /// Returns the key of the first synchronised batch normalisation in `layers`, whose key is
    /// `place`.
    pub fn synchronised(layers: &[Layer], place: &str) -> Option<String> {
        layers.iter().enumerate().find_map(|(i, layer)| match layer {
            Layer::BatchNorm { synchronised: true, .. } => Some(format!("{place}[{i}]")),
            Layer::Residual { layers, shortcut } => {
                Layer::synchronised(layers, &format!("{place}[{i}].layers"))
                    .or_else(|| Layer::synchronised(shortcut, &format!("{place}[{i}].shortcut")))
            }
            Layer::EmbeddingTables { dense, .. } => {
                Layer::synchronised(dense, &format!("{place}[{i}].dense"))
            }
            _ => None,
        })
    }

    /// Returns the activation function, if the layer is one.
    pub fn activation(&self) -> Option<Activation> {
        match self {
            Layer::Relu => Some(Activation::Relu),
            Layer::LeakyRelu { slope } => Some(Activation::LeakyRelu(*slope)),
            Layer::Gelu => Some(Activation::Gelu),
            Layer::Silu => Some(Activation::Silu),
            Layer::Tanh => Some(Activation::Tanh),
            Layer::Sigmoid => Some(Activation::Sigmoid),
            _ => None,
        }
    }
}
