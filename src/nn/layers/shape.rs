//! Shape inference: the output shape of a layer from its input shape, per sample.

use super::spec::Layer;
use hpctrain_base::error::{Error, Result};
use hpctrain_device::Im2colShape;

/// The largest numbers of elements per sample in a layer's input or output, and of its weights.
/// Larger ones are mistakes, and their sums would overflow.
const LARGEST: [usize; 2] = [1 << 31, 1 << 40];

/// Returns the number of elements of a shape, or `None` if it exceeds `largest`.
fn elements(shape: &[usize], largest: usize) -> Option<usize> {
    shape
        .iter()
        .try_fold(1usize, |all, extent| all.checked_mul(*extent))
        .filter(|all| *all <= largest)
}

/// Returns the output shape of `layer`, whose key is `place` (such as `model.layers[3]`).
///
/// # Errors
/// Returns an error if the layer does not accept the input shape, or if one of its sizes is
/// invalid.
pub fn output_shape(layer: &Layer, place: &str, input: &[usize]) -> Result<Vec<usize>> {
    check_elements(layer, place, input, "gets")?;
    let after = result(layer, place, input)?;
    check_elements(layer, place, &after, "gives")?;
    Ok(after)
}

/// Returns an error if a shape that the layer "gets" or "gives", which is the `verb`, has too many
/// elements.
fn check_elements(layer: &Layer, place: &str, shape: &[usize], verb: &str) -> Result<()> {
    match elements(shape, LARGEST[0]) {
        Some(_) => Ok(()),
        None => Err(Error::input(format!(
            "{place} ({}) {verb} {}: too many elements",
            layer.kind(),
            format_shape(shape)
        ))
        .hint("a sample has 2147483648 at most, before and after every layer")),
    }
}

