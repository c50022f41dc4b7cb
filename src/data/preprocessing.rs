//! Preprocessing: the scale, columns, classes and tokenizer that turn stored samples into inputs
//! and targets. Shards describe it, checkpoints record it, and other data are converted to it, so
//! that a network gets new samples in the form that it was trained on.
//!
//! A shard describes its own preprocessing, and a manifest records that of the training data. Users
//! of a checkpoint convert their data to it (`Manifest::conform`, `Source::conform`), which only
//! changes how rows are read.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Tokenizer;
use super::columns::{Category, Coding, Columns, UNKNOWN};
use super::lookup::Lookup;
use super::normalization::MeanStd;
use hpctrain_base::error::{Error, Result};

/// The conversion of stored samples into inputs and classes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Preprocessing {
    /// The scales of inputs: one, or the distinct scales of the data sets of a mixture; empty if
    /// inputs are not numbers. `null` stands for numbers that are used as they are stored.
    #[serde(default)]
    pub scales: Vec<Option<Scale>>,
    /// The columns of a table by their use, and the mapping of categories to ids.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub columns: Option<Columns>,
    /// The names of the classes in the order of their numbers; empty if they have none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<String>,
    /// The tokenizer of text. A manifest has it in a separate field.
    #[serde(skip)]
    pub tokenizer: Option<Tokenizer>,
}

/// The normalisation of inputs: the mean is subtracted, and the result divided by the deviation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Scale {
    /// The means, one for each index of the last axis of inputs, or of a whole row.
    pub mean: Vec<f32>,
    /// The standard deviations, as many as means.
    pub std: Vec<f32>,
}

impl From<&MeanStd> for Scale {
    fn from(MeanStd { mean, std }: &MeanStd) -> Self {
        Self { mean: mean.clone(), std: std.clone() }
    }
}

/// The preprocessing that a shard describes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct DescribedPreprocessing {
    pub scale: Option<Scale>,
    #[serde(with = "columns")]
    pub columns: Option<Arc<Columns>>,
    pub classes: Vec<String>,
}

/// Serialisation of shared columns, like that of owned ones.
mod columns {
    use std::sync::Arc;

    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    use crate::Columns;

    pub fn serialize<S: Serializer>(
        columns: &Option<Arc<Columns>>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        columns.as_deref().serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<Arc<Columns>>, D::Error> {
        Ok(Option::<Columns>::deserialize(from)?.map(Arc::new))
    }
}

/// The conversion of a shard's samples to a preprocessing.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Transform {
    pub scale: Option<MeanStd>,
    /// The stored index of each number of a row; `None` if the order is the same.
    pub numbers: Option<Vec<usize>>,
    /// The stored column of each category, with the new id of each stored id if ids differ; `None`
    /// if nothing differs.
    pub categories: Option<Vec<Recoded>>,
    /// The new class of each stored class; `None` if classes keep their numbers.
    pub classes: Option<Vec<u32>>,
}

/// The stored column of a category, and the new ids of its values if they differ.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Recoded {
    pub column: usize,
    pub ids: Option<Vec<u32>>,
}

/// The parts of a sample that are converted.
#[derive(Debug, Clone, Copy)]
pub(super) struct Converted {
    /// The number of numbers in a row of inputs.
    pub numbers: usize,
    pub classes: bool,
}

impl Transform {
    /// Creates the conversion of samples stored with the preprocessing `own` to the preprocessing
    /// `to`. Adds a description of each conversion to `notes`.
    ///
    /// # Errors
    /// Returns an error if `own` cannot be converted to `to`.
    pub fn new(
        own: &DescribedPreprocessing,
        to: &Preprocessing,
        parts: Converted,
        notes: &mut Vec<String>,
    ) -> Result<Self> {
        let mut form = Self::default();
        if parts.numbers > 0 {
            form.scale = scale(own.scale.as_ref(), to, parts.numbers, notes)?;
        }
        if let (Some(own), Some(to)) = (&own.columns, &to.columns) {
            text(own, to)?;
            form.numbers = numbers(own, to, notes)?;
            form.categories = categories(own, to, notes)?;
        }
        if parts.classes {
            form.classes = classes(&own.classes, &to.classes, notes)?;
        }
        Ok(form)
    }
}

/// Adds a note unless it is already there.
fn note(notes: &mut Vec<String>, text: String) {
    if !notes.contains(&text) {
        notes.push(text);
    }
}

