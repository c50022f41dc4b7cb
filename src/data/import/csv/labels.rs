//! The targets of a table: numbers, or words, each of which is a class.

use std::path::Path;

use crate::columns::Coding;
use crate::import::spool::Elements;
use crate::lookup::{Lookup, ValueCounts};
use hpctrain_base::error::{Error, Result};

/// The largest number of different words of a column that are taken for classes.
const MOST: usize = 1 << 16;

/// The kind of a table's targets.
pub(super) enum Labels {
    /// One column, of which no row has been read.
    Unseen,
    Numbers,
    /// Words, whose classes are numbered in order of appearance until all are known.
    Words(ValueCounts),
    /// Words, whose classes have the numbers of an earlier table.
    Known(Lookup),
}

impl Labels {
    /// Creates targets of `width` columns: words if `classes`, numbers if `regression` or if there
    /// are several columns, otherwise decided by the first row. `earlier` has the classes of an
    /// earlier table.
    pub fn new(width: usize, regression: bool, classes: bool, earlier: Option<&[String]>) -> Self {
        match earlier {
            Some([]) => Self::Numbers,
            Some(names) if width == 1 => {
                Self::Known(Lookup::from_coding(Coding::Values(names.to_vec())))
            }
            None if classes => Self::Words(ValueCounts::default()),
            None if width == 1 && !regression => Self::Unseen,
            _ => Self::Numbers,
        }
    }

    /// Decides by the first row: a cell that is not a number is the name of a class.
    pub fn see(&mut self, is_number: bool) {
        if matches!(self, Self::Unseen) {
            *self = match is_number {
                true => Self::Numbers,
                false => Self::Words(ValueCounts::default()),
            };
        }
    }

    /// Returns the number of a word's class, or `None` if targets are numbers. Errors name neither
    /// line nor column.
    pub fn class(&mut self, word: &str) -> Result<Option<f64>> {
        match self {
            Self::Unseen | Self::Numbers => Ok(None),
            Self::Known(lookup) => match lookup.get(word) {
                Some(id) if id > 0 => Ok(Some(f64::from(id) - 1.0)),
                _ => Err(Error::input(format!(
                    "{word:?} is none of the classes {}",
                    lookup.coding().values().join(", ")
                ))
                .hint("these are the classes of the earlier table; mend the line, or remove it")),
            },
            Self::Words(words) => match words.add(word) as usize {
                MOST.. => Err(Error::input(format!("more than {MOST} different words"))
                    .hint("a column of free text cannot be a target; name another with --target")),
                place => Ok(Some(place as f64)),
            },
        }
    }

    /// Returns the names of the classes in order, and the targets renumbered to it: the order of an
    /// earlier table, or of the values if all names are numbers, or of the names.
    pub fn finish(
        self,
        targets: Elements<f64>,
        out: &Path,
    ) -> Result<(Vec<String>, Elements<f64>)> {
        let (classes, places) = match self {
            Self::Unseen | Self::Numbers => return Ok((vec![], targets)),
            Self::Known(lookup) => return Ok((lookup.coding().values().to_vec(), targets)),
            Self::Words(words) => in_order(words.values()),
        };
        let ordered = targets.map(out, |class| places[class as usize] as f64)?;
        Ok((classes, ordered))
    }
}

/// Returns the words in order, by value if all are numbers, and the place of each word.
fn in_order(words: &[String]) -> (Vec<String>, Vec<usize>) {
    let values: Option<Vec<f64>> =
        words.iter().map(|word| word.parse().ok().filter(|x: &f64| !x.is_nan())).collect();
    let mut order: Vec<usize> = (0..words.len()).collect();
    order.sort_by(|a, b| {
        let by_value = values.as_ref().map(|values| values[*a].total_cmp(&values[*b]));
        by_value.unwrap_or(std::cmp::Ordering::Equal).then_with(|| words[*a].cmp(&words[*b]))
    });
    let mut places = vec![0; words.len()];
    order.iter().enumerate().for_each(|(place, word)| places[*word] = place);
    (order.into_iter().map(|word| words[word].clone()).collect(), places)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owned(all: &[&str]) -> Vec<String> {
        all.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn classes_are_in_the_order_of_their_names_or_numbers() {
        assert_eq!(
            in_order(&owned(&["dog", "cat", "Ant"])),
            (owned(&["Ant", "cat", "dog"]), vec![2, 1, 0])
        );
        assert_eq!(in_order(&owned(&["10", "9", "1"])), (owned(&["1", "9", "10"]), vec![2, 1, 0]));
        assert_eq!(in_order(&owned(&["10", "9", "x"])), (owned(&["10", "9", "x"]), vec![0, 1, 2]));
    }

    #[test]
    fn words_get_the_numbers_of_their_order() {
        let folder = tempfile::tempdir().unwrap();
        let mut labels = Labels::new(1, false, false, None);
        labels.see(false);
        let targets = ["dog", "cat", "dog", "eel"].map(|word| labels.class(word).unwrap().unwrap());
        let (classes, targets) =
            labels.finish(Elements::Memory(targets.to_vec()), folder.path()).unwrap();
        assert_eq!(
            (classes, targets.get(0, 4).unwrap()),
            (owned(&["cat", "dog", "eel"]), vec![1.0, 0.0, 1.0, 2.0])
        );
        // Classes of an earlier table keep their numbers.
        let known = owned(&["eel", "cat"]);
        let mut labels = Labels::new(1, false, false, Some(&known));
        assert_eq!(labels.class("cat").unwrap(), Some(1.0));
        assert!(
            labels
                .class("dog")
                .unwrap_err()
                .to_string()
                .contains("\"dog\" is none of the classes eel, cat\nhint: ")
        );
    }

    #[test]
    fn the_first_row_decides() {
        for (width, regression, classes, earlier, is_number, words) in [
            (1, false, false, None, true, false),
            (1, false, false, None, false, true),
            (1, false, true, None, true, true),
            (1, true, false, None, false, false),
            (2, false, false, None, false, false),
            (1, false, false, Some(&[][..]), false, false),
        ] {
            let mut labels = Labels::new(width, regression, classes, earlier);
            labels.see(is_number);
            assert_eq!(labels.class("1").unwrap().is_some(), words);
        }
    }
}
