//! Layers as a configuration has them: `[[model.layers]]`.

use serde::{Deserialize, Serialize};

use hpctrain_device::Activation;

/// One number for rows and columns, or one for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "a number, or [rows, columns]")]
pub enum Pair {
    /// The same for both.
    Both(usize),
    /// Rows, columns.
    Each([usize; 2]),
}

impl Pair {
    /// Rows, columns.
    pub fn get(self) -> [usize; 2] {
        match self {
            Pair::Both(n) => [n, n],
            Pair::Each(pair) => pair,
        }
    }
}

/// Rows and columns beyond the edges of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "\"same\", \"valid\", a number, or [rows, columns]")]
pub enum Padding {
    /// So many.
    Of(Pair),
    /// A word for it.
    Named(NamedPadding),
}

/// Words for paddings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NamedPadding {
    /// Half the window: with a stride of 1 and a window of odd size, images keep their size.
    Same,
    /// None.
    Valid,
}

impl Default for Padding {
    fn default() -> Self {
        Padding::Named(NamedPadding::Valid)
    }
}

impl Padding {
    /// Rows and columns at each edge, for a window of this size.
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

/// One layer. Images are height × width × channels, channels last.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Layer {
    /// An affine map of the last axis.
    Dense {
        /// Elements of its output.
        units: usize,
        /// Add a bias.
        #[serde(default = "yes")]
        bias: bool,
    },
    /// A convolution of images.
    Conv2d {
        /// Channels of its output.
        filters: usize,
        /// Rows and columns of the window.
        kernel: Pair,
        /// Rows and columns from one place of the window to the next.
        #[serde(default = "one")]
        stride: Pair,
        /// `same`, `valid`, or rows and columns.
        #[serde(default)]
        padding: Padding,
        /// Equal parts of the channels that do not see each other.
        #[serde(default = "single")]
        groups: usize,
        /// Add a bias.
        #[serde(default = "yes")]
        bias: bool,
    },
    /// The largest element that a window sees, channel by channel.
    MaxPool2d {
        /// Rows and columns of the window.
        kernel: Pair,
        /// Rows and columns from one place to the next; left out, the window's.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stride: Option<Pair>,
        /// `same`, `valid`, or rows and columns.
        #[serde(default)]
        padding: Padding,
    },
    /// The mean of the elements that a window sees, channel by channel; edges do not count.
    AvgPool2d {
        /// Rows and columns of the window.
        kernel: Pair,
        /// Rows and columns from one place to the next; left out, the window's.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stride: Option<Pair>,
        /// `same`, `valid`, or rows and columns.
        #[serde(default)]
        padding: Padding,
    },
    /// The mean of each channel.
    GlobalAvgPool,
    /// Layer normalisation of the last axis.
    LayerNorm {
        /// Added to the variance.
        #[serde(default = "epsilon", deserialize_with = "not_negative")]
        epsilon: f32,
    },
    /// Batch normalisation of every channel, the last axis (Ioffe and Szegedy, 2015).
    BatchNorm {
        /// Added to the variance.
        #[serde(default = "epsilon", deserialize_with = "not_negative")]
        epsilon: f32,
        /// Part of the way that running statistics move to those of a batch.
        #[serde(default = "momentum")]
        momentum: f32,
        /// Whether a batch is the micro-batches of all ranks rather than that of one.
        #[serde(default = "yes")]
        synchronised: bool,
    },
    /// Normalisation of groups of channels of every sample by itself (Wu and He, 2018).
    GroupNorm {
        /// Groups of neighbouring channels.
        groups: usize,
        /// Added to the variance.
        #[serde(default = "epsilon", deserialize_with = "not_negative")]
        epsilon: f32,
    },
    /// Dropout, while training.
    Dropout {
        /// Chance to drop an element.
        rate: f32,
    },
    /// One axis.
    Flatten,
    /// The same elements in other axes.
    Reshape {
        /// Extent of every axis.
        shape: Vec<usize>,
    },
    /// A row of a table for each id; only as the first layer.
    Embedding {
        /// Ids.
        ids: usize,
        /// Elements of a row.
        width: usize,
    },
    /// A row of a table for each of a sample's categories, every category with a table of its own,
    /// and before them a row that layers make of the sample's numbers; only as the first layer.
    EmbeddingTables {
        /// Ids of each category: rows of its table.
        ids: Vec<usize>,
        /// Elements of a row.
        width: usize,
        /// Layers on the sample's numbers, which end with `width` elements; without any, samples
        /// have no numbers.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        dense: Vec<Layer>,
    },
    /// The first row, then the scalar products of all pairs of rows (Naumov et al., "Deep learning
    /// recommendation model", 2019).
    DotInteraction,
    /// max(x, 0).
    Relu,
    /// x where it is positive, else x times a slope.
    LeakyRelu {
        /// The slope; any finite number.
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
    /// `shortcut(x) + body(x)`; without a shortcut, x itself.
    Residual {
        /// The branch.
        layers: Vec<Layer>,
        /// The branch of the shortcut; x itself if empty.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        shortcut: Vec<Layer>,
    },
}

impl Layer {
    /// Its word in configurations.
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

    /// Place of the first batch normalisation that all ranks share in `layers`, which stand at
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

    /// The function of every element that it is, if it is one.
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
