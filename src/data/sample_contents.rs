//! The contents of a sample for display: its text, or its columns by name.

use std::fmt;

use serde::ser::{Serialize, SerializeMap as _, Serializer};
use serde_json::{Map, Value};

use super::columns::Category;
use super::{Columns, Dataset, Ids, Preprocessing, SampleMut, SampleSpec, Target, TextColumns};
use super::{SampleFields, Tokenizer};
use hpctrain_base::error::Result;

/// The largest number of inputs without names that are displayed; images have more.
const MAX_UNNAMED: usize = 64;

/// The contents of a sample.
#[derive(Debug, Clone, PartialEq)]
pub enum SampleContents {
    /// The text of a language model's sample: its inputs and the last target.
    Text(String),
    /// Values by the names of their columns.
    Columns(Vec<(String, Value)>),
}

impl SampleContents {
    /// Reads sample `number` of `data`. Numbers are those that `data` returns: those of
    /// [`Dataset::as_stored`] are not scaled.
    ///
    /// # Errors
    /// Returns an error if [`Dataset::read`] does.
    pub fn read(data: &mut Dataset, number: u64) -> Result<Self> {
        let sizes = data.sizes();
        let mut parts = sizes.map(|ids| vec![0; ids], |numbers| vec![0.0; numbers]);
        let into: SampleMut<'_> = parts.as_mut().map(Vec::as_mut_slice, Vec::as_mut_slice);
        data.read(number, into)?;
        let preprocessing = data.preprocessing();
        match data.sample_spec() {
            SampleSpec::Text | SampleSpec::Anything => Ok(text(preprocessing, &parts)),
            SampleSpec::Rows { ids, target, .. } => {
                Ok(Self::Columns(columns(preprocessing, ids, target, &parts)))
            }
        }
    }
}

impl Dataset {
    /// Returns the contents of sample `number` by name: its `text`, or its columns.
    ///
    /// # Errors
    /// Returns an error if [`Dataset::read`] does.
    pub fn describe_sample(&mut self, number: u64) -> Result<Map<String, Value>> {
        Ok(match SampleContents::read(self, number)? {
            SampleContents::Text(text) => Map::from_iter([("text".to_owned(), text.into())]),
            SampleContents::Columns(columns) => columns.into_iter().collect(),
        })
    }
}

/// Serializes text as a string, and columns as an object.
impl Serialize for SampleContents {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Text(text) => to.serialize_str(text),
            Self::Columns(columns) => {
                let mut map = to.serialize_map(Some(columns.len()))?;
                columns.iter().try_for_each(|(name, value)| map.serialize_entry(name, value))?;
                map.end()
            }
        }
    }
}

/// Formats text as it is, and columns as `name=value`.
impl fmt::Display for SampleContents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => f.write_str(text),
            Self::Columns(columns) => {
                for (index, (name, value)) in columns.iter().enumerate() {
                    let space = if index == 0 { "" } else { " " };
                    match value {
                        Value::String(text) => write!(f, "{space}{name}={text}")?,
                        other => write!(f, "{space}{name}={other}")?,
                    }
                }
                Ok(())
            }
        }
    }
}

/// The parts of one sample.
type Parts = SampleFields<Vec<u32>, Vec<f32>>;

/// Returns the text of a language model's sample, or its ids if there is no tokenizer.
fn text(preprocessing: &Preprocessing, Parts { ids, classes, .. }: &Parts) -> SampleContents {
    let follow = ids.iter().skip(1).eq(classes.iter().take(classes.len().saturating_sub(1)));
    let mut all = ids.clone();
    if follow {
        all.extend(classes.last());
    }
    match &preprocessing.tokenizer {
        Some(tokenizer) => SampleContents::Text(tokenizer.decode(&all)),
        None => SampleContents::Columns(vec![("ids".into(), all.into())]),
    }
}

/// Returns the columns of a row.
fn columns(
    preprocessing: &Preprocessing,
    ids: &Ids,
    target: &Target,
    parts: &Parts,
) -> Vec<(String, Value)> {
    let Preprocessing { columns, classes, tokenizer, .. } = preprocessing;
    let none = Columns::default();
    let known = columns.as_ref().unwrap_or(&none);
    let mut all = Vec::new();
    match ids {
        Ids::None => {}
        Ids::Input(_) => all.extend(texts(known.text.as_ref(), tokenizer.as_ref(), &parts.ids)),
        Ids::Tables(tables) => {
            let mut before = 0;
            for (index, (id, rows)) in parts.ids.iter().zip(tables.iter()).enumerate() {
                all.push(category(known.categories.get(index), index, id - before));
                before += *rows as u32;
            }
        }
    }
    all.extend(numbers(&known.inputs, "inputs", &parts.features));
    match target {
        Target::Unknown => {}
        Target::Class(_) => {
            let name = known.targets.first().map_or("class", String::as_str);
            let class = parts.classes.first().map(|class| {
                classes
                    .get(*class as usize)
                    .map_or_else(|| Value::from(*class), |name| name.as_str().into())
            });
            all.extend(class.map(|class| (name.to_owned(), class)));
        }
        Target::Values(_) => all.extend(numbers(&known.targets, "targets", &parts.values)),
    }
    all.extend(parts.weights.first().map(|weight| ("weight".to_owned(), decimal(*weight))));
    all
}

/// Returns the texts of a row without their padding, or its ids if there is no tokenizer.
fn texts(
    columns: Option<&TextColumns>,
    tokenizer: Option<&Tokenizer>,
    ids: &[u32],
) -> Vec<(String, Value)> {
    let (Some(TextColumns { names, length }), Some(tokenizer)) = (columns, tokenizer) else {
        return vec![("ids".into(), ids.into())];
    };
    let mut texts = Vec::with_capacity(names.len());
    for (name, ids) in names.iter().zip(ids.chunks((*length).max(1))) {
        let end = ids.iter().rposition(|id| *id != 0).map_or(0, |last| last + 1);
        texts.push((name.clone(), tokenizer.decode(&ids[..end]).into()));
    }
    texts
}

/// Returns the name and the value of a category; the id if its value is not listed, and null for an
/// empty cell.
fn category(category: Option<&Category>, index: usize, id: u32) -> (String, Value) {
    let Some(Category { name, coding }) = category else {
        return (format!("category {index}"), id.into());
    };
    let listed = coding.values();
    let first = coding.ids() - listed.len();
    let value = (id as usize).checked_sub(first).and_then(|place| listed.get(place));
    let value = match (id, value) {
        (0, _) => Value::Null,
        (_, Some(value)) => value.as_str().into(),
        (id, None) => id.into(),
    };
    (name.clone(), value)
}

/// Returns numbers by the names of their columns, or all under `other`. Images are omitted.
fn numbers(names: &[String], other: &str, numbers: &[f32]) -> Vec<(String, Value)> {
    if names.len() == numbers.len() {
        return names.iter().cloned().zip(numbers.iter().map(|x| decimal(*x))).collect();
    }
    if numbers.is_empty() || numbers.len() > MAX_UNNAMED {
        return vec![];
    }
    let all: Vec<Value> = numbers.iter().map(|x| decimal(*x)).collect();
    vec![(other.to_owned(), all.into())]
}

/// Returns a number with no more digits than an `f32` needs.
fn decimal(number: f32) -> Value {
    number.to_string().parse::<f64>().unwrap_or(f64::from(number)).into()
}
