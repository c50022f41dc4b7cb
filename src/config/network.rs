//! The network that a configuration describes, the samples that it takes, and the loss that it
//! minimises.

use super::range::out_of_range;
use super::{Config, LayerList, LossKind, Model, ModelKind, RopeScaling, bounds, rope};
use hpctrain_base::error::{Error, Result};
use hpctrain_cpu::Cpu;
use hpctrain_data::{Axes, SampleSpec};
use hpctrain_device::RegressionLoss;
use hpctrain_nn::gpt::Gpt;
use hpctrain_nn::layers::{Layer, Layers};
use hpctrain_nn::llama::Llama;
use hpctrain_nn::loss::{ContrastiveLoss, CustomLoss, Loss, Objective};
use hpctrain_nn::{CustomModel, Input, Network};

/// Returns the network that a section describes, and sets optional keys of the section to their
/// defaults. `data_vocabulary` is the number of token ids in the data, if known.
///
/// # Errors
/// Returns an error for the first invalid key, with its value and the values that are valid.
pub fn network(model: &mut Model, data_vocabulary: Option<usize>) -> Result<Network> {
    bounds::check_model(model)?;
    if let Some(own) = model.own.clone() {
        return custom_network(model, own, data_vocabulary);
    }
    if model.kind == ModelKind::Layers {
        return layer_list_network(model).map(Network::Layers);
    }
    if model.input.is_some() {
        return Err(Error::input("model.input is not a key of language models")
            .hint("omit it, or set model.kind=layers"));
    }
    let vocabulary = vocabulary(model, data_vocabulary)?;
    model.vocabulary = Some(vocabulary);
    let LayerList::Count(layers) = model.layers else {
        return Err(Error::input(
            "model.layers is a list, but transformers have a number of blocks",
        )
        .hint("set model.kind=\"layers\" for a list of layers"));
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
                return Err(Error::input(format!("{key} is not a key of GPTs"))
                    .hint("omit it, or set model.kind=llama"));
            }
            let bias = *model.bias.get_or_insert(true);
            Ok(Network::Gpt(Gpt { layers, heads, width, context, vocabulary, bias, dropout }))
        }
        ModelKind::Llama => {
            if model.bias == Some(true) {
                return Err(
                    Error::input("model.bias = true, but a Llama has no biases").hint("omit it")
                );
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
                    "model.width / model.heads = {head}, but rotary positions (RoPE) require an even number"
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
        ModelKind::Layers => layer_list_network(model).map(Network::Layers),
    }
}

/// Checks a custom model.
fn custom_network(
    model: &Model,
    own: CustomModel,
    data_vocabulary: Option<usize>,
) -> Result<Network> {
    let name = own.name();
    let elements = match own.input() {
        None => {
            return Err(Error::input(format!("model.own = {name:?} names a custom model, which only the program that defines it can build"))
                .hint("use that program to train, evaluate and predict, or omit the key"));
        }
        Some(Input::Text { context, vocabulary: ids }) => {
            vocabulary(model, data_vocabulary)?;
            if own.outputs() != *ids {
                let message =
                    format!("{name} has {} outputs for a vocabulary of {ids} ids", own.outputs());
                return Err(
                    Error::input(message).hint("outputs() must return the vocabulary of input()")
                );
            }
            *context
        }
        Some(Input::Numbers(shape)) => shape.iter().product(),
        Some(Input::Ids { count, .. }) => *count,
    };
    let made = own.blocks::<Cpu>();
    made.iter().try_for_each(|block| block.check()).map_err(|e| e.at(name))?;
    let blocks = made.len();
    if elements == 0 || own.outputs() == 0 || blocks == 0 {
        let message =
            format!("{name} has {elements} inputs, {blocks} blocks and {} outputs", own.outputs());
        return Err(Error::input(message).hint("each must be at least 1"));
    }
    Ok(Network::Custom(own))
}

/// Returns the network of a list of layers.
fn layer_list_network(model: &Model) -> Result<Layers> {
    let transformer_keys = [
        ("model.kv_heads", model.kv_heads.is_some(), "omit it"),
        ("model.hidden", model.hidden.is_some(), "omit it: dense layers have units"),
        ("model.tied", model.tied.is_some(), "omit it"),
        ("model.rope_theta", model.rope_theta.is_some(), "omit it"),
        ("model.rope_scaling", model.rope_scaling != RopeScaling::default(), "omit it"),
        ("model.norm_epsilon", model.norm_epsilon.is_some(), "omit it: layer_norm has an epsilon"),
        ("model.dropout", model.dropout != 0.0, "omit it, and add layers of kind dropout"),
        ("model.bias", model.bias == Some(true), "omit it: layers have a key bias"),
    ];
    if let Some((key, _, hint)) = transformer_keys.into_iter().find(|(_, given, _)| *given) {
        return Err(Error::input(format!("{key} is not a key of layer-list models")).hint(hint));
    }
    let (LayerList::List(layers), Some(input)) = (&model.layers, &model.input) else {
        return Err(Error::input("model.kind = layers requires model.input and [[model.layers]]")
            .hint("give the shape of a sample and a list of layers; see the presets mlp-mnist and cnn-mnist"));
    };
    let has_only_ids =
        matches!(&layers[..], [Layer::EmbeddingTables { dense, .. }, ..] if dense.is_empty());
    if input.is_empty() || input.contains(&0) && !has_only_ids {
        return Err(Error::input(format!("model.input = {input:?} has no elements"))
            .hint("give the shape of a sample"));
    }
    Layers::new(input, layers)
}

