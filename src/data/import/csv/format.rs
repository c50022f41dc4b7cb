//! The format of a table: its delimiter, its decimal separator, the cells without a value, and
//! whether it has a line of names.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::Path;

use csv::{ErrorKind, Reader, ReaderBuilder, StringRecord};

use crate::import::missing;
use hpctrain_base::error::{Error, Result};

/// Characters that may separate cells, the likeliest first.
const DELIMITERS: [u8; 4] = *b",;\t|";

/// Cells that stand for missing numbers by default.
const MISSING: [&str; 8] = ["NA", "N/A", "NaN", "nan", "NULL", "null", "None", "-"];

/// The number of bytes of the first line that are examined.
const FIRST_LINE: usize = 1 << 20;

/// The format of a table.
#[derive(Debug, Clone, Default, PartialEq, Eq, clap::Args)]
pub struct TableFormat {
    /// The character between cells, or tab [default: that of , ; tab | which the first line has
    /// most often]
    #[arg(long, value_name = "CHAR", value_parser = delimiter)]
    pub delimiter: Option<u8>,
    /// Numbers have a comma before their decimals: 3,14
    #[arg(long)]
    pub decimal_comma: bool,
    /// Cells without a value, besides empty ones [default, in columns of numbers: NA, N/A, NaN,
    /// nan, NULL, null, None, -]
    #[arg(long, value_name = "TEXT,…", value_delimiter = ',')]
    pub na: Vec<String>,
    /// The first line is a row: columns are named 1, 2, 3 and so on
    #[arg(long)]
    pub no_header: bool,
}

/// The content of a cell of a column of numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Cell {
    Number(f64),
    /// NaN, an infinity, or a number outside the range of f32.
    NotFinite,
    Missing,
    /// Any other text.
    Word,
}

/// The treatment of missing numbers among the inputs.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub enum Missing {
    /// The import fails and names the line and column.
    #[default]
    Error,
    /// Rows with a missing number are skipped, and counted.
    Skip,
    /// A missing number becomes the mean of its column over the training rows that have a value.
    /// Tables imported like this one get the same means.
    Mean,
    /// A missing number becomes this one.
    Number(f32),
}

impl std::str::FromStr for Missing {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "error" => Ok(Self::Error),
            "skip" => Ok(Self::Skip),
            "mean" => Ok(Self::Mean),
            number => match number.parse() {
                Ok(number) if f32::is_finite(number) => Ok(Self::Number(number)),
                _ => Err("error, skip, mean, or a number".into()),
            },
        }
    }
}

/// Parses `;`, `tab` or `\t`.
fn delimiter(text: &str) -> std::result::Result<u8, String> {
    match (text, text.as_bytes()) {
        ("tab" | "\\t", _) => Ok(b'\t'),
        (_, [b'"' | b'\n' | b'\r' | b'.' | b'-' | b'0'..=b'9']) => {
            Err("a character that does not occur in numbers or quotes".into())
        }
        (_, [one]) if one.is_ascii() => Ok(*one),
        _ => Err("one character, such as ';', or tab".into()),
    }
}

impl TableFormat {
    /// Opens the table at `path` and returns a reader whose next record is the first row, and the
    /// names of the columns.
    ///
    /// # Errors
    /// Returns an error if the file does not exist, cannot be read, is not UTF-8, or is empty.
    pub(super) fn open(&self, path: &Path) -> Result<(Reader<BufReader<File>>, StringRecord)> {
        let hint = "give the path of a table, a line for each row";
        // A pipe is allowed: the file is read once, from beginning to end.
        let file = File::open(path).map_err(|e| missing(path, &e, hint))?;
        let mut file = BufReader::with_capacity(FIRST_LINE, file);
        let seen = file.fill_buf().map_err(|e| Error::io("read", path, e))?;
        let line = seen.split(|byte| *byte == b'\n').next().unwrap_or_default();
        let delimiter = self.delimiter.unwrap_or_else(|| self.likeliest(line));
        let mut reader = ReaderBuilder::new()
            .delimiter(delimiter)
            .has_headers(!self.no_header)
            .from_reader(file);
        let mut header = reader.headers().map_err(|e| refused(path, &e))?.clone();
        if self.no_header {
            header = (1..=header.len()).map(|number| number.to_string()).collect();
        }
        header.trim();
        Ok((reader, header))
    }

    /// Returns the delimiter that a line has most often outside of quotes; a comma if it has none.
    fn likeliest(&self, line: &[u8]) -> u8 {
        let mut counts = [0usize; DELIMITERS.len()];
        let mut is_quoted = false;
        for byte in line {
            is_quoted ^= *byte == b'"';
            if !is_quoted
                && let Some(place) = DELIMITERS.iter().position(|delimiter| delimiter == byte)
            {
                counts[place] += 1;
            }
        }
        if self.decimal_comma {
            // It is inside of cells.
            counts[0] = 0;
        }
        let most = counts.iter().max().copied().unwrap_or(0);
        let first = counts.iter().position(|count| *count == most).unwrap_or(0);
        DELIMITERS[if most == 0 { 0 } else { first }]
    }

    /// Returns whether a cell of a column of words has no value.
    pub(super) fn is_missing(&self, cell: &str) -> bool {
        cell.is_empty() || self.na.iter().any(|na| na == cell)
    }

