//! Import of tables into shards.

mod category_column;
mod cells;
mod format;
mod labels;
mod options;
mod text_columns;
mod texts;

use csv::{Position, StringRecord};

use self::cells::{Cells, names};
use self::format::{Cell, refused};
use self::labels::Labels;
use super::row_writer::{Imported, Inputs, NotFinite, Rows, Table};
use super::spool::Spooler;
use crate::Columns;
use hpctrain_base::error::{Error, Result};

pub use format::{Missing, TableFormat};
pub use options::{Categories, CategoryIds, ImportCsv, TextOptions};
pub use texts::column_texts;

/// The treatment of missing numbers.
enum Filled {
    Refused,
    Skipped,
    /// The number that replaces missing ones, for each input.
    With(Vec<f32>),
    /// The means of this table's training rows; NaN until they are known.
    Later,
}

impl Filled {
    fn new(import: &ImportCsv, cells: &Cells) -> Result<Self> {
        let earlier = cells.earlier.as_ref();
        let fill = earlier.map(|earlier| &earlier.fill).filter(|fill| !fill.is_empty());
        Ok(match (import.missing, fill) {
            (None, Some(fill)) => Self::With(fill.clone()),
            (None, None) if import.options.not_finite == NotFinite::Skip => Self::Skipped,
            (None, None) | (Some(Missing::Error), _) => Self::Refused,
            (Some(Missing::Skip), _) => Self::Skipped,
            (Some(Missing::Number(number)), _) => Self::With(vec![number; cells.inputs.len()]),
            // The means of the training rows, if the earlier table or the network provides them.
            (Some(Missing::Mean), fill) => match earlier {
                None => Self::Later,
                Some(earlier) => {
                    let means = earlier.scale.as_ref().map(|(mean, _)| mean);
                    let means = means.or(fill).filter(|means| means.len() == cells.inputs.len());
                    Self::With(means.cloned().ok_or_else(|| {
                        Error::input("the means of the earlier table's columns are not known")
                            .hint("give a number, such as --missing 0")
                    })?)
                }
            },
        })
    }
}

/// Why a row is not imported: it is skipped, or one of its cells is an error.
enum Unusable {
    Skip,
    Error(Error),
}

impl From<Error> for Unusable {
    fn from(e: Error) -> Self {
        Self::Error(e)
    }
}

/// A row, with the settings that decide how its cells are read.
struct TableRow<'a> {
    import: &'a ImportCsv,
    header: &'a StringRecord,
    record: &'a StringRecord,
    filled: &'a Filled,
}