/// Returns the vocabulary size, which must not be smaller than that of the data.
fn vocabulary(model: &Model, data_vocabulary: Option<usize>) -> Result<usize> {
    match (model.vocabulary, data_vocabulary) {
        (Some(asked), Some(needed)) if asked < needed => Err(Error::input(format!(
            "model.vocabulary = {asked} is smaller than the data's vocabulary of {needed}"
        ))
        .hint(format!("set model.vocabulary = {needed}, or omit it"))),
        (Some(asked), _) => Ok(asked),
        (None, Some(needed)) => Ok(needed),
        (None, None) => Err(Error::input("the data does not say how many token ids it uses")
            .hint("set model.vocabulary")),
    }
}

/// Returns the samples that the network of a configuration takes. The vocabulary of a language
/// model need not be known yet.
///
/// # Errors
/// Returns an error if the network or its loss is invalid.
pub fn sample_spec(config: &Config) -> Result<SampleSpec> {
    if config.model.kind != ModelKind::Layers {
        return Ok(SampleSpec::Text);
    }
    let network = network(&mut config.model.clone(), None)?;
    Ok(network.sample_spec(&loss(config, &network)?))
}

/// Returns the loss that the network minimises.
pub(super) fn loss(config: &Config, network: &Network) -> Result<Loss> {
    let section = &config.loss;
    if !(0.0..1.0).contains(&section.label_smoothing) {
        return Err(out_of_range(
            "loss.label_smoothing",
            section.label_smoothing,
            "at least 0 and less than 1",
        ));
    }
    if !(section.huber_delta > 0.0 && section.huber_delta.is_finite()) {
        return Err(out_of_range("loss.huber_delta", section.huber_delta, "greater than 0"));
    }
    if network.is_language() && config.data.weights.as_ref().is_some_and(|name| !name.is_empty()) {
        return Err(
            Error::input("data.weights is not supported for language models").hint("omit it")
        );
    }
    if network.is_language() && (config.data.image_layout, config.data.scale) != (Axes::Nhwc, None)
    {
        return Err(Error::input(
            "data.image_layout and data.scale are not supported for language models",
        )
        .hint("omit them"));
    }
    if !(section.temperature > 0.0 && section.temperature.is_finite()) {
        return Err(out_of_range("loss.temperature", section.temperature, "greater than 0"));
    }
    let is_cross_entropy = section.kind == LossKind::CrossEntropy && section.own.is_none();
    if !is_cross_entropy && (section.label_smoothing != 0.0 || !section.class_weights.is_empty()) {
        return Err(Error::input(
            "loss.label_smoothing and loss.class_weights are for cross-entropy",
        )
        .hint("omit them, or set loss.kind=cross-entropy"));
    }
    if let Some(custom) = &section.own {
        return custom_loss(custom, network).map(Loss::Custom);
    }
    let deviation = match section.kind {
        LossKind::Contrastive => {
            let contrastive = ContrastiveLoss { temperature: section.temperature };
            return custom_loss(&CustomLoss::new(contrastive), network).map(Loss::Custom);
        }
        LossKind::CrossEntropy => {
            let given = section.class_weights.len();
            let classes = network.outputs();
            if given > 0 && given != classes {
                return Err(Error::input(format!(
                    "loss.class_weights has {given} weights for {classes} classes"
                ))
                .hint("give one for each class, or none"));
            }
            if let Some(weight) =
                section.class_weights.iter().find(|weight| !(**weight >= 0.0 && weight.is_finite()))
            {
                return Err(out_of_range("loss.class_weights", weight, "0 or more"));
            }
            if let Network::Layers(layers) = network
                && layers.output().len() != 1
            {
                let output = hpctrain_nn::layers::format_shape(layers.output());
                let message = format!(
                    "the last of model.layers gives {output}, but cross-entropy requires one axis of classes"
                );
                return Err(Error::input(message)
                    .hint("end with flatten and dense, or set another loss.kind"));
            }
            return Ok(Loss::CrossEntropy {
                smoothing: section.label_smoothing,
                weights: section.class_weights.clone(),
            });
        }
        LossKind::Mse => RegressionLoss::Squared,
        LossKind::Mae => RegressionLoss::Absolute,
        LossKind::Huber => RegressionLoss::Huber(section.huber_delta),
        LossKind::BinaryCrossEntropy => RegressionLoss::BinaryCrossEntropy,
    };
    if network.is_language() {
        return Err(
            Error::input("loss.kind: language models support only cross-entropy").hint("omit it")
        );
    }
    Ok(Loss::Deviation(deviation))
}

/// Checks a loss by its forward on the shapes of a network's output.
fn custom_loss(loss: &CustomLoss, network: &Network) -> Result<CustomLoss> {
    let name = loss.name();
    if !loss.is_built() {
        return Err(Error::input(format!(
            "loss.own = {name:?} names a custom loss, which only the program that defines it can compute"
        ))
        .hint("use that program, or set another loss.kind and remove loss.own"));
    }
    if matches!(network, Network::Gpt(_) | Network::Llama(_)) {
        return Err(Error::input(format!(
            "loss {name:?}: the built-in language models support only cross-entropy"
        ))
        .hint("omit it, or use it with layers or a custom model"));
    }
    if let Network::Layers(layers) = network
        && layers.output().len() != 1
    {
        let output = hpctrain_nn::layers::format_shape(layers.output());
        let message =
            format!("the last of model.layers gives {output}, but loss {name:?} requires one axis");
        return Err(Error::input(message).hint("end with flatten and dense"));
    }
    let objective = Objective::<Cpu>::new(Loss::Custom(loss.clone()), network.outputs(), false);
    // Two rows, since one may fit by chance.
    objective.peak_elements(2)?;
    Ok(loss.clone())
}
