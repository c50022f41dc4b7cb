//! Layer-list (sequential) models, as configurations list them.
//!
//! A layer list is checked, and its shapes are inferred, when the configuration is resolved. `spec`
//! is the configuration, `shape` infers shapes, `layer` computes. Layers are grouped into blocks
//! (`block`) that begin at a layer with parameters. In a unit, tensors with weight decay come
//! first, whatever the order of their layers.

mod activation;
mod block;
mod channel_norm;
mod conv;
mod dense;
mod dense_features;
mod dot_interaction;
mod dropout;
mod embedding;
mod embedding_tables;
mod init;
mod layer;
mod norm;
mod pool;
mod residual;
mod sequential;
mod shape;
mod softmax;
mod spec;

use activation::ActivationLayer;
use block::LayerBlock;
use channel_norm::{ChannelNorm, NormScope};
use conv::Conv;
use dense::Dense;
use dense_features::DenseFeatures;
use dot_interaction::Interaction;
use dropout::DropoutLayer;
use embedding::Embedding;
use embedding_tables::EmbeddingTables;
use layer::{LayerOp, Op as _};
use norm::LayerNorm;
use pool::{PoolLayer, PoolReduction};
use residual::Residual;
use sequential::Sequence;
use softmax::Softmax;

use super::Blocks;
use super::network::LayerSummary;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::trained;
use hpctrain_data::Ids;
use hpctrain_device::{Im2colShape, Kernels};

pub use shape::{format_shape, output_shape, window_shape};
pub use spec::{Layer, NamedPadding, Padding, Pair};

/// The key of the layer list in the configuration.
const PLACE: &str = "model.layers";

/// A layer-list model with checked shapes.
#[derive(Debug, Clone, PartialEq)]
pub struct Layers {
    /// The input shape of a sample.
    input: Vec<usize>,
    /// The output shape of a sample.
    output: Vec<usize>,
    /// The layers of each block, with the block's name.
    blocks: Vec<(String, Sequence)>,
    /// See [`Layers::ids`].
    ids: Ids,
    summary: Vec<LayerSummary>,
    /// See [`Layers::single`].
    single: Option<(String, bool)>,
}

impl Layers {
    /// Creates the model with `layers` on samples of shape `input`.
    ///
    /// # Errors
    /// Returns an error if a layer cannot take the output of the one before, or if no layer has
    /// parameters.
    pub fn new(input: &[usize], layers: &[Layer]) -> Result<Self> {
        let output = shape::output_shape_of_all(layers, PLACE, input)?;
        let ids = match layers.first() {
            Some(Layer::Embedding { ids, .. }) => Ids::Input(*ids),
            Some(Layer::EmbeddingTables { ids, .. }) => Ids::Tables(ids.as_slice().into()),
            _ => Ids::None,
        };
        let mut compiler =
            Compiler { shape: input.to_vec(), sites: 0, summary: vec![], single: None };
        let mut steps = compiler.compile(layers, "layers", PLACE)?.into_iter();
        let mut blocks: Vec<(String, Sequence)> = Vec::new();
        let mut waiting = Vec::new();
        for (place, step) in steps.by_ref() {
            let has_parameters = !step.tensors().is_empty();
            waiting.push(step);
            match (has_parameters, blocks.last_mut()) {
                (true, _) => blocks.push((place, Sequence(std::mem::take(&mut waiting)))),
                (false, Some((_, last))) => last.0.append(&mut waiting),
                // Layers before the first one with parameters belong to its block.
                (false, None) => {}
            }
        }
        if blocks.is_empty() {
            return Err(Error::input("model.layers has no layer with parameters")
                .hint("add a dense or conv2d layer"));
        }
        let Compiler { summary, single, .. } = compiler;
        Ok(Self { input: input.to_vec(), output, blocks, ids, summary, single })
    }

    /// Returns the same model with its embedding tables as a separate first block. Returns `None`
    /// if the first layer is not an embedding, or if no other layer has parameters. The names of
    /// tensors and their values stay.
    #[must_use]
    pub fn with_separate_embedding(&self) -> Option<Self> {
        let ((name, Sequence(steps)), behind) = self.blocks.split_first()?;
        let (first, rest) = steps.split_first()?;
        let (tables, numbers) = match first {
            LayerOp::Embedding(_) => (first.clone(), None),
            LayerOp::Tables(tables) => {
                let (tables, numbers) = tables.split_dense_features();
                (LayerOp::Tables(tables), numbers.map(LayerOp::DenseFeatures))
            }
            _ => return None,
        };
        let mut behind = behind.to_vec();
        match (numbers, behind.first_mut()) {
            (Some(numbers), _) => {
                let rest = std::iter::once(numbers).chain(rest.iter().cloned()).collect();
                behind.insert(0, (format!("{name}.dense"), Sequence(rest)));
            }
            (None, Some((_, next))) => drop(next.0.splice(0..0, rest.iter().cloned())),
            (None, None) => return None,
        }
        let blocks =
            std::iter::once((name.clone(), Sequence(vec![tables]))).chain(behind).collect();
        Some(Self { blocks, ..self.clone() })
    }

