//! Names of rows beside their outputs.

use hpctrain_base::error::{Error, Result};

/// Cells of a row, and so on.
type Rows = Box<dyn Iterator<Item = Result<Vec<String>>> + Send>;

/// Columns that tell rows apart: numbers from 0 on, names of files, or columns of a table.
pub struct RowIds {
    names: Vec<String>,
    /// None of rows that have numbers.
    rows: Option<Rows>,
    /// Rows so far.
    done: u64,
}

impl RowIds {
    /// Numbers from 0 on, in a column `row`.
    pub fn numbers() -> Self {
        Self { names: vec!["row".to_owned()], rows: None, done: 0 }
    }

    /// Columns of these names, with cells for each row.
    pub fn columns(
        names: Vec<String>,
        rows: impl Iterator<Item = Result<Vec<String>>> + Send + 'static,
    ) -> Self {
        Self { names, rows: Some(Box::new(rows)), done: 0 }
    }

    /// Names of the columns.
    pub(super) fn names(&self) -> &[String] {
        &self.names
    }

    /// Whether rows have numbers alone.
    pub(super) fn is_number(&self) -> bool {
        self.rows.is_none()
    }

    /// Cells of the rows that follow.
    pub(super) fn next(&mut self, rows: usize) -> Result<Vec<Vec<String>>> {
        let first = self.done;
        self.done += rows as u64;
        match &mut self.rows {
            None => Ok((first..self.done).map(|row| vec![row.to_string()]).collect()),
            Some(all) => {
                let next: Vec<Vec<String>> = all.take(rows).collect::<Result<_>>()?;
                if next.len() < rows {
                    return Err(Error::input(
                        "the input has fewer rows than when it was read first",
                    )
                    .hint("leave it as it is while hpctrain predict runs"));
                }
                Ok(next)
            }
        }
    }
}
