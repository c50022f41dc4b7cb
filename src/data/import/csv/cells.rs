//! The use of each column of a table.

use std::path::Path;

use csv::StringRecord;

use super::category_column::CategoryColumn;
use super::format::{place, twice};
use super::options::{Categories, CategoryIds, ImportCsv};
use super::text_columns::TextReader;
use crate::columns::Columns;
use crate::format::Header;
use crate::import::class_names;
use crate::import::row_writer::Scale;
use crate::lookup::{Lookup, LookupOptions};
use crate::normalization::MeanStd;
use crate::sandbox::Sandbox;
use crate::{DataSpec, Split, Tokenizer, h5};
use hpctrain_base::error::{Error, Result};

/// The parts of an earlier table that later ones take over.
#[derive(Default)]
pub(super) struct Earlier {
    pub scale: Option<Scale>,
    /// The numbers that replace missing values, one for each input; empty if there are none.
    pub fill: Vec<f32>,
    /// The names of the classes; empty if they have none.
    pub classes: Vec<String>,
    /// The tokenizer of its texts.
    pub tokenizer: Option<Tokenizer>,
}

/// The use of each cell of a line, by column index.
pub(super) struct Cells {
    pub inputs: Vec<usize>,
    pub categories: Vec<CategoryColumn>,
    pub text: Option<TextReader>,
    pub targets: Vec<usize>,
    pub weight: Option<usize>,
    /// The earlier table whose columns and scale this one takes over, if any.
    pub earlier: Option<Earlier>,
}

impl Cells {
    /// Finds the cells in a table with this header, according to the options of the import.
    pub fn find(import: &ImportCsv, header: &StringRecord) -> Result<Self> {
        let place = |name: &String| place(&import.input, header, name);
        let targets = places(import, header, &import.targets)?;
        let weight = import.weight.as_ref().map(place).transpose()?;
        let cells = match &import.categories {
            Categories::Named { columns, ids } => {
                // A name drops every column that has it; a name that no column has is a mistake.
                for name in
                    import.drop.iter().filter(|name| !header.iter().any(|column| column == *name))
                {
                    place(name)?;
                }
                let is_dropped =
                    |column: usize| import.drop.iter().any(|name| header.get(column) == Some(name));
                let kept: Vec<usize> =
                    (0..header.len()).filter(|column| !is_dropped(*column)).collect();
                check_names(import, header, &kept)?;
                let categories = category_columns(import, header, columns, ids)?;
                let text = import.text.as_ref();
                let text = text.map(|options| {
                    TextReader::new(places(import, header, &options.columns)?, options)
                });
                let text = text.transpose()?;
                let is_used = |column: &usize| {
                    targets.contains(column)
                        || weight == Some(*column)
                        || categories.iter().any(|category| category.column == *column)
                        || text.as_ref().is_some_and(|text| text.columns.contains(column))
                };
                let inputs = kept.into_iter().filter(|column| !is_used(column)).collect();
                Self { inputs, categories, text, targets, weight, earlier: None }
            }
            Categories::Like(path) => {
                let (columns, earlier) = earlier(path)?;
                Self::like(import, header, &columns, targets, weight, earlier)?
            }
            Categories::Learned(known) => {
                let columns =
                    Columns { targets: vec![], ..known.columns.clone().unwrap_or_default() };
                let scale = match &known.scales[..] {
                    [Some(scale)] => Some((scale.mean.clone(), scale.std.clone())),
                    _ => None,
                };
                let earlier = Earlier {
                    scale,
                    fill: columns.fill.clone(),
                    classes: vec![],
                    tokenizer: known.tokenizer.clone(),
                };
                Self::like(import, header, &columns, targets, weight, earlier)?
            }
        };
        cells.check(import, header)?;
        Ok(cells)
    }

