//! Long files of JSON lines, which grow by one line per step: reads them from the end, and finds a
//! step in time and memory that do not grow with the file.

use std::io::{self, BufRead as _, BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use hpctrain_base::safe_open;

/// The number of bytes that are read at once from the end.
const BLOCK: usize = 64 << 10;

/// The number of bytes at the end that are read line by line before a step is found by bisection.
const TAIL: u64 = 1 << 20;

/// The number of bytes that are read at once in a bisection, which needs a line or two each time.
const BISECTION_BLOCK: usize = 4 << 10;

/// Reads the lines of a file from its end to its beginning.
pub struct FromEnd<R> {
    file: R,
    /// The offset of the buffer in the file.
    start: u64,
    buffer: Vec<u8>,
    /// The number of bytes at the start of the buffer that were not returned yet.
    unread: usize,
    is_done: bool,
}

/// A line, without its line break.
#[derive(Debug, PartialEq, Eq)]
pub struct Line<'a> {
    /// The offset of its first byte in the file.
    pub offset: u64,
    /// The bytes of the line.
    pub text: &'a [u8],
}

impl<R: Read + Seek> FromEnd<R> {
    /// Creates a reader at the end of a file.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read.
    pub fn new(mut file: R) -> io::Result<Self> {
        let start = file.seek(SeekFrom::End(0))?;
        Ok(Self { file, start, buffer: Vec::new(), unread: 0, is_done: false })
    }

    /// Returns the line before the one that was returned last. The first call returns what follows
    /// the last line break: nothing, or a line that was cut short by a kill.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read.
    pub fn previous(&mut self) -> io::Result<Option<Line<'_>>> {
        if self.is_done {
            return Ok(None);
        }
        loop {
            if let Some(at) = self.buffer[..self.unread].iter().rposition(|byte| *byte == b'\n') {
                let text = at + 1..std::mem::replace(&mut self.unread, at);
                return Ok(Some(Line {
                    offset: self.start + text.start as u64,
                    text: &self.buffer[text],
                }));
            }
            if self.start == 0 {
                self.is_done = true;
                return Ok(Some(Line { offset: 0, text: &self.buffer[..self.unread] }));
            }
            self.load()?;
        }
    }

    /// Reads the block before the buffer.
    fn load(&mut self) -> io::Result<()> {
        let length = self.start.min(BLOCK as u64);
        self.start -= length;
        self.file.seek(SeekFrom::Start(self.start))?;
        let mut bytes = vec![0; length as usize];
        self.file.read_exact(&mut bytes)?;
        bytes.extend_from_slice(&self.buffer[..self.unread]);
        self.unread = bytes.len();
        self.buffer = bytes;
        Ok(())
    }
}

/// Parses the record in a line; `None` if the line is not valid UTF-8, or not such a record. The
/// whole line must be valid, because other programs read the values that are ignored here.
pub fn parse_record<T: DeserializeOwned>(line: &[u8]) -> Option<T> {
    serde_json::from_str(std::str::from_utf8(line).ok()?).ok()
}

/// Returns the step of the last record in the file at `path`; 0 if there is none.
///
/// # Errors
/// Returns an error if the file exists but cannot be read.
pub fn last_step(path: &Path) -> io::Result<u64> {
    let file = match safe_open::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(e) => return Err(e),
    };
    let mut lines = FromEnd::new(file)?;
    while let Some(line) = lines.previous()? {
        if let Some(step) = step_in(line.text) {
            return Ok(step);
        }
    }
    Ok(0)
}

/// The prefix of a file with the records up to some step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordPrefix {
    /// The length of the prefix in bytes.
    pub bytes: u64,
    /// Whether its last line lacks a line break.
    pub is_torn: bool,
    /// The number of damaged lines after the prefix.
    pub damaged: u64,
}

impl RecordPrefix {
    /// The empty prefix.
    pub const EMPTY: Self = Self { bytes: 0, is_torn: false, damaged: 0 };
}