/// Returns the scale of inputs of `row_len` numbers.
fn scale(
    own: Option<&Scale>,
    to: &Preprocessing,
    row_len: usize,
    notes: &mut Vec<String>,
) -> Result<Option<MeanStd>> {
    let own = own.cloned();
    let scale = match &to.scales[..] {
        [] => own,
        [one] => {
            if *one != own {
                let stored = if own.is_some() { "its own" } else { "none" };
                note(
                    notes,
                    match one {
                        Some(_) => {
                            format!("inputs get the scale that the network learned with ({stored} in the data)")
                        }
                        None => {
                            "inputs are taken as they are stored, as the network learned, without the scale in the data"
                                .into()
                        }
                    },
                );
            }
            one.clone()
        }
        several if several.contains(&own) => own,
        several => {
            return Err(Error::input(format!(
                "the network learned from data sets with {} scales of inputs, and the data has none of them",
                several.len()
            ))
            .hint("give its inputs the attributes mean and std of one of those data sets"));
        }
    };
    let Some(Scale { mean, std }) = scale else { return Ok(None) };
    if mean.is_empty() || mean.len() != std.len() || !row_len.is_multiple_of(mean.len()) {
        let means = mean.len();
        let stds = std.len();
        return Err(Error::input(format!(
            "inputs are rows of {row_len}, but the network learned with {means} means and {stds} deviations"
        ))
        .hint("give data of the shape that the network was trained on"));
    }
    Ok(Some(MeanStd { mean, std }))
}

/// Returns the index in the data of each column of numbers; `None` if the columns are the same.
fn numbers(own: &Columns, to: &Columns, notes: &mut Vec<String>) -> Result<Option<Vec<usize>>> {
    if own.inputs == to.inputs {
        return Ok(None);
    }
    let places =
        to.inputs.iter().map(|name| place(name, own.inputs.iter())).collect::<Result<_>>()?;
    note(notes, "columns of numbers are taken in the order in which the network learned".into());
    Ok(Some(places))
}

/// Returns an error unless the texts of the data are the same columns of the same length. The
/// tokenizers are compared by themselves.
fn text(own: &Columns, to: &Columns) -> Result<()> {
    if own.text == to.text {
        return Ok(());
    }
    Err(Error::input(format!(
        "the data has {}, but the network learned from {}",
        describe_text(own),
        describe_text(to)
    ))
    .hint(LIKE))
}

/// Describes the texts of some data.
fn describe_text(columns: &Columns) -> String {
    match &columns.text {
        Some(text) => format!("texts of {} ids in column {}", text.length, text.names.join(", ")),
        None => "no texts".to_owned(),
    }
}

/// Returns the index in the data of each category, and the new ids of its values; `None` if the
/// categories are the same.
fn categories(
    own: &Columns,
    to: &Columns,
    notes: &mut Vec<String>,
) -> Result<Option<Vec<Recoded>>> {
    if own.categories == to.categories {
        return Ok(None);
    }
    let all: Vec<Recoded> = to
        .categories
        .iter()
        .map(|category| recoded(category, own, notes))
        .collect::<Result<_>>()?;
    if all.iter().enumerate().any(|(place, one)| one.column != place) {
        note(notes, "categories are taken in the order in which the network learned".into());
    }
    Ok(Some(all))
}

/// Returns the index in the data of a category of the network, and the new ids of its values. Adds
/// a note if ids differ.
fn recoded(category: &Category, own: &Columns, notes: &mut Vec<String>) -> Result<Recoded> {
    let name = &category.name;
    let column = place(name, own.categories.iter().map(|category| &category.name))?;
    let coding = &own.categories[column].coding;
    if *coding == category.coding {
        return Ok(Recoded { column, ids: None });
    }
    let values = match coding {
        Coding::Values(values) => values,
        Coding::Oov { ids, .. } | Coding::Hash(ids) => {
            return Err(Error::input(format!(
                "values of column {name:?} are hashed to {ids} ids, which cannot be mapped to the ids of the network",
            ))
            .hint(LIKE));
        }
    };
    let lookup = Lookup::from_coding(category.coding.clone());
    let ids = values.iter().map(|value| lookup.id(value));
    let ids = Some(std::iter::once(UNKNOWN).chain(ids).collect());
    let mut unknown = values.iter().filter(|value| lookup.get(value).is_none());
    let known = match unknown.next() {
        None => String::new(),
        Some(first) => format!(
            "; it does not know {} of {} values, such as {first:?}",
            1 + unknown.count(),
            values.len()
        ),
    };
    note(notes, format!("values of column {name:?} get the ids that the network learned{known}"));
    Ok(Recoded { column, ids })
}