    /// Returns the model as blocks.
    pub fn blocks<B: Kernels>(&self) -> Blocks<B> {
        let blocks = self.blocks.iter().enumerate();
        blocks
            .map(|(i, (name, layers))| {
                Box::new(LayerBlock::new(name.clone(), layers.clone(), i == 0)) as _
            })
            .collect()
    }

    /// Returns the input shape of a sample.
    pub fn input(&self) -> &[usize] {
        &self.input
    }

    /// Returns the output shape of a sample.
    pub fn output(&self) -> &[usize] {
        &self.output
    }

    /// Returns the summaries of all layers, in order.
    pub fn summary(&self) -> &[LayerSummary] {
        &self.summary
    }

    /// Returns the summaries of all blocks, in order.
    pub fn blocks_summary(&self) -> Vec<LayerSummary> {
        self.blocks.iter().map(|(name, layers)| block_summary(name, layers)).collect()
    }

    /// Returns the ids that it takes, as its input or besides it.
    pub fn ids(&self) -> &Ids {
        &self.ids
    }

    /// Returns the key of a batch normalisation that sees a single value per channel and sample, so
    /// that one sample has no variance, and whether it is synchronised.
    pub fn single_value_batch_norm(&self) -> Option<(&str, bool)> {
        self.single.as_ref().map(|(place, synchronised)| (place.as_str(), *synchronised))
    }

    /// Returns the number of layers that compute something.
    pub fn len(&self) -> usize {
        // The dense features belong to the layer of embedding tables, even as a separate step.
        let steps = self.blocks.iter().flat_map(|(_, layers)| &layers.0);
        steps.filter(|step| !matches!(step, LayerOp::DenseFeatures(_))).count()
    }

    /// Returns false: there is always at least one layer.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Returns the summary of a block with this name.
fn block_summary(name: &str, layers: &Sequence) -> LayerSummary {
    let sizes = layers.sizes();
    LayerSummary {
        name: name.to_owned(),
        output: vec![sizes.output],
        parameters: trained(&layers.tensors()),
        flops: layers.flops(),
        kept: sizes.kept + sizes.saved_f32 + sizes.output,
    }
}

/// Infers shapes from layer to layer.
struct Compiler {
    shape: Vec<usize>,
    /// The number of dropout layers so far.
    sites: usize,
    /// The summaries of the top-level layers.
    summary: Vec<LayerSummary>,
    /// See [`Layers::single`].
    single: Option<(String, bool)>,
}

impl Compiler {
    /// Returns the layers that compute something, with their names.
    fn compile(
        &mut self,
        layers: &[Layer],
        name: &str,
        place: &str,
    ) -> Result<Vec<(String, LayerOp)>> {
        let mut steps = Vec::new();
        for (i, layer) in layers.iter().enumerate() {
            let name = format!("{name}.{i}");
            let place = format!("{place}[{i}]");
            let after = output_shape(layer, &place, &self.shape)?;
            let step = self.step(layer, &name, &place)?;
            if place.matches('[').count() == 1 {
                let (kept, parameters, flops) = step.as_ref().map_or((0, 0, 0), |step| {
                    let sizes = step.sizes();
                    let tensors = step.tensors();
                    // The input of the next layer is saved as well.
                    (sizes.kept + sizes.saved_f32 + sizes.output, trained(&tensors), step.flops())
                });
                self.summary.push(LayerSummary {
                    name: format!("{name} {}", layer.kind()),
                    output: after.clone(),
                    parameters,
                    flops,
                    kept,
                });
            }
            steps.extend(step.map(|step| (name, step)));
            self.shape = after;
        }
        Ok(steps)
    }

    /// Returns the number of rows per sample and of elements per row.
    fn rows(&self) -> (usize, usize) {
        let (width, rest) = self.shape.split_last().unwrap_or((&1, &[]));
        (rest.iter().product(), *width)
    }

