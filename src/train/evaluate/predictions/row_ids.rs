//! Identifiers of the rows of a file of predictions.

use hpctrain_base::error::{Error, Result};

/// The cells of each row in turn.
type Rows = Box<dyn Iterator<Item = Result<Vec<String>>> + Send>;

/// Columns that identify rows: numbers from 0 on, names of files, or columns of a table.
pub struct RowIds {
    names: Vec<String>,
    /// `None` if rows are numbered.
    rows: Option<Rows>,
    /// The number of rows returned so far.
    done: u64,
}

impl RowIds {
    /// Numbers rows from 0 on, in a column `row`.
    pub fn numbers() -> Self {
        Self { names: vec!["row".to_owned()], rows: None, done: 0 }
    }

    /// Identifies rows by columns with these names, with cells for each row.
    pub fn columns(
        names: Vec<String>,
        rows: impl Iterator<Item = Result<Vec<String>>> + Send + 'static,
    ) -> Self {
        Self { names, rows: Some(Box::new(rows)), done: 0 }
    }

    /// Returns the names of the columns.
    pub(super) fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns true if rows are numbered.
    pub(super) fn is_number(&self) -> bool {
        self.rows.is_none()
    }

    /// Returns the cells of the next `rows` rows.
    pub(super) fn next(&mut self, rows: usize) -> Result<Vec<Vec<String>>> {
        let first = self.done;
        self.done += rows as u64;
        match &mut self.rows {
            None => Ok((first..self.done).map(|row| vec![row.to_string()]).collect()),
            Some(all) => {
                let next: Vec<Vec<String>> = all.take(rows).collect::<Result<_>>()?;
                if next.len() < rows {
                    return Err(Error::input(
                        "the input has fewer rows than when it was first read",
                    )
                    .hint("do not change it while hpctrain predict runs"));
                }
                Ok(next)
            }
        }
    }
}