const LIKE: &str = "import the table again: hpctrain data import csv TABLE --like DIR, the directory of the training's import";

/// Returns the index of the only column of a name.
fn place<'a>(name: &String, mut among: impl Iterator<Item = &'a String> + Clone) -> Result<usize> {
    let refused = |what: &str| {
        Err(Error::input(format!("{what} column {name:?}, from which the network learned"))
            .hint(LIKE))
    };
    match (among.clone().filter(|own| *own == name).count(), among.position(|own| own == name)) {
        (1, Some(place)) => Ok(place),
        (0, _) => refused("there is no"),
        _ => refused("there is more than one"),
    }
}

/// Returns the network's number of each class of the data, by name; `None` if the numbers are the
/// same.
fn classes(own: &[String], to: &[String], notes: &mut Vec<String>) -> Result<Option<Vec<u32>>> {
    if own.is_empty() || to.is_empty() || own == to {
        return Ok(None);
    }
    let numbers = own.iter().map(|name| class_number(name, to)).collect::<Result<Vec<u32>>>()?;
    if numbers.iter().copied().eq(0..own.len() as u32) {
        return Ok(None);
    }
    note(notes, "classes get the numbers that their names have in the network".into());
    Ok(Some(numbers))
}

/// Returns the number of a class among those of the network.
fn class_number(name: &str, to: &[String]) -> Result<u32> {
    match to.iter().position(|known| known == name) {
        Some(number) => Ok(number as u32),
        None => Err(Error::input(format!(
            "class {name:?} is not one of the network's: {}",
            to.join(", ")
        ))
        .hint("give folders the names of those classes and import them again")),
    }
}

/// Returns the tokenizer of data that has `own`, for a network that was trained with `to`.
///
/// # Errors
/// Returns an error if the two differ.
pub(super) fn tokenizer<'a>(
    own: Option<&'a Tokenizer>,
    to: Option<&'a Tokenizer>,
) -> Result<Option<&'a Tokenizer>> {
    match (own, to) {
        (Some(own), Some(to)) if own != to => {
            let [own, to] = tokenizer_names(Some(own), Some(to));
            Err(Error::input(format!("the tokenizer of the data is {own}, that of the network {to}")).hint(
                "ids would mean other text: give data with the tokenizer of the network, or train another network",
            ))
        }
        (own, to) => Ok(to.or(own)),
    }
}