    /// Returns the cells of a table whose columns have the use of those of an earlier one.
    fn like(
        import: &ImportCsv,
        header: &StringRecord,
        columns: &Columns,
        mut targets: Vec<usize>,
        weight: Option<usize>,
        earlier: Earlier,
    ) -> Result<Self> {
        let mut earlier_targets = columns.targets.iter();
        if targets.is_empty()
            && earlier_targets.any(|name| header.iter().any(|column| column == name))
        {
            targets = places(import, header, &columns.targets)?;
        }
        let inputs = places(import, header, &columns.inputs)?;
        let categories = columns.categories.iter().map(|category| {
            let column = place(&import.input, header, &category.name)?;
            let lookup = Lookup::from_coding(category.coding.clone());
            Ok(CategoryColumn::known(column, lookup))
        });
        let categories = categories.collect::<Result<_>>()?;
        let text = match (&columns.text, &earlier.tokenizer) {
            (None, _) => None,
            (Some(text), Some(tokenizer)) => {
                let columns = places(import, header, &text.names)?;
                Some(TextReader::like(columns, text.length, tokenizer.clone())?)
            }
            (Some(text), None) => {
                return Err(Error::input(format!(
                    "the tokenizer of column {:?} is not known",
                    text.names.join(", ")
                ))
                .hint("import the earlier table again"));
            }
        };
        Ok(Self { inputs, categories, text, targets, weight, earlier: Some(earlier) })
    }

    /// Checks that every column has one use, and that there is at least one input or category.
    fn check(&self, import: &ImportCsv, header: &StringRecord) -> Result<()> {
        let path = import.input.display();
        let texts = self.text.as_ref().map_or(&[][..], |text| &text.columns);
        let learned_from = self.inputs.len() + self.categories.len() + texts.len();
        // Options with their columns; inputs are the remaining columns, or those of an earlier
        // table.
        let like = !matches!(import.categories, Categories::Named { .. });
        let dropped = (0..header.len())
            .filter(|column| import.drop.iter().any(|name| header.get(*column) == Some(name)));
        let asked = [
            ("--target", self.targets.clone()),
            ("--weight", self.weight.into_iter().collect()),
            (
                if like { "--like" } else { "--categorical" },
                self.categories.iter().map(|category| category.column).collect(),
            ),
            (if like { "--like" } else { "--text" }, texts.to_vec()),
            ("--like", if like { self.inputs.clone() } else { vec![] }),
            ("--drop", dropped.collect()),
        ];
        let asked = asked
            .iter()
            .flat_map(|(option, columns)| columns.iter().map(move |column| (*column, *option)));
        let asked: Vec<(usize, &str)> = asked.collect();
        let twice = asked.iter().enumerate().find_map(|(i, (column, second))| {
            let (_, first) = asked[..i].iter().find(|(before, _)| before == column)?;
            Some((header.get(*column).unwrap_or_default(), first, second))
        });
        if let Some((name, first, second)) = twice {
            let (what, hint) = match first == second {
                true => (format!("{first} names column {name:?} twice"), "name each column once"),
                false => (
                    format!("{first} and {second} both name column {name:?}"),
                    "a column is a target, the weight, a category, text or an input, or it is dropped: name it in one of them only",
                ),
            };
            return Err(Error::input(format!("{path}: {what}")).hint(hint));
        }
        if !texts.is_empty() && learned_from > texts.len() {
            let categories = self.categories.iter().map(|category| category.column);
            let others = self.inputs.iter().copied().chain(categories);
            let others: Vec<&str> = others.filter_map(|column| header.get(column)).collect();
            return Err(Error::input(format!(
                "{path}: inputs besides the text: columns {}",
                others.join(", ")
            ))
            .hint(format!(
                "a network that takes text has no other inputs: --drop '{}'",
                others.join(",")
            )));
        }
        if learned_from == 0 {
            let all = header.len();
            let targets = self.targets.len();
            return Err(Error::input(format!("{path}: {all} columns, {targets} of them targets")).hint(
                "name the columns to predict with --target, and leave some as inputs; another character between cells can be given with --delimiter",
            ));
        }
        Ok(())
    }
}

