//! Values and characters that an earlier table, a vocabulary or a tokenizer does not have.

/// The largest number of characters of an example.
const EXAMPLE: usize = 40;

/// The values of a column that are unknown, or the characters of a column of text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UnknownValues {
    /// The name of the column.
    pub column: String,
    /// The number of its values that are unknown.
    pub unknown: u64,
    /// The number of all of its values; empty cells do not count.
    pub values: u64,
    /// The first unknown value.
    pub example: String,
    /// Whether the column is text, whose characters are counted.
    pub is_text: bool,
}

impl UnknownValues {
    /// Counts an unknown value.
    pub(super) fn add(&mut self, value: &str, times: u64) {
        if self.unknown == 0 {
            self.example = value.chars().take(EXAMPLE).collect();
        }
        self.unknown += times;
    }
}

/// Returns the note on unknown values, in one line; `None` if there are none.
pub fn unknown_note(columns: &[UnknownValues]) -> Option<String> {
    let notes = columns.iter().filter(|column| column.unknown > 0).map(|column| {
        let UnknownValues { column, unknown, values, example, is_text } = column;
        let what = if *is_text { "characters" } else { "values" };
        format!("{unknown} of {values} {what} of column {column:?}, such as {example:?}")
    });
    let notes: Vec<String> = notes.collect();
    (!notes.is_empty()).then(|| format!("unknown: {}", notes.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_values_are_listed_in_one_line() {
        let mut site = UnknownValues { column: "site".into(), values: 9, ..Default::default() };
        assert_eq!(unknown_note(std::slice::from_ref(&site)), None);
        site.add("a\nb", 2);
        site.add("c", 1);
        let mut note = UnknownValues { column: "note".into(), is_text: true, ..site.clone() };
        note.values = 500;
        assert_eq!(
            unknown_note(&[site, note]).unwrap(),
            "unknown: 3 of 9 values of column \"site\", such as \"a\\nb\"; 3 of 500 characters of column \"note\", such as \"a\\nb\""
        );
    }
}