/// Finds the prefix of a file of records with ascending steps that ends with the last record of
/// step `last` or earlier. It may contain damaged lines, which readers skip.
///
/// # Errors
/// Returns an error if the file cannot be read.
pub fn prefix_until_step<R: Read + Seek>(mut file: R, last: u64) -> io::Result<RecordPrefix> {
    let mut lines = FromEnd::new(&mut file)?;
    let all = lines.start;
    let mut offset = all;
    let mut damaged = 0;
    while all - offset < TAIL {
        let Some(line) = lines.previous()? else {
            return Ok(RecordPrefix { damaged, ..RecordPrefix::EMPTY });
        };
        offset = line.offset;
        let end = offset + line.text.len() as u64;
        match step_in(line.text) {
            Some(step) if step <= last => {
                return Ok(RecordPrefix {
                    bytes: (end + 1).min(all),
                    is_torn: end == all,
                    damaged,
                });
            }
            Some(_) => {}
            // A last line without line break was cut short by a kill.
            None => damaged += u64::from(end < all),
        }
    }
    let bytes = search(file, offset, last)?;
    Ok(RecordPrefix { bytes, is_torn: false, damaged })
}

fn step_in(line: &[u8]) -> Option<u64> {
    #[derive(Deserialize)]
    struct Numbered {
        step: u64,
    }
    parse_record(line).map(|numbered: Numbered| numbered.step)
}

/// Finds the length of the prefix of [`until_step`] by bisection in the first `high` bytes, which
/// end with a line break.
fn search<R: Read + Seek>(file: R, mut high: u64, last: u64) -> io::Result<u64> {
    let mut file = BufReader::with_capacity(BISECTION_BLOCK, file);
    // Lines before `low` are in the prefix, and those that begin at `high` or later are not.
    let mut low: u64 = 0;
    // A line that begins before `high` may end after it.
    while high.saturating_sub(low) > BLOCK as u64 {
        let middle = low + (high - low) / 2;
        match first_record(&mut file, middle, high)? {
            Some((end, step)) if step <= last => low = end,
            _ => high = middle,
        }
    }
    let mut at = low;
    while let Some((end, step)) = record_from(&mut file, at, high)?
        && step <= last
    {
        (low, at) = (end, end);
    }
    Ok(low)
}

/// Returns the end and the step of the first record that begins at `middle` or later, and before
/// `high`.
fn first_record<R: Read + Seek>(
    file: &mut BufReader<R>,
    middle: u64,
    high: u64,
) -> io::Result<Option<(u64, u64)>> {
    // The byte before shows whether a line begins here.
    file.seek(SeekFrom::Start(middle - 1))?;
    let skipped = file.skip_until(b'\n')? as u64;
    record_from(file, middle - 1 + skipped, high)
}