    fn step(&mut self, layer: &Layer, name: &str, place: &str) -> Result<Option<LayerOp>> {
        let (elements, (rows, width)) = (self.shape.iter().product(), self.rows());
        let name = name.to_string();
        Ok(Some(match layer {
            Layer::Flatten | Layer::Reshape { .. } => return Ok(None),
            Layer::Dense { units, bias } => {
                LayerOp::Dense(Dense { name, rows, inputs: width, outputs: *units, bias: *bias })
            }
            Layer::Conv2d { filters, groups, bias, .. } => {
                let window = window_shape(layer, place, &self.shape)?;
                LayerOp::Conv(Conv {
                    name,
                    window,
                    filters: *filters,
                    groups: *groups,
                    bias: *bias,
                })
            }
            Layer::MaxPool2d { .. } => LayerOp::Pool(PoolLayer {
                window: window_shape(layer, place, &self.shape)?,
                reduction: PoolReduction::Max,
            }),
            Layer::AvgPool2d { .. } => LayerOp::Pool(PoolLayer {
                window: window_shape(layer, place, &self.shape)?,
                reduction: PoolReduction::Mean,
            }),
            Layer::GlobalAvgPool => {
                let &[height, width, channels] = &self.shape[..] else {
                    return Err(Error::internal(format!(
                        "{place} is on {}",
                        format_shape(&self.shape)
                    )));
                };
                let size = [height, width];
                let window = Im2colShape {
                    batch: 1,
                    height,
                    width,
                    channels,
                    size,
                    stride: size,
                    padding: [0, 0],
                };
                LayerOp::Pool(PoolLayer { window, reduction: PoolReduction::Mean })
            }
            Layer::LayerNorm { epsilon } => {
                LayerOp::Norm(LayerNorm { name, rows, width, epsilon: *epsilon })
            }
            Layer::BatchNorm { epsilon, momentum, synchronised } => {
                let over = NormScope::Batch { momentum: *momentum, synchronised: *synchronised };
                if rows == 1 && self.single.as_ref().is_none_or(|(_, synchronised)| *synchronised) {
                    self.single = Some((place.to_string(), *synchronised));
                }
                LayerOp::Channels(ChannelNorm {
                    name,
                    places: rows,
                    channels: width,
                    epsilon: *epsilon,
                    scope: over,
                })
            }
            Layer::GroupNorm { groups, epsilon } => {
                let over = NormScope::Groups(*groups);
                LayerOp::Channels(ChannelNorm {
                    name,
                    places: rows,
                    channels: width,
                    epsilon: *epsilon,
                    scope: over,
                })
            }
            Layer::Dropout { rate } => {
                self.sites += 1;
                LayerOp::Drop(DropoutLayer { site: self.sites, rate: *rate, elements })
            }
            Layer::Embedding { ids, width } => {
                LayerOp::Embedding(Embedding { name, ids: *ids, time: elements, width: *width })
            }
            Layer::EmbeddingTables { ids, width, dense } => {
                let dense =
                    self.compile(dense, &format!("{name}.dense"), &format!("{place}.dense"))?;
                let tables = ids.len();
                let width = *width;
                let features = elements;
                let numbers = (!dense.is_empty()).then(|| DenseFeatures {
                    tables,
                    width,
                    features,
                    dense: sequence(dense),
                });
                LayerOp::Tables(EmbeddingTables {
                    name,
                    ids: ids.clone(),
                    width,
                    dense_features: numbers,
                })
            }
            Layer::DotInteraction => LayerOp::Interaction(Interaction { rows, width }),
            Layer::Softmax => LayerOp::Softmax(Softmax { width, elements }),
            Layer::Residual { layers, shortcut } => {
                let before = self.shape.clone();
                let body =
                    self.compile(layers, &format!("{name}.layers"), &format!("{place}.layers"))?;
                self.shape = before.clone();
                let around = self.compile(
                    shortcut,
                    &format!("{name}.shortcut"),
                    &format!("{place}.shortcut"),
                )?;
                self.shape = before;
                if body.is_empty() {
                    return Err(Error::input(format!(
                        "{place} (residual): the branch in `layers` computes nothing"
                    ))
                    .hint("put layers into it, or remove the residual layer"));
                }
                let shortcut = (!around.is_empty()).then(|| sequence(around));
                LayerOp::Residual(Residual { body: sequence(body), shortcut })
            }
            function => match function.activation() {
                Some(f) => LayerOp::Function(ActivationLayer { f, elements }),
                None => {
                    return Err(Error::internal(format!("{place} is not an activation function")));
                }
            },
        }))
    }
}

/// Returns the steps without their names.
fn sequence(steps: Vec<(String, LayerOp)>) -> Sequence {
    Sequence(steps.into_iter().map(|(_, step)| step).collect())
}
