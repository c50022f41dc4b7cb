//! The network that a configuration describes, the samples that it takes, and the loss that it
//! minimises.

use super::range::out_of_range;
use super::{Config, LayerList, LossKind, Model, ModelKind, RopeScaling, bounds, rope};
use hpctrain_base::error::{Error, Result};
use hpctrain_cpu::Cpu;
use hpctrain_data::{Axes, SampleSpec};
use hpctrain_device::Deviation;
use hpctrain_nn::gpt::Gpt;
use hpctrain_nn::layers::{Layer, Layers};
use hpctrain_nn::llama::Llama;
use hpctrain_nn::loss::Loss;
use hpctrain_nn::{CustomModel, Input, Network};

/// The network that a section describes; fills the keys that it leaves open. `of_data` is the
/// number of token ids in the data, if that is known.
///
/// # Errors
/// The first invalid key, with its value and the values that are valid.
pub fn network(model: &mut Model, of_data: Option<usize>) -> Result<Network> {
    bounds::check_model(model)?;
    if let Some(own) = model.own.clone() {
        return own_network(model, own, of_data);
    }
    if model.kind == ModelKind::Layers {
        return by_layers(model).map(Network::Layers);
    }
    if model.input.is_some() {
        return Err(Error::input("model.input is not of a language model")
            .hint("leave it out, or set model.kind=layers"));
    }
    let vocabulary = vocabulary(model, of_data)?;
    model.vocabulary = Some(vocabulary);
    let LayerList::Count(layers) = model.layers else {
        return Err(Error::input(
            "model.layers is a list, but transformers have a number of blocks",
        )
        .hint("set model.kind=\"layers\" for a network by layers"));
    };
    if layers == 0 {
        return Err(out_of_range("model.layers", 0, "at least 1"));
    }
    let Model { heads, width, context, dropout, .. } = *model;
    match model.kind {
        ModelKind::Gpt => {
            let of_llama = [
                ("model.kv_heads", model.kv_heads.is_some()),
                ("model.hidden", model.hidden.is_some()),
                ("model.tied", model.tied.is_some()),
                ("model.rope_theta", model.rope_theta.is_some()),
                ("model.rope_scaling", model.rope_scaling != RopeScaling::default()),
                ("model.norm_epsilon", model.norm_epsilon.is_some()),
            ];
            if let Some((key, _)) = of_llama.into_iter().find(|(_, given)| *given) {
                return Err(Error::input(format!("{key} is not of a GPT"))
                    .hint("leave it out, or set model.kind=llama"));
            }
            let bias = *model.bias.get_or_insert(true);
            Ok(Network::Gpt(Gpt { layers, heads, width, context, vocabulary, bias, dropout }))
        }
        ModelKind::Llama => {
            if model.bias == Some(true) {
                return Err(Error::input("model.bias = true, but a Llama has no biases")
                    .hint("leave it out"));
            }
            model.bias = Some(false);
            let kv_heads = *model.kv_heads.get_or_insert(heads);
            if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
                let some =
                    (1..=heads).filter(|kv| heads.is_multiple_of(*kv)).map(|kv| kv.to_string());
                return Err(Error::input(format!(
                    "model.kv_heads = {kv_heads} does not divide model.heads = {heads}"
                ))
                .hint(format!("one of {} does", some.collect::<Vec<_>>().join(", "))));
            }
            if !(width / heads).is_multiple_of(2) {
                let head = width / heads;
                return Err(Error::input(format!(
                    "model.width / model.heads = {head}, but rotary positions turn pairs"
                ))
                .hint(format!(
                    "a width of {} has heads of {}",
                    (head + 1) * heads,
                    head + 1
                )));
            }
            let hidden = *model.hidden.get_or_insert((width * 8).div_ceil(3).next_multiple_of(64));
            let rope_theta = *model.rope_theta.get_or_insert(10_000.0);
            let epsilon = *model.norm_epsilon.get_or_insert(1e-5);
            if hidden == 0 {
                return Err(out_of_range("model.hidden", 0, "at least 1"));
            }
            if !(rope_theta >= 1.0 && rope_theta.is_finite()) {
                return Err(out_of_range("model.rope_theta", rope_theta, "at least 1"));
            }
            if !(epsilon > 0.0 && epsilon.is_finite()) {
                return Err(out_of_range("model.norm_epsilon", epsilon, "greater than 0"));
            }
            let rope_scaling = rope::scaling(&model.rope_scaling)?;
            let epsilon = epsilon as f32;
            let tied = *model.tied.get_or_insert(false);
            let llama = Llama {
                layers,
                heads,
                kv_heads,
                width,
                hidden,
                context,
                vocabulary,
                rope_theta,
                rope_scaling,
                epsilon,
                tied,
                dropout,
            };
            Ok(Network::Llama(llama))
        }
        ModelKind::Layers => by_layers(model).map(Network::Layers),
    }
}