/// Returns the output shape of [`output_shape`], without the checks of sizes.
fn result(layer: &Layer, place: &str, input: &[usize]) -> Result<Vec<usize>> {
    let refused = |expected: &str, hint: String| {
        let got = format!("{place} ({}) gets {}", layer.kind(), format_shape(input));
        Err(Error::input(format!("{got}, but expects {expected}")).hint(hint))
    };
    let image = |expected: &str| match *input {
        [height, width, channels] => Ok([height, width, channels]),
        _ => refused(expected, "images are height × width × channels: reshape before".into())
            .map(|_: Vec<usize>| [0; 3]),
    };
    let positive =
        |name: &str, value: usize| match value {
            0 => Err(Error::input(format!("{place} ({}): {name} = 0", layer.kind()))
                .hint("give 1 or more")),
            _ => Ok(()),
        };
    match layer {
        Layer::Dense { units, .. } => {
            positive("units", *units)?;
            match input.split_last() {
                Some((_, rest)) => Ok([rest, &[*units]].concat()),
                None => refused("at least one axis", "flatten before".into()),
            }
        }
        Layer::Conv2d { filters, kernel, groups, .. } => {
            let [.., channels] = image("an image")?;
            positive("filters", *filters)?;
            positive("groups", *groups)?;
            positive("kernel", kernel.get()[0] * kernel.get()[1])?;
            if !channels.is_multiple_of(*groups) || !filters.is_multiple_of(*groups) {
                let expected =
                    format!("channels and filters (= {filters}) in {groups} equal groups");
                return refused(&expected, "choose groups that divide both".into());
            }
            let [rows, columns] = kernel.get();
            if elements(&[rows, columns, channels, *filters], LARGEST[1]).is_none() {
                return refused(
                    "a smaller kernel",
                    "it has more than 2^40 weights: reduce kernel or filters".into(),
                );
            }
            let [high, wide] = window_shape(layer, place, input)?.output_size();
            Ok(vec![high, wide, *filters])
        }
        Layer::MaxPool2d { kernel, .. } | Layer::AvgPool2d { kernel, .. } => {
            let [.., channels] = image("an image")?;
            positive("kernel", kernel.get()[0] * kernel.get()[1])?;
            let [high, wide] = window_shape(layer, place, input)?.output_size();
            Ok(vec![high, wide, channels])
        }
        Layer::GlobalAvgPool => Ok(vec![image("an image")?[2]]),
        Layer::Dropout { rate } if !(0.0..1.0).contains(rate) => {
            Err(Error::input(format!("{place} (dropout): rate = {rate}"))
                .hint("give at least 0 and less than 1"))
        }
        Layer::Reshape { shape } => {
            let there: usize = input.iter().product();
            match elements(shape, LARGEST[0]) {
                Some(here) if here == there => Ok(shape.clone()),
                Some(here) => refused(
                    &format!("the {here} elements of {}", format_shape(shape)),
                    format!("it has {there}"),
                ),
                None => refused(
                    &format!("the elements of {}", format_shape(shape)),
                    format!("it has {there}"),
                ),
            }
        }
        Layer::Flatten => Ok(vec![input.iter().product()]),
        Layer::Embedding { ids, width } => {
            positive("ids", *ids)?;
            positive("width", *width)?;
            match *input {
                [time] => Ok(vec![time, *width]),
                _ => refused(
                    "one axis of ids",
                    "set model.input to the number of ids a sample".into(),
                ),
            }
        }
        Layer::EmbeddingTables { ids, width, dense } => {
            positive("width", *width)?;
            positive("ids", ids.iter().copied().min().unwrap_or(0))?;
            let all = ids.iter().fold(0usize, |sum, ids| sum.saturating_add(*ids));
            if all > i32::MAX as usize {
                return Err(Error::input(format!("{place} (embedding_tables): {all} ids in all"))
                    .hint("give fewer: ids are counted with 31 bits"));
            }
            let features: usize = input.iter().product();
            match (dense.is_empty(), features) {
                (true, 0) => return Ok(vec![ids.len(), *width]),
                (true, _) => {
                    return refused(
                        "0 numbers",
                        "add `dense` layers, or set model.input=[0]".into(),
                    );
                }
                (false, 0) => {
                    return refused(
                        "numbers",
                        "set model.input to the number of dense features, or remove `dense`".into(),
                    );
                }
                (false, _) => {}
            }
            match output_shape_of_all(dense, &format!("{place}.dense"), input)? {
                row if row == [*width] => Ok(vec![1 + ids.len(), *width]),
                row => Err(Error::input(format!(
                    "{place} (embedding_tables): dense gives {}",
                    format_shape(&row)
                ))
                .hint(format!("end it with {width} units, the width of the tables"))),
            }
        }
        Layer::DotInteraction => match *input {
            [rows, width] if rows > 1 => Ok(vec![width + rows * (rows - 1) / 2]),
            _ => refused(
                "two rows or more",
                "put it behind embedding_tables, or reshape before".into(),
            ),
        },
        Layer::Residual { layers, shortcut } => {
            let body = output_shape_of_all(layers, &format!("{place}.layers"), input)?;
            let around = output_shape_of_all(shortcut, &format!("{place}.shortcut"), input)?;
            match body == around {
                true => Ok(body),
                false => Err(Error::input(format!(
                    "{place} (residual): the branch gives {}, its shortcut {}",
                    format_shape(&body),
                    format_shape(&around)
                ))
                .hint(
                    "give both the same shape, for example by a conv2d of kernel 1 in the shortcut",
                )),
            }
        }
        Layer::BatchNorm { momentum, .. } if !(0.0..=1.0).contains(momentum) => {
            Err(Error::input(format!("{place} (batch_norm): momentum = {momentum}"))
                .hint("give from 0 to 1"))
        }
        Layer::GroupNorm { groups, .. } => {
            positive("groups", *groups)?;
            match input.last() {
                Some(channels) if channels.is_multiple_of(*groups) => Ok(input.to_vec()),
                _ => refused(
                    &format!("channels in {groups} equal groups"),
                    "choose groups that divide them".into(),
                ),
            }
        }
        Layer::LayerNorm { .. } | Layer::BatchNorm { .. } | Layer::Softmax if input.is_empty() => {
            refused("at least one axis", "flatten before".into())
        }
        _ => Ok(input.to_vec()),
    }
}