/// Returns the names of two tokenizers: with the first character in which they differ, if they are
/// of characters; with the number of their ids, if they came in files.
pub(super) fn tokenizer_names(a: Option<&Tokenizer>, b: Option<&Tokenizer>) -> [String; 2] {
    if let (Some(Tokenizer::Char { chars: a }), Some(Tokenizer::Char { chars: b })) = (a, b) {
        return match a.iter().zip(b).enumerate().find(|(_, (a, b))| a != b) {
            Some((id, (a, b))) => [a, b].map(|c| format!("char with {c:?} as id {id}")),
            None => [a, b].map(|chars| format!("char with {} characters", chars.len())),
        };
    }
    [a, b].map(|tokenizer| match tokenizer {
        None => "none".to_owned(),
        Some(file @ Tokenizer::HuggingFace(_)) => {
            format!("{} with {} ids", file.name(), file.vocabulary())
        }
        Some(tokenizer) => tokenizer.name().to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TextColumns;

    fn names(all: &[&str]) -> Vec<String> {
        all.iter().map(|name| name.to_string()).collect()
    }

    fn values(name: &str, all: &[&str]) -> Category {
        Category { name: name.into(), coding: Coding::Values(names(all)) }
    }

    fn table(inputs: &[&str], categories: &[Category]) -> Columns {
        Columns { inputs: names(inputs), categories: categories.to_vec(), ..Columns::default() }
    }

    fn scaled(mean: f32) -> Option<Scale> {
        Some(Scale { mean: vec![mean], std: vec![2.0] })
    }

    /// Returns the conversion, and the notes on it.
    fn form(own: DescribedPreprocessing, to: &Preprocessing) -> Result<(Transform, Vec<String>)> {
        let mut notes = Vec::new();
        Ok((Transform::new(&own, to, Converted { numbers: 4, classes: true }, &mut notes)?, notes))
    }

    #[test]
    fn the_networks_scale_takes_the_place_of_the_datas() {
        for own in [None, scaled(3.0), scaled(1.0)] {
            let to = Preprocessing { scales: vec![scaled(1.0)], ..Preprocessing::default() };
            let (form, notes) = form(
                DescribedPreprocessing { scale: own.clone(), ..DescribedPreprocessing::default() },
                &to,
            )
            .unwrap();
            assert_eq!(form.scale.map(|scale| scale.mean), Some(vec![1.0]));
            assert_eq!(notes.is_empty(), own == scaled(1.0), "{notes:?}");
        }
        // A network that was trained on numbers as they are stored gets those.
        let raw = Preprocessing { scales: vec![None], ..Preprocessing::default() };
        assert_eq!(
            form(
                DescribedPreprocessing { scale: scaled(1.0), ..DescribedPreprocessing::default() },
                &raw
            )
            .unwrap()
            .0
            .scale,
            None
        );
        // Of several scales, each data set has one; another would have to be guessed.
        let mixed = Preprocessing { scales: vec![scaled(1.0), None], ..Preprocessing::default() };
        assert_eq!(
            form(
                DescribedPreprocessing { scale: scaled(1.0), ..DescribedPreprocessing::default() },
                &mixed
            )
            .unwrap()
            .0
            .scale
            .unwrap()
            .mean,
            [1.0]
        );
        assert_eq!(form(DescribedPreprocessing::default(), &mixed).unwrap().0.scale, None);
        let error = form(
            DescribedPreprocessing { scale: scaled(7.0), ..DescribedPreprocessing::default() },
            &mixed,
        )
        .unwrap_err()
        .to_string();
        assert!(
            error.contains("2 scales of inputs, and the data has none of them\nhint: "),
            "{error}"
        );
        let three = Some(Scale { mean: vec![0.0; 3], std: vec![1.0; 3] });
        let to = Preprocessing { scales: vec![three], ..Preprocessing::default() };
        let error = form(DescribedPreprocessing::default(), &to).unwrap_err().to_string();
        assert!(
            error.contains("rows of 4, but the network learned with 3 means and 3 deviations"),
            "{error}"
        );
    }

    #[test]
    fn columns_are_found_by_name_and_values_recoded() {
        let to =
            table(&["age", "pay"], &[values("city", &["Rome", "Oslo"]), values("pet", &["cat"])]);
        let to = Preprocessing { columns: Some(to), ..Preprocessing::default() };
        let described = |columns: Columns| DescribedPreprocessing {
            columns: Some(columns.into()),
            ..DescribedPreprocessing::default()
        };
        let own = table(
            &["pay", "age"],
            &[values("pet", &["cat"]), values("city", &["Bonn", "Oslo", "Rome"])],
        );
        let (form_of, notes) = form(described(own), &to).unwrap();
        assert_eq!(form_of.numbers, Some(vec![1, 0]));
        let city = Recoded { column: 1, ids: Some(vec![0, 0, 2, 1]) };
        assert_eq!(form_of.categories, Some(vec![city, Recoded { column: 0, ids: None }]));
        assert_eq!(notes.len(), 3, "{notes:?}");
        assert_eq!(
            notes[1],
            "values of column \"city\" get the ids that the network learned; it does not know 1 of 3 values, such as \"Bonn\""
        );
        // Listed values can be hashed as well; hashes cannot be mapped back to values.
        let hashed = |ids| Category { name: "city".into(), coding: Coding::Hash(ids) };
        let to_hash =
            Preprocessing { columns: Some(table(&[], &[hashed(50)])), ..Preprocessing::default() };
        let (form_of, _) =
            form(described(table(&[], &[values("city", &["Rome"])])), &to_hash).unwrap();
        let rome = Lookup::hashed(50).unwrap().id("Rome");
        assert_eq!(form_of.categories, Some(vec![Recoded { column: 0, ids: Some(vec![0, rome]) }]));
        // Ids of unknown values cannot be mapped back either, but can be mapped to.
        let oov = |values: &[&str]| Category {
            name: "city".into(),
            coding: Coding::Oov { ids: 2, values: names(values) },
        };
        let to_oov = Preprocessing {
            columns: Some(table(&[], &[oov(&["Rome", "Oslo"])])),
            ..Preprocessing::default()
        };
        let own = table(&[], &[values("city", &["Oslo", "Bonn"])]);
        let bonn = Lookup::new(["Rome"]).unwrap().with_oov(2).id("Bonn");
        assert_eq!(
            form(described(own), &to_oov).unwrap().0.categories,
            Some(vec![Recoded { column: 0, ids: Some(vec![0, 4, bonn]) }])
        );
        assert!(form(described(table(&[], &[oov(&["Rome"])])), &to_oov).is_err());
        for (own, wanted) in [
            (
                table(&["age"], &[]),
                "there is no column \"pay\", from which the network learned\nhint: import",
            ),
            (table(&["pay", "age", "age"], &[]), "there is more than one column \"age\""),
            (
                table(&["age", "pay"], &[hashed(9), values("pet", &[])]),
                "\"city\" are hashed to 9 ids",
            ),
        ] {
            let error = form(described(own), &to).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
        assert!(form(described(table(&[], &[hashed(9)])), &to_hash).is_err());
        // Data that does not name its columns is taken as it is.
        assert_eq!(form(DescribedPreprocessing::default(), &to).unwrap().0, Transform::default());
    }

    #[test]
    fn texts_have_the_same_length() {
        let texts = |length| {
            let text = Some(TextColumns { names: names(&["note"]), length });
            Columns { text, ..Columns::default() }
        };
        let to = Preprocessing { columns: Some(texts(8)), ..Preprocessing::default() };
        let described = |columns: Columns| DescribedPreprocessing {
            columns: Some(columns.into()),
            ..DescribedPreprocessing::default()
        };
        assert!(form(described(texts(8)), &to).unwrap().1.is_empty());
        for (own, wanted) in [
            (
                texts(9),
                "the data has texts of 9 ids in column note, but the network learned from texts of 8 ids in column note\nhint: import the table again",
            ),
            (
                table(&["age"], &[]),
                "the data has no texts, but the network learned from texts of 8 ids",
            ),
        ] {
            let error = form(described(own), &to).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
    }

    #[test]
    fn classes_go_by_their_names() {
        let to =
            Preprocessing { classes: names(&["cat", "dog", "eel"]), ..Preprocessing::default() };
        let described = |all: &[&str]| DescribedPreprocessing {
            classes: names(all),
            ..DescribedPreprocessing::default()
        };
        assert_eq!(form(described(&["dog", "cat"]), &to).unwrap().0.classes, Some(vec![1, 0]));
        for same in [&["cat", "dog", "eel"][..], &["cat"], &[]] {
            assert_eq!(form(described(same), &to).unwrap(), (Transform::default(), vec![]));
        }
        let error = form(described(&["cat", "owl"]), &to).unwrap_err().to_string();
        assert!(
            error.contains("class \"owl\" is not one of the network's: cat, dog, eel\nhint: "),
            "{error}"
        );
    }

    #[test]
    fn scales_survive_as_json_bit_by_bit() {
        let mean =
            (0..2000u32).map(|i| f32::from_bits(0x3f80_0000 ^ i.wrapping_mul(0x9e37_79b9) >> 4));
        let mean: Vec<f32> = mean.filter(|x| x.is_finite()).collect();
        let scale = Scale { std: mean.clone(), mean };
        let before = Preprocessing {
            scales: vec![Some(scale), None],
            classes: names(&["a"]),
            ..Preprocessing::default()
        };
        let after: Preprocessing =
            serde_json::from_str(&serde_json::to_string(&before).unwrap()).unwrap();
        assert_eq!(before, after);
    }

    #[test]
    fn two_tokenizers_are_named() {
        let chars = |text: &str| Tokenizer::Char { chars: text.chars().collect() };
        let refused = |own: &Tokenizer, to: &Tokenizer| {
            tokenizer(Some(own), Some(to)).unwrap_err().to_string()
        };
        assert!(
            refused(&Tokenizer::Byte, &Tokenizer::Gpt2)
                .contains("of the data is byte, that of the network gpt2\nhint")
        );
        assert!(
            refused(&chars("abd"), &chars("abc"))
                .contains("is char with 'd' as id 2, that of the network char with 'c'")
        );
        assert!(
            refused(&chars("ab"), &chars("abc"))
                .contains("is char with 2 characters, that of the network char with 3")
        );
        assert_eq!(tokenizer(None, Some(&Tokenizer::Byte)).unwrap(), Some(&Tokenizer::Byte));
        assert_eq!(tokenizer(Some(&Tokenizer::Byte), None).unwrap(), Some(&Tokenizer::Byte));
    }
}