/// A network that a program has built.
fn own_network(model: &Model, own: CustomModel, of_data: Option<usize>) -> Result<Network> {
    let name = own.name();
    let elements = match own.input() {
        None => {
            return Err(Error::input(format!("model.own = {name:?}: the network is a program's own"))
                .hint("use that program: it can train it, evaluate it and predict with it; or leave the key out"));
        }
        Some(Input::Text { context, vocabulary: ids }) => {
            vocabulary(model, of_data)?;
            if own.outputs() != *ids {
                let message = format!(
                    "{name}: {} outputs, but text of {ids} ids has as many to predict",
                    own.outputs()
                );
                return Err(
                    Error::input(message).hint("let outputs() be the vocabulary of input()")
                );
            }
            *context
        }
        Some(Input::Numbers(shape)) => shape.iter().product(),
        Some(Input::Ids { count, .. }) => *count,
    };
    let blocks = own.blocks::<Cpu>().len();
    if elements == 0 || own.outputs() == 0 || blocks == 0 {
        let message =
            format!("{name} has {elements} inputs, {blocks} blocks and {} outputs", own.outputs());
        return Err(Error::input(message).hint("each must be at least 1"));
    }
    Ok(Network::Own(own))
}

/// A network by layers.
fn by_layers(model: &Model) -> Result<Layers> {
    let of_transformers = [
        ("model.kv_heads", model.kv_heads.is_some(), "leave it out"),
        ("model.hidden", model.hidden.is_some(), "leave it out: dense layers have units"),
        ("model.tied", model.tied.is_some(), "leave it out"),
        ("model.rope_theta", model.rope_theta.is_some(), "leave it out"),
        ("model.rope_scaling", model.rope_scaling != RopeScaling::default(), "leave it out"),
        (
            "model.norm_epsilon",
            model.norm_epsilon.is_some(),
            "leave it out: layer_norm has an epsilon",
        ),
        (
            "model.dropout",
            model.dropout != 0.0,
            "leave it out, and put dropout layers where they are to be",
        ),
        ("model.bias", model.bias == Some(true), "leave it out: layers have their own"),
    ];
    if let Some((key, _, hint)) = of_transformers.into_iter().find(|(_, given, _)| *given) {
        return Err(Error::input(format!("{key} is not of a network by layers")).hint(hint));
    }
    let (LayerList::List(layers), Some(input)) = (&model.layers, &model.input) else {
        return Err(Error::input("model.kind = layers wants model.input and [[model.layers]]")
            .hint("give the shape of a sample and a list of layers; see the presets mlp-mnist and cnn-mnist"));
    };
    let of_ids_alone =
        matches!(&layers[..], [Layer::EmbeddingTables { dense, .. }, ..] if dense.is_empty());
    if input.is_empty() || input.contains(&0) && !of_ids_alone {
        return Err(Error::input(format!("model.input = {input:?} has no elements"))
            .hint("give the shape of a sample"));
    }
    Layers::new(input, layers)
}