/// Returns the output shape of consecutive layers, whose key is `place`.
///
/// # Errors
/// Returns an error under the conditions of [`output_shape`], and if an embedding is not the first layer.
pub fn output_shape_of_all(layers: &[Layer], place: &str, input: &[usize]) -> Result<Vec<usize>> {
    let mut shape = input.to_vec();
    for (i, layer) in layers.iter().enumerate() {
        let of_ids = matches!(layer, Layer::Embedding { .. } | Layer::EmbeddingTables { .. });
        if of_ids && (i > 0 || place != super::PLACE) {
            return Err(Error::input(format!(
                "{place}[{i}] ({}) is not the first layer",
                layer.kind()
            ))
            .hint("its input is the ids of the data: put it first"));
        }
        shape = output_shape(layer, &format!("{place}[{i}]"), &shape)?;
    }
    Ok(shape)
}

/// Returns the window of a convolution or pooling layer, with a batch of one image.
///
/// # Errors
/// Returns an error if a stride is 0, the padding is not smaller than the kernel, or the kernel
/// does not fit into the padded image.
pub fn window_shape(layer: &Layer, place: &str, input: &[usize]) -> Result<Im2colShape> {
    let (kernel, stride, padding) = match layer {
        Layer::Conv2d { kernel, stride, padding, .. } => (kernel, *stride, padding),
        Layer::MaxPool2d { kernel, stride, padding }
        | Layer::AvgPool2d { kernel, stride, padding } => {
            (kernel, stride.unwrap_or(*kernel), padding)
        }
        _ => return Err(Error::internal(format!("{place} has no window"))),
    };
    let &[height, width, channels] = input else {
        return Err(Error::internal(format!("{place} is on {}", format_shape(input))));
    };
    let size = kernel.get();
    let stride = stride.get();
    let padding = padding.get(size);
    let kind = layer.kind();
    if stride.contains(&0) {
        return Err(Error::input(format!("{place} ({kind}): stride = 0")).hint("give 1 or more"));
    }
    if padding[0] >= size[0] || padding[1] >= size[1] {
        return Err(Error::input(format!(
            "{place} ({kind}): a padding of {} for a kernel of {}",
            format_shape(&padding),
            format_shape(&size)
        ))
        .hint("give less than the kernel: some windows would contain only padding"));
    }
    if size[0] > height + 2 * padding[0] || size[1] > width + 2 * padding[1] {
        return Err(Error::input(format!(
            "{place} ({kind}) gets {}, smaller than its kernel of {}",
            format_shape(input),
            format_shape(&size)
        ))
        .hint("use a smaller kernel, more padding, or fewer strides before"));
    }
    Ok(Im2colShape { batch: 1, height, width, channels, size, stride, padding })
}

