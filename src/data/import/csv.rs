//! From a table with a header to shards.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use csv::{Reader, StringRecord};

use super::missing;
use super::samples::{Imported, Inputs, Kept, NotFinite, Rows, Scale, Table};
use super::spool::Spooler;
use crate::data::columns::{Category, Coder, Columns};
use crate::data::standard::Standard;
use crate::data::{DataSpec, Split, h5};
use crate::error::{Error, Result};

/// Input and options of an import.
#[derive(Debug, Clone)]
pub struct ImportCsv {
    /// The table: a line of names, then a line for each sample.
    pub input: PathBuf,
    /// Names of the columns to predict. All others are inputs. With none of them rows have no targets; but a table like an earlier
    /// one has those of the earlier one, if it has these columns.
    pub targets: Vec<String>,
    /// Name of the column with the weights of samples, neither input nor target.
    pub weight: Option<String>,
    /// Targets are numbers, even where they look like classes.
    pub regression: bool,
    /// Columns of categories.
    pub categories: Categories,
    /// Validation split, shards and destination of the rows.
    pub kept: Kept,
}

/// Columns of categories, and the mapping of their values to ids. An empty cell has id 0.
#[derive(Debug, Clone)]
pub enum Categories {
    /// Columns of these names.
    Named {
        /// The names.
        columns: Vec<String>,
        /// Ids of each category, to which values are hashed. Without it, values have ids from 1 on in the order of their
        /// appearance.
        hash: Option<u32>,
    },
    /// Inputs, categories, ids and scale of an earlier import in this directory. Values that it did not have get id 0;
    /// other columns are left out.
    Like(PathBuf),
}

impl Categories {
    /// None.
    pub const NONE: Self = Self::Named { columns: Vec::new(), hash: None };
}

/// Use of each cell of a line, by column index.
struct Cells {
    inputs: Vec<usize>,
    categories: Vec<(usize, Coder)>,
    targets: Vec<usize>,
    weight: Option<usize>,
    /// Scale of the earlier import.
    scale: Option<Scale>,
}

impl Cells {
    /// Finds the cells in a table with this header, by the options of the import.
    fn find(import: &ImportCsv, header: &StringRecord) -> Result<Self> {
        let path = import.input.display();
        let place = |name: &String| {
            header.iter().position(|column| column.trim() == name).ok_or_else(|| {
                let names: Vec<&str> = header.iter().collect();
                Error::input(format!("{path}: there is no column {name:?}"))
                    .hint(format!("its columns: {}", names.join(", ")))
            })
        };
        let places = |names: &[String]| names.iter().map(place).collect::<Result<Vec<usize>>>();
        let (mut targets, weight) = (places(&import.targets)?, import.weight.as_ref().map(place).transpose()?);
        let (inputs, categories, scale) = match &import.categories {
            Categories::Named { columns, hash } => {
                if let Some(ids) = hash.filter(|ids| *ids < 2) {
                    return Err(Error::input(format!("values hashed to {ids} ids"))
                        .hint("give 2 or more: id 0 is of empty cells"));
                }
                let categories = places(columns)?;
                let is_input = |column: &usize| {
                    !targets.contains(column) && !categories.contains(column) && weight != Some(*column)
                };
                let inputs = (0..header.len()).filter(is_input).collect();
                (inputs, categories.into_iter().map(|column| (column, Coder::new(*hash))).collect(), None)
            }
            Categories::Like(path) => {
                let (columns, scale) = earlier(path)?;
                let has = |name: &String| header.iter().any(|column| column.trim() == name);
                if targets.is_empty() && columns.targets.iter().any(has) {
                    targets = places(&columns.targets)?;
                }
                let coders = columns
                    .categories
                    .iter()
                    .map(|category| Ok((place(&category.name)?, Coder::like(&category.coding))));
                (places(&columns.inputs)?, coders.collect::<Result<_>>()?, scale)
            }
        };
        let cells = Self { inputs, categories, targets, weight, scale };
        cells.check(import, header)?;
        Ok(cells)
    }

    /// Every column has one use, and there is something to learn and something to learn it from.
    fn check(&self, import: &ImportCsv, header: &StringRecord) -> Result<()> {
        let path = import.input.display();
        let learned_from = self.inputs.len() + self.categories.len();
        // Options with their columns; inputs are the remaining columns, or those of an earlier table.
        let like = matches!(import.categories, Categories::Like(_));
        let asked = [
            ("--target", self.targets.clone()),
            ("--weight", self.weight.into_iter().collect()),
            (
                if like { "--like" } else { "--categorical" },
                self.categories.iter().map(|(column, _)| *column).collect(),
            ),
            ("--like", self.inputs.clone()),
        ];
        let asked = asked.iter().flat_map(|(option, columns)| columns.iter().map(move |column| (*column, *option)));
        let asked: Vec<(usize, &str)> = asked.collect();
        let twice = asked.iter().enumerate().find_map(|(i, (column, second))| {
            let (_, first) = asked[..i].iter().find(|(before, _)| before == column)?;
            Some((header.get(*column).unwrap_or_default().trim(), first, second))
        });
        if let Some((name, first, second)) = twice {
            let (what, hint) = match first == second {
                true => (format!("{first} names column {name:?} twice"), "name each column once"),
                false => (
                    format!("{first} and {second} both name column {name:?}"),
                    "a column is a target, the weight, a category or an input: leave it out of one of them",
                ),
            };
            return Err(Error::input(format!("{path}: {what}")).hint(hint));
        }
        if learned_from == 0 {
            let (all, targets) = (header.len(), self.targets.len());
            return Err(Error::input(format!("{path}: {all} columns, {targets} of them targets"))
                .hint("name the columns to predict with --target, and leave some as inputs"));
        }
        Ok(())
    }