impl TableRow<'_> {
    fn cell(&self, column: usize) -> &str {
        self.record.get(column).unwrap_or_default().trim()
    }

    /// Returns the text in a cell; an empty one if it has no value.
    fn word(&self, column: usize) -> &str {
        let cell = self.cell(column);
        if self.import.format.is_missing(cell) { "" } else { cell }
    }

    /// Returns the file, the line and the column of a cell.
    fn place(&self, column: usize) -> String {
        let line = self.record.position().map_or(0, Position::line);
        let path = self.import.input.display();
        let name = self.header.get(column).unwrap_or_default();
        format!("{path}: line {line}, column {name:?}")
    }

    fn refused(&self, column: usize, what: &str, hint: &str) -> Unusable {
        Unusable::Error(Error::input(what).at(self.place(column)).hint(hint))
    }

    /// Returns the number in a cell; `None` if it has no value.
    fn given(&self, column: usize) -> std::result::Result<Option<f64>, Unusable> {
        let cell = self.cell(column);
        let format = &self.import.format;
        match format.number(cell) {
            Cell::Number(number) => Ok(Some(number)),
            Cell::Missing => Ok(None),
            Cell::NotFinite if self.import.options.not_finite == NotFinite::Skip => {
                Err(Unusable::Skip)
            }
            Cell::NotFinite => Err(self.refused(
                column,
                &format!("{cell:?} is not finite"),
                if self.import.needs_all {
                    "mend the line"
                } else {
                    "mend the line, or skip such rows with --not-finite skip"
                },
            )),
            Cell::Word => {
                Err(self.refused(column, &format!("{cell:?} is not a number"), format.advice(cell)))
            }
        }
    }

    /// Returns the number in the cell of input number `input`.
    fn input(&self, input: usize, column: usize) -> std::result::Result<f32, Unusable> {
        match (self.given(column)?, self.filled) {
            (Some(number), _) => Ok(number as f32),
            (None, Filled::Skipped) => Err(Unusable::Skip),
            (None, Filled::With(numbers)) => Ok(numbers[input]),
            (None, Filled::Later) => Ok(f32::NAN),
            (None, Filled::Refused) if self.import.needs_all => {
                Err(self.missing(column, "fill such cells: --missing mean, or a number such as --missing 0"))
            }
            (None, Filled::Refused) => Err(self.missing(
                column,
                "skip such rows with --missing skip, or fill the cells: --missing mean, or a number such as --missing 0",
            )),
        }
    }

    /// Returns the number in a cell that must have one.
    fn needed(&self, column: usize) -> std::result::Result<f64, Unusable> {
        match self.given(column)? {
            Some(number) => Ok(number),
            None => Err(self.without_target(column)),
        }
    }

    /// Returns the error of a row without a target or weight, or skips the row.
    fn without_target(&self, column: usize) -> Unusable {
        match self.filled {
            Filled::Skipped => Unusable::Skip,
            _ => self.missing(
                column,
                "targets and weights are not filled: skip such rows with --missing skip",
            ),
        }
    }

    fn missing(&self, column: usize, hint: &str) -> Unusable {
        self.refused(column, &format!("{:?} is a missing value", self.cell(column)), hint)
    }

    /// Returns the target in a column: the number of its class, or a number.
    fn target(&self, column: usize, labels: &mut Labels) -> std::result::Result<f64, Unusable> {
        let cell = self.cell(column);
        let format = &self.import.format;
        let is_number = format.number(cell) != Cell::Word;
        if matches!(labels, Labels::Unseen) && !format.is_missing(cell) {
            if format.number(cell) == Cell::Missing {
                return Err(self.refused(
                    column,
                    &format!("{cell:?} is a missing number, or the name of a class"),
                    "choose: --na for words without a value, --regression for numbers, or --classes for names",
                ));
            }
            labels.see(is_number);
        }
        if matches!(labels, Labels::Words(_) | Labels::Known(_)) && format.is_missing(cell) {
            return Err(self.without_target(column));
        }
        match labels.class(cell) {
            Ok(Some(class)) => Ok(class),
            Ok(None)
                if !is_number && matches!(labels, Labels::Numbers) && !self.import.regression =>
            {
                Err(self.refused(
                    column,
                    &format!("{cell:?} is not a number, unlike the targets before it"),
                    "mend the line; with --classes all values of the column are names of classes",
                ))
            }
            Ok(None) => self.needed(column),
            Err(e) => Err(Unusable::Error(e.at(self.place(column)))),
        }
    }

    /// Reads the inputs and targets, and returns the weight, if there is a column of them.
    fn read(
        &self,
        cells: &Cells,
        labels: &mut Labels,
        inputs: &mut Vec<f32>,
        targets: &mut Vec<f64>,
    ) -> std::result::Result<Option<f64>, Unusable> {
        inputs.clear();
        targets.clear();
        for (input, column) in cells.inputs.iter().enumerate() {
            inputs.push(self.input(input, *column)?);
        }
        for column in &cells.targets {
            targets.push(self.target(*column, labels)?);
        }
        let Some(column) = cells.weight else { return Ok(None) };
        match self.needed(column)? {
            weight if weight < 0.0 => Err(self.refused(
                column,
                &format!("a weight of {weight}, less than 0"),
                "mend the line, or remove it",
            )),
            weight => Ok(Some(weight)),
        }
    }
}