/// Formats a shape, such as `28 × 28 × 1`.
pub fn format_shape(shape: &[usize]) -> String {
    shape.iter().map(usize::to_string).collect::<Vec<_>>().join(" × ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(layers: &str, input: &[usize]) -> Result<Vec<usize>, String> {
        #[derive(serde::Deserialize)]
        struct Model {
            layers: Vec<Layer>,
        }
        let model: Model =
            toml::from_str(&format!("layers = [{layers}]")).map_err(|e| e.to_string())?;
        output_shape_of_all(&model.layers, super::super::PLACE, input).map_err(|e| e.to_string())
    }

    #[test]
    fn shapes_follow() {
        let image = |layers: &str| shape(layers, &[28, 28, 3]).unwrap();
        assert_eq!(image("{kind='conv2d', filters=8, kernel=3, padding='same'}"), [28, 28, 8]);
        assert_eq!(
            image("{kind='conv2d', filters=6, kernel=[3, 5], stride=2, groups=3}"),
            [13, 12, 6]
        );
        assert_eq!(
            image("{kind='max_pool2d', kernel=2}, {kind='flatten'}, {kind='dense', units=5}"),
            [5]
        );
        assert_eq!(image("{kind='avg_pool2d', kernel=3, stride=2, padding=1}"), [14, 14, 3]);
        assert_eq!(image("{kind='global_avg_pool'}, {kind='relu'}"), [3]);
        assert_eq!(
            shape("{kind='embedding', ids=9, width=4}, {kind='layer_norm'}", &[7]).unwrap(),
            [7, 4]
        );
        let tables =
            "{kind='embedding_tables', ids=[5, 6], width=3, dense=[{kind='dense', units=3}]}";
        assert_eq!(shape(tables, &[7]).unwrap(), [3, 3]);
        assert_eq!(shape(&format!("{tables}, {{kind='dot_interaction'}}"), &[7]).unwrap(), [6]);
        assert_eq!(shape("{kind='embedding_tables', ids=[5, 6], width=3}", &[0]).unwrap(), [2, 3]);
        assert!(shape(tables, &[0]).unwrap_err().contains("gets 0, but expects numbers"));
        assert_eq!(shape("{kind='reshape', shape=[2, 3, 1]}", &[6]).unwrap(), [2, 3, 1]);
    }

    #[test]
    fn what_does_not_fit_is_named() {
        for (layers, wanted) in [
            (
                "{kind='conv2d', filters=8, kernel=9}",
                "model.layers[0] (conv2d) gets 4 × 4 × 3, smaller than its kernel of 9 × 9",
            ),
            (
                "{kind='flatten'}, {kind='max_pool2d', kernel=2}",
                "model.layers[1] (max_pool2d) gets 48, but expects an image",
            ),
            (
                "{kind='conv2d', filters=8, kernel=3, groups=2}",
                "model.layers[0] (conv2d) gets 4 × 4 × 3, but expects channels",
            ),
            (
                "{kind='reshape', shape=[5]}",
                "model.layers[0] (reshape) gets 4 × 4 × 3, but expects the 5 elements of 5",
            ),
            (
                "{kind='conv2d', filters=8, kernel=1, stride=0}",
                "model.layers[0] (conv2d): stride = 0",
            ),
            (
                "{kind='max_pool2d', kernel=2, padding=2}",
                "a padding of 2 × 2 for a kernel of 2 × 2",
            ),
            ("{kind='dense', units=0}", "model.layers[0] (dense): units = 0"),
            (
                "{kind='group_norm', groups=2}",
                "model.layers[0] (group_norm) gets 4 × 4 × 3, but expects channels in 2 equal",
            ),
            ("{kind='batch_norm', momentum=2.0}", "model.layers[0] (batch_norm): momentum = 2"),
            ("{kind='dropout', rate=1.0}", "model.layers[0] (dropout): rate = 1"),
            (
                "{kind='relu'}, {kind='embedding', ids=2, width=2}",
                "model.layers[1] (embedding) is not the first layer",
            ),
            (
                "{kind='residual', layers=[{kind='embedding_tables', ids=[2], width=2}]}",
                "model.layers[0].layers[0] (embedding_tables) is not the first layer",
            ),
            (
                "{kind='embedding_tables', ids=[], width=2}",
                "model.layers[0] (embedding_tables): ids = 0",
            ),
            (
                "{kind='embedding_tables', ids=[5, 0], width=2}",
                "model.layers[0] (embedding_tables): ids = 0",
            ),
            (
                "{kind='embedding_tables', ids=[5], width=2}",
                "(embedding_tables) gets 4 × 4 × 3, but expects 0 numbers",
            ),
            (
                "{kind='embedding_tables', ids=[2000000000, 2000000000], width=2}",
                "model.layers[0] (embedding_tables): 4000000000 ids in all",
            ),
            (
                "{kind='embedding_tables', ids=[5], width=2, dense=[{kind='flatten'}, {kind='dense', units=3}]}",
                "model.layers[0] (embedding_tables): dense gives 3",
            ),
            (
                "{kind='embedding_tables', ids=[5], width=2, dense=[{kind='dense', units=0}]}",
                "model.layers[0].dense[0] (dense): units = 0",
            ),
            (
                "{kind='dot_interaction'}",
                "model.layers[0] (dot_interaction) gets 4 × 4 × 3, but expects two rows or more",
            ),
            (
                "{kind='residual', layers=[{kind='dense', units=4}]}",
                "model.layers[0] (residual): the branch gives 4 × 4 × 4, its shortcut 4 × 4 × 3",
            ),
            (
                "{kind='residual', layers=[{kind='flatten'}, {kind='conv2d', filters=1, kernel=1}]}",
                "model.layers[0].layers[1] (conv2d) gets 48, but expects an image",
            ),
            ("{kind='dens', units=4}", "unknown variant `dens`"),
            ("{kind='dense', units=4, filters=3}", "unknown field `filters`"),
        ] {
            let error = shape(layers, &[4, 4, 3]).unwrap_err();
            assert!(error.contains(wanted), "{layers}: {error}");
        }
    }
}