    /// Names of inputs and categories, and the mapping of the latter to ids.
    fn columns(self, header: &StringRecord) -> Columns {
        let name = |column: usize| header.get(column).unwrap_or_default().trim().to_owned();
        let category = |(column, coder): (usize, Coder)| Category { name: name(column), coding: coder.coding() };
        let names = |columns: &[usize]| columns.iter().map(|column| name(*column)).collect();
        let (inputs, targets) = (names(&self.inputs), names(&self.targets));
        Columns { inputs, categories: self.categories.into_iter().map(category).collect(), targets }
    }
}

/// Columns and scale of an earlier import.
fn earlier(folder: &Path) -> Result<(Columns, Option<Scale>)> {
    let files = DataSpec::new(folder).files(Split::Train)?;
    let file = h5::open_file(&files[0], None)?;
    let at = files[0].display();
    let columns = Columns::read(&file).map_err(|e| e.at(at.to_string()))?.ok_or_else(|| {
        Error::input(format!("{at} does not tell its columns")).hint("give the directory of a table that was imported")
    })?;
    let inputs = DataSpec::new(folder).inputs;
    let standard = match columns.inputs.len() {
        0 => None,
        width => Standard::read(&file, &inputs, width).map_err(|e| e.at(at))?,
    };
    Ok((columns, standard.map(|Standard { mean, std }| (mean, std))))
}

/// Writes every line as a sample. Targets are classes if there is one column of them that holds integers from 0 on.
///
/// # Errors
/// The file is missing, a line has not as many cells as the header, a cell is no number or a weight less than 0, there is no
/// such column, or as for every import.
pub fn import_csv(import: &ImportCsv) -> Result<Imported> {
    let path = import.input.display();
    let malformed = |what: String| Error::input(format!("{path}: {what}")).hint("mend the line, or leave it out");
    let hint = "give the path of a table of numbers with a header";
    let table = File::open(&import.input).map_err(|e| missing(&import.input, &e, hint))?;
    let mut reader = Reader::from_reader(BufReader::new(table));
    let header = reader.headers().map_err(|e| malformed(e.to_string()))?.clone();
    let mut cells = Cells::find(import, &header)?;
    let skips = import.kept.not_finite == NotFinite::Skip;
    let number = |cell: &str| match cell.trim() {
        // An empty cell is a missing value.
        "" if skips => Some(f64::NAN),
        cell => cell.parse().ok().filter(|x: &f64| skips || (*x as f32).is_finite()),
    };
    // They wait in files: a table may be larger than memory.
    let out = &import.kept.out;
    let (mut inputs, mut ids) = (Spooler::create(out)?, Spooler::create(out)?);
    let (mut targets, mut weights) = (Spooler::create(out)?, Spooler::create(out)?);
    let mut record = StringRecord::new();
    let mut rows = 0;
    while reader.read_record(&mut record).map_err(|e| malformed(e.to_string()))? {
        let line = record.position().map_or(0, csv::Position::line);
        let cell = |column: usize| record.get(column).unwrap_or_default();
        let number = |column: usize| {
            number(cell(column)).ok_or_else(|| {
                let (name, cell) = (header.get(column).unwrap_or_default(), cell(column));
                let hint = "mend the line or leave it out; name a column of words with --categorical";
                Error::input(format!("{path}: line {line}, column {name:?}: {cell:?} is no number")).hint(hint)
            })
        };
        for column in &cells.inputs {
            inputs.push(&[number(*column)? as f32])?;
        }
        for (column, coder) in &mut cells.categories {
            ids.push(&[coder.id(cell(*column).trim())])?;
        }
        if let Some(column) = cells.weight {
            let weight = number(column)?;
            if weight < 0.0 {
                return Err(malformed(format!("line {line}: a weight of {weight}, less than 0")));
            }
            weights.push(&[weight])?;
        }
        for column in &cells.targets {
            targets.push(&[number(*column)?])?;
        }
        rows += 1;
    }
    if rows == 0 {
        return Err(Error::input(format!("{path}: no lines after the header")).hint("give a table with some samples"));
    }
    let source = import.input.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let places = std::array::from_fn(|_| path.to_string());
    let (inputs, shape, width) = (Inputs::Numbers(inputs.finish()?), vec![cells.inputs.len()], cells.targets.len());
    let (targets, weights, ids) = (targets.finish()?, weights.finish()?, ids.finish()?);
    let scale = cells.scale.take();
    let table = Some(Table { columns: cells.columns(&header), ids, scale });
    let regression = import.regression;
    Rows { inputs, count: rows, shape, targets, width, weights, regression, source, places, table, files: None }
        .write(&import.kept)
}