/// Imports every line of a table as a sample. Targets are classes if there is one column of them
/// that holds integers from 0 on, or words.
///
/// # Errors
/// Returns an error if the file is missing, a line does not have as many cells as the header, a
/// cell is not a number, a weight is negative, a named column does not exist or exists twice, or
/// the rows cannot be written.
pub fn import_csv(import: &ImportCsv) -> Result<Imported> {
    let path = import.input.display();
    let (mut reader, header) = import.format.open(&import.input)?;
    let mut cells = Cells::find(import, &header)?;
    if import.classes && cells.targets.len() != 1 {
        let targets = cells.targets.len();
        return Err(Error::input(format!("{path}: {targets} columns of classes"))
            .hint("name the one column of classes with --target"));
    }
    let filled = Filled::new(import, &cells)?;
    let classes = cells.earlier.as_ref().map(|earlier| &earlier.classes[..]);
    let mut labels = Labels::new(cells.targets.len(), import.regression, import.classes, classes);
    // They are stored in temporary files: a table may be larger than memory.
    let out = &import.options.out;
    let mut inputs = Spooler::create(out)?;
    let mut ids = Spooler::create(out)?;
    let mut tokens = Spooler::create(out)?;
    let mut targets = Spooler::create(out)?;
    let mut weights = Spooler::create(out)?;
    let mut record = StringRecord::new();
    let mut rows = 0;
    let mut skipped = 0;
    let mut numbers = Vec::new();
    let mut aims = Vec::new();
    let mut of_texts = Vec::new();
    while reader.read_record(&mut record).map_err(|e| refused(&import.input, &e))? {
        let row = TableRow { import, header: &header, record: &record, filled: &filled };
        let weight = match row.read(&cells, &mut labels, &mut numbers, &mut aims) {
            Ok(weight) => weight,
            Err(Unusable::Skip) => {
                skipped += 1;
                continue;
            }
            Err(Unusable::Error(e)) => return Err(e),
        };
        inputs.push(&numbers)?;
        targets.push(&aims)?;
        if let Some(weight) = weight {
            weights.push(&[weight])?;
        }
        for category in &mut cells.categories {
            ids.push(&[category.id(row.word(category.column))])?;
        }
        if let Some(text) = &mut cells.text {
            of_texts.clear();
            for place in 0..text.columns.len() {
                let column = text.columns[place];
                text.encode(place, row.word(column), &mut of_texts)
                    .map_err(|e| e.at(row.place(column)))?;
            }
            tokens.push(&of_texts)?;
        }
        rows += 1;
    }
    if rows == 0 {
        let what = if skipped > 0 {
            "every line has a missing value"
        } else {
            "no lines after the header"
        };
        return Err(Error::input(format!("{path}: {what}")).hint("give a table with some samples"));
    }
    let source = import.input.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let width = cells.targets.len();
    let weights = weights.finish()?;
    let (classes, targets) = labels.finish(targets.finish()?, out)?;
    let scale = cells.earlier.take().and_then(|earlier| earlier.scale);
    let (is_filled_later, fill) = match filled {
        Filled::With(numbers) => (false, numbers),
        Filled::Later => (true, vec![]),
        Filled::Refused | Filled::Skipped => (false, vec![]),
    };
    let mut columns = Columns {
        inputs: names(&header, &cells.inputs),
        targets: names(&header, &cells.targets),
        fill,
        ..Columns::default()
    };
    let places: Vec<usize> = cells.categories.iter().map(|category| category.column).collect();
    let of_categories = names(&header, &places);
    let categories = category_column::finish(cells.categories, &of_categories, ids.finish()?, out)
        .map_err(|e| e.at(import.input.display()))?;
    columns.categories = categories.categories;
    let mut unknown = categories.unknown;
    let mut shape = vec![cells.inputs.len()];
    let mut inputs = Inputs::Numbers(inputs.finish()?);
    let mut text = None;
    if let Some(reader) = cells.text {
        shape = vec![reader.row_len()];
        let names = names(&header, &reader.columns);
        let finished = reader
            .finish(names, tokens.finish()?, out)
            .map_err(|e| e.at(import.input.display()))?;
        inputs = Inputs::Ids(finished.ids);
        columns.text = Some(finished.columns);
        unknown.extend(finished.unknown);
        text = Some((finished.tokenizer, finished.summary));
    }
    let ids = categories.ids;
    Rows {
        inputs,
        count: rows,
        shape,
        targets,
        width,
        weights,
        regression: import.regression,
        classes,
        skipped,
        source,
        places: std::array::from_fn(|_| path.to_string()),
        table: Some(Table { columns, ids, scale, is_filled_later, text, unknown }),
        files: None,
    }
    .write(&import.options)
}