/// Returns the end and the step of the first record from the line that begins at `start`, before
/// `high`.
fn record_from<R: Read + Seek>(
    file: &mut BufReader<R>,
    start: u64,
    high: u64,
) -> io::Result<Option<(u64, u64)>> {
    let mut at = start;
    file.seek(SeekFrom::Start(at))?;
    let mut line = Vec::new();
    while at < high {
        line.clear();
        let length = file.read_until(b'\n', &mut line)? as u64;
        if length == 0 {
            break;
        }
        at += length;
        if let Some(step) = step_in(line.strip_suffix(b"\n").unwrap_or(&line)) {
            return Ok(Some((at, step)));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use proptest::prelude::*;

    use super::*;

    /// A virtual file with a line of [`WIDTH`] bytes for each step, which counts the bytes that are
    /// read.
    struct Steps {
        steps: u64,
        at: u64,
        read: u64,
        most: usize,
    }

    const WIDTH: u64 = 400;

    fn line(step: u64) -> Vec<u8> {
        let text = format!("{{\"step\":{step},\"loss\":1.5,\"note\":\"");
        let padding = WIDTH as usize - text.len() - 3;
        format!("{text}{}\"}}\n", "x".repeat(padding)).into_bytes()
    }

    impl Read for Steps {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            self.most = self.most.max(out.len());
            if self.at >= self.steps * WIDTH {
                return Ok(0);
            }
            let line = line(self.at / WIDTH + 1);
            let rest = &line[(self.at % WIDTH) as usize..];
            let length = rest.len().min(out.len());
            out[..length].copy_from_slice(&rest[..length]);
            self.at += length as u64;
            self.read += length as u64;
            Ok(length)
        }
    }

    impl Seek for Steps {
        fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
            self.at = match to {
                SeekFrom::Start(at) => at,
                SeekFrom::End(by) => (self.steps * WIDTH).strict_add_signed(by),
                SeekFrom::Current(by) => self.at.strict_add_signed(by),
            };
            Ok(self.at)
        }
    }

    /// Files of 400 MB and 4 GB: the bytes that are read and buffered do not grow with the length.
    #[test]
    fn a_step_is_found_without_reading_the_file() {
        for steps in [1_000_000, 10_000_000] {
            for last in [
                0,
                1,
                17,
                steps / 3,
                steps / 2,
                steps - 5_000,
                steps - 2_000,
                steps - 1,
                steps,
                steps + 9,
            ] {
                let mut file = Steps { steps, at: 0, read: 0, most: 0 };
                let kept = prefix_until_step(&mut file, last).unwrap();
                assert_eq!(kept.bytes, last.min(steps) * WIDTH, "{last} of {steps}");
                assert!(file.read < 2_000_000, "{} bytes for step {last} of {steps}", file.read);
                assert!(file.most <= BLOCK, "{} bytes at once", file.most);
            }
        }
    }

    #[test]
    fn lines_come_from_the_end() {
        let text = b"one\n\nthree\nto".to_vec();
        let mut lines = FromEnd::new(Cursor::new(&text)).unwrap();
        let mut seen = Vec::new();
        while let Some(Line { offset, text }) = lines.previous().unwrap() {
            seen.push((offset, String::from_utf8(text.to_vec()).unwrap()));
        }
        assert_eq!(
            seen,
            [(11, "to".into()), (5, "three".into()), (4, String::new()), (0, "one".into())]
        );
    }

    #[test]
    fn torn_and_damaged_lines_at_the_end_go() {
        let kept =
            |text: &str, last| prefix_until_step(Cursor::new(text.as_bytes()), last).unwrap();
        let text = "{\"step\":1}\n{\"step\":2}\n";
        let whole = RecordPrefix { bytes: 22, is_torn: false, damaged: 0 };
        assert_eq!(kept(text, 2), whole);
        assert_eq!(kept(&format!("{text}{{\"st"), 2), whole);
        assert_eq!(kept(&format!("{text}x\n{{\"st"), 2), RecordPrefix { damaged: 1, ..whole });
        assert_eq!(kept(text.trim_end(), 2), RecordPrefix { bytes: 21, is_torn: true, damaged: 0 });
        assert_eq!(kept("", 2), RecordPrefix::EMPTY);
        assert_eq!(kept("x\ny\n", 2), RecordPrefix { damaged: 2, ..RecordPrefix::EMPTY });
        assert_eq!(
            kept(&format!("{text}x\n{{\"step\":3}}\n"), 3),
            RecordPrefix { bytes: 35, is_torn: false, damaged: 0 }
        );
    }

    proptest! {
        /// Bisection finds the same prefix as reading all lines, for any lengths of lines and any
        /// damage.
        #[test]
        fn bisection_finds_the_last_line_of_a_step(
            lines in prop::collection::vec((0u64..3, 0usize..40_000, prop::bool::weighted(0.2)), 1..40),
            last in 0u64..60,
        ) {
            let mut text = Vec::new();
            let mut step = 0;
            let mut kept = 0;
            for (more, padding, is_damaged) in lines {
                step += more;
                let name = if is_damaged { "stop" } else { "step" };
                text.extend(format!("{{\"{name}\":{step},\"note\":\"{}\"}}\n", "x".repeat(padding)).into_bytes());
                if !is_damaged && step <= last {
                    kept = text.len() as u64;
                }
            }
            let length = text.len() as u64;
            prop_assert_eq!(search(Cursor::new(text), length, last).unwrap(), kept);
        }
    }
}