    /// Returns the content of a cell of a column of numbers.
    pub(super) fn number(&self, cell: &str) -> Cell {
        if self.is_missing(cell) || self.na.is_empty() && MISSING.contains(&cell) {
            return Cell::Missing;
        }
        let number = match self.decimal_comma && cell.contains(',') {
            // A dot as well would separate thousands, or be a mistake.
            true if cell.contains('.') => None,
            true => cell.replacen(',', ".", 1).parse().ok(),
            false => cell.parse().ok(),
        };
        match number {
            None => Cell::Word,
            // Numbers are kept as f32.
            Some(number) if f64::is_finite(number) && (number as f32).is_finite() => {
                Cell::Number(number)
            }
            Some(_) => Cell::NotFinite,
        }
    }

    /// Returns a hint for a cell that is not a number.
    pub(super) fn advice(&self, cell: &str) -> &'static str {
        let digits = cell.strip_prefix(['-', '+']).unwrap_or(cell);
        let has_decimal_comma = digits.contains(',')
            && digits.chars().all(|c| c.is_ascii_digit() || c == ',' || c == '.');
        if !self.decimal_comma && has_decimal_comma {
            return "if the comma is before decimals, give --decimal-comma; remove thousands separators";
        }
        "mend the line; name a column of words with --categorical, a word for missing values with --na, and a column that is not an input with --drop"
    }
}

/// Returns the index of the only column of a name.
pub(super) fn place(path: &Path, header: &StringRecord, name: &str) -> Result<usize> {
    let mut found = header.iter().enumerate().filter(|(_, column)| *column == name);
    match (found.next(), found.next()) {
        (Some((place, _)), None) => Ok(place),
        (Some((first, _)), Some((second, _))) => Err(twice(path, name, first, second)),
        (None, _) => {
            let names: Vec<&str> = header.iter().collect();
            Err(Error::input(format!("{}: there is no column {name:?}", path.display()))
                .hint(format!("its columns: {}", names.join(", "))))
        }
    }
}

/// Returns the error of two columns of one name, given their indices.
pub(super) fn twice(path: &Path, name: &str, first: usize, second: usize) -> Error {
    let path = path.display();
    let first = first + 1;
    let second = second + 1;
    Error::input(format!("{path}: columns {first} and {second} are both named {name:?}"))
        .hint("give each column a different name, or drop both with --drop")
}

/// Returns the error of a table that cannot be read.
pub(super) fn refused(path: &Path, e: &csv::Error) -> Error {
    let hint = match e.kind() {
        ErrorKind::Utf8 { .. } => "convert the file to UTF-8: iconv -f latin1 -t utf-8 OLD > NEW",
        ErrorKind::UnequalLengths { .. } => {
            "mend the line; the character between cells can be given with --delimiter"
        }
        ErrorKind::Io(_) => "give a table of text, a line for each row",
        _ => "mend the line, or remove it",
    };
    Error::input(format!("{}: {e}", path.display())).hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn format(decimal_comma: bool, na: &[&str]) -> TableFormat {
        TableFormat {
            decimal_comma,
            na: na.iter().map(ToString::to_string).collect(),
            ..TableFormat::default()
        }
    }

    #[test]
    fn the_delimiter_is_the_one_that_the_first_line_has_most_often() {
        let lines = [
            ("a,b,c", b','),
            ("a;b;c", b';'),
            ("a\tb,c\td", b'\t'),
            ("a|b", b'|'),
            ("\"x;y;z\",b", b','),
            ("alone", b','),
            ("", b','),
            ("a,b;c", b','),
        ];
        for (line, wanted) in lines {
            assert_eq!(format(false, &[]).likeliest(line.as_bytes()), wanted, "{line}");
        }
        assert_eq!(format(true, &[]).likeliest(b"1,5;2,5;3,5"), b';');
        assert_eq!(["tab", "\\t", ";"].map(|text| delimiter(text).unwrap()), [b'\t', b'\t', b';']);
        for text in ["", ",,", "\"", "3", "ä"] {
            assert!(delimiter(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn cells_are_numbers_or_missing_or_neither() {
        let plain = format(false, &[]);
        for (cell, wanted) in [
            ("1.5", Cell::Number(1.5)),
            ("-2e3", Cell::Number(-2000.0)),
            ("1,5", Cell::Word),
            ("x", Cell::Word),
            ("inf", Cell::NotFinite),
            ("1e39", Cell::NotFinite),
        ] {
            assert_eq!(plain.number(cell), wanted, "{cell}");
        }
        for cell in ["", "NA", "N/A", "NaN", "nan", "null", "None", "-"] {
            assert_eq!(plain.number(cell), Cell::Missing, "{cell}");
        }
        let comma = format(true, &["?"]);
        for (cell, wanted) in [
            ("1,5", Cell::Number(1.5)),
            ("-0,25", Cell::Number(-0.25)),
            ("7", Cell::Number(7.0)),
            ("1.000,5", Cell::Word),
            ("1,2,3", Cell::Word),
            ("NA", Cell::Word),
            ("nan", Cell::NotFinite),
            ("?", Cell::Missing),
            ("", Cell::Missing),
        ] {
            assert_eq!(comma.number(cell), wanted, "{cell}");
        }
        // Words that stand for missing numbers may be words: Namibia is one.
        assert!(
            !plain.is_missing("NA")
                && plain.is_missing("")
                && format(false, &["NA"]).is_missing("NA")
        );
        assert!(
            plain.advice("3,14").contains("--decimal-comma")
                && plain.advice("red").contains("--categorical")
        );
    }

    #[test]
    fn missing_values_have_four_treatments() {
        let parsed = |text: &str| text.parse::<Missing>();
        assert_eq!(
            ["error", "skip", "mean", "-1.5"].map(|text| parsed(text).unwrap()),
            [Missing::Error, Missing::Skip, Missing::Mean, Missing::Number(-1.5)]
        );
        assert!(parsed("median").is_err() && parsed("nan").is_err() && parsed("1e39").is_err());
    }
}