/// Token ids, which must be enough for the data.
fn vocabulary(model: &Model, of_data: Option<usize>) -> Result<usize> {
    match (model.vocabulary, of_data) {
        (Some(asked), Some(needed)) if asked < needed => Err(Error::input(format!(
            "model.vocabulary = {asked} is smaller than the data's vocabulary of {needed}"
        ))
        .hint(format!("set model.vocabulary = {needed}, or leave it out"))),
        (Some(asked), _) => Ok(asked),
        (None, Some(needed)) => Ok(needed),
        (None, None) => Err(Error::input("the data does not say how many token ids it uses")
            .hint("set model.vocabulary")),
    }
}

/// The samples that the network of a configuration takes. The vocabulary of a language model may
/// still be open.
///
/// # Errors
/// The network or its loss is not possible.
pub fn sample_spec(config: &Config) -> Result<SampleSpec> {
    if config.model.kind != ModelKind::Layers {
        return Ok(SampleSpec::Text);
    }
    let network = network(&mut config.model.clone(), None)?;
    Ok(network.sample_spec(&loss(config, &network)?))
}

/// The loss that the network minimises.
pub(super) fn loss(config: &Config, network: &Network) -> Result<Loss> {
    let own = &config.loss;
    if !(0.0..1.0).contains(&own.label_smoothing) {
        return Err(out_of_range(
            "loss.label_smoothing",
            own.label_smoothing,
            "at least 0 and less than 1",
        ));
    }
    if !(own.huber_delta > 0.0 && own.huber_delta.is_finite()) {
        return Err(out_of_range("loss.huber_delta", own.huber_delta, "greater than 0"));
    }
    if network.is_language() && config.data.weights.as_ref().is_some_and(|name| !name.is_empty()) {
        return Err(
            Error::input("data.weights: samples of language models have none").hint("leave it out")
        );
    }
    if network.is_language() && (config.data.image_layout, config.data.scale) != (Axes::Nhwc, None)
    {
        return Err(Error::input(
            "data.image_layout and data.scale: samples of language models are ids",
        )
        .hint("leave them out"));
    }
    let by = match own.kind {
        LossKind::CrossEntropy => {
            let given = own.class_weights.len();
            let classes = network.outputs();
            if given > 0 && given != classes {
                return Err(Error::input(format!(
                    "loss.class_weights has {given} weights for {classes} classes"
                ))
                .hint("give one for each class, or none"));
            }
            if let Some(weight) =
                own.class_weights.iter().find(|weight| !(**weight >= 0.0 && weight.is_finite()))
            {
                return Err(out_of_range("loss.class_weights", weight, "0 or more"));
            }
            if let Network::Layers(layers) = network
                && layers.output().len() != 1
            {
                let output = hpctrain_nn::layers::shown(layers.output());
                let message = format!(
                    "the last of model.layers gives {output}, but cross-entropy wants one axis of classes"
                );
                return Err(Error::input(message)
                    .hint("end with flatten and dense, or set another loss.kind"));
            }
            return Ok(Loss::CrossEntropy {
                smoothing: own.label_smoothing,
                weights: own.class_weights.clone(),
            });
        }
        LossKind::Mse => Deviation::Squared,
        LossKind::Mae => Deviation::Absolute,
        LossKind::Huber => Deviation::Huber(own.huber_delta),
        LossKind::BinaryCrossEntropy => Deviation::Binary,
    };
    if network.is_language() {
        return Err(Error::input("loss.kind: language models predict tokens")
            .hint("leave it out: cross-entropy"));
    }
    if own.label_smoothing != 0.0 || !own.class_weights.is_empty() {
        return Err(Error::input(
            "loss.label_smoothing and loss.class_weights are for cross-entropy",
        )
        .hint("leave them out, or set loss.kind=cross-entropy"));
    }
    Ok(Loss::Deviation(by))
}