/// Returns the columns of categories with these names, and the ids of their values.
fn category_columns(
    import: &ImportCsv,
    header: &StringRecord,
    names: &[String],
    ids: &CategoryIds,
) -> Result<Vec<CategoryColumn>> {
    let columns = places(import, header, names)?.into_iter();
    let (vocabularies, options) = match ids {
        CategoryIds::Hashed(ids) => {
            let lookup = Lookup::hashed(*ids)?;
            return Ok(columns
                .map(|column| CategoryColumn::known(column, lookup.clone()))
                .collect());
        }
        CategoryIds::Listed { vocabularies, options } => (vocabularies, options),
    };
    options.check()?;
    for (place, (name, _)) in vocabularies.iter().enumerate() {
        if !names.contains(name) {
            return Err(Error::input(format!(
                "--vocabulary names column {name:?}, which is not categorical"
            ))
            .hint(format!("name it with --categorical {name} as well")));
        }
        if vocabularies[..place].iter().any(|(before, _)| before == name) {
            return Err(Error::input(format!("--vocabulary names column {name:?} twice"))
                .hint("give each column one vocabulary"));
        }
    }
    let is_chosen = LookupOptions { oov: 0, ..options.clone() } != LookupOptions::ALL;
    if is_chosen && names.iter().all(|name| vocabularies.iter().any(|(known, _)| known == name)) {
        return Err(Error::input("--min-count and --max-ids choose among the values of a table, but every categorical column has a --vocabulary")
            .hint("omit them, or shorten the vocabularies"));
    }
    let columns = columns.zip(names).map(|(column, name)| {
        Ok(match vocabularies.iter().find(|(known, _)| known == name) {
            Some((_, path)) => {
                CategoryColumn::known(column, Lookup::read(path)?.with_oov(options.oov))
            }
            None => CategoryColumn::counted(column, options.clone()),
        })
    });
    columns.collect()
}

/// Returns the names of the columns with these indices.
pub(super) fn names(header: &StringRecord, columns: &[usize]) -> Vec<String> {
    columns.iter().map(|column| header.get(*column).unwrap_or_default().to_owned()).collect()
}

/// Returns the indices of the columns of these names.
fn places(import: &ImportCsv, header: &StringRecord, names: &[String]) -> Result<Vec<usize>> {
    names.iter().map(|name| place(&import.input, header, name)).collect()
}

/// Returns an error unless the columns that may be inputs have different names: others could not be
/// distinguished in a later table. A column without a name usually holds the number of the row.
fn check_names(import: &ImportCsv, header: &StringRecord, kept: &[usize]) -> Result<()> {
    let name = |column: usize| header.get(column).unwrap_or_default();
    if let Some(column) = kept.iter().find(|column| name(**column).is_empty()) {
        let path = import.input.display();
        let number = column + 1;
        return Err(Error::input(format!("{path}: column {number} has no name")).hint(
            "name it in the first line; drop it with --drop \"\"; or give --no-header if the first line is a row",
        ));
    }
    let mut seen = std::collections::HashMap::new();
    match kept
        .iter()
        .find_map(|column| seen.insert(name(*column), *column).map(|first| (first, *column)))
    {
        Some((first, second)) => Err(twice(&import.input, name(second), first, second)),
        None => Ok(()),
    }
}

/// Reads the columns of an earlier import, and the parts that later tables take over.
fn earlier(folder: &Path) -> Result<(Columns, Earlier)> {
    let files = DataSpec::new(folder).files(Split::Train)?;
    Sandbox::default().inspect(&files[0])?;
    let file = h5::open_file(&files[0], None)?;
    let at = files[0].display();
    let columns = Columns::read(&file).map_err(|e| e.at(at.to_string()))?.ok_or_else(|| {
        Error::input(format!("{at} does not record its columns"))
            .hint("give the directory of a table that was imported")
    })?;
    let classes =
        class_names(&file).map_err(|e| Error::input(format!("{at}: {}", h5::one_line(&e))))?;
    let inputs = DataSpec::new(folder).inputs;
    let standard = match columns.inputs.len() {
        0 => None,
        width => MeanStd::read(&file, &inputs, width).map_err(|e| e.at(at))?,
    };
    let scale = standard.map(|MeanStd { mean, std }| (mean, std));
    let fill = columns.fill.clone();
    let classes = classes.unwrap_or_default();
    let tokenizer = Header::read(&file).map_err(|e| e.at(files[0].display()))?.tokenizer;
    Ok((columns, Earlier { scale, fill, classes, tokenizer }))
}
